"""Pyright finds no error, and everything that is public has a type."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pyright(*arguments, folder=ROOT):
    """The exit code of Pyright, and what it printed."""
    # It asks the first Python on the path where packages are, and must not find the
    # working tree in place of the installed package.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=folder,
        env={name: of for name, of in os.environ.items() if name != "PYTHONPATH"}
        | {"PATH": path},
    )
    return done.returncode, done.stdout


def test_there_is_no_error():
    code, printed = pyright("--pythonpath", sys.executable)
    assert code == 0, printed


def test_all_that_is_public_has_a_type(tmp_path):
    code, printed = pyright(
        "--verifytypes", "optx_sync", "--ignoreexternal", folder=tmp_path
    )
    assert "Type completeness score: 100%" in printed, printed
    assert code == 0
