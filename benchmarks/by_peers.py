"""Steps and rounds as users of Optax and DrJAX write them, for `bench_wrappers.py`.

With Optax alone several batches per update are `optax.MultiSteps`. With DrJAX
(Rush et al., "DrJAX: Scalable and Differentiable MapReduce Primitives in JAX", 2024)
workers are a `map_fn` and their mean a `reduce_mean`; MaxText builds DiLoCo from these
two, with the exchange in a `lax.cond` after each step. Local SGD is the same with
plain SGD of rate 1 outside.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from by_hand import (
    AXIS,
    CASES,
    INNER,
    OUTER,
    PERIOD,
    Step,
    copy,
    descend,
    kept,
    mesh_of,
    minus,
    on_mesh,
    own,
    step_of,
    varying,
    where_due,
    with_library,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import optx_sync as oxs

Tree = Any
OUTERS = {"local_sgd": optax.sgd(1.0), "diloco": OUTER}


def multi_steps(params: Tree, workers: int, gradient: Callable) -> Step:
    """Optax: the gradient is averaged, and the inner optimizer runs, in every step."""
    tx = optax.MultiSteps(INNER, PERIOD)

    def start(params):
        return copy(params), tx.init(params)

    def step(carry, batch):
        params, state = carry
        grads = lax.pmean(gradient(varying(params), batch), AXIS)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return on_mesh(step, workers, start, (P(), P()), params)


def drjax_step(name: str, params: Tree, workers: int, gradient: Callable) -> Step:
    """DrJAX, as MaxText's DiLoCo: every step asks whether it is time to exchange."""
    drjax, outer = _drjax(), OUTERS[name]

    def train(params, inner, batch):
        return descend(params, inner, gradient(params, batch))

    def exchange(params, center, state):
        center, state = _move(drjax, outer, params, center, state)
        return drjax.broadcast(center), center, state

    def step(carry, batch):
        params, inner, center, state, count = carry
        params, inner = drjax.map_fn(train, (params, inner, batch))
        count = count + 1
        due = count % PERIOD == 0
        moved = where_due(due, exchange, params, center, state)
        return moved[0], inner, *moved[1:], count

    def start(params):
        stacked = oxs.stack((params, INNER.init(params)), workers)
        state = outer.init(params)
        return *stacked, copy(params), state, jnp.zeros((), jnp.int32)

    specs = (P(AXIS), P(AXIS), P(), P(), P())
    return _program(drjax, step, workers, start, specs, params)


def drjax_round(name: str, params: Tree, workers: int, gradient: Callable) -> Step:
    """DrJAX, a whole round in one program: no worker keeps parameters in between."""
    drjax, outer = _drjax(), OUTERS[name]

    def train(params, inner, batches):
        return _descend_all(params, inner, batches, gradient)

    def step(carry, batches):
        inner, center, state = carry
        params = drjax.broadcast(center)
        params, inner = drjax.map_fn(train, (params, inner, batches))
        return inner, *_move(drjax, outer, params, center, state)

    def start(params):
        inner = oxs.stack(INNER.init(params), workers)
        return inner, copy(params), outer.init(params)

    return _program(drjax, step, workers, start, (P(AXIS), P(), P()), params)


def hand_round(name: str, params: Tree, workers: int, gradient: Callable) -> Step:
    """The same round by hand, with a collective under `shard_map`."""
    outer = OUTERS[name]

    def start(params):
        inner = oxs.stack(INNER.init(params), workers)
        return inner, copy(params), outer.init(params)

    def step(carry, batches):
        inner, center, state = carry
        params, inner = _descend_all(varying(center), own(inner), batches, gradient)
        moved = lax.pmean(minus(center, params), AXIS)
        updates, state = outer.update(moved, state, center)
        return kept(inner), optax.apply_updates(center, updates), state

    return on_mesh(step, workers, start, (P(AXIS), P(), P()), params)


def library_round(name: str, params: Tree, workers: int, gradient: Callable) -> Step:
    """The library's steps in a loop: a round of as many as its period."""
    step = with_library(CASES[name], params, workers, gradient)

    def loop(carry, batches):
        batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batches)
        return lax.scan(lambda c, b: (step.program(c, b), None), carry, batches)[0]

    places = jax.tree.map(lambda x: x.sharding, step.carry)
    program = jax.jit(loop, donate_argnums=0, out_shardings=places)
    return step._replace(program=program)


def _descend_all(params, inner, batches, gradient):
    """The steps of a worker from one exchange to the next."""

    def one(carry, batch):
        params, inner = carry
        return descend(params, inner, gradient(params, batch)), None

    return lax.scan(one, (params, inner), batches)[0]


def _move(drjax, outer, params, center, state):
    """What the workers moved on average is the outer optimizer's gradient."""
    moved = drjax.reduce_mean(minus(drjax.broadcast(center), params))
    updates, state = outer.update(moved, state, center)
    return optax.apply_updates(center, updates), state


def _drjax() -> Any:
    # An extra of the benchmarks: who has not installed it leaves these steps out.
    return importlib.import_module("drjax")


def _program(drjax, step, workers, start, specs, params) -> Step:
    """A program of DrJAX, which looks for the mesh in the context."""
    mesh = mesh_of(workers)
    placed = drjax.program(placements={AXIS: workers})(step)

    def program(carry, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return placed(carry, batch)

    return step_of(program, mesh, start, specs, params)
