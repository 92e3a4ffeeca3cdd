# SPDX-License-Identifier: Apache-2.0
"""Who is slow: a worker's pace beside the others', and beside its own best."""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from optx_sync.runtime.display import log
from optx_sync.runtime.messages import Event
from optx_sync.runtime.system import here

# The rounds of whose seconds a step the median is a worker's pace.
ROUNDS = 5
# A worker whose score is below this, in so many rounds in a row, is slow.
SLOW, IN_A_ROW = 0.75, 3
# Seconds between two lines of the log.
LINE_SECONDS = 60.0


class Scores(NamedTuple):
    """How fast a worker is: 0.5 is half as fast, 1 as fast."""

    relative: float  # beside the median of the others
    individual: float  # beside its own best since it has joined


class Paces:
    """Each worker's seconds a step, between its pushes of a part.

    Args:
        stands: Whether workers stand still until they are answered; those seconds are
            left out, since who is fast waits for who is slow.
    """

    def __init__(self, stands: bool = True):
        self._stands = stands
        # By worker and part its last push: the time, the step, and the seconds waited.
        self._last: dict[tuple[int, int], tuple[float, int, float]] = {}
        self._waited: defaultdict[int, float] = defaultdict(float)
        self._recent: dict[int, deque[float]] = {}
        self._best: dict[int, float] = {}
        self._slow: Counter[int] = Counter()  # of each, slow rounds in a row
        self._said: float = -math.inf

    def add(self, events: Iterable[Event]) -> dict[int, Scores]:
        """The scores of those who have pushed; say who is slow."""
        found: dict[int, Scores] = {}
        for event in events:
            worker = event.worker
            if event.kind in ("join", "lost", "left"):  # Another process, if any.
                self._last = {k: v for k, v in self._last.items() if k[0] != worker}
                for of in (self._recent, self._best, self._slow):
                    of.pop(worker, None)
            if event.kind not in ("push", "dropped"):
                continue
            self._waited[worker] += event.seconds if self._stands else 0.0
            now = event.time, event.local_step, self._waited[worker]
            before = self._last.get((worker, event.part), now)
            self._last[worker, event.part] = now
            time, steps, waited = (a - b for a, b in zip(now, before, strict=True))
            if steps > 0 and time > waited:
                recent = self._recent.setdefault(worker, deque(maxlen=ROUNDS))
                recent.append((time - waited) / steps)
                found[worker] = scores = self._scores(worker)
                self._slow[worker] = (self._slow[worker] + 1) * (min(scores) < SLOW)
        slow = {w: of for w, of in found.items() if self._slow[w] >= IN_A_ROW}
        if slow and here().now() - self._said > LINE_SECONDS:
            self._said = here().now()
            said = (
                f"worker {worker} is slow: {self._pace(worker):.3g} s a step, "
                f"{of.relative:.2f} of the others' pace, {of.individual:.2f} of its own"
                " best"
                for worker, of in slow.items()
            )
            log.warning("; ".join(said))
        return found

    def _pace(self, worker: int) -> float:
        return statistics.median(self._recent[worker])

    def _scores(self, worker: int) -> Scores:
        own, recent = self._pace(worker), self._recent[worker]
        others = [self._pace(other) for other in self._recent if other != worker]
        if len(recent) == ROUNDS:
            self._best[worker] = min(own, self._best.get(worker, own))
        best = self._best.get(worker, own)
        return Scores(statistics.median(others or [own]) / own, best / own)
