"""Rounds of an exchange in every context, many exchanges in one compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests.meshes import mesh_of

AXIS = "pods"


def mapped(context, function, replicas, axis: Any = AXIS):
    """`function` of one replica's trees as a jitted one of [N, ...] trees.

    Along a tuple of two axes the replicas lie two by N/2.
    """
    names = (axis,) if isinstance(axis, str) else axis
    shape = (replicas,) if isinstance(axis, str) else (2, replicas // 2)
    if context == "vmap":
        lanes = function
        for name in reversed(names):
            lanes = jax.vmap(lanes, axis_name=name)

        def flat(*args):
            cut = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), args)
            return jax.tree.map(
                lambda x: x.reshape(replicas, *x.shape[len(shape) :]), lanes(*cut)
            )

        return jax.jit(flat)
    if context == "pmap":
        return jax.pmap(function, axis_name=axis, devices=jax.devices()[:replicas])

    def stacked(*args):
        return oxs.by_hand.replicate(function(*oxs.by_hand.first(args)), 1)

    keywords: Any = {"check_vma": context != "shard_map_unchecked"}
    sizes = dict(zip(names, shape, strict=True))
    if context == "sharded_workers":
        sizes, keywords = sizes | {"inside": 2}, {"axis_names": {axis}}
    specs = {"in_specs": P(axis), "out_specs": P(axis)}
    return jax.jit(jax.shard_map(stacked, mesh=mesh_of(sizes), **specs, **keywords))


def placed(context, tree, replicas):
    """The trees of all replicas; those of sharded workers cut along the last axis."""
    if context != "sharded_workers":
        return tree
    mesh = mesh_of({AXIS: replicas, "inside": 2})

    def place(x):
        even = x.ndim > 2 and x.size and x.shape[-1] % 2 == 0
        inside = (None,) * (x.ndim - 2) + ("inside",) if even else ()
        return jax.device_put(x, NamedSharding(mesh, P(AXIS, *inside)))

    return jax.tree.map(place, tree)


def rounds(exchanges, weighted):
    """A replica's T rounds with every exchange: means, what is lost, last states.

    And sums: of the weights, and of a scalar that rides along.
    """

    def run(trees, weights):
        def one(exchange):
            def meet(state, now):
                tree, weight = now
                weight = {"weight": weight} if weighted else {}
                also = {"scalar": tree["scalar"]}
                met = exchange.meet(tree, state, AXIS, also=also, **weight)
                # Outputs of a scan vary as they do; all_reduce loses nothing.
                sums = jnp.float32(met.weight), met.also["scalar"]
                return met.state, (met.mean, met.lost, sums)

            first = jax.tree.map(lambda x: x[0], trees)
            state = oxs.localize(exchange.init(first), AXIS)
            state, (means, lost, sums) = jax.lax.scan(meet, state, (trees, weights))
            return means, lost, state, sums

        return {name: one(exchange) for name, exchange in exchanges.items()}

    return run
