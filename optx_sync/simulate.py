# SPDX-License-Identifier: Apache-2.0
"""Asynchronous workers on one device: a schedule of events, replayed exactly.

At each event one worker steps, at the parameters as they are then. What the wrappers
of this package do in lockstep is done here worker by worker, with the same code, so
that what asynchrony does to training can be tested, studied, and scaled to thousands
of workers without any of them running.
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
    is_due,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
    worker_params,
)
from optx_sync.checks import check_grads, check_inner, fill_missing
from optx_sync.optimizers.rule import RuleState
from optx_sync.replicas.accumulator import (
    Accumulator,
    accumulate,
    clear,
    mean_of,
    start_accumulator,
    unique_rows,
)
from optx_sync.replicas.sync_replicas import (
    advance_averages,
    apply_updates,
    check_averages,
    check_replicas,
    check_variables,
    start_averages,
)
from optx_sync.sharding import stack

GradFn: TypeAlias = Callable[[jax.Array, Any, jax.Array], Any]
Record: TypeAlias = Literal["all"] | int | Callable[[Any, Any], Any]


class WorkerState(NamedTuple):
    """A worker's own; with a worker axis in front, [N, ...], those of all."""

    params: Any
    inner: Any  # state of the workers' own optimizer
    taken: Any  # the center that it took last, or () where the rule does not ask
    accumulated: Any  # what it summed up since its last round, or ()
    local_step: jax.Array  # int32[], its steps
    steps_since_round: jax.Array  # int32[]


class AsynchronousState(NamedTuple):
    """All there is after an event of `asynchronous`."""

    workers: WorkerState  # [N, ...]
    center: Any  # like the parameters, float32 for half precision
    outer: Any  # state of the rule's outer transformation, or ()
    global_step: jax.Array  # int32[], rounds of all workers


class AsynchronousRecord(NamedTuple):
    """What happened, event by event; T events, of which `record` keeps K."""

    params: Any  # [K, ...], the stepping worker's, or None where `record` is a function
    center: Any  # [K, ...], or None where `record` is a function
    local_step: jax.Array  # int32[T], the stepping worker's steps so far
    global_step: jax.Array  # int32[T], rounds of all workers so far
    recorded: Any  # [T, ...], what the function `record` returned, or None
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
        grad_fn: `(worker, params, event) -> gradients`, from int32 scalars, traced;
            leaves may be `IndexedSlices` or `None`.
        schedule: int[T], the worker that steps at each event. Where it is traced a
            number that names no worker cannot be refused, and its event changes
            nothing.
        num_workers: N.
        communication_period: A worker's steps between its rounds: an int, or a schedule
            of its own step (0-based).
        record: Which history of `params` and `center` to keep: `"all"`, which takes
            the memory of 2 T copies of the parameters; an int n, after every n-th
            event; or a function of (params, center) whose results are `recorded`
            instead. The counters are kept of every event.

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
        >>> [f"{center:.2f}" for center in run.center], int(run.global_step[-1])
        (['1.81', '1.81'], 60)

    References:
        TensorFlow 1.15, `tf.contrib.opt.ElasticAverageOptimizer` and `AGNOptimizer`.
        Dean et al., "Large Scale Distributed Deep Networks", 2012 (DOWNPOUR).
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

    def work(number, place, own, center, outer):
        """One event: what is the worker's, the center's, and whether they met."""
        grads = grad_fn(place, own.params, number)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        at = Round(num_workers, static_period, steps)
        updates, own_inner, accumulated = local_step(
            inner,
            rule,
            at,
            grads,
            own.inner,
            own.params,
            own.taken if keeps_taken else center,
            own.accumulated,
        )
        # As in lockstep, wide: half precision is rounded once, in `worker_params`.
        updates = jax.tree.map(lambda u, c: u.astype(c.dtype), updates, center)
        x = worker_params(own.params, updates, center)
        due = is_due(communication_period, steps, own.local_step)

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
            if keeps_taken:
                own_taken = after if rule.take is None else center
            x = take(rule, x, center, after, at)
            accumulated = jax.tree.map(jnp.zeros_like, accumulated)
            return x, own_taken, accumulated, own_inner, after, outer

        x, own_taken, accumulated, own_inner, center, outer = jax.lax.cond(
            due,
            exchange,
            lambda *operands: operands,
            *(x, own.taken, accumulated, own_inner, center, outer),
        )
        own = WorkerState(
            params=jax.tree.map(lambda x, p: x.astype(p.dtype), x, own.params),
            inner=own_inner,
            taken=own_taken,
            accumulated=accumulated,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
        )
        return own, center, outer, due.astype(jnp.int32)

    def advance(machine, event):
        state, _ = machine
        worker, number = event
        place = jnp.clip(worker, 0, num_workers - 1)
        # The conditional is there for a worker that does not exist, and for speed:
        # without it XLA fuses reading one stack with writing another, and then copies
        # both, the states of all workers, in every event.
        own, center, outer, rounds = jax.lax.cond(
            place == worker,
            lambda *operands: work(number, place, *operands),
            lambda *operands: (*operands, jnp.zeros((), jnp.int32)),
            *(_row(state.workers, place), state.center, state.outer),
        )
        state = AsynchronousState(
            workers=_with_row(state.workers, place, own),
            center=center,
            outer=outer,
            global_step=state.global_step + rounds,
        )
        return (state, own.params), (own.local_step, state.global_step)

    def view(machine):
        state, params = machine
        if callable(record):
            return None, None, record(params, state.center)
        return params, state.center, None

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
    (final, _), (local_steps, global_steps), views = _replay(
        advance, view, (state, params), schedule, record
    )
    shown_params, shown_center, recorded = views
    return AsynchronousRecord(
        shown_params, shown_center, local_steps, global_steps, recorded, final
    )


class SyncReplicasMachine(NamedTuple):
    """Chief, accumulators and workers of `sync_replicas`, as an event leaves them."""

    params: Any
    inner: optax.OptState
    averages: Any  # like the parameters, or ()
    accumulator: Accumulator
    accumulated: jax.Array  # int32[], gradients in it
    global_step: jax.Array  # int32[], updates
    local_step: jax.Array  # int32[N], the token that each worker took last
    blocked: jax.Array  # bool[N], whether it waits for a token
    # The queue holds tokens of the last two steps only: nothing of a later step is
    # accumulated before all tokens of earlier steps have been taken.
    old_tokens: jax.Array  # int32[], of `global_step - 1`, which are taken first
    new_tokens: jax.Array  # int32[], of `global_step`


class SyncReplicasRecord(NamedTuple):
    """What happened at each of T events; every array is as after the event."""

    params: Any  # [T, ...], or None where `record` is a function
    accepted: jax.Array  # bool[T], whether the gradient was accumulated
    updated: jax.Array  # bool[T], whether it completed an update
    blocked: Any  # bool[T, N], the workers that wait for a token
    local_step: Any  # int32[T, N]
    tokens: jax.Array  # int32[T], in the queue
    global_step: jax.Array  # int32[T]
    averages: Any  # [T, ...], or None where there are none or `record` is a function
    recorded: Any  # [T, ...], what the function `record` returned, or None
    final: SyncReplicasMachine


def sync_replicas(
    inner: optax.GradientTransformation,
    params: optax.Params,
    grad_fn: GradFn,
    schedule: Any,
    *,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    num_tokens: int = -1,
    variable_averages: float | optax.Schedule | None = None,
    initial_global_step: int = 0,
    record: Record = "all",
) -> SyncReplicasRecord:
    """Replay TensorFlow's `SyncReplicasOptimizer`: accumulators, token queue, chief.

    With R = `replicas_to_aggregate` and N = `total_num_replicas`, at each event:

        worker w:  g = grad_fn(w, params, event)
                   if local_step[w] >= global_step: accumulate g, else drop it
        chief:     once R gradients are in: params move by inner(their mean),
                   global_step += 1, max(N, R) tokens of this value join the queue,
                   then the moving averages follow
        worker w:  local_step[w] = the first token of the queue; wait if there is none

    A worker that waits goes on as soon as there are tokens; an event of one that still
    waits changes nothing. A dropped gradient takes a token all the same, and nothing
    binds tokens to workers: a fast one may contribute several gradients to one update.
    A row of a row-sparse gradient is divided by the number of gradients that contained
    it. The lockstep form is `oxs.sync_replicas`.

    Args:
        inner: The transformation that gets the mean gradient.
        params: The parameters to start from.
        grad_fn: `(worker, params, event) -> grads`, from int32 scalars, traced.
        schedule: int[T], the worker that steps at each event. Where it is traced a
            number that names no worker cannot be refused, and its event changes
            nothing.
        replicas_to_aggregate: R, the gradients that an update needs, 1 or more.
        total_num_replicas: N, the number of workers. `None`: R.
        num_tokens: Tokens in the queue at the start, at least R - N; -1: R. They carry
            the initial step, so that the workers that take one waste it: their first
            gradient after the first update is stale. 0 wastes none.
        variable_averages: The decay of a moving average of the parameters, or a
            schedule of the new global step.
        initial_global_step: Where a restarted run goes on; may be traced.
        record: Which history of `params`, `averages`, `blocked` and `local_step` to
            keep: `"all"`; an int n, after every n-th event, [T // n, ...]; or a
            function of (params, averages) whose results are `recorded` instead.

    Returns:
        A `SyncReplicasRecord`. Nothing else depends on the host: it can be jitted,
        with everything but the arrays static.

    Raises:
        TypeError: An `inner` that is no transformation, a bad number or schedule.
        ValueError: No variables, a number below 1, too few tokens, a worker out of
            range, gradients that do not match the parameters.

    Example:
        Worker 1 is slow, and one of two gradients is enough:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> run = oxs.simulate.sync_replicas(
        ...     optax.sgd(0.5),
        ...     jnp.float32(1),
        ...     lambda worker, params, event: params,
        ...     jnp.array([0, 0, 1, 0, 1]),
        ...     replicas_to_aggregate=1,
        ...     total_num_replicas=2,
        ... )
        >>> run.accepted.tolist()
        [True, False, False, True, False]
        >>> run.params.tolist()
        [0.5, 0.5, 0.5, 0.25, 0.25]
    """
    inner = check_inner(
        inner, "oxs.simulate.sync_replicas(optax.sgd(0.1), params, ...)"
    )
    check_variables(params)
    check_replicas(replicas_to_aggregate, total_num_replicas)
    check_averages(variable_averages)
    required = replicas_to_aggregate
    workers = required if total_num_replicas is None else total_num_replicas
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an integer; got {num_tokens!r}.")
    needed = max(required - workers, 0)
    if num_tokens != -1 and num_tokens < needed:
        raise ValueError(
            f"Too few tokens to finish the first update: got num_tokens={num_tokens}, "
            f"and {needed} are needed, replicas_to_aggregate - total_num_replicas. "
            "Pass as many or more, or -1 for replicas_to_aggregate."
        )
    schedule = _check_schedule(schedule, workers)
    step = jnp.asarray(initial_global_step, jnp.int32)

    def new_update(machine: SyncReplicasMachine, grads):
        mean = mean_of(machine.accumulator, grads, machine.accumulated, required)
        updates, inner_state = inner.update(mean, machine.inner, machine.params)
        moved = apply_updates(machine.params, fill_missing(updates, machine.params))
        global_step = machine.global_step + 1
        averages = machine.averages
        if variable_averages is not None:
            averages = advance_averages(averages, moved, variable_averages, global_step)
        return machine._replace(
            params=moved,
            inner=inner_state,
            averages=averages,
            accumulator=clear(machine.accumulator, mean),
            accumulated=jnp.zeros_like(machine.accumulated),
            global_step=global_step,
            old_tokens=machine.new_tokens,
            new_tokens=jnp.full_like(machine.new_tokens, max(workers, required)),
        )

    def advance(machine: SyncReplicasMachine, event):
        worker, number = event
        known = (worker >= 0) & (worker < workers)
        place = jnp.clip(worker, 0, workers - 1)
        grads = grad_fn(place, machine.params, number)
        check_grads(grads, machine.params)
        grads = unique_rows(grads)
        fresh = machine.local_step[place] >= machine.global_step
        accepted = known & ~machine.blocked[place] & fresh
        machine = machine._replace(
            accumulator=accumulate(machine.accumulator, grads, accepted),
            accumulated=machine.accumulated + accepted.astype(jnp.int32),
        )
        updated = machine.accumulated >= required
        machine = jax.lax.cond(
            updated, lambda machine: new_update(machine, grads), lambda m: m, machine
        )
        # A queue that was empty has been filled for all, so that whoever waits is
        # served, or nobody; and several wait only where no old token is left.
        waiting = machine.blocked | (jnp.arange(workers, dtype=jnp.int32) == worker)
        served = waiting & (machine.old_tokens + machine.new_tokens > 0)
        taken = jnp.sum(served, dtype=jnp.int32)
        old = machine.old_tokens > 0
        token = machine.global_step - old.astype(jnp.int32)
        machine = machine._replace(
            local_step=jnp.where(served, token, machine.local_step),
            blocked=waiting & ~served,
            old_tokens=jnp.where(old, machine.old_tokens - taken, 0),
            new_tokens=jnp.where(old, machine.new_tokens, machine.new_tokens - taken),
        )
        tokens = machine.old_tokens + machine.new_tokens
        return machine, (accepted, updated, tokens, machine.global_step)

    def view(machine: SyncReplicasMachine):
        averages = None if variable_averages is None else machine.averages
        if callable(record):
            return None, None, None, None, record(machine.params, averages)
        return (
            machine.params, averages, machine.blocked, machine.local_step, None
        )  # fmt: skip

    params = jax.tree.map(jnp.asarray, params)
    averages = () if variable_averages is None else start_averages(params, None)
    machine = SyncReplicasMachine(
        params=params,
        inner=inner.init(params),
        averages=averages,
        accumulator=start_accumulator(params),
        accumulated=jnp.zeros((), jnp.int32),
        global_step=step,
        local_step=jnp.full(workers, step, jnp.int32),
        blocked=jnp.zeros(workers, jnp.bool_),
        old_tokens=jnp.zeros((), jnp.int32),
        new_tokens=jnp.full(
            (), required if num_tokens == -1 else num_tokens, jnp.int32
        ),
    )
    machine, scalars, views = _replay(advance, view, machine, schedule, record)
    accepted, updated, tokens, global_step = scalars
    params, averages, blocked, local_step, recorded = views
    return SyncReplicasRecord(
        params=params,
        accepted=accepted,
        updated=updated,
        blocked=blocked,
        local_step=local_step,
        tokens=tokens,
        global_step=global_step,
        averages=averages,
        recorded=recorded,
        final=machine,
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


def _replay(
    advance: Callable,
    view: Callable,
    state: Any,
    schedule: jax.Array,
    record: Record,
) -> tuple[Any, Any, Any]:
    """(last state, what `advance` returns of each event, `view` of those to record).

    `advance(state, (worker, event))` returns the next state and small values.
    """
    every = _check_record(record)
    events = schedule, jnp.arange(len(schedule), dtype=jnp.int32)
    chunks = len(schedule) // every

    def advance_chunk(state, of_chunk):
        state, values = jax.lax.scan(advance, state, of_chunk)
        return state, (values, view(state))

    first = jax.tree.map(lambda x: x[: chunks * every].reshape(chunks, every), events)
    state, (values, views) = jax.lax.scan(advance_chunk, state, first)
    values = jax.tree.map(lambda x: x.reshape(chunks * every, *x.shape[2:]), values)
    if chunks * every < len(schedule):  # events after the last view
        rest = jax.tree.map(lambda x: x[chunks * every :], events)
        state, of_rest = jax.lax.scan(advance, state, rest)
        values = jax.tree.map(lambda *x: jnp.concatenate(x), values, of_rest)
    return state, values, views


def _check_schedule(schedule: Any, workers: int) -> jax.Array:
    known = None if isinstance(schedule, jax.core.Tracer) else np.asarray(schedule)
    dtype = schedule.dtype if known is None else known.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"schedule must hold integers, workers; got {dtype}.")
    if np.ndim(schedule) != 1:
        raise ValueError(
            "schedule must have one axis, the worker of each event; got shape "
            f"{np.shape(schedule)}."
        )
    if known is not None and known.size:
        worst = known.max() if known.max() >= workers else known.min()
        if not 0 <= worst < workers:
            raise ValueError(
                f"schedule names worker {worst}, but there are {workers}, numbered "
                "from 0. Pass workers in this range, or their number."
            )
    return jnp.asarray(schedule).astype(jnp.int32)


def _check_record(record: Any) -> int:
    """Every how many events to look at the state."""
    if callable(record) or (isinstance(record, str) and record == "all"):
        return 1
    if isinstance(record, bool) or not isinstance(record, int):
        raise TypeError(
            "record must be 'all', an integer (every how many events), or a function "
            f"of parameters and averages (or center); got {record!r}."
        )
    if record < 1:
        raise ValueError(f"record must be 1 or more events; got {record}.")
    return record
