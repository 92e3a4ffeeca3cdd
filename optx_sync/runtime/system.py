# SPDX-License-Identifier: Apache-2.0
"""Time, waiting and Ray, as this process has them; a test puts its own in their place.

A schedule of tests runs servers and workers in one process on a clock of its own: what
waits for time or for another process asks here for it, and for nothing else.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class System:
    """The clocks of this machine, waits of threads, notices to leave, and Ray."""

    # Whether processes of one machine speak through shared memory.
    shares_memory: bool = hasattr(os, "memfd_create")

    def now(self) -> float:
        """Seconds of a clock that is never set back."""
        return time.monotonic()

    def stamp(self) -> int:
        """Nanoseconds since the epoch, by a clock that may be set."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def condition(self) -> Any:
        """A lock, and what waits until others have changed what it guards."""
        return threading.Condition()

    def on_notice(self, hear: Callable[[], None]) -> None:
        """Call `hear` at a SIGTERM, with which clouds announce that a machine goes."""
        signal.signal(signal.SIGTERM, lambda *_: hear())

    def ray(self) -> Any:
        """Import Ray, or say what to install."""
        # Of a death the log has one line of ours; Ray's own is in its raylet's log.
        skipped = "A worker died or was killed"
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", skipped)
        try:
            import ray
            import ray.util.metrics  # Ray does not do so itself.
        except ImportError as error:
            raise ImportError(
                "oxs.runtime.run needs Ray: pip install 'optx-sync[ray]'."
            ) from error
        return ray


_systems: list[System] = [System()]


def here() -> System:
    """The system that servers, connections and workers are to ask now."""
    return _systems[-1]


@contextlib.contextmanager
def using(system: System) -> Iterator[None]:
    """Put another system in place of this machine's, for tests."""
    _systems.append(system)
    try:
        yield
    finally:
        _systems.remove(system)
