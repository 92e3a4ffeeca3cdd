"""Elastic averaging on a quadratic is stable where linear algebra says so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand

STEPS = 4000  # The slowest mode of these grids moves by 0.37 % in a step.


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_stability_map_of_900_points(workers):
    """Curvature 1, period 1, no penalty; rate a, learning rate e, p workers.

    The mean of the workers and the center follow a matrix with determinant (1 - e)(1 -
    a - p a) and trace (1 - a)(1 - e) + 1 - p a; differences between workers are
    multiplied by (1 - a)(1 - e).
    """
    rates = np.linspace(0.039, 0.989, 30)
    learning_rates = np.linspace(0.044, 2.221, 30)
    a, e = (grid.ravel() for grid in np.meshgrid(rates, learning_rates))
    determinant = (1 - e) * (1 - a - workers * a)
    trace = (1 - a) * (1 - e) + 1 - workers * a
    stable = (np.abs(determinant) < 1) & (np.abs(trace) < 1 + determinant)
    if workers > 1:  # One worker has no other to differ from.
        stable &= np.abs((1 - a) * (1 - e)) < 1
    assert 100 < stable.sum() < 900

    def train(moving_rate, learning_rate):
        options: Any = {"moving_rate": moving_rate, "rho": 0.0}
        options |= {"num_workers": workers, "communication_period": 1}
        tx = oxs.elastic_average(optax.sgd(learning_rate), "workers", **options)
        params: Any = 1 + jnp.arange(
            workers, dtype=jnp.float32
        )  # All modes are excited.
        state = by_hand.replicate(tx.init(jnp.float32(-1)), workers)

        def step(carry, _):
            params, state = carry
            updates, state = jax.vmap(tx.update, axis_name="workers")(
                params, state, params
            )
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, state), length=STEPS)
        return jnp.concatenate([params, state.center])

    points = (jnp.asarray(x, jnp.float32) for x in (a, e))
    # In NumPy: XLA's maximum on a CPU loses a NaN.
    largest = np.abs(np.asarray(jax.jit(jax.vmap(train))(*points))).max(1)
    # What is stable has gone to 0, what is not to infinity or NaN: nothing in between.
    assert not np.any((largest > 1e-3) & (largest < 1e3))
    np.testing.assert_array_equal(largest < 1, stable)


def test_a_moving_rate_that_diverges_without_gradients_is_refused_in_lockstep():
    """A round multiplies the distance by 1 - a (p + 1); one by one any rate is well."""

    def step(moving_rate, workers=8):
        rule = oxs.rules.elastic(moving_rate=moving_rate, rho=0.0)
        tx = oxs.center_variable(optax.sgd(0.0), rule, "workers")
        params = jnp.arange(float(workers))
        state = by_hand.replicate(tx.init(params[0]), workers)
        jax.eval_shape(jax.vmap(tx.update, axis_name="workers"), params, state, params)

    for rate, workers in ((2 / 9, 8), (0.9 / 8, 8), (1.0, 1)):
        step(rate, workers)
    for rate, workers in ((0.5, 8), (0.23, 8), (jnp.float32(0.7), 2)):
        with pytest.raises(ValueError, match=f"with {workers} workers .* at most 0"):
            step(rate, workers)
