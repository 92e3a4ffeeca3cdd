"""Bad input is refused, and the message says how to mend it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts
from tests.refusals import refused

AXIS = contexts.AXIS
wrong: Any = oxs  # What these tests pass is of a wrong type on purpose.
SGD = optax.sgd(0.1)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}


def update(tx, grads=PARAMS, params=PARAMS, workers=2, axis_name=AXIS):
    """The program of a step of equal workers, which is not run."""

    def one(_):
        return tx.update(grads, tx.init(PARAMS), params)

    mapped = jax.vmap(one, axis_name=axis_name, axis_size=workers)
    return jax.make_jaxpr(mapped)(jnp.arange(workers))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        *(
            (
                lambda period=period: wrong.local_sgd(
                    SGD, AXIS, communication_period=period
                ),
                rf"ValueError: communication_period must be 1 or more.*got {period}",
            )
            for period in (0, -3, 2**31, 10**10, np.int64(2**40))
        ),
        *(
            (
                lambda period=period: wrong.agn(SGD, AXIS, communication_period=period),
                r"TypeError: communication_period must be an integer, and not traced; "
                r"got .* "
                r"Pass an int, which is static, for example 10, or a schedule",
            )
            for period in (True, 2.0, "10", None, np.ones(2))
        ),
        *(
            (
                lambda rate=rate: wrong.elastic_average(
                    SGD, AXIS, moving_rate=rate, rho=0.0
                ),
                r"ValueError: moving_rate must be in \[0, 1\]; got",
            )
            for rate in (-0.1, 1.5, math.nan, math.inf, np.float32(2), jnp.float32(-1))
        ),
        *(
            (
                lambda rho=rho: wrong.elastic_average(SGD, AXIS, rho=rho),
                "ValueError: rho must be finite and at least 0; got",
            )
            for rho in (-0.1, math.nan, math.inf, jnp.float32(-1))
        ),
        *(
            (
                lambda rate=rate: wrong.elastic_average(
                    SGD, AXIS, moving_rate=rate, rho=0.0
                ),
                "TypeError: moving_rate must be a number or None; got",
            )
            for rate in ("0.1", True, jnp.ones(2), [0.1])
        ),
        (
            lambda: wrong.elastic_average(SGD, AXIS),
            r"ValueError: rho=None .* needs learning_rate. .*=0.1, say, or rho=0.0",
        ),
        *(
            (
                lambda workers=workers: wrong.elastic_average(
                    SGD, AXIS, num_workers=workers, rho=0.0
                ),
                f"{error}: num_workers must be",
            )
            for workers, error in ((0, "ValueError"), (2.0, "TypeError"))
        ),
        *(
            (
                lambda rate=rate: wrong.elastic_average(SGD, AXIS, learning_rate=rate),
                "ValueError: learning_rate must be a float > 0, from which rho",
            )
            for rate in (0, 0.0, -1.0, math.nan, math.inf)
        ),
        (
            lambda: wrong.elastic_average(SGD, AXIS, learning_rate=lambda step: 0.1),
            "TypeError: learning_rate must be a number",
        ),
        (
            lambda: wrong.elastic_average(
                SGD, AXIS, rho=0.0, communication_period=lambda step: 3
            ),
            "ValueError: With a schedule as communication_period .* Pass moving_rate",
        ),
        (
            lambda: wrong.agn(SGD, AXIS, reduction="max"),
            "ValueError: reduction must be 'mean' or 'sum'; got 'max'",
        ),
        (
            lambda: wrong.agn(SGD, AXIS, accumulate="params"),
            "ValueError: accumulate must be 'gradients' or 'updates'; got 'params'",
        ),
        (
            lambda: wrong.agn(SGD, AXIS, outer=SGD, accumulate="updates"),
            "ValueError: Leave outer out, or pass accumulate='gradients'",
        ),
        (
            lambda: wrong.local_sgd(SGD, AXIS, inner_state="mean"),
            "ValueError: inner_state must .*'keep', 'average' and 'reset'; got 'mean'",
        ),
        (
            lambda: wrong.local_sgd(SGD, AXIS, accumulator_dtype=jnp.int32),
            "ValueError: accumulator_dtype must be a floating dtype .*; got int32",
        ),
        (
            lambda: wrong.local_sgd(AXIS, SGD),
            r"TypeError: inner must be an .*transformation; got 'data' of type str",
        ),
        (
            lambda: wrong.diloco(SGD, AXIS, outer=0.7),
            (
                r"TypeError: must be an Optax .*transformation; got 0.7 .*"
                r" oxs.rules.diloco"
            ),
        ),
        (
            lambda: wrong.rules.agn(None),
            r"TypeError: must be an Optax .*transformation; got None .* oxs.rules.agn",
        ),
        (
            lambda: wrong.center_variable(SGD, oxs.rules.local_sgd, AXIS),
            (
                r"TypeError: must be a CenterRule; got <function .*"
                r" oxs.rules.local_sgd\(\)"
            ),
        ),
        (
            lambda: wrong.local_sgd(SGD, 0),
            "TypeError: axis_name must be .* mapped axis, or a tuple of names; got 0",
        ),
        (
            lambda: wrong.local_sgd(SGD, ("data", "data")),
            "ValueError: axis_name names an axis twice",
        ),
    ],
)
def test_refused_at_construction(build, said):
    with refused(said):
        build()


ROWS = oxs.IndexedSlices(jnp.array([0]), jnp.ones((1, 2)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: update(oxs.elastic_average(SGD, AXIS, num_workers=3, rho=0.0)),
            r"ValueError: num_workers=3, but the axis 'data' has 2 workers. Leave",
        ),
        (
            lambda: update(
                oxs.local_sgd(SGD, AXIS, communication_period=lambda _: jnp.ones(1))
            ),
            r"ValueError: a schedule of scalars; .* shape \(1,\)",
        ),
        (
            lambda: update(oxs.local_sgd(SGD, AXIS), params=None),
            r"ValueError: Call update\(grads, state, params\)",
        ),
        (
            lambda: update(oxs.diloco(SGD, AXIS), grads={**PARAMS, "b": ROWS}),
            r"ValueError: \['b'\]",
        ),
        (
            lambda: oxs.local_sgd(SGD, AXIS).init({"n": jnp.zeros(2, jnp.int32)}),
            r"TypeError: at \['n'\] has dtype int32; .* Leave it out with optax.masked",
        ),
        (
            lambda: oxs.elastic_average(SGD, AXIS, rho=0.0).init({"b": 0.5}),
            r"TypeError: at \['b'\] is 0\.5 of type float; .* jnp.asa",
        ),
    ],
)
def test_refused_with_the_parameters(call, said):
    with refused(said):
        call()


def test_integers_of_numpy_are_integers():
    def one_step(kind):
        tx = oxs.elastic_average(
            SGD, AXIS, num_workers=kind(2), communication_period=kind(1), rho=0.0
        )
        return str(update(tx))

    assert one_step(np.int64) == one_step(int)


@pytest.mark.parametrize(
    "tx",
    [
        oxs.elastic_average(SGD, AXIS, rho=0.0),
        oxs.agn(SGD, AXIS),
        oxs.local_sgd(SGD, AXIS),
        oxs.diloco(SGD, AXIS),
    ],
)
def test_a_gradient_that_autodiff_has_summed_is_refused(tx):
    """Replicated parameters in a checked shard_map: the gradient varies no more."""

    def local(params, x):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * x[0] + jnp.sum(p["b"]))(params)
        return tx.update(grads, tx.init(params), params)[0]

    run = jax.shard_map(
        local, mesh=contexts.mesh(), in_specs=(P(), P(AXIS)), out_specs=P(AXIS)
    )
    with pytest.raises(
        ValueError, match=r"already summed .*oxs.by_hand.replicate\(params, n\)"
    ):
        jax.eval_shape(run, PARAMS, jnp.ones(contexts.REPLICAS))


def test_a_refused_call_leaves_the_state_as_it_was():
    tx = oxs.diloco(SGD, AXIS)
    state = tx.init(PARAMS)
    before = jax.tree.map(np.array, state)
    with pytest.raises(ValueError):
        tx.update({"w": PARAMS["w"]}, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state, before)
