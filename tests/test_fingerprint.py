"""`oxs.fingerprint`: any bit that flipped in any replica is found and named."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync.workers import fingerprints
from tests import contexts
from tests.exchange.meeting import mapped
from tests.meshes import mesh_of
from tests.refusals import all_refused

AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
CASES = 1000
# Sizes in bytes that divide nothing, kinds of all widths, and nothing at all.
TREE: Any = {
    "bfloat16": np.linspace(-3, 3, 7).astype(ml_dtypes.bfloat16),
    "bool": np.array([True, False, True]),
    "complex": np.linspace(-1, 1, 3).astype(np.complex64),
    "empty": np.zeros((0, 3), np.float32),
    "float8": np.linspace(-1, 1, 5).astype(ml_dtypes.float8_e4m3fn),
    "int8": np.arange(-2, 3, dtype=np.int8),
    "matrix": np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3),
    "nan": np.array([np.nan, -0.0, np.inf], np.float16),
    "scalar": np.float32(0.5),
    "uint32": np.arange(6, dtype=np.uint32).reshape(1, 2, 3),
}


def compare(tree):
    return oxs.fingerprint(tree, AXIS)


def flip(leaf, replica, bit):
    """The stacked leaf with one bit of one replica flipped."""
    shape, dtype = leaf.shape, leaf.dtype
    octets = np.frombuffer(np.ascontiguousarray(leaf).tobytes(), np.uint8)
    octets = octets.reshape(shape[0], -1).copy()
    octets[replica, bit // 8] ^= np.uint8(1 << bit % 8)
    return np.frombuffer(octets.tobytes(), dtype).reshape(shape)


def flipped(tree, replica, bit):
    """Paths of a tree's stacked leaves, and the tree with that bit flipped there."""
    leaves, treedef = jax.tree.flatten(tree)
    for place, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if x.shape[:1] == (REPLICAS,):  # Others are equal by their type.
            wrong = flip(np.asarray(x), replica, bit)
            wrong = jax.device_put(wrong, getattr(x, "sharding", None))
            every = [*leaves[:place], wrong, *leaves[place + 1 :]]
            yield jax.tree_util.keystr(path), treedef.unflatten(every)


def stacked(tree=None):
    tree = TREE if tree is None else tree
    return jax.tree.map(lambda x: np.stack([x] * REPLICAS), tree)


@functools.cache
def drawn():
    """1,000 cases: (replica, leaf, the stacked leaf with one bit flipped)."""
    rng = np.random.default_rng(0)
    whole, cases = stacked(), []
    names = [name for name in TREE if TREE[name].size]
    for _ in range(CASES):
        name, replica = str(rng.choice(names)), int(rng.integers(REPLICAS))
        bits = 8 * TREE[name].nbytes
        # A bool has one bit that it may differ in.
        bit = int(rng.integers(bits))
        bit = bit - bit % 8 if name == "bool" else bit
        cases.append((replica, name, flip(whole[name], replica, bit)))
    return cases


def test_1000_drawn_bits_are_found_and_named():
    whole, cases = stacked(), drawn()
    many = {
        name: np.stack([new if own == name else leaf for _, own, new in cases])
        for name, leaf in whole.items()
    }
    each = jax.vmap(compare, axis_name=AXIS)
    found = jax.jit(jax.vmap(lambda tree: jax.tree.map(lambda x: x[0], each(tree))))(
        many
    )
    replicas = np.array([replica for replica, _, _ in cases])
    leaves = np.array([list(TREE).index(name) for _, name, _ in cases])
    expected = np.full((CASES, REPLICAS), -1)
    expected[np.arange(CASES), replicas] = leaves
    assert np.array_equal(found.leaf, expected)
    assert np.array_equal(found.differs, expected >= 0)


@pytest.mark.parametrize(
    "context", ["vmap", "shard_map", "shard_map_unchecked", "pmap"]
)
def test_all_contexts_and_no_false_alarm(context):
    whole, run = stacked(), mapped(context, compare, REPLICAS, AXIS)
    found = run(whole)
    assert found.where(TREE) == {}
    assert not np.any(found.differs)
    # The words are those of the formula, and the same everywhere.
    words = np.asarray(found.words)
    assert np.array_equal(words, np.broadcast_to(formula(TREE), words.shape))
    replica, name, leaf = drawn()[0]
    wrong = run({**whole, name: leaf})
    assert wrong.where(TREE) == {replica: f"['{name}']"}


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_numbers_that_are_in_no_state(context):
    """Of a replica whose program has another learning rate, or another list of them."""

    def compared(given):
        tree, rate, betas = given
        return oxs.fingerprint(tree, AXIS, also={"rate": rate, "betas": betas, "k": 3})

    run = mapped(context, compared, REPLICAS, AXIS)
    rates = np.full(REPLICAS, 0.1, np.float32)
    betas = np.tile(np.array([0.9, 0.99], np.float32), (REPLICAS, 1))
    also = {"rate": 0.1, "betas": np.array([0.9, 0.99]), "k": 3}
    found = run((stacked(), rates, betas))
    assert found.where(TREE, also) == {}
    rates[2], betas[1, 0] = 0.2, 0.8
    found = run((stacked(), rates, betas))
    assert found.where(TREE, also) == {1: "also['betas']", 2: "also['rate']"}
    replica, name, leaf = drawn()[0]
    found = run(
        ({**stacked(), name: leaf}, rates[::-1] * 0 + 0.1, betas[:1] + 0 * betas)
    )
    assert found.where(TREE, also) == {replica: f"['{name}']"}


test_refused = all_refused(globals())(r"""
oxs.fingerprint(TREE, None, also={"rate": optax.constant_schedule(0.1)})
    # TypeError: also\['rate'\] is a function.*Pass its number now
oxs.fingerprint(TREE, None, also=0.1)  # TypeError: also must be a dict.*got 0.1
oxs.fingerprint(TREE, None, also={"name": "adam"})
    # TypeError: also\['name'\] must be a number or an array of numbers; got 'adam'
oxs.Workers(2, AXIS).fingerprint({"w": np.ones(2)}, also={1: 0.1})
    # TypeError: also must be a dict
oxs.elastic.Group("unused", oxs.Workers(2, AXIS), also=[0.1])  # TypeError: also must be
""")


def formula(tree):
    words = []
    for x in jax.tree.leaves(tree):
        kind = {1: np.uint8, 2: np.uint16}.get(x.itemsize, np.uint32)
        w = np.frombuffer(np.ascontiguousarray(x).tobytes(), kind).astype(object)
        k = np.arange(w.size).astype(object)
        one = sum(w * (2 * k + 1)) % 2**32
        two = sum((w ^ 0x9E3779B9) * (4 * k + 3)) % 2**32
        words.append((one, two))
    return np.array(words, np.uint32)


def test_copies_that_jax_takes_for_one_array():
    """A device's memory is at fault: the array is still replicated to JAX."""
    mesh = contexts.mesh()
    where = NamedSharding(mesh, P())
    x = np.arange(6, dtype=np.float32)
    copies = [x, x, np.where(x == 3, np.float32(7), x), x]
    array = jax.make_array_from_single_device_arrays(
        x.shape,
        where,
        [jax.device_put(c, d) for c, d in zip(copies, mesh.devices.flat, strict=True)],
    )
    tree = {"a": jax.device_put(jnp.ones(3), where), "w": array}
    checked = jax.jit(
        jax.shard_map(
            lambda tree: compare(tree)[1:], mesh=mesh, in_specs=P(), out_specs=P()
        )
    )
    differs, leaf = checked(tree)
    assert leaf.tolist() == [-1, -1, 1, -1] and differs.tolist() == [0, 0, 1, 0]


# Both words of 2 are larger than those of 0: the middle alone would take it for right.
MAJORITIES = {
    (0, 2): [0, 0],
    (0, 2, 0): [-1, 0, -1],
    (1, 2, 3, 4): [0, 0, 0, 0],
    (0, 2, 0, 2): [0, 0, 0, 0],
    (2, 2, 0, 0, 0): [0, 0, -1, -1, -1],
}


def test_a_majority_is_more_than_half():
    @jax.jit
    def leaf(cases):
        return [jax.vmap(compare, axis_name=AXIS)(x).leaf[0] for x in cases]

    found = leaf([jnp.array(values, jnp.uint32) for values in MAJORITIES])
    assert [x.tolist() for x in found] == list(MAJORITIES.values())


def test_of_states_what_is_a_replicas_own_is_left_out():
    params = {"w": jnp.arange(4.0)}
    center = oxs.diloco(optax.adam(0.1), AXIS)
    pieces = oxs.cross_shard(optax.adam(0.1), AXIS, shard_state=True)
    plain = oxs.cross_shard(optax.adam(0.1), AXIS)
    states = {"center": center, "pieces": pieces, "plain": plain}
    whole = {name: stacked(tx.init(params)) for name, tx in states.items()}
    run = jax.jit(jax.vmap(compare, axis_name=AXIS))
    paths, seen = [], set()
    for path, wrong in flipped(whole, 1, 0):
        found = run(wrong).where(whole)
        assert found in ({}, {1: path})
        paths.append(path)
        seen |= set(found.values())
    # Of a center rule each worker's own, and the arrays that lie in pieces.
    for path in paths:
        center, pieces = "'center'" in path, "'pieces'" in path
        own = center and (".inner" in path or ".info" in path)
        own = own or (pieces and not path.endswith("count"))
        assert (path not in seen) == own, path
    assert any(".center" in path for path in seen)


ADAM = optax.adam(0.1)
WRAPPED: Any = {
    "replicas": oxs.cross_shard(ADAM, AXIS, measure=True),
    "center": oxs.diloco(ADAM, AXIS),
    "pods": oxs.diloco(oxs.cross_shard(ADAM, "chips", measure=True), AXIS),
    "gossip": oxs.gossip(ADAM, AXIS),
    "plain": oxs.cross_shard(ADAM, AXIS),
    "chain": optax.chain(optax.trace(0.9), oxs.all_reduce_grads(AXIS), ADAM),
    "steps": optax.MultiSteps(oxs.cross_shard(ADAM, AXIS), 2).gradient_transformation(),
    "pieces": oxs.cross_shard(ADAM, AXIS, shard_state=True),
}
ADAMS = ("count", "mu['w']", "nu['w']")


def workers_of(where):
    if where == "sharded":
        mesh = mesh_of({AXIS: REPLICAS, "fsdp": 2})
        return oxs.Workers(REPLICAS, AXIS, mesh=mesh, specs={"w": jax.P("fsdp")})
    return oxs.Workers(
        REPLICAS, AXIS, mesh=contexts.mesh() if where == "mesh" else None
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *itertools.product(["replicas", "center", "gossip"], ["simulated", "mesh"]),
        *itertools.product(["plain", "chain", "steps", "pieces"], ["simulated"]),
        ("replicas", "sharded"),
    ],
)
def test_workers_are_compared_in_what_is_to_be_equal(name, where):
    workers = workers_of(where)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    state = workers.start((params, WRAPPED[name].init(params)))
    if where == "sharded":
        assert state[0]["w"].sharding.spec == jax.P(AXIS, "fsdp")
    assert workers.fingerprint(state) == {}
    named = set()
    for path, wrong in flipped(state, 2, 5):
        found = workers.fingerprint(wrong)
        assert found in ({}, {2: path}), path
        named |= set(found.values())
    measured = "agreement contribution_norm update_norm contributors noise signal"
    # Each worker's own: of a center rule and of gossip all that is stacked; what stands
    # before the mean in a chain, or waits for it.
    expected = {
        "replicas": {f"[1].info.measured.{x}" for x in measured.split()}
        | {f"[1].inner[0].{x}" for x in ADAMS},
        "plain": {f"[1][0].{x}" for x in ADAMS},
        "chain": {f"[1][2][0].{x}" for x in ADAMS},
        "steps": {"[1].mini_step", "[1].gradient_step"}
        | {f"[1].inner_opt_state[0].{x}" for x in ADAMS},
        "pieces": set(),
    }
    if name in expected:
        assert named == expected[name] | {"[0]['w']"}
    else:
        assert not named


def test_a_center_that_one_device_holds_otherwise_and_replicas_of_pods():
    workers = oxs.Workers((2, REPLICAS), (AXIS, "chips"), mesh=True)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    params, state = workers.start((params, WRAPPED["pods"].init(params)))
    assert workers.fingerprint((params, state)) == {}
    wrong = params | {"w": params["w"].at[1, 2, 0, 0].set(7)}
    assert workers.fingerprint((wrong, state)) == {(1, 2): "[0]['w']"}
    plain = oxs.diloco(oxs.cross_shard(ADAM, "chips"), AXIS)
    one = {"w": jnp.arange(6.0).reshape(2, 3)}
    params, state = workers.start((one, plain.init(one)))
    moments = state.inner[0]
    moments = moments._replace(count=moments.count.at[1, 2].add(1))
    wrong = state._replace(inner=(moments, state.inner[1]))
    assert workers.fingerprint((params, wrong)) == {(1, 2): "[1].inner[0].count"}
    workers = oxs.Workers(REPLICAS, AXIS, mesh=contexts.mesh())
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    params, state = workers.start((params, WRAPPED["center"].init(params)))
    center = state.center["w"]
    copies = [
        jax.device_put(np.asarray(center) + (place == 3), x.data.sharding)
        for place, x in enumerate(center.addressable_shards)
    ]
    wrong = jax.make_array_from_single_device_arrays(
        center.shape, center.sharding, copies
    )
    state = state._replace(center={"w": wrong})
    assert workers.fingerprint((params, state)) == {3: "[1].center['w']"}


def test_statistics_of_an_nnx_model_are_each_replicas_own():
    with jax.numpy_dtype_promotion("standard"):
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        workers = oxs.Workers(REPLICAS, AXIS)
        optimizer = nnx.Optimizer(model, WRAPPED["plain"], wrt=nnx.Param)
        state = model, optimizer = workers.start((model, optimizer))
    model.mean[...] = model.mean[...].at[2].add(1)
    assert workers.fingerprint(state) == {}
    model.scale[...] = model.scale[...].at[2].add(1)
    assert workers.fingerprint(state) == {2: "[0].scale"}


@pytest.mark.parametrize("small", (0, 2**16))
def test_what_is_saved_has_the_words_of_its_replica_however_it_is_split(
    small, monkeypatch
):
    monkeypatch.setattr(fingerprints, "_SMALL", small)
    square = jax.random.normal(jax.random.key(0), (8, 4))
    mesh = mesh_of({"a": 4, "b": 2})
    places = {name: NamedSharding(mesh, P(*name)) for name in ("", "a", "ab", "ba")}
    tree = {
        **TREE,
        **{f"split {k}": jax.device_put(square, x) for k, x in places.items()},
        "keys": jax.random.split(jax.random.key(0), 3),
    }
    words = fingerprints.sealed({}, fingerprints.by_name(tree))["fingerprints"]
    expected = oxs.fingerprint(tree, None).words.tolist()
    assert [two for _, _, _, *two in words] == expected
    wide = {("wide",): np.arange(3) * 2.0**-40 + 1}  # more than JAX keeps of it
    sealed = fingerprints.sealed({"notes": {1: np.int64(2)}}, wide)
    assert fingerprints.unsealed("", sealed)[0] == {"notes": {"1": 2}}
    wide["wide",][1] += 2.0**-50
    with pytest.raises(fingerprints.Damaged, match="another wide than"):
        fingerprints.compare("", fingerprints.unsealed("", sealed)[1], wide)


def test_one_pass_over_the_data():
    """Bytes that the compiled program reads, over those of the tree."""
    tree = {
        "f": jnp.ones((512, 300)),
        "h": jnp.ones((300, 100), jnp.bfloat16),
        "i": jnp.ones((1000,), jnp.int8),
    }
    size = sum(x.nbytes for x in jax.tree.leaves(tree))
    compiled: Any = (
        jax.jit(lambda tree: oxs.fingerprint(tree, None).words)
        .lower(tree)
        .compile(compiler_options=contexts.AS_USERS_COMPILE)
    )
    assert compiled.cost_analysis()["bytes accessed"] < 1.001 * size
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * size
