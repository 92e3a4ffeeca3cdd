# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous training with a center that workers meet one by one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.center import coded, contract
from optx_sync.center import worker as work
from optx_sync.center.checks import check_delay
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import (
    Fragments,
    Partition,
    check_fragments,
    steps_between,
)
from optx_sync.center.rounds import AtOnce, Later, Step
from optx_sync.center.turns import Now
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_function, check_grads, check_inner, integer
from optx_sync.exchange.contract import Exchange
from optx_sync.metrics import SharedInfo
from optx_sync.optimizers.rule import RuleState
from optx_sync.placement.axes import stack
from optx_sync.shapes import Array, Float, Int32
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
    # The next two are [P], one number for each of P parts, or scalars without parts.
    tokens: Float[Array, "*parts"]  # since its last round
    seen: Int32[Array, "*parts"]  # `applied` when it took the center
    ages: Any  # int32[P], its steps since its last round of each part; () without parts
    pending: Any  # with `delay`, its contributions on the way, a `Pending`; or ()
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
    phases = _Phases(
        inner,
        work.keeping(rule, keep_local),
        coded.check_code(exchange, rule),
        drop_nonfinite,
    )
    fragments, delay = check_fragments(fragments), check_delay(delay)
    params = jax.tree.map(jnp.asarray, params)
    workers = check_workers(workers, num_workers)
    if tokens is not None and np.shape(tokens) != workers.shape:
        raise ValueError(
            f"tokens must hold a number for each of the {len(workers)} events; got "
            f"shape {np.shape(tokens)}."
        )
    parts = Partition(fragments, work.start_center(params))
    run = _Run(
        phases,
        AtOnce(phases) if not delay else Later(phases, delay),
        parts,
        period,
        steps_between(period, parts.number, delay),
        num_workers,
        grad_fn,
        tokens,
    )
    start = run.start(params)
    (final, _), counts, views, recorded, events = replay(
        run.advance, run.view, (start, params), workers, record
    )
    push_bytes = run.push_bytes(start.center)
    # What `view` and `advance` return stands in the order of the record's fields.
    in_order = (*views, events, *counts, recorded, final, push_bytes)
    return AsynchronousRecord._make(in_order)


class _Phases(NamedTuple):
    """The phases of a round of one worker that meets the center alone."""

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    exchange: Exchange | None
    drop_nonfinite: bool

    @property
    def drops(self) -> bool:
        """Whether the center may stay in a round."""
        return self.drop_nonfinite or self.rule.weigh is not None

    def remember(self, part: Tree) -> Tree:
        """The memory of the code for a part, before the first round."""
        return () if self.exchange is None else coded.start_codes(self.exchange, part)

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, the contribution of this worker that the center is to absorb)."""
        rule, at, well = self.rule, step.at(part), now.well
        worker, pushed = work.bring(rule, now.worker, now.center.value, at)
        if self.drop_nonfinite:
            well = well & is_finite(pushed)
            pushed = where(well, pushed, jax.tree.map(jnp.zeros_like, pushed))
        pushed, codes = work.share_of_one(rule, pushed, at), now.exchange
        if self.exchange is not None:
            messages, codes = coded.encoded(self.exchange, pushed, codes)
            pushed = coded.decoded(self.exchange, messages, pushed)
            if self.drop_nonfinite:
                codes = where(well, codes, now.exchange)
        now = now._replace(worker=worker, exchange=codes, well=well)
        pushed, counts = work.weigh_alone(rule, pushed, at)
        if self.drops:
            counts &= well if self.drop_nonfinite else True
            info = SharedInfo(dropped=(~counts).astype(jnp.int32))
            now = now._replace(weight=counts.astype(jnp.float32), info=info)
        return now, pushed

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """The contribution and how it counts: 0 if it is dropped."""
        return now, contribution, now.weight if self.drops else ()

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The center absorbs the contribution, if it counts; the worker takes it."""
        rule, worker, before = self.rule, now.worker, now.center
        shared = rule.outer is self.inner
        if shared:
            before = before._replace(outer=_with_powers(before.outer, worker.inner))
        after = work.absorb(rule, before, total, num_workers=at.num_workers)
        if self.drops:
            after = where(pushed > 0, after, before)
        if shared:
            worker = worker._replace(inner=_with_powers(worker.inner, after.outer))
        worker = work.take(rule, worker, now.center.value, after.value, at)
        return now._replace(worker=worker, center=after)

    def settle(self, now: Now, walked: Tree, center: Tree) -> Now:
        """A worker that is not finite starts again from the center."""
        if not self.drop_nonfinite:
            return now
        return now._replace(worker=work.mend(self.inner, now.worker, center, now.well))


# All workers, and the parameters of the one that stepped.
_Machine: TypeAlias = tuple[AsynchronousState, Tree]


class _Run(NamedTuple):
    """The checked arguments of `asynchronous`, and the functions of a run."""

    phases: _Phases
    round: AtOnce | Later
    parts: Partition
    period: Period
    between: Period  # steps from one exchange of a worker to its next
    num_workers: int
    grad_fn: GradFn
    tokens: ArrayLike | Sequence[float] | None

    def start(self, params: Tree) -> AsynchronousState:
        """The initial state: all workers and the center at the parameters."""
        rule, several = self.phases.rule, self.parts.number > 1
        center, count = work.start_center(params), jnp.zeros((), jnp.int32)
        pending, remembered = self.round.start(self.parts, center, center)
        each = self.parts.number if several else ()
        # Others move the center meanwhile, so each worker keeps the center it took.
        keeps_taken = work.takes_center(rule) or contract.keeps_before(rule)
        worker = WorkerState(
            params=params,
            inner=self.phases.inner.init(params),
            taken=center if keeps_taken else (),
            accumulated=work.start_accumulated(rule, center),
            exchange=remembered,
            local_step=count,
            steps_since_round=count,
            rounds=count,
            tokens=jnp.zeros(each, jnp.float32),
            seen=jnp.zeros(each, jnp.int32),
            ages=jnp.zeros(each, jnp.int32) if several else (),
            pending=pending,
            broken=jnp.bool_(False) if self.phases.drop_nonfinite else (),
        )
        return AsynchronousState(
            workers=stack(worker, self.num_workers, None),
            center=center,
            outer=()
            if rule.outer is None
            else self.parts.each(rule.outer.init, center),
            global_step=count,
            applied=count,
        )

    def advance(
        self, machine: _Machine, event: tuple[jax.Array, jax.Array]
    ) -> tuple[_Machine, tuple[jax.Array, ...]]:
        """The workers and the center after an event, and its counters."""
        state, _ = machine
        worker, number = event
        place = jnp.clip(worker, 0, self.num_workers - 1)
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
        grads = self.grad_fn(place, own.params, number)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        count = 1.0 if self.tokens is None else jnp.asarray(self.tokens)[number]
        tokens = own.tokens + jnp.float32(count)
        due = work.is_due(self.between, steps, own.local_step)
        step = Step(
            num_workers=self.num_workers,
            period=contract.static_period(self.period),
            due=due,
            steps=steps,
            ages=jax.tree.map(lambda age: age + 1, own.ages),
            rounds=own.rounds,
            quiet=own.steps_since_round,
            parts=self.parts,
            params=own.params,
            alike=True,
            extra_args={},
            alone={
                "staleness": applied - own.seen,
                "tokens": tokens,
                "num_pushed": jnp.broadcast_to(own.rounds + 1, own.seen.shape),
            },
        )
        now, broken = self.walk(own, center, grads, steps)
        now, met = self.round.step(now, step), step.met()
        met_now = jnp.asarray(due, jnp.int32)
        counted = met_now - now.info.dropped if self.phases.drops else met_now
        own = WorkerState(
            **now.worker._asdict(),
            exchange=now.exchange,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            rounds=own.rounds + met_now,
            tokens=jnp.where(met, 0.0, tokens),
            seen=jnp.where(met, applied + counted, own.seen),
            ages=where(met, zeros_like(step.ages), step.ages),
            pending=now.pending,
            broken=where(due, zeros_like(broken), broken),
        )
        return own, now.center, met_now, counted

    def walk(
        self, own: WorkerState, center: Center, grads: Tree, steps: jax.Array
    ) -> tuple[Now, Tree]:
        """(now, after the worker's own step; whether the worker is broken)."""
        at = Round(self.num_workers, contract.static_period(self.period), steps)
        before = Worker(own.params, own.inner, own.taken, own.accumulated)
        inner, rule = self.phases.inner, self.phases.rule
        worker = work.walk(inner, rule, before, center.value, grads, at)
        broken, well = (), None
        if self.phases.drop_nonfinite:
            broken = own.broken | ~is_finite(worker.params)
            worker = work.stand_still(before, worker, broken)
            well = ~broken
        weight, info = None, SharedInfo()
        if self.phases.drops:
            weight = jnp.float32(1)
            info = SharedInfo(dropped=jnp.zeros((), jnp.int32))
        now = Now(worker, center, own.pending, own.exchange, info, weight, well)
        return now, broken

    def push_bytes(self, center: Tree) -> float:
        """The bytes sent in one contribution, that of the largest part."""
        pick, code = self.parts.pick, self.phases.exchange
        parts = range(self.parts.number)
        return float(
            max(
                coded.bytes_of(coded.message_shapes(code, pick(center, i)))
                for i in parts
            )
        )


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
