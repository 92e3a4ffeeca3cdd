# SPDX-License-Identifier: Apache-2.0
"""What workers and servers send each other."""

from typing import Any, NamedTuple, TypeAlias

Arrays: TypeAlias = dict[str, Any]  # the path of a variable -> its array


class PushRefused(ValueError):
    """A push that the server did not accept; the center is as it was."""


class NoStart(RuntimeError):
    """A server has neither a checkpoint nor the parameters to start from."""


class Push(NamedTuple):
    """What a worker sends."""

    worker: int
    round: int  # 1 for a worker's first push; a retry has the number of the first try
    arrays: dict[str, Arrays]  # what is sent -> its arrays, see `traffic`
    steps: int = 1  # the worker's steps since its last round
    local_step: int = 0  # the worker's steps so far
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display
    incarnation: int = 0  # what `join` said; 0: of a worker that has not joined
    seconds: float = 0.0  # how long the exchange before this one took
    lost: int = 0  # pushes that it was told are lost, since its last push
    bytes: int = 0  # of all its arrays, on all servers
    tokens: float = 1.0  # behind it, as the worker counts them


class Reply(NamedTuple):
    """What a worker gets back."""

    arrays: dict[str, Arrays]  # "before", "after"; or "params"
    global_step: int
    staleness: int  # the other workers' rounds since this worker's last one
    used: bool = True  # False for a stale gradient, which left no trace
    waiting: bool = False  # whether the worker must wait for a token: ask `wait`
    round: int = 0  # the number of this push
    lost: int = 0  # earlier pushes of this worker that went with a server


class Joined(NamedTuple):
    """What a worker gets that starts, or starts again."""

    arrays: Arrays  # the center
    round: int  # the worker's last one
    local_step: int  # the worker's steps at its last round
    global_step: int
    restarts: int  # how often the worker has joined before
    incarnation: int = 0  # goes into every push; a push of an older one is refused


class Event(NamedTuple):
    """One line of the history."""

    # started, restored, damaged, unsaved, join, left, push, dropped, retry, refused,
    # rolled_back (pushes of a worker went with a server); lost (a worker, by `run`)
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
    bytes: int = 0  # of a push as it travelled, on all servers
