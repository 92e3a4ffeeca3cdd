"""Pods of chips: gradients inside of a pod, a center between pods."""

from typing import Any

import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts

PODS, CHIPS, STEPS = 2, 4, 5
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
TX: Any = oxs.diloco(
    oxs.cross_shard(optax.sgd(0.1, momentum=0.9), "chips", measure=True),
    "pods",
    outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
    communication_period=2,
    measure=True,
)


def started(mesh, **given):
    sizes, axes = (PODS, CHIPS), ("pods", "chips")
    return contexts.started(TX, PARAMS, sizes, axes, mesh=mesh, **given)


def gradients():
    shape = (STEPS, PODS, CHIPS, *PARAMS["w"].shape)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def by_hand():
    """[T, pods, ...] in float64."""
    grads = np.float64(gradients()).mean(2)
    x = np.float64(PARAMS["w"]) + np.zeros((PODS, 1, 1))
    center, trace, outer = x[0], np.zeros_like(x), 0.0
    history = []
    for t in range(STEPS):
        trace = 0.9 * trace + grads[t]
        x = x - 0.1 * trace
        if t % 2 == 1:
            moved = center - x.mean(0)
            outer = 0.9 * outer + moved
            center = center - 0.7 * (moved + 0.9 * outer)
            x = center + np.zeros_like(x)
        history.append(x)
    return np.stack(history)


@pytest.mark.parametrize("mesh", [None, True])
def test_one_answer(mesh):
    (step, params, state), grads = started(mesh, batch_size=3), gradients()
    for now, expected in zip(grads, by_hand(), strict=True):
        params, state = step(params, state, {"w": now})
        every = np.broadcast_to(expected[:, None], params["w"].shape)
        contexts.assert_close(params["w"], every)
    # Of a pod's own chips in the last step, and of the pods in the last round.
    inside = oxs.metrics(state.inner)
    own = np.float64(grads[-1]).reshape(PODS, CHIPS, -1)
    norms = np.sqrt((own**2).sum(-1).mean(-1, keepdims=True))
    found = inside.contribution_norm
    np.testing.assert_allclose(found, np.broadcast_to(norms, found.shape), rtol=1e-5)
    assert np.all(inside.contributors == CHIPS)
    assert np.all(oxs.metrics(state).contributors == PODS)
    assert int(oxs.metrics(state).rounds) == 2


def test_often_inside_of_a_pod_and_seldom_between_pods():
    """Groups and bytes in the compiled step; measures are a scalar each."""
    step, *begin = started(True)
    rows = oxs.audit.collectives(step, *begin, {"w": gradients()[0]})
    size = 4 * PARAMS["w"].size
    assert sorted(row[:5] for row in rows) == [
        ("all-reduce", size + 4, 2, ((0, 1, 2, 3), (4, 5, 6, 7)), False),
        ("all-reduce", size + 4, 2, ((0, 4), (1, 5), (2, 6), (3, 7)), True),
    ]
