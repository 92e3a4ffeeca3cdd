"""`oxs.stacked`: whole matrices per device under plain `jax.jit`."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
EIGHT.update(BOTH, FOUR.init(BOTH), BOTH)
    # ValueError: 4 rows, and 2 leaves on 8 devices need 8
oxs.stacked(CLIPPED, jax.NamedSharding(MESH, P("fsdp"))).init(BOTH)
    # ValueError: reads all of the gradient of \['b'\].*oxs.stacked\(inner
""")
