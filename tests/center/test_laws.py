"""What is not in the recurrence of `test_lockstep.py`: schedules, dtypes, measures."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs
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
    grads = jnp.arange(1.0, WORKERS + 1)[:, None] * jnp.ones((WORKERS, 4))
    for rule, contributed in (("local_sgd", 1.0), ("elastic", 0.2)):
        tx = RULES[rule](optax.sgd(0.5), communication_period=2, measure=True)
        step, params, state = contexts.started(tx, jnp.zeros(4))
        params, state = step(params, state, grads)
        assert not np.any(oxs.metrics(state, params).distance_before_round)
        params, state = step(params, state, grads)
        after = oxs.metrics(state, params)
        # The penalty of elastic averaging has pulled by 0.3 of the first step.
        apart = (2.0 - 0.3 / 2 * (rule == "elastic")) * np.arange(1, WORKERS + 1)
        np.testing.assert_allclose(after.distance_before_round, apart, rtol=1e-6)
        mean_square = np.mean((contributed * apart) ** 2)
        np.testing.assert_allclose(after.contribution_norm, mean_square**0.5, rtol=1e-6)
        names = oxs.optimizers.slot_names(tx.init(jnp.zeros(4)))
        assert names[0] == "center" and "distance_before_round" not in str(names)
    without = oxs.metrics(RULES["local_sgd"]().init(PARAMS))
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
