"""Two processes with jax.distributed give the numbers that one process gives."""

import functools

import jax
import numpy as np
import pytest

from tests import contexts, two_processes

CASES = two_processes.cases()
RUNS = [
    (name, style) for name in CASES for style in two_processes.styles_of(*CASES[name])
]


@pytest.fixture(scope="session")
def histories():
    return two_processes.replay_all()


@functools.cache
def in_one_process(name):
    history, _ = contexts.replay("vmap", *CASES[name][:4])
    return history


@pytest.mark.parametrize(("name", "style"), RUNS)
def test_two_processes_agree_with_one(histories, name, style):
    expected = in_one_process(name)
    structure = jax.tree.structure(expected)
    contexts.assert_close(structure.unflatten(histories[name, style]), expected)


def test_workers_over_two_processes(histories):
    """Each worker's own keys and part of a batch, the center and measures: as one."""
    for name, expected in two_processes.front_door(None).items():
        (found,) = histories["Workers", name]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert len(np.unique(histories["Workers", "own keys"][0], axis=0)) == 4
