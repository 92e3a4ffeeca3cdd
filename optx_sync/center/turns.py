# SPDX-License-Identifier: Apache-2.0
"""Which part of a center rule meets in a step, where the host that runs it counts.

A compiled step finds in its counters whether workers meet, and needs a conditional for
that. A host that knows these counters can run a program for each kind of step instead:
one in which nobody meets, and one for each part that does. It says which one it traces
by `asked`; rules ask `Turns.kind_of`.
"""

import contextvars
from typing import Any, NamedTuple, Protocol

import jax.core

from optx_sync.state.direct import Period, period_length

# No part meets; other kinds are the numbers of the parts.
QUIET = -1


class Counters(NamedTuple):
    """The counters of a center rule's state: arrays of a state, or their numbers."""

    local_step: Any
    steps_since_round: Any
    global_step: Any
    waits: Any  # () without `overlap`

    @classmethod
    def of(cls, state: Any) -> "Counters":
        """Those of a `CenterState`."""
        return cls(*(getattr(state, name) for name in cls._fields))


class Turns(NamedTuple):
    """When the parts of a center rule meet.

    Attributes:
        between: The steps from one exchange to the next.
        parts: P, the number of parts.
        overlap: Whether a part lands in the step after the one that is due.
    """

    between: Period
    parts: int
    overlap: bool

    def kind_of(self, state: Any) -> int | None:
        """The part that meets in the step that is traced, or `QUIET`; `None`: unknown.

        It is known where a host says so for the very counters of this state.
        """
        host = asked.get(None)
        return None if host is None else host.kind_of(self, Counters.of(state))

    def went_on(self, state: Any, after: Any) -> None:
        """Tell a host that counts what the rule has made of its counters."""
        if (host := asked.get(None)) is not None:
            host.went_on(self, Counters.of(state), Counters.of(after))

    def next(self, now: Counters) -> tuple[int, Counters]:
        """(the kind of the next step, the counters after it), from numbers."""
        steps = now.steps_since_round + 1
        length = self.between
        if callable(length):
            with jax.core.eval_context():
                length = period_length(length, now.local_step - (steps - 1))
        due, kind = steps >= length, QUIET
        if self.overlap and now.waits:
            kind = (now.global_step - 1) % self.parts
        elif due and not self.overlap:
            kind = now.global_step % self.parts
        return kind, Counters(
            now.local_step + 1,
            0 if due else steps,
            now.global_step + due,
            int(due) if self.overlap else (),  # whether any wait is all that counts
        )


class Host(Protocol):
    """Who traces a program and counts for the rules in it."""

    def kind_of(self, turns: Turns, counters: Counters) -> int | None:
        """The kind of the step that is traced; `None`: unknown."""
        ...

    def went_on(self, turns: Turns, counters: Counters, after: Counters) -> None:
        """The rule has made these of its counters."""
        ...


asked: contextvars.ContextVar[Host] = contextvars.ContextVar("asked")
