# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous training: workers that meet a center one by one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.center import worker as work
from optx_sync.center.checks import check_delay, check_keep_local
from optx_sync.center.coded import (
    bytes_of,
    check_code,
    decoded,
    encoded,
    message_shapes,
    start_codes,
)
from optx_sync.center.contract import (
    CenterRule,
    Period,
    Round,
    Weigh,
    check_period,
    check_rule,
    keeps_before,
    static_period,
    weighed,
)
from optx_sync.center.fragments import (
    Fragments,
    Whole,
    check_fragments,
    split,
    steps_between,
)
from optx_sync.center.rounds.at_once import AtOnce
from optx_sync.center.rounds.later import Later
from optx_sync.center.rounds.meeting import Now, Step
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_grads, check_inner, integer
from optx_sync.exchange.contract import Exchange
from optx_sync.metrics import SharedInfo
from optx_sync.placement.workers import replicate
from optx_sync.shapes import Array, Float, Int32
from optx_sync.simulate.replay import GradFn, Record, check_workers, replay
from optx_sync.trees import Tree, is_finite, row_of, where, with_row


class WorkerState(NamedTuple):
    """What one worker holds; with a worker axis in front, [N, ...], what all do."""

    params: Tree
    inner: Tree  # state of the workers' own optimizer
    taken: Tree  # the center that it took last, or () where the rule does not ask
    accumulated: Tree  # what it summed up since its last round, or ()
    exchange: Tree  # what the code of its pushes remembers, of each part, or ()
    local_step: Int32[Array, ""]  # its steps
    steps_since_round: Int32[Array, ""]
    rounds: Int32[Array, ""]  # its rounds
    # With parts [P], of each one.
    tokens: Float[Array, "*parts"]  # since its last round
    seen: Int32[Array, "*parts"]  # the rounds of all workers when it took the center
    ages: Any  # int32[P], steps since its round of each part, or () where there is one
    pending: Any  # with `delay`, a `Pending` of what it has contributed; or ()
    broken: Any  # bool[], it has not been finite since its last round, or ()


class AsynchronousState(NamedTuple):
    """State after one event of `asynchronous`."""

    workers: WorkerState  # [N, ...]
    center: Tree  # like the parameters, float32 for half precision
    # State of the rule's outer transformation, or (); a tuple, one for each part.
    outer: Tree
    global_step: Int32[Array, ""]  # rounds of all workers


class AsynchronousRecord(NamedTuple):
    """What happened in T events; every array is as after the event."""

    # [K, ...] each, of the K events that `record` keeps; None where it is a function.
    params: Tree  # those of the worker that stepped, in their own dtypes
    center: Tree  # float32 for half precision parameters
    events: Int32[Array, " kept"]  # the numbers of these events, from 0
    local_step: Int32[Array, " events"]  # steps that the event's worker has made
    global_step: Int32[Array, " events"]  # rounds that all workers together have made
    # [T, ...], what the function `record` returned after each event; None without one.
    recorded: Tree
    final: AsynchronousState  # after the last event
    push_bytes: float  # bytes of one contribution, of the largest part, as it travels


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
    r"""Simulate asynchronous training: workers that meet a center one by one.

    An event is one step of the worker w that `workers` names: `inner` turns its
    gradient into its update, and when its steps since its last round reach
    `communication_period` it meets the center alone, as `rule` says (N workers, the
    table of `optx_sync.center.contract`):

    .. math::

        c' \leftarrow \text{absorb}(c,\; \text{contribution of } w), \qquad
        x_w \leftarrow \text{take}(x_w, c, c')

    The exchange is atomic: nobody else pushes between the two. The contribution of a
    rule with `mean_over="workers"` is divided by N, any other's is not. All workers
    start at `params`, and so does the center.

    The originals are TensorFlow's `ElasticAverageOptimizer` and `AGNOptimizer`, whose
    recorded runs it reproduces to 1e-6. In these the optimizer's running powers (Adam's
    of beta) belong to the worker, and advance in its own step and once more in its step
    on the center. So they do here for `agn_rule(inner)` with the same `inner`, one of
    this package's; in lockstep, and with another `outer`, the center has its own. Plain
    asynchronous SGD (DOWNPOUR) is `agn_rule(inner)` with a period of 1.

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
        delay: As in `center_variable`, in steps of the worker: that many steps after it
            has decided what it contributes the center absorbs that, wherever others
            have moved the center meanwhile, and the worker takes.
        keep_local: As in `center_variable`.
        drop_nonfinite: As in `center_variable`: in its next round a worker that is not
            finite contributes nothing, and starts anew from the center.
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
    num_workers = integer("num_workers", num_workers, "Pass for example 8.")
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
    phases = _Phases(
        inner,
        rule,
        check_code(exchange, rule, period),
        drop_nonfinite,
        check_keep_local(keep_local),
    )
    fragments, delay = check_fragments(fragments), check_delay(delay)
    params = jax.tree.map(jnp.asarray, params)
    workers = check_workers(workers, num_workers)
    if tokens is not None and np.shape(tokens) != workers.shape:
        raise ValueError(
            f"tokens must hold a number for each of the {len(workers)} events; got "
            f"shape {np.shape(tokens)}."
        )
    parts = split(fragments, work.start_center(params))
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
    machine, (local_steps, global_steps), views, recorded, events = replay(
        run.advance, run.view, (start, params), workers, record
    )
    kept_params, kept_center = views
    return AsynchronousRecord(
        params=kept_params,
        center=kept_center,
        events=events,
        local_step=local_steps,
        global_step=global_steps,
        recorded=recorded,
        final=machine[0],
        push_bytes=run.push_bytes(start.center),
    )


class _Phases(NamedTuple):
    """The phases of a round of one worker that meets the center alone."""

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    exchange: Exchange | None
    drop_nonfinite: bool
    keep_local: float | jax.Array

    def remember(self, part: Tree) -> Tree:
        """What the code of a part remembers before the first round."""
        return () if self.exchange is None else start_codes(self.exchange, part)

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, what the center is to absorb of this worker)."""
        rule, at, well = self.rule, step.at(part), now.well
        worker, pushed = work.bring(rule, now.worker, now.center.value, at)
        if self.drop_nonfinite:
            well = well & is_finite(pushed)
            pushed = where(well, pushed, jax.tree.map(jnp.zeros_like, pushed))
        pushed, codes = work.share_of_one(rule, pushed, at), now.exchange
        if self.exchange is not None:
            messages, codes = encoded(self.exchange, pushed, codes)
            pushed = decoded(self.exchange, messages, pushed)
            if self.drop_nonfinite:
                codes = where(well, codes, now.exchange)
        now = now._replace(worker=worker, exchange=codes, well=well)
        return now, work.weigh_alone(rule, pushed, at)

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """There is nobody to agree with; a worker that is not finite counts 0."""
        counts = now.well.astype(jnp.float32) if self.drop_nonfinite else ()
        return now, contribution, counts

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The center absorbs it, if it counts, and the worker takes."""
        rule, worker, before = self.rule, now.worker, now.center
        if rule.outer is self.inner:
            before = before._replace(outer=_with_powers(before.outer, worker.inner))
        after = work.absorb(rule, before, total, num_workers=at.num_workers)
        if self.drop_nonfinite:
            after = where(pushed > 0, after, now.center)
        if rule.outer is self.inner:
            worker = worker._replace(inner=_with_powers(worker.inner, after.outer))
        worker = work.take(
            rule, worker, now.center.value, after.value, at, self.keep_local
        )
        return now._replace(worker=worker, center=after)

    def settle(self, now: Now, walked: Tree, center: Tree) -> Now:
        """A broken worker starts anew from the center."""
        if not self.drop_nonfinite:
            return now
        return now._replace(worker=work.mend(self.inner, now.worker, center, now.well))


# All workers, and the parameters of the one that stepped.
_Machine: TypeAlias = tuple[AsynchronousState, Tree]


class _Run(NamedTuple):
    """What `asynchronous` was asked for, checked."""

    phases: _Phases
    round: AtOnce | Later
    parts: Whole
    period: Period
    between: Period  # steps from one exchange of a worker to its next
    num_workers: int
    grad_fn: GradFn
    tokens: ArrayLike | Sequence[float] | None

    def start(self, params: Tree) -> AsynchronousState:
        """All workers at the parameters, and so is the center."""
        rule, several = self.phases.rule, self.parts.number > 1
        center, count = work.start_center(params), jnp.zeros((), jnp.int32)
        pending, remembered = self.round.start(self.parts, center, center)
        each = self.parts.number if several else ()
        # Others move the center meanwhile, so each worker keeps the one that it took.
        keeps_taken = rule.take is None or keeps_before(rule, self.period)
        worker = WorkerState(
            params=params,
            inner=self.phases.inner.init(params),
            taken=center if keeps_taken else (),
            accumulated=work.start_accumulated(rule, center),
            exchange=() if self.phases.exchange is None else remembered,
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
            workers=replicate(worker, self.num_workers),
            center=center,
            outer=()
            if rule.outer is None
            else self.parts.each(rule.outer.init, center),
            global_step=count,
        )

    def advance(
        self, machine: _Machine, event: tuple[jax.Array, jax.Array]
    ) -> tuple[_Machine, tuple[jax.Array, ...]]:
        """The workers and their center after an event."""
        state, _ = machine
        worker, number = event
        place = jnp.clip(worker, 0, self.num_workers - 1)
        # The conditional is there for a worker that does not exist, and for speed:
        # without it XLA fuses reading one stack with writing another, and then copies
        # both, the states of all workers, in every event.
        own, (center, outer), rounds = jax.lax.cond(
            place == worker,
            lambda *operands: self.step(number, place, *operands),
            lambda *operands: (*operands[:-1], jnp.zeros((), jnp.int32)),
            *(row_of(state.workers, place), Center(state.center, state.outer)),
            state.global_step,
        )
        state = AsynchronousState(
            workers=with_row(state.workers, place, own),
            center=center,
            outer=outer,
            global_step=state.global_step + rounds,
        )
        return (state, own.params), (own.local_step, state.global_step)

    def view(self, machine: _Machine) -> tuple[Tree, Tree]:
        """What is kept of an event."""
        state, params = machine
        return params, state.center

    def step(
        self,
        number: jax.Array,
        place: jax.Array,
        own: WorkerState,
        center: Center,
        rounds: jax.Array,
    ) -> tuple[WorkerState, Center, jax.Array]:
        """(a worker after its step, the center, int32[] whether they met).

        `rounds` is int32[], those of all workers before it.
        """
        grads = self.grad_fn(place, own.params, number)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        count = 1.0 if self.tokens is None else jnp.asarray(self.tokens)[number]
        tokens = own.tokens + jnp.float32(count)
        due = work.is_due(self.between, steps, own.local_step)
        step = Step(
            num_workers=self.num_workers,
            period=static_period(self.period),
            due=due,
            steps=steps,
            ages=own.ages + 1 if self.parts.number > 1 else (),
            rounds=own.rounds,
            quiet=own.steps_since_round,
            parts=self.parts,
            params=own.params,
            alike=True,
            extra_args={},
            alone={
                "staleness": rounds - own.seen,
                "tokens": tokens,
                "num_pushed": jnp.broadcast_to(own.rounds + 1, own.seen.shape),
            },
        )
        now, broken = self.walk(own, center, grads, steps)
        now, met, ages = self.round.step(now, step), step.met(), own.ages
        if self.parts.number > 1:
            ages = jnp.where(met, jnp.zeros_like(ages), step.ages)
        own = WorkerState(
            **now.worker._asdict(),
            exchange=now.exchange,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            rounds=own.rounds + jnp.asarray(due, jnp.int32),
            tokens=jnp.where(met, 0.0, tokens),
            seen=jnp.where(met, rounds + 1, own.seen),
            ages=ages,
            pending=now.pending,
            broken=() if broken is None else broken & ~due,
        )
        return own, now.center, jnp.asarray(due, jnp.int32)

    def walk(
        self, own: WorkerState, center: Center, grads: Tree, steps: jax.Array
    ) -> tuple[Now, Tree]:
        """(all after the worker's own step, whether it is broken)."""
        at = Round(self.num_workers, static_period(self.period), steps)
        before = Worker(own.params, own.inner, own.taken, own.accumulated)
        inner, rule = self.phases.inner, self.phases.rule
        worker = work.walk(inner, rule, before, center.value, grads, at)
        broken = well = None
        if self.phases.drop_nonfinite:
            broken = own.broken | ~is_finite(worker.params)
            worker = work.stand_still(before, worker, broken)
            well = ~broken
        now = Now(worker, center, own.pending, own.exchange, SharedInfo(), None, well)
        return now, broken

    def push_bytes(self, center: Tree) -> float:
        """The bytes of a contribution, of the largest part, as it travels."""
        pick, code = self.parts.pick, self.phases.exchange
        parts = range(self.parts.number)
        return float(
            max(bytes_of(message_shapes(code, pick(center, i))) for i in parts)
        )


def _with_powers(state: optax.OptState, source: optax.OptState) -> optax.OptState:
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
