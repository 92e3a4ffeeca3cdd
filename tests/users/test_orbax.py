"""Checkpoints with Orbax: a run that is resumed is the run that was not stopped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint

import optx_sync as oxs
from tests.contexts import AXIS, REPLICAS

# One program trains all of them, each on parameters of its own.
TRANSFORMATIONS: Any = {
    "cross_shard": oxs.cross_shard(oxs.optimizers.ftrl(0.1, l1=0.01), AXIS),
    # Eight gradients of four replicas: every second step is in the middle.
    "sync_replicas": oxs.sync_replicas(
        optax.sgd(0.1, 0.9), AXIS, 8, variable_averages=0.9
    ),
    "elastic_average": oxs.elastic_average(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, learning_rate=0.1
    ),
    "agn": oxs.agn(oxs.optimizers.adam(0.1), AXIS, communication_period=3),
    "diloco": oxs.diloco(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, drop_nonfinite=True
    ),
    "diloco in pieces": oxs.diloco(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, shard_state=True
    ),
    "cross_shard in pieces": oxs.cross_shard(
        oxs.optimizers.adagrad(0.1), AXIS, shard_state=True
    ),
    "coded": oxs.local_sgd(
        optax.sgd(0.1),
        AXIS,
        communication_period=3,
        exchange=oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4)),
    ),
}
ONE = {
    "w": jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32).reshape(3, 4),
    "b": jnp.array([0.5, 1.5, 2.5, 3.5], jnp.bfloat16),
}
PARAMS = dict.fromkeys(TRANSFORMATIONS, ONE)
TX = optax.partition(TRANSFORMATIONS, {name: name for name in PARAMS})


WORKERS = oxs.Workers(REPLICAS, AXIS, mesh=True)


@WORKERS.step(state=2, split=False)
def step(params, state, grads):
    updates, state = TX.update(grads, state, params)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state


def start() -> Any:
    return WORKERS.start((PARAMS, TX.init(PARAMS)))


def trained(now, seed):
    """Two steps on, on gradients of each worker's own."""
    rng = np.random.default_rng(seed)
    for _ in range(2):
        drawn = {k: rng.normal(size=(REPLICAS, *x.shape)) for k, x in ONE.items()}
        grads = {k: jnp.asarray(x, ONE[k].dtype) for k, x in drawn.items()}
        now = step(*now, dict.fromkeys(PARAMS, grads))
    return now


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape, a.tobytes()) == (e.dtype, e.shape, e.tobytes()), path


def test_resumed_training_is_bit_equal(tmp_path):
    """After two steps of three, and of two in every second accumulation."""
    at = trained(start(), 0)
    counters = optax.tree_utils.tree_get_all_with_path(at, "steps_since_round")
    assert {int(np.max(count)) for _, count in counters} == {2}  # of three
    # As a new process would: from a fresh start, of which only the shapes are used.
    like = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, start())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", at)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", like)
    assert_same_bits(restored, at)
    resumed, uninterrupted = (trained(trained(x, 1), 2) for x in (restored, at))
    assert_same_bits(resumed, uninterrupted)
