# SPDX-License-Identifier: Apache-2.0
"""Conditionals of a round, which carry only the fields that may change."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from optx_sync.center.fragments import Whole
from optx_sync.center.worker import Center, Worker
from optx_sync.comm.varying import vary_like
from optx_sync.metrics import SharedInfo
from optx_sync.placement import memory
from optx_sync.trees import Tree, is_nothing


class Now(NamedTuple):
    """What a round may change: the operands and results of its conditionals."""

    worker: Worker
    center: Center
    pending: Any  # with `delay`, what is on its way: `Pending` or `Outgoing`; or ()
    exchange: Tree  # what the exchange remembers, for each part
    info: SharedInfo
    # Of this round alone. `None` where all contributions count the same.
    weight: Any  # float[], this worker's
    # `None` without `drop_nonfinite`.
    well: Any  # bool[], whether this worker is finite


class Fields(NamedTuple):
    """The fields of worker and center in a round, or a mark for each of them."""

    params: Any = False
    inner: Any = False
    taken: Any = False
    accumulated: Any = False
    center: Any = False
    outer: Any = False
    exchange: Any = False

    def __or__(self, other: "Fields") -> "Fields":
        """The marks of both."""
        return Fields(*(x or y for x, y in zip(self, other, strict=True)))

    def over(self, others: "Fields", marks: "Fields") -> "Fields":
        """These fields where they are marked, elsewhere the others."""
        return Fields(
            *(x if m else y for x, y, m in zip(self, others, marks, strict=True))
        )

    def put(self, now: Now) -> Now:
        """A round with these fields."""
        worker = Worker(self.params, self.inner, self.taken, self.accumulated)
        center = Center(self.center, self.outer)
        return now._replace(worker=worker, center=center, exchange=self.exchange)


_NOTHING = Fields(*((),) * len(Fields._fields))
# The fields that change when a part sets out, and when one lands.
SETS_OUT = Fields(accumulated=True, exchange=True)
LANDS = Fields(params=True, taken=True, center=True, outer=True, inner=True)
# The fields that change when a broken worker starts again.
MENDS = Fields(params=True, accumulated=True, inner=True)
# Trees like the parameters are cut into parts, of some fields each part has its own,
# and `inner` is seen whole.
_CUT = Fields("tree", "whole", "tree", "tree", "tree", "each", "each")

Change: TypeAlias = Callable[[Now], Now]


def either(
    due: bool | jax.Array,
    change: Change,
    now: Now,
    changes: Fields = SETS_OUT | LANDS | MENDS,
) -> Now:
    """`change(now)` if due, else `now`; `changes` marks the fields it may change.

    If `due` is a Python bool there is no conditional.
    """

    def changed(given):
        return change(given)._replace(weight=given.weight, well=given.well)

    return _either(due, changed, now, changes)


def in_turn(
    parts: Whole,
    part: int | jax.Array,
    change: Callable[[Now, int], Now],
    now: Now,
    changes: Fields,
) -> Now:
    """Call `change(now, part)` for the part whose turn it is.

    `change` sees this part of what is cut into parts, and the whole of all else. Each
    part has a conditional of its own, which carries only what may change in that part:
    XLA copies whatever several branches of one conditional pass on. While `change`
    runs, center and outer state are on the device, wherever they live.
    """
    change = _with_center_here(change)
    if parts.number == 1:
        return change(now, 0)
    for number in range(parts.number):
        now = _turn(parts, number, part == number, change, now, changes)
    return now


def _turn(
    parts: Whole,
    number: int,
    due: bool | jax.Array,
    change: Callable[[Now, int], Now],
    now: Now,
    changes: Fields,
) -> Now:
    """The turn of one part, if it is due."""

    def of_part(fields, marked):
        """The part of those fields that may change, or of those that may not."""
        return Fields(
            *(
                _of_part(parts, number, how, x) if m == marked else x
                for x, how, m in zip(fields, _CUT, changes, strict=True)
            )
        )

    def changed(seen):
        # What is only read is cut here, and is no operand where nothing reads it.
        return change(of_part(_fields_of(seen), False).put(seen), number)

    whole = _fields_of(now)
    now = _either(due, changed, of_part(whole, True).put(now), changes)
    fields = zip(whole, _CUT, _fields_of(now), changes, strict=True)
    return Fields(
        *(_with_part(parts, number, how, x, v) if m else x for x, how, v, m in fields)
    ).put(now)


def _either(due: bool | jax.Array, change: Change, now: Now, changes: Fields) -> Now:
    """A conditional that carries only fields that may change.

    Each operand takes as long to trace as a step of the round.
    """
    fields = _fields_of(now)

    def changed(given):
        after = change(_fields_of(given).over(fields, changes).put(given))
        return vary_like(_fields_of(after).over(_NOTHING, changes).put(after), given)

    given = fields.over(_NOTHING, changes).put(now)
    if isinstance(due, bool):
        after = changed(given) if due else given
    else:
        after = jax.lax.cond(due, changed, lambda same: same, given)
    return _fields_of(after).over(fields, changes).put(after)


def _fields_of(now: Now) -> Fields:
    center, outer = now.center
    return Fields(
        **now.worker._asdict(), center=center, outer=outer, exchange=now.exchange
    )


def _of_part(parts: Whole, part: int, how: str, field: Tree) -> Tree:
    if how == "tree":
        return parts.pick(field, part)
    return field if how == "whole" or is_nothing(field) else field[part]


def _with_part(parts: Whole, part: int, how: str, field: Tree, value: Tree) -> Tree:
    if how == "tree":
        return parts.put(field, part, value)
    if how == "whole" or is_nothing(field):
        return value
    return (*field[:part], value, *field[part + 1 :])


def _with_center_here(
    change: Callable[[Now, int], Now],
) -> Callable[[Now, int], Now]:
    """The change, with the center moved to the device before it and back after it."""

    def here(now: Now, part: int) -> Now:
        if not memory.is_on_host(now.center):
            return change(now, part)
        after = change(now._replace(center=memory.on_device(now.center)), part)
        return after._replace(center=memory.like(after.center, now.center))

    return here
