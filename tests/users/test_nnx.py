"""`nnx.Optimizer` as it is, inside of `pmap` and `shard_map`; `SyncOptimizer`."""

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.flax import SyncOptimizer
from tests.meshes import mesh_of
from tests.users.data import WORKERS, batches, square_error


@pytest.fixture(autouse=True)
def promotion():
    """NNX and Optax's Adam need what users have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def start(tx):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(model, optimizer, inputs, targets, **extra):
    grads = nnx.grad(lambda model: square_error(model(inputs), targets))(model)
    optimizer.update(model, grads, **extra)


def test_nnx_optimizer_in_pmap_trains_as_on_one_device():
    # Arrays alone: what `jax.pmap` wants.
    graph, state = nnx.split(start(oxs.cross_shard(optax.adam(0.1), "data")))
    state = by_hand.replicate(state, WORKERS)

    def step(state, inputs, targets):
        model, optimizer = nnx.merge(graph, state)
        train_step(model, optimizer, inputs, targets)
        return nnx.state((model, optimizer))

    step = jax.pmap(step, axis_name="data", devices=jax.devices()[:WORKERS])
    alone, optimizer = start(optax.adam(0.1))
    for inputs, targets in zip(*batches(4), strict=True):
        state = step(state, inputs, targets)
        train_step(alone, optimizer, inputs.reshape(-1, 3), targets.reshape(-1, 2))
    model, _ = nnx.merge(graph, state)
    found, expected = (nnx.as_pure(nnx.state(x)) for x in (model, alone))
    expected = by_hand.replicate(expected, WORKERS)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def place_of(on_mesh):
    return mesh_of({"data": WORKERS}, "Explicit") if on_mesh else None


@pytest.mark.parametrize("on_mesh", [False, True])
def test_sync_optimizer_steps_directly(on_mesh):
    """As many steps of `nnx.Optimizer` with the same numbers; a round lands exactly."""
    tx = oxs.local_sgd(optax.sgd(0.1, momentum=0.9), "data", communication_period=2)

    def step(model, optimizer, inputs, targets):
        train_step(model, optimizer, inputs, targets, weight=1.0)
        return model, optimizer

    workers = oxs.Workers(WORKERS, "data", mesh=place_of(on_mesh))
    mapped = workers.step(step, state=2, split=False)
    results = []
    for optimizer_class in (nnx.Optimizer, SyncOptimizer):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        both = model, optimizer_class(model, tx, wrt=nnx.Param)
        both = workers.start(both)
        for inputs, targets in zip(*batches(4), strict=True):
            both = mapped(*both, inputs, targets)
        results.append(both)
    (plain, _), (model, optimizer) = results
    pure = (nnx.as_pure(nnx.state(x)) for x in (model, plain))
    chex.assert_trees_all_close(*pure, rtol=1e-6)
    assert optimizer.step[...].tolist() == [4] * WORKERS
    center = oxs.flax.swap_center(model, optimizer)
    assert center.kernel.shape == (3, 2)
    for kernel in np.asarray(model.kernel[...]):
        np.testing.assert_array_equal(kernel, np.asarray(center.kernel[...]))


def test_what_is_read_of_an_nnx_optimizer_and_resized():
    """Variables stand for arrays in its state, and in what `nnx.state` gives."""
    tx = oxs.local_sgd(
        optax.adam(0.1), "data", communication_period=2, fragments=2, measure=True
    )
    model, optimizer = by_hand.replicate(start(tx), WORKERS)
    params = nnx.state(model, nnx.Param)
    state = optimizer.opt_state
    pure = nnx.as_pure((state, params))
    found = oxs.metrics(state, params)
    chex.assert_trees_all_equal(found, oxs.metrics(*pure))
    assert found.fragment_ages.shape == (WORKERS, 2)
    assert found.distance.shape == (WORKERS,)
    center = oxs.center_params(state, params)
    assert isinstance(center["kernel"], nnx.Param)
    chex.assert_trees_all_equal(nnx.as_pure(center), oxs.center_params(*pure))
    resized = by_hand.resize(tx, params, state, 6)
    assert isinstance(resized[0]["kernel"], nnx.Param)
    assert resized[0]["kernel"].shape == (6, 3, 2)
    chex.assert_trees_all_equal(
        nnx.as_pure(resized), by_hand.resize(tx, pure[1], pure[0], 6)
    )
    # As it is put back.
    nnx.update(model, resized[0])
    nnx.update(optimizer.opt_state, nnx.state(resized[1]))
    assert oxs.metrics(optimizer.opt_state).rounds.shape == (6,)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_objects_are_not_mapped_by_hand(on_mesh):
    """Changes to the copies that a mapped function gets would be lost."""
    model, optimizer = start(optax.sgd(0.1))
    mapped = jax.jit(by_hand.map_workers(train_step, "data", mesh=place_of(on_mesh)))
    batch = [x[0] for x in batches(1)]
    for objects, name in (
        ((model, optimizer), r"\[0\] .* a Linear"),
        (({"w": model.kernel}, 0.0), r"\[0\]\['w'\] .* a Param"),
    ):
        with pytest.raises(TypeError, match=f"{name}, .*use oxs.Workers.*nnx.split"):
            mapped(*by_hand.replicate(objects, WORKERS), *batch)


def test_only_loras_matrices_are_sent():
    """docs/fine-tuning.md: what `wrt=` leaves out has no center and stays."""
    base = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model = nnx.LoRA(3, 1, 2, base_module=base, rngs=nnx.Rngs(1))
    kernel = np.asarray(base.kernel[...])
    tx = oxs.local_sgd(optax.adam(0.1), "data", communication_period=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    workers = oxs.Workers(WORKERS, "data", mesh=mesh_of({"data": WORKERS}))
    model, optimizer = workers.start((model, optimizer))

    @workers.step(state=2)
    def step(model, optimizer, inputs, targets):
        def loss_of(model):
            return square_error(model(inputs), targets)

        of = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(model, nnx.grad(loss_of, argnums=of)(model))

    inputs, targets = (x[0].reshape(-1, x.shape[-1]) for x in batches(1))
    (row,) = oxs.audit.collectives(step, model, optimizer, inputs, targets)
    assert row.bytes == 4 * (3 * 1 + 1 * 2)
    for _ in range(4):
        step(model, optimizer, inputs, targets)
    tuned = workers.center((model, optimizer))
    assert np.abs(tuned.lora_b[...]).min() > 0  # zeros before
    np.testing.assert_array_equal(tuned.base_module.kernel[...], kernel)
