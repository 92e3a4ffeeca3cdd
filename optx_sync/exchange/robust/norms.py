# SPDX-License-Identifier: Apache-2.0
"""Norms of what replicas send, medians over the replicas, and who is an outlier.

`oxs.metrics` counts outliers: a replica is one when what it sent is not finite, or lies
more than three times as far from the result as the median of the distances of all that
count, in the norm over all leaves. That costs one more number from each replica.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optx_sync.comm.buffers import wide
from optx_sync.comm.collectives import AxisName, gather
from optx_sync.comm.norms import Axes, Number, norm_of
from optx_sync.comm.varying import axes_of_shards, localize, norm_axes, sum_over
from optx_sync.core.shapes import Array, Bool, Float, Inexact, Int32
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Met

# Who counts; what each replica says; a number of one replica or of all.
Counts: TypeAlias = Bool[Array, " replicas"]
OfEach: TypeAlias = Float[Array, "replicas ..."]
# How many times the typical distance from the result an outlier is away.
_OUTLYING = 3.0


def far_from_result(
    shard_axes: AxisName | None,
) -> Callable[[Tree, Met, AxisName, ArrayLike | None], Bool[Array, ""]]:
    """Whether a replica is more than three times the typical distance away."""

    def outlier(tree, met, axis_name, weight):
        axes = axes_of_shards(tree, axis_name)
        if shard_axes is not None:
            axes = norm_axes(tree, axis_name, shard_axes)
        apart = jax.tree.map(lambda x, m: wide(x) - wide(m), tree, met.mean)
        distance = norm_of(jax.tree.leaves(apart), axes)
        typical = median_over(distance, weight, axis_name)
        # So that what is not finite is far.
        return counted(~(distance <= _OUTLYING * typical), weight)

    return outlier


def counted(flag: Bool[Array, ""], weight: ArrayLike | None) -> Bool[Array, ""]:
    """The flag of a replica that counts; one that does not is no outlier."""
    return flag if weight is None else flag & flag_of(weight)


def times(factor: Number, x: jax.Array) -> jax.Array:
    """The array times a number, computed in at least float32."""
    whole = wide(x)
    return (whole * factor.astype(whole.dtype)).astype(x.dtype)


def median_over(own: Number, weight: ArrayLike | None, axis_name: AxisName) -> Number:
    """The median of one number of each replica that counts."""
    counts = jnp.ones((), bool) if weight is None else flag_of(weight)
    said = jnp.stack([own, localize(counts, axis_name).astype(own.dtype)])
    said = gather(said[None], axis_name)
    return median_of(said[:, 0], said[:, 1] > 0)


def median_of(values: OfEach, counts: Counts) -> Float[Array, "..."]:
    """The median over axis 0 of those that count, 0 if none does."""
    n = number_of(counts)
    values = ordered(values, counts)
    low, high = jnp.maximum(n - 1, 0) // 2, n // 2
    half = jnp.asarray(0.5, values.dtype)
    middle = half * values[low] + half * values[high]
    return jnp.where(n > 0, middle, jnp.zeros_like(middle))


def ordered(values: OfEach, counts: Counts) -> OfEach:
    """Sorted along axis 0; what does not count stands last, where a NaN stands too."""
    counts = counts.reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.sort(jnp.where(counts, values, jnp.full_like(values, jnp.nan)), axis=0)


def number_of(counts: Counts) -> Int32[Array, ""]:
    """How many replicas count."""
    return jnp.sum(counts, dtype=jnp.int32)


def flag_of(weight: ArrayLike) -> Bool[Array, ""]:
    """Whether a replica counts."""
    return jnp.asarray(weight).astype(bool)


def products(
    block: Inexact[Array, "replicas piece"], axes: Axes
) -> Inexact[Array, "replicas replicas"]:
    """The inner products of all replicas' pieces, over all shards of them."""
    full = jax.lax.Precision.HIGHEST
    return sum_over(jnp.einsum("ip,jp->ij", block, block, precision=full), axes)
