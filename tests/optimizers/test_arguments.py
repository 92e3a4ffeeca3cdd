"""Each refusal, with the words that tell the user what to do."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.optimizers.adagrad import adagrad
from optx_sync.optimizers.adam import adam
from optx_sync.optimizers.amsgrad import amsgrad
from optx_sync.optimizers.ftrl import ftrl
from optx_sync.optimizers.gradient_descent import gradient_descent
from optx_sync.optimizers.momentum import momentum
from optx_sync.optimizers.rmsprop import rmsprop
from optx_sync.rows.slices import IndexedSlices
from tests.cases import OPTIMIZERS
from tests.refusals import refused

NAN, INF = float("nan"), float("inf")
ADAMS = "adam custom_adam amsgrad nadam grad_variance_scaled"
# (interval, what lies outside of it, arguments, of which optimizers)
INTERVALS = [
    ("(0, inf)", (0.0, -1.0, INF), "initial_accumulator_value", "adagrad"),
    ("(0, inf)", (0.0, -1.0), "initial_accumulator_value", "proximal_adagrad"),
    ("(0, inf)", (0.0,), "initial_gradient_squared_accumulator_value", "adagrad_da"),
    ("[0, inf)", (-0.1, NAN), "initial_accumulator_value l2_shrinkage beta", "ftrl"),
    ("[0, inf)", (-0.1, INF), "l1 l2", "ftrl adagrad_da proximal_adagrad"),
    ("[0, inf)", (np.float32(-1), INF), "l1 l2", "proximal_gradient_descent"),
    ("[0, inf)", (-1e-8, NAN), "eps", f"adadelta rmsprop {ADAMS}"),
    ("(-inf, 0]", (0.5, NAN), "learning_rate_power", "ftrl"),
    ("[0, 1]", (1.01, -0.1), "rho", "adadelta"),
    ("[0, 1]", (1.5, -0.1), "decay", "rmsprop"),
    ("[0, 1]", (1.01, -0.1, NAN), "b1", f"neural_optimizer_1 {ADAMS}"),
    ("[0, 1]", (1.01, -0.1), "b2", ADAMS),
    ("(-inf, inf)", (INF, NAN), "momentum", "momentum rmsprop"),
    ("(-inf, inf)", (NAN,), "decrease_factor", "neural_optimizer_1"),
]


@pytest.mark.parametrize(("interval", "values", "names", "optimizers"), INTERVALS)
def test_a_number_out_of_its_interval(interval, values, names, optimizers):
    for make in optimizers.split():
        for name in names.split():
            for value in values:
                said = f"{name} must be a finite number in {interval}; got {value!r}."
                with pytest.raises(ValueError, match=re.escape(said)):
                    getattr(oxs.optimizers, make)(0.1, **{name: value})


WRONG: Any = 0.9
NO_NUMBER = r"TypeError: b1 must be a number in \[0, 1\]; got"


@pytest.mark.parametrize(
    ("said", "call"),
    [
        *((NO_NUMBER, lambda v=v: adam(0.1, b1=v)) for v in (None, "0.9", True, [0.9])),
        ("ValueError: b1 must be a scalar", lambda: adam(0.1, b1=np.array([0.9, 0.8]))),
        ("ValueError: b1 must be a scalar", lambda: adam(0.1, b1=jnp.array([0.9]))),
        (
            "ValueError: learning_rate must be a scalar",
            lambda: gradient_descent(jnp.ones([2])),
        ),
        (
            r"ValueError: learning_rate must be a scalar.*\(2,\)",
            lambda: gradient_descent(lambda count: jnp.ones([2])).update(
                jnp.ones(2), gradient_descent(0.1).init(jnp.ones(2))
            ),
        ),
        ("ValueError: must not be 0", lambda: ftrl(0.0)),
        (
            r"TypeError: decay must be True or False; got 0\.9",
            lambda: amsgrad(0.1, WRONG),
        ),
        (
            "TypeError: nesterov must be True or False",
            lambda: momentum(0.1, 0.9, nesterov=1),
        ),
        (
            "TypeError: centered must be True or False",
            lambda: rmsprop(0.1, centered=None),
        ),
    ],
)
def test_what_is_no_number_and_no_flag(said, call):
    with refused(said):
        call()


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_learning_rates(case):
    for value in (None, "0.1", True):
        with pytest.raises(TypeError, match="or an Optax schedule"):
            case.make(value)
    for value in (NAN, INF):
        with pytest.raises(ValueError, match="learning_rate must be a finite number"):
            case.make(value)
    # As in the originals and in Optax.
    case.make(-0.1)
    case.make(np.float64(0.1))


def test_traced_hyperparameters_pass():
    def first_update(b1) -> Any:
        tx = adam(0.1, b1=b1)
        return tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0]

    np.testing.assert_allclose(jax.jit(first_update)(0.5), first_update(0.5), rtol=1e-6)
    assert jax.eval_shape(first_update, 2.0).shape == (2,)


PARAMS = {"layer": {"w": jnp.ones([3, 2]), "b": jnp.ones([2])}}
BIAS, SCALAR = {"layer": {"b": jnp.ones([2])}}, jnp.ones([])
W, B = r"\['layer'\]\['w'\]", r"\['layer'\]\['b'\]"


def changed(**leaves):
    return {"layer": {**PARAMS["layer"], **leaves}}


def rows(*width):
    return IndexedSlices(jnp.array([0]), jnp.ones([1, *width]))


TALLER, TURNED = changed(w=jnp.ones([4, 2])), changed(w=jnp.ones([2, 3]))
MISSING = {"layer": {"w": jnp.ones([3, 2])}}
BOTH = [jnp.ones([2]), jnp.ones([3, 2])]
MORE = {**PARAMS, "x": optax.EmptyState()}


@pytest.mark.parametrize(
    ("said", "grads", "params", "of"),
    [
        (rf"ValueError: {W} has shape \(2, 3\)", TURNED, PARAMS, PARAMS),
        (rf"ValueError: {W} has shape \(2, 3\)", TURNED, None, PARAMS),
        (f"ValueError: {B} is missing", MISSING, PARAMS, PARAMS),
        (f"ValueError: {B} is missing", MISSING, None, PARAMS),
        ("ValueError: structure", {"layer": BOTH}, PARAMS, PARAMS),
        ("ValueError: structure of the parameters", MORE, PARAMS, PARAMS),
        ("ValueError: structure of the optimizer's state", BIAS, BIAS, PARAMS),
        (f"ValueError: {W} .* made by init for", TALLER, TALLER, PARAMS),
        *(
            (f"TypeError: {B} {of}", changed(b=jnp.ones([2], dtype)), PARAMS, PARAMS)
            for dtype, of in {
                "int32": "has dtype int32",
                "bool": "has dtype bool",
                "complex64": "is complex",
            }.items()
        ),
        (f"ValueError: {W} needs its parameter", changed(w=rows(2)), None, PARAMS),
        (f"ValueError: {W}", changed(w=rows(3)), PARAMS, PARAMS),
        ("ValueError: do not fit their table", rows(), SCALAR, SCALAR),
    ],
)
def test_gradients_that_do_not_fit_name_their_leaf(said, grads, params, of):
    """And other parameters than the state was made for."""
    tx = adagrad(0.1)
    with refused(said):
        tx.update(grads, tx.init(of), params)
