# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and the interfaces of an agreement's two sides."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from optx_sync.center.contract import Period
from optx_sync.center.fragments import Fragments
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime.messages import Arrays
from optx_sync.runtime.samples import Outcome, What

Place: TypeAlias = Callable[[Tree], Tree]  # lays a tree out over devices


class Settings(NamedTuple):
    """The settings of a run that servers and workers share."""

    num_workers: int
    communication_period: Period = 10
    exchange: Exchange | None = None
    fragments: Fragments | None = None
    delay: int | None = None
    pull_exchange: Exchange | None = None
    meet: Quorum | None = None  # `None`: `one()`
    num_servers: int = 1


class AtOnce:
    """A server's side where no push waits for one of a part's other workers."""

    short: tuple[str, ...] = ()  # of meetings that closed with too few
    outcomes: tuple[Outcome, ...] = ()  # of ranges, which the server has not asked for

    def tell(self, holder: int, ranges: tuple[int, ...], what: What) -> None:
        """Note what became of the ranges that came with a push."""
        self.outcomes += (Outcome(holder, ranges, what),)

    def settle(self) -> float:
        """Close what is to be closed now; the seconds until the next time."""
        return math.inf

    def asks(self, worker: int, met: int) -> bool:
        """Whether a worker is asked to push before its turn."""
        return False

    def waiting_ranges(self) -> set[int]:
        """The ranges of samples of contributions that wait in a meeting."""
        return set()


class Sent(NamedTuple):
    """A worker's push of a part, under way."""

    arrays: dict[str, Arrays]
    steps: int = 1  # since the one before
    kept: Tree = ()  # (what was summed up, what was contributed) of a center rule
    codes: Tree = ()  # the memory of its code after it
    then: Tree = ()  # the parameters that it was made of, where its answer may be late


class Way(NamedTuple):
    """Both sides of an agreement: constructors for server and worker."""

    # (a part, inner, copy_replies) -> the server's side: state and arithmetic.
    serve: Callable[..., Any]
    # (shapes of the parameters, inner, layout) -> the worker's side.
    work: Callable[..., Any]
    # Whether the server holds a center that workers take, in parts on several servers,
    # or else applies the workers' optimizer to whole gradients.
    of_center: bool
    # Whether a worker may wait at the server for the others: for a token, or where they
    # meet the center together.
    waits: bool
    fragments: Fragments = 1
    delay: int = 0
