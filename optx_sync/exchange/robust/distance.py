# SPDX-License-Identifier: Apache-2.0
"""Rules by distance: `geometric_median` and `krum`.

Besides their pieces they need the N x N matrix of inner products: a sum of N^2 numbers.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optx_sync.comm.collectives import AxisName
from optx_sync.comm.norms import size_of, unit_of, widest
from optx_sync.comm.reduce import or_one, reduce
from optx_sync.core.checks import integer
from optx_sync.core.shapes import Array, Float
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.robust import norms
from optx_sync.exchange.robust.transposed import (
    Everyone,
    Rule,
    check_enough,
    transposed,
)

Gram: TypeAlias = Float[Array, "replicas replicas"]
Weights: TypeAlias = Float[Array, " replicas"]
# How far from the median, in units of the typical replica's largest value, a value is
# still told from one further away: squares of 10^12 values that far fit into float32.
_FAR = 1e12
# Distances below this part of the typical one drown in the rounding of their squares.
_CLOSE = 1e-3
# Scores that differ by this part of them are equal, but for rounding.
_EQUAL = 1e-5


def geometric_median(steps: int = 8, *, shard_axes: AxisName | None = None) -> Exchange:
    r"""The point with the least sum of distances to all replicas, whole trees each.

    It stands up to fewer than half of the replicas; one that holds a NaN or infinity is
    left out. `steps` steps of Weiszfeld's algorithm, from the median by coordinate:

    .. math::

        z \leftarrow \sum_i \frac{v_i}{|z - v_i|} \Big/ \sum_i \frac{1}{|z - v_i|}

    Distances below a thousandth of the typical one count as that.

    Args:
        steps: The number of steps.
        shard_axes: Mesh axes along which a replica is itself cut in shards by hand, in
            `jax.shard_map`; distances are summed over them. `()`: none. `None`: none,
            and where it might be otherwise it is refused.

    Returns:
        The exchange, which takes what `median` takes.

    Raises:
        TypeError: `steps` is no integer.
        ValueError: `steps` is below 1; `shard_axes` is needed and missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.geometric_median()
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=exchange)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> gradients = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1e30]])
        >>> found = jax.jit(jax.vmap(step, axis_name="data"))(gradients)
        >>> bool(jnp.all(jnp.abs(found) < 1e-3))
        True

    References:
        Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning",
        2019, arXiv 1912.13445.
    """
    mend = "Write for example oxs.exchange.geometric_median(8)."
    steps = integer("steps", steps, mend)

    def rule(everyone: Everyone) -> list[jax.Array]:
        near = _near(everyone)
        b = _weiszfeld(_gram(near.blocks, everyone), everyone.counts, steps)
        return [
            middle + near.scale.astype(block.dtype) * _combine(b, block)
            for middle, block in zip(near.middles, near.blocks, strict=True)
        ]

    return transposed(_of_finite(rule), shard_axes=shard_axes, sizes=size_of)


def krum(
    f: int, m: int | None = None, *, shard_axes: AxisName | None = None
) -> Exchange:
    r"""The mean of the `m` replicas that are closest to their neighbours (multi-Krum).

    With n replicas that count, of which f may be wrong:

    .. math::

        \text{score}_i = \sum_{j \in \text{near}(i)} |v_i - v_j|^2

    with near(i) the n - f - 2 others for which that is smallest; the result is the mean
    of the m replicas of least score. Replicas of equal score are taken or left
    together, so that their order does not matter. A replica that holds a NaN or
    infinity is left out. Where n falls below 2 f + 3, f is (n - 3) // 2 and not
    negative.

    Args:
        f: How many replicas may be wrong; 2 f + 3 replicas are needed.
        m: How many are taken; `None`: n - f, 1: Krum itself.
        shard_axes: See `geometric_median`.

    Returns:
        The exchange, which takes what `median` takes.

    Raises:
        TypeError: `f` or `m` is no integer.
        ValueError: `f` is negative, `m` is below 1; at the call, the axis is too small
            for them; `shard_axes` is needed and missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.krum(f=1)
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=exchange)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> step = jax.jit(jax.vmap(step, axis_name="data"))
        >>> step(jnp.array([1.0, 2.0, 3.0, 1e30, 2.0]))
        Array([-2., -2., -2., -2., -2.], dtype=float32)

    References:
        Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries:
        Byzantine Tolerant Gradient Descent", 2017, arXiv 1703.02757.
    """
    f = integer("f", f, "Write for example oxs.exchange.krum(1).", least=0)
    if m is not None:
        m = integer("m", m, "Write for example oxs.exchange.krum(1, m=1).")
    needs = max(2 * f + 3 if f else 1, m or 1)

    def rule(everyone: Everyone) -> list[jax.Array]:
        counts = everyone.counts
        replicas = len(counts)
        check_enough(replicas, needs, f"krum({f}, m={m})")
        gram = _gram(_near(everyone).blocks, everyone)
        own = jnp.diagonal(gram)
        # Symmetric to the bit, so that neighbours' scores are equal where they are.
        squares = own[:, None] + own[None, :] - (gram + gram.T)
        others = counts[:, None] & counts[None, :] & ~jnp.eye(replicas, dtype=bool)
        squares = jnp.where(others, jnp.maximum(squares, 0), jnp.inf)
        n = norms.number_of(counts)
        wrong = jnp.clip((n - 3) // 2, 0, f)
        nearest = jnp.arange(replicas, dtype=jnp.int32) < n - wrong - 2
        squares = jnp.where(nearest, jnp.sort(squares, axis=1), 0)
        score = jnp.where(counts, jnp.sum(squares, axis=1), jnp.inf)
        taken = n - wrong if m is None else jnp.minimum(m, n)
        last = jnp.sort(score)[jnp.maximum(taken - 1, 0)]
        last = last * (1 + _EQUAL)
        chosen = (counts & (score <= last)).astype(gram.dtype)
        chosen = chosen / or_one(jnp.sum(chosen))
        return [_combine(chosen, block) for block in everyone.blocks]

    exchange = transposed(_of_finite(rule), shard_axes=shard_axes, sizes=size_of)
    return exchange._replace(needs=needs)


class _Near(NamedTuple):
    """The pieces as seen from the median, in units of a typical replica's values."""

    middles: list[Float[Array, " piece"]]
    blocks: list[Float[Array, "replicas piece"]]
    scale: Float[Array, ""]


def _of_finite(rule: Rule) -> Rule:
    """The rule without replicas that are not finite; NaN where there is no other."""

    def apply(everyone: Everyone) -> list[jax.Array]:
        sizes = everyone.sizes[:, 0]
        finite = everyone.counts & jnp.isfinite(sizes)
        pieces = rule(everyone._replace(counts=finite))
        lost = jnp.any(everyone.counts) & ~jnp.any(finite)
        return [jnp.where(lost, jnp.full_like(p, jnp.nan), p) for p in pieces]

    return apply


def _near(everyone: Everyone) -> _Near:
    """Relative to the median, so that squares neither cancel nor leave the range."""
    counts = everyone.counts
    scale = unit_of(norms.median_of(everyone.sizes[:, 0], counts))
    middles = [norms.median_of(block, counts) for block in everyone.blocks]

    def seen(block, middle):
        apart = (block - middle[None]) / scale.astype(block.dtype)
        apart = jnp.where(counts[:, None], apart, jnp.zeros_like(apart))
        return jnp.clip(apart, -_FAR, _FAR)

    return _Near(middles, list(map(seen, everyone.blocks, middles)), scale)


def _weiszfeld(gram: Gram, counts: norms.Counts, steps: int) -> Weights:
    """The weights whose weighted mean is the geometric median, after these steps."""
    own = jnp.maximum(jnp.diagonal(gram), 0)
    least = _CLOSE * jnp.sqrt(norms.median_of(own, counts))
    least = jnp.maximum(least, jnp.finfo(gram.dtype).tiny ** 0.5)

    def weights(squares):
        distances = jnp.maximum(jnp.sqrt(jnp.maximum(squares, 0)), least)
        closeness = jnp.where(counts, least / distances, jnp.zeros_like(distances))
        return closeness / or_one(jnp.sum(closeness))

    def step(_, b):
        across = _dot(gram, b)
        return weights(own - 2 * across + _dot(b, across))

    return jax.lax.fori_loop(1, steps, step, weights(own))


def _gram(blocks: Sequence[norms.OfEach], everyone: Everyone) -> Gram:
    """The inner products of all replicas' arrays, on each of them."""
    own = [norms.products(block, everyone.shard_axes) for block in blocks]
    dtype = widest(own)
    total = functools.reduce(jnp.add, [x.astype(dtype) for x in own])
    return reduce(total, everyone.axis_name, reduction="sum")


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _combine(weights: Weights, block: norms.OfEach) -> Float[Array, " piece"]:
    """The sum of all replicas' pieces; what has no weight leaves no trace."""
    weights = weights.astype(block.dtype)[:, None]
    return jnp.sum(jnp.where(weights == 0, 0, block * weights), axis=0)
