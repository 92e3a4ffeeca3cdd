"""A hard pull lands: parameters equal on all workers, round after round, donated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts

AXIS, WORKERS, ROUNDS = contexts.AXIS, contexts.REPLICAS, 1000
HARD = {
    "agn": oxs.agn(optax.sgd(0.1), AXIS, communication_period=1),
    "local_sgd": oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=1),
    "diloco": oxs.diloco(optax.sgd(0.1), AXIS, communication_period=1),
}
# Where a hard pull widens by 24 bits of float32, less 8 or 11 of the parameter's own.
REACH = {"bfloat16": 2.0**16, "float16": 2.0**13}


def start(dtype):
    """Magnitudes from ordinary down to subnormal ones in float16."""
    scales = 2.0 ** np.arange(0, -24, -1)
    values = np.outer([1.37, -0.71, 0.39], scales)
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize("rule", HARD)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_hard_pull_lands_a_thousand_times(dtype, rule):
    tx = HARD[rule]
    one = start(dtype)
    axes = oxs.state_axes(tx, one)
    scale = jnp.abs(one)

    def body(params, state, key):
        def step(carry, key):
            params, state = carry
            # As large as the parameter itself, so that it keeps changing its binade.
            grads = (jax.random.normal(key, one.shape) * 10).astype(dtype) * scale
            updates, state = tx.update(grads, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
            return (params, state), (params, state.center)

        return jax.lax.scan(step, (params, state), jax.random.split(key, ROUNDS))[1]

    run = jax.vmap(body, (0, axes, 0), (0, None), axis_name=AXIS)
    keys = jax.random.split(jax.random.key(0), WORKERS)
    params, centers = jax.jit(run)(
        oxs.stack(one, WORKERS), oxs.stack(tx.init(one), WORKERS, axes), keys
    )
    assert params.dtype == dtype
    before = np.concatenate(
        [oxs.stack(one, WORKERS)[:, None], params[:, :-1]], 1
    ).astype(np.float64)
    after = np.asarray(params, np.float64)
    if dtype == "float32":
        centers = np.asarray(centers)
        larger = np.maximum(np.abs(before), np.abs(centers)[None]).astype(np.float32)
        assert np.all(np.abs(after - centers[None]) <= np.spacing(larger))
        return
    landed = np.asarray(centers.astype(dtype), np.float64)
    within = np.abs(before) < REACH[dtype] * np.abs(landed)[None]
    assert within.mean() > 0.99
    equal = after == landed[None]
    assert equal[within].all()
    if dtype == "float16":
        assert np.any((landed != 0) & (np.abs(landed) < jnp.finfo(dtype).tiny))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_who_was_left_out_lands_on_the_center_too(dtype):
    tx = oxs.elastic_average(
        optax.sgd(0.1),
        AXIS,
        moving_rate=0.1,
        rho=0.0,
        communication_period=1,
        drop_nonfinite=True,
    )
    params = start(dtype)
    grads = jax.random.normal(jax.random.key(0), (3, WORKERS, *params.shape))
    grads = grads.at[-1, 1, 0, 0].set(jnp.nan).astype(dtype)
    history, state = contexts.replay("vmap_axes", tx, params, grads)
    center = np.asarray(oxs.center_params(state, params).astype(jnp.float32))
    before, after = (np.asarray(h, np.float32) for h in (history[-2, 1], history[-1]))
    larger = np.maximum(np.abs(before), np.abs(center))
    bound = np.spacing(larger) if dtype == "float32" else 0
    assert np.all(np.abs(after[1] - center) <= bound)
    assert np.any(after[0] != center)


DONATED = {
    "elastic": oxs.elastic_average(
        optax.sgd(0.1, momentum=0.9), AXIS, learning_rate=0.1, communication_period=2
    ),
    "agn": oxs.agn(optax.sgd(0.1, momentum=0.9), AXIS, communication_period=2),
    "local_sgd": oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=2),
    "diloco": oxs.diloco(optax.sgd(0.1), AXIS, communication_period=2),
}


@pytest.mark.parametrize("rule", DONATED)
@pytest.mark.parametrize("jitted", [False, True])
def test_parameters_and_state_are_donated_from_the_first_step(rule, jitted):
    """One worker, so that nothing is copied into a stack between init and update."""
    tx = DONATED[rule]
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    state = (jax.jit(tx.init) if jitted else tx.init)(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def one_worker(params, state, grads):
        run = jax.vmap(step, (None, None, 0), axis_name=AXIS)
        return oxs.unstack(run(params, state, grads))

    run = jax.jit(one_worker, donate_argnums=(0, 1))
    for _ in range(3):
        old = params
        params, state = run(
            params, state, {"w": jnp.ones((1, 3, 2)), "b": jnp.ones((1, 2))}
        )
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert int(oxs.metrics(state).rounds) == 1


def test_the_center_that_is_read_survives_a_donated_step():
    tx = DONATED["local_sgd"]
    params = jnp.arange(3.0)
    state = tx.init(params)
    center = oxs.center_params(state, params)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(state)
    assert state.center.is_deleted()
    assert center.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("rule", DONATED)
def test_init_and_a_scan_inside_of_a_checked_shard_map(rule):
    """Types do not change between `init` and `update`, whatever those of `params`."""
    tx = DONATED[rule]
    grads = jax.random.normal(jax.random.key(0), (WORKERS, 5, 3))

    def varying(params, grads):
        (params, _), _ = train(params[0], tx.init(params[0]), grads[0])
        return params[None]

    def replicated(params, grads):
        state = tx.init(params)
        (params, state), _ = train(oxs.localize(params, AXIS), state, grads[0])
        return params[None], state.center  # The center is known to be equal.

    def train(params, state, grads):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), grads)

    over = {"mesh": contexts.mesh(), "check_vma": True}
    params = jnp.arange(3.0)
    first = jax.jit(
        jax.shard_map(varying, in_specs=P(AXIS), out_specs=P(AXIS), **over)
    )(oxs.stack(params, WORKERS), grads)
    second, center = jax.jit(
        jax.shard_map(
            replicated, in_specs=(P(), P(AXIS)), out_specs=(P(AXIS), P()), **over
        )
    )(params, grads)
    expected, state = contexts.replay("vmap_axes", tx, params, grads.swapaxes(0, 1))
    for found in (first, second):
        np.testing.assert_allclose(found, expected[-1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(center, state.center, rtol=1e-6, atol=1e-6)
