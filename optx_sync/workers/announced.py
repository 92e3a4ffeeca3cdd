# SPDX-License-Identifier: Apache-2.0
"""What a step of `Workers` says of itself in the log, once, at level INFO.

The log is `logging.getLogger("optx_sync.workers")`; a program that wants to read it
calls `logging.basicConfig(level=logging.INFO)`.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh

from optx_sync.center.turns import Turns
from optx_sync.comm.collectives import check_axis_name
from optx_sync.comm.sends import Bytes, sends
from optx_sync.workers.layout import Arrays, Layout

log: logging.Logger = logging.getLogger("optx_sync.workers")


def said(
    name: str,
    layout: Layout,
    turns: Sequence[Turns],
    traced: Any,
    arrays: Arrays,
    *,
    averages_after: bool,
) -> str:
    """How many workers run a step, where, and what they send when.

    Args:
        name: That of the step.
        layout: How many workers lie along which axes, and the mesh.
        turns: When the parts of its center rules meet.
        traced: The step's program for all kinds of step, `jax.stages.Traced`.
        arrays: Those of the state, which lie on the devices of simulated workers.
        averages_after: Whether a second program averages the step's other results.
    """
    several = len(layout.sizes) > 1
    number = " x ".join(map(str, layout.sizes))
    axes = ", ".join(map(repr, layout.axes))
    text = (
        f"{name}: {number} workers along the {'axes' if several else 'axis'} {axes}, "
        f"{_place(layout, arrays)}. {_sends(layout, turns, traced)}"
    )
    _, others, _ = traced.out_info
    if averages_after and jax.tree.leaves(others):
        text += " Behind it a second program averages its other results."
    return text


def _place(layout: Layout, arrays: Arrays) -> str:
    """Where the workers are."""
    mesh = layout.mesh
    if mesh is None:
        found = [x.sharding.device_set for x in arrays if _is_placed(x)]
        devices = sorted(set().union(*found), key=lambda device: device.id)
        return f"simulated by jax.vmap{' on ' * bool(devices)}{_devices(devices)}"
    if not isinstance(mesh, Mesh):
        return "on a mesh without devices"
    place = f"on {_devices(list(mesh.devices.flat))}"
    return place + f", the mesh {dict(mesh.shape)}" * bool(_other_axes(layout))


def _other_axes(layout: Layout) -> list[str]:
    """The mesh axes along which a worker itself is sharded."""
    names = {name for axis in layout.axes for name in check_axis_name(axis)}
    axes = layout.mesh.axis_names if layout.mesh else ()
    return [axis for axis in axes if axis not in names]


def _is_placed(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _devices(devices: Sequence[Any]) -> str:
    """So many devices, of which kind."""
    if not devices:
        return ""
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in devices))
    processes = len({device.process_index for device in devices})
    number = f"{len(devices)} device{'s' * (len(devices) > 1)} ({kinds})"
    return number + f" of {processes} processes" * (processes > 1)


def _sends(layout: Layout, turns: Sequence[Turns], traced: Any) -> str:
    """What a step sends, and what a round."""
    parts = sum(one.parts for one in turns)
    periods = " and ".join(dict.fromkeys(map(_period, turns)))
    rounds = f" A round comes {periods}" * bool(periods)
    if layout.mesh is None:
        return "Nothing is sent." + (rounds and f"{rounds}.")
    always, branches = sends(traced.jaxpr.jaxpr)
    text = f"Each step sends {_written(always, layout) or 'nothing'}.{rounds}"
    if meets := _written(branches, layout, parts or 1):
        text += " and sends " if rounds else " Some send besides "
        text += meets + " on average" * (parts > 1)
    text = text.removesuffix(".") + "."
    if others := _other_axes(layout):
        text += " What the compiler sends along "
        text += f"{', '.join(map(repr, others))} is not counted."
    return text


def _period(turns: Turns) -> str:
    """When the parts of a rule meet."""
    between, parts, _ = turns
    every = "in every step" if between == 1 else f"every {between} steps"
    if callable(between):
        every = "when its schedule says"
    return every + f" for one of {parts} parts in turn" * (parts > 1)


def _written(found: Bytes, layout: Layout, share: int = 1) -> str:
    """Bytes by kind, a part of them, in words."""
    several = len(layout.sizes) > 1
    return " and ".join(
        f"{'an' if kind[0] == 'a' else 'a'} {kind} of {round(number / share):,} bytes"
        + f" along {', '.join(map(repr, axes))}" * several
        for (kind, axes), number in found.items()
    )
