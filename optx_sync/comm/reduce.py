# SPDX-License-Identifier: Apache-2.0
"""Mean and sum over replicas, with weights, in groups, of dense and sparse arrays.

`lax.pmean` has no weights, sums half precision in half precision, and divides groups of
unequal size by the size of the first.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optx_sync.comm import buffers, collectives
from optx_sync.comm.collectives import AxisName, GroupAssignment, Groups
from optx_sync.comm.varying import localize, require_local
from optx_sync.core.checks import floating, interval, one_of
from optx_sync.core.shapes import Array, Float
from optx_sync.core.slices import IndexedSlices
from optx_sync.core.trees import (
    Tree,
    at_least_float32,
    is_floating,
    is_inexact,
    is_slices,
)

Reduction: TypeAlias = Literal["mean", "sum"]
SameTree = TypeVar("SameTree")
# Sums of gradients overflow in narrower dtypes.
SUM_BITS = 16
Number: TypeAlias = Float[Array, ""]


def reduce(
    tree: SameTree,
    axis_name: AxisName,
    *,
    reduction: Reduction = "mean",
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
    dtype: DTypeLike | None = None,
) -> SameTree:
    r"""Mean or sum over the replicas of every leaf of a tree.

    For leaf x_i of replica i, with N replicas and weights w_i:

    .. math::

        \text{mean} = \frac{1}{N} \sum_i x_i, \qquad
        \text{weighted mean} = \frac{\sum_i w_i x_i}{\sum_i w_i}

    `cross_shard` reduces gradients this way; use it for losses, metrics and batch
    statistics. All leaves of one dtype travel in one all-reduce. It runs wherever
    `axis_name` is bound: `jax.pmap`, `jax.shard_map`, `jax.vmap`.

    Row-sparse leaves (`IndexedSlices` of k rows) are gathered, N k rows, and rows that
    several replicas sent are then summed: the table itself never travels. The
    all-gather of N k rows costs more than the all-reduce of the dense table once N k
    exceeds about twice the table's number of rows; then reduce
    `slices.to_dense(rows)`.

    Args:
        tree: A tree of arrays, `IndexedSlices` and `None`. Inside
            `jax.shard_map(check_vma=True)` each leaf must vary over `axis_name`.
            The mean of integers and booleans is float32, their sum at least int32.
        axis_name: The mapped axis, or a tuple of them.
        reduction: `"mean"` or `"sum"`.
        weight: This replica's weight (a scalar, not negative), for example its number
            of tokens, for a weighted mean. A replica of weight 0 contributes nothing,
            even if its leaves are NaN; if all weights are 0 the result is zero, and NaN
            if their sum overflows.
        group_assignment: A partition of `range(axis_size)` into lists of equal size:
            each replica gets the reduction over its own group.
        dtype: The dtype in which floating leaves travel and are summed. `None`: float32
            for half precision, else the leaf's own. Half precision means are divided
            before they are summed.

    Returns:
        A tree of the same structure; floating leaves keep their dtype.

    Raises:
        ValueError: `axis_name` is not bound, or is an axis of `jax.vmap` inside
            `jax.shard_map(check_vma=True)`, where JAX has no collective; a leaf does
            not vary over it; `reduction`, `group_assignment`, `weight` or `dtype` is
            invalid.
        TypeError: `axis_name` is not a str or a tuple of them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def mean_loss(loss, tokens):
        ...     return oxs.reduce(loss, "data", weight=tokens)
        >>> losses, tokens = jnp.array([1.0, 4.0]), jnp.array([30.0, 10.0])
        >>> jax.vmap(mean_loss, axis_name="data")(losses, tokens)
        Array([1.75, 1.75], dtype=float32)
    """
    found = reduce_and_sum(
        tree, axis_name, None, reduction, weight, group_assignment, dtype
    )
    return found[0]


def mean_or(
    otherwise: Tree,
    tree: SameTree,
    axis_name: AxisName,
    weight: jax.Array | float | None,
    group_assignment: GroupAssignment | None = None,
) -> SameTree:
    """The weighted mean; where all weights are 0, `otherwise`, of which `None` is NaN.

    A mean of nobody is no 0, which an optimizer would take for a value.
    """
    mean, _, total = reduce_and_sum(
        tree, axis_name, None, weight=weight, group_assignment=group_assignment
    )
    if weight is None:
        return mean
    if otherwise is None:
        otherwise = jax.tree.map(_no_value, mean)
    return jax.tree.map(
        lambda m, x: jnp.where(jnp.asarray(total) > 0, m, x), mean, otherwise
    )


def _no_value(x: jax.Array) -> jax.Array:
    return jnp.asarray(jnp.nan, x.dtype) if is_inexact(x.dtype) else x


WEIGHED_SUM = (
    "weight= makes a weighted mean and has no meaning with reduction='sum'; leave "
    "weight out, or pass reduction='mean'."
)


def reduce_and_sum(
    tree: SameTree,
    axis_name: AxisName,
    also: Tree,
    reduction: Reduction = "mean",
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[SameTree, Tree, Number | int]:
    """`reduce`, and the sums of scalars that travel with it: (tree, sums, total).

    `also` is a tree of scalars. The total is the sum of the weights, or without weights
    the number of replicas, in this replica's group.
    """
    one_of("reduction", reduction, Reduction)
    wire_dtype = floating("dtype", dtype, SUM_BITS)
    axes = collectives.check_axis_name(axis_name)
    size = collectives.axis_size(axis_name)
    if weight is not None and reduction == "sum":
        raise ValueError(WEIGHED_SUM)
    groups = None
    if group_assignment is not None:
        check_group_assignment(group_assignment, size)
        groups = Groups(axes, group_assignment)
    collectives.reducible(axes)
    require_local(
        tree,
        axis_name,
        mend="Leave it as it is; or, if each replica is to count, reduce "
        f"oxs.localize(x, {axis_name!r}). For a gradient write `params = "
        f"oxs.localize(params, {axis_name!r})` before jax.grad.",
        why="So it is equal on all replicas already: a constant, what was reduced "
        "before, or the gradient of a replicated parameter, which autodiff has already "
        "summed.",
    )

    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
    leaves = [x if is_slices(x) else jnp.asarray(x) for x in leaves]
    arrays = [x for x in leaves if not is_slices(x)]
    wire = functools.partial(_wire_dtype, reduction=reduction, asked=wire_dtype)
    # The scalars of `also` come last, and travel in their own dtypes.
    scalars, names = jax.tree.flatten(localize(also, axis_name))
    total: Any = size if groups is None else groups.size
    divisor: Any = 1 if reduction == "sum" else total
    fraction = own = own_weight(weight, axis_name)
    narrow = any(_is_narrow(wire(x.dtype)) for x in arrays)
    if own is not None and narrow:
        # Gradients times weights such as token counts overflow a half precision sum, so
        # a scalar reduction first normalises the weights.
        (total,) = _sum([own], axes, groups)
        fraction, divisor = own / weight_divisor(total), 1

    def to_wire(x):
        return _on_wire(x, wire(x.dtype), fraction, divisor)

    sent = [*map(to_wire, arrays), *scalars]
    if own is None or narrow:
        sums = _sum(sent, axes, groups)
    else:
        *sums, total = _sum([*sent, own], axes, groups)
        divisor = weight_divisor(total)
        fraction = own / divisor

    def mean(value):
        whole = isinstance(divisor, int) and divisor == 1
        if whole or _is_narrow(value.dtype):  # Narrow sums are of quotients.
            return value
        return value / jnp.asarray(divisor, value.dtype)

    def finish(leaf):
        if not is_slices(leaf):
            return _in_dtype(mean(next(dense)), leaf.dtype)
        values, indices = to_wire(leaf.values), leaf.indices
        if fraction is None:
            values = mean(values)
        else:
            # Rows of a replica of weight 0 are not touched: index -1 names no row.
            indices = jnp.where(fraction == 0, jnp.full_like(indices, -1), indices)
        both, dtype = (indices, values), leaf.values.dtype
        rows = IndexedSlices(*(collectives.gather(x, axes, groups) for x in both))
        return rows.sum_duplicates().map_values(lambda v: _in_dtype(v, dtype))

    dense = iter(sums)
    tree = treedef.unflatten([finish(leaf) for leaf in leaves])
    return tree, names.unflatten(dense), total


def weigh(x: jax.Array, weight: Number | None) -> jax.Array:
    """`weight * x`; zeros if the weight is 0, even of NaN. `None` counts as 1."""
    if weight is None:
        return x
    # Multiplication alone does not do: 0 * NaN is NaN.
    return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))


def as_weight(weight: ArrayLike) -> jax.Array:
    """A weight as an array; refused is what is no finite number, 0 or more."""
    number = int(weight) if isinstance(weight, bool) else weight
    interval("[0, inf)", "Pass for example weights.sum(), of tokens.", weight=number)
    return jnp.asarray(weight)


def own_weight(weight: ArrayLike | None, axis_name: AxisName) -> Number | None:
    """This replica's weight as a checked float that varies over the axis, or `None`."""
    if weight is None:
        return None
    array = as_weight(weight)
    keeps = array.dtype in (jnp.float32, jnp.float64)
    return localize(array if keeps else array.astype(jnp.float32), axis_name)


def or_one(total: jax.Array) -> jax.Array:
    """A number to divide by: 1 where it is 0, since the dividend is 0 too."""
    # NaN stays, so that it is seen in the result.
    return jnp.where(total == 0, jnp.ones_like(total), total)


def weight_divisor(total: jax.Array) -> jax.Array:
    """A sum of weights to divide by: `or_one`, and NaN where it has overflowed.

    Divided by infinity all would be 0, as if nobody had contributed.
    """
    return or_one(jnp.where(jnp.isinf(total), jnp.full_like(total, jnp.nan), total))


class MeanOfReplicas:
    """A function whose results are equal on all replicas: the means of theirs.

    Args:
        function: What is called.
        loss: The function of one replica, whose signature it shows: Optax looks there
            for the names of arguments.
    """

    def __init__(self, function: Callable[..., jax.Array], loss: Callable[..., Any]):
        self._function: Callable[..., jax.Array] = function
        functools.update_wrapper(self, loss)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The mean."""
        return self._function(*args, **kwargs)


def mean_extra_args(
    extra_args: dict[str, Tree],
    names: Sequence[str],
    axis_name: AxisName,
    *,
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
    equal: Sequence[str] = (),
) -> dict[str, Tree]:
    """Replace the named extra arguments by their means over the replicas.

    The inner transformation then gets the same on all replicas, with the weights and
    groups of the gradients; where all weights are 0, it gets NaN, which is no value.
    Values that are known to be equal stay as they are: Python numbers, and under
    check_vma=True arrays that do not vary. Under check_vma=True, scalars that vary and
    are not named are refused; and wherever nothing says that they are equal (`equal`
    has names of which the user does), functions and arrays that are no scalars. Arrays
    are allowed beside a `MeanOfReplicas`, which takes them as arguments.
    """
    axes = set(collectives.checked_axes(axis_name))
    unchecked = set(collectives.check_axis_name(axis_name)) - axes

    def mean(x):
        if isinstance(x, bool | int | float):
            return x
        x = jnp.asarray(x)
        if not (unchecked or collectives.varying_axes(x) & axes):
            return x
        own = localize(x, axis_name)
        return mean_or(
            None, own, axis_name, weight=weight, group_assignment=group_assignment
        )

    searched = any(isinstance(x, MeanOfReplicas) for x in extra_args.values())
    for name in sorted({*extra_args} - {*names, *equal}):
        found = extra_args[name]
        if callable(found) and not isinstance(found, MeanOfReplicas):
            raise ValueError(
                f"The extra argument {name!r} is a function. If its results differ from"
                " replica to replica, an optimizer that calls it makes equal replicas "
                f"drift apart. Pass oxs.value_fn({name}, {axis_name!r}), the mean of "
                "all, or say that it gives all the same: equal_extra_args="
                f"({name!r},)."
            )
        arrays = [x for x in jax.tree.leaves(found) if hasattr(x, "ndim")]
        for x in arrays:
            known = not unchecked and not collectives.varying_axes(x) & axes
            if x.ndim and not searched and not known:
                raise ValueError(
                    f"The extra argument {name!r} has an array of shape {jnp.shape(x)}."
                    " If it is each replica's own, an optimizer that reads it makes "
                    "equal replicas drift apart. Name it in reduce_extra_args= to pass "
                    "its mean, or say that all have the same: equal_extra_args="
                    f"({name!r},)."
                )
            scalar = isinstance(x, jax.Array) and x.ndim == 0
            if scalar and not unchecked and collectives.varying_axes(x) & axes:
                raise collectives.VaryingTypeError(
                    f"The extra argument {name!r} varies over the mesh axis "
                    f"{axis_name!r}: an optimizer that reads it would make equal "
                    "replicas drift apart. Pass its mean, "
                    f"oxs.reduce({name}, {axis_name!r}), or name it in "
                    "reduce_extra_args= of the wrapper around that optimizer."
                )
    named = [name for name in names if extra_args.get(name) is not None]
    return extra_args | {name: jax.tree.map(mean, extra_args[name]) for name in named}


def check_extra_args(names: object, option: str) -> tuple[str, ...]:
    """The names as a tuple; a TypeError for anything but a tuple or list of names."""
    several = isinstance(names, tuple | list)
    if not (several and all(isinstance(name, str) for name in names)):
        raise TypeError(
            f"{option} must be a tuple of names of extra arguments; got "
            f"{names!r}. Pass for example ('value',), or () for none."
        )
    return tuple(names)


def check_group_assignment(groups: Any, size: int | None = None) -> None:
    """Refuse groups that are not a partition of `range(size)` into lists of equal size.

    Without `size` (outside a mapped context) the number of replicas is not checked.
    """
    lists = isinstance(groups, list) and all(isinstance(g, list) for g in groups)
    members = list(itertools.chain(*groups)) if lists else []
    number = len(members) if size is None else size
    integers = members != [] and all(type(member) is int for member in members)
    partition = integers and sorted(members) == list(range(number))
    if not partition or len(set(map(len, groups))) > 1:
        raise ValueError(
            f"group_assignment must be a partition of range({size or 'axis size'}) into"
            f" a list of lists of equal size; got {groups!r}. List every replica once,"
            " for example [[0, 1], [2, 3]]; for one group of all pass None."
        )


def _sum(
    operands: Sequence[jax.Array], axes: tuple[str, ...], groups: Groups | None
) -> list[jax.Array]:
    """The sums of all operands over the axes, or over this replica's group."""
    if not operands or not axes:
        return list(operands)
    if groups is None or (groups.native and not collectives.checked_axes(axes)):
        return collectives.psum(operands, axes, groups)
    if groups.native:
        # Under check_vma=True JAX refuses an all-reduce in groups; a reduce-scatter and
        # an all-gather together send as much.
        def total(x):
            padded = jnp.pad(x, (0, -x.size % groups.size))
            return collectives.gather(
                collectives.scatter_sum(padded, axes, groups), axes, groups
            )

        sums = buffers.through(total, buffers.flat(operands))
        return [
            buffers.shaped(total, x) for total, x in zip(sums, operands, strict=True)
        ]
    # Without collectives of groups: sum a slot for each group, and take the own one.
    own = jnp.asarray(groups.own_group)[collectives.axis_index(axes)]
    slots = jnp.arange(len(groups.assignment))

    def place(x):
        mine = (slots == own).reshape((-1,) + (1,) * x.ndim)
        return jnp.where(mine, x[None], jnp.zeros_like(x)[None])

    return [
        total[own] for total in collectives.psum([place(x) for x in operands], axes)
    ]


def _wire_dtype(
    dtype: np.dtype, reduction: Reduction, asked: np.dtype | None
) -> np.dtype:
    if is_floating(dtype):
        return asked or at_least_float32(dtype)
    if is_inexact(dtype):
        return dtype
    if reduction == "mean":
        return np.dtype(np.float32)
    return np.dtype(np.int32) if dtype.itemsize < 4 else dtype


def _on_wire(
    x: jax.Array, dtype: np.dtype, fraction: Number | None, divisor: int
) -> jax.Array:
    """What this replica adds to a sum; a mean in a narrow dtype is divided before."""
    if not _is_narrow(dtype):
        return weigh(x.astype(dtype), fraction)
    # The mean fits where the sum may overflow.
    wide = x.astype(at_least_float32(x.dtype))
    if fraction is None:
        return (wide / jnp.asarray(divisor, wide.dtype)).astype(dtype)
    return weigh(wide, fraction).astype(dtype)


def _is_narrow(dtype: np.dtype) -> bool:
    return at_least_float32(dtype) != dtype


def _in_dtype(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast a mean or sum to its leaf's dtype; that of integers keeps its own."""
    return x.astype(dtype) if is_inexact(dtype) else x
