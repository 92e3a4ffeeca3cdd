# SPDX-License-Identifier: Apache-2.0
"""A virtual clock: which worker steps, meets and takes when, without any numbers.

Nothing is measured: the seconds of steps and links and the failures are given, so the
order of events is exact. `decoupled` replays the numbers of a model in this order.
"""

import dataclasses
import enum
import heapq
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optx_sync.center.fragments import steps_between
from optx_sync.checks import check_function, integer, interval
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
    """One event of a virtual clock."""

    second: float
    kind: Kind
    worker: int = -1  # -1: of none
    part: int = -1  # -1: of none
    # Of STEP, since the worker's last push; of PUSH and what comes of it, since the
    # last one of the part; this one included.
    steps: int = 0
    tokens: float = 0.0  # behind so many steps, or of this STEP
    # Of JOIN and LATE: meetings of the part since its worker knew of one.
    staleness: int = 0
    number: int = 0  # of STEP: steps of all before it; of a PUSH: its worker's, from 1
    come: tuple[int, ...] = ()  # of CLOSE: whose contributions are absorbed


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
    is there; with 0 it waits for it, and else it never stands still. A contribution
    that started from an older center of its part is late, and answered with the current
    one.

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
        Decoupled DiLoCo, arXiv 2604.21428.
    """
    num_workers = check_number(seconds, num_workers)
    interval("(0, inf)", "It is in seconds.", until=until)
    period = integer("communication_period", communication_period, "Pass 10, say.")
    delay, parts = check_delay(delay), [float(x) for x in part_bytes]
    run = _Run(
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
        run.later(dies, Order.DEATH, run.die, worker, back)
    for worker in range(num_workers):
        run.later(0.0, Order.START, run.go_on, worker, 0)
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


class _Made(NamedTuple):
    """What a worker has made so far, or did between two times."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def since(self, then: "_Made") -> "_Made":
        """What it has made since then."""
        return _Made._make(map(operator.sub, self, then))


class _Push(NamedTuple):
    """A contribution on its way, or in a meeting."""

    worker: int
    life: int  # of the worker when it sent it
    part: int
    version: int  # of the part that it started from
    local_step: int
    made: _Made  # since the push of the part before
    step_seconds: float  # of the last step
    seconds: float  # of the steps since the worker took the part
    number: int  # of its worker's pushes of the part


class _Worker:
    """What a worker knows, and what it has on the way."""

    def __init__(self, parts: int):
        self.life, self.made = 0, _Made()
        self.left = self.waits = False
        self.pushed = [0] * parts  # its pushes of each part, in all its lives
        self.start([0] * parts)

    def start(self, versions: list[int]) -> None:
        """Begin with these versions of the parts of the center."""
        self.versions = list(versions)
        # What it had made at its last push, and when it pushed and took each part.
        self.turned = self.made
        self.brought, self.taken = ([self.made] * len(versions) for _ in range(2))
        self.sent: _Push | None = None
        self.answer: int | None = None  # the version that has come
        self.step_seconds = 0.0  # of its last step


@dataclasses.dataclass
class _Meeting:
    """An open meeting of a part."""

    opened: float
    first: int  # the worker that opened it
    come: dict[int, _Push] = dataclasses.field(default_factory=dict)
    closes: float = math.inf


class Order(enum.IntEnum):
    """The order of what happens at the same second."""

    DEATH = 0
    RETURN = 1
    STEP = 2  # ends
    ARRIVAL = 3
    CLOSING = 4
    ANSWER = 5
    START = 6  # of a step


@dataclasses.dataclass
class _Run:
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
        self.set_off = self.steps = 0
        self.now = 0.0
        self.events: list[Happening] = []
        # Of each part, when each of its meetings was opened, and how many have closed.
        self.opened: list[list[float]] = [[] for _ in self.parts]
        self.versions: list[int] = [0] * len(self.parts)
        self.meetings: dict[int, _Meeting] = {}
        names = ("bytes_up", "bytes_down", "step_seconds", "kept_seconds")
        self.totals = {name: np.zeros(len(self.workers)) for name in names}

    def later(
        self, second: float, turn: Order, what: Callable, who: int, *arguments: Any
    ) -> None:
        """Let something happen at a second, in its turn among what happens then."""
        self.set_off += 1  # No two are alike, so nothing else is compared.
        order = turn, who, self.set_off
        heapq.heappush(self.queue, (second, order, what, (who, *arguments)))

    def until(self, second: float) -> None:
        """Let all happen until then."""
        while self.queue and self.queue[0][0] <= second:
            self.now, _, what, arguments = heapq.heappop(self.queue)
            what(*arguments)

    def note(self, kind: Kind, worker: int = -1, part: int = -1, **more: Any) -> None:
        """Write down what happens now."""
        self.events.append(Happening(self.now, kind, worker, part, **more))

    def noted(self, kind: Kind, push: _Push, staleness: int = 0) -> None:
        """Write down what becomes of a contribution."""
        steps, tokens, _ = push.made
        of = (push.worker, push.part, steps, tokens, staleness, push.number)
        self.events.append(Happening(self.now, kind, *of))

    def go_on(self, worker: int, life: int) -> None:
        """A worker begins a step."""
        w = self.workers[worker]
        if w.life == life:
            w.step_seconds = self.seconds(worker, w.made.steps)
            ends = self.now + w.step_seconds
            self.later(ends, Order.STEP, self.end_step, worker, life)

    def end_step(self, worker: int, life: int) -> None:
        """A worker has made a step: it takes what is there, and contributes."""
        w = self.workers[worker]
        if w.life != life:
            return
        steps, tokens, seconds = w.made
        more = self.tokens(worker, steps)
        w.made = _Made(steps + 1, tokens + more, seconds + w.step_seconds)
        since = w.made.steps - w.turned.steps
        self.note(Kind.STEP, worker, steps=since, tokens=more, number=self.steps)
        self.steps += 1
        self.totals["step_seconds"][worker] += w.step_seconds
        self.take(worker)
        part = self.turn(w)
        # A part that it has taken just now has no step of its own yet.
        if w.sent is None and w.taken[part] != w.made:
            if since >= self.between or self.is_asked(worker, part):
                self.push(worker, part)
        w.waits = not self.delay and w.sent is not None
        if not w.waits:
            self.go_on(worker, life)

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
        w.pushed[part] += 1
        made = w.made.since(w.brought[part])
        seconds = w.made.since(w.taken[part]).seconds
        w.sent = _Push(
            worker, w.life, part, w.versions[part], w.made.steps, made,
            w.step_seconds, seconds, w.pushed[part],
        )  # fmt: skip
        w.turned = w.brought[part] = w.made
        self.totals["bytes_up"][worker] += size
        self.noted(Kind.PUSH, w.sent)
        at = self.now + self.link(worker, size, self.now)
        self.later(at, Order.ARRIVAL, self.arrive, worker, w.sent)

    def arrive(self, worker: int, push: _Push) -> None:
        """A contribution comes to the center."""
        part = push.part
        if self.workers[worker].life != push.life:
            return
        staleness = self.versions[part] - push.version
        if self.meet.shared and staleness:
            self.noted(Kind.LATE, push, staleness)
            self.reply(push, self.versions[part])
            return
        if part not in self.meetings:
            self.meetings[part] = _Meeting(self.now, worker)
            self.opened[part].append(self.now)
        self.noted(Kind.JOIN, push, staleness)
        self.meetings[part].come[worker] = push
        self.fill(part)

    def fill(self, part: int) -> None:
        """Let a meeting close if it is full: after its grace, or once all have come."""
        meeting = self.meetings[part]
        present = {number for number, w in enumerate(self.workers) if not w.left}
        if not self.meet.is_full(len(meeting.come), len(present)):
            return
        if not self.meet.shared:
            self.close(part, self.now)
            return
        grace = 0.0
        if not present <= meeting.come.keys():
            step = min(push.step_seconds for push in meeting.come.values())
            sync = 2 * self.link(meeting.first, self.parts[part], self.now)
            spent = self.now - meeting.opened
            grace = self.meet.grace_seconds(step, self.delay, spent, sync)
        if self.now + grace < meeting.closes:
            meeting.closes = self.now + grace
            self.later(meeting.closes, Order.CLOSING, self.close, part, meeting.closes)

    def close(self, part: int, closes: float) -> None:
        """The center absorbs what has come, and answers."""
        meeting = self.meetings.get(part)
        if meeting is None or (self.meet.shared and meeting.closes != closes):
            return
        del self.meetings[part]
        self.versions[part] += 1
        self.note(Kind.CLOSE, part=part, come=tuple(sorted(meeting.come)))
        for worker, push in sorted(meeting.come.items()):
            self.totals["kept_seconds"][worker] += push.seconds / len(self.parts)
            self.reply(push, self.versions[part])

    def reply(self, push: _Push, version: int) -> None:
        """Send a worker the center's part as it is now."""
        worker, size = push.worker, self.parts[push.part]
        if self.workers[worker].life == push.life:
            self.totals["bytes_down"][worker] += size
            at = self.now + self.link(worker, size, self.now)
            self.later(at, Order.ANSWER, self.hear, worker, push.life, version)

    def hear(self, worker: int, life: int, version: int) -> None:
        """An answer comes to a worker, which takes it now if it waits."""
        w = self.workers[worker]
        if w.life == life:
            w.answer = version
            if w.waits:
                self.take(worker)
                self.go_on(worker, life)

    def take(self, worker: int) -> None:
        """A worker takes the answer, if it is there and it is time."""
        w, sent = self.workers[worker], self.workers[worker].sent
        if sent is None or w.answer is None:
            return
        if w.made.steps - sent.local_step >= self.delay:
            w.versions[sent.part], w.taken[sent.part] = w.answer, w.made
            w.sent = w.answer = None
            self.note(Kind.TAKE, worker, sent.part, steps=sent.made.steps)

    def die(self, worker: int, back: float) -> None:
        """A worker dies; one that never comes back has left."""
        w = self.workers[worker]
        w.life += 1
        w.waits, w.left = False, math.isinf(back)
        self.note(Kind.DIE, worker)
        self.later(back, Order.RETURN, self.back, worker, w.life)
        for part in list(self.meetings) if w.left else []:
            self.fill(part)

    def back(self, worker: int, life: int) -> None:
        """A worker starts again, with all parts of the center."""
        w, size = self.workers[worker], sum(self.parts)
        if w.life == life:
            w.start(self.versions)
            self.note(Kind.BACK, worker)
            self.totals["bytes_down"][worker] += size
            at = self.now + self.link(worker, size, self.now)
            self.later(at, Order.START, self.go_on, worker, life)
