# SPDX-License-Identifier: Apache-2.0
"""Which worker differs from the others where all must be equal, and in which array.

A state's class declares which fields must be equal: a center, its outer state and
counters; of replicas all of their state and their parameters. What else stands beside
an optimizer's state, and random keys there, is each worker's own.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from optx_sync.center.state import CenterState
from optx_sync.comm.shards import Names
from optx_sync.fingerprints import fingerprint
from optx_sync.forms import Form, is_trained
from optx_sync.placement import fields
from optx_sync.placement.axes import is_key, tree_axes
from optx_sync.placement.held import is_of_optimizer
from optx_sync.placement.layout import Layout
from optx_sync.placement.workers import map_workers
from optx_sync.trees import Tree, names_of, path_name

Worker: TypeAlias = int | tuple[int, ...]  # with several axes its place along each


def differing(
    layout: Layout, form: Form, arrays: Sequence[Any], start: Names
) -> dict[Worker, str]:
    """The workers that differ and, for each, the path of the first array.

    Args:
        layout: How many workers there are, and where.
        form: That of the state of all.
        arrays: Its arrays.
        start: The path to the parameters in it.
    """
    found: dict[Worker, str] = {}
    paths = [path_name(path) for path in form.paths()]
    for level in range(len(layout.sizes)):
        chosen = _equal(layout, form, arrays, level, start)
        if not chosen:
            continue
        some = [arrays[k] for k in chosen]
        found_first = _first(layout, form, level, tuple(chosen), some)
        first = np.asarray(jax.device_get(found_first))
        for where in np.argwhere(first >= 0).tolist():
            path = paths[chosen[first[tuple(where)]]]
            place = [*where[:-1]]
            place.insert(level, where[-1])
            worker = place[0] if len(place) == 1 else tuple(place)
            found.setdefault(worker, path)
    return found


def _equal(
    layout: Layout, form: Form, arrays: Sequence[Any], level: int, start: Names
) -> list[int]:
    """The numbers of the arrays that must be equal along an axis."""
    tree = form.bare(arrays)
    nodes = fields.nodes_of(tree, fields.is_level)
    for _ in range(level):
        inner: Tree = [node.inner for node in nodes]
        nodes = fields.nodes_of(inner, fields.is_level)
    # An axis without a state of its own is one of replicas.
    has_center = any(hasattr(type(node), "center_params") for node in nodes)
    marks = form.pick(tree_axes(tree, level, replicated=not has_center))
    optimizers = form.pick(_of_optimizers(tree, level))
    inside = form.pick(
        jax.tree.map(
            lambda node: jax.tree.map(lambda _: fields.is_level(node), node),
            tree,
            is_leaf=fields.is_level,
        )
    )
    lies = layout.marks(form, arrays)
    chosen, variables = [], form.variables()
    for k, (path, x) in enumerate(zip(form.paths(), arrays, strict=True)):
        is_param = names_of(path)[: len(start)] == start and not is_key(x)
        is_param = is_param and is_trained(variables[k])
        equal = not has_center and (is_param or optimizers[k])
        if inside[k] and not optimizers[k]:
            equal = marks[k] is None
        # Simulated workers hold what they share once.
        if equal and (layout.mesh is not None or lies[k][level] is not None):
            chosen.append(k)
    return chosen


# Fields of states that follow from a gradient before it is reduced.
_BEFORE: dict[type, tuple[str, ...]] = {
    CenterState: ("accumulated",),  # of one worker alone, which is no level
    optax.ApplyEvery: ("grad_acc",),
    optax.ApplyIfFiniteState: ("notfinite_count", "last_finite", "total_notfinite"),
    optax.MultiStepsState: ("acc_grads", "skip_state"),
    optax.ZeroNansState: ("found_nan",),
}


def _of_optimizers(tree: Tree, level: int, inside: bool = False) -> Tree:
    """Whether each leaf is what an optimizer has computed from a reduced gradient.

    Of levels of workers only outer ones may stand around it. `inside`: whether the
    state of an optimizer holds the tree.
    """

    def visit(node):
        if fields.is_level(node):
            return fields.map_fields(field, node)
        if fields.is_in_pieces(node):
            return _nowhere(node)
        if is_of_optimizer(node):
            before = _BEFORE.get(type(node), ())
            pairs = zip(node._fields, node, strict=True)
            return type(node)(
                *(_nowhere(x) if name in before else deeper(x) for name, x in pairs)
            )
        if _is_chain(node):
            last = max(place for place, link in enumerate(node) if _reduces(link))
            own = [place < last and not _reduces(x) for place, x in enumerate(node)]
            pairs = zip(own, node, strict=True)
            return tuple(
                _nowhere(x) if before else _of_optimizers(x, level, inside)
                for before, x in pairs
            )
        return inside

    def field(name, _, x):
        return (
            _of_optimizers(x, level - 1) if level and name == "inner" else _nowhere(x)
        )

    def deeper(x):
        return _of_optimizers(x, level, inside=True)

    return jax.tree.map(
        visit,
        tree,
        is_leaf=lambda x: is_of_optimizer(x) or _is_chain(x),
    )


def _nowhere(tree: Tree) -> Tree:
    return jax.tree.map(lambda _: False, tree)


def _reduces(link: Tree) -> bool:
    """Whether a link of a chain makes one gradient of all replicas', by its state."""

    def is_one(node):
        return fields.is_level(node) or isinstance(node, fields.Reduced)

    return bool(fields.nodes_of(link, is_one))


def _is_chain(node: Any) -> bool:
    return type(node) is tuple and any(map(_reduces, node))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _first(
    layout: Layout,
    form: Form,
    level: int,
    chosen: tuple[int, ...],
    arrays: list[Any],
) -> jax.Array:
    """Of all workers' arrays the number of the first that differs, `[..., n]`."""
    every: list[Any] = [None] * len(form.paths())
    for k, x in zip(chosen, arrays, strict=True):
        every[k] = x
    marks = layout.marks(form, every)

    def compare(arrays: list[Any]) -> jax.Array:
        return fingerprint(arrays, layout.axes[level]).leaf

    for at in reversed(range(len(layout.sizes))):
        compare = map_workers(
            compare,
            layout.axes[at],
            mesh=layout.mesh,
            in_axes=([marks[k][at] for k in chosen],),
            out_axes=None if at == level else 0,
        )
    return compare(arrays)
