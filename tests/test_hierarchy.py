"""Pods of chips: gradients inside of a pod, a center between pods."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts
from tests.meshes import mesh_of

PODS, CHIPS, STEPS = 2, 4, 5
AXES = ("pods", "chips")
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
TX: Any = oxs.diloco(
    oxs.cross_shard(optax.sgd(0.1, momentum=0.9), "chips", measure=True),
    "pods",
    outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
    communication_period=2,
    measure=True,
)
AXES_OF_STATE = oxs.by_hand.state_axes(TX, PARAMS)


def mesh():
    return mesh_of(dict(zip(AXES, (PODS, CHIPS), strict=True)))


def gradients():
    shape = (STEPS, PODS, CHIPS, *PARAMS["w"].shape)
    return {"w": np.random.default_rng(0).normal(size=shape).astype(np.float32)}


def train(params, state, grads):
    """One chip, all steps: [T, ...] parameters, and what both levels measure."""

    def step(carry, grads):
        params, state = oxs.apply_gradients(TX, grads, carry[1], carry[0], batch_size=3)
        return (params, state), params

    (_, state), history = jax.lax.scan(step, (params, state), grads)
    return history, state


def by_map_workers(over):
    def one(params, state, grads):
        grads = oxs.localize(grads, "chips") if over is None else grads
        return train(params, state, grads)

    pod = oxs.by_hand.map_workers(
        one, "chips", mesh=over, in_axes=(None, None, 0), out_axes=None
    )
    return oxs.by_hand.map_workers(
        pod,
        "pods",
        mesh=over,
        in_axes=(0, AXES_OF_STATE, 0),
        out_axes=(0, AXES_OF_STATE),
    )


def by_shard_map(check_vma):
    specs = oxs.by_hand.state_specs(TX, PARAMS, P(), "pods")

    def local(params, state, grads):
        params = oxs.by_hand.first(params)
        grads = oxs.by_hand.first(oxs.by_hand.first(grads))
        state = oxs.by_hand.first(state, AXES_OF_STATE)
        history, state = train(params, state, grads)
        return oxs.by_hand.replicate(history, 1), oxs.by_hand.replicate(
            state, 1, AXES_OF_STATE
        )

    return jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(P("pods"), specs, P(*AXES)),
        out_specs=(P("pods"), specs),
        check_vma=check_vma,
    )


def arguments():
    params, state, _ = contexts.begun(TX, PARAMS, PODS)
    # [T, pods, chips, ...] -> [pods, chips, T, ...]
    return params, state, {"w": np.moveaxis(gradients()["w"], 0, 2)}


def by_hand():
    """[T, pods, ...] in float64."""
    grads = np.float64(gradients()["w"]).mean(2)
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


CONTEXTS = {
    "simulation": lambda: by_map_workers(None),
    "map_workers": lambda: by_map_workers(mesh()),
    "shard_map": lambda: by_shard_map(True),
    "shard_map_unchecked": lambda: by_shard_map(False),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_answer(context):
    history, state = jax.jit(CONTEXTS[context]())(*arguments())
    found = np.swapaxes(history["w"], 0, 1)
    contexts.assert_close(found, by_hand())
    # Of a pod's own chips in the last step, and of the pods in the last round.
    inside = oxs.metrics(state.inner)
    own = np.float64(gradients()["w"][-1]).reshape(PODS, CHIPS, -1)
    norms = np.sqrt((own**2).sum(-1).mean(-1))
    np.testing.assert_allclose(inside.contribution_norm, norms, rtol=1e-5)
    np.testing.assert_array_equal(inside.contributors, [CHIPS] * PODS)
    assert float(oxs.metrics(state).contributors) == PODS
    assert int(oxs.metrics(state).rounds) == 2


def test_often_inside_of_a_pod_and_seldom_between_pods():
    """Groups and bytes in the compiled step; measures are a scalar each."""

    def step(params, state, grads):
        return oxs.apply_gradients(TX, grads, state, params)

    pod = oxs.by_hand.map_workers(
        step, "chips", mesh=mesh(), in_axes=(None, None, 0), out_axes=None
    )
    pods = oxs.by_hand.map_workers(
        pod,
        "pods",
        mesh=mesh(),
        in_axes=(0, AXES_OF_STATE, 0),
        out_axes=(0, AXES_OF_STATE),
    )
    params, state, _ = contexts.begun(TX, PARAMS, PODS, "pods", mesh())
    place = NamedSharding(mesh(), P(*AXES))
    grads = jax.device_put({"w": jnp.ones((PODS, CHIPS, 3, 2))}, place)
    rows = oxs.audit.collectives(pods, params, state, grads)
    size = 4 * PARAMS["w"].size
    assert sorted(row[:5] for row in rows) == [
        ("all-reduce", size + 4, 2, ((0, 1, 2, 3), (4, 5, 6, 7)), False),
        ("all-reduce", size + 4, 2, ((0, 4), (1, 5), (2, 6), (3, 7)), True),
    ]
