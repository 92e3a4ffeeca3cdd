# SPDX-License-Identifier: Apache-2.0
"""Workers that meet a center one by one, each at its own pace, on one device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.checks import check_delay, check_keep_local
from optx_sync.center.coded import (
    bytes_of,
    check_code,
    decoded,
    encoded,
    message_shapes,
    start_codes,
)
from optx_sync.center.formulas import (
    absorb,
    contributions,
    divide,
    is_due,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
    weigh_alone,
    worker_params,
)
from optx_sync.center.fragments import (
    Buffer,
    Fragments,
    Pending,
    check_fragments,
    in_turn,
    split,
    steps_between,
)
from optx_sync.center.rule import (
    CenterRule,
    Period,
    Round,
    Weigh,
    check_period,
    check_rule,
    keeps_before,
    weighed,
)
from optx_sync.checks import check_count, check_grads, check_inner
from optx_sync.exchange.contract import Exchange
from optx_sync.sharding import stack
from optx_sync.simulate.replay import (
    GradFn,
    Record,
    check_workers,
    replay,
)
from optx_sync.trees import row_of, with_row, zeros_like


class WorkerState(NamedTuple):
    """A worker's own; with a worker axis in front, [N, ...], those of all."""

    params: Any
    inner: Any  # state of the workers' own optimizer
    taken: Any  # the center that it took last, or () where the rule does not ask
    accumulated: Any  # what it summed up since its last round, or ()
    exchange: Any  # what the code of its pushes remembers, of each part, or ()
    local_step: jax.Array  # int32[], its steps
    steps_since_round: jax.Array  # int32[]
    rounds: jax.Array  # int32[], its rounds
    # With parts [P], of each one.
    tokens: jax.Array  # float32[], since its last round
    seen: jax.Array  # int32[], the rounds of all workers when it took the center
    ages: Any  # int32[P], steps since its round of each part, or () where there is one
    pending: Any  # with `delay`, a `Pending` of what it has contributed; or ()


class _Meeting(NamedTuple):
    """What a round changes."""

    params: Any  # in the center's dtypes
    taken: Any
    accumulated: Any
    exchange: Any
    inner: Any
    pending: Any
    center: Any
    outer: Any


class AsynchronousState(NamedTuple):
    """State after one event of `asynchronous`."""

    workers: WorkerState  # [N, ...]
    center: Any  # like the parameters, float32 for half precision
    # State of the rule's outer transformation, or (); a tuple, one for each part.
    outer: Any
    global_step: jax.Array  # int32[], rounds of all workers


class AsynchronousRecord(NamedTuple):
    """What happened in T events; every array is as after the event."""

    # [K, ...] each, of the K events that `record` keeps; None where it is a function.
    params: Any  # those of the worker that stepped, in their own dtypes
    center: Any  # float32 for half precision parameters
    events: jax.Array  # int32[K], the numbers of these events, from 0
    local_step: jax.Array  # int32[T], steps that the event's worker has made
    global_step: jax.Array  # int32[T], rounds that all workers together have made
    # [T, ...], what the function `record` returned after each event; None without one.
    recorded: Any
    final: AsynchronousState  # after the last event
    push_bytes: float  # bytes of one contribution, of the largest part, as it travels


def asynchronous(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    params: optax.Params,
    grad_fn: GradFn,
    workers: Any,
    *,
    num_workers: int,
    communication_period: Period = 10,
    exchange: Exchange | None = None,
    fragments: Fragments | None = None,
    delay: int | None = None,
    keep_local: float | jax.Array | None = None,
    record: Record = None,
    weigh: Weigh | None = None,
    tokens: Any = None,
) -> AsynchronousRecord:
    r"""Workers that meet a center one by one, each at its own pace.

    An event is one step of the worker w that `workers` names: `inner` turns its
    gradient into its update, and when its steps since its last round reach
    `communication_period` it meets the center alone, as `rule` says (N workers, the
    table of `optx_sync.center.rule`):

    .. math::

        c' \leftarrow \text{absorb}(c,\; \text{contribution of } w), \qquad
        x_w \leftarrow \text{take}(x_w, c, c')

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
        workers: int[T], the worker that steps at each event. Where it is traced a
            number that names no worker cannot be refused, and its event changes
            nothing.
        num_workers: N.
        communication_period: A worker's steps between its rounds: an int, or a schedule
            of its own step (0-based).
        exchange: How a worker codes what it pushes: each array alone, with what
            `oxs.exchange.error_feedback` remembers kept at the worker. `None`: whole.
            The center is taken whole. Not for rules whose contribution reads the
            center, as `elastic_rule` does.
        fragments: As in `center_variable`: in its k-th round a worker exchanges part
            k mod P.
        delay: As in `center_variable`, in steps of the worker: it decides what it
            contributes in one step, and that many steps later the center absorbs it,
            wherever the others have moved it meanwhile, and the worker takes.
        keep_local: As in `center_variable`.
        record: Which history of `params` and `center` to keep. `None`: all of it where
            that takes at most 256 MB, else every n-th event with the smallest n that
            fits. `"all"`: 2 T copies of the parameters. An int n: every n-th event. A
            function of (params, center): its results are `recorded` instead. The
            counters are kept of every event.
        weigh: `(at: Round) -> factor`, traced: of a contribution, from its `staleness`,
            its `tokens` and how many its worker has pushed (`num_pushed`), for example
            `lambda at: (1.0 + at.staleness) ** -0.5`.
        tokens: [T], the tokens or examples behind the gradient of each event, for
            `weigh`. `None`: each counts 1.

    Returns:
        An `AsynchronousRecord`.

    Raises:
        TypeError: An `inner` that is no transformation, a `rule` that is no
            `CenterRule`, `workers` that are no integers, numbers or a `record` of
            the wrong type, gradients or parameters that are not floating, an
            `exchange` that is none.
        ValueError: `workers` that name one outside of 0 ... N - 1 or are not
            one-dimensional, `num_workers` or a period below 1 or not the rule's,
            gradients that do not match the parameters, an `exchange` that has no code
            for one worker alone, or a rule that it does not fit.

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
        ...     workers=jnp.array([0, 0, 1] * 20),
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
    check_rule(rule, call)
    num_workers = check_count("num_workers", num_workers, "Pass for example 8.")
    if rule.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for num_workers={rule.num_workers}; got num_workers="
            f"{num_workers}. Leave num_workers out of the rule, or make them equal."
        )
    if weigh is not None and (fragments is not None or delay):
        raise ValueError(
            "weigh= is for contributions that land whole and at once; got fragments or "
            "delay as well. Leave one of them out."
        )
    rule = weighed(rule, weigh)
    period = check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    exchange = check_code(exchange, rule, period)
    static_period = None if callable(period) else period
    fragments, delay = check_fragments(fragments), check_delay(delay)
    keep_local = check_keep_local(keep_local)
    params = jax.tree.map(jnp.asarray, params)
    center = start_center(params)
    parts = split(fragments, center)
    between = steps_between(period, parts.number, delay)
    buffer = Buffer(parts, center)
    workers = check_workers(workers, num_workers)
    if tokens is not None and jnp.shape(tokens) != workers.shape:
        raise ValueError(
            f"tokens must hold a number for each of the {len(workers)} events; got "
            f"shape {jnp.shape(tokens)}."
        )
    # What the worker took last is its own business once the center has moved on: a rule
    # that takes the center whole may contribute the way from there.
    keeps_taken = rule.take is None or keeps_before(rule, period)
    shares_powers = rule.outer is inner

    def work(number, place, own, center, outer, global_step):
        """One event: what is the worker's, the center's, and whether they met."""
        grads = grad_fn(place, own.params, number)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        behind = jnp.float32(1)
        if tokens is not None:
            behind = jnp.asarray(tokens)[number].astype(jnp.float32)
        behind = own.tokens + behind

        def at_of(steps):
            return Round(num_workers, static_period, steps)

        updates, own_inner, accumulated = local_step(
            inner,
            rule,
            at_of(steps),
            grads,
            own.inner,
            own.params,
            own.taken if keeps_taken else center,
            own.accumulated,
        )
        x = worker_params(own.params, updates, center)
        due = is_due(between, steps, own.local_step)
        ages = own.ages if parts.number == 1 else own.ages + 1

        def contribute(now, number):
            of_part = (own.seen, behind, steps)
            if parts.number > 1:
                of_part = (own.seen[number], behind[number], ages[number])
            at = at_of(of_part[2])._replace(
                staleness=global_step - of_part[0],
                tokens=of_part[1],
                num_pushed=own.rounds + 1,
            )
            taken = now.taken if keeps_taken else now.center
            pushed = contributions(
                rule, own_of(rule, now.params, taken, now.accumulated), now.center, at
            )
            if rule.mean_over == "workers":
                pushed = divide(pushed, num_workers)
            if exchange is not None:
                messages, codes = encoded(exchange, pushed, now.exchange)
                pushed = decoded(exchange, messages, pushed)
                now = now._replace(exchange=codes)
            pushed = weigh_alone(rule, pushed, at)
            now = now._replace(accumulated=zeros_like(now.accumulated))
            return now, pushed, at

        def land(now, pushed, at):
            outer, own_inner, taken = now.outer, now.inner, now.taken
            if shares_powers:
                outer = _with_powers(outer, own_inner)
            after, outer = absorb(
                rule, now.center, outer, pushed, num_workers=num_workers
            )
            if shares_powers:
                own_inner = _with_powers(own_inner, outer)
            if keeps_taken:
                taken = after if rule.take is None else now.center
            x = take(rule, now.params, now.center, after, at, keep_local)
            return now._replace(
                params=x, taken=taken, inner=own_inner, center=after, outer=outer
            )

        def set_out(now, number):
            now, pushed, at = contribute(now, number)
            pending = Pending(buffer.pack(pushed), at.steps, ())
            return now._replace(pending=pending)

        def arrive(now, number):
            pushed = buffer.unpack(now.pending.values, number)
            return land(now, pushed, at_of(now.pending.steps))

        def where_due(due, half, now, part):
            return jax.lax.cond(
                due,
                lambda now: in_turn(part, half, now, _Meeting._fields, parts),
                lambda now: now,
                now,
            )

        now = _Meeting(
            params=x,
            taken=own.taken,
            accumulated=accumulated,
            exchange=own.exchange,
            inner=own_inner,
            pending=own.pending,
            center=center,
            outer=outer,
        )
        part, last = own.rounds % parts.number, (own.rounds - 1) % parts.number
        if delay:
            lands = (own.rounds > 0) & (own.steps_since_round < delay)
            now = where_due(lands & ((steps >= delay) | due), arrive, now, last)
            now = where_due(due, set_out, now, part)
        else:
            now = where_due(
                due, lambda now, number: land(*contribute(now, number)), now, part
            )
        met = due
        if parts.number > 1:
            met = due & (jnp.arange(parts.number) == part)
            ages = jnp.where(met, jnp.zeros_like(ages), ages)
        rounds = due.astype(jnp.int32)
        own = WorkerState(
            params=jax.tree.map(lambda x, p: x.astype(p.dtype), now.params, own.params),
            inner=now.inner,
            taken=now.taken,
            accumulated=now.accumulated,
            exchange=now.exchange,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            tokens=jnp.where(met, 0.0, behind),
            seen=jnp.where(met, global_step + 1, own.seen),
            rounds=own.rounds + rounds,
            ages=ages,
            pending=now.pending,
        )
        return own, now.center, now.outer, rounds

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
            lambda *operands: (*operands[:-1], jnp.zeros((), jnp.int32)),
            *(row_of(state.workers, place), state.center, state.outer),
            state.global_step,
        )
        state = AsynchronousState(
            workers=with_row(state.workers, place, own),
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

    count = jnp.zeros((), jnp.int32)
    worker = WorkerState(
        params=params,
        inner=inner.init(params),
        taken=center if keeps_taken else (),
        accumulated=start_accumulated(rule, center),
        exchange=()
        if exchange is None
        else parts.each(lambda part: start_codes(exchange, part), center),
        local_step=count,
        steps_since_round=count,
        tokens=jnp.zeros(() if parts.number == 1 else parts.number, jnp.float32),
        seen=jnp.zeros(() if parts.number == 1 else parts.number, jnp.int32),
        rounds=count,
        ages=jnp.zeros(parts.number, jnp.int32) if parts.number > 1 else (),
        pending=Pending(buffer.zeros(), count, ()) if delay else (),
    )
    state = AsynchronousState(
        workers=stack(worker, num_workers),
        center=center,
        outer=() if rule.outer is None else parts.each(rule.outer.init, center),
        global_step=jnp.zeros((), jnp.int32),
    )
    (final, _), (local_steps, global_steps), views, events = replay(
        advance, view, (state, params), workers, record
    )
    kept_params, kept_center, recorded = views
    return AsynchronousRecord(
        params=kept_params,
        center=kept_center,
        events=events,
        local_step=local_steps,
        global_step=global_steps,
        recorded=recorded,
        final=final,
        push_bytes=float(
            max(
                bytes_of(message_shapes(exchange, parts.pick(center, part)))
                for part in range(parts.number)
            )
        ),
    )


def _with_powers(state: Any, source: Any) -> Any:
    """A state with the running powers of another state of the same optimizer.

    All else stays, at any depth of chains and masks.
    """

    def is_rule_state(x):
        # What `from_rule` makes; the catalogue itself is not imported here.
        return "powers" in getattr(x, "_fields", ())

    return jax.tree.map(
        lambda own, other: (
            own._replace(powers=other.powers) if is_rule_state(own) else own
        ),
        state,
        source,
        is_leaf=is_rule_state,
    )
