"""Center rules inside of Optax: chains, masks, injected rates, forms of gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts
from tests.center.test_laws import RULES, STEPS, gradients, replay
from tests.meshes import mesh_of

AXIS, WORKERS = contexts.AXIS, contexts.REPLICAS
PARAMS = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
}


def test_a_chain_clips_each_workers_gradient_before_the_exchange():
    grads = jax.tree.map(lambda g: 3 * g, gradients())
    rule = RULES["elastic"](communication_period=2)
    history, _ = replay(optax.chain(optax.clip(1.0), rule), grads)
    clipped = jax.tree.map(lambda g: np.clip(g, -1, 1), grads)
    contexts.assert_close(history, replay(rule, clipped)[0])


def test_masked_leaves_are_left_to_others():
    """What the mask leaves out is neither in the center nor pulled."""
    mask = {"scalar": False, "matrix": True}
    tx = optax.masked(RULES["local_sgd"](communication_period=2), mask)
    grads = gradients()
    history, state = replay(tx, grads)
    only = {"matrix": PARAMS["matrix"]}
    expected, _ = replay(
        RULES["local_sgd"](communication_period=2), {"matrix": grads["matrix"]}, only
    )
    contexts.assert_close(history["matrix"], expected["matrix"])
    # optax.masked hands a masked gradient on as it is.
    sums = PARAMS["scalar"] + np.cumsum(grads["scalar"], 0)
    np.testing.assert_allclose(history["scalar"], sums, rtol=0, atol=2e-6)
    stacked = jax.tree.map(lambda h: h[-1], history)
    center: Any = oxs.center_params(state, stacked)
    np.testing.assert_allclose(
        center["matrix"], expected["matrix"][-2, 0], rtol=0, atol=1e-6
    )
    np.testing.assert_array_equal(center["scalar"], stacked["scalar"])
    distance = oxs.metrics(state, stacked).distance
    apart = np.sqrt(np.square(stacked["matrix"] - center["matrix"][None]).sum((1, 2)))
    np.testing.assert_allclose(distance, apart, rtol=1e-5)


def test_two_rules_for_two_parts_of_the_parameters():
    labels = {"scalar": "a", "matrix": "b"}
    rules: dict[Any, Any] = {
        "a": RULES["elastic"](communication_period=3),
        "b": RULES["diloco"](communication_period=2),
    }
    grads = gradients()
    history, state = replay(optax.multi_transform(rules, labels), grads)
    for name, label in labels.items():
        expected, own = replay(rules[label], {name: grads[name]}, {name: PARAMS[name]})
        contexts.assert_close(history[name], expected[name])
        center: Any = oxs.center_params(state, PARAMS)
        np.testing.assert_allclose(center[name], own.center[name], atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_none_gradients(rule):
    """No update in a quiet step; the exchange acts on the leaf all the same."""
    tx = RULES[rule](optax.sgd(0.1), communication_period=2)
    one = {"used": jnp.ones(3), "unused": jnp.arange(2.0)}
    step, params, state = contexts.started(tx, one)
    # The center of the unused leaf is [0, 1] on all workers, as at worker 0.
    params["unused"] = jnp.arange(WORKERS * 2.0).reshape(WORKERS, 2)
    grads = {"used": jnp.ones((WORKERS, 3)), "unused": None}
    quiet, state = step(params, state, grads)
    np.testing.assert_array_equal(quiet["unused"], params["unused"])
    assert np.all(quiet["used"] != params["used"])
    pulled, state = step(quiet, state, grads)
    x, c = np.asarray(params["unused"]), np.array([0.0, 1.0])
    expected = {
        "elastic": x - 0.2 * (x - c),
        "agn": np.stack([c] * WORKERS),
        "local_sgd": np.stack([x.mean(0)] * WORKERS),
        # Nesterov momentum of the first step: 0.7 * (1 + 0.9).
        "diloco": np.stack([c + 1.33 * (x.mean(0) - c)] * WORKERS),
    }[rule]
    np.testing.assert_allclose(pulled["unused"], expected, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_row_sparse_gradients_are_as_good_as_dense_ones(rule):
    """Duplicates and rows out of range included, and elastic averaging's penalty."""
    rng = np.random.default_rng(0)
    table = np.linspace(-2, 2, 18, dtype=np.float32).reshape(9, 2)
    rows = {
        "indices": rng.integers(0, 11, size=(STEPS, WORKERS, 4)).astype(np.int32),
        "values": rng.normal(size=(STEPS, WORKERS, 4, 2)).astype(np.float32),
    }

    def sparse(grads):
        return oxs.IndexedSlices(grads["indices"], grads["values"])

    def dense(grads):
        return sparse(grads).to_dense(9)

    tx = RULES[rule](oxs.optimizers.gradient_descent(0.1), communication_period=3)
    history, _ = replay(tx, rows, table, prepare=sparse)
    expected, _ = replay(tx, rows, table, prepare=dense)
    contexts.assert_close(history, expected)


def test_rows_reach_the_inner_optimizer_as_rows():
    """Momentum of TensorFlow's kind moves touched rows only, unlike a dense one."""
    tx = oxs.agn(oxs.optimizers.momentum(0.1, 0.9), AXIS, communication_period=10)
    values = np.ones((3, WORKERS, 1, 2), np.float32)
    indices = np.array([0, 1, 1], np.int32)[:, None, None] + np.zeros(
        (3, WORKERS, 1), np.int32
    )
    history, state = replay(
        tx,
        {"indices": indices, "values": values},
        np.zeros((3, 2), np.float32),
        prepare=lambda g: oxs.IndexedSlices(g["indices"], g["values"]),
    )
    np.testing.assert_allclose(history[-1, 0, :, 0], [-0.1, -0.29, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(state.accumulated[0, :, 0], [1, 2, 0])


def test_a_tuple_of_axes():
    names, options = ("outer", "inner"), {"communication_period": 2}

    def rules(axis):
        sgd = optax.sgd(0.1)
        return {
            "elastic": oxs.elastic_average(sgd, axis, learning_rate=0.1, **options),
            "agn": oxs.agn(sgd, axis, **options),
            "local_sgd": oxs.local_sgd(sgd, axis, drop_nonfinite=True, **options),
            "diloco": oxs.diloco(sgd, axis, **options),
        }

    along = oxs.Workers(WORKERS, names, mesh=mesh_of(dict.fromkeys(names, 2)))
    inputs = jnp.ones(3), gradients(params=np.ones(3)).swapaxes(0, 1)
    found, _ = contexts.by_workers(along, rules(names), *inputs)
    wanted, _ = contexts.by_workers(oxs.Workers(WORKERS, AXIS), rules(AXIS), *inputs)
    contexts.assert_close(found, wanted)


@pytest.mark.parametrize("rule", ["elastic", "diloco"])
def test_double_precision(rule):
    with jax.enable_x64(True):
        tx = RULES[rule](
            optax.sgd(0.1, momentum=0.9), communication_period=2, drop_nonfinite=True
        )
        grads = jax.tree.map(np.float64, gradients())
        params = jax.tree.map(np.float64, PARAMS)
        history, _ = replay(tx, grads, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(history)} == {np.dtype("f8")}
    expected, _ = replay(tx, gradients())
    contexts.assert_close(history, expected)
    assert not np.array_equal(history["matrix"], expected["matrix"])


@pytest.mark.parametrize(
    ("dtype", "moving_rate", "second"),
    [
        ("float32", lambda step: 0.5 / (step.astype(jnp.float32) + 1), [3.75, 3.1875]),
        ("bfloat16", lambda step: 0.5 / (step.astype(jnp.float32) + 1), [3.75, 3.1875]),
        ("bfloat16", 0.5, [3.5, 3.25]),
    ],
)
def test_an_injected_moving_rate_is_traced(dtype, moving_rate, second):
    """A schedule for it, too; checks are for what is known."""
    fixed = {"static_args": ("axis_name", "communication_period")}
    inject = optax.inject_hyperparams(oxs.elastic_average, **fixed)
    options: dict[str, Any] = {"learning_rate": 0.25, "communication_period": 1}
    tx = inject(optax.sgd(0.25), AXIS, moving_rate=moving_rate, **options)
    # With rho = a / learning rate the penalty doubles the pull, but for the first step.
    step, params, state = contexts.started(tx, jnp.full(1, 4.0, dtype), 2)
    params, values = params.at[1].set(0.0), []
    for _ in range(2):
        params, state = step(params, state, jnp.zeros((2, 1), dtype))
        values.append([float(x) for x in params[:, 0]])
    # a = 0.5: the penalty pulls worker 1 by 0.5 * 4 to 2, the exchange by 0.5 * 2 to 3,
    # and the center 4 goes to 3. a = 0.25, anchored at 4: 3 + 0.25 goes to 3.1875.
    assert values[0] == [4.0, 3.0]
    assert values[1] == second


ALL = {
    **{name: make() for name, make in RULES.items()},
    "drop": RULES["agn"](drop_nonfinite=True),
    "schedule": RULES["elastic"](communication_period=lambda step: 3),
}


@pytest.mark.parametrize("name", ALL)
def test_optax_finds_its_way_in_a_state(name):
    tx = ALL[name]
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optax.chain(optax.clip(1.0), tx).init(params)
    center = optax.tree_utils.tree_get(state, "center")
    jax.tree.map(np.testing.assert_array_equal, center, params)
    for field in ("local_step", "global_step", "steps_since_round", "dropped"):
        assert int(optax.tree_utils.tree_get(state, field)) == 0
    doubled: Any = optax.tree_utils.tree_map_params(
        tx, lambda x: x + 1, tx.init(params)
    )
    np.testing.assert_array_equal(doubled.center["matrix"], params["matrix"] + 1)
    assert int(doubled.local_step) == 0


def test_a_center_that_is_equal_where_the_parameters_differ_is_refused():
    tx = RULES["local_sgd"](communication_period=2)

    def local(grads):
        params = jax.tree.map(jnp.zeros_like, grads)  # vary over the shards too
        state = tx.init(jnp.zeros(params.shape))
        return tx.update(grads, state, params)[0]

    spec = P(AXIS, "inside")
    step = jax.shard_map(
        local, mesh=contexts.island_mesh(), in_specs=spec, out_specs=spec
    )
    match = r"over the mesh axes \['inside'\], but the center .* does not.*param_specs"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(step, jnp.zeros((WORKERS, 4)))
