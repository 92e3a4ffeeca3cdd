# SPDX-License-Identifier: Apache-2.0
"""Gradients reduced over all replicas, or over groups of them, in every step."""

from typing import Any, Literal, get_args

import jax
import optax

from optx_sync.checks import check_grads, check_inner, fill_missing
from optx_sync.collectives import (
    AxisName,
    GroupAssignment,
    Reduction,
    axis_size,
    check_axis_name,
    check_group_assignment,
    check_reduce_dtype,
    check_reduction,
    localize_where_mapped,
    reduce,
    require_reduced,
    vary_like,
)
from optx_sync.indexed_slices import IndexedSlices

Grads = Literal["local", "summed", "averaged"]
_CALL = (
    "oxs.cross_shard(optax.adam(1e-3), 'data'), or as a link of a chain "
    "oxs.cross_shard(axis_name='data')"
)


def cross_shard(
    inner: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
    *,
    reduction: Reduction = "mean",
    group_assignment: GroupAssignment | None = None,
    grads: Grads = "local",
    reduce_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Reduce the gradients of all replicas in every step, then apply `inner`.

    For the gradient g_i of replica i, with N replicas (of the group) and weights w_i:

        mean: g = sum_i g_i / N      weighted: g = sum_i w_i g_i / sum_i w_i
        sum:  g = sum_i g_i          updates = inner(g)

    The original is TensorFlow's `CrossShardOptimizer`. It scales the *loss* by 1/N for
    a mean; here the gradient is scaled, so that what comes before in a chain, such as
    clipping per replica, sees the replica's own gradient.

    Without `inner` it is a link of a chain: `optax.chain(per_replica_clip,
    oxs.cross_shard(axis_name="data"), optax.adam(1e-3))`.

    The extra argument `weight` of `update` (a scalar per replica, for example its
    number of tokens) makes the mean a weighted one, over the group's weights where
    there are groups. A replica of weight 0 leaves no trace, NaN or not; if all weights
    are 0 the gradient is zero.

    Row-sparse gradients (`IndexedSlices`) travel as rows, see `reduce`. For a `None`
    gradient `inner` gets what Optax does with `None`, and the update is zeros.

    A guard that decides by one replica's own values, such as
    `optax.apply_if_finite(cross_shard(...))`, hangs: one replica enters the
    collective and the others wait for it. Put it inside:
    `cross_shard(optax.apply_if_finite(...))` sees the same gradient everywhere.

    Args:
        inner: The transformation that gets the reduced gradient.
        axis_name: The mapped axis, or a tuple of them.
        reduction: `"mean"` or `"sum"`.
        group_assignment: A partition of `range(axis_size)` into lists of equal size,
            for example `[[0, 1], [2, 3]]`; each group then trains on its own. Inside
            `jax.shard_map(check_vma=True)` the groups' parameters differ: call `init`
            there, where the axis is known, or on parameters that vary over it.
        grads: What `update` is given. `"local"`: each replica's own gradient.
            `"summed"`: gradients that autodiff has summed over the axis already, as
            `jax.grad` of a replicated parameter does in
            `jax.shard_map(check_vma=True)`. `"averaged"`: the mean, for example of
            `jax.grad` of a loss under `lax.pmean`. The latter two communicate nothing.
        reduce_dtype: The dtype on the wire; `None`: float32 for half precision
            gradients, else their own.

    Returns:
        A transformation whose `init` gives `inner`'s state, and whose `update` must
        run where `axis_name` is mapped.

    Raises:
        TypeError: A missing axis name, an `inner` that is no transformation, integer
            gradients.
        ValueError: A bad `reduction`, `grads`, `group_assignment` or `reduce_dtype`;
            at the call, a gradient that has been reduced already, a weight that has no
            meaning, an axis that is not mapped, gradients that do not match the
            parameters.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.cross_shard(optax.sgd(0.5), "data")
        >>> params = jnp.zeros(2)
        >>> state = tx.init(params)
        >>> def step(gradient):
        ...     updates, _ = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates)
        >>> jax.vmap(step, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
        Array([[-1., -2.],
               [-1., -2.]], dtype=float32)

    References:
        TensorFlow 1.15, `tf.compat.v1.tpu.CrossShardOptimizer`.
    """
    if inner is not None:
        inner = check_inner(inner, _CALL)
    if axis_name is None:
        raise TypeError(f"cross_shard needs an axis name. Write {_CALL}.")
    check_axis_name(axis_name)
    check_reduction(reduction)
    check_reduce_dtype(reduce_dtype)
    if grads not in get_args(Grads):
        raise ValueError(
            f"grads must be one of 'local', 'summed' and 'averaged'; got {grads!r}."
        )
    if group_assignment is not None:
        check_group_assignment(group_assignment)
        if grads != "local":
            raise ValueError(
                "group_assignment needs each replica's own gradient, but "
                f"grads={grads!r} says that they are reduced over the whole axis. Use "
                "grads='local', with oxs.localize(params, axis_name) before jax.grad."
            )

    def reduced(updates, weight):
        if grads == "local":
            return reduce(
                updates,
                axis_name,
                reduction=reduction,
                weight=weight,
                group_assignment=group_assignment,
                reduce_dtype=reduce_dtype,
            )
        if weight is not None:
            raise ValueError(
                f"weight needs each replica's own gradient, but grads={grads!r} says "
                "that they are reduced already. Use grads='local', with "
                "oxs.localize(params, axis_name) before jax.grad."
            )
        require_reduced(updates, axis_name, grads)
        size = axis_size(axis_name)
        if grads == "summed" and reduction == "mean":
            return _map_values(lambda g: g / size, updates)
        if grads == "averaged" and reduction == "sum":
            return _map_values(lambda g: g * size, updates)
        return updates

    def init(params):
        if inner is None:
            return optax.EmptyState()
        if group_assignment is None:
            return inner.init(params)
        # The groups' states will differ, so all of it varies from the start.
        params = localize_where_mapped(params, axis_name)
        return localize_where_mapped(inner.init(params), axis_name)

    def update(updates, state, params=None, *, weight=None, **extra_args):
        check_grads(updates, params)
        updates = reduced(updates, weight)
        if inner is None:
            return updates, state
        updates, new_state = inner.update(updates, state, params, **extra_args)
        return fill_missing(updates, params), vary_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _map_values(function, grads):
    def apply(leaf):
        sparse = isinstance(leaf, IndexedSlices)
        return leaf.map_values(function) if sparse else function(leaf)

    return jax.tree.map(apply, grads, is_leaf=lambda x: isinstance(x, IndexedSlices))
