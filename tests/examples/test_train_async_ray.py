"""Workers are killed, leave and come late, and the center learns all the same."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.examples.running import cells

ROOT = Path(__file__).parents[2]
# Compiled as all other tests.
COMPILED = {'os.environ["XLA_FLAGS"] = "': 'os.environ["XLA_FLAGS"] += " '}


def lines_of(name, changes, *arguments):
    """What an example prints, some of whose text is another here."""
    code = (ROOT / "examples" / f"{name}.py").read_text()
    # Ray's sockets need a short path, so it is not pytest's directory.
    directory = tempfile.mkdtemp(prefix="oxs")
    for old, new in (COMPILED | changes).items():
        assert code.count(old) == 1
        code = code.replace(old, new.replace("DIRECTORY", repr(directory)))
    try:
        finished = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
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
    return finished.stdout.splitlines()


def test_it_learns_while_a_worker_is_killed(tmp_path):
    picture = tmp_path / "timeline.png"
    short = "include_dashboard=False, object_store_memory=10**8, _temp_dir=DIRECTORY,"
    # Rounds of the center, in the example and here.
    changes = {"rho=0.0), 240)": "rho=0.0), 100)", "include_dashboard=False,": short}
    options = "--rule", "elastic", "--out", picture
    lines = lines_of("train_async_ray", changes, *options)
    assert lines[-1] == f"wrote {picture}" and picture.stat().st_size > 20_000
    row = next(line for line in lines if "elastic" in line)
    accuracy, pushes, dropped, killed = re.findall(r"[\d.]+", row)[:4]
    assert float(accuracy) >= 88 and int(pushes) >= 100
    assert (killed, dropped) == ("1", "0")


def test_a_quorum_learns_while_workers_leave_die_and_come_late(tmp_path):
    picture = tmp_path / "picture.png"
    short = "ray.init(num_cpus=PLACES, object_store_memory=10**8, _temp_dir=DIRECTORY,"
    options = "--epochs", 8, "--picture", picture
    changes = {"ray.init(num_cpus=PLACES,": short}
    lines = lines_of("train_decoupled", changes, *options)
    assert f"wrote {picture}" in lines and picture.stat().st_size > 10_000
    accuracy, epochs = re.findall(r"[\d.]+", lines[-1])
    assert float(accuracy) >= 80 and epochs == "8"
    rows = [row for row in cells("\n".join(lines)) if row[0].isdigit()]
    assert [row[1] for row in rows][2:] == ["is killed", "is slow", "is late"]
    assert [int(row[4]) for row in rows] == [0, 0, 1, 0, 0]  # deaths
    # Two have left, and come again.
    assert [row[5].count("s") >= 2 for row in rows[:3]] == [True] * 3
    assert all(int(row[2]) for row in rows)  # rounds
