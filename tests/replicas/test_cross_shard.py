"""cross_shard: one answer everywhere, and what it must refuse."""

import jax
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.reference import replicas as reference

GROUPS = [[0, 2], [1, 3]]
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "empty": np.zeros((0, 3), np.float32),
}
# name: (arguments of cross_shard, arguments of the reference, with weights)
CASES = {
    "mean": ({}, {}, False),
    "sum": ({"reduction": "sum"}, {"reduction": "sum"}, False),
    "weighted": ({}, {}, True),
    "groups": ({"group_assignment": GROUPS}, {"groups": GROUPS}, False),
    "sum_groups": (
        {"reduction": "sum", "group_assignment": GROUPS},
        {"reduction": "sum", "groups": GROUPS},
        False,
    ),
    "weighted_groups": ({"group_assignment": GROUPS}, {"groups": GROUPS}, True),
}


def gradients(steps=25, replicas=contexts.REPLICAS, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(steps, replicas, *p.shape)).astype(np.float32),
        PARAMS,
    )


def weights(steps=25, replicas=contexts.REPLICAS):
    weight = np.random.default_rng(1).integers(0, 9, (steps, replicas))
    weight[3] = 0  # nobody has seen a token
    return weight.astype(np.float32)


def inputs(name):
    arguments, _, weighted = CASES[name]
    tx = oxs.cross_shard(optax.sgd(0.1, momentum=0.9), contexts.AXIS, **arguments)
    extra = {"weight": weights()} if weighted else {}
    return tx, PARAMS, gradients(), extra


def expected(name):
    _, arguments, weighted = CASES[name]
    grads = gradients()
    per_step = weights() if weighted else [None] * 25

    def leaf(param, grad):
        reduced = [
            reference.reduce(g, weight=w, **arguments)
            for g, w in zip(grad, per_step, strict=True)
        ]
        start = np.broadcast_to(param, (contexts.REPLICAS, *param.shape))
        return reference.momentum(start, reduced, 0.1, 0.9)

    return jax.tree.map(leaf, PARAMS, grads)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("context", contexts.CONTEXTS)
def test_one_answer_everywhere(context, name):
    history, _ = contexts.replay(context, *inputs(name))
    contexts.assert_close(history, expected(name))


def process_cases():
    """For tests/two_processes.py."""
    cases = {name: inputs(name) for name in CASES}
    for name in ("mean", "weighted"):
        cases[f"{name} replicated"] = (*inputs(name), ("replicated",))
    return cases
