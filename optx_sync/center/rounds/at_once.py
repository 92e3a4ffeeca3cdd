# SPDX-License-Identifier: Apache-2.0
"""A round without delay: workers contribute, agree and take in one step."""

from typing import NamedTuple

from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.meeting import OnItsWay, Phases, Step
from optx_sync.center.rounds.turns import LANDS, SETS_OUT, Now, either, in_turn
from optx_sync.trees import Tree


class AtOnce(NamedTuple):
    """All phases of a round happen in the step in which it is due."""

    meeting: Phases

    def start(self, parts: Whole, center: Tree, held: Tree) -> tuple[OnItsWay, Tree]:
        """(what is pending, what the exchange remembers) before the first round."""
        return (), parts.each(self.meeting.remember, center)

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        return either(step.due, lambda now: self._round(now, step), now)

    def _round(self, now: Now, step: Step) -> Now:
        walked = now.worker.params
        now = in_turn(
            step.parts,
            step.part(),
            lambda seen, part: self._meet(seen, step, part),
            now,
            SETS_OUT | LANDS,
        )
        return self.meeting.settle(now, walked, now.center.value)

    def _meet(self, now: Now, step: Step, part: int) -> Now:
        now, contribution = self.meeting.bring(now, step, part)
        now, total, pushed = self.meeting.agree(now, step, contribution)
        return self.meeting.land(now, step, total, pushed, step.at(part))
