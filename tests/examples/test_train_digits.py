"""The demo, run as a user runs it, for fewer steps."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
STEPS = 200
# Kernels and biases of 64-64-10, in float32: what one exchange sends.
EXCHANGE = 4 * (64 * 64 + 64 + 64 * 10 + 10)
ROUNDS = {
    "one device": 0,
    "cross_shard": STEPS,
    "elastic_average": STEPS // 10,
    "agn": STEPS // 10,
    "local_sgd": STEPS // 10,
    "diloco": STEPS // 20,
    "streaming diloco": STEPS // 5,
    "gossip": STEPS // 10,
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The table's cells of each strategy, and where the picture is."""
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    arguments = "--steps", STEPS, "--out", picture
    printed = scripts.run(EXAMPLE, *arguments, folder=picture.parent)
    assert printed.endswith(f"\nwrote {picture}\n")
    lines = [line.strip("│┃ ") for line in printed.splitlines()]
    rows = [re.split(r"\s*[│┃]\s*", line) for line in lines if re.search("[│┃]", line)]
    titles = ["strategy", "test accuracy", "steps", "rounds", "bytes sent", "seconds"]
    assert rows[0] == titles
    return {name: cells for name, *cells in rows[1:]}, picture


def test_every_strategy_learns_and_only_rounds_are_paid_for(demo):
    table, _ = demo
    assert list(table) == list(ROUNDS)
    for name, (accuracy, steps, rounds, sent, seconds) in table.items():
        # Chance is 10 %. AGN's center makes one step per round and comes last.
        mean, half_the_range = map(float, accuracy.split("% ± "))
        assert mean >= (88 if name == "agn" else 93), name
        assert 0 < half_the_range < 3  # seeds differ
        assert int(steps) == STEPS and float(seconds) >= 0
        assert int(rounds) == ROUNDS[name]
        share = int(sent.replace(",", "")) / max(EXCHANGE * ROUNDS[name], 1)
        if name == "streaming diloco":  # a fourth, in 4 bits: there and back
            assert 0.1 < 4 * share < 0.2
        else:
            assert share == (name != "one device"), name


def test_replicas_train_as_one_device_does(demo):
    one, eight = (float(demo[0][n][0][:4]) for n in ("one device", "cross_shard"))
    # Same batches, other order of summation: at most two of 360 images differ.
    assert abs(one - eight) < 0.7


def test_draws_a_picture(demo):
    image = imread(demo[1])[..., :3]
    assert image.shape == (675, 1200, 3)
    # A line for each strategy that sends: in a label a colour has few pixels.
    for colour in rcParams["axes.prop_cycle"].by_key()["color"][: len(ROUNDS) - 1]:
        assert np.isclose(image, to_rgb(colour), atol=0.02).all(-1).sum() > 700
