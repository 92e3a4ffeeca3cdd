"""The reproduction of elastic averaging in its short form, and its own parts."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests.benchmarks.reading import criterion

SCRIPT = "reproduce_elastic_averaging"
METHODS = ["DOWNPOUR", "EASGD", "EAMSGD", "AGN", "local SGD"]
PERIODS = [1, 4, 16, 64]
STEPS, PARAMETERS = 128, 64 * 64 + 64 + 64 * 10 + 10


def columns_of(found, number):
    """A table's columns, by their titles."""
    table = found["tables"][number]
    rows = zip(*table["rows"], strict=True)
    return dict(zip(table["columns"], rows, strict=True))


@pytest.mark.slow
def test_writes_a_page_and_pictures(folder, page):
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {f"{SCRIPT}_{of}.png" for of in ("tau", "bytes", "stability")}
    assert "**simulated**" in page


@pytest.mark.slow
def test_errors_of_every_method_and_period(found):
    errors = columns_of(found, 1)
    assert list(errors) == ["", *METHODS, "MB of a worker"]
    assert list(errors[""]) == [f"p = 4, tau = {period}" for period in PERIODS]
    sent = [f"{8e-6 * PARAMETERS * STEPS / period:.3f}" for period in PERIODS]
    assert list(errors["MB of a worker"]) == sent
    means = {}
    for name in METHODS:
        cells = [re.fullmatch(r"(.+) ± (.+) \((.+)\)", cell) for cell in errors[name]]
        means[name] = [float(cell[1]) for cell in cells if cell]
        assert len(means[name]) == len(PERIODS)
    for name in ("EASGD", "EAMSGD", "local SGD"):
        assert 0 < min(means[name]) and max(means[name]) < 25  # chance is 90
    for period in (2, 3):
        assert means["DOWNPOUR"][period] > 1.5 * means["EASGD"][period]
    # A push of AGN is divided by tau, one of local SGD by p.
    assert means["AGN"][1] == pytest.approx(means["local SGD"][1], abs=2)
    assert means["AGN"][3] > 3 * means["local SGD"][3]
    assert errors["AGN"][0] == errors["DOWNPOUR"][0]


@pytest.mark.slow
def test_what_must_hold_however_short_the_run(found):
    for begins in ("The paper's form is stable", "Three turns of", "AGN with tau = 1"):
        assert criterion(found, begins)["met"]
    largest = columns_of(found, 2)
    rates = {name: [float(x) for x in largest[name][:3]] for name in METHODS}
    assert rates["DOWNPOUR"][2] < rates["DOWNPOUR"][0] < rates["EASGD"][0]
    assert rates["EASGD"] == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_as_many_stable_points_as_the_paper_says(found):
    eta, alpha = np.meshgrid(np.linspace(-0.21, 2.71, 30), np.linspace(-0.11, 1.31, 30))
    bound = (4 - 2 * eta) / (4 - eta)
    stable = int(((eta > 0) & (eta < 2) & (alpha > 0) & (alpha < bound)).sum())
    points = columns_of(found, 0)
    assert set(points["paper's form"]) == {stable}
    assert set(points["other than it says"]) == set(points["only paper's"]) == {0}
    assert min(points["library's form"]) > 2 * stable


def test_turns_are_spread_over_a_period(script):
    schedule = script.turns(4, 16, 32)
    assert np.bincount(schedule).tolist() == [32] * 4
    steps = np.zeros(4, int)
    exchanges = []
    for event, worker in enumerate(schedule):
        steps[worker] += 1
        if steps[worker] % 16 == 0:
            exchanges.append((event, worker))
    assert [worker for _, worker in exchanges] == [0, 1, 2, 3] * 2
    # Four turns apart: of four workers once all have started.
    gaps = np.diff([event for event, _ in exchanges])
    assert gaps[3] == 4 * 4 + 1 - 4  # the last worker of a turn, the first of another
    assert script.turns(3, 1, 2).tolist() == [0, 1, 2, 0, 1, 2]


def test_one_turn_is_the_paper_s_step_of_each_worker(module):
    round_robin = module("elastic_stability").round_robin
    eta, alpha = 0.7, 0.3
    x, center = np.array([1.0, -2.0, 4.0]), 0.5
    cycle = round_robin(np.array(eta), np.array(alpha), 3, simultaneous=True)
    moved = cycle @ np.append(x, center)
    for worker in range(3):
        pull = alpha * (x[worker] - center)
        x[worker] -= eta * x[worker] + pull
        center += pull
    np.testing.assert_allclose(moved, np.append(x, center), rtol=1e-14)


def test_downpour_adds_up_what_the_workers_moved(script):
    schedule = script.turns(3, 4, 8)
    targets = np.array([1.0, -2.0, 4.0], np.float32)
    run = oxs.simulate.asynchronous(
        optax.sgd(0.1),
        script.downpour_rule(),
        jnp.zeros(()),
        lambda worker, params, event: params - jnp.asarray(targets)[worker],
        schedule,
        num_workers=3,
        communication_period=4,
    )
    x, moved, center, expected = np.zeros(3), np.zeros(3), 0.0, []
    steps = np.zeros(3, int)
    for worker in schedule:
        update = -0.1 * (x[worker] - targets[worker])
        x[worker] += update
        moved[worker] += update
        steps[worker] += 1
        if steps[worker] % 4 == 0:
            center += moved[worker]
            x[worker], moved[worker] = center, 0.0
        expected.append(center)
    np.testing.assert_allclose(run.center, expected, rtol=1e-5, atol=1e-6)
