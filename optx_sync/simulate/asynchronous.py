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

from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import Fragments, steps_between
from optx_sync.center.worker import Center, Worker
from optx_sync.core.checks import integer
from optx_sync.core.shapes import Array, Bool, Float, Int32
from optx_sync.core.trees import Tree, row_of, with_row, zeros_like
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings import alone
from optx_sync.meetings.alone import check_delay
from optx_sync.simulate.engine import Engine, engine_of
from optx_sync.simulate.replay import GradFn, Record, check_workers, replay
from optx_sync.state.leaves import stack


class OnTheWay(NamedTuple):
    """A worker's contribution on its way to the center."""

    values: Tree  # like the center: the part that it is to, zeros elsewhere
    steps: Int32[Array, ""]  # behind it
    counts: Bool[Array, ""]  # whether the center absorbs it


class WorkerState(NamedTuple):
    """State of one worker; of all workers with a worker axis in front, [N, ...].

    Attributes:
        worker: What it holds: `params`, `inner`, `taken` and `accumulated`.
        exchange: The memory of the code of its pushes, for each part; or ().
        local_step: int32[], its steps.
        rounds: int32[], its rounds.
        tokens: float32[P], for each part: tokens behind its gradients since its last
            round.
        seen: int32[P], for each part: `AsynchronousState.applied` after its last round,
            0 before the first.
        ages: int32[P], for each part: its steps since its last round.
        pending: With `delay`, its contribution that was made last, with the steps
            behind it and whether the center absorbs it; otherwise ().
        broken: bool[], with `drop_nonfinite`: whether it was not finite since its last
            round. Otherwise ().
    """

    worker: Worker
    exchange: Tree
    local_step: Int32[Array, ""]
    rounds: Int32[Array, ""]
    tokens: Float[Array, " parts"]
    seen: Int32[Array, " parts"]
    ages: Int32[Array, " parts"]
    pending: Any
    broken: Any

    @property
    def params(self) -> Tree:
        """Its parameters."""
        return self.worker.params

    @property
    def inner(self) -> Tree:
        """The state of its own optimizer."""
        return self.worker.inner

    @property
    def taken(self) -> Tree:
        """The center that it took last, or () if the rule does not read it."""
        return self.worker.taken

    @property
    def accumulated(self) -> Tree:
        """Its sum since its last round, or ()."""
        return self.worker.accumulated


class AsynchronousState(NamedTuple):
    """State after one event of `asynchronous`.

    Attributes:
        workers: All workers, [N, ...].
        center: A tree like the parameters, float32 for half precision.
        outer: State of the rule's outer transformation, or (): with parts, one for each
            part.
        global_step: int32[], rounds of all workers.
        applied: int32[], those of them whose contribution was not dropped.
    """

    workers: WorkerState
    center: Tree
    outer: Tree
    global_step: Int32[Array, ""]
    applied: Int32[Array, ""]


class AsynchronousRecord(NamedTuple):
    """The history of T events; each array has the values after the event.

    `record` keeps K of them.

    Attributes:
        params: [K, ...], the parameters of the worker that stepped, in their own
            dtypes; `None` if `record` is a function.
        center: [K, ...], the center, float32 for half precision parameters; `None` if
            `record` is a function.
        events: int32[K] of NumPy, the numbers of these events, from 0.
        local_step: int32[T], steps of the event's worker so far.
        global_step: int32[T], rounds of all workers so far.
        recorded: [T, ...], the result of the function `record` after each event; `None`
            without one.
        final: The state after the last event.
        push_bytes: Bytes sent in one contribution, that of the largest part.
    """

    params: Tree
    center: Tree
    events: np.ndarray
    local_step: Int32[Array, " events"]
    global_step: Int32[Array, " events"]
    recorded: Tree
    final: AsynchronousState
    push_bytes: float


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
    is divided by N. All workers and the center start at `params`. It is `decoupled`
    with meetings of one, in a given order of steps and not in that of a clock.

    It reproduces recorded runs of TensorFlow's `ElasticAverageOptimizer` and
    `AGNOptimizer` to 1e-6. There the running powers of Adam's betas advance both in a
    worker's own step and in its step on the center; so they do here for
    `oxs.rules.agn(inner)` with the same `inner`, an optimizer of this package.
    `oxs.rules.agn(inner)` with a period of 1 is asynchronous SGD (DOWNPOUR).

    Args:
        inner: The workers' own optimizer.
        rule: What workers and center exchange, for example `oxs.rules.local_sgd()`.
        params: The parameters at which all start, without a worker axis.
        grad_fn: `(worker, params, event) -> gradients`, traced; `worker` and `event`
            are int32 scalars.
        workers: int[T], the worker of each event. Traced, a number that names no worker
            changes nothing.
        num_workers: N.
        communication_period: A worker's steps between its rounds: an int, or a schedule
            of its own step (0-based).
        exchange: How a worker compresses its pushes, array by array; not for rules
            whose contribution reads the center, such as `oxs.rules.elastic(...)`.
            `None`: not at all.
        fragments: As in `center_variable`: in its k-th round a worker exchanges part k
            mod P.
        delay: A worker's steps from its contribution until the center absorbs it and
            the worker takes the center; what it made meanwhile is overwritten.
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
        Dean et al., "Large Scale Distributed Deep Networks", 2012, NIPS 25 (DOWNPOUR).
    """
    call = "oxs.simulate.asynchronous(optax.sgd(0.1), oxs.rules.local_sgd(), ...)"
    num_workers = integer("num_workers", num_workers, "Pass for example 8.")
    engine, params = engine_of(
        call, inner, rule, params, grad_fn, num_workers=num_workers, weigh=weigh,
        communication_period=communication_period, exchange=exchange,
        fragments=fragments, drop_nonfinite=drop_nonfinite,
    )  # fmt: skip
    if engine.rule.weigh is not None and (fragments is not None or delay):
        raise ValueError(
            "weigh= is for contributions that land whole and at once; got fragments or "
            "delay as well. Leave one of them out."
        )
    workers, delay = check_workers(workers, num_workers), check_delay(delay)
    behind = jnp.ones(workers.shape) if tokens is None else jnp.asarray(tokens)
    if behind.shape != workers.shape:
        raise ValueError(
            f"tokens must hold a number for each of the {len(workers)} events; got "
            f"shape {behind.shape}."
        )
    between = steps_between(communication_period, engine.parts.number, delay)
    run = _OneByOne(engine, delay, between)
    machine, events = (run.start(params), params), (workers, jnp.float32(behind))
    done = replay(run.advance, run.view, machine, events, record)
    (final, _), (local_step, global_step) = done.state, done.values
    (each, centers), push_bytes = done.views, max(engine.part_bytes(params))
    return AsynchronousRecord(
        each, centers, done.events, local_step, global_step, done.recorded, final,
        push_bytes,
    )  # fmt: skip


# All workers, and the parameters of the one that stepped.
_Machine: TypeAlias = tuple[AsynchronousState, Tree]


class _OneByOne(NamedTuple):
    """The checked arguments of `asynchronous`: who steps, and when it meets the center.

    What a meeting does to the arrays, its `engine` says.
    """

    engine: Engine
    delay: int
    between: Period  # steps from one exchange of a worker to its next

    def start(self, params: Tree) -> AsynchronousState:
        """The initial state: all workers and the center at the parameters."""
        engine, center = self.engine, work.start_center(params)
        own, codes = engine.start(params, center)
        zero, zeros = jnp.int32(0), jnp.zeros(engine.parts.number, jnp.int32)
        pending = OnTheWay(zeros_like(center), zero, jnp.bool_(False))
        worker = WorkerState(
            worker=own,
            exchange=codes,
            local_step=zero,
            rounds=zero,
            tokens=zeros.astype(jnp.float32),
            seen=zeros,
            ages=zeros,
            pending=pending if self.delay else (),
            broken=jnp.bool_(False) if engine.drop_nonfinite else (),
        )
        workers = stack(worker, engine.at.num_workers, None)
        return AsynchronousState(
            workers, center, engine.start_outer(center), zero, zero
        )

    def advance(self, machine: _Machine, event: Any) -> tuple[_Machine, Any]:
        """The workers and the center after an event, and its counters."""
        state, _ = machine
        (worker, tokens), number = event
        place = jnp.clip(worker, 0, self.engine.at.num_workers - 1)
        # The conditional skips workers that do not exist. It also saves time: without
        # it XLA fuses the read of one stacked array with the write of another, and then
        # copies both, the states of all workers, in every event.
        step = functools.partial(self.step, place, number, tokens)
        now = state._replace(workers=row_of(state.workers, place))
        now = jax.lax.cond(place == worker, step, lambda same: same, now)
        own = now.workers
        state = now._replace(workers=with_row(state.workers, place, own))
        return (state, own.params), (own.local_step, state.global_step)

    def view(self, machine: _Machine) -> tuple[Tree, Tree]:
        """The trees that a record keeps of an event."""
        state, params = machine
        return params, state.center

    # From here on `now.workers` is the one of the event.

    def step(
        self, place: Any, number: Any, tokens: Any, now: AsynchronousState
    ) -> AsynchronousState:
        """A worker makes a step, and meets the center if it is due."""
        engine, own = self.engine, now.workers
        steps = own.ages.min() + 1  # since its last round, of whichever part
        due = work.is_due(self.between, steps, own.local_step)
        own = engine.walk(own, now.center, place, number, steps)
        own = own._replace(
            local_step=own.local_step + 1,
            tokens=own.tokens + tokens,
            ages=own.ages + 1,
        )
        now = now._replace(workers=own)
        if self.delay:
            lands = (steps == self.delay) | ((steps < self.delay) & due)
            lands &= own.rounds > 0
            now = self.of_turn(lands, own.rounds - 1, self.arrive, now)
        return self.of_turn(due, own.rounds, self.meet, now)

    def of_turn(
        self, due: Any, rounds: Any, change: Any, now: AsynchronousState
    ) -> AsynchronousState:
        """`change(the part whose turn it is, now)` if due, else now."""
        number = self.engine.parts.number
        branches = [functools.partial(change, part) for part in range(number)]
        turn = jnp.where(due, rounds % number, number)
        return jax.lax.switch(turn, [*branches, lambda same: same], now)

    def meet(self, part: int, now: AsynchronousState) -> AsynchronousState:
        """A worker contributes to a part, and takes it at once or sends it off."""
        engine, own = self.engine, now.workers
        at = engine.at._replace(
            steps=own.ages[part],
            staleness=now.applied - own.seen[part],
            tokens=own.tokens[part],
            num_pushed=own.rounds + 1,
        )
        own, brought, well = engine.bring(part, own, now.center, at)
        brought, counts = alone.weigh_alone(engine.rule, brought, at)
        counts &= well
        applied = now.applied + counts.astype(jnp.int32)
        own = own._replace(
            rounds=own.rounds + 1,
            tokens=own.tokens.at[part].set(0),
            seen=own.seen.at[part].set(applied),
            ages=own.ages.at[part].set(0),
            broken=zeros_like(own.broken),
        )
        if self.delay:
            values = engine.parts.put(own.pending.values, part, brought)
            own = own._replace(pending=OnTheWay(values, at.steps, counts))
        step = now.global_step + 1
        now = now._replace(workers=own, global_step=step, applied=applied)
        if not self.delay:
            now = self.land(part, now, brought, counts, at)
        if not engine.drop_nonfinite:
            return now
        worker = work.mend(engine.inner, now.workers.worker, now.center, well)
        return now._replace(workers=now.workers._replace(worker=worker))

    def arrive(self, part: int, now: AsynchronousState) -> AsynchronousState:
        """What a worker sent off lands."""
        values, steps, counts = now.workers.pending
        at = self.engine.at._replace(steps=steps)
        total = self.engine.parts.pick(values, part)
        return self.land(part, now, total, counts, at)

    def land(
        self, part: int, now: AsynchronousState, total: Tree, counts: Any, at: Round
    ) -> AsynchronousState:
        """The center absorbs a contribution, if it counts, and its worker takes it."""
        engine, center = self.engine, Center(now.center, now.outer)
        own, center, around = engine.land(part, now.workers, center, total, counts)
        own = engine.take(part, own, around, at)
        return now._replace(workers=own, center=center.value, outer=center.outer)
