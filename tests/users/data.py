"""A line to fit, for tests in which only the way of writing a script matters."""

import jax.numpy as jnp
import numpy as np

WORKERS = 4


def batches(steps, seed=0):
    """Inputs [T, N, 5, 3] and targets [T, N, 5, 2] of T steps of N workers."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(steps, WORKERS, 5, 3))
    targets = inputs @ rng.normal(size=(3, 2)) + rng.normal(size=(steps, WORKERS, 1, 2))
    return np.asarray(inputs, np.float32), np.asarray(targets, np.float32)


def square_error(outputs, targets):
    return jnp.mean(jnp.square(outputs - targets))
