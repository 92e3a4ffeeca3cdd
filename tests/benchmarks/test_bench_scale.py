"""What grows with what, run as a user runs it, in its short form."""

import pytest

from tests.benchmarks.reading import criterion, table

SCRIPT = "bench_scale"
NAMES = ("cross_shard", "sync_replicas, accumulating", "local_sgd", "diloco")
DEVICES, LEAVES = (2, 8), (10, 30)
BYTES = 4 * 1_000_000
pytestmark = pytest.mark.slow


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
    workers_table = table(found, "local_sgd of simulated workers")
    rows = workers_table["rows"]
    assert workers_table["columns"][0] == "workers"
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
    rows = table(found, "Seconds to trace, lower and compile")["rows"]
    assert len(rows) == len(LEAVES) * len(steps)
    judged = criterion(found, "time to trace and compile at most 1.1")
    ratios = [row[-1] for row in rows if row[2] == "library"]
    assert all(f"{ratio} (" in judged["found"] for ratio in ratios)
    if all(abs(float(ratio) - 1.1) > 0.006 for ratio in ratios):
        assert judged["met"] == (max(map(float, ratios)) <= 1.1)


def test_bytes_are_those_of_the_parameters_over_the_period(found):
    by_period = table(found, "Bytes per step and worker")
    assert by_period["columns"][1:] == ["period 1", "period 10"]
    assert {row[0]: row[1:] for row in by_period["rows"]} == {
        name: [400, 40] for name in ("elastic_average", "agn", "local_sgd", "diloco")
    }
    assert criterion(found, "bytes per step exactly 1 / period")["met"]
