"""Microbatches of unequal numbers of tokens, added up in the step."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs

K, N = 4, 8


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.parametrize("options", [{}, {"shard_state": True}])
def test_weighed_by_its_tokens_it_is_the_gradient_of_the_mean_over_all_tokens(
    mesh, options
):
    def losses(params, x, real):
        return jnp.where(real, (x @ params - 1.0) ** 2, 0.0).sum()

    tx = oxs.cross_shard(optax.sgd(0.5), "data", **options)
    workers = oxs.Workers(N, "data", mesh=mesh)

    @workers.step(state=2)
    def step(params, state, x, real):
        def add(total, of):
            return total + jax.grad(losses)(params, *of), None

        micro = x.reshape(K, -1, 3), real.reshape(K, -1)
        total, _ = jax.lax.scan(add, jnp.zeros_like(params), micro)
        tokens = real.sum(dtype=jnp.float32)
        mean = total / jnp.maximum(tokens, 1.0)
        return oxs.apply_gradients(tx, mean, state, params, weight=tokens)

    params = jnp.array([1.0, -2.0, 0.5])
    x = jax.random.normal(jax.random.key(0), (N * K * 2, 3))
    # The last worker's microbatches are all padding, and some of the first one's.
    real = jax.random.bernoulli(jax.random.key(1), 0.6, (N * K * 2,))
    real = real.at[-K * 2 :].set(False).at[:2].set(False)
    args = *workers.start((params, tx.init(params))), x, real
    if mesh:
        rows = oxs.audit.collectives(step, *args)
        assert {row.times for row in rows} == {1}
    expected = params - 0.5 * jax.grad(losses)(params, x, real) / real.sum(
        dtype=jnp.float32
    )
    params, state = step(*args)
    assert jnp.allclose(workers.center((params, state)), expected, atol=1e-6)
