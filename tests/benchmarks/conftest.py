"""Each script of `benchmarks/` in its short form, run as a user runs it.

A test module names its script: `SCRIPT = "bench_dense"`.
"""

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.reading import BENCHMARKS


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Where a short run wrote its page, its numbers and its pictures."""
    name = request.module.SCRIPT
    folder = tmp_path_factory.mktemp(name)
    script = BENCHMARKS / f"{name}.py"
    finished = subprocess.run(
        [sys.executable, "-W", "error", script, "--quick", "--out", folder],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "NPROC": "16",
            "PYTHONIOENCODING": "utf-8",
        },
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    page = (folder / f"{name}.md").read_text("utf-8")
    assert "A short run" in page
    pictures = list(folder.glob("*.png"))
    assert pictures
    for picture in pictures:
        assert f"({picture.name})" in page
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    return folder


@pytest.fixture(scope="module")
def page(request, folder):
    """The page of that run."""
    return (folder / f"{request.module.SCRIPT}.md").read_text("utf-8")


@pytest.fixture(scope="module")
def found(request, folder):
    """The numbers of that run."""
    numbers = json.loads((folder / f"{request.module.SCRIPT}.json").read_text())
    assert numbers["quick"] is True
    return numbers


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def script(request, module):
    """The script as a module."""
    return module(request.module.SCRIPT)
