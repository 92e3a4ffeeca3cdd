# SPDX-License-Identifier: Apache-2.0
"""A program for each kind of step: the host counts when center rules meet.

While a step is traced, its center rules ask which part meets in it (`center/turns.py`).
Here is the answer for those whose counters are arrays of the state that the step was
given, and come back as the rule has made them. A rule whose counters are not (in a
loop inside of the step, say) is not known, and finds out by a conditional.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from optx_sync.center.turns import Counters, Turns, asked

# Beyond so many programs of one step, a quiet one and those of eight parts, further
# rules have conditionals.
MOST = 9
Places: TypeAlias = tuple[int, ...]  # of counters, among the arrays of a state
Kinds: TypeAlias = tuple[int, ...]  # of one step: that of each rule


class Counted(NamedTuple):
    """What the host knows of a rule's counters in a state that a step has given out."""

    arrays: tuple[Any, ...]  # the counters themselves: by them the state is known
    now: Counters


class Rule(NamedTuple):
    """A center rule of a step, whose kinds of step the host counts."""

    places: Places
    turns: Turns

    def counters(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Its counters, among these arrays of a state."""
        return tuple(arrays[place] for place in self.places)

    def now(self, known: Counted | None, arrays: Sequence[Any]) -> Counters:
        """The numbers that its counters hold; if they are not known it waits for them.

        `known` is of the state that was given out last, of another rule it may be.
        """
        own = self.counters(arrays)
        pairs = itertools.zip_longest(known.arrays, own) if known else ()
        if known and all(x is y for x, y in pairs):
            return known.now
        found = [int(_number(x)) for x in own]
        return Counters(*found, *[()] * (len(Counters._fields) - len(found)))


class KindsAsked:
    """What the rules of one traced step have asked, and what they were told.

    Attributes:
        told: The kind for each rule, by its places; `None`: rules are told nothing, so
            that they have conditionals, and learned of.
        rules: The rules found, in the order in which they asked; once the step has
            come back, those of them that a host can count.
        turns: When the parts of all rules meet that asked, counted by a host or not.
    """

    def __init__(self, told: Mapping[Places, int] | None = None):
        self.told = told
        self.rules: list[Rule] = []
        self.turns: list[Turns] = []
        self._given: dict[int, int] = {}
        self._after: dict[Places, Counters] = {}

    @contextlib.contextmanager
    def tracing(self, arrays: Sequence[Any]) -> Iterator[None]:
        """Answer rules that hold some of these arrays, one worker's."""
        self.rules, self.turns, self._after = [], [], {}
        self._given = {id(x): place for place, x in enumerate(arrays)}
        before = asked.set(self)
        try:
            yield
        finally:
            asked.reset(before)

    def kind_of(self, turns: Turns, counters: Counters) -> int | None:
        """The kind of this step for a rule with these counters; `None`: unknown."""
        self.turns.append(turns)
        places = self._places(counters)
        if places is None or any(rule.places == places for rule in self.rules):
            return None
        if self.told is not None:
            return self.told.get(places)
        both = [*self.rules, Rule(places, turns)]
        programs = math.prod(rule.turns.parts + 1 for rule in both)
        if programs <= MOST and _is_of_host(turns, counters):
            self.rules = both
        return None

    def went_on(self, turns: Turns, counters: Counters, after: Counters) -> None:
        """A rule has made these of its counters."""
        if (places := self._places(counters)) is not None:
            self._after[places] = after

    def came_back(self, arrays: Sequence[Any]) -> None:
        """A worker's step has returned these arrays: which rules does a host count?

        Those whose counters came back as the rule has made them.
        """
        self.rules = [
            rule
            for rule in self.rules
            if all(map(operator.is_, rule.counters(arrays), self._after[rule.places]))
        ]
        self._given, self._after = {}, {}  # which would keep what was traced alive

    def _places(self, counters: Counters) -> Places | None:
        """The places of counters among the arrays given; `None` if any has none."""
        found = [self._given.get(id(x)) for x in counters if not isinstance(x, tuple)]
        places = tuple(place for place in found if place is not None)
        return places if len(places) == len(found) else None


def _is_of_host(turns: Turns, counters: Counters) -> bool:
    """Whether a host can read the schedule: one may be of the compiled step alone."""
    zeros = (x if isinstance(x, tuple) else 0 for x in counters)
    try:
        turns.next(Counters(*zeros))
    except TypeError:
        return False
    return True


def _number(x: Any) -> np.ndarray:
    """The number of a counter, also of one that lies on other processes, too."""
    here = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.ravel(np.asarray(here))[0]
