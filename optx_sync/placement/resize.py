# SPDX-License-Identifier: Apache-2.0
"""`resize`: elastic training with another number of workers.

The kind of a field says what becomes of it. All arrays here have the worker axis in
front, `[N, ...]`, even those that are equal on all workers.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm.buffers import cut_numbers, in_rows
from optx_sync.placement import fields
from optx_sync.placement.axes import (
    fold_keys,
    in_pieces,
    own_keys,
    stacked_axes,
)
from optx_sync.trees import Tree, is_inexact, is_masked, path_name

Joiners: TypeAlias = Literal["mean", "first", "fresh"]


def resize_tree(
    params: Tree,
    tree: Tree,
    like: Tree,
    axes: Tree,
    n: int,
    *,
    levels: int,
    joiners: Joiners,
    strict: bool,
    replicated: bool = False,
    init: Callable[[Tree], Tree] | None = None,
) -> tuple[Tree, Tree]:
    """Parameters and a tree with states in it, stacked on so many levels, for `n`.

    `params` are those of a center in the tree, `like` is the tree of one worker. `init`
    makes the tree of a worker that begins, all of which is a state. Without it, leaves
    outside of states are each worker's own, keys included.
    """
    leaves = _leaves(tree, like, axes, levels)
    sizes = {leaf.x.shape[0] for leaf in leaves if leaf.own or leaf.cut}
    if not replicated:
        sizes |= {jnp.shape(x)[0] for x in jax.tree.leaves(params)}
    if len(sizes) > 1:
        raise ValueError(
            f"Parameters and state are of {sorted(sizes)} workers. Pass those of all "
            "workers, of one run, as oxs.by_hand.replicate stacks them."
        )
    before = sizes.pop() if sizes else n
    if n == before:
        return jax.tree.map(jnp.copy, (params, tree))
    how = _Resizing(before, n, joiners, [])
    params = jax.tree.map(_on_host, params)
    if replicated:
        params = jax.tree.map(lambda x: _repeat(x, before), params)
    stacked = _stacked(tree, leaves, before)
    new_params = _new_params(how, params, stacked)
    if init is None:
        fresh = _begun(like)
    else:
        last = jax.tree.map(lambda x: jnp.asarray(x[-1]), new_params)
        for _ in range(0 if replicated else levels - 1):
            last = jax.tree.map(lambda x: x[0], last)
        fresh = jax.tree.map(_on_host, init(last))
    new_tree = _new_state(how, tree, stacked, leaves, fresh, own=init is None)
    _say(how.lost, strict)
    if replicated:
        new_params = jax.tree.map(lambda x: x[0], new_params)
    return jax.tree.map(_back, (new_params, new_tree))


def _stacked(state: Tree, leaves: list["_Leaf"], workers: int) -> Tree:
    """The state, with the worker axis in front of all arrays."""
    return jax.tree.structure(state).unflatten(leaf.of_all(workers) for leaf in leaves)


def _new_params(how: "_Resizing", params: Tree, stacked: Tree) -> Tree:
    """The new workers' parameters, with some or all of them at the center."""
    params = jax.tree.map(lambda x: how.array(fields.OWN, x), params)
    for node in fields.nodes_of(stacked, fields.is_level):
        if found := fields.center_of(node):
            params = _at_center(how, params, *found)
    return params


def _new_state(
    how: "_Resizing",
    state: Tree,
    stacked: Tree,
    leaves: list["_Leaf"],
    fresh: Tree,
    own: bool,
) -> Tree:
    """The new workers' state; `own` says whose keys outside of states are."""
    resized = how.tree(stacked, fresh)
    # A joiner must not draw the same numbers as another worker.
    resized = jax.tree.map(
        lambda x, own: x.fold_in(how.before) if own and isinstance(x, _Keys) else x,
        resized,
        own_keys(state, own=own),
    )
    cuts = {
        fields.Cut.NOT: lambda x, leaf: x if leaf.own else x[0],
        fields.Cut.NUMBERS: lambda x, _: cut_numbers(x[0], how.after),
        fields.Cut.LEAVES: lambda x, _: in_rows(x[0], how.after),
    }
    return jax.tree.structure(state).unflatten(
        cuts[leaf.cut](x, leaf)
        for x, leaf in zip(jax.tree.leaves(resized), leaves, strict=True)
    )


def _begun(tree: Tree, number: int = 0) -> Tree:
    """The starting values of a state's arrays, by their fields' kinds."""

    def visit(node):
        if fields.declares(node):
            return fields.map_fields(lambda _, kind, x: _begun(x, kind.begins), node)
        return jax.tree.map(lambda x: np.full(x.shape, number), node)

    return jax.tree.map(visit, tree, is_leaf=fields.declares)


class _Resizing(NamedTuple):
    """From how many workers to how many; what becomes of arrays `[N, ...]`."""

    before: int
    after: int
    joiners: Joiners
    lost: list[str]
    # Whether contributions are added up, so that what is owed keeps its scale.
    added: bool = False
    # Whether the tree lies below `inner`, whose levels keep their size.
    inside: bool = False

    def tree(self, tree: Tree, fresh: Tree) -> Tree:
        """Resize a tree: states' fields by their kinds, all else as each worker's own.

        `fresh` is the tree of a worker that begins, with `None` where joiners get none.
        """

        def visit(node, fresh):
            if not fields.declares(node):
                return self.array(fields.OWN, node, fresh)
            if hasattr(node, "lost_by_resize") and not self.inside:
                self.lost.extend(node.lost_by_resize(self.after < self.before))
            field = functools.partial(self._field, fields.is_level(node))
            return fields.map_fields(field, node, fresh)

        return jax.tree.map(visit, tree, fresh, is_leaf=fields.declares)

    def _field(
        self, level: bool, name: str, kind: fields.Kind, tree: Tree, fresh: Tree
    ) -> Tree:
        if self.inside:
            counts = kind.resized == "from 0"
            kind = fields.OWN_COUNT if counts else fields.OWN
        how = self._replace(
            added=self.added or kind.added,
            inside=self.inside or (level and name == "inner"),
        )
        if kind.whose == "params":
            # A state inside of what is no level has a table of its own.
            fresh = jax.tree.map(
                lambda x: x if fields.declares(x) else None,
                fresh,
                is_leaf=None if level else fields.declares,
            )
        if kind.resized == "kept" and not kind.is_shared:
            return how.tree(tree, fresh)
        return jax.tree.map(lambda x, new: how.array(kind, x, new), tree, fresh)

    def array(self, kind: fields.Kind, x: Any, fresh: Any = None) -> Any:
        """Resize one array of this kind."""
        kept, joiner = x[: self.after], x[0]
        if kind.is_shared or kind.resized == "anew":
            kept, joiner = x[:0], joiner if kind.resized == "kept" else fresh
        elif kind.resized != "kept":
            joiner = np.zeros_like(joiner)
        elif self.joiners == "fresh" and fresh is not None:
            joiner = fresh
        elif self.joiners != "first" and not isinstance(x, _Keys):
            joiner = _mean(x) if is_inexact(x.dtype) else x.max(0)
        if kind.resized == "owed":
            kept = kept.astype(np.float64)
            kept = kept + x[self.after :].astype(np.float64).sum(0) / self.after
            # What is owed is a share of a mean over N, so it scales by after / before.
            kept = kept * (1.0 if self.added else self.after / self.before)
        new = np.broadcast_to(joiner, (self.after - len(kept), *x.shape[1:]))
        joined = np.concatenate([kept.astype(x.dtype), new.astype(x.dtype)])
        return _Keys.of(joined, x) if isinstance(x, _Keys) else joined


class _Keys(np.ndarray):
    """The data of random keys, which have no mean."""

    impl: Any

    def __array_finalize__(self, like: Any) -> None:
        """A slice of them is of this class, too."""
        self.impl = getattr(like, "impl", None)

    def fold_in(self, first: int) -> "_Keys":
        """The same keys `[N]`, with the worker's number folded in from `first` on."""
        folded = np.array(self)
        for worker in range(first, len(self)):
            keys = jax.random.wrap_key_data(jnp.asarray(folded[worker]), impl=self.impl)
            folded[worker] = jax.random.key_data(fold_keys(keys, worker))
        return _Keys.of(folded, self)

    @staticmethod
    def of(numbers: Any, like: Any) -> "_Keys":
        keys = np.asarray(numbers).view(_Keys)
        keys.impl = like.impl if isinstance(like, _Keys) else jax.random.key_impl(like)
        return keys


def _mean(x: np.ndarray) -> np.ndarray:
    """The mean over the workers; where they are equal, their value to the bit."""
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    with np.errstate(invalid="ignore"):
        mean = (wide[0] + (wide - wide[0]).mean(0)).astype(x.dtype)
    return np.where((x == x[0]).all(0), x[0], mean)


def _on_host(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _Keys.of(jax.device_get(jax.random.key_data(x)), x)
    return np.asarray(jax.device_get(x))


def _back(x: Any) -> jax.Array:
    if isinstance(x, _Keys):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(x)), impl=x.impl)
    return jnp.asarray(x)


def _repeat(x: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(x, (n, *x.shape), subok=True)


def worker_axes(state: Tree) -> int:
    """How many worker axes the parameters have: one for each nested rule."""
    return max(1, *map(stacked_axes, fields.nodes_of(state, fields.is_level)), 1)


class _Leaf(NamedTuple):
    """An array of a state."""

    x: Any
    one: jax.ShapeDtypeStruct  # its shape for one worker
    own: bool  # whether it has the worker axis
    cut: fields.Cut

    def of_all(self, workers: int) -> np.ndarray:
        """`[workers, ...]`; an array in pieces is put together and shared."""
        x = _on_host(self.x)
        if self.cut == fields.Cut.NUMBERS:  # with the axes of levels inside
            x = np.moveaxis(x, 0, -2)
            x = x.reshape(*x.shape[:-2], -1)[..., : self.one.shape[0]]
        elif self.cut:
            x = x.reshape(-1, *x.shape[2:])[: self.one.shape[0]]
        return x if self.own else _repeat(x, workers)


def _leaves(state: Tree, like: Tree, axes: Any, most: int) -> list[_Leaf]:
    """The leaves of a state, with their shapes checked."""
    # With nested rules some leaves have only the axis of the inner workers.
    levels = fields.nodes_of(state, fields.is_level)
    counters = [getattr(node, "global_step", 0) for node in levels]
    stacked = any(map(jnp.ndim, counters))
    found = []
    for (path, x), one, mark, pieces in zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree.leaves(like),
        jax.tree.structure(like).flatten_up_to(axes),
        jax.tree.leaves(in_pieces(like)),
        strict=True,
    ):
        shape, cut = jnp.shape(x), pieces if one.ndim else fields.Cut.NOT
        own = not cut and (stacked or mark is not None)
        more = len(shape) - one.ndim
        fits = own <= more < own + most and shape[more:] == one.shape
        if cut:
            own_rows = -(-one.shape[0] // shape[0]) if shape else 0
            piece = own_rows, *one.shape[1:]
            inside = len(shape) - 1 - len(piece)  # levels
            fits = 0 <= inside < most and shape[1 + inside :] == piece
        if not fits:
            what = "it has no worker axis" if more < own else "it is of another run"
            raise ValueError(
                f"The state at {path_name(path)} has shape {shape}, of one worker"
                f" {one.shape}: {what}. Pass the parameters and state of all workers,"
                " as oxs.by_hand.replicate stacks them; with replicas whose parameters"
                " have no worker axis pass replicated=True."
            )
        found.append(_Leaf(x, one, own, cut))
    return found


def _say(lost: list[str], strict: bool) -> None:
    if not lost:
        return
    message = (
        f"resize in the middle of a round drops {', '.join(lost)}. Resize after one, "
        "when oxs.metrics(state).steps_since_round is 0 or an update has been made."
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def _at_center(how: _Resizing, params: Tree, kind: fields.Kind, center: Tree) -> Tree:
    """Parameters `[n, ...]`, with joiners, or all workers, at the center."""
    if fields.is_in_pieces(center):
        center = jax.tree.map(
            lambda c, p: c if is_masked(c) else c.reshape(how.before, *p.shape[1:]),
            center.tree,
            params,
            is_leaf=is_masked,
        )
    elif isinstance(center, fields.InParts):
        whole = jax.tree.map(lambda c: c[0], center).whole()
        center = jax.tree.map(lambda c: np.asarray(c)[None], whole)
    first = 0 if kind.lands == "everyone" else min(how.before, how.after)

    def place(c, p):
        if is_masked(c):
            return p
        c = np.broadcast_to(c[0].astype(p.dtype), p.shape[1:])
        return np.concatenate([p[:first], _repeat(c, how.after - first)])

    return jax.tree.map(place, center, params, is_leaf=is_masked)
