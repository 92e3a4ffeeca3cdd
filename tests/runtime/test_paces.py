"""Who is slow is said once a minute: beside the others, and beside its own best."""

import itertools
from typing import Any

import pytest

from optx_sync.runtime import Event
from optx_sync.runtime.paces import Paces
from optx_sync.runtime.system import System, using


class Clock(System):
    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds


@pytest.fixture(name="clock")
def clock_here():
    with using(clock := Clock()):
        yield clock


def pushes(worker, pace, begin=0.0, step=0, period=10, rounds=8, **more):
    """Pushes of a worker that makes a step in so many seconds."""
    return [
        Event(
            "push", worker, n + 1, step + n * period, 0, 0,
            begin + n * (period * pace + more.get("seconds", 0.0)), {},
        )._replace(**more)
        for n in range(rounds)
    ]  # fmt: skip


def told(paces, *of_workers):
    """Their scores in the end, rounded; events come as they happen."""
    scores: dict[int, Any] = {}
    events = itertools.chain(*of_workers)
    for event in sorted(events, key=lambda event: event.time):
        scores |= paces.add([event])
    return {w: tuple(round(x, 2) for x in of) for w, of in sorted(scores.items())}


def test_one_that_is_half_as_fast_as_the_others_is_told_once_a_minute(clock, caplog):
    paces = Paces()
    three = [pushes(worker, 0.1 + 0.1 * (worker == 2)) for worker in range(3)]
    assert told(paces, *three) == {0: (1.5, 1.0), 1: (1.5, 1.0), 2: (0.5, 1.0)}
    said = [
        "worker 2 is slow: 0.2 s a step, 0.50 of the others' pace, 1.00 of its own best"
    ]
    assert caplog.messages == said
    clock.seconds = 61.0
    told(paces, pushes(2, 0.2, begin=100.0, step=200))
    assert caplog.messages == said * 2


def test_one_that_has_become_slower_than_it_was_is_told(caplog, clock):
    paces = Paces()
    before, after = pushes(0, 0.1), pushes(0, 0.2, begin=9.0, step=80)
    assert told(paces, before, after) == {0: (1.0, 0.5)}
    (said,) = caplog.messages
    assert said.endswith("0.2 s a step, 1.00 of the others' pace, 0.50 of its own best")
    # Another process in its place has no better days behind it.
    join = before[0]._replace(kind="join", time=29.0)
    again = pushes(0, 0.2, begin=30.0, step=80)
    assert told(paces, [join], again) == {0: (1.0, 1.0)}


def test_two_slow_rounds_are_no_news(caplog, clock):
    paces = Paces()
    stopped = [event._replace(time=event.time + 30.0) for event in pushes(1, 0.1)[4:]]
    slow = [pushes(0, 0.1), pushes(1, 0.1)[:4] + stopped]
    assert told(paces, *slow) == {0: (1.0, 1.0), 1: (1.0, 1.0)} and not caplog.messages
    late = pushes(1, 0.3, begin=40.0, step=80, rounds=4)
    told(paces, late)
    assert not caplog.messages


def test_seconds_in_which_a_worker_waits_for_others_are_not_its_own(clock):
    """Who is fast waits two seconds a round for who is slow, unless it goes on."""
    fast, slow = pushes(0, 0.1, seconds=2.0), pushes(1, 0.3)
    assert told(Paces(), fast, slow) == {0: (3.0, 1.0), 1: (0.33, 1.0)}
    assert told(Paces(stands=False), fast, slow) == {0: (1.0, 1.0), 1: (1.0, 1.0)}


def test_parts_in_turn_and_dropped_pushes_count(clock):
    """The clocks of two servers may differ: a part is compared with itself."""
    turns = []
    for part in (0, 1):
        of_part = pushes(0, 0.1, begin=1e3 * part, step=5 * part, part=part)
        turns += [event._replace(kind="dropped") for event in of_part]
    assert told(Paces(), turns, pushes(1, 0.05)) == {0: (0.5, 1.0), 1: (2.0, 1.0)}
