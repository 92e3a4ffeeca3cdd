"""Checkpoints with Orbax: bit-equal resumption, and another number of workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.contexts import AXIS, REPLICAS

# One program trains all of them, each on parameters of its own.
TRANSFORMATIONS: Any = {
    "cross_shard": oxs.cross_shard(oxs.optimizers.ftrl(0.1, l1=0.01), AXIS),
    # Eight gradients of four replicas: every second step is in the middle.
    "sync_replicas": oxs.sync_replicas(
        optax.sgd(0.1, 0.9), AXIS, 8, variable_averages=0.9
    ),
    "elastic_average": oxs.elastic_average(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, learning_rate=0.1
    ),
    "agn": oxs.agn(oxs.optimizers.adam(0.1), AXIS, communication_period=3),
    "diloco": oxs.diloco(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, drop_nonfinite=True
    ),
    "diloco in pieces": oxs.diloco(
        optax.sgd(0.1, 0.9), AXIS, communication_period=3, shard_center=True
    ),
    "cross_shard in pieces": oxs.cross_shard(
        oxs.optimizers.adagrad(0.1), AXIS, shard_state=True
    ),
    "coded": oxs.local_sgd(
        optax.sgd(0.1),
        AXIS,
        communication_period=3,
        exchange=oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4)),
    ),
}
ONE = {
    "w": jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32).reshape(3, 4),
    "b": jnp.array([0.5, 1.5, 2.5, 3.5], jnp.bfloat16),
}
PARAMS = dict.fromkeys(TRANSFORMATIONS, ONE)
TX = optax.partition(TRANSFORMATIONS, {name: name for name in PARAMS})


def gradients(params, steps, seed):
    rng = np.random.default_rng(seed)

    def draw(x):
        return jnp.asarray(rng.normal(size=(REPLICAS, steps, *x.shape)), x.dtype)

    return jax.tree.map(draw, params)


def in_lanes(tx, axes, **spmd):
    """A program of all workers' steps: the history of parameters, and the state."""
    own = {"in_axes": (0, axes, 0, 0), "out_axes": (0, axes), "axis_name": AXIS}
    return jax.jit(jax.vmap(contexts.steps(tx), **own, **spmd))


def train(run, params, state, *grads):
    history, state = run(params, state, gradients(*grads), {})
    return jax.tree.map(lambda x: x[:, -1], history), state


def trainer(context) -> Any:
    """A program in one of the contexts, and what places a start."""
    axes = by_hand.state_axes(TX, PARAMS)
    # Orbax restores to the devices of the template, and there it must stay.
    if context == "shard_map_axes":
        params, mesh = by_hand.replicate(PARAMS, REPLICAS), contexts.mesh()
        run = contexts.mapped(contexts.steps(TX), TX, params, axes, mesh, True)
        inside, own = P(), P(AXIS)
    else:
        run, mesh = in_lanes(TX, axes, spmd_axis_name=AXIS), contexts.island_mesh()
        inside = {key: {"w": P(None, "inside"), "b": P("inside")} for key in PARAMS}
        own = jax.tree.map(lambda spec: P(AXIS, *spec), inside)
    specs = own, by_hand.state_specs(TX, PARAMS, inside, AXIS)

    def put(spec, below):
        return jax.device_put(below, NamedSharding(mesh, spec))

    def start():
        now = (
            by_hand.replicate(PARAMS, REPLICAS),
            by_hand.replicate(TX.init(PARAMS), 4, axes),
        )
        return jax.tree.map(put, specs, now, is_leaf=lambda x: isinstance(x, P))

    return run, start


def save(path, tree):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, like):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape, a.tobytes()) == (e.dtype, e.shape, e.tobytes()), path


@pytest.mark.parametrize("context", ["shard_map_axes", "islands"])
def test_resumed_training_is_bit_equal(context, tmp_path):
    """After two steps of three, and of two in every second accumulation."""
    run, start = trainer(context)
    at = train(run, *start(), PARAMS, 2, 0)
    counters = optax.tree_utils.tree_get_all_with_path(at, "steps_since_round")
    assert {int(np.max(count)) for _, count in counters} == {2}  # of three
    save(tmp_path / "checkpoint", at)
    # As a new process would: from a fresh start, of which only the shapes are used.
    like = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, start())
    restored = restore(tmp_path / "checkpoint", like)
    assert_same_bits(restored, at)
    resumed, uninterrupted = (
        train(run, *train(run, *now, PARAMS, 2, 1), PARAMS, 2, 2)
        for now in (restored, at)
    )
    assert_same_bits(resumed, uninterrupted)


@pytest.mark.parametrize("measure", [False, True])
def test_a_run_goes_on_without_what_was_told(measure, tmp_path):
    """Saved without its info, or by a run that measured nothing: same parameters."""

    def rule(measure):
        tx = oxs.diloco(
            optax.sgd(0.1, 0.9), AXIS, communication_period=2, measure=measure
        )
        return optax.chain(optax.clip(1.0), tx)

    saves, goes_on = rule(measure), rule(True)
    start, fresh = (contexts.begun(tx, ONE) for tx in (saves, goes_on))
    run = in_lanes(saves, start[2])
    params, state = train(run, *start[:2], ONE, 3, 0)
    template = jax.eval_shape(lambda: optax.tree.set(start[1], info=()))
    save(tmp_path / "bare", optax.tree.set(state, info=()))
    bare: Any = restore(tmp_path / "bare", template)
    restored: Any = optax.tree.set(bare, info=optax.tree.get(fresh[1], "info"))
    assert oxs.metrics(state).rounds == oxs.metrics(restored).rounds == 1
    expected, _ = train(run, params, state, ONE, 3, 1)
    actual, after = train(in_lanes(goes_on, fresh[2]), params, restored, ONE, 3, 1)
    assert_same_bits(actual, expected)
    assert oxs.metrics(after).contributors == 4
