"""What a round and a quiet step cost, read from the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.center import test_lockstep

AXIS, WORKERS = contexts.AXIS, contexts.REPLICAS
PARAMS = {"matrix": jnp.ones((16, 8)), "vector": jnp.ones(6)}
BYTES = 4 * (16 * 8 + 6)
INNER = optax.sgd(0.05, momentum=0.9)
# The rules with their own inner optimizer, whose state is as large as the parameters.
EXPECTED_BYTES = {
    **{name: (tx, BYTES) for name, (tx, _) in test_lockstep.CASES.items()},
    "agn_average": (test_lockstep.VARIANTS["agn_average"][0], 2 * BYTES),
    "diloco_reset": (test_lockstep.VARIANTS["diloco_reset"][0], BYTES),
    # One scalar more: how many workers are in the round.
    "elastic_drop": (test_lockstep.VARIANTS["elastic_drop"][0], BYTES + 4),
    "diloco_drop": (test_lockstep.VARIANTS["diloco_drop"][0], BYTES + 4),
    "local_sgd_drop_average": (
        test_lockstep.VARIANTS["local_sgd_drop_average"][0],
        2 * BYTES + 4,
    ),
}


def compiled(tx) -> Any:
    """`update` of a transformation in shard_map, state placed by `state_specs`."""
    axes = by_hand.state_axes(tx, PARAMS)
    state_specs = by_hand.state_specs(
        tx, PARAMS, jax.tree.map(lambda _: P(), PARAMS), AXIS
    )

    def local(grads, state, params):
        grads, params = by_hand.first((grads, params))
        updates, state = tx.update(grads, by_hand.first(state, axes), params)
        return by_hand.replicate(updates, 1), by_hand.replicate(state, 1, axes)

    update = jax.shard_map(
        local,
        mesh=contexts.mesh(),
        in_specs=(P(AXIS), state_specs, P(AXIS)),
        out_specs=(P(AXIS), state_specs),
    )
    params = by_hand.replicate(PARAMS, WORKERS)
    state = by_hand.replicate(tx.init(PARAMS), WORKERS, axes)
    lowered = jax.jit(update, donate_argnums=1).lower(params, state, params)
    return lowered.compile()


@pytest.mark.parametrize("name", EXPECTED_BYTES)
def test_a_round_sends_the_parameters_once_inside_a_conditional(name):
    tx, expected = EXPECTED_BYTES[name]
    rows = oxs.audit.collectives(compiled(tx))
    assert {row.kind for row in rows} == {"all-reduce"}
    assert all(row.conditional for row in rows)
    assert sum(row.bytes for row in rows) == expected


@pytest.mark.parametrize("name", ["elastic_schedule", "agn", "local_sgd", "diloco"])
def test_islands_send_their_shards_inside_a_conditional(name):
    tx, _ = test_lockstep.CASES[name]
    axes = by_hand.state_axes(tx, PARAMS)
    mesh = contexts.island_mesh()
    specs = {"matrix": P("inside"), "vector": P("inside")}
    stacked = jax.tree.map(lambda spec: P(AXIS, *spec), specs)
    arguments = []
    for tree, tree_specs in (
        (by_hand.replicate(PARAMS, WORKERS), stacked),
        (
            by_hand.replicate(tx.init(PARAMS), WORKERS, axes),
            by_hand.state_specs(tx, PARAMS, specs, AXIS),
        ),
    ):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree_specs)
        arguments.append(jax.device_put(tree, shardings))
    params, state = arguments
    update = jax.vmap(
        tx.update,
        in_axes=(0, axes, 0),
        out_axes=(0, axes),
        axis_name=AXIS,
        spmd_axis_name=AXIS,
    )
    rows = oxs.audit.collectives(update, params, state, params)
    assert {(row.kind, row.conditional) for row in rows} == {("all-reduce", True)}
    assert {row.groups for row in rows} == {((0, 2, 4, 6), (1, 3, 5, 7))}
    assert sum(row.bytes for row in rows) == BYTES // 2
