# SPDX-License-Identifier: Apache-2.0
"""Each array of a tree, with the fields that hold it, and what these say of it.

When the states of several workers are stacked, what is equal on all of them
(counters, the center) has no worker axis, and all else has one in front. Fields that
follow the parameters have a worker axis only if the parameters do.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optx_sync.comm import shards
from optx_sync.comm.buffers import cut_numbers, in_rows, with_rows
from optx_sync.core.checks import integer
from optx_sync.core.trees import Item, KeyPath, Tree, check_arrays, is_slices, names_of
from optx_sync.state import fields

# Whether an array has the axis of a level's workers in front (0), or they share it.
Mark: TypeAlias = int | None


class Field(NamedTuple):
    """A field of a node of a tree that holds an array; of a list or dict, an entry."""

    node: Tree
    name: str
    kind: fields.FieldKind | None  # `None` where the state has no table
    level: bool  # whether the node is a level of workers


class Leaf(NamedTuple):
    """An array of a tree with states anywhere in it, of one worker or of all.

    Attributes:
        path: The keys that lead to it in the tree.
        x: The array, or its shape.
        around: The fields that hold it, the outermost first.
        size: Of an array in pieces, the number of numbers in the whole; of a stack of
            leaves, their number; else `None`.
    """

    path: KeyPath
    x: Tree
    around: tuple[Field, ...]
    size: int | None = None

    @property
    def levels(self) -> list[fields.FieldKind]:
        """The kinds of those that belong to a level of workers."""
        return [field.kind for field in self.around if field.kind and field.level]

    def mark(self, level: int, replicated: bool = False) -> Mark:
        """Whether it lies along the worker axis of a level, 0 the outermost.

        `replicated`: whether the parameters are equal on all workers, without an axis.
        """
        whose = [kind.whose for kind in self.levels]
        equal = {"level", "params"} if replicated else {"level"}
        # Below the innermost level only the counters are shared.
        shared = "all levels" in whose or not equal.isdisjoint(whose[level : level + 1])
        shared = shared if whose else replicated
        # What `optax.inject_hyperparams` keeps for a center is shared, as it may act
        # at the center.
        shared = shared or (len(whose) == level and any(map(_is_injected, self.around)))
        own = not shared or (self._piece and len(whose) == level + bool(whose))
        return 0 if own else None

    def along(self, levels: Iterable[Item]) -> tuple[Item, ...]:
        """Those of the levels, the outermost first, along whose axes it lies."""
        return tuple(x for at, x in enumerate(levels) if self.mark(at) is not None)

    def cut(self, level: int = 0) -> fields.Cut:
        """How it is cut over the workers of a level."""
        own = sum(not kind.is_shared for kind in self.levels)
        return self._piece if own == level else fields.Cut.NOT

    def draws_own(self, level: int = 0, outside: bool = True) -> bool:
        """Whether it is a random key of which each worker of a level has its own.

        Of a key in no state of this package `outside` says it. A state of an outer
        level says nothing about the level that is asked for.
        """
        # Row numbers have a key's dtype, so that arithmetic refuses them.
        if not is_key(self.x) or any(is_slices(field.node) for field in self.around):
            return False
        if not self.levels:
            # In a chain beside `all_reduce_grads` it must stay equal on all.
            return outside and not any(
                fields.is_optax(field.node) for field in self.around
            )
        return {kind.whose for kind in self.levels[level:]} == {"own"}

    @property
    def stack(self) -> fields.InStacks | None:
        """The stacks of leaves of which it is one."""
        around = [field.node for field in self.around]
        found = [node for node in around if isinstance(node, fields.InStacks)]
        return found[0] if found and self.size else None

    @property
    def _piece(self) -> fields.Cut:
        """How it is cut over the workers of the level that holds it."""
        inside = [field for field in self.around if isinstance(field.node, _CUT)]
        levels = [field.node for field in self.around if field.level]
        stacked = max(map(stacked_axes, levels), default=0)
        if not inside or _ndim(self.x) <= stacked:
            return fields.Cut.NOT
        whole = isinstance(inside[-1].node, fields.Owned) and inside[-1].name
        return fields.Cut.LEAVES if whole == "leaves" else fields.Cut.NUMBERS


_CUT = fields.InPieces, fields.Owned


def leaves_of(tree: Tree) -> list[Leaf]:
    """The arrays of a tree."""
    return list(_leaves(tree, (), ()))


def map_leaves(
    function: Callable[..., Tree], tree: Tree, *more: Iterable[Tree]
) -> Tree:
    """The tree with what a function makes of each array, and of more for each."""
    return jax.tree.structure(tree).unflatten(map(function, leaves_of(tree), *more))


def map_but_counters(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`function` of every leaf of a state, except counters shared on all levels.

    All workers must take the same branch of a conditional on such a counter.
    """

    def apply(leaf):
        shared = any(kind.whose == "all levels" for kind in leaf.levels)
        return leaf.x if shared else function(leaf.x)

    return map_leaves(apply, tree)


def _leaves(
    node: Tree, path: KeyPath, around: tuple[Field, ...], info: Field | None = None
) -> Iterator[Leaf]:
    """`info`: of the state around, whose own the fields of this node count as."""
    children, _ = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    declares = fields.declares(node)
    holder = info or Field(node, "", None, fields.is_level(node))
    for key, child in children:
        if not key:  # the node is an array itself
            yield Leaf(path, node, around)
            continue
        (name,) = names_of(key)
        kind = fields.kind_of(node, name) if declares else None
        inside = (*path, *key)
        if kind is fields.INFO and child:
            yield from _leaves(child, inside, around, holder)
            continue
        field = Field(holder.node, name, kind, holder.level)
        found = _leaves(child, inside, (*around, field))
        if fields.has_sizes(node):
            pairs = zip(found, node.sizes, strict=True)
            found = (leaf._replace(size=size) for leaf, size in pairs)
        yield from found


def stacked_axes(state: fields.Declares) -> int:
    """How many worker axes the arrays of a state have that are each worker's own."""
    counts = [
        _ndim(x)
        for _, kind, value in fields.fields_of(state)
        if kind == fields.OWN_COUNT
        for x in jax.tree.leaves(value)
    ]
    return max(counts, default=0)


def check_levels(state: Tree, levels: int) -> None:
    """Refuse more levels than there are nested states."""

    def depth(leaf: Leaf) -> int:
        own = list(itertools.takewhile(lambda kind: not kind.is_shared, leaf.levels))
        pieces = any(fields.is_in_pieces(field.node) for field in leaf.around)
        return len(own) + (pieces or len(own) < len(leaf.levels))

    found = max([1, *map(depth, leaves_of(state))])
    if not 1 <= levels <= found:
        raise ValueError(
            f"This state has {found} level(s) of workers, numbered from 0; got level "
            f"{levels - 1}. A level is a wrapper in another one, with its own workers."
        )


def is_key(x: object) -> bool:
    """Whether this is an array of typed random keys, not raw ones."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def on_data(function: Callable[[Tree], Tree], x: Tree) -> Tree:
    """A function of numbers, of an array; of the data of random keys."""
    if not is_key(x):
        return function(x)
    data = function(jax.random.key_data(x))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def is_raw_key(x: Tree) -> bool:
    """Whether this looks like a `jax.random.PRNGKey`, which is an array of numbers."""
    return jnp.shape(x) == (2,) and x.dtype == jnp.uint32


def _ndim(x: Tree) -> int:
    """Of an array, of its shape, or of what Orbax says of it."""
    return len(getattr(x, "shape", ()))


def _is_injected(field: Field) -> bool:
    """Whether `optax.inject_hyperparams` keeps a field around a center rule."""
    injected = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState
    if not isinstance(field.node, injected) or field.name == "inner_state":
        return False
    states = fields.nodes_of(field.node.inner_state, fields.is_level)
    return any(map(fields.center_of, states))


def is_none(mark: object) -> bool:
    """Whether this is `None`; for `is_leaf=`."""
    return mark is None


def entries(
    prefix: Tree,
    tree: Tree,
    what: str,
    mend: str,
    is_leaf: Callable[[Tree], bool] | None = is_none,
) -> list[Tree]:
    """The entry of a prefix of a tree for each of the tree's leaves."""
    try:
        each = jax.tree.map(
            lambda entry, part: [entry] * len(jax.tree.leaves(part)),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"{what} do not fit: {str(error).rstrip('.')}. {mend}"
        ) from None
    return jax.tree.leaves(each, is_leaf=is_leaf)


def marks_of(axes: Tree, tree: Tree, what: str = "axes") -> list[Mark]:
    """The mark of each array of a tree in a prefix of it."""
    mend = (
        "Pass 0 or None, or a tree of them like the first levels of the value; "
        "oxs.by_hand.state_axes(tx, params) gives that of a state."
    )
    return entries(axes, tree, what, mend)


def in_rows_of(leaf: Leaf, rows: int, axis: int) -> Tree:
    """A stack of leaves along an axis, padded anew on the host, to so many rows."""
    if leaf.x.shape[axis] == rows:
        return leaf.x
    return with_rows(np.asarray(jax.device_get(leaf.x)), leaf.size or 0, rows, axis)


# How an array is cut over n workers.
TO_CUT = {fields.Cut.NUMBERS: cut_numbers, fields.Cut.LEAVES: in_rows}


def equal_on_replicas(tree: Tree) -> list[bool]:
    """Whether each leaf of a tree with states in it is equal on all replicas.

    Leaves outside of states are; a state's table says it of its fields.
    """
    return [leaf.mark(0, replicated=True) is None for leaf in leaves_of(tree)]


def specs_like(
    tree: Tree, params: shards.Named, sizes: Mapping[str, int] | None = None
) -> list[PartitionSpec]:
    """The spec of each leaf of a tree with states in it, from the parameters' own.

    `params` are, by the names in their paths, the parameters and their specs, `None`
    where there is none. A leaf that belongs to a parameter lies like it; `sizes` are
    those of the mesh's axes.
    """

    def spec(leaf: Leaf, like: PartitionSpec) -> PartitionSpec:
        for node, *_ in leaf.around:
            if isinstance(node, fields.InStacks):  # which carry their specs
                return node.spec_of(leaf.x)
            if fields.is_in_pieces(node):  # flat, with none of its parameter's axes
                return PartitionSpec()
        return like

    return list(map(spec, leaves_of(tree), shards.specs_like(tree, params, sizes)))


def stack(tree: Tree, n: int, axes: Tree = None) -> Tree:
    """`oxs.by_hand.replicate`."""
    n = integer("n", n, "Pass the number of workers.")
    check_arrays(tree, "What is stacked")
    marks = marks_of(0 if axes is None else axes, tree)
    return map_leaves(lambda leaf, mark: stacked(leaf, leaf.x, n, mark), tree, marks)


def stacked(leaf: Leaf, x: Tree, n: int, mark: Mark, level: int = 0) -> jax.Array:
    """One worker's array with the axis of a level's workers, where its mark is 0.

    Of several levels the innermost comes first.
    """
    if mark is None:
        return jnp.copy(x)
    cut = leaf.cut(level)
    if cut:
        return TO_CUT[cut](x, n)
    copies = jnp.broadcast_to(x, (n, *jnp.shape(x)))
    if n > 1 and leaf.draws_own(level):
        return jax.vmap(fold_keys)(copies, jnp.arange(n, dtype=jnp.uint32))
    return copies


def fold_keys(keys: jax.Array, worker: int | jax.Array) -> jax.Array:
    """Random keys, each folded with a worker's number."""
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
    return folded.reshape(keys.shape)


# Optax's wrappers that step what they wrap in some steps only.
_SOMETIMES = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)


def refuse_around_center(state: Tree) -> None:
    """Refuse a wrapper that decides for each worker whether a center rule steps."""

    def sometimes(x):
        return isinstance(x, _SOMETIMES)

    def is_center(x):
        return fields.may_have_center(x) and fields.is_level(x)

    for node in fields.nodes_of(state, sometimes):
        if fields.nodes_of(node, is_center):
            name = type(node).__name__.removesuffix("State")
            raise ValueError(
                f"Optax's {name} stands around a center rule: each worker would decide "
                "for itself whether it meets the others, who wait. Put it inside of the"
                " rule, oxs.diloco(optax.apply_if_finite(optax.adam(1e-3), 3), "
                "'workers'); optax.MultiSteps by its gradient_transformation()."
            )
