# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers: pushes, replies, joins and events."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from optx_sync.core.trees import Tree

# The path of a variable -> its array, or those rows of it that belong to the part. A
# gradient may also be (indices, values) of some rows, or `None`.
Arrays: TypeAlias = dict[str, Tree]


# Why a server refuses a push of finite arrays.
OVERFLOW = "the center would overflow"


class PushRefused(ValueError):
    """The server refused a push; the center is unchanged."""


class Push(NamedTuple):
    """A worker's message with its contribution to one part of the parameters.

    Attributes:
        worker: The worker's number, from 0.
        round: The number of this push among the worker's of this part, counted from 1;
            a retry has the number of the first try.
        arrays: By name the arrays of the part, by path: "contribution", or fields of
            `Own` where the server is to make the contribution of them; "grads" with
            `SyncReplicas`. With `exchange` its codes.
        steps: The worker's steps since its last round of this part.
        local_step: The worker's steps so far.
        shown: Numbers for the display and the history: `Worker.step(grads, loss=...)`.
        incarnation: From `join`; 0: the worker has not joined.
        seconds: The duration of the worker's previous exchange.
        lost: Pushes reported lost to the worker since its last push.
        bytes: Of all that the worker sends in this round.
        tokens: The weight of the contribution, as the worker counts it.
        part: The number of the part.
        place: For the worker's successor: notes of its program, as JSON.
        met: The part's meetings that the worker has taken; -1: all.
        leases: The numbers of the ranges of samples that it is made of.
        step_seconds: Seconds of one of the worker's steps, in the mean since its last
            push.
        confirms: The `Reply.number` that the worker took last; 0: answer with whole
            arrays.
    """

    worker: int
    round: int
    arrays: dict[str, Arrays]
    steps: int = 1
    local_step: int = 0
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display
    incarnation: int = 0
    seconds: float = 0.0
    lost: int = 0
    bytes: int = 0
    tokens: float = 1.0
    part: int = 0
    place: str = ""
    met: int = -1
    leases: tuple[int, ...] = ()
    step_seconds: float = 0.0
    confirms: int = 0

    def problem(self) -> str:
        """What is wrong with the header's numbers, "" if nothing is."""
        for name, least in _INTEGERS.items():
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                return f"{name} must be an integer; got {number!r}."
            if number < least:
                return f"{name} must be {least} or more; got {number}."
        if not isinstance(self.shown, dict):
            return f"shown must be a dict of numbers; got {self.shown!r}."
        if not isinstance(self.place, str):
            return f"place must be a text; got {self.place!r}."
        numbers = {"seconds": self.seconds, "tokens": self.tokens}
        numbers["step_seconds"] = self.step_seconds
        for name, number in {**self.shown, **numbers}.items():
            if not isinstance(number, int | float | np.number):
                return f"{name} must be a number; got {number!r}."
        if not (self.tokens >= 0 and math.isfinite(self.tokens)):
            return f"tokens must be 0 or more, and finite; got {self.tokens}."
        return ""


# The numbers of a push and the least value of each; the server checks the others.
_INTEGERS: dict[str, int] = {"steps": 1, "local_step": 0, "incarnation": 0}
_INTEGERS |= {"lost": 0, "bytes": 0, "round": -(2**62), "part": -(2**62), "confirms": 0}
_INTEGERS |= {"met": -1}


class Reply(NamedTuple):
    """The server's answer to a push.

    Attributes:
        arrays: By name the arrays of the part, by path: "before" and "after", the part
            of the center around the round, or one of them; "params" with
            `SyncReplicas`. Or "change": the difference to what the worker knows of
            these, as messages of `pull_exchange`. Empty while it waits.
        global_step: Rounds of the part; the updates of `SyncReplicas`.
        staleness: The others' rounds since this worker's last one, none of them
            dropped; with `SyncReplicas` the updates since its token.
        used: False for what came stale or late, and was dropped.
        waiting: Whether it is not answered yet: ask `wait`.
        round: The number of this push.
        lost: Earlier pushes of this worker that were lost with the server.
        number: The number of this answer, which the next push confirms; 0 without
            `pull_exchange`.
    """

    arrays: dict[str, Arrays]
    global_step: int
    staleness: int
    used: bool = True
    waiting: bool = False
    round: int = 0
    lost: int = 0
    number: int = 0


class Pending(NamedTuple):
    """The answer to a push that was sent: a call waits for the `Reply`.

    Attributes:
        wait: `() -> Reply`; raises `PushRefused` if the push was refused.
        is_there: `() -> bool`, whether a call returns at once.
        hand_in: `() -> None`, waits until the server has the push.
    """

    wait: Callable[[], Reply]
    is_there: Callable[[], bool] = lambda: True
    hand_in: Callable[[], None] = lambda: None

    def __call__(self) -> Reply:
        """Wait for it; raises `PushRefused` if the push was refused."""
        return self.wait()


class JoinedPart(NamedTuple):
    """One part of the center, for a worker that starts.

    Attributes:
        arrays: The center's arrays of this part, by path.
        round: The number of the worker's last push of this part; 0 before the first.
        global_step: Rounds of the part, of all workers.
    """

    arrays: Arrays
    round: int
    global_step: int


class Joined(NamedTuple):
    """The server's answer to a worker that starts, or starts again.

    Attributes:
        parts: The parts of the center, by number.
        local_step: The worker's steps at its last round.
        restarts: How often the worker has joined before.
        incarnation: Stands in every push; pushes of an older one are refused.
        place: The notes of its predecessor's program, as JSON; "" if there are none.
        lost: Pushes of the worker, which had joined before, that went with a server.
    """

    parts: dict[int, JoinedPart]
    local_step: int
    restarts: int
    incarnation: int = 0
    place: str = ""
    lost: int = 0

    @property
    def round(self) -> int:
        """The worker's last round, of the part that has met most often."""
        return max(part.round for part in self.parts.values())


class Event(NamedTuple):
    """An event of a run: one entry of its history.

    Attributes:
        kind: What happened: "started", "restored", "saved", "damaged", "unsaved",
            "join", "left", "push", "dropped", "retry", "short" (a meeting closed with
            too few), "uncounted" (ranges of samples at the end), "refused",
            "rolled_back" (pushes of a worker were lost with a server) or "lost" (a
            worker died; `run` says it).
        worker: The worker's number, from 0; -1 for the server's own.
        round: The number of the worker's last push of the part, from 1; 0 before the
            first, and for the server.
        local_step: The worker's steps at its last push; 0 for the server.
        global_step: Rounds (or updates) of all workers, after the event.
        staleness: Of "push" and "dropped", the other workers' rounds since this
            worker's last one; of "rolled_back", the number of pushes; otherwise 0.
        time: Seconds since the epoch, of the server's clock; of "lost" that of `run`.
        shown: Numbers that came with a push: `Worker.step(grads, loss=...)`.
        message: More about it, such as why something was refused or lost; "" if there
            is none.
        seconds: The duration of the worker's previous exchange, of a push.
        bytes: All bytes that the worker sent in this round, of a push.
        part: The part that was pushed; else the first part of the server.
        pulled: Bytes of the server's answer for this part; 0 where the answer came
            later.
    """

    kind: str
    worker: int
    round: int
    local_step: int
    global_step: int
    staleness: int
    time: float
    shown: dict[str, float]
    message: str = ""
    seconds: float = 0.0
    bytes: int = 0
    part: int = 0
    pulled: int = 0
