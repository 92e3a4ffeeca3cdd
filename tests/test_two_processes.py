"""Two processes with jax.distributed give the numbers that one process gives."""

import functools
import socket

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


def test_numbers_that_are_in_no_state(histories):
    """Of a joiner with another rate, which drifted: both numbers are told."""
    alike, apart, other_rate, other_names, position = histories["of one's own"]
    # Of two processes neither is the majority.
    assert alike == {} and apart == dict.fromkeys(range(4), "also['rate']")
    host = socket.gethostname()
    assert f"also['rate']: 0.1 in process 0 on {host}; 0.2 in process 1" in other_rate
    assert "also['decay']: missing in process 0" in other_names
    assert "0.01 in process 1" in other_names and position == 0


def test_a_worker_of_the_runtime_over_two_processes(histories):
    """Answers, refusals and a notice that process 1 got are those of both: as one."""
    params, heard = histories["Worker", "runtime"]
    (expected,), ((refused, rounds, steps, left),) = two_processes.of_the_runtime(False)
    np.testing.assert_array_equal(params[0], params[1])
    np.testing.assert_allclose(params[0], expected, rtol=1e-6, atol=1e-6)
    assert refused == 1 and rounds == steps > 4
    assert heard[0].tolist()[:3] == [refused, rounds, steps]
    assert heard[1].tolist()[:3] == [refused, rounds, 0]  # its server heard nothing
    assert heard[0, 3] == heard[1, 3] >= left
