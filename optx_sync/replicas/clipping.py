# SPDX-License-Identifier: Apache-2.0
"""Clip gradients by their global norm, also where each replica gets a piece of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.comm import collectives, varying
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import reduce
from optx_sync.core import checks
from optx_sync.core.programs import axes_of_pieces
from optx_sync.core.trees import at_least_float32
from optx_sync.exchange.contract import require_dense


@checks.shows_call("oxs.clip_by_global_norm(1.0, 'data')")
def clip_by_global_norm(
    max_norm: ArrayLike, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    r"""`optax.clip_by_global_norm` that may stand inside of `shard_state=True`.

    With g_k the leaves of the gradient, and m the largest norm:

    .. math::

        n &= \sqrt{\sum_k |g_k|^2} \\
        u_k &= g_k \quad\text{if } n < m, \quad\text{else}\quad g_k \, m / n

    Inside of `cross_shard(..., shard_state=True)`, and in the outer optimizer of a
    center rule with `shard_state=True`, a replica gets a piece of each g_k. There the
    sum of squares is one over the pieces of all replicas: one all-reduce of a scalar,
    while gradients keep their reduce-scatter. Everywhere else the gradient is whole,
    and nothing is sent. Optax's sums the squares of half precision in half precision;
    this one does in float32.

    Args:
        max_norm: The largest norm, above 0.
        axis_name: The mapped axis along which the pieces lie, or a tuple of them: that
            of the wrapper around this.

    Returns:
        A transformation with an empty state.

    Raises:
        TypeError: `max_norm` is no number; a missing or bad axis name.
        ValueError: `max_norm` is not above 0; at the call, row-sparse gradients.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> inner = optax.chain(oxs.clip_by_global_norm(1.0, "data"), optax.sgd(1.0))
        >>> tx = oxs.cross_shard(inner, "data", shard_state=True)
        >>> params = jnp.zeros(2)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(params), params)[0]
        >>> jax.vmap(step, axis_name="data")(jnp.array([[3.0, 8.0], [3.0, 0.0]]))
        Array([[-0.6, -0.8],
               [-0.6, -0.8]], dtype=float32)

    References:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
        networks", 2013, arXiv 1211.5063.
    """
    mend = "Pass for example max_norm=1.0."
    checks.interval("(0, inf]", mend, max_norm=max_norm)
    collectives.check_axis_name(axis_name)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        require_dense(updates, "clip_by_global_norm")
        squares: Any = jnp.float32(0)
        for x in jax.tree.leaves(updates):
            square = jnp.square(jnp.abs(x))
            squares = squares + jnp.sum(square.astype(at_least_float32(square.dtype)))
        named = collectives.check_axis_name(axis_name)
        if axes := tuple(axis for axis in axes_of_pieces() if axis in named):
            own = varying.localize(squares, axes)
            squares = reduce(own, axes, reduction="sum")
        norm = jnp.sqrt(squares)
        return jax.tree.map(lambda x: _cut(x, norm, max_norm), updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def _cut(x: jax.Array, norm: jax.Array, max_norm: ArrayLike) -> jax.Array:
    """The array, in the order of Optax's operations."""
    cut = x / norm.astype(x.dtype) * jnp.asarray(max_norm, x.dtype)
    return jnp.where(norm < max_norm, x, cut)
