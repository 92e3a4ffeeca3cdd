"""The reproduction of DiLoCo, in its short form: all that is not a matter of luck."""

import hashlib
import math
import pydoc_data.topics
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from tests.benchmarks.reading import BENCHMARKS, criterion

SCRIPT = "reproduce_diloco"
STEPS, PERIODS, SEEDS = 200, (10, 50), 2
DILOCO = [f"DiLoCo, H={period}" for period in PERIODS]
MILDER = [f"DiLoCo 1.0/0.5, H={period}" for period in PERIODS]
AVERAGING = [f"averaging, H={period}" for period in PERIODS]

pytestmark = pytest.mark.slow


def test_it_writes_a_page_with_a_picture(folder, page, found):
    assert "2.9 %" in page and "simulated" in page
    assert imread(folder / "reproduce_diloco.png").shape[:2] == (528, 1155)
    losses, rates = found["tables"]
    apart = [row for name in DILOCO for row in (name, f"{name}, non-iid")]
    rest = [*MILDER, *AVERAGING, "data parallel", "1 worker"]
    assert [row[0] for row in losses["rows"]] == [*apart, *rest]
    assert [row[0] for row in rates["rows"]] == [*DILOCO, *rest]


def test_it_names_the_text(found):
    text = "\n".join(pydoc_data.topics.topics.values())
    facts = found["data"]["facts"]
    assert facts["length"] == len(text)
    assert facts["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert facts["alphabet"] == len(set(text))
    assert 0.5 * len(text) < facts["kept"] < len(text)


def test_bytes_are_those_of_the_parameters_once_a_round(found):
    alphabet = found["data"]["facts"]["alphabet"]
    layers = (alphabet * 16, 12 * 16 * 272, 272, 272 * alphabet, alphabet)
    size = 4 * sum(layers)
    assert found["data"]["parameters"] == sum(layers)
    expected = {name: [0, size] for name in (*DILOCO, *MILDER, *AVERAGING)}
    expected |= {"data parallel": [size, 0], "1 worker": [0, 0]}
    assert found["data"]["bytes"] == expected
    rounds = {name: s["rounds"] for name, s in found["data"]["studies"].items()}
    counted = [STEPS // period for period in PERIODS]
    assert [rounds[name] for name in DILOCO] == counted
    assert [rounds[name] for name in AVERAGING] == counted
    sent = {row[0]: row[-1] for row in found["tables"][0]["rows"]}
    assert sent["data parallel"] == STEPS * size
    for period, *names in zip(PERIODS, DILOCO, MILDER, AVERAGING, strict=True):
        assert {sent[name] * period for name in names} == {STEPS * size}
    assert criterion(found, "bytes per step")["met"]


def test_an_outer_sgd_of_rate_1_is_averaging(found):
    assert found["data"]["differences"] == {"10": 0}
    assert criterion(found, "DiLoCo by SGD(1)")["met"]


def test_every_method_learns_and_is_a_method_of_its_own(found):
    studies = found["data"]["studies"]
    losses = {name: studies[name]["iid"] for name in studies}
    losses |= {f"{name}, non-iid": studies[name]["non-iid"] for name in DILOCO}
    uniform = math.log(found["data"]["facts"]["alphabet"])
    for of_seeds in losses.values():
        assert len(of_seeds) == SEEDS
        assert all(2 < loss < 0.75 * uniform for loss in of_seeds)
    # No two methods, and no two seeds, have done the same.
    assert len({loss for of_seeds in losses.values() for loss in of_seeds}) == 2 * 10
    # Four times the data help, whatever the seed.
    for name in (*AVERAGING, "data parallel"):
        assert np.all(np.array(losses[name]) < losses["1 worker"])


def test_criteria_say_what_the_losses_say(found):
    studies = found["data"]["studies"]

    def worse(losses, than):
        return 100 * (np.array(losses) / np.array(than) - 1).mean()

    for name, allowed in zip(DILOCO, (1, 3), strict=True):
        ours, kept = studies[name], studies["data parallel"]["iid"]
        assert criterion(found, f"{name}: at most")["met"] == (
            worse(ours["iid"], kept) <= allowed
        )
        assert criterion(found, f"{name}: non-iid")["met"] == (
            worse(ours["non-iid"], ours["iid"]) <= 2
        )
    # No period has had the rounds that an outer momentum needs.
    assert not [c for c in found["criteria"] if "beats" in c["criterion"]]


def test_rates_are_tried_past_the_best_on_both_sides():
    # In a process of its own: the script gives JAX one thread when it is imported.
    code = """
from math import log2
from reproduce_diloco import try_rates
for best in (0, 2, -1):
    found = try_rates(lambda rate: abs(log2(rate / 2e-3) - best))
    print([round(log2(rate / 2e-3)) for rate in sorted(found)])
"""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[-1, 0, 1]\n[0, 1, 2, 3]\n[-2, -1, 0, 1]\n"
