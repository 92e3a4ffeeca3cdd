# SPDX-License-Identifier: Apache-2.0
"""Worker axes and PartitionSpecs of a state, from its fields and the parameters' specs.

When the states of several workers are held together, what is equal on all of them
(counters, the center) has no worker axis, and all else has one in front. Fields that
follow the parameters have a worker axis only if the parameters do.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optx_sync.checks import integer
from optx_sync.comm import shards
from optx_sync.comm.buffers import cut_numbers, in_rows
from optx_sync.placement import fields, memory
from optx_sync.trees import (
    Tree,
    check_arrays,
    is_slices,
)


def tree_axes(tree: Tree, level: int, replicated: bool = False) -> Tree:
    """`state_axes` for a tree with states anywhere in it, of one worker or stacked.

    Below the innermost level only the counters are shared.
    """
    _refuse_around_center(tree)
    return _axes(tree, replicated, level)


def equal_on_replicas(tree: Tree) -> list[bool]:
    """Whether each leaf of a tree with states in it is equal on all replicas.

    Leaves outside of states are; a state's table says it of its fields.
    """
    marks = jax.tree.structure(tree).flatten_up_to(_axes(tree, True, 0))
    return [mark is None for mark in marks]


def specs_like(
    tree: Tree, params: Mapping[shards.Names, tuple[Any, PartitionSpec | None]]
) -> list[PartitionSpec]:
    """The spec of each leaf of a tree with states in it, from the parameters' own.

    `params` are, by the names in their paths, the parameters and their specs, `None`
    where there is none. A leaf that belongs to a parameter lies like it.
    """

    def whole_or_own(node):
        if fields.is_in_stacks(node):  # which carry their specs
            return node.specs()
        # A piece is flat: it has none of its parameter's axes.
        spec = PartitionSpec() if fields.is_in_pieces(node) else False
        return jax.tree.map(lambda _: spec, node)

    nodes = jax.tree.map(
        whole_or_own,
        tree,
        is_leaf=lambda x: fields.is_in_stacks(x) or fields.is_in_pieces(x),
    )
    pairs = zip(
        shards.specs_like(tree, params),
        jax.tree.leaves(nodes, is_leaf=shards.is_spec),
        strict=True,
    )
    return [like if spec is False else spec for like, spec in pairs]


def map_marked(
    function: Callable,
    tree: Tree,
    axes: Any,
    shared: Callable,
    pieces: Callable | None = None,
    level: int = 0,
) -> Tree:
    """`function` of the leaves that are per worker, `shared` of the others.

    If given, `pieces` is for leaves in pieces on this level; it also gets their
    `fields.Cut`.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=shards.is_spec)
    try:
        marks = [0] * len(leaves) if axes is None else treedef.flatten_up_to(axes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"axes do not fit the tree: {str(error).rstrip('.')}. Pass None, or a tree "
            "like it of 0 and None: oxs.by_hand.state_axes(tx, params) for a state."
        ) from None
    cut = jax.tree.leaves(in_pieces(tree, level)) if pieces else [False] * len(leaves)

    def placed(leaf, mark, flag):
        if mark is None:
            return shared(leaf)
        return pieces(leaf, flag) if flag and pieces else function(leaf)

    return treedef.unflatten(map(placed, leaves, marks, cut))


def stack(tree: Tree, n: int, axes: Tree, level: int = 0) -> Tree:
    """`replicate` along one of several levels, of which the innermost comes first."""
    n = integer("n", n, "Pass the number of workers.")
    check_arrays(tree, "What is stacked")

    def repeat(x):
        return jnp.broadcast_to(x, (n, *jnp.shape(x)))

    def cut(x, how):
        if how == fields.Cut.NUMBERS:
            return cut_numbers(x, n)
        return in_rows(x, n) if jnp.ndim(x) else repeat(x)

    stacked = map_marked(
        repeat, tree, axes, shared=memory.copy, pieces=cut, level=level
    )
    if n == 1 or not any(map(is_key, jax.tree.leaves(tree))):
        return stacked
    workers = jnp.arange(n, dtype=jnp.uint32)
    return jax.tree.map(
        lambda folds, x, copies: (
            jax.vmap(fold_keys)(copies, workers)
            if folds and copies.ndim > x.ndim
            else copies
        ),
        own_keys(tree, True, level=level),
        tree,
        stacked,
    )


def in_pieces(tree: Tree, level: int = 0, stacked: int = 0) -> Tree:
    """The `fields.Cut` of each leaf over the workers of a level, 0 the outermost.

    `stacked`: how many worker axes the state that holds the tree has.
    """

    def visit(node):
        if fields.is_level(node):
            now = stacked_axes(node)
            return fields.map_fields(
                lambda _, kind, x: in_pieces(x, level - (not kind.is_shared), now),
                node,
            )
        if level or not fields.is_in_pieces(node):
            return jax.tree.map(lambda _: fields.Cut.NOT, node)
        numbers, no = fields.Cut.NUMBERS, fields.Cut.NOT
        marks = jax.tree.map(lambda x: numbers if _ndim(x) > stacked else no, node)
        if not isinstance(node.tree, fields.Owned):
            return marks
        whole = jax.tree.map(lambda _: fields.Cut.LEAVES, node.tree.leaves)
        return fields.InPieces(marks.tree._replace(leaves=whole))

    return jax.tree.map(visit, tree, is_leaf=is_level_or_pieces)


def stacked_axes(state: Any) -> int:
    """How many worker axes the arrays of a state have that are each worker's own."""
    counts = [
        _ndim(x)
        for _, kind, value in fields.fields_of(state)
        if kind == fields.OWN_COUNT
        for x in jax.tree.leaves(value)
    ]
    return max(counts, default=0)


def _ndim(x: Any) -> int:
    """Of an array, of its shape, or of what Orbax says of it."""
    return len(getattr(x, "shape", ()))


def is_key(x: Any) -> bool:
    """Whether this is an array of typed random keys, not raw ones."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def fold_keys(keys: Any, worker: Any) -> Any:
    """Random keys, each folded with a worker's number."""
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
    return folded.reshape(keys.shape)


def own_keys(tree: Tree, own: bool, ours: bool = False, level: int = 0) -> Tree:
    """Whether each leaf is a random key of which each worker of a level gets its own.

    `own`: whether keys in the tree differ between workers. `ours`: whether a state of
    this package holds the tree. A state of an outer level says nothing about the level
    that is asked for.
    """
    differ = own or not ours

    def field(_, kind, x):
        if level > 0:
            return own_keys(x, False, level=level - 1)
        return own_keys(x, differ and kind.whose == "own", True)

    def visit(node):
        if fields.is_level(node):
            return fields.map_fields(field, node)
        if is_optax(node):
            # In a chain beside `all_reduce_grads` it must stay equal on all.
            return type(node)(*(own_keys(x, own and ours, ours) for x in node))
        # Row numbers have a key's dtype, so that arithmetic refuses them.
        return jax.tree.map(lambda x: own and not is_slices(node) and is_key(x), node)

    return jax.tree.map(
        visit,
        tree,
        is_leaf=lambda x: fields.is_level(x) or is_optax(x) or is_slices(x),
    )


def is_optax(x: Any) -> bool:
    """Whether this is a state of one of Optax's own transformations."""
    return hasattr(x, "_fields") and type(x).__module__.split(".")[0] == "optax"


def is_level_or_pieces(x: Any) -> bool:
    """Whether this is a level of workers or an `InPieces`; for `is_leaf=`."""
    return fields.is_level(x) or fields.is_in_pieces(x)


def _is_injected(x: Any) -> bool:
    """Whether this is what `optax.inject_hyperparams` keeps around a center rule."""
    injected = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState
    return isinstance(x, injected) and any(
        fields.center_of(node)
        for node in fields.nodes_of(x.inner_state, fields.is_level)
    )


# Optax's wrappers that step what they wrap in some steps only.
_SOMETIMES = (
    "ApplyIfFiniteState",
    "ConditionallyMaskState",
    "ConditionallyTransformState",
    "MultiStepsState",
)


def _refuse_around_center(state: Tree) -> None:
    """Refuse a wrapper that decides for each worker whether a center rule steps."""

    def sometimes(x):
        return is_optax(x) and type(x).__name__ in _SOMETIMES

    def is_center(x):
        return hasattr(type(x), "center_params") and fields.is_level(x)

    for node in fields.nodes_of(state, sometimes):
        if fields.nodes_of(node, is_center):
            name = type(node).__name__.removesuffix("State")
            raise ValueError(
                f"Optax's {name} stands around a center rule: it decides by what is a "
                "worker's own whether the rule makes a step, and so whether this "
                "worker meets the others, who wait. Put it inside of the rule, for "
                "example oxs.diloco(optax.apply_if_finite(optax.adam(1e-3), 3), "
                "'workers'), or around optax.MultiSteps(optax.adam(1e-3), "
                "4).gradient_transformation()."
            )


def check_levels(state: Tree, levels: int) -> None:
    """Refuse more levels than there are nested states."""

    def inside(node):
        if fields.is_in_pieces(node):
            return ()
        return [x for _, kind, x in fields.fields_of(node) if not kind.is_shared]

    def depth(tree: Tree) -> int:
        nodes = fields.nodes_of(tree, is_level_or_pieces)
        return max((1 + depth(inside(node)) for node in nodes), default=0)

    found = max(depth(state), 1)
    if not 1 <= levels <= found:
        raise ValueError(
            f"This state has {found} level(s) of workers, numbered from 0; got level "
            f"{levels - 1}. A level is a wrapper with workers or replicas of its own "
            "that stands in another one."
        )


def _axes(
    tree: Tree,
    replicated: bool,
    level: int,
    around: bool | None = None,
    stacked: int = 0,
) -> Tree:
    """`None` for every leaf of a state that is shared on a level, else 0.

    `around`: whether the field that holds the tree is shared; `None` if no state of
    this package holds it. `level`: how many levels are still to descend. `stacked` is
    as for `in_pieces`.
    """
    shared = replicated if around is None else around
    equal = {"all levels"}
    if level == 0:
        equal |= {"level", "params"} if replicated else {"level"}

    def visit(node):
        if fields.is_level(node):
            now = stacked_axes(node)

            def field(_, kind, value):
                inside = bool(around) or kind.whose in equal
                return _axes(value, replicated, level - 1, inside, now)

            return fields.map_fields(field, node)
        if _is_injected(node):
            # What acts at the center is shared.
            whose = None if shared or level == 0 else 0
            inside = _axes(node.inner_state, replicated, level, around)
            numbers = jax.tree.map(lambda _: whose, node._replace(inner_state=()))
            return numbers._replace(inner_state=inside)
        cut = fields.is_in_pieces(node) and level == (-1 if around else 0)
        return jax.tree.map(
            lambda x: None if shared and not (cut and _ndim(x) > stacked) else 0,
            node,
        )

    return jax.tree.map(
        visit, tree, is_leaf=lambda x: is_level_or_pieces(x) or _is_injected(x)
    )
