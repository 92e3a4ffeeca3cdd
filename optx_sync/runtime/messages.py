# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers: pushes, replies, joins and events."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from optx_sync.trees import Tree

# The path of a variable -> its array, or those rows of it that belong to the part. A
# gradient may also be (indices, values) of some rows, or `None`.
Arrays: TypeAlias = dict[str, Tree]


# Why a server refuses a push of finite arrays.
OVERFLOW = "the center would overflow"


class PushRefused(ValueError):
    """The server refused a push; the center is unchanged."""


class Push(NamedTuple):
    """A worker's message with its contribution to one part of the parameters."""

    worker: int
    # Counted per part from 1; a retry has the number of the first try
    round: int
    arrays: dict[str, Arrays]  # name of the message -> its arrays, see `traffic`
    steps: int = 1  # the worker's steps since its last round of this part
    local_step: int = 0  # the worker's steps so far
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display
    incarnation: int = 0  # from `join`; 0: the worker has not joined
    seconds: float = 0.0  # the duration of the previous exchange
    lost: int = 0  # pushes reported lost to the worker since its last push
    bytes: int = 0  # of all that the worker sends in this round
    tokens: float = 1.0  # the weight of the contribution, as the worker counts it
    part: int = 0
    place: str = ""  # for its successor: notes of its program, as JSON
    met: int = -1  # the part's meetings that it has taken; -1: all
    leases: tuple[int, ...] = ()  # the ranges of samples that it is made of
    step_seconds: float = 0.0  # seconds of one of the worker's steps
    confirms: int = (
        0  # the `Reply.number` that it took last; 0: answer with whole arrays
    )

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
    """The server's answer to a push."""

    # "before", "after" or "params" of the part; or "change": the difference to what the
    # worker knows of these, as messages of `pull_exchange`.
    arrays: dict[str, Arrays]
    global_step: int  # rounds of the part
    staleness: int  # others' rounds since this worker's last one, none of them dropped
    used: bool = True  # False for what came stale or late, and was dropped
    waiting: bool = False  # whether it is not answered yet: ask `wait`
    round: int = 0  # the number of this push
    lost: int = 0  # earlier pushes of this worker that were lost with the server
    number: int = 0  # the number of this answer; the next push confirms it


class Pending(NamedTuple):
    """The answer to a push that was sent: a call waits for the `Reply`."""

    wait: Callable[[], Reply]
    is_there: Callable[[], bool] = lambda: True  # whether a call returns at once
    hand_in: Callable[[], None] = lambda: None  # waits until the server has the push

    def __call__(self) -> Reply:
        """Wait for it; raises `PushRefused` if the push was refused."""
        return self.wait()


class JoinedPart(NamedTuple):
    """One part of the center, for a worker that starts."""

    arrays: Arrays  # the center
    round: int  # the worker's last round
    global_step: int


class Joined(NamedTuple):
    """The server's answer to a worker that starts, or starts again."""

    parts: dict[int, JoinedPart]
    local_step: int  # the worker's steps at its last round
    restarts: int  # how often the worker has joined before
    incarnation: int = 0  # stands in every push; pushes of an older one are refused
    place: str = ""  # the notes of its predecessor's program, as JSON

    @property
    def round(self) -> int:
        """The worker's last round, of the part that has met most often."""
        return max(part.round for part in self.parts.values())


class Event(NamedTuple):
    """An event of a run: one entry of its history."""

    # started, restored, saved, damaged, unsaved, join, left, push, dropped, retry,
    # short (a meeting closed with too few), refused, rolled_back (pushes of a worker
    # were lost with a server), lost (a worker died; `run` says it)
    kind: str
    worker: int  # its number, from 0; -1 for the server's own
    round: int  # the worker's, from 1; 0 before its first push, and for the server
    local_step: int  # the worker's steps at its last push; 0 for the server
    global_step: int  # rounds (or updates) of all workers, after the event
    # For a push, the other workers' rounds since this worker's last one; for
    # "rolled_back", the number of pushes; otherwise 0.
    staleness: int
    time: float  # seconds since the epoch, of the server's clock
    shown: dict[str, float]  # of a push: `Worker.step(grads, loss=...)`
    message: str = ""  # why something was refused or lost
    seconds: float = 0.0  # the duration of the worker's previous exchange
    bytes: int = 0  # all bytes that the worker sent in this round
    part: int = 0  # the part that was pushed
    pulled: int = 0  # bytes of the server's answer for this part
