# SPDX-License-Identifier: Apache-2.0
"""Which worker differs from the others where all must be equal, and in which array.

A state's class declares which fields must be equal: a center, its outer state and
counters; of replicas all of their state and their parameters. What else stands beside
an optimizer's state, and random keys there, is each worker's own.
"""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optx_sync.center.state import CenterState
from optx_sync.core.forms import Form, is_trained
from optx_sync.core.trees import KeyPath, one_or_several, path_name
from optx_sync.state import fields, held
from optx_sync.state.leaves import Leaf, is_key
from optx_sync.workers.fingerprints import fingerprint
from optx_sync.workers.layout import Arrays, Layout, Levels, marks
from optx_sync.workers.mapped import map_workers

Worker: TypeAlias = int | tuple[int, ...]  # with several axes its place along each


def differing(layout: Layout, form: Form, arrays: Arrays) -> dict[Worker, str]:
    """The workers that differ and, for each, the path of the first array.

    Args:
        layout: How many workers there are, and where.
        form: That of the state of all.
        arrays: Its arrays.
    """
    found: dict[Worker, str] = {}
    leaves = held.leaves(form, arrays)
    params = {x.path for x in held.params(form.bare(arrays), leaves).values()}
    trained = {
        leaf.path
        for leaf, variable in zip(leaves, form.variables(), strict=True)
        if leaf.path in params and is_trained(variable) and not is_key(leaf.x)
    }
    for level in range(len(layout.sizes)):
        chosen = _equal(leaves, level, trained)
        if layout.mesh is None:  # Simulated workers hold what they share once.
            chosen = [leaf for leaf in chosen if leaf.mark(level) is not None]
        if not chosen:
            continue
        numbers = [leaf.x for leaf in chosen]
        first = jax.device_get(_first(layout, level, layout.levels(chosen), numbers))
        for where in np.argwhere(first >= 0).tolist():
            path = chosen[first[tuple(where)]].path
            place = [*where[:-1]]
            place.insert(level, where[-1])
            found.setdefault(one_or_several(tuple(place)), path_name(path))
    return found


def differing_numbers(
    layout: Layout, told: Sequence[Mapping[str, str]]
) -> dict[Worker, str]:
    """The workers whose processes differ in what these tell, and in which name first.

    Args:
        layout: How many workers there are, and where.
        told: By each process, what it has under each name.
    """
    if not isinstance(layout.mesh, Mesh) or len(told) < 2:
        return {}
    names = layout.mesh.axis_names
    order = [names.index(name) for name in layout.names]
    order += [place for place in range(len(names)) if place not in order]
    devices = layout.mesh.devices.transpose(order).reshape(*layout.sizes, -1)
    found: dict[Worker, str] = {}
    for name in sorted({name for one in told for name in one}):
        of = {
            place: frozenset(told[x.process_index].get(name) for x in devices[place])
            for place in np.ndindex(*layout.sizes)
        }
        ((usual, many),) = collections.Counter(of.values()).most_common(1)
        for place, values in of.items():
            alone = values != usual or 2 * many <= len(of)
            if alone or len(values) > 1:  # whose own devices differ
                found.setdefault(one_or_several(place), f"also[{name!r}]")
    return found


def _equal(leaves: Sequence[Leaf], level: int, trained: set[KeyPath]) -> list[Leaf]:
    """The arrays that must be equal along an axis; `trained` are the parameters."""
    around = [[field for field in leaf.around if field.level] for leaf in leaves]
    states = [field.node for levels in around for field in levels[level : level + 1]]
    # An axis without a state of its own is one of replicas.
    has_center = any(map(fields.may_have_center, states))
    before, chosen = _before_reductions(leaves), []
    for leaf in leaves:
        computed = _is_computed(leaf, level, before)
        equal = not has_center and (computed or leaf.path in trained)
        if leaf.levels and not computed:
            equal = leaf.mark(level, replicated=not has_center) is None
        if equal:
            chosen.append(leaf)
    return chosen


# Fields of states that follow from a gradient before it is reduced.
_BEFORE: dict[type, tuple[str, ...]] = {
    CenterState: ("accumulated",),  # of one worker alone, which is no level
    optax.ApplyEvery: ("grad_acc",),
    optax.ApplyIfFiniteState: ("notfinite_count", "last_finite", "total_notfinite"),
    optax.MultiStepsState: ("acc_grads", "skip_state"),
    optax.ZeroNansState: ("found_nan",),
}


def _is_computed(leaf: Leaf, level: int, before: set[tuple[int, str]]) -> bool:
    """Whether an optimizer has computed an array from a reduced gradient.

    Of levels of workers only outer ones may stand around it. `before`: the links of
    chains that come before a reduction.
    """
    inside = False
    for node, name, _, is_level in leaf.around:
        if is_level:
            if not level or name != "inner":
                return False
            level, inside = level - 1, False
        own = fields.is_in_pieces(node) or name in _BEFORE.get(type(node), ())
        if own or (id(node), name) in before:
            return False
        inside = inside or (not is_level and fields.is_of_optimizer(node))
    return inside


def _before_reductions(leaves: Sequence[Leaf]) -> set[tuple[int, str]]:
    """The links of chains, by chain and place, before one that reduces gradients.

    It makes one gradient of all replicas', as its state says.
    """

    def reduces(node):
        return fields.is_level(node) or isinstance(node, fields.Reduced)

    nodes = (field.node for leaf in leaves for field in leaf.around)
    chains = {id(node): node for node in nodes if type(node) is tuple}
    found = set()
    for number, chain in chains.items():
        reducing = [bool(fields.nodes_of(link, reduces)) for link in chain]
        last = max((place for place, yes in enumerate(reducing) if yes), default=0)
        found |= {(number, str(x)) for x in range(last) if not reducing[x]}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first(
    layout: Layout, level: int, levels: Levels, arrays: list[jax.Array]
) -> jax.Array:
    """Of all workers' arrays the number of the first that differs, `[..., n]`."""

    def compare(arrays: list[jax.Array]) -> jax.Array:
        return fingerprint(arrays, layout.axes[level]).leaf

    for at in reversed(range(len(layout.sizes))):
        compare = map_workers(
            compare,
            layout.axes[at],
            mesh=layout.mesh,
            in_axes=(marks(levels, at),),
            out_axes=None if at == level else 0,
        )
    return compare(arrays)
