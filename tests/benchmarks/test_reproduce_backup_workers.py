"""The reproduction of backup workers, run as a user runs it, in its short form."""

import math

import numpy as np
import pytest
from scipy import stats

SCRIPT = "reproduce_backup_workers"
MACHINES, SPARES = 100, (0, 20, 80)


@pytest.mark.slow
def test_what_is_arithmetic_is_met(found):
    never, faster, exact, taken, least = found["criteria"]
    for one in (never, faster, exact, taken):
        assert one["met"], one
    assert never["found"].startswith("longer in 0 of 25,200 draws")
    assert taken["found"].startswith("0 of 72,000 gradients")
    assert exact["found"].startswith("of 72 arrays")
    assert least["criterion"].startswith("the time to 80% is least")


def expected_seconds(law, spare):
    """The mean of the (100 - b)-th smallest of 100 times, by formulas."""
    if law == "1 + exponential":
        return 1 + 0.3 * sum(1 / k for k in range(spare + 1, MACHINES + 1))
    if law == "Pareto":
        gammas = (MACHINES + 1, -0.4 + spare + 1), (spare + 1, MACHINES + 1 - 0.4)
        (a, b), (c, d) = ([math.lgamma(x) for x in pair] for pair in gammas)
        return math.exp(a + b - c - d)
    seconds = np.linspace(0, 60, 60_001)
    slow, fast = (stats.lognorm(0.3, scale=scale) for scale in (10, 1))
    below = 0.98 * fast.cdf(seconds) + 0.02 * slow.cdf(seconds)
    later = stats.binom.cdf(MACHINES - spare - 1, MACHINES, below)
    return np.trapezoid(later, seconds)


@pytest.mark.slow
def test_steps_take_what_order_statistics_say(found):
    table = found["tables"][0]
    assert len(table["rows"]) == 15
    means = np.array(found["data"]["step_seconds"])  # [law, seed, b]
    assert means.shape == (3, 2, 21)
    for row in table["rows"]:
        law, spare, seconds, gain, _, carried_on = row
        # A few hundred draws, and the largest of Pareto has a heavy tail.
        expected = expected_seconds(law, spare)
        close = 0.15 if spare == 0 else 0.05
        assert float(seconds.split()[0]) == pytest.approx(expected, rel=close), row
        assert float(gain.split()[0]) >= 1
        # To end a batch that is late never helps.
        assert float(carried_on.split()[0]) >= float(seconds.split()[0]) - 0.01


@pytest.mark.slow
def test_spare_machines_save_simulated_time(found):
    times = np.array(found["data"]["seconds"])  # [law, b, seed]
    updates = np.array(found["data"]["updates"])
    assert times.shape == updates.shape == (3, len(SPARES), 2)
    assert (times[:, 1] < 0.8 * times[:, 0]).all()
    assert ((updates[:, :2] >= 3) & (updates[:, :2] <= 40)).all()
    assert (updates[:, 2] > updates[:, 0]).all()  # 20 gradients instead of 100


def test_late_machines(script):
    # One of two is enough. The second one is busy until 10, then hands in at 11 what it
    # began at 10, while the first one needs 5 for its tenth step.
    times = np.ones((12, 2))
    times[0, 1], times[10, 0] = 10, 5
    assert script.giving_up(times, 1).tolist() == [1] * 12
    assert script.carrying_on(times, 1).tolist() == [1] * 12
    # Both are needed: the last one counts, and nobody is late.
    both = script.giving_up(times, 0)
    assert both.tolist() == [10, *[1] * 9, 5, 1]
    assert script.carrying_on(times, 0).tolist() == both.tolist()
    # Two of three are enough, and one is late by two steps: the others are waited for.
    times = np.array([[1.0, 1, 3], [1, 2, 1], [1, 2, 1], [2, 2, 1]])
    assert script.giving_up(times, 1).tolist() == [1, 1, 1, 2]
    # Until 3 the third one is away. The third step begins at 3.
    assert script.carrying_on(times, 1).tolist() == [1, 2, 1, 2]


def test_the_events_of_a_step_are_in_order(script):
    times, (_, schedule, rows, validation, test) = script.make(0, "Pareto", 5)
    assert times.min() >= 1
    for of_step, order in zip(times, schedule.reshape(5, MACHINES), strict=True):
        assert (np.diff(of_step[order]) >= 0).all()
        assert sorted(order) == list(range(MACHINES))
    everywhere = np.concatenate([validation, test])
    assert len(np.unique(everywhere)) == 720
    assert not np.isin(rows, everywhere).any()


def test_the_first_time(script):
    curves = np.array([[0.1, 0.8, 0.7, 0.9], [0.1, 0.2, 0.3, 0.4]])
    seconds = np.array([1.5, 3.0, 4.5, 6.0])
    when, updates = script.first_time(curves, seconds, 0.8)
    assert when.tolist() == [3.0, np.inf]
    assert updates.tolist() == [2, np.inf]
