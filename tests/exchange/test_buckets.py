"""Buckets change how many collectives there are, and no number."""

import math
import re

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


FED = {"block": 4, "bits": 4}


def fed_back(exchange):
    fed = EXCHANGE.error_feedback(exchange)

    def meet(grads):
        weight = jnp.abs(grads["a"][0])
        more = {"weight": weight, "also": {"loss": grads["a"][1]}}
        met = fed.meet(grads, fed.init(grads), AXIS, **more)
        return (met.mean, met.weight, met.also), jax.lax.psum(met.lost, AXIS)

    return meet


def eqns_of(function):
    """The equations of a replica's program on a mesh, and which are behind each."""
    run = mapped("shard_map_unchecked", function, REPLICAS, AXIS)
    (eqn,) = jax.make_jaxpr(run)(GRADS).eqns
    (eqn,) = [one for one in eqn.params["jaxpr"].eqns if "shard_map" in str(one)[:200]]
    eqns, behind, made = eqn.params["jaxpr"].eqns, [], {}
    for number, one in enumerate(eqns):
        read = {made[id(x)] for x in one.invars if id(x) in made}
        behind.append(read.union(*(behind[i] for i in read)))
        made |= {id(x): number for x in one.outvars}
    return eqns, behind


def test_a_large_tree_with_feedback_meets_bucket_by_bucket_and_no_number_changes():
    whole = EXCHANGE.quantized(**FED)
    cut = EXCHANGE.quantized(**FED, bucket_bytes=BYTES)
    both = jax.vmap(lambda x: (fed_back(whole)(x), fed_back(cut)(x)), axis_name=AXIS)
    (one, lost), (other, lost_too) = jax.jit(both)(GRADS)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    # A piece has another owner, who owes what the second coding loses.
    for name in PARAMS:
        np.testing.assert_allclose(lost[name], lost_too[name], atol=1e-5)

    for exchange, buckets in ((whole, 1), (cut, 3)):
        eqns, behind = eqns_of(fed_back(exchange))
        found = {
            kind: [i for i, one in enumerate(eqns) if one.primitive.name == kind]
            for kind in ("all_to_all", "all_gather", "psum", "psum_invariant")
        }
        # The weights travel with the codes.
        assert len(found["all_to_all"]) == len(found["all_gather"]) == buckets
        sums = found["psum"] + found["psum_invariant"]
        # Of the scalar, and of what each leaf lost, above.
        assert len(sums) == 1 + len(PARAMS)
        # The third waits for the first, and the second does not.
        for number, sent in enumerate(found["all_to_all"]):
            done = [one in behind[sent] for one in found["all_gather"]]
            assert done == [place <= number - 2 for place in range(buckets)]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
def test_a_large_message_travels_in_lines(bits):
    """So XLA lays it out on TPUs as it is; a small one has no padding for that."""
    exchange = EXCHANGE.quantized(bits)
    for blocks in (3, 131, 515):
        size = REPLICAS * blocks * 256 - 5
        grads = {"a": jax.random.normal(jax.random.key(0), (REPLICAS, size))}

        def meet(grads):
            met = exchange.meet(grads, (), AXIS)
            return met.mean, met.lost

        run = mapped("shard_map_unchecked", meet, REPLICAS, AXIS)
        rows = [r for r in oxs.audit.collectives(run, grads) if r.kind == "all-to-all"]
        least = REPLICAS * (blocks * (32 * bits + (4 if bits < 16 else 0)))
        assert least <= sum(row.bytes for row in rows) < 1.06 * least
        shapes = re.findall(
            r":u8\[([\d,]*)\] = all_to_all", str(jax.make_jaxpr(run)(grads))
        )
        lines = [len(shape.split(",")) == 3 for shape in shapes]
        # Without scales a message is whole lines anyhow.
        assert lines == [bits == 16 or blocks >= 64 * 8 // math.gcd(8, bits)]
        mean, lost = run(grads)
        # What all received and what is owed is what was sent.
        sent = np.sum(grads["a"], 0) - np.sum(lost["a"], 0)
        np.testing.assert_allclose(REPLICAS * mean["a"][0], sent, atol=2e-5)


def test_what_is_joined_fills_a_bucket_and_what_is_larger_is_alone():
    def places(sizes, bucket_bytes):
        arrays = [jax.ShapeDtypeStruct((n,), t) for n, t in sizes]
        return Joint(arrays, bucket_bytes=bucket_bytes).places

    wide, narrow = np.float32, np.int8
    sizes = [(2, wide), (2, wide), (9, narrow), (1, wide), (0, wide), (5, wide)]
    assert places(sizes, 16) == [[0, 1], [2], [3], [5]]
    assert places(sizes, 20) == [[0, 1, 3], [2], [5]]
    assert places(sizes, 2**25) == [[0, 1, 3, 5], [2]]
