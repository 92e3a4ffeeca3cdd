"""What grows with what, run as a user runs it, in its short form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_scale.py"
NAMES = ("cross_shard", "sync_replicas, accumulating", "local_sgd", "diloco")
DEVICES, LEAVES = (2, 8), (10, 30)
BYTES = 4 * 1_000_000
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What it wrote."""
    folder = tmp_path_factory.mktemp("scale")
    finished = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, "--quick", "--out", folder],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    for name in ("bench_scale.md", "bench_scale_leaves.png", "bench_scale_periods.png"):
        assert (folder / name).stat().st_size > 1000
    return json.loads((folder / "bench_scale.json").read_text())


def table(found, start):
    """The columns and rows of a table."""
    (one,) = (t for t in found["tables"] if t["title"].startswith(start))
    return one["columns"], one["rows"]


def criterion(found, start):
    """The one criterion that starts so."""
    (one,) = (c for c in found["criteria"] if c["criterion"].startswith(start))
    return one


def test_a_worker_does_not_see_how_many_there_are(found):
    for devices in DEVICES:
        of_number = found["data"]["devices"][str(devices)]
        assert [(row["name"], row["arm"]) for row in of_number] == [
            (name, arm) for name in NAMES for arm in ("library", "by hand")
        ]
        for row in of_number:
            quiet, last = row["every step"], row["round"]
            if row["name"] == "cross_shard":
                assert (quiet, last) == (BYTES, 0)
            else:
                flags = row["name"].startswith("sync") and row["arm"] == "library"
                assert (quiet, last) == (4 * devices * flags, BYTES)
            # Parameters, two moments and a gradient at least, and two centers at most.
            assert 4 < (row["arguments"] + row["temporary"]) / BYTES < 12
            assert all(0 < row[what] < 120 for what in ("trace", "lower", "compile"))
    assert criterion(found, "bytes per round of a worker")["met"]
    assert criterion(found, "memory of a worker")["met"]


def test_simulated_workers(found):
    columns, rows = table(found, "local_sgd of simulated workers")
    assert columns[0] == "workers"
    assert [row[0] for row in rows] == ["8", "32"]
    floats = 8 * (1_000_000 // 8 // 50)
    for workers, (_, seconds, held, microseconds) in zip((8, 32), rows, strict=True):
        assert 0 < seconds < 120 and 0 < microseconds < 1e6
        # Parameters, moments and gradients; the center is shared.
        assert 4 * floats * (4 + 1 / workers) <= held < 4 * floats * 12
    assert criterion(found, "memory of a simulated worker")["met"]


def test_programs_of_many_leaves(found):
    steps = {("", "Optax alone")} | {
        (name, arm)
        for name in ("cross_shard", "local_sgd")
        for arm in ("by hand", "library", "by hand again")
    }
    for leaves in LEAVES:
        of_number = found["data"]["leaves"][str(leaves)]
        assert {(row["name"], row["arm"]) for row in of_number} == steps
        for row in of_number:
            assert all(0 < row[what] < 120 for what in ("trace", "lower", "compile"))
    _, rows = table(found, "Seconds to trace, lower and compile")
    assert len(rows) == len(LEAVES) * len(steps)
    judged = criterion(found, "time to trace and compile at most 1.1")
    ratios = [row[-1] for row in rows if row[2] == "library"]
    assert all(f"{ratio} (" in judged["found"] for ratio in ratios)
    if all(abs(float(ratio) - 1.1) > 0.006 for ratio in ratios):
        assert judged["met"] == (max(map(float, ratios)) <= 1.1)


def test_bytes_are_those_of_the_parameters_over_the_period(found):
    columns, rows = table(found, "Bytes per step and worker")
    assert columns[1:] == ["period 1", "period 10"]
    assert {row[0]: row[1:] for row in rows} == {
        name: [400, 40] for name in ("elastic_average", "agn", "local_sgd", "diloco")
    }
    assert criterion(found, "bytes per step exactly 1 / period")["met"]
