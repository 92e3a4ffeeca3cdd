"""Every wrapper in the contexts that the law tests leave out: parts of a mesh, types.

`tests.contexts` has those in which each law runs. Here all wrappers stand in one
program for each context, beside the same program under `jax.vmap`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 7
SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2),
}
TABLE = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
# name: (transformation, parameters, what makes gradients of the inputs)
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
ROWS: dict[str, Any] = {
    "cross_shard": oxs.cross_shard(oxs.optimizers.adagrad(0.1), AXIS),
    "sync_replicas": oxs.sync_replicas(oxs.optimizers.adagrad(0.1), AXIS, 6),
    "local_sgd": oxs.local_sgd(
        oxs.optimizers.adagrad(0.1), AXIS, communication_period=2
    ),
}


def row_gradients(inputs):
    """The rows that a batch touches, through `take`."""

    def loss(params, inputs):
        return jnp.sum(oxs.take(params["table"], inputs["ids"]) * inputs["scale"])

    grad_fn = oxs.value_and_grad(loss, rows={"table": lambda inputs: inputs["ids"]})
    return grad_fn({"table": jnp.asarray(TABLE)}, inputs)[1]["table"]


CASES: dict[str, Any] = {
    **{name: (tx, PARAMS, lambda grads: grads) for name, tx in DENSE.items()},
    **{f"{name} rows": (tx, TABLE, row_gradients) for name, tx in ROWS.items()},
}


def inputs(name):
    """[N, T, ...]"""
    rng = np.random.default_rng(0)
    shape = (WORKERS, STEPS)
    if "rows" in name:
        scale = rng.normal(size=(*shape, 4, 2)).astype(np.float32)
        return {"ids": rng.integers(0, 5, (*shape, 4), np.int32), "scale": scale}
    return jax.tree.map(
        lambda p: rng.normal(size=(*shape, *p.shape)).astype(np.float32), PARAMS
    )


def start(name):
    tx, params, _ = CASES[name]
    axes = oxs.state_axes(tx, params)
    state = oxs.stack(tx.init(params), WORKERS, axes)
    return oxs.stack(params, WORKERS), state, axes


def lanes(name):
    tx, _, prepare = CASES[name]
    axes = start(name)[2]
    body = contexts.steps(tx, prepare)
    return jax.vmap(body, (0, axes, 0, None), (0, axes), axis_name=AXIS)


def shards(name, mesh, **options):
    tx, params, prepare = CASES[name]
    axes = start(name)[2]
    body = contexts.steps(tx, prepare)
    specs = oxs.state_specs(tx, params, P(), AXIS)

    def local(params, state, grads, extra):
        params, grads = oxs.unstack((params, grads))
        history, state = body(params, oxs.unstack(state, axes), grads, extra)
        return oxs.stack(history, 1), oxs.stack(state, 1, axes)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(AXIS), specs, P(AXIS), P()),
        out_specs=(P(AXIS), specs),
        **options,
    )


def run(body, mesh=None):
    """The histories of all cases, in one program; on a mesh all inputs lie on it."""
    arguments = {name: (*start(name)[:2], inputs(name), {}) for name in CASES}
    if mesh is not None:
        for name, (params, state, grads, extra) in arguments.items():
            tx, one, _ = CASES[name]
            specs = oxs.state_specs(tx, one, P(), AXIS)
            state = jax.tree.map(
                lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
                state,
                specs,
            )
            along = NamedSharding(mesh, P(AXIS))
            arguments[name] = (
                *jax.device_put((params,), along),
                state,
                *jax.device_put((grads, extra), along),
            )

    def everything(arguments):
        return {name: body(name)(*arguments[name])[0] for name in CASES}

    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(everything, compiler_options=options)(arguments)


@pytest.fixture(scope="module")
def answer():
    return run(lanes)


def auto_mesh():
    return jax.make_mesh((4, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)


def explicit_mesh():
    """As `jax.make_mesh` makes them by default, since JAX 0.9."""
    return jax.make_mesh((4, 2), (AXIS, "model"))


def assert_same(found, answer):
    for name in CASES:
        time_first = [
            jax.tree.map(lambda x: np.swapaxes(x, 0, 1), tree[name])
            for tree in (found, answer)
        ]
        contexts.assert_close(*time_first)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_some_axes_of_a_mesh(answer, check_vma):
    options = {"axis_names": {AXIS}, "check_vma": check_vma}
    assert_same(run(lambda name: shards(name, auto_mesh(), **options)), answer)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_explicit_axes(answer, check_vma):
    mesh = explicit_mesh()
    found = run(lambda name: shards(name, mesh, check_vma=check_vma), mesh)
    assert_same(found, answer)


def test_vmap_over_explicit_axes(answer):
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        assert_same(run(lanes, mesh), answer)
