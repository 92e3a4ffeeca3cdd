# SPDX-License-Identifier: Apache-2.0
"""Meetings that several workers share: contributions wait until enough have come."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center import worker as work
from optx_sync.core.trees import Tree, is_finite
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.meetings import alone
from optx_sync.meetings.quorum import Quorum
from optx_sync.meetings.together import merged
from optx_sync.runtime.agreements.arrays import own_buffers
from optx_sync.runtime.agreements.center import Center, said
from optx_sync.runtime.agreements.own import Terms
from optx_sync.runtime.agreements.pushes import bound
from optx_sync.runtime.agreements.saved import Notes
from optx_sync.runtime.messages import Arrays, Push, Reply
from optx_sync.runtime.samples import MEETING
from optx_sync.runtime.system import here

# What overflows is found out at the end of a meeting, which is then dropped.
_QUIETLY = np.errstate(over="ignore", invalid="ignore")


class Meetings(Center):
    """The center of a part at which K of M workers meet.

    A contribution that started from the center as it is waits for the others. When
    enough have come and the grace is over, their weighted mean, or what `merge` makes
    of them, is absorbed in one step. A contribution that started from another center is
    late: it is dropped. No center is donated or overwritten, so answers are no copies.

    What comes is added up, or for `merge` copied to a row of a buffer. No program
    depends on how many have come: of thousands of arrays one takes minutes to compile.
    """

    center: Arrays
    outer: Tree
    global_step: int
    applied: int
    short: tuple[str, ...]

    def __init__(self, params: Tree, terms: Terms):
        self.quorum: Quorum = terms.meet
        self.merge: Exchange = check_exchange(terms.meet.merge, all_reduce())
        self.sums: bool = terms.meet.merge is None
        self.saved_as: str = "came_sum" if self.sums else "came_rows"
        super().__init__(params, terms, copy_replies=False)
        self.delay: int = terms.delay
        self.clock: Callable[[], float] = here().now
        self.came: list[Push] = []  # to the meeting that is open, without their arrays
        self.weights: list[np.ndarray] = []  # of each of them
        rows = 1 if self.sums else self.at.num_workers
        self.rows: Arrays = {  # their weighted sum, or each of them
            path: np.zeros((rows, *x.shape), x.dtype) for path, x in self.center.items()
        }
        self.left: set[int] = set()
        self.before: Arrays = self.center  # around the last meeting
        self.strangers: set[int] = set()  # who has no answer of a server that came back
        self.restored: int = 0  # its meetings by then
        self.took: dict[int, int] = {}  # `Push.confirms` of those that wait
        # What waited in the checkpoint that was restored, that of it which came to
        # nothing then, and each worker's last push since, without arrays.
        self.again: list[Push] = []
        self.fell: dict[int, Push] = {}
        self.newest: dict[int, Push] = {}
        self.opened: float = 0.0  # the time at which the first one came
        self.closes: float | None = None  # the end of the grace, once enough have come
        self.step_seconds: float = 0.0  # of the fastest that has come
        self.sync_seconds: float = 0.0  # what the last meeting took to merge
        self._weigh: Any = jax.jit(self._run_weigh)
        self._contribute: Any = jax.jit(self._run_contribute)
        self._meet: Any = jax.jit(self._run_meet)

    @property
    def adds(self) -> bool:
        """Whether a mean is only added; an answer may be on its way: not in place."""
        return self.sums and self.rule.outer is None

    def absorb(self, worker: int, push: Push, sizes: dict[str, float]) -> Reply:
        """Take a contribution for the meeting that is open, or drop it as late."""
        self.settle()
        self._note_newest(worker, push)
        gone = worker in self.strangers and push.met > self.restored
        if gone or push.met not in (-1, self.global_step):
            return self.drop(worker, push)
        arrays, known = push.arrays.get("contribution"), said(push)
        if arrays is None:
            arrays = self._contribute(push.arrays, self.center, known)
        self._gather(arrays, np.asarray(self._weigh(known)))
        self.dropped.discard(worker)
        self.tell(worker, push.leases, "waits")
        now = self.clock()
        if not self.came:
            self.opened, self.step_seconds = now, push.step_seconds
        self.step_seconds = min(self.step_seconds, push.step_seconds)
        self.came.append(push._replace(arrays={}))
        return self.reply_again(worker)

    @_QUIETLY
    def _gather(self, arrays: Arrays, weight: np.ndarray) -> None:
        """Add a contribution to what has come; its message may be overwritten then."""
        place = 0 if self.sums else len(self.weights)
        for path, rows in self.rows.items():
            if place == len(rows):  # Who died may come twice.
                rows = self.rows[path] = np.concatenate([rows, np.zeros_like(rows)])
            row, x = rows[place, ...], np.asarray(arrays[path])
            if self.sums and weight != 1:  # With 0 it leaves no trace, NaN or not.
                x = x * weight.astype(x.dtype) if weight else np.zeros_like(x)
            if self.sums and self.weights:
                np.add(row, x, out=row)
            else:
                np.copyto(row, x)
        self.weights.append(weight)

    def drop(self, worker: int, push: Push) -> Reply:
        """Answer a push that comes to no meeting."""
        self._note_newest(worker, push)
        self._note_dropped(worker, push)
        return self.reply_again(worker)

    def _note_newest(self, worker: int, push: Push) -> None:
        if worker in self.newest and worker not in self.took:  # It has been told.
            self.fell.pop(worker, None)
        self.took[worker] = push.confirms
        self.newest[worker] = push._replace(arrays={})

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
        weights, self.weights = self.weights, []
        weigh, needs = [bool(weight > 0) for weight in weights], self.merge.needs
        counts, why = [False for _ in came], ""
        try:
            if 0 < sum(weigh) < needs:
                why = f"merge= needs {needs}"
            elif self._merge(weights):
                counts = weigh
            elif any(weigh):
                why = "the center would hold a NaN or infinity"
            if why:
                what = f"nothing was merged of {sum(weigh)}, for {why}"
                self.short += (f"{what}: all are dropped",)
        finally:  # Also where `merge` raises, everybody is told.
            last = {one.worker: one for one in came}  # Who died may have come before.
            for one, used, weighs in zip(came, counts, weigh, strict=True):
                if not used and one is last[one.worker]:
                    self.dropped.add(one.worker)
                if weighs and not used and any(one is saved for saved in self.again):
                    self.fell[one.worker] = one
                self.tell(MEETING, one.leases, "absorbed" if used else "dropped")
            self.sync_seconds = self.clock() - now

    @_QUIETLY
    def _merge(self, weights: list[np.ndarray]) -> bool:
        """The center absorbs what has come, unless all weigh 0 or it would overflow."""
        self.before, total = self.center, sum(map(float, weights))
        if not total > 0:
            return False
        came, padded = self.rows, None
        if self.sums:
            came = {path: x[0, ...] for path, x in came.items()}
            for x in came.values() if self.rule.mean_over is not None else ():
                np.divide(x, total, out=x)
        else:  # Of those that have not come the weight is 0.
            rows = max(map(len, came.values()), default=len(weights))
            padded = np.pad(weights, (0, rows - len(weights)))
        if self.adds:
            outer = self.outer
            center = {p: np.asarray(self.center[p] + x) for p, x in came.items()}
            finite = np.isfinite([*map(bound, center.values())]).all()
        else:
            center, outer, finite = self._meet(self.center, self.outer, came, padded)
        if finite:
            self.center, self.outer = center, outer
            self.global_step += 1
            self.applied += 1
        return bool(finite)

    def _run_weigh(self, known):
        factor = alone.factor_of(self.rule, self.at._replace(**known))
        return jnp.bool_(True) if factor is None else factor

    def _run_contribute(self, sent, center, known):
        center, at = self.variables.tree(center), self.at._replace(**known)
        return self.variables.arrays(self.contribution(sent, center, at))

    def _run_meet(self, center, outer, came, weights):
        before = work.Center(self.variables.tree(center), outer)
        total = self.variables.tree(came)
        if not self.sums:
            total = merged(self.merge, self.rule, total, weights)
        after = alone.absorb(self.rule, before, total)
        held = own_buffers((self.variables.arrays(after.value), after.outer), came)
        return *held, is_finite(after)

    def reply_again(self, worker: int) -> Reply:
        """The answer: the center around the meeting, once it is closed."""
        if self.is_waiting(worker):
            return Reply({}, self.global_step, 0, waiting=True)
        self.seen[worker] = self.applied
        self.strangers.discard(worker)
        used = worker not in self.dropped
        before = self.before if used else self.center
        reply = self._reply(worker, before, self.took.pop(worker, 0))
        return reply._replace(used=used, lost=self._lost(worker))

    def _lost(self, worker: int) -> int:
        """Whether a contribution is gone that was answered before this server died."""
        fell, newest = self.fell.get(worker), self.newest.get(worker)
        if fell is None or newest is None or fell.incarnation != newest.incarnation:
            return 0  # It is the one that is answered now, or its predecessor's.
        return int(fell.round != newest.round)

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
        if self.came:
            count = 1 if self.sums else len(self.came)
            arrays[self.saved_as] = {path: x[:count] for path, x in self.rows.items()}
        came = [
            (one.worker, one.steps, one.tokens, one.round, *one.leases)
            for one in self.came
        ]
        incarnations = [one.incarnation for one in self.came]
        return arrays, {**notes, "came": came, "incarnations": incarnations}

    def waiting_ranges(self) -> set[int]:
        """The ranges of samples of contributions that wait in a meeting."""
        return {number for one in self.came for number in one.leases}

    def load(self, arrays: dict[str, Arrays], notes: Notes) -> None:
        """Restore from a checkpoint, also from one of contributions that came alone."""
        super().load(arrays, notes)
        self.before, self.closes, self.opened = self.center, None, self.clock()
        self.strangers, self.restored = set(range(len(self.seen))), self.global_step
        self.came, self.weights = [], []
        rows = arrays.get(self.saved_as)
        for path, saved in (rows or {}).items():
            self.rows[path] = np.concatenate([saved, self.rows[path][len(saved) :]])
        came = notes.get("came", ())
        incarnations = notes.get("incarnations", [0] * len(came))
        for (worker, steps, tokens, number, *of), incarnation in zip(
            came, incarnations, strict=True
        ):
            if rows is None:  # It waited for another merge.
                self.dropped.add(worker)
                continue
            one = Push(worker, number, {}, steps, tokens=tokens, leases=tuple(of))
            one = one._replace(incarnation=incarnation)
            self.came.append(one)
            self.weights.append(np.asarray(self._weigh(said(one))))
        self.again, self.fell, self.newest = list(self.came), {}, {}
