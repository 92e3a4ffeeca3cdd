"""Steps of `Workers` in a `lax.scan` are those of a loop of the host."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optx_sync as oxs

AXIS, N, K = "workers", 4, 7
CODES = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=8))
CASES = {
    "cross_shard, in pieces": oxs.cross_shard(
        optax.sgd(0.1, 0.9), AXIS, shard_state=True
    ),
    "sync_replicas": oxs.sync_replicas(optax.sgd(0.1), AXIS, 3 * N),
    "diloco in parts, behind": oxs.diloco(
        optax.sgd(0.1, 0.9),
        AXIS,
        communication_period=4,
        fragments=2,
        overlap=True,
        exchange=CODES,
    ),
    "gossip": oxs.gossip(optax.sgd(0.1), AXIS),
}


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - 1.0) ** 2)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert x.dtype == y.dtype and jnp.allclose(x, y, atol=1e-6), (x, y)


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loop(name, mesh):
    tx, workers = CASES[name], oxs.Workers(N, AXIS, mesh=mesh)

    @workers.step(state=2, average=False)
    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return *oxs.apply_gradients(tx, grads, state, params), loss

    def one(now, x):
        *now, losses = step(*now, x)
        return tuple(now), losses

    def start():
        params = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2)}
        return workers.start((params, tx.init(params)))

    batches = jax.random.normal(jax.random.key(0), (K, 8 * N, 8))
    looped, losses = start(), []
    for x in batches:
        looped, own = one(looped, x)
        losses.append(own)
    scanned = jax.jit(lambda now, xs: jax.lax.scan(one, now, xs), donate_argnums=0)
    assert_equal(scanned(start(), batches), (looped, jnp.stack(losses)))


def test_objects_of_nnx_are_taken_apart_once():
    tx = oxs.local_sgd(optax.sgd(0.1, 0.9), AXIS, communication_period=3)
    workers = oxs.Workers(N, AXIS)

    def loss_of(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    graph, params = nnx.split(nnx.Linear(8, 2, rngs=nnx.Rngs(0)))

    @workers.step(state=2)
    def apart(params, state, x):
        def loss(params):
            return loss_of(nnx.merge(graph, params), x)

        value, grads = jax.value_and_grad(loss)(params)
        return *oxs.apply_gradients(tx, grads, state, params), value

    def one(now, x):
        *now, loss = apart(*now, x)
        return tuple(now), loss

    batches = jax.random.normal(jax.random.key(0), (K, 8 * N, 8))
    scan = jax.jit(lambda now, xs: jax.lax.scan(one, now, xs))
    scanned, losses = scan(workers.start((params, tx.init(params))), batches)

    @workers.step(state=2)
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    objects = workers.start((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
    looped = [step(*objects, x) for x in batches]
    assert_equal(losses, jnp.stack(looped))
    center = nnx.state(workers.center(objects))
    assert_equal(jax.tree.leaves(workers.center(scanned)), jax.tree.leaves(center))
