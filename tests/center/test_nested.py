"""A center rule inside of a center rule: workers of a pod, pods of workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.reference.center import nested
from tests.refusals import all_refused

PODS, WORKERS, STEPS, RATE = 2, 2, 13, 0.05
AXES = ("pods", "data")
SGD = optax.sgd(RATE)
PARAMS = {"vector": np.linspace(-1, 1, 3, dtype=np.float32), "scalar": np.float32(0.5)}


def level(rule, inner, axis, period, rate=None, rho=0.0) -> Any:
    """One level as it is written with this package; as `nested` takes it."""
    options: dict[str, Any] = {"communication_period": period}
    if rule == "elastic":
        return oxs.elastic_average(inner, axis, moving_rate=rate, rho=rho, **options)
    if rule != "local_sgd":
        options["outer"] = optax.sgd(rate or 1)
    return getattr(oxs, rule)(inner, axis, **options)


def build(levels, axes=AXES):
    tx = SGD
    for (rule, *numbers), axis in zip(reversed(levels), reversed(axes), strict=True):
        tx = level(rule, tx, axis, *numbers)
    return tx


# Levels as `tests.reference.center.nested` takes them, the outer one first.
CASES = {
    "local_sgd(local_sgd)": [("local_sgd", 4, None, 0), ("local_sgd", 2, None, 0)],
    "local_sgd(agn)": [("local_sgd", 3, None, 0), ("agn", 1, 0.1, 0)],
    "elastic(elastic)": [("elastic", 3, 0.3, 0.5), ("elastic", 2, 0.2, 0.4)],
    "diloco(local_sgd)": [("diloco", 4, 0.7, 0), ("local_sgd", 3, None, 0)],
    "agn(elastic)": [("agn", 5, 0.1, 0), ("elastic", 1, 0.4, 0)],
}
RULES = {name: build(levels) for name, levels in CASES.items()}


def gradients(*shape):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: rng.normal(size=(STEPS, *shape, *p.shape)).astype(np.float32), PARAMS
    )


def expected(levels, grads):
    shape = jax.tree.leaves(grads)[-1].shape[1:][: len(levels)]
    return jax.tree.map(
        lambda p, g: nested(levels, np.broadcast_to(p, (*shape, *p.shape)), g, RATE),
        PARAMS,
        grads,
    )


def replay(txs, grads, names=AXES, mesh=None):
    """Histories by name and last states: all arrays [T, n0, n1, ...]."""
    levels = len(names)
    workers = oxs.Workers(grads["scalar"].shape[1:], names, mesh=mesh)
    grads = jax.tree.map(lambda g: np.moveaxis(g, 0, levels), grads)
    histories, states = contexts.by_workers(workers, txs, PARAMS, grads)
    return jax.tree.map(lambda x: np.moveaxis(x, levels, 0), histories), states


@pytest.mark.parametrize("mesh", [None, True])
def test_two_levels_are_the_recurrence(mesh):
    """Several pairs in one program; the centers move with the parameters."""
    some = ("local_sgd(agn)", "elastic(elastic)", "diloco(local_sgd)")
    names = some if mesh else tuple(RULES)
    grads = gradients(PODS, WORKERS)
    found, _ = replay({name: RULES[name] for name in names}, grads, mesh=mesh)
    for name, history in found.items():
        contexts.assert_close(history, expected(CASES[name], grads))


def test_three_levels_are_the_recurrence():
    levels = [("local_sgd", 6, None, 0), ("elastic", 3, 0.3, 0.2), ("agn", 1, 0.1, 0)]
    names, grads = ("regions", *AXES), gradients(2, 2, 2)
    found, _ = replay({"all": build(levels, names)}, grads, names)
    contexts.assert_close(found["all"], expected(levels, grads))


def step_of(tx, mesh=None):
    """A step of all workers, and the parameters and state that they start from."""
    return contexts.started(tx, PARAMS, (PODS, WORKERS), AXES, mesh=mesh)


def test_an_outer_round_stays():
    """Two pods, at 0 and 8, meet at 4 and stay there; the inner center knows."""
    inner = oxs.agn(optax.sgd(0.0), "data", communication_period=1)
    tx = oxs.local_sgd(inner, "pods", communication_period=2)
    step, params, state = step_of(tx)
    params = jax.tree.map(lambda p: jnp.zeros_like(p).at[1].set(8), params)
    center = jax.tree.map(lambda p: p[:, 0], params)
    state = state._replace(inner=state.inner._replace(center=center))
    zeros = jax.tree.map(jnp.zeros_like, params)
    for wanted in ([0, 8], [4, 4], [4, 4], [4, 4]):
        params, state = step(params, state, zeros)
        assert np.array_equal(params["scalar"], np.transpose([wanted] * WORKERS))
    assert np.all(state.inner.center["scalar"] == 4)


def test_a_round_of_pods_stays_inside_its_conditional():
    """The parameters over each axis, and once more for the pods' own centers."""
    step, params, state = step_of(RULES["local_sgd(agn)"], True)
    rows = oxs.audit.collectives(step, params, state, params)
    assert {row.kind for row in rows} == {"all-reduce"}
    assert all(row.conditional for row in rows)
    size = 4 * sum(p.size for p in PARAMS.values())
    within, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    sent: dict[Any, int] = {within: 0, across: 0}
    for row in rows:
        sent[row.groups] += row.bytes
    assert sent == {within: 2 * size, across: size}


def test_levels_of_a_state():
    tx = RULES["elastic(elastic)"]
    outer, inner = (by_hand.state_axes(tx, PARAMS, level=at) for at in (0, 1))
    assert (outer.center["scalar"], outer.inner.center["scalar"]) == (None, 0)
    assert (inner.center["scalar"], inner.inner.center["scalar"]) == (0, None)
    for axes in (outer, inner):
        assert axes.info.dropped == axes.inner.info.dropped == 0
        for state in (axes, axes.inner):
            assert state.local_step is state.steps_since_round is None
            assert state.global_step is None
    specs: Any = by_hand.state_specs(tx, PARAMS, P(), P(*AXES))
    assert specs.center["scalar"] == P("data")
    assert specs.inner.taken["vector"] == P("pods")
    assert specs.local_step == specs.inner.local_step == P()
    assert specs.info.dropped == P(*AXES)
    # Of gradients that meet inside of a worker the counters are the worker's own.
    replicas = oxs.local_sgd(oxs.sync_replicas(SGD, "data", 2), "pods")
    outer, inner = (by_hand.state_axes(replicas, PARAMS, level=at) for at in (0, 1))
    assert (outer.inner.global_step, inner.inner.global_step) == (0, None)
    # Where replicas hold one inner state, all of it is shared, whatever it is made of.
    inside = oxs.sync_replicas(optax.adam(0.1), "inside", 2)
    both = oxs.sync_replicas(inside, "data", 2)
    shared: Any = by_hand.state_axes(both, PARAMS, replicated=True)
    assert set(jax.tree.leaves(shared.accumulator)) == {0}
    assert jax.tree.leaves(shared.inner) == []


def test_metrics_and_center_of_two_levels():
    """Of the outermost center, of which each worker of a pod has one."""
    _, params, state = step_of(RULES["local_sgd(agn)"])
    params = jax.tree.map(lambda p: p + jnp.full_like(p, 2.0), params)
    distance = oxs.metrics(state, params).distance
    np.testing.assert_allclose(distance, np.full((PODS, WORKERS), 4.0), rtol=1e-6)
    center: Any = oxs.center_params(state, params)
    assert center["vector"].shape == (WORKERS, 3)


def test_gradients_that_meet_inside_are_no_second_center():
    """DiLoCo between pods, whose chips have equal parameters: no level, no change."""
    tx: Any = oxs.diloco(oxs.cross_shard(SGD, "data"), "pods", communication_period=2)
    alone: Any = oxs.diloco(SGD, "pods")
    assert tx.init(PARAMS).inner == alone.init(PARAMS).inner


@pytest.mark.parametrize(
    "inner",
    [
        oxs.cross_shard(SGD, "data"),
        oxs.cross_shard(SGD, "data", shard_state=True),
        oxs.cross_shard(SGD, "data", shard_state="leaves"),
        optax.chain(oxs.all_reduce_grads("data"), SGD),
        oxs.sync_replicas(SGD, "data", WORKERS),
    ],
)
def test_a_weight_is_used_once_where_wrappers_nest(inner):
    """By the inner wrapper: the replicas of a pod stay equal, and pods count alike."""
    tx = oxs.local_sgd(inner, "pods", communication_period=1)
    grads = jnp.array([[1.0, 3.0], [5.0, 2.0]])
    weight = jnp.array([[1.0, 9.0], [4.0, 1.0]])

    def step(grad, weight):
        params = {"w": jnp.ones(1)}
        grad = {"w": grad[None]}
        state = tx.init(params)
        return oxs.apply_gradients(tx, grad, state, params, weight=weight)[0]["w"]

    found = jax.vmap(jax.vmap(step, axis_name="data"), axis_name="pods")(grads, weight)
    mean = np.mean(np.average(grads, 1, weights=weight))
    np.testing.assert_allclose(found.ravel(), [1 - RATE * mean] * 4, rtol=1e-6)


RULE, MASK = oxs.local_sgd(SGD, "data"), {"vector": True, "scalar": False}


test_refused = all_refused(globals())(r"""
oxs.diloco(optax.chain(optax.clip(1.0), RULE), "pods").init(PARAMS)
oxs.diloco(optax.masked(RULE, MASK), "pods").init(PARAMS)
oxs.diloco(oxs.cross_shard(RULE, "chips"), "pods").init(PARAMS)
    # ValueError: another center rule.*innermost
oxs.local_sgd(RULE, "pods", drop_nonfinite=True)
    # ValueError: drop_nonfinite.*innermost
oxs.local_sgd(RULE, "pods", inner_state="reset")  # ValueError: reset.*innermost
oxs.agn(RULE, "pods")  # ValueError: outer optimizer is a center rule
by_hand.state_axes(RULES["elastic(elastic)"], PARAMS, level=-1)
by_hand.state_axes(RULES["elastic(elastic)"], PARAMS, level=2)
    # ValueError: has 2 level.*got level
by_hand.state_specs(RULE, PARAMS, P(), P(*AXES))
    # ValueError: has 1 level.*got level 1
""")


def test_pieces_that_are_measured_lie_on_their_own_level():
    """Of a level without counts of its own the one around says how many axes it has."""
    inner = oxs.cross_shard(optax.adam(0.1), "chips", shard_state=True, measure=True)
    tx = oxs.diloco(inner, "pods", communication_period=2)
    params = {"w": jnp.arange(6.0), "b": jnp.ones(())}
    workers = oxs.Workers((2, 3), ("pods", "chips"))
    state = workers.start((params, tx.init(params)))

    @workers.step(state=2)
    def step(params, state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), params)
        return oxs.apply_gradients(tx, grads, state, params)

    with jax.numpy_dtype_promotion("standard"):  # Adam counts in integers
        for _ in range(4):  # whole rounds
            state = step(*state, jnp.arange(12.0))
    resized = oxs.Workers((3, 3), ("pods", "chips")).resize(state)
    # [pods, chips, 2]: each pod's pieces stay on its chips.
    before, after = (x[1].inner.inner.tree[0].mu["w"] for x in (state, resized))
    assert before.shape == (2, 3, 2)
    np.testing.assert_array_equal(after[:2], before)
