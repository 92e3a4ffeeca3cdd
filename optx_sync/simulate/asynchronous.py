# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous training with a center that workers meet one by one."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.center import coded, contract
from optx_sync.center import worker as work
from optx_sync.center.buffers import Pending
from optx_sync.center.checks import check_delay
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import (
    Fragments,
    Partition,
    check_fragments,
    steps_between,
)
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_function, check_inner, integer
from optx_sync.exchange.contract import Exchange
from optx_sync.optimizers.rule import RuleState
from optx_sync.placement.axes import stack
from optx_sync.shapes import Array, Float, Int32
from optx_sync.simulate.engine import Engine
from optx_sync.simulate.replay import GradFn, Record, check_workers, replay
from optx_sync.trees import Tree, is_finite, row_of, where, with_row, zeros_like


class WorkerState(NamedTuple):
    """State of one worker; of all workers with a worker axis in front, [N, ...]."""

    params: Tree
    inner: Tree  # state of the workers' own optimizer
    taken: Tree  # the center that it took last, or () if the rule does not read it
    accumulated: Tree  # its sum since its last round, or ()
    exchange: Tree  # the memory of the code of its pushes, for each part, or ()
    local_step: Int32[Array, ""]  # its steps
    steps_since_round: Int32[Array, ""]
    rounds: Int32[Array, ""]  # its rounds
    # The next three are [P], one number for each of P parts, or scalars without parts.
    tokens: Float[Array, "*parts"]  # since its last round
    seen: Int32[Array, "*parts"]  # `applied` when it took the center
    ages: Int32[Array, "*parts"]  # its steps since its last round
    pending: Any  # with `delay`, its contribution on the way, a `Pending`; or ()
    broken: Any  # bool[], whether it was not finite since its last round; or ()


class AsynchronousState(NamedTuple):
    """State after one event of `asynchronous`."""

    workers: WorkerState  # [N, ...]
    center: Tree  # like the parameters, float32 for half precision
    # State of the rule's outer transformation, or (): with parts, one for each part.
    outer: Tree
    global_step: Int32[Array, ""]  # rounds of all workers
    applied: Int32[Array, ""]  # those of them whose contribution was not dropped


class AsynchronousRecord(NamedTuple):
    """The history of T events; each array has the values after the event."""

    # [K, ...] each, for the K events that `record` keeps; None if it is a function.
    params: Tree  # those of the worker that stepped, in their own dtypes
    center: Tree  # float32 for half precision parameters
    events: Int32[Array, " kept"]  # the numbers of these events, from 0
    local_step: Int32[Array, " events"]  # steps of the event's worker so far
    global_step: Int32[Array, " events"]  # rounds of all workers so far
    # [T, ...], the result of the function `record` after each event; None without one.
    recorded: Tree
    final: AsynchronousState  # after the last event
    push_bytes: float  # bytes sent in one contribution, that of the largest part


def asynchronous(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    params: optax.Params,
    grad_fn: GradFn,
    workers: ArrayLike | Sequence[int],
    *,
    num_workers: int,
    communication_period: Period = 10,
    exchange: Exchange | None = None,
    fragments: Fragments | None = None,
    delay: int | None = None,
    keep_local: float | jax.Array | None = None,
    drop_nonfinite: bool = False,
    record: Record = None,
    weigh: Weigh | None = None,
    tokens: ArrayLike | Sequence[float] | None = None,
) -> AsynchronousRecord:
    r"""Simulate asynchronous training with a center that workers meet one by one.

    An event is one step of the worker w that `workers` names. `inner` turns its
    gradient into its update. When its steps since its last round reach
    `communication_period`, it meets the center alone, as `rule` says:

    .. math::

        c' \leftarrow \text{absorb}(c,\; \text{contribution of } w), \qquad
        x_w \leftarrow \text{take}(x_w, c, c')

    No other worker pushes between the two. With `mean_over="workers"` the contribution
    is divided by N. All workers and the center start at `params`.

    It reproduces recorded runs of TensorFlow's `ElasticAverageOptimizer` and
    `AGNOptimizer` to 1e-6. There the running powers of Adam's betas advance both in a
    worker's own step and in its step on the center; so they do here for
    `agn_rule(inner)` with the same `inner`, an optimizer of this package.
    `agn_rule(inner)` with a period of 1 is asynchronous SGD (DOWNPOUR).

    Args:
        inner: The workers' own optimizer.
        rule: What workers and center exchange, for example `local_sgd_rule()`.
        params: The parameters at which all start, without a worker axis.
        grad_fn: `(worker, params, event) -> gradients`, traced; `worker` and `event`
            are int32 scalars.
        workers: int[T], the worker of each event. Traced, a number that names no worker
            changes nothing.
        num_workers: N.
        communication_period: A worker's steps between its rounds: an int, or a schedule
            of its own step (0-based).
        exchange: How a worker compresses its pushes, array by array; not for rules
            whose contribution reads the center, such as `elastic_rule`. `None`: not at
            all.
        fragments: As in `center_variable`: in its k-th round a worker exchanges part k
            mod P.
        delay: As in `center_variable`, in steps of the worker.
        keep_local: As in `center_variable`.
        drop_nonfinite: As in `center_variable`.
        record: Which history of `params` and `center` to keep. `None`: all, or every
            n-th event so that it takes at most 256 MB. `"all"`. An int n: every n-th. A
            function of (params, center): its results are `recorded` instead.
        weigh: `(at: Round) -> factor`, traced: the factor of a contribution, from its
            `staleness`, `tokens` and `num_pushed`. 0 drops it:
            `lambda at: at.staleness <= 2` is TensorFlow's `DropStaleGradientOptimizer`.
            Not with `fragments` or `delay`.
        tokens: [T], the tokens or examples behind each gradient, for `weigh`.

    Returns:
        An `AsynchronousRecord`.

    Raises:
        TypeError: An argument of a wrong type; gradients or parameters that are not
            floating.
        ValueError: A number out of range or of another shape; options that exclude each
            other; gradients that do not match the parameters.

    Example:
        Two workers, the first one twice as fast:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> target = jnp.array([1.0, 3.0])
        >>> run = oxs.simulate.asynchronous(
        ...     optax.sgd(0.5),
        ...     oxs.rules.local_sgd(),
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
        Dean et al., "Large Scale Distributed Deep Networks", 2012 (DOWNPOUR).
    """
    call = "oxs.simulate.asynchronous(optax.sgd(0.1), oxs.rules.local_sgd(), ...)"
    inner = check_inner(inner, call)
    check_function("grad_fn", grad_fn, "It takes (worker, params, event).")
    contract.check_rule(rule, call)
    num_workers = integer("num_workers", num_workers, "Pass for example 8.")
    if rule.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for num_workers={rule.num_workers}; got num_workers="
            f"{num_workers}. Leave num_workers out of the rule, or make them equal."
        )
    rule = contract.weighed(rule, weigh)
    if rule.weigh is not None and (fragments is not None or delay):
        raise ValueError(
            "weigh= is for contributions that land whole and at once; got fragments or "
            "delay as well. Leave one of them out."
        )
    period = contract.check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    exchange = coded.check_code(exchange, rule)
    fragments, delay = check_fragments(fragments), check_delay(delay)
    params = jax.tree.map(jnp.asarray, params)
    workers = check_workers(workers, num_workers)
    if tokens is not None and np.shape(tokens) != workers.shape:
        raise ValueError(
            f"tokens must hold a number for each of the {len(workers)} events; got "
            f"shape {np.shape(tokens)}."
        )
    center = work.start_center(params)
    parts = Partition(fragments, center)
    at = Round(num_workers, contract.static_period(period), 1)
    keeping = work.keeping(rule, keep_local)
    engine = Engine(inner, keeping, exchange, parts, at, grad_fn)
    between = steps_between(period, parts.number, delay)
    run = _Run(engine, drop_nonfinite, delay, between, tokens)
    (final, _), counts, views, recorded, events = replay(
        run.advance, run.view, (run.start(params), params), workers, record
    )
    push_bytes = max(engine.bytes_of_parts(center))
    # What `view` and `advance` return stands in the order of the record's fields.
    in_order = (*views, events, *counts, recorded, final, push_bytes)
    return AsynchronousRecord._make(in_order)


class _Now(NamedTuple):
    """What a round may change."""

    worker: Worker
    exchange: Tree
    center: Center
    pending: Any
    counts: Any  # bool[], whether the contribution of this event is not dropped


# All workers, and the parameters of the one that stepped.
_Machine: TypeAlias = tuple[AsynchronousState, Tree]


class _Run(NamedTuple):
    """The checked arguments of `asynchronous`, and the functions of a run."""

    engine: Engine
    drop_nonfinite: bool
    delay: int
    between: Period  # steps from one exchange of a worker to its next
    tokens: ArrayLike | Sequence[float] | None

    def start(self, params: Tree) -> AsynchronousState:
        """The initial state: all workers and the center at the parameters."""
        number = self.engine.parts.number
        center, count = work.start_center(params), jnp.zeros((), jnp.int32)
        each = number if number > 1 else ()
        own, codes = self.engine.start(params, center)
        worker = WorkerState(
            **own._asdict(),
            exchange=codes,
            local_step=count,
            steps_since_round=count,
            rounds=count,
            tokens=jnp.zeros(each, jnp.float32),
            seen=jnp.zeros(each, jnp.int32),
            ages=jnp.zeros(each, jnp.int32),
            pending=Pending(zeros_like(center), count, jnp.bool_(False))
            if self.delay
            else (),
            broken=jnp.bool_(False) if self.drop_nonfinite else (),
        )
        return AsynchronousState(
            workers=stack(worker, self.engine.at.num_workers, None),
            center=center,
            outer=self.engine.start_outer(center),
            global_step=count,
            applied=count,
        )

    def advance(
        self, machine: _Machine, event: tuple[jax.Array, jax.Array]
    ) -> tuple[_Machine, tuple[jax.Array, ...]]:
        """The workers and the center after an event, and its counters."""
        state, _ = machine
        worker, number = event
        place = jnp.clip(worker, 0, self.engine.at.num_workers - 1)
        # The conditional skips workers that do not exist. It also saves time: without
        # it XLA fuses the read of one stacked array with the write of another, and then
        # copies both, the states of all workers, in every event.
        none = jnp.zeros((), jnp.int32)
        own, (center, outer), rounds, applied = jax.lax.cond(
            place == worker,
            lambda *operands: self.step(number, place, *operands),
            lambda *operands: (*operands[:-1], none, none),
            *(row_of(state.workers, place), Center(state.center, state.outer)),
            state.applied,
        )
        state = AsynchronousState(
            workers=with_row(state.workers, place, own),
            center=center,
            outer=outer,
            global_step=state.global_step + rounds,
            applied=state.applied + applied,
        )
        return (state, own.params), (own.local_step, state.global_step)

    def view(self, machine: _Machine) -> tuple[Tree, Tree]:
        """The trees that a record keeps of an event."""
        state, params = machine
        return params, state.center

    def step(
        self,
        number: jax.Array,
        place: jax.Array,
        own: WorkerState,
        center: Center,
        applied: jax.Array,
    ) -> tuple[WorkerState, Center, jax.Array, jax.Array]:
        """(the worker after its step, the center, whether they met, and that counted).

        The last two are int32[], as is `applied`, the rounds so far that counted.
        """
        engine, parts = self.engine, self.engine.parts.number
        steps, ages = own.steps_since_round + 1, own.ages + 1
        count = 1.0 if self.tokens is None else jnp.asarray(self.tokens)[number]
        tokens = own.tokens + jnp.float32(count)
        due = work.is_due(self.between, steps, own.local_step)
        before = Worker(own.params, own.inner, own.taken, own.accumulated)
        worker = engine.walk(before, center.value, place, number, steps)
        broken = own.broken
        if self.drop_nonfinite:
            broken |= ~is_finite(worker.params)
            worker = work.stand_still(before, worker, broken)
        now = _Now(worker, own.exchange, center, own.pending, jnp.bool_(False))
        if self.delay:
            lands = (own.rounds != 0) & (own.steps_since_round < self.delay)
            lands &= (steps >= self.delay) | due
            last = (own.rounds - 1) % parts
            now = jax.lax.cond(
                lands, lambda x: engine.of_part(self.arrive, last, x), lambda x: x, now
            )
        pushed = jnp.broadcast_to(own.rounds + 1, ages.shape)
        known = {"staleness": applied - own.seen, "tokens": tokens}
        known |= {"steps": ages, "num_pushed": pushed}
        part, meet = own.rounds % parts, functools.partial(self.meet, known, broken)
        now = jax.lax.cond(
            due, lambda x: engine.of_part(meet, part, x), lambda x: x, now
        )
        met, counted = due, now.counts.astype(jnp.int32)
        if parts > 1:
            met = due & (jnp.arange(parts, dtype=jnp.int32) == part)
        met_now = jnp.asarray(due, jnp.int32)
        own = WorkerState(
            **now.worker._asdict(),
            exchange=now.exchange,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            rounds=own.rounds + met_now,
            tokens=jnp.where(met, 0.0, tokens),
            seen=jnp.where(met, applied + counted, own.seen),
            ages=jnp.where(met, jnp.zeros_like(ages), ages),
            pending=now.pending,
            broken=where(due, zeros_like(broken), broken),
        )
        return own, now.center, met_now, counted

    def meet(
        self, known: dict[str, jax.Array], broken: Tree, part: int, now: _Now
    ) -> _Now:
        """A worker contributes to a part, and takes it at once or sends it off."""
        engine, rule = self.engine, self.engine.rule
        of_part = {name: x[part] if x.ndim else x for name, x in known.items()}
        at = engine.at._replace(**of_part)
        worker, brought = engine.bring(part, now.worker, now.center.value, at)
        well = ~broken & is_finite(brought) if self.drop_nonfinite else True
        brought = work.share_of_one(rule, brought, at)
        brought, codes = engine.sent(part, brought, now.exchange)
        brought, counts = work.weigh_alone(rule, brought, at)
        if self.drop_nonfinite:
            codes = where(well, codes, now.exchange)
        now = now._replace(worker=worker, exchange=codes, counts=counts & well)
        if self.delay:
            values = engine.parts.put(now.pending.values, part, brought)
            now = now._replace(pending=Pending(values, at.steps, now.counts))
        else:
            now = self.land(part, now, brought, now.counts, at)
        if self.drop_nonfinite:
            mended = work.mend(engine.inner, now.worker, now.center.value, well)
            now = now._replace(worker=mended)
        return now

    def arrive(self, part: int, now: _Now) -> _Now:
        """What a worker sent off lands."""
        values, steps, counts = now.pending
        at = self.engine.at._replace(steps=steps)
        return self.land(part, now, self.engine.parts.pick(values, part), counts, at)

    def land(self, part: int, now: _Now, total: Tree, counts: Any, at: Round) -> _Now:
        """The center absorbs a contribution, if it counts, and its worker takes it."""
        engine, rule, worker = self.engine, self.engine.rule, now.worker
        before = seen = engine.seen(part, now.center)
        shared = rule.outer is engine.inner
        if shared:
            before = before._replace(outer=_with_powers(before.outer, worker.inner))
        drops = self.drop_nonfinite or rule.weigh is not None
        extra = {"num_workers": at.num_workers}
        after = engine.absorbed(before, total, counts if drops else None, **extra)
        if shared:
            worker = worker._replace(inner=_with_powers(worker.inner, after.outer))
        worker = engine.take(part, worker, seen.value, after.value, at)
        center = engine.moved(part, now.center, after)
        return now._replace(worker=worker, center=center)


def _with_powers(state: optax.OptState, source: optax.OptState) -> optax.OptState:
    """A state with the running powers of another state of the same optimizer.

    The powers are replaced at any depth of chains and masks; all else stays.
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
