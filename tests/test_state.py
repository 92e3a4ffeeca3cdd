"""What can be read from a state: the center, metrics, in every layout."""

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

AXIS, WORKERS = "workers", 3
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
TX = oxs.local_sgd(optax.sgd(0.5), AXIS, communication_period=2, drop_nonfinite=True)


def trained(tx: Any = TX, stacked=False, steps=3, dtype=jnp.float32) -> Any:
    """All workers' (parameters, state) after some steps; gradients are 1, 2, 3."""
    one = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    axes = None if stacked else by_hand.state_axes(tx, one)
    state = by_hand.replicate(tx.init(one), WORKERS, axes)
    params: Any = by_hand.replicate(one, WORKERS)
    placed = 0 if stacked else axes
    run = jax.jit(jax.vmap(tx.update, (0, placed, 0), (0, placed), axis_name=AXIS))
    sizes = 1 + jnp.arange(WORKERS, dtype=dtype).reshape(-1, 1, 1)
    grads = {"w": sizes + jnp.zeros_like(params["w"])}
    for _ in range(steps):
        updates, state = run(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_the_center_in_every_layout(stacked, chained):
    tx = optax.chain(optax.clip(10.0), TX) if chained else TX
    params, state = trained(tx, stacked)
    # One round after the second step: each worker had gone 2 * 0.5 * (1, 2, 3).
    expected = PARAMS["w"] - 2
    for given in (params, PARAMS):
        center: Any = oxs.center_params(state, given)
        assert center["w"].shape == (3, 2)
        np.testing.assert_allclose(center["w"], expected, rtol=1e-6)
    # One worker's own, without a worker axis.
    axes = None if stacked else by_hand.state_axes(tx, PARAMS)
    own: Any = oxs.center_params(by_hand.first(state, axes), PARAMS)
    np.testing.assert_allclose(own["w"], expected, rtol=1e-6)


def test_the_center_has_the_dtype_of_the_parameters():
    params, state = trained(dtype=jnp.bfloat16)
    center: Any = oxs.center_params(state, params)
    assert center["w"].dtype == jnp.bfloat16
    assert state.center["w"].dtype == jnp.float32


@pytest.mark.parametrize("stacked", [False, True])
def test_metrics_of_every_worker(stacked):
    params, state = trained(stacked=stacked)
    found = oxs.metrics(state, params)
    shape = (WORKERS,) if stacked else ()
    for value, expected in ((found.rounds, 1), (found.steps_since_round, 1)):
        np.testing.assert_array_equal(value, np.full(shape, expected))
    np.testing.assert_array_equal(found.dropped, [0, 0, 0])
    # One step of 0.5 * (1, 2, 3) since the round, in six elements.
    np.testing.assert_allclose(
        found.distance, 0.5 * np.array([1, 2, 3]) * np.sqrt(6), rtol=1e-5
    )
    axes = None if stacked else by_hand.state_axes(TX, PARAMS)
    own = oxs.metrics(by_hand.first(state, axes), by_hand.first(params))
    np.testing.assert_allclose(own.distance, 0.5 * np.sqrt(6), rtol=1e-5)
    assert own.distance.shape == own.rounds.shape == own.dropped.shape == ()
    assert oxs.metrics(state).distance is None


def test_metrics_send_nothing():
    def local(state, params):
        found = oxs.metrics(*by_hand.first((state, params)))
        return by_hand.replicate(found, 1)

    mesh = mesh_of({AXIS: WORKERS}, "Explicit")
    run = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    params, state = jax.device_put(
        trained(stacked=True), jax.sharding.NamedSharding(mesh, P(AXIS))
    )
    assert oxs.audit.collectives(run, state, params) == []
    np.testing.assert_allclose(
        jax.jit(run)(state, params).distance,
        [1.2247449, 2.4494898, 3.6742346],
        rtol=1e-6,
    )


@pytest.mark.parametrize("tx", [TX, oxs.gossip(optax.sgd(0.5), AXIS)])
def test_metrics_are_one_program(tx):
    """Not several for each leaf, whose difference from the center would be held."""
    params, state = trained(tx, stacked=True)
    assert len(jax.make_jaxpr(oxs.metrics)(state, params).eqns) == 1


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_read_outlives_the_state(stacked):
    """A step donates the state, and who logs later has what was read before."""
    average = oxs.sync_replicas(optax.sgd(0.5), AXIS, 2, variable_averages=0.5)
    for tx, reads in (
        (TX, (oxs.metrics, oxs.center_params)),
        (oxs.gossip(optax.sgd(0.5), AXIS), (oxs.metrics, oxs.center_params)),
        (average, (oxs.metrics, oxs.averaged_params)),
        (oxs.cross_shard(optax.sgd(0.5), AXIS, measure=True), (oxs.metrics,)),
    ):
        params, state = trained(tx, stacked=True)
        if not stacked:
            params, state = by_hand.first((params, state))
        found = [read(state, params) for read in reads]
        jax.tree.map(lambda x: x.delete(), state)
        jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("read", [oxs.center_params, oxs.metrics])
def test_a_state_without_a_center(read):
    with pytest.raises(ValueError, match=r"no .* in this state.*tuple.*local_sgd"):
        read(optax.adam(0.1).init(PARAMS), PARAMS)


def test_metrics_of_a_cross_shard_that_measures_nothing():
    state = oxs.cross_shard(optax.adam(0.1), AXIS).init(PARAMS)
    with pytest.raises(ValueError, match=r"no metrics.*cross_shard.*measure=True"):
        oxs.metrics(state)


@pytest.mark.parametrize(
    "tx",
    [
        oxs.diloco(optax.sgd(0.1), "workers", fragments=2),
        oxs.diloco(optax.sgd(0.1), "workers", shard_state=True),
        oxs.cross_shard(optax.adam(0.1), "workers", shard_state=True),
        oxs.cross_shard(optax.adam(0.1), "workers", shard_state="leaves"),
        oxs.stacked(optax.contrib.muon(0.1), jax.P("fsdp")),
    ],
)
def test_optax_maps_no_state_in_parts_or_pieces(tx):
    with pytest.raises(
        ValueError, match=r"map_params does not .* oxs.by_hand.state_specs"
    ):
        optax.tree.map_params(tx, lambda x: x, ())
