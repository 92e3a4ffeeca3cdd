# SPDX-License-Identifier: Apache-2.0
"""`adasum`: add what is orthogonal, average what is parallel."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from optx_sync.comm import buffers
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import or_one, reduce
from optx_sync.comm.varying import sum_over
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.robust import norms
from optx_sync.exchange.robust.transposed import Everyone, transposed
from optx_sync.shapes import Array, Float, Inexact

# Of each leaf: the unit of each node of a level of the tree, and the nodes' pieces.
_Tree: TypeAlias = tuple[Float[Array, "leaves nodes"], list[Inexact[Array, "nodes _"]]]


def adasum(*, shard_axes: AxisName | None = None) -> Exchange:
    """Adasum: a sum of what is orthogonal and a mean of what is parallel, by pairs.

        a, b  ->  (1 - a.b / 2 |a|^2) a  +  (1 - a.b / 2 |b|^2) b

    for each leaf on its own, along a binary tree: replica i with i xor 1, the results
    with those of i xor 2, and so on. It does not stand up to replicas that are wrong: a
    NaN travels. A replica that is left out counts as zero, which changes nothing.

    Horovod, where it comes from, reports that it has cost users convergence: compare it
    with the mean. Its scale grows with the number of replicas, up to a sum.

    Args:
        shard_axes: See `geometric_median`.

    Returns:
        The exchange, which takes what `median` takes.

    Raises:
        ValueError: At the call, a number of replicas that is no power of two;
            `shard_axes` is needed and missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=oxs.exchange.adasum())
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> step = jax.jit(jax.vmap(step, axis_name="data"))
        >>> step(jnp.array([[2.0, 0.0], [0.0, 1.0]]))
        Array([[-2., -1.],
               [-2., -1.]], dtype=float32)

    References:
        Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020,
        arXiv 2006.02924. Horovod, `horovod/common/ops/adasum`.
    """

    def rule(everyone: Everyone) -> list[jax.Array]:
        counts = everyone.counts
        replicas = len(counts)
        if replicas & (replicas - 1):
            raise ValueError(
                "adasum adds pairs of pairs and needs a power of two of replicas; the "
                f"axis has {replicas}. Use oxs.exchange.all_reduce() there."
            )
        counted = [jnp.where(counts[:, None], x, 0) for x in everyone.blocks]
        nodes = everyone.joint.cut(counted)
        sizes = jnp.where(counts[:, None], everyone.sizes, 0).T
        of_leaf = [
            _unit_of(size.astype(node.dtype))
            for node, size in zip(nodes, sizes, strict=True)
        ]
        nodes = [x / unit[:, None] for x, unit in zip(nodes, of_leaf, strict=True)]
        dtype = norms.widest(nodes)
        units = jnp.stack([unit.astype(dtype) for unit in of_leaf])
        levels = replicas.bit_length() - 1
        if levels:
            # A loop, since its nodes are arrays in memory: otherwise XLA may compute a
            # node twice, rounded otherwise in its products than in the next node. The
            # digits of one whose pair nearly cancels would differ.
            units, nodes = jax.lax.fori_loop(
                0, levels, lambda _, tree: _level(tree, everyone), (units, nodes)
            )
        combined = [
            unit[0].astype(node.dtype) * node[0]
            for node, unit in zip(nodes, units, strict=True)
        ]
        return everyone.joint.join(combined)

    def sizes(leaves, axes):
        dtype = norms.widest(leaves)
        return jnp.stack([norms.largest_of(x, axes, dtype) for x in leaves])

    # Its result is no middle: a sum of what is orthogonal lies far from all.
    everyone_in = transposed(rule, shard_axes=shard_axes, sizes=sizes)
    return everyone_in._replace(outlier=None)


def _unit_of(size: Float[Array, " replicas"]) -> Float[Array, " replicas"]:
    """About each replica's largest value of a leaf: squares in it stay in range.

    A power of two, so that what is opposite cancels exactly.
    """
    return jax.lax.reduce_precision(norms.unit_of(size), jnp.finfo(size.dtype).nexp, 0)


def _level(tree: _Tree, everyone: Everyone) -> _Tree:
    """The nodes of the next level, half as many, followed by zeros."""
    units, nodes = tree
    pairs = [(node[0::2], node[1::2]) for node in nodes]
    aa, bb, ab = jnp.moveaxis(_products(pairs, everyone), 1, 0)
    # A node of zeros has no size, however large what cancelled out.
    a = jnp.where(aa == 0, 0, units[:, 0::2])
    b = jnp.where(bb == 0, 0, units[:, 1::2])
    unit = jnp.maximum(a, b)
    a, b = a / or_one(unit), b / or_one(unit)
    of_a, of_b = a - b * ab / (2 * or_one(aa)), b - a * ab / (2 * or_one(bb))
    found = [
        x[:, None].astype(one.dtype) * one + y[:, None].astype(one.dtype) * two
        for (one, two), x, y in zip(pairs, of_a, of_b, strict=True)
    ]
    followed = [jnp.concatenate([node, jnp.zeros_like(node)]) for node in found]
    return jnp.concatenate([unit, jnp.zeros_like(unit)], axis=1), followed


def _products(
    pairs: list[tuple[jax.Array, jax.Array]], everyone: Everyone
) -> Inexact[Array, "leaves 3 pairs"]:
    """|a|^2, |b|^2 and a.b of each pair of each leaf, over all pieces and shards.

    Products of the replicas alone would give those of all nodes in one sum, but less
    exactly: of a node whose pair nearly cancels, as a small difference of large sums.
    """
    own = [
        jnp.sum(jnp.stack([a * a, b * b, a * b]), axis=2).reshape(-1) for a, b in pairs
    ]
    whole = buffers.through(lambda x: sum_over(x, everyone.shard_axes), own)
    wide = jnp.stack([x.astype(norms.widest(whole)) for x in whole])
    products = reduce(wide, everyone.axis_name, reduction="sum")
    return products.reshape(len(pairs), 3, -1)
