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

from optx_sync.center import checks
from optx_sync.center import worker as work
from optx_sync.center.checks import Options
from optx_sync.center.contract import (
    CenterRule,
    InnerState,
    Period,
    Round,
    check_first_period,
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
from optx_sync.center.round import (
    CenterRounds,
    Rounds,
    RoundState,
    Turn,
    begun,
    in_turn,
)
from optx_sync.center.state import CenterState, Facts
from optx_sync.center.turns import QUIET, Turns
from optx_sync.center.worker import Center, Worker
from optx_sync.comm import varying
from optx_sync.comm.collectives import (
    ALONE,
    AxisName,
    axis_size,
    check_axis_name,
)
from optx_sync.comm.reduce import own_weight, reduce
from optx_sync.core import trees
from optx_sync.core.checks import (
    check_inner,
    check_params,
    floating,
    refuse,
    refuse_placeholder,
    shows_call,
)
from optx_sync.core.programs import Elementwise
from optx_sync.core.trees import Tree
from optx_sync.exchange import contract as exchanges
from optx_sync.exchange import landing
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.measures import start
from optx_sync.exchange.meeting import Meeting
from optx_sync.state.direct import (
    Direct,
    direct_transformation,
    refuse_unread,
    take_weight,
    weight_takers,
)
from optx_sync.state.fields import fact
from optx_sync.state.leaves import map_but_counters
from optx_sync.state.metrics import SharedInfo

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
    shard_state: bool = False,
    # None, not 1: `optax.inject_hyperparams` would trace a number.
    fragments: Fragments | None = None,
    overlap: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Parameter averaging: workers train alone and meet at a center every few steps.

    What local SGD, DiLoCo, elastic averaging, AGN and federated averaging share.
    `inner` turns the worker's own gradient into its update. Every
    `communication_period` steps the workers meet as `rule` says: one exchange of the
    parameters' size; other steps send nothing.

    `oxs.apply_gradients(tx, grads, state, params)` returns parameters, and a float32
    worker that takes the center gets it to the bit. `update` gives
    `new parameters - params`: float32 lands within one ulp, which does not add up. It
    needs `params`, stands last in a chain, and takes each worker's own gradients.

    Both take `weight`, how much this worker's contribution counts in this step's
    meeting: a number or a bool. And `meet`: `None`, the counter decides; a bool, equal
    on all workers, the caller does (with `overlap`, when a part is due); a Python bool
    (`oxs.by_hand.due`) leaves the conditional out of the program.

    Args:
        inner: The worker's own optimizer, or a center rule over another axis.
        rule: What workers and center give each other.
        axis_name: The mapped axis of the workers, or a tuple of them. `None`: one
            worker with a center of its own (with `cross_shard`, all replicas).
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step, read where a period begins; a fraction is rounded up.
        inner_state: In a round, `"keep"` the state of `inner`, `"average"` it over the
            workers, or `"reset"` it. Or fields of it with the rounds from one average
            to the next (DES-LOC, arXiv 2505.22549): of Adam `{"mu": 3, "nu": 6}`.
        drop_nonfinite: A worker that would become NaN or infinite stands still, is left
            out of the next round, and takes the center and a fresh inner state.
        accumulator_dtype: Of center and accumulators. `None`: float32 for half
            precision parameters, else their own.
        exchange: How contributions become their mean, also compressed or robust.
            `None`: `oxs.exchange.all_reduce()`.
        measure: Keep measures of a round for `oxs.metrics`.
        shard_state: Keep 1/N of the outer optimizer's state on each worker, as
            `cross_shard` does of the inner one's.
        fragments: P parts of the parameters, one of which meets every
            `communication_period / P` steps; or a function of path and leaf, such as
            `oxs.rules.strided(P)`. `None`: 1.
        overlap: Whether workers exchange at the begin of the step after the one that is
            due, so that the exchange hides behind it. What that step makes of the part
            is overwritten: of its H steps one is lost, and H is 2 or more.

    Returns:
        A transformation with a `CenterState`.

    Raises:
        TypeError: Arguments of a wrong type, parameters that are not floating.
        ValueError: A bad keyword, options that exclude each other; gradients that
            autodiff has summed or unlike the parameters, an axis that is not
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
    options = Options(
        inner,
        rule,
        axis_name,
        at_least_two(period) if overlap and callable(period) else period,
        exchanges.check_exchange(exchange, all_reduce()),
        floating("accumulator_dtype", accumulator_dtype),
        check_inner_state(inner_state),
        drop_nonfinite,
        measure,
        shard_state,
        check_fragments(fragments),
        overlap,
    )
    refuse(options, checks.TOGETHER)
    parts = number_of_parts(options.fragments)
    between = None if parts is None else steps_between(options.period, parts)
    lockstep = Lockstep(CenterRounds(options, meeting_of(options)))
    direct = Direct(lockstep.apply, between, lockstep.moved, parts or 1)
    return direct_transformation(lockstep.init, direct)


# Of a rule without an outer optimizer: the center moves by the mean or sum.
_ADD = optax.GradientTransformationExtraArgs(
    lambda params: (), lambda updates, state, params=None, **extra: (updates, state)
)


def meeting_of(options: Options) -> Meeting:
    """The meeting of all workers, which moves the center."""
    axis_name, outer = options.axis_name, options.rule.outer or _ADD
    outer = optax.with_extra_args_support(outer)
    lands = landing.Landing(axis_name, outer)
    if options.shard_state:
        axes, size = check_axis_name(axis_name), options.exchange.bucket_bytes
        check = Elementwise(outer, axes, "shard_state=True", "the outer optimizer")
        lands = landing.Pieces(axis_name, outer, elementwise=check, bucket_bytes=size)
    return Meeting(options.exchange, lands, summed=options.rule.mean_over is None)


def at_least_two(period: optax.Schedule) -> optax.Schedule:
    """The schedule, of 2 steps or more: one of them is lost where a part lands."""
    return lambda step: jnp.maximum(jnp.asarray(period(step)), 2)


class Lockstep(NamedTuple):
    """`init` and `apply` of `center_variable` and `gossip`."""

    rounds: Rounds

    @property
    def options(self) -> Options:
        """The checked options."""
        return self.rounds.options

    def init(self, params: Tree) -> CenterState:
        """The state of a worker before its first step."""
        options = self.options
        rule, axis_name = options.rule, options.axis_name
        check_params(params)
        check_first_period(options.period, params)
        center = work.start_center(params, options.dtype)
        inner = options.inner.init(params)
        check_fields(options.inner_state, inner, params)
        if options.moved is None:
            checks.refuse_hidden_center(inner)
        if number_of_parts(options.fragments) != 1:
            refuse_placeholder(center, "fragments")
        parts = Partition(options.fragments, center)
        steps_between(options.period, parts.number)
        held, remembered = self.rounds.start(parts, center)
        # A worker's own fields have the varying type from the start.
        own = functools.partial(
            map_but_counters, lambda x: varying.localize_where_mapped(x, axis_name)
        )
        measured = {}
        if options.measure:
            measured["distance"] = own(jnp.float32(0))
            measured["measured"] = start(options.exchange.exact, False)
        copy = work.start_center(params, options.dtype) if keeps_before(rule) else ()
        return CenterState(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            ages=jnp.zeros(parts.number, jnp.int32) if parts.number > 1 else (),
            waits=jnp.zeros((), jnp.int32) if options.overlap else (),
            weight=own(jnp.float32(1)) if options.overlap else (),
            center=held.value,
            taken=copy,
            outer=varying.vary_with(held.outer, center),
            accumulated=own(work.start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if options.drop_nonfinite else (),
            exchange=own(remembered),
            info=SharedInfo(
                dropped=own(jnp.zeros((), jnp.int32)),
                outliers=own(exchanges.start_outliers(options.exchange)),
                **measured,
            ),
            inner=own(inner),
            how=Facts(
                sums=fact(rule.mean_over is None),
                takes=fact(rule.take is not None),
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
        turn, due = self.turn(state, params, meet, extra_args)
        was_broken = state.broken
        before = Worker(params, state.inner, state.taken, state.accumulated)
        if options.overlap:
            turn = turn._replace(brings=before)
            before = begun(turn, before)
        with weight_takers() as takers:
            worker = work.walk(
                options.inner,
                options.rule,
                before,
                state.center,
                grads,
                Round(turn.num_workers, turn.period, state.steps_since_round + 1),
                **extra_args if weight is None else {**extra_args, "weight": weight},
            )
        take_weight(weight)
        read = "weight", "meet"
        refuse_unread("A center rule", read, extra_args, options.inner, grads, params)
        asked = checks.Asked(options, turn.num_workers, sorted(extra_args))
        refuse(asked, checks.IN_A_STEP)
        if options.rule.check_lockstep is not None:
            options.rule.check_lockstep(turn.num_workers)
        worker, broken = self.own_step(before, worker, state.broken)
        weight, alike = self.own_weight(None if takers else weight)
        state = self.set_out(state, turn, due, weight)
        if options.overlap:  # by the weight that was given with the contribution
            weight, alike = turn.weight, False
        restarts = was_broken if options.overlap else broken
        now = RoundState(
            worker=worker,
            center=Center(state.center, state.outer),
            exchange=state.exchange,
            info=state.info,
            well=jax.tree.map(jnp.logical_not, restarts),
        )
        turn = turn._replace(weight=weight, alike=alike)
        now = in_turn(self.rounds, now, turn)
        return now.worker.params, state._replace(
            center=now.center.value,
            taken=now.worker.taken,
            outer=now.center.outer,
            accumulated=now.worker.accumulated,
            broken=jax.tree.map(
                lambda broken, restarts: broken & ~(restarts & turn.due),
                broken,
                restarts,
            ),
            exchange=now.exchange,
            info=now.info,
            inner=now.worker.inner,
        )

    def turn(
        self,
        state: CenterState,
        params: Tree,
        meet: bool | jax.Array | None,
        extra_args: dict[str, Any],
    ) -> tuple[Turn, bool | jax.Array]:
        """(what is known of this step, whether contributions are due in it)."""
        options, rounds = self.options, state.global_step
        parts = Partition(options.fragments, self.shapes(params))
        number = parts.number
        between = steps_between(options.period, number)
        steps = state.steps_since_round + 1
        due = meet
        if due is None:
            due = work.is_due(between, steps, state.local_step)
        meets, part = due, rounds % number
        if number > 1:
            steps = state.ages[part] + 1
        if options.overlap:
            meets, part, steps = state.waits > 0, (rounds - 1) % number, state.waits
        counted = Turns(between, number, options.overlap)
        kind = counted.kind_of(state) if meet is None else None
        if kind is not None:
            meets, part = kind != QUIET, kind
        turn = Turn(
            num_workers=axis_size(options.axis_name),
            period=static_period(options.period),
            due=meets,
            part=part,
            parts=parts,
            steps=steps,
            rounds=rounds,
            brings=None,
            params=params,
            weight=state.weight if options.overlap else None,
            alike=False,
            extra_args=extra_args,
            counted=counted,
        )
        return turn, due

    def set_out(
        self,
        state: CenterState,
        turn: Turn,
        due: bool | jax.Array,
        weight: jax.Array | None,
    ) -> CenterState:
        """The state with its counters a step later; with `overlap` one part waits."""
        before, due, number = state, jnp.asarray(due), turn.parts.number
        steps, ages = state.steps_since_round + 1, state.ages
        part = state.global_step % number
        behind = steps
        if number > 1:
            ages = ages + 1
            behind = ages[part]
            met = due & (jnp.arange(number, dtype=jnp.int32) == part)
            ages = jnp.where(met, jnp.zeros_like(ages), ages)
        if self.options.overlap:
            counts = jnp.float32(1) if weight is None else weight.astype(jnp.float32)
            counts = varying.localize(counts, self.options.axis_name)
            state = state._replace(
                waits=jnp.where(due, behind, jnp.zeros_like(behind)),
                weight=jnp.where(due, counts, state.weight),
            )
        after = state._replace(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            global_step=state.global_step + due.astype(jnp.int32),
            ages=ages,
        )
        turn.counted.went_on(before, after)
        return after

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
        center = jax.tree.map(jnp.add, state.center, change)
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
    shard_state: bool
    fragments: Fragments | None
    overlap: bool


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
