# SPDX-License-Identifier: Apache-2.0
"""What one worker does (walk, bring, take), and how its center absorbs what it brings.

Pure functions of a worker and a center. Lockstep, simulation, gossip and the runtime
call them, and add what is their own: collectives, the order of events, messages.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optx_sync.center.contract import CenterRule, Own, Period, Round, declared
from optx_sync.core.checks import explains_inner, fill_missing
from optx_sync.core.slices import IndexedSlices
from optx_sync.core.trees import (
    Tree,
    accumulator_dtype,
    add_updates,
    at_least_float32,
    cast_like,
    is_gradient_leaf,
    is_inexact,
    is_nothing,
    path_name,
    round_to,
    where,
    zeros_like,
)

GradientLeaf: TypeAlias = jax.Array | IndexedSlices | None


class Worker(NamedTuple):
    """What one worker holds."""

    params: Tree  # x, in their own dtypes
    inner: optax.OptState  # state of its optimizer
    # s, the center that it took last, or () where that is the current one. For a rule
    # with `take`: the center as it was before the worker's last round.
    taken: Tree
    accumulated: Tree  # what it summed up since its last round, or ()


class Center(NamedTuple):
    """What the workers share."""

    value: Tree  # c, like the parameters, at least float32
    outer: optax.OptState  # state of the rule's outer transformation, or ()


def walk(
    inner: optax.GradientTransformationExtraArgs,
    rule: CenterRule,
    worker: Worker,
    center: Tree,
    grads: Tree,
    at: Round,
    **extra_args: Any,
) -> Worker:
    """The worker after a step of its own: its gradient goes through `inner`."""
    params = worker.params
    if rule.penalty is not None:
        taken = _taken(worker, center)
        grads = jax.tree.map(
            lambda grad, param, s: _penalised(rule, grad, param, s, at),
            grads,
            params,
            taken,
            is_leaf=is_gradient_leaf,
        )
    with explains_inner(grads):
        updates, inner_state = inner.update(grads, worker.inner, params, **extra_args)
    updates = jax.tree.map(
        _dense, fill_missing(updates, params), params, is_leaf=is_gradient_leaf
    )
    accumulated = worker.accumulated
    if rule.accumulate is not None:
        # The total is the second tree, so that a `None` or row-sparse leaf is one leaf.
        accumulated = jax.tree.map(
            _added,
            grads if rule.accumulate == "gradients" else updates,
            accumulated,
            is_leaf=is_gradient_leaf,
        )
    moved = add_updates(params, updates)
    return worker._replace(
        # Rounded to their own dtypes, however XLA fuses the casts.
        params=round_like(jax.tree.map(_rounded, moved), moved),
        inner=cast_like(inner_state, worker.inner),
        accumulated=accumulated,
    )


def bring(
    rule: CenterRule, worker: Worker, center: Tree, at: Round
) -> tuple[Worker, Tree]:
    """(the worker with its sums reset, its contribution, not yet divided)."""
    contribution = contribute(
        rule,
        as_center(worker.params, center),
        _taken(worker, center),
        worker.accumulated,
        center,
        at,
    )
    return worker._replace(accumulated=zeros_like(worker.accumulated)), contribution


def contribute(
    rule: CenterRule,
    params: Tree,
    taken: Tree,
    accumulated: Tree,
    center: Tree,
    at: Round,
) -> Tree:
    """The rule's `contribute` of each array, in the center's dtypes."""
    if rule.accumulate is None:
        accumulated = jax.tree.map(lambda c: None, center)

    def one(c, x, s, a):
        own = Own(
            declared(rule, "params", x),
            declared(rule, "taken", s),
            declared(rule, "accumulated", a),
        )
        return rule.contribute(own, declared(rule, "center", c), at)

    return jax.tree.map(one, center, params, taken, accumulated)


def take(
    rule: CenterRule,
    worker: Worker,
    before: Tree,
    after: Tree,
    at: Round,
    then: Tree = (),
) -> Worker:
    """The worker after a round that has moved the center from `before` to `after`.

    With `then`, its parameters when it contributed, it keeps what it moved since.
    """
    x, formula = after, rule.take
    if formula is None and not is_nothing(then):
        now, then = as_center(worker.params, after), as_center(then, after)
        x = jax.tree.map(lambda a, p, t: a + (p - t), after, now, then)
    if formula is not None:

        def one(x, b, a):
            around = declared(rule, "before", b), declared(rule, "after", a)
            return formula(x, *around, at)

        x = jax.tree.map(one, as_center(worker.params, after), before, after)
    taken = worker.taken
    if not is_nothing(taken):
        taken = after if rule.take is None else before
    return worker._replace(params=round_like(x, worker.params), taken=taken)


def stand_still(worker: Worker, walked: Worker, broken: jax.Array) -> Worker:
    """`walked`; where it is broken, with the parameters from before the step."""
    return walked._replace(params=where(broken, worker.params, walked.params))


def mend(
    inner: optax.GradientTransformation,
    worker: Worker,
    center: Tree,
    well: jax.Array,
) -> Worker:
    """A broken worker takes the center and a fresh inner state, and sums up anew."""
    params = where(well, worker.params, round_like(center, worker.params))
    return worker._replace(
        params=params,
        inner=where(well, worker.inner, inner.init(params)),
        accumulated=where(well, worker.accumulated, zeros_like(worker.accumulated)),
    )


def is_due(
    communication_period: Period, steps: jax.Array | int, local_step: jax.Array | int
) -> bool | jax.Array:
    """Whether a worker meets the center in this step: bool[].

    Args:
        communication_period: Steps between rounds. A schedule is read at the step
            in which the period began: read at the current step, a period that grows
            faster than the steps pass would never end.
        steps: int32[], the worker's steps since its last round, this one included.
        local_step: int32[], the worker's steps before this one.
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
    # Schedules may give floats; the counter is exact in float32 up to 2^24. Every
    # comparison with NaN is false, so `~(<)` lets workers meet rather than never again.
    return ~(jnp.asarray(steps, jnp.float32) < period.astype(jnp.float32))


def start_center(params: Tree, dtype: DTypeLike | None = None) -> Tree:
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
    """Zeros for what a worker sums up between rounds; () where it sums nothing."""
    return () if rule.accumulate is None else zeros_like(center)


def as_center(params: Tree, center: Tree) -> Tree:
    """Parameters in the center's dtypes, rounded to their own dtypes first."""
    return round_like(jax.tree.map(_rounded, params), center)


def round_like(tree: Tree, like: Tree) -> Tree:
    """The tree in the dtypes of `like`."""
    return jax.tree.map(
        lambda x, p: x if x.dtype == p.dtype else x.astype(p.dtype), tree, like
    )


def _taken(worker: Worker, center: Tree) -> Tree:
    return center if is_nothing(worker.taken) else worker.taken


def _rounded(param: jax.Array) -> jax.Array:
    """At least float32, rounded explicitly: XLA may drop a cast down and up again."""
    wide = at_least_float32(param.dtype)
    return param if wide == param.dtype else round_to(param.astype(wide), param.dtype)


def _penalised(
    rule: CenterRule, grad: Any, param: jax.Array, taken: jax.Array, at: Round
) -> jax.Array | None:
    if grad is None or rule.penalty is None:
        return grad
    pull = rule.penalty(Own(param.astype(taken.dtype), taken, None), at)
    grad = _dense(grad, param)
    wide = at_least_float32(grad.dtype)
    total = grad.astype(wide) + pull.astype(wide)
    return round_to(total, grad.dtype).astype(grad.dtype)


def _added(value: GradientLeaf, total: jax.Array) -> jax.Array:
    if value is None:
        return total
    if isinstance(value, IndexedSlices):
        return total + value
    return total + value.astype(total.dtype)


def _dense(update: GradientLeaf, param: jax.Array) -> jax.Array | None:
    if isinstance(update, IndexedSlices):
        return update.to_dense(param.shape[0])
    return update
