"""The example with late and broken replicas, run as a user runs it."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_stragglers.py"
STEPS = 60


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """{run: (accuracy, updates)}, and the picture."""
    picture = tmp_path_factory.mktemp("example") / "picture.png"
    arguments = "--steps", STEPS, "--out", picture
    printed = scripts.run(EXAMPLE, *arguments, folder=picture.parent)
    assert printed.endswith(f"\nwrote {picture}\n")
    lines = re.findall(r"^(.*): (.*)% after (\d+) updates$", printed, re.M)
    return {name: (float(a), int(updates)) for name, a, updates in lines}, picture


def test_faults_cost_some_updates_and_no_accuracy(example):
    runs, _ = example
    accuracy, updates = runs["sync_replicas, no faults"]
    assert updates == STEPS
    with_faults, fewer = runs["sync_replicas, faults"]
    assert STEPS // 2 < fewer < STEPS
    assert with_faults > 90
    assert abs(with_faults - accuracy) < 4


def test_plain_mean_is_lost(example):
    runs, _ = example
    # Chance is 10 %.
    assert runs["cross_shard, faults"][0] < 20


def test_every_outcome_is_drawn(example):
    _, picture = example
    image = imread(picture)[..., :3]
    # used, stale, nonfinite, not_contributed; in the legend alone about 500 pixels.
    for colour in ("#a8d5ba", "#f2b134", "#c8323c", "#4a4e69"):
        assert np.isclose(image, to_rgb(colour), atol=0.01).all(-1).sum() > 2000
