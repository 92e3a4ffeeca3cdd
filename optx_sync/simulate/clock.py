# SPDX-License-Identifier: Apache-2.0
"""A virtual clock: which worker steps, meets and takes when, without any numbers.

Nothing is measured: the seconds of steps and links and the failures are given, so the
order of events is exact. `decoupled` replays the numbers of a model in this order.
"""

import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optx_sync.center.fragments import steps_between
from optx_sync.core.checks import check_function, integer, interval
from optx_sync.meetings.alone import check_delay
from optx_sync.meetings.quorum import Quorum, check_meet

# Of each worker a number, or `(worker, its step from 0 on) -> number`.
PerStep: TypeAlias = Sequence[float] | Callable[[int, int], float]
# (worker, bytes, second) -> the seconds that a message takes, to or from the center.
Link: TypeAlias = Callable[[int, float, float], float]
Failure: TypeAlias = tuple[int, float, float]  # worker, dies at, is back at


class Kind(enum.IntEnum):
    """What happens."""

    STEP = 0  # a worker ends a step
    PUSH = 1  # it sends its contribution to a part
    JOIN = 2  # the contribution is in a meeting
    LATE = 3  # it came too late: dropped, and its worker is told
    CLOSE = 4  # a meeting's contributions are absorbed, and answered
    TAKE = 5  # a worker takes a part of the center
    DIE = 6
    BACK = 7  # a worker has all parts of the center


class Happening(NamedTuple):
    """One event of a virtual clock.

    Attributes:
        second: When it happens.
        kind: What happens.
        worker: The worker's number, -1: of none.
        part: The number of the part, -1: of none.
        steps: Of STEP, the worker's steps since its last push; of PUSH and what comes
            of it, since its last push of the part; this one included.
        tokens: Of STEP, those behind its gradient; of PUSH, JOIN and LATE, those behind
            all of `steps`.
        staleness: Of JOIN and LATE: meetings of the part since its worker knew of one.
        number: Of STEP: steps of all workers before it. Of PUSH, JOIN and LATE: the
            number of the push among its worker's of this part, from 1. Of TAKE: the
            worker's steps since its contribution.
        come: Of CLOSE: the workers whose contributions are absorbed.
    """

    second: float
    kind: Kind
    worker: int = -1
    part: int = -1
    steps: int = 0
    tokens: float = 0.0
    staleness: int = 0
    number: int = 0
    come: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All that happened until a second of a virtual clock; made by `clock`.

    Attributes:
        events: In order.
        num_workers: N.
        until: The second at which it ends.
        bytes_up: float[N], bytes that each worker has sent.
        bytes_down: float[N], bytes sent to each.
        step_seconds: float[N], seconds that each spent in whole steps.
        kept_seconds: float[N], those of steps that are in the center: neither lost in a
            death, nor late, nor on the way, nor overwritten by an answer. A step counts
            for each part in turn.
    """

    events: tuple[Happening, ...]
    num_workers: int
    until: float
    bytes_up: np.ndarray
    bytes_down: np.ndarray
    step_seconds: np.ndarray
    kept_seconds: np.ndarray

    def of(self, *kinds: Kind) -> list[Happening]:
        """The events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def uptime(self) -> float:
        """The share of all workers' time that was spent in whole steps."""
        return float(self.step_seconds.sum() / (self.num_workers * self.until))

    @property
    def goodput(self) -> float:
        """The share of all workers' time that is in the center as `kept_seconds`."""
        return float(self.kept_seconds.sum() / (self.num_workers * self.until))

    @property
    def participation(self) -> float:
        """The mean over meetings of what came in time, per worker."""
        come = [len(event.come) for event in self.of(Kind.CLOSE)]
        return float(np.mean(come) / self.num_workers) if come else 0.0

    @property
    def workers(self) -> np.ndarray:
        """int32[S], the order for `asynchronous`: the worker of each step."""
        return np.asarray([event.worker for event in self.of(Kind.STEP)], np.int32)


def clock(
    seconds: PerStep,
    *,
    until: float,
    num_workers: int | None = None,
    meet: Quorum | None = None,
    communication_period: int = 10,
    delay: int | None = None,
    part_bytes: Sequence[float] = (0.0,),
    link: Link | None = None,
    failures: Sequence[Failure] = (),
    tokens: PerStep | None = None,
) -> Timeline:
    r"""Virtual time: goodput, staleness, bytes and participation of decoupled workers.

    A worker's turn is the part with the fewest meetings known to it, and due H / P
    steps after its last contribution, or at the end of its next step where others have
    opened the meeting after the one that it knows. A meeting is full as `meet` says,
    waits the seconds of its grace, or until all have come, and answers those that came.
    From `delay` steps after its contribution on a worker takes the answer as soon as it
    is there; with 0 it waits for it, and else it never stands still. What it made since
    its contribution is overwritten; if it took more than `delay` steps, it is kept. A
    contribution that started from an older center of its part is late, and answered
    with the current one.

    A worker that dies loses its step, and what is on the way from and to it. Back again
    it starts with all parts of the center. One that is back at `inf` has left: no
    meeting waits for it.

    The grace of a meeting counts on the last step of the fastest that has come, and
    twice the first one's link. What happens at the same second happens in this order:
    deaths, returns, ends of steps, arrivals, closings and answers; of the same kind, by
    the number of the worker or part.

    Args:
        seconds: Of each worker's step: N numbers, or `(worker, step) -> seconds`.
        until: The second at which the clock stops.
        num_workers: N, where `seconds` is a function.
        meet: `oxs.runtime.quorum(k)`, or `None` for `oxs.runtime.one()`.
        communication_period: H, a worker's steps from one contribution of a part to the
            next.
        delay: Steps from a contribution to its answer, at most H / P.
        part_bytes: [P], the bytes of each part in a message.
        link: `(worker, bytes, second) -> seconds` that a message takes, one of 0 bytes
            to hear of a meeting. `None`: none.
        failures: Each `(worker, dies at, is back at)`, in seconds.
        tokens: Behind each step: N numbers, or `(worker, step) -> tokens`. `None`: 1.

    Returns:
        A `Timeline`.

    Raises:
        TypeError: An argument of a wrong type.
        ValueError: A number out of range; parts that do not divide the period.

    Example:
        Of three workers one is slow, and a meeting waits for two of them:

        >>> import optx_sync as oxs
        >>> line = oxs.simulate.clock(
        ...     [1.0, 1.0, 4.0], until=41, communication_period=4,
        ...     meet=oxs.runtime.quorum(2),
        ... )
        >>> f"{line.goodput:.0%}, {line.participation:.0%}"
        '65%, 67%'

    References:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026, arXiv 2604.21428.
    """
    num_workers = check_number(seconds, num_workers)
    interval("(0, inf)", "It is in seconds.", until=until)
    period = integer("communication_period", communication_period, "Pass 10, say.")
    delay, parts = check_delay(delay), [float(x) for x in part_bytes]
    run = _Clock(
        meet=check_meet(meet),
        between=steps_between(period, len(parts), delay),
        delay=delay,
        parts=parts,
        seconds=_per_step("seconds", seconds, num_workers),
        tokens=_per_step("tokens", tokens or [1.0] * num_workers, num_workers),
        link=(lambda worker, size, second: 0.0) if link is None else link,
        workers=[_Worker(len(parts)) for _ in range(num_workers)],
    )
    check_function("link", run.link, "It takes (worker, bytes, second).")
    for worker, dies, back in failures:
        integer("The worker of a failure", worker, f"There are {num_workers}.", 0)
        if worker >= num_workers or not 0 <= dies < back:
            raise ValueError(
                f"A failure is (worker, dies at, is back at), with one of {num_workers}"
                f" workers; got {(worker, dies, back)}."
            )
        run.later(dies, _Turn.DIE, worker, back)
    for worker in range(num_workers):
        run.later(0.0, _Turn.GO_ON, worker)
    run.until(until)
    return Timeline(tuple(run.events), num_workers, float(until), **run.totals)


def check_number(seconds: PerStep, num_workers: int | None) -> int:
    """N: the number of the seconds, or as given."""
    if num_workers is None and not callable(seconds):
        num_workers = len(seconds)
    mend = "It is the number of workers; pass it where seconds is a function."
    return integer("num_workers", num_workers, mend)


def _per_step(name: str, given: PerStep, num_workers: int) -> Callable:
    """A function of (worker, step), checked whenever it is called."""
    if not callable(given):
        if len(given) != num_workers:
            raise ValueError(
                f"{name} must be a number for each of the {num_workers} workers; got "
                f"{len(given)}."
            )
        numbers = tuple(given)
        given = lambda worker, step: numbers[worker]  # noqa: E731

    def checked(worker: int, step: int) -> float:
        value = given(worker, step)
        if not 0 < value < math.inf:
            interval("(0, inf)", f"Of worker {worker} in step {step}.", **{name: value})
        return float(value)

    return checked


class _Push(NamedTuple):
    """A contribution on its way, or in a meeting."""

    happening: Happening  # as it was sent
    version: int  # of the part that it started from
    step_seconds: float  # of the last step
    seconds: float  # of the steps since the worker took the part
    pushed: float  # the seconds of all its steps until then


class _Worker:
    """What a worker knows, and what it has on the way."""

    def __init__(self, parts: int):
        self.steps, self.tokens, self.seconds = 0, 0.0, 0.0  # of all that it made
        self.left = False
        self.pushed = [0] * parts  # its pushes of each part, in all its lives
        self.start([0] * parts)

    def start(self, versions: list[int]) -> None:
        """Begin with these versions of the parts of the center."""
        self.versions = list(versions)
        # What it had made at its last push, and when it pushed and took each part.
        self.turned = self.steps
        self.brought = [(self.steps, self.tokens)] * len(versions)
        self.taken = [(self.steps, self.seconds)] * len(versions)
        self.sent: _Push | None = None
        self.answer: int | None = None  # the version that has come
        self.step_seconds = 0.0  # of its last step


class _Turn(enum.IntEnum):
    """What happens to a worker, or a part; at the same second in this order."""

    DIE = 0
    BACK = 1
    END_STEP = 2
    ARRIVE = 3
    CLOSE = 4
    HEAR = 5
    GO_ON = 6


@dataclasses.dataclass
class _Clock:
    """The queue of what is to happen, and the handlers."""

    meet: Quorum
    between: Any
    delay: int
    parts: list[float]
    seconds: Callable[[int, int], float]
    tokens: Callable[[int, int], float]
    link: Link
    workers: list[_Worker]

    def __post_init__(self) -> None:
        self.queue: list[Any] = []
        self.set_off = itertools.count()
        self.steps, self.now = 0, 0.0
        self.events: list[Happening] = []
        # Of each part, when each of its meetings was opened, and how many have closed.
        self.opened: list[list[float]] = [[] for _ in self.parts]
        self.versions: list[int] = [0] * len(self.parts)
        # Of open meetings by their part: who has come, in order, and when it closes.
        self.come: dict[int, dict[int, _Push]] = {}
        self.closes: dict[int, float] = {}
        names = ("bytes_up", "bytes_down", "step_seconds", "kept_seconds")
        self.totals = {name: np.zeros(len(self.workers)) for name in names}

        self.handlers: dict[_Turn, Callable[..., None]] = {
            _Turn.DIE: self.die,
            _Turn.BACK: self.back,
            _Turn.END_STEP: self.end_step,
            _Turn.ARRIVE: self.arrive,
            _Turn.CLOSE: self.close,
            _Turn.HEAR: self.hear,
            _Turn.GO_ON: self.go_on,
        }

    def later(self, second: float, what: _Turn, who: int, *arguments: Any) -> None:
        """Let something happen at a second, in its turn among what happens then."""
        # No two are alike, so nothing else is compared.
        order = what, who, next(self.set_off)
        heapq.heappush(self.queue, (second, order, arguments))

    def forget(self, who: int, *what: _Turn) -> None:
        """Let nothing of these happen any more to a worker or part."""
        turns = [(turn, who) for turn in what]
        self.queue = [one for one in self.queue if one[1][:2] not in turns]
        heapq.heapify(self.queue)

    def until(self, second: float) -> None:
        """Let all happen until then."""
        while self.queue and self.queue[0][0] <= second:
            self.now, (what, who, _), arguments = heapq.heappop(self.queue)
            self.handlers[what](who, *arguments)

    def note(self, kind: Kind, *what: Any, **more: Any) -> Happening:
        """Write down what happens now."""
        self.events.append(Happening(self.now, kind, *what, **more))
        return self.events[-1]

    def send(self, way: str, worker: int, size: float, what: _Turn, *sent: Any) -> None:
        """Send bytes from or to a worker, and let something happen when they come."""
        self.totals[way][worker] += size
        comes = self.now + self.link(worker, size, self.now)
        self.later(comes, what, worker, *sent)

    def go_on(self, worker: int) -> None:
        """A worker begins a step."""
        w = self.workers[worker]
        w.step_seconds = self.seconds(worker, w.steps)
        self.later(self.now + w.step_seconds, _Turn.END_STEP, worker)

    def end_step(self, worker: int) -> None:
        """A worker has made a step: it takes what is there, and contributes."""
        w = self.workers[worker]
        tokens = self.tokens(worker, w.steps)
        w.steps += 1
        w.tokens += tokens
        w.seconds += w.step_seconds
        since = w.steps - w.turned
        self.note(Kind.STEP, worker, steps=since, tokens=tokens, number=self.steps)
        self.steps += 1
        self.totals["step_seconds"][worker] += w.step_seconds
        self.take(worker)
        part = self.turn(w)
        # A part that it has taken just now has no step of its own yet.
        if w.sent is None and w.taken[part][0] != w.steps:
            if since >= self.between or self.is_asked(worker, part):
                self.push(worker, part)
        if self.delay or w.sent is None:
            self.go_on(worker)

    def turn(self, w: _Worker) -> int:
        """The part with the fewest meetings: all that it knows, or its own alone."""
        known = w.versions if self.meet.shared else w.pushed
        return known.index(min(known))

    def is_asked(self, worker: int, part: int) -> bool:
        """Whether a worker has heard of a meeting after those that it knows."""
        opened = self.opened[part][self.workers[worker].versions[part] :]
        if not self.meet.shared or not opened:
            return False
        return opened[0] + self.link(worker, 0.0, opened[0]) < self.now

    def push(self, worker: int, part: int) -> None:
        """A worker sends its contribution to a part."""
        w, size = self.workers[worker], self.parts[part]
        (steps, tokens), (_, seconds) = w.brought[part], w.taken[part]
        w.pushed[part] += 1
        made = w.steps - steps, w.tokens - tokens
        pushed = self.note(Kind.PUSH, worker, part, *made, number=w.pushed[part])
        made = w.seconds - seconds, w.seconds
        w.sent = _Push(pushed, w.versions[part], w.step_seconds, *made)
        w.turned, w.brought[part] = w.steps, (w.steps, w.tokens)
        self.send("bytes_up", worker, size, _Turn.ARRIVE, w.sent)

    def arrive(self, worker: int, push: _Push) -> None:
        """A contribution comes to the center."""
        part = push.happening.part
        staleness = self.versions[part] - push.version
        late = self.meet.shared and staleness > 0
        here = push.happening._replace(second=self.now, staleness=staleness)
        self.events.append(here._replace(kind=Kind.LATE if late else Kind.JOIN))
        if late:
            self.reply(push)
            return
        if part not in self.come:
            self.come[part], self.closes[part] = {}, math.inf
            self.opened[part].append(self.now)
        self.come[part][worker] = push
        self.fill(part)

    def fill(self, part: int) -> None:
        """Let a meeting close if it is full: after its grace, or once all have come."""
        come = self.come[part]
        present = {number for number, w in enumerate(self.workers) if not w.left}
        if not self.meet.is_full(len(come), len(present)):
            return
        if not self.meet.shared:
            self.close(part)
            return
        grace = 0.0
        if not present <= come.keys():
            step = min(push.step_seconds for push in come.values())
            sync = 2 * self.link(next(iter(come)), self.parts[part], self.now)
            spent = self.now - self.opened[part][-1]
            grace = self.meet.grace_seconds(step, self.delay, spent, sync)
        if self.now + grace < self.closes[part]:
            self.closes[part] = self.now + grace
            self.forget(part, _Turn.CLOSE)
            self.later(self.closes[part], _Turn.CLOSE, part)

    def close(self, part: int) -> None:
        """The center absorbs what has come, and answers."""
        come = sorted(self.come.pop(part).items())
        self.versions[part] += 1
        self.note(Kind.CLOSE, part=part, come=tuple(worker for worker, _ in come))
        for worker, push in come:
            self.totals["kept_seconds"][worker] += push.seconds / len(self.parts)
            self.reply(push)

    def reply(self, push: _Push) -> None:
        """Send a worker the center's part as it is now, unless it died meanwhile."""
        worker, part = push.happening.worker, push.happening.part
        if self.workers[worker].sent is push:
            size, version = self.parts[part], self.versions[part]
            self.send("bytes_down", worker, size, _Turn.HEAR, version)

    def hear(self, worker: int, version: int) -> None:
        """An answer comes to a worker; one that does not go on without takes it."""
        self.workers[worker].answer = version
        if not self.delay:
            self.take(worker)
            self.go_on(worker)

    def take(self, worker: int) -> None:
        """A worker takes the answer, if it is there and it is time."""
        w, sent = self.workers[worker], self.workers[worker].sent
        if sent is None or w.answer is None:
            return
        if w.steps - w.turned >= self.delay:
            part = sent.happening.part
            made = w.steps - w.turned
            # From an answer that came late on it has what it made since it pushed.
            since = sent.pushed if made > self.delay else w.seconds
            w.versions[part], w.taken[part] = w.answer, (w.steps, since)
            w.sent = w.answer = None
            steps = sent.happening.steps
            self.note(Kind.TAKE, worker, part, steps=steps, number=made)

    def die(self, worker: int, back: float) -> None:
        """A worker dies; one that never comes back has left."""
        w = self.workers[worker]
        w.sent, w.left = None, math.isinf(back)
        self.note(Kind.DIE, worker)
        self.forget(worker, *(set(_Turn) - {_Turn.DIE, _Turn.CLOSE}))
        self.later(back, _Turn.BACK, worker)
        for part in list(self.come) if w.left else []:
            self.fill(part)

    def back(self, worker: int) -> None:
        """A worker starts again, with all parts of the center."""
        self.workers[worker].start(self.versions)
        self.note(Kind.BACK, worker)
        size = sum(self.parts)
        self.send("bytes_down", worker, size, _Turn.GO_ON)
