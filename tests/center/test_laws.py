"""What holds for every center rule: one worker, order, conservation, broken workers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.center.worker import is_due
from tests import contexts

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 7
PARAMS = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
}
INNER = optax.sgd(0.05, momentum=0.9)
RULES: dict[str, Any] = {
    "elastic": lambda inner=INNER, **keywords: oxs.elastic_average(
        inner, AXIS, moving_rate=0.2, rho=0.3, **keywords
    ),
    "agn": lambda inner=INNER, **keywords: oxs.agn(inner, AXIS, **keywords),
    "local_sgd": lambda inner=INNER, **keywords: oxs.local_sgd(inner, AXIS, **keywords),
    "diloco": lambda inner=INNER, **keywords: oxs.diloco(inner, AXIS, **keywords),
}


def gradients(workers=WORKERS, seed=0, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(STEPS, workers, *np.shape(p))).astype(np.float32),
        params,
    )


def replay(tx, grads, params=PARAMS, context="vmap_axes", **keywords):
    return contexts.replay(context, tx, params, grads, **keywords)


def alone(tx, grads, params=PARAMS):
    """The history of an optimizer without workers, from [T, 1, ...] gradients."""
    params = jax.tree.map(jnp.asarray, params)
    state, history = tx.init(params), []
    for t in range(STEPS):
        now = jax.tree.map(lambda g, t=t: g[t, 0], grads)
        updates, state = tx.update(now, state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.tree.map(lambda p: p[None], params))
    return jax.tree.map(lambda *steps: np.stack(steps), *history)


def test_one_worker_of_local_sgd_is_the_inner_optimizer():
    grads = gradients(workers=1)
    history, _ = replay(oxs.local_sgd(INNER, AXIS, communication_period=2), grads)
    contexts.assert_close(history, alone(INNER, grads), 2e-7)


def test_diloco_with_a_plain_outer_step_is_local_sgd():
    grads = gradients()
    outer = optax.sgd(1.0)
    diloco = oxs.diloco(INNER, AXIS, outer=outer, communication_period=2)
    local_sgd = oxs.local_sgd(INNER, AXIS, communication_period=2)
    contexts.assert_close(replay(diloco, grads)[0], replay(local_sgd, grads)[0], 3e-7)


@pytest.mark.parametrize("accumulate", ["gradients", "updates"])
def test_one_worker_of_agn_at_period_1_makes_the_inner_step(accumulate):
    grads, inner = gradients(workers=1), optax.sgd(0.1)
    tx = oxs.agn(inner, AXIS, accumulate=accumulate, communication_period=1)
    contexts.assert_close(replay(tx, grads)[0], alone(inner, grads), 2e-7)


@pytest.mark.parametrize("accumulate", ["gradients", "updates"])
def test_agn_at_period_1_is_downpour(accumulate):
    """DOWNPOUR: every worker pushes its update, pulls the center, and goes on."""
    grads = gradients()
    tx = oxs.agn(
        optax.sgd(0.1),
        AXIS,
        accumulate=accumulate,
        reduction="sum",
        communication_period=1,
    )
    history, _ = replay(tx, grads)
    center = {
        name: np.asarray(p, np.float32) + np.zeros_like(p) for name, p in PARAMS.items()
    }
    for t in range(STEPS):
        for worker in range(WORKERS):
            for name in center:
                center[name] = center[name] - np.float32(0.1) * grads[name][t, worker]
        for name, c in center.items():
            np.testing.assert_allclose(
                history[name][t], np.stack([c] * WORKERS), rtol=0, atol=2e-6
            )


def test_an_elastic_exchange_conserves_the_sum_of_workers_and_center():
    """Without gradients nothing but the exchange moves anything."""
    tx: Any = oxs.elastic_average(
        optax.sgd(0.1), AXIS, moving_rate=0.3, rho=0.0, communication_period=1
    )
    axes = by_hand.state_axes(tx, PARAMS)
    state = by_hand.replicate(tx.init(PARAMS), WORKERS, axes)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: rng.normal(size=(WORKERS, *np.shape(p))).astype(np.float32), PARAMS
    )
    zeros = jax.tree.map(np.zeros_like, params)
    step = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS)
    updates, after = jax.jit(step)(zeros, state, params)
    moved = optax.apply_updates(params, updates)

    def total(center, params):
        workers = np.asarray(params, np.float64).sum(0)
        return (np.asarray(center, np.float64) + workers)[None]

    before = jax.tree.map(total, state.center, params)
    contexts.assert_close(jax.tree.map(total, after.center, moved), before, 5e-7)
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).min()), moved, params)
    assert min(jax.tree.leaves(change)) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_workers_does_not_matter(rule):
    order = [2, 0, 3, 1]
    grads = gradients()
    shuffled = jax.tree.map(lambda g: g[:, order], grads)
    tx = RULES[rule](communication_period=2)
    history, state = replay(tx, grads)
    other, other_state = replay(tx, shuffled)
    expected = jax.tree.map(lambda h: h[:, order], history)
    contexts.assert_close(other, expected)
    assert not np.array_equal(other["matrix"], history["matrix"])
    contexts.assert_close(
        *jax.tree.map(lambda c: c[None], (other_state.center, state.center))
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_others_never_see_a_broken_worker(rule):
    """They do what three workers do alone; the center is where a NaN would show."""
    grads = gradients(workers=3)
    broken = jax.tree.map(
        lambda g: np.concatenate([g, np.full_like(g[:, :1], np.nan)], 1), grads
    )
    tx = RULES[rule](communication_period=2, drop_nonfinite=True)
    history, state = replay(tx, broken)
    expected, expected_state = replay(RULES[rule](communication_period=2), grads)
    # To rounding: two programs, of four workers and of three, need not fuse alike.
    contexts.assert_close(jax.tree.map(lambda h: h[:, :3], history), expected, 3e-7)
    for name in PARAMS:
        # The broken one stands still, and takes the center in every round.
        assert np.isfinite(history[name][:, 3]).all()
        np.testing.assert_allclose(
            history[name][-1, 3], expected_state.center[name], rtol=0, atol=3e-7
        )
    assert oxs.metrics(state).dropped.tolist() == [0, 0, 0, 3]
    assert int(oxs.metrics(state).rounds) == 3


@pytest.mark.parametrize(
    ("rule", "value"),
    [("elastic", np.nan), ("agn", np.inf), ("local_sgd", -np.inf), ("diloco", np.nan)],
)
def test_a_worker_that_broke_trains_on_from_the_center(rule, value):
    grads = gradients()
    grads["matrix"][2, 1, 0, 0] = value  # in the middle of a period of 4
    tx = RULES[rule](communication_period=4, drop_nonfinite=True)
    history, state = replay(tx, grads)
    matrix = history["matrix"]
    np.testing.assert_array_equal(matrix[2, 1], matrix[1, 1])
    assert np.isfinite(matrix).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    # After the round it moves again, with a momentum that starts afresh.
    grad = grads["matrix"][4, 1]
    if rule == "elastic":
        grad = grad + 0.3 * (matrix[3, 1] - PARAMS["matrix"])
    np.testing.assert_allclose(matrix[4, 1] - matrix[3, 1], -0.05 * grad, atol=1e-6)
    assert oxs.metrics(state).dropped.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("rule", RULES)
def test_one_broken_step_keeps_a_worker_out_until_the_round(rule):
    """Without a momentum nothing but the flag remembers it."""
    grads = gradients()
    grads["scalar"][1, 3] = np.nan  # two steps before a round
    tx = RULES[rule](optax.sgd(0.1), communication_period=4, drop_nonfinite=True)
    history, state = replay(tx, grads)
    without = jax.tree.map(lambda g: g[:, :3], grads)
    expected, _ = replay(RULES[rule](optax.sgd(0.1), communication_period=4), without)
    for name in PARAMS:
        # Other programs, a weighted mean and a plain one: the last bit may differ.
        np.testing.assert_allclose(
            history[name][:, :3][:4], expected[name][:4], rtol=3e-7
        )
        for t in (1, 2):
            np.testing.assert_array_equal(history[name][t, 3], history[name][0, 3])
    assert oxs.metrics(state).dropped.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_the_center_stays_where_all_workers_are_broken(rule):
    grads = jax.tree.map(lambda g: np.full_like(g, np.nan), gradients())
    tx = RULES[rule](communication_period=2, drop_nonfinite=True)
    history, state = replay(tx, grads)
    for name, p in PARAMS.items():
        np.testing.assert_array_equal(
            history[name], np.broadcast_to(p, history[name].shape)
        )
        np.testing.assert_array_equal(state.center[name], p)
    assert oxs.metrics(state).dropped.tolist() == [3] * WORKERS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.outer))


def test_a_schedule_counts_the_steps_of_a_worker_from_zero():
    """Rounds after the steps 0, 1 and 2, then after every third: 5, 8."""

    def period(step):  # a float, as most schedules give
        return jnp.where(step < 3, 1.0, 3.0)

    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=period)
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(10, WORKERS, 3)).astype(np.float32)
    history, state = replay(tx, grads, np.zeros(3, np.float32))
    equal = [np.ptp(now, axis=0).max() < 1e-6 for now in history]
    assert [t for t in range(10) if equal[t]] == [0, 1, 2, 5, 8]
    assert int(oxs.metrics(state).rounds) == 5
    assert int(oxs.metrics(state).steps_since_round) == 1


def test_reset_restarts_a_schedule():
    """The inner optimizer's own count starts again after each round."""

    def rates(count):
        return 0.5 ** jnp.minimum(count, 2).astype(jnp.float32)

    grads = np.ones((STEPS, WORKERS, 2), np.float32)
    params = np.zeros(2, np.float32)
    for inner_state, expected in (("reset", [1, 0.5, 0.25] * 2 + [1]), ("keep", None)):
        tx = RULES["local_sgd"](
            optax.sgd(rates), communication_period=3, inner_state=inner_state
        )
        history, _ = replay(tx, grads, params)
        expected = expected or [1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
        np.testing.assert_allclose(history[:, 0, 0], -np.cumsum(expected), rtol=1e-6)


def test_the_accumulators_have_the_dtype_that_is_asked_for():
    grads = gradients()
    for dtype in (jnp.bfloat16, jnp.float32):
        tx = RULES["agn"](communication_period=2, accumulator_dtype=dtype)
        state = tx.init(PARAMS)
        for tree in (state.center, state.accumulated, state.outer):
            assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}
    # A coarser center, but the workers keep their own dtype and near the same course.
    history, _ = replay(RULES["agn"](accumulator_dtype=jnp.bfloat16), grads)
    expected, _ = replay(RULES["agn"](), grads)
    contexts.assert_close(history, expected, 2**-7)
    assert history["matrix"].dtype == np.float32


def test_complex_parameters_are_two_real_ones():
    """All of these rules are linear; asked for float32, a complex center stays one."""
    rng = np.random.default_rng(6)
    start = rng.normal(size=(2, 3)).astype(np.float32)  # real and imaginary part
    grads = rng.normal(size=(WORKERS, 4, 2, 3)).astype(np.float32)
    options = {"communication_period": 2, "accumulator_dtype": jnp.float32}
    txs = [make(**options) for make in RULES.values()]

    def run(tx, start, grads):
        def step(carry, grads):
            params, state = carry
            params, state = oxs.apply_gradients(tx, grads, state, params)
            return (params, state), (params, state.center, state.accumulated)

        return jax.lax.scan(step, (start, tx.init(start)), grads)[1]

    def all_rules(grads):
        as_complex = (
            jax.lax.complex(start[0], start[1]),
            jax.lax.complex(grads[:, 0], grads[:, 1]),
        )
        return [(run(tx, start, grads), run(tx, *as_complex)) for tx in txs]

    for real, found in jax.jit(jax.vmap(all_rules, axis_name=AXIS))(grads):
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("c8")}
        found = jax.tree.map(lambda x: np.stack([x.real, x.imag], 2), found)
        contexts.assert_close(found, real)


def test_a_period_that_grows_is_reached():
    """It is read where it began: of the current step's it would run away."""

    def period(step):
        done = jnp.minimum(jnp.asarray(step, jnp.float32), 100) / 100
        rate = 0.05 * (1 + jnp.cos(jnp.pi * done))
        return jnp.clip(jnp.floor(jnp.square(0.05 / rate)), 2, 100)

    def step(carry, _):
        steps, local_step = carry
        due = is_due(period, steps + 1, local_step)
        return (jnp.where(due, 0, steps + 1), local_step + 1), due

    zero = jnp.int32(0)
    _, dues = jax.lax.scan(step, (zero, zero), length=100)
    rounds = (np.flatnonzero(dues) + 1).tolist()
    assert rounds[:31] == list(range(2, 64, 2))
    assert rounds[31:] == [64, 67, 71, 77, 93]
    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=period)
    assert [end for end in range(1, 101) if by_hand.due(tx, end - 1)] == rounds


def test_where_a_period_is_nan_the_workers_meet():
    """`due` refuses it; a compiled step cannot, and must not wait for ever."""

    def period(step):
        return jnp.where(step < 2, 2.0, jnp.nan)

    steps = jnp.arange(5)
    since = jnp.array([1, 2, 1, 1, 1])
    due = [bool(is_due(period, s, t)) for s, t in zip(since, steps, strict=True)]
    assert due == [False, True, True, True, True]


def test_what_a_round_measures():
    """Before the exchange, which leaves no distance behind."""
    arguments = {"communication_period": 2, "measure": True}
    params = jnp.zeros((WORKERS, 4))
    grads = jnp.arange(1.0, WORKERS + 1)[:, None] * jnp.ones((WORKERS, 4))
    for tx, contributed in (
        (oxs.local_sgd(optax.sgd(0.5), AXIS, **arguments), 1.0),
        (
            oxs.elastic_average(
                optax.sgd(0.5), AXIS, moving_rate=0.25, rho=0.0, **arguments
            ),
            0.25,
        ),
    ):
        state = by_hand.replicate(tx.init(params[0]), WORKERS)
        step = jax.jit(
            jax.vmap(functools.partial(oxs.apply_gradients, tx), axis_name=AXIS)
        )
        moved, state = step(grads, state, params)
        before = oxs.metrics(state, moved)
        np.testing.assert_array_equal(before.distance_before_round, np.zeros(WORKERS))
        moved, state = step(grads, state, moved)
        after = oxs.metrics(state, moved)
        apart = 2.0 * np.arange(1, WORKERS + 1)
        np.testing.assert_allclose(after.distance_before_round, apart, rtol=1e-6)
        mean_square = np.mean((contributed * apart) ** 2)
        np.testing.assert_allclose(
            after.contribution_norm, np.full(WORKERS, mean_square**0.5), rtol=1e-6
        )
        assert oxs.optimizers.slot_names(by_hand.first(state))[0] == "center"
        assert "distance_before_round" not in str(
            oxs.optimizers.slot_names(by_hand.first(state))
        )
    without = oxs.metrics(oxs.local_sgd(optax.sgd(0.5), AXIS).init(params[0]))
    assert without.distance_before_round is without.contribution_norm is None


def test_the_penalised_gradient_is_rounded_to_its_dtype():
    # By an operation that XLA keeps: of two casts it may drop both. XLA:CPU does not,
    # so that no number tells.
    def roundings(rho):
        tx = oxs.elastic_average(optax.sgd(0.1), None, moving_rate=0.3, rho=rho)
        params = jnp.zeros(3, jnp.bfloat16)
        state = jax.eval_shape(tx.init, params)
        step = str(jax.make_jaxpr(tx.update)(params, state, params))
        return step.count("reduce_precision[exponent_bits=8 mantissa_bits=7]")

    assert roundings(0.3) == roundings(0.0) + 1
