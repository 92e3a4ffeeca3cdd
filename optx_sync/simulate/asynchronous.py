# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous training with a center that workers meet one by one."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.center import worker as work
from optx_sync.center.checks import check_delay
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import (
    Fragments,
    steps_between,
)
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import integer
from optx_sync.exchange.contract import Exchange
from optx_sync.placement.axes import stack
from optx_sync.shapes import Array, Bool, Float, Int32
from optx_sync.simulate.engine import Engine, engine_of, with_powers
from optx_sync.simulate.replay import GradFn, Record, check_workers, replay
from optx_sync.trees import Tree, is_finite, row_of, where, with_row, zeros_like


class Pending(NamedTuple):
    """A contribution on its way, before the center absorbs it."""

    values: Tree  # like the center
    steps: Int32[Array, ""]  # `Round.steps` of its round
    counts: Bool[Array, ""]  # whether the center absorbs it


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

    @property
    def worker(self) -> Worker:
        """What the rule knows of it."""
        return Worker(self.params, self.inner, self.taken, self.accumulated)


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
    num_workers = integer("num_workers", num_workers, "Pass for example 8.")
    engine, params = engine_of(
        call, inner, rule, params, grad_fn, num_workers=num_workers, weigh=weigh,
        communication_period=communication_period, exchange=exchange,
        fragments=fragments,
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
    run = _Run(engine, drop_nonfinite, delay, between)
    machine, events = (run.start(params), params), (workers, jnp.float32(behind))
    (final, _), counts, views, recorded, kept = replay(
        run.advance, run.view, machine, events, record
    )
    # What `view` and `advance` return stands in the order of the record's fields.
    in_order = (*views, kept, *counts, recorded, final, max(engine.part_bytes(params)))
    return AsynchronousRecord._make(in_order)


_State: TypeAlias = AsynchronousState
# All workers, and the parameters of the one that stepped.
_Machine: TypeAlias = tuple[_State, Tree]


class _Run(NamedTuple):
    """The checked arguments of `asynchronous`, and the functions of a run."""

    engine: Engine
    drop_nonfinite: bool
    delay: int
    between: Period  # steps from one exchange of a worker to its next

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

    def step(self, place: Any, number: Any, tokens: Any, now: _State) -> _State:
        """A worker makes a step, and meets the center if it is due."""
        engine, own = self.engine, now.workers
        before, steps = own.worker, own.steps_since_round + 1
        due = work.is_due(self.between, steps, own.local_step)
        worker = engine.walk(before, now.center, place, number, steps)
        if self.drop_nonfinite:
            own = own._replace(broken=own.broken | ~is_finite(worker.params))
            worker = work.stand_still(before, worker, own.broken)
        own = own._replace(
            **worker._asdict(),
            local_step=own.local_step + 1,
            steps_since_round=steps,
            tokens=own.tokens + tokens,
            ages=own.ages + 1,
        )
        now = now._replace(workers=own)
        if self.delay:
            lands = (steps == self.delay) | ((steps < self.delay) & due)
            lands &= own.rounds > 0
            now = self.of_turn(lands, own.rounds - 1, self.arrive, now)
        return self.of_turn(due, own.rounds, self.meet, now)

    def of_turn(self, due: Any, rounds: Any, change: Any, now: _State) -> _State:
        """`change(the part whose turn it is, now)` if due, else now."""
        number = self.engine.parts.number
        branches = [functools.partial(change, part) for part in range(number)]
        turn = jnp.where(due, rounds % number, number)
        return jax.lax.switch(turn, [*branches, lambda same: same], now)

    def meet(self, part: int, now: _State) -> _State:
        """A worker contributes to a part, and takes it at once or sends it off."""
        engine, rule, own = self.engine, self.engine.rule, now.workers
        i = part if engine.parts.number > 1 else ()
        at = engine.at._replace(
            steps=own.ages[i],
            staleness=now.applied - own.seen[i],
            tokens=own.tokens[i],
            num_pushed=own.rounds + 1,
        )
        worker, brought = engine.bring(part, own.worker, now.center, at)
        well = jnp.bool_(True)
        if self.drop_nonfinite:
            well = ~own.broken & is_finite(brought)
        brought = work.share_of_one(rule, brought, at)
        brought, codes = engine.sent(part, brought, own.exchange)
        brought, counts = work.weigh_alone(rule, brought, at)
        counts &= well
        applied = now.applied + counts.astype(jnp.int32)
        own = own._replace(
            **worker._asdict(),
            exchange=where(well, codes, own.exchange) if self.drop_nonfinite else codes,
            steps_since_round=jnp.zeros_like(own.rounds),
            rounds=own.rounds + 1,
            tokens=own.tokens.at[i].set(0),
            seen=own.seen.at[i].set(applied),
            ages=own.ages.at[i].set(0),
            broken=zeros_like(own.broken),
        )
        step = now.global_step + 1
        now = now._replace(workers=own, global_step=step, applied=applied)
        if self.delay:
            values = engine.parts.put(own.pending.values, part, brought)
            own = own._replace(pending=Pending(values, at.steps, counts))
            now = now._replace(workers=own)
        else:
            now = self.land(part, now, brought, counts, at)
        if not self.drop_nonfinite:
            return now
        worker = work.mend(engine.inner, now.workers.worker, now.center, well)
        return now._replace(workers=now.workers._replace(**worker._asdict()))

    def arrive(self, part: int, now: _State) -> _State:
        """What a worker sent off lands."""
        values, steps, counts = now.workers.pending
        at = self.engine.at._replace(steps=steps)
        total = self.engine.parts.pick(values, part)
        return self.land(part, now, total, counts, at)

    def land(
        self, part: int, now: _State, total: Tree, counts: Any, at: Round
    ) -> _State:
        """The center absorbs a contribution, if it counts, and its worker takes it."""
        engine, worker = self.engine, now.workers.worker
        drops = self.drop_nonfinite or engine.rule.weigh is not None
        shared = engine.rule.outer is engine.inner
        (center, outer), before, after = engine.absorb(
            part, Center(now.center, now.outer), total, counts if drops else None,
            powers=worker.inner if shared else None, num_workers=at.num_workers,
        )  # fmt: skip
        if shared:
            worker = worker._replace(inner=with_powers(worker.inner, after.outer))
        worker = engine.take(part, worker, before.value, after.value, at)
        own = now.workers._replace(**worker._asdict())
        return now._replace(workers=own, center=center, outer=outer)
