"""Meshes of the first devices."""

import math

import jax
from jax.sharding import AxisType, Mesh


def mesh_of(sizes: dict[str, int], kind: str = "Auto") -> Mesh:
    """Axes of these names and sizes, all of the type `Auto` or `Explicit`."""
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType[kind],) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
