# SPDX-License-Identifier: Apache-2.0
"""The collectives of `jax.lax` in every context; only this file calls them.

The functions of this package run in several contexts: `jax.pmap`, `jax.shard_map` with
`check_vma=True` (types say over which mesh axes a value varies) or `check_vma=False`,
and `jax.vmap(axis_name=...)`. JAX's collectives differ between them: `vmap` and
`check_vma=True` refuse groups of replicas, and some collectives are missing over
several axes or over lanes on a mesh. The functions here behave alike in all contexts.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from optx_sync.core.shapes import Array, Int32, Shaped
from optx_sync.core.trees import Tree, one_or_several

AxisName: TypeAlias = str | tuple[str, ...]
GroupAssignment: TypeAlias = list[list[int]]
Result = TypeVar("Result")
# What messages recommend where Explicit axes do not work.
_AUTO_MESH = (
    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
)


class VaryingTypeError(ValueError):
    """An array varies over an axis where it must not, or does not where it must.

    Types show this, those of `jax.shard_map(check_vma=True)` and of `jax.vmap`.
    """


class UnequalError(VaryingTypeError):
    """What workers are to share differs between them, or the other way round."""


class _Alone(tuple):
    """An empty tuple of axes; any other empty tuple is refused as an axis name."""

    __slots__ = ()

    def __reduce__(self) -> str:  # a copy, and what is read from a pickle, is the same
        return "ALONE"


# Stands for `axis_name=None`: no axes. Reductions return their input; nothing is sent.
ALONE = _Alone()


class Groups:
    """A checked partition of the replicas, and whether JAX has collectives for it."""

    def __init__(self, axes: tuple[str, ...], assignment: GroupAssignment):
        """Groups of the replicas along these axes; `assignment` is checked already."""
        self.assignment = assignment
        self.size: int = len(assignment[0])
        # own_group[i] is the number of replica i's group.
        numbers = {m: number for number, group in enumerate(assignment) for m in group}
        self.own_group: list[int] = [numbers[i] for i in range(len(numbers))]
        # JAX has collectives of groups only over a single manual axis.
        manual = axes[0] in jax.sharding.get_abstract_mesh().manual_axes
        self.native: bool = len(axes) == 1 and manual


# Where set: the axes that are named while a step is traced.
_named: contextvars.ContextVar[set[str]] = contextvars.ContextVar("named")


@contextlib.contextmanager
def names_of_axes() -> Iterator[set[str]]:
    """The axes that this library's functions are given meanwhile."""
    found: set[str] = set()
    before = _named.set(found)
    try:
        yield found
    finally:
        _named.reset(before)


def check_axis_name(axis_name: object) -> tuple[str, ...]:
    """The axes as a tuple.

    Raises:
        TypeError: `axis_name` is neither a str nor a tuple or list of them, or is
            empty.
        ValueError: It names an axis twice.
    """
    if axis_name is ALONE:
        return ALONE
    axes: Any = (axis_name,) if isinstance(axis_name, str) else axis_name
    names = isinstance(axes, tuple | list) and all(isinstance(a, str) for a in axes)
    if not names or not axes:
        raise TypeError(
            "axis_name must be the name of a mapped axis, or a tuple of names; "
            f"got {axis_name!r}. Pass for example axis_name='data'."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis_name names an axis twice; got {axis_name!r}.")
    _named.get(set()).update(axes)
    return tuple(axes)


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along the mapped axis, or along all axes of a tuple."""
    return math.prod(_bound(lax.axis_size, a) for a in check_axis_name(axis_name))


def is_mapped(axis_name: AxisName) -> bool:
    """Whether the axis is mapped in this context."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def axis_index(axis_name: AxisName) -> Int32[Array, ""]:
    """This replica's index in `range(axis_size)`; the first axis is major."""
    index = jnp.int32(0)
    for axis in check_axis_name(axis_name):
        own = _bound(lax.axis_index, axis)
        try:
            index = index * axis_size(axis) + own
        except ValueError as error:  # the axis is mapped: it is the lanes' type
            raise ValueError(
                "Lanes of jax.vmap that lie along an Explicit mesh axis, as "
                "jax.make_mesh makes them by default, need the mesh: call this within "
                "`with jax.set_mesh(mesh):`, or make the mesh of the compiler's own "
                f"axes: {_AUTO_MESH}."
            ) from error
    return index


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which an array varies, by its type."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jax.typeof(x).manual_axis_type.varying
    kind = x.manual_axis_type  # None where no axis is mapped
    return frozenset() if kind is None else kind.varying


def checked_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Those of the axes for which types say what varies over them (check_vma=True)."""
    # The axis index varies by definition: if its type does not say so, no type does.
    return tuple(
        axis
        for axis in check_axis_name(axis_name)
        if axis in varying_axes(_bound(lax.axis_index, axis))
    )


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same array, with a type that also varies over these checked axes."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def without_types(x: jax.Array) -> jax.Array:
    """The same array without a type that varies, where no other array has one.

    What leaves a `shard_map` with types into one without them keeps its own, and then
    fits no counterpart in a conditional. JAX drops it at the next operation; XLA takes
    these two out again.
    """
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def reducible(axis_name: AxisName) -> tuple[str, ...]:
    """The axes; a ValueError where JAX has no collective over them."""
    axes = check_axis_name(axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = set(axes) - set(checked_axes(axes))
    if mapped and any(checked_axes(axis) for axis in manual):
        raise ValueError(
            f"JAX has no collective over {sorted(mapped)}, an axis of jax.vmap inside "
            "jax.shard_map(check_vma=True). Pass check_vma=False to jax.shard_map."
        )
    return axes


def require_whole_lanes(tree: Tree, axis_name: AxisName) -> bool:
    """Whether these arrays are lanes of `jax.vmap` on a mesh of Explicit axes.

    Lanes that are themselves sharded over such axes are refused: JAX cannot sum them,
    and its own error, where they meet arrays of another sharding, does not say so.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    placed = [jax.typeof(x).sharding for x in jax.tree.leaves(tree)]
    lanes = any(at.mesh.explicit_axes for at in placed)
    lanes = lanes and not any(axis in manual for axis in check_axis_name(axis_name))
    if lanes and any(part is not None for at in placed for part in at.spec):
        raise ValueError(
            "JAX cannot sum over an axis of jax.vmap where each lane is sharded over "
            "Explicit mesh axes, as jax.make_mesh makes them by default. Make the mesh "
            f"of the compiler's own axes: {_AUTO_MESH}."
        )
    return lanes


def psum(
    operands: Sequence[jax.Array], axes: tuple[str, ...], groups: Groups | None = None
) -> list[jax.Array]:
    """The sums over the axes, or over groups: `native` ones, without check_vma=True."""
    if groups or not require_whole_lanes(operands, axes):
        return _added(lax.psum, operands, axes, groups and groups.assignment)
    # Here jax.lax.psum gives its result the sharding of the axis that it sums over.
    for axis in axes:
        gathered = lax.all_gather(list(operands), axis)
        operands = [jnp.sum(x, 0, dtype=x.dtype) for x in gathered]
    return list(operands)


def gather(
    x: Shaped[Array, "rows ..."], axis_name: AxisName, groups: Groups | None = None
) -> Shaped[Array, "everyone ..."]:
    """All-gather: the arrays of all replicas, concatenated along axis 0.

    JAX's types know that the result is equal on all replicas. It runs wherever the axis
    is mapped, also over two axes of `jax.vmap`, where `jax.lax.all_gather` fails.

    Args:
        x: This replica's array `[rows, ...]`, of any dtype. To stack arrays of any
            shape, scalars too, pass `x[None]`: replica i's is row i of the result.
        axis_name: The mapped axis, or a tuple of them; the first is major.
        groups: For the library's own use.

    Returns:
        An array `[N rows, ...]` for N replicas; with `groups`, of this replica's group.

    Raises:
        ValueError: `x` is a scalar; `axis_name` is not bound, or is an axis of
            `jax.vmap` inside `jax.shard_map(check_vma=True)`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def largest(x):
        ...     return oxs.exchange.gather(x[None], "data").max(axis=0)
        >>> jax.vmap(largest, axis_name="data")(jnp.array([1.0, 3.0, 2.0]))
        Array([3., 3., 3.], dtype=float32)
    """
    if not jnp.shape(x):
        raise ValueError(
            "gather joins the replicas' arrays along their first axis, and a scalar "
            "has none. Gather x[None]: replica i's x is number i of the result."
        )
    axes = reducible(axis_name)
    checked = checked_axes(axes)
    everyone = vary(x, checked)[None]
    if groups is not None and groups.native:
        everyone = lax.all_gather(
            everyone, axes, tiled=True, axis_index_groups=groups.assignment
        )
    else:
        # Axis by axis, as JAX cannot gather over two axes of vmap; the first is major.
        for axis in reversed(axes):
            to = "invarying" if axis in checked else "varying"
            own = _of_each(everyone, axis)
            everyone = lax.all_gather(own, axis, tiled=True, to=to)
        if groups is not None:
            members = jnp.asarray([groups.assignment[g] for g in groups.own_group])
            everyone = everyone[members[axis_index(axes)]]
    return everyone.reshape((everyone.shape[0] * x.shape[0], *x.shape[1:]))


def all_to_all(
    x: Shaped[Array, "replicas ..."], axis_name: AxisName
) -> Shaped[Array, "replicas ..."]:
    """All-to-all: row j of replica i's array becomes row i of replica j's result.

    It runs wherever the axis is mapped, also over two axes of `jax.vmap`.

    Args:
        x: This replica's array `[N, ...]`, of any dtype: a row for each of N replicas.
        axis_name: The mapped axis, or a tuple of them; the first is major.

    Returns:
        An array like `x`: what each replica had for this one.

    Raises:
        ValueError: `x` has not N rows; `axis_name` is not bound, or is an axis of
            `jax.vmap` inside `jax.shard_map(check_vma=True)`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def turned(x):
        ...     return oxs.exchange.all_to_all(x, "data")
        >>> jax.vmap(turned, axis_name="data")(jnp.array([[1, 2], [3, 4]]))
        Array([[1, 3],
               [2, 4]], dtype=int32)
    """
    size = axis_size(axis_name)
    if jnp.shape(x)[:1] != (size,):
        raise ValueError(
            f"all_to_all needs {size} rows, one for each replica; got "
            f"{x.dtype}{list(x.shape)}. Reshape to [{size}, ...], padded if need be."
        )
    axes = reducible(axis_name)
    rows = vary(x, checked_axes(axes)).reshape(*map(axis_size, axes), *x.shape[1:])
    # Axis by axis, as JAX has none over two axes of vmap; the first is major.
    for place, axis in enumerate(axes):
        rows = lax.all_to_all(_of_each(rows, axis), axis, place, place, tiled=True)
    return rows.reshape(x.shape)


def _of_each(x: jax.Array, axis: str) -> jax.Array:
    """The array, one for each replica also where those of `jax.vmap` share one.

    JAX's collectives make another shape of a shared one. XLA takes the choice out.
    """
    if axis in jax.sharding.get_abstract_mesh().manual_axes:
        return x
    return jnp.where(axis_index(axis) >= 0, x, x)


def scatter_sum(
    x: jax.Array, axis_name: AxisName, groups: Groups | None = None
) -> jax.Array:
    """Reduce-scatter: of the sum of `x[N k]`, replica i gets `[i k, (i + 1) k)`.

    With `groups`, which must be `native`, the sum is over this replica's group.
    """
    assignment = groups and groups.assignment
    scatter = functools.partial(lax.psum_scatter, tiled=True)
    for axis in reducible(axis_name):
        (x,) = _added(scatter, [_of_each(x, axis)], axis, assignment)
    return x


def permute(x: jax.Array, axis_name: AxisName, source: Sequence[int]) -> jax.Array:
    """Replica i gets the array of replica `source[i]`; `source` is a permutation.

    The result varies over the axis. Under `jax.vmap` over several axes all arrays are
    gathered.
    """
    axes = reducible(axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if len(axes) > 1 and not set(axes) <= set(manual):
        everyone = vary(gather(x[None], axes), checked_axes(axes))
        return everyone[jnp.asarray(source, jnp.int32)[axis_index(axes)]]
    pairs = [(sender, receiver) for receiver, sender in enumerate(source)]
    return lax.ppermute(x, one_or_several(axes), pairs)


def _added(
    add: Callable[..., Any],
    operands: Sequence[jax.Array],
    axes: AxisName,
    groups: GroupAssignment | None = None,
) -> list[jax.Array]:
    """The operands after a collective that adds them up, in their own dtypes.

    XLA:CPU makes each sum of bfloat16 one of float32. Where the mesh is manual in part
    the pass that does it ends the process, so there it is done here.
    """
    add = functools.partial(add, axis_name=axes, axis_index_groups=groups)

    def wide(operands):
        sent = [
            x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands
        ]
        return [x.astype(o.dtype) for x, o in zip(add(sent), operands, strict=True)]

    mesh = jax.sharding.get_abstract_mesh()
    partly_manual = 0 < len(mesh.manual_axes) < len(mesh.axis_names)
    if partly_manual and any(x.dtype == jnp.bfloat16 for x in operands):
        return lax.platform_dependent(list(operands), cpu=wide, default=add)
    return add(list(operands))


def _bound(function: Callable[[str], Result], axis: str) -> Result:
    """`function(axis)`, with an error that helps where the axis is not mapped."""
    try:
        return function(axis)
    except NameError as error:
        raise ValueError(
            f"No mapped axis is named {axis!r} here. The reduction over replicas, and "
            "so `update`, must run inside jax.shard_map or jax.pmap over a mesh with "
            f"that axis, or inside jax.vmap(..., axis_name={axis!r}). The step of "
            f"oxs.Workers(n, {axis!r}) does; one with several axes that of oxs.Workers("
            "(2, 4), ('pods', 'chips'))."
        ) from error
