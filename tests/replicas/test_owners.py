"""`cross_shard(..., shard_state="leaves")`: whole leaves on owners, numbers of all."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from benchmarks import by_hand
from tests import contexts
from tests.refusals import all_refused

cross_shard: Any = oxs.cross_shard
AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
RNG = np.random.default_rng(0)


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# Five alike and one alone: neither divides by four. What is no matrix is Adam's.
PARAMS: Any = {
    "alone": drawn(3, 8),
    "bias": drawn(5),
    "blocks": [drawn(6, 4) for _ in range(5)],
    "empty": drawn(0),
    "half": drawn(6, 4).astype(jnp.bfloat16),
    "scalar": drawn(),
}
STEPS = 3


@pytest.fixture(autouse=True)
def promotion():
    """Muon's own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield


GRADS = jax.tree.map(lambda x: drawn(STEPS, REPLICAS, *x.shape), PARAMS)
GRADS["half"] = RNG.integers(-4, 5, GRADS["half"].shape).astype(jnp.bfloat16)


def inner():
    return optax.contrib.muon(0.1, ns_steps=2, weight_decay=0.01)


@functools.cache
def transformation():
    return cross_shard(inner(), AXIS, shard_state="leaves")


@functools.cache
def started():
    """The state of all, [N, ...] where it lies on owners, and its axes."""
    tx = transformation()
    axes = oxs.by_hand.state_axes(tx, PARAMS, replicated=True)
    return oxs.by_hand.replicate(tx.init(PARAMS), REPLICAS, axes), axes


def body(params, state, grads):
    tx = transformation()

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), grads)[0]


@functools.cache
def whole():
    """Of `inner` on the mean, of half precision in float32, as owners compute."""
    tx = inner()
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), PARAMS)

    @jax.jit
    def run(params, state, grads):
        def step(carry, grads):
            params, state = carry
            now = jax.tree.map(lambda x: x.mean(0), grads)
            updates, state = tx.update(now, state, params)
            params: Any = optax.apply_updates(params, updates)
            half = params["half"].astype(jnp.bfloat16).astype(jnp.float32)
            return ({**params, "half": half}, state), None

        return jax.lax.scan(step, (params, state), grads)[0][0]

    grads = jax.tree.map(lambda x: np.asarray(x, np.float32), GRADS)
    return run(wide, jax.jit(tx.init)(wide), grads)


def momentum(state):
    return state.inner_states["muon"].inner_state[0].mu["blocks"][0]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_the_numbers_are_those_of_muon_on_the_mean(on_mesh):
    state, axes = started()
    over, out = (contexts.mesh(), (None, axes)) if on_mesh else (None, (0, axes))
    ways = {"in_axes": (None, axes, 0), "out_axes": out}
    run = oxs.by_hand.map_workers(body, AXIS, mesh=over, **ways)
    grads = jax.tree.map(lambda x: x.swapaxes(0, 1), GRADS)
    params, state = jax.jit(run)(PARAMS, state, grads)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(whole()),
        strict=True,
    ):
        tolerance = 2e-2 if "half" in str(path) else 1e-6
        ours = np.asarray(ours, np.float32)
        theirs = np.broadcast_to(theirs, ours.shape)
        np.testing.assert_allclose(ours, theirs, 0, tolerance, err_msg=str(path))
    owned = state.own.tree.leaves["['blocks'][0]"]
    assert momentum(owned).shape == (REPLICAS, 2, 6, 4)


def test_one_scatter_one_gather_and_memory():
    state, axes = started()
    tx = transformation()

    def update(grads, state):
        return tx.update(grads, state, PARAMS)

    ways = {"in_axes": (0, axes), "out_axes": (None, axes)}
    step = oxs.by_hand.map_workers(update, AXIS, mesh=contexts.mesh(), **ways)
    grads = jax.tree.map(lambda x: x[0], GRADS)
    compiled = jax.jit(step, donate_argnums=1).lower(grads, state).compile()
    text: Any = compiled.as_text()
    # None in a loop, of Newton and Schulz or another: all stand in the entry.
    names = "reduce-scatter(", "all-gather(", "all-reduce(", "all-to-all("
    entry = text[text.index("ENTRY") :]
    assert [text.count(name) for name in names] == [entry.count(n) for n in names]
    rows = oxs.audit.collectives(compiled)
    kinds = [row.kind for row in rows]
    # One for each dtype of all groups together.
    assert kinds.count("reduce-scatter") == 1
    assert 1 <= kinds.count("all-gather") <= 2
    assert set(kinds) == {"reduce-scatter", "all-gather"}
    gradients = sum(x.nbytes // REPLICAS for x in jax.tree.leaves(grads))
    held = by_hand.memory(compiled).arguments - gradients
    sizes = [x.nbytes // REPLICAS if x.ndim else 4 for x in jax.tree.leaves(state.own)]
    assert held <= sum(sizes) + 256  # numbers that are for all


def test_another_number_of_replicas():
    """The state of four cut for three and again for four has the same rows."""
    workers, tx = oxs.Workers(REPLICAS, AXIS), transformation()
    params, state = workers.start((PARAMS, tx.init(PARAMS)))
    numbered = jax.tree.map(
        lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape), state.own
    )
    back = params, state._replace(own=numbered)
    for n in (3, REPLICAS):
        back = workers.resize(back, n)
        mu = momentum(back[1].own.tree.leaves["['blocks'][0]"])
        assert mu.shape == (n, 2, 6, 4)
        assert np.array_equal(np.ravel(mu)[: 5 * 24], np.arange(5 * 24))
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), back[1], state)
    two = oxs.by_hand.first(*started())
    with pytest.raises(ValueError, match="for one of 2 replicas"):
        jax.vmap(lambda g: tx.update(g, two, PARAMS), axis_name=AXIS)(
            jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS)
        )


def test_a_partition_of_whole_matrices_and_numbers():
    """Muon for some, Adam for the rest; groups of fewer matrices than replicas."""

    def dimensions(params):
        return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(), params)

    muon = optax.contrib.scale_by_muon(ns_steps=1, weight_dimension_numbers=dimensions)
    whole = optax.chain(muon, optax.scale(-0.1))
    rules: Any = {"whole": whole, "numbers": optax.adam(0.1)}
    params: Any = {name: PARAMS[name] for name in ("alone", "bias")}
    params["blocks"] = PARAMS["blocks"][:2]
    labels = {"alone": "whole", "bias": "numbers", "blocks": ["whole", "whole"]}
    inner = optax.partition(rules, labels)
    tx = cross_shard(inner, AXIS, shard_state="leaves")
    state, axes = tx.init(params), oxs.by_hand.state_axes(tx, params, replicated=True)
    assert set(state.own.tree.leaves) == {"['alone']", "['blocks'][0]"}
    grads = jax.tree.map(lambda x: drawn(REPLICAS, *x.shape), params)

    @jax.jit
    def both(grads, stacked):
        mean = jax.tree.map(lambda x: x.mean(0), grads)
        ours = jax.vmap(
            lambda grads, state: tx.update(grads, state, params)[0],
            in_axes=(0, axes),
            axis_name=AXIS,
        )(grads, stacked)
        return ours, inner.update(mean, inner.init(params), params)[0]

    ours, theirs = both(grads, oxs.by_hand.replicate(state, REPLICAS, axes))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, np.broadcast_to(other, one.shape), atol=1e-6)


def owned(inner):
    tx = cross_shard(inner, AXIS, shard_state="leaves")
    return tx.init({"a": jnp.ones((2, 3)), "b": jnp.ones(4)})


def by_number():
    """It divides by how many leaves there are."""
    return optax.stateless(
        lambda g, p: optax.tree.scale(1 / len(jax.tree.leaves(g)), g)
    )


test_what_mixes_leaves_is_refused = all_refused(globals())(r"""
owned(optax.chain(optax.clip_by_global_norm(1.0), inner()))
owned(optax.normalize_by_update_norm())
owned(optax.contrib.dog())
owned(optax.contrib.prodigy())
owned(optax.contrib.dadapt_adamw())
owned(optax.apply_if_finite(inner(), 3))
    # ValueError: each leaf alone.* of \['a'\] reads all of the gradient of \['b'\]
owned(by_number())  # ValueError: its program for one leaf is another one
""")


def test_leaves_that_differ_by_name_alone_are_no_group():
    """A mask of which the state says nothing: weight decay of one of two."""
    mask = {"a": True, "b": False}
    tx = cross_shard(
        optax.contrib.muon(0.1, weight_decay=0.5, weight_decay_mask=mask),
        AXIS,
        shard_state="leaves",
    )
    state = tx.init({"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))})
    assert set(state.own.tree.leaves) == {"['a']", "['b']"}


def by_name(transformation):
    """The transformation of each of two leaves."""
    rules: Any = {name: transformation(name) for name in "ab"}
    return optax.multi_transform(rules, lambda tree: {name: name for name in tree})


class Factor(NamedTuple):
    by: dict[str, Any]


def from_the_state():
    """It scales by what `init` knows of a leaf's name."""
    factors = {"a": 1.0, "b": 0.5}

    def init(params):
        of = jax.tree_util.tree_map_with_path(
            lambda path, _: jnp.float32(factors[path[0].key]), params
        )
        return Factor(of)

    def update(updates, state, params=None):
        return jax.tree.map(jnp.multiply, updates, state.by), state

    return optax.GradientTransformation(init, update)


# Of an array in a program only its shape is shown.
WIDTHS = {"a": jnp.float32(1), "b": jnp.float32(10_000)}
SCALED: Any = {
    "array": lambda: by_name(lambda name: optax.scale(1 / jnp.sqrt(WIDTHS[name]))),
    "array in jit": lambda: by_name(
        lambda name: optax.stateless_with_tree_map(
            lambda x, _: jax.jit(lambda x: x / WIDTHS[name])(x)
        )
    ),
    "state": from_the_state,
}


@pytest.mark.parametrize(
    "name, wrapper",
    [
        *[(name, "owners") for name in (*SCALED, "own scalars")],
        ("array", "stacked"),
        ("own scalars", "stacked"),
    ],
)
def test_leaves_are_alike_only_if_their_constants_are(name, wrapper):
    """And scalars that `inner` keeps for each leaf are that leaf's own."""
    params = {"a": drawn(3, 2), "b": drawn(3, 2)}
    grads = [{"a": drawn(3, 2), "b": drawn(3, 2)} for _ in range(2)]
    inner = optax.novograd(0.1)
    if name in SCALED:
        inner = optax.chain(optax.scale_by_trust_ratio(), SCALED[name]())

    def run(tx):
        state, every = tx.init(params), []
        for own in grads:
            updates, state = tx.update(own, state, params)
            every.append(updates)
        return every

    if wrapper == "stacked":
        with jax.set_mesh(jax.make_mesh((2,), ("fsdp",))):
            ours = jax.jit(lambda: run(oxs.stacked(inner, jax.P("fsdp"))))()
    else:
        tx = cross_shard(inner, AXIS, shard_state="leaves")
        ours = jax.vmap(lambda _: run(tx), axis_name=AXIS)(jnp.arange(3))
    for one, two in zip(*map(jax.tree.leaves, (ours, run(inner))), strict=True):
        two = np.broadcast_to(two, one.shape)
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_scalars_of_each_leaf_go_on_with_another_number_of_replicas():
    params = {"blocks": [drawn(3, 2) for _ in range(5)]}
    tx = cross_shard(optax.novograd(0.1), AXIS, shard_state="leaves")
    axes = oxs.by_hand.state_axes(tx, params, replicated=True)
    state = oxs.by_hand.replicate(tx.init(params), 4, axes)
    [group] = state.own.tree.leaves.values()
    assert group[0].nu["blocks"][0].shape == (4, 2)
    numbered = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state
    )
    _, three = oxs.by_hand.resize(tx, params, numbered, 3, replicated=True)
    [group] = three.own.tree.leaves.values()
    nu = np.ravel(group[0].nu["blocks"][0])
    assert nu.tolist()[:5] == [0, 1, 2, 3, 4] and nu.shape == (6,)
