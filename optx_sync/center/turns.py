# SPDX-License-Identifier: Apache-2.0
"""Conditionals of a round, which carry only the fields that may change."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeAlias

import jax

from optx_sync.center.fragments import Partition
from optx_sync.center.worker import Center, Worker
from optx_sync.comm.varying import vary_like
from optx_sync.metrics import SharedInfo
from optx_sync.placement import memory
from optx_sync.trees import Tree


class Now(NamedTuple):
    """What a round may change: the operands and results of its conditionals."""

    worker: Worker
    center: Center
    pending: Any  # with `delay`, what is on its way: `Pending` or `Outgoing`; or ()
    exchange: Tree  # what the exchange remembers, for each part
    info: SharedInfo
    # Of this round alone. `None` where all contributions count the same.
    weight: Any  # float[], this worker's
    well: Any  # bool[], whether this worker is finite; () without `drop_nonfinite`


# The fields of worker, center and exchange that change when a part sets out, and when
# one lands.
SETS_OUT = frozenset({"accumulated", "exchange"})
LANDS = frozenset({"params", "taken", "value", "outer", "inner"})
# Those that change when a broken worker starts again.
MENDS = frozenset({"params", "accumulated", "inner"})
_ALL = SETS_OUT | LANDS
# Trees like the parameters are cut into parts, of some fields each part has its own,
# and `inner` is seen whole.
_CUT = {"params", "taken", "accumulated", "value"}
_OF_EACH_PART = {"outer", "exchange"}

Change: TypeAlias = Callable[[Now], Now]


def either(
    due: bool | jax.Array, change: Change, now: Now, changes: Set[str] = _ALL
) -> Now:
    """`change(now)` if due, else `now`; `changes` names the fields it may change.

    If `due` is a Python bool there is no conditional.
    """

    def changed(given):
        return change(given)._replace(weight=given.weight, well=given.well)

    return _either(due, changed, now, changes)


def in_turn(
    parts: Partition,
    part: int | jax.Array,
    change: Callable[[Now, int], Now],
    now: Now,
    changes: Set[str],
) -> Now:
    """Call `change(now, part)` for the part whose turn it is.

    `change` sees this part of what is cut into parts, and the whole of all else. Each
    part has a conditional of its own, which carries only what may change in that part:
    XLA copies whatever several branches of one conditional pass on. While `change`
    runs, center and outer state are on the device, wherever they live.
    """
    change = _with_center_here(change)
    for number in range(parts.number):
        now = _turn(parts, number, part == number, change, now, changes)
    return now


def _turn(
    parts: Partition,
    number: int,
    due: bool | jax.Array,
    change: Callable[[Now, int], Now],
    now: Now,
    changes: Set[str],
) -> Now:
    """The turn of one part, if it is due."""
    whole = _fields_of(now)

    def pick(name, x):
        if name in _CUT:
            return parts.pick(x, number)
        return parts.of_each(x, number) if name in _OF_EACH_PART else x

    def put(name, x):
        if name in _CUT:
            return parts.put(whole[name], number, x)
        return parts.with_each(whole[name], number, x) if name in _OF_EACH_PART else x

    def changed(seen):
        # What is only read is cut here, and is no operand where nothing reads it.
        return change(_over(pick, seen, _ALL - changes), number)

    after = _either(due, changed, _over(pick, now, changes), changes)
    return _over(put, after, changes)


def _either(due: bool | jax.Array, change: Change, now: Now, changes: Set[str]) -> Now:
    """A conditional that carries only fields that may change.

    Each operand takes as long to trace as a step of the round.
    """
    fields, fixed = _fields_of(now), _ALL - changes

    def seen(given):
        return _over(lambda name, _: fields[name], given, fixed)

    def carried(seen):
        return _over(lambda *_: (), seen, fixed)

    def changed(given):
        return vary_like(carried(change(seen(given))), given)

    given = carried(now)
    if isinstance(due, bool):
        after = changed(given) if due else given
    else:
        after = jax.lax.cond(due, changed, lambda same: same, given)
    return seen(after)


def _fields_of(now: Now) -> dict[str, Tree]:
    """The fields of a round that a change may be kept from, by their names."""
    return now.worker._asdict() | now.center._asdict() | {"exchange": now.exchange}


def _over(function: Callable[[str, Tree], Tree], now: Now, names: Set[str]) -> Now:
    """The round with `function(name, field)` of its fields of these names."""
    found = {
        name: function(name, x) if name in names else x
        for name, x in _fields_of(now).items()
    }
    return now._replace(
        worker=Worker(*(found[name] for name in Worker._fields)),
        center=Center(*(found[name] for name in Center._fields)),
        exchange=found["exchange"],
    )


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
