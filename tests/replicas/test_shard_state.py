"""`cross_shard(..., shard_state=True)`: a state in pieces, the numbers of the whole."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from benchmarks import by_hand
from tests import contexts
from tests.refusals import all_refused
from tests.replicas.test_cross_shard import together, with_weight

cross_shard: Any = oxs.cross_shard
AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
# Sizes that divide nothing.
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3),
    "empty": np.zeros((0, 3), np.float32),
    "bfloat16": np.arange(4).astype(jnp.bfloat16),
    "float16": np.zeros(3, np.float16),
}
# Half precision leaves take plain steps of whole numbers: what they hold is exact.
LABELS = {name: "sgd" if "float16" in name else "adam" for name in PARAMS}


def inner():
    return optax.multi_transform(
        {"adam": oxs.optimizers.adam(0.1), "sgd": optax.sgd(0.25, momentum=0.5)}, LABELS
    )


# name: (arguments, with weights)
CASES = {
    "mean": ({}, False),
    "sum": ({"reduction": "sum", "measure": True}, False),
    "weighted": ({"measure": True}, True),
}


def transformation(names, **more):
    return together(
        {
            name: with_weight(
                cross_shard(inner(), AXIS, **CASES[name][0], **more), CASES[name][1]
            )
            for name in names
        }
    )


def inputs(steps=12):
    rng = np.random.default_rng(0)

    def drawn(name, param):
        shape = (steps, REPLICAS, *param.shape)
        if "float16" in name:
            return 8 * rng.integers(-1, 2, shape).astype(param.dtype)
        return rng.normal(size=shape).astype(np.float32)

    grads = {name: drawn(name, param) for name, param in PARAMS.items()}
    weight = 2.0 ** rng.integers(0, 3, (steps, REPLICAS)).astype(np.float32)
    weight[:, 1:] = weight[:, :1]  # The weighted mean of whole numbers stays exact.
    weight[3, 1:3] = 0
    weight[4] = 0
    broken = jax.tree.map(np.copy, grads)
    for name, leaf in broken.items():
        if "float16" not in name:  # They must leave no trace.
            leaf[weight == 0] = np.nan
    trees = {name: broken if CASES[name][1] else grads for name in CASES}
    return {name: PARAMS for name in CASES}, trees, {"weight": weight}


def only(names, tree):
    return {name: tree[name] for name in names}


@functools.cache
def whole():
    params, grads, extra = inputs()
    return contexts.replay("vmap", transformation(CASES), params, grads, extra)


@pytest.mark.parametrize(
    "context, names",
    [
        ("vmap", tuple(CASES)),
        ("shard_map", tuple(CASES)),
        ("shard_map_unchecked", ("mean",)),
        ("pmap", ("mean",)),
        ("islands", ("mean",)),
    ],
)
def test_the_numbers_are_those_of_the_whole(context, names):
    params, grads, extra = inputs()
    history, state = contexts.replay(
        context,
        transformation(names, shard_state=True),
        only(names, params),
        only(names, grads),
        extra,
    )
    for leaf in jax.tree.leaves(history):
        assert np.array_equal(leaf, np.broadcast_to(leaf[:, :1], leaf.shape))
    expected, whole_state = whole()
    contexts.assert_close(history, only(names, expected))
    for name in set(names) & {"sum", "weighted"}:
        measured = oxs.metrics(state[name])._asdict()
        for field, x in oxs.metrics(whole_state[name])._asdict().items():
            if x is not None:
                # Updates of half precision leaves travel as these round them.
                close = 1e-4 if field == "update_norm" else 2e-5
                np.testing.assert_allclose(
                    measured[field], x, rtol=close, atol=1e-5, err_msg=field
                )
    for name, param in PARAMS.items():
        if LABELS[name] == "adam":
            m = oxs.optimizers.slot(state["mean"], "m")[name]
            assert m.shape == (REPLICAS, -(-param.size // REPLICAS))


@pytest.mark.parametrize("bits", [4, 16])
def test_codes_to_the_owners_and_whole_updates_back(bits):
    """The steps of SGD add up to all gradients but for what is still owed."""
    exchange = oxs.exchange.error_feedback(oxs.exchange.quantized(bits))
    tx = cross_shard(optax.sgd(0.1), AXIS, exchange=exchange, shard_state=True)
    params = {name: PARAMS[name] for name in ("vector", "matrix", "empty")}
    rng = np.random.default_rng(3)
    grads = {
        name: rng.normal(size=(6, REPLICAS, *x.shape)).astype("f4")
        for name, x in params.items()
    }
    grads["matrix"][..., 0, 0] += 40  # beside which the others are less than a step
    history, state = contexts.replay("shard_map_axes", tx, params, grads)
    for name, x in params.items():
        moved = history[name][-1]
        assert np.array_equal(moved, np.broadcast_to(moved[:1], moved.shape))
        owed = np.asarray(state.exchange.error[name]).mean(0)
        wanted = x - 0.1 * (grads[name].mean(1).sum(0) - owed)
        np.testing.assert_allclose(moved[0], wanted, rtol=1e-5, atol=1e-5)
    # Another number of replicas owes the same to the mean.
    more = oxs.by_hand.resize(tx, oxs.by_hand.replicate(params, REPLICAS), state, 3)[1]
    for name, error in more.exchange.error.items():
        owed = np.asarray(state.exchange.error[name])
        np.testing.assert_allclose(error.mean(0), owed.mean(0), rtol=1e-4, atol=1e-6)


def test_replicated_parameters_gradients_that_autodiff_summed_and_a_norm_over_all():
    """Under shard_map(check_vma=True), as most would write it."""

    def schedule(count):
        return 0.1 / (1.0 + count.astype(jnp.float32))

    def clip(bound):
        def update(updates, state, params=None):
            leaves: Any = jax.tree.leaves(updates)
            squares: Any = sum(jnp.sum(jnp.square(g)) for g in leaves)
            if isinstance(axis := clip_axis, str):
                squares = oxs.reduce(oxs.localize(squares, axis), axis, reduction="sum")
            scale = jnp.minimum(1.0, bound / jnp.sqrt(squares))
            return jax.tree.map(lambda g: g * scale, updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    params = {name: jnp.asarray(PARAMS[name]) for name in ("vector", "matrix")}
    batch = np.random.default_rng(0).normal(size=(REPLICAS, 11)).astype(np.float32)
    mesh = contexts.mesh()
    ends = {}
    for sharded in (True, False):
        clip_axis = AXIS if sharded else None
        tx = cross_shard(
            optax.chain(clip(0.1), optax.sgd(schedule, momentum=0.9)),
            AXIS,
            grads="summed",
            shard_state=sharded,
        )
        axes = oxs.by_hand.state_axes(tx, params, replicated=True)
        specs = oxs.by_hand.state_specs(tx, params, P(), AXIS, replicated=True)

        def step(params, state, x, tx=tx, axes=axes):
            def loss(params):
                outputs = jnp.tanh(x[0] @ params["matrix"])
                return jnp.sum(outputs) * params["vector"].sum()

            state, grads = oxs.by_hand.first(state, axes), jax.grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return params, oxs.by_hand.replicate(state, 1, axes)

        ways = {"in_specs": (P(), specs, P(AXIS)), "out_specs": (P(), specs)}
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, **ways))
        now = params, oxs.by_hand.replicate(tx.init(params), REPLICAS, axes)
        for _ in range(3):
            now = mapped(*now, batch)
        ends[sharded] = now[0]
        if sharded:
            # A count is no piece: it is one for all. And `init` knows where it runs.
            assert optax.tree_utils.tree_get(now[1], "count").shape == ()
            there = oxs.by_hand.map_workers(
                tx.init, AXIS, mesh=mesh, in_axes=(None,), out_axes=axes
            )(params)
            assert jax.tree.map(jnp.shape, there) == jax.tree.map(jnp.shape, now[1])
    contexts.assert_close(ends[True], ends[False])


def test_bytes_and_memory():
    """A reduce-scatter and an all-gather, and 1/N of Adam's state."""
    params = {"w": jnp.zeros((64, 40)), "half": jnp.zeros(800, jnp.bfloat16)}
    grads, memory, sent = oxs.by_hand.replicate(params, REPLICAS), {}, {}
    for sharded in (True, False):
        tx = cross_shard(optax.adam(0.1), AXIS, shard_state=sharded)
        axes = oxs.by_hand.state_axes(tx, params, replicated=True)
        state = oxs.by_hand.replicate(tx.init(params), REPLICAS, axes)
        ways = {"in_axes": (0, axes), "out_axes": (None, axes)}
        step = oxs.by_hand.map_workers(
            lambda grads, state, tx=tx: tx.update(grads, state),
            AXIS,
            mesh=contexts.mesh(),
            **ways,
        )
        # Adam's own arithmetic with a count.
        with jax.numpy_dtype_promotion("standard"):
            compiled = jax.jit(step, donate_argnums=1).lower(grads, state).compile()
        memory[sharded] = by_hand.memory(compiled).arguments
        sent[sharded] = collections.Counter()
        for row in oxs.audit.collectives(compiled):
            sent[sharded][row.kind] += row.bytes
    whole, gradients = 4 * (2560 + 800), 4 * 2560 + 2 * 800
    assert sent[False] == {"all-reduce": whole}
    gathered = gradients // REPLICAS
    assert sent[True] == {"reduce-scatter": whole, "all-gather": gathered}
    assert memory[True] - gradients - 2 * whole // REPLICAS <= 64  # counters
    assert memory[False] > gradients + 2 * gradients


def test_a_missing_gradient_and_another_number_of_replicas():
    tx = cross_shard(oxs.optimizers.adagrad(0.1), AXIS, shard_state=True)
    one = {"w": jnp.arange(7.0), "none": jnp.ones(3)}

    def train(number, held=None):
        step, *begin = contexts.started(tx, one, number)
        grads = {"w": jnp.tile(jnp.arange(7.0), (number, 1)), "none": None}
        before = held or begin
        after, state = step(*before, grads)
        assert np.array_equal(after["none"], np.ones((number, 3)))
        return (after, state), np.abs(after["w"] - before[0]["w"])[0, 1:]

    held, first = train(3)
    (_, state), second = train(4, oxs.Workers(4, AXIS).resize(held))
    accumulated = oxs.optimizers.slot(state, "accumulator")["w"]
    assert accumulated.shape == (4, 2)
    squares = 0.1 + 2 * np.square(np.arange(7.0))
    np.testing.assert_allclose(accumulated.reshape(-1)[:7], squares, rtol=1e-6)
    assert (second < first).all()


def sharded(inner, **more):
    return cross_shard(inner, AXIS, shard_state=True, **more)


def started(inner, params=None):
    return sharded(inner).init(jnp.ones(5) if params is None else params)


def on_two(function, *shape):
    return jax.vmap(function, axis_name=AXIS)(jnp.ones((2, *shape)))


def updated(grads, state=(), params=None):
    return sharded(MOMENTUM).update(grads, state, params)


def rows(values):
    return oxs.IndexedSlices(jnp.zeros(1, jnp.int32), values)


def needs(name):
    def update(updates, state, params=None, **extra_args):
        return updates * extra_args[name], state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


NORM, MOMENTUM = optax.normalize_by_update_norm(), optax.sgd(0.1, momentum=0.9)


test_refused = all_refused(globals())(r"""
started(optax.lamb(0.1))  # ValueError: Or leave shard_state=True out
started(optax.apply_if_finite(MOMENTUM, 3))
started(optax.contrib.dadapt_adamw())
started(optax.masked(NORM, {"w": True}), {"w": jnp.ones(5)})
    # ValueError: each number alone.* reads all of the gradient of .*, by `
started(optax.scale_by_factored_rms(), jnp.zeros((128, 128)))
    # ValueError: the state at .v_row has shape \(128,\) and no pieces
started(needs("curvature"))
    # ValueError: it cannot be traced: KeyError: 'curvature'. It must do with
sharded(MOMENTUM, group_assignment=[[0, 1], [2, 3]])
    # ValueError: mesh with an axis per group
sharded(MOMENTUM, exchange=oxs.exchange.top_k())
sharded(MOMENTUM, exchange=oxs.exchange.median())  # ValueError: half way
on_two(lambda x: updated(rows(x)), 1, 3)  # ValueError: row-sparse
on_two(lambda x: updated(x, started(MOMENTUM, x), jnp.arange(3)), 3)
    # TypeError: dtype int32
on_two(lambda x, whole=started(MOMENTUM): updated(x, whole), 5)
    # ValueError: for one of 2 replicas
""")


def test_hyperparameters_may_be_traced():
    make = optax.inject_hyperparams(
        lambda learning_rate: sharded(optax.sgd(learning_rate, momentum=0.9))
    )
    tx = make(learning_rate=0.5)
    step, params, state = contexts.started(tx, jnp.zeros(3), 2)
    params, _ = step(params, state, jnp.ones((2, 3)))
    assert np.array_equal(params, np.full((2, 3), -0.5))
