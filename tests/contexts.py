"""The contexts in which a transformation must give one answer.

`replay` runs a transformation for T steps on given per-replica gradients in one of
`CONTEXTS` and returns the parameters of every replica after every step. Four replicas
(devices, lanes of a vmap) everywhere, so that a 4 x 2 mesh of islands fits too.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests.meshes import mesh_of

REPLICAS = 4
AXIS = "data"
CONTEXTS = (
    "pmap",
    "shard_map",  # check_vma=True, everything stacked
    "shard_map_axes",  # check_vma=True, counters and center replicated
    "shard_map_unchecked",
    "vmap",  # everything stacked
    "vmap_axes",  # counters and center unbatched
    "islands",  # vmap with spmd_axis_name over a 4 x 2 mesh
)
# For what is built of mechanisms that are tested in all of these: JAX makes of `pmap`
# an unchecked `shard_map`, and who stacks everything is there once.
DISTINCT = ("shard_map_axes", "shard_map_unchecked", "vmap_axes", "islands")

# Compiler options for a program whose fusions, copies and bytes are asked for: what
# tests/conftest.py changed of what decides them is set back to what users have.
AS_USERS_COMPILE: Any = {}
if "fusion_emitters" in os.environ["XLA_FLAGS"]:
    AS_USERS_COMPILE["xla_cpu_use_fusion_emitters"] = True


@functools.cache
def mesh(replicas=REPLICAS):
    return mesh_of({AXIS: replicas})


@functools.cache
def island_mesh():
    return mesh_of({AXIS: REPLICAS, "inside": 2})


def steps(tx, prepare=lambda grads: grads):
    """The body: T steps on one replica, (history of the parameters, last state)."""

    def body(params, state, grads, extra):
        def step(carry, now):
            params, state = carry
            grads, extra = now
            updates, state = tx.update(prepare(grads), state, params, **extra)
            # Optax itself adds wide updates to half precision by promotion.
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), history = jax.lax.scan(step, (params, state), (grads, extra))
        return history, state

    return body


def replay(context, tx, params, grads, extra=None, prepare=lambda grads: grads):
    """Parameters [T, N, ...] and last state, of gradients and extras [T, N, ...]."""
    body = steps(tx, prepare)
    extra = {} if extra is None else extra
    grads, extra = by_replica((grads, extra))
    workers = jax.tree.leaves((grads, extra))[0].shape[0]
    axes = by_hand.state_axes(tx, params) if context in AXES_CONTEXTS else None
    # In NumPy: of what lies on one device JAX compiles a slice for each of the others.
    state = jax.tree.map(
        _numpy_but_keys, by_hand.replicate(tx.init(params), workers, axes)
    )
    params = jax.tree.map(_numpy_but_keys, by_hand.replicate(params, workers))

    if context == "pmap":
        run = jax.pmap(body, axis_name=AXIS, devices=jax.devices()[:workers])
    elif context in ("vmap", "vmap_axes", "islands"):
        spmd = AXIS if context == "islands" else None
        placed = 0 if axes is None else axes
        run = jax.jit(
            jax.vmap(
                body,
                in_axes=(0, placed, 0, 0),
                out_axes=(0, placed),
                axis_name=AXIS,
                spmd_axis_name=spmd,
            )
        )
        if context == "islands":
            params, grads = jax.tree.map(_on_islands, (params, grads))
    else:
        checked = context != "shard_map_unchecked"
        run = mapped(body, tx, params, axes, mesh(), checked)
    history, state = run(params, state, grads, extra)
    return jax.tree.map(lambda x: np.swapaxes(_numpy(x), 0, 1), history), state


def begun(tx, params, workers=REPLICAS, axis: Any = AXIS, over=None):
    """Parameters and state of all workers, which lie on a mesh; the state's axes."""
    state, axes = tx.init(params), by_hand.state_axes(tx, params)
    if over is not None:
        return *oxs.Workers(workers, axis, mesh=over).start((params, state)), axes
    return (
        by_hand.replicate(params, workers),
        by_hand.replicate(state, workers, axes),
        axes,
    )


def started(
    tx, params, workers: Any = REPLICAS, axis: Any = AXIS, donate=False, **given
):
    """(step(params, state, grads), parameters, state) of all workers.

    `given` are extra arguments of the update, and of `oxs.Workers` `mesh` and `specs`.
    """
    where = {name: given.pop(name, None) for name in ("mesh", "specs")}
    workers = oxs.Workers(workers, axis, **where)

    @functools.partial(workers.step, state=2, split=False, donate=donate)
    def step(params, state, grads):
        return oxs.apply_gradients(tx, grads, state, params, **given)

    return step, *workers.start((params, tx.init(params)))


def by_workers(workers, txs, params, grads):
    """Histories [N, T, ...] and last states by name, of gradients [N, T, ...].

    What `oxs.Workers` make of several transformations, in one program.
    """

    @functools.partial(workers.step, split=False, average=False)
    def run(state, grads):
        ends = {name: steps(tx)(*state[name], grads, {}) for name, tx in txs.items()}
        state = {name: (state[name][0], end) for name, (_, end) in ends.items()}
        return state, {name: history for name, (history, _) in ends.items()}

    start = {name: (params, tx.init(params)) for name, tx in txs.items()}
    state, histories = run(workers.start(start), grads)
    return histories, {name: own for name, (_, own) in state.items()}


AXES_CONTEXTS = ("shard_map_axes", "vmap_axes", "islands")


def mapped(body, tx, params, axes, over, check_vma):
    """The body under shard_map, state stacked as `axes` says (None: all of it)."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    if axes is None:
        specs = P(AXIS)
    else:
        specs = by_hand.state_specs(tx, one, jax.tree.map(lambda _: P(), one), AXIS)

    def local(params, state, grads, extra):
        params, grads, extra = by_hand.first((params, grads, extra))
        history, state = body(params, by_hand.first(state, axes), grads, extra)
        return jax.tree.map(lambda x: x[None], history), by_hand.replicate(
            state, 1, axes
        )

    return jax.jit(
        jax.shard_map(
            local,
            mesh=over,
            in_specs=(P(AXIS), specs, P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), specs),
            check_vma=check_vma,
        )
    )


def by_replica(tree):
    """Arrays [T, N, ...] as [N, T, ...], a slice for each replica, in NumPy."""
    return jax.tree.map(lambda x: _numpy_but_keys(x).swapaxes(0, 1), tree)


def _numpy_but_keys(x):
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _on_islands(x):
    inside = "inside" if x.ndim > 1 and x.shape[-1] % 2 == 0 and x.shape[-1] else None
    spec = P(AXIS, *(None,) * (x.ndim - 2), inside) if x.ndim > 1 else P(AXIS)
    return jax.device_put(x, NamedSharding(island_mesh(), spec))


def _numpy(x):
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


def assert_close(actual, expected, relative=1e-6):
    """Each element to `relative` of the largest magnitude that it has had so far.

    Magnitudes below 1 count as 1: a parameter near 0 is the difference of larger terms.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, (path, a.shape, e.shape)
        scale = np.maximum(1, np.maximum.accumulate(np.abs(e), axis=0))
        error = np.abs(a - e)
        worst = np.max(error - relative * scale, initial=-1.0)
        assert np.all(error <= relative * scale), (path, worst)
