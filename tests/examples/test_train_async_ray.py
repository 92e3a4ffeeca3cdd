"""A worker is killed and replaced halfway, and the center learns all the same."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Ray's sockets need a short path, so it is not pytest's directory.
SHORT = "include_dashboard=False, object_store_memory=10**8, _temp_dir={directory!r},"


# Rounds of the center, or updates, in the example and here.
SHORTER = {"rho=0.0), 240)": "rho=0.0), 100)", "Replicas(3), 400)": "Replicas(3), 200)"}


@pytest.mark.slow
def test_it_learns_while_a_worker_is_killed(tmp_path):
    picture, directory = tmp_path / "timeline.png", tempfile.mkdtemp(prefix="oxs")
    code = (ROOT / "examples" / "train_async_ray.py").read_text()
    changes = SHORTER | {"include_dashboard=False,": SHORT.format(directory=directory)}
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    rules = ("elastic", "sync_replicas")
    try:
        finished = subprocess.run(
            [sys.executable, "-c", code, "--rule", *rules, "--out", str(picture)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "120"},
            timeout=400,
            check=False,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1] == f"wrote {picture}" and picture.stat().st_size > 20_000
    for rule, least, pushes_needed in (
        ("elastic", 88, 100),
        ("sync_replicas", 92, 600),
    ):
        row = next(line for line in lines if rule in line)
        accuracy, pushes, dropped, killed = re.findall(r"[\d.]+", row)[:4]
        assert float(accuracy) >= least and killed == "1"
        assert int(pushes) >= pushes_needed
        # Only a synchronous replica's gradient can be stale, and then it is dropped.
        assert (int(dropped) > 0) == (rule == "sync_replicas")
