# SPDX-License-Identifier: Apache-2.0
"""Steps that one process makes with its own workers alone: where their arrays lie.

Processes must launch a program over a mesh of all devices equally often, with a
collective in it or without. What each runs as often as it likes is compiled for its own
devices, and takes the same arrays as arrays over these.
"""

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optx_sync.comm.collectives import AxisName, check_axis_name, here
from optx_sync.placement.layout import Arrays, Layout, Levels, Part
from optx_sync.placement.leaves import on_data
from optx_sync.trees import one_or_several


def part_of(layout: Layout) -> Layout:
    """The layout of this process's own workers, whose first axis has another name."""
    axes, number, mesh = check_axis_name(layout.axes[0]), layout.sizes[0], layout.mesh
    rows, sizes = np.arange(number), ((axes[0], number),)
    if isinstance(mesh, Mesh):
        places = [mesh.axis_names.index(axis) for axis in axes]
        workers = np.moveaxis(mesh.devices, places, range(len(axes)))
        own = np.vectorize(lambda x: x.process_index == jax.process_index())(workers)
        own = own.reshape(number, -1)
        (rows,), sizes = own.all(1).nonzero(), tuple((x, mesh.shape[x]) for x in axes)
        if not rows.size or (own.any(1) != own.all(1)).any():
            raise ValueError(
                "For steps of `workers.here` one process has all devices of a worker "
                f"along {layout.axes[0]!r}. This process has the positions "
                f"{np.argwhere(own).tolist()} of (workers, their devices). Lay the "
                "mesh's devices so, the workers' axis first; or step all together."
            )
        names = [here(axis) if axis in axes else axis for axis in mesh.axis_names]
        mesh = Mesh(mesh.local_mesh.devices, names, axis_types=mesh.axis_types)
    first: AxisName = one_or_several(tuple(map(here, axes)))
    return layout._replace(
        sizes=(len(rows), *layout.sizes[1:]),
        axes=(first, *layout.axes[1:]),
        mesh=mesh,
        part=Part(tuple(rows.tolist()), sizes),
    )


def moved(arrays: Arrays, levels: Levels, to: Layout) -> list[jax.Array]:
    """The arrays as those of another layout, which has these devices or some more."""
    mesh = to.mesh
    if not isinstance(mesh, Mesh):  # workers are simulated, all of them here
        return list(arrays)

    def move(x: jax.Array, along: tuple[int, ...]) -> jax.Array:
        spec, shape = getattr(x.sharding, "spec", PartitionSpec()), x.shape
        if 0 in along:
            spec = PartitionSpec(to.axes[0], *spec[1:])
            shape = (to.sizes[0], *shape[1:])
        place = NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind)
        own = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, place, own)

    return [
        on_data(lambda data, along=along: move(data, along), x)
        for x, along in zip(arrays, levels, strict=True)
    ]


def largest(
    counters: list[jax.Array], mesh: Mesh | AbstractMesh | None
) -> list[jax.Array]:
    """The largest that any process has, of counters over the devices of all."""
    if not isinstance(mesh, Mesh):
        return counters
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def side_by_side(x: jax.Array) -> jax.Array:
        own = [shard.data[None] for shard in x.addressable_shards]
        shape = (mesh.size, *x.shape)
        return jax.make_array_from_single_device_arrays(shape, each, own)

    # On the devices, so that no process waits for its steps to end.
    run = jax.jit(_largest, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return run(list(map(side_by_side, counters)))


def _largest(own: list[jax.Array]) -> list[jax.Array]:
    return [x.max(axis=0) for x in own]
