"""`center_memory="pinned_host"`: the numbers of a center on the device, kept elsewhere.

CPU devices have this kind of memory in name; what it saves on others is read from
programs compiled ahead of time, in `tests/test_ahead.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.refusals import all_refused

AXIS, REPLICAS = contexts.AXIS, contexts.REPLICAS
PERIOD = 2
PARAMS: Any = {
    "half": np.arange(4).astype(jnp.bfloat16),
    "matrix": np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3),
    "scalar": np.float32(0.5),
}
INNER = optax.sgd(0.1, momentum=0.5)
RULES: dict[str, Any] = {
    "diloco": functools.partial(oxs.diloco, drop_nonfinite=True, measure=True),
    "diloco in parts": functools.partial(oxs.diloco, fragments=2),
    "diloco in pieces": functools.partial(
        oxs.diloco, shard_center=True, drop_nonfinite=True, keep_local=0.5
    ),
    "agn": functools.partial(oxs.agn, outer=optax.sgd(0.1, momentum=0.9)),
    "elastic": functools.partial(oxs.elastic_average, rho=0.0, moving_rate=0.1),
}
ON_A_MESH = "diloco in parts", "diloco in pieces"


def make(name, memory="pinned_host"):
    period = 2 * PERIOD if "parts" in name else PERIOD
    return RULES[name](INNER, AXIS, communication_period=period, center_memory=memory)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def drawn(step):
    rng = np.random.default_rng(step)
    grads = jax.tree.map(lambda x: rng.normal(size=(REPLICAS, *x.shape)), PARAMS)
    if step == 1:
        grads["matrix"][2, 3] = np.nan
    return jax.tree.map(lambda g, x: jnp.asarray(g, x.dtype), grads, PARAMS)


@functools.cache
def trained(names, memory, mesh):
    """All workers' parameters and states after two rounds, of several rules."""
    workers = oxs.Workers(REPLICAS, AXIS, mesh=contexts.mesh() if mesh else None)
    every = {name: make(name, memory) for name in names}
    state = workers.start(
        {name: (PARAMS, tx.init(PARAMS)) for name, tx in every.items()}
    )

    @functools.partial(workers.step, split=(False, None))
    def step(state, grads, meet):
        return {
            name: oxs.apply_gradients(tx, grads, *state[name][::-1], meet=meet)
            for name, tx in every.items()
        }

    for number in range(2 * PERIOD):
        meet = number % PERIOD == PERIOD - 1
        state = step(state, drawn(number), meet)
    # No state changes its type.
    assert [program.run._cache_size() for program in step.programs.values()] == [1, 1]
    return state


@pytest.mark.parametrize("mesh", [False, True])
def test_the_numbers_are_those_of_a_center_on_the_device(mesh):
    names = [name for name in RULES if mesh == (name in ON_A_MESH)]
    host = trained(tuple(names), "pinned_host", mesh)
    device = trained(tuple(names), "device", mesh)
    for name in names:
        (params, state), (like, expected) = host[name], device[name]
        assert kinds((state.center, state.outer)) == {"pinned_host"}
        assert kinds((params, state.inner, state.exchange)) == {"device"}
        assert kinds((like, expected)) == {"device"}
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path((params, tuple(state))),
            jax.tree.leaves((like, tuple(expected))),
            strict=True,
        ):
            assert np.array_equal(x, y, equal_nan=True), (name, path)
        found = oxs.center_params(state, params), oxs.metrics(state, params).distance
        wanted = oxs.center_params(expected, like), oxs.metrics(expected, like).distance
        assert kinds(found) == {"device"}
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_center_is_saved_restored_resized_and_compared_where_it_is(tmp_path):
    mesh = contexts.mesh()
    workers = oxs.Workers(REPLICAS, AXIS, mesh=mesh)
    tx = make("diloco")
    pair = workers.start((PARAMS, tx.init(PARAMS)))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(pair))
        manager.wait_until_finished()
        for other in (workers, oxs.Workers(2, AXIS, mesh=contexts.mesh(2))):
            other.start((PARAMS, tx.init(PARAMS)))
            params, state = other.restore(manager)
            assert kinds((state.center, state.outer)) == {"pinned_host"}
            assert kinds((params, state.inner)) == {"device"}
            jax.tree.map(np.testing.assert_array_equal, state.center, pair[1].center)
    again = oxs.Workers(REPLICAS, AXIS, mesh=mesh)
    shapes = again.expect(lambda: (PARAMS, tx.init(PARAMS)))[1]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(shapes.center)} == {
        "pinned_host",
        "device",  # a scalar
    }
    found = jax.jit(lambda state: oxs.fingerprint(state, None).words)(pair[1])
    plain = workers.start((PARAMS, make("diloco", "device").init(PARAMS)))[1]
    assert np.array_equal(found, oxs.fingerprint(plain, None).words)
    simulated = oxs.Workers(REPLICAS, AXIS)
    _, state = simulated.resize(simulated.start((PARAMS, tx.init(PARAMS))), 3)
    assert kinds((state.center, state.outer)) == {"pinned_host"}
    copied = by_hand.replicate(tx.init(PARAMS), 3, by_hand.state_axes(tx, PARAMS))
    assert kinds(copied.center) == {"pinned_host"}


def test_quiet_steps_hand_the_center_on():
    """They hold no operation on it: each array goes from argument to result."""
    tx = make("diloco")
    axes = by_hand.state_axes(tx, PARAMS)
    state = by_hand.replicate(tx.init(PARAMS), REPLICAS, axes)

    def touched(meet):
        def step(state, params):
            return oxs.apply_gradients(tx, params, state, params, meet=meet)[1]

        marks = {"in_axes": (axes, None), "out_axes": axes}
        run = jax.vmap(step, axis_name=AXIS, axis_size=REPLICAS, **marks)
        made: Any = jax.make_jaxpr(run)(state, PARAMS)
        unflatten = jax.tree.structure(state).unflatten
        before = unflatten(made.jaxpr.invars[: len(made.jaxpr.outvars)])
        after = unflatten(made.jaxpr.outvars)
        pairs = (before.center, before.outer), (after.center, after.outer)
        return not jax.tree.all(jax.tree.map(lambda x, y: x is y, *pairs))

    assert touched(meet=True) and not touched(meet=False)


def decided(meet):
    tx = oxs.local_sgd(INNER, None, center_memory="pinned_host")
    return oxs.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS, meet=meet)


test_refused = all_refused(globals())(r"""
oxs.diloco(INNER, AXIS, center_memory="host")
    # ValueError: center_memory must be 'device' or
oxs.diloco(INNER, AXIS, center_memory="pinned_host", delay=1)
    # ValueError: delay=1 it absorbs
oxs.elastic_average(INNER, AXIS, rho=0.1, center_memory="pinned_host")
    # ValueError: reads it in every step
decided(None)
decided(jnp.bool_(True))  # ValueError: needs two programs
""")
