# SPDX-License-Identifier: Apache-2.0
"""The phases of a round (bring, agree, land, settle), and when they happen.

A round calls each phase once, for the part of the parameters that meets. `Meeting` has
those of lockstep; where the center lies and how a worker sees it, its landing says.
`AtOnce`, `Later` and `InLine` say when the phases happen, and in which conditional.
"""

import contextlib
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from optx_sync.center import worker as work
from optx_sync.center.buffers import Buffer, OnItsWay, Outgoing, Pending, buffer_of
from optx_sync.center.checks import Options
from optx_sync.center.contract import Round
from optx_sync.center.fragments import Partition
from optx_sync.center.inner_state import after_round
from optx_sync.center.landing import Landing
from optx_sync.center.state import norm_of
from optx_sync.center.turns import LANDS, MENDS, SETS_OUT, Now, either, in_turn
from optx_sync.center.worker import Center
from optx_sync.comm import shards
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import everywhere, localize, vary_like
from optx_sync.exchange.agree import agree
from optx_sync.placement import memory
from optx_sync.shapes import Array, Int32
from optx_sync.trees import (
    Tree,
    is_finite,
    is_floating,
    is_placeholder,
    row_of,
    where,
    with_row,
)


class Step(NamedTuple):
    """What is known of the current step."""

    num_workers: int
    period: int | None  # in steps; None for a schedule
    due: bool | jax.Array  # bool or bool[], whether workers meet in this step
    # int32[], the workers' steps since their last round, this one included
    steps: jax.Array
    ages: Any  # int32[P], steps since each part met; () where there is one part
    rounds: Int32[Array, ""]  # rounds before this step
    quiet: Int32[Array, ""]  # steps between the last round and this step
    parts: Partition
    params: Tree  # as given to the step; their types say how a worker is sharded
    alike: bool  # whether all weights are 0 or 1
    extra_args: dict[str, Any]

    def at(self, part: int) -> Round:
        """What a rule may know of the meeting of a part."""
        steps = self.steps if self.parts.number == 1 else self.ages[part]
        return Round(self.num_workers, self.period, steps)

    def part(self, ago: int = 0) -> int | jax.Array:
        """The part that meets in the next exchange, or did so many exchanges before."""
        number = self.parts.number
        return (self.rounds - ago) % number if number > 1 else 0

    def sent(self, contribution: Tree) -> Any:
        """A context in which a part of a sharded worker is sent in shards."""
        if self.parts.number == 1:
            return contextlib.nullcontext()
        return shards.of_part(contribution, self.params)

    def met(self) -> jax.Array:
        """Which parts have met in this step: bool[P], or bool[] for a single part."""
        due = jnp.asarray(self.due)
        if self.parts.number == 1:
            return due
        return due & (jnp.arange(self.parts.number, dtype=jnp.int32) == self.part())


class Meeting(NamedTuple):
    """The phases of a round in lockstep, by the options of `center_variable`."""

    options: Options
    landing: Landing

    @property
    def drop_nonfinite(self) -> bool:
        """Whether a worker that is not finite is left out."""
        return self.options.drop_nonfinite

    def remember(self, part: Tree) -> Tree:
        """What the exchange of a part remembers before the first round."""
        return self.options.exchange.init(part)

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, what this worker contributes)."""
        seen, info = self.landing.seen(now), now.info
        worker, contribution = self.landing.bring(now, seen, step.at(part))
        contribution = localize(contribution, self.options.axis_name)
        if self.options.measure:
            x = work.as_center(now.worker.params, seen)
            apart = jax.tree.map(jnp.subtract, x, seen)
            info = info._replace(distance=norm_of(apart, like=info.distance))
        now = now._replace(worker=worker, info=info)
        return self.leave_out(now, step, contribution), contribution

    def leave_out(self, now: Now, step: Step, contribution: Tree) -> Now:
        """Weight 0 for a worker that is not finite, with `drop_nonfinite`."""
        if not self.drop_nonfinite:
            return now
        axis_name = self.options.axis_name
        finite = everywhere(is_finite(contribution), step.params, axis_name)
        well = localize(now.well & finite, axis_name)
        weight = jnp.where(well, now.weight, jnp.zeros_like(now.weight))
        return now._replace(well=well, weight=weight)

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """(now, the sum or mean for the center, the sum of weights or ())."""
        agreed = agree(
            self.options.exchange,
            self.landing.of(now, step.at(0)),
            contribution,
            now.exchange,
            now.info,
            weight=now.weight,
            alike=step.alike,
            summed=self.options.rule.mean_over is None,
        )
        now = now._replace(exchange=agreed.memory, info=agreed.info)
        return now, agreed.mean, agreed.weight if self.drop_nonfinite else ()

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The center absorbs the contributions, and this worker takes from it."""
        landing, rule, held, info = (
            self.landing,
            self.options.rule,
            now.center,
            now.info,
        )
        before, (total, _) = landing.open(held), landing.open(Center(total, ()))
        extra = self.extra_args(step, now.weight)
        with landing.stepped():
            after = work.absorb(rule, before, vary_like(total, before.value), **extra)
        if self.drop_nonfinite:
            after = where(pushed > 0, after, before)
        if self.options.measure:
            change = jax.tree.map(jnp.subtract, after.value, before.value)
            norm = landing.norm(change, info.measured.update_norm)
            info = info._replace(measured=info.measured._replace(update_norm=norm))
        now = now._replace(center=landing.close(after, held), info=info)
        worker = work.take(rule, now.worker, *landing.taken(now, before), at)
        return now._replace(worker=worker)

    def settle(self, now: Now, step: Step, walked: Tree, center: Tree) -> Now:
        """The other effects of a round on a worker; a broken one starts again.

        Args:
            now: After the other phases, of all parts.
            step: The current one.
            walked: The worker's parameters before them.
            center: What a broken worker takes.
        """
        worker, inner, moved = now.worker, self.options.inner, self.options.moved
        if moved is not None:
            worker = worker._replace(inner=moved(worker.inner, walked, worker.params))
        inner_state = after_round(
            self.options.inner_state,
            inner,
            worker,
            step.rounds,
            self.options.axis_name,
            now.weight,
        )
        worker = worker._replace(inner=inner_state)
        now = now._replace(worker=worker)
        if not self.drop_nonfinite:
            return now
        center = self.landing.for_broken(now, memory.on_device(center))
        dropped = now.info.dropped + (~now.well).astype(jnp.int32)
        return now._replace(
            worker=work.mend(inner, worker, center, now.well),
            info=now.info._replace(dropped=dropped),
        )

    def extra_args(self, step: Step, weight: jax.Array | None) -> dict[str, Any]:
        """The extra arguments of the step that `inner` makes at the center."""
        if self.options.rule.outer is not self.options.inner:
            return {}
        # `batch_size` is for a `cross_shard(measure=True)` inside.
        return {
            name: _mean_of(name, value, self.options.axis_name, weight)
            for name, value in step.extra_args.items()
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
    return reduce(localize(jnp.asarray(value), axis_name), axis_name, weight=weight)


# (what is pending, what the exchange remembers)
Begun: TypeAlias = tuple[OnItsWay, Tree]


class Rounds(Protocol):
    """When the phases of a round happen."""

    def start(self, parts: Partition, center: Tree, held: Tree) -> Begun:
        """(what is pending, what the exchange remembers) before the first round.

        Args:
            parts: The parts of the parameters.
            center: The whole center.
            held: The center as a worker holds it: whole, or its pieces.
        """
        ...

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        ...


class AtOnce(NamedTuple):
    """Without delay: workers contribute, agree and take in the step that is due."""

    meeting: Meeting

    def start(self, parts: Partition, center: Tree, held: Tree) -> Begun:
        """(what is pending, what the exchange remembers) before the first round."""
        return (), parts.each(self.meeting.remember, center)

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        return either(step.due, lambda now: self._round(now, step), now)

    def _round(self, now: Now, step: Step) -> Now:
        def meet(now, part):
            now, contribution = self.meeting.bring(now, step, part)
            with step.sent(contribution):
                now, total, pushed = self.meeting.agree(now, step, contribution)
            return self.meeting.land(now, step, total, pushed, step.at(part))

        walked = now.worker.params
        now = in_turn(step.parts, step.part(), meet, now, SETS_OUT | LANDS)
        return self.meeting.settle(now, step, walked, now.center.value)


class Later(NamedTuple):
    """The center absorbs a sum, and workers take, `delay` steps after the sum."""

    meeting: Meeting
    delay: int

    def start(self, parts: Partition, center: Tree, held: Tree) -> Begun:
        """(what is pending, what the exchange remembers) before the first round."""
        pushed = jnp.zeros(()) if self.meeting.drop_nonfinite else ()
        buffer = buffer_of(parts, held).zeros()
        pending = Pending(buffer, jnp.zeros((), jnp.int32), pushed)
        return pending, parts.each(self.meeting.remember, center)

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round: a pending sum lands before the next part sets out."""
        buffer = buffer_of(step.parts, now.center.value)
        lands = (step.rounds != 0) & (step.quiet < self.delay)
        lands &= (step.steps >= self.delay) | step.due
        now = either(
            lands, lambda now: _arrive(self.meeting, now, step, buffer), now, LANDS
        )
        changes = SETS_OUT | MENDS if self.meeting.drop_nonfinite else SETS_OUT
        return either(
            step.due, lambda now: self._set_out(now, step, buffer), now, changes
        )

    def _set_out(self, now: Now, step: Step, buffer: Buffer) -> Now:
        def set_out(now, part):
            now, contribution = self.meeting.bring(now, step, part)
            with step.sent(contribution):
                now, total, pushed = self.meeting.agree(now, step, contribution)
            pending = Pending(buffer.pack(total, part), step.at(part).steps, pushed)
            return now._replace(pending=pending)

        walked = now.worker.params
        now = in_turn(step.parts, step.part(), set_out, now, SETS_OUT)
        return self.meeting.settle(now, step, walked, now.center.value)


class InLine(NamedTuple):
    """In every step one part sets out while the part of the step before lands.

    The sum of what set out a step before stands outside of all conditionals and depends
    on the state alone, so that the compiler may overlap it with the step.
    """

    meeting: Meeting

    def start(self, parts: Partition, center: Tree, held: Tree) -> Begun:
        """(what is pending, what the exchange remembers) before the first round."""
        weight = jnp.zeros(()) if self.meeting.drop_nonfinite else ()
        buffer = Buffer(parts, center).zeros()
        remembered = buffer
        if not is_placeholder(center):
            remembered = self.meeting.remember(buffer)
        if parts.number > 1:
            remembered = jax.tree.map(
                lambda x: jnp.stack([x] * parts.number), remembered
            )
        return Outgoing(buffer, jnp.zeros((), jnp.int32), weight), remembered

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        buffer = Buffer(step.parts, now.center.value)
        lands = step.rounds != 0
        now, summed, remembered = self._sum(now, step, lands)
        before = now.pending
        now = now._replace(pending=summed, exchange=())
        now = either(
            lands, lambda now: _arrive(self.meeting, now, step, buffer), now, LANDS
        )
        now = self._set_out(now._replace(pending=before), step, buffer)
        return now._replace(exchange=remembered)

    def _sum(self, now: Now, step: Step, lands: jax.Array) -> tuple[Now, Pending, Tree]:
        """(now, the sum of what is pending, what the exchange remembers)."""
        parts, memory, last = step.parts, now.exchange, step.part(ago=1)
        if parts.number > 1:
            memory = row_of(memory, last)
        values, steps, weight = now.pending
        weighed = self.meeting.drop_nonfinite
        before = now._replace(exchange=memory, weight=weight if weighed else None)
        with shards.beside(values, now.center.value):
            # The weights belong to the step before: this step's say nothing of them.
            after, total, pushed = self.meeting.agree(
                before, step._replace(alike=not weighed), values
            )
        # Before the first round nothing is pending.
        exchange, info = where(
            lands, (after.exchange, after.info), (before.exchange, before.info)
        )
        if parts.number > 1:
            exchange = with_row(now.exchange, last, exchange)
        return now._replace(info=info), Pending(total, steps, pushed), exchange

    def _set_out(self, now: Now, step: Step, buffer: Buffer) -> Now:
        def set_out(now, part):
            now, contribution = self.meeting.bring(now, step, part)
            weight = now.weight if self.meeting.drop_nonfinite else ()
            values = buffer.pack(contribution, part)
            return now._replace(pending=Outgoing(values, step.at(part).steps, weight))

        walked, before = now.worker.params, now.pending
        now = in_turn(step.parts, step.part(), set_out, now, SETS_OUT)
        now = self.meeting.settle(now, step, walked, now.center.value)
        pending = localize(now.pending, self.meeting.options.axis_name)
        return now._replace(pending=vary_like(pending, before))


def _arrive(meeting: Meeting, now: Now, step: Step, buffer: Buffer) -> Now:
    """Let the pending sum land; nothing is sent."""
    pending = now.pending

    def land(now, part):
        at = Round(step.num_workers, step.period, pending.steps)
        total = buffer.unpack(pending.values, part)
        return meeting.land(now, step, total, pending.pushed, at)

    return in_turn(step.parts, step.part(ago=1), land, now, LANDS)
