"""The numbers of TensorFlow's own unit tests, under the names that they have there.

Figures of TensorFlow 1.15, `python/training/*_test.py`: gradients that stay the same, a
few steps, and the variables after them, to TensorFlow's own 1e-6.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs

catalogue: Any = oxs.optimizers


class Case(NamedTuple):
    """Two variables, their gradients, and where they are after some steps."""

    tx: Any
    steps: int
    expected: tuple[Any, Any]
    start: Any = ([1.0, 2.0], [4.0, 3.0])
    grads: Any = ([0.1, 0.2], [0.01, 0.02])


def row(index, value):
    return oxs.IndexedSlices(jnp.array([index]), jnp.array([[value]]))


ZEROS = ([0.0, 0.0], [0.0, 0.0])
ADAGRAD = {
    "start": ([1.0, 2.0], [3.0, 4.0]),
    "grads": ([0.1, 0.1], [0.01, 0.01]),
}
ADAGRAD_AFTER_3 = (
    [-1.6026098728179932, -0.6026098728179932],
    [2.715679168701172, 3.715679168701172],
)
L1 = {"l1": 0.001}
L1_L2 = {"l1": 0.001, "l2": 2.0}
SHRINKAGE = {**L1_L2, "l2_shrinkage": 0.1}
ROWS = {
    "start": ([[1.0], [2.0]], [[4.0], [3.0]]),
    "grads": (row(0, 0.1), row(1, 0.02)),
}
CASES = {
    "adagrad.testBasic": Case(catalogue.adagrad(3.0), 3, ADAGRAD_AFTER_3, **ADAGRAD),
    "adagrad.testTensorLearningRate": Case(
        catalogue.adagrad(jnp.float32(3)), 3, ADAGRAD_AFTER_3, **ADAGRAD
    ),
    "adagrad.testSparseBasic": Case(
        catalogue.adagrad(3.0),
        3,
        ([[-1.6026098728179932], [2.0]], [[3.0], [3.715679168701172]]),
        start=([[1.0], [2.0]], [[3.0], [4.0]]),
        grads=(row(0, 0.1), row(1, 0.01)),
    ),
    "adagrad.testSparseStability": Case(
        catalogue.adagrad(1.0),
        1,
        (
            [[0.00891194, -0.10712013, 0.11047515]],
            [[0.22636929, -0.0144573, -0.01029443]],
        ),
        start=(
            [[0.00872496, -0.106952, 0.110467]],
            [[0.226505, -0.0147257, -0.0105945]],
        ),
        grads=(
            oxs.IndexedSlices(
                jnp.array([0]), jnp.array([[-5.91278e-05, 5.31673e-05, -2.5779e-06]])
            ),
            oxs.IndexedSlices(
                jnp.array([0]), jnp.array([[4.29153e-05, -8.4877e-05, -9.48906e-05]])
            ),
        ),
    ),
    "ftrl.testFtrlWithoutRegularization": Case(
        catalogue.ftrl(3.0),
        3,
        ([-2.60260963, -4.29698515], [-0.28432083, -0.56694895]),
        start=ZEROS,
    ),
    "ftrl.testFtrlwithoutRegularization2": Case(
        catalogue.ftrl(3.0),
        3,
        ([-2.55607247, -3.98729396], [-0.28232238, -0.56096673]),
    ),
    "ftrl.testFtrlWithL1": Case(
        catalogue.ftrl(3.0, **L1),
        10,
        ([-7.66718769, -10.91273689], [-0.93460727, -1.86147261]),
    ),
    "ftrl.testFtrlWithL1_L2": Case(
        catalogue.ftrl(3.0, **L1_L2),
        10,
        ([-0.24059935, -0.46829352], [-0.02406147, -0.04830509]),
    ),
    "ftrl.testFtrlWithL1_L2_L2Shrinkage": Case(
        catalogue.ftrl(3.0, **SHRINKAGE),
        10,
        ([-0.22578995, -0.44345796], [-0.14378493, -0.13229476]),
    ),
    "ftrl.testFtrlWithL1_L2_L2ShrinkageSparse": Case(
        catalogue.ftrl(3.0, **SHRINKAGE),
        10,
        ([[-0.22578995], [2.0]], [[4.0], [-0.13229476]]),
        **ROWS,
    ),
    "proximal_gradient_descent.testProximalGradientDescentwithoutRegularization": Case(
        catalogue.proximal_gradient_descent(3.0),
        3,
        ([-0.9, -1.8], [-0.09, -0.18]),
        start=ZEROS,
    ),
    "proximal_gradient_descent.testProximalGradientDescentwithoutRegularization2": Case(
        catalogue.proximal_gradient_descent(3.0), 3, ([0.1, 0.2], [3.91, 2.82])
    ),
    "proximal_gradient_descent.testProximalGradientDescentWithL1_L2": Case(
        catalogue.proximal_gradient_descent(3.0, **L1_L2),
        10,
        ([-0.0495, -0.0995], [-0.0045, -0.0095]),
    ),
    "proximal_adagrad.testProximalAdagradwithoutRegularization": Case(
        catalogue.proximal_adagrad(3.0),
        3,
        ([-2.60260963, -4.29698515], [-0.28432083, -0.56694895]),
        start=ZEROS,
    ),
    "proximal_adagrad.testProximalAdagradwithoutRegularization2": Case(
        catalogue.proximal_adagrad(3.0),
        3,
        ([-1.60261, -2.296985], [3.715679, 2.433051]),
    ),
    "proximal_adagrad.testProximalAdagradWithL1": Case(
        catalogue.proximal_adagrad(3.0, **L1),
        10,
        ([-6.663634, -9.190331], [2.959304, 1.029232]),
    ),
    "proximal_adagrad.testProximalAdagradWithL1_L2": Case(
        catalogue.proximal_adagrad(3.0, **L1_L2),
        10,
        ([-0.0495, -0.0995], [-0.0045, -0.0095]),
    ),
    # Decays of 1: both averages stand still, and a step is the gradient.
    "adadelta.testMinimizeSparseResourceVariable": Case(
        catalogue.adadelta(1.0, rho=1.0, eps=1.0),
        1,
        ([-111.0, -138.0], [1.0, 2.0]),
        start=([1.0, 2.0], [1.0, 2.0]),
        grads=([112.0, 140.0], [0.0, 0.0]),
    ),
}


@pytest.fixture(scope="module")
def after():
    """All cases in one program."""

    def run(case):
        grads = tuple(
            jnp.array(grad) if isinstance(grad, list) else grad for grad in case.grads
        )
        params = tuple(jnp.array(start) for start in case.start)

        def step(carry, _):
            params, state = carry
            updates, state = case.tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = (params, case.tx.init(params))
        return jax.lax.scan(step, start, length=case.steps)[0][0]

    return jax.jit(lambda: {name: run(case) for name, case in CASES.items()})()


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_tensorflow_s_own_tests(after, name):
    for actual, expected in zip(after[name], CASES[name].expected, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_decays_of_one_are_what_the_formulas_give():
    """No original refuses them: an average of such a decay stays where it starts."""
    params, grads = jnp.ones(2), jnp.array([2.0, -4.0])

    def first(tx) -> Any:
        return tx.update(grads, tx.init(params), params)

    update, state = first(catalogue.rmsprop(0.5, decay=1.0, eps=0.0))
    np.testing.assert_array_equal(update, -0.5 * grads)  # the average of squares is 1
    np.testing.assert_array_equal(state.slots.rms, 1)
    update, state = first(catalogue.adam(0.5, b2=1.0))
    np.testing.assert_array_equal(update, 0)  # the root of 1 - b2^t
    np.testing.assert_array_equal(state.slots.v, 0)
    # The bias correction of a first moment that does not move is 0 / 0.
    assert np.all(np.isnan(first(catalogue.adam(0.5, b1=1.0))[0]))
