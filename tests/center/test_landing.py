"""A hard pull lands: parameters equal on all workers, round after round, donated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync.state.direct import landing
from tests import contexts

AXIS, WORKERS, ROUNDS = contexts.AXIS, contexts.REPLICAS, 1000
HARD: dict[str, Any] = {
    "agn": oxs.agn(optax.sgd(0.1), AXIS, communication_period=1),
    "local_sgd": oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=1),
    "diloco": oxs.diloco(optax.sgd(0.1), AXIS, communication_period=1),
}
# Where a hard pull widens by 24 bits of float32, less 8 or 11 of the parameter's own.
REACH = {"bfloat16": 2.0**16, "float16": 2.0**13}


def start():
    """Magnitudes from ordinary down to subnormal ones in float16."""
    values = np.outer([1.37, -0.71, 0.39], 2.0 ** np.arange(0, -24, -1))
    return {
        name: jnp.asarray(values, name) for name in ("bfloat16", "float16", "float32")
    }


@pytest.mark.parametrize("rule", HARD)
def test_a_hard_pull_lands_a_thousand_times(rule):
    tx, one = HARD[rule], start()
    stacked, state, axes = contexts.begun(tx, one)

    def body(params, state, key):
        def step(carry, key):
            params, state = carry
            noise = 10 * jax.random.normal(key, one["float32"].shape)
            # As large as the parameters, which so keep changing their binades.
            grads = {k: noise.astype(p.dtype) * jnp.abs(p) for k, p in one.items()}
            updates, state = tx.update(grads, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
            return (params, state), (params, state.center)

        return jax.lax.scan(step, (params, state), jax.random.split(key, ROUNDS))[1]

    run = jax.vmap(body, (0, axes, 0), (0, None), axis_name=AXIS)
    keys = jax.random.split(jax.random.key(0), WORKERS)
    history, centers = jax.jit(run)(stacked, state, keys)
    for name in one:
        assert history[name].dtype == name
        first = stacked[name][:, None]
        before = np.concatenate([first, history[name][:, :-1]], 1).astype(np.float64)
        after = np.asarray(history[name], np.float64)
        center = np.asarray(centers[name].astype(name), np.float64)[None]
        if name == "float32":
            larger = np.maximum(np.abs(before), np.abs(center)).astype(np.float32)
            assert np.all(np.abs(after - center) <= np.spacing(larger))
            continue
        within = np.abs(before) < REACH[name] * np.abs(center)
        assert within.mean() > 0.99
        assert (after == center)[within].all()
        if name == "float16":
            tiny = float(jnp.finfo(name).tiny)
            assert np.any((center != 0) & (np.abs(center) < tiny))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_next_to_the_middle_of_two_values_lands_on_the_nearer(dtype):
    """From afar a difference loses the bit that decides, unless rounded first."""
    bits = jnp.finfo(dtype).nmant
    ulp, half, bit = 2.0**-bits, 2.0 ** -(bits + 1), 2.0**-23
    targets = 1 + np.array([half - bit, half, half + bit, 3 * half - bit, 3 * half])
    expected = 1 + np.array([0, 0, ulp, ulp, 2 * ulp])
    for distance in (1.0, 300.0, 0.9 * REACH[dtype]):
        params = jnp.full(5, distance, dtype)
        updates = jax.jit(landing)(params, jnp.asarray(targets, jnp.float32))
        with jax.numpy_dtype_promotion("standard"):
            landed = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(np.asarray(landed, np.float64), expected)


def test_who_was_left_out_lands_on_the_center_too():
    options: Any = {"communication_period": 1, "drop_nonfinite": True}
    pull = {"moving_rate": 0.1, "rho": 0.0}
    tx = oxs.elastic_average(optax.sgd(0.1), AXIS, **pull, **options)
    params = start()
    noise = jax.random.normal(jax.random.key(0), (3, WORKERS, 3, 24))
    noise = noise.at[-1, 1, 0, 0].set(jnp.nan)
    grads = {name: noise.astype(name) for name in params}
    history, state = contexts.replay("vmap_axes", tx, params, grads)
    centers: Any = oxs.center_params(state, params)
    for name, center in centers.items():
        center = np.asarray(center.astype(jnp.float32))
        before, after = (np.asarray(history[name][t], np.float32) for t in (-2, -1))
        larger = np.maximum(np.abs(before[1]), np.abs(center))
        bound = np.spacing(larger) if name == "float32" else 0
        assert np.all(np.abs(after[1] - center) <= bound)
        assert np.any(after[0] != center)


DONATED: dict[str, Any] = {
    "elastic": oxs.elastic_average(
        optax.sgd(0.1, momentum=0.9), AXIS, learning_rate=0.1, communication_period=2
    ),
    "agn": oxs.agn(optax.sgd(0.1, momentum=0.9), AXIS, communication_period=2),
    "local_sgd": oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=2),
    "diloco": oxs.diloco(optax.sgd(0.1), AXIS, communication_period=2),
}


@pytest.mark.parametrize("rule", DONATED)
def test_parameters_and_state_share_no_buffer(rule):
    """So both may be donated from the first step on."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    for init in (DONATED[rule].init, jax.jit(DONATED[rule].init)):
        leaves = jax.tree.leaves((params, init(params)))
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@pytest.mark.parametrize("rule", DONATED)
def test_init_and_a_scan_inside_of_a_checked_shard_map(rule):
    """`init` and `update` give the same types; a center is known to be equal."""
    tx, params = DONATED[rule], jnp.arange(3.0)
    grads = jax.random.normal(jax.random.key(0), (WORKERS, 5, 3))

    def train(params, grads):
        local, state = oxs.localize(params, AXIS), tx.init(params)
        history, state = contexts.steps(tx)(local, state, grads[0], {})
        return history[None], state.center

    ways = {"in_specs": (P(), P(AXIS)), "out_specs": (P(AXIS), P())}
    run = jax.jit(jax.shard_map(train, mesh=contexts.mesh(), **ways))
    found, center = run(params, grads)
    expected, state = contexts.replay("vmap_axes", tx, params, grads.swapaxes(0, 1))
    contexts.assert_close(found.swapaxes(0, 1), expected)
    np.testing.assert_allclose(center, state.center, rtol=1e-6, atol=1e-6)
