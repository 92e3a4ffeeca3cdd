"""Eight CPU devices stand for a mesh; nothing is promoted or broadcast silently."""

import gc
import importlib.metadata
import os
import pathlib

import pytest

# Threads to spare for the devices, or a collective may wait for ever: see Makefile.
os.environ.setdefault("NPROC", "16")

# A program of a test runs for milliseconds: XLA:CPU's older emitters, where there are
# any, without LLVM's optimisation compile it in less than half the time (BUILD_NOTES).
# `XLA_FLAGS= make test` compiles as users do. In one piece, as a product and a sum that
# land in two pieces are rounded twice, and once otherwise: programs of the same
# arithmetic would differ in the last bit, which is what some tests compare.
FLAGS = "--xla_backend_optimization_level=0"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
# Ray's processes would yield to all others: a test that waits for them waits minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import jax  # noqa: E402 # reads what stands above

# What is imported stays: to look through all of it again takes a tenth of the tests.
gc.freeze()
gc.set_threshold(20_000, 20, 20)

# Nobody keeps these programs on a disk, but each would be given a name for it.
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file():
    """A process would keep all programs of all files: gigabytes."""
    yield
    jax.clear_caches()


def _is_in(test, row):
    return test == row or test.startswith((f"{row}::", f"{row}["))


def pytest_collection_modifyitems(session, config, items):
    """What tests/slow.txt names has the marker `slow`."""
    lines = pathlib.Path(__file__).with_name("slow.txt").read_text().splitlines()
    rows = [line for line in lines if line and not line.startswith("#")]
    found = set()
    for item in items:
        test = item.nodeid.removeprefix("tests/")
        if mine := [row for row in rows if _is_in(test, row)]:
            item.add_marker(pytest.mark.slow)
            found.update(mine)
    whole = config.getini("testpaths") == config.args
    # A file that cannot be imported says so itself.
    if whole and not session.testsfailed and (gone := sorted({*rows} - found)):
        raise pytest.UsageError(f"tests/slow.txt has rows of no test: {gone}")
