"""cross_shard: one answer everywhere, and what it must refuse."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync.audit import hlo
from optx_sync.optimizers.adam import adam
from tests import contexts, two_processes
from tests.recorded import arrays_of, inner_of, recorded
from tests.reference import replicas as reference
from tests.refusals import all_refused

# Optax's types know no gradient that is a tree of rows, or of arrays by name.
cross_shard: Any = oxs.cross_shard
all_reduce_grads: Any = oxs.all_reduce_grads
AXIS, N = contexts.AXIS, contexts.REPLICAS
GROUPS = [[0, 2], [1, 3]]
STEPS = 6
PARAMS = {"matrix": np.zeros((6, 2), np.float32), "half": np.zeros(4, jnp.bfloat16)}
# Steps of whole numbers: what half precision holds is exact.
WHOLE = optax.sgd(1.0, momentum=1.0)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
# name: (arguments of cross_shard, with weights)
CASES: dict[str, Any] = {
    "mean": ({}, False),
    "sum": ({"reduction": "sum"}, False),
    "weighted": ({}, True),
    "groups": ({"group_assignment": GROUPS}, False),
    "sum_groups": ({"reduction": "sum", "group_assignment": GROUPS}, False),
    "weighted_groups": ({"group_assignment": GROUPS}, True),
}
EQUAL = ("mean", "sum", "weighted")  # Groups do not end equal on all replicas.


def weights():
    """[T, 4]: in each step two pairs of equal weight, a power of two."""
    rng = np.random.default_rng(1)
    pair = 2.0 ** rng.integers(0, 3, (STEPS, 1))
    first = np.floor(rng.uniform(0, pair + 1, (STEPS, 2)))
    weight = np.concatenate([first, pair - first], axis=1)
    weight[3] = 0  # nobody has seen a token
    return weight.astype(np.float32)


def gradients(weighted):
    rng = np.random.default_rng(0)

    def drawn(param):
        grad = 16 * rng.integers(-1, 2, (STEPS, N, *param.shape)).astype(param.dtype)
        if weighted:  # They must leave no trace.
            grad[weights() == 0] = np.nan
        return grad

    return jax.tree.map(drawn, PARAMS)


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
    made = {
        name: with_weight(cross_shard(WHOLE, AXIS, **arguments), weighted)
        for name, (arguments, weighted) in CASES.items()
        if name in names
    }
    grads = {name: gradients(CASES[name][1]) for name in names}
    return together(made), dict.fromkeys(names, PARAMS), grads, {"weight": weights()}


def process_cases():
    """For tests/two_processes.py."""
    return {"cross_shard": inputs(), "replicated": (*inputs(EQUAL), ("replicated",))}


def expected(name):
    arguments, weighted = CASES[name]
    how = arguments.get("reduction", "mean")
    groups = arguments.get("group_assignment")

    def moved(grads):
        reduced = [
            reference.reduce(grad, how, weight if weighted else None, groups)
            for grad, weight in zip(grads, weights(), strict=True)
        ]
        return reference.momentum(np.zeros_like(reduced[0]), reduced, 1.0, 1.0)

    return jax.tree.map(moved, gradients(weighted))


@pytest.mark.parametrize("context", ["shard_map", "replicated", "vmap", "islands"])
def test_one_answer_everywhere(context):
    if context == "replicated":  # `P()` for parameters and state, in and out
        tx, params, grads, extra = inputs(EQUAL)
        run = two_processes.replicated(tx, contexts.mesh())
        one, _ = run(params, tx.init(params), *contexts.by_replica((grads, extra)))
        history = jax.tree.map(lambda x: np.stack([contexts._numpy(x)] * N, 1), one)
    else:
        history, _ = contexts.replay(context, *inputs())
    for name, got in history.items():
        contexts.assert_close(got, expected(name))
    assert history.keys() == set(EQUAL if context == "replicated" else CASES)


# Gradients that autodiff has reduced already (check_vma=True), eight devices.

INPUT = np.arange(1, 9, dtype=np.float32)  # mean 4.5, sum 36


def over_eight(function, **options):
    specs = {"in_specs": P(AXIS), "out_specs": P(), **options}
    return jax.jit(jax.shard_map(function, mesh=contexts.mesh(8), **specs))


# What the gradients are said to be: how they come about.
WAYS = {
    "local": lambda loss, w: jax.grad(loss)(oxs.localize(w, AXIS)),
    "summed": lambda loss, w: jax.grad(loss)(w),
    "averaged": lambda loss, w: jax.grad(lambda w: oxs.reduce(loss(w), AXIS))(w),
}


def answers(x, ways=tuple(WAYS)):
    """What `all_reduce_grads` makes of gradients of w x: {(way, reduction): ...}."""
    found = {}
    for told in ways:
        grad = WAYS[told](lambda w: jnp.sum(w * x), jnp.float32(2))
        rows = oxs.IndexedSlices(jnp.array([2]), jnp.reshape(grad, 1))
        tree = {"w": grad, "half": grad.astype(jnp.bfloat16), "rows": rows}
        for reduction in ("mean", "sum"):
            tx = all_reduce_grads(AXIS, grads=told, reduction=reduction)
            updates, _ = tx.update(tree, tx.init(None))
            half, rows_of_it = updates["half"], updates["rows"].to_dense(3)
            assert half.dtype == jnp.bfloat16
            found[told, reduction] = updates["w"], half.astype("f4"), rows_of_it
    return found


def test_each_way_out_gives_the_right_number():
    local = functools.partial(answers, ways=("local",))  # localize does nothing there
    for found in (
        over_eight(answers)(INPUT),
        over_eight(local, check_vma=False)(INPUT),
        jax.jit(jax.vmap(local, axis_name=AXIS))(INPUT),
    ):
        for (_, reduction), (number, half, rows) in found.items():
            right = 4.5 if reduction == "mean" else 36.0
            assert (number == right).all() and (half == right).all()
            assert (rows[..., 2] == right).all() and not rows[..., :2].any()


def said_to_be(grads, made):
    """A step of gradients said to be what they are not."""
    tx = all_reduce_grads(AXIS, grads=grads)
    return over_eight(lambda x: tx.update(made(x), tx.init(None)))(INPUT)


def mixed(x):
    return {"here": x, "there": jax.lax.psum(x, AXIS)}


def rows(x):
    return mixed(x) | {"here": oxs.IndexedSlices(jnp.array([0]), x)}


test_leaves_that_are_not_what_they_are_said_to_be = all_refused(globals())(r"""
said_to_be("local", mixed)
    # ValueError: (?s)at \['there'\].* does not vary over the mesh axis 'data'.*jax.grad
said_to_be("local", mixed)
    # ValueError: (?s)oxs.localize\(params, 'data'\).*grads='summed'.*grads='averaged'
said_to_be("summed", lambda x: {"here": x})
said_to_be("summed", mixed)
said_to_be("summed", rows)
    # ValueError: grads='summed'.*at \['here'\] varies.*oxs.localize
said_to_be("averaged", lambda x: {"here": x})
said_to_be("averaged", mixed)
said_to_be("averaged", rows)
    # ValueError: grads='averaged'.*at \['here'\] varies.*oxs.localize
""")


SCHEDULED = optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(0.1), 0.9)


@pytest.mark.parametrize("inner", [optax.apply_if_finite(MOMENTUM, 3), SCHEDULED])
def test_groups_that_start_inside_checked_shard_map(inner):
    tx = cross_shard(inner, AXIS, group_assignment=GROUPS)
    grads = np.random.default_rng(0).normal(size=(4, N, 3)).astype(np.float32)

    def train(grads):
        params = oxs.localize(jnp.ones(3), AXIS)
        history, _ = contexts.steps(tx)(params, tx.init(params), grads[0], {})
        return oxs.by_hand.replicate(history, 1)

    run = jax.jit(
        jax.shard_map(train, mesh=contexts.mesh(), in_specs=P(AXIS), out_specs=P(AXIS))
    )
    with jax.numpy_dtype_promotion("standard"):  # inject_hyperparams counts in floats
        got = np.swapaxes(run(np.swapaxes(grads, 0, 1)), 0, 1)
    reduced = [reference.reduce(g, groups=GROUPS) for g in grads]
    start = np.ones((N, 3), np.float32)
    contexts.assert_close(got, reference.momentum(start, reduced, 0.1, 0.9))


# The compiled program.

LAYERS = {f"layer{i}": np.ones((i % 3 + 1, 4), np.float32) for i in range(8)}


def compiled(tx, check_vma=True, weight=None):
    def step(params, state, grads, extra):
        grads, extra = oxs.by_hand.first((grads, extra))
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=contexts.mesh(),
        in_specs=(P(), P(), P(AXIS), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )
    extra = {} if weight is None else {"weight": weight}
    grads = oxs.by_hand.replicate(LAYERS, N)
    return jax.jit(mapped).lower(LAYERS, tx.init(LAYERS), grads, extra).compile()


def opcodes(program):
    """How often each instruction of XLA stands in a compiled program."""
    bodies = hlo.program(program).computations.values()
    return Counter(instruction.opcode for body in bodies for instruction in body)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_is_the_one_by_hand_with_one_all_reduce_for_a_whole_tree(check_vma):
    def by_hand(updates, state, params=None):
        return MOMENTUM.update(jax.lax.pmean(updates, AXIS), state, params)

    tx = cross_shard(MOMENTUM, AXIS)
    ours = compiled(tx, check_vma)
    hand = compiled(optax.GradientTransformation(tx.init, by_hand), check_vma)
    assert opcodes(ours) == opcodes(hand)
    size = sum(leaf.size for leaf in LAYERS.values())
    weighted = compiled(tx, check_vma, np.ones(N, np.float32))
    for more, program in enumerate((ours, weighted)):
        (row,) = oxs.audit.collectives(program)
        assert (row.kind, row.groups) == ("all-reduce", ((0, 1, 2, 3),))
        assert (row.operands, row.bytes) == (len(LAYERS) + more, 4 * (size + more))


def test_one_all_reduce_per_dtype():
    def step(x):
        tree = [(x * i, (x * i).astype(jnp.bfloat16), x > i) for i in range(6)]
        return oxs.reduce(tree, AXIS, reduction="sum")

    rows = oxs.audit.collectives(jax.pmap(step, axis_name=AXIS), jnp.ones((8, 3)))
    assert [row.kind for row in rows] == ["all-reduce"] * 2  # float32 and int32
    assert sorted(row.operands for row in rows) == [6, 12]


def test_the_default_exchange_may_be_written_out():
    for grads in ("summed", "averaged"):
        options: Any = {"grads": grads, "exchange": oxs.exchange.all_reduce()}
        assert oxs.cross_shard(optax.sgd(0.1), "data", **options).init(jnp.ones(2))


def test_reduced_gradients_are_not_sent_again():
    def update(grads):
        return [
            cross_shard(optax.sgd(0.1), AXIS, grads=told, reduction=how).update(
                grads, (optax.EmptyState(), optax.EmptyState())
            )
            for told in ("summed", "averaged")
            for how in ("mean", "sum")
        ]

    mapped = jax.shard_map(update, mesh=contexts.mesh(), in_specs=P(), out_specs=P())
    assert oxs.audit.collectives(mapped, LAYERS) == []


def test_groups_use_the_collectives_that_there_are():
    def step(grads):
        reduced = oxs.reduce(oxs.by_hand.first(grads), AXIS, group_assignment=GROUPS)
        return oxs.by_hand.replicate(reduced, 1)

    grads = oxs.by_hand.replicate(LAYERS, N)
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS)}
    for check_vma, kinds in (
        (False, {"all-reduce": 1}),
        (True, {"reduce-scatter": 1, "all-gather": 1}),
    ):
        mapped = jax.shard_map(step, mesh=contexts.mesh(), check_vma=check_vma, **specs)
        rows = oxs.audit.collectives(mapped, grads)
        assert Counter(row.kind for row in rows) == kinds
        assert all(row.groups == ((0, 2), (1, 3)) for row in rows)


def test_no_table_travels():
    tx = cross_shard(oxs.on_values(optax.sgd(0.5)), AXIS)

    def loss(params, ids):
        return jnp.sum(oxs.take(params["table"], ids) ** 2 @ params["w"])

    def step(params, ids):
        gradient = oxs.value_and_grad(loss, rows={"table": lambda ids: ids})
        _, grads = gradient(oxs.localize(params, AXIS), ids[0])
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    # That the result is equal on all replicas is known to its type.
    mapped = jax.shard_map(
        step, mesh=contexts.mesh(), in_specs=(P(), P(AXIS)), out_specs=P()
    )
    params = {"table": jnp.ones((1000, 8)), "w": jnp.ones(8)}
    rows = oxs.audit.collectives(mapped, params, np.zeros((N, 3), np.int32))
    assert 0 < sum(row.bytes for row in rows) <= 4 * (3 * (8 + 1) + 8)


# Optax around and inside; `tests/test_pairs.py` has many of its optimizers inside.

TREE = {"v": np.linspace(-1, 1, 3, dtype=np.float32), "m": np.ones((2, 2), np.float32)}


def masked(shard):
    # What the mask leaves out has not met; here it does not move.
    rest = optax.masked(optax.set_to_zero(), {"v": False, "m": True})
    return optax.chain(optax.masked(shard(MOMENTUM), {"v": True, "m": False}), rest)


# Each with `shard`, which wraps an inner transformation in cross_shard, or does not.
AROUND: dict[str, Any] = {
    "link": lambda shard: optax.chain(shard(optax.identity()), MOMENTUM),
    "inject_hyperparams": lambda shard: optax.inject_hyperparams(
        lambda learning_rate: shard(optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "masked": masked,
    "multi_transform": lambda shard: optax.multi_transform(
        {"a": shard(optax.sgd(0.1)), "b": shard(MOMENTUM)}, {"v": "a", "m": "b"}
    ),
    "MultiSteps": lambda shard: optax.MultiSteps(
        shard(MOMENTUM), 2
    ).gradient_transformation(),
}


def test_inside_of_optax_it_is_the_inner_one_on_the_mean():
    rng = np.random.default_rng(5)
    one = jax.tree.map(lambda x: rng.normal(size=(6, N, *x.shape)).astype("f4"), TREE)
    grads, params = dict.fromkeys(AROUND, one), dict.fromkeys(AROUND, TREE)
    mean = jax.tree.map(lambda g: g.mean(1, keepdims=True), grads)
    ours = {at: make(lambda tx: cross_shard(tx, AXIS)) for at, make in AROUND.items()}
    plain = {name: make(lambda inner: inner) for name, make in AROUND.items()}
    with jax.numpy_dtype_promotion("standard"):  # Optax's counters meet floats
        found, _ = contexts.replay("shard_map", together(ours), params, grads)
        wanted, _ = contexts.replay("vmap", together(plain), params, mean)
    wanted = jax.tree.map(lambda x: np.repeat(x, N, axis=1), wanted)
    contexts.assert_close(found, wanted)


def test_the_state_is_that_of_the_inner_one():
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.1, b1=0.8)
    tx = cross_shard(inner, AXIS)
    state = tx.init(TREE)
    jax.tree.map(np.testing.assert_array_equal, state, inner.init(TREE))
    assert all_reduce_grads(AXIS).init(TREE) == optax.EmptyState()
    marked = optax.tree_utils.tree_map_params(tx, lambda _: "params", state)
    assert optax.tree_utils.tree_get(marked, "nu") == {"v": "params", "m": "params"}


def lanes(tx, grads, params=None, **extra):
    """The first update of four lanes of a vmap; `grads` and `extra` [4, ...]."""
    state = tx.init(TREE if params is None else params)

    def update(grads, extra):
        return tx.update(grads, state, params, **extra)[0]

    return jax.vmap(update, axis_name=AXIS)(grads, extra)


def test_no_gradient():
    grads = {"v": jnp.ones((N, 3)), "m": None}
    for told in ("local", "summed", "averaged"):
        tx = cross_shard(optax.sgd(0.5), AXIS, grads=told)
        assert np.array_equal(lanes(tx, grads, TREE)["m"], np.zeros((N, 2, 2)))
        # Without the parameters its shape is not known.
        assert lanes(tx, grads)["m"] is None
    # The next link of the chain shall see it.
    assert lanes(all_reduce_grads(AXIS), grads, TREE)["m"] is None
    updates = lanes(optax.chain(all_reduce_grads(AXIS), adam(0.1)), grads, TREE)
    assert np.array_equal(updates["m"], np.zeros((N, 2, 2)))


def test_a_guard_inside_skips_the_step_on_all_replicas():
    """Around it, `apply_if_finite(cross_shard(...))`, one replica hangs the others."""
    tx = cross_shard(optax.apply_if_finite(optax.sgd(0.5), 3), AXIS)
    grads = np.ones((3, N, 2), np.float32)
    grads[1, 2, 0] = np.nan
    history, state = contexts.replay("shard_map", tx, np.ones(2, np.float32), grads)
    assert np.array_equal(history[:, :, 1], np.repeat([[0.5], [0.5], [0.0]], N, 1))
    assert np.asarray(state.total_notfinite).tolist() == [1] * N


RECORDED = recorded("cross_shard")


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_from_the_original(name):
    hyper = RECORDED[name]["hyperparameters"]
    groups, reduction = hyper["group_assignment"], hyper["reduction"]
    tx = cross_shard(
        inner_of(hyper["inner"]), AXIS, reduction=reduction, group_assignment=groups
    )
    _, named = arrays_of(RECORDED[name])

    def train(params, state, scale, center):
        def step(carry, _):
            params, state = carry
            # of a sum of squares
            grads = jax.tree.map(lambda x, a, c: a * (x - c), params, scale, center)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, state), length=RECORDED[name]["steps"])[1]

    start = oxs.by_hand.replicate(
        (named("p0"), tx.init(named("p0"))), hyper["num_shards"]
    )
    run = jax.jit(jax.vmap(train, axis_name=AXIS, out_axes=1))
    contexts.assert_close(run(*start, named("a"), named("c")), named("p"))


# What is refused; a test writes docs/combinations.md, which has pairs of options.

SGD, PAIRS, ex = optax.sgd(0.1), [[0, 1], [2, 3]], oxs.exchange


def sharded(**options):
    return cross_shard(SGD, AXIS, **options)


def grouped(*groups):
    return sharded(group_assignment=list(groups))


test_refused_at_construction = all_refused(globals())(r"""
cross_shard()  # TypeError: missing.*'inner'.*oxs\.cross_shard\(optax
cross_shard(SGD)
cross_shard("data")  # TypeError: missing.*'axis_name'
cross_shard("data", AXIS)  # TypeError: inner must be.*of type str
cross_shard(SGD, 0)  # TypeError: axis_name must be the name.*got 0
cross_shard(SGD, ["a", 0])  # TypeError: axis_name must be the name
sharded(reduction="x")  # ValueError: must be 'mean' or 'sum'; got 'x'
sharded(grads="x")  # ValueError: grads must be one of.*got 'x'
sharded(shard_state="owners")  # ValueError: shard_state must be .*'owners'
sharded(reduce_extra_args="key")  # TypeError: tuple of names.*'key'
sharded(exchange="int8")  # TypeError: exchange must be one of.*'int8'
sharded(group_assignment=((0, 1), (2, 3)))  # ValueError: list of lists of equal size
grouped([0, 1], [2, 3], [0, 1])  # ValueError: a partition of
grouped([0, 1, 2], [3])  # ValueError: equal size
grouped([0, 1], [2, 7])  # ValueError: a partition of range\(axis size\)
sharded(grads="summed", exchange=ex.all_reduce(jnp.bfloat16))
    # ValueError: An exchange needs each replica's own.*'summed'.*oxs.localize
sharded(exchange=ex.quantized(), group_assignment=PAIRS)
    # ValueError: exchange that takes groups.*oxs.exchange.all_reduce\(\)
""")


OWN = ex.Exchange(lambda tree: (), lambda tree, *_, **__: ex.Met(tree), True)


def weighted(tx):
    return lanes(tx, oxs.by_hand.replicate(TREE, N), TREE, weight=jnp.ones(N))


def rows_of(width, index, exchange=None):
    tx = all_reduce_grads(AXIS, exchange=exchange)

    def update(x):
        rows = oxs.IndexedSlices(np.array([index]), x * jnp.ones((1, width)))
        return tx.update({"m": rows}, tx.init(None), {"m": TREE["m"]})

    return jax.vmap(update, axis_name=AXIS)(jnp.ones(N))


test_refused_at_the_call = all_refused(globals())(r"""
weighted(grouped([0], [1]))  # ValueError: a partition of range\(4\)
weighted(sharded(reduction="sum"))  # ValueError: no meaning.*reduction='sum'
weighted(sharded(grads="summed"))  # ValueError: weight needs each.*'summed'
rows_of(3, 0)
rows_of(2, 2)  # ValueError: IndexedSlices at \['m'\]
rows_of(2, 0, OWN)  # ValueError: row-sparse, which this exchange does not take
""")
