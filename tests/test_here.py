"""`Workers.here`: quiet steps that one process makes alone; here it has all workers.

Two processes with unequal numbers of them are in `test_two_processes.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests.meshes import mesh_of
from tests.refusals import refused, table

SIZES = {"pods": 2, "data": 2}
AXES = tuple(SIZES)
INSIDE = oxs.cross_shard(optax.sgd(0.1, 0.9), "data")
TX = oxs.diloco(INSIDE, "pods", measure=True)
IN_PIECES = oxs.diloco(INSIDE, "pods", shard_center=True, fragments=2)
PARAMS = {"w": np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)}
KEY = jax.random.key(1)
X = np.linspace(-1, 1, 8 * 4, dtype=np.float32).reshape(8, 4)


def step_of(tx, params, state, steps, key, x, noise, meet=False):
    key, now = jax.random.split(key)
    x = x + jax.random.normal(now, x.shape) + jax.random.normal(noise, x.shape)
    grads = jax.grad(lambda params: jnp.mean((x @ params["w"] - 1) ** 2))(params)
    params, state = oxs.apply_gradients(tx, grads, state, params, meet=meet)
    return params, state, steps + 1, key, oxs.reduce(x.mean(), "data")


def train(workers, alone, together, now):
    """Two rounds with two quiet steps in each, `alone` by workers.here or by all."""
    apart, noise = alone.layout().part is not None, jax.random.key(2)
    for _ in range(2):
        now = workers.apart(now) if apart else now
        for _ in range(2):
            *now, loss = alone(*now, X, noise)
        now = workers.together(tuple(now)) if apart else tuple(now)
        *now, loss = together(*now, X, noise)
        now = tuple(now)
    *now, key = now
    return *now, jax.random.key_data(key), loss


@pytest.mark.parametrize(
    "tx, mesh, specs",
    [
        (IN_PIECES, None, None),
        (TX, mesh_of(SIZES | {"shards": 2}), {"w": P("shards")}),
    ],
    ids=["simulated", "sharded"],
)
def test_the_steps_of_here_are_those_of_all(tx, mesh, specs):
    """Also what is drawn, and on a mesh where arrays lie."""
    workers = oxs.Workers((2, 2), AXES, mesh=mesh, specs=specs)
    quiet, meet = (functools.partial(step_of, tx, meet=meet) for meet in (False, True))
    together, start = workers.step(meet, state=4), (PARAMS, tx.init(PARAMS), 0, KEY)
    expected, found = (
        train(workers, whose.step(quiet, state=4), together, workers.start(start))
        for whose in (workers, workers.here)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
        assert mesh is None or x.sharding.is_equivalent_to(y.sharding, x.ndim)
    lost = workers.apart(workers.start(PARAMS))
    assert workers.here.sizes == workers.sizes and lost["w"].shape == (2, 2, 4, 2)


PULLED = oxs.CenterRule(
    contribute=lambda own, center, at: own.params,
    penalty=lambda own, at: jnp.float32(at.num_workers) + 0 * own.params,
)


def test_a_rule_knows_the_number_of_all_workers():
    """Here the second four of twelve; of a key they get those of these places."""
    workers = oxs.Workers(4, "workers", mesh=mesh_of({"workers": 4}))
    layout, all_keys = workers.here._layout, oxs.Workers(12, "workers").keys(KEY)
    part = layout.part._replace(rows=(4, 5, 6, 7), sizes=(("workers", 12),))
    workers.here._layout = layout._replace(part=part)
    assert (workers.here.keys(KEY) == all_keys[4:8]).all()

    @functools.partial(workers.here.step, average=False)
    def step(x):
        tx = oxs.center_variable(optax.sgd(0.1), PULLED, "workers")
        return x, oxs.apply_gradients(tx, x, tx.init(x), x, meet=False)[0]

    # From 0, with the number of workers as the gradient.
    _, found = step(workers.apart(workers.start(jnp.float32(0))))
    np.testing.assert_allclose(found, [-1.2] * 4)


def of_here(tx: Any = TX, change=lambda x: x, **given):
    """A step of here, with something in it that other workers have a part in."""
    workers = oxs.Workers((2, 2), AXES, mesh=mesh_of(SIZES))

    @functools.partial(workers.here.step, state=2)
    def step(params, state):
        grads = jax.tree.map(change, params)
        return oxs.apply_gradients(tx, grads, state, params, **given)

    return step(*workers.apart(workers.start((PARAMS, tx.init(PARAMS)))))


LATE = oxs.diloco(INSIDE, "pods", communication_period=4, delay=1)
SIMULATED = oxs.Workers(2, "pods")
GOSSIP = oxs.gossip(optax.sgd(0.1), "pods")
ABSTRACT = oxs.Workers(2, "pods", mesh=AbstractMesh((2,), ("pods",)))


@table("""
of_here()
of_here(meet=True)
of_here(meet=True, tx=GOSSIP)
of_here(tx=oxs.cross_shard(optax.sgd(0.1), "pods"))
of_here(meet=False, change=lambda x: oxs.reduce(x, "pods"))
# ValueError: all along 'pods' are to meet. Pass meet=False
of_here(meet=False, tx=LATE)  # ValueError: With delay=1 a sum lands in a quiet step
of_here(meet=False, change=lambda x: jax.lax.pmean(x, "pods"))
of_here(meet=False, change=lambda x: x + jax.lax.axis_index("pods"))
# NameError: axis name: pods
ABSTRACT.here  # ValueError: workers.here needs devices
SIMULATED.here.resize(SIMULATED.start(PARAMS))  # ValueError: and not by `workers.here`
""")
def test_refused(call, said):
    with refused(said):
        eval(call)


def test_workers_that_lie_on_two_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with refused("ValueError: one process has all devices of a worker along 'pods'"):
        _ = oxs.Workers(2, "pods", mesh=mesh_of({"pods": 2})).here
