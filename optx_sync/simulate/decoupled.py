# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo on a virtual clock: meetings that close when enough have come."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Round, Weigh
from optx_sync.center.fragments import Fragments
from optx_sync.center.worker import Center, Worker
from optx_sync.core.checks import Refused, refuse
from optx_sync.core.shapes import Array, Float
from optx_sync.core.trees import Tree, is_nothing, row_of, where, with_row
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.meetings import alone
from optx_sync.meetings.quorum import Quorum, check_meet
from optx_sync.meetings.together import merged
from optx_sync.simulate.clock import (
    Failure,
    Happening,
    Kind,
    Link,
    PerStep,
    Timeline,
    check_number,
    clock,
)
from optx_sync.simulate.engine import Around, Engine, engine_of
from optx_sync.simulate.replay import GradFn, Record, replay
from optx_sync.state.leaves import stack


class Learner(NamedTuple):
    """State of one worker of `decoupled`; of all with a worker axis in front, [N].

    Attributes:
        worker: What it holds: parameters, the state of its optimizer, the center that
            it took, and what it summed up.
        exchange: The memory of the code of its pushes, for each part; or ().
        sent: Its contributions on the way, a tree like the center; () without `delay`.
        then: The parameters that they were made of; () without `delay`, or if the rule
            has a `take`.
        brought: Its contributions in a meeting, a tree like the center.
        before: The center before its last meeting, as it was answered; () if the rule
            has no `take`.
        after: The center after its last meeting, as it was answered.
        weights: float32[P], for each part: the weight of what is in a meeting.
    """

    worker: Worker
    exchange: Tree
    sent: Tree
    then: Tree
    brought: Tree
    before: Tree
    after: Tree
    weights: Float[Array, " parts"]


class DecoupledState(NamedTuple):
    """State after one event of `decoupled`.

    Attributes:
        learners: All workers, [N, ...].
        center: A tree like the parameters, float32 for half precision.
        outer: State of the rule's outer transformation, for each part; or ().
        params: The parameters of the worker of the event; a CLOSE has none, and leaves
            those of the event before it.
    """

    learners: Learner
    center: Tree
    outer: Tree
    params: Tree


class DecoupledRecord(NamedTuple):
    """The history of T events; each array has the values after the event.

    `record` keeps K of them.

    Attributes:
        params: [K, ...], the parameters of the worker of the event, in their own
            dtypes; a CLOSE has none, and repeats those of the event before it. `None`
            if `record` is a function.
        center: [K, ...], the center, float32 for half precision parameters; `None` if
            `record` is a function.
        events: int32[K] of NumPy, the numbers of these events in the timeline, from 0.
        seconds: float64[K] of NumPy, when they happened.
        recorded: [T, ...], the result of the function `record` after each event; `None`
            without one.
        final: The state after the last event.
        timeline: What happened: goodput, staleness, bytes, participation.
    """

    params: Tree
    center: Tree
    events: np.ndarray
    seconds: np.ndarray
    recorded: Tree
    final: DecoupledState
    timeline: Timeline


_NOT_DECOUPLED: Refused["_ByMeetings"] = (
    (
        lambda o: o.delay and o.engine.alone and "center" in o.engine.rule.reads,
        "The contribution of this rule reads the center as it is when it arrives, and "
        "with delay={0.delay} its worker has gone on by then. Leave delay out, or write"
        " the rule with own.taken and declare what it reads.",
    ),
    (
        lambda o: o.engine.rule.weigh is not None and not o.merge.takes_weights,
        "merge= counts all contributions alike and takes no weights. Leave weigh out, "
        "or merge with another exchange.",
    ),
)


def decoupled(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    params: optax.Params,
    grad_fn: GradFn,
    seconds: PerStep,
    *,
    until: float,
    num_workers: int | None = None,
    meet: Quorum | None = None,
    communication_period: int = 10,
    exchange: Exchange | None = None,
    fragments: Fragments | None = None,
    delay: int | None = None,
    link: Link | None = None,
    failures: Sequence[Failure] = (),
    tokens: PerStep | None = None,
    weigh: Weigh | None = None,
    record: Record = None,
) -> DecoupledRecord:
    r"""Decoupled DiLoCo on a virtual clock: a meeting closes when enough have come.

    The order of events is that of `clock`, which says who meets whom and when. In it
    the workers of a meeting of part p, with their contributions d_w and weights f_w:

    .. math::

        d = \text{merge}(d_w, f_w), \qquad c_p \leftarrow \text{outer}(c_p, d), \qquad
        x_{w,p} \leftarrow \text{take}(x_{w,p}, c_p)

    where merge is the weighted mean, or that of `meet`, and each worker takes the
    answer when `clock` says. If K is the number of workers, all are equally fast and
    nothing takes time, it is `oxs.diloco(fragments=)` in lockstep. With
    `oxs.runtime.one()` and without `delay` it is `asynchronous` in the order of
    `clock`; with `delay` the center absorbs a contribution when it arrives, and in
    `asynchronous` when its worker takes the answer.

    Args:
        inner: The workers' own optimizer. One that has died begins with a new state.
        rule: What workers and center exchange, for example `oxs.rules.diloco()`.
        params: The parameters at which all start, without a worker axis.
        grad_fn: `(worker, params, step) -> gradients`, traced; `step` is the number of
            the step among those of all workers, from 0 on.
        seconds: As in `clock`, as are `until`, `num_workers`, `meet`, `delay`, `link`,
            `failures` and `tokens`.
        until: The second at which it ends.
        num_workers: N.
        meet: `oxs.runtime.quorum(k)`, or `None` for `oxs.runtime.one()`.
        communication_period: H; see `clock`.
        exchange: How a worker compresses its pushes; see `asynchronous`.
        fragments: As in `center_variable`: P parts, which meet one by one.
        delay: A worker's steps from its contribution until it takes the answer; what it
            made meanwhile is overwritten. Of an answer that comes later it keeps that:
            its parameters become the center's, plus what they moved since.
        link: Seconds of messages, whose bytes are those of the parts.
        failures: Each `(worker, dies at, is back at)`.
        tokens: Behind each step.
        weigh: `(at: Round) -> weight` of a contribution in the mean, traced; 0 drops
            it. `lambda at: at.tokens**2 / at.steps` is the paper's. In a meeting of one
            it is the factor of the contribution, as in `asynchronous`, and a rule of
            sums adds up contributions times their factors; but `staleness` counts those
            that were dropped, too, since the clock knows no numbers.
        record: As in `asynchronous`; an event is one of the timeline.

    Returns:
        A `DecoupledRecord`.

    Raises:
        TypeError: An argument of a wrong type; parameters that are not floating.
        ValueError: A number out of range; options that exclude each other.

    Example:
        Three workers, one of them slow, and two are enough:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> run = oxs.simulate.decoupled(
        ...     optax.sgd(0.1),
        ...     oxs.rules.diloco(optax.sgd(1.0)),
        ...     jnp.zeros(()),
        ...     lambda worker, params, step: params - 1.0,
        ...     [1.0, 1.0, 4.0],
        ...     until=41,
        ...     meet=oxs.runtime.quorum(2),
        ...     communication_period=4,
        ... )
        >>> f"{run.final.center:.2f}, {run.timeline.participation:.0%}"
        '0.99, 67%'

    References:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026, arXiv 2604.21428.
    """
    call = "oxs.simulate.decoupled(optax.sgd(0.1), oxs.rules.diloco(), ...)"
    meet = check_meet(meet)
    engine, params = engine_of(
        call, inner, rule, params, grad_fn, weigh=weigh, alone=not meet.shared,
        num_workers=check_number(seconds, num_workers), exchange=exchange,
        communication_period=communication_period, fragments=fragments,
    )  # fmt: skip
    timeline = clock(
        seconds, until=until, num_workers=num_workers, meet=meet, delay=delay,
        communication_period=communication_period, link=link, failures=failures,
        part_bytes=engine.part_bytes(params), tokens=tokens,
    )  # fmt: skip
    run = _ByMeetings(engine, check_exchange(meet.merge, all_reduce()), delay or 0)
    refuse(run, _NOT_DECOUPLED)
    events = _rows(timeline)
    done = replay(run.advance, run.view, run.start(params), events, record)
    each, centers = done.views
    happened = np.array([event.second for event in timeline.events])[done.events]
    return DecoupledRecord(
        each, centers, done.events, happened, done.recorded, done.state, timeline
    )


_Row: TypeAlias = Any  # a `Happening` whose fields are arrays; `come` is bool[N]


def _rows(timeline: Timeline) -> _Row:
    """The events as arrays, each [T]."""
    come = np.zeros((len(timeline.events), timeline.num_workers), bool)
    for row, event in zip(come, timeline.events, strict=True):
        row[list(event.come)] = True

    def column(name):
        dtype = np.float32 if name in ("second", "tokens") else np.int32
        return np.array([getattr(event, name) for event in timeline.events], dtype)

    names: Any = Happening._fields[:-1]
    return Happening(*map(column, names), come=come)  # pyright: ignore


class _ByMeetings(NamedTuple):
    """The checked arguments of `decoupled`, and what happens in its events."""

    engine: Engine
    merge: Exchange
    delay: int  # the steps of a worker between its push and its answer

    def start(self, params: Tree) -> DecoupledState:
        """All workers and the center at the parameters."""
        engine, center = self.engine, work.start_center(params)
        worker, codes = engine.start(params, center)
        learner = Learner(
            worker,
            codes,
            sent=center if self.delay else (),
            then=params if self.delay and engine.rule.take is None else (),
            brought=center,
            before=() if engine.rule.take is None else center,
            after=center,
            weights=jnp.zeros(engine.parts.number, jnp.float32),
        )
        learners = stack(learner, engine.at.num_workers, None)
        return DecoupledState(learners, center, engine.start_outer(center), params)

    def view(self, state: DecoupledState) -> tuple[Tree, Tree]:
        """The trees that a record keeps of an event."""
        return state.params, state.center

    def advance(
        self, state: DecoupledState, event: tuple[_Row, jax.Array]
    ) -> tuple[DecoupledState, tuple[()]]:
        """The state after an event: a meeting that closes, or what one worker does."""
        row, _ = event
        close = self.of_part(self.land if self.engine.alone else self.close)
        return jax.lax.cond(row.kind == Kind.CLOSE, close, self.act, state, row), ()

    def act(self, state: DecoupledState, row: _Row) -> DecoupledState:
        """What one worker does, which moves nothing but its own."""
        # The contribution of a worker that waits is made when it arrives.
        push = self.of_part(self.push) if self.delay else self.nothing
        join, late, take = map(self.of_part, (self.join, self.late, self.take))
        none = self.nothing  # A worker that died gets all when it is back.
        in_order = [self.step, push, join, late, none, take, none, self.back]
        own = row_of(state.learners, row.worker)
        own = jax.lax.switch(row.kind, in_order, own, state.center, row)
        learners = with_row(state.learners, row.worker, own)
        return state._replace(learners=learners, params=own.worker.params)

    def of_part(self, handler: Callable) -> Callable:
        """What calls the handler of this row's part."""
        numbers = range(self.engine.parts.number)
        branches = [functools.partial(handler, number) for number in numbers]
        return lambda *operands: jax.lax.switch(operands[-1].part, branches, *operands)

    def nothing(self, own: Learner, center: Tree, row: _Row) -> Learner:
        """Nothing happens to a worker's numbers."""
        return own

    def step(self, own: Learner, center: Tree, row: _Row) -> Learner:
        """A worker makes a step of its own."""
        return self.engine.walk(own, center, row.worker, row.number, row.steps)

    def back(self, own: Learner, center: Tree, row: _Row) -> Learner:
        """A worker that had died starts from the center."""
        params = work.round_like(center, own.worker.params)
        worker, codes = self.engine.start(params, center)
        return own._replace(worker=worker, exchange=codes)

    def round_of(self, row: _Row) -> Round:
        """What a rule may know of a contribution."""
        known = {"steps": row.steps, "tokens": row.tokens, "num_pushed": row.number}
        return self.engine.at._replace(staleness=row.staleness, **known)

    def push(self, part: int, own: Learner, center: Tree, row: _Row) -> Learner:
        """A worker that will go on sends its contribution to a part."""
        own, brought, _ = self.engine.bring(part, own, center, self.round_of(row))
        pick, put = self.engine.parts.pick, self.engine.parts.put
        if not is_nothing(own.then):
            then = put(own.then, part, pick(own.worker.params, part))
            own = own._replace(then=then)
        return own._replace(sent=put(own.sent, part, brought))

    def join(self, part: int, own: Learner, center: Tree, row: _Row) -> Learner:
        """A contribution joins a meeting."""
        at, rule, parts = self.round_of(row), self.engine.rule, self.engine.parts
        if self.delay:
            brought = parts.pick(own.sent, part)
        else:
            own, brought, _ = self.engine.bring(part, own, center, at)
        if self.engine.alone:
            brought, weight = alone.weigh_alone(rule, brought, at)
        else:
            factor = alone.factor_of(rule, at)
            weight = 1.0 if factor is None else factor
        return own._replace(
            brought=parts.put(own.brought, part, brought),
            weights=own.weights.at[part].set(jnp.asarray(weight, jnp.float32)),
        )

    def late(self, part: int, own: Learner, center: Tree, row: _Row) -> Learner:
        """A contribution is dropped, and its worker answered with the center."""
        if not self.delay:
            own, *_ = self.engine.bring(part, own, center, self.round_of(row))
        now = self.engine.parts.pick(center, part)
        return self.answered(part, own, (now, now))

    def answered(self, part: int, own: Learner, around: Around) -> Learner:
        """A worker for which an answer is on its way."""
        put, (before, after) = self.engine.parts.put, around
        if not is_nothing(own.before):
            own = own._replace(before=put(own.before, part, before))
        return own._replace(after=put(own.after, part, after))

    def take(self, part: int, own: Learner, center: Tree, row: _Row) -> Learner:
        """A worker takes its answer."""
        engine, pick = self.engine, self.engine.parts.pick
        around = pick(own.before, part), pick(own.after, part)
        at = engine.at._replace(steps=row.steps)
        taken = engine.take(part, own, around, at)
        if is_nothing(own.then):
            return taken
        added = engine.take(part, own, around, at, pick(own.then, part))
        return where(row.number > self.delay, added, taken)

    def land(self, part: int, state: DecoupledState, row: _Row) -> DecoupledState:
        """The center absorbs what one worker has brought alone, and answers."""
        engine, who = self.engine, jnp.argmax(row.come)
        own, center = row_of(state.learners, who), Center(state.center, state.outer)
        brought, counts = engine.parts.pick(own.brought, part), own.weights[part] > 0
        own, center, around = engine.land(part, own, center, brought, counts)
        own = self.answered(part, own, around)
        learners = with_row(state.learners, who, own)
        return DecoupledState(learners, *center, state.params)

    def close(self, part: int, state: DecoupledState, row: _Row) -> DecoupledState:
        """The center absorbs what has come to a meeting, and answers."""
        engine, learners = self.engine, state.learners
        # What others hold is of earlier meetings, and counts for nothing.
        weights, counts = row.come, None
        if engine.rule.weigh is not None:
            weights = jnp.where(row.come, learners.weights[:, part], 0)
            counts = jnp.any(weights > 0)
        brought = jax.vmap(lambda x: engine.parts.pick(x, part))(learners.brought)
        total = merged(self.merge, engine.rule, brought, weights)
        center = Center(state.center, state.outer)
        # As in lockstep, an outer optimizer sees the workers of a meeting as one.
        center, around = engine.absorb(part, center, total, counts)

        def answer(own, has_come):
            return where(has_come, self.answered(part, own, around), own)

        learners = jax.vmap(answer)(learners, row.come)
        return DecoupledState(learners, *center, state.params)
