"""What holds for every linear exchange: the law of what is lost, equal means, sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optx_sync as oxs
from tests.exchange.meeting import CONTEXTS, mapped, placed, rounds

quantized, top_k = oxs.exchange.quantized, oxs.exchange.top_k
power_sgd, error_feedback = oxs.exchange.power_sgd, oxs.exchange.error_feedback
ROUNDS = 100
EXCHANGES = {
    "exact": oxs.exchange.all_reduce(),
    "8 bit": quantized(),
    "4 bit": quantized(bits=4, block=7),
    "top-k": top_k(k=2, chunk=50),
    "2 bit": top_k(k=9, chunk=300, bits=2),
    "power": power_sgd(rank=2),
    "4 bit, feedback": error_feedback(quantized(bits=4)),
    "top-k, feedback": error_feedback(top_k(k=20, chunk=100)),
    "power, feedback": error_feedback(power_sgd(), decay=0.9),
}
# Sizes that divide nothing.
SHAPES = {
    "scalar": ((), np.float32),
    "empty": ((0, 3), np.float32),
    "vector": ((7,), np.float32),
    "matrix": ((11, 6), np.float32),
    "cube": ((5, 3, 4), jnp.bfloat16),
    "half": ((3,), jnp.bfloat16),
}
CASES = [
    *(("vmap", replicas, weighted) for replicas in (1, 3, 8) for weighted in (0, 1)),
    *((context, 3, 1) for context in CONTEXTS[1:]),
    ("shard_map", 8, 0),
    ("pmap", 8, 0),
    ("shard_map_unchecked", 1, 0),
    ("sharded_workers", 4, 0),
]


def inputs(replicas):
    """Trees [N, T, ...] and weights [N, T], zeros and ones of all replicas among."""
    rng = np.random.default_rng(replicas)
    # Of different sizes, as gradients of layers are.
    trees = {
        name: (rng.normal(size=(replicas, ROUNDS, *shape)) * 10.0**place).astype(dtype)
        for place, (name, (shape, dtype)) in enumerate(SHAPES.items(), -3)
    }
    weights = rng.integers(0, 4, (replicas, ROUNDS)).astype(np.float32)
    weights[:, 3] = 0
    return trees, weights


@functools.cache
def met(context, replicas, weighted):
    trees, weights = inputs(replicas)
    program = mapped(context, rounds(EXCHANGES, weighted), replicas)
    results = program(*placed(context, (trees, weights), replicas))
    if not weighted:
        weights = np.ones_like(weights)
    # A replica without weight leaves no trace; what it has is not in the law either.
    return trees, weights.astype(np.float64), jax.tree.map(np.asarray, results)


def wide(x, weights):
    """w_i x_i in float64."""
    scale = weights.reshape(weights.shape + (1,) * (x.ndim - 2))
    return scale * x.astype(np.float64)


@pytest.mark.parametrize("context, replicas, weighted", CASES)
def test_law(context, replicas, weighted):
    trees, weights, results = met(context, replicas, weighted)
    total = weights.sum(0)
    for name, (means, lost, _) in results.items():
        for leaf, x in trees.items():
            mean = means[leaf]
            assert mean.dtype == x.dtype, (name, leaf)
            assert np.array_equal(mean, np.broadcast_to(mean[:1], mean.shape)), name
            owed = np.zeros(x.shape) if lost is None else lost[leaf].astype(np.float64)
            arrived = wide(mean[0][None], total[None])[0]
            sent = wide(x, weights)
            tolerance = 1e-6 * (np.abs(sent) + np.abs(owed)).sum(0).max(initial=0)
            if lost is None:
                tolerance = max(tolerance, float(jnp.finfo(x.dtype).eps) * 1e3)
            error = np.abs(arrived - (sent - owed).sum(0)).max(initial=0)
            assert error <= tolerance, (name, leaf, error, tolerance)
