"""Each refusal, with the words that tell the user what to do."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.core.slices import IndexedSlices
from tests.cases import OPTIMIZERS
from tests.refusals import all_refused

optimizers: Any = oxs.optimizers
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
                said = f"{name} must be a number in {interval}; got {value!r} of type"
                with pytest.raises(ValueError, match=re.escape(said)):
                    getattr(oxs.optimizers, make)(0.1, **{name: value})


test_what_is_no_number_and_no_flag = all_refused(globals())(r"""
optimizers.adam(0.1, b1=None)
optimizers.adam(0.1, b1="0.9")
optimizers.adam(0.1, b1=True)
optimizers.adam(0.1, b1=[0.9])  # TypeError: b1 must be a number in \[0, 1\]; got
optimizers.adam(0.1, b1=np.array([0.9, 0.8]))
optimizers.adam(0.1, b1=jnp.array([0.9]))  # ValueError: b1 must be.*got float
optimizers.gradient_descent(jnp.ones([2]))  # ValueError: a number.*got float32\[2\]
optimizers.gradient_descent(lambda count: jnp.ones([2])).update(
    jnp.ones(2), optimizers.gradient_descent(0.1).init(jnp.ones(2))
    )  # ValueError: learning_rate must be .* of scalars.*\(2,\)
optimizers.ftrl(0.0)  # ValueError: must not be 0
optimizers.amsgrad(0.1, 0.9)  # ValueError: decay must be True or False; got 0\.9
""")


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_learning_rates(case):
    for value in (None, "0.1", True):
        with pytest.raises(TypeError, match="or an Optax schedule"):
            case.make(value)
    for value in (NAN, INF):
        with pytest.raises(
            ValueError, match=r"learning_rate must be a number in \(-inf"
        ):
            case.make(value)
    # As in the originals and in Optax.
    case.make(-0.1)
    case.make(np.float64(0.1))


def test_traced_hyperparameters_pass():
    def first_update(b1) -> Any:
        tx = optimizers.adam(0.1, b1=b1)
        return tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0]

    np.testing.assert_allclose(jax.jit(first_update)(0.5), first_update(0.5), rtol=1e-6)
    assert jax.eval_shape(first_update, 2.0).shape == (2,)


PARAMS = {"layer": {"w": jnp.ones([3, 2]), "b": jnp.ones([2])}}
BIAS, SCALAR = {"layer": {"b": jnp.ones([2])}}, jnp.ones([])


def changed(**leaves):
    return {"layer": {**PARAMS["layer"], **leaves}}


def rows(*width):
    return IndexedSlices(jnp.array([0]), jnp.ones([1, *width]))


TALLER, TURNED = changed(w=jnp.ones([4, 2])), changed(w=jnp.ones([2, 3]))
MISSING = {"layer": {"w": jnp.ones([3, 2])}}
BOTH = [jnp.ones([2]), jnp.ones([3, 2])]
MORE = {**PARAMS, "x": optax.EmptyState()}


def update(grads, params: Any = PARAMS, of: Any = PARAMS):
    tx = optimizers.adagrad(0.1)
    tx.update(grads, tx.init(of), params)


# They name their leaf; so do other parameters than the state was made for.
test_gradients_that_do_not_fit = all_refused(globals())(r"""
update(TURNED)
update(TURNED, None)  # ValueError: \['layer'\]\['w'\] has shape \(2, 3\)
update(MISSING)
update(MISSING, None)  # ValueError: \['layer'\]\['b'\] is missing
update({"layer": BOTH})  # ValueError: structure
update(MORE)  # ValueError: structure of the parameters
update(BIAS, BIAS)  # ValueError: structure of the optimizer's state
update(TALLER, TALLER)  # ValueError: \['layer'\]\['w'\] .* made by init for
update(changed(b=jnp.ones([2], "i4")))  # TypeError: \['b'\] has dtype int32
update(changed(b=jnp.ones([2], "?")))  # TypeError: \['b'\] has dtype bool
update(changed(b=jnp.ones([2], "c8")))  # TypeError: \['b'\] is complex
update(changed(w=rows(2)), None)  # ValueError: \['w'\] needs its parameter
update(changed(w=rows(3)))  # ValueError: \['layer'\]\['w'\]
update(rows(), SCALAR, SCALAR)  # ValueError: do not fit their table
""")
