"""Every center rule gives the NumPy recurrence's numbers, in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.reference import center as reference

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 25
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "empty": np.zeros((0, 3), np.float32),
}


def warm_up(step):
    """Every step at first, then every fourth."""
    return jnp.where(jnp.asarray(step) < 5, 1, 4)


INNER = optax.sgd(0.05, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
NUMPY_INNER = reference.momentum(0.05, 0.9)
NUMPY_OUTER = reference.momentum(0.7, 0.9, nesterov=True)

# name: (transformation, arguments of the recurrence)
CASES = {
    "elastic": (
        oxs.elastic_average(
            INNER, AXIS, num_workers=WORKERS, rho=0.0, communication_period=3
        ),
        {"rule": "elastic", "period": lambda t: 3, "rate": 0.9 / 3 / WORKERS},
    ),
    "elastic_rho": (
        oxs.elastic_average(INNER, AXIS, learning_rate=0.05, communication_period=3),
        {
            "rule": "elastic",
            "period": lambda t: 3,
            "rate": 0.9 / 3 / WORKERS,
            "rho": 0.9 / 3 / WORKERS / 0.05,
        },
    ),
    "elastic_schedule": (
        oxs.elastic_average(
            INNER, AXIS, moving_rate=0.2, rho=0.3, communication_period=warm_up
        ),
        {"rule": "elastic", "period": warm_up, "rate": 0.2, "rho": 0.3},
    ),
    "agn": (
        oxs.agn(INNER, AXIS, communication_period=3),
        {"rule": "agn", "period": lambda t: 3, "outer": NUMPY_INNER},
    ),
    "agn_sum": (
        oxs.agn(
            INNER,
            AXIS,
            outer=optax.sgd(0.02),
            reduction="sum",
            communication_period=warm_up,
        ),
        {
            "rule": "agn",
            "period": warm_up,
            "outer": reference.momentum(0.02),
            "mean": False,
        },
    ),
    "agn_updates": (
        oxs.agn(INNER, AXIS, accumulate="updates", communication_period=4),
        {"rule": "agn_updates", "period": lambda t: 4},
    ),
    "local_sgd": (
        oxs.local_sgd(INNER, AXIS, communication_period=3),
        {"rule": "local_sgd", "period": lambda t: 3},
    ),
    "post_local_sgd": (
        oxs.local_sgd(INNER, AXIS, communication_period=warm_up),
        {"rule": "local_sgd", "period": warm_up},
    ),
    "diloco": (
        oxs.diloco(INNER, AXIS, communication_period=3),
        {"rule": "diloco", "period": lambda t: 3, "outer": NUMPY_OUTER},
    ),
}


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(STEPS, WORKERS, *p.shape)).astype(np.float32), PARAMS
    )


def expected(name):
    """Trees of workers' parameters [T, N, ...] and of centers [T, ...]."""
    _, arguments = CASES[name]
    leaves, treedef = jax.tree.flatten(PARAMS)
    pairs = [
        reference.lockstep(x0=p, grads=g, inner=NUMPY_INNER, **arguments)
        for p, g in zip(leaves, jax.tree.leaves(gradients()), strict=True)
    ]
    return [treedef.unflatten(part) for part in zip(*pairs, strict=True)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("context", contexts.CONTEXTS)
def test_one_answer_everywhere(context, name):
    tx, _ = CASES[name]
    history, state = contexts.replay(context, tx, PARAMS, gradients())
    workers, centers = expected(name)
    contexts.assert_close(history, workers)
    center = oxs.center_params(state, PARAMS)
    contexts.assert_close(
        jax.tree.map(lambda c: np.asarray(c)[None], center),
        jax.tree.map(lambda c: c[-1:], centers),
    )
