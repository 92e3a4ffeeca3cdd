"""The example with late and broken replicas, run as a user runs it."""

import re
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_stragglers.py"
STEPS = 60


def test_faults_cost_updates_but_no_accuracy_and_every_outcome_is_drawn(tmp_path):
    arguments = "--steps", STEPS, "--out", tmp_path / "picture.png"
    printed = scripts.run(EXAMPLE, *arguments, folder=tmp_path)
    assert printed.endswith(f"\nwrote {tmp_path / 'picture.png'}\n")
    lines = re.findall(r"^(.*): (.*)% after (\d+) updates$", printed, re.M)
    runs = {name: (float(a), int(updates)) for name, a, updates in lines}
    accuracy, updates = runs["sync_replicas, no faults"]
    assert updates == STEPS
    with_faults, fewer = runs["sync_replicas, faults"]
    assert STEPS // 2 < fewer < STEPS
    assert with_faults > 90 and abs(with_faults - accuracy) < 4
    # The plain mean is lost: chance is 10 %.
    assert runs["cross_shard, faults"][0] < 20
    image = imread(tmp_path / "picture.png")[..., :3]
    # used, stale, nonfinite, not_contributed; in the legend alone about 500 pixels.
    for colour in ("#a8d5ba", "#f2b134", "#c8323c", "#4a4e69"):
        assert np.isclose(image, to_rgb(colour), atol=0.01).all(-1).sum() > 2000
