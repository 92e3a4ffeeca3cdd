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

from optx_sync.core.trees import Tree, is_inexact, is_masked, path_name, users_level
from optx_sync.state import fields
from optx_sync.state.leaves import (
    TO_CUT,
    Leaf,
    fold_keys,
    is_key,
    leaves_of,
    on_data,
    stacked_axes,
)

Joiners: TypeAlias = Literal["mean", "first", "fresh"]
Numbers: TypeAlias = Any  # an array of NumPy; of JAX where it holds random keys


class Resize(NamedTuple):
    """What becomes of parameters and of a tree with states in it, for `n` workers.

    Attributes:
        n: The number of workers to go on with.
        levels: On how many levels of workers all is stacked.
        joiners: What those get that join.
        strict: Whether to refuse what would be lost.
        replicated: Whether the parameters have no worker axis.
        init: Makes the tree of a worker that begins, all of which is a state. Without
            it, leaves outside of states are each worker's own, keys included.
    """

    n: int
    levels: int
    joiners: Joiners
    strict: bool
    replicated: bool = False
    init: Callable[[Tree], Tree] | None = None

    def of(self, params: list[Tree], tree: Tree, like: Tree) -> tuple[list[Tree], Tree]:
        """The parameters of each center in the tree, and the tree; `like` is of one."""
        n, own, found = self.n, not self.replicated, self._arrays(tree, like)
        owners = [_Array(x, x.x, own, fields.Cut.NOT) for x in leaves_of(params)]
        both = [*owners, *found]
        sizes = {jnp.shape(x.leaf.x)[0] for x in both if x.own or x.cut}
        if len(sizes) > 1:
            raise ValueError(
                f"Parameters and state are of {sorted(sizes)} workers. Pass those of "
                "one run, of all workers."
            )
        before, *_ = *sizes, n
        if n == before:
            return jax.tree.map(jnp.copy, (params, tree))
        _say(_lost([x.leaf for x in found], fewer=n < before), self.strict)
        outside, structure = jax.tree.structure(params), jax.tree.structure(tree)
        stacked = [x.of_all(before) for x in found]
        params = self._params(
            outside.unflatten([x.of_all(before) for x in owners]),
            structure.unflatten(stacked),
        )
        if self.init is None:
            fresh = [np.full(x.one.shape, _begins(x.leaf)) for x in found]
        else:
            last = (-1, *[0] * (self.levels - 1 if own else 0))
            one_worker = jax.tree.map(lambda x: jnp.asarray(x[last]), params[0])
            fresh = jax.tree.leaves(jax.tree.map(_on_host, self.init(one_worker)))
        new = []
        for one, x, begun in zip(found, stacked, fresh, strict=True):
            x = self._of(one.leaf, x, begun)
            if n > before and one.leaf.draws_own(outside=self.init is None):
                # A joiner must draw other numbers.
                joined = jax.vmap(fold_keys)(x[before:], jnp.arange(before, n))
                x = jnp.concatenate([x[:before], joined])
            new.append(one.of_each(x, n))
        pairs = zip(owners, jax.tree.leaves(params), strict=True)
        params = outside.unflatten([x.of_each(one, n) for x, one in pairs])
        return jax.tree.map(jnp.asarray, (params, structure.unflatten(new)))

    def _params(self, params: list[Tree], stacked: Tree) -> list[Tree]:
        """The new workers' parameters, with some or all of them at their center."""
        new = jax.tree.map(lambda x: self._array(fields.OWN, x), params)
        nodes = fields.nodes_of(stacked, fields.has_center)
        for place, node in enumerate(nodes[: len(params)]):
            if fields.is_level(node) and (found := fields.center_of(node)):
                new[place] = _at_center(new[place], params[place], *found)
        return new

    def _of(self, leaf: Leaf, x: Numbers, fresh: Numbers) -> Numbers:
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
                return self._array(kind._replace(added=added), x, fresh)
        return self._array(fields.OWN, x, fresh)

    def _array(
        self, kind: fields.FieldKind, x: Numbers, fresh: Numbers = None
    ) -> Numbers:
        """Resize one array of this kind."""
        kept, joiner = x[: self.n], x[0]
        if is_key(x):  # which have no mean
            return jnp.concatenate([kept, _repeat(joiner, self.n - len(kept))])
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
            kept = kept + x[self.n :].astype(np.float64).sum(0) / self.n
            # What is owed is a share of a mean over N, so it scales by after / before.
            kept = kept * (1.0 if kind.added else self.n / len(x))
        new = np.broadcast_to(joiner, (self.n - len(kept), *x.shape[1:]))
        return np.concatenate([kept.astype(x.dtype), new.astype(x.dtype)])

    def _arrays(self, state: Tree, like: Tree) -> "list[_Array]":
        """The arrays of a state, with their shapes checked."""
        # With nested rules some leaves have only the axis of the inner workers.
        levels = fields.nodes_of(state, fields.is_level)
        counters = [getattr(node, "global_step", 0) for node in levels]
        stacked = any(map(jnp.ndim, counters))
        found = []
        for leaf, of_one in zip(leaves_of(state), leaves_of(like), strict=True):
            shape, one, cut = jnp.shape(leaf.x), of_one.x, of_one.cut()
            own = not cut and (stacked or of_one.mark(0, self.replicated) is not None)
            more = len(shape) - one.ndim
            fits = own <= more < own + self.levels and shape[more:] == one.shape
            if cut:
                own_rows = -(-one.shape[0] // shape[0]) if shape else 0
                piece = own_rows, *one.shape[1:]
                inside = len(shape) - 1 - len(piece)  # levels
                fits = 0 <= inside < self.levels and shape[1 + inside :] == piece
            if not fits:
                what = "it has no worker axis" if more < own else "it is of another run"
                raise ValueError(
                    f"The state at {path_name(leaf.path)} has shape {shape}, of one "
                    f"worker {one.shape}: {what}. Pass what all workers have, stacked "
                    "as by oxs.by_hand.replicate; with replicas' whole parameters "
                    "replicated=True."
                )
            found.append(_Array(leaf, one, own, cut))
        return found


def _begins(leaf: Leaf) -> int:
    """The number that fills an array where it begins anew."""
    return [fields.OWN, *(x.kind for x in leaf.around if x.kind)][-1].begins


def _lost(leaves: list[Leaf], fewer: bool) -> list[tuple[str, str]]:
    """(what the states say they lose, how not to); levels inside keep their size."""
    states = {}
    for leaf in leaves:
        for field in leaf.around:
            if isinstance(field.node, fields.WithLosses):
                states[id(field.node)] = field.node
            if field.level and field.name == "inner":
                break
    return [lost for x in states.values() for lost in x.lost_by_resize(fewer)]


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


def _say(lost: list[tuple[str, str]], strict: bool) -> None:
    if not lost:
        return
    what, mends = (dict.fromkeys(words) for words in zip(*lost, strict=True))
    drops = f"resize in the middle of a round drops {', '.join(what)}."
    message = " ".join([drops, *mends])
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=users_level())


def _at_center(new: Tree, params: Tree, kind: fields.FieldKind, center: Tree) -> Tree:
    """New parameters `[n, ...]`, with joiners, or all workers, at the center."""

    def place(c, x, before):
        if is_masked(c):
            return x
        stay = 0 if kind.lands == "everyone" else min(len(before), len(x))
        c = np.broadcast_to(c[0].astype(x.dtype), x.shape[1:])
        return np.concatenate([x[:stay], _repeat(c, len(x) - stay)])

    return jax.tree.map(place, center, new, params, is_leaf=is_masked)
