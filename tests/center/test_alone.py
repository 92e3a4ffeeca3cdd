"""`axis_name=None`: one worker with a center of its own, no axis and no collective."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.center.test_laws import PARAMS, STEPS, gradients

SGD = optax.sgd(0.05, momentum=0.9)
OPTIONS: dict[str, Any] = {
    "communication_period": 3,
    "drop_nonfinite": True,
    "inner_state": "average",
    "measure": True,
}
EIGHT_BITS = oxs.exchange.error_feedback(oxs.exchange.quantized())
RATE, MOMENTUM = 0.6, 0.8


def rules(axis_name):
    return {
        "elastic": oxs.elastic_average(
            SGD, axis_name, num_workers=1, moving_rate=0.2, rho=0.3, **OPTIONS
        ),
        "agn": oxs.agn(SGD, axis_name, **OPTIONS),
        "local_sgd": oxs.local_sgd(SGD, axis_name, exchange=EIGHT_BITS, **OPTIONS),
        "lookahead": oxs.diloco(
            SGD, axis_name, outer=optax.sgd(RATE), communication_period=3
        ),
        "snoo": oxs.diloco(
            SGD,
            axis_name,
            outer=optax.sgd(RATE, MOMENTUM, nesterov=True),
            communication_period=3,
        ),
    }


def trains(axis_name):
    """All rules in one program: histories and last states."""

    def train(grads):
        params = jax.tree.map(jnp.asarray, PARAMS)
        return {
            name: contexts.steps(tx)(params, tx.init(params), grads, {})
            for name, tx in rules(axis_name).items()
        }

    return train


def test_it_is_one_worker_under_vmap():
    stacked = gradients(workers=1)
    grads = jax.tree.map(lambda g: g[:, 0], stacked)
    alone = trains(None)
    found = jax.jit(alone)(grads)
    mapped = jax.vmap(trains("workers"), in_axes=1, axis_name="workers")
    expected = jax.jit(mapped)(stacked)
    for name, (history, _) in found.items():
        first = jax.tree.map(lambda x: x[0], expected[name][0])
        contexts.assert_close(history, first)
    assert oxs.audit.collectives(alone, grads) == []
    for name, (history, state) in found.items():
        assert int(oxs.metrics(state).rounds) == 2, name
        if name in ("lookahead", "snoo"):
            check_by_hand(history, grads, MOMENTUM if name == "snoo" else 0)


def check_by_hand(history, grads, momentum):
    """SNOO is a Nesterov step on what the steps moved, Lookahead a plain one."""
    for name, start in PARAMS.items():
        x = slow = np.float64(start)
        trace = buffer = np.zeros_like(x)
        for t in range(STEPS):
            trace = 0.9 * trace + grads[name][t]
            x = x - 0.05 * trace
            if t % 3 == 2:
                buffer = momentum * buffer + (slow - x)
                x = slow = slow - RATE * (slow - x + momentum * buffer)
            np.testing.assert_allclose(history[name][t], x, rtol=0, atol=3e-6)


def of_replicas(inner, **options):
    return oxs.cross_shard(inner, "data", **options)


def snoo(inner):
    outer = optax.sgd(RATE, MOMENTUM, nesterov=True)
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


def test_what_it_cannot_be():
    wrong: Any = oxs
    for call in (
        lambda: wrong.local_sgd(SGD, ()),
        lambda: wrong.cross_shard(SGD, None),
        lambda: wrong.gossip(SGD, None),
    ):
        with pytest.raises(TypeError, match="axis_name must be the name of a mapped"):
            call()
    with pytest.raises(ValueError, match="Put the center rule around"):
        of_replicas(snoo(SGD), shard_state=True).init(jnp.ones(2))
    tx = oxs.elastic_average(SGD, None, num_workers=4, moving_rate=0.1, rho=0.0)
    with pytest.raises(ValueError, match="num_workers=4, but axis_name=None stands"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_what_a_replica_adds_up_between_rounds_is_its_own():
    workers = oxs.Workers(2, "data")
    tx = oxs.agn(oxs.cross_shard(SGD, "data"), None, communication_period=4)

    @workers.step(state=2)
    def step(params, state, x):
        return oxs.apply_gradients(tx, params - x.mean(), state, params)

    held = step(*workers.start((jnp.ones(3), tx.init(jnp.ones(3)))), np.arange(2.0))
    assert workers.fingerprint(held) == {}
