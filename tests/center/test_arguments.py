"""Bad input is refused, and the message says how to mend it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts
from tests.refusals import all_refused

AXIS = contexts.AXIS
SGD = optax.sgd(0.1)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}


def local_sgd(period: Any = 10, **options):
    return oxs.local_sgd(SGD, AXIS, communication_period=period, **options)


def agn(period: Any = 10, **options):
    return oxs.agn(SGD, AXIS, communication_period=period, **options)


def elastic(moving_rate: Any = None, period: Any = 10, rho: Any = 0.0, **options):
    given = {"moving_rate": moving_rate, "communication_period": period, "rho": rho}
    return oxs.elastic_average(SGD, AXIS, **given, **options)


def update(tx, grads=PARAMS, params=PARAMS, workers=2, axis_name=AXIS):
    """The program of a step of equal workers, which is not run."""

    def one(_):
        return tx.update(grads, tx.init(PARAMS), params)

    mapped = jax.vmap(one, axis_name=axis_name, axis_size=workers)
    return jax.make_jaxpr(mapped)(jnp.arange(workers))


ROWS = oxs.IndexedSlices(jnp.array([0]), jnp.ones((1, 2)))


test_refused = all_refused(globals())(r"""
local_sgd(period=0)
local_sgd(period=-3)
local_sgd(period=2**31)
local_sgd(period=10**10)
local_sgd(period=np.int64(2**40))
    # ValueError: communication_period must be 1 or more.*got (0|-3|\d{10,})
local_sgd(period=lambda step: 0).init(PARAMS)
local_sgd(period=lambda step: -3.0).init(PARAMS)
local_sgd(period=lambda step: jnp.nan).init(PARAMS)
    # ValueError: numbers of steps above 0; it gave (0|-3.0|nan) .* step 0
agn(period=True)
agn(period=2.0)
agn(period="10")
agn(period=None)
agn(period=np.ones(2))
    # TypeError: must be an integer, and not traced; .* int, which is static.* schedule
elastic(-0.1)
elastic(1.5)
elastic(np.nan)
elastic(np.inf)
elastic(np.float32(2))
elastic(jnp.float32(-1))  # ValueError: moving_rate must be in \[0, 1\]; got
elastic(rho=-0.1)
elastic(rho=np.nan)
elastic(rho=np.inf)
elastic(rho=jnp.float32(-1))  # ValueError: rho must be finite and at least 0; got
elastic("0.1")
elastic(True)
elastic(jnp.ones(2))
elastic([0.1])  # TypeError: moving_rate must be a number or None; got
elastic(rho=None)
    # ValueError: rho=None .* needs learning_rate. .*=0.1, say, or rho=0.0
elastic(num_workers=0)  # ValueError: num_workers must be
elastic(num_workers=2.0)  # TypeError: num_workers must be
elastic(rho=None, learning_rate=0)
elastic(rho=None, learning_rate=0.0)
elastic(rho=None, learning_rate=-1.0)
elastic(rho=None, learning_rate=np.nan)
elastic(rho=None, learning_rate=np.inf)
    # ValueError: learning_rate must be a float > 0, from which rho
elastic(rho=None, learning_rate=len)  # TypeError: learning_rate must be a number
elastic(period=lambda step: 3)
    # ValueError: With a schedule as communication_period .* Pass moving_rate
agn(reduction="max")  # ValueError: reduction must be 'mean' or 'sum'; got 'max'
agn(accumulate="params")
    # ValueError: accumulate must be 'gradients' or 'updates'; got 'params'
agn(outer=SGD, accumulate="updates")
    # ValueError: Leave outer out, or pass accumulate='gradients'
local_sgd(inner_state="mean")
    # ValueError: inner_state must .*'keep', 'average' and 'reset'; got 'mean'
local_sgd(accumulator_dtype=jnp.int32)
    # ValueError: accumulator_dtype must be a floating dtype .*; got int32
oxs.local_sgd(AXIS, SGD)
    # TypeError: inner must be an .*transformation; got 'data' of type str
oxs.diloco(SGD, AXIS, outer=0.7)
    # TypeError: must be an Optax .*transformation; got 0.7 .* oxs.rules.diloco
oxs.rules.agn(None)
    # TypeError: must be an Optax .*transformation; got None .* oxs.rules.agn
oxs.center_variable(SGD, oxs.rules.local_sgd, AXIS)
    # TypeError: must be a CenterRule; got <function .* oxs.rules.local_sgd\(\)
oxs.center_variable(SGD, oxs.rules.diloco()._replace(mean_over="worker"), AXIS)
    # ValueError: mean_over must be one of 'pushed', 'workers' and None; got 'worker'
oxs.local_sgd(SGD, 0)
    # TypeError: axis_name must be .* mapped axis, or a tuple of names; got 0
oxs.local_sgd(SGD, ("data", "data"))  # ValueError: axis_name names an axis twice
update(elastic(num_workers=3))
    # ValueError: num_workers=3, but the axis 'data' has 2 workers. Leave
local_sgd(period=lambda _: jnp.ones(1)).init(PARAMS)
    # ValueError: a schedule of scalars, .* gave \[1.\]
update(local_sgd(), params=None)  # ValueError: Call update\(grads, state, params\)
update(oxs.diloco(SGD, AXIS), grads={**PARAMS, "b": ROWS})  # ValueError: \['b'\]
local_sgd().init({"n": jnp.zeros(2, jnp.int32)})
    # TypeError: at \['n'\] has dtype int32; .* Leave it out with optax.masked
elastic().init({"b": 0.5})  # TypeError: at \['b'\] is 0\.5 of type float; .* jnp.asa
""")


def test_integers_of_numpy_are_integers():
    def one_step(kind):
        return str(update(elastic(num_workers=kind(2), period=kind(1))))

    assert one_step(np.int64) == one_step(int)


@pytest.mark.parametrize("tx", [elastic(), agn(), local_sgd(), oxs.diloco(SGD, AXIS)])
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


def test_a_schedule_of_what_is_traced_has_no_number_yet():
    """As in a grid of periods, in one program."""

    def start(period):
        return local_sgd(period=lambda step: period).init(PARAMS)

    assert jax.eval_shape(start, jnp.int32(3)).local_step.shape == ()
