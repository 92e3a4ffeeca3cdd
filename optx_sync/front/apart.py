# SPDX-License-Identifier: Apache-2.0
"""Steps that one process makes with its own workers alone: where their arrays lie.

Processes must launch a program over a mesh of all devices equally often, with a
collective in it or without. What each runs as often as it likes is compiled for its own
devices, and takes the same arrays as arrays over these.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optx_sync.comm.collectives import AxisName, check_axis_name, here
from optx_sync.comm.shards import axes_in
from optx_sync.placement.layout import Arrays, Layout, Levels, Part
from optx_sync.placement.leaves import on_data
from optx_sync.trees import one_or_several


def part_of(layout: Layout) -> Layout:
    """The layout of this process's own workers, whose first axis has another name."""
    axes, number, mesh = check_axis_name(layout.axes[0]), layout.sizes[0], layout.mesh
    rows = tuple(range(number))
    sizes = {axes[0]: number}
    if isinstance(mesh, Mesh):
        sizes = {axis: mesh.shape[axis] for axis in axes}
        places = [mesh.axis_names.index(axis) for axis in axes]
        devices = np.moveaxis(mesh.devices, places, range(len(axes)))
        own = [
            {device.process_index == jax.process_index() for device in worker}
            for worker in devices.reshape(number, -1)
        ]
        rows = tuple(row for row, owned in enumerate(own) if owned == {True})
        if {True, False} in own or not rows:
            raise ValueError(
                f"In steps of `workers.here` each worker along {layout.axes[0]!r} is "
                "one process's, with all of its devices; on this mesh process "
                f"{jax.process_index()} has {'a part of one' if rows else 'none'}. "
                "Order its devices by process, as jax.make_mesh does, with the workers'"
                " axis first."
            )
        names = [here(axis) if axis in axes else axis for axis in mesh.axis_names]
        mesh = Mesh(mesh.local_mesh.devices, names, axis_types=mesh.axis_types)
    first: AxisName = one_or_several(tuple(map(here, axes)))
    return layout._replace(
        sizes=(len(rows), *layout.sizes[1:]),
        axes=(first, *layout.axes[1:]),
        mesh=mesh,
        part=Part(rows, sizes),
    )


def moved(
    arrays: Arrays, levels: Levels, before: Layout, after: Layout
) -> list[jax.Array]:
    """The arrays of one layout as those of the other, on the devices of both."""
    if not isinstance(after.mesh, Mesh):  # all workers are simulated here
        return list(arrays)
    mesh, number = after.mesh, after.sizes[0]
    names = dict(
        zip(
            *(check_axis_name(layout.axes[0]) for layout in (before, after)),
            strict=True,
        )
    )

    def move(x: jax.Array, along: tuple[int, ...]) -> jax.Array:
        entries = [
            one_or_several(tuple(names.get(axis, axis) for axis in axes_in(entry)))
            for entry in getattr(x.sharding, "spec", ())
        ]
        place = NamedSharding(
            mesh,
            PartitionSpec(*(entry or None for entry in entries)),
            memory_kind=x.sharding.memory_kind,
        )
        shape = (number, *x.shape[1:]) if 0 in along else x.shape
        own = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, place, own)

    return [
        on_data(lambda data, along=along: move(data, along), x)
        for x, along in zip(arrays, levels, strict=True)
    ]


def agreed(
    arrays: Sequence[jax.Array],
    counters: Sequence[bool],
    mesh: Mesh | AbstractMesh | None,
) -> list[jax.Array]:
    """The arrays, in which each counter is the largest that any process has."""
    found = list(arrays)
    places = [place for place, counts in enumerate(counters) if counts]
    if not isinstance(mesh, Mesh) or not places:
        return found
    # What each device has, side by side: a step never waits for the host.
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = [
        jax.make_array_from_single_device_arrays(
            (mesh.size, *found[place].shape),
            each,
            [shard.data[None] for shard in found[place].addressable_shards],
        )
        for place in places
    ]
    largest = jax.jit(_largest, out_shardings=NamedSharding(mesh, PartitionSpec()))
    for place, x in zip(places, largest(own), strict=True):
        found[place] = x
    return found


def _largest(own: list[jax.Array]) -> list[jax.Array]:
    return [x.max(axis=0) for x in own]
