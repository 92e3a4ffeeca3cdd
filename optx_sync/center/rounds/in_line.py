# SPDX-License-Identifier: Apache-2.0
"""Rounds in every step: one part sets out while the part of the step before lands.

The sum of what set out a step before stands outside of all conditionals and depends on
the state alone, so that the compiler may overlap it with the step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optx_sync.center.buffers import Buffer, Outgoing, Pending
from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.later import arrive
from optx_sync.center.rounds.meeting import Meeting, OnItsWay, Step
from optx_sync.center.rounds.turns import LANDS, SETS_OUT, Now, either, in_turn
from optx_sync.comm import shards
from optx_sync.comm.varying import localize, vary_like
from optx_sync.trees import Tree, row_of, where, with_row


class InLine(NamedTuple):
    """An exchange in every step, of what set out in the step before it."""

    meeting: Meeting

    def start(self, parts: Whole, center: Tree, held: Tree) -> tuple[OnItsWay, Tree]:
        """(what is pending, what the exchange remembers) before the first round."""
        weight = jnp.zeros(()) if self.meeting.drop_nonfinite else ()
        buffer = Buffer(parts, center).zeros()
        remembered = self.meeting.exchange.init(buffer)
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
            lands, lambda now: arrive(self.meeting, now, step, buffer), now, LANDS
        )
        now = self._set_out(now._replace(pending=before), step, buffer)
        return now._replace(exchange=remembered)

    def _sum(self, now: Now, step: Step, lands: jax.Array) -> tuple[Now, Pending, Tree]:
        """(now, the sum of what is pending, what the exchange remembers)."""
        parts, memory, last = step.parts, now.exchange, step.part(ago=1)
        if parts.number > 1:
            memory = row_of(memory, last)
        values, steps, weight = now.pending
        before = now._replace(
            exchange=memory, weight=weight if self.meeting.drop_nonfinite else None
        )
        # The weights belong to the step before: this step's say nothing about them.
        alike = not self.meeting.drop_nonfinite
        with shards.beside(values, now.center.value):
            after, total, pushed = self.meeting.agree(
                before, step._replace(alike=alike), values
            )
        # Before the first round nothing is pending.
        exchange, info = where(
            lands, (after.exchange, after.info), (before.exchange, before.info)
        )
        if parts.number > 1:
            exchange = with_row(now.exchange, last, exchange)
        now = now._replace(info=info)
        return now, Pending(total, steps, pushed), exchange

    def _set_out(self, now: Now, step: Step, buffer: Buffer) -> Now:
        walked = now.worker.params

        def set_out(now, part):
            now, contribution = self.meeting.bring(now, step, part)
            weight = now.weight if self.meeting.drop_nonfinite else ()
            pending = Outgoing(
                buffer.pack(contribution, part), step.at(part).steps, weight
            )
            return now._replace(pending=pending)

        before = now.pending
        now = in_turn(step.parts, step.part(), set_out, now, SETS_OUT)
        now = self.meeting.settle(now, walked, now.center.value)
        pending = localize(now.pending, self.meeting.axis_name)
        return now._replace(pending=vary_like(pending, before))
