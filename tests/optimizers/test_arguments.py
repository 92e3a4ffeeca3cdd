"""Each refusal, with the words that tell the user what to do."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optx_sync.optimizers.adadelta import adadelta
from optx_sync.optimizers.adagrad import adagrad
from optx_sync.optimizers.adagrad_da import adagrad_da
from optx_sync.optimizers.adam import adam
from optx_sync.optimizers.amsgrad import amsgrad
from optx_sync.optimizers.custom_adam import custom_adam
from optx_sync.optimizers.ftrl import ftrl
from optx_sync.optimizers.grad_variance_scaled import grad_variance_scaled
from optx_sync.optimizers.gradient_descent import gradient_descent
from optx_sync.optimizers.momentum import momentum
from optx_sync.optimizers.nadam import nadam
from optx_sync.optimizers.neural_optimizer_1 import neural_optimizer_1
from optx_sync.optimizers.proximal_adagrad import proximal_adagrad
from optx_sync.optimizers.proximal_gradient_descent import proximal_gradient_descent
from optx_sync.optimizers.rmsprop import rmsprop
from optx_sync.rows.slices import IndexedSlices
from tests.cases import OPTIMIZERS

NAN, INF = float("nan"), float("inf")

OUT_OF_RANGE = [
    (adagrad, "initial_accumulator_value", "(0, inf)", [0.0, -1.0, INF]),
    (proximal_adagrad, "initial_accumulator_value", "(0, inf)", [0.0, -1.0]),
    (
        adagrad_da,
        "initial_gradient_squared_accumulator_value",
        "(0, inf)",
        [0.0, -1.0],
    ),
    (ftrl, "initial_accumulator_value", "[0, inf)", [-0.1, NAN]),
    (ftrl, "learning_rate_power", "(-inf, 0]", [0.5, NAN]),
    (ftrl, "l1", "[0, inf)", [-0.1]),
    (ftrl, "l2", "[0, inf)", [-0.1]),
    (ftrl, "l2_shrinkage", "[0, inf)", [-0.1]),
    (ftrl, "beta", "[0, inf)", [-0.5]),
    (adagrad_da, "l1", "[0, inf)", [-0.1]),
    (adagrad_da, "l2", "[0, inf)", [-0.1]),
    (proximal_adagrad, "l1", "[0, inf)", [-0.1]),
    (proximal_adagrad, "l2", "[0, inf)", [-0.1]),
    (proximal_gradient_descent, "l1", "[0, inf)", [-0.1]),
    (proximal_gradient_descent, "l2", "[0, inf)", [-0.1, np.float32(-1), INF]),
    (adadelta, "rho", "[0, 1]", [1.01, -0.1]),
    (rmsprop, "decay", "[0, 1]", [1.5, -0.1]),
    (rmsprop, "momentum", "(-inf, inf)", [NAN]),
    (momentum, "momentum", "(-inf, inf)", [INF, NAN]),
    (neural_optimizer_1, "decrease_factor", "(-inf, inf)", [NAN]),
    *[
        (make, "eps", "[0, inf)", [-1e-8, NAN])
        for make in (
            adadelta,
            rmsprop,
            adam,
            custom_adam,
            amsgrad,
            nadam,
            grad_variance_scaled,
        )
    ],
    *[
        (make, "b1", "[0, 1]", [1.01, 1.5, -0.1, NAN])
        for make in (
            adam,
            custom_adam,
            amsgrad,
            nadam,
            neural_optimizer_1,
            grad_variance_scaled,
        )
    ],
    *[
        (make, "b2", "[0, 1]", [1.01, -0.1])
        for make in (adam, custom_adam, amsgrad, nadam, grad_variance_scaled)
    ],
]


@pytest.mark.parametrize(
    ("make", "name", "interval", "values"),
    OUT_OF_RANGE,
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_number_out_of_its_interval(make, name, interval, values):
    for value in values:
        message = f"{name} must be a number in {interval}; got {value!r} of type"
        with pytest.raises(ValueError, match=re.escape(message)):
            make(0.1, **{name: value})


@pytest.mark.parametrize("value", [None, "0.9", True, 1j, [0.9]])
def test_a_hyperparameter_that_is_no_number(value):
    with pytest.raises(TypeError, match=r"b1 must be a number in \[0, 1\]; got"):
        adam(0.1, b1=value)


def test_a_hyperparameter_that_is_no_scalar():
    for value in (np.array([0.9, 0.8]), jnp.array([0.9])):
        with pytest.raises(ValueError, match=r"b1 must be a number .* got float\d\d\["):
            adam(0.1, b1=value)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_learning_rates(case):
    for value in (None, "0.1", True):
        with pytest.raises(TypeError, match="or an Optax schedule"):
            case.make(value)
    for value in (NAN, INF):
        with pytest.raises(
            ValueError, match=r"learning_rate must be a number in \(-inf, inf\)"
        ):
            case.make(value)
    # As in the originals and in Optax.
    case.make(-0.1)
    case.make(np.float64(0.1))


def test_a_learning_rate_that_is_no_scalar():
    tx = gradient_descent(lambda count: jnp.ones([2]))
    with pytest.raises(ValueError, match=r"learning_rate .* of scalars.*\(2,\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"learning_rate must be a number.*32\[2\]"):
        gradient_descent(jnp.ones([2]))


def test_ftrl_divides_by_the_learning_rate():
    with pytest.raises(ValueError, match="must not be 0"):
        ftrl(0.0)


def test_a_number_where_a_flag_stands():
    with pytest.raises(ValueError, match=r"decay must be True or False; got 0\.9"):
        amsgrad(0.1, 0.9)  # pyright: ignore[reportArgumentType] # the mistake itself


def test_traced_hyperparameters_pass():
    def first_update(b1) -> Any:
        tx = adam(0.1, b1=b1)
        return tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0]

    np.testing.assert_allclose(jax.jit(first_update)(0.5), first_update(0.5), rtol=1e-6)
    assert jax.eval_shape(first_update, 2.0).shape == (2,)


PARAMS = {"layer": {"w": jnp.ones([3, 2]), "b": jnp.ones([2])}}


def refuse(error, message, grads, params=PARAMS, tx=None, init=PARAMS):
    tx = adagrad(0.1) if tx is None else tx
    state: Any = tx.init(init)
    with pytest.raises(error, match=message):
        tx.update(grads, state, params)
    assert state.update_count == 0


def changed(**leaves):
    return {"layer": {**PARAMS["layer"], **leaves}}


def test_a_gradient_of_another_shape_names_its_leaf():
    grads = changed(w=jnp.ones([2, 3]))
    for params in (PARAMS, None):
        refuse(ValueError, r"\['layer'\]\['w'\] has shape \(2, 3\)", grads, params)


def test_a_missing_gradient_names_its_leaf():
    grads = {"layer": {"w": jnp.ones([3, 2])}}
    for params in (PARAMS, None):
        refuse(ValueError, r"\['layer'\]\['b'\] is missing", grads, params)


def test_other_containers_are_told():
    grads = {"layer": [jnp.ones([2]), jnp.ones([3, 2])]}
    refuse(ValueError, "structure", grads)
    ordered = optax.EmptyState()
    refuse(ValueError, "structure of the parameters", {**PARAMS, "x": ordered})


def test_a_state_of_other_parameters_is_told():
    bias = {"layer": {"b": jnp.ones([2])}}
    refuse(ValueError, "structure of the optimizer's state", bias, bias)
    other = changed(w=jnp.ones([4, 2]))
    refuse(ValueError, r"\['layer'\]\['w'\] .* made by init for", other, other)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integer_gradients(dtype):
    grads = changed(b=jnp.ones([2], dtype))
    refuse(TypeError, rf"\['layer'\]\['b'\] has dtype {dtype}", grads)


def test_complex_gradients():
    grads = changed(b=jnp.ones([2], jnp.complex64))
    refuse(TypeError, r"\['layer'\]\['b'\] is complex", grads)


def test_rows_without_params():
    grads = changed(w=IndexedSlices(jnp.array([0]), jnp.ones([1, 2])))
    refuse(ValueError, r"\['layer'\]\['w'\] needs its parameter", grads, None)


def test_rows_of_another_width():
    grads = changed(w=IndexedSlices(jnp.array([0]), jnp.ones([1, 3])))
    refuse(ValueError, r"\['layer'\]\['w'\]", grads)


def test_rows_of_a_scalar():
    grads = IndexedSlices(jnp.array([0]), jnp.ones([1]))
    scalar = jnp.ones([])
    refuse(ValueError, "do not fit their table", grads, scalar, init=scalar)
