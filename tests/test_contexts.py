"""Every wrapper in the contexts that the law tests leave out: parts of a mesh, types.

`tests.contexts` has those in which each law runs. Here all wrappers stand in one
program for each context, beside the same program under `jax.vmap`.
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
from tests.meshes import mesh_of
from tests.refusals import refused

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 7
SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"matrix": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
TABLE = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
DENSE: dict[str, Any] = {
    "cross_shard": oxs.cross_shard(SGD, AXIS),
    "all_reduce_grads": optax.chain(
        optax.clip(1.0),
        oxs.all_reduce_grads(AXIS, group_assignment=[[0, 2], [1, 3]]),
        SGD,
    ),
    "sync_replicas": oxs.sync_replicas(
        SGD, AXIS, 6, variable_averages=0.9, drop_nonfinite=True
    ),
    "elastic": oxs.elastic_average(
        SGD, AXIS, learning_rate=0.1, communication_period=2
    ),
    "agn": oxs.agn(SGD, AXIS, communication_period=2, inner_state="average"),
    "local_sgd": oxs.local_sgd(
        SGD, AXIS, communication_period=2, drop_nonfinite=True, measure=True
    ),
    "diloco": oxs.diloco(SGD, AXIS, communication_period=lambda step: 2),
}


def row_gradients(inputs):
    """The rows that a batch touches, through `take`."""

    def loss(params, inputs):
        return jnp.sum(oxs.take(params["table"], inputs["ids"]) * inputs["scale"])

    grad_fn = oxs.value_and_grad(loss, rows={"table": lambda inputs: inputs["ids"]})
    return grad_fn({"table": jnp.asarray(TABLE)}, inputs)[1]["table"]


# name: (transformation, parameters, what makes gradients of the inputs)
CASES: dict[str, Any] = {
    **{name: (tx, PARAMS, lambda grads: grads) for name, tx in DENSE.items()},
    "rows": (oxs.cross_shard(oxs.optimizers.adagrad(0.1), AXIS), TABLE, row_gradients),
}


def inputs(name):
    """[N, T, ...]"""
    rng = np.random.default_rng(0)
    shape = (WORKERS, STEPS)
    if name == "rows":
        scale = rng.normal(size=(*shape, 4, 2)).astype(np.float32)
        return {"ids": rng.integers(0, 5, (*shape, 4), np.int32), "scale": scale}
    return jax.tree.map(
        lambda p: rng.normal(size=(*shape, *p.shape)).astype(np.float32), PARAMS
    )


def start(name):
    tx, params, _ = CASES[name]
    axes = by_hand.state_axes(tx, params)
    state = by_hand.replicate(tx.init(params), WORKERS, axes)
    return by_hand.replicate(params, WORKERS), state, axes


def lanes(name):
    tx, _, prepare = CASES[name]
    axes = start(name)[2]
    body = contexts.steps(tx, prepare)
    return jax.vmap(body, (0, axes, 0, None), (0, axes), axis_name=AXIS)


def shards(name, mesh, **options):
    tx, params, prepare = CASES[name]
    axes = start(name)[2]
    body = contexts.steps(tx, prepare)
    specs = by_hand.state_specs(tx, params, P(), AXIS)

    def local(params, state, grads, extra):
        params, grads = by_hand.first((params, grads))
        history, state = body(params, by_hand.first(state, axes), grads, extra)
        return by_hand.replicate(history, 1), by_hand.replicate(state, 1, axes)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(AXIS), specs, P(AXIS), P()),
        out_specs=(P(AXIS), specs),
        **options,
    )


def run(body, mesh=None, names=tuple(CASES)):
    """The histories of these cases, in one program; on a mesh all inputs lie on it."""
    arguments = {name: (*start(name)[:2], inputs(name), {}) for name in names}
    if mesh is not None:
        along = NamedSharding(mesh, P(AXIS))
        for name, (params, state, grads, extra) in arguments.items():
            tx, one, _ = CASES[name]
            specs = by_hand.state_specs(tx, one, P(), AXIS)
            places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            params, grads = jax.device_put((params, grads), along)
            arguments[name] = (params, jax.device_put(state, places), grads, extra)

    def everything(arguments):
        return {name: body(name)(*arguments[name])[0] for name in names}

    return jax.jit(everything)(arguments)


@pytest.fixture(scope="module")
def answer():
    return run(lanes)


def assert_same(found, answer):
    for name in found:
        time_first = [
            jax.tree.map(lambda x: np.swapaxes(x, 0, 1), tree[name])
            for tree in (found, answer)
        ]
        contexts.assert_close(*time_first)


def test_shard_map_over_some_axes_of_a_mesh(answer):
    """The compiler shards over the other ones: `axis_names`, types checked."""
    mesh = mesh_of({AXIS: 4, "model": 2})
    found = run(lambda name: shards(name, mesh, axis_names={AXIS}))
    assert_same(found, answer)


def test_shard_map_over_explicit_axes(answer):
    """A mesh as `jax.make_mesh` makes them; `device_put` places what goes in."""
    mesh = jax.make_mesh((4, 2), (AXIS, "model"))
    assert_same(run(lambda name: shards(name, mesh), mesh), answer)


def test_vmap_over_explicit_axes(answer):
    """Each lane whole. (JAX asks for an `out_sharding` where rows are gathered.)"""
    mesh = jax.make_mesh((4, 2), (AXIS, "model"))
    with jax.set_mesh(mesh):
        some = ("cross_shard", "sync_replicas", "local_sgd", "diloco")
        assert_same(run(lanes, mesh, some), answer)


SMALL: dict[str, Any] = {
    "cross_shard": oxs.cross_shard(optax.sgd(0.1), AXIS),
    "sync_replicas": oxs.sync_replicas(optax.sgd(0.1), AXIS, 3),
}


def over_explicit(name, spec, is_set):
    """A step whose gradients lie on a mesh of explicit axes, set or not."""
    mesh = jax.make_mesh((4, 2), (AXIS, "model"))
    tx, grads = SMALL[name], jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec))
    state = by_hand.replicate(tx.init(jnp.zeros(8)), 4)
    if spec == P(AXIS):
        state = jax.device_put(state, NamedSharding(mesh, spec))
    step = jax.vmap(lambda grads, state: tx.update(grads, state)[0], axis_name=AXIS)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        jax.eval_shape(step, grads, state)


@pytest.mark.parametrize(
    ("name", "spec", "is_set"),
    [(name, P(None, "model"), is_set) for name in SMALL for is_set in (False, True)]
    + [("sync_replicas", P(AXIS), False)],
)
def test_islands_over_explicit_axes_and_a_mesh_that_is_not_set_are_refused(
    name, spec, is_set
):
    """JAX spoke of the shardings of a select's cases, or of an axis in mesh: ()."""
    said = r"with jax\.set_mesh\(mesh\)" if spec == P(AXIS) else "Explicit mesh axes"
    with refused(rf"ValueError: {said}.*AxisType\.Auto"):
        over_explicit(name, spec, is_set)
