import functools
import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import chex
import jax
import jax.numpy as jnp
import keras as library
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from optx_sync.optimizers.keras import keras as typed_keras
from optx_sync.rows.slices import IndexedSlices
from tests.meshes import mesh_of
from tests.refusals import refused

K: Any = library.optimizers

# Optax's types say nothing about the state or the leaves.
keras: Any = typed_keras


# Of those with slots and schedules alike one.
OPTIMIZERS = {
    "nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: K.Adam(0.1),
    "adamw": lambda: K.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: K.RMSprop(0.1, momentum=0.5, centered=True),
    "adafactor": lambda: K.Adafactor(0.1),
    "nadam": lambda: K.Nadam(0.1),
    "ftrl": lambda: K.Ftrl(
        0.1, l1_regularization_strength=0.1, l2_shrinkage_regularization_strength=0.1
    ),
    "muon": lambda: K.Muon(0.1),
    "schedule_free": lambda: K.ScheduleFreeAdamW(0.1, warmup_steps=2),
    "schedule": lambda: K.SGD(K.schedules.CosineDecay(0.1, 4)),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.5),
    "moving_average": lambda: K.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: K.SGD(0.1, gradient_accumulation_steps=2),
}


def make_params():
    return {
        "scale": jnp.float32(2.0),
        "layers": [{"bias": jnp.arange(3.0) - 1}, (jnp.ones((2, 3)),)],
    }


def make_grads(step, params):
    return jax.tree.map(lambda p: jnp.cos(p * (step + 1.0)) + 0.25, params)


def step_of(tx):
    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_close(actual, desired):
    jax.tree.map(
        lambda a, d: np.testing.assert_allclose(a, d, rtol=2e-6, atol=2e-7),
        actual,
        desired,
    )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_five_steps_are_those_of_keras(make):
    params = make_params()
    variables = [library.Variable(leaf) for leaf in jax.tree.leaves(params)]
    original, tx = make(), keras(make())
    state, step = tx.init(params), step_of(tx)
    original.build(variables)
    for count in range(5):
        grads = make_grads(count, params)
        # Keras's moving average multiplies floats by integers.
        with jax.numpy_dtype_promotion("standard"):
            original.apply(jax.tree.leaves(grads), variables)
        params, new_state = step(grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        state = new_state
        assert_close(jax.tree.leaves(params), [v.value for v in variables])
    # Every variable of Keras is somewhere in the state, with its value.
    kept = sorted(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(state))
    theirs = sorted(float(jnp.sum(v.value)) for v in original.variables)
    np.testing.assert_allclose(kept, theirs, rtol=1e-5, atol=1e-6)


START = jnp.array([1.0, 2.0, 3.0, 4.0])
GRADS = jnp.array([1.0, 6.0, 7.0, 2.0])


@pytest.mark.parametrize(
    ("options", "grads", "steps", "expected", "scale"),
    [
        ({}, GRADS * 2.0**15, 1, [0.5, -1.0, -0.5, 3.0], 2.0**15),
        ({}, jnp.full(4, jnp.inf), 1, START, 2.0**14),
        ({"initial_scale": 400.0}, jnp.full(4, jnp.inf), 4, START, 25.0),
        # Each pair of steps is at twice the scale: 0.5 (1/2 + 1/4 + 1/8 + 1/16) 2.
        (
            {"initial_scale": 2.0, "dynamic_growth_steps": 2},
            GRADS,
            8,
            START - 0.9375 * GRADS,
            32.0,
        ),
    ],
    ids=[
        "test_finite_step",
        "test_infinite_step",
        "test_downscaling",
        "test_upscaling",
    ],
)
def test_loss_scales_of_keras_s_own_tests(options, grads, steps, expected, scale):
    """The names and figures are those of Keras's loss_scale_optimizer_test.py."""
    params: Any = START
    tx = keras(K.LossScaleOptimizer(K.SGD(learning_rate=0.5), **options))
    state, step = tx.init(params), step_of(tx)
    for _ in range(steps):
        params, state = step(grads, state, params)
    np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-4)
    assert optax.tree_utils.tree_get(state, "dynamic_scale") == scale


def test_the_learning_rate_under_a_loss_scale_is_the_one_that_acts():
    tx = keras(K.LossScaleOptimizer(K.SGD(0.5), initial_scale=1.0))
    state = tx.init(START)
    # Keras keeps a rate of the wrapper's own beside it, which nothing reads.
    assert state.variables["learning_rate"] == 0.5
    state.variables["learning_rate"] = jnp.float32(0.25)
    updates, state = tx.update(GRADS, state, START)
    np.testing.assert_array_equal(updates, -0.25 * GRADS)
    assert state.variables["iteration"] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: K.SGD(learning_rate=lambda: 0.5),
        lambda: K.SGD(learning_rate=functools.partial(float, "0.5")),
        lambda: K.LossScaleOptimizer(K.SGD(lambda: 0.5), initial_scale=1.0),
    ],
)
def test_callable_learning_rate(make):
    """The name and figures are those of Keras's optimizer_test.py."""
    params = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    tx = keras(make())
    state = tx.init(params)
    moved, state = step_of(tx)(jnp.ones((2, 2)), state, params)
    np.testing.assert_allclose(moved, [[0.5, 1.5], [2.5, 3.5]], rtol=1e-6)
    assert state.variables["iteration"] == 1


def test_the_optimizer_handed_in_is_read_and_not_changed():
    original = K.Adam(0.1)
    tx = keras(original)
    params = make_params()
    state = tx.init(params)
    tx.update(params, state, params)
    assert not original.built
    assert original.variables[0].value == 0
    assert len(original.variables) == 2
    # One that has been at work before starts anew, from its configuration.
    variables = [library.Variable(leaf) for leaf in jax.tree.leaves(params)]
    original.build(variables)
    original.apply(jax.tree.leaves(params), variables)
    chex.assert_trees_all_equal(keras(original).init(params), state)
    assert original.variables[0].value == 1


def test_slots_are_trees_like_the_parameters_and_have_names():
    tx = keras(K.Adam(0.1))
    params = make_params()
    state = tx.init(params)
    assert sorted(state.variables) == ["iteration", "learning_rate"]
    assert sorted(state.slots) == ["momentum", "velocity"]
    chex.assert_trees_all_equal_shapes_and_dtypes(state.slots["momentum"], params)
    assert optax.tree_utils.tree_get(state, "iteration") == 0
    specs: Any = optax.tree_utils.tree_map_params(
        tx, lambda _: "slot", state, transform_non_params=lambda _: "other"
    )
    assert set(jax.tree.leaves(specs.slots)) == {"slot"}
    assert set(jax.tree.leaves(specs.variables)) == {"other"}


@pytest.mark.parametrize("name", ["adam", "nadam", "adafactor", "muon"])
def test_init_on_abstract_parameters(name):
    tx = keras(OPTIMIZERS[name]())
    params = make_params()
    state = tx.init(params)
    abstract = jax.eval_shape(lambda: params)
    chex.assert_trees_all_equal(tx.init(abstract), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(tx.init, params), state
    )


def test_a_slot_that_starts_as_the_parameter_has_a_buffer_of_its_own():
    params = {"w": jnp.arange(3.0)}
    state = keras(K.ScheduleFreeAdamW(0.1)).init(params)
    chex.assert_trees_all_equal(state.slots["momentum"], params)
    momentum = state.slots["momentum"]["w"]
    assert momentum.unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()


def test_a_leaf_without_gradient_and_its_slots_stay():
    params = {"a": jnp.ones(2), "b": jnp.full(2, 3.0)}
    tx = keras(K.Adam(0.1, use_ema=True, ema_overwrite_frequency=1, weight_decay=0.5))
    state, step = tx.init(params), step_of(tx)
    params, state = step(jax.tree.map(jnp.ones_like, params), state, params)
    before, old = params, state
    params, state = step({"a": jnp.ones(2), "b": None}, state, params)
    # Keras, where there is only the other leaf.
    alone = {"a": jnp.ones(2)}
    tx_alone = keras(
        K.Adam(0.1, use_ema=True, ema_overwrite_frequency=1, weight_decay=0.5)
    )
    state_alone, step_alone = tx_alone.init(alone), step_of(tx_alone)
    for _ in range(2):
        alone, state_alone = step_alone({"a": jnp.ones(2)}, state_alone, alone)
    for slot in ["momentum", "velocity", "average"]:
        chex.assert_trees_all_equal(state.slots[slot]["b"], old.slots[slot]["b"])
        assert_close(state.slots[slot]["a"], state_alone.slots[slot]["a"])
    chex.assert_trees_all_equal(params["b"], before["b"])
    assert_close(params["a"], alone["a"])
    assert state.variables["iteration"] == 2
    updates, same = tx.update({"a": None, "b": None}, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(same, state)


def test_names_are_those_of_the_tree():
    # The paths of these two leaves read the same; one of them is a bias.
    params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2), "bias": jnp.ones(2)}}
    original = K.AdamW(0.1, weight_decay=0.5)
    original.exclude_from_weight_decay(var_names=["bias"])
    tx = keras(original)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    assert_close(updates["a"]["bias"], jnp.zeros(2))
    assert_close(updates["a"]["b"], jnp.full(2, -0.05))
    assert_close(updates["a/b"], jnp.full(2, -0.05))
    original.exclude_from_weight_decay(var_list=[library.Variable(jnp.ones(2))])
    with pytest.raises(ValueError, match="var_list"):
        keras(original)


def test_half_precision_lands_where_keras_lands():
    params = {"w": jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16)}
    grads = {"w": jnp.sin(params["w"] * 3)}
    variable = library.Variable(params["w"])
    original, tx = K.Adam(0.01), keras(K.Adam(0.01))
    original.build([variable])
    state, step = tx.init(params), step_of(tx)
    for _ in range(3):
        original.apply([grads["w"]], [variable])
        params, state = step(grads, state, params)
    assert params["w"].dtype == state.slots["momentum"]["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        params["w"].astype(jnp.float32), variable.value.astype(jnp.float32), rtol=2**-8
    )
    assert tx.update(grads, state, params)[0]["w"].dtype == jnp.bfloat16


def test_scan_vmap_and_shard_map_give_the_same():
    tx = keras(K.Nadam(0.1, clipnorm=1.0))
    params = {"w": jnp.arange(24.0).reshape(8, 3) / 8}

    def train(params: Any) -> Any:
        def step(carry, count):
            params, state = carry
            grads = make_grads(count, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        return lax.scan(step, carry, jnp.arange(3.0))[0][0]

    rows = [train({"w": params["w"][i : i + 1]})["w"] for i in range(8)]
    expected = {"w": jnp.concatenate(rows)}
    mesh = mesh_of({"d": 8})
    sharded = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    )
    assert_close(sharded(params), expected)
    assert_close(jax.vmap(train)({"w": params["w"][:, None]})["w"][:, 0], expected["w"])


def test_extra_arguments_are_ignored():
    tx, params = keras(K.SGD(0.1)), jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params, value=1.0)
    assert_close(updates, jnp.full(2, -0.1))


TABLE = {"table": jnp.ones((4, 2))}
ROWS = {"table": IndexedSlices(jnp.array([1]), jnp.ones((1, 2)))}


def update(grads, params: Any = TABLE):
    tx = keras(K.SGD(0.1))
    return tx.update(grads, tx.init(TABLE), params)


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("ValueError: params=None", lambda: update(TABLE, None)),
        (r"TypeError: IndexedSlices at \['table'\]", lambda: update(ROWS)),
        ("ValueError: table", lambda: update({"other": jnp.ones((4, 2))})),
        ("TypeError: got 'adam' of type str", lambda: keras("adam")),
        (
            r"TypeError: optax\.partition",
            lambda: keras(
                K.MultiOptimizer(K.OptimizerMap(default_optimizer=K.SGD(0.1)))
            ),
        ),
    ],
)
def test_what_is_refused(said, call):
    with refused(said):
        call()


def test_a_class_that_its_configuration_does_not_make():
    class Halving(K.SGD):
        def __init__(self, half=0.5):
            super().__init__(half)

    class Mended(K.SGD):
        def __init__(self, half=0.5, **kwargs):
            super().__init__(**{"learning_rate": half, **kwargs})

    with pytest.raises(TypeError, match=r"Halving.* 'name'.*Let its __init__"):
        keras(Halving())
    tx, params = keras(Mended(0.25)), jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params)
    assert_close(updates, jnp.full(2, -0.25))


def test_keras_missing_or_on_another_backend(monkeypatch):
    optimizer = K.SGD(0.1)
    monkeypatch.setattr(library.backend, "backend", lambda: "tensorflow")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=jax"):
        keras(optimizer)
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ImportError, match=r"pip install 'optx-sync\[keras\]'"):
        keras(optimizer)
