"""The methods of docs/reference/settings.md against their papers' equations."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optx_sync as oxs
from tests import contexts

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/settings.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
RECIPES: dict[str, Any] = {}
exec("\n".join(BLOCKS), RECIPES)
N, D = 4, 3
RNG = np.random.default_rng(0)
START = RNG.normal(size=D).astype(np.float32)
GRADS = RNG.normal(size=(40, N, D)).astype(np.float32)


def by_recipe(name, axis="clients", mesh=None):
    """The parameters [steps, N, D] of workers with given gradients."""
    grads = GRADS.swapaxes(0, 1).copy()
    workers, txs = oxs.Workers(N, axis, mesh=mesh), {name: RECIPES[name]}
    history, _ = contexts.by_workers(workers, txs, START, grads)
    return np.asarray(history[name]).swapaxes(0, 1)


def by_paper(period, absorb, pull=lambda t, x, s: 0.0, correct=lambda: 0.0):
    """The same of workers that take what `absorb(c, mean x)` makes of the center."""
    x = s = np.tile(START.astype(float), (N, 1))
    for t, gradient in enumerate(GRADS.astype(float)):
        x = x - 0.1 * (gradient + pull(t, x, s) + correct())
        if (t + 1) % period == 0:
            center = absorb(s[0], x)
            x = s = np.tile(center, (N, 1))
        yield x


def test_fed_prox():
    mean = by_paper(10, lambda c, x: x.mean(0), lambda t, x, s: 0.01 * (x - s))
    found = by_recipe("fed_prox")
    np.testing.assert_allclose(found, list(mean), atol=1e-5)
    plain = list(by_paper(10, lambda c, x: x.mean(0)))
    assert np.abs(found - plain).max() > 1e-4


def test_fed_adam_and_fed_yogi():
    """With the corrections of the bias that Optax adds."""

    def server(yogi):
        start = 1e-6 if yogi else 0.0
        m, v, rounds = np.full(D, start), np.full(D, start), 0

        def absorb(c, x):
            nonlocal m, v, rounds
            d, rounds = c - x.mean(0), rounds + 1
            m = 0.9 * m + 0.1 * d
            toward = np.sign(v - d**2) * d**2 if yogi else v - d**2
            v = v - 0.01 * toward
            hat = v / (1 - 0.99**rounds)
            return c - 0.01 * m / (1 - 0.9**rounds) / (np.sqrt(hat) + 1e-3)

        return absorb

    with jax.numpy_dtype_promotion("standard"):  # Optax's own promote dtypes
        for name in ("fed_adam", "fed_yogi"):
            expected = list(by_paper(10, server(name == "fed_yogi")))
            found = by_recipe(name)
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)


def test_palsgd():
    drawn = np.array([RECIPES["drawn"](t) for t in range(200)])
    assert set(drawn.tolist()) == {0.0, float(np.float32(0.1))}
    assert 5 < (drawn > 0).sum() < 40
    pull = drawn[: len(GRADS)]
    assert 0 < (pull > 0).sum() < len(GRADS)
    expected = list(by_paper(64, np.mean, lambda t, x, s: pull[t] * (x - s)))
    found = by_recipe("palsgd", axis="workers")
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scaffold():
    """As published: with a c_i of each worker's own, and their mean c."""
    own, mean = np.zeros((N, D)), np.zeros(D)

    def absorb(c, x):
        nonlocal own, mean
        before = own
        own = own - mean + (c - x) / (10 * 0.1)
        mean = mean + (own - before).mean(0)
        return x.mean(0)

    expected = list(by_paper(10, absorb, correct=lambda: mean - own))
    found = by_recipe("scaffolded")
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_array_equal(by_recipe("scaffolded", mesh=True), found)
    plain = list(by_paper(10, lambda c, x: x.mean(0)))
    assert np.abs(found - plain).max() > 0.1


def test_one_worker_sends_nothing():
    tx, params = RECIPES["one_worker"], {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}

    def step(params, state):
        return oxs.apply_gradients(tx, params, state, params)

    with jax.numpy_dtype_promotion("standard"):
        assert oxs.audit.collectives(step, params, tx.init(params)) == []
        assert [n for n in range(90) if oxs.by_hand.due(tx, n)] == [29, 59, 89]
