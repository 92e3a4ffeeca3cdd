# SPDX-License-Identifier: Apache-2.0
"""`resize`: elastic training with another number of workers.

The kind of a field says what becomes of it. All arrays here have the worker axis in
front, `[N, ...]`, even those that are equal on all workers.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.placement import fields
from optx_sync.placement.leaves import (
    TO_CUT,
    Leaf,
    fold_keys,
    is_key,
    leaves_of,
    on_data,
    stacked_axes,
)
from optx_sync.trees import Tree, is_inexact, is_masked, path_name

Joiners: TypeAlias = Literal["mean", "first", "fresh"]
Numbers: TypeAlias = Any  # an array of NumPy; of JAX where it holds random keys


def resize_tree(
    params: Tree,
    tree: Tree,
    like: Tree,
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
    found = _arrays(tree, like, levels, replicated)
    owners = [_Array(x, x.x, not replicated, fields.Cut.NOT) for x in leaves_of(params)]
    both = [*owners, *found]
    sizes = {jnp.shape(x.leaf.x)[0] for x in both if x.own or x.cut}
    if len(sizes) > 1:
        raise ValueError(
            f"Parameters and state are of {sorted(sizes)} workers. Pass those of one "
            "run, of all workers."
        )
    before, *_ = *sizes, n
    if n == before:
        return jax.tree.map(jnp.copy, (params, tree))
    _say(_lost([x.leaf for x in found], fewer=n < before), strict)
    how, structure = _Resizing(before, n, joiners), jax.tree.structure(tree)
    outside = jax.tree.structure(params)
    params = outside.unflatten([x.of_all(before) for x in owners])
    stacked = [x.of_all(before) for x in found]
    params = how.params(params, structure.unflatten(stacked))
    if init is None:
        fresh = [np.full(x.one.shape, _begins(x.leaf)) for x in found]
    else:
        last = (-1, *[0] * (0 if replicated else levels - 1))
        one_worker = jax.tree.map(lambda x: jnp.asarray(x[last]), params)
        fresh = jax.tree.leaves(jax.tree.map(_on_host, init(one_worker)))
    new = []
    for one, x, begun in zip(found, stacked, fresh, strict=True):
        x = how.of(one.leaf, x, begun)
        if n > before and one.leaf.draws_own(outside=init is None):
            # A joiner must draw other numbers.
            joined = jax.vmap(fold_keys)(x[before:], jnp.arange(before, n))
            x = jnp.concatenate([x[:before], joined])
        new.append(one.of_each(x, n))
    pairs = zip(owners, jax.tree.leaves(params), strict=True)
    params = outside.unflatten([x.of_each(one, n) for x, one in pairs])
    return jax.tree.map(jnp.asarray, (params, structure.unflatten(new)))


def _begins(leaf: Leaf) -> int:
    """The number that fills an array where it begins anew."""
    return [fields.OWN, *leaf.kinds][-1].begins


def _lost(leaves: list[Leaf], fewer: bool) -> list[tuple[str, str]]:
    """(what the states say they lose, how not to); levels inside keep their size."""
    states = {}
    for leaf in leaves:
        for field in leaf.around:
            if hasattr(type(field.node), "lost_by_resize"):
                states[id(field.node)] = field.node
            if field.level and field.name == "inner":
                break
    return [lost for x in states.values() for lost in x.lost_by_resize(fewer)]


class _Resizing(NamedTuple):
    """From how many workers to how many; what becomes of arrays `[N, ...]`."""

    before: int
    after: int
    joiners: Joiners

    def params(self, params: Tree, stacked: Tree) -> Tree:
        """The new workers' parameters, with some or all of them at the center."""
        params = jax.tree.map(lambda x: self.array(fields.OWN, x), params)
        for node in fields.nodes_of(stacked, fields.is_level):
            if found := fields.center_of(node):
                params = _at_center(self, params, *found)
        return params

    def of(self, leaf: Leaf, x: Numbers, fresh: Numbers) -> Numbers:
        """Resize an array as the fields that hold it say, else as each worker's own.

        `fresh` is that of a worker that begins.
        """
        tables = [field for field in leaf.around if field.kind]
        added = inside = False
        for place, field in enumerate(tables, 1):
            kind = field.kind or fields.OWN
            if inside:  # whose levels keep their size
                kind = fields.OWN_COUNT if kind.resized == "from 0" else fields.OWN
            # Whether contributions are added up, so that what is owed keeps its scale.
            added = added or kind.added
            inside = inside or (field.level and field.name == "inner")
            # A state inside of what is no level has a table of its own.
            if kind.whose == "params" and (field.level or place == len(tables)):
                fresh = None
            if kind.is_shared or kind.resized != "kept":
                return self.array(kind, x, fresh, added)
        return self.array(fields.OWN, x, fresh)

    def array(
        self,
        kind: fields.Kind,
        x: Numbers,
        fresh: Numbers = None,
        added: bool = False,
    ) -> Numbers:
        """Resize one array of this kind."""
        kept, joiner = x[: self.after], x[0]
        if is_key(x):  # which have no mean
            return jnp.concatenate([kept, _repeat(joiner, self.after - len(kept))])
        if kind.is_shared or kind.resized == "anew":
            kept, joiner = x[:0], joiner if kind.resized == "kept" else fresh
        elif kind.resized != "kept":
            joiner = np.zeros_like(joiner)
        elif self.joiners == "fresh" and fresh is not None:
            joiner = fresh
        elif self.joiners != "first":
            joiner = _mean(x) if is_inexact(x.dtype) else x.max(0)
        if kind.resized == "owed":
            kept = kept.astype(np.float64)
            kept = kept + x[self.after :].astype(np.float64).sum(0) / self.after
            # What is owed is a share of a mean over N, so it scales by after / before.
            kept = kept * (1.0 if added else self.after / self.before)
        new = np.broadcast_to(joiner, (self.after - len(kept), *x.shape[1:]))
        return np.concatenate([kept.astype(x.dtype), new.astype(x.dtype)])


def _mean(x: np.ndarray) -> np.ndarray:
    """The mean over the workers; where they are equal, their value to the bit."""
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    with np.errstate(invalid="ignore"):
        mean = (wide[0] + (wide - wide[0]).mean(0)).astype(x.dtype)
    return np.where((x == x[0]).all(0), x[0], mean)


def _on_host(x: Tree) -> Numbers:
    return on_data(lambda numbers: np.asarray(jax.device_get(numbers)), x)


def _repeat(x: Numbers, n: int) -> Numbers:
    repeated = jnp.broadcast_to if is_key(x) else np.broadcast_to
    return repeated(x, (n, *x.shape))


def worker_axes(state: Tree) -> int:
    """How many worker axes the parameters have: one for each nested rule."""
    return max(1, *map(stacked_axes, fields.nodes_of(state, fields.is_level)), 1)


class _Array(NamedTuple):
    """An array of a state of all workers."""

    leaf: Leaf
    one: jax.ShapeDtypeStruct  # its shape for one worker
    own: bool  # whether it has the worker axis
    cut: fields.Cut

    def of_all(self, workers: int) -> Numbers:
        """`[workers, ...]`; an array in pieces is put together and shared."""
        x = _on_host(self.leaf.x)
        if self.cut == fields.Cut.NUMBERS:  # with the axes of levels inside
            x = np.moveaxis(x, 0, -2)
            x = x.reshape(*x.shape[:-2], -1)[..., : self.one.shape[0]]
        elif self.cut:
            x = x.reshape(-1, *x.shape[2:])[: self.one.shape[0]]
        return x if self.own else _repeat(x, workers)

    def of_each(self, x: Numbers, workers: int) -> Numbers:
        """From `[workers, ...]` back, with an axis where it has one, or cut anew."""
        if self.cut:
            return TO_CUT[self.cut](x[0], workers)
        return x if self.own else x[0]


def _arrays(state: Tree, like: Tree, most: int, replicated: bool) -> list[_Array]:
    """The arrays of a state, with their shapes checked."""
    # With nested rules some leaves have only the axis of the inner workers.
    levels = fields.nodes_of(state, fields.is_level)
    counters = [getattr(node, "global_step", 0) for node in levels]
    stacked = any(map(jnp.ndim, counters))
    found = []
    for leaf, of_one in zip(leaves_of(state), leaves_of(like), strict=True):
        shape, one, cut = jnp.shape(leaf.x), of_one.x, of_one.cut()
        own = not cut and (stacked or of_one.mark(0, replicated) is not None)
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
                f"The state at {path_name(leaf.path)} has shape {shape}, of one worker"
                f" {one.shape}: {what}. Pass what all workers have, stacked as by oxs."
                "by_hand.replicate; with replicas' whole parameters replicated=True."
            )
        found.append(_Array(leaf, one, own, cut))
    return found


def _say(lost: list[tuple[str, str]], strict: bool) -> None:
    if not lost:
        return
    what, mends = (dict.fromkeys(words) for words in zip(*lost, strict=True))
    drops = f"resize in the middle of a round drops {', '.join(what)}."
    message = " ".join([drops, *mends])
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def _at_center(how: _Resizing, params: Tree, kind: fields.Kind, center: Tree) -> Tree:
    """Parameters `[n, ...]`, with joiners, or all workers, at the center."""
    first = 0 if kind.lands == "everyone" else min(how.before, how.after)

    def place(c, p):
        if is_masked(c):
            return p
        c = np.broadcast_to(c[0].astype(p.dtype), p.shape[1:])
        return np.concatenate([p[:first], _repeat(c, how.after - first)])

    return jax.tree.map(place, center, params, is_leaf=is_masked)
