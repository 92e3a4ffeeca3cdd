"""Exchanges of workers that are sharded: each device sends of its own shards alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.comm.shards import spec_like
from tests.meshes import mesh_of
from tests.refusals import all_refused

exchange = oxs.exchange
fed = exchange.error_feedback
# Each with how far its numbers may be from those of an unsharded worker, as a share of
# the largest. `None`: another matrix, basis or chunks; then a law is what is tried.
CODES = {
    "all_reduce": (exchange.all_reduce(), 1e-6),
    "4 bits, fed back": (fed(exchange.quantized(bits=4)), 0.35),
    "16 bits": (exchange.quantized(16), 0.008),
    "8 bits": (exchange.quantized(), 0.02),
    "2 bits, rotated": (fed(exchange.rotated(exchange.quantized(2))), None),
    "top_k": (fed(exchange.top_k(8, 16)), None),
    "top_k in 2 bits": (exchange.top_k(8, 16, bits=2), None),
    "power_sgd": (fed(exchange.power_sgd(4)), None),
    "clipped to 1, 8 bits": (exchange.clipped(1.0, exchange.quantized()), 0.02),
    "radial, 8 bits": (exchange.radial(exchange.quantized()), 0.02),
}
ROBUST = {
    "median": exchange.median(),
    "trimmed_mean": exchange.trimmed_mean(0),
    "sign_majority": exchange.sign_majority(),
    "clipped": exchange.clipped("median"),
    "geometric_median": exchange.geometric_median(),
    "krum": exchange.krum(0),
    "radial": exchange.radial(),
    "penalized": exchange.penalized(groups=lambda path: path, temperature=10.0),
}
GROUPS = {"codes": CODES, "robust": {name: (x, 1e-5) for name, x in ROBUST.items()}}
MESHES = {
    "2 x 4": ((2, 4), {"rows": P("a"), "columns": P(None, "a"), "whole": P()}),
    "2 x 2 x 2": ((2, 2, 2), {"rows": P("a"), "columns": P("b", "a"), "whole": P()}),
}
SHAPES = {"rows": (64, 24), "columns": (24, 64), "whole": (16,)}


def gradients(shapes=SHAPES):
    numbers = np.random.default_rng(0)
    return {
        name: numbers.normal(size=(2, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def is_far(row):
    """Whether a collective crosses between pods, of four devices each."""
    return any(len({device // 4 for device in group}) > 1 for group in row.groups)


def started(group, grads):
    """Wrappers of all exchanges, their states, and a step in which all of them meet."""
    txs = {
        name: oxs.cross_shard(optax.sgd(1.0), "pods", exchange=x)
        for name, (x, _) in GROUPS[group].items()
    }
    one = jax.tree.map(lambda x: x[0], grads)
    states = by_hand.replicate({name: tx.init(one) for name, tx in txs.items()}, 2)

    def step(grads, states, due):
        def met(states):
            found = {name: tx.update(grads, states[name]) for name, tx in txs.items()}
            means = {name: oxs.localize(u, "pods") for name, (u, _) in found.items()}
            return means, {name: state for name, (_, state) in found.items()}

        def waits(states):
            return {name: jax.tree.map(jnp.zeros_like, grads) for name in txs}, states

        return jax.lax.cond(due, met, waits, states)  # as a round is

    return (
        txs,
        states,
        functools.partial(by_hand.map_workers, step, "pods", in_axes=(0, 0, None)),
    )


@functools.cache
def simulated(group):
    """The means without shards, of two rounds."""
    grads = gradients()
    _, states, mapped = started(group, grads)
    step = jax.jit(mapped())
    return step(grads, step(grads, states, True)[1], True)[0]


@functools.cache
def message(group, shapes):
    """Bytes that a worker of these shapes sends that is not sharded."""
    grads = gradients(dict(shapes))
    mesh = mesh_of({"pods": 2})
    _, states, mapped = started(group, grads)
    step = jax.jit(mapped(mesh=mesh))
    return sum(row.bytes for row in oxs.audit.collectives(step, grads, states, True))


@pytest.mark.parametrize(
    ("group", "which", "kind"),
    [
        ("codes", "2 x 4", "Auto"),
        ("codes", "2 x 2 x 2", "Explicit"),
        ("robust", "2 x 4", "Explicit"),
        ("robust", "2 x 2 x 2", "Auto"),
    ],
)
def test_each_device_sends_its_shards(group, which, kind):
    """The bytes of a shard's message between pods, and inside of them sums alone."""
    shape, specs = MESHES[which]
    names = ("pods", "a", "b")[: len(shape)]
    mesh = mesh_of(dict(zip(names, shape, strict=True)), kind)
    grads = gradients()
    txs, states, mapped = started(group, grads)
    one = jax.tree.map(lambda x: x[0], grads)

    def lies(x, spec):
        return jax.device_put(x, NamedSharding(mesh, P("pods", *spec)))

    grads = {name: lies(x, specs[name]) for name, x in grads.items()}
    for name, tx in txs.items():
        places = by_hand.state_specs(tx, one, specs, None)
        states[name] = jax.tree.map(lies, states[name], places)
    step = mapped(mesh=mesh, specs=specs if kind == "Auto" else None)
    compiled = jax.jit(step).lower(grads, states, True).compile()
    rows = [row for row in oxs.audit.collectives(compiled) if row.conditional]
    near = [row for row in rows if not is_far(row)]
    far = sum(row.bytes for row in rows if is_far(row))
    shards = {name: x.addressable_shards[0].data.shape[1:] for name, x in grads.items()}
    expected = message(group, tuple(shards.items()))
    assert abs(far - expected) <= 0.02 * expected
    # What is summed over the shards: norms, matrices of products, PowerSGD's factor.
    assert {row.kind for row in near} <= {"all-reduce"}
    assert max((row.bytes for row in near), default=0) <= 600
    first, states = compiled(grads, states, True)
    found = *compiled(grads, states, True), first, grads
    means, states, first, grads = jax.tree.map(np.asarray, found)
    for name, (_, error) in GROUPS[group].items():
        memory: Any = getattr(states[name], "exchange", ())
        for key, x in simulated(group)[name].items():
            if error is not None or (key == "rows" and name == "top_k in 2 bits"):
                atol = (error or 1e-5) * np.abs(x).max()
                np.testing.assert_allclose(means[name][key], x, atol=atol)
            if hasattr(memory, "error"):  # What did not arrive is owed.
                arrived = first[name][key] + means[name][key]  # minus the means
                sent = 2 * np.sum(grads[key], 0)
                owed = np.sum(memory.error[key], 0)
                np.testing.assert_allclose(sent - owed, -2 * arrived[0], atol=1e-4)


def fragments(path, leaf):
    """Layers by turns; of what is no layer, one part has it all."""
    return [0, 1, 0, 1] if leaf.ndim == 3 else 1


@pytest.mark.parametrize("period", [4, 2])
def test_workers_stay_as_they_lie(period):
    """One compilation, shards kept in all of the state, nothing inside in a round."""
    mesh = mesh_of({"pods": 2, "a": 4})
    specs = {"layers": P(None, None, "a"), "head": {"w": P(None, "a"), "b": P()}}
    shapes = {"layers": (4, 6, 32), "head": {"w": (6, 16), "b": (3,)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    bits4 = fed(exchange.quantized(bits=4))
    stream: Any = {"fragments": fragments, "overlap": True}
    stream |= {"communication_period": period, "exchange": bits4}
    tx = oxs.diloco(optax.sgd(0.1, 0.9), "pods", **stream)
    workers = oxs.Workers(2, "pods", mesh=mesh, specs=specs)

    @workers.step(state=3)
    def step(params, state, anew, x):
        mean = x.mean()
        grads = jax.tree.map(lambda p: p - mean, params)
        # Left alone, the compiler keeps what depends on no shard whole on each device.
        anew = jax.tree.map(jnp.zeros_like, anew)
        return *oxs.apply_gradients(tx, grads, state, params), anew

    now = workers.start((params, tx.init(params), params))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P(("pods", "a"))))
    rows = oxs.audit.collectives(step.lower(*now, x).compile())
    near = [row.bytes for row in rows if not is_far(row)]
    assert near == [4]  # the mean of the batch
    places = jax.tree.map(lambda x: x.sharding, now)
    state: Any = now[1]
    assert state.inner[0].trace["head"]["w"].sharding.spec == P("pods", None, "a")
    owed = jax.tree.leaves(state.exchange)
    assert sum("a" in x.sharding.spec for x in owed) == 3  # two of the layers, and w
    for _ in range(3):
        now = jax.block_until_ready(step(*now, x))
        lie = jax.tree.map(
            lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), now, places
        )
        assert all(jax.tree.leaves(lie))
    assert {one._cache_size() for one in step.programs.values()} == {1}


PODS = mesh_of({"pods": 2, "a": 4})


COLUMNS, ROWS = P(None, "a"), P("a")


@pytest.mark.parametrize(
    ("fragments", "embed", "period", "overlap"),
    [
        (4, COLUMNS, 4, True),  # no part has rows of all leaves
        (2, ROWS, 4, True),
        (oxs.rules.strided(2), ROWS, 2, True),  # 18 rows, which four cannot divide
        (oxs.rules.strided(2), ROWS, 4, False),
    ],
)
def test_a_part_travels_in_shards(fragments, embed, period, overlap):
    """However it is cut each device sends its share of codes; the numbers stay."""
    shapes = {"embed": (36, 64), "in": (4, 64, 64), "out": (4, 64, 64)}
    specs = {"embed": embed, "in": P(None, "a"), "out": P(None, None, "a")}
    numbers = np.random.default_rng(0)
    params = {
        k: jnp.asarray(numbers.normal(size=x), "float32") for k, x in shapes.items()
    }
    far = {1: lambda row: True, 4: is_far}
    places = {
        1: oxs.Workers(2, "pods", mesh=mesh_of({"pods": 2})),
        4: oxs.Workers(2, "pods", mesh=PODS, specs=specs),
    }

    def started(workers, exchange):
        stream: Any = {"fragments": fragments, "overlap": overlap}
        stream |= {"communication_period": period, "exchange": exchange}
        tx = oxs.diloco(optax.sgd(0.1), "pods", **stream)

        def step(params, state, x):
            grads = jax.tree.map(lambda p: p * x.mean(), params)
            return oxs.apply_gradients(tx, grads, state, params)

        now = workers.start((params, tx.init(params)))
        return workers.step(step, state=2), now, jnp.array([1.0, 2.0])

    sent, centers = {}, {}
    for shards, workers in places.items():
        step, now, x = started(workers, fed(exchange.quantized(bits=4)))
        rows = oxs.audit.collectives(step, *now, x)
        sent[shards] = sum(row.bytes for row in rows if far[shards](row))
        step, now, x = started(workers, exchange.trimmed_mean(0))
        for _ in range(2 * period + 1):
            now = step(*now, x)
        centers[shards] = jax.tree.map(np.asarray, workers.center(now))
    assert sent[4] <= 1.05 * sent[1] / 4
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4), *centers.values()
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_that_four_shards_cannot_divide_are_named(overlap):
    part: Any = {"communication_period": 4, "fragments": oxs.rules.strided(4)}
    bits4, params = fed(exchange.quantized(bits=4)), {"w": jnp.ones((8, 3))}
    tx = oxs.diloco(optax.sgd(0.1), "pods", overlap=overlap, exchange=bits4, **part)
    workers = oxs.Workers(2, "pods", mesh=PODS, specs={"w": ROWS})
    now = workers.start((params, tx.init(params)))
    step = workers.step(lambda p, s: oxs.apply_gradients(tx, p, s, p), state=2)
    with pytest.warns(UserWarning, match=r"of w,.*shape \(2, 3\), as 4 divides none"):
        step(*step(*now))


def mean_of(specs):
    """A mean of workers that lie so."""
    tx = oxs.cross_shard(optax.sgd(1.0), "pods", exchange=exchange.median())
    mapped = by_hand.map_workers(
        lambda x: tx.update(x, tx.init(x))[0], "pods", mesh=PODS, specs=specs
    )
    return mapped({"w": jnp.ones((2, 4))})


test_specs_that_do_not_fit = all_refused(globals())(r"""
oxs.Workers(2, "pods", mesh=PODS, specs={"w": P("pods")})
    # ValueError: 'pods' is no axis of the mesh along which
oxs.Workers(2, "pods", mesh=PODS, specs={"w": P("b")})  # ValueError: 'b' is no axis
mean_of({"w": ("a",)})  # TypeError: specs is a tree of
mean_of({"v": P("a")})
    # ValueError: array at \['w'\], of shape \(4,\), is to be sent
mean_of(P("a", None))  # ValueError: has shape .4,., and specs has
""")


@pytest.mark.parametrize(
    ("shapes", "specs"),
    [
        ([{"w": (8, 4)}, {"w": (4, 8)}], [{"w": P("a")}, {"w": P(None, "a")}]),
        (((8, 4), (4, 8)), (P("a"), P(None, "a"))),
        ({"w": (8, 4), "mu": {"w": (8, 4)}}, {"w": P("a"), "mu": {"w": P(None, "a")}}),
        ({"v": (8, 4), "w": (4, 8)}, P("a")),
        ((8, 4), P("a")),
    ],
)
def test_moments_lie_as_their_parameters_whatever_these_are_named(shapes, specs):
    """Layers in a list, a name of Adam's, one spec for all of them, a single array."""

    def is_shape(x):
        return isinstance(x, tuple) and isinstance(x[0], int)

    params = jax.tree.map(jnp.ones, shapes, is_leaf=is_shape)
    workers = oxs.Workers(2, "pods", mesh=PODS, specs=specs)
    tx = oxs.local_sgd(optax.adam(0.1), "pods")
    state: Any = workers.start((params, tx.init(params)))[1]
    wanted = jax.tree.broadcast(specs, params, is_leaf=lambda x: isinstance(x, P))
    lie = jax.tree.map(lambda x: x.sharding.spec, (state.center, state.inner[0].mu))
    assert lie == (wanted, jax.tree.map(lambda x: P("pods", *x), wanted))


def test_an_array_of_a_state_lies_as_its_parameter():
    """Or by its shape, if all parameters of that shape lie alike."""
    one = jax.ShapeDtypeStruct((8, 4), np.float32)
    alone = {("first",): (one, P("a"))}
    both = alone | {("second",): (one, P(None, "a"))}
    assert spec_like(("second",), one, both) == P(None, "a")
    assert spec_like(None, one, both) == P()
    assert spec_like(None, one, alone) == P("a")
