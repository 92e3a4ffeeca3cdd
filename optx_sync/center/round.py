# SPDX-License-Identifier: Apache-2.0
"""One round of lockstep: bring, meet, move the center, take.

A round is an update. What the workers bring is the gradient of the center, and the
meeting that makes a mean of gradients in `cross_shard` makes a move of the center here:

    sent  = what the rule contributes          of this worker, like the parameters
    move  = meeting.update(sent, ..., center)  an exchange, and a step of `outer`
    after = center + move
    x     = what the rule takes                of the center before and after

Parts of the parameters meet in turn. Each has a state of the meeting and a conditional
of its own, which carries what may change in a round and nothing else.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.checks import Options
from optx_sync.center.contract import Round
from optx_sync.center.fragments import Partition
from optx_sync.center.inner_state import after_round
from optx_sync.center.state import norm_of
from optx_sync.center.turns import Turns
from optx_sync.center.worker import Center, Worker
from optx_sync.comm import shards
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import mean_or
from optx_sync.comm.varying import everywhere, localize, vary_like
from optx_sync.core.trees import Tree, is_finite, is_floating, where, zeros_like
from optx_sync.exchange.meeting import Meeting, MeetingState
from optx_sync.state.metrics import SharedInfo


class RoundState(NamedTuple):
    """What a round may change.

    Attributes:
        worker: This worker.
        center: The center, and the state of the outer optimizer.
        exchange: What the exchange remembers.
        info: What is measured and counted.
        well: bool[], whether this worker is finite; () without `drop_nonfinite`.
    """

    worker: Worker
    center: Center
    exchange: Tree
    info: SharedInfo
    well: Any


class Turn(NamedTuple):
    """What is known of the current step.

    Attributes:
        num_workers: N.
        period: The steps between rounds; `None` for a schedule.
        due: bool or bool[], whether a part meets in this step.
        part: int or int32[], the part whose turn it is.
        parts: How the parameters are divided.
        steps: int32[], `Round.steps` of the part whose turn it is.
        rounds: int32[], rounds before this one.
        brings: The worker that contributes, as it was before this step; `None`: the
            worker as it is after its step.
        params: The parameters as given to the step, whose types say how a worker is
            sharded.
        weight: float[], this worker's; `None`: all contributions count the same.
        alike: Whether all weights are 0 or 1.
        extra_args: Of the step.
        counted: When parts meet, for a host that counts.
    """

    num_workers: int
    period: int | None
    due: bool | jax.Array
    part: int | jax.Array
    parts: Partition
    steps: jax.Array
    rounds: jax.Array
    brings: Worker | None
    params: Tree
    weight: jax.Array | None
    alike: bool
    extra_args: dict[str, Any]
    counted: Turns

    @property
    def at(self) -> Round:
        """What a rule may know of this round."""
        return Round(self.num_workers, self.period, self.steps)

    def meets(self, part: int) -> bool | jax.Array:
        """Whether this part meets in this step."""
        if self.parts.number == 1 or self.due is False:
            return self.due
        turn = self.part == part
        return turn if self.due is True else jnp.asarray(self.due) & turn


class Rounds(Protocol):
    """What lockstep asks of a round: of a center's here, of partners' in `peers/`."""

    @property
    def options(self) -> Options:
        """The checked options."""
        ...

    def start(self, parts: Partition, center: Tree) -> tuple[Center, Tree]:
        """(the center, what the exchange remembers) before the first round."""
        ...

    def meet(self, now: RoundState, turn: Turn, part: int) -> RoundState:
        """The round of a part; `now` has this part alone of what is cut into parts."""
        ...


class CenterRounds(NamedTuple):
    """Rounds at a center that all workers share."""

    options: Options
    meeting: Meeting

    def start(self, parts: Partition, center: Tree) -> tuple[Center, Tree]:
        """(the center, what the exchange remembers) before the first round."""
        outer = parts.each(self.meeting.init, center)
        return Center(center, outer), parts.each(self.options.exchange.init, center)

    def meet(self, now: RoundState, turn: Turn, part: int) -> RoundState:
        """The round of a part; `now` has this part alone of what is cut into parts."""
        options, rule, center = self.options, self.options.rule, now.center.value
        if turn.brings is None:
            worker, sent = work.bring(rule, now.worker, center, turn.at)
            brings = worker
        else:  # the sums of `now.worker` began anew before this step
            worker, brings = now.worker, of_part(turn.parts, turn.brings, part)
            _, sent = work.bring(rule, brings, center, turn.at)
        sent = localize(sent, options.axis_name)
        now = left_out(self.options, now, turn, sent)
        weight, info = weight_of(now, turn), now.info
        if options.measure:
            apart = jax.tree.map(
                jnp.subtract, work.as_center(brings.params, center), center
            )
            info = info._replace(distance=norm_of(apart, like=info.distance))
        with _in_part(turn, sent):
            move, met, pushed = self.meeting.update(
                sent,
                MeetingState(now.exchange, info, now.center.outer),
                center,
                weight=weight,
                alike=turn.alike,
                extra_args=outer_args(options, turn, weight),
            )
        center = moved_center(now.center, move, met.inner, pushed, weight)
        info = met.info
        if options.measure and weight is not None:
            norm = info.measured.update_norm
            norm = where(pushed > 0, norm, zeros_like(norm))
            info = info._replace(measured=info.measured._replace(update_norm=norm))
        worker = work.take(rule, worker, now.center.value, center.value, turn.at)
        return RoundState(worker, center, met.exchange, info, now.well)


def moved_center(
    before: Center, move: Tree, outer: Tree, pushed: Any, weight: jax.Array | None
) -> Center:
    """The center after a move; where nobody has pushed, it and `outer` stay."""
    after = Center(optax.apply_updates(before.value, move), outer)
    return after if weight is None else where(pushed > 0, after, before)


def left_out(options: Options, now: RoundState, turn: Turn, sent: Tree) -> RoundState:
    """The round in which a worker is not well that would send NaN or infinity."""
    if not options.drop_nonfinite:
        return now
    finite = everywhere(is_finite(sent), turn.params, options.axis_name)
    return now._replace(well=localize(now.well & finite, options.axis_name))


def weight_of(now: RoundState, turn: Turn) -> jax.Array | None:
    """This worker's weight, 0 if it is not well."""
    if turn.weight is None or isinstance(now.well, tuple):
        return turn.weight
    return jnp.where(now.well, turn.weight, jnp.zeros_like(turn.weight))


def settled(options: Options, now: RoundState, turn: Turn, walked: Tree) -> RoundState:
    """The other effects of a round on a worker; a broken one starts again.

    Args:
        options: Of the rule.
        now: After the meeting of a part, with all parts.
        turn: The current step.
        walked: The worker's parameters before the meeting.
    """
    worker, inner = now.worker, options.inner
    if options.moved is not None:
        moved = options.moved(worker.inner, walked, worker.params)
        worker = worker._replace(inner=moved)
    inner_state = after_round(
        options.inner_state,
        inner,
        worker,
        turn.rounds,
        options.axis_name,
        weight_of(now, turn),
    )
    worker = worker._replace(inner=inner_state)
    if not options.drop_nonfinite:
        return now._replace(worker=worker)
    dropped = now.info.dropped + (~now.well).astype(jnp.int32)
    return now._replace(
        worker=work.mend(inner, worker, now.center.value, now.well),
        info=now.info._replace(dropped=dropped),
    )


def outer_args(
    options: Options, turn: Turn, weight: jax.Array | None
) -> dict[str, Any]:
    """The extra arguments of the step that `inner` makes at the center."""
    if options.rule.outer is not options.inner:
        return {}
    # `batch_size` is for a `cross_shard(measure=True)` inside.
    return {
        name: _mean_of(name, value, options.axis_name, weight)
        for name, value in turn.extra_args.items()
        if name != "batch_size"
    }


def _mean_of(
    name: str, value: Any, axis_name: AxisName, weight: jax.Array | None
) -> Any:
    """The workers' mean of an extra argument; what is no array is equal on all."""
    if isinstance(value, bool | int | float):
        return value
    scalar = getattr(value, "ndim", None) == 0
    if not scalar or not is_floating(value.dtype):
        raise ValueError(
            "The center makes a step of `inner`, which gets the mean of the workers' "
            f"extra arguments. Of {name!r} there is none: it is no floating scalar but "
            f"{value!r}. Pass an optimizer of its own for the center, outer=, which "
            "gets no extra arguments."
        )
    own = localize(jnp.asarray(value), axis_name)
    return mean_or(None, own, axis_name, weight=weight)


def _in_part(turn: Turn, sent: Tree) -> Any:
    """A context in which a part of a sharded worker is sent in shards."""
    if turn.parts.number == 1:
        return contextlib.nullcontext()
    return shards.of_part(sent, turn.params)


def in_turn(rounds: Rounds, now: RoundState, turn: Turn) -> RoundState:
    """The round of the part whose turn it is, if that is due."""
    options, parts, walked = rounds.options, turn.parts, now.worker.params
    settles = options.settles
    if parts.number == 1:

        def whole(now):
            met = rounds.meet(now, turn, 0)
            return settled(options, met, turn, walked) if settles else met

        return _changed(turn.due, whole, now, settles)
    for part in range(parts.number):
        if turn.meets(part) is False:
            continue

        def change(seen, part=part):
            return rounds.meet(seen, turn, part)

        seen = of_part(parts, now, part)
        met = _changed(turn.meets(part), change, seen, inner=False)
        now = _with_part(parts, now, part, met)
    if settles:

        def settle(now):
            return settled(options, now, turn, walked)

        now = _changed(turn.due, settle, now, inner=True)
    return now


def of_part(parts: Partition, tree: Any, part: int) -> Any:
    """A part of a `RoundState`, a `Worker` or a `Center`."""
    if isinstance(tree, RoundState):
        return tree._replace(
            worker=of_part(parts, tree.worker, part),
            center=Center(
                parts.pick(tree.center.value, part),
                parts.of_each(tree.center.outer, part),
            ),
            exchange=parts.of_each(tree.exchange, part),
        )
    cut = tree.params, tree.taken, tree.accumulated
    params, taken, accumulated = (parts.pick(x, part) for x in cut)
    return Worker(params, tree.inner, taken, accumulated)


def _with_part(
    parts: Partition, now: RoundState, part: int, met: RoundState
) -> RoundState:
    """The round with a new part."""
    worker = Worker(
        parts.put(now.worker.params, part, met.worker.params),
        now.worker.inner,
        parts.put(now.worker.taken, part, met.worker.taken),
        parts.put(now.worker.accumulated, part, met.worker.accumulated),
    )
    center = Center(
        parts.put(now.center.value, part, met.center.value),
        parts.with_each(now.center.outer, part, met.center.outer),
    )
    exchange = parts.with_each(now.exchange, part, met.exchange)
    return met._replace(worker=worker, center=center, exchange=exchange)


def _changed(
    due: bool | jax.Array,
    change: Callable[[RoundState], RoundState],
    now: RoundState,
    inner: bool,
) -> RoundState:
    """`change(now)` if due, else `now`; with `inner` it may change that state, too.

    Counters in the state of `inner` that pass through a conditional would become
    batched under `vmap`.
    """
    kept = now.worker.inner
    if not inner:
        now = now._replace(worker=now.worker._replace(inner=()))
    now = cond_over(due, lambda seen: vary_like(change(seen), seen), now)
    if inner:
        return now
    return now._replace(worker=now.worker._replace(inner=kept))


def cond_over(due: bool | jax.Array, change: Callable[[Tree], Tree], now: Tree) -> Tree:
    """`change(now)` if due, else `now`; no conditional for a Python bool."""
    if isinstance(due, bool):
        return change(now) if due else now
    return jax.lax.cond(due, change, lambda same: same, now)


def begun(turn: Turn, worker: Worker) -> Worker:
    """The worker whose sums of the part that meets begin anew before its step."""
    parts, accumulated = turn.parts, worker.accumulated
    for part in range(parts.number):
        if (meets := turn.meets(part)) is not False:
            one = parts.pick(accumulated, part)
            one = where(meets, zeros_like(one), one)
            accumulated = parts.put(accumulated, part, one)
    return worker._replace(accumulated=accumulated)
