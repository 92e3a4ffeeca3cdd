"""`axis_name=None`: one worker with a center of its own, no axis and no collective."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.refusals import all_refused

SGD = optax.sgd(0.05, momentum=0.9)


def test_it_sends_nothing():
    """That it is one worker of every rule is in `test_four_drivers.py`."""
    tx, params = snoo(SGD), jnp.ones(3)

    def step(params, state):
        return oxs.apply_gradients(tx, params, state, params)

    assert oxs.audit.collectives(step, params, tx.init(params)) == []


def test_it_is_diloco_of_one_worker_to_the_bit():
    outer = optax.sgd(0.75, 0.5, nesterov=True)
    found, workers = {}, oxs.Workers(1, "workers")
    for axis in (None, "workers"):
        tx = oxs.diloco(
            optax.sgd(0.5, momentum=0.5), axis, outer=outer, communication_period=3
        )

        def step(params, state, tx=tx):
            return oxs.apply_gradients(tx, params - 2.0, state, params)

        params = jnp.arange(3.0)
        held, run = (params, tx.init(params)), jax.jit(step)
        if axis is not None:
            held, run = workers.start(held), workers.step(step, state=2)
        for _ in range(7):
            held = run(*held)
        found[axis] = np.asarray(held[0]).reshape(3)
    np.testing.assert_array_equal(found[None], found["workers"])


def of_replicas(inner, **options):
    return oxs.cross_shard(inner, "data", **options)


def snoo(inner):
    outer = optax.sgd(0.6, 0.8, nesterov=True)
    return oxs.diloco(inner, None, outer=outer, communication_period=3)


# Around data parallel replicas, which all keep the same center, and inside of them.
REPLICAS: Any = {
    "around": lambda tx: snoo(of_replicas(tx)),
    "inside": lambda tx: of_replicas(snoo(tx)),
    "inside of a wrapper with a state": lambda tx: of_replicas(snoo(tx), measure=True),
    "chain": lambda tx: optax.chain(oxs.all_reduce_grads("data"), snoo(tx)),
    "pieces": lambda tx: snoo(of_replicas(tx, shard_state=True)),
    "guard": lambda tx: optax.apply_if_finite(snoo(of_replicas(tx)), 3),
}


@pytest.mark.parametrize(
    "form, mesh",
    [*[(form, None) for form in REPLICAS], ("around", True), ("inside", True)],
)
def test_data_parallel_replicas_make_its_steps(form, mesh):
    """The weight is that of gradients: a replica of weight 0 makes the outer step."""
    params = {"w": jnp.arange(3.0), "b": jnp.ones(1)}
    numbers = np.random.default_rng(0)
    batches = numbers.normal(size=(4, 4, 3)).astype(np.float32)
    weights = jnp.array([1.0, 2.0, 0.0 if form.startswith("inside") else 4.0, 3.0])

    def loss(params, x):
        return jnp.sum((x @ params["w"] + params["b"] - 1) ** 2)

    one = snoo(SGD)
    expected, state = params, one.init(params)
    for batch in batches:
        own = jax.vmap(jax.grad(loss), in_axes=(None, 0))(expected, batch)
        mean = jax.tree.map(lambda x: jnp.average(x, 0, weights), own)
        expected, state = oxs.apply_gradients(one, mean, state, expected)
    center = oxs.center_params(state, expected)

    tx, workers = REPLICAS[form](SGD), oxs.Workers(4, "data", mesh=mesh)

    @workers.step(state=2)
    def step(params, state, batch, weight):
        grads = jax.grad(loss)(params, batch[0])
        return oxs.apply_gradients(tx, grads, state, params, weight=weight[0])

    held = workers.start((params, tx.init(params)))
    for batch in batches[:2]:
        held = step(*held, batch, weights)
    # In the middle of a round: nobody loses what it has learned since.
    for trained in (held, workers.resize(oxs.Workers(3, "data").resize(held))):
        for batch in batches[2:]:
            trained = step(*trained, batch, weights)
        contexts.assert_close(workers.center(trained), center)
        every = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), expected)
        contexts.assert_close(trained[0], every)


def step_of(tx):
    return tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


test_what_it_cannot_be = all_refused(globals())(r"""
oxs.local_sgd(SGD, ())
oxs.cross_shard(SGD, None)
oxs.gossip(SGD, None)  # TypeError: axis_name must be the name of a mapped
of_replicas(snoo(SGD), shard_state=True).init(jnp.ones(2))
    # ValueError: Put the center rule around
oxs.diloco(SGD, None, exchange=oxs.exchange.quantized(bits=4))
    # ValueError: Leave exchange= out
step_of(oxs.elastic_average(SGD, None, num_workers=4, moving_rate=0.1, rho=0.0))
    # ValueError: num_workers=4, but axis_name=None stands
""")


def test_what_a_replica_adds_up_between_rounds_is_its_own():
    workers = oxs.Workers(2, "data")
    tx = oxs.agn(oxs.cross_shard(SGD, "data"), None, communication_period=4)

    @workers.step(state=2)
    def step(params, state, x):
        return oxs.apply_gradients(tx, params - x.mean(), state, params)

    held = step(*workers.start((jnp.ones(3), tx.init(jnp.ones(3)))), np.arange(2.0))
    assert workers.fingerprint(held) == {}
