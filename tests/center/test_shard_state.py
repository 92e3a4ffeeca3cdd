"""`shard_state=True` of center rules: the outer state in pieces, and equal numbers."""

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
LATE: dict[str, Any] = {"drop_nonfinite": True, "fragments": 2, "overlap": True}
PAPER = {"accumulate": "updates", "reduction": "sum"}
AGN = {"outer": oxs.optimizers.adam(0.01), "inner_state": "average"}
ROWS = {"fragments": oxs.rules.strided(2), "measure": True}
# (rule, period, options)
RULES: dict[str, tuple[Any, int, Any]] = {
    "local_sgd": (oxs.local_sgd, 2, {}),
    "diloco": (oxs.diloco, 3, {"drop_nonfinite": True}),
    "agn": (oxs.agn, 3, AGN),
    "late": (oxs.diloco, 4, LATE | {"measure": True}),
    "rows": (oxs.diloco, 2, ROWS),
    "elastic": (oxs.elastic_average, 2, {"moving_rate": 0.1, "rho": 0.5}),
    "agn of the paper": (oxs.agn, 2, PAPER),
}


def made(name, sharded):
    rule, period, more = RULES[name]
    more = {**more, "communication_period": period, "shard_state": sharded}
    return rule(INNER, AXIS, **more)


CASES = {
    "vmap": ("local_sgd", "diloco", "agn", "agn of the paper", "elastic"),
    "shard_map": ("diloco", "late", "rows"),
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
    # One worker is broken for a round; "late" when it has moved away from the center in
    # one part.
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
def test_the_numbers_are_those_of_a_whole_state(context):
    history, centers, state = run(context, CASES[context], True)
    whole, whole_centers, whole_state = run(context, CASES[context], False)
    for name in CASES[context]:
        # A sum may be rounded in another order, in half precision by a step of that.
        half = {"bfloat16": history[name].pop("bfloat16")}
        expected = {leaf: whole[name][leaf] for leaf in PARAMS}
        expected_half = {"bfloat16": expected.pop("bfloat16")}
        contexts.assert_close(history[name], expected, 2e-6)
        contexts.assert_close(half, expected_half, 2**-7)
        assert np.mean(half["bfloat16"] != expected_half["bfloat16"]) < 0.05
        history[name] |= half
        found, wanted = (
            jax.tree.map(lambda x: np.asarray(x, np.float32), tree[name])
            for tree in (centers, whole_centers)
        )
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
            outer = oxs.optimizers.slot(state[name], "outer.trace")["matrix"]
            assert outer.shape == (REPLICAS, -(-33 // REPLICAS))
            assert measured.dropped.tolist() == [1, 2, 1, 1]


CODES: dict[str, Any] = {
    "8 bits": (8, {}),
    "8 bits, in parts": (8, {"fragments": 2}),
    "16 bits, late": (16, {"overlap": True}),
    "4 bits, late": (4, {"overlap": True, "drop_nonfinite": True, "measure": True}),
}


@pytest.mark.parametrize(
    "context, name",
    [
        ("vmap_axes", "8 bits"),
        ("shard_map", "4 bits, late"),
        ("shard_map_axes", "8 bits, in parts"),
        ("shard_map", "16 bits, late"),
    ],
)
def test_codes_go_up_and_the_move_comes_back_whole(context, name):
    """A worker's steps are the same wherever it starts, so their sum is known."""
    bits, more = CODES[name]
    exchange = oxs.exchange.error_feedback(oxs.exchange.quantized(bits))
    options = {"communication_period": 2, "shard_state": True, "exchange": exchange}
    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, **options, **more)
    params = {name: PARAMS[name] for name in ("scalar", "matrix", "empty")}
    rng = np.random.default_rng(2)
    grads = {
        name: (0.1 * rng.normal(size=(24, REPLICAS, *x.shape)) - 1).astype("f4")
        for name, x in params.items()
    }
    # Beside it the others are less than half a step, unless what is lost adds up.
    grads["matrix"][:, :, 0, 0] = -50
    _, now = contexts.replay(context, tx, params, grads)
    center, errors = oxs.center_params(now, params), now.exchange
    # With `overlap` the last contribution is under way, and of two steps one is lost.
    counts = [0, *range(1, 22, 2)] if "overlap" in more else range(24)
    learned = [grads["matrix"][list(counts)]] if "fragments" not in more else None
    if learned is None:
        # The last step comes after the last meeting of the first part.
        first, second = (jax.tree.map(np.asarray, memory.error) for memory in errors)
        owed = np.concatenate(
            [x["matrix"].mean(0).reshape(-1, 3) for x in (first, second)]
        )
        rows = len(first["matrix"][0])
        moved = -0.1 * grads["matrix"].sum(0).mean(0)
        late = 0.1 * grads["matrix"][-1].mean(0)
        moved[:rows] += late[:rows]
    else:
        owed = np.asarray(errors.error["matrix"]).mean(0)
        moved = -0.1 * learned[0].sum(0).mean(0)
    arrived = center["matrix"] + owed
    np.testing.assert_allclose(arrived, params["matrix"] + moved, rtol=1e-5, atol=1e-5)


def test_workers_that_are_sharded():
    """Along an axis that the compiler lays out: pieces are of whole arrays."""
    mesh = mesh_of({"pods": 2, "inside": 2})
    one = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    grads = {"w": np.random.default_rng(0).normal(size=(2, 3, 8, 4)).astype("f4")}
    specs = {"w": PartitionSpec("inside")}
    workers = oxs.Workers(2, "pods", mesh=mesh, specs=specs)
    options: dict[str, Any] = {"communication_period": 2, "fragments": 2}
    txs = {
        name: oxs.diloco(INNER, "pods", shard_state=name == "pieces", **options)
        for name in ("whole", "pieces")
    }
    found, _ = contexts.by_workers(workers, txs, one, grads)
    contexts.assert_close(found["pieces"], found["whole"], 2e-6)


def test_bytes_of_codes():
    """Of b bits b / 32 of what float32 sends on the way up, and the scales."""
    params = {"w": jnp.zeros((64, 1024)), "b": jnp.zeros(513)}
    floats = 64 * 1024 + 513
    exchange = oxs.exchange.error_feedback(oxs.exchange.quantized(4))
    tx = oxs.diloco(INNER, AXIS, shard_state=True, exchange=exchange)
    step, params, state = contexts.started(tx, params, mesh=contexts.mesh(), meet=True)
    rows = oxs.audit.collectives(step.lower(params, state, params).compile())
    sent = {row.kind: row.bytes for row in rows}
    assert set(sent) == {"all-to-all", "all-gather"} and len(rows) == 2
    codes = floats * (4 / 8 + 4 / 256)
    assert abs(sent["all-to-all"] / codes - 1) < 0.02
    assert abs(REPLICAS * sent["all-gather"] / (4 * floats) - 1) < 0.02


def test_weights_are_those_of_a_whole_state():
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
    tx = oxs.local_sgd(optax.sgd(0.5), AXIS, communication_period=1, shard_state=True)
    step, params, state = contexts.started(tx, {"a": None, "b": jnp.zeros(3)}, 2)
    params, state = step(params, state, {"a": None, "b": jnp.ones((2, 3))})
    center = oxs.center_params(state, params)
    assert center["a"] is None and np.array_equal(center["b"], np.full(3, -0.5))


@pytest.mark.parametrize("number", [2, 8])
def test_memory_and_bytes(number):
    workers, found = oxs.Workers(number, AXIS, mesh=contexts.mesh(number)), {}
    params = jnp.zeros((1024, 64))
    for sharded in (True, False):
        options: Any = {"communication_period": 4, "shard_state": sharded}
        tx = oxs.diloco(optax.sgd(0.1), AXIS, **options)

        @functools.partial(workers.step, state=2)
        def step(params, state, tx=tx):
            return oxs.apply_gradients(tx, params, state, params)

        compiled = step.lower(*workers.start((params, tx.init(params)))).compile()
        sent = {row.kind: row.bytes for row in oxs.audit.collectives(compiled)}
        memory = memory_of(compiled)
        found[sharded] = memory.arguments, memory.temporary, sent
    pieces, whole, own = found[True], found[False], params.nbytes
    # Parameters, center and momentum; and counters.
    assert pieces[0] - 2 * own - own // number <= 64
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
    tx = oxs.diloco(inner, AXIS, communication_period=2, shard_state=True)
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
    """By `resize`, and by `Workers.resize`, which has the state alone."""
    options: Any = {"communication_period": 4, "overlap": True, "shard_state": True}
    options["fragments"] = lambda path, leaf: np.arange(13) // 9
    tx = oxs.diloco(optax.sgd(0.1, momentum=0.9), AXIS, **options)
    step, *now = start(tx, 4)
    params, state = train(step, *now, 5)
    with pytest.warns(UserWarning, match="have learned"):
        moved, more = by_hand.resize(tx, params, state, 3)
    workers = oxs.Workers(4, AXIS)
    with pytest.warns(UserWarning, match="have learned"):
        again = workers.resize((params, state), 3)
    same((moved, more), again)
    same(oxs.center_params(more, moved), oxs.center_params(state, params))
    pieces = [x.tree[0].trace["w"] for x in more.outer]
    assert [x.shape for x in pieces] == [(3, 3), (3, 2)]
    for one, before in zip(pieces, state.outer, strict=True):
        was = before.tree[0].trace["w"].reshape(-1)
        size = before.sizes[0]
        assert np.abs(one).max() > 0
        same(one.reshape(-1)[:size], was[:size])
    moved, more = train(start(tx, 3)[0], moved, more, 2)
    before, after = (oxs.center_params(x, params)["w"] for x in (state, more))
    assert not np.array_equal(before, after)


ONES = jnp.ones((2, 5))


def sharded(make: Any = oxs.local_sgd, **more):
    return make(INNER, axis_name=AXIS, shard_state=True, **more)


OUTER = sharded(oxs.diloco)


def on_two(function):
    return jax.vmap(function, axis_name=AXIS)(ONES)


test_refused = all_refused(globals())(r"""
start(sharded(oxs.diloco, outer=optax.clip_by_global_norm(1.0)), 2)
    # ValueError: the outer optimizer flat pieces
start(oxs.agn(optax.lamb(0.1), AXIS, shard_state=True), 2)
    # ValueError: each number alone
oxs.diloco(INNER, None, shard_state=True)  # ValueError: shares the outer
sharded(exchange=oxs.exchange.error_feedback(oxs.exchange.top_k()))
    # ValueError: half way
on_two(lambda p, state=OUTER.init(ONES[0]): OUTER.update(p, state, p))
    # ValueError: for one of 2 replicas
""")
