"""What steps send on a mesh without devices, as in the program that is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import optx_sync as oxs
from optx_sync import audit
from tests.refusals import all_refused

PARAMS = {"a": jnp.zeros(1000), "b": [jnp.zeros((30, 40)), jnp.zeros(7, jnp.bfloat16)]}
SGD, BITS4 = optax.sgd(0.1), oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))
WORKERS64 = oxs.Workers(64, "workers", mesh=AbstractMesh((64,), ("workers",)))


def plain(rows):
    """Rows without names, and without pieces, in which a CPU moves an all-to-all."""
    return sorted(
        row._replace(operands=1, branch=tuple(number for _, number in row.branch))
        for row in rows
    )


@pytest.mark.parametrize(
    "tx",
    [
        oxs.cross_shard(SGD, "workers"),
        oxs.cross_shard(SGD, "workers", shard_state=True),
        oxs.sync_replicas(SGD, "workers", replicas_to_aggregate=6),
        oxs.local_sgd(SGD, "workers", communication_period=20, fragments=2),
        oxs.diloco(SGD, "workers", communication_period=20, exchange=BITS4),
        oxs.diloco(SGD, "workers", shard_state=True),
        oxs.noloco(SGD, "workers"),
        oxs.gossip(SGD, "workers", graph=oxs.graphs.exponential()),
    ],
    ids="cross_shard pieces sync parts bits4 shard_state noloco gossip".split(),
)
def test_an_abstract_mesh_sends_what_the_compiled_program_sends(tx):
    abstract, compiled = (
        audit.strategy(tx, PARAMS, oxs.Workers(8, "workers", mesh=mesh))
        for mesh in (AbstractMesh((8,), ("workers",)), True)
    )
    assert plain(abstract.rows) == plain(compiled.rows)
    assert abstract.period == compiled.period


def test_replicas_inside_of_workers_are_groups_of_an_abstract_mesh():
    tx = oxs.diloco(oxs.cross_shard(SGD, "chips"), "pods")
    n, axes, kinds = (2, 4), ("pods", "chips"), (AxisType.Auto,) * 2
    abstract, compiled = (
        audit.strategy(tx, PARAMS, oxs.Workers(n, axes, mesh=mesh))
        for mesh in (AbstractMesh(n, axes, axis_types=kinds), True)
    )
    assert plain(abstract.rows) == plain(compiled.rows)
    assert {row.groups[0] for row in abstract.rows} == {(0, 1, 2, 3), (0, 4)}


def test_each_call_of_one_function_counts_and_a_loop_once():
    mean, largest = (
        jax.jit(lambda x, reduce=reduce: reduce(x, "workers"))
        for reduce in (lax.pmean, lax.pmax)
    )

    def step(x, batch):
        first, second = mean(x), mean(2 * x + batch.mean())
        both = first + mean(second) + largest(x)
        both += lax.fori_loop(0, 5, lambda i, y: mean(y * i + x), x)
        return lax.cond(x[0] > 0, lambda y: mean(y + mean(y * y)), jnp.sin, both)

    def rows(mesh):
        workers = oxs.Workers(8, "workers", mesh=mesh)
        shapes = workers.expect(jnp.zeros(3))
        return audit.collectives(workers.step(step), shapes, jnp.ones((16, 2)))

    found = rows(AbstractMesh((8,), ("workers",)))
    assert plain(found) == plain(rows(True))
    # Two means that do not wait for each other are one; the maximum, the loop's and
    # the mean of a mean are by themselves.
    assert sorted((row.operands, row.conditional) for row in found) == [
        *((1, False),) * 3,
        *((1, True),) * 2,
        (2, False),
    ]


def test_workers_without_devices_have_a_strategy_and_a_time():
    params = jax.ShapeDtypeStruct((10**6,), jnp.float32)
    local = oxs.local_sgd(SGD, "workers", communication_period=20)
    link: Any = {"gbits": 1.0, "step_seconds": 1.0, "latency": 0.08}
    found = audit.strategy(local, params, WORKERS64)
    assert [(row.bytes, len(row.groups[0])) for row in found.rows] == [(4 * 10**6, 64)]
    cost = audit.time(found, **link)
    assert cost.sent == pytest.approx(126 * (0.08 + 0.032 / 64))
    noloco = oxs.noloco(SGD, "workers")
    cost = audit.time(noloco, params=params, workers=WORKERS64, **link)
    assert cost.sent == pytest.approx(0.08 + 0.032)


def run(x):
    return x


STEP, FSDP = WORKERS64.step(run), AbstractMesh((4, 2), ("workers", "fsdp"))
STARTED = jnp.zeros((64, 3))
test_nothing_runs_on_an_abstract_mesh = all_refused(globals())(r"""
STEP(STARTED)  # ValueError: run needs devices, and got AbstractMesh.* give Workers a
WORKERS64.start(PARAMS)  # ValueError: workers.start needs devices
WORKERS64.resize((STARTED,))  # ValueError: workers.resize needs devices
WORKERS64.restore(None)  # ValueError: workers.restore needs devices
oxs.Workers(4, "workers", mesh=FSDP)  # ValueError: {'workers': 4, 'fsdp': 2} .*num_cpu_devices', 8
""")  # noqa: E501
