"""Shapes and dtypes in annotations are true, and a false one is noticed."""

import os
import pathlib
import subprocess
import sys


def test_shapes_hold_in_a_step_of_each_wrapper_and_exchange():
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.shapes"],
        cwd=root, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[1:] == ["wrappers"]
