# SPDX-License-Identifier: Apache-2.0
"""`center_variable`: workers that meet at a center every few steps, in lockstep."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optx_sync import trees
from optx_sync.center import checks
from optx_sync.center import worker as work
from optx_sync.center.buffers import Outgoing
from optx_sync.center.checks import Options
from optx_sync.center.contract import (
    CenterMemory,
    CenterRule,
    InnerState,
    Period,
    Round,
    check_period,
    check_rule,
    keeps_before,
    static_period,
)
from optx_sync.center.fragments import (
    Fragments,
    Partition,
    check_fragments,
    number_of_parts,
    steps_between,
)
from optx_sync.center.inner_state import check_fields, check_inner_state
from optx_sync.center.landing import Landing, Pieces
from optx_sync.center.rounds import AtOnce, InLine, Later, Meeting, Rounds, Step
from optx_sync.center.state import CenterState, How
from optx_sync.center.turns import Now
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import (
    check_inner,
    check_params,
    floating,
    one_of,
    refuse_placeholder,
    shows_call,
)
from optx_sync.comm import varying
from optx_sync.comm.collectives import ALONE, AxisName, axis_size, check_axis_name
from optx_sync.comm.reduce import own_weight, reduce
from optx_sync.exchange import contract as exchanges
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.measures import start
from optx_sync.metrics import SharedInfo
from optx_sync.options import refuse
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

_CALL = "oxs.center_variable(optax.sgd(0.1), oxs.rules.local_sgd(), 'workers')"


@shows_call(_CALL)
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
            workers, or `"reset"` it to that of a first step. Or fields of it with the
            rounds from one average to the next (DES-LOC, arXiv 2505.22549): of Adam
            `{"mu": 3, "nu": 6}`.
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
    inner = check_inner(inner, _CALL)
    check_rule(rule, _CALL)
    axis_name = ALONE if axis_name is None else axis_name
    check_axis_name(axis_name)
    period = check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    one_of("center_memory", center_memory, CenterMemory)
    options = Options(
        inner,
        work.keeping(rule, keep_local),
        axis_name,
        period,
        exchanges.check_exchange(exchange, all_reduce()),
        floating("accumulator_dtype", accumulator_dtype),
        check_inner_state(inner_state),
        drop_nonfinite,
        measure,
        shard_center,
        check_fragments(fragments),
        checks.check_delay(delay),
        center_memory,
    )
    refuse(options, checks.TOGETHER)
    parts = number_of_parts(options.fragments)
    between = None if parts is None else steps_between(period, parts, options.delay)
    landing = Pieces if shard_center else Landing
    meeting = Meeting(options, landing(options))
    lockstep = Lockstep(meeting, functools.partial(_rounds, meeting))
    return direct_transformation(
        lockstep.init,
        landing_update(lockstep.apply),
        lockstep.apply,
        between,
        lockstep.moved,
        parts or 1,
    )


def _rounds(meeting: Meeting, between: Period) -> Rounds:
    """How parts meet that do so every `between` steps."""
    delay = meeting.options.delay
    if not delay:
        return AtOnce(meeting)
    # One exchange in each step, of what set out in the step before.
    every_step = delay == 1 and not callable(between) and between == 1
    in_line = every_step and not meeting.options.shard_center
    return InLine(meeting) if in_line else Later(meeting, delay)


class Lockstep(NamedTuple):
    """`init` and `apply` of `center_variable` and `gossip`."""

    meeting: Meeting
    rounds: Callable[[Period], Rounds]  # given the steps from one exchange to the next

    @property
    def options(self) -> Options:
        """The checked options."""
        return self.meeting.options

    def plan(self, center: Tree) -> tuple[Partition, Period, Rounds]:
        """How a tree like the parameters meets.

        (its parts, the steps from one exchange to the next, when they meet)
        """
        options = self.options
        parts = Partition(options.fragments, center)
        between = steps_between(options.period, parts.number, options.delay)
        return parts, between, self.rounds(between)

    def init(self, params: Tree) -> CenterState:
        """The state of a worker before its first step."""
        options = self.options
        rule, axis_name = options.rule, options.axis_name
        takes = work.takes_center(rule)
        check_params(params)
        center = work.start_center(params, options.dtype)
        inner = options.inner.init(params)
        check_fields(options.inner_state, inner)
        if options.moved is None:
            checks.refuse_hidden_center(inner)
        if number_of_parts(options.fragments) != 1:
            refuse_placeholder(center, "fragments")
        parts, _, round_ = self.plan(center)
        held = self.meeting.landing.start(parts, center)
        pending, remembered = round_.start(parts, center, held.value)
        # A worker's own fields have the varying type from the start.
        own = functools.partial(
            map_but_counters, lambda x: varying.localize_where_mapped(x, axis_name)
        )
        held = memory.on_host(held) if options.on_host else held
        measured = {}
        if options.measure:
            measured["distance"] = own(jnp.float32(0))
            measured["measured"] = start(options.exchange.exact, False)
        keeps_taken = options.coded or (keeps_before(rule) and not takes)
        return CenterState(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            ages=jnp.zeros(parts.number, jnp.int32) if parts.number > 1 else (),
            center=held.value,
            taken=work.start_center(params, options.dtype) if keeps_taken else (),
            outer=held.outer,
            pending=own(pending)
            if isinstance(pending, Outgoing)
            else varying.vary_with(pending, center),
            accumulated=own(work.start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if options.drop_nonfinite else (),
            exchange=own(remembered),
            info=SharedInfo(
                dropped=own(jnp.zeros((), jnp.int32)),
                outliers=own(exchanges.start_outliers(options.exchange)),
                **measured,
            ),
            inner=own(inner),
            how=How(
                sums=fact(rule.mean_over is None),
                takes=fact(not takes),
                on_host=fact(options.on_host),
                alone=fact(axis_name is ALONE),
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
        options = self.options
        checks.check_step(grads, state, params, options.axis_name)
        num_workers = axis_size(options.axis_name)
        period = static_period(options.period)
        center = self.shapes(params)
        parts, between, round_ = self.plan(center)
        self.meeting.landing.fit(parts, state.center, center)
        steps = state.steps_since_round + 1
        before = Worker(params, state.inner, state.taken, state.accumulated)
        with weight_takers() as takers:
            worker = work.walk(
                options.inner,
                options.rule,
                before,
                state.center,
                grads,
                Round(num_workers, period, steps),
                **extra_args if weight is None else {**extra_args, "weight": weight},
            )
        take_weight(weight)
        weight = None if takers else weight
        refuse(
            checks.Asked(
                options,
                num_workers,
                isinstance(round_, InLine),
                meet,
                weight,
                sorted(extra_args),
                checks.axes_missing(state),
            ),
            checks.IN_A_STEP,
        )
        if options.rule.check_lockstep is not None:
            options.rule.check_lockstep(num_workers)
        worker, broken = self.own_step(before, worker, state.broken)
        due = work.is_due(between, steps, state.local_step) if meet is None else meet
        weight, alike = self.own_weight(weight)
        step = Step(
            num_workers=num_workers,
            period=period,
            due=due,
            steps=steps,
            ages=jax.tree.map(lambda age: age + 1, state.ages),
            rounds=state.global_step,
            quiet=state.steps_since_round,
            parts=parts,
            params=params,
            alike=alike,
            extra_args=extra_args,
        )
        now = Now(
            worker=worker,
            center=Center(state.center, state.outer),
            pending=state.pending,
            exchange=state.exchange,
            info=state.info,
            weight=weight,
            well=jax.tree.map(lambda broken: ~broken, broken),
        )
        now = round_.step(now, step)
        return now.worker.params, self.next_state(state, now, step, broken)

    def next_state(
        self, state: CenterState, now: Now, step: Step, broken: Tree
    ) -> CenterState:
        """The state after a step, from what the step and its round have changed."""
        due, met = jnp.asarray(step.due), step.met()
        return state._replace(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(step.steps), step.steps),
            global_step=state.global_step + due.astype(jnp.int32),
            ages=trees.where(met, trees.zeros_like(step.ages), step.ages),
            center=now.center.value,
            taken=now.worker.taken,
            outer=now.center.outer,
            pending=now.pending,
            accumulated=now.worker.accumulated,
            broken=jax.tree.map(lambda broken: broken & ~due, broken),
            exchange=now.exchange,
            info=now.info,
            inner=now.worker.inner,
        )

    def own_step(
        self, before: Worker, worker: Worker, broken: Any
    ) -> tuple[Worker, Tree]:
        """(the worker after its own step, whether it is broken, or ())."""
        axis_name = self.options.axis_name
        # Constants and fresh counters inside `inner` may not have the varying type.
        x, accumulated = varying.localize(
            (worker.params, worker.accumulated), axis_name
        )
        inner = map_but_counters(lambda x: varying.localize(x, axis_name), worker.inner)
        worker = worker._replace(params=x, inner=inner, accumulated=accumulated)
        if not self.options.drop_nonfinite:
            return worker, ()
        broken = broken | ~varying.everywhere(
            trees.is_finite(x), before.params, axis_name
        )
        return work.stand_still(before, worker, broken), broken

    def own_weight(self, weight: ArrayLike | None) -> tuple[jax.Array | None, bool]:
        """(this worker's weight or `None`, whether all weights are 0 or 1)."""
        axis_name = self.options.axis_name
        if weight is not None:
            exchanges.check_weight(self.options.exchange, weight)
            alike = jnp.result_type(weight) == jnp.bool_
            return own_weight(weight, axis_name), alike
        if self.options.drop_nonfinite:
            return varying.localize(jnp.float32(1), axis_name), True
        return None, True

    def shapes(self, params: Tree) -> Tree:
        """The shapes and dtypes of the whole center."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
        )
        return work.start_center(shapes, self.options.dtype)

    def moved(self, state: CenterState, before: Tree, after: Tree) -> CenterState:
        """The state after a rule around this one has moved the workers' parameters."""
        axis_name, center = self.options.axis_name, self.shapes(after)
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
        inner, moved = state.inner, self.options.moved
        if moved is not None:
            inner = moved(inner, before, after)
        return state._replace(center=center, taken=taken, inner=inner)


class CenterOptions(TypedDict, total=False):
    """Keywords of `center_variable` that every center rule passes on to it."""

    inner_state: InnerState
    drop_nonfinite: bool
    accumulator_dtype: DTypeLike | None
    exchange: exchanges.Exchange | None
    measure: bool
    shard_center: bool
    fragments: Fragments | None
    delay: int | None
    keep_local: float | jax.Array | None
    center_memory: CenterMemory


Function = TypeVar("Function", bound=Callable)


def spelled_out(function: Function) -> Function:
    """Show the keywords of `CenterOptions` one by one in a signature, with defaults.

    For `help`, and for `optax.inject_hyperparams`, which cannot read `**options`.
    """
    signature = inspect.signature(function)
    all_options = inspect.signature(center_variable).parameters
    spelled = [all_options[name] for name in CenterOptions.__annotations__]
    own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *spelled])  # pyright: ignore[reportFunctionMemberAccess] # what inspect reads
    return function
