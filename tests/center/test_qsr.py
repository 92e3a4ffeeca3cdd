"""The period that grows as the learning rate falls."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests.refusals import all_refused

STEPS = 120


def falling(step):
    """Up to 0.1 in ten steps, and down to 0 along a cosine."""
    # Not of Optax: its schedules need the standard promotion of dtypes.
    step = jnp.asarray(step).astype(jnp.float32)
    angle = jnp.float32(math.pi) * (step - 10) / (STEPS - 10)
    return jnp.minimum((step + 3) / 130, 0.05 * (1 + jnp.cos(angle)))


def rounds(alpha, base, power=2, warmup=0, total=None):
    """The steps that end a period, by the rule written down with floats."""
    found, begin = [], 0
    while begin < STEPS:
        rate = float(falling(max(begin, warmup)))
        length = (alpha / rate) ** power if rate else math.inf
        length = max(base, math.floor(length) if length < STEPS else STEPS)
        if total is not None:
            length = min(length, total - begin)
        begin += length
        found.append(begin - 1)
    return [step for step in found if step < STEPS]


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": 0.21, "base": 4, "warmup": 10},
        {"alpha": 0.17, "base": 3, "power": 3, "warmup": 9, "total": STEPS},
        {"alpha": 0.13, "base": 2, "total": STEPS},
    ],
)
def test_rounds_are_those_of_the_rule(arguments):
    numbers = dict(arguments)
    total = numbers.pop("total", None)
    # Compiled, as the host asks often.
    period = jax.jit(oxs.outer.qsr(falling, **numbers, total_steps=total))
    found = [step for step in range(STEPS) if by_hand.due(period, step)]
    assert found == rounds(**arguments)
    assert (found[-1] == STEPS - 1) or total is None
    assert max(np.diff(found)) > 2 * min(np.diff(found))


def test_a_compiled_run_meets_where_the_host_says():
    period = jax.jit(oxs.outer.qsr(falling, 0.3, warmup=10, total_steps=STEPS))
    tx = oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=period)

    def run(x):
        def step(carry, _):
            params, state = oxs.apply_gradients(tx, x, carry[1], carry[0])
            return (params, state), state.steps_since_round == 0

        return jax.lax.scan(step, (x, tx.init(x)), length=STEPS)[1]

    met = jax.jit(jax.vmap(run, axis_name="workers"))(jnp.arange(2.0))
    expected = [by_hand.due(tx, step) for step in range(STEPS)]
    np.testing.assert_array_equal(met, [expected] * 2)
    assert expected[-1]


def test_a_constant_rate_gives_a_constant_period():
    period = oxs.outer.qsr(0.1, 0.3, base=2)
    # 0.3 / 0.1 is not quite 3 in floats.
    np.testing.assert_array_equal([period(0), period(jnp.int32(50))], [9.0, 9.0])


test_refused = all_refused(globals())(r"""
oxs.outer.qsr(0.1, alpha=0.0)
oxs.outer.qsr(0.1, alpha=0.1, base=0)
oxs.outer.qsr(0.1, alpha=0.1, power=-1)
oxs.outer.qsr(0.1, alpha=0.1, warmup=-1)
oxs.outer.qsr(0.1, alpha=0.1, total_steps=0)  # ValueError: must
oxs.outer.qsr(0.1, alpha=0.1, base=2.5)  # TypeError: must
""")
