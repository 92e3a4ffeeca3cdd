# SPDX-License-Identifier: Apache-2.0
"""Sum and cut arrays by their sharding types, under plain `jax.jit`: no axis is mapped.

On a mesh of Explicit axes a type says over which of them an array is still to be
summed. Another type, `jax.reshard`, is what the collectives are elsewhere: XLA makes an
all-reduce of it where the array becomes whole, a reduce-scatter where it is cut.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.trees import Tree, path_name

SameTree = TypeVar("SameTree")


def require_unreduced(tree: Tree, axis_name: AxisName) -> None:
    """Refuse a leaf whose type does not say that it is still to be summed."""
    axes = set(check_axis_name(axis_name))
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        kind = jax.typeof(x)
        if not axes <= set(kind.sharding.spec.unreduced):
            raise ValueError(
                f"grads='unreduced' says that gradients are still to be summed over "
                f"{sorted(axes)}, but the type of the one at {path_name(path)} is "
                f"{kind}. Differentiate with respect to parameters of a type that says "
                "so, jax.reshard(params, jax.P(reduced={'data'})), with data of "
                "jax.P('data') on a mesh of Explicit axes, or use grads='summed'."
            )


def summed(tree: SameTree, axis_name: AxisName) -> SameTree:
    """The sums, on all devices."""
    require_unreduced(tree, axis_name)
    return _retyped(tree, lambda spec, _: _summed(spec, axis_name))


def cut(tree: SameTree, axis_name: AxisName) -> SameTree:
    """The sums, or what is whole, cut along the first dimension that divides evenly.

    An array without one is on all devices.
    """
    names, replicas = check_axis_name(axis_name), size(tree, axis_name)

    def spec_of(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
        spec = _summed(spec, axis_name)
        parts = [*spec.partitions, *[None] * (len(shape) - len(spec.partitions))]
        for place, (n, part) in enumerate(zip(shape, parts, strict=True)):
            if part is None and n and n % replicas == 0:
                parts[place] = names
                break
        return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)

    return _retyped(tree, spec_of)


def unreduced(tree: SameTree, axis_name: AxisName) -> SameTree:
    """Arrays of zeros, with the types of such as are still to be summed."""
    size(tree, axis_name)
    axes = set(check_axis_name(axis_name))
    return _retyped(tree, lambda spec, _: _with(spec, axes | spec.unreduced))


def whole(tree: SameTree, axis_name: AxisName) -> SameTree:
    """What `cut` has cut, on all devices."""
    names = {*check_axis_name(axis_name)}

    def spec_of(spec: PartitionSpec, _: tuple[int, ...]) -> PartitionSpec:
        parts = (None if names & {*_names(x)} else x for x in spec.partitions)
        return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)

    return _retyped(tree, spec_of)


def size(tree: Tree, axis_name: AxisName) -> int:
    """How many devices lie along these axes of the arrays' mesh."""
    names = check_axis_name(axis_name)
    for x in jax.tree.leaves(tree):
        mesh = jax.typeof(x).sharding.mesh
        if not {*names} <= {*mesh.explicit_axes}:
            raise ValueError(
                f"grads='unreduced' is for arrays on a mesh whose axis {axis_name!r} "
                f"is Explicit; got {jax.typeof(x)}, whose mesh has the Explicit axes "
                f"{mesh.explicit_axes}. Call init and update under jax.set_mesh(mesh), "
                "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,))."
            )
        return math.prod(mesh.shape[name] for name in names)
    return 1


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else () if part is None else (part,)


def _summed(spec: PartitionSpec, axis_name: AxisName) -> PartitionSpec:
    return _with(spec, spec.unreduced - {*check_axis_name(axis_name)})


def _with(spec: PartitionSpec, unreduced: Any) -> PartitionSpec:
    # `update` of JAX 0.12 keeps the kind of sums that there are none of.
    return PartitionSpec(*spec.partitions, unreduced=unreduced, reduced=spec.reduced)


def _retyped(
    tree: SameTree, spec_of: Callable[[PartitionSpec, tuple[int, ...]], PartitionSpec]
) -> SameTree:
    """Each array with the spec that is made of its own and of its shape."""
    return jax.tree.map(
        lambda x: jax.reshard(x, spec_of(jax.typeof(x).sharding.spec, x.shape)), tree
    )
