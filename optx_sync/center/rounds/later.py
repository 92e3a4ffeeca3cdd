# SPDX-License-Identifier: Apache-2.0
"""A round with delay: the sum is taken in one step, and lands `delay` steps later."""

from typing import NamedTuple

import jax.numpy as jnp

from optx_sync.center.buffers import Buffer, Pending, buffer_of
from optx_sync.center.contract import Round
from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.meeting import OnItsWay, Phases, Step
from optx_sync.center.rounds.turns import (
    LANDS,
    MENDS,
    SETS_OUT,
    Now,
    either,
    in_turn,
)
from optx_sync.trees import Tree


class Later(NamedTuple):
    """The center absorbs a sum, and workers take, `delay` steps after the sum."""

    meeting: Phases
    delay: int

    def start(self, parts: Whole, center: Tree, held: Tree) -> tuple[OnItsWay, Tree]:
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
            lands, lambda now: arrive(self.meeting, now, step, buffer), now, LANDS
        )
        changes = SETS_OUT | MENDS if self.meeting.drop_nonfinite else SETS_OUT
        return either(
            step.due, lambda now: self._set_out(now, step, buffer), now, changes
        )

    def _set_out(self, now: Now, step: Step, buffer: Buffer) -> Now:
        walked = now.worker.params

        def set_out(now, part):
            now, contribution = self.meeting.bring(now, step, part)
            now, total, pushed = self.meeting.agree(now, step, contribution)
            pending = Pending(buffer.pack(total, part), step.at(part).steps, pushed)
            return now._replace(pending=pending)

        now = in_turn(step.parts, step.part(), set_out, now, SETS_OUT)
        return self.meeting.settle(now, walked, now.center.value)


def arrive(meeting: Phases, now: Now, step: Step, buffer: Buffer) -> Now:
    """Let the pending sum land; nothing is sent."""
    pending = now.pending

    def land(now, part):
        at = Round(step.num_workers, step.period, pending.steps)
        total = buffer.unpack(pending.values, part)
        return meeting.land(now, step, total, pending.pushed, at)

    return in_turn(step.parts, step.part(ago=1), land, now, LANDS)
