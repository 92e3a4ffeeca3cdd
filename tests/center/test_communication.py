"""What a round and a quiet step cost, read from the compiled program."""

import jax
import jax.numpy as jnp
import pytest

import optx_sync as oxs
from tests import contexts
from tests.center import test_lockstep

PARAMS = {"matrix": jnp.ones((16, 8)), "vector": jnp.ones(6)}
BYTES = 4 * (16 * 8 + 6)
# The inner optimizer's state is as large as the parameters, and "drop" sends one scalar
# more: how many workers are in the round.
ONCE = ("elastic_schedule", "agn_sum", "agn_updates", "local_sgd", "diloco")
CASES = test_lockstep.CASES | test_lockstep.VARIANTS
EXPECTED_BYTES = dict.fromkeys((*ONCE, "diloco_reset"), BYTES) | {
    "agn_average": 2 * BYTES,
    "elastic_drop": BYTES + 4,
    "diloco_drop": BYTES + 4,
    "local_sgd_drop_average": 2 * BYTES + 4,
}


def sent(tx, mesh, specs=None):
    """The collectives of a step of all workers."""
    step, params, state = contexts.started(tx, PARAMS, mesh=mesh, specs=specs)
    return oxs.audit.collectives(step, params, state, params)


@pytest.mark.parametrize("name", EXPECTED_BYTES)
def test_a_round_sends_the_parameters_once_inside_a_conditional(name):
    rows = sent(CASES[name][0], contexts.mesh())
    assert {(row.kind, row.conditional) for row in rows} == {("all-reduce", True)}
    assert sum(row.bytes for row in rows) == EXPECTED_BYTES[name]


@pytest.mark.parametrize("name", ["elastic_schedule", "agn_sum", "local_sgd", "diloco"])
def test_sharded_workers_send_their_shards_inside_a_conditional(name):
    specs = dict.fromkeys(PARAMS, jax.P("inside"))
    rows = sent(CASES[name][0], contexts.island_mesh(), specs)
    assert {(row.kind, row.conditional) for row in rows} == {("all-reduce", True)}
    assert {row.groups for row in rows} == {((0, 2, 4, 6), (1, 3, 5, 7))}
    assert sum(row.bytes for row in rows) == BYTES // 2
