"""Equinox modules and plain pytrees: what is no array is no parameter."""

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests.users.data import WORKERS, batches, square_error


class Network(eqx.Module):
    """With a function, a counter and a bias that is None, as real modules have."""

    hidden: eqx.nn.Linear
    out: eqx.nn.Linear
    activation: object
    calls: jax.Array

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(3, 4, key=first)
        self.out = eqx.nn.Linear(4, 2, use_bias=False, key=second)
        self.activation = jax.nn.tanh
        self.calls = jnp.zeros((), jnp.int32)

    def __call__(self, x):
        return self.out(jax.nn.tanh(self.hidden(x)))


WRAPPERS = {
    "sync_replicas": oxs.sync_replicas(
        optax.sgd(0.1), "data", 3, variable_averages=0.9, drop_nonfinite=True
    ),
    "diloco": oxs.diloco(optax.sgd(0.1, 0.9), "data", communication_period=2),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_partitioned_module_trains(name):
    tx = WRAPPERS[name]
    params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)
    assert params.calls is params.out.bias is params.activation is None
    axes = by_hand.state_axes(tx, params)

    def loss_of(params, inputs, targets):
        network = eqx.combine(params, static)
        return square_error(jax.vmap(network)(inputs), targets)

    def step(params, state, inputs, targets):
        loss, grads = eqx.filter_value_and_grad(loss_of)(params, inputs, targets)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    step = jax.jit(
        jax.vmap(step, in_axes=(0, axes, 0, 0), out_axes=(0, axes, 0), axis_name="data")
    )
    workers = by_hand.replicate(params, WORKERS)
    state = by_hand.replicate(tx.init(params), WORKERS, axes)
    losses = []
    inputs, targets = batches(1)
    for _ in range(6):
        workers, state, loss = step(workers, state, inputs[0], targets[0])
        losses.append(loss.mean())
    assert jax.tree.structure(workers) == jax.tree.structure(params)
    assert losses[-1] < 0.9 * losses[0]
    if name == "sync_replicas":
        return
    center = oxs.center_params(state, workers)
    network: Any = eqx.combine(center, static)
    assert jax.vmap(network)(inputs[0, 0]).shape == (5, 2)
    chex.assert_trees_all_equal(center, state.center)
    # The sixth step is a round: a hard pull.
    pulled = by_hand.replicate(center, WORKERS)
    chex.assert_trees_all_close(workers, pulled, rtol=1e-6, atol=1e-7)
