"""The benchmark of exchanges, short: that it runs and what its figures must obey."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXCHANGES = {"naive actor", "naive actor, NumPy", "Ray alone", "copy"} | {
    "local_sgd",
    "elastic",
    "diloco",
}


@pytest.mark.slow
def test_every_exchange_is_measured(tmp_path):
    finished = subprocess.run(
        [sys.executable, "benchmarks/bench_async.py", "--quick", "--out", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NPROC": "16"},
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads((tmp_path / "bench_async.json").read_text())
    assert found["quick"] and found["machine"]["versions"]["ray"]
    (table,) = found["tables"]
    rows = {row[0]: row[2:] for row in table["rows"] if row[2] != ""}
    assert set(rows) == EXCHANGES
    naive_over_copy = rows["naive actor"][1]
    for times_faster, over_copy, _ in rows.values():
        assert times_faster * over_copy == pytest.approx(naive_over_copy, rel=1e-4)
    # A copy within a process is faster than anything that goes to another one.
    assert all(row[1] > 1 for name, row in rows.items() if name != "copy")
    assert [one["met"] for one in found["criteria"]] == [
        rows[name][0] >= 1.2 for name in ("local_sgd", "elastic", "diloco")
    ]
    page = (tmp_path / "bench_async.md").read_text()
    assert "A short run" in page and "(bench_async.png)" in page
    assert (tmp_path / "bench_async.png").stat().st_size > 10_000
