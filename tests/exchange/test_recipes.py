"""The recipes of docs/exchange.md are what was published, restated in NumPy."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs
from tests.contexts import started

# Optax's own optimizers promote dtypes, which tests/conftest.py forbids.
AS_OPTAX = functools.partial(jax.numpy_dtype_promotion, "standard")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "exchange.md"


@functools.cache
def recipes() -> dict[str, Any]:
    """What the page's block of recipes defines."""
    code = PAGE.read_text().split("## Recipes")[1].split("```python\n")[1]
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax, "oxs": oxs}
    exec(code.split("```")[0], names)
    return names


def gradients(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def waves(size):
    """The DCT-II as a matrix, by its sum."""
    places = np.arange(size)
    matrix = np.cos(np.pi / size * np.outer(places, places + 0.5)) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


def test_demo():
    grads = gradients(3, 4, 8192)  # steps, replicas, two chunks of 64 rows
    step, x, state = started(recipes()["demo"], jnp.zeros(8192), 4, "data")
    dct, owed, moved = waves(64), np.zeros((4, 8192)), np.zeros(8192)
    for now in grads:
        x, state = step(x, state, jnp.asarray(now))
        owed = 0.999 * owed + now
        found = np.zeros((4, 2, 4096))
        for own, out in zip(owed, found, strict=True):
            chunks = (own.reshape(-1, 64) @ dct.T).reshape(2, 4096)
            for chunk, kept in zip(chunks, out, strict=True):
                largest = np.argsort(-np.abs(chunk))[:32]
                kept[largest] = chunk[largest]
        sent = (found.reshape(4, -1, 64) @ dct).reshape(4, 8192)
        owed, mean = owed - sent, sent.mean(0)
        moved -= 1e-3 * np.sign(np.where(np.abs(mean) > 1e-6, mean, 0))
    # A mean that is nearly 0 has either sign, or none.
    wrong = np.abs(np.asarray(x) - moved).max(0) > 1e-6
    assert wrong.mean() < 0.01 and np.abs(x).max() < 0.0031


def test_distributed_lion():
    grads = gradients(4, 3, 50)
    step, x, state = started(recipes()["lion"], jnp.ones(50), 3, "data")
    m, expected = np.zeros((3, 50)), np.ones(50)
    for now in grads:
        x, state = step(x, state, jnp.asarray(now))
        votes = np.sign(0.9 * m + 0.1 * now)
        m = 0.99 * m + 0.01 * now
        expected -= 1e-4 * (np.sign(votes.sum(0)) + 0.1 * expected)
    np.testing.assert_allclose(x, np.tile(expected, (3, 1)), rtol=1e-6)


def test_sparse_loco_is_clipped_before_what_is_owed_is_added():
    grads = gradients(3, 8192) * np.array([1, 2, 30], np.float32)[:, None]
    ex = recipes()["ex"]
    fed = ex.error_feedback(ex.top_k(64, 4096, bits=2), decay=0.95)
    clipped = ex.clipped("median", fed)
    norms = np.linalg.norm(grads, axis=1)
    short = grads * np.minimum(1, np.median(norms) / norms)[:, None]

    def meet(exchange, x):
        met = exchange.meet(x, exchange.init(x), "pods")
        return exchange.meet(x, met.state, "pods").mean

    both = jax.vmap(lambda x, y: (meet(clipped, x), meet(fed, y)), axis_name="pods")
    one, other = jax.jit(both)(grads, short)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    tx = recipes()["sparse_loco"]
    assert not oxs.optimizers.slot(tx.init(jnp.zeros(8192)), "error").any()


def test_muloco_in_two_bits_goes_where_it_goes_exactly():
    target, centers = jnp.asarray(gradients(2, 64, 64)), []
    outer = optax.sgd(0.8, momentum=0.9, nesterov=True)
    options: Any = {"communication_period": 30, "outer": outer}
    exact = oxs.diloco(optax.contrib.muon(1e-2), "pods", **options)
    for tx in (exact, recipes()["mu_loco"]):
        step, params, state = started(tx, {"w": jnp.zeros((64, 64))}, 2, "pods")
        for _ in range(60):
            with AS_OPTAX():
                params, state = step(params, state, {"w": params["w"] - target})
        centers.append(oxs.center_params(state, params)["w"])
    moved, apart = jnp.linalg.norm(centers[0]), jnp.linalg.norm(centers[1] - centers[0])
    assert 0 < apart < 0.5 * moved


def trained(tx, x, state, grads):
    """The parameters after each step, and the last states, of all replicas."""

    def of_one(grads):
        def step(carry, now):
            updates, state = tx.update(now, carry[1], carry[0])
            x = optax.apply_updates(carry[0], updates)
            return (x, state), x

        (_, last), history = jax.lax.scan(step, (x, state), grads)
        return history, last

    with AS_OPTAX():
        return jax.jit(jax.vmap(of_one, 1, axis_name="data"))(grads)


def test_one_bit_adam_goes_on_from_the_moments_of_the_warm_up():
    warm_up, make = recipes()["warm_up"], recipes()["one_bit_adam"]
    grads, zeros = gradients(8, 3, 512) + 1, jnp.zeros(512)
    history, state = trained(warm_up, zeros, warm_up.init(zeros), grads[:4])
    warm = jax.tree.map(lambda leaf: leaf[0], state)
    x, mu, nu = (np.asarray(leaf) for leaf in (history[0, -1], warm[0].mu, warm[0].nu))
    tx, state = make(jnp.asarray(x), warm)
    history, state = trained(tx, jnp.asarray(x), state, grads[4:])
    m, sent = np.tile(mu, (3, 1)), np.zeros(512)
    for now in grads[4:]:
        m = 0.9 * m + 0.1 * now
        sent += m.sum(0)
    # All momenta have arrived, over the frozen second moments, or are owed.
    arrived = 3 * (x - history[0, -1]) / 1e-3 * (np.sqrt(nu) + 1e-8)
    owed = np.asarray(oxs.optimizers.slot(state, "error")).sum(0)
    np.testing.assert_allclose(arrived + owed, sent, atol=2e-3)
    assert np.abs(owed).max() > 0.1
