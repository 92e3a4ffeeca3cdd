"""torchft's own regression test of DiLoCo with two fragments, as recorded.

The figures stand in tests/golden: what torchft's fixtures hold, written down by
`tests.reference.torchft`. Each layer meets every six steps, the first one three steps
ahead of the second; with a delay it sets out a step earlier than here, and arrives when
it does without one.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.reference import torchft

AXIS = contexts.AXIS
GOLDEN = json.loads(torchft.FILE.read_text())
RECORDED = {(case["delay"], case["mix"]): case for case in GOLDEN["cases"]}
STEPS = GOLDEN["steps"]


def test_the_file_holds_every_case_of_its_generator():
    assert tuple(RECORDED) == torchft.CASES
    for name, case in RECORDED.items():
        own, center = torchft.histories(*name)
        assert case["params"] == own.tolist() and case["center"] == center.tolist()


@pytest.fixture(scope="module")
def histories():
    """Parameters and centers of all runs, from one program."""

    def run(delay, mix):
        tx = oxs.diloco(
            optax.sgd(GOLDEN["inner_rate"]),
            AXIS,
            outer=optax.sgd(GOLDEN["outer_rate"]),
            communication_period=GOLDEN["period"],
            fragments=GOLDEN["parts"],
            delay=delay,
            keep_local=mix,
        )
        start = {"layers": [jnp.ones(()), jnp.ones(())]}
        grads = jax.tree.map(lambda x: GOLDEN["gradient"] * x, start)

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
    for own in histories[case]:  # of both replicas, [steps, layers, own and center]
        np.testing.assert_array_equal(own[..., 0], np.float32(recorded["params"]))
        np.testing.assert_array_equal(own[..., 1], np.float32(recorded["center"]))
