"""The reproduction of AGN, run as a user runs it, in its short form."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs

SCRIPT = "reproduce_agn"
WORKERS, PERIODS, BATCHES = (10, 40), (10, 40), 1600
COMMITS, STEPS = 0, 1


@pytest.mark.slow
def test_one_update_per_commit_is_downpour(found):
    verdicts = {one["criterion"]: one["met"] for one in found["criteria"]}
    assert len(verdicts) == 4
    assert verdicts["with lambda = 1 AGN and DOWNPOUR are the same, bit for bit"]


@pytest.mark.slow
def test_the_center_learns_and_all_methods_commit_alike(found):
    commits, train, test = (
        np.array(found["data"][name]) for name in ("commits", "train", "test")
    )
    # [order, workers, period, method, seed, point]
    assert commits.shape == train.shape == test.shape == (2, 2, 2, 3, 2, 101)
    assert (commits == commits[:, :, :, :1]).all()
    for place, period in enumerate(PERIODS):
        assert (commits[COMMITS, :, place, ..., -1] == BATCHES // period).all()
        # In the other order each worker may be on its way to a commit.
        missing = BATCHES / period - commits[STEPS, :, place, ..., -1]
        assert ((missing >= 0) & (missing < np.array(WORKERS)[:, None, None])).all()
    assert (train[..., 0] < 0.3).all()  # chance is 0.1
    assert (train[COMMITS, 0, 0, ..., -1] > 0.8).all()
    assert (abs(train - test)[..., -1] < 0.1).all()
    # The sum of 10 or 40 updates moves the center by more than their mean, at first.
    assert (train[COMMITS, :, :, 2, :, 5] > train[COMMITS, :, :, 0, :, 5]).all()


@pytest.mark.slow
def test_tables_say_what_the_curves_say(found):
    train, test = (np.array(found["data"][name]) for name in ("train", "test"))
    tables = {table["title"]: table for table in found["tables"]}
    assert len(tables) == 4
    accuracies, others, means, efficiency = tables.values()
    cells = ["10, 10", "10, 40", "40, 10", "40, 40"]
    for table in (accuracies, others, efficiency):
        assert [row[0] for row in table["rows"]] == cells
    last = 100 * np.stack([train, test], 3)[..., -1].mean(-1)
    for order, table in enumerate((accuracies, others)):
        shown = [[float(cell.split()[0]) for cell in row[1:7]] for row in table["rows"]]
        np.testing.assert_allclose(shown, last[order].reshape(4, 6), atol=0.051)
    over = np.linspace(0, 1, 101)
    agn, aeasgd = (np.trapezoid(train[COMMITS, :, :, m], over) for m in (0, 1))
    shown = [float(row[1].split()[0]) for row in efficiency["rows"]]
    np.testing.assert_allclose(shown, (agn / aeasgd).mean(-1).flatten(), atol=6e-4)
    assert [row[0] for row in means["rows"]] == [
        f"{n}, {whose}" for n in WORKERS for whose in ("the paper's", "here")
    ]
    ours = [[float(cell) for cell in row[1:]] for row in means["rows"][1::2]]
    expected = last[COMMITS].mean(1)[..., :2].reshape(2, 4)  # AGN and AEASGD
    np.testing.assert_allclose(ours, expected, atol=0.006)


def by_hand(method, schedule, targets, period, rate):
    """The methods in NumPy, for the gradient x - target of worker's own target."""
    x, summed = np.zeros(len(targets)), np.zeros(len(targets))
    steps, center = np.zeros(len(targets), int), 0.0
    for w in schedule:
        update = -rate * (x[w] - targets[w])
        x[w], summed[w], steps[w] = x[w] + update, summed[w] + update, steps[w] + 1
        if steps[w] % period == 0:
            if method == "AEASGD":
                pull = 0.05 * (x[w] - center)
                x[w], center = x[w] - pull, center + pull
            else:
                center += summed[w] / (period if method == "AGN" else 1)
                x[w], summed[w] = center, 0.0
    return center


@pytest.mark.parametrize("method", ["AGN", "AEASGD", "DOWNPOUR"])
def test_the_methods_are_what_their_papers_say(script, method):
    targets, period, rate = np.array([1.0, -2.0, 4.0, 0.5]), 3, 0.1
    schedule = np.random.default_rng(0).integers(0, 4, 200)
    record = oxs.simulate.asynchronous(
        optax.sgd(rate),
        script.RULES[method],
        jnp.zeros(()),
        lambda worker, params, event: params - jnp.float32(targets)[worker],
        schedule,
        num_workers=4,
        communication_period=period,
    )
    expected = by_hand(method, schedule, targets, period, rate)
    assert abs(expected) > 0.1
    np.testing.assert_allclose(record.center[-1], expected, rtol=1e-5)


def test_orders_and_staleness(script):
    rng = np.random.default_rng(0)
    schedule = script.ORDERS["commits"](rng, 5, 4, 2000)
    blocks = schedule.reshape(500, 4)
    assert (blocks == blocks[:, :1]).all()
    # Whoever commits is drawn: that of a worker after its own is 0 commits old.
    assert np.mean(script.staleness_of(schedule, 4) == 0) == pytest.approx(
        0.2, abs=0.05
    )
    assert script.staleness_of(np.array([0, 1, 0, 0, 1, 1]), 1).tolist() == [
        *(0, 1, 1, 0, 2, 0)
    ]
    round_robin = script.staleness_of(np.arange(60) % 5, 3)
    assert round_robin.tolist() == [0, 1, 2, 3, 4] + [4] * 15


def test_areas(script):
    assert script.areas_of(np.array([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]])).tolist() == [
        *(0.5, 2.0)
    ]
    # Two curves, of 4 and of 8 commits: over the first 4 the second has half its rise.
    commits = np.array([[0.0, 2.0, 4.0], [0.0, 4.0, 8.0]])
    curves = np.array([[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]])
    against = script.against_commits(commits, curves)
    np.testing.assert_allclose(against, [[0, 0.5, 1], [0, 0.25, 0.5]])
