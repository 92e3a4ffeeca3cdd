"""The figures of torchft's own regression test of DiLoCo with two fragments.

Source: meta-pytorch/torchft, `test_fixtures/`, the files of `diloco_regression_test`,
`DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0`, `_1`, `_2`, `_4` and `_5`; `_3`,
a delay of 1 and a mix of 0, is worked out by hand. Two replicas, two layers of one
weight that start at 1, gradients of 2, inner rate 1, outer rate 2. Each layer meets
every six steps, the first one three steps ahead of the second; with a delay it sets out
a step earlier, and arrives when it does without one. Of the global parameters a replica
takes 1 - mix, of its own mix.
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
ALONE = [1 - 2 * step for step in range(STEPS + 1)]
# (delay, mix): both layers after 0 ... 15 steps; their global parameters at 0, 3, ....
RECORDED: dict[tuple[int, float], Any] = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        [1, -11, -11, -35, -35],
        [1, 1, -23, -23, -47],
    ),
    (0, 0.5): (
        [1, -1, -3, *range(-8, -19, -2), *np.arange(-24.5, -35, -2), -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [1, -11, -11, -29, -29],
        [1, 1, -23, -23, -35],
    ),
    (0, 1.0): (ALONE, ALONE, [1, -11, -11, -23, -23], [1, 1, -23, -23, -23]),
    (1, 0.0): (
        [1, -1, -3, *range(-7, -18, -2), *range(-27, -38, -2), -47],
        [1, -1, -3, -5, -7, -9, *range(-19, -30, -2), *range(-39, -46, -2)],
        [1, -7, -7, -27, -27, -47],
        [1, 1, -19, -19, -39, -39],
    ),
    (1, 0.5): (
        [1, -1, -3, *range(-6, -17, -2), *np.arange(-21.5, -32, -2), -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        [1, -7, -7, -25, -25, -38],
        [1, 1, -19, -19, -31, -31],
    ),
    (1, 1.0): (ALONE, ALONE, [1, -7, -7, -23, -23], [1, 1, -19, -19, -23]),
}


@pytest.fixture(scope="module")
def histories():
    """Parameters and centers of all runs, from one program."""

    def run(delay, mix):
        tx = oxs.diloco(
            optax.sgd(1.0),
            AXIS,
            outer=optax.sgd(2.0),
            communication_period=6,
            fragments=2,
            delay=delay,
            keep_local=mix,
        )
        start = {"layers": [jnp.ones(()), jnp.ones(())]}
        grads = jax.tree.map(lambda x: 2 * x, start)

        def step(carry, number):
            params, state = carry
            early = number % 3 == 1 if delay else None
            params, state = oxs.apply_gradients(tx, grads, state, params, meet=early)
            both = [params["layers"], state.center["layers"]]
            return (params, state), jnp.array(both).T

        _, after = jax.lax.scan(step, (start, tx.init(start)), jnp.arange(STEPS))
        return jnp.concatenate([jnp.ones((1, 2, 2)), after])

    def all_runs(_):
        return {case: run(*case) for case in RECORDED}

    return jax.jit(jax.vmap(all_runs, axis_name=AXIS))(jnp.zeros(2))


@pytest.mark.parametrize("case", RECORDED)
def test_diloco_mocked_updates(histories, case):
    recorded = RECORDED[case]
    for own in histories[case]:  # of both replicas
        for layer in (0, 1):
            expected, center = recorded[layer], recorded[2 + layer]
            np.testing.assert_array_equal(own[:, layer, 0], np.float32(expected))
            seen = own[::3, layer, 1][: len(center)]
            np.testing.assert_array_equal(seen, np.float32(center))
