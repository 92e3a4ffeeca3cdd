"""A step of workers that train: simulated on one device, or compiled for many."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from by_hand import AXIS, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs


def loss_of(params: Any, inputs: jax.Array) -> jax.Array:
    """Of a perceptron that is to give back its input."""
    x = inputs
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - inputs) ** 2)


def workers_step(
    tx: Any,
    params: Any,
    grad_of: Callable[[Any, Any], Any],
    apply: Callable = oxs.apply_gradients,
    mesh: Any = None,
) -> Callable:
    """`(params, state, batch) -> (params, state)` of all workers, on a mesh or on one.

    `grad_of(params, batch)` is the gradient of one worker, `apply` what uses it.
    """
    axes = oxs.by_hand.state_axes(tx, params)

    def step(params, state, batch):
        return apply(tx, grad_of(params, batch), state, params)

    marks = {"in_axes": (0, axes, 0), "out_axes": (0, axes)}
    return oxs.by_hand.map_workers(step, AXIS, mesh=mesh, **marks)


def compiled_step(
    tx: Any,
    params: Any,
    grad_of: Callable[[Any, Any], Any],
    batch: Any,
    mesh: Any,
    apply: Callable = oxs.apply_gradients,
) -> jax.stages.Compiled:
    """The same, compiled for a mesh, where each device is a worker; nothing is run.

    One worker's parameters and all workers' batch may be shapes.
    """
    one = params, jax.eval_shape(tx.init, params)
    carry = oxs.Workers(mesh.size, AXIS, mesh=mesh).expect(one)
    places = jax.tree.map(lambda x: x.sharding, carry)
    split = NamedSharding(mesh, P(AXIS))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), batch
    )
    with warnings.catch_warnings():
        # Of threads, which are for programs that run.
        warnings.filterwarnings("ignore", r"\d+ CPU devices share", UserWarning)
        step = workers_step(tx, params, grad_of, apply, mesh)
    program = jax.jit(step, donate_argnums=(0, 1), out_shardings=places)
    return program.lower(*carry, batch).compile()


def collectives_of(
    tx: Any, params: Any, grad_of: Callable[[Any, Any], Any], batch: Any
) -> list[oxs.audit.Collective]:
    """What a worker sends in a step that is compiled for a device for each."""
    (workers,) = {x.shape[0] for x in jax.tree.leaves(batch)}
    step = compiled_step(tx, params, grad_of, batch, mesh_of(workers))
    return oxs.audit.collectives(step)
