"""Type checkers find no error, and everything that is public has a type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a user writes. The other examples are left to Pyright: Pyrefly and ty find errors
# there in how scikit-learn, Orbax, matplotlib and Ray are called, and none of ours.
PROGRAMS = [
    "tests/users",
    "examples/custom_optimizer.py",
    "examples/custom_center_rule.py",
]
CHECKERS = {
    "pyrefly": ("--python-interpreter-path", sys.executable, "--error=unused-ignore"),
    "ty": ("--python", sys.prefix, "--error=unused-type-ignore-comment"),
}


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


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_user_s_program_has_no_error(checker):
    command = [sys.executable, "-m", checker, "check", *PROGRAMS, *CHECKERS[checker]]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
