"""cross_shard: one answer everywhere, and what it must refuse."""

import functools
import json
import pathlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync.optimizers.adam import adam
from tests import contexts, two_processes
from tests.reference import replicas as reference
from tests.refusals import refused

# Optax's types know no gradient that is a tree of rows, or of arrays by name.
cross_shard: Any = oxs.cross_shard
all_reduce_grads: Any = oxs.all_reduce_grads
AXIS = contexts.AXIS
GROUPS = [[0, 2], [1, 3]]
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "empty": np.zeros((0, 3), np.float32),
    "bfloat16": np.zeros(4, jnp.bfloat16),
    "float16": np.zeros(3, np.float16),
}
# The state is each replica's own, whole: the contexts with axes would say nothing new.
CONTEXTS = ("pmap", "shard_map", "shard_map_unchecked", "vmap", "islands")
# Half precision leaves take plain steps of whole numbers: what they hold is exact.
EXACT = ("bfloat16", "float16")
LABELS = {name: "exact" if name in EXACT else "momentum" for name in PARAMS}
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


def weights(steps=25):
    """[T, 4]: in each step two pairs of equal weight, a power of two."""
    rng = np.random.default_rng(1)
    pair = 2.0 ** rng.integers(0, 4, (steps, 1))
    first = np.floor(rng.uniform(0, pair + 1, (steps, 2)))
    weight = np.concatenate([first, pair - first], axis=1)
    weight[3] = 0  # nobody has seen a token
    return weight.astype(np.float32)


def gradients(steps=25, weighted=False):
    rng = np.random.default_rng(0)

    def leaf(name, param):
        shape = (steps, contexts.REPLICAS, *param.shape)
        if name in EXACT:
            grad = 16 * rng.integers(-1, 2, shape).astype(param.dtype)
        else:
            grad = rng.normal(size=shape).astype(np.float32)
        if weighted:  # They must leave no trace.
            grad[weights(steps) == 0] = np.nan
        return grad

    return {name: leaf(name, param) for name, param in PARAMS.items()}


def leaves_of(name):
    """All forms of leaves in one of the cases, for the compiler's sake."""
    return PARAMS if name == "mean" else ("matrix", "float16")


def with_weight(tx, weighted):
    """The extra argument `weight` for one of the cases and not for the others."""

    def update(updates, state, params=None, *, weight=None):
        extra = {"weight": weight} if weighted else {}
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def together(transformations):
    """Each on the subtree of its name, so that one program tries all of them."""
    each = {
        name: optax.with_extra_args_support(tx) for name, tx in transformations.items()
    }

    def init(params: Any):
        return {name: tx.init(params[name]) for name, tx in each.items()}

    def update(updates: Any, state, params: Any = None, **extra):
        pairs = {
            name: tx.update(updates[name], state[name], params[name], **extra)
            for name, tx in each.items()
        }
        updates = {name: new for name, (new, _) in pairs.items()}
        return updates, {name: state for name, (_, state) in pairs.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def inputs(names=tuple(CASES)):
    """These cases in one transformation, so that each context compiles once."""

    def one(name):
        arguments, _, weighted = CASES[name]
        inner = optax.multi_transform(
            {"momentum": optax.sgd(0.1, momentum=0.9), "exact": optax.sgd(1.0)},
            {leaf: LABELS[leaf] for leaf in leaves_of(name)},
        )
        return with_weight(cross_shard(inner, AXIS, **arguments), weighted)

    def of_leaves(name, tree):
        return {leaf: tree[leaf] for leaf in leaves_of(name)}

    tx = together({name: one(name) for name in names})
    params = {name: of_leaves(name, PARAMS) for name in names}
    grads = {
        name: of_leaves(name, gradients(weighted=CASES[name][2])) for name in names
    }
    return tx, params, grads, {"weight": weights()}


def expected(name):
    _, arguments, weighted = CASES[name]
    per_step = weights() if weighted else [None] * 25

    def leaf(name, param, grad):
        reduced = [
            reference.reduce(g, weight=w, **arguments)
            for g, w in zip(grad, per_step, strict=True)
        ]
        start = np.broadcast_to(param, (contexts.REPLICAS, *param.shape))
        if name not in EXACT:
            return reference.momentum(start, reduced, 0.1, 0.9)
        history = reference.momentum(start.astype(np.float32), reduced, 1.0, 0.0)
        assert np.array_equal(history, history.astype(param.dtype))
        return history

    grads = gradients(weighted=weighted)
    return {at: leaf(at, PARAMS[at], grads[at]) for at in leaves_of(name)}


# Groups do not end equal on all replicas.
EQUAL = ("mean", "sum", "weighted")


def process_cases():
    """For tests/two_processes.py."""
    return {"cross_shard": inputs(), "replicated": (*inputs(EQUAL), ("replicated",))}


def check(history):
    for name, got in history.items():
        contexts.assert_close(got, expected(name))


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_answer_everywhere(context):
    history, _ = contexts.replay(context, *inputs())
    assert history.keys() == CASES.keys()
    check(history)


def replicated(tx, params, grads, extra=None):
    """As `contexts.replay`, with equal parameters and state: `P()` in and out."""
    grads, extra = contexts.by_replica((grads, extra or {}))
    run = two_processes.replicated(tx, contexts.mesh())
    history, state = run(params, tx.init(params), grads, extra)
    every = jax.tree.map(
        lambda x: np.stack([contexts._numpy(x)] * contexts.REPLICAS, axis=1), history
    )
    return every, state


def test_one_answer_where_parameters_are_replicated():
    history, _ = replicated(*inputs(EQUAL))
    assert history.keys() == set(EQUAL)
    check(history)


# Gradients that autodiff has reduced already (check_vma=True), eight devices.

INPUT = np.arange(1, 9, dtype=np.float32)  # mean 4.5, sum 36


def over_eight(function, *args, check_vma=True):
    mapped = jax.shard_map(
        function,
        mesh=contexts.mesh(8),
        in_specs=P(AXIS),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(mapped)(*args)


def loss(w, x):
    return jnp.mean(w * x)


def mean_loss(w, x):
    return oxs.reduce(loss(w, x), AXIS)


# way out: (mark the parameters as local, the loss, what cross_shard is told)
WAYS = {
    "localize": (True, loss, "local"),
    "summed": (False, loss, "summed"),
    "averaged": (False, mean_loss, "averaged"),
}


def one_gradient(x, way, reduction="mean", told=None):
    local, of, grads = WAYS[way]
    w = jnp.float32(2)
    gradient = jax.grad(of)(oxs.localize(w, AXIS) if local else w, x)
    tx = cross_shard(optax.scale(1.0), AXIS, reduction=reduction, grads=told or grads)
    return tx.update(gradient, tx.init(w), w)[0]


@pytest.mark.parametrize(("reduction", "right"), [("mean", 4.5), ("sum", 36.0)])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_out_gives_the_right_number(way, reduction, right):
    step = functools.partial(one_gradient, way=way, reduction=reduction)
    assert over_eight(step, INPUT) == right
    if way == "localize":  # The same code elsewhere: localize is the identity there.
        assert (jax.pmap(step, axis_name=AXIS)(INPUT) == right).all()
        assert (jax.vmap(step, axis_name=AXIS)(INPUT) == right).all()
        assert over_eight(step, INPUT, check_vma=False) == right


@pytest.mark.parametrize("way", ["summed", "averaged"])
def test_a_reduced_gradient_raises_and_names_both_ways_out(way):
    match = (
        r"(?s)does not vary over the mesh axis 'data'.*"
        r"oxs\.localize\(params, 'data'\).*jax\.grad.*"
        r"grads='summed'\).*grads='averaged'\)"
    )
    with pytest.raises(ValueError, match=match):
        over_eight(functools.partial(one_gradient, way=way, told="local"), INPUT)


# What a replica's gradients are told to be, what they are made of, where that is seen.
@pytest.mark.parametrize(
    ("told", "made", "seen"),
    [
        ("local", lambda x, summed: {"here": x, "there": summed}, r"at \['there'\]"),
        *(
            (told, made, rf"grads='{told}'.*at \['here'\] varies.*oxs\.localize")
            for told in ("summed", "averaged")
            for made in (
                lambda x, summed: {"here": x},
                lambda x, summed: {"here": x, "there": summed},
                lambda x, summed: {
                    "here": oxs.IndexedSlices(jnp.array([0]), x),
                    "there": summed,
                },
            )
        ),
    ],
)
def test_leaves_that_are_not_what_they_are_told_to_be_are_named(told, made, seen):
    tx = all_reduce_grads(AXIS, grads=told)

    def step(x):
        return tx.update(made(x, jax.lax.psum(x, AXIS)), tx.init(None))

    with pytest.raises(ValueError, match=seen):
        over_eight(step, INPUT)


@pytest.mark.parametrize("told", ["summed", "averaged"])
def test_reduced_rows_are_scaled(told):
    reduction = "mean" if told == "summed" else "sum"
    tx = all_reduce_grads(AXIS, grads=told, reduction=reduction)

    def step(x):
        rows = oxs.IndexedSlices(jnp.array([2]), jax.lax.psum(x, AXIS))
        return tx.update(rows, tx.init(None))[0].to_dense(3)

    factor = 1 / 8 if told == "summed" else 8
    assert np.array_equal(over_eight(step, INPUT), [0, 0, 36 * factor])


def test_an_update_of_a_replicated_parameter_is_known_to_be_equal():
    def train(x):
        w = jnp.float32(2)
        tx = cross_shard(optax.sgd(0.125, momentum=0.5), AXIS)

        def step(carry, _):
            w, state = carry
            gradient = jax.grad(loss)(oxs.localize(w, AXIS), x)
            updates, state = tx.update(gradient, state, w)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, tx.init(w)), length=3)[0][0]

    assert over_eight(train, INPUT) == 2 - 0.125 * 4.5 * (1 + 1.5 + 1.75)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
        optax.inject_hyperparams(optax.sgd)(
            learning_rate=optax.constant_schedule(0.1), momentum=0.9
        ),
    ],
    ids=["sgd", "apply_if_finite", "inject_hyperparams"],
)
def test_groups_that_start_inside_checked_shard_map(inner):
    tx = cross_shard(inner, AXIS, group_assignment=GROUPS)
    grads = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32)

    def train(grads):
        params = oxs.localize(jnp.ones(3), AXIS)
        history, _ = contexts.steps(tx)(params, tx.init(params), grads[0], {})
        return oxs.replicate(history, 1)

    run = jax.jit(
        jax.shard_map(train, mesh=contexts.mesh(), in_specs=P(AXIS), out_specs=P(AXIS))
    )
    with jax.numpy_dtype_promotion("standard"):  # inject_hyperparams counts in floats
        got = np.swapaxes(run(np.swapaxes(grads, 0, 1)), 0, 1)
    reduced = [reference.reduce(g, groups=GROUPS) for g in grads]
    start = np.ones((4, 3), np.float32)
    contexts.assert_close(got, reference.momentum(start, reduced, 0.1, 0.9))


# Row-sparse gradients.


@pytest.mark.parametrize("context", CONTEXTS)
def test_rows_give_the_dense_answer(context):
    steps, rows = 3, 6
    rng = np.random.default_rng(2)
    indices = rng.integers(0, rows, (steps, contexts.REPLICAS, 2)).astype(np.int32)
    values = rng.normal(size=(*indices.shape, 2)).astype(np.float32)
    bias = rng.normal(size=(steps, contexts.REPLICAS, 2)).astype(np.float32)
    weight = weights()[2 : 2 + steps]  # One of them is all zero.
    params = {"bias": np.zeros(2, np.float32), "table": np.ones((rows, 2), np.float32)}
    txs, grads, want = {}, {}, {}
    for name in ("mean", "weighted_groups"):
        arguments, reference_arguments, weighted = CASES[name]
        sent = values.copy()
        if weighted:
            sent[weight == 0] = np.nan
        dense = np.zeros((steps, contexts.REPLICAS, rows, 2), np.float32)
        for at in np.ndindex(indices.shape):
            dense[at[:2]][indices[at]] += sent[at]
        inner = oxs.on_values(optax.sgd(0.5))
        txs[name] = with_weight(cross_shard(inner, AXIS, **arguments), weighted)
        slices = jax.vmap(jax.vmap(oxs.IndexedSlices))(indices, sent)
        grads[name] = {"bias": bias, "table": slices}
        for leaf, grad in (("bias", bias), ("table", dense)):
            reduced = [
                reference.reduce(
                    g, weight=w if weighted else None, **reference_arguments
                )
                for g, w in zip(grad, weight, strict=True)
            ]
            start = params[leaf]
            every = np.broadcast_to(start, (contexts.REPLICAS, *start.shape))
            want[name, leaf] = reference.momentum(every, reduced, 0.5, 0.0)
    tx = together(txs)
    start = {name: params for name in txs}
    history, _ = contexts.replay(context, tx, start, grads, {"weight": weight})
    for (name, leaf), expected in want.items():
        contexts.assert_close(history[name][leaf], expected)


def test_no_table_travels_and_the_result_is_known_to_be_equal():
    rows, width, ids = 1000, 8, 3
    tx = cross_shard(oxs.on_values(optax.sgd(0.5)), AXIS)

    def dense_loss(params, batch):
        return jnp.sum(params["table"][batch] ** 2 @ params["w"])

    def sparse_loss(params, batch):
        return jnp.sum(oxs.take(params["table"], batch) ** 2 @ params["w"])

    def sparse_step(params, batch):
        gradient = oxs.value_and_grad(sparse_loss, rows={"table": lambda batch: batch})
        _, grads = gradient(oxs.localize(params, AXIS), batch[0])
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    def dense_step(params, batch):
        plain = cross_shard(optax.sgd(0.5), AXIS)
        grads = jax.grad(dense_loss)(oxs.localize(params, AXIS), batch[0])
        updates, _ = plain.update(grads, plain.init(params), params)
        return optax.apply_updates(params, updates)

    params = {
        "table": jnp.linspace(0, 1, rows * width).reshape(rows, width),
        "w": jnp.ones(width),
    }
    batch = np.array([[1, 2, 2], [2, 999, 0], [5, 5, 5], [0, 7, 2]], np.int32)
    sparse, dense = (
        jax.jit(
            jax.shard_map(
                step, mesh=contexts.mesh(), in_specs=(P(), P(AXIS)), out_specs=P()
            )
        )
        for step in (sparse_step, dense_step)
    )
    contexts.assert_close(sparse(params, batch), dense(params, batch))
    rows_found = oxs.audit.collectives(sparse, params, batch)
    assert rows_found
    assert sum(row.bytes for row in rows_found) <= 4 * (ids * (width + 1) + width)


# The compiled program.


def leaves(n=24):
    return {f"layer{i}": np.ones((i % 3 + 1, 4), np.float32) for i in range(n)}


def compiled(tx, check_vma=True, weight=False, of="collectives"):
    params = leaves()

    def step(params, state, grads, weight):
        extra = {"weight": weight[0]} if weight is not None else {}
        updates, state = tx.update(oxs.first(grads), state, params, **extra)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=contexts.mesh(),
        in_specs=(P(), P(), P(AXIS), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )
    grads = oxs.replicate(params, 4)
    given = np.ones(4, np.float32) if weight else None
    return getattr(oxs.audit, of)(mapped, params, tx.init(params), grads, given)


def by_hand(inner, check_vma=True):
    def update(updates, state, params=None):
        return inner.update(jax.lax.pmean(updates, AXIS), state, params)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("weight", [False, True])
def test_one_all_reduce_for_a_whole_tree(check_vma, weight):
    tx = cross_shard(optax.sgd(0.1, momentum=0.9), AXIS)
    (row,) = compiled(tx, check_vma, weight)
    size = sum(leaf.size for leaf in leaves().values())
    assert row.kind == "all-reduce"
    assert row.operands == 24 + weight
    assert row.bytes == 4 * (size + weight)
    assert row.groups == ((0, 1, 2, 3),)


def test_one_all_reduce_per_dtype():
    def step(x):
        tree = {}
        for i in range(6):
            y = x * i
            tree[i] = {"float": y, "half": y.astype(jnp.bfloat16), "bool": y > i}
        return oxs.reduce(tree, AXIS, reduction="sum")

    rows = oxs.audit.collectives(jax.pmap(step, axis_name=AXIS), jnp.ones((8, 3)))
    assert [row.kind for row in rows] == ["all-reduce"] * 2  # float32 and int32
    assert sorted(row.operands for row in rows) == [6, 12]


@pytest.mark.parametrize(
    "inner", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)], ids=["sgd", "momentum"]
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_compiles_to_what_the_step_by_hand_compiles_to(inner, check_vma):
    ours = compiled(cross_shard(inner, AXIS), check_vma, of="instructions")
    hand = compiled(by_hand(inner), check_vma, of="instructions")
    assert ours == hand
    assert ours["all-reduce"] == 1


@pytest.mark.parametrize("told", ["summed", "averaged"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduced_gradients_are_not_sent_again(told, reduction):
    tx = cross_shard(optax.sgd(0.1), AXIS, grads=told, reduction=reduction)

    def step(params, state, grads):
        return tx.update(grads, state, params)

    mapped = jax.shard_map(step, mesh=contexts.mesh(), in_specs=P(), out_specs=P())
    params = leaves()
    assert oxs.audit.collectives(mapped, params, tx.init(params), params) == []


def test_groups_use_the_collectives_that_there_are():
    def kinds(check_vma):
        def step(grads):
            grads = oxs.first(grads)
            reduced = oxs.reduce(grads, AXIS, group_assignment=GROUPS)
            return oxs.replicate(reduced, 1)

        mapped = jax.shard_map(
            step,
            mesh=contexts.mesh(),
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=check_vma,
        )
        rows = oxs.audit.collectives(mapped, oxs.replicate(leaves(), 4))
        assert all(row.groups == ((0, 2), (1, 3)) for row in rows)
        return Counter(row.kind for row in rows)

    assert kinds(check_vma=False) == {"all-reduce": 1}
    assert kinds(check_vma=True) == {"reduce-scatter": 1, "all-gather": 1}


# Optax around and inside.

TREE = {"v": np.linspace(-1, 1, 3, dtype=np.float32), "m": np.ones((2, 2), np.float32)}
FIRST = {"v": True, "m": False}


def with_mask_around(shard):
    # What the mask leaves out has not met; here it does not move.
    def still(updates: Any, params: Any):
        return updates | {"m": jnp.zeros_like(params["m"])}

    masked = optax.masked(shard(optax.sgd(0.1, momentum=0.9)), FIRST)
    return optax.chain(masked, optax.stateless(still))


# Each with `shard`, which wraps an inner transformation in cross_shard, or does not.
COMPOSED = {
    "adamw": lambda shard: shard(optax.adamw(0.1, weight_decay=0.1)),
    "catalogue": lambda shard: shard(adam(0.1)),
    "link": lambda shard: optax.chain(shard(optax.identity()), optax.adam(0.1)),
    "clip_inside": lambda shard: shard(
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    ),
    "inject_inside": lambda shard: shard(
        optax.inject_hyperparams(optax.sgd)(
            learning_rate=optax.linear_schedule(0.2, 0.1, 4)
        )
    ),
    "inject_around": lambda shard: optax.inject_hyperparams(
        lambda learning_rate: shard(optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "masked_inside": lambda shard: shard(
        optax.masked(optax.sgd(0.1, momentum=0.9), FIRST)
    ),
    "masked_around": with_mask_around,
    "multi_transform_inside": lambda shard: shard(
        optax.multi_transform(
            {"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"v": "a", "m": "b"}
        )
    ),
    "multi_transform_around": lambda shard: optax.multi_transform(
        {"a": shard(optax.sgd(0.1)), "b": shard(optax.adam(0.1))}, {"v": "a", "m": "b"}
    ),
    "multi_steps_inside": lambda shard: shard(
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    ),
    "multi_steps_around": lambda shard: optax.MultiSteps(
        shard(optax.sgd(0.1, momentum=0.9)), 2
    ).gradient_transformation(),
    "apply_if_finite_inside": lambda shard: shard(
        optax.apply_if_finite(optax.sgd(0.1), 3)
    ),
    "schedule_free_inside": lambda shard: shard(optax.contrib.schedule_free_sgd(0.1)),
}


def sharded(inner):
    return cross_shard(inner, AXIS)


def composed_gradients(replicas=contexts.REPLICAS, steps=6):
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda p: rng.normal(size=(steps, replicas, *p.shape)).astype(np.float32), TREE
    )


def plain_history(tx, grads, params=TREE):
    mean = jax.tree.map(lambda g: g.mean(1, keepdims=True), grads)
    history, _ = contexts.replay("vmap", tx, params, mean)
    return history


@pytest.mark.parametrize("style", ["shard_map", "replicated"])
def test_composed_with_optax_it_is_the_inner_one_on_the_mean(style):
    """All of them in one program."""
    names = set(COMPOSED)
    if style == "replicated":
        # MultiSteps accumulates on what `init` saw: its parameters must be local.
        names.remove("multi_steps_around")

    def composed(shard):
        parts = {name: COMPOSED[name](shard) for name in names}
        return together(parts)

    params = dict.fromkeys(names, TREE)
    grads = dict.fromkeys(names, composed_gradients())
    with jax.numpy_dtype_promotion("standard"):  # Optax's counters meet floats
        expected = plain_history(composed(lambda inner: inner), grads, params)
        if style == "replicated":
            history, _ = replicated(composed(sharded), params, grads)
        else:
            history, _ = contexts.replay(style, composed(sharded), params, grads)
    for name in names:
        every = jax.tree.map(
            lambda x: np.repeat(x, contexts.REPLICAS, axis=1), expected[name]
        )
        contexts.assert_close(history[name], every, 2e-6 if "adam" in name else 1e-6)


def test_clipping_before_the_link_is_each_replica_s_own():
    tx = optax.chain(optax.clip(1.0), all_reduce_grads(AXIS), optax.sgd(1.0))
    grads = np.array([[[8.0]], [[0.5]], [[-0.5]], [[2.0]]], np.float32).reshape(1, 4, 1)
    history, _ = contexts.replay("shard_map", tx, np.zeros(1, np.float32), grads)
    assert np.array_equal(history, np.full((1, 4, 1), -(1 + 0.5 - 0.5 + 1) / 4))


def test_optax_finds_and_changes_what_is_in_the_state():
    tx = cross_shard(
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1, b1=0.8), AXIS
    )
    state = tx.init(TREE)
    assert type(state) is optax.InjectStatefulHyperparamsState
    assert all_reduce_grads(AXIS).init(TREE) == optax.EmptyState()
    assert jax.tree.structure(optax.tree_utils.tree_get(state, "mu")) == (
        jax.tree.structure(TREE)
    )
    assert float(optax.tree_utils.tree_get(state, "b1")) == np.float32(0.8)
    changed = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.5))
    assert float(optax.tree_utils.tree_get(changed, "learning_rate")) == 0.5
    marked = optax.tree_utils.tree_map_params(
        tx, lambda _: "params", state, transform_non_params=lambda _: "other"
    )
    assert optax.tree_utils.tree_get(marked, "nu") == {"v": "params", "m": "params"}
    assert optax.tree_utils.tree_get(marked, "b1") == "other"


def test_parameters_and_state_are_donated_together():
    tx = cross_shard(optax.sgd(0.5, momentum=0.5), AXIS)

    def step(params, state, grads):
        updates, state = tx.update(oxs.first(grads), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=contexts.mesh(),
            in_specs=(P(), P(), P(AXIS)),
            out_specs=P(),
        ),
        donate_argnums=(0, 1),
    )
    everywhere = jax.NamedSharding(contexts.mesh(), P())
    params = jax.device_put(jax.tree.map(jnp.asarray, TREE), everywhere)
    state = jax.device_put(tx.init(params), everywhere)
    grads = oxs.replicate(TREE, 4)
    first = (params, state)
    for _ in range(2):
        params, state = run(params, state, grads)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    contexts.assert_close(params, jax.tree.map(lambda x: x * (1 - 0.5 - 0.75), TREE))


@pytest.mark.parametrize("context", ["shard_map", "vmap"])
def test_one_replica_is_the_inner_one(context, monkeypatch):
    one = contexts.mesh(1)
    monkeypatch.setattr(contexts, "mesh", lambda: one)
    inner = optax.sgd(0.1, momentum=0.9)
    txs = {
        "mean": with_weight(cross_shard(inner, AXIS), False),
        "weighted_groups": cross_shard(inner, AXIS, group_assignment=[[0]]),
    }
    grads = composed_gradients(replicas=1)
    history, _ = contexts.replay(
        context,
        together(txs),
        dict.fromkeys(txs, TREE),
        dict.fromkeys(txs, grads),
        {"weight": np.full((6, 1), 7.0, np.float32)},
    )
    plain = plain_history(inner, grads)
    contexts.assert_close(history, dict.fromkeys(txs, plain))


def lanes(tx, grads, params=None, state=None, **extra):
    """One update of four lanes of a vmap; `grads` and `extra` [4, ...]."""
    state = tx.init(TREE if params is None else params) if state is None else state

    def update(grads, extra):
        return tx.update(grads, state, params, **extra)

    return jax.vmap(update, axis_name=AXIS)(grads, extra)


def test_no_gradient():
    grads = {"v": jnp.ones((4, 3)), "m": None}
    updates, _ = lanes(cross_shard(optax.sgd(0.5), AXIS), grads, params=TREE)
    assert np.array_equal(updates["m"], np.zeros((4, 2, 2)))
    assert np.array_equal(updates["v"], np.full((4, 3), -0.5))
    updates, _ = lanes(cross_shard(optax.sgd(0.5), AXIS), grads)
    assert updates["m"] is None  # Without the parameters its shape is not known.
    updates, _ = lanes(all_reduce_grads(AXIS), grads, params=TREE)
    assert updates["m"] is None  # The next link of the chain shall see it.
    chain: Any = optax.chain(all_reduce_grads(AXIS), adam(0.1))
    updates, _ = lanes(chain, grads, params=TREE)
    assert np.array_equal(updates["m"], np.zeros((4, 2, 2)))
    for told in ("summed", "averaged"):
        tx = cross_shard(optax.sgd(0.5), AXIS, grads=told, reduction="sum")
        updates, _ = lanes(tx, grads, params=TREE)
        assert np.array_equal(updates["m"], np.zeros((4, 2, 2)))


def test_updates_keep_the_dtype_of_the_gradients():
    grads = {"b": jnp.ones((4, 2), jnp.bfloat16), "h": jnp.ones((4, 2), jnp.float16)}
    updates, _ = lanes(cross_shard(optax.sgd(0.5), AXIS), grads)
    assert updates["b"].dtype == jnp.bfloat16 and updates["h"].dtype == jnp.float16
    for told in ("summed", "averaged"):
        for reduction in ("mean", "sum"):
            tx = all_reduce_grads(AXIS, grads=told, reduction=reduction)
            updates, _ = lanes(tx, grads)
            assert updates["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_guard_inside_skips_the_step_on_all_replicas(context):
    """Around it, `apply_if_finite(cross_shard(...))`, one replica hangs the others."""
    inner = optax.apply_if_finite(optax.sgd(0.5), max_consecutive_errors=3)
    grads = np.ones((3, 4, 2), np.float32)
    grads[1, 2, 0] = np.nan
    history, state = contexts.replay(
        context, cross_shard(inner, AXIS), np.ones(2, np.float32), grads
    )
    assert np.array_equal(history[:, :, 1], np.repeat([[0.5], [0.5], [0.0]], 4, 1))
    assert np.asarray(state.total_notfinite).tolist() == [1] * 4


# Trajectories recorded from the original.

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
RECORDED = {
    case["name"]: case
    for case in json.loads((GOLDEN / "manifest.json").read_text())["cases"]
    if case["group"] == "cross_shard"
}
INNER = {
    "GradientDescentOptimizer": lambda learning_rate: optax.sgd(learning_rate),
    "MomentumOptimizer": lambda learning_rate, momentum, use_nesterov: optax.sgd(
        learning_rate, momentum, use_nesterov
    ),
    "AdamOptimizer": lambda learning_rate, beta1, beta2, epsilon: adam(
        learning_rate, beta1, beta2, epsilon
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_from_the_original(name):
    hyper = RECORDED[name]["hyperparameters"]
    shards, groups = hyper["num_shards"], hyper["group_assignment"]
    inner = dict(hyper["inner"])
    tx = cross_shard(
        INNER[inner.pop("class")](**inner),
        AXIS,
        reduction=hyper["reduction"],
        group_assignment=groups,
    )
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        arrays = dict(arrays)

    def named(prefix):
        return {leaf: arrays[f"{prefix}_{leaf}"] for leaf in ("s", "v", "m")}

    def objective(params, scale, center):
        terms = jax.tree.map(
            lambda x, a, c: 0.5 * jnp.sum(a * (x - c) ** 2), params, scale, center
        )
        return sum(jax.tree.leaves(terms))

    def train(params, state, scale, center):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(objective)(params, scale, center)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, grads)

        return jax.lax.scan(step, (params, state), length=RECORDED[name]["steps"])[1]

    args = oxs.replicate((named("p0"), tx.init(named("p0"))), shards)
    args = (*args, named("a"), named("c"))
    run = jax.jit(jax.vmap(train, axis_name=AXIS))
    history, grads = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), run(*args))
    contexts.assert_close(history, named("p"))
    # The original scales the loss for a mean, and so the gradients that it shows.
    size = len(groups[0]) if groups else shards
    scale = 1 / size if hyper["reduction"] == "mean" else 1
    contexts.assert_close(jax.tree.map(lambda g: g * scale, grads), named("grad"))


# What is refused.


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (r"TypeError: missing.*'inner'.*oxs\.cross_shard\(optax", {}),
        ("TypeError: missing.*'axis_name'", {"inner": optax.sgd(0.1)}),
        (r"TypeError: missing.*oxs\.cross_shard\(optax", {"inner": "data"}),
        ("TypeError: inner must be.*of type str", {"inner": "data", "axis_name": "x"}),
        ("TypeError: inner must be.*of type float", {"inner": 0.1, "axis_name": "x"}),
        ("TypeError: axis_name must be the name.*got 0", {"axis_name": 0}),
        ("TypeError: axis_name must be the name", {"axis_name": ["a", 0]}),
        (
            "ValueError: reduction must be 'mean' or 'sum'; got 'none'",
            {"reduction": "none"},
        ),
        ("ValueError: grads must be one of.*got 'global'", {"grads": "global"}),
        ("TypeError: exchange must be one of.*got 'int8'", {"exchange": "int8"}),
        ("ValueError: list of lists; got", {"group_assignment": ((0, 1), (2, 3))}),
        ("ValueError: more than once", {"group_assignment": [[0, 1], [2, 3], [0, 1]]}),
        ("ValueError: size of each group", {"group_assignment": [[0, 1, 2], [3]]}),
        (
            r"ValueError: permutation of range\(4\)",
            {"group_assignment": [[0, 1], [2, 7]]},
        ),
        *(
            (f"ValueError: {match}", {"grads": grads, "exchange": exchange})
            for grads, match in (
                ("summed", "An exchange needs each replica's own.*'summed'.*reduced"),
                ("averaged", "An exchange needs each replica's own.*'averaged'"),
            )
            for exchange in (
                oxs.exchange.all_reduce(jnp.bfloat16),
                oxs.exchange.quantized(),
                oxs.exchange.top_k(1, 2),
            )
        ),
        (
            "ValueError: group_assignment needs .*'s own.*'summed'.*oxs.localize",
            {"grads": "summed", "group_assignment": [[0, 1]]},
        ),
        (
            "ValueError: group_assignment needs .*'s own.*'averaged'.*oxs.localize",
            {"grads": "averaged", "group_assignment": [[0, 1]]},
        ),
        (
            "ValueError: an exchange that takes groups.*oxs.exchange.all_reduce()",
            {"exchange": oxs.exchange.quantized(), "group_assignment": [[0, 1]]},
        ),
    ],
)
def test_refused_at_construction(said, arguments):
    if arguments and "inner" not in arguments:
        arguments = {"inner": optax.sgd(0.1), "axis_name": AXIS, **arguments}
    with refused(said):
        cross_shard(**arguments)


@pytest.mark.parametrize(
    ("said", "arguments", "grads"),
    [
        (
            r"ValueError: permutation of range\(4\)",
            {"group_assignment": [[0], [1]]},
            TREE,
        ),
        ("ValueError: no meaning.*reduction='sum'", {"reduction": "sum"}, TREE),
        ("ValueError: weight needs each.*'summed'", {"grads": "summed"}, TREE),
        ("ValueError: weight needs each.*'averaged'", {"grads": "averaged"}, TREE),
        (
            r"TypeError: at \['v'\] has dtype bool",
            {},
            {"v": np.ones(3, bool), "m": TREE["m"]},
        ),
    ],
)
def test_refused_at_the_call(said, arguments, grads):
    tx = cross_shard(optax.sgd(0.1), AXIS, **arguments)
    with refused(said):
        lanes(tx, oxs.replicate(grads, 4), params=TREE, weight=jnp.ones(4))


def test_rows_that_do_not_fit_their_table():
    tx = all_reduce_grads(AXIS)
    for values, index in ((jnp.ones((1, 3)), 0), (jnp.ones((1, 2)), 2)):

        def update(x, index=index, values=values):
            rows = oxs.IndexedSlices(np.array([index]), values * x)
            return tx.update({"m": rows}, tx.init(None), {"m": TREE["m"]})

        with pytest.raises(ValueError, match=r"IndexedSlices at \['m'\]"):
            jax.vmap(update, axis_name=AXIS)(jnp.ones(4))


def test_a_mixed_vmap_and_checked_shard_map_says_what_to_do():
    tx = cross_shard(optax.sgd(0.1), (AXIS, "lane"))

    def lane(grad):
        return tx.update(grad, tx.init(grad))[0]

    def mapped(check_vma):
        return jax.jit(
            jax.shard_map(
                jax.vmap(lane, axis_name="lane"),
                mesh=contexts.mesh(),
                in_specs=P(AXIS),
                out_specs=P(AXIS),
                check_vma=check_vma,
            )
        )

    with pytest.raises(ValueError, match="Pass check_vma=False"):
        mapped(True)(jnp.arange(8.0))
    contexts.assert_close(mapped(False)(jnp.arange(8.0)), np.full(8, -0.35))


def test_rows_need_an_exchange_that_takes_them():
    exchange = oxs.exchange.Exchange(
        lambda tree: (), lambda tree, state, axis_name, **_: oxs.exchange.Met(tree)
    )
    tx = oxs.cross_shard(optax.sgd(0.1), "data", exchange=exchange)
    params = jnp.ones((4, 3))
    rows = jax.vmap(oxs.IndexedSlices)(
        jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1, 3))
    )
    with pytest.raises(ValueError, match="row-sparse"):
        jax.vmap(lambda g: tx.update(g, tx.init(params), params), axis_name="data")(
            rows
        )
