"""The catalogue against trajectories recorded from the originals."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from optx_sync.core.slices import IndexedSlices
from tests.cases import OPTIMIZERS
from tests.recorded import GOLDEN, arrays_of, recorded

RECORDED = recorded("tf_train", "tf_contrib", "returnn")
BY_ORIGINAL = {original: case for case in OPTIMIZERS for original in case.originals}

# Arguments of the originals under the names that they have here.
NAMES = {
    "beta1": "b1",
    "beta2": "b2",
    "epsilon": "eps",
    "use_nesterov": "nesterov",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l2_shrinkage_regularization_strength": "l2_shrinkage",
}

# RETURNN's BaseCustomOptimizer treats equal rows one by one, in an order that its own
# race decides; here they are summed first. (Its NadamOptimizer sums them too.)
DUPLICATES_DO_NOT_BIND = {
    f"returnn_{name}_sparse_duplicate_{variant}"
    for name, variant in [
        ("customadamoptimizer", "lr"),
        ("customgradientdescentoptimizer", "lr01"),
        ("gradvariancescaledoptimizer", "default"),
        ("neuraloptimizer1", "default"),
        ("normalizedsgd", "lr01"),
    ]
}
# The original divides zero by zero; see `test_amsgrad_without_gradient_stays_put`.
AMSGRAD_NAN = "returnn_amsgradoptimizer_dense_eps0_zerograd_nan"
RUN = sorted(RECORDED.keys() - DUPLICATES_DO_NOT_BIND - {AMSGRAD_NAN})

# Ftrl's powers, other than the square root, cancel in `linear`.
CANCELLING = {
    "tf_ftrl_dense_power",
    "tf_ftrl_sparse_unique_power",
    "tf_ftrl_sparse_duplicate_power",
}


@functools.cache
def compiled(factory, hyperparameters):
    """The scan over steps, shared by the cases that differ in data alone."""
    arguments: dict[str, Any] = dict(hyperparameters)
    learning_rate = arguments.pop("learning_rate")

    @jax.jit
    def trajectory(params, grads, rates):
        rate = rates.__getitem__ if learning_rate == "schedule" else learning_rate
        tx = factory(rate, **arguments)

        def step(carry, grads):
            params, state = carry
            grads = {
                name: IndexedSlices(*grad) if isinstance(grad, tuple) else grad
                for name, grad in grads.items()
            }
            updates, state = tx.update(grads, state, params)
            carry = optax.apply_updates(params, updates), state
            return carry, carry

        return lax.scan(step, (params, tx.init(params)), grads)[1]

    return trajectory


def run(case, arrays):
    """The parameters after every step, and the states after every step."""
    hyperparameters = tuple(
        (NAMES.get(key, key), value) for key, value in case["hyperparameters"].items()
    )
    names = [param["name"] for param in case["params"]]
    params = {name: arrays[f"p0_{name}"] for name in names}
    grads = {
        name: (arrays[f"idx_{name}"], arrays[f"val_{name}"])
        if f"idx_{name}" in arrays
        else arrays[f"g_{name}"]
        for name in names
    }
    rates = jnp.asarray(arrays.get("lr", 0.0))
    row = BY_ORIGINAL[f"{case['group']}/{case['optimizer']}"]
    trajectory = compiled(row.factory, hyperparameters)
    return jax.tree.map(np.asarray, trajectory(params, grads, rates))


def check(actual, recorded, magnitude, tolerance, what):
    """Equal up to `tolerance`, relative to the largest magnitude so far."""
    allowed = tolerance * magnitude
    error = np.abs(actual - recorded)
    worst = np.argmax(error - allowed)
    assert np.all(error <= allowed), (
        f"{what}: got {actual.flat[worst]}, recorded {recorded.flat[worst]}, "
        f"largest magnitude so far {magnitude.flat[worst]}"
    )


def check_params(arrays, name, actual, select: Any = ...):
    recorded = arrays[f"p_{name}"]
    history = np.concatenate([arrays[f"p0_{name}"][None], recorded])
    magnitude = np.maximum.accumulate(np.abs(history))[1:]
    check(actual[select], recorded[select], magnitude[select], 1e-6, name)


@pytest.mark.parametrize("name", RUN)
def test_trajectory(name):
    case = RECORDED[name]
    arrays, _ = arrays_of(case)
    params, states = run(case, arrays)
    unchecked = {key for key in case["arrays"] if key[:2] not in ("g_", "id", "va")}
    unchecked -= {"lr"}
    for param in case["params"]:
        name = param["name"]
        check_params(arrays, name, params[name])
        unchecked -= {f"p0_{name}", f"p_{name}"}
        for slot, tree in states.slots._asdict().items():
            tolerance = 1e-6
            if slot == "linear" and case["name"] in CANCELLING:
                tolerance = 3e-6
            key = f"slot_{slot}_{name}"
            magnitude = np.max(np.abs(tree[name]), axis=0)
            check(tree[name][-1], arrays[key], magnitude, tolerance, key)
            unchecked.remove(key)
    if states.powers:
        for power, values in states.powers._asdict().items():
            np.testing.assert_array_equal(values[-1], arrays[f"nonslot_{power}"])
            unchecked.remove(f"nonslot_{power}")
    for count in unchecked & {"nonslot_t", "global_step"}:
        assert states.update_count[-1] == np.max(arrays[count])
        unchecked.remove(count)
    assert not unchecked


def test_amsgrad_without_gradient_stays_put():
    case = RECORDED[AMSGRAD_NAN]
    arrays, _ = arrays_of(case)
    params, _ = run(case, arrays)
    for name in ("s", "v", "m"):
        check_params(arrays, name, params[name])
    lost = np.isnan(arrays["p_x"][-1])
    assert lost.any()
    check_params(arrays, "x", params["x"], (slice(None), ~lost))
    never = ~np.any(arrays["g_x"], axis=0)
    assert never.any() and np.all(lost[never])
    np.testing.assert_array_equal(
        params["x"][:, never], np.tile(arrays["p0_x"][never], (case["steps"], 1))
    )
    assert np.isfinite(params["x"]).all()


def test_the_table_is_the_catalogue():
    package = GOLDEN.parent.parent / "optx_sync" / "optimizers"
    files = {path.stem for path in package.glob("*.py")}
    others = {"__init__", "rule", "slots"}
    assert {case.name for case in OPTIMIZERS} == files - others


def test_every_recorded_trajectory_is_run_or_listed():
    assert RECORDED.keys() >= DUPLICATES_DO_NOT_BIND | {AMSGRAD_NAN} | CANCELLING
    assert {f"{case['group']}/{case['optimizer']}" for case in RECORDED.values()} == (
        BY_ORIGINAL.keys()
    )
    cases = json.loads((GOLDEN / "manifest.json").read_text())["cases"]
    recorded_files = {case["file"] for case in cases}
    assert recorded_files == {path.name for path in GOLDEN.glob("*.npz")}
