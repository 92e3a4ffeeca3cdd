"""What a round and a quiet step cost, read from the compiled program."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import hlo
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
    axes = oxs.state_axes(tx, PARAMS)
    state_specs = oxs.state_specs(tx, PARAMS, jax.tree.map(lambda _: P(), PARAMS), AXIS)

    def local(grads, state, params):
        grads, params = oxs.unstack((grads, params))
        updates, state = tx.update(grads, oxs.unstack(state, axes), params)
        return oxs.stack(updates, 1), oxs.stack(state, 1, axes)

    update = jax.shard_map(
        local,
        mesh=contexts.mesh(),
        in_specs=(P(AXIS), state_specs, P(AXIS)),
        out_specs=(P(AXIS), state_specs),
    )
    params = oxs.stack(PARAMS, WORKERS)
    state = oxs.stack(tx.init(PARAMS), WORKERS, axes)
    return jax.jit(update, donate_argnums=1).lower(params, state, params).compile()


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
    axes = oxs.state_axes(tx, PARAMS)
    mesh = contexts.island_mesh()
    specs = {"matrix": P("inside"), "vector": P("inside")}
    stacked = jax.tree.map(lambda spec: P(AXIS, *spec), specs)
    arguments = []
    for tree, tree_specs in (
        (oxs.stack(PARAMS, WORKERS), stacked),
        (
            oxs.stack(tx.init(PARAMS), WORKERS, axes),
            oxs.state_specs(tx, PARAMS, specs, AXIS),
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


def fusions(program):
    """(of arrays, of scalars), what the fusions of a step without a round write."""
    sizes = [
        prod(array.shape)
        for instruction in hlo.written(hlo.program(program), 0)
        if instruction.opcode == "fusion"
        for array in instruction.arrays
    ]
    return sum(size > 1 for size in sizes), sizes.count(1)


@pytest.mark.parametrize("inner_name", ["sgd", "adam"])
@pytest.mark.parametrize("rule", ["elastic", "rho", "agn", "local_sgd", "diloco"])
def test_a_quiet_step_is_the_inner_step_and_the_counters(rule, inner_name):
    inner = {"sgd": INNER, "adam": optax.adam(1e-3)}[inner_name]
    tx = {
        "elastic": lambda: oxs.elastic_average(inner, AXIS, rho=0.0),
        "rho": lambda: oxs.elastic_average(inner, AXIS, learning_rate=0.1),
        "agn": lambda: oxs.agn(inner, AXIS),
        "local_sgd": lambda: oxs.local_sgd(inner, AXIS),
        "diloco": lambda: oxs.diloco(inner, AXIS),
    }[rule]()
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        alone, wrapped = compiled(inner), compiled(tx)
    arrays, scalars = fusions(alone)
    # AGN sums up the gradients as well: one addition for each leaf.
    arrays += len(PARAMS) if rule == "agn" else 0
    found = fusions(wrapped)
    assert found[0] <= arrays
    # local_step, steps_since_round, global_step, and whether a round is due; AGN hands
    # the steps since the last round to the conditional too, as its divisor.
    assert found[1] <= scalars + (5 if rule == "agn" else 4)
