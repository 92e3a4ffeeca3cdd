# SPDX-License-Identifier: Apache-2.0
"""Ranges of samples that workers lease, so that each sample of an epoch counts once."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from optx_sync.core.checks import integer
from optx_sync.runtime.system import here


class Lease(NamedTuple):
    """The samples of one step: numbers from `start` to `stop` - 1 of an epoch.

    Attributes:
        number: The number of the range, from 0 on over all epochs.
        epoch: The number of the epoch, from 0.
        start: The first sample.
        stop: The sample after the last one.
    """

    number: int
    epoch: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples that are handed out to workers in ranges, each counted once in an epoch.

    `worker.samples()` yields a `Lease` for each step. A range is done once the push
    that its step is part of has been absorbed. What a worker has and has not pushed
    when it dies, leaves, or comes late to a meeting goes to another one. Servers save
    what is done with their checkpoints.

    The numbers may be those of anything: rows of an array, or blocks of a data set,
    such as the references of `ray.data.Dataset.to_numpy_refs()`.

    Attributes:
        total: The samples of an epoch.
        batch: The samples of a step; the last step of an epoch may have fewer.
        epochs: How often each sample is to be counted.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is below 1.

    Example:
        >>> from optx_sync.runtime import Samples
        >>> Samples(total=10, batch=4).lease(number=2)
        Lease(number=2, epoch=0, start=8, stop=10)
    """

    total: int
    batch: int
    epochs: int = 1

    def __post_init__(self) -> None:
        integer("total", self.total, "Pass the samples of an epoch.")
        integer("batch", self.batch, "Pass the samples of a step, for example 32.")
        integer("epochs", self.epochs, "Pass for example 1.")

    @property
    def ranges(self) -> int:
        """The ranges of an epoch."""
        return -(-self.total // self.batch)

    def lease(self, number: int) -> Lease:
        """The lease of this number, from 0 on over all epochs."""
        epoch, place = divmod(number, self.ranges)
        stop = min((place + 1) * self.batch, self.total)
        return Lease(number, epoch, place * self.batch, stop)


# Who holds the ranges of contributions that wait in a meeting.
MEETING = -1
FREE = -2  # nobody
# Seconds that a server which came back waits for workers to say what they hold. Who
# says it later may find that others have it, and its push is dropped.
SILENCE_SECONDS = 30.0


What: TypeAlias = Literal["waits", "absorbed", "dropped"]


class Outcome(NamedTuple):
    """What became of the ranges that came with a push.

    Attributes:
        holder: Who held them until now: a worker, or a `MEETING`.
        ranges: Their numbers.
        what: Whether they wait in a meeting now, are done, or are to be made again.
    """

    holder: int
    ranges: tuple[int, ...]
    what: What


class Ledger:
    """Who holds which range, at the first server: a range is free, held, or done.

    A range is done once the center has absorbed it, and counts once: a push with ranges
    that are done, or that another worker holds, is not to be absorbed (`may_count`).
    """

    def __init__(self, samples: Samples | None):
        self.samples = samples
        self.clock: Callable[[], float] = here().now
        self._next: int = 0  # ranges from this one on have not been handed out
        # Of those before it that are not done: who has each, a worker or `MEETING`.
        self._open: dict[int, int] = {}
        # After a restore: workers that have not said yet what they hold, until when
        # they are waited for, and who says that it has what one of them is to have.
        self.silent: set[int] = set()
        self._until: float = 0.0
        self._claims: dict[int, int] = {}

    def lease(self, worker: int, holds: list[int], count: int) -> list[Lease] | None:
        """Hand out `count` ranges at most; none if all are done or held by others.

        `None`: ask again, since others have not said yet what they hold.

        Args:
            holds: The ranges that the worker has and that were not absorbed, as far as
                it knows.
        """
        if (samples := self.samples) is None:
            raise ValueError(
                "There are no samples to lease. Pass samples=oxs.runtime.Samples("
                "total, batch) to run."
            )
        self._settle(worker, holds)
        if self.silent and self.clock() < self._until:
            return None
        self.silent, self._claims = set(), {}
        free, end = self._of(FREE)[:count], samples.ranges * samples.epochs
        new = range(self._next, min(self._next + count - len(free), end))
        self._next += len(new)
        found = [*free, *new]
        self._open |= dict.fromkeys(found, worker)
        return [samples.lease(number) for number in found]

    def _settle(self, worker: int, holds: list[int]) -> None:
        """Take a worker's word for what it holds.

        Less than is noted here: an answer was lost, or pushes with a server. More: this
        server was restored, and handed it out after its checkpoint.
        """
        self.silent.discard(worker)
        for number in {*self._of(worker)} - {*holds}:
            self._give_back(number)
        for number in holds:
            who = self._holder(number)
            if who == FREE:
                self._open[number] = worker
            elif who in self.silent:
                self._claims.setdefault(number, worker)

    def _of(self, who: int) -> list[int]:
        """The ranges that one has, in order."""
        return sorted(number for number, one in self._open.items() if one == who)

    def _holder(self, number: int) -> int | None:
        """Who has a range; `None`: it is done. Those before it are handed out, too."""
        for new in range(self._next, number + 1):
            self._open[new] = FREE
        self._next = max(self._next, number + 1)
        return self._open.get(number)

    def _give_back(self, number: int) -> None:
        self._open[number] = self._claims.pop(number, FREE)

    def may_count(self, worker: int, numbers: tuple[int, ...]) -> bool:
        """Whether a push of a worker with these ranges counts none of them twice."""
        return all(
            number >= self._next or self._open.get(number) in (worker, FREE)
            for number in numbers
        )

    @property
    def uncounted(self) -> int:
        """The ranges of all epochs that are not done."""
        samples = self.samples
        end = 0 if samples is None else samples.ranges * samples.epochs
        return end - self._next + len(self._open)

    def note(self, outcome: Outcome) -> None:
        """Note what became of the ranges of a push."""
        for number in outcome.ranges:
            if outcome.what == "dropped":
                if self._open.get(number) == outcome.holder:
                    self._give_back(number)
                continue
            self._holder(number)
            self._open.pop(number, None)
            if outcome.what == "waits":
                self._open[number] = MEETING

    def gone(self, worker: int) -> None:
        """A worker has died or left: what it held is free."""
        self._settle(worker, [])

    def saved(self) -> list[Any]:
        """The ledger as JSON."""
        samples = self.samples or Samples(1, 1)
        sizes = samples.total, samples.batch
        held = [(n, who) for n, who in self._open.items() if who != FREE]
        return [self._next, self._of(FREE), held, sizes]

    def restore(self, saved: list[Any], alive: set[int], waits: set[int]) -> None:
        """Go on from what was saved.

        Args:
            saved: Of `saved`.
            alive: The workers that go on, who may hold more since.
            waits: The ranges of contributions that wait in a meeting.

        Raises:
            ValueError: It counts ranges of other samples.
        """
        self._next, free, held, sizes = saved
        now = self.samples
        if now is not None and sizes != [now.total, now.batch]:
            total, batch = sizes
            raise ValueError(
                f"The checkpoint counts ranges of Samples({total}, {batch}), and this "
                f"run has Samples({now.total}, {now.batch}): which samples were seen "
                "would be lost. Pass those of before (epochs= may be another number), "
                "or resume=False to start afresh."
            )
        self.silent, self._claims = set(alive), {}
        self._until = self.clock() + SILENCE_SECONDS
        self._open = dict.fromkeys(free, FREE)
        self._open |= {n: MEETING if n in waits else who for n, who in held}
        for worker in {*self._open.values()} - alive - {MEETING, FREE}:
            self.gone(worker)
        for number in {*self._of(MEETING)} - waits:
            self._give_back(number)
