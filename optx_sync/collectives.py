# SPDX-License-Identifier: Apache-2.0
"""Mean and sum over replicas; the only file that names a collective of `jax.lax`.

A function of this package runs in one of several contexts: `jax.pmap`,
`jax.shard_map` with `check_vma=True` (types say over which mesh axes a value varies)
or `check_vma=False`, and `jax.vmap(axis_name=...)`. JAX's collectives differ between
them: groups of replicas are refused under `vmap` and under `check_vma=True`, and
`lax.pmean` of groups of unequal size divides by the first one's size. This module
hides these differences, so that the rest of the package sees one answer everywhere.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from optx_sync.rows.slices import IndexedSlices
from optx_sync.trees import (
    at_least_float32,
    is_floating,
    is_inexact,
    is_slices,
    leaves_with_names,
    path_name,
    values_of,
)

AxisName: TypeAlias = str | tuple[str, ...]
GroupAssignment: TypeAlias = list[list[int]]
Reduction: TypeAlias = Literal["mean", "sum"]
Tree = TypeVar("Tree")
# What a message recommends where Explicit axes do not do.
_AUTO_MESH = (
    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
)


class _Alone(tuple):
    """No axis at all, which as the name of an axis would be a mistake."""

    __slots__ = ()


# Of a worker that is alone: over it everything is what it is by itself, and nothing is
# sent. What a user passes is `axis_name=None`, where a wrapper allows it.
ALONE = _Alone()


def reduce(
    tree: Tree,
    axis_name: AxisName,
    *,
    reduction: Reduction = "mean",
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
    dtype: Any = None,
) -> Tree:
    r"""Mean or sum over the replicas of every leaf of a tree.

    For leaf x_i of replica i, with N replicas and weights w_i:

    .. math::

        \text{mean} = \frac{1}{N} \sum_i x_i, \qquad
        \text{weighted mean} = \frac{\sum_i w_i x_i}{\sum_i w_i}

    This is the reduction that `cross_shard` applies to gradients; losses, metrics and
    batch statistics need it too. All leaves of one dtype travel in one all-reduce.
    It runs wherever `axis_name` is bound: `jax.pmap`, `jax.shard_map`, `jax.vmap`.

    Row-sparse leaves (`IndexedSlices` of k rows) are gathered, N k rows, and rows that
    several replicas sent are summed after it: the table itself never travels. An
    all-gather of N k rows costs more than the all-reduce of the dense table once
    N k exceeds about twice the table's number of rows; reduce `slices.to_dense(rows)`
    then.

    Args:
        tree: A tree of arrays, `IndexedSlices` and `None`. Inside
            `jax.shard_map(check_vma=True)` each leaf must vary over `axis_name`.
            The mean of integers and booleans is float32, their sum at least int32.
        axis_name: The mapped axis, or a tuple of them.
        reduction: `"mean"` or `"sum"`.
        weight: This replica's weight (a scalar, not negative), for example its number
            of tokens; makes the mean a weighted one. A replica of weight 0 leaves no
            trace, NaN or not; if all weights are 0 the result is zero.
        group_assignment: A partition of `range(axis_size)` into lists of equal size:
            each replica gets the reduction over its own group.
        dtype: The dtype in which floating leaves travel and are summed. `None`: float32
            for half precision, else the leaf's own.

    Returns:
        A tree of the same structure; floating leaves keep their dtype.

    Raises:
        ValueError: `axis_name` is not bound, or an axis of `jax.vmap` inside
            `jax.shard_map(check_vma=True)`, where JAX has no collective; a leaf does
            not vary over it; a bad `reduction`, `group_assignment` or `weight`.
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
    options: Any = {"reduction": reduction, "weight": weight, "dtype": dtype}
    return reduce_and_sum(
        tree, axis_name, None, group_assignment=group_assignment, **options
    )[0]


def reduce_and_sum(
    tree: Tree,
    axis_name: AxisName,
    also: Any,
    *,
    reduction: Reduction = "mean",
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
    dtype: Any = None,
) -> tuple[Tree, Any, Any]:
    """`reduce`, and sums of a tree of scalars that travel with it: (tree, sums, total).

    The total is the sum of the weights, or the number of replicas.
    """
    check_reduction(reduction)
    wire_dtype = check_sum_dtype(dtype)
    axes = check_axis_name(axis_name)
    size = axis_size(axis_name)
    if weight is not None and reduction == "sum":
        raise ValueError(
            "weight= makes a weighted mean and has no meaning with reduction='sum'; "
            "leave weight out, or pass reduction='mean'."
        )
    groups = None
    if group_assignment is not None:
        check_group_assignment(group_assignment, size)
        groups = _Groups(axes, group_assignment)
    _check_reducible(axes)
    require_local(tree, axis_name)

    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
    arrays = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
    originals = [jnp.asarray(leaves[i]) for i in arrays]
    operands = [_to_wire(x, reduction, wire_dtype) for x in originals]
    divisor: Any = size if groups is None else groups.size
    counted: Any = divisor
    # They come last, and travel as they are.
    scalars, form = jax.tree.flatten(localize(also, axis_name))
    operands += scalars
    last = len(operands) - len(scalars)

    fraction = None
    own = own_weight(weight, axis_name)
    if own is not None:
        if any(jnp.finfo(x.dtype).bits < 32 for x in operands if is_inexact(x.dtype)):
            # Weights such as token counts overflow a half precision sum, so here
            # they are normalised before the gradients travel, in a scalar reduction.
            (total,) = _sum([own], axes, groups)
            counted, fraction = total, own / or_one(total)
            weighed = [weigh(x, fraction) for x in operands[:last]]
            sums, divisor = _sum([*weighed, *operands[last:]], axes, groups), 1
        else:
            weighed = [weigh(x, own) for x in operands[:last]]
            *sums, total = _sum([*weighed, *operands[last:], own], axes, groups)
            counted, divisor = total, or_one(total)
            fraction = own / divisor
    else:
        sums = _sum(operands, axes, groups)
    sums, summed_scalars = sums[:last], sums[last:]

    for i, original, total_value in zip(arrays, originals, sums, strict=True):
        value = total_value
        if reduction == "mean" and not (isinstance(divisor, int) and divisor == 1):
            value = value / jnp.asarray(divisor, value.dtype)
        keeps = is_inexact(original.dtype)
        leaves[i] = value.astype(original.dtype) if keeps else value
    for i, leaf in enumerate(leaves):
        if is_slices(leaf):
            scale = None if reduction == "sum" else fraction
            mean_of = divisor if reduction == "mean" and fraction is None else 1
            values = _to_wire(leaf.values, reduction, wire_dtype)
            rows = IndexedSlices(leaf.indices, values)
            summed = _sum_rows(rows, axes, groups, scale, mean_of)
            keeps = is_inexact(leaf.values.dtype)
            kept = leaf.values.dtype if keeps else values.dtype
            leaves[i] = summed.map_values(lambda v, kept=kept: v.astype(kept))
    return treedef.unflatten(leaves), form.unflatten(summed_scalars), counted


def gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The arrays of all replicas along axis 0, one behind the other, equal on all."""
    axes = check_axis_name(axis_name)
    _check_reducible(axes)
    return _gather(localize(x, axes), axes, None)


def all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Row j of replica i's `x[N, ...]` becomes row i of replica j's result."""
    axes = check_axis_name(axis_name)
    _check_reducible(axes)
    rows = localize(x, axes).reshape(*map(axis_size, axes), *x.shape[1:])
    # One by one, as JAX has none over two axes of vmap; the first is major.
    for place, axis in enumerate(axes):
        rows = lax.all_to_all(rows, axis, place, place, tiled=True)
    return rows.reshape(x.shape)


def scatter_sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The sum of all replicas' `x[N k]`, of which replica i gets numbers i k ... ."""
    axes = check_axis_name(axis_name)
    _check_reducible(axes)
    for axis in axes:
        x = lax.psum_scatter(x, axis, tiled=True)
    return x


def weigh(x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """`weight * x`; zeros where the weight is 0, even of a NaN. `None` counts as 1."""
    if weight is None:
        return x
    # Not by multiplication alone: 0 * NaN is NaN.
    return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))


def own_weight(weight: Any, axis_name: AxisName) -> jax.Array | None:
    """This replica's weight as a checked float that varies over the axis, or `None`."""
    return None if weight is None else localize(_check_weight(weight), axis_name)


def or_one(total: jax.Array) -> jax.Array:
    """A sum of weights to divide by: 1 where it is 0, since so is what is divided."""
    # A NaN stays: it must be seen.
    return jnp.where(total == 0, jnp.ones_like(total), total)


def localize(tree: Tree, axis_name: AxisName) -> Tree:
    """Mark a tree as each replica's own, so that its gradients stay local.

    In `jax.shard_map(check_vma=True)`, the default, autodiff sums the gradient of a
    replicated parameter over the mesh by itself. Parameters that went through
    `localize` vary over `axis_name`, and `jax.grad` gives each replica its own
    gradient, as everywhere else. The values do not change and nothing is sent. In
    `jax.pmap`, `jax.vmap` and under `check_vma=False` it is the identity.

    Args:
        tree: Any tree of arrays, usually the parameters.
        axis_name: The mapped axis, or a tuple of them.

    Returns:
        The same tree, varying over `axis_name`.

    Raises:
        ValueError: `axis_name` is not bound.
        TypeError: `axis_name` is not a str or a tuple of them.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> def loss(w, x):
        ...     return jnp.mean(w * x)
        >>> def local_gradient(w, x):
        ...     return jax.grad(loss)(oxs.localize(w, "data"), x)
        >>> w, x = jnp.float32(2), jnp.array([[1.0], [3.0]])
        >>> jax.vmap(local_gradient, axis_name="data", in_axes=(None, 0))(w, x)
        Array([1., 3.], dtype=float32)
    """
    checked = checked_axes(axis_name)
    if not checked:
        return tree

    def vary(x):
        missing = tuple(a for a in checked if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def localize_where_mapped(tree: Tree, axis_name: AxisName) -> Tree:
    """`localize` where the axis is mapped, the identity outside: for `init`."""
    return localize(tree, axis_name) if is_mapped(axis_name) else tree


def is_mapped(axis_name: AxisName) -> bool:
    """Whether this runs where the axis is mapped."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def vary_like(tree: Tree, reference: Any) -> Tree:
    """The tree, each leaf varying over the axes that its counterpart varies over.

    Branches of a conditional must agree in this, and so must a state from step to
    step; a reduction takes it away. A leaf without a counterpart stays as it is.
    """
    varying = {
        path: varying_axes(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(reference)
    }

    def vary(path, x):
        missing = tuple(sorted(varying.get(path, frozenset()) - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree_util.tree_map_with_path(vary, tree)


def vary_with(tree: Tree, reference: Any) -> Tree:
    """The tree, each leaf varying over all axes that any leaf of another one varies.

    For a state computed from a tree: its scalars may begin as constants, and depend on
    all of the tree a step later.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(reference)))
    return localize(tree, tuple(sorted(axes))) if axes else tree


def axis_size(axis_name: AxisName) -> int:
    """Number of replicas along the mapped axis, or along all axes of a tuple."""
    return math.prod(_bound(lax.axis_size, a) for a in check_axis_name(axis_name))


def axis_index(axis_name: AxisName) -> jax.Array:
    """This replica's number, int32 in `range(axis_size)`; the first axis is major."""
    index = jnp.int32(0)
    for axis in check_axis_name(axis_name):
        own = _bound(lax.axis_index, axis)
        try:
            index = index * axis_size(axis) + own
        except ValueError as error:
            if "not found in mesh" not in str(error):
                raise
            raise ValueError(
                "Lanes of jax.vmap that lie along an Explicit mesh axis, as "
                "jax.make_mesh makes them by default, need the mesh: call this within "
                "`with jax.set_mesh(mesh):`, or make the mesh of the compiler's own "
                f"axes: {_AUTO_MESH}."
            ) from error
    return index


def checked_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Those of the axes over which types say what varies (check_vma=True)."""
    # The index varies by definition: where its type does not say so, no type does.
    return tuple(
        axis
        for axis in check_axis_name(axis_name)
        if axis in varying_axes(_bound(lax.axis_index, axis))
    )


def require_local(
    tree: Any, axis_name: AxisName, what: str = "leaf", mend: str | None = None
) -> None:
    """Refuse a tree in which a leaf is known to be equal on all replicas already.

    Such a leaf has been reduced, by autodiff or by the user, and reducing it again
    would be silently wrong. Types tell only under `check_vma=True`; elsewhere the
    caller is trusted. `mend` ends the message: what the caller's user can do.
    """
    if mend is None:
        mend = (
            f"Either write `params = oxs.localize(params, {axis_name!r})` before "
            "jax.grad, so that gradients stay local, or, if it is reduced on purpose, "
            "say so: cross_shard(..., grads='summed') or cross_shard(..., "
            "grads='averaged')."
        )
    for axis in checked_axes(axis_name):
        for path, leaf in leaves_with_names(tree):
            if leaf is not None and axis not in varying_axes(values_of(leaf)):
                raise ValueError(
                    f"The {what} at {path} does not vary over the mesh axis {axis!r}: "
                    f"its type is {jax.typeof(values_of(leaf))}. Inside "
                    "jax.shard_map(check_vma=True) autodiff has already summed the "
                    "gradient of a replicated parameter, unless this program has "
                    "averaged it before (oxs.reduce, jax.lax.pmean); reducing it again "
                    f"would be wrong. {mend}"
                )


def require_whole_lanes(tree: Any, axis_name: AxisName) -> bool:
    """Whether these are lanes of `jax.vmap` on a mesh of Explicit axes.

    Lanes that are sharded over such axes themselves are refused: JAX has no sum of
    them, and where they meet an array that lies otherwise it speaks of shardings.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    placed = [jax.typeof(x).sharding for x in jax.tree.leaves(tree)]
    if not any(at.mesh.explicit_axes for at in placed):
        return False
    if any(axis in manual for axis in check_axis_name(axis_name)):
        return False
    if any(part is not None for at in placed for part in at.spec):
        raise ValueError(
            "JAX cannot sum over an axis of jax.vmap where each lane is sharded over "
            "Explicit mesh axes, as jax.make_mesh makes them by default. Make the mesh "
            f"of the compiler's own axes: {_AUTO_MESH}."
        )
    return True


def require_varying(tree: Any, reference: Any, axis_name: AxisName, what: str) -> None:
    """Refuse a state that is equal over a mesh axis over which parameters differ.

    A center is equal over the workers' axis only. Where the parameters vary over a
    second manual axis, as shards do, so must the center (check_vma=True).
    """
    own = set(check_axis_name(axis_name))
    varying = {
        path: varying_axes(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(reference)
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        missing = varying.get(path, frozenset()) - varying_axes(leaf) - own
        if missing:
            raise ValueError(
                f"The parameter at {path_name(path)} varies over the mesh axes "
                f"{sorted(missing)}, but the {what} in the state does not. Place the "
                "state as the parameters are: oxs.state_specs(tx, params, "
                "param_specs, worker_axis) with these axes in param_specs, or call "
                "init where the axes are mapped."
            )


def kinds(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Which of the arrays can be joined into one: places, of one dtype and type each.

    Joined arrays get one type: what varies over another mesh axis stays apart. So does
    every array where the compiler lays arrays out over mesh axes of its own
    (`axis_names` of `jax.shard_map`), since joining would gather them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    laid_out = bool(mesh.manual_axes) and mesh.size > manual
    found: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        kind = i if laid_out else (x.dtype, varying_axes(x))
        found.setdefault(kind, []).append(i)
    return list(found.values())


def permute(x: jax.Array, axis_name: AxisName, source: Sequence[int]) -> jax.Array:
    """What replica `source[i]` holds, on replica i; `source` is a permutation.

    It varies over the axis. Under `jax.vmap` over several axes it is a gather.
    """
    axes = check_axis_name(axis_name)
    _check_reducible(axes)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if len(axes) > 1 and not set(axes) <= set(manual):
        everyone = localize(_gather(x[None], axes, None), axes)
        return everyone[jnp.asarray(source, jnp.int32)[axis_index(axes)]]
    pairs = [(sender, receiver) for receiver, sender in enumerate(source)]
    return lax.ppermute(x, axes[0] if len(axes) == 1 else axes, pairs)


def norm_axes(
    tree: Any, axis_name: AxisName, shard_axes: AxisName | None
) -> tuple[str, ...]:
    """Mesh axes over which the squares of a replica's arrays are to be summed.

    `shard_axes` are those along which a replica is itself cut in shards by hand. `None`
    where there may be such axes is refused: a shard that knows its own norm alone
    decides other than its neighbours.
    """
    if shard_axes is not None:
        return check_axis_name(shard_axes) if shard_axes else ()
    own = set(check_axis_name(axis_name))
    others = [a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in own]
    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    unclear = [a for a in others if a in varying or not checked_axes(a)]
    if unclear:
        raise ValueError(
            f"This exchange compares whole arrays of replicas along {axis_name!r}, but "
            f"they may be in shards over the mesh axes {unclear}, too. Pass "
            f"shard_axes={tuple(unclear)!r} if they are, for sums over the shards, or "
            "shard_axes=() if each position there is a replica of its own."
        )
    return ()


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over those mesh axes over which an array may vary."""
    checked = [axis for axis in axes if checked_axes(axis)]
    axes = tuple(a for a in axes if a not in checked or a in varying_axes(x))
    return lax.psum(x, axes) if axes else x


def axes_of_shards(tree: Any, axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes along which the devices lie that hold shards of one worker.

    All manual ones besides `axis_name`; where types say over which axes the arrays of
    the tree vary, those of them.
    """
    own = set(check_axis_name(axis_name))
    axes = [a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in own]
    checked = [axis for axis in axes if checked_axes(axis)]
    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return tuple(axis for axis in axes if axis not in checked or axis in varying)


def everywhere(flag: jax.Array, like: Any, axis_name: AxisName) -> jax.Array:
    """bool[], whether the flag holds on all devices that hold shards of one worker."""
    axes = axes_of_shards(like, axis_name)
    if not axes:
        return flag
    failed = localize((~flag).astype(jnp.int32), axes)
    return lax.psum(failed, axes) == 0


def sum_shards(x: jax.Array, like: jax.Array) -> jax.Array:
    """The sum over the mesh axes over which `x` varies, but `like` does not.

    What is summed up over an array that lies in shards is summed over these (where
    types tell, under check_vma=True).
    """
    axes = tuple(sorted(varying_axes(x) - varying_axes(like)))
    return lax.psum(x, axes) if axes else x


def mean_extra_args(
    extra_args: dict[str, Any],
    names: Sequence[str],
    axis_name: AxisName,
    *,
    weight: jax.Array | float | None = None,
    group_assignment: GroupAssignment | None = None,
) -> dict[str, Any]:
    """Extra arguments for an inner transformation that must see one on all replicas.

    Those that are named are their means over the replicas, as those of gradients are;
    what is known to be equal is left alone: Python's numbers, and under check_vma=True
    what does not vary. There other scalars that do vary are refused.
    """
    axes = checked_axes(axis_name)
    unchecked = set(check_axis_name(axis_name)) - set(axes)

    def may_differ(x: Any) -> bool:
        known = isinstance(x, bool | int | float)
        return not known and bool(unchecked or varying_axes(jnp.asarray(x)) & set(axes))

    def mean(x: Any) -> Any:
        if not may_differ(x):
            return x
        own = localize(jnp.asarray(x), axis_name)
        return reduce(own, axis_name, weight=weight, group_assignment=group_assignment)

    for name in set(extra_args) - set(names):
        for leaf in jax.tree.leaves(extra_args[name]):
            if isinstance(leaf, jax.Array) and leaf.ndim == 0 and not unchecked:
                if varying_axes(leaf) & set(axes):
                    raise ValueError(
                        f"The extra argument {name!r} varies over the mesh axis "
                        f"{axis_name!r}: an optimizer that reads it would make equal "
                        f"replicas drift apart. Pass its mean, oxs.reduce({name}, "
                        f"{axis_name!r}), or name it in reduce_extra_args= of the "
                        "wrapper around that optimizer."
                    )
    named = [name for name in names if extra_args.get(name) is not None]
    return extra_args | {name: jax.tree.map(mean, extra_args[name]) for name in named}


def check_extra_args(names: Any) -> tuple[str, ...]:
    """The names as a tuple; a TypeError for anything but a sequence of names."""
    if not isinstance(names, tuple | list) or not all(
        isinstance(name, str) for name in names
    ):
        raise TypeError(
            "reduce_extra_args must be a tuple of names of extra arguments; got "
            f"{names!r}. Pass for example ('value',), or () for none."
        )
    return tuple(names)


def require_reduced(tree: Any, axis_name: AxisName, grads: str) -> None:
    """Refuse a tree in which a leaf still varies over the axis (check_vma=True)."""
    for axis in checked_axes(axis_name):
        for path, leaf in leaves_with_names(tree):
            if leaf is not None and axis in varying_axes(values_of(leaf)):
                raise ValueError(
                    f"grads={grads!r} says that the gradients have been reduced "
                    f"already, but the gradient at {path} varies over the mesh "
                    f"axis {axis!r}: its type is {jax.typeof(values_of(leaf))}. "
                    f"Make all leaves local with `params = oxs.localize(params, "
                    f"{axis_name!r})` before "
                    "jax.grad and use grads='local', or reduce this one first with "
                    "oxs.reduce."
                )


def check_axis_name(axis_name: Any) -> tuple[str, ...]:
    """The axes as a tuple; a TypeError for anything but a str or a tuple of them."""
    if axis_name is ALONE:
        return ALONE
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    names = isinstance(axes, tuple | list) and all(isinstance(a, str) for a in axes)
    if not names or not axes:
        raise TypeError(
            "axis_name must be the name of a mapped axis, or a tuple of names; "
            f"got {axis_name!r}. Pass for example axis_name='data'."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis_name names an axis twice; got {axis_name!r}.")
    return tuple(axes)


def check_reduction(reduction: Any) -> None:
    """A ValueError for anything but "mean" and "sum"."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}.")


def check_sum_dtype(dtype: Any) -> Any:
    """The dtype, or None; a ValueError for what cannot hold a sum of gradients."""
    if dtype is None:
        return None
    dtype = jnp.dtype(dtype)
    if not is_floating(dtype) or jnp.finfo(dtype).bits < 16:
        raise ValueError(
            "dtype must be a floating dtype of 16 bits or more, since narrower "
            f"sums overflow; got {dtype}. Pass for example jnp.bfloat16."
        )
    return dtype


def check_group_assignment(groups: Any, size: int | None = None) -> None:
    """Refuse what is not a partition of `range(size)` into lists of equal size.

    Without `size` (outside of a mapped context) all is checked but the number of
    replicas.
    """
    rule = "group_assignment must be a partition of range(axis size) into equal groups"
    if not isinstance(groups, list) or not all(isinstance(g, list) for g in groups):
        raise ValueError(
            f"{rule}, given as a list of lists; got {groups!r}. "
            "Pass for example [[0, 1], [2, 3]]."
        )
    members = [member for group in groups for member in group]
    if not members or not all(
        isinstance(m, int) and not isinstance(m, bool) for m in members
    ):
        raise ValueError(
            f"{rule}, and its members integers; got {groups!r}. For one group of all "
            "replicas pass None."
        )
    repeated = sorted({m for m in members if members.count(m) > 1})
    if repeated:
        raise ValueError(
            f"{rule}; got {groups!r}, in which {repeated} stand more than once. "
            "List every replica once."
        )
    if size is not None and sorted(members) != list(range(size)):
        raise ValueError(
            f"{rule}: a permutation of range({size}); got {groups!r}. "
            "List every replica of the axis once."
        )
    if len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"{rule}: the size of each group must be equal; got sizes "
            f"{[len(group) for group in groups]} in {groups!r}."
        )
    if sorted(members) != list(range(len(members))):
        raise ValueError(
            f"{rule}: a permutation of range({len(members)}); got {groups!r}. "
            "List every replica of the axis once."
        )


class _Groups:
    """A checked partition of the replicas, and what a context needs to sum in it."""

    def __init__(self, axes: tuple[str, ...], assignment: GroupAssignment):
        self.assignment = assignment
        self.size = len(assignment[0])
        # own_group[i] is the number of the group that holds replica i.
        self.own_group = [0] * (self.size * len(assignment))
        for number, group in enumerate(assignment):
            for member in group:
                self.own_group[member] = number
        # JAX has collectives of groups over a single manual axis only.
        manual = axes[0] in jax.sharding.get_abstract_mesh().manual_axes
        self.native = len(axes) == 1 and manual


def _bound(function, axis):
    """`function(axis)`, with a telling error where the axis is not mapped."""
    try:
        return function(axis)
    except NameError as error:
        raise ValueError(
            f"No mapped axis is named {axis!r} here. The reduction over replicas, and "
            "so `update`, must run inside jax.shard_map or jax.pmap over a mesh with "
            f"that axis, or inside jax.vmap(..., axis_name={axis!r})."
        ) from error


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which the type of an array says that it varies."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jax.typeof(x).manual_axis_type.varying
    kind = x.manual_axis_type  # None where no axis is mapped
    return frozenset() if kind is None else kind.varying


def _check_reducible(axes: tuple[str, ...]) -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = set(axes) - set(checked_axes(axes))
    if mapped and any(checked_axes(axis) for axis in manual):
        raise ValueError(
            f"JAX has no collective over {sorted(mapped)}, an axis of jax.vmap inside "
            "jax.shard_map(check_vma=True). Pass check_vma=False to jax.shard_map."
        )


def _sum(operands: Sequence[jax.Array], axes, groups: _Groups | None):
    """The sums of all operands over the axes, or over this replica's group."""
    operands = list(operands)
    if not operands or not axes:
        return operands
    if groups is None:
        return _psum(operands, axes)
    if not groups.native:
        return _sum_by_slots(operands, axes, groups)
    if not checked_axes(axes):
        return lax.psum(operands, axes, axis_index_groups=groups.assignment)
    return _sum_by_scatter(operands, axes[0], groups)


def _psum(operands, axes):
    """`lax.psum`, also for lanes of `jax.vmap` that lie on a mesh of Explicit axes."""
    if not require_whole_lanes(operands, axes):
        return lax.psum(operands, axes)
    # There JAX's own psum gives its result the sharding of the axis that it sums over.
    for axis in axes:
        operands = [
            jnp.sum(lax.all_gather(x, axis), 0, dtype=x.dtype) for x in operands
        ]
    return operands


def _sum_by_slots(operands, axes, groups: _Groups):
    """Sums in groups where JAX has none: a slot for each group, of which one is own."""
    own = jnp.asarray(groups.own_group)[axis_index(axes)]
    slots = jnp.arange(len(groups.assignment))

    def place(x):
        mine = (slots == own).reshape((-1,) + (1,) * x.ndim)
        return jnp.where(mine, x[None], jnp.zeros_like(x)[None])

    return [total[own] for total in _psum([place(x) for x in operands], axes)]


def _sum_by_scatter(operands, axis, groups: _Groups):
    """Sums in groups under check_vma=True: a reduce-scatter and an all-gather.

    Together they send as much as the all-reduce that JAX refuses there.
    """
    sums = list(operands)  # An array without elements is its own sum.
    # Joined arrays get one type: what varies over another mesh axis stays apart.
    kinds = [(x.dtype, varying_axes(x)) for x in operands]
    for kind in dict.fromkeys(kinds):
        members = [i for i, x in enumerate(operands) if x.size and kinds[i] == kind]
        if not members:
            continue
        flat = jnp.concatenate([operands[i].reshape(-1) for i in members])
        padded = jnp.pad(flat, (0, -flat.size % groups.size))
        piece = lax.psum_scatter(
            padded, axis, tiled=True, axis_index_groups=groups.assignment
        )
        whole = lax.all_gather(
            piece, axis, tiled=True, axis_index_groups=groups.assignment
        )
        start = 0
        for i in members:
            stop = start + operands[i].size
            sums[i] = whole[start:stop].reshape(operands[i].shape)
            start = stop
    return sums


def _sum_rows(slices, axes, groups: _Groups | None, fraction, divisor):
    """The sum of all replicas' rows: gathered, then equal rows summed."""
    indices, values = slices.indices, slices.values
    if fraction is not None:
        values = weigh(values, fraction)
        # A row of a replica without weight is not a touched row: -1 names no row.
        indices = jnp.where(fraction == 0, jnp.full_like(indices, -1), indices)
    if divisor != 1:
        values = values / jnp.asarray(divisor, values.dtype)
    indices, values = (_gather(x, axes, groups) for x in (indices, values))
    return IndexedSlices(indices, values).sum_duplicates()


def _gather(x: jax.Array, axes, groups: _Groups | None) -> jax.Array:
    """The arrays of all replicas (of the group), one behind the other."""
    everyone = x[None]
    if groups is not None and groups.native:
        everyone = lax.all_gather(
            everyone, axes, tiled=True, axis_index_groups=groups.assignment
        )
    else:
        checked = checked_axes(axes)
        # One by one, as JAX cannot gather over two axes of vmap; the first is major.
        for axis in reversed(axes):
            to = "invarying" if axis in checked else "varying"
            everyone = lax.all_gather(everyone, axis, tiled=True, to=to)
        if groups is not None:
            members = jnp.asarray([groups.assignment[g] for g in groups.own_group])
            everyone = everyone[members[axis_index(axes)]]
    return everyone.reshape((everyone.shape[0] * x.shape[0], *x.shape[1:]))


def _to_wire(x: jax.Array, reduction, dtype) -> jax.Array:
    if is_floating(x.dtype):
        return x.astype(dtype or at_least_float32(x.dtype))
    if is_inexact(x.dtype):
        return x
    if reduction == "mean":
        return x.astype(jnp.float32)
    narrow = x.dtype.itemsize < 4
    return x.astype(jnp.int32) if narrow else x


def _check_weight(weight) -> jax.Array:
    if jnp.shape(weight) != ():
        raise ValueError(
            "weight must be a scalar per replica; got an array of shape "
            f"{jnp.shape(weight)}. Pass for example this replica's number of tokens, "
            "`weights.sum()`."
        )
    concrete = not isinstance(weight, jax.core.Tracer)
    if concrete and not 0 <= float(weight) < math.inf:
        raise ValueError(f"weight must be finite and not negative; got {weight}.")
    array = jnp.asarray(weight)
    keeps = array.dtype in (jnp.float32, jnp.float64)
    return array if keeps else array.astype(jnp.float32)
