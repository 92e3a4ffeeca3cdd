"""`clip_by_global_norm`: one norm, whoever is given pieces of the gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.refusals import all_refused
from tests.replicas.test_cross_shard import together

AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
# Sizes that divide nothing, and one of them a scalar.
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3),
    "empty": np.zeros((0, 3), np.float32),
}
STEPS = 8


def clipped(clip, *links):
    return optax.chain(clip, *(links or (optax.adam(0.1),)))


OURS, OPTAX = oxs.clip_by_global_norm(1.0, AXIS), optax.clip_by_global_norm(1.0)
INNER, ADAM = clipped(OURS), optax.adam(0.1)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)


def diloco(clip, **more):
    outer = clipped(clip, OUTER)
    return oxs.diloco(optax.sgd(0.5), AXIS, communication_period=2, outer=outer, **more)


# Each beside what is clipped by Optax where the gradient is whole.
CASES: dict[str, Any] = {
    "pieces": oxs.cross_shard(INNER, AXIS, shard_state=True),
    "whole": oxs.cross_shard(INNER, AXIS),
    "several steps": oxs.cross_shard(
        optax.MultiSteps(INNER, 3).gradient_transformation(), AXIS, shard_state=True
    ),
    "in front": optax.chain(
        oxs.all_reduce_grads(AXIS),
        OPTAX,
        oxs.cross_shard(ADAM, AXIS, grads="averaged", shard_state=True),
    ),
    "outer": diloco(OURS, shard_state=True),
}
WHOLE: dict[str, Any] = dict.fromkeys(CASES, oxs.cross_shard(clipped(OPTAX), AXIS)) | {
    "several steps": oxs.cross_shard(
        optax.MultiSteps(clipped(OPTAX), 3).gradient_transformation(), AXIS
    ),
    "outer": diloco(OPTAX),
}


@functools.cache
def run(context, whole, names=tuple(CASES)):
    tx = together({name: (WHOLE if whole else CASES)[name] for name in names})
    numbers = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda x: numbers.normal(size=(STEPS, REPLICAS, *x.shape)).astype("f4"), PARAMS
    )
    for x in jax.tree.leaves(grads):
        x[::2] *= np.float32(0.1)  # Then it is short.
    every = dict.fromkeys(names, PARAMS), dict.fromkeys(names, grads)
    with jax.numpy_dtype_promotion("standard"):  # that of Optax's own
        return contexts.replay(context, tx, *every)[0]


@pytest.mark.parametrize(
    "context", ["vmap", "shard_map", "shard_map_unchecked", "pmap", "islands"]
)
def test_the_norm_is_that_of_the_whole_gradient(context):
    names = tuple(CASES) if context in ("vmap", "shard_map") else ("pieces", "outer")
    found, whole = run(context, False, names), run("vmap", True)
    for name in names:
        contexts.assert_close(found[name], whole[name], 1e-6)


def test_without_any_wrapper_it_is_that_of_optax():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[0.0, 12.0]])}
    for bound in (1.0, 13.0, 14.0, jnp.float32(2)):
        for params in (None, grads):
            ours, theirs = (
                tx.update(grads, tx.init(grads), params)[0]
                for tx in (
                    oxs.clip_by_global_norm(bound, AXIS),
                    optax.clip_by_global_norm(bound),
                )
            )
            assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    # Of half precision the sum is one of float32: that of 4,096 ones is their number.
    ones = jnp.ones(4096, jnp.bfloat16)
    half, _ = OURS.update({"x": ones, "y": None}, OURS.init(ones))
    assert half["x"].dtype == jnp.bfloat16 and half["y"] is None
    assert np.array_equal(half["x"], np.full(4096, 1 / 64))
    assert jax.tree.leaves(OURS.init(ones)) == []


def test_gradients_keep_their_reduce_scatter():
    params = {"w": jnp.zeros((64, 40)), "b": jnp.zeros(40)}
    tx = CASES["pieces"]
    axes = oxs.by_hand.state_axes(tx, params, replicated=True)
    state = oxs.by_hand.replicate(tx.init(params), REPLICAS, axes)
    step = oxs.by_hand.map_workers(
        lambda grads, state: tx.update(grads, state),
        AXIS,
        mesh=contexts.mesh(),
        in_axes=(0, axes),
        out_axes=(None, axes),
    )
    grads = oxs.by_hand.replicate(params, REPLICAS)
    with jax.numpy_dtype_promotion("standard"):
        sent = oxs.audit.collectives(jax.jit(step).lower(grads, state).compile())
    size, kinds = 4 * (64 * 40 + 40), {row.kind: row.bytes for row in sent}
    assert len(sent) == len(kinds) == 3
    assert kinds["all-reduce"] == 4
    assert (kinds["reduce-scatter"], kinds["all-gather"]) == (size, size // REPLICAS)


SGD = optax.sgd(0.1)
ROWS = oxs.IndexedSlices(jnp.zeros(1, jnp.int32), jnp.ones((1, 2)))

test_refused = all_refused(globals())(r"""
oxs.clip_by_global_norm(0.0, AXIS)  # ValueError: number in \(0, inf\]
oxs.clip_by_global_norm("data", 1.0)  # TypeError: max_norm must be a number
oxs.clip_by_global_norm(1.0, None)  # TypeError: axis_name must be the name
oxs.clip_by_global_norm(1.0)  # TypeError: oxs.clip_by_global_norm\(1.0, 'data'\)
OURS.update(ROWS, OURS.init(ROWS))  # ValueError: row-sparse, which clip_by_global_norm
oxs.cross_shard(INNER, AXIS, shard_state="leaves").init(PARAMS)
    # ValueError: reads all of the gradient of \['.*'\].*all_reduce_grads\('data'\)
oxs.cross_shard(INNER, "other", shard_state=True).init(PARAMS)
    # ValueError: \(1.0, 'other'\), or put .*all_reduce_grads\('other'
diloco(oxs.clip_by_global_norm(1.0, "other"), shard_state=True).init(PARAMS)
    # ValueError: oxs.clip_by_global_norm\(1.0, 'data'\). Or leave shard_state=True out
""")
