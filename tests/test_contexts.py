"""Lanes of a `jax.vmap` over a mesh whose axes are explicit, set or not.

`tests.contexts` has the contexts in which each law runs, and `tests/test_workers.py`
meshes of automatic and of explicit axes, of workers on one and on several devices.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.refusals import refused

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 7
SGD, EVERY = optax.sgd(0.1, momentum=0.9), {"communication_period": 2}
TXS: dict[str, Any] = {
    "cross_shard": oxs.cross_shard(SGD, AXIS),
    "sync_replicas": oxs.sync_replicas(SGD, AXIS, 6, variable_averages=0.9),
    "local_sgd": oxs.local_sgd(SGD, AXIS, drop_nonfinite=True, measure=True, **EVERY),
    "diloco": oxs.diloco(SGD, AXIS, communication_period=lambda step: 2),
}
PARAMS = {"matrix": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
DRAWN = np.random.default_rng(0).normal(size=(WORKERS, STEPS, 3, 2))
GRADS = {"matrix": DRAWN.astype(np.float32)}


def explicit():
    """A mesh as `jax.make_mesh` makes them."""
    return jax.make_mesh((4, 2), (AXIS, "model"))


def histories(mesh=None):
    """The parameters in each step, in one program; on a mesh all inputs lie on it."""
    arguments = {}
    for name, tx in TXS.items():
        params, state, _ = contexts.begun(tx, PARAMS)
        grads = GRADS
        if mesh is not None:
            specs = by_hand.state_specs(tx, PARAMS, P(), AXIS)
            places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            along = NamedSharding(mesh, P(AXIS))
            params, grads = jax.device_put((params, grads), along)
            state = jax.device_put(state, places)
        arguments[name] = params, state, grads, {}

    def run(arguments):
        found = {}
        for name, tx in TXS.items():
            axes = by_hand.state_axes(tx, PARAMS)
            ways = (0, axes, 0, None), (0, axes)
            lanes = jax.vmap(contexts.steps(tx), *ways, axis_name=AXIS)
            found[name] = lanes(*arguments[name])[0]
        return found

    return jax.jit(run)(arguments)


def test_vmap_over_explicit_axes():
    """Each lane whole. (JAX asks for an `out_sharding` where rows are gathered.)"""
    expected, mesh = histories(), explicit()
    with jax.set_mesh(mesh):
        found = histories(mesh)
    both = (
        {k: np.swapaxes(x[k]["matrix"], 0, 1) for k in x} for x in (found, expected)
    )
    contexts.assert_close(*both)


def over_explicit(name, spec, is_set):
    """A step whose gradients lie on a mesh of explicit axes, set or not."""
    mesh = explicit()
    tx, grads = TXS[name], jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec))
    state = by_hand.replicate(tx.init(jnp.zeros(8)), 4)
    if spec == P(AXIS):
        state = jax.device_put(state, NamedSharding(mesh, spec))
    step = jax.vmap(
        lambda grads, state: tx.update(grads, state, grads)[0], axis_name=AXIS
    )
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        jax.eval_shape(step, grads, state)


@pytest.mark.parametrize(
    ("name", "spec", "is_set"),
    [
        ("cross_shard", P(None, "model"), False),
        ("cross_shard", P(None, "model"), True),
        ("sync_replicas", P(None, "model"), False),
        ("sync_replicas", P(None, "model"), True),
        ("sync_replicas", P(AXIS), False),
    ],
)
def test_islands_over_explicit_axes_and_a_mesh_that_is_not_set_are_refused(
    name, spec, is_set
):
    """JAX spoke of the shardings of a select's cases, or of an axis in mesh: ()."""
    said = r"with jax\.set_mesh\(mesh\)" if spec == P(AXIS) else "Explicit mesh axes"
    with refused(rf"ValueError: {said}.*AxisType\.Auto"):
        over_explicit(name, spec, is_set)
