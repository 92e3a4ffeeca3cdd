"""Checkpoints with Orbax: bit-equal resumption, and another number of workers."""

import functools
import re
from pathlib import Path
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
from tests import contexts, scripts
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
# After two steps of three, and after three steps of two in every second accumulation.
CHUNK = 2


def gradients(chunk):
    rng = np.random.default_rng(chunk)

    def draw(x):
        values = rng.normal(size=(REPLICAS, CHUNK, *x.shape))
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(draw, PARAMS)


@functools.cache
def trainer(context) -> Any:
    """What places a start, and a program of two steps, in one of the contexts."""
    axes = oxs.state_axes(TX, PARAMS)
    body = contexts.steps(TX)

    def start():
        params = oxs.replicate(PARAMS, REPLICAS)
        state = oxs.replicate(TX.init(PARAMS), REPLICAS, axes)
        # Orbax restores to the devices of the template, and there it must stay.
        if context == "shard_map_axes":
            specs = oxs.state_specs(TX, PARAMS, P(), AXIS)
            return place((params, state), (P(AXIS), specs), contexts.mesh())
        one = {"w": P(None, "inside"), "b": P("inside")}
        inside = {name: one for name in PARAMS}
        own = jax.tree.map(lambda spec: P(AXIS, *spec), inside)
        specs = oxs.state_specs(TX, PARAMS, inside, AXIS)
        return place((params, state), (own, specs), contexts.island_mesh())

    if context == "shard_map_axes":
        run = contexts.mapped(
            body,
            TX,
            oxs.replicate(PARAMS, REPLICAS),
            axes,
            contexts.mesh(),
            True,
        )
    else:
        run = jax.jit(
            jax.vmap(
                body,
                in_axes=(0, axes, 0, 0),
                out_axes=(0, axes),
                axis_name=AXIS,
                spmd_axis_name=AXIS,
            )
        )

    def train(params, state, chunk):
        history, state = run(params, state, gradients(chunk), {})
        return jax.tree.map(lambda x: x[:, -1], history), state

    return start, train


def place(tree, specs, mesh):
    def put(spec, below):
        return jax.device_put(below, NamedSharding(mesh, spec))

    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))


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
    start, train = trainer(context)
    at = train(*start(), 0)
    counters = optax.tree_utils.tree_get_all_with_path(at, "steps_since_round")
    assert {int(np.max(count)) for _, count in counters} == {2}  # of three
    save(tmp_path / "checkpoint", at)
    uninterrupted = train(*train(*at, 1), 2)
    # As a new process would: from a fresh start, of which only the shapes are used.
    like = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, start())
    restored = restore(tmp_path / "checkpoint", like)
    assert_same_bits(restored, at)
    assert_same_bits(train(*train(*restored, 1), 2), uninterrupted)


TARGET = {
    "w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 6,
    "b": jnp.ones(4, jnp.bfloat16),
}


def train(tx, axes, params, state, steps, seed):
    """Every worker is pulled to the target, with noise of its own."""
    workers = params["b"].shape[0]
    rng = np.random.default_rng(seed)

    def draw(x):
        values = rng.normal(scale=0.1, size=(workers, steps, *x.shape))
        return jnp.asarray(values, x.dtype)

    def body(params, state, noise):
        def step(carry, noise):
            params, state = carry
            grads = jax.tree.map(lambda p, t, n: p - t + n, params, TARGET, noise)
            updates, state = tx.update(grads, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
            return (params, state), None

        return jax.lax.scan(step, (params, state), noise)[0]

    run = jax.vmap(body, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    return jax.jit(run)(params, state, jax.tree.map(draw, ONE))


@pytest.mark.parametrize("measure", [False, True])
def test_a_run_goes_on_without_what_was_told(measure, tmp_path):
    """Saved without its info, or by a run that measured nothing: same parameters."""

    def rule(measure):
        tx = oxs.diloco(
            optax.sgd(0.1, 0.9), AXIS, communication_period=2, measure=measure
        )
        return optax.chain(optax.clip(1.0), tx)

    saves, goes_on = rule(measure), rule(True)
    start, fresh = (oxs.start_workers(tx, ONE, 4) for tx in (saves, goes_on))
    params, state = train(saves, *start[2:], *start[:2], 3, 0)
    template = jax.eval_shape(lambda: optax.tree.set(start[1], info=()))
    save(tmp_path / "bare", optax.tree.set(state, info=()))
    bare: Any = restore(tmp_path / "bare", template)
    info = optax.tree.get(fresh[1], "info")
    restored: Any = optax.tree.set(bare, info=info)
    assert oxs.metrics(state).rounds == oxs.metrics(restored).rounds == 1
    expected, _ = train(saves, start[2], params, state, 3, 1)
    actual, after = train(goes_on, fresh[2], params, restored, 3, 1)
    assert_same_bits(actual, expected)
    assert oxs.metrics(after).contributors == 4


# As docs/checkpoints.md has it: a mesh of eight devices in one process, of three in
# another.
WRITE = """
mesh = jax.make_mesh((8,), ("workers",))
everyone = oxs.start_workers(tx, params, 8, mesh=mesh, axis_name="workers")[:2]
with StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, everyone)
"""
READ = """
eight = read(folder, 8)
mesh = jax.make_mesh((3,), ("workers",))
places = oxs.state_shardings(tx, params, mesh=mesh, axis_name="workers")
three, state = jax.device_put(oxs.resize(tx, *eight, 3, strict=True), places)
print(three["w"].shape, three["w"].sharding.spec[0], int(state[1].global_step))
"""


def test_another_number_of_workers_in_another_process(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    first, *others = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    # Up to where the page trains.
    first = first[: first.index("def step(")]
    read = next(block for block in others if block.startswith("def read("))
    printed = [
        scripts.run(
            f'import jax\njax.config.update("jax_num_cpu_devices", {devices})\n{first}'
            f"folder = Path({str(tmp_path / 'of-eight')!r})\n{code}"
        )
        for devices, code in ((8, WRITE), (3, read + READ))
    ]
    assert printed[-1].split("\n")[-2] == "(3, 3) workers 0"
