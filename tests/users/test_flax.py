"""Flax's `TrainState` as it is, and `SyncTrainState` for extra arguments."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.flax import SyncTrainState
from tests.users.data import WORKERS, batches, square_error

network: Any = nn.Dense(2)


@pytest.fixture(autouse=True)
def promotion():
    """Optax's Adam and Flax's normalisation need what users have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def start(tx, of: Any = TrainState) -> Any:
    params = network.init(jax.random.key(0), jnp.ones((1, 3)))
    return of.create(apply_fn=network.apply, params=params, tx=tx)


def train_step(state, inputs, targets, **extra):
    def loss_of(params):
        return square_error(state.apply_fn(params, inputs), targets)

    return state.apply_gradients(grads=jax.grad(loss_of)(state.params), **extra)


def test_train_state_in_pmap_trains_as_on_one_device():
    state = by_hand.replicate(start(oxs.cross_shard(optax.adam(0.1), "data")), WORKERS)
    step = jax.pmap(train_step, axis_name="data", devices=jax.devices()[:WORKERS])
    alone, alone_step = start(optax.adam(0.1)), jax.jit(train_step)
    for inputs, targets in zip(*batches(5), strict=True):
        state = step(state, inputs, targets)
        alone = alone_step(alone, inputs.reshape(-1, 3), targets.reshape(-1, 2))
    assert state.step.tolist() == [5] * WORKERS
    expected = by_hand.replicate(alone.params, WORKERS)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-5, atol=1e-5)


def test_swap_center_is_for_evaluation_and_leaves_training_alone():
    tx = oxs.elastic_average(
        optax.sgd(0.1), "data", communication_period=2, moving_rate=0.2, rho=0.0
    )
    first = start(tx)
    state = by_hand.replicate(first, WORKERS)
    step = jax.jit(jax.vmap(train_step, axis_name="data"), donate_argnums=0)
    inputs, targets = batches(4)
    for now in range(2):
        state = step(state, inputs[now], targets[now])
    swapped = oxs.flax.swap_center(state)
    assert swapped.opt_state is state.opt_state
    center = jax.tree.map(lambda x: x[0], state.opt_state.center)
    chex.assert_trees_all_equal(swapped.params, center)
    # One center, with which the network runs as it is; no worker has it.
    outputs = swapped.apply_fn(swapped.params, inputs[0, 0])
    assert outputs.shape == targets[0, 0].shape
    kernel = swapped.params["params"]["kernel"]
    for other in (first.params["params"]["kernel"], *state.params["params"]["kernel"]):
        assert not np.array_equal(kernel, other)
    # What was swapped is a copy: donation of the state leaves it alone.
    for now in (2, 3):
        state = step(state, inputs[now], targets[now])
    assert np.isfinite(kernel).all()
    assert not np.array_equal(
        oxs.flax.swap_center(state).params["params"]["kernel"], kernel
    )


def test_what_a_state_says_of_itself_is_in_flax_bytes():
    """How it was made has no leaf; the state still resizes as one of sums does."""
    coded = oxs.exchange.error_feedback(oxs.exchange.quantized())
    options: Any = {"reduction": "sum", "shard_state": True, "exchange": coded}
    state = start(oxs.cross_shard(optax.adam(0.1), "data", **options))
    restored: Any = serialization.from_bytes(state, serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored.opt_state.summed and restored.opt_state.cut


def test_contributes_and_gradient_step_reach_sync_replicas():
    tx = oxs.sync_replicas(optax.sgd(0.1), "data", replicas_to_aggregate=2)
    state = by_hand.replicate(start(tx, SyncTrainState), WORKERS)

    def one(state, inputs, targets, contributes, computed_at):
        return train_step(
            state, inputs, targets, contributes=contributes, gradient_step=computed_at
        )

    step = jax.jit(jax.vmap(one, axis_name="data"))
    inputs, targets = batches(2)
    zeros = jnp.zeros(WORKERS, jnp.int32)
    state = step(state, inputs[0], targets[0], zeros == 0, zeros)
    in_time, computed_at = jnp.array([[1, 0, 1, 1], [1, 1, 0, 1]])
    state = step(state, inputs[1], targets[1], in_time == 1, computed_at)
    seen = oxs.metrics(state.opt_state)
    found = seen.used, seen.not_contributed, seen.stale
    expected = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]
    np.testing.assert_array_equal(np.stack(found), expected)


class WithStatistics(SyncTrainState):
    batch_stats: Any


def test_fields_are_replaced_and_the_transformation_stays():
    tx = optax.sgd(0.1)  # takes no extra arguments
    state = WithStatistics.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, batch_stats=jnp.zeros(2)
    )
    after = state.apply_gradients(
        grads={"w": jnp.ones(2)}, batch_stats=jnp.ones(2), weight=3
    )
    assert isinstance(after, WithStatistics)
    assert after.tx is tx  # or the next step would be compiled anew
    np.testing.assert_array_equal(after.batch_stats, [1, 1])
    params: Any = after.params
    np.testing.assert_allclose(params["w"], [0.9, 0.9], rtol=1e-6)
    assert after.step == 1
