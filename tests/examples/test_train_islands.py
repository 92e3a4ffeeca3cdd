"""The example of sharded workers, run as a user runs it."""

import pydoc_data.topics
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_islands.py"


@pytest.mark.slow
def test_it_learns_and_meets_in_a_conditional_only(tmp_path):
    picture = tmp_path / "picture.png"
    printed = scripts.run(EXAMPLE, "--steps", 20, "--out", picture)
    assert printed.endswith(f"\nwrote {picture}\n")
    # All characters alike would be log(103) = 4.6.
    loss = re.search(r"^step 20: .* of the center (.*)$", printed, re.M)
    assert loss is not None
    assert float(loss[1]) < 3.4
    rows = re.findall(r"^│ (\w+) +│ ([\w-]+) +│ ([\d,]+) +│ (.*?) +│$", printed, re.M)
    sent = {(over, kind): (size, when) for over, kind, size, when in rows}
    assert {over for over, _ in sent} == {"workers", "fsdp"}
    # The parameters once, each device its half (and what cannot be halved).
    # The text comes with Python, and so does the size of its alphabet.
    size, when = sent["workers", "all-reduce"]
    # A character has two rows of 64, halved, and a bias, halved where they are even.
    alphabet = len(set("\n".join(pydoc_data.topics.topics.values())))
    biases = alphabet if alphabet % 2 else alphabet // 2
    assert size == f"{208_384 + 4 * (64 * alphabet + biases):,}"
    assert when == "in a conditional"
    assert [key for key in sent if key[0] == "workers"] == [("workers", "all-reduce")]
    assert {when for _, when in sent.values()} == {"in a conditional", "every step"}
    assert imread(picture).shape[:2] == (400, 700)
