"""Steps as users of Optax and DrJAX write them, for `bench_wrappers.py`.

With Optax alone several batches per update are `optax.MultiSteps`. With DrJAX
(Rush et al., "DrJAX: Scalable and Differentiable MapReduce Primitives in JAX", 2024)
workers are a `map_fn` and their mean a `reduce_mean`; MaxText builds DiLoCo from these
two, with the exchange in a `lax.cond` after each step. Local SGD is the same with
plain SGD of rate 1 outside.
"""

import importlib
from typing import Any

import by_hand
import jax.numpy as jnp
import optax
from by_hand import AXIS, INNER, OUTER, PERIOD, copy, descend, minus, update, varying
from jax import lax, sharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs

OUTERS = {"local_sgd": optax.sgd(1.0), "diloco": OUTER}


def multi_steps(params, workers, gradient):
    """Optax: the gradient is averaged, and the inner optimizer runs, in every step."""
    tx = optax.MultiSteps(INNER, PERIOD)

    def start(params):
        return copy(params), tx.init(params)

    def step(carry, batch):
        params, state = carry
        grads = lax.pmean(gradient(varying(params), batch), AXIS)
        return update(tx, grads, state, params)

    return by_hand.on_mesh(step, workers, start, (P(), P()), params)


def drjax_step(name, params, workers, gradient):
    """DrJAX, as MaxText's DiLoCo: every step asks whether it is time to exchange."""
    # An extra of the benchmarks: who has not installed it leaves these steps out.
    drjax: Any = importlib.import_module("drjax")
    outer, mesh = OUTERS[name], by_hand.mesh_of(workers)

    def train(params, inner, batch):
        return descend(params, inner, gradient(params, batch))

    def exchange(params, center, state):
        # What the workers moved on average is the outer optimizer's gradient.
        moved = drjax.reduce_mean(minus(drjax.broadcast(center), params))
        center, state = update(outer, moved, state, center)
        return drjax.broadcast(center), center, state

    @drjax.program(placements={AXIS: workers})
    def step(carry, batch):
        params, inner, center, state, count = carry
        params, inner = drjax.map_fn(train, (params, inner, batch))
        count = count + 1
        due = count % PERIOD == 0
        moved = by_hand.where_due(due, exchange, params, center, state)
        return moved[0], inner, *moved[1:], count

    def program(carry, batch):
        # DrJAX looks for the mesh in the context.
        with sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step(carry, batch)

    def start(params):
        stacked = oxs.by_hand.replicate((params, INNER.init(params)), workers)
        return *stacked, copy(params), outer.init(params), jnp.zeros((), jnp.int32)

    specs = (P(AXIS), P(AXIS), P(), P(), P())
    return by_hand.step_of(program, mesh, start, specs, params)
