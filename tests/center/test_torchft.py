"""The figures of torchft's own regression test of DiLoCo, without delay.

Source: meta-pytorch/torchft, `test_fixtures/`, the files of `diloco_regression_test`,
`DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0`, `_1` and `_2`. Two replicas, two
layers of one weight that start at 1, gradients of 2, inner rate 1, outer rate 2. Each
layer meets every six steps, the first one three steps ahead of the second; of the
global parameters a replica takes 1 - mix, of its own mix.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts

AXIS, STEPS = contexts.AXIS, 15
# Per mix: both layers after 0 ... 15 steps; their global parameters at 0, 3, 6, 9, 12.
RECORDED: dict[float, Any] = {
    0.0: (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        [1, -11, -11, -35, -35],
        [1, 1, -23, -23, -47],
    ),
    0.5: (
        [
            1,
            -1,
            -3,
            -8,
            -10,
            -12,
            -14,
            -16,
            -18,
            -24.5,
            -26.5,
            -28.5,
            -30.5,
            -32.5,
            -34.5,
            -40.25,
        ],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [1, -11, -11, -29, -29],
        [1, 1, -23, -23, -35],
    ),
    1.0: (
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        [1, -11, -11, -23, -23],
        [1, 1, -23, -23, -23],
    ),
}


def mixing(mix):
    """DiLoCo whose workers keep a part of their own parameters."""
    return oxs.CenterRule(
        contribute=lambda own, center, at: center - own.params,
        outer=optax.sgd(2.0),
        take=lambda x, before, after, at: (1 - mix) * after + mix * x,
        mean_over="workers",
    )


@pytest.fixture(scope="module")
def histories():
    """Parameters and centers of all runs, from one program."""

    def three_then_six(step):
        return jnp.where(step < 3, 3, 6)

    def run(mix, period):
        inner = optax.sgd(1.0)
        tx = oxs.center_variable(inner, mixing(mix), AXIS, communication_period=period)
        if mix == 0:
            tx = oxs.diloco(
                inner, AXIS, outer=optax.sgd(2.0), communication_period=period
            )
        start = jnp.ones(())

        def step(carry, _):
            params, state = carry
            params, state = oxs.apply_gradients(tx, jnp.float32(2), state, params)
            return (params, state), jnp.stack([params, state.center])

        _, after = jax.lax.scan(step, (start, tx.init(start)), length=STEPS)
        return jnp.concatenate([jnp.ones((1, 2)), after])

    def all_runs(_):
        return {mix: (run(mix, three_then_six), run(mix, 6)) for mix in RECORDED}

    return jax.jit(jax.vmap(all_runs, axis_name=AXIS))(jnp.zeros(2))


@pytest.mark.parametrize("mix", RECORDED)
def test_diloco_mocked_updates(histories, mix):
    *params, first, second = RECORDED[mix]
    for layer, expected, center in zip(
        histories[mix], params, (first, second), strict=True
    ):
        for own in layer:  # of both replicas
            np.testing.assert_array_equal(own[:, 0], np.float32(expected))
            np.testing.assert_array_equal(own[::3, 1][:5], np.float32(center))
