# SPDX-License-Identifier: Apache-2.0
"""Workers that do not march in step, replayed on one device as a list of events.

The originals run every worker at its own pace. Here that pace is data: `schedule`
names the worker that takes each event, and one event is one whole training step of one
worker, with its exchange where one is due. `asynchronous` replays workers that share a
center, by the same rules and formulas as lockstep; `sync_replicas` replays replicas
that wait for each other's gradients, with tokens, stale gradients and backup replicas.
For tests, for studies, and for thousands of workers: their states are stacked, and an
event touches one row.

Both compile to one loop, work inside `jax.jit`, and take

* `grad_fn(worker, params, event)`: the gradients of this worker (int32[]) at these
  parameters; `event` (int32[]) counts from 0, and is there to choose the batch.
* `record`: what to keep of the way there. `"all"`, of every event; an int n, of every
  n-th event (n - 1, 2 n - 1, ...); or a function, of which `kept` then holds the
  results of every event. Counters are always kept whole.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.rule import (
    CenterRule,
    Period,
    Round,
    absorb,
    check_period,
    contributions,
    divide,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
    worker_params,
)
from optx_sync.checks import check_grads, check_inner
from optx_sync.optimizers.rule import RuleState
from optx_sync.sharding import stack

GradFn: TypeAlias = Callable[[jax.Array, Any, jax.Array], Any]
Record: TypeAlias = Literal["all"] | int | Callable[..., Any]


class WorkerState(NamedTuple):
    """A worker's own; with a worker axis in front, [N, ...], those of all."""

    params: optax.Params
    inner: optax.OptState
    taken: Any  # the center that it took last, or () where the rule does not ask
    accumulated: Any  # what it summed up since its last round, or ()
    local_step: jax.Array  # int32[], its steps
    steps_since_round: jax.Array  # int32[]


class AsynchronousState(NamedTuple):
    """All there is after an event of `asynchronous`."""

    workers: WorkerState  # [N, ...]
    center: optax.Params  # like the parameters, float32 for half precision
    outer: optax.OptState  # state of the rule's outer transformation, or ()
    global_step: jax.Array  # int32[], rounds of all workers


class AsynchronousRecord(NamedTuple):
    """What happened, event by event; T events, of which `record` keeps K."""

    params: Any  # [K, ...], the stepping worker's after its step, or None
    center: Any  # [K, ...], after the event, or None
    local_step: jax.Array  # int32[T], the stepping worker's steps so far
    global_step: jax.Array  # int32[T], rounds so far
    kept: Any  # [T, ...], the results of a function given as `record`, or None
    final: AsynchronousState


def asynchronous(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    params: optax.Params,
    grad_fn: GradFn,
    schedule: Any,
    *,
    num_workers: int,
    communication_period: Period = 10,
    record: Record = "all",
) -> AsynchronousRecord:
    """Workers that meet a center one by one, each at its own pace.

    An event is one step of the worker w that `schedule` names: `inner` turns its
    gradient into its update, and when its steps since its last round reach
    `communication_period` it meets the center alone, as `rule` says (N workers, the
    table of `optx_sync.center.rule`):

        c' <- absorb(c, contribution of w)        x_w <- take(x_w, c, c')

    The exchange is atomic: nobody else pushes between the two. A contribution that is
    a mean over workers is divided by N; one that is a mean over those that came
    together, by one. All workers start at `params`, and so does the center.

    The originals are TensorFlow's `ElasticAverageOptimizer` and `AGNOptimizer`, whose
    recorded runs it reproduces to 1e-6. In these the optimizer's running powers (Adam's
    of beta) belong to the worker, and advance in its own step and once more in its step
    on the center. So do they here for `agn_rule(inner)` with the same `inner`, one of
    this package's; in lockstep, and with another `outer`, the center has its own.
    Plain asynchronous SGD (DOWNPOUR) is `agn_rule(inner)` with a period of 1.

    Args:
        inner: The workers' own optimizer.
        rule: What is exchanged: `elastic_rule`, `agn_rule`, `local_sgd_rule`,
            `diloco_rule`, or one of your own.
        params: Where all start, without a worker axis.
        grad_fn: `(worker, params, event) -> gradients`, traced once; leaves may be
            `IndexedSlices` or `None`.
        schedule: int[T], the worker that steps at each event. Where it is traced a
            number that names no worker cannot be refused, and its event changes
            nothing.
        num_workers: N.
        communication_period: A worker's steps between its rounds: an int, or a schedule
            of its own step (0-based).
        record: See the top of this page; a function is called with `(params, center)`,
            the stepping worker's and the shared one. `"all"` needs memory for 2 T
            copies of the parameters.

    Returns:
        An `AsynchronousRecord`.

    Raises:
        TypeError: An `inner` that is no transformation, a `rule` that is no
            `CenterRule`, a schedule that is not of integers, numbers or a `record` of
            the wrong type, gradients or parameters that are not floating.
        ValueError: A schedule that names a worker outside of 0 ... N - 1 or is not
            one-dimensional, `num_workers` or a period below 1 or not the rule's,
            gradients that do not match the parameters.

    Example:
        Two workers, the first one twice as fast:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> target = jnp.array([1.0, 3.0])
        >>> run = oxs.simulate.asynchronous(
        ...     optax.sgd(0.5),
        ...     oxs.local_sgd_rule(),
        ...     jnp.zeros(()),
        ...     lambda worker, params, event: params - target[worker],
        ...     schedule=jnp.array([0, 0, 1] * 20),
        ...     num_workers=2,
        ...     communication_period=1,
        ...     record=30,
        ... )
        >>> run.center.round(1), int(run.global_step[-1])
        (Array([1.8, 1.8], dtype=float32), 60)
    """
    call = "oxs.simulate.asynchronous(optax.sgd(0.1), oxs.local_sgd_rule(), ...)"
    inner = check_inner(inner, call)
    if not isinstance(rule, CenterRule):
        raise TypeError(
            f"rule must be a CenterRule; got {rule!r}. Write for example {call}."
        )
    _check_count("num_workers", num_workers)
    if rule.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for num_workers={rule.num_workers}; got num_workers="
            f"{num_workers}. Leave num_workers out of the rule, or make them equal."
        )
    check_period(communication_period)
    if rule.check is not None:
        rule.check(communication_period)
    static_period = None if callable(communication_period) else communication_period
    schedule = _check_schedule(schedule, num_workers)
    # What the worker took last is its own business once the center has moved on: a rule
    # that takes the center whole may contribute the way from there.
    keeps_taken = rule.take is None or rule.keeps_taken
    shares_powers = rule.outer is inner

    def step(state, event, worker):
        known = (worker >= 0) & (worker < num_workers)
        place = jnp.clip(worker, 0, num_workers - 1)
        own = _row(state.workers, place)
        grads = grad_fn(place, own.params, event)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        at = Round(num_workers, static_period, steps)
        taken = own.taken if keeps_taken else state.center
        updates, own_inner, accumulated = local_step(
            inner, rule, at, grads, own.inner, own.params, taken, own.accumulated
        )
        x = worker_params(own.params, updates, state.center)
        period = communication_period
        if callable(period):
            # As in lockstep: schedules may give floats.
            due = steps.astype(jnp.float32) >= jnp.asarray(
                period(own.local_step), jnp.float32
            )
        else:
            due = steps >= period

        def exchange(x, own_taken, accumulated, own_inner, center, outer):
            taken = own_taken if keeps_taken else center
            pushed = contributions(
                rule, own_of(rule, x, taken, accumulated), center, at
            )
            if rule.mean_over == "workers":
                pushed = divide(pushed, num_workers)
            if shares_powers:
                outer = _with_powers(outer, own_inner)
            after, outer = absorb(rule, center, outer, pushed)
            if shares_powers:
                own_inner = _with_powers(own_inner, outer)
            new_x = take(rule, x, center, after, at)
            if keeps_taken:
                own_taken = after if rule.take is None else center
            accumulated = jax.tree.map(jnp.zeros_like, accumulated)
            return new_x, own_taken, accumulated, own_inner, after, outer

        x, own_taken, accumulated, own_inner, center, outer = jax.lax.cond(
            due & known,
            exchange,
            lambda *operands: operands,
            *(x, own.taken, accumulated, own_inner, state.center, state.outer),
        )
        moved = WorkerState(
            params=jax.tree.map(lambda x, p: x.astype(p.dtype), x, own.params),
            inner=own_inner,
            taken=own_taken,
            accumulated=accumulated,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
        )
        moved = jax.tree.map(lambda new, old: jnp.where(known, new, old), moved, own)
        state = AsynchronousState(
            workers=_with_row(state.workers, place, moved),
            center=center,
            outer=outer,
            global_step=state.global_step + (due & known).astype(jnp.int32),
        )
        return state, (moved.local_step, state.global_step)

    def show(state, worker):
        place = jnp.clip(worker, 0, num_workers - 1)
        return _row(state.workers.params, place), state.center

    params = jax.tree.map(jnp.asarray, params)
    center = start_center(params)
    worker = WorkerState(
        params=params,
        inner=inner.init(params),
        taken=center if keeps_taken else (),
        accumulated=start_accumulated(rule, center),
        local_step=jnp.zeros((), jnp.int32),
        steps_since_round=jnp.zeros((), jnp.int32),
    )
    state = AsynchronousState(
        workers=stack(worker, num_workers),
        center=center,
        outer=() if rule.outer is None else rule.outer.init(center),
        global_step=jnp.zeros((), jnp.int32),
    )
    final, (local_steps, global_steps), shown, kept = _replay(
        step, show, state, schedule, record
    )
    shown_params, shown_center = (None, None) if shown is None else shown
    return AsynchronousRecord(
        shown_params, shown_center, local_steps, global_steps, kept, final
    )


def _with_powers(state: Any, source: Any) -> Any:
    """A state with the running powers of another state of the same optimizer.

    All else stays, at any depth of chains and masks.
    """

    def is_rule_state(x):
        return isinstance(x, RuleState)

    return jax.tree.map(
        lambda own, other: (
            own._replace(powers=other.powers) if is_rule_state(own) else own
        ),
        state,
        source,
        is_leaf=is_rule_state,
    )


def _replay(
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, Any]],
    show: Callable[[Any, jax.Array], tuple[Any, Any]],
    state: Any,
    schedule: jax.Array,
    record: Record,
) -> tuple[Any, Any, Any, Any]:
    """All events in their order: (last state, counters, shown, kept).

    `step(state, event, worker)` gives the next state and counters, which are kept of
    every event; `show(state, worker)` what `record` chooses from.
    """
    if not (callable(record) or record == "all"):
        if isinstance(record, bool | str) or not isinstance(record, int):
            raise TypeError(
                "record must be 'all', an int or a function; got "
                f"{record!r}. Pass for example 100, for every hundredth event."
            )
        _check_count("record", record)
    events = (jnp.arange(len(schedule), dtype=jnp.int32), schedule)

    def advance(state, event):
        return step(state, *event)

    def advance_and_show(state, event):
        state, counters = step(state, *event)
        shown = show(state, event[1])
        return state, (counters, record(*shown) if callable(record) else shown)

    if callable(record) or record == "all":
        state, (counters, shown) = jax.lax.scan(advance_and_show, state, events)
        if callable(record):
            return state, counters, None, shown
        return state, counters, shown, None

    whole = len(schedule) // record * record

    def advance_many(state, events):
        state, counters = jax.lax.scan(advance, state, events)
        return state, (counters, show(state, events[1][-1]))

    state, (counters, shown) = jax.lax.scan(
        advance_many,
        state,
        jax.tree.map(lambda x: x[:whole].reshape(-1, record), events),
    )
    counters = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), counters)
    if whole < len(schedule):
        state, last = jax.lax.scan(
            advance, state, jax.tree.map(lambda x: x[whole:], events)
        )
        counters = jax.tree.map(lambda *x: jnp.concatenate(x), counters, last)
    return state, counters, shown, None


def _row(tree, place):
    """One worker's part of stacked trees."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), tree
    )


def _with_row(tree, place, row):
    return jax.tree.map(
        lambda x, r: jax.lax.dynamic_update_index_in_dim(x, r, place, 0), tree, row
    )


def _check_count(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(
            f"{name} must be an int; got {number!r} of type {type(number).__name__}. "
            "It is static: pass for example 8."
        )
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {number}.")


def _check_schedule(schedule: Any, num_workers: int) -> jax.Array:
    """The schedule as int32[T]; what is traced is not read."""
    if not isinstance(schedule, jax.Array):
        schedule = np.asarray(schedule)
    mend = "Pass for example jnp.arange(100) % num_workers."
    if not jnp.issubdtype(schedule.dtype, jnp.integer):
        raise TypeError(
            "schedule must hold integers, the worker of each event; got dtype "
            f"{schedule.dtype}. {mend}"
        )
    if schedule.ndim != 1:
        raise ValueError(
            "schedule must be one-dimensional, one worker per event; got shape "
            f"{schedule.shape}. {mend}"
        )
    if not isinstance(schedule, jax.core.Tracer):
        workers = np.asarray(schedule)
        outside = np.flatnonzero((workers < 0) | (workers >= num_workers))
        if outside.size:
            raise ValueError(
                f"schedule names worker {workers[outside[0]]} at event {outside[0]}; "
                f"with num_workers={num_workers} they are 0 ... {num_workers - 1}."
            )
    return jnp.asarray(schedule).astype(jnp.int32)
