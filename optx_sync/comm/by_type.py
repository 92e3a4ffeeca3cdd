# SPDX-License-Identifier: Apache-2.0
"""Sum and cut arrays by their sharding types, under plain `jax.jit`: no axis is mapped.

On a mesh of Explicit axes, the type of an array (`unreduced`) says over which axes it
is still to be summed. `jax.reshard` to another type takes the place of the collectives:
XLA makes it an all-reduce where the array becomes whole, and a reduce-scatter where it
becomes cut.
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
    """Refuse leaves whose type does not say that they are still to be summed."""
    axes = set(check_axis_name(axis_name))
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        kind = jax.typeof(x)
        spec = kind.sharding.spec
        # JAX 0.12 also has arrays of which a maximum or minimum is still to be taken.
        what = getattr(getattr(spec, "unreduced_kind", None), "name", "sum")
        if not axes <= set(spec.unreduced) or what != "sum":
            raise ValueError(
                f"grads='unreduced' says that gradients are still to be summed over "
                f"{sorted(axes)}, but the type of the one at {path_name(path)} is "
                f"{kind}. Differentiate with respect to parameters of a type that says "
                "so, jax.reshard(params, jax.P(reduced={'data'})), with data of "
                "jax.P('data') on a mesh of Explicit axes, or use grads='summed'."
            )


def summed(tree: SameTree, axis_name: AxisName) -> SameTree:
    """The sums over the axes, whole on all devices."""
    require_unreduced(tree, axis_name)
    return _retyped(tree, lambda spec, _: _summed(spec, axis_name))


def cut(tree: SameTree, axis_name: AxisName) -> SameTree:
    """Cut the sums, or whole arrays, along the first dimension that divides evenly.

    The dimension must not be sharded yet. An array without such a dimension is whole on
    all devices.
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
    """Give arrays of zeros the type of arrays that are still to be summed."""
    size(tree, axis_name)
    axes = set(check_axis_name(axis_name))
    return _retyped(tree, lambda spec, _: _with(spec, axes | spec.unreduced))


def whole(tree: SameTree, axis_name: AxisName) -> SameTree:
    """Gather arrays that `cut` has cut: whole on all devices."""
    names = {*check_axis_name(axis_name)}

    def spec_of(spec: PartitionSpec, _: tuple[int, ...]) -> PartitionSpec:
        parts = (None if names & {*_names(x)} else x for x in spec.partitions)
        return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)

    return _retyped(tree, spec_of)


def size(tree: Tree, axis_name: AxisName) -> int:
    """The number of devices along these Explicit axes of the arrays' mesh."""
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
    # `spec.update` of JAX 0.12 keeps the kind of reduction when no axis is unreduced.
    return PartitionSpec(*spec.partitions, unreduced=unreduced, reduced=spec.reduced)


def _retyped(
    tree: SameTree, spec_of: Callable[[PartitionSpec, tuple[int, ...]], PartitionSpec]
) -> SameTree:
    """Reshard each array to `spec_of(its spec, its shape)`."""
    return jax.tree.map(
        lambda x: jax.reshard(x, spec_of(jax.typeof(x).sharding.spec, x.shape)), tree
    )
