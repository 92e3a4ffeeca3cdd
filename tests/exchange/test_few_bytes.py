"""Compressing exchanges: what travels, what is refused, and how wrappers use them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests.exchange.meeting import AXIS, mapped, placed
from tests.meshes import mesh_of
from tests.refusals import all_refused

quantized, top_k = oxs.exchange.quantized, oxs.exchange.top_k
power_sgd, error_feedback = oxs.exchange.power_sgd, oxs.exchange.error_feedback
rotated = oxs.exchange.rotated
REPLICAS = 4
TREE = {
    "matrix": np.ones((REPLICAS, 300, 66), np.float32),
    "vector": np.ones((REPLICAS, 701), np.float32),
    "half": np.ones((REPLICAS, 1000), jnp.bfloat16),
}
NUMBERS = sum(x[0].size for x in TREE.values())


def between_replicas(context, exchange):
    """{kind: bytes per device} of the collectives between replicas, as compiled."""

    def meet(tree):
        met = exchange.meet(tree, oxs.localize(exchange.init(tree), AXIS), AXIS)
        return met.mean, met.lost

    program = mapped(context, meet, REPLICAS)
    found: dict[str, float] = {}
    for row in oxs.audit.collectives(program, placed(context, TREE, REPLICAS)):
        if len(row.groups[0]) == REPLICAS:  # Pairs are the shards of one worker.
            found[row.kind] = found.get(row.kind, 0) + row.sent
    return found


WAYS = ("shard_map", "pmap", "sharded_workers")


@pytest.mark.parametrize(
    "context, bits, most",
    [
        *((way, bits, most) for way in WAYS for bits, most in ((16, 0.51), (8, 0.27))),
        ("shard_map", 4, 0.14),
        *(("shard_map", 3, 0.0977), ("shard_map", 2, 0.0665), ("shard_map", 1, 0.0353)),
    ],
)
def test_bytes_of_codes(context, bits, most):
    exchange = quantized(bits)
    found = between_replicas(context, exchange if bits > 2 else rotated(exchange))
    assert set(found) == {"all-to-all", "all-gather"}
    whole = 2 * (REPLICAS - 1) / REPLICAS * 4 * NUMBERS  # of an all-reduce
    assert sum(found.values()) <= most * whole


SHARDS = {"rows": jax.P("inside"), "columns": jax.P(None, "inside"), "whole": jax.P()}
FED = {
    "quantized": error_feedback(quantized(4, 16)),
    "top_k": error_feedback(top_k(4, 16, bits=2)),
    "power_sgd": error_feedback(power_sgd(1)),
}


def test_shards_of_a_worker_send_their_own_codes_where_all_axes_are_manual():
    """XLA gathers a worker's codes on each of its shards where their axis is its own.

    A sharding constraint does not keep it from that. Where the program is manual over
    the shards' axis too, a shard codes and sends what it has.
    """
    exchange, mesh = quantized(), mesh_of({AXIS: REPLICAS, "inside": 2})
    tree = {name: TREE[name] for name in ("matrix", "half")}
    specs = {"matrix": jax.P(AXIS, None, "inside"), "half": jax.P(AXIS, "inside")}

    def meet(tree):
        mean = exchange.meet(by_hand.first(tree), (), AXIS)[0]
        return jax.tree.map(lambda x: x[None], mean)

    mapped_by_hand = jax.jit(
        jax.shard_map(meet, mesh=mesh, in_specs=(specs,), out_specs=specs)
    )
    found = {row.kind: row.bytes for row in oxs.audit.collectives(mapped_by_hand, tree)}
    own = (300 * 33 + 500) // REPLICAS  # numbers of a piece of a shard
    for kind, pieces in (("all-to-all", REPLICAS), ("all-gather", 1)):
        assert own * pieces <= found[kind] <= 1.04 * own * pieces


SHARDS = {"rows": jax.P("inside"), "columns": jax.P(None, "inside"), "whole": jax.P()}
FED = {
    "quantized": error_feedback(quantized(4, 16)),
    "top_k": error_feedback(top_k(4, 16, bits=2)),
    "power_sgd": error_feedback(power_sgd(1)),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", FED)
def test_the_law_where_the_axis_of_the_shards_is_manual_too(name, check_vma):
    """What arrived and what is owed is what was sent, of each shard by itself."""
    mesh, number = mesh_of({AXIS: REPLICAS, "inside": 2}), 3
    rng = np.random.default_rng(0)
    params = {
        "rows": jnp.zeros((32, 12)),
        "columns": jnp.zeros((16, 24)),
        "whole": jnp.zeros(5),
    }
    grads = {
        leaf: rng.normal(size=(REPLICAS, *p.shape)).astype(np.float32)
        for leaf, p in params.items()
    }
    options: Any = {"communication_period": 1, "exchange": FED[name]}
    tx = oxs.local_sgd(optax.sgd(1.0), AXIS, **options)
    axes = by_hand.state_axes(tx, params)
    of_each = {leaf: jax.P(AXIS, *spec) for leaf, spec in SHARDS.items()}
    specs = of_each, by_hand.state_specs(tx, params, SHARDS, AXIS)

    def train(params, state, grads):
        pair = by_hand.first(params), by_hand.first(state, axes)
        for _ in range(number):
            pair = oxs.apply_gradients(tx, by_hand.first(grads), pair[1], pair[0])
        return by_hand.replicate(pair[0], 1), by_hand.replicate(pair[1], 1, axes)

    ways = {"in_specs": (*specs, of_each), "out_specs": specs, "check_vma": check_vma}
    run = jax.jit(jax.shard_map(train, mesh=mesh, **ways))
    state = by_hand.replicate(tx.init(params), REPLICAS, axes)
    trained, state = run(by_hand.replicate(params, REPLICAS), state, grads)
    owed = oxs.optimizers.slot(state, "error")
    for leaf, grad in grads.items():
        # Workers send how far they moved, which is minus their gradients.
        arrived = (number * grad + owed[leaf]).mean(0)
        np.testing.assert_allclose(-trained[leaf][0], arrived, rtol=1e-5, atol=1e-5)
        if leaf != "whole" or name == "quantized":
            assert np.abs(owed[leaf]).max() > 0.01


def test_bytes_of_the_largest_and_of_factors():
    chunks, others = -(-NUMBERS // 4096), REPLICAS - 1
    found = between_replicas("shard_map", top_k())
    assert found == {"all-gather": others * chunks * 32 * (2 + 4)}
    found = between_replicas("shard_map_unchecked", top_k(64, bits=2))
    assert found == {"all-gather": others * chunks * (64 * 2 + 16 + 16)}
    factors = 2 * (300 + 66)
    found = between_replicas("shard_map", power_sgd(rank=2))
    whole = 4 * (factors + 701 + 1000)
    assert found == {"all-reduce": pytest.approx(2 * others / REPLICAS * whole)}
    # A position takes the bytes that the last one of a chunk needs.
    for chunk, of_position in ((256, 1), (257, 2), (2**16, 2), (2**16 + 1, 4)):
        code: Any = top_k(3, chunk).code
        x = jax.ShapeDtypeStruct((chunk,), np.float32)
        message, *_ = jax.eval_shape(code.encode, x, ())
        assert message.shape == (3 * (of_position + 4),)


def lanes(function, *args):
    return jax.jit(jax.vmap(function, axis_name=AXIS))(*args)


def test_two_bits_are_the_means_of_four_bins():
    x = np.random.default_rng(1).normal(1, 2, size=(2, 3, 40)).astype(np.float32)
    x[0, 1] = np.abs(x[0, 1])  # a chunk without negative numbers
    sent = np.zeros_like(x)
    for chunk, out in zip(x.reshape(-1, 40), sent.reshape(-1, 40), strict=True):
        largest = np.argsort(-np.abs(chunk))[:15]
        value, size = chunk[largest], np.abs(chunk[largest])
        for sign in (value < 0, value >= 0):
            if sign.any():
                above = size > size[sign].mean()
                for one_bin in (sign & above, sign & ~above):
                    out[largest[one_bin]] = value[one_bin].mean()
    exchange = top_k(15, 40, bits=2)
    met = lanes(lambda x: exchange.meet(x, (), AXIS), x.reshape(2, 120))
    np.testing.assert_allclose(met.mean[0], sent.mean(0).ravel(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(
        met.lost, (x - sent).reshape(2, 120), rtol=2e-6, atol=1e-6
    )


def test_a_nan_and_an_infinity_are_seen_and_do_no_lasting_harm():
    good = np.random.default_rng(0).normal(size=(2, 4, 40, 40)).astype(np.float32)
    exchanges = quantized(4), top_k(4, 64), top_k(4, 64, 2), power_sgd()
    exchanges += rotated(quantized(1)), quantized(3, 64), quantized(16)

    def meet(bad, good):
        found = []
        for fed in map(error_feedback, exchanges):
            before = fed.meet(good, fed.init(bad), AXIS)
            met = fed.meet(bad, before.state, AXIS)
            again = fed.meet(good, met.state, AXIS)
            found.append((met.mean, again.mean, again.state.error))
        return found

    run = jax.jit(jax.vmap(meet, axis_name=AXIS))
    for broken in (np.nan, np.inf):
        bad = good[0].copy()
        bad[1, 3, 5] = broken
        for mean, again, error in run(bad, good[1]):
            assert not np.isfinite(mean[:, 3, 5]).any()
            assert np.isfinite(again).all() and np.isfinite(error).all()


def test_a_replica_without_weight_keeps_what_it_owes():
    """A dropped worker of a center rule: its contribution is NaN, its weight 0."""
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    x[1] = np.nan
    exchange = error_feedback(top_k(5, 50))

    def meet(x, weight):
        state = exchange.init(x)._replace(error=jnp.arange(50.0))
        return exchange.meet(x, state, AXIS, weight=weight)

    met = lanes(meet, x, jnp.array([2.0, 0.0, 1.0]))
    assert np.isfinite(met.mean).all()
    assert np.array_equal(met.state.error[1], np.arange(50.0))
    assert np.array_equal(met.lost[1], np.zeros(50))


PARAMS = {
    "matrix": np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8),
    "half": np.ones(5, jnp.bfloat16),
}
FEEDBACK = error_feedback(quantized(bits=8))
WRAPPERS = {
    "cross_shard": lambda **more: oxs.cross_shard(optax.sgd(0.1), AXIS, **more),
    "sync_replicas": lambda **more: oxs.sync_replicas(optax.sgd(0.1), AXIS, 3, **more),
    "local_sgd": lambda **more: oxs.local_sgd(
        optax.sgd(0.1), AXIS, communication_period=2, drop_nonfinite=True, **more
    ),
    "diloco": lambda **more: oxs.diloco(
        optax.sgd(0.1), AXIS, communication_period=2, **more
    ),
}


def test_wrappers_with_feedback_follow_the_exact_ones():
    """In 40 steps, with a worker that is broken once."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: rng.normal(size=(3, 40, *p.shape)).astype(p.dtype), PARAMS
    )
    broken = grads | {"matrix": grads["matrix"].copy()}
    broken["matrix"][1, 20] = np.nan

    def run(tx, grads):
        def step(carry, grads):
            return oxs.apply_gradients(tx, grads, carry[1], carry[0]), None

        params = jax.tree.map(jnp.asarray, PARAMS)
        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]

    def all_of_them(grads, broken):
        ends = {}
        for name, wrapper in WRAPPERS.items():
            txs = wrapper(), wrapper(exchange=FEEDBACK)
            now = broken if name == "local_sgd" else grads
            ends[name] = [run(tx, now) for tx in txs]
        return jax.tree.map(lambda x: x.astype(jnp.float32), ends)

    for name, (exact, coded) in lanes(all_of_them, grads, broken).items():
        for leaf, x in exact.items():
            y = coded[leaf]
            assert np.array_equal(y, np.broadcast_to(y[:1], y.shape)), (name, leaf)
            assert 0 < np.abs(x - y).max() < 0.03 * max(1, np.abs(x).max()), name


def met(exchange, x):
    return lanes(lambda x: exchange.meet(x, exchange.init(x), AXIS)[0], x)


def of_rows(function):
    """What a function makes of row-sparse gradients of a table."""

    def one(values):
        return function(
            oxs.IndexedSlices(jnp.zeros(1, jnp.int32), values), jnp.zeros((4, 3))
        )

    return lanes(one, jnp.ones((2, 1, 3)))


def met_rows(exchange):
    return of_rows(
        lambda rows, table: exchange.meet(
            {"w": rows}, exchange.init({"w": table}), AXIS
        )[0]
    )


def step_of_rows(wrapper, exchange):
    tx = WRAPPERS[wrapper](exchange=exchange)
    return of_rows(lambda rows, table: tx.update(rows, tx.init(table))[0])


test_refused = all_refused(globals())(r"""
quantized(bits=5)  # ValueError: 1, 2, 3, 4, 8 or 16, .* got bits=5
quantized(bits=16, code="linear")  # ValueError: bits=16 and code='linear'
quantized(bits=16, block=64)  # ValueError: Leave block out
quantized(bits=True)  # TypeError: bits must be an integer
quantized(bits=1, code="linear")  # ValueError: bits=1 and code='linear'
quantized(code="lloyd")  # ValueError: bits=8 and code='lloyd'
quantized(4, code="log")  # ValueError: code='log'
rotated(quantized(), "fourier")  # ValueError: 'hadamard' or 'dct'
rotated(quantized(), block=48)  # ValueError: power of two .* got 48
rotated(quantized(), seed="a")  # TypeError: seed
rotated(oxs.exchange.median())  # ValueError: median
rotated(power_sgd())
rotated(error_feedback(quantized()))  # ValueError: Put error_feedback around
rotated(oxs.exchange.Exchange(lambda tree: (), met))  # ValueError: declares linear=True
quantized(block=0)  # ValueError: block must be 1 or more
quantized(block=2.0)  # TypeError: an integer
quantized(bucket_bytes=0)
oxs.exchange.all_reduce(bucket_bytes=0)  # ValueError: bucket_bytes must be 1 or more
quantized(bucket_bytes=1e6)
oxs.exchange.all_reduce(bucket_bytes=1e6)  # TypeError: bucket_bytes must be an integer
top_k(k=65, chunk=64)  # ValueError: k=65 and chunk=64
top_k(k=0)  # ValueError: k must be 1 or more
top_k(bits=4)  # ValueError: quantized
power_sgd(rank=0)  # ValueError: rank must be 1 or more
power_sgd(min_rate=0)  # ValueError: min_rate
error_feedback(quantized(), 1.5)  # ValueError: \[0, 1\]
error_feedback(0.5)  # TypeError: oxs.exchange
error_feedback(oxs.exchange.median())  # ValueError: must not come back
met(quantized(), {"w": jnp.ones((2, 3), jnp.int32)})  # TypeError: int32
met(top_k(), jnp.ones((2, 3), jnp.complex64))  # TypeError: complex64
met_rows(power_sgd())  # ValueError: \['w'\] is row-spar
met_rows(FEEDBACK)
step_of_rows("cross_shard", top_k())
step_of_rows("sync_replicas", FEEDBACK)  # ValueError: row-sparse
WRAPPERS["cross_shard"](exchange=quantized(), group_assignment=[[0, 1], [2, 3]])
    # ValueError: takes groups
""")


def test_a_missing_gradient_is_owed_nothing():
    exchange = error_feedback(quantized())

    def meet(x):
        state = exchange.init({"w": x, "v": x})
        met = exchange.meet({"w": x, "v": None}, state, AXIS)
        return met.mean, met.lost, met.state.error["v"]

    mean, lost, error = lanes(meet, jnp.ones((2, 3)))
    assert mean["v"] is None and lost["v"] is None
    assert np.array_equal(error, np.zeros((2, 3)))

    factors = power_sgd()

    def without(x):
        state = factors.init({"w": x})
        return factors.meet({"w": None}, state, AXIS)[0]

    with pytest.raises(ValueError, match=r"leaves that are None: \[\"\['w'\]\"\]"):
        lanes(without, jnp.ones((2, 9, 9)))


CODES = {
    "16 bits": quantized(16),
    "8 bits": quantized(),
    "4 bits fed back": error_feedback(quantized(bits=4)),
    "rotated": rotated(quantized(bits=2)),
    "largest": top_k(),
    "factors": power_sgd(),
    "median": oxs.exchange.median(),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("pieces", [False, True])
def test_workers_of_vmap_that_share_their_gradients_are_each_one(name, pieces):
    """Nothing of them is batched, gradients and weights, in all modes of a wrapper."""
    params = {"w": jnp.linspace(-1, 1, 35).reshape(5, 7), "b": jnp.ones(3)}
    if pieces and CODES[name].scatter is None:
        return
    options: Any = {"exchange": CODES[name], "shard_state": pieces}
    for tx in (
        oxs.cross_shard(optax.sgd(0.1), AXIS, **options),
        oxs.diloco(optax.sgd(0.1), AXIS, communication_period=1, **options),
    ):

        def step(grads, weight, tx=tx):
            state = tx.init(params)
            return tx.update(grads, state, params, weight=weight)[0]

        shared, own = (
            jax.vmap(step, in_axes=ins, axis_name=AXIS, axis_size=REPLICAS)
            for ins in (None, 0)
        )
        weight = jnp.bool_(True)
        many = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), (params, weight))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
            shared(params, weight),
            own(*many),
        )
