"""Gradients whose types say that they are not reduced yet, under plain `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import hlo
from tests.meshes import mesh_of

N, LAYERS, WIDTH, MICRO, EXAMPLES = 4, 3, 4, 2, 8
AXIS = "data"
PARAMS = {"w": jnp.linspace(-0.5, 0.5, LAYERS * WIDTH**2).reshape(LAYERS, WIDTH, WIDTH)}
BATCHES = jnp.sin(jnp.arange(MICRO * EXAMPLES * WIDTH)).reshape(MICRO, EXAMPLES, WIDTH)
INNER = optax.sgd(0.5, momentum=0.9)


def sync(inner, axis, required=N, **options):
    return oxs.sync_replicas(inner, axis, required, **options)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of({AXIS: N}, "Explicit")


def loss(params, batch):
    """A mean over the batch, of layers in a scan."""
    last, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
    return jnp.mean(last**2)


def stepping(tx):
    def step(params, state, batches):
        local = jax.tree.map(
            lambda x: jax.reshard(x, jax.P(reduced=frozenset({AXIS}))), params
        )

        def add(total, batch):
            grads = jax.grad(loss)(local, batch)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        zeros = jax.tree.map(
            lambda x: jax.reshard(x, jax.P(unreduced=frozenset({AXIS}))), zeros
        )
        grads, _ = jax.lax.scan(add, zeros, batches)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_they_are_summed_once_outside_of_all_loops_to_the_same_numbers(mesh):
    tx = oxs.cross_shard(INNER, AXIS, grads="unreduced")
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.P())
        state = jax.jit(tx.init)(params)
        batches = jax.device_put(BATCHES, jax.P(None, AXIS))
        program = jax.jit(stepping(tx)).lower(params, state, batches).compile()
        moved, after = program(params, state, batches)
        kinds = jax.tree.map(jax.typeof, (state, tx.init(params)))
    assert kinds == (jax.tree.map(jax.typeof, after),) * 2
    rows = oxs.audit.collectives(program)
    assert [(row.kind, row.bytes) for row in rows] == [("all-reduce", 4 * LAYERS * 16)]
    found = hlo.read(program.as_text() or "")
    (entry,) = found.entries
    assert "all-reduce" in [one.opcode for one in found.computations[entry]]

    local = oxs.cross_shard(INNER, AXIS)

    def step(batches):
        grads = [jax.grad(loss)(PARAMS, batch) for batch in batches]
        grads = jax.tree.map(lambda *of: sum(of), *grads)
        return local.update(grads, local.init(PARAMS), PARAMS)[0]

    own = BATCHES.reshape(MICRO, N, -1, WIDTH).swapaxes(0, 1)
    updates = jax.jit(jax.vmap(step, axis_name=AXIS))(own)["w"][0]
    np.testing.assert_allclose(moved["w"], PARAMS["w"] + updates, rtol=1e-5, atol=1e-6)


# name: (the transformation, steps of a batch for an update, its collectives on CPU)
TYPED = {
    "all at once": (oxs.sync_replicas(INNER, AXIS, N, grads="unreduced"), 1),
    "every other": (oxs.sync_replicas(INNER, AXIS, 2 * N, grads="unreduced"), 2),
    "in pieces": (
        oxs.cross_shard(INNER, AXIS, grads="unreduced", shard_state=True),
        1,
    ),
}


@pytest.mark.parametrize("lies", [(), (None, "model")], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", TYPED)
def test_sums_wait_without_a_collective(name, lies):
    """Also of parameters that lie along another axis, by `update` and by `apply`."""
    tx, every = TYPED[name]
    mesh = mesh_of({AXIS: N, "model": 2}, "Explicit")
    expected: Any = PARAMS
    inner, waiting = INNER.init(PARAMS), []
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.P(*lies))
        batches = jax.device_put(BATCHES, jax.P(None, AXIS))

        def step(params, state, batch, direct):
            local = jax.tree.map(
                lambda x: jax.reshard(x, jax.P(*lies, reduced=frozenset({AXIS}))),
                params,
            )
            grads = jax.grad(lambda p: jnp.mean(jnp.sin(p["w"] @ batch.T) ** 2))(local)
            if direct:
                return oxs.apply_gradients(tx, grads, state, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        run = jax.jit(step, static_argnums=3)
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, (params, state))
        assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params)) == types[1]
        rows = oxs.audit.collectives(run.lower(params, state, batches[0], False))
        for number in (0, 1, 0, 1):
            params, state = run(params, state, batches[number], True)
            own = BATCHES[number]
            waiting.append(
                jax.grad(lambda p, x=own: jnp.mean(jnp.sin(p["w"] @ x.T) ** 2))(
                    expected
                )
            )
            if len(waiting) == every:
                mean = jax.tree.map(lambda *of: sum(of) / every, *waiting)
                updates, inner = INNER.update(mean, inner)
                expected, waiting = optax.apply_updates(expected, updates), []
            assert jax.tree.map(jax.typeof, (params, state)) == types
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5, atol=1e-6)
    nbytes = 4 * LAYERS * WIDTH**2 // (2 if lies else 1)
    if name == "in pieces":  # XLA:CPU knows no reduce-scatter of what is not reduced.
        assert [row.kind for row in rows] == ["all-reduce", "all-gather"]
        assert [row.bytes for row in rows] == [nbytes, nbytes // N]
        (trace,) = jax.tree.leaves(state)
        assert 4 * np.prod(trace.sharding.shard_shape(trace.shape)) == nbytes // N
    else:
        (row,) = rows
        assert (row.kind, row.bytes, row.conditional) == ("all-reduce", nbytes, True)
        told = oxs.metrics(state)
        assert (int(told.counts.used), int(state.global_step)) == (4, 4 // every)


def test_a_gradient_that_is_reduced_already_is_refused(mesh):
    tx = oxs.cross_shard(INNER, AXIS, grads="unreduced")
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.P())
        with pytest.raises(ValueError, match=r"still to be summed .* type of the one"):
            tx.update(params, tx.init(params), params)
        newest: Any = jax
        if hasattr(newest.sharding, "UnreducedKind"):  # JAX 0.12

            def largest(x):
                kind = newest.sharding.UnreducedKind.max
                spec = newest.P(None, unreduced={AXIS}, unreduced_kind=kind)
                found = newest.lax.reduce_max(x, (0,), out_sharding=spec)
                return tx.update(found, ())

            with pytest.raises(ValueError, match="U_max:data"):
                jax.eval_shape(largest, jax.device_put(BATCHES[0], jax.P(AXIS)))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sum": (oxs.cross_shard, {"reduction": "sum"}, "no meaning with grads='unred"),
    "leaves": (oxs.cross_shard, {"shard_state": "leaves"}, "needs a mapped axis"),
    "exchange": (sync, {"exchange": oxs.exchange.median()}, "exchange needs each"),
    "nonfinite": (sync, {"drop_nonfinite": True}, "drop_nonfinite needs each rep"),
    "measure": (sync, {"measure": True}, "measure needs each replica's own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_with_types_is_refused(name):
    wrapper, option, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        wrapper(INNER, AXIS, grads="unreduced", **option)


def test_what_asks_for_one_replica_of_sums_is_refused(mesh):
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.P())
        grads = jax.tree.map(
            lambda x: jax.reshard(x, jax.P(unreduced=frozenset({AXIS}))), params
        )
        for required, more, message in (
            (N + 1, {}, f"Pass a multiple of {N}, or at most {N}"),
            (N, {"weight": 1.0}, "weight needs each replica's own"),
            (N, {"contributes": True}, "contributes needs each replica's own"),
        ):
            tx = sync(INNER, AXIS, required, grads="unreduced")
            with pytest.raises(ValueError, match=message):
                tx.update(grads, tx.init(params), params, **more)
    with pytest.raises(ValueError, match="'data' is Explicit; got"):
        sync(INNER, AXIS, grads="unreduced").init(PARAMS)
