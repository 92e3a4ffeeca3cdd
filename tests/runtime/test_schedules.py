"""Drawn schedules of a run: each ends, and its center is what workers were told."""

from collections import Counter

import numpy as np
import pytest

import optx_sync as oxs
from optx_sync.runtime import system
from tests.runtime.schedules import INNER, MARKS, PARAMS, RULE, draw, patched, run
from tests.runtime.world import Faults, World

# The settings for which programs are compiled: half of them lease samples.
SETTINGS = 6, 20, 23, 26, 38, 40, 42, 83


def judged(seeds):
    marks: Counter[str] = Counter()
    for seed in seeds:
        run(draw(seed, SETTINGS[seed % len(SETTINGS)]), marks)
    return marks


def test_drawn_schedules_end_and_count_each_step_once():
    """And what is rare was seen: else the schedules say less than they seem to."""
    marks = judged(range(120))
    assert not [mark for mark in MARKS if not marks[mark]], marks


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_whose_push_takes_longer_than_the_timeout_is_not_killed(
    meets, servers
):
    """It says meanwhile that it is there."""
    world = World(0)
    world.faults = Faults(bytes_a_second=800.0)  # ten seconds and more for a push
    down = {name: value - 1.0 for name, value in PARAMS.items()}

    def train(worker):
        while worker.local_step < (60 if meets else 6):
            system.here().sleep(0.5)
            worker.step(down)

    def main():
        return oxs.runtime.run(
            train, PARAMS, INNER, RULE, num_workers=2, num_servers=servers,
            communication_period=2, delay=1 if meets else 0,
            meet=oxs.runtime.quorum(2) if meets else None,
            worker_timeout=4.0, checkpoint_dir="/nowhere/run",
        )  # fmt: skip

    with patched(world):
        _, history = world.run(main)
    assert not history.count("lost") and world.seconds > 20.0
    assert history.count("push") + history.count("dropped") >= 4


# Seeds and their settings that have found a defect, or find it again where its mend is
# taken back (docs/reference/schedules.md), and that are not among the first.
FOUND = (72, 42), (140, 38), (366, 6), (520, 6), (714, 23), (25161, 51), (63456, 6)


def test_schedules_that_have_found_a_defect():
    for seed, settings in FOUND:
        run(draw(seed, settings))


def test_a_worker_pulls_from_servers_of_unlike_numbers_of_parts():
    params = {name: np.zeros(2, np.float32) for name in "abc"}
    downs = {name: np.full(2, -1.0, np.float32) for name in "abc"}

    def train(worker):
        while worker.local_step < 6:
            worker.step(downs)
            if worker.local_step == 3:
                worker.pull()
        assert not worker.lost

    with oxs.testing.virtual_cluster():
        center, _ = oxs.runtime.run(
            train, params, INNER, RULE, num_workers=1, num_servers=2,
            communication_period=3, fragments=lambda path, _: "abc".index(path[0].key),
        )  # fmt: skip
    np.testing.assert_array_equal(center["c"], 6.0)


def test_many_drawn_schedules():
    judged(range(120, 400))
