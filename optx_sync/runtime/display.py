# SPDX-License-Identifier: Apache-2.0
"""The history of a run, shown as a table in a terminal or as lines of a log."""

import contextlib
import datetime
import logging
import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from optx_sync.core.trees import Tree
from optx_sync.runtime.messages import Event

log: logging.Logger = logging.getLogger("optx_sync.runtime")

# Seconds between two lines of the log on all workers.
LINE_SECONDS = 5.0
# The window of the rate, in seconds.
RATE_SECONDS = 30.0
# The most events that a history holds.
KEPT = 100_000
# The most workers that such a line names.
SHOWN_WORKERS = 8
# What the log says of an event. The first three are no warnings.
SAID = {
    "join": "{who} has joined",
    "left": "{who} has ended",
    "started": "{who} has started",
    "lost": "{who} died",
    "refused": "a push of {who} was refused",
    "restored": "{who} is back, at step {step}",
    "damaged": "{who} has a damaged checkpoint",
    "unsaved": "{who} could not save, and goes on",
    "rolled_back": "{who} has lost pushes",
    "short": "{who} waits no longer",
    "uncounted": "{who} has samples left",
}


class History(NamedTuple):
    """The history of a run as it was heard: an event for each push and each death.

    What a server had not handed over when it died is missing, a fraction of a second;
    `Worker.rounds` and `Worker.lost` count every push that was applied or lost.

    Attributes:
        events: The events in the order of the servers' clocks; of a long run the last
            100,000.
        averages: The averages of `SyncReplicas(variable_averages=)`, like the
            parameters; otherwise `None`.
        counts: The number of events of the whole run by (kind, worker); `count` adds
            them up.
    """

    events: list[Event]
    averages: Tree | None
    counts: dict[tuple[str, int], int] = {}  # noqa: RUF012 # only read: (kind, worker)

    def count(self, kind: str, worker: int | None = None) -> int:
        """The number of events of a kind, of one worker or of all."""
        return sum(
            number
            for (of_kind, of_worker), number in self.counts.items()
            if of_kind == kind and worker in (None, of_worker)
        )


def is_told(event: Event, of_first: bool, parts: Container[int]) -> bool:
    """Whether an event is told: several servers may have one of the same thing.

    Args:
        event: Of a push, a warning, or anything else.
        of_first: Whether the first server has it.
        parts: Of parts that are pushed in the same round, the first.
    """
    if event.kind in ("push", "dropped", "retry"):
        return event.part in parts
    return of_first or event.kind in SAID.keys() - {"join", "left"}


class Seen:
    """The events of a run so far, and totals; it holds at most `KEPT` events."""

    def __init__(self):
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.last: dict[int, Event] = {}  # pushes, by worker
        self.states: dict[int, str] = {}  # of each worker that has not pushed
        self.steps: dict[int, int] = {}  # of each worker, its earlier runs' too
        self.pushing: tuple[float, float] | None = None  # times of first and last push
        self.step: int = 0  # of the center
        self.saved: int | None = None  # the step of the newest checkpoint
        self.done: int = 0  # steps that workers have made since their first push
        self._walked: deque[tuple[float, int]] = deque()  # (time, steps done by then)

    def add(self, new: list[Event]) -> None:
        """Add new events."""
        for event in new:
            self.events.append(event)
            self.counts[event.kind, event.worker] += 1
            if event.kind in ("push", "dropped"):
                last = self.last.get(event.worker, event)
                self.done += max(event.local_step - last.local_step, 0)
                self.last[event.worker] = event
            if event.kind == "push":
                begin, end = self.pushing or (event.time, event.time)
                self.pushing = min(begin, event.time), max(end, event.time)
            if event.kind in ("push", "dropped", "join", "left"):
                self.steps[event.worker] = event.local_step
            if event.kind == "saved":
                self.saved = event.global_step
            if event.kind in _STATES:
                self.states[event.worker] = _STATES[event.kind]
            if event.kind != "lost":  # A "lost" event has the step of the last push.
                self.step = event.global_step
        if not self.last:
            return  # They start, and compile.
        self._walked.append((time.monotonic(), self.done))
        while self._walked[-1][0] - self._walked[0][0] > RATE_SECONDS:
            self._walked.popleft()

    def rate(self) -> float:
        """Recent steps per second of all workers together."""
        (begin, before), (end, done) = self._walked[0], self._walked[-1]
        return (done - before) / (end - begin) if end > begin else 0.0

    def head(self, num_workers: int, total_steps: int | None) -> str:
        """The step of the center, the rate, the percentage and the time left."""
        said, rate = f"center: step {self.step}", self.rate() if self._walked else 0.0
        if rate:
            said += f", {rate:.3g} steps a second"
        if total_steps:
            made = sum(min(steps, total_steps) for steps in self.steps.values())
            # Who has ended makes no more.
            ended = [w for w, state in self.states.items() if state == "ended"]
            whole = (num_workers - len(ended)) * total_steps
            whole += sum(min(self.steps[w], total_steps) for w in ended)
            said += f", {100 * made // max(whole, 1)} %"
            if rate and made < whole:
                left = datetime.timedelta(seconds=round((whole - made) / rate))
                said += f", {left} left"
        return said if self.saved is None else f"{said}, saved at step {self.saved}"

    def state(self, worker: int) -> str:
        """The state of a worker that has not pushed."""
        return self.states.get(worker, "starting")

    def closing(self, seconds: float, saved_in: str | None) -> str:
        """A closing summary of the run, in one line."""
        count = self.history(None).count
        pushes, (begin, end) = count("push"), self.pushing or (0.0, 0.0)
        said = f"{pushes} pushes in {seconds:.0f} s"
        if end > begin:
            said += (
                f", from the first one on {(pushes - 1) / (end - begin):.3g} a second"
            )
        names = {
            "dropped": "dropped as stale",
            "refused": "refused",
            "retry": "answered again",
            "lost": "deaths of workers",
            "restored": "times that a server came back",
            "unsaved": "checkpoints not written",
        }
        more = [f"{n} {what}" for kind, what in names.items() if (n := count(kind))]
        if self.saved is not None:
            more.insert(0, f"saved at step {self.saved} in {saved_in}")
        return ", ".join([said, f"the center at step {self.step}", *more])

    def history(self, averages: Tree | None) -> History:
        """The `History` that `run` returns."""
        return History(list(self.events), averages, dict(self.counts))


_STATES = {"join": "joined", "lost": "starting", "left": "ended"}


class Display:
    """A log, and a table of the workers in a terminal, where there is Rich.

    The log is `logging.getLogger("optx_sync.runtime")`. If the program has configured
    no handler, lines go to standard error while the run lasts: above the table, which
    goes at the end. Without a table some of them say how the workers stand.
    """

    def __init__(self, num_workers: int, total_steps: int | None = None):
        self._workers, self._total = num_workers, total_steps
        self._live = None
        self._ends = contextlib.ExitStack()
        self._next_line: float = 0.0
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return
        console = Console()
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Display":
        if self._live is not None:
            # From now on lines of standard error stand above it.
            self._ends.enter_context(self._live)
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            log.addHandler(handler)
            self._ends.callback(log.removeHandler, handler)
            self._ends.callback(log.setLevel, log.level)
            log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: Any) -> None:
        self._ends.close()

    def show(self, seen: Seen, new: list[Event]) -> None:
        """Show new events."""
        for event in new:
            if event.kind in SAID:
                is_news = event.kind in ("join", "left", "started")
                log.log(logging.INFO if is_news else logging.WARNING, line(event))
        if self._live is not None:
            self._live.update(table(self._workers, seen, self._total), refresh=True)
        elif time.monotonic() >= self._next_line and log.isEnabledFor(logging.INFO):
            log.info(summary(self._workers, seen, self._total))
            self._next_line = time.monotonic() + LINE_SECONDS


def numbered(workers: Sequence[int]) -> str:
    """Workers by their numbers, for the log; of many the first ones."""
    more = len(workers) - SHOWN_WORKERS
    numbers = ", ".join(map(str, workers[:SHOWN_WORKERS]))
    several = "workers" if len(workers) > 1 else "worker"
    return f"{several} {numbers}" + (f" and {more} more" if more > 0 else "")


def line(event: Event) -> str:
    """An event as a line of the log."""
    who = f"worker {event.worker}" if event.worker >= 0 else "a server"
    what = SAID[event.kind].format(who=who, step=event.global_step)
    message = ": " + " ".join(event.message.split()) if event.message else ""
    return what + message[:500]


def summary(num_workers: int, seen: Seen, total_steps: int | None = None) -> str:
    """The state of all workers, in one line."""
    parts = [seen.head(num_workers, total_steps)]
    for worker in range(min(num_workers, SHOWN_WORKERS)):
        event = seen.last.get(worker)
        if event is None:
            parts.append(f"worker {worker}: {seen.state(worker)}")
            continue
        shown = "".join(f", {n} {v:.4g}" for n, v in event.shown.items())
        parts.append(
            f"worker {worker}: {event.local_step} steps, {event.round} rounds, "
            f"staleness {event.staleness}{shown}"
        )
    if num_workers > SHOWN_WORKERS:
        parts.append(f"and {num_workers - SHOWN_WORKERS} more")
    return "; ".join(parts)


def table(num_workers: int, seen: Seen, total_steps: int | None = None) -> Any:
    """What a terminal shows by Rich: how far the run is, and a table of the workers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = sorted({name for event in seen.last.values() for name in event.shown})
    # Above the table and not its title, which would break where the table ends.
    head, shown = Text(seen.head(num_workers, total_steps), "italic"), Table()
    for name in ("worker", "steps", "rounds", "staleness", "lost", *names):
        shown.add_column(name, justify="right")
    for worker in range(num_workers):
        lost = str(seen.counts["lost", worker])
        event = seen.last.get(worker)
        if event is None:
            shown.add_row(str(worker), seen.state(worker), "", "", lost)
            continue
        numbers = (worker, event.local_step, event.round, event.staleness)
        values = [f"{event.shown[n]:.4g}" if n in event.shown else "" for n in names]
        shown.add_row(*map(str, numbers), lost, *values)
    return Group(head, shown)
