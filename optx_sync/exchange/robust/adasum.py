# SPDX-License-Identifier: Apache-2.0
"""`adasum`: add what is orthogonal, average what is parallel."""

import jax
import jax.numpy as jnp

from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import or_one, reduce
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.robust import norms
from optx_sync.exchange.robust.transposed import Everyone, transposed


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
        # In units of each replica's largest value of a leaf: squares stay in range.
        sizes = jnp.where(counts[:, None], everyone.sizes, 0)
        unit = norms.unit_of(sizes)
        counted = [jnp.where(counts[:, None], x, 0) for x in everyone.blocks]
        pieces = [
            piece / unit[:, place, None].astype(piece.dtype)
            for place, piece in enumerate(everyone.joint.cut(counted))
        ]
        grams = jnp.stack(
            [norms.products(piece, everyone.shard_axes) for piece in pieces]
        )
        grams = reduce(grams, everyone.axis_name, reduction="sum")
        # Row i of `nodes[leaf]`: what node i of the tree takes of each replica.
        nodes = jnp.eye(replicas)[None] * unit.T[:, None, :].astype(grams.dtype)
        while nodes.shape[1] > 1:
            size = jnp.max(jnp.abs(nodes), axis=2, keepdims=True)
            plain = nodes / or_one(size)
            inner = norms.einsum("lai,lij,lbj->lab", plain, grams, plain)
            square = jnp.diagonal(inner, axis1=1, axis2=2)
            both = jnp.diagonal(inner[:, 0::2, 1::2], axis1=1, axis2=2)
            pulls = [
                both / or_one(square[:, place::2]) * size[:, 1 - place :: 2, 0]
                for place in (0, 1)
            ]
            nodes = (
                nodes[:, 0::2]
                + nodes[:, 1::2]
                - sum(
                    pull[:, :, None] / 2 * plain[:, place::2]
                    for place, pull in enumerate(pulls)
                )
            )
        combined = [
            jnp.sum(nodes[i, 0, :, None].astype(piece.dtype) * piece, axis=0)
            for i, piece in enumerate(pieces)
        ]
        return everyone.joint.join(combined)

    def sizes(leaves, axes):
        return jnp.stack([norms.largest_of(x, axes) for x in leaves])

    # Its result is no middle: a sum of what is orthogonal lies far from all.
    everyone_in = transposed(rule, shard_axes=shard_axes, sizes=sizes)
    return everyone_in._replace(outlier=None)
