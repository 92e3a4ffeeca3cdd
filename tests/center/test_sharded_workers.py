"""Workers that are sharded by hand, over a second axis of `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests.meshes import mesh_of

PARAMS = {"sharded": jnp.zeros(2), "whole": jnp.zeros(3)}
SPECS = {"sharded": P("shards"), "whole": P()}
WITH_WORKERS = jax.tree.map(lambda spec: P("workers", *spec), SPECS)


def run(tx, grads, steps=1, check_vma=True, state_specs=None):
    """(parameters, state) of two workers of two shards after some equal steps."""
    axes = by_hand.state_axes(tx, PARAMS)
    specs = state_specs or by_hand.state_specs(tx, PARAMS, SPECS, "workers")
    mesh = mesh_of({"workers": 2, "shards": 2})

    def local(params, state, grads):
        params, grads = by_hand.first((params, grads))
        state = by_hand.first(state, axes)
        for _ in range(steps):
            params, state = oxs.apply_gradients(tx, grads, state, params)
        return by_hand.replicate(params, 1), by_hand.replicate(state, 1, axes)

    out = WITH_WORKERS, specs
    ways = {"in_specs": (*out, WITH_WORKERS), "out_specs": out, "check_vma": check_vma}
    step = jax.shard_map(local, mesh=mesh, **ways)
    state = by_hand.replicate(tx.init(PARAMS), 2, axes)
    return jax.jit(step)(by_hand.replicate(PARAMS, 2), state, grads)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_worker_that_breaks_in_one_shard_breaks_as_a_whole(check_vma):
    """The round is that of the other worker, in both shards."""
    guards: Any = {"drop_nonfinite": True, "measure": True}
    tx = oxs.local_sgd(optax.sgd(1.0), "workers", communication_period=1, **guards)
    grads = {
        "sharded": jnp.array([[-3.0, jnp.nan], [-1.0, -1.0]]),
        "whole": jnp.array([[-3.0] * 3, [-1.0] * 3]),
    }
    params, state = run(tx, grads, check_vma=check_vma)
    for leaf in jax.tree.leaves((params, state.center)):
        np.testing.assert_array_equal(leaf, np.ones_like(leaf))
    metrics: Any = oxs.metrics(state)
    np.testing.assert_array_equal(metrics.dropped, [1, 0])
    if check_vma:  # A leaf in shards counts as a whole, a replicated one counts once.
        expected = [0.0, np.sqrt(5.0)]
        np.testing.assert_allclose(metrics.distance_before_round, expected, rtol=1e-6)


def constant():
    """An optimizer whose updates depend on nothing, and so vary over no axis."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: jnp.full(u.shape, -1.0), updates), state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize("drop_nonfinite", [True, False])
def test_updates_that_vary_over_fewer_axes_than_the_parameters(drop_nonfinite):
    tx = oxs.local_sgd(
        constant(), "workers", communication_period=2, drop_nonfinite=drop_nonfinite
    )
    params, state = run(tx, by_hand.replicate(PARAMS, 2), steps=3)
    np.testing.assert_array_equal(params["sharded"], np.full((2, 2), -3.0))
    np.testing.assert_array_equal(state.center["sharded"], [-2.0, -2.0])


def test_a_center_that_does_not_lie_as_the_parameters_do():
    tx = oxs.local_sgd(optax.sgd(1.0), "workers")
    specs: Any = by_hand.state_specs(tx, PARAMS, P(), "workers")
    with pytest.raises(ValueError, match=r"'sharded'\].*\['shards'\], but the center"):
        run(tx, by_hand.replicate(PARAMS, 2), state_specs=specs)
