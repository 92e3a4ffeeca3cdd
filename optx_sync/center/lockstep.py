# SPDX-License-Identifier: Apache-2.0
"""`center_variable`: workers in lockstep that meet at a center every few steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.checks import (
    check_delay,
    check_delayed_inner,
    check_inner_state,
    check_keep_local,
    check_lockstep_rule,
    check_nested,
    check_streaming_step,
    check_streams,
    check_whole_center,
    check_workers,
    refuse_hidden_center,
)
from optx_sync.center.formulas import (
    absorb,
    as_center,
    check_step,
    contributions,
    is_due,
    landing_update,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
)
from optx_sync.center.fragments import (
    Buffer,
    Fragments,
    Outgoing,
    Pending,
    check_fragments,
    in_turn,
    number_of_parts,
    split,
    steps_between,
)
from optx_sync.center.rule import (
    CenterRule,
    InnerState,
    Period,
    Round,
    check_period,
    keeps_before,
)
from optx_sync.center.sharded import ShardedCenter
from optx_sync.center.state import CenterState, MeasuredOwn, SoftCenterState, norm_of
from optx_sync.checks import check_inner, check_params
from optx_sync.collectives import (
    ALONE,
    AxisName,
    check_axis_name,
    everywhere,
    localize,
    localize_where_mapped,
    reduce,
    vary_like,
    vary_with,
)
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import (
    Exchange,
    check_exchange,
    count_outlier,
    start_outliers,
)
from optx_sync.measures import measure_of, square_sum, to_sum
from optx_sync.measures import start as start_measured
from optx_sync.step import direct_transformation
from optx_sync.trees import (
    add_updates,
    check_accumulator_dtype,
    is_finite,
    is_floating,
    is_inexact,
    is_placeholder,
    row_of,
    where,
    with_row,
    zeros_like,
)


class _Meeting(NamedTuple):
    """What a round changes: the operands and results of the conditional."""

    params: Any
    center: Any
    taken: Any
    outer: Any
    pending: Any
    accumulated: Any
    dropped: Any
    exchange: Any
    outliers: Any
    measured: Any
    agreed: Any
    inner: Any
    weight: Any  # float32[], 0 where the worker is left out, or None


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
    shard_center: bool = False,
    # Not 1, 0 and 0: `optax.inject_hyperparams` would trace these.
    fragments: Fragments | None = None,
    delay: int | None = None,
    keep_local: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Workers that train on their own and meet at a center every few steps.

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

    With `fragments`, P of them, one part of the parameters meets every
    `communication_period / P` steps, part k mod P in exchange k: as many bytes in the
    mean, a P-th at a time. Each part has an outer state of its own. With `delay` the
    sum of a part is taken in step t, and in step t + delay the center absorbs it and
    the workers, which went on meanwhile, take of the center c what `rule` says. Where
    that is the center itself,

    .. math::

        x_i \leftarrow k\, x_i + (1 - k)\, c, \qquad k = \text{keep\_local}

    and what they contribute next starts from c. (What a round finds out about a worker,
    that it is broken say, it does in step t.) With one exchange in each step and
    `delay=1` the sum stands outside of all conditionals and depends on the state alone,
    so that the compiler may hide it behind the step.

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
            With fragments: of the part that met.
        shard_center: Keep 1/N of the center and of the outer state on each worker,
            instead of all of both. What the workers have is added up where it is
            owned, and the new center is gathered: as many bytes as the all-reduce, and
            fewer for half precision parameters. For rules whose workers take the
            center, an `outer` that acts on each number alone, and the exchange
            `all_reduce`. Center and outer state are `InPieces`, as in `cross_shard(...,
            shard_state=True)`; `oxs.center_params` of all workers' state is whole.
        fragments: P, the number of parts: of about equal bytes, leaves in order, cut
            between rows along axis 0. Or a function `(path, leaf) -> part`, an int for
            the leaf or a sequence of ints for its rows along axis 0, such as
            `oxs.strided(P)`; P is the largest number plus 1. P divides the period.
            `None`: 1.
        delay: Steps from a sum to where it lands, at most `communication_period / P`.
            It keeps a part more in the state. `None`: 0.
        keep_local: The share of its own parameters that a worker keeps where `rule`
            takes the center, in [0, 1]; other rules take what their formula says.
            Above 0 the workers never agree: evaluate the center. `None`: 0.

    Returns:
        A transformation with a `CenterState`. Updates of half precision parameters are
        float32: `optax.apply_updates` then lands exactly on the center.

    Raises:
        TypeError: An `inner` that is no transformation, a `rule` that is no
            `CenterRule`, a bad axis name, parameters that are not floating.
        ValueError: A bad period or keyword; `shard_center` with a rule, an `outer`, an
            exchange or a keyword that needs the center whole; at the call, missing
            `params`, gradients that autodiff has summed already or that do not match
            the parameters, an axis that is not mapped or not of the rule's
            `num_workers`.
    """
    call = "oxs.center_variable(optax.sgd(0.1), oxs.local_sgd_rule(), 'workers')"
    inner = check_inner(inner, call)
    check_lockstep_rule(rule, call)
    axis_name = ALONE if axis_name is None else axis_name
    check_axis_name(axis_name)
    period = check_period(communication_period)
    if rule.check is not None:
        rule.check(period)
    check_inner_state(inner_state)
    dtype = check_accumulator_dtype(accumulator_dtype)
    exchange = check_exchange(exchange, all_reduce())
    static_period = None if callable(period) else period
    keeps_taken = keeps_before(rule, period)
    inner_moved = getattr(inner, "moved", None)
    check_nested(inner_moved, drop_nonfinite, inner_state)
    fragments, delay = check_fragments(fragments), check_delay(delay)
    keep_local = check_keep_local(keep_local)
    known = number_of_parts(fragments)
    between = None if known is None else steps_between(period, known, delay)
    streams = fragments != 1 or delay > 0
    check_streams(streams, inner_state, inner_moved)
    sharded: ShardedCenter | None = None
    if shard_center:
        check_whole_center(streams, measure, keep_local)
        sharded = ShardedCenter(rule, period, axis_name, exchange)
    # What a round does not change stays out of the conditional.
    state_of = CenterState if rule.take is None else SoftCenterState
    changes_inner = inner_state != "keep" or drop_nonfinite or inner_moved is not None

    def plan(center):
        """The parts, steps between two exchanges, and whether all stand in line."""
        nonlocal known
        parts = split(fragments, center)
        known = parts.number
        steps = steps_between(period, known, delay)
        # One exchange in each step, of what the step before has left.
        straight = delay == 1 and not callable(steps) and steps == 1
        return parts, steps, straight

    def start_parts(center):
        """(ages, outer state, pending, what exchanges remember) of the first step."""
        parts, _, straight = plan(center)
        ages = jnp.zeros(parts.number, jnp.int32) if parts.number > 1 else ()
        outer = () if rule.outer is None else parts.each(rule.outer.init, center)
        if not delay:
            return ages, outer, (), parts.each(exchange.init, center)
        buffer = Buffer(parts, center).zeros()
        count = jnp.zeros((), jnp.int32)
        pending = Pending(buffer, count, jnp.zeros(()) if drop_nonfinite else ())
        if not straight:
            return ages, outer, pending, parts.each(exchange.init, center)
        remembered = exchange.init(buffer)
        if parts.number > 1:
            remembered = jax.tree.map(
                lambda x: jnp.stack([x] * parts.number), remembered
            )
        return ages, outer, Outgoing(*pending), remembered

    def start_placeholder(center):
        """The same, of the tree without leaves that `optax.tree.map_params` asks of."""
        some = jnp.zeros(())  # stands for all that a tree with leaves tells first

        def each(start):
            if known == 1:
                return start(center)
            return (start(center),) * known if known else some

        outer = () if rule.outer is None else each(rule.outer.init)
        return (
            some if known != 1 else (),
            outer,
            some if delay else (),
            some if delay == 1 and known == period else each(exchange.init),
        )

    def init(params):
        check_params(params)
        center = start_center(params, dtype)
        within = inner.init(params)
        if inner_moved is None:
            refuse_hidden_center(within)
        held: Any = center
        if sharded is None:
            start = start_placeholder if is_placeholder(center) else start_parts
            ages, outer, pending, remembered = start(center)
        else:
            ages = pending = remembered = ()
            held, outer = sharded.start(center)

        def own(tree):
            # A worker's own fields vary over the axis from the start.
            return _but_counters(localize_where_mapped, tree, axis_name)

        return state_of(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            ages=ages,
            center=held,
            taken=start_center(params, dtype) if keeps_taken else (),
            outer=vary_with(outer, center) if sharded is None else outer,
            pending=own(pending)
            if isinstance(pending, Outgoing)
            else vary_with(pending, center),
            accumulated=own(start_accumulated(rule, center)),
            broken=own(jnp.bool_(False)) if drop_nonfinite else (),
            dropped=own(jnp.zeros((), jnp.int32)),
            exchange=own(remembered),
            outliers=own(start_outliers(exchange)),
            measured=own(MeasuredOwn(jnp.float32(0))) if measure else (),
            agreed=start_measured(exchange.exact, False) if measure else (),
            inner=own(within),
        )

    def apply(grads, state, params, *, meet=None, **extra_args):
        """One step that returns parameters: the driver of every center rule."""
        workers = check_step(
            grads, state, params, axis_name, in_pieces=sharded is not None
        )
        if sharded is not None:
            sharded.check(state.center, params)
        check_workers(rule, workers, axis_name)
        parts, between_exchanges, straight = plan(state.center)
        if streams:
            if rule.outer is inner:
                check_delayed_inner(delay, extra_args)
            check_streaming_step(
                state, jax.eval_shape(start_parts, state.center), meet, straight
            )
        steps = state.steps_since_round + 1
        updates, inner_new, accumulated = local_step(
            inner,
            rule,
            Round(workers, static_period, steps),
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
        ages = state.ages if parts.number == 1 else state.ages + 1

        # A round has two halves, with `delay` steps between them. They see of trees the
        # part that meets, of which this is the number.

        def contribute(now: _Meeting, number: int):
            """What the worker brings to a round: (now, it, the round)."""
            at = Round(
                workers, static_period, steps if parts.number == 1 else ages[number]
            )
            own_x = as_center(now.params, now.center)
            taken = now.taken if keeps_taken else now.center
            own = own_of(rule, own_x, taken, now.accumulated)
            contribution = localize(contributions(rule, own, now.center, at), axis_name)
            measured = now.measured
            if measure:
                apart = jax.tree.map(jnp.subtract, own_x, now.center)
                like = measured.distance_before_round
                measured = MeasuredOwn(norm_of(apart, like=like))
            now = now._replace(
                accumulated=zeros_like(now.accumulated),
                measured=measured,
                weight=weight_of(contribution),
            )
            return now, contribution, at

        def weight_of(sent):
            """0 where the worker is left out of a round; `None` where none can be."""
            if not drop_nonfinite:
                return None
            finite = ~broken & everywhere(is_finite(sent), params, axis_name)
            return localize(finite.astype(jnp.float32), axis_name)

        def pushed_of(weight) -> Any:
            """The workers that are in a round."""
            if weight is None:
                return workers
            return reduce(weight, axis_name, reduction="sum")

        def agree(now: _Meeting, contribution):
            """What the center absorbs: (now, it, the workers in it)."""
            weight, agreed, also = now.weight, now.agreed, None
            if measure:
                square = square_sum(contribution, now.measured.distance_before_round)
                also = to_sum(square, axis_name, weight=weight, alike=True)
            met = exchange.meet(
                contribution, now.exchange, axis_name, weight=weight, also=also
            )
            total, pushed = met.mean, met.weight
            if measure:
                agreed = measure_of(
                    agreed, met.also, pushed, square_sum(total, agreed.update_norm)
                )
            outliers = count_outlier(
                exchange, contribution, total, axis_name, weight, now.outliers
            )
            if rule.mean_over is None:
                total = jax.tree.map(
                    lambda mean: mean * jnp.asarray(pushed, mean.dtype), total
                )
            now = now._replace(exchange=met.state, outliers=outliers, agreed=agreed)
            return now, total, pushed

        def land(now: _Meeting, total, pushed, at) -> _Meeting:
            """The center absorbs it, and the worker takes what the rule says."""
            extra = {}
            if rule.outer is inner:
                extra = _mean_extra_args(extra_args, axis_name, now.weight)
            total = vary_like(total, now.center)
            center, outer = absorb(rule, now.center, now.outer, total, **extra)
            if drop_nonfinite:
                center, outer = where(
                    pushed > 0, (center, outer), (now.center, now.outer)
                )
            agreed = now.agreed
            if measure:
                change = jax.tree.map(jnp.subtract, center, now.center)
                norm = norm_of(change, like=agreed.update_norm)
                agreed = agreed._replace(update_norm=norm)
            own_x = as_center(now.params, now.center)
            new_x = take(rule, own_x, now.center, center, at, keep_local)
            return now._replace(
                params=_rounded(new_x, now.params),
                center=center,
                taken=now.center if keeps_taken else (),
                outer=outer,
                agreed=agreed,
            )

        def settle(now: _Meeting) -> _Meeting:
            """What else a round does to a worker; a broken one comes back whole."""
            inner_met, landed = now.inner, now.params
            if drop_nonfinite and sharded is None:  # There all take the center.
                landed = where(now.weight > 0, landed, _rounded(now.center, landed))
            if inner_moved is not None:
                inner_met = inner_moved(inner_met, x, landed)
            if inner_state == "average":
                inner_met = _average(inner_met, axis_name, now.weight)
            elif inner_state == "reset":
                inner_met = inner.init(landed)
            now = now._replace(params=landed, inner=inner_met)
            if not drop_nonfinite:
                return now
            return now._replace(
                inner=where(now.weight > 0, inner_met, inner.init(landed)),
                accumulated=where(
                    now.weight > 0, now.accumulated, zeros_like(now.accumulated)
                ),
                dropped=now.dropped + (now.weight == 0).astype(jnp.int32),
            )

        def meet_in_pieces(now: _Meeting, sharded: ShardedCenter) -> _Meeting:
            """Both halves, where the center lies in pieces."""
            at = Round(workers, static_period, steps)
            sent = sharded.sent(now.params, now.accumulated, now.center, at)
            sent = localize(sent, axis_name)
            weight = weight_of(sent)
            center, outer = sharded.meet(
                now.center,
                now.outer,
                sent,
                at,
                weight=weight,
                pushed=pushed_of(weight),
                extra=_mean_extra_args(extra_args, axis_name, weight)
                if rule.outer is inner
                else {},
            )
            whole = sharded.whole(center, now.params)
            return now._replace(
                params=whole,
                center=center,
                outer=outer,
                accumulated=zeros_like(now.accumulated),
                weight=weight,
            )

        def meet_at_once(now: _Meeting, number: int) -> _Meeting:
            """Both halves."""
            now, contribution, at = contribute(now, number)
            now, total, pushed = agree(now, contribution)
            return land(now, total, pushed, at)

        def set_out(now: _Meeting, number: int) -> _Meeting:
            """The first half: a sum, or what is to be summed, is pending."""
            now, contribution, at = contribute(now, number)
            if straight:
                count = now.weight if drop_nonfinite else ()
                pending: Any = Outgoing(buffer.pack(contribution), at.steps, count)
                return now._replace(pending=pending)
            now, total, pushed = agree(now, contribution)
            count = pushed if drop_nonfinite else ()
            pending = Pending(buffer.pack(total), at.steps, count)
            return now._replace(pending=pending)

        def arrive(now: _Meeting, number: int) -> _Meeting:
            """The second half, in which nothing is sent."""
            at = Round(workers, static_period, summed.steps)
            total = buffer.unpack(summed.values, number)
            return land(now, total, summed.pushed, at)

        due = meet
        if meet is None:
            due = is_due(between_exchanges, steps, state.local_step)
        now = _Meeting(
            params=x,
            center=state.center,
            taken=state.taken,
            outer=state.outer,
            pending=state.pending,
            accumulated=accumulated,
            dropped=state.dropped,
            exchange=state.exchange,
            outliers=state.outliers,
            measured=state.measured,
            agreed=state.agreed,
            inner=inner_new,
            weight=(~broken).astype(jnp.float32) if drop_nonfinite else None,
        )
        # The part of this exchange, and of the one before.
        part, last = (
            (state.global_step + shift) % parts.number if parts.number > 1 else 0
            for shift in (0, -1)
        )
        # What each half changes; all else stays out of its conditionals.
        given = ["accumulated", "exchange", "outliers", "measured", "agreed"]
        given += ["weight"] if drop_nonfinite else []
        taken = ["params", "center", "taken", "outer", "agreed"]
        settled = ["dropped", "params"] if drop_nonfinite else []
        settled += ["inner"] if changes_inner else []
        if not delay:

            def whole_round(now):
                if sharded is not None:
                    return settle(meet_in_pieces(now, sharded))
                fields = [*given, *taken]
                return settle(in_turn(part, meet_at_once, now, fields, parts))

            now = _either(due, whole_round, now, {*given, *taken, *settled})
        else:
            buffer = Buffer(parts, state.center)
            lands = state.global_step != 0
            remembered = ()
            if straight:
                # In no conditional, and of the state alone: it runs beside the step.
                memory = state.exchange
                if parts.number > 1:
                    memory = row_of(memory, last)
                values, at_steps, weight = state.pending
                before = now._replace(
                    exchange=memory, weight=weight if drop_nonfinite else None
                )
                after, total, pushed = agree(before, values)
                summed, due = Pending(total, at_steps, pushed), True
                fields = "exchange", "outliers", "agreed"
                kept, known_before = (
                    {field: getattr(x, field) for field in fields}
                    for x in (after, before)
                )
                kept = where(lands, kept, known_before)
                remembered = kept.pop("exchange")
                if parts.number > 1:
                    remembered = with_row(state.exchange, last, remembered)
                now = now._replace(**kept, exchange=())
            else:
                summed = state.pending
                lands &= state.steps_since_round < delay
                lands &= (steps >= delay) | due

            def second_half(now):
                return in_turn(last, arrive, now, taken, parts)

            def first_half(now):
                return settle(in_turn(part, set_out, now, given, parts))

            given += ["pending"]
            now = _either(lands, second_half, now, set(taken))
            now = _either(due, first_half, now, {*given, *settled})
            pending = now.pending
            if straight:
                now = now._replace(exchange=remembered)
                pending = localize(pending, axis_name)
            now = now._replace(pending=vary_like(pending, state.pending))
        due = jnp.asarray(due)
        if parts.number > 1:
            met_now = due & (jnp.arange(parts.number) == part)
            ages = jnp.where(met_now, jnp.zeros_like(ages), ages)
        return now.params, state_of(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            global_step=state.global_step + due.astype(jnp.int32),
            ages=ages,
            center=now.center,
            taken=now.taken,
            outer=now.outer,
            pending=now.pending,
            accumulated=now.accumulated,
            broken=broken & ~due if drop_nonfinite else (),
            dropped=now.dropped,
            exchange=now.exchange,
            outliers=now.outliers,
            measured=now.measured,
            agreed=now.agreed,
            inner=now.inner,
        )

    def moved(state, before, after):
        """The state once a rule around this one has moved the workers' parameters."""
        center = state.center if sharded is None else state.center.tree
        change = jax.tree.map(
            jnp.subtract, as_center(after, center), as_center(before, center)
        )
        change = reduce(localize(change, axis_name), axis_name)
        taken = state.taken
        if sharded is not None:
            center = sharded.moved(state.center, change)
        else:
            center, taken = (
                jax.tree.map(jnp.add, tree, change) if jax.tree.leaves(tree) else tree
                for tree in (center, state.taken)
            )
        within = state.inner
        if inner_moved is not None:
            within = inner_moved(within, before, after)
        return state._replace(center=center, taken=taken, inner=within)

    return direct_transformation(init, landing_update(apply), apply, between, moved)


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
    due: Any,
    change: Callable[[_Meeting], _Meeting],
    now: _Meeting,
    fields: set[str],
) -> _Meeting:
    """`change(now)` where due, else `now`; it changes these fields.

    The conditional carries no others, and there is none where `due` is known.
    """
    quiet = {
        field: getattr(now, field)
        for field in _Meeting._fields
        if field in fields and field != "weight"  # It is asked for no more.
    }

    def changed(quiet):
        after = change(now._replace(**quiet))._asdict()
        return vary_like({field: after[field] for field in quiet}, quiet)

    if isinstance(due, bool):
        return now._replace(**(changed(quiet) if due else quiet))
    return now._replace(**jax.lax.cond(due, changed, lambda quiet: quiet, quiet))


def _rounded(tree: Any, like: Any) -> Any:
    """The tree in the dtypes of another one."""
    return jax.tree.map(lambda x, p: x.astype(p.dtype), tree, like)


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
