"""Fields of the inner state that workers average every so many rounds: DES-LOC."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.refusals import all_refused

AXIS, N, PERIOD, EVERY = contexts.AXIS, contexts.REPLICAS, 2, {"mu": 3, "nu": 6}
START = np.array([1.0, -2.0, 0.5], np.float32)
GRADS = np.random.default_rng(0).normal(size=(26, N, 3)).astype(np.float32)
OPTAX = optax.chain(optax.scale_by_adam(0.9, 0.99), optax.scale(-0.1))
# Optax's Adam promotes dtypes, which tests/conftest.py forbids.
ADAM = optax.GradientTransformation(
    OPTAX.init, jax.numpy_dtype_promotion("standard")(OPTAX.update)
)


def local_sgd(inner=ADAM, **options):
    return oxs.local_sgd(inner, AXIS, communication_period=PERIOD, **options)


@pytest.mark.parametrize("context", ["vmap_axes", "shard_map_axes"])
def test_the_published_update(context):
    weights = np.random.default_rng(1).integers(1, 4, (len(GRADS), N))
    extra = {"weight": weights.astype(np.float32)}
    tx = local_sgd(inner_state=EVERY)
    found, state = contexts.replay(context, tx, START, GRADS, extra)
    x = np.tile(START.astype(float), (N, 1))
    mu, nu, expected = np.zeros((N, 3)), np.zeros((N, 3)), []
    for t, g in enumerate(GRADS.astype(float)):
        mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g**2
        hats = mu / (1 - 0.9 ** (t + 1)), nu / (1 - 0.99 ** (t + 1))
        x = x - 0.1 * hats[0] / (np.sqrt(hats[1]) + 1e-8)
        if (t + 1) % PERIOD == 0:
            number, share = (t + 1) // PERIOD, weights[t] / weights[t].sum()
            x, *moments = (
                np.tile(share @ y, (N, 1)) if number % every == 0 else y
                for y, every in ((x, 1), (mu, 3), (nu, 6))
            )
            mu, nu = moments
        expected.append(x)
    np.testing.assert_allclose(found, np.array(expected), atol=2e-5)
    moments = state.inner[0]
    np.testing.assert_allclose(moments.mu, mu, atol=1e-5)
    np.testing.assert_allclose(moments.nu, nu, atol=1e-5)


def test_a_field_is_sent_when_it_is_due():
    """D (1 + 1/3 + 1/6) in a round, each field in a conditional of its own."""
    params = {"matrix": jnp.ones((16, 8)), "vector": jnp.ones(6)}
    size = 4 * (16 * 8 + 6)
    for asked, sent in ((EVERY, [size] * 3), ({"nu": 1}, [2 * size]), ({}, [size])):
        tx = local_sgd(inner_state=asked)
        step, workers, state = contexts.started(tx, params, mesh=contexts.mesh())
        rows = oxs.audit.collectives(step, workers, state, workers)
        assert {(row.kind, row.conditional) for row in rows} == {("all-reduce", True)}
        assert [row.bytes for row in rows] == sent

    # That of a round, and in it one for each of the two fields.
    tx = local_sgd(inner_state=EVERY)

    def body(x):
        return oxs.apply_gradients(tx, x, tx.init(x), x)[0]

    program = str(jax.make_jaxpr(jax.vmap(body, axis_name=AXIS))(jnp.ones((N, 3))))
    assert program.count("cond[") == 3


def test_every_round_of_all_fields_is_the_average():
    found = [
        contexts.replay("vmap_axes", local_sgd(inner_state=asked), START, GRADS)[0]
        for asked in ("average", {"mu": 1, "nu": 1}, {"0": 1})
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


ONES = jnp.ones(3)

test_refused = all_refused(globals())(r"""
local_sgd(inner_state={"mu": 0})  # ValueError: inner_state\['mu'\] must be 1 or more
local_sgd(inner_state={"mu": 2.5})  # TypeError: inner_state\['mu'\] must be an integer
local_sgd(inner_state={"my": 2}).init(ONES)  # ValueError: names 'my'.*'mu', 'nu'
local_sgd(inner_state=EVERY, fragments=2)  # ValueError: rounds of all parameters
""")


def test_a_parameter_called_like_a_field_is_none():
    """Its moments lie in the fields of the state; SGD's momentum has no `mu`."""
    params = {"mu": jnp.ones(3), "nu": {"mu": jnp.ones(3)}}
    tx = local_sgd(inner_state={"mu": 1})
    step, workers, state = contexts.started(tx, params, N)
    for grads in GRADS[:PERIOD]:
        tree = {"mu": grads, "nu": {"mu": grads}}
        workers, state = step(workers, state, tree)
    moments: Any = state.inner[0]
    for name, equal in (("mu", True), ("nu", False)):
        for x in jax.tree.leaves(getattr(moments, name)):
            assert np.allclose(x, x[:1]) == equal
    with pytest.raises(ValueError, match=r"names .mu., but no floating array"):
        local_sgd(optax.sgd(0.1, 0.9), inner_state={"mu": 1}).init(params)


@pytest.mark.parametrize("asked", ["average", EVERY, {"mu": 1}])
def test_where_nobody_counts_moments_stay(asked):
    tx = local_sgd(inner_state=asked)
    steps = [contexts.started(tx, START, N, weight=jnp.float32(w))[0] for w in (1, 0)]
    _, params, state = contexts.started(tx, START, N)
    alone = oxs.local_sgd(ADAM, AXIS, communication_period=100)
    other, own, plain = contexts.started(alone, START, N)
    for number, grads in enumerate(GRADS[:PERIOD]):
        params, state = steps[number == PERIOD - 1](params, state, grads)
        own, plain = other(own, plain, grads)
    contexts.assert_close(state.inner, plain.inner)
