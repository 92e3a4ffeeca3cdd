# SPDX-License-Identifier: Apache-2.0
"""The pieces of a round: what lockstep, simulation and the runtime all call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.rule import CenterRule, Own, Period, Round
from optx_sync.checks import check_grads, check_one_worker, fill_missing
from optx_sync.collectives import (
    AxisName,
    axis_size,
    require_local,
    require_varying,
)
from optx_sync.rows.slices import IndexedSlices
from optx_sync.trees import (
    Tree,
    accumulator_dtype,
    add_updates,
    at_least_float32,
    cast_like,
    explains_inner,
    is_gradient_leaf,
    is_inexact,
    path_name,
    round_to,
    zeros_like,
)


def check_step(
    grads: Any, state: Any, params: Any, axis_name: AxisName, *, in_pieces: bool = False
) -> int:
    """Refuse what does not fit a step of a worker; the number of workers.

    `state` has the fields `local_step` and `center`, which may lie in pieces.
    """
    check_grads(grads, params)
    require_local(
        grads,
        axis_name,
        "gradient",
        "A worker has parameters of its own: lay them along the worker axis, "
        f"`oxs.stack(params, n)` with in_specs=P({axis_name!r}), or start with "
        "oxs.start_workers and map the step with oxs.map_workers.",
    )
    require_varying(state.center, params, axis_name, "center")
    center = () if in_pieces else state.center
    check_one_worker(state.local_step, center, params)
    return axis_size(axis_name)


def holds_center(state: Any) -> bool:
    """Whether the state of a center rule or of gossip stands anywhere in a state."""

    def has_center(x):
        return hasattr(type(x), "center_params")

    return any(map(has_center, jax.tree.leaves(state, is_leaf=has_center)))


def is_due(
    communication_period: Period, steps: Any, local_step: jax.Array | int
) -> Any:
    """Whether a worker meets the center in this step: bool[].

    Args:
        communication_period: Steps between rounds. A schedule is read at the step in
            which the period began: read at the current one, a period that grows faster
            than the steps pass would never be reached.
        steps: int32[], its steps since its last round, this one included.
        local_step: int32[], its steps before this one.
    """
    if not callable(communication_period):
        return steps >= communication_period
    begin = local_step - (steps - 1)
    period = jnp.asarray(communication_period(begin))
    if period.ndim:
        raise ValueError(
            "communication_period must be a schedule of scalars; it returned an array "
            f"of shape {period.shape}."
        )
    # Schedules may give floats; the counter is exact in float32 up to 2^24.
    return jnp.asarray(steps, jnp.float32) >= period.astype(jnp.float32)


def start_center(params: Tree, dtype: Any = None) -> Tree:
    """A copy of the parameters, at least float32 unless a dtype is given.

    The copy shares no buffer with the parameters, so that both can be donated.
    """

    def copy(path, param):
        if not hasattr(param, "dtype"):
            raise TypeError(
                f"The parameter at {path_name(path)} is {param!r} of type "
                f"{type(param).__name__}; workers exchange arrays. Pass for example "
                f"jnp.asarray({param!r})."
            )
        if not is_inexact(param.dtype):
            raise TypeError(
                f"The parameter at {path_name(path)} has dtype "
                f"{param.dtype}; workers exchange floating parameters only. Leave it "
                "out with optax.masked."
            )
        wide = accumulator_dtype(param.dtype, dtype)
        if isinstance(param, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(param.shape, wide)
        return jnp.array(param, dtype=wide, copy=True)

    return jax.tree_util.tree_map_with_path(copy, params)


def start_accumulated(rule: CenterRule, center: Tree) -> Tree:
    """Zeros for what a worker sums up between rounds, or () if it does not."""
    return () if rule.accumulate is None else zeros_like(center)


def local_step(
    inner: optax.GradientTransformationExtraArgs,
    rule: CenterRule,
    at: Round,
    grads: Any,
    inner_state: Any,
    params: Any,
    taken: Any,
    accumulated: Any,
    **extra_args: Any,
) -> tuple[Any, Any, Any]:
    """One step of a worker alone: (dense updates, inner state, accumulated)."""
    if rule.penalty is not None:
        penalty = rule.penalty

        def penalised(grad, param, taken):
            if grad is None:
                return None
            pull = penalty(Own(param.astype(taken.dtype), taken, None), at)
            grad = _dense(grad, param)
            wide = at_least_float32(grad.dtype)
            total = grad.astype(wide) + pull.astype(wide)
            return round_to(total, grad.dtype).astype(grad.dtype)

        grads = jax.tree.map(penalised, grads, params, taken, is_leaf=is_gradient_leaf)
    with explains_inner(grads):
        updates, new_state = inner.update(grads, inner_state, params, **extra_args)
    inner_state = cast_like(new_state, inner_state)
    updates = jax.tree.map(
        _dense, fill_missing(updates, params), params, is_leaf=is_gradient_leaf
    )
    if rule.accumulate is not None:
        added = grads if rule.accumulate == "gradients" else updates

        def add(total, value):
            if value is None:
                return total
            if isinstance(value, IndexedSlices):
                return total + value
            return total + value.astype(total.dtype)

        # The total comes second so that a `None` or row-sparse leaf is one leaf.
        accumulated = jax.tree.map(
            lambda value, total: add(total, value),
            added,
            accumulated,
            is_leaf=is_gradient_leaf,
        )
    return updates, inner_state, accumulated


def as_center(params: Tree, center: Tree) -> Tree:
    """Parameters in the center's dtypes, as their own dtypes round them."""

    def widen(param, center):
        # Where the cast that rounded them stands beside this one, XLA may drop both.
        wide = at_least_float32(param.dtype)
        return round_to(param.astype(wide), param.dtype).astype(center.dtype)

    return jax.tree.map(widen, params, center)


def worker_params(params: Tree, updates: Tree, center: Tree) -> Tree:
    """The worker's parameters after its step, in the center's dtypes."""
    return as_center(add_updates(params, updates), center)


def own_of(rule: CenterRule, params: Tree, taken: Tree, accumulated: Tree) -> Tree:
    """A tree of `Own`, one for each array."""
    if rule.accumulate is None:
        return jax.tree.map(lambda x, s: Own(x, s, None), params, taken)
    return jax.tree.map(Own, params, taken, accumulated)


def contributions(rule: CenterRule, own: Any, center: Any, at: Round) -> Any:
    """What one worker brings to a round, not yet divided."""
    return jax.tree.map(
        lambda own, center: rule.contribute(own, center, at),
        own,
        center,
        is_leaf=_is_own,
    )


def absorb(
    rule: CenterRule,
    center: Any,
    outer: optax.OptState,
    total: Any,
    /,
    **extra_args: Any,
) -> tuple[Any, optax.OptState]:
    """The center after the sum or mean of contributions: (center, outer state)."""
    if rule.outer is None:
        return jax.tree.map(lambda c, t: c + t.astype(c.dtype), center, total), outer
    outer_tx = optax.with_extra_args_support(rule.outer)
    updates, outer = outer_tx.update(total, outer, center, **extra_args)
    return optax.apply_updates(center, updates), outer


def weigh_alone(rule: CenterRule, total: Any, at: Round) -> Any:
    """The contribution of a worker that comes alone, as much of it as `weigh` says."""
    if rule.weigh is None:
        return total
    # What a user writes of integers and numbers is a float.
    with jax.numpy_dtype_promotion("standard"):
        factor = jnp.asarray(rule.weigh(at))
    if factor.ndim:
        raise ValueError(
            "weigh must return a scalar, of which a contribution is multiplied; got an "
            f"array of shape {factor.shape}."
        )
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), total)


def take(
    rule: CenterRule,
    params: Any,
    before: Any,
    after: Any,
    at: Round,
    keep_local: Any = 0,
) -> Any:
    """The worker's parameters after a round, in the center's dtype.

    `keep_local` is the share of its own that stays where the rule takes the center.
    """
    if rule.take is None:
        if isinstance(keep_local, int | float) and keep_local == 0:
            return after

        def mix(x, c):
            own = jnp.asarray(keep_local, c.dtype)
            return own * x + (1 - own) * c

        return jax.tree.map(mix, params, after)
    formula = rule.take
    return jax.tree.map(
        lambda x, before, after: formula(x, before, after, at), params, before, after
    )


def divide(total: Any, count: jax.Array | int) -> Any:
    """A tree divided by a count, in its own dtypes."""
    return jax.tree.map(lambda x: x / jnp.asarray(count, x.dtype), total)


def landing(params: Any, target: Any) -> Any:
    """Updates that bring parameters onto a target exactly, once it is rounded.

    The target is rounded to the parameter's dtype first and the difference is taken
    wide: `optax.apply_updates` adds wide and casts back, so half precision parameters
    land on the same bits wherever they came from.
    """

    def difference(param, target):
        wide = at_least_float32(param.dtype)
        rounded = round_to(target.astype(wide), param.dtype)
        return rounded - param.astype(wide)

    return jax.tree.map(difference, params, target)


def landing_update(apply: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Optax's `update` of a wrapper whose `apply` gives new parameters."""

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "Workers exchange parameters; got params=None. Call update(grads, "
                "state, params)."
            )
        new_params, state = apply(updates, state, params, **extra_args)
        return landing(params, new_params), state

    return update


def _dense(update: Any, param: jax.Array) -> Any:
    if isinstance(update, IndexedSlices):
        return update.to_dense(param.shape[0])
    return update


def _is_own(x: Any) -> bool:
    return isinstance(x, Own)
