"""torchft's own regression test of DiLoCo with two fragments, as recorded.

The figures stand in tests/golden: what torchft's fixtures hold, written down by
`tests.reference.torchft`. Each layer meets every six steps, the first one three steps
ahead of the second. With a delay of a step it sets out a step earlier than here, and
arrives when it does without one: `overlap=True`, whose rounds are asked for a step
early.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.reference import torchft

AXIS = contexts.AXIS
GOLDEN = json.loads(torchft.FILE.read_text())
RECORDED = {case["delay"]: case for case in GOLDEN["cases"]}
STEPS = GOLDEN["steps"]


def test_the_file_holds_every_case_of_its_generator():
    assert tuple(RECORDED) == torchft.DELAYS
    for delay, case in RECORDED.items():
        own, center = torchft.histories(delay)
        assert case["params"] == own.tolist() and case["center"] == center.tolist()


def made(**options):
    inner, outer = (optax.sgd(GOLDEN[f"{rate}_rate"]) for rate in ("inner", "outer"))
    options |= {"communication_period": GOLDEN["period"], "fragments": GOLDEN["parts"]}
    return oxs.diloco(inner, AXIS, outer=outer, **options)


@pytest.fixture(scope="module")
def histories():
    """Parameters and centers of all runs, from one program."""

    def run(delay):
        tx = made(overlap=bool(delay))
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
        return {delay: run(delay) for delay in RECORDED}

    return jax.jit(jax.vmap(all_runs, axis_name=AXIS))(jnp.zeros(2))


@pytest.mark.parametrize("delay", RECORDED)
def test_diloco_mocked_updates(histories, delay):
    recorded = RECORDED[delay]
    for own in histories[delay]:  # of both replicas, [steps, layers, own and center]
        np.testing.assert_array_equal(own[..., 0], np.float32(recorded["params"]))
        np.testing.assert_array_equal(own[..., 1], np.float32(recorded["center"]))


def test_diloco_mocked_failure_recovery():
    """A replica dies after step 6; another one is there from the round of step 9 on.

    In torchft's fixture of this name (at the same commit) the histories are those of
    its run without a death and without a delay: the new replica takes the living
    one's own parameters, also of the part whose round is under way. Here it begins at
    the center (docs/checkpoints.md): in that part's next round one of two brings three
    steps less, and the outer step is shorter by as much.
    """
    tx = made()
    one = [jnp.ones(()), jnp.ones(())]
    made_for = {number: contexts.started(tx, one, number) for number in (1, 2)}
    _, params, state = made_for[2]
    own, center = [], []
    for number in range(1, STEPS + 1):
        grads = jax.tree.map(lambda x: jnp.full_like(x, GOLDEN["gradient"]), params)
        params, state = made_for[len(params[0])][0](params, state, grads)
        if number == 6:
            with pytest.warns(UserWarning, match="what leaving workers have learned"):
                params, state = by_hand.resize(tx, params, state, 1)
        if number == 9:
            params, state = by_hand.resize(tx, params, state, 2)
        own.append(np.stack(params, -1))
        center.append(np.stack(state.center))
    recorded = RECORDED[0]
    first = np.array([x[0] for x in own])
    later, center = np.array([x[1] for x in own[8:]]), np.array(center)
    # The second layer meets in step 12: a mean of 6 and 12 of them, times 2.
    missing = np.zeros((STEPS, 2))
    missing[11:, 1] = 6
    np.testing.assert_array_equal(first, recorded["params"][1:] + missing)
    np.testing.assert_array_equal(center, recorded["center"][1:] + missing)
    missing[8:11, 1] = 6  # of the new one's own, from the center on
    np.testing.assert_array_equal(later, (recorded["params"][1:] + missing)[8:])
