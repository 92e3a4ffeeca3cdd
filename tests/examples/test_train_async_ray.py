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


CHANGES = {
    # Rounds of the center, in the example and here.
    "rho=0.0), 240)": "rho=0.0), 100)",
    # Compiled as all other tests.
    'os.environ["XLA_FLAGS"] = "': 'os.environ["XLA_FLAGS"] += " ',
}


@pytest.mark.slow
def test_it_learns_while_a_worker_is_killed(tmp_path):
    picture, directory = tmp_path / "timeline.png", tempfile.mkdtemp(prefix="oxs")
    code = (ROOT / "examples" / "train_async_ray.py").read_text()
    changes = CHANGES | {"include_dashboard=False,": SHORT.format(directory=directory)}
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    try:
        finished = subprocess.run(
            [sys.executable, "-c", code, "--rule", "elastic", "--out", str(picture)],
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
    row = next(line for line in lines if "elastic" in line)
    accuracy, pushes, dropped, killed = re.findall(r"[\d.]+", row)[:4]
    assert float(accuracy) >= 88 and int(pushes) >= 100
    assert (killed, dropped) == ("1", "0")
