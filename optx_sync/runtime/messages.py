# SPDX-License-Identifier: Apache-2.0
"""What workers and servers send each other."""

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from optx_sync.trees import Tree

# The path of a variable -> its array, or the rows of it that belong to the part. Of a
# gradient also (indices, values) of some rows, or `None`.
Arrays: TypeAlias = dict[str, Tree]


class PushRefused(ValueError):
    """A push that the server did not accept; the center is as it was."""


class NoStart(RuntimeError):
    """A server has neither a checkpoint nor the parameters to start from."""


class Push(NamedTuple):
    """What a worker sends, of one part of the parameters."""

    worker: int
    # Of this part: 1 for a worker's first push; a retry has the number of the first try
    round: int
    arrays: dict[str, Arrays]  # what is sent -> its arrays, see `traffic`
    steps: int = 1  # the worker's steps since its last round of this part
    local_step: int = 0  # the worker's steps so far
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display
    incarnation: int = 0  # what `join` said; 0: of a worker that has not joined
    seconds: float = 0.0  # how long the exchange before this one took
    lost: int = 0  # pushes that it was told are lost, since its last push
    bytes: int = 0  # of all that the worker sends in this round
    tokens: float = 1.0  # behind it, as the worker counts them
    part: int = 0
    # For this worker's successor, where it has any: the leaves of its inner state, and
    # words of its program, as JSON.
    state: Arrays = {}  # noqa: RUF012 # only read
    place: str = ""
    told: int = 0  # of the answer that it took last, see `Reply`; 0: whole arrays

    def problem(self) -> str:
        """What is wrong with the numbers beside the arrays, "" if nothing is."""
        for name, least in _INTEGERS.items():
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                return f"{name} must be an integer; got {number!r}."
            if number < least:
                return f"{name} must be {least} or more; got {number}."
        if not isinstance(self.shown, dict):
            return f"shown must be a dict of numbers; got {self.shown!r}."
        arrays = (np.ndarray, np.generic)
        if not isinstance(self.state, dict) or not all(
            isinstance(x, arrays) for x in self.state.values()
        ):
            return f"state must be a dict of NumPy arrays; got {type(self.state)}."
        if not isinstance(self.place, str):
            return f"place must be a text; got {self.place!r}."
        numbers = {"seconds": self.seconds, "tokens": self.tokens}
        for name, number in {**self.shown, **numbers}.items():
            if not isinstance(number, int | float | np.number):
                return f"{name} must be a number; got {number!r}."
        if not (self.tokens >= 0 and math.isfinite(self.tokens)):
            return f"tokens must be 0 or more, and finite; got {self.tokens}."
        return ""


# Those of a push, and the least that each may be; of others the server says more.
_INTEGERS: dict[str, int] = {"steps": 1, "local_step": 0, "incarnation": 0}
_INTEGERS |= {"lost": 0, "bytes": 0, "round": -(2**62), "part": -(2**62), "told": 0}


class Reply(NamedTuple):
    """What a worker gets back."""

    # "before", "after", or "params": of the part. "change": what the worker lacks of
    # these, as messages of `pull_exchange`.
    arrays: dict[str, Arrays]
    global_step: int  # rounds of the part
    staleness: int  # the other workers' rounds since this worker's last one
    used: bool = True  # False for a stale gradient, which left no trace
    waiting: bool = False  # whether the worker must wait for a token: ask `wait`
    round: int = 0  # the number of this push
    lost: int = 0  # earlier pushes of this worker that went with the server
    told: int = 0  # which answer this is; the next push says whether it arrived


class JoinedPart(NamedTuple):
    """What a worker that starts gets of one part."""

    arrays: Arrays  # the center
    round: int  # the worker's last one
    global_step: int


class Joined(NamedTuple):
    """What a worker gets that starts, or starts again."""

    parts: dict[int, JoinedPart]
    local_step: int  # the worker's steps at its last round
    restarts: int  # how often the worker has joined before
    incarnation: int = 0  # goes into every push; a push of an older one is refused
    state: Arrays = {}  # noqa: RUF012 # only read: of its predecessor's inner optimizer
    place: str = ""  # what its predecessor's program has left, as JSON

    @property
    def round(self) -> int:
        """The worker's last round, of the part that has met most often."""
        return max(part.round for part in self.parts.values())


class Event(NamedTuple):
    """One line of the history."""

    # started, restored, saved, damaged, unsaved, join, left, push, dropped, retry,
    # refused, rolled_back (pushes of a worker went with a server); lost (a worker, by
    # `run`)
    kind: str
    worker: int  # its number, from 0; -1 for the server's own
    round: int  # the worker's, 1 for its first push; 0 before it, and for the server
    local_step: int  # the worker's steps at its last push; 0 for the server
    global_step: int  # rounds (or updates) of all workers, after the event
    # Rounds of the others since the worker's last one, of a push; of "rolled_back": how
    # many pushes; otherwise 0.
    staleness: int
    time: float  # seconds since the epoch, of the server's clock
    shown: dict[str, float]  # what `Worker.step(grads, loss=...)` was given, of a push
    message: str = ""  # why, where something was refused or lost
    seconds: float = 0.0  # the worker's exchange before this one
    bytes: int = 0  # of all that the worker sent in this round
    part: int = 0  # that was pushed
    pulled: int = 0  # bytes of the server's answer, of this part
