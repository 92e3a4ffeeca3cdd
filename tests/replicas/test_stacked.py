"""`oxs.stacked`: whole matrices per device under plain `jax.jit`."""

import functools
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optx_sync as oxs
from tests.meshes import mesh_of
from tests.refusals import all_refused

RNG = np.random.default_rng(0)
STEPS = 3


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# Six alike, which four and eight devices do not divide; what is no matrix is Adam's.
PARAMS: Any = {
    "bias": drawn(5),
    "blocks": [drawn(8, 6) for _ in range(6)],
    "scalar": drawn(),
    "wide": [drawn(4, 16) for _ in range(8)],
}
GRADS = jax.tree.map(lambda x: drawn(STEPS, *x.shape), PARAMS)
# Explicit axes tell the compiler the same: one of them is enough of two.
CASES = {
    "auto": ("Auto", "fsdp"),
    "auto, replicas too": ("Auto", ("data", "fsdp")),
    "explicit, replicas too": ("Explicit", ("data", "fsdp")),
}


@pytest.fixture(autouse=True)
def promotion():
    """Muon's own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def muon():
    return optax.contrib.muon(0.1, ns_steps=2, weight_decay=0.01)


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def whole():
    params, tx = PARAMS, muon()
    state, step = tx.init(params), jax.jit(step_of(tx))
    for k in range(STEPS):
        params, state = step(params, state, jax.tree.map(lambda x, k=k: x[k], GRADS))
    return params


def on(mesh, tree):
    """Matrices cut along their rows, the rest on all devices."""

    def place(x):
        spec = jax.P("fsdp") if np.ndim(x) == 2 else jax.P()
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def sent(program):
    """The collectives of a program and the axes' devices, in order."""
    return re.findall(
        r"= .* (all-[a-z-]+|reduce-scatter|collective-permute)\(", program
    )


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_whole_arrays_and_one_reshard_each_way(case):
    kind, axes = CASES[case]
    mesh = mesh_of({"data": 2, "fsdp": 4}, kind)
    tx = oxs.stacked(muon(), jax.P(axes))
    with jax.set_mesh(mesh):
        params = on(mesh, PARAMS)
        state = jax.jit(tx.init)(params)
        grads = [
            on(mesh, jax.tree.map(lambda x, k=k: x[k], GRADS)) for k in range(STEPS)
        ]
        step = jax.jit(step_of(tx)).lower(params, state, grads[0]).compile()
        places = jax.tree.map(lambda x: x.sharding, (params, state))
        for own in grads:
            params, state = step(params, state, own)
    for one, two in zip(*map(jax.tree.leaves, (params, whole())), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
    # What comes back lies where it lay, so that the step is compiled once.
    pairs = zip(*map(jax.tree.leaves, (places, (params, state))), strict=True)
    assert all(place.is_equivalent_to(x.sharding, x.ndim) for place, x in pairs)
    # Whole matrices where they are owned, as many on each device.
    momentum = [x for x in jax.tree.leaves(state.stacks) if x.ndim == 3]
    shards = 4 if axes == "fsdp" else 8
    assert sorted(x.shape for x in momentum) == [(8, 4, 16), (8, 8, 6)]
    for x in momentum:
        assert x.addressable_shards[0].data.shape == (8 // shards, *x.shape[1:])
    # Of each group one reshard in for parameters and gradients, and one out; over an
    # axis along which parameters are replicated a gather of the updates.
    found = sent(step.as_text())
    gathers = 0 if axes == "fsdp" else 2
    assert found.count("all-gather") == gathers, found
    assert found.count("all-to-all") == len(found) - gathers == 6, found


def test_pods_that_share_out_their_matrices():
    """Muon inside of DiLoCo, the matrices of a pod on their owners: MuLoCo."""
    mesh = mesh_of({"pods": 2, "fsdp": 4})
    start = {"bias": PARAMS["bias"], "blocks": PARAMS["blocks"]}
    specs = {"bias": jax.P(), "blocks": jax.P("fsdp")}
    numbers = RNG.normal(size=(4, 4)).astype(np.float32)

    def trained(inner, **where):
        tx = oxs.diloco(inner, "pods", communication_period=2)
        workers = oxs.Workers(2, "pods", **where)

        def loss(params, batch):
            blocks = sum(jnp.sum((w * batch.mean() - 1) ** 2) for w in params["blocks"])
            return blocks + jnp.sum(params["bias"] ** 2)

        @workers.step(state=2)
        def step(params, state, batch):
            grads = jax.grad(loss)(params, batch)
            return oxs.apply_gradients(tx, grads, state, params)

        params, state = workers.start((start, tx.init(start)))
        for batch in numbers:
            params, state = step(params, state, batch)
        return params, state

    expected, _ = trained(muon())
    with jax.set_mesh(mesh):
        owned = oxs.stacked(muon(), jax.P("fsdp"))
        params, state = trained(owned, mesh=mesh, specs=specs)
        tx = oxs.diloco(owned, "pods", communication_period=2)
        asked = oxs.by_hand.state_specs(tx, start, specs, "pods").inner.stacks
    for one, two in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    assert params["blocks"][0].sharding.spec == jax.P("pods", "fsdp")
    for x, spec in zip(*map(jax.tree.leaves, (state.inner.stacks, asked)), strict=True):
        assert x.sharding.spec == spec == jax.P(*["pods", "fsdp"][: x.ndim])


def shampoo(rate):
    """For each matrix two that are accumulated, and how many gradients it has seen."""

    def init(params):
        def of(x):
            if x.ndim < 2:
                return None
            both = (jnp.eye(n) * 1e-3 for n in x.shape)
            return (*both, jnp.zeros((), x.dtype))

        return jax.tree.map(of, params)

    def update(updates, state, params=None):
        def one(g, own):
            if own is None:
                return -rate * g, None
            left, right, seen = own
            left, right, seen = left + g @ g.T, right + g.T @ g, seen + jnp.mean(g * g)
            roots = []
            for x in (left, right):
                values, vectors = jnp.linalg.eigh(x)
                roots.append((vectors * values[None] ** -0.25) @ vectors.T)
            return -rate * roots[0] @ g @ roots[1] / (1 + seen), (left, right, seen)

        leaves, treedef = jax.tree.flatten(updates)
        pairs = zip(leaves, treedef.flatten_up_to(state), strict=True)
        new, now = zip(*(one(g, own) for g, own in pairs), strict=True)
        return treedef.unflatten(new), treedef.unflatten(now)

    return optax.GradientTransformation(init, update)


def in_memory(state, start):
    """What was computed elsewhere, on the host."""
    return jax.tree.map(np.asarray, state)


def from_orbax(state, start):
    """Its own way to read arrays of other shapes."""
    with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
        )
        return manager.restore(1, args=ocp.args.StandardRestore(like, strict=False))


# Of six alike four and eight devices hold eight rows, and two hold six.
TWO, FOUR_TOO, EIGHT_TOO = {"fsdp": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 4}
GOES_ON: Any = {
    "as many rows": (in_memory, muon(), FOUR_TOO, EIGHT_TOO, "Explicit"),
    "fewer rows": (in_memory, shampoo(0.1), EIGHT_TOO, TWO, "Auto"),
    "more rows": (in_memory, shampoo(0.1), TWO, EIGHT_TOO, "Explicit"),
    "Orbax, fewer rows": (from_orbax, muon(), EIGHT_TOO, TWO, "Explicit"),
    "Orbax, more rows": (from_orbax, muon(), TWO, EIGHT_TOO, "Auto"),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_goes_on_on_other_devices_and_axes(case):
    """As whole arrays do that stay where they are."""
    how, tx, before, after, kind = GOES_ON[case]
    first = {"blocks": PARAMS["blocks"], "bias": PARAMS["bias"]}
    expected, state = first, tx.init(first)
    whole = jax.jit(step_of(tx))
    found: Any = None
    for k, sizes in enumerate((before, after, after)):
        grads = {name: jax.tree.map(lambda x, k=k: x[k], GRADS[name]) for name in first}
        expected, state = whole(expected, state, grads)
        mesh, stacked = mesh_of(sizes, kind), oxs.stacked(tx, jax.P(tuple(sizes)))
        with jax.set_mesh(mesh):
            params = on(mesh, first)
            start = params, jax.jit(stacked.init)(params)
            given: Any = found or start
            if k == 1:
                params, own = how(found, start)
                given = on(mesh, params), own
            found = jax.jit(step_of(stacked))(*given, on(mesh, grads))
        # After one step it lies as one that began on so many devices.
        assert jax.tree.structure(found) == jax.tree.structure(start)
        for x, y in zip(*map(jax.tree.leaves, (found, start)), strict=True):
            assert x.shape == y.shape and np.isfinite(x).all()  # padding, too
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    for one, two in zip(*map(jax.tree.leaves, (found[0], expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


BOTH = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
MESH, MUON, P = mesh_of({"data": 2, "fsdp": 4}), muon(), jax.P
FOUR, EIGHT = (
    oxs.stacked(MUON, jax.NamedSharding(MESH, P(x))) for x in ("fsdp", ("data", "fsdp"))
)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), MUON)


test_refused = all_refused(globals())(r"""
oxs.stacked(MUON, P("fsdp")).init(PARAMS)
    # ValueError: over \['fsdp'\].*jax.set_mesh
oxs.stacked(MUON, P())
oxs.stacked(MUON, P(None, "fsdp"))
oxs.stacked(MUON, P("fsdp", "data"))
    # ValueError: in its first place and no other
oxs.stacked(MUON, "fsdp")  # TypeError: spec must be a jax.P.*got 'fsdp'
EIGHT.update(BOTH, FOUR.init({"a": BOTH["a"]}), BOTH)
    # ValueError: at \['a'\] is of 1 leaves that are alike, and these parameters have 2
oxs.stacked(CLIPPED, jax.NamedSharding(MESH, P("fsdp"))).init(BOTH)
    # ValueError: reads all of the gradient of \['b'\].*oxs.stacked\(inner
""")
