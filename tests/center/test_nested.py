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
from tests.meshes import mesh_of
from tests.reference.center import nested

PODS, WORKERS, STEPS, RATE = 2, 2, 13, 0.05
AXES = ("pods", "data")
SGD = optax.sgd(RATE)
PARAMS = {"vector": np.linspace(-1, 1, 3, dtype=np.float32), "scalar": np.float32(0.5)}


def level(rule, inner, axis, period, rate=None, rho=0.0) -> Any:
    """One level as it is written with this package; as `nested` takes it."""
    return {
        "local_sgd": lambda: oxs.local_sgd(inner, axis, communication_period=period),
        "agn": lambda: oxs.agn(
            inner, axis, outer=optax.sgd(rate or 1), communication_period=period
        ),
        "elastic": lambda: oxs.elastic_average(
            inner, axis, moving_rate=rate, rho=rho, communication_period=period
        ),
        "diloco": lambda: oxs.diloco(
            inner, axis, outer=optax.sgd(rate or 1), communication_period=period
        ),
    }[rule]()


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


def start(tx, shape=(PODS, WORKERS)) -> Any:
    """Stacked parameters and state, and the axes of the state, the outer first."""
    axes = [by_hand.state_axes(tx, PARAMS, level=at) for at in range(len(shape))]
    params, state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    for n, marks in reversed(list(zip(shape, axes, strict=True))):
        params, state = by_hand.replicate(params, n), by_hand.replicate(state, n, marks)
    return params, state, axes


def lanes(tx, names=AXES, shape=(PODS, WORKERS)) -> Any:
    """The body of `contexts.steps` under one vmap for each level."""
    run: Any = contexts.steps(tx)
    for name, axes in reversed(list(zip(names, start(tx, shape)[2], strict=True))):
        run = jax.vmap(run, (0, axes, 0, None), (0, axes), axis_name=name)
    return run


def on_mesh(tx, check_vma=True) -> Any:
    """The body of `contexts.steps` under shard_map over both levels' axes."""
    specs = by_hand.state_specs(tx, PARAMS, P(), P(*AXES))
    outer, inner = start(tx)[2]

    def local(params, state, grads, extra):
        params, grads = (by_hand.first(by_hand.first(x)) for x in (params, grads))
        state = by_hand.first(by_hand.first(state, outer), inner)
        run: Any = contexts.steps(tx)
        history, state = run(params, state, grads, extra)
        history = by_hand.replicate(by_hand.replicate(history, 1), 1)
        return history, by_hand.replicate(by_hand.replicate(state, 1, inner), 1, outer)

    mesh = mesh_of(dict(zip(AXES, (PODS, WORKERS), strict=True)))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(*AXES), specs, P(*AXES), P()),
        out_specs=(P(*AXES), specs),
        check_vma=check_vma,
    )


def steps_last(grads, levels=2):
    """[T, n0, n1, ...] -> [n0, n1, T, ...]."""
    return jax.tree.map(lambda g: np.moveaxis(g, 0, levels), grads)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "shard_map_unchecked"])
def test_two_levels_are_the_recurrence(context):
    """Several pairs in one program; the centers move with the parameters."""
    runs = {name: lanes(tx) for name, tx in RULES.items()}
    if context != "vmap":
        some = ("local_sgd(agn)", "elastic(elastic)", "diloco(local_sgd)")
        runs = {name: on_mesh(RULES[name], context == "shard_map") for name in some}
    grads = gradients(PODS, WORKERS)

    @jax.jit
    def run(starts, grads):
        return {name: runs[name](*starts[name], grads, {})[0] for name in runs}

    found = run({name: start(RULES[name])[:2] for name in runs}, steps_last(grads))
    for name, history in found.items():
        history = jax.tree.map(lambda x: np.moveaxis(x, 2, 0), history)
        contexts.assert_close(history, expected(CASES[name], grads))


def test_three_levels_are_the_recurrence():
    levels = [("local_sgd", 6, None, 0), ("elastic", 3, 0.3, 0.2), ("agn", 1, 0.1, 0)]
    names, shape = ("regions", *AXES), (2, 2, 2)
    tx = build(levels, names)
    grads = gradients(*shape)
    params, state, _ = start(tx, shape)
    run = jax.jit(lanes(tx, names, shape))
    history, _ = run(params, state, steps_last(grads, 3), {})
    history = jax.tree.map(lambda x: np.moveaxis(x, 3, 0), history)
    contexts.assert_close(history, expected(levels, grads))


def test_an_outer_round_stays():
    """Two pods, at 0 and 8, meet at 4 and stay there; the inner center knows."""
    inner = oxs.agn(optax.sgd(0.0), "data", communication_period=1)
    tx = oxs.local_sgd(inner, "pods", communication_period=2)
    params, state, _ = start(tx)
    at = np.array([[0.0, 0.0], [8.0, 8.0]], np.float32)
    params = jax.tree.map(
        lambda p: at.reshape(at.shape + (1,) * (p.ndim - 2)) + 0 * p, params
    )
    center = jax.tree.map(lambda p: p[:, 0], params)
    state = state._replace(inner=state.inner._replace(center=center))
    grads = steps_last(jax.tree.map(np.zeros_like, gradients(PODS, WORKERS)))
    history, state = jax.jit(lanes(tx))(params, state, grads, {})
    np.testing.assert_array_equal(history["scalar"][:, 0, 0], [0, 8])
    assert np.all(history["scalar"][:, :, 1:] == 4)
    assert np.all(state.inner.center["scalar"] == 4)


def test_a_round_of_pods_stays_inside_its_conditional():
    """The parameters over each axis, and once more for the pods' own centers."""
    tx = RULES["local_sgd(agn)"]
    params, state, _ = start(tx)
    grads = steps_last(gradients(PODS, WORKERS))
    rows = oxs.audit.collectives(on_mesh(tx), params, state, grads, {})
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
    outer, inner = start(tx)[2]
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
    assert shared.accumulator.row_weights == 0
    assert jax.tree.leaves(shared.inner) == []
    for level in (-1, 2):
        with pytest.raises(ValueError, match=r"has 2 level.*got level"):
            by_hand.state_axes(tx, PARAMS, level=level)
    with pytest.raises(ValueError, match=r"has 1 level.*got level 1"):
        by_hand.state_specs(oxs.local_sgd(SGD, "data"), PARAMS, P(), P(*AXES))


def test_metrics_and_center_of_two_levels():
    """Of the outermost center, of which each worker of a pod has one."""
    params, state, _ = start(RULES["local_sgd(agn)"])
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


@pytest.mark.parametrize(
    "within",
    [
        lambda rule: optax.chain(optax.clip(1.0), rule),
        lambda rule: optax.masked(rule, {"vector": True, "scalar": False}),
        lambda rule: oxs.cross_shard(rule, "chips"),
    ],
)
def test_a_center_that_cannot_be_told_is_refused(within):
    rule = oxs.local_sgd(SGD, "data")
    with pytest.raises(ValueError, match=r"another center rule.*innermost"):
        oxs.diloco(within(rule), "pods").init(PARAMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop_nonfinite": True}, "drop_nonfinite.*innermost"),
        ({"inner_state": "reset"}, "reset.*innermost"),
    ],
)
def test_what_would_start_an_inner_center_anew_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        oxs.local_sgd(oxs.local_sgd(SGD, "data"), "pods", **arguments)


def test_a_center_rule_is_no_outer_optimizer():
    with pytest.raises(ValueError, match=r"outer optimizer is a center rule"):
        oxs.agn(oxs.local_sgd(SGD, "data"), "pods")
