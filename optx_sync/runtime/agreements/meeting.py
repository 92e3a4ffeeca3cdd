# SPDX-License-Identifier: Apache-2.0
"""Meetings that several workers share: contributions wait until enough have come."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center import worker as work
from optx_sync.core.trees import Tree, is_finite, where
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.meetings import alone
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime.agreements.center import Center
from optx_sync.runtime.agreements.own import Terms
from optx_sync.runtime.agreements.saved import Notes
from optx_sync.runtime.messages import Arrays, Push, Reply
from optx_sync.runtime.samples import MEETING, Outcome
from optx_sync.runtime.system import here

# The axis of the contributions to one meeting.
AXIS = "contributions"


class Meetings(Center):
    """The center of a part at which K of M workers meet.

    A contribution that started from the center as it is waits for the others. When
    enough have come and the grace is over, their weighted mean, or what `merge` makes
    of them, is absorbed in one step. A contribution that started from another center is
    late: it is dropped. Nothing is donated or overwritten, so answers are no copies.
    """

    center: Arrays
    outer: Tree
    global_step: int
    applied: int
    short: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    def __init__(self, params: Tree, terms: Terms):
        super().__init__(params, terms, copy_replies=False)
        self.quorum: Quorum = terms.meet
        self.delay: int = terms.delay
        self.clock: Callable[[], float] = here().now
        self.merge: Exchange = check_exchange(terms.meet.merge, all_reduce())
        self.came: list[Push] = []  # to the meeting that is open
        self.left: set[int] = set()
        self.before: Arrays = self.center  # around the last meeting
        self.strangers: set[int] = set()  # who has no answer of a server that came back
        self.restored: int = 0  # its meetings by then
        self.took: dict[int, int] = {}  # `Push.confirms` of those that wait
        self.opened: float = 0.0  # the time at which the first one came
        self.closes: float | None = None  # the end of the grace, once enough have come
        self.step_seconds: float = 0.0  # of the fastest that has come
        self.sync_seconds: float = 0.0  # what the last meeting took to merge
        self._meet: Any = jax.jit(self._run_meet)

    @property
    def adds(self) -> bool:
        """Never in place: an answer may still be on its way."""
        return False

    def absorb(self, worker: int, push: Push, sizes: dict[str, float]) -> Reply:
        """Take a contribution for the meeting that is open, or drop it as late."""
        self.settle()
        self.took[worker] = push.confirms
        gone = worker in self.strangers and push.met > self.restored
        if gone or push.met not in (-1, self.global_step):
            return self.drop(worker, push)
        self.dropped.discard(worker)
        self.outcomes += (Outcome(worker, push.leases, "waits"),)
        now = self.clock()
        if not self.came:
            self.opened, self.step_seconds = now, push.step_seconds
        self.step_seconds = min(self.step_seconds, push.step_seconds)
        # The message may be overwritten after the answer.
        arrays = jax.tree.map(np.array, push.arrays)
        self.came.append(push._replace(arrays=arrays))
        return self.reply_again(worker)

    def drop(self, worker: int, push: Push) -> Reply:
        """Answer a push that comes to no meeting."""
        self.took[worker] = push.confirms
        self._note_dropped(worker, push)
        return self.reply_again(worker)

    def join(self, worker: int) -> None:
        """Note that a worker starts and takes the center; it is waited for again."""
        super().join(worker)
        self.left.discard(worker)
        self.strangers.discard(worker)

    def settle(self) -> float:
        """Close the meeting if it is time; the seconds until it closes by itself."""
        workers = {one.worker for one in self.came}
        present = set(range(self.at.num_workers)) - self.left
        now = self.clock()
        if not self.quorum.is_full(len(workers), len(present)):
            waits = self.opened + self.quorum.patience - now if workers else math.inf
            if waits > 0:
                return waits
            need = self.quorum.required(len(present))
            self.short += (f"it closed with {len(workers)} of {need} workers",)
            self.closes = now
        if self.closes is None:
            seconds = self.quorum.grace_seconds(
                self.step_seconds, self.delay, now - self.opened, self.sync_seconds
            )
            self.closes = now + seconds
        if now < self.closes and not present <= workers:
            return self.closes - now
        self._close(now)
        return math.inf

    def _close(self, now: float) -> None:
        came, self.came, self.closes = self.came, [], None
        counts, needs = [False for _ in came], self.merge.needs
        try:
            if len(came) < needs:
                what = f"nothing was merged of {len(came)}, for merge= needs {needs}"
                self.short += (f"{what}: all are dropped",)
            else:
                counts = self._merge(came)
        finally:  # Also where `merge` raises, everybody is told.
            for one, used in zip(came, counts, strict=True):
                if not used:
                    self.dropped.add(one.worker)
                what = "absorbed" if used else "dropped"
                self.outcomes += (Outcome(MEETING, one.leases, what),)
            self.sync_seconds = self.clock() - now

    def _merge(self, came: list[Push]) -> list[bool]:
        """The center absorbs what has come; whose contributions count."""
        known = {
            "steps": jnp.array([one.steps for one in came], jnp.int32),
            "tokens": jnp.array([one.tokens for one in came], jnp.float32),
            "num_pushed": jnp.array([one.round for one in came], jnp.int32),
        }
        sent = [one.arrays for one in came]
        center, outer, finite, counts = self._meet(self.center, self.outer, sent, known)
        self.before = self.center
        if not finite:  # The center would overflow.
            return [False for _ in came]
        self.center, self.outer = center, outer
        self.global_step += 1
        self.applied += 1
        return np.asarray(counts).tolist()

    def _run_meet(self, center, outer, sent, known):
        rule, variables = self.rule, self.variables
        before = work.Center(variables.tree(center), outer)

        def one(sent, known):
            at = self.at._replace(**known)
            total = self.contribution(sent, before.value, at)
            memory, factor = self.merge.init(total), alone.factor_of(rule, at)
            met = self.merge.meet(total, memory, AXIS, weight=factor)
            counts = jnp.bool_(True) if factor is None else factor > 0
            return met.mean, jnp.asarray(met.weight, jnp.float32), counts

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *sent)
        means, weights, counts = jax.vmap(one, axis_name=AXIS)(stacked, known)
        total, weight = jax.tree.map(lambda x: x[0], (means, weights))
        if rule.mean_over is None:
            total = jax.tree.map(lambda x: x * weight.astype(x.dtype), total)
        after = alone.absorb(rule, before, total)
        after = where(weight > 0, after, before)
        return variables.arrays(after.value), after.outer, is_finite(after), counts

    def reply_again(self, worker: int) -> Reply:
        """The answer: the center around the meeting, once it is closed."""
        if self.is_waiting(worker):
            return Reply({}, self.global_step, 0, waiting=True)
        self.seen[worker] = self.applied
        self.strangers.discard(worker)
        used = worker not in self.dropped
        before = self.before if used else self.center
        reply = self._reply(worker, before, self.took.pop(worker, 0))
        return reply._replace(used=used)

    def asks(self, worker: int, met: int) -> bool:
        """Whether to push now: a meeting is open, or has closed without this worker.

        Args:
            met: How many meetings of the part the worker has taken.
        """
        self.settle()
        return met != self.global_step or (
            bool(self.came) and not self._has_come(worker)
        )

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker has contributed to the meeting that is open."""
        self.settle()
        return self._has_come(worker)

    def _has_come(self, worker: int) -> bool:
        return any(one.worker == worker for one in self.came)

    def release(self, left: set[int]) -> None:
        """Wait no longer for workers that have left."""
        super().release(left)
        self.left = set(left)
        self.settle()

    def save(self) -> tuple[dict[str, Arrays], Notes]:
        """The arrays and notes for a checkpoint, with the contributions that wait."""
        arrays, notes = super().save()
        for i, one in enumerate(self.came):
            for name, of_name in one.arrays.items():
                arrays[f"came_{i}_{name}"] = of_name
        came = [
            (one.worker, one.steps, one.tokens, one.round, *one.leases)
            for one in self.came
        ]
        return arrays, {**notes, "came": came}

    def waiting_ranges(self) -> set[int]:
        """The ranges of samples of contributions that wait in a meeting."""
        return {number for one in self.came for number in one.leases}

    def load(self, arrays: dict[str, Arrays], notes: Notes) -> None:
        """Restore from a checkpoint, also from one of contributions that came alone."""
        super().load(arrays, notes)
        self.before, self.closes, self.opened = self.center, None, self.clock()
        self.strangers, self.restored = set(range(len(self.seen))), self.global_step
        self.came = []
        for i, (worker, steps, tokens, number, *of) in enumerate(notes.get("came", ())):
            sent = {name: arrays[f"came_{i}_{name}"] for name in self.traffic.sends}
            one = Push(worker, number, sent, steps, tokens=tokens, leases=tuple(of))
            self.came.append(one)
