"""A state that a transformation would not have made is refused, and its own is not."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs

AXIS, PARAMS = "workers", {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
SGD = optax.sgd(0.1)
CODES = oxs.exchange.quantized(bits=4)


def local_sgd(inner=SGD, **options):
    return oxs.local_sgd(inner, AXIS, communication_period=2, **options)


KINDS: dict[str, Any] = {
    "local_sgd": local_sgd(),
    "with momentum": local_sgd(optax.sgd(0.1, 0.9)),
    "in parts": local_sgd(fragments=2),
    "overlap": local_sgd(overlap=True),
    "fed back": local_sgd(exchange=oxs.exchange.error_feedback(CODES)),
    "diloco": oxs.diloco(SGD, AXIS, communication_period=2),
    "elastic": oxs.elastic_average(SGD, AXIS, moving_rate=0.1, rho=0.0),
    "gossip": oxs.gossip(SGD, AXIS),
    "sync_replicas": oxs.sync_replicas(SGD, AXIS, 2),
}


def step(tx, state):
    def one(grads):
        return oxs.apply_gradients(tx, grads, state, PARAMS)[0]

    stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS)
    return jax.eval_shape(jax.vmap(one, axis_name=AXIS), stacked)


@pytest.mark.parametrize("pair", [*itertools.permutations(KINDS, 2)], ids="-".join)
def test_the_state_of_another_transformation_is_refused(pair):
    made, used = (KINDS[name] for name in pair)
    with pytest.raises(ValueError, match="is not one of this transformation"):
        step(used, made.init(PARAMS))


@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_ones_own_is_none_of_another(name):
    """Also where this process has not made it: of the same function, called again."""
    state = KINDS[name].init(PARAMS)
    step(KINDS[name], jax.tree.map(jnp.copy, state))
    again = oxs.diloco(SGD, AXIS, communication_period=7)  # another period may go on
    step(again, KINDS["diloco"].init(PARAMS))
