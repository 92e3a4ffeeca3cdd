# SPDX-License-Identifier: Apache-2.0
"""`center_variable`: workers in lockstep that meet at a center every few steps."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar, get_args

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.formulas import (
    absorb,
    as_center,
    contributions,
    is_due,
    landing,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
)
from optx_sync.center.rule import (
    CenterRule,
    InnerState,
    Period,
    Round,
    check_period,
    check_rule,
    keeps_before,
)
from optx_sync.checks import (
    check_grads,
    check_inner,
    check_one_worker,
    check_params,
)
from optx_sync.collectives import (
    ALONE,
    AxisName,
    axis_size,
    check_axis_name,
    everywhere,
    localize,
    localize_where_mapped,
    reduce,
    require_local,
    require_varying,
    vary_like,
    vary_with,
)
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.rule import Exchange, check_exchange
from optx_sync.measures import measure_of, square_sum, start, to_sum
from optx_sync.resizing import Resizing, take_center
from optx_sync.step import direct_transformation
from optx_sync.trees import (
    Tree,
    add_updates,
    check_accumulator_dtype,
    first_worker,
    is_finite,
    is_floating,
    is_inexact,
    is_masked,
    where,
    zeros_like,
)


class CenterOptions(TypedDict, total=False):
    """Keywords of `center_variable` that every center rule passes on to it."""

    inner_state: InnerState
    drop_nonfinite: bool
    accumulator_dtype: Any
    exchange: Exchange | None
    measure: bool


class MeasuredOwn(NamedTuple):
    """What `measure=True` keeps of a worker's own last round; 0 before the first."""

    distance_before_round: jax.Array  # float32[], |x - c| just before the exchange

    def named_slots(self) -> dict[str, Tree]:
        """None of these is an array for each parameter."""
        return {}


class CenterMetrics(NamedTuple):
    """What `oxs.metrics` reads from a center rule: a worker's own, nothing is sent.

    Shapes are those of one worker; of a stacked state what is a worker's own has the
    worker axis in front, [N].
    """

    rounds: jax.Array  # int32[], rounds so far, those without this worker included
    steps_since_round: jax.Array  # int32[], 0 after the step in which the workers met
    # int32[], rounds that left this worker out; 0 without `drop_nonfinite`.
    dropped: jax.Array
    # float32[], |x - c|, the norm over all leaves together, as the step has left them;
    # None where `metrics` was not given the parameters.
    distance: jax.Array | None
    # Of the last round, with `measure=True`; otherwise None. But for the distance they
    # are equal on all workers.
    distance_before_round: jax.Array | None  # float32[], |x - c| before the exchange
    contribution_norm: jax.Array | None  # float32[], root of the mean square, undivided
    agreement: jax.Array | None  # float32[], the mean cosine of two contributions
    update_norm: jax.Array | None  # float32[], of what the center moved
    contributors: jax.Array | None  # float32[], workers that were not left out


class CenterState(NamedTuple):
    """State of `center_variable`; `shared_fields` are equal on all workers."""

    local_step: jax.Array  # int32[], steps of a worker
    steps_since_round: jax.Array  # int32[]
    global_step: jax.Array  # int32[], rounds
    center: optax.Params  # like the parameters, float32 for half precision
    taken: Any  # the center before the last round, or () where no formula reads it
    outer: optax.OptState  # state of the rule's outer transformation, or ()
    accumulated: Any  # what the worker summed up since the last round, or ()
    broken: Any  # bool[], it has not been finite since the last round, or ()
    dropped: jax.Array  # int32[], rounds that left this worker out
    exchange: Any  # what the exchange remembers, or ()
    measured: Any  # `MeasuredOwn`, of the last round, or ()
    agreed: Any  # `Measured`, of the last round, or ()
    inner: optax.OptState

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """The fields that are equal on all workers."""
        return (
            "local_step",
            "steps_since_round",
            "global_step",
            "center",
            "taken",
            "outer",
            "agreed",
        )

    @property
    def counter_fields(self) -> tuple[str, ...]:
        """The fields that are equal on the workers of all levels of nested rules."""
        return ("local_step", "steps_since_round", "global_step")

    @property
    def stands_last(self) -> bool:
        """Whether nothing may stand after it in a chain."""
        return True

    def center_params(self, params: Tree) -> Tree:
        """The center in the structure and dtypes of `params`: `oxs.center_params`."""
        center = self.center
        for _ in range(jnp.ndim(self.local_step)):  # All workers hold the same one.
            center = jax.tree.map(first_worker, center)
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else jnp.array(c, p.dtype, copy=True),
            center,
            params,
            is_leaf=is_masked,
        )

    def metrics(self, params: Tree | None) -> CenterMetrics:
        """A worker's counters, and with `params` its distance from the center."""
        distance = None
        if params is not None:
            stacked = jnp.ndim(self.dropped)  # worker axes in front

            def apart(c, p):
                if is_masked(c):
                    return c
                # Where it is one for all, it has not all of the axes.
                c = jnp.expand_dims(c, range(p.ndim - c.ndim))
                return p.astype(c.dtype) - c

            distance = _norm(
                jax.tree.map(apart, self.center, params, is_leaf=is_masked), stacked
            )
        agreed = self.agreed or None
        found = (getattr(agreed, name, None) for name in CenterMetrics._fields[5:])
        return CenterMetrics(
            self.global_step,
            self.steps_since_round,
            self.dropped,
            distance,
            *(self.measured or (None,)),
            *(None if isinstance(value, tuple) else value for value in found),
        )

    @property
    def worker_axes(self) -> int:
        """How many worker axes parameters have in front."""
        return jnp.ndim(self.dropped)

    @property
    def takes_center(self) -> bool:
        """Whether workers take the center whole."""
        return True

    def resized_params(self, how: Resizing, params: Tree) -> Tree:
        """The parameters of another number of workers: see `oxs.resize`."""
        return take_center(how, params, self.center, self.takes_center)

    def resized(self, how: Resizing, fresh: "CenterState") -> "CenterState":
        """The state of another number of workers: see `oxs.resize`."""
        steps = int(self.steps_since_round.flat[0])
        if steps and _has_center(self.inner):
            raise ValueError(
                "There is a center rule inside of this one, and workers are not at "
                f"its center: {steps} step(s) since the last round. Resize right after "
                "a round of the outer rule."
            )
        if steps and (self.takes_center or jax.tree.leaves(self.accumulated)):
            what = "have learned" if self.takes_center else "accumulated"
            how.loses(f"what workers {what} in {steps} step(s) since their last round")
        # A worker that goes a part of the way adds that part to the center.
        of_exchange = how if self.takes_center else how.of_sums()
        shared = {
            field: how.equal(getattr(self, field)) for field in self.shared_fields
        }
        return self._replace(
            **shared,
            accumulated=how.zeros(self.accumulated),
            broken=how.zeros(self.broken),
            dropped=how.joined_by_zeros(self.dropped),
            exchange=of_exchange.tree(self.exchange, fresh.exchange),
            measured=how.joined_by_zeros(self.measured),
            inner=how.own(self.inner, fresh.inner),
        )


class SoftCenterState(CenterState):
    """State of a rule whose workers take a part of the way to the center."""

    __slots__ = ()

    @property
    def takes_center(self) -> bool:
        """Whether workers take the center whole."""
        return False


class _Meeting(NamedTuple):
    """What a round changes: the operands and results of the conditional."""

    params: Any
    center: Any
    taken: Any
    outer: Any
    accumulated: Any
    dropped: Any
    exchange: Any
    measured: Any
    agreed: Any
    inner: Any


def center_variable(
    inner: optax.GradientTransformation,
    rule: CenterRule,
    axis_name: AxisName | None,
    *,
    communication_period: Period = 10,
    inner_state: InnerState = "keep",
    drop_nonfinite: bool = False,
    accumulator_dtype: Any = None,
    exchange: Exchange | None = None,
    measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Workers that train on their own and meet at a center every few steps.

    In every step `inner` turns the worker's own gradient into its update. When the
    steps since the last round reach `communication_period`, the workers meet as `rule`
    says: one exchange of the size of the parameters, inside a conditional, so that the
    other steps communicate nothing.

    `oxs.apply_gradients(tx, grads, state, params)` is a step that returns parameters:
    the program is the one written by hand, and in float32 a worker that takes the
    center lands on it to the bit. `update` gives `new parameters - params`, for
    `optax.apply_updates`: half precision parameters land to the bit, float32 ones
    within one ulp of the larger of the two values, which does not add up over rounds.

    It computes `params + updates`, so it stands last in a chain, and `update` needs
    `params`. The gradients must be each worker's own: inside
    `jax.shard_map(check_vma=True)` parameters that lie along the worker axis give
    such gradients by themselves.

    All workers start from equal parameters: `oxs.stack(params, n)`, and
    `oxs.stack(tx.init(params), n, oxs.state_axes(tx, params))` for the state. Under
    `jax.vmap` counters that are stacked too give the same numbers, but communicate in
    every step.

    `inner` may be a center rule itself, over another axis: workers meet often at the
    center of their pod, and pods seldom at one of their own,

        oxs.diloco(oxs.local_sgd(inner, "data", communication_period=8), "pods")

    A round of the outer rule moves the center of the inner one by the mean, over the
    inner axis, of what it moved the parameters. Give `state_axes` and `state_specs` the
    level. What else is to be nested (a chain, a mask) goes into the innermost rule.

    Row-sparse gradients are accepted and `inner` sees them as they are; updates are
    dense, since what is exchanged is whole tables.

    Both take an extra argument `meet`. `None`: the counter decides, inside the program.
    A Python bool: the caller decides (`oxs.due`), and of the two programs one has no
    collective, the other no conditional. A traced bool: the same inside the program;
    it must be equal on all workers, which is the caller's promise.

    Args:
        inner: The worker's own optimizer.
        rule: What is exchanged.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
            `None`: one worker with a center of its own. No axis is mapped, nothing is
            stacked and nothing is sent.
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step (0-based), read at the step in which a period begins. 1 during
            a warm-up gives post-local SGD.
        inner_state: What happens to `inner`'s state in a round: `"keep"` it,
            `"average"` its floating leaves over the workers, or `"reset"` it to that of
            a first step (which restarts schedules too).
        drop_nonfinite: A worker whose step would bring a NaN or infinity into its
            parameters does not make it: it stands still until the next round, is left
            out of that, and takes the center and a fresh inner state (what is added to
            a NaN is NaN, so it could not come back later). If no worker is left the
            center stays. A worker that is sharded over other axes of `jax.shard_map` is
            broken as a whole: its shards agree, by one scalar reduction in each step.
        accumulator_dtype: The dtype of the center and of accumulators. `None`: float32
            for half precision parameters, else their own. Complex parameters keep
            theirs.
        exchange: How contributions become their mean; `None`:
            `oxs.exchange.all_reduce()`.
        measure: Keep for `oxs.metrics` of the last round how far each worker was from
            the center before it, and how large the contributions were, how well they
            agreed (where the exchange is an all-reduce), how far the center moved and
            how many contributed. One scalar more travels. (Of a worker that is sharded
            over other axes of `jax.shard_map`, with `check_vma=False`: each shard's.)

    Returns:
        A transformation with a `CenterState`. Updates of half precision parameters are
        float32: `optax.apply_updates` then lands exactly on the center.

    Raises:
        TypeError: An `inner` that is no transformation, a `rule` that is no
            `CenterRule`, a bad axis name, parameters that are not floating.
        ValueError: A bad period or keyword; at the call, missing `params`, gradients
            that autodiff has summed already or that do not match the parameters, an
            axis that is not mapped or not of the rule's `num_workers`.
    """
    call = "oxs.center_variable(optax.sgd(0.1), oxs.local_sgd_rule(), 'workers')"
    inner = check_inner(inner, call)
    check_rule(rule, call)
    if rule.weigh is not None:
        raise ValueError(
            "weigh is for workers that come one by one, in oxs.simulate.asynchronous "
            "and oxs.runtime.run; in lockstep nobody is late. Leave it out of the rule."
        )
    axis_name = ALONE if axis_name is None else axis_name
    check_axis_name(axis_name)
    period = check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    if inner_state not in get_args(InnerState):
        raise ValueError(
            "inner_state must be one of 'keep', 'average' and 'reset'; got "
            f"{inner_state!r}."
        )
    dtype = check_accumulator_dtype(accumulator_dtype)
    exchange = check_exchange(exchange, all_reduce())
    static_period = None if callable(period) else period
    keeps_taken = keeps_before(rule, period)
    if getattr(rule.outer, "moved", None) is not None:
        raise ValueError(
            "The rule's outer optimizer is a center rule itself, which cannot step on "
            "a center. Pass an optimizer as outer=, for example optax.sgd(0.1)."
        )
    inner_moved = getattr(inner, "moved", None)
    if inner_moved is not None and (drop_nonfinite or inner_state == "reset"):
        got = "drop_nonfinite=True" if drop_nonfinite else "inner_state='reset'"
        raise ValueError(
            f"{got} would start the center rule inside anew, whose center its workers "
            "share. Pass it to the innermost rule instead."
        )
    # What a round does not change stays out of the conditional.
    state_of = CenterState if rule.take is None else SoftCenterState
    changes_inner = inner_state != "keep" or drop_nonfinite or inner_moved is not None

    def init(params):
        check_params(params)
        center = start_center(params, dtype)
        within = inner.init(params)
        if inner_moved is None:
            _refuse_hidden_center(within)

        def own(tree):
            # A worker's own fields vary over the axis from the start.
            return _but_counters(localize_where_mapped, tree, axis_name)

        return state_of(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            center=center,
            taken=start_center(params, dtype) if keeps_taken else (),
            outer=()
            if rule.outer is None
            else vary_with(rule.outer.init(center), center),
            accumulated=own(start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if drop_nonfinite else (),
            dropped=own(jnp.zeros((), jnp.int32)),
            exchange=own(exchange.init(center)),
            measured=own(MeasuredOwn(jnp.float32(0))) if measure else (),
            agreed=start(exchange.meet_and_sum is not None, False) if measure else (),
            inner=own(within),
        )

    def apply(grads, state, params, *, meet=None, **extra_args):
        """One step that returns parameters: the driver of every center rule."""
        workers = _check_step(grads, state, params, rule, axis_name)
        steps = state.steps_since_round + 1
        at = Round(workers, static_period, steps)
        updates, inner_new, accumulated = local_step(
            inner,
            rule,
            at,
            grads,
            state.inner,
            params,
            state.taken if keeps_taken else state.center,
            state.accumulated,
            **extra_args,
        )
        # A leaf may have lost its type inside `inner` (a constant, a fresh counter).
        x, accumulated = localize(
            (add_updates(params, updates), accumulated), axis_name
        )
        inner_new = _but_counters(localize, inner_new, axis_name)
        broken = state.broken
        if drop_nonfinite:
            finite_now = everywhere(is_finite(x), params, axis_name)
            broken = broken | ~finite_now
            x = where(broken, params, x)

        def meeting(now: _Meeting) -> _Meeting:
            """A round."""
            own_x = as_center(now.params, now.center)
            own = own_of(
                rule,
                own_x,
                now.taken if keeps_taken else now.center,
                now.accumulated,
            )
            contribution = localize(contributions(rule, own, now.center, at), axis_name)
            finite, weight, pushed = jnp.bool_(True), None, workers
            if drop_nonfinite:
                finite = ~broken & everywhere(
                    is_finite(contribution), params, axis_name
                )
                weight = localize(finite.astype(jnp.float32), axis_name)
                pushed = reduce(weight, axis_name, reduction="sum")
            brought = (contribution, now.exchange, axis_name)
            measured: Any = ()
            agreed: Any = ()
            if not measure:
                total, _, remembered = exchange.meet(*brought, weight=weight)
            else:
                like = now.measured.distance_before_round
                apart = jax.tree.map(jnp.subtract, own_x, now.center)
                measured = MeasuredOwn(_norm(apart, like=like))
                square = square_sum(contribution, like)
                scalars = to_sum(square, axis_name, weight=weight, alike=True)
                if exchange.meet_and_sum is None:
                    total, _, remembered = exchange.meet(*brought, weight=weight)
                    sums = reduce(scalars, axis_name, reduction="sum")
                else:
                    total, _, remembered, sums, _ = exchange.meet_and_sum(
                        *brought, scalars, weight=weight
                    )
                mean_square = square_sum(total, now.agreed.update_norm)
                agreed = measure_of(now.agreed, sums, pushed, mean_square)
            if rule.mean_over is None:
                total = jax.tree.map(
                    lambda mean: mean * jnp.asarray(pushed, mean.dtype), total
                )
            extra = {}
            if rule.outer is inner:
                extra = _mean_extra_args(extra_args, axis_name, weight)
            total = vary_like(total, now.center)
            center, outer = absorb(rule, now.center, now.outer, total, **extra)
            if drop_nonfinite:
                center, outer = where(
                    pushed > 0, (center, outer), (now.center, now.outer)
                )
            if measure:
                moved = jax.tree.map(jnp.subtract, center, now.center)
                like = now.agreed.update_norm
                agreed = agreed._replace(update_norm=_norm(moved, like=like))
            new_x = take(rule, own_x, now.center, center, at)
            if drop_nonfinite:
                new_x = where(finite, new_x, center)
            landed = jax.tree.map(lambda x, p: x.astype(p.dtype), new_x, params)
            inner_met, dropped = now.inner, now.dropped
            if inner_moved is not None:
                inner_met = inner_moved(inner_met, now.params, landed)
            if inner_state == "average":
                inner_met = _average(inner_met, axis_name, weight)
            elif inner_state == "reset":
                inner_met = inner.init(landed)
            if drop_nonfinite:
                inner_met = where(finite, inner_met, inner.init(landed))
                dropped = dropped + (~finite).astype(jnp.int32)
            return _Meeting(
                params=landed,
                center=center,
                taken=now.center if keeps_taken else (),
                outer=outer,
                accumulated=zeros_like(now.accumulated),
                dropped=dropped,
                exchange=remembered,
                measured=measured,
                agreed=agreed,
                inner=inner_met,
            )

        due = is_due(period, steps, state.local_step) if meet is None else meet
        met = _either(
            due,
            meeting,
            _Meeting(
                params=x,
                center=state.center,
                taken=state.taken,
                outer=state.outer,
                accumulated=accumulated,
                dropped=state.dropped if drop_nonfinite else (),
                exchange=state.exchange,
                measured=state.measured,
                agreed=state.agreed,
                inner=inner_new if changes_inner else (),
            ),
        )
        due = jnp.asarray(due)
        return met.params, state_of(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            global_step=state.global_step + due.astype(jnp.int32),
            center=met.center,
            taken=met.taken,
            outer=met.outer,
            accumulated=met.accumulated,
            broken=broken & ~due if drop_nonfinite else (),
            dropped=met.dropped if drop_nonfinite else state.dropped,
            exchange=met.exchange,
            measured=met.measured,
            agreed=met.agreed,
            inner=met.inner if changes_inner else inner_new,
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "A center exchange needs the parameters; got params=None. Call "
                "update(grads, state, params)."
            )
        new_params, state = apply(updates, state, params, **extra_args)
        return landing(params, new_params), state

    def moved(state, before, after):
        """The state once a rule around this one has moved the workers' parameters."""
        center = state.center
        change = jax.tree.map(
            jnp.subtract, as_center(after, center), as_center(before, center)
        )
        change = reduce(localize(change, axis_name), axis_name)
        center, taken = (
            jax.tree.map(jnp.add, tree, change) if jax.tree.leaves(tree) else tree
            for tree in (center, state.taken)
        )
        within = state.inner
        if inner_moved is not None:
            within = inner_moved(within, before, after)
        return state._replace(center=center, taken=taken, inner=within)

    return direct_transformation(init, update, apply, period, moved)


Function = TypeVar("Function", bound=Callable)


def spells_out_options(function: Function) -> Function:
    """Show the keywords of `CenterOptions` one by one in a signature, with defaults.

    For `help`, and for `optax.inject_hyperparams`, which cannot read `**options`.
    """
    signature = inspect.signature(function)
    all_options = inspect.signature(center_variable).parameters
    spelled = [
        all_options[name]
        for name in CenterOptions.__annotations__
        if name in all_options
    ]
    own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *spelled])  # pyright: ignore[reportFunctionMemberAccess] # what inspect reads
    return function


def _check_step(grads, state, params, rule, axis_name) -> int:
    """Refuse what does not fit a step of a worker; the number of workers."""
    check_grads(grads, params)
    require_local(
        grads,
        axis_name,
        "gradient",
        "A worker has parameters of its own: lay them along the worker axis, "
        f"`oxs.stack(params, n)` with in_specs=P({axis_name!r}), or start with "
        "oxs.start_workers and map the step with oxs.map_workers.",
    )
    require_varying(state.center, params, axis_name, "center")
    check_one_worker(state.local_step, state.center, params)
    workers = axis_size(axis_name)
    if rule.num_workers not in (None, workers):
        found = f"the axis {axis_name!r} has {workers} workers"
        if axis_name is ALONE:
            found = "axis_name=None stands for one worker"
        raise ValueError(
            f"num_workers={rule.num_workers}, but {found}. Leave num_workers out, or "
            "make them equal."
        )
    return workers


def _has_center(state: Any) -> bool:
    """Whether there is a state of a center rule anywhere in a state."""

    def has_center(x):
        return hasattr(type(x), "center_params")

    return any(map(has_center, jax.tree.leaves(state, is_leaf=has_center)))


def _refuse_hidden_center(state: Any) -> None:
    """Refuse a center rule that something inside keeps from being told of a round."""
    if _has_center(state):
        raise ValueError(
            "There is another center rule in `inner`, wrapped in something else: its "
            "center would not move when this one's rounds move the parameters. Nest "
            "rules directly and put what stands between them inside of the innermost "
            "one, oxs.diloco(oxs.local_sgd(optax.chain(clip, adam), 'data'), 'pods')."
        )


def _but_counters(vary: Callable[[Any, AxisName], Any], tree: Any, axis_name) -> Any:
    """`vary` of a state, except for counters of center rules in it.

    All workers of all levels share these, so that conditionals on them are agreed on.
    """

    def counts(x):
        return hasattr(type(x), "counter_fields")

    def visit(node):
        if not counts(node):
            return vary(node, axis_name)
        return node._replace(
            **{
                field: _but_counters(vary, value, axis_name)
                for field, value in node._asdict().items()
                if field not in node.counter_fields
            }
        )

    return jax.tree.map(visit, tree, is_leaf=counts)


def _either(
    due: Any, meeting: Callable[[_Meeting], _Meeting], quiet: _Meeting
) -> _Meeting:
    """`meeting(quiet)` where due, else `quiet`; no conditional where it is known."""
    if isinstance(due, bool):
        return vary_like(meeting(quiet), quiet) if due else quiet
    return jax.lax.cond(
        due, lambda quiet: vary_like(meeting(quiet), quiet), lambda quiet: quiet, quiet
    )


def _mean_extra_args(extra_args, axis_name, weight):
    """What the worker's optimizer gets when it makes a step at the center."""

    def mean(name, value):
        if isinstance(value, bool | int | float):
            return value
        scalar = getattr(value, "ndim", None) == 0
        if not scalar or not is_floating(value.dtype):
            raise ValueError(
                f"The center makes a step of `inner`, which gets the mean of the "
                f"workers' extra arguments. Of {name!r} there is none: it is no "
                f"floating scalar but {value!r}. Pass an optimizer of its own for the "
                "center, outer=, which gets no extra arguments."
            )
        own = localize(jnp.asarray(value), axis_name)
        return reduce(own, axis_name, weight=weight)

    # What `measure=True` of a `cross_shard` inside is told of a worker's own gradient.
    given = {k: v for k, v in extra_args.items() if k != "batch_size"}
    return {name: mean(name, value) for name, value in given.items()}


def _average(state, axis_name, weight):
    """The mean of the floating leaves of the workers' inner states."""
    leaves, treedef = jax.tree.flatten(state)
    floating = [i for i, x in enumerate(leaves) if is_inexact(x.dtype)]
    means = reduce([leaves[i] for i in floating], axis_name, weight=weight)
    for i, mean in zip(floating, means, strict=True):
        leaves[i] = mean
    return treedef.unflatten(leaves)


def _norm(tree, stacked=0, like=None):
    """float32, the norm over all leaves, for each place along the worker axes."""
    return jnp.sqrt(square_sum(tree, like, stacked))
