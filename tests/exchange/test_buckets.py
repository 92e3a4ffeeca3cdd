"""Buckets change how many collectives there are, and no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.comm.buffers import Joint
from tests.exchange.meeting import mapped

AXIS, REPLICAS = "data", 4
BYTES = 32 * REPLICAS * 4
# In buckets of 32 numbers for each replica: the first alone, two that fill one, and one
# that is larger than a bucket.
SIZES = {"a": 20, "b": 24, "c": 8, "d": 80}
PARAMS = {name: jnp.zeros(REPLICAS * size) for name, size in SIZES.items()}
GRADS = {
    name: jax.random.normal(jax.random.key(place), (REPLICAS, x.size))
    for place, (name, x) in enumerate(PARAMS.items())
}
EXCHANGE = oxs.exchange


def in_pieces(exchange):
    tx = oxs.cross_shard(
        optax.sgd(0.1, momentum=0.9), AXIS, shard_state=True, exchange=exchange
    )
    return lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS)[0]


def outer_in_pieces(exchange):
    options = {"communication_period": 1, "shard_state": True, "exchange": exchange}
    tx = oxs.diloco(optax.sgd(0.1), AXIS, **options)
    return lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS, meet=True)[0]


def meeting(exchange):
    return lambda grads: exchange.meet(grads, exchange.init(grads), AXIS).mean


# By name: a program of one replica's gradients, an exchange without buckets, one with.
CASES = {
    "cross_shard": (in_pieces, EXCHANGE.all_reduce, {}),
    "diloco": (outer_in_pieces, EXCHANGE.all_reduce, {}),
    # Blocks that lie in one leaf whatever lies beside it.
    "8 bits": (meeting, EXCHANGE.quantized, {"block": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_bucket_travels_by_itself_and_no_number_changes(case):
    program, make, options = CASES[case]
    whole = program(make(**options))
    cut = program(make(**options, bucket_bytes=BYTES))
    both = jax.vmap(lambda grads: (whole(grads), cut(grads)), axis_name=AXIS)
    one, other = jax.jit(both)(GRADS)
    for name in PARAMS:
        np.testing.assert_array_equal(one[name], other[name], name)
    for function, buckets in ((whole, 1), (cut, 3)):
        run = mapped("shard_map_unchecked", function, REPLICAS, AXIS)
        text = str(jax.make_jaxpr(run)(GRADS))
        first = "all_to_all[" if make is EXCHANGE.quantized else "reduce_scatter["
        assert text.count(first) == buckets
        assert text.count("all_gather[") == buckets


def test_what_is_joined_fills_a_bucket_and_what_is_larger_is_alone():
    def places(sizes, bucket_bytes):
        arrays = [jax.ShapeDtypeStruct((n,), t) for n, t in sizes]
        return Joint(arrays, bucket_bytes=bucket_bytes).places

    wide, narrow = np.float32, np.int8
    sizes = [(2, wide), (2, wide), (9, narrow), (1, wide), (0, wide), (5, wide)]
    assert places(sizes, 16) == [[0, 1], [2], [3], [5]]
    assert places(sizes, 20) == [[0, 1, 3], [2], [5]]
    assert places(sizes, 2**25) == [[0, 1, 3, 5], [2]]
