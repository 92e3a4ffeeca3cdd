"""Drawn schedules of a run: each ends, and its center is what workers were told."""

from collections import Counter

from tests.runtime.schedules import MARKS, draw, run

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


def test_many_drawn_schedules():
    judged(range(120, 400))
