# SPDX-License-Identifier: Apache-2.0
"""The states that steps gave out, and what the host knows of each without a look at it.

A state is told by its counters, which all workers share: they are the very arrays that
a step gave out, or it is another state, restored or made by hand.
"""

import operator
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.core

from optx_sync.forms import Form
from optx_sync.placement import held
from optx_sync.placement.layout import Arrays


class Known(NamedTuple):
    """What the host knows of a state that a step gave out."""

    form: Form


# Of a state's counters, and not the arrays, which it would keep alive.
_Counters: TypeAlias = tuple[weakref.ReferenceType[jax.Array], ...]


class GivenOut:
    """What is known of the states that steps gave out, as long as they are there."""

    def __init__(self) -> None:
        # By the number of the first counter's object, while that lives.
        self._found: dict[int, tuple[_Counters, Known]] = {}

    def find(self, counters: Sequence[jax.Array]) -> Known | None:
        """What is known of the state with these counters; `None` if it is another."""
        if not counters:
            return None
        given, known = self._found.get(id(counters[0]), ((), None))
        same = len(given) == len(counters) and all(
            map(operator.is_, map(operator.call, given), counters)
        )
        return known if same else None

    def add(self, counters: Sequence[jax.Array], known: Known) -> None:
        """Remember what is known of a state that is given out."""
        if not counters or isinstance(counters[0], jax.core.Tracer):
            return
        number, found = id(counters[0]), self._found
        first = weakref.ref(counters[0], lambda _: found.pop(number, None))
        found[number] = (first, *map(weakref.ref, counters[1:])), known


def counters_of(form: Form, arrays: Arrays) -> tuple[int, ...]:
    """The places of a state's counters among its arrays."""
    found = enumerate(held.leaves(form, arrays))
    return tuple(place for place, leaf in found if leaf.is_counter)
