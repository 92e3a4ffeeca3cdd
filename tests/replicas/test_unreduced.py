"""Gradients whose types say that they are not reduced yet, under plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optx_sync as oxs
from optx_sync import hlo

N, LAYERS, WIDTH, MICRO, EXAMPLES = 4, 3, 4, 2, 8
AXIS = "data"
PARAMS = {"w": jnp.linspace(-0.5, 0.5, LAYERS * WIDTH**2).reshape(LAYERS, WIDTH, WIDTH)}
BATCHES = jnp.sin(jnp.arange(MICRO * EXAMPLES * WIDTH)).reshape(MICRO, EXAMPLES, WIDTH)
INNER = optax.sgd(0.5, momentum=0.9)


@pytest.fixture(scope="module")
def mesh():
    kinds = (AxisType.Explicit,)
    return jax.make_mesh((N,), (AXIS,), axis_types=kinds, devices=jax.devices()[:N])


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


def test_a_gradient_that_is_reduced_already_is_refused(mesh):
    tx = oxs.cross_shard(INNER, AXIS, grads="unreduced")
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.P())
        with pytest.raises(ValueError, match=r"still to be summed .* type of the one"):
            tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("option", [{"reduction": "sum"}, {"shard_state": True}])
def test_what_has_no_meaning_with_types_is_refused(option):
    with pytest.raises(ValueError, match="grads='unreduced'"):
        oxs.cross_shard(INNER, AXIS, grads="unreduced", **option)
