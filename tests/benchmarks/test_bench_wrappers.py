"""Wrappers beside steps by hand, run as a user runs it, in its short form."""

import importlib.util
import math
import re
import statistics
import textwrap

import numpy as np
import pytest

from optx_sync import hlo
from tests.benchmarks.reading import criterion, table

SCRIPT = "bench_wrappers"
SUMS = "sync_replicas, accumulating"
CENTERS = ("local_sgd", "diloco", "agn", "elastic_average", "elastic_average, penalty")
CASES = ("cross_shard", "sync_replicas", SUMS, *CENTERS)
SETTING, PERIOD, DEVICES = "perceptron, 2 devices", 5, 2
BYTES = 4 * 2 * (128 * 128 + 128)  # two layers of 128 units, float32
pytestmark = pytest.mark.slow


def rows(found, start):
    """The rows of the one table whose title starts so, cells by their columns."""
    one = table(found, start)
    return [dict(zip(one["columns"], row, strict=True)) for row in one["rows"]]


def numbers(text, sign="/"):
    """Numbers of a cell, NaN where there is none."""
    parts = [part.strip().replace(",", "") for part in text.split(sign)]
    return [math.nan if part == "-" else float(part) for part in parts]


def test_every_case_is_judged_by_its_times(found):
    shown = {row["quiet / round / period"]: row for row in rows(found, SETTING)}
    assert tuple(shown) == CASES
    for name in CASES:
        times = found["data"][f"{name}, {SETTING}"]
        arms = {arm: np.array(of_arm) for arm, of_arm in times.items()}
        assert arms["by hand"].shape == arms["library"].shape == (2, PERIOD)
        assert all(np.all((of > 0) & (of < 10_000)) for of in arms.values())
        for arm, column in (
            ("library", "library / by hand"),
            ("by hand again", "noise"),
        ):
            over, under = arms[arm], arms["by hand"]
            if name in ("cross_shard", "sync_replicas"):
                pairs = [None, over / under, over / under]
            else:
                quiet = over[:, :4] / under[:, :4]
                pairs = [quiet, over[:, 4] / under[:, 4], over.sum(1) / under.sum(1)]
            for ratios, cell in zip(pairs, numbers(shown[name][column]), strict=True):
                if ratios is None:
                    assert math.isnan(cell)
                else:
                    expected = statistics.median(np.ravel(ratios).tolist())
                    # Two digits are shown, of times that are kept to three.
                    assert cell == pytest.approx(expected, abs=0.02, rel=0.02)
        judged = criterion(found, f"{name}: at most 1.02")
        most = np.nanmax(numbers(shown[name]["library / by hand"]))
        if abs(most - 1.02) > 0.011:
            assert judged["met"] == (most <= 1.02)


def test_library_and_hand_written_steps_agree(found):
    assert criterion(found, "parameters of library and hand-written")["met"]


def test_bytes_of_steps_and_rounds(found):
    programs = rows(found, f"Compiled programs, {SETTING}")
    sent = {(row["case"], row["step"]): row["bytes, quiet / round"] for row in programs}
    flags = 4 * DEVICES
    for name in CASES:
        quiet = BYTES if name == "cross_shard" else flags if "sync" in name else 0
        last = BYTES + (flags if "sync" in name else 0)
        assert numbers(sent[name, "library"]) == [quiet, last]
        by_hand = BYTES if name in CASES[:2] else 0
        assert numbers(sent[name, "by hand"]) == [by_hand, BYTES]
    for name in CENTERS:
        assert numbers(sent[name, "library, vmap"]) == [0, BYTES]
    assert numbers(sent[SUMS, "optax.MultiSteps"]) == [BYTES, BYTES]
    assert criterion(found, "as many bytes per step")["met"]
    assert criterion(found, "bytes per step exactly 1 / period")["met"]


def test_what_programs_write_and_hold(found):
    for row in rows(found, f"Compiled programs, {SETTING}"):
        arguments, aliased, temporary = numbers(row["arguments / aliased / temporary"])
        # All that is carried is donated; the batch is not.
        assert aliased <= arguments <= aliased + 0.2
        assert 1 <= temporary < 6
        quiet, last = numbers(row["fusions, quiet / round"])
        assert 1 <= quiet <= last < 15
        assert all(0 <= copies < 10 for copies in numbers(row["copies, quiet / round"]))
    # Adam of the parameters alone: three fusions, for two moments and the update.
    first, second = rows(found, f"Compiled programs, {SETTING}")[:2]
    assert first["case"] == second["case"] == "cross_shard"
    for row in (first, second):
        assert numbers(row["fusions, quiet / round"]) == [3, 3]
        assert numbers(row["copies, quiet / round"]) == [0, 0]


def test_arrays_are_counted_where_they_are_written(module):
    program = hlo.read(
        textwrap.dedent("""
                %fused (p: f32[4,4]) -> f32[4,4] {
                  ROOT %c = f32[4,4]{1,0} copy(%p)
                }
                %first (t: (f32[4,4])) -> (f32[4,4]) {
                  %a = f32[4,4]{1,0} copy(%t)
                  ROOT %r = (f32[4,4]{1,0}) tuple(%a)
                }
                %second.1 (t: (f32[4,4])) -> (f32[4,4]) {
                  %a = (f32[4,4]{1,0}, f32[15]{0}) fusion(%t), kind=kLoop, calls=%fused
                  ROOT %r = f32[1,16]{1,0} fusion(%a), kind=kLoop, calls=%fused
                }
                ENTRY %main (p: f32[4,4]) -> f32[4,4] {
                  %f = f32[4,4]{1,0} fusion(%p), kind=kLoop, calls=%fused
                  %small = f32[15]{0} fusion(%p), kind=kLoop, calls=%fused
                  %c = (f32[4,4]{1,0}) conditional(%i, %f, %f), \
                    branch_computations={%first, %second.1}
                  ROOT %o = f32[4,4]{1,0} copy(%c)
                }
        """)
    )

    written = module("programs").written(program, 16)
    assert written == {
        "quiet fusion": 1,
        "quiet copy": 2,
        "round fusion": 3,
        "round copy": 1,
    }


def test_peers(found):
    beside = {(row["case"], row["peer"]): row for row in rows(found, "Beside peers")}
    row = beside[f"{SUMS}, {SETTING}", "optax.MultiSteps"]
    assert row["the peer's"] == BYTES
    assert row["bytes per step"] == round(BYTES / PERIOD) + 4 * DEVICES
    installed = importlib.util.find_spec("drjax") is not None
    for name in ("local_sgd", "diloco"):
        assert ((f"{name}, {SETTING}", "DrJAX") in beside) == installed
        if installed:
            row = beside[f"{name}, {SETTING}", "DrJAX"]
            assert row["bytes per step"] == row["the peer's"] == round(BYTES / PERIOD)
    rounds = rows(found, f"{PERIOD} steps and an exchange in one program, {SETTING}")
    written = {"by hand", "by hand again", "library"} | (
        {"DrJAX"} if installed else set()
    )
    assert {row["written"] for row in rounds} == written
    assert all(
        re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", row["ms"]) for row in rounds
    )
