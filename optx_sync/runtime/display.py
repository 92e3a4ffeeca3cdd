# SPDX-License-Identifier: Apache-2.0
"""What happens in a run: its history, a table in a terminal, else lines on a log."""

import logging
import time
from typing import Any, NamedTuple

from optx_sync.runtime.messages import Event

log: logging.Logger = logging.getLogger("optx_sync.runtime")

# How often a line says how all workers stand.
LINE_SECONDS = 5.0
# How many workers such a line names.
SHOWN_WORKERS = 8
WARNINGS = ("lost", "restored", "damaged", "unsaved", "refused", "rolled_back")
# Of these all servers tell; of what workers do, the first one.
OF_EACH_SERVER = ("started", "restored", "damaged", "unsaved", "refused", "rolled_back")
PUSHES = ("push", "dropped", "retry")


class History(NamedTuple):
    """What happened in a run: one event for each push, and for each death."""

    events: list[Event]  # in the order of the servers' clocks
    averages: Any  # of `SyncReplicas(variable_averages=)`, or None

    def count(self, kind: str, worker: int | None = None) -> int:
        """How many events of a kind there were, of one worker or of all."""
        return sum(
            event.kind == kind and worker in (None, event.worker)
            for event in self.events
        )


class Display:
    """A table of the workers in a terminal, where there is Rich; otherwise a log.

    The log is Python's, `optx_sync.runtime`. Where the program has set none up, lines
    go to the standard error stream while the run lasts.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._live = None
        self._handler: logging.Handler | None = None
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
            self._live.start()
        elif not log.hasHandlers():
            self._handler = logging.StreamHandler()
            self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            log.addHandler(self._handler)
            self._level = log.level
            log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()
        if self._handler is not None:
            log.removeHandler(self._handler)
            log.setLevel(self._level)

    def show(self, last: dict[int, Event], seen: list[Event], new: list[Event]) -> None:
        """Tell what is new."""
        for event in new:
            if event.kind in WARNINGS:
                log.warning(line(event))
            elif event.kind in ("started", "join", "left"):
                log.info(line(event))
        if self._live is not None:
            self._live.update(table(self._num_workers, last, seen), refresh=True)
        elif time.monotonic() >= self._next_line and log.isEnabledFor(logging.INFO):
            log.info(summary(self._num_workers, last, seen))
            self._next_line = time.monotonic() + LINE_SECONDS


def line(event: Event) -> str:
    """What an event is in words."""
    who = f"worker {event.worker}" if event.worker >= 0 else "a server"
    what = {
        "join": f"{who} has joined",
        "left": f"{who} has ended",
        "lost": f"{who} died",
        "refused": f"a push of {who} was refused",
        "restored": f"{who} is back, at step {event.global_step}",
        "started": f"{who} has started",
        "damaged": f"{who} has a damaged checkpoint",
        "unsaved": f"{who} could not save, and goes on",
    }.get(event.kind, f"{event.kind}: {who}")
    message = f": {event.message.strip()}" if event.message else ""
    return what + message[:500]


def summary(num_workers: int, last: dict[int, Event], seen: list[Event]) -> str:
    """How all workers stand, in a line."""
    parts = [f"center: step {center_step(seen)}"]
    for worker in range(min(num_workers, SHOWN_WORKERS)):
        event = last.get(worker)
        if event is None:
            parts.append(f"worker {worker}: {state(worker, seen)}")
            continue
        shown = "".join(f", {n} {v:.4g}" for n, v in event.shown.items())
        parts.append(
            f"worker {worker}: {event.local_step} steps, {event.round} rounds, "
            f"staleness {event.staleness}{shown}"
        )
    if num_workers > SHOWN_WORKERS:
        parts.append(f"and {num_workers - SHOWN_WORKERS} more")
    return "; ".join(parts)


def center_step(seen: list[Event]) -> int:
    """Where the center is, by the servers; a death has the step of the last push."""
    return next((e.global_step for e in reversed(seen) if e.kind != "lost"), 0)


def state(worker: int, seen: list[Event]) -> str:
    """How it stands with a worker that has not pushed."""
    own = [e.kind for e in seen if e.worker == worker and e.kind in _STATES]
    return _STATES[own[-1]] if own else "starting"


_STATES = {"join": "joined", "lost": "starting", "left": "ended"}


def table(num_workers: int, last: dict[int, Event], seen: list[Event]) -> Any:
    """What the display shows, a Rich table."""
    from rich.table import Table

    names = sorted({name for event in last.values() for name in event.shown})
    shown = Table(title=f"center: step {center_step(seen)}")
    for name in ("worker", "steps", "rounds", "staleness", "lost", *names):
        shown.add_column(name, justify="right")
    for worker in range(num_workers):
        lost = str(sum(e.kind == "lost" and e.worker == worker for e in seen))
        event = last.get(worker)
        if event is None:
            shown.add_row(str(worker), state(worker, seen), "", "", lost)
            continue
        numbers = (worker, event.local_step, event.round, event.staleness)
        values = [f"{event.shown[n]:.4g}" if n in event.shown else "" for n in names]
        shown.add_row(*map(str, numbers), lost, *values)
    return shown
