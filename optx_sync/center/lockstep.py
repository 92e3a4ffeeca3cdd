# SPDX-License-Identifier: Apache-2.0
"""`center_variable`: workers that meet at a center every few steps, in lockstep."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optx_sync import trees
from optx_sync.center import checks
from optx_sync.center import worker as work
from optx_sync.center.buffers import Outgoing
from optx_sync.center.contract import (
    CenterMemory,
    CenterRule,
    InnerState,
    Period,
    Round,
    check_period,
    keeps_before,
    static_period,
)
from optx_sync.center.fragments import (
    Fragments,
    Whole,
    check_fragments,
    number_of_parts,
    split,
    steps_between,
)
from optx_sync.center.landing import Landing
from optx_sync.center.rounds.at_once import AtOnce
from optx_sync.center.rounds.in_line import InLine
from optx_sync.center.rounds.in_pieces import Pieces, pieces
from optx_sync.center.rounds.later import Later
from optx_sync.center.rounds.meeting import Meeting, Rounds, Step
from optx_sync.center.rounds.turns import Now
from optx_sync.center.state import CenterState, How
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import (
    check_inner,
    check_params,
    floating,
    refuse_placeholder,
)
from optx_sync.comm import varying
from optx_sync.comm.collectives import ALONE, AxisName, check_axis_name
from optx_sync.comm.reduce import own_weight, reduce
from optx_sync.exchange import contract as exchanges
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.measures import start
from optx_sync.metrics import SharedInfo
from optx_sync.placement import memory
from optx_sync.placement.fields import fact
from optx_sync.placement.leaves import map_but_counters
from optx_sync.step import (
    direct_transformation,
    landing_update,
    take_weight,
    weight_takers,
)
from optx_sync.trees import Tree


def center_variable(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    axis_name: AxisName | None,
    *,
    communication_period: Period = 10,
    inner_state: InnerState = "keep",
    drop_nonfinite: bool = False,
    accumulator_dtype: DTypeLike | None = None,
    exchange: exchanges.Exchange | None = None,
    measure: bool = False,
    shard_center: bool = False,
    # None, not 1 and 0: `optax.inject_hyperparams` would trace numbers.
    fragments: Fragments | None = None,
    delay: int | None = None,
    keep_local: float | jax.Array | None = None,
    center_memory: CenterMemory = "device",
) -> optax.GradientTransformationExtraArgs:
    """Parameter averaging: workers train alone and meet at a center every few steps.

    What local SGD, DiLoCo, elastic averaging, AGN and federated averaging share. In
    every step `inner` turns the worker's own gradient into its update. Every
    `communication_period` steps the workers meet as `rule` says: one exchange of the
    parameters' size, inside a conditional; other steps send nothing.

    `oxs.apply_gradients(tx, grads, state, params)` returns parameters, and a float32
    worker that takes the center gets it to the bit. `update` gives
    `new parameters - params`: float32 lands within one ulp, which does not add up. It
    needs `params`, stands last in a chain, and takes each worker's own gradients. All
    workers start equal (`oxs.Workers`).

    Both take `weight`, how much this worker's contribution counts in this step's
    meeting: a number or a bool. And `meet`: `None`, the counter decides; a bool, equal
    on all workers, the caller does; a Python bool (`oxs.by_hand.due`) leaves the
    conditional out of the program.

    Args:
        inner: The worker's own optimizer, or a center rule over another axis.
        rule: What workers and center give each other.
        axis_name: The mapped axis of the workers, or a tuple of them. `None`: one
            worker with a center of its own (with `cross_shard`, all replicas).
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step, read where a period begins.
        inner_state: In a round, `"keep"` the state of `inner`, `"average"` it over the
            workers, or `"reset"` it to that of a first step.
        drop_nonfinite: A worker that would become NaN or infinite stands still until
            the next round, is left out of it, and takes the center and a fresh inner
            state.
        accumulator_dtype: The dtype of center and accumulators. `None`: float32 for
            half precision parameters, else their own.
        exchange: How contributions become their mean, also compressed or robust.
            `None`: `oxs.exchange.all_reduce()`.
        measure: Keep measures of the last round for `oxs.metrics`.
        shard_center: Keep 1/N of center and outer state on each worker (ZeRO's idea).
        fragments: P parts of the parameters, one of which meets every
            `communication_period / P` steps; or a function of path and leaf, such as
            `oxs.rules.strided(P)`. `None`: 1.
        delay: Steps from a part's sum until it lands, at most
            `communication_period / P`. `None`: 0.
        keep_local: The share of its own parameters, in [0, 1], that a worker keeps
            where it takes the center. `None`: 0.
        center_memory: Where center and outer state live between rounds: `"device"`, or
            `"pinned_host"`, the host's memory, which needs a Python bool `meet`.

    Returns:
        A transformation with a `CenterState`.

    Raises:
        TypeError: Arguments of a wrong type, parameters that are not floating.
        ValueError: A bad keyword, options that exclude each other; gradients that
            autodiff has summed or that do not match the parameters, an axis that is not
            mapped or of another size.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.center_variable(
        ...     optax.sgd(0.5), oxs.rules.local_sgd(), "workers", communication_period=1
        ... )
        >>> params = jnp.zeros(())
        >>> def step(target):
        ...     return oxs.apply_gradients(tx, -target, tx.init(params), params)[0]
        >>> jax.vmap(step, axis_name="workers")(jnp.array([1.0, 3.0])).tolist()
        [1.0, 1.0]
    """
    call = "oxs.center_variable(optax.sgd(0.1), oxs.rules.local_sgd(), 'workers')"
    inner = check_inner(inner, call)
    checks.check_lockstep_rule(rule, call)
    axis_name = ALONE if axis_name is None else axis_name
    check_axis_name(axis_name)
    period = check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    checks.check_inner_state(inner_state)
    inner_moved = getattr(inner, "moved", None)
    checks.check_nested(inner_moved, drop_nonfinite, inner_state)
    fragments, delay = check_fragments(fragments), checks.check_delay(delay)
    streams = fragments != 1 or delay > 0
    checks.check_streams(streams, inner_state, inner_moved)
    exchange = exchanges.check_exchange(exchange, all_reduce())
    known = number_of_parts(fragments)
    between = None if known is None else steps_between(period, known, delay)
    on_host = checks.check_memory(center_memory, rule, delay)
    kept = work.keeping(rule, keep_local)
    landing = Landing(kept, axis_name)
    if shard_center:
        landing = pieces(kept, axis_name, exchange, measure, delay)
    meeting = Meeting(
        inner,
        kept,
        axis_name,
        exchange,
        inner_state,
        drop_nonfinite,
        measure,
        landing,
    )
    lockstep = Lockstep(
        meeting,
        period,
        functools.partial(_rounds, meeting, delay),
        floating("accumulator_dtype", accumulator_dtype),
        keeps_before(rule) or landing.coded,
        fragments,
        delay,
        on_host,
    )
    return direct_transformation(
        lockstep.init,
        landing_update(lockstep.apply),
        lockstep.apply,
        between,
        lockstep.moved,
    )


def _rounds(meeting: Meeting, delay: int, between: Period) -> Rounds:
    """How parts meet that do so every `between` steps."""
    if not delay:
        return AtOnce(meeting)
    # One exchange in each step, of what set out in the step before.
    every_step = delay == 1 and not callable(between) and between == 1
    if every_step and not isinstance(meeting.landing, Pieces):
        return InLine(meeting)
    return Later(meeting, delay)


class _Plan(NamedTuple):
    """How the parts of a tree of parameters meet."""

    parts: Whole
    between: Period  # steps from one exchange to the next
    round: Rounds


class Lockstep(NamedTuple):
    """`init` and `apply` of `center_variable` and `gossip`, with checked arguments."""

    meeting: Meeting
    period: Period
    rounds: Callable[[Period], Rounds]  # given the steps from one exchange to the next
    dtype: DTypeLike | None = None
    keeps_taken: bool = False  # whether a worker keeps the center before its last round
    fragments: Fragments = 1
    delay: int = 0
    on_host: bool = False  # whether center and outer state live in host memory

    def plan(self, center: Tree) -> _Plan:
        """The parts of a tree like the parameters, and when and how they meet."""
        parts = split(self.fragments, center)
        between = steps_between(self.period, parts.number, self.delay)
        return _Plan(parts, between, self.rounds(between))

    def start(self, center: Tree) -> tuple[Tree, Center, Tree, Tree]:
        """(ages, center, pending, what exchanges remember) before the first step."""
        if trees.is_placeholder(center):
            return self.start_placeholder(center)
        parts, _, round_ = self.plan(center)
        ages = jnp.zeros(parts.number, jnp.int32) if parts.number > 1 else ()
        held = self.meeting.landing.start(parts, center)
        return ages, held, *round_.start(parts, center, held.value)

    def start_placeholder(self, center: Tree) -> tuple[Tree, Center, Tree, Tree]:
        """The same for the tree without leaves of `optax.tree.map_params`."""
        if number_of_parts(self.fragments) != 1:
            refuse_placeholder(center, "fragments")
        if isinstance(self.meeting.landing, Pieces):
            refuse_placeholder(center, "shard_center=True")
        some = jnp.zeros(())  # stands for all that depends on a tree with leaves
        meeting = self.meeting
        outer = () if meeting.rule.outer is None else meeting.rule.outer.init(center)
        remembered = meeting.exchange.init(center)
        if self.delay == 1 and self.period == 1:  # in line
            remembered = some
        return (), Center(center, outer), some if self.delay else (), remembered

    def init(self, params: Tree) -> CenterState:
        """The state of a worker before its first step."""
        meeting = self.meeting
        rule, exchange, drops = meeting.rule, meeting.exchange, meeting.drop_nonfinite
        check_params(params)
        center = work.start_center(params, self.dtype)
        inner = meeting.inner.init(params)
        if getattr(meeting.inner, "moved", None) is None:
            checks.refuse_hidden_center(inner)
        if not trees.is_placeholder(center):
            meeting.landing.try_on(center)
        ages, held, pending, remembered = self.start(center)
        # A worker's own fields have the varying type from the start.
        own = functools.partial(
            map_but_counters,
            lambda x: varying.localize_where_mapped(x, meeting.axis_name),
        )
        if self.on_host:
            held = memory.on_host(held)
        return CenterState(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            ages=ages,
            center=held.value,
            taken=work.start_center(params, self.dtype) if self.keeps_taken else (),
            outer=held.outer,
            pending=own(pending)
            if isinstance(pending, Outgoing)
            else varying.vary_with(pending, center),
            accumulated=own(work.start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if drops else (),
            exchange=own(remembered),
            info=SharedInfo(
                dropped=own(jnp.zeros((), jnp.int32)),
                outliers=own(exchanges.start_outliers(exchange)),
                distance=own(jnp.float32(0)) if meeting.measure else (),
                measured=start(exchange.exact, False) if meeting.measure else (),
            ),
            inner=own(inner),
            how=How(
                sums=fact(rule.mean_over is None),
                takes=fact(not work.takes_center(rule)),
                on_host=fact(self.on_host),
                alone=fact(meeting.axis_name is ALONE),
            ),
        )

    def apply(
        self,
        grads: Tree,
        state: CenterState,
        params: Tree,
        *,
        meet: bool | jax.Array | None = None,
        weight: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, CenterState]:
        """One step that returns parameters: what every center rule runs."""
        meeting = self.meeting
        num_workers = self.check_step(grads, state, params)
        center = self.shapes(params)
        plan = self.plan(center)
        meeting.landing.fit(plan.parts, state.center, center)
        self.check_stream(plan, state, meet, extra_args)
        if self.on_host:
            checks.check_meet(meet)
        steps = state.steps_since_round + 1
        before = Worker(params, state.inner, state.taken, state.accumulated)
        with weight_takers() as takers:
            worker = work.walk(
                meeting.inner,
                meeting.rule,
                before,
                state.center,
                grads,
                Round(num_workers, static_period(self.period), steps),
                **extra_args if weight is None else {**extra_args, "weight": weight},
            )
        take_weight(weight)
        worker, broken = self.own_step(before, worker, state.broken)
        due = (
            work.is_due(plan.between, steps, state.local_step) if meet is None else meet
        )
        step = Step(
            num_workers=num_workers,
            period=static_period(self.period),
            due=due,
            steps=steps,
            ages=state.ages if plan.parts.number == 1 else state.ages + 1,
            rounds=state.global_step,
            quiet=state.steps_since_round,
            parts=plan.parts,
            params=params,
            alike=True,
            extra_args=extra_args,
            alone={},
        )
        well = None if broken is None else ~broken
        weight, alike = self.own_weight(plan, None if takers else weight)
        step = step._replace(alike=alike)
        now = plan.round.step(
            Now(
                worker=worker,
                center=Center(state.center, state.outer),
                pending=state.pending,
                exchange=state.exchange,
                info=state.info,
                weight=weight,
                well=well,
            ),
            step,
        )
        return now.worker.params, self.next_state(state, now, step, broken)

    def next_state(
        self, state: CenterState, now: Now, step: Step, broken: jax.Array | None
    ) -> CenterState:
        """The state after a step, from what the step and its round have changed."""
        due, ages = jnp.asarray(step.due), step.ages
        if step.parts.number > 1:
            ages = jnp.where(step.met(), jnp.zeros_like(ages), ages)
        return state._replace(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(step.steps), step.steps),
            global_step=state.global_step + due.astype(jnp.int32),
            ages=ages,
            center=now.center.value,
            taken=now.worker.taken,
            outer=now.center.outer,
            pending=now.pending,
            accumulated=now.worker.accumulated,
            broken=() if broken is None else broken & ~due,
            exchange=now.exchange,
            info=now.info,
            inner=now.worker.inner,
        )

    def own_step(
        self, before: Worker, worker: Worker, broken: Any
    ) -> tuple[Worker, Tree]:
        """(the worker after its own step, whether it is broken, or `None`)."""
        axis_name = self.meeting.axis_name
        # Constants and fresh counters inside `inner` may not have the varying type.
        x, accumulated = varying.localize(
            (worker.params, worker.accumulated), axis_name
        )
        inner = map_but_counters(lambda x: varying.localize(x, axis_name), worker.inner)
        worker = worker._replace(params=x, inner=inner, accumulated=accumulated)
        if not self.meeting.drop_nonfinite:
            return worker, None
        broken = broken | ~varying.everywhere(
            trees.is_finite(x), before.params, axis_name
        )
        return work.stand_still(before, worker, broken), broken

    def own_weight(
        self, plan: _Plan, weight: ArrayLike | None
    ) -> tuple[jax.Array | None, bool]:
        """(this worker's weight or `None`, whether all weights are 0 or 1)."""
        meeting = self.meeting
        if weight is None:
            one = jnp.float32(1)
            if not meeting.drop_nonfinite:
                return None, True
            return varying.localize(one, meeting.axis_name), True
        exchanges.check_weight(meeting.exchange, weight)
        if isinstance(plan.round, InLine) and not meeting.drop_nonfinite:
            raise ValueError(
                "With delay=1 and communication_period equal to the number of "
                "fragments what a worker contributes is summed a step later, and its "
                "weight has to travel in the state: pass drop_nonfinite=True, with "
                "which the state has a place for it, or a longer communication_period."
            )
        alike = jnp.result_type(weight) == jnp.bool_
        return own_weight(weight, meeting.axis_name), alike

    def shapes(self, params: Tree) -> Tree:
        """The shapes and dtypes of the whole center."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
        )
        return work.start_center(shapes, self.dtype)

    def check_step(self, grads: Tree, state: CenterState, params: Tree) -> int:
        """Refuse what does not fit a worker's step; returns the number of workers."""
        return checks.check_step(
            grads, state, params, self.meeting.axis_name, self.meeting.rule
        )

    def check_stream(
        self,
        plan: _Plan,
        state: CenterState,
        meet: bool | jax.Array | None,
        extra_args: dict[str, Any],
    ) -> None:
        """Refuse what rounds of parts cannot take."""
        if self.fragments == 1 and not self.delay:
            return
        if self.meeting.rule.outer is self.meeting.inner:
            checks.check_delayed_inner(self.delay, extra_args)
        checks.check_streaming_step(state, meet, isinstance(plan.round, InLine))

    def moved(self, state: CenterState, before: Tree, after: Tree) -> CenterState:
        """The state after a rule around this one has moved the workers' parameters."""
        axis_name, center = self.meeting.axis_name, self.shapes(after)
        change = jax.tree.map(
            jnp.subtract,
            work.as_center(after, center),
            work.as_center(before, center),
        )
        change = reduce(varying.localize(change, axis_name), axis_name)
        center = self.meeting.landing.moved(state.center, change)
        taken = state.taken
        if jax.tree.leaves(taken):
            taken = jax.tree.map(jnp.add, taken, change)
        inner, inner_moved = state.inner, getattr(self.meeting.inner, "moved", None)
        if inner_moved is not None:
            inner = inner_moved(inner, before, after)
        return state._replace(center=center, taken=taken, inner=inner)
