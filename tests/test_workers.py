"""One program of a user: simulated, on a mesh, and with workers that are sharded."""

import functools
import itertools
import logging
import os
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests.contexts import begun
from tests.meshes import mesh_of
from tests.refusals import refused, table

AXIS = "workers"
STEPS = 5
PARAMS = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), "b": None}
PARAMS["b"] = np.linspace(0, 1, 3, dtype=np.float32)
RULES = {
    "diloco": oxs.diloco(optax.sgd(0.1, 0.9), AXIS, communication_period=2),
    "elastic": oxs.elastic_average(
        optax.sgd(0.1, 0.9), AXIS, communication_period=2, moving_rate=0.1, rho=0.5
    ),
}
TXS = RULES | {
    "cross_shard": oxs.cross_shard(optax.sgd(0.1, 0.9), AXIS),
    "sync_replicas": oxs.sync_replicas(optax.sgd(0.1), AXIS, replicas_to_aggregate=1),
}


def batch_of(workers):
    data = np.random.default_rng(0).normal(size=(workers, 16, 8))
    return np.asarray(data, np.float32)


def loss_of(params, inputs):
    return jnp.mean((inputs @ params["w"]) ** 2) + jnp.sum((params["b"] - 1.0) ** 2)


def train(number, mesh, params):
    """The user's program: states and losses at the end, and its collectives."""
    workers = oxs.Workers(number, AXIS, mesh=mesh)

    @functools.partial(workers.step, split=False)
    def step(states, inputs):
        losses = {}
        for name, tx in TXS.items():
            params, state = states[name]
            losses[name], grads = jax.value_and_grad(loss_of)(params, inputs)
            states[name] = oxs.apply_gradients(tx, grads, state, params)
        return states, losses

    states = {name: (params, tx.init(params)) for name, tx in TXS.items()}
    states, losses = workers.start(states), None
    rows = oxs.audit.collectives(step, states, batch_of(number))
    for _ in range(STEPS):  # The program takes what it returns: nothing moves.
        states, losses = step(states, batch_of(number))
    assert {one._cache_size() for one in step.programs.values()} == {1}
    return jax.device_get((states, losses)), rows


simulated = functools.cache(lambda workers: train(workers, None, PARAMS)[0])


@pytest.mark.parametrize(
    ("workers", "kind"),
    list(itertools.product((8, 2), ("Auto", "Explicit"))),
)
def test_one_program_has_the_same_numbers(workers, kind):
    mesh = mesh_of({AXIS: 8} if workers == 8 else {AXIS: 2, "fsdp": 4}, kind)
    params: Any = PARAMS
    if workers == 2:  # Each worker lies on four devices.
        specs = {"w": P("fsdp"), "b": P()}
        params = {
            name: jax.device_put(x, NamedSharding(mesh, specs[name]))
            for name, x in PARAMS.items()
        }
    results, rows = train(workers, mesh, params)
    expected = simulated(workers)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(results),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6, err_msg=str(path))
    # Between workers travels a device's own shard, and in rounds only.
    groups = jax.make_mesh((workers, 8 // workers), ("a", "b")).device_ids.T
    between = [r for r in rows if r.groups == tuple(map(tuple, groups.tolist()))]
    shard = 4 * (64 // (8 // workers) + 3)
    rounds = sum(row.bytes for row in between if row.conditional)
    sync = shard  # One update of `sync_replicas` is in a conditional, too.
    assert rounds == len(RULES) * shard + sync
    assert {row.kind for row in between} == {"all-reduce"}
    always = sum(row.bytes for row in between if not row.conditional)
    assert shard <= always < shard + 64  # `cross_shard`, and scalars


def test_workers_along_two_mesh_axes():
    mesh = mesh_of({"a": 2, "b": 4})

    def around(x, shift):
        return x - oxs.reduce(x, ("a", "b")) + shift

    mapped = by_hand.map_workers(around, ("a", "b"), mesh=mesh, in_axes=(0, None))
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_allclose(mapped(x, np.float32(1)), x - 2.5)
    params, state, axes = begun(optax.sgd(0.1, 0.9), PARAMS, 8, ("a", "b"), mesh)
    assert params["w"].sharding.spec == P(("a", "b"))
    assert jax.tree.leaves(state)[0].shape[0] == 8
    assert set(jax.tree.leaves(axes)) == {0}


def test_gradients_of_replicated_parameters_are_local():
    """With and without rows; the same on a mesh as simulated."""
    ids = np.arange(8, dtype=np.int32)[:, None] % 4
    table = {"table": jnp.ones((4, 2)), "scale": jnp.float32(2.0)}

    def loss(params, ids):
        return jnp.sum(params["scale"] * oxs.take(params["table"], ids))

    def both(params, ids):
        rows = {"table": lambda ids: ids}
        sparse = oxs.value_and_grad(loss, rows=rows, axis_name=AXIS)(params, ids)
        (dense, aux), grads = oxs.value_and_grad(
            lambda params, ids: (loss(params, ids), ids), has_aux=True, axis_name=AXIS
        )(params, ids)
        return sparse[0], sparse[1]["table"].to_dense(4), dense, aux, grads

    results = [
        jax.jit(by_hand.map_workers(both, AXIS, mesh=mesh, in_axes=(None, 0)))(
            table, ids
        )
        for mesh in (None, mesh_of({AXIS: 8}))
    ]
    for simulated, on_mesh in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(simulated, on_mesh)
    _, rows, _, _, grads = results[1]
    np.testing.assert_array_equal(grads["scale"], np.full(8, 2.0))
    np.testing.assert_array_equal(rows, grads["table"])
    np.testing.assert_array_equal(grads["table"][3], [[0, 0]] * 3 + [[2, 2]])


def test_keys_keywords_and_trees_with_holes():
    def draw(keys, tree, *, shift):
        return jax.random.uniform(keys) + shift, tree

    keys, shift = jax.random.split(jax.random.key(0), 8), np.ones(8, np.float32)
    tree = {"a": np.ones((8, 2), np.float32), "hole": None, "all": np.zeros(3)}
    axes = {"a": 0, "hole": None, "all": None}
    results = []
    for mesh in (None, mesh_of({AXIS: 8}), mesh_of({AXIS: 8}, "Explicit")):
        mapped = by_hand.map_workers(
            draw, AXIS, mesh=mesh, in_axes=[0, axes], out_axes=(0, axes)
        )
        results.append(mapped(keys, tree, shift=shift))
    for other in results[1:]:
        assert jax.tree.structure(other) == jax.tree.structure(results[0])
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def same(x):
    return x


EIGHT, FOUR, SGD = np.arange(8.0), mesh_of({AXIS: 4}), optax.sgd(0.1)
TWO = mesh_of({AXIS: 2, "fsdp": 4})


def mapped(mesh, *args, fun=same, **ways):
    return by_hand.map_workers(fun, AXIS, mesh=mesh, **ways)(*args)


def across():
    """Started with parameters that lie along the axis of the workers."""
    params = jax.device_put(np.ones((4, 2)), NamedSharding(TWO, P(AXIS)))
    return oxs.Workers(2, AXIS, mesh=TWO).start(params)


@pytest.mark.parametrize("mesh", [None, FOUR], ids=["simulated", "mesh"])
@table(r"""
mapped(mesh or FOUR, EIGHT)
    # ValueError: 8 workers, but the mesh has \d positions.*mesh=None
mapped(mesh, 1.0)  # ValueError: is a scalar. Give it None in in_axes
mapped(mesh, EIGHT, in_axes=({"a": 0},))
    # ValueError: in_axes of map_workers do not fit
mapped(mesh, EIGHT, in_axes=(0, 0))
    # ValueError: in_axes of map_workers do not fit
mapped(mesh, EIGHT, in_axes=1)
    # ValueError: got 1. Move the worker axis to the front
mapped(mesh, EIGHT[:4], EIGHT[:3], fun=max)
    # ValueError: \[1\] of map_workers has shape \(3,\), of 3 workers
mapped(mesh, EIGHT[:4], out_axes=None)
    # ValueError: of map_workers has None in out_axes, equal on all
by_hand.map_workers(same, "pods", mesh=TWO)  # ValueError: no axis 'pods'; its axes
by_hand.map_workers(same, (AXIS, "fsdp"))  # ValueError: needs a mesh, which says
by_hand.map_workers(same, AXIS, mesh=8)  # TypeError: mesh must be a jax
mapped(None, {})  # ValueError: nothing tells how many workers
by_hand.state_axes(SGD, PARAMS, level=-1)  # ValueError: from 0; got level -1
oxs.Workers(3, AXIS, mesh=TWO)
    # ValueError: Workers are 3, but the mesh has 2 positions
across()  # ValueError: may be sharded over the mesh's axes besides
oxs.value_and_grad(loss_of, axis_name=0)  # TypeError: axis_name must be the name
""")
def test_refused(call, said, mesh):
    with refused(said):
        eval(call, globals() | {"mesh": mesh})


# JAX's version, NPROC, devices of the mesh; the cores are 3 and the CPU devices 8.
THREADS = {
    "as many as devices": ((0, 11, 2), None, 8, "8 CPU devices share 8 threads"),
    "nearly two for each": ((0, 10, 2), "15", 8, "share 15 threads.*NPROC=16"),
    "no number": ((0, 10, 2), "many", 5, "share 8 threads.*'10'"),
    "two for each": ((0, 10, 2), "16", 8, None),
    "few devices of many": ((0, 10, 2), None, 4, None),
    "a device that waits for none": ((0, 10, 2), "1", 1, None),
    "programs have a pool of their own": ((0, 12, 0), None, 8, None),
}


@pytest.mark.parametrize("name", THREADS)
def test_cpu_devices_that_may_wait_for_ever_are_told_once(name, monkeypatch):
    version, nproc, devices, told = THREADS[name]
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.delenv("NPROC")
    if nproc is not None:
        monkeypatch.setenv("NPROC", nproc)
    # Of a name that no other test has: each mesh is looked at once.
    axis = f"{name} of {devices}"
    mesh = mesh_of({axis: devices})
    shape: Any = mesh.abstract_mesh  # without devices
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_hand.map_workers(lambda x: x, axis, mesh=shape)
        oxs.Workers(devices, axis, mesh=mesh).start(PARAMS)
        by_hand.map_workers(lambda x: x, axis, mesh=mesh)
    assert len(caught) == (told is not None)
    for warning in caught:
        assert re.search(told, str(warning.message)) and warning.filename == __file__


def test_shardings_are_where_a_run_starts():
    mesh, tx = mesh_of({AXIS: 2, "fsdp": 4}), RULES["diloco"]
    specs = {"w": P(None, "fsdp"), "b": P()}
    workers = oxs.Workers(2, AXIS, mesh=mesh, specs=specs)
    one = PARAMS, tx.init(PARAMS)
    expected = oxs.Workers(2, AXIS, mesh=mesh, specs=specs).expect(lambda: one)
    started = workers.start(one)
    equal = jax.tree.map(
        lambda x, s: (x.shape, x.dtype, x.sharding) == (s.shape, s.dtype, s.sharding),
        started,
        expected,
    )
    assert all(jax.tree.leaves(equal))
    assert expected[1].center["w"].sharding.spec == P(None, "fsdp")
    assert started[0]["w"].addressable_shards[0].data.shape == (1, 8, 2)


@pytest.mark.parametrize("mesh", [None, mesh_of({AXIS: 4}), mesh_of({"a": 2, "b": 2})])
def test_a_gradient_of_shared_parameters_is_not_taken_for_their_sum(mesh):
    """JAX's types would sum it on a mesh, and simulated workers have each their own."""
    axis_name = AXIS if mesh is None else mesh.axis_names

    def step(params, x):
        grads = jax.grad(lambda params: jnp.sum(params * x))(params)
        tx = oxs.cross_shard(optax.sgd(1.0), axis_name, grads="summed")
        return oxs.apply_gradients(tx, grads, tx.init(params), params)[0]

    run = by_hand.map_workers(
        step, axis_name, mesh=mesh, in_axes=(None, 0), out_axes=None
    )
    with pytest.raises(ValueError, match="has None in out_axes, equal on all workers"):
        run(np.ones(3, np.float32), np.ones((4, 3), np.float32))


def trained(tx, workers):
    """Three steps of a program with 27 float32 parameters: what the next one takes."""
    params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(3)}
    params, state = workers.start((params, tx.init(params)))

    @workers.step(state=2)
    def step(params, state, inputs):
        loss, grads = jax.value_and_grad(loss_of)(params, inputs)
        return *oxs.apply_gradients(tx, grads, state, params), loss

    inputs = jnp.ones((8, 8))
    for _ in range(3):
        params, state, _ = step(params, state, inputs)
    return step, params, state, inputs


SGD = optax.sgd(0.1)
ON_FOUR = "step: 4 workers along the axis 'workers', on 4 devices (cpu). "
SIMULATED = (
    "step: 4 workers along the axis 'workers', simulated by jax.vmap on 1 device "
    "(cpu). Nothing is sent."
)
AFTER = " Behind it a second program averages its other results."
# The optimizer, the arguments of Workers, and what the log says: of 27 numbers.
SAID = {
    "cross_shard": (
        oxs.cross_shard(SGD, AXIS),
        (4, AXIS, True),
        ON_FOUR + "Each step sends an all-reduce of 108 bytes." + AFTER,
    ),
    "diloco": (
        oxs.diloco(SGD, AXIS, communication_period=10),
        (4, AXIS, True),
        ON_FOUR + "Each step sends nothing. A round comes every 10 steps and sends an "
        "all-reduce of 108 bytes." + AFTER,
    ),
    "parts": (
        oxs.diloco(SGD, AXIS, communication_period=8, fragments=2),
        (4, AXIS, True),
        ON_FOUR + "Each step sends nothing. A round comes every 4 steps for one of 2 "
        "parts in turn and sends an all-reduce of 54 bytes on average." + AFTER,
    ),
    "a schedule": (
        oxs.local_sgd(SGD, AXIS, communication_period=lambda step: 2 + step),
        (4, AXIS, True),
        ON_FOUR + "Each step sends nothing. A round comes when its schedule says and "
        "sends an all-reduce of 108 bytes." + AFTER,
    ),
    # A partner before, another one in the next round: one of two ways.
    "gossip": (
        oxs.gossip(SGD, AXIS, communication_period=1, graph=oxs.graphs.exponential()),
        (4, AXIS, True),
        ON_FOUR + "Each step sends nothing. A round comes in every step and sends a "
        "collective-permute of 108 bytes." + AFTER,
    ),
    # Counters of pushes, and a conditional that is no center rule's.
    "sync_replicas": (
        oxs.sync_replicas(SGD, AXIS, replicas_to_aggregate=3),
        (4, AXIS, True),
        ON_FOUR + "Each step sends an all-reduce of 16 bytes. Some send besides an "
        "all-reduce of 108 bytes." + AFTER,
    ),
    "along two axes": (
        oxs.diloco(oxs.cross_shard(SGD, "chips"), "pods", communication_period=7),
        ((2, 4), ("pods", "chips"), True),
        "step: 2 x 4 workers along the axes 'pods', 'chips', on 8 devices (cpu). Each "
        "step sends an all-reduce of 108 bytes along 'chips'. A round comes every 7 "
        "steps and sends an all-reduce of 108 bytes along 'pods'." + AFTER,
    ),
    "sharded workers": (
        oxs.local_sgd(SGD, AXIS, communication_period=4),
        (4, AXIS, mesh_of({AXIS: 4, "fsdp": 2})),
        "step: 4 workers along the axis 'workers', on 8 devices (cpu), the mesh "
        "{'workers': 4, 'fsdp': 2}. Each step sends nothing. A round comes every 4 "
        "steps and sends an all-reduce of 108 bytes. What the compiler sends along "
        "'fsdp' is not counted." + AFTER,
    ),
    "simulated cross_shard": (oxs.cross_shard(SGD, AXIS), (4, AXIS, None), SIMULATED),
    "simulated diloco": (
        oxs.diloco(SGD, AXIS, communication_period=10),
        (4, AXIS, None),
        SIMULATED + " A round comes every 10 steps.",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_the_log_says_once_what_a_step_does(name, caplog):
    tx, (n, axis, mesh), said = SAID[name]
    caplog.set_level(logging.INFO, "optx_sync")
    workers = oxs.Workers(n, axis, mesh=mesh)
    step, params, state, inputs = trained(tx, workers)
    step(params, state, inputs=inputs)  # traced and compiled anew
    assert [x.getMessage() for x in caplog.records if x.name[:9] == "optx_sync"] == [
        said
    ]
    assert caplog.records[-1].name == "optx_sync.workers"


def test_the_log_says_what_a_step_in_a_loop_does(caplog):
    """Outside of the step and inside: counters that no host counts."""
    caplog.set_level(logging.INFO, "optx_sync")
    workers = oxs.Workers(4, AXIS, mesh=True)
    tx = oxs.local_sgd(SGD, AXIS, communication_period=4)

    @workers.step(state=2, split=False)
    def step(params, state, inputs):
        return oxs.apply_gradients(tx, params - inputs, state, params)

    @workers.step(state=2, split=False)
    def steps(params, state, inputs):
        def one(carry, _):
            params, state = carry
            return oxs.apply_gradients(tx, params - inputs, state, params), None

        return jax.lax.scan(one, (params, state), length=8)[0]

    inputs = jnp.ones((4, 3))
    given = workers.start((jnp.zeros(3), tx.init(jnp.zeros(3))))
    given, _ = jax.lax.scan(
        lambda carry, _: (step(*carry, inputs), None), given, length=8
    )
    steps(*given, inputs)
    said = ON_FOUR + "Each step sends nothing. A round comes every 4 steps and sends "
    said = said.removeprefix("step") + "an all-reduce of 12 bytes."
    found = [x for x in caplog.messages if "workers along" in x]
    assert found == [f"step{said}", f"steps{said}"]


def test_where_nobody_reads_the_log_nothing_is_read_for_it(caplog, monkeypatch):
    def said(*args, **kwargs):
        raise AssertionError("said for nobody")

    monkeypatch.setattr("optx_sync.workers.step.said", said)
    caplog.set_level(logging.WARNING, "optx_sync")
    workers = oxs.Workers(4, AXIS, mesh=True)
    step, params, state, inputs = trained(SAID["diloco"][0], workers)
    # The step has its programs: who begins to read now is told nothing of it.
    caplog.set_level(logging.INFO, "optx_sync")
    step(params, state, inputs)
    assert not [x for x in caplog.messages if "workers along" in x]
