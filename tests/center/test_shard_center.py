"""`shard_center=True`: the numbers of the whole center, in 1/N of the memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optx_sync as oxs
from benchmarks.by_hand import memory as memory_of
from optx_sync import by_hand
from tests import contexts
from tests.meshes import mesh_of
from tests.refusals import all_refused
from tests.replicas.test_cross_shard import together

AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
# Sizes that divide nothing.
PARAMS = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3),
    "empty": np.zeros((0, 3), np.float32),
    "bfloat16": np.arange(4).astype(jnp.bfloat16),
}
INNER = optax.sgd(0.1, momentum=0.5)
LATE: dict[str, Any] = {"drop_nonfinite": True, "fragments": 2, "delay": 2}
PAPER = {"accumulate": "updates", "reduction": "sum"}
AGN = {"outer": oxs.optimizers.adam(0.01), "inner_state": "average"}
KEPT = {"fragments": oxs.rules.strided(2), "keep_local": 0.5, "measure": True}
# (rule, period, options)
RULES: dict[str, tuple[Any, int, Any]] = {
    "local_sgd": (oxs.local_sgd, 2, {}),
    "diloco": (oxs.diloco, 3, {"drop_nonfinite": True}),
    "agn": (oxs.agn, 3, AGN),
    "late": (oxs.diloco, 4, LATE | {"measure": True}),
    "kept": (oxs.local_sgd, 2, KEPT),
    "agn of the paper": (oxs.agn, 2, PAPER),
}


def made(name, sharded):
    rule, period, more = RULES[name]
    more = {**more, "communication_period": period, "shard_center": sharded}
    return rule(INNER, AXIS, **more)


CASES = {
    "vmap": ("local_sgd", "diloco", "agn", "agn of the paper"),
    "shard_map": ("diloco", "late", "kept"),
    "shard_map_axes": ("late",),
    "shard_map_unchecked": ("diloco",),
    "pmap": ("diloco",),
    "islands": ("diloco", "agn"),
}


def inputs(steps=13):
    rng = np.random.default_rng(0)

    def drawn(param):
        shape = (steps, REPLICAS, *param.shape)
        return rng.normal(size=shape).astype(param.dtype)

    grads = {name: jax.tree.map(drawn, PARAMS) for name in RULES}
    # One worker is broken for a round; "late" in the step in which a part lands, when
    # it has moved away from the center in the other one.
    for name, step in (("diloco", 4), ("late", 5)):
        grads[name]["matrix"][step, 1, 2] = np.nan
        grads[name]["matrix"][7] = np.nan  # All are.
    return {name: PARAMS for name in RULES}, grads


@functools.cache
def run(context, names, sharded):
    params, grads = ({name: tree[name] for name in names} for tree in inputs())
    transformations = {name: made(name, sharded) for name in names}
    tx = together(transformations)
    name = names[0]
    if context == "shard_map_axes":  # Specs are asked of one transformation.
        tx, params, grads = transformations[name], params[name], grads[name]
    history, state = contexts.replay(context, tx, params, grads)
    if context == "shard_map_axes":
        history, state = {name: history}, {name: state}
    centers = {name: oxs.center_params(state[name], PARAMS) for name in names}
    return history, centers, state


@pytest.mark.parametrize("context", CASES)
def test_the_numbers_are_those_of_a_whole_center(context):
    history, centers, state = run(context, CASES[context], True)
    whole, whole_centers, whole_state = run(context, CASES[context], False)
    for name in CASES[context]:
        # A sum of parameters rounds where one of differences would not; where such a
        # sum is rounded to half precision that may be a step of that.
        half = {"bfloat16": history[name].pop("bfloat16")}
        expected = {leaf: whole[name][leaf] for leaf in PARAMS}
        expected_half = {"bfloat16": expected.pop("bfloat16")}
        contexts.assert_close(history[name], expected, 2e-6)
        contexts.assert_close(half, expected_half, 2**-7)
        assert np.array_equal(half["bfloat16"], expected_half["bfloat16"]) or (
            np.mean(half["bfloat16"] != expected_half["bfloat16"]) < 0.05
        )
        history[name] |= half
        found = jax.tree.map(lambda x: np.asarray(x, np.float32), centers[name])
        wanted = jax.tree.map(lambda x: np.asarray(x, np.float32), whole_centers[name])
        for leaf, x in found.items():
            assert x.shape == PARAMS[leaf].shape
            np.testing.assert_allclose(x, wanted[leaf], rtol=1e-2, atol=1e-5)
        measured, expected = oxs.metrics(state[name]), oxs.metrics(whole_state[name])
        for field, x in expected._asdict().items():
            if x is not None:
                np.testing.assert_allclose(
                    getattr(measured, field), x, rtol=1e-5, atol=1e-6, err_msg=field
                )
        if name == "diloco":
            pieces = state[name].center.parts[0].tree["matrix"]
            assert pieces.shape == (REPLICAS, -(-33 // REPLICAS))
            outer = oxs.optimizers.slot(state[name], "outer.trace")["matrix"]
            assert outer.shape == pieces.shape
            assert measured.dropped.tolist() == [1, 2, 1, 1]


CODES: dict[str, Any] = {
    "8 bits": (8, {}),
    "8 bits, in parts": (8, {"fragments": 2}),
    "8 bits, rotated": (8, {}),
    "4 bits, late": (4, {"delay": 1, "drop_nonfinite": True, "measure": True}),
}


def coded(name):
    bits, more = CODES[name]
    exchange = oxs.exchange.quantized(bits)
    exchange = oxs.exchange.rotated(exchange) if "rotated" in name else exchange
    exchange = oxs.exchange.error_feedback(exchange)
    options = {"communication_period": 2, "shard_center": True, "exchange": exchange}
    return oxs.local_sgd(optax.sgd(0.1), AXIS, **options, **more)


@pytest.mark.parametrize(
    "context, name",
    [
        ("vmap_axes", "8 bits"),
        ("shard_map", "4 bits, late"),
        ("shard_map_axes", "8 bits, in parts"),
        ("shard_map_axes", "8 bits, rotated"),
    ],
)
def test_codes_go_up_and_down_and_nothing_is_lost(context, name):
    """A worker's steps are the same wherever it starts, so their sum is known."""
    params = {name: PARAMS[name] for name in ("scalar", "matrix", "empty")}
    rng = np.random.default_rng(2)
    grads = {
        name: (0.1 * rng.normal(size=(24, REPLICAS, *x.shape)) - 1).astype("f4")
        for name, x in params.items()
    }
    # Beside it the others are less than half a step, unless what is lost adds up.
    grads["matrix"][:, :, 0, 0] = -50
    _, now = contexts.replay(context, coded(name), params, grads)
    if context == "vmap_axes":
        four = by_hand.replicate(params, REPLICAS)
        three, more = by_hand.resize(coded("8 bits"), four, now, 3)
        # They go on where workers are, not where the owners' pieces are.
        for leaf, x in more.taken.items():
            assert np.array_equal(x, now.taken[leaf])
            assert np.array_equal(three[leaf], np.broadcast_to(x, (3, *x.shape)))
        before, after = (oxs.center_params(s, params) for s in (now, more))
        assert np.array_equal(before["matrix"], after["matrix"])
        assert not np.array_equal(before["matrix"], more.taken["matrix"])
    bits, more = CODES[name]
    center, seen = oxs.center_params(now, params), now.taken
    if context == "shard_map":  # where each worker has its own copy
        seen = jax.tree.map(np.asarray, seen)
        for x in jax.tree.leaves(seen):
            assert np.array_equal(x, np.broadcast_to(x[:1], x.shape))
        seen = jax.tree.map(lambda x: x[0], seen)
    # What is summed in step t lands in t + 1, and what was learned there is left.
    counts = [0, *range(1, 24, 2)] if "delay" in more else range(24)
    if "fragments" in more:
        # The last step comes after the last meeting of the first part.
        assert now.center.partition.number == 2
        first, second = now.exchange
        late = jax.tree.map(lambda g: 0.1 * np.asarray(g), grads)
        late = now.center.partition.pick(jax.tree.map(lambda g: g[-1].mean(0), late), 0)
        owed = jax.tree.map(lambda e: np.asarray(e).mean(0), first.error)
        first = jax.tree.map(lambda e, g: e - g, owed, late)
        second = jax.tree.map(lambda e: np.asarray(e).mean(0), second.error)
        owed = now.center.partition.join([first, second])
    else:
        owed = jax.tree.map(lambda e: np.asarray(e).mean(0), now.exchange.error)
    for leaf in params:
        arrived = center[leaf] + np.asarray(owed[leaf])
        if "delay" in more:
            way = np.asarray(now.pending.values[0].tree[leaf]).reshape(-1)
            size = params[leaf].size
            arrived += way[:size].reshape(params[leaf].shape)
        moved = -0.1 * grads[leaf][list(counts)].sum(0).mean(0)
        np.testing.assert_allclose(arrived, params[leaf] + moved, rtol=1e-5, atol=1e-5)
        # The gap is half a step of the largest that was sent, not the sum of many.
        gap = np.abs(seen[leaf] - center[leaf]).max(initial=0)
        assert gap < 0.5 * 11.2 / (2 ** (bits - 1) - 1)


def test_workers_that_are_sharded():
    """Along an axis that the compiler lays out: pieces are of whole arrays."""
    mesh = mesh_of({"pods": 2, "inside": 2})
    one = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    grads = {"w": np.random.default_rng(0).normal(size=(2, 3, 8, 4)).astype("f4")}
    specs = {"w": PartitionSpec("inside")}
    workers = oxs.Workers(2, "pods", mesh=mesh, specs=specs)
    options: dict[str, Any] = {"communication_period": 2, "fragments": 2}
    txs = {
        name: oxs.diloco(INNER, "pods", shard_center=name == "pieces", **options)
        for name in ("whole", "pieces")
    }
    found, _ = contexts.by_workers(workers, txs, one, grads)
    contexts.assert_close(found["pieces"], found["whole"], 2e-6)


def test_bytes_of_codes():
    """Of b bits b / 32 of what the sum of float32 sends, and the scales."""
    params = {"w": jnp.zeros((64, 1024)), "b": jnp.zeros(513)}
    floats = 64 * 1024 + 513
    exchange = oxs.exchange.error_feedback(oxs.exchange.quantized(4))
    tx = oxs.diloco(INNER, AXIS, shard_center=True, exchange=exchange)
    step, params, state = contexts.started(tx, params, mesh=contexts.mesh(), meet=True)
    rows = oxs.audit.collectives(step.lower(params, state, params).compile())
    sent = {row.kind: row.bytes for row in rows}
    assert set(sent) == {"all-to-all", "all-gather"} and len(rows) == 2
    codes = floats * (4 / 8 + 4 / 256)
    assert abs(sent["all-to-all"] / codes - 1) < 0.02
    assert abs(REPLICAS * sent["all-gather"] / codes - 1) < 0.02


def test_weights_are_those_of_a_whole_center():
    """In the second round all are 0."""
    names = "diloco", "late"
    params, grads = ({name: tree[name] for name in names} for tree in inputs())
    weights = np.random.default_rng(1).integers(0, 3, (13, REPLICAS))
    weights[[3, 5]] = 0
    extra = {"weight": weights.astype(np.float32)}
    found = []
    for sharded in (False, True):
        tx = together({name: made(name, sharded) for name in names})
        found += [contexts.replay("vmap_axes", tx, params, grads, extra)[0]]
    whole, pieces = ({n: {"m": tree[n]["matrix"]} for n in names} for tree in found)
    for name in names:
        contexts.assert_close(pieces[name], whole[name], 2e-6)


def test_a_parameter_that_is_none():
    tx = oxs.local_sgd(optax.sgd(0.5), AXIS, communication_period=1, shard_center=True)
    step, params, state = contexts.started(tx, {"a": None, "b": jnp.zeros(3)}, 2)
    params, state = step(params, state, {"a": None, "b": jnp.ones((2, 3))})
    center = oxs.center_params(state, params)
    assert center["a"] is None and np.array_equal(center["b"], np.full(3, -0.5))


@pytest.mark.parametrize("number", [2, 8])
def test_memory_and_bytes(number):
    workers, found = oxs.Workers(number, AXIS, mesh=contexts.mesh(number)), {}
    params = jnp.zeros((1024, 64))
    for sharded in (True, False):
        options: Any = {"communication_period": 4, "shard_center": sharded}
        tx = oxs.diloco(optax.sgd(0.1), AXIS, **options)

        @functools.partial(workers.step, state=2)
        def step(params, state, tx=tx):
            return oxs.apply_gradients(tx, params, state, params)

        compiled = step.lower(*workers.start((params, tx.init(params)))).compile()
        sent = {row.kind: row.bytes for row in oxs.audit.collectives(compiled)}
        memory = memory_of(compiled)
        found[sharded] = memory.arguments, memory.temporary, sent
    pieces, whole, own = found[True], found[False], params.nbytes
    assert pieces[0] - own - 2 * own // number <= 64  # its parameters; and its counters
    assert whole[0] - 3 * own <= 64
    assert pieces[1] <= whole[1]
    # On a ring the same bytes: (N-1)/N of the operand and N-1 times a piece, or twice
    # (N-1)/N of the operand.
    assert whole[2] == {"all-reduce": own}
    assert pieces[2] == {"reduce-scatter": own, "all-gather": own // number}


def start(tx: Any, workers: int) -> Any:
    return contexts.started(tx, {"w": jnp.linspace(-1, 1, 13)}, workers)


def train(step, params, state, steps):
    workers = params["w"].shape[0]
    for _ in range(steps):
        grads = {"w": params["w"] + jnp.linspace(-1, 1, workers)[:, None]}
        params, state = step(params, state, grads)
    return params, state


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_pieces_for_another_number_of_workers():
    inner = optax.sgd(0.1, momentum=0.9)
    tx = oxs.diloco(inner, AXIS, communication_period=2, shard_center=True)
    step, *now = start(tx, 4)
    now = train(step, *now, 3)  # In the middle of a period.

    # Three workers go on from the center and the outer state of four.
    params, state = train(step, *now, 1)
    center = oxs.center_params(state, params)
    more_params, more = by_hand.resize(tx, params, state, 3)
    same(oxs.center_params(more, more_params), center)
    before, after = (oxs.optimizers.slot(s, "outer.trace")["w"] for s in (state, more))
    assert (before.shape, after.shape) == ((4, 4), (3, 5)) and np.abs(before).max() > 0
    same(before.reshape(-1)[:13], after.reshape(-1)[:13])
    moved, more = train(start(tx, 3)[0], more_params, more, 2)
    assert np.abs(oxs.center_params(more, moved)["w"] - center["w"]).max() > 0.01


def test_parts_in_pieces_are_cut_anew():
    """Also what is on its way, of the part that has the fewer numbers."""
    options: Any = {"communication_period": 4, "delay": 1, "shard_center": True}
    options["fragments"] = lambda path, leaf: np.arange(13) // 9
    tx = oxs.diloco(optax.sgd(0.1, momentum=0.9), AXIS, **options)
    step, *now = start(tx, 4)
    params, state = train(step, *now, 4)
    moved, more = by_hand.resize(tx, params, state, 4)
    same(more, state)
    with pytest.warns(UserWarning, match="have learned"):
        moved, more = by_hand.resize(tx, params, state, 3)
    same(oxs.center_params(more, moved), oxs.center_params(state, params))
    same(pending(more), pending(state))
    assert np.abs(pending(state)[9:]).min() > 0 and not pending(state)[:9].any()
    assert [x.tree["w"].shape for x in more.center.parts] == [(3, 3), (3, 2)]
    moved, more = train(start(tx, 3)[0], moved, more, 1)
    before, after = (oxs.center_params(x, params)["w"] for x in (state, more))
    assert np.array_equal(before[:9], after[:9]) and not np.any(before[9:] == after[9:])


def pending(state):
    """What is on its way, of all parts."""
    sizes = 9, 4
    held = [x.tree["w"].reshape(-1) for x in state.pending.values]
    return np.concatenate([x[:n] for x, n in zip(held, sizes, strict=True)])


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_one_number_for_each_worker_is_a_parameter(shape):
    """Of the shape that stacked numbers have: the state knows its parameters'."""
    params, workers = jnp.arange(8.0).reshape(shape), oxs.Workers(8, AXIS)
    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, shard_center=True)
    stacked, state = workers.start((params, tx.init(params)))
    assert np.array_equal(workers.center((stacked, state)), params)
    assert np.array_equal(oxs.center_params(state, stacked), params)
    assert not workers.metrics((stacked, state)).distance.any()
    assert np.array_equal(oxs.center_params(state, params), params)


ONES = jnp.ones((2, 5))


def sharded(make: Any = oxs.local_sgd, **more):
    return make(INNER, axis_name=AXIS, shard_center=True, **more)


def curved(own, center, at):
    return jnp.square(own.params - own.taken)


def on_two(function):
    return jax.vmap(function, axis_name=AXIS)(ONES)


test_refused = all_refused(globals())(r"""
sharded(oxs.elastic_average, moving_rate=0.1, rho=0.5)  # ValueError: `penalty` reads
sharded(oxs.elastic_average, moving_rate=0.1, rho=0.0)  # ValueError: `take` reads
start(sharded(oxs.diloco, outer=optax.clip_by_global_norm(1.0)), 2)
    # ValueError: the outer optimizer flat pieces
start(oxs.agn(optax.lamb(0.1), AXIS, shard_center=True), 2)
    # ValueError: each number alone
oxs.diloco(INNER, None, shard_center=True)  # ValueError: shares a center
sharded(exchange=oxs.exchange.error_feedback(oxs.exchange.top_k()))
    # ValueError: half way
sharded(oxs.center_variable, rule=oxs.CenterRule(curved)).init(ONES[0])
    # ValueError: affine
on_two(lambda p, state=sharded().init(ONES[0]): sharded().update(p, state, p))
    # ValueError: for one of 2 replicas
on_two(lambda p: oxs.center_params(sharded().init(p), p))
    # ValueError: outside of the mapped function
""")
