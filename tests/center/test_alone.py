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


def test_what_it_cannot_be():
    wrong: Any = oxs
    for call in (
        lambda: wrong.local_sgd(SGD, ()),
        lambda: wrong.cross_shard(SGD, None),
        lambda: wrong.gossip(SGD, None),
    ):
        with pytest.raises(TypeError, match="axis_name must be the name of a mapped"):
            call()
    tx = oxs.elastic_average(SGD, None, num_workers=4, moving_rate=0.1, rho=0.0)
    with pytest.raises(ValueError, match="num_workers=4, but axis_name=None stands"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
