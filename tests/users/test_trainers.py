"""Trainers as others write them, on eight replicas: the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs

AXIS, STEPS = "data", 8
RNG = np.random.default_rng(0)
PARAMS = {
    "dense": {"kernel": jnp.asarray(RNG.normal(size=(3, 5)), jnp.float32)},
    "head": {"kernel": jnp.ones((5, 1)) / 5, "bias": jnp.zeros(1)},
}
BATCHES = [
    (RNG.normal(size=(32, 3)), RNG.normal(size=(32, 1)) + 1) for _ in range(STEPS)
]
BATCHES = [tuple(np.asarray(x, np.float32) for x in batch) for batch in BATCHES]
DECAYED = jax.tree.map(lambda x: x.ndim > 1, PARAMS)  # bools: no shape is asked later


def accumulating(clip):
    """Weight decay of matrices alone, and an update of four batches."""
    del clip
    decayed = optax.adamw(0.05, weight_decay=0.5, mask=DECAYED)
    return optax.MultiSteps(decayed, 4).gradient_transformation()


def clipped(clip):
    """Before Adam, as most trainers have it."""
    return optax.chain(clip(0.3), optax.adam(0.05))


def with_rates(clip):
    """A rate that the loop sets in each step."""
    del clip
    return optax.inject_hyperparams(optax.adam)(learning_rate=0.0)


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["dense"]["kernel"])
    bias = jnp.broadcast_to(params["head"]["bias"], y.shape)
    return jnp.mean((hidden @ params["head"]["kernel"] + bias - y) ** 2)


def trained(tx, n, set_rates):
    workers = oxs.Workers(n, AXIS)
    params, state = workers.start((PARAMS, tx.init(PARAMS)))

    @workers.step(state=2)
    def step(params, state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        return oxs.apply_gradients(tx, grads, state, params)

    for number, batch in enumerate(BATCHES):
        if set_rates:
            old = optax.tree.get(state, "learning_rate")
            rate = jnp.full_like(old, 0.1 / (1 + number))
            state = optax.tree.set(state, learning_rate=rate)
        params, state = step(params, state, *batch)
    return jax.tree.map(lambda x: np.asarray(x[0]), params)


@pytest.mark.parametrize("shard_state", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("trainer", [accumulating, clipped, with_rates])
def test_replicas_give_the_numbers_of_one_device(trainer, shard_state):
    def ours(norm):
        return oxs.clip_by_global_norm(norm, AXIS)

    clip, rates = (
        ours if shard_state else optax.clip_by_global_norm,
        trainer is with_rates,
    )
    tx = oxs.cross_shard(trainer(clip), AXIS, shard_state=shard_state)
    with jax.numpy_dtype_promotion("standard"):
        found = trained(tx, 8, rates)
        one = trained(trainer(optax.clip_by_global_norm), 1, rates)
    for x, y, begun in zip(*map(jax.tree.leaves, (found, one, PARAMS)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
        assert np.abs(y - begun).max() > 0.02
