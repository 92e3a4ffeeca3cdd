"""The modules of `benchmarks/`, which is no package."""

import importlib

import pytest

from tests.benchmarks.reading import BENCHMARKS


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    # A script may say how many threads its own process has.
    monkeypatch.setenv("NPROC", "16")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module
