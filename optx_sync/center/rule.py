# SPDX-License-Identifier: Apache-2.0
"""One mechanism for workers that share a center: `CenterRule` and `center_variable`.

Every worker trains parameters of its own with `inner`. Every `communication_period`
steps they meet: each worker contributes something, the center absorbs the sum of the
contributions, and each worker takes something back. A `CenterRule` says what. With x
the worker's parameters, c the center now, s the center that the worker took last
(equal to c in lockstep, where the worker takes the center whole) and N workers:

    rule        contributes            the center absorbs       the worker takes
    elastic     a (x - c)              c + sum                  x - a (x - c)
    agn         accumulated / steps    a step of `outer`        the center
    local_sgd   (x - s) / N            c + sum                  the center
    diloco      (s - x) / N            a step of `outer`        the center

The functions at the end of this file are the pieces: lockstep, simulation and the
asynchronous runtime call the same ones.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from optx_sync.checks import check_grads, check_inner, fill_missing
from optx_sync.collectives import (
    AxisName,
    axis_size,
    check_axis_name,
    localize,
    localize_where_mapped,
    reduce,
    require_local,
    vary_like,
)
from optx_sync.indexed_slices import IndexedSlices, at_least_float32

InnerState: TypeAlias = Literal["keep", "average", "reset"]
Period: TypeAlias = int | optax.Schedule


class Own(NamedTuple):
    """What a worker has of one array when it meets the center (center's dtype)."""

    params: Any  # x: its parameters, after the step
    taken: Any  # s: the center that it took last
    accumulated: Any  # the sum of its gradients or updates since then, or None


class Round(NamedTuple):
    """What a rule may know of a round besides the arrays."""

    num_workers: int
    communication_period: int | None  # None where the period is a schedule
    steps: Any  # int32[], the worker's steps since it last met the center


class CenterRule(NamedTuple):
    """What workers and the center exchange, as formulas for one array.

    Attributes:
        contribute: `(own: Own, center, at: Round) -> array`.
        outer: The transformation that absorbs the contributions as a gradient, in one
            step on the center. `None`: they are added to the center.
        take: `(x, before, after, at) -> array`, the worker's new parameters from its
            own and the center before and after the round. `None`: it takes the center
            after the round.
        mean_over: `None`: contributions are summed. `"pushed"`: divided by the number
            that came together, all in lockstep, one when asynchronous. `"workers"`:
            divided by the number of workers of the round in lockstep, and by N when
            asynchronous.
        accumulate: What a worker sums up between rounds: `"gradients"`, `"updates"` of
            `inner`, or `None`.
        penalty: `(own, at) -> array` added to the gradient in every step, or `None`.
        keeps_taken: Whether a rule with `take` reads `own.taken`: the worker then keeps
            a copy of the center as it was before its last round.
        num_workers: The number of workers that the rule was made for, checked against
            the axis; `None`: any.
        check: `(communication_period) -> None`, raises for a period that the rule
            cannot work with; `None`: any.

    Example:
        The skeleton to copy, local SGD with a slower center:

        >>> import optax
        >>> import optx_sync as oxs
        >>> half_way = oxs.CenterRule(
        ...     contribute=lambda own, center, at: 0.5 * (own.params - own.taken),
        ...     mean_over="workers",
        ... )
        >>> tx = oxs.center_variable(optax.sgd(0.1), half_way, "workers")
    """

    contribute: Callable[[Own, Any, Round], Any]
    outer: optax.GradientTransformation | None = None
    take: Callable[[Any, Any, Any, Round], Any] | None = None
    mean_over: Literal["pushed", "workers"] | None = None
    accumulate: Literal["gradients", "updates"] | None = None
    penalty: Callable[[Own, Round], Any] | None = None
    keeps_taken: bool = False
    num_workers: int | None = None
    check: Callable[[Period], None] | None = None


class CenterState(NamedTuple):
    """State of `center_variable`; `shared_fields` are equal on all workers."""

    local_step: jax.Array  # int32[], steps of a worker
    steps_since_round: jax.Array  # int32[]
    global_step: jax.Array  # int32[], rounds
    center: optax.Params  # like the parameters, float32 for half precision
    taken: Any  # the center before the last round, or ()
    outer: optax.OptState  # state of the rule's outer transformation, or ()
    accumulated: Any  # what the worker summed up since the last round, or ()
    broken: Any  # bool[], it has not been finite since the last round, or ()
    dropped: jax.Array  # int32[], rounds that left this worker out
    inner: optax.OptState

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """The fields that are equal on all workers."""
        return (
            "local_step",
            "steps_since_round",
            "global_step",
            "center",
            "taken",
            "outer",
        )


def center_variable(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    axis_name: AxisName,
    *,
    communication_period: Period = 10,
    inner_state: InnerState = "keep",
    drop_nonfinite: bool = False,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Workers that train on their own and meet at a center every few steps.

    In every step `inner` turns the worker's own gradient into its update. When the
    steps since the last round reach `communication_period`, the workers meet as `rule`
    says: one all-reduce of the size of the parameters, inside a conditional, so that
    the other steps communicate nothing.

    It computes `params + updates`, so it stands last in a chain, and `update` needs
    `params`. The gradients must be each worker's own: inside
    `jax.shard_map(check_vma=True)` parameters that lie along the worker axis give
    such gradients by themselves.

    All workers start from equal parameters: `oxs.stack(params, n)`, and
    `oxs.stack(tx.init(params), n, oxs.state_axes(tx, params))` for the state. Under
    `jax.vmap` counters that are stacked too give the same numbers, but communicate in
    every step.

    Row-sparse gradients are accepted and `inner` sees them as they are; updates are
    dense, since what is exchanged is whole tables.

    Args:
        inner: The worker's own optimizer.
        rule: What is exchanged.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step (0-based). 1 during a warm-up gives post-local SGD.
        inner_state: What happens to `inner`'s state in a round: `"keep"` it,
            `"average"` its floating leaves over the workers, or `"reset"` it to that of
            a first step (which restarts schedules too).
        drop_nonfinite: A worker whose step would bring a NaN or infinity into its
            parameters does not make it: it stands still until the next round, is left
            out of that, and takes the center and a fresh inner state (what is added to
            a NaN is NaN, so it could not come back later). If no worker is left the
            center stays.
        accumulator_dtype: The dtype of the center and of accumulators. `None`: float32
            for half precision parameters, else their own.

    Returns:
        A transformation with a `CenterState`. Updates of half precision parameters are
        float32: `optax.apply_updates` then lands exactly on the center.

    Raises:
        TypeError: An `inner` that is no transformation, a `rule` that is no
            `CenterRule`, a bad axis name, parameters that are not floating.
        ValueError: A bad period or keyword; at the call, missing `params`, gradients
            that autodiff has summed already or that do not match the parameters, an
            axis that is not mapped or not of the rule's `num_workers`.
    """
    call = "oxs.center_variable(optax.sgd(0.1), oxs.local_sgd_rule(), 'workers')"
    inner = check_inner(inner, call)
    if not isinstance(rule, CenterRule):
        raise TypeError(
            f"rule must be a CenterRule; got {rule!r}. Write for example {call}."
        )
    check_axis_name(axis_name)
    check_period(communication_period)
    if rule.check is not None:
        rule.check(communication_period)
    if inner_state not in get_args(InnerState):
        raise ValueError(
            "inner_state must be one of 'keep', 'average' and 'reset'; got "
            f"{inner_state!r}."
        )
    dtype = None if accumulator_dtype is None else jnp.dtype(accumulator_dtype)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"accumulator_dtype must be a floating dtype; got {dtype}. Pass for "
            "example jnp.float32."
        )
    static_period = None if callable(communication_period) else communication_period

    def init(params):
        center = start_center(params, dtype)

        def own(tree):
            # A worker's own fields vary over the axis from the start.
            return localize_where_mapped(tree, axis_name)

        return CenterState(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            center=center,
            taken=start_center(params, dtype) if rule.keeps_taken else (),
            outer=() if rule.outer is None else rule.outer.init(center),
            accumulated=own(start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if drop_nonfinite else (),
            dropped=own(jnp.zeros((), jnp.int32)),
            inner=own(inner.init(params)),
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "A center exchange needs the parameters; got params=None. Call "
                "update(grads, state, params)."
            )
        check_grads(updates, params)
        require_local(updates, axis_name, "gradient")
        workers = axis_size(axis_name)
        if rule.num_workers not in (None, workers):
            raise ValueError(
                f"num_workers={rule.num_workers}, but the axis {axis_name!r} has "
                f"{workers} workers. Leave num_workers out, or make them equal."
            )
        steps = state.steps_since_round + 1
        at = Round(workers, static_period, steps)
        taken = state.taken if rule.keeps_taken else state.center
        updates, inner_new, accumulated = local_step(
            inner, rule, at, updates, state.inner, params, taken, state.accumulated,
            **extra_args,
        )  # fmt: skip
        # A leaf may have lost its type inside `inner` (a constant, a fresh counter).
        updates, inner_new, accumulated = localize(
            (updates, inner_new, accumulated), axis_name
        )
        # A hard pull widens the updates of half precision, so a quiet step does too.
        updates = jax.tree.map(
            lambda u, p: u.astype(at_least_float32(p.dtype)), updates, params
        )
        broken = state.broken
        if drop_nonfinite:
            broken |= ~is_finite(worker_params(params, updates, state.center))
            updates = _where(broken, 0, updates)
        due = is_due(communication_period, steps, state.local_step)

        def exchange(updates, moved):
            center, taken, outer, accumulated, dropped, inner_new = moved
            x = worker_params(params, updates, center)
            own = own_of(rule, x, taken if rule.keeps_taken else center, accumulated)
            contribution = contributions(rule, own, center, at)
            if drop_nonfinite:
                finite = ~broken & is_finite(contribution)
                contribution = _where(~finite, 0, contribution)
                count = localize(finite.astype(jnp.int32), axis_name)
                total, pushed = _sum((contribution, count), axis_name)
            else:
                finite, pushed = jnp.bool_(True), workers
                total = _sum(contribution, axis_name)
            if rule.mean_over is not None:
                total = divide(total, jnp.maximum(pushed, 1))
            new_center, new_outer = absorb(rule, center, outer, total)
            if drop_nonfinite:
                new_center, new_outer = _where(
                    pushed > 0, (new_center, new_outer), (center, outer)
                )
            new_x = take(rule, x, center, new_center, at)
            if drop_nonfinite:
                new_x = _where(finite, new_x, new_center)
            landed = jax.tree.map(lambda x, p: x.astype(p.dtype), new_x, params)
            if inner_state == "average":
                weight = finite.astype(jnp.float32) if drop_nonfinite else None
                inner_new = _average(inner_new, axis_name, weight)
            elif inner_state == "reset":
                inner_new = inner.init(landed)
            if drop_nonfinite:
                inner_new = _where(finite, inner_new, inner.init(landed))
                dropped = dropped + (~finite).astype(jnp.int32)
            return localize(landing(params, new_x), axis_name), (
                new_center,
                center if rule.keeps_taken else (),
                new_outer,
                jax.tree.map(jnp.zeros_like, accumulated),
                dropped,
                inner_new,
            )

        operands = (
            updates,
            (
                state.center,
                state.taken,
                state.outer,
                accumulated,
                state.dropped,
                inner_new,
            ),
        )
        updates, moved = jax.lax.cond(
            due,
            lambda *operands: vary_like(exchange(*operands), operands),
            lambda *operands: operands,
            *operands,
        )
        center, taken, outer, accumulated, dropped, inner_new = moved
        rounds = due.astype(jnp.int32)
        return updates, CenterState(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            global_step=state.global_step + rounds,
            center=center,
            taken=taken,
            outer=outer,
            accumulated=accumulated,
            broken=broken & ~due if drop_nonfinite else (),
            dropped=dropped,
            inner=inner_new,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def check_period(communication_period: Any) -> None:
    """A ValueError or TypeError for what is no int >= 1 and no schedule."""
    if callable(communication_period):
        return
    if isinstance(communication_period, bool) or not isinstance(
        communication_period, int
    ):
        raise TypeError(
            "communication_period must be an int or a schedule; got "
            f"{communication_period!r} of type {type(communication_period).__name__}. "
            "It is static: pass for example 10."
        )
    if communication_period < 1:
        raise ValueError(
            f"communication_period must be at least 1; got {communication_period}."
        )


def is_due(communication_period: Period, steps: Any, local_step: jax.Array) -> Any:
    """Whether a worker that made so many steps since its last round meets: bool[]."""
    if callable(communication_period):
        # Schedules may give floats; the counter is exact in float32 up to 2^24.
        period = jnp.asarray(communication_period(local_step), jnp.float32)
        return jnp.asarray(steps, jnp.float32) >= period
    return steps >= communication_period


def start_center(params: Any, dtype: Any = None) -> Any:
    """A copy of the parameters, at least float32 unless a dtype is given.

    The copy shares no buffer with the parameters, so that both can be donated.
    """

    def copy(path, param):
        if not hasattr(param, "dtype"):
            raise TypeError(
                f"The parameter at {jax.tree_util.keystr(path)} is {param!r} of type "
                f"{type(param).__name__}; workers exchange arrays. Pass for example "
                f"jnp.asarray({param!r})."
            )
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            raise TypeError(
                f"The parameter at {jax.tree_util.keystr(path)} has dtype "
                f"{param.dtype}; workers exchange floating parameters only. Leave it "
                "out with optax.masked."
            )
        wide = dtype or at_least_float32(param.dtype)
        if isinstance(param, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(param.shape, wide)
        return jnp.array(param, dtype=wide, copy=True)

    return jax.tree_util.tree_map_with_path(copy, params)


def start_accumulated(rule: CenterRule, center: Any) -> Any:
    """Zeros for what a worker sums up between rounds, or () if it does not."""
    return () if rule.accumulate is None else jax.tree.map(jnp.zeros_like, center)


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
            return _round(total, grad.dtype).astype(grad.dtype)

        grads = jax.tree.map(penalised, grads, params, taken, is_leaf=_is_grad)
    updates, inner_state = inner.update(grads, inner_state, params, **extra_args)
    updates = jax.tree.map(
        _dense, fill_missing(updates, params), params, is_leaf=_is_grad
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
            lambda value, total: add(total, value), added, accumulated, is_leaf=_is_grad
        )
    return updates, inner_state, accumulated


def worker_params(params: Any, updates: Any, center: Any) -> Any:
    """The worker's parameters after its step, in the center's dtype."""

    def moved(param, update, center):
        wide = param.astype(update.dtype) + update
        return _round(wide, param.dtype).astype(center.dtype)

    return jax.tree.map(moved, params, updates, center)


def own_of(rule: CenterRule, params: Any, taken: Any, accumulated: Any) -> Any:
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
    rule: CenterRule, center: Any, outer: optax.OptState, total: Any
) -> tuple[Any, optax.OptState]:
    """The center after the sum or mean of contributions: (center, outer state)."""
    if rule.outer is None:
        return jax.tree.map(lambda c, t: c + t.astype(c.dtype), center, total), outer
    updates, outer = rule.outer.update(total, outer, center)
    return optax.apply_updates(center, updates), outer


def take(rule: CenterRule, params: Any, before: Any, after: Any, at: Round) -> Any:
    """The worker's parameters after a round, in the center's dtype."""
    if rule.take is None:
        return after
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
        rounded = _round(target.astype(wide), param.dtype)
        return rounded - param.astype(wide)

    return jax.tree.map(difference, params, target)


def is_finite(tree: Any) -> jax.Array:
    """bool[], whether no leaf holds a NaN or infinity."""
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree):
        finite = finite & jnp.all(jnp.isfinite(leaf))
    return finite


def _sum(tree, axis_name):
    return reduce(localize(tree, axis_name), axis_name, reduction="sum")


def _average(state, axis_name, weight):
    """The mean of the floating leaves of the workers' inner states."""
    leaves, treedef = jax.tree.flatten(state)
    floating = [i for i, x in enumerate(leaves) if _is_floating(x)]
    means = reduce([leaves[i] for i in floating], axis_name, weight=weight)
    for i, mean in zip(floating, means, strict=True):
        leaves[i] = mean
    return treedef.unflatten(leaves)


def _where(flag, tree, other):
    """`tree` (or 0) where the flag holds, else `other`."""
    if isinstance(tree, int):
        tree = jax.tree.map(jnp.zeros_like, other)
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), tree, other)


def _dense(update, param):
    if isinstance(update, IndexedSlices):
        return update.to_dense(param.shape[0])
    return update


def _round(x, dtype):
    """`x` rounded to a narrower dtype, in its own.

    Not by two casts: XLA may drop such a pair (excess precision).
    """
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return rounded
    # reduce_precision flushes what is subnormal in the narrower dtype to zero.
    smallest = float(info.smallest_subnormal)
    steps = jax.lax.round(x / smallest, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < float(info.tiny), steps * smallest, rounded)


def _is_floating(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_grad(x) -> bool:
    return x is None or isinstance(x, IndexedSlices)


def _is_own(x) -> bool:
    return isinstance(x, Own)
