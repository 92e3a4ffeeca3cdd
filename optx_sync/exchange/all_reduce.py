# SPDX-License-Identifier: Apache-2.0
"""All-reduce: the exact mean over all replicas, the default of every wrapper."""

import functools

from jax.typing import DTypeLike

from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.reduce import SUM_BITS, reduce_and_sum
from optx_sync.core.checks import floating, integer
from optx_sync.exchange.contract import Code, Exchange, Met
from optx_sync.exchange.pieces import scatter


def all_reduce(
    dtype: DTypeLike | None = None, *, bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
    r"""All-reduce: the exact mean over all replicas.

    With x_i the array of replica i and w_i its weight:

    .. math::

        \text{mean} = \frac{\sum_i w_i x_i}{\sum_i w_i}

    All leaves of one dtype travel in one all-reduce. It takes row-sparse leaves and
    groups, and remembers nothing. In a narrower `dtype` x_i / N is sent, which does not
    overflow where the mean fits. The sum is rounded on the way, and no replica knows
    what that loses: the law of exchanges then holds up to this rounding.

    Args:
        dtype: The floating dtype in which leaves travel and are summed, of 16 bits or
            more. `None`: float32 for half precision leaves, else their own.
        bucket_bytes: For a state or a center in pieces: leaves are joined until
            they fill so many bytes (a larger leaf stands alone), and each bucket
            travels in a reduce-scatter and an all-gather of its own. XLA itself
            joins all-reduces.

    Returns:
        The exchange.

    Raises:
        ValueError: `dtype` is not floating, or narrower than 16 bits; `bucket_bytes` is
            below 1.
        TypeError: `bucket_bytes` is no integer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.all_reduce(jnp.bfloat16)
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "data").mean
        >>> jax.vmap(mean, axis_name="data")(jnp.array([1.0, 4.0]))
        Array([2.5, 2.5], dtype=float32)
    """
    dtype = floating("dtype", dtype, SUM_BITS)
    bucket_bytes = integer("bucket_bytes", bucket_bytes, "The default is 2**25.")
    return _made(dtype, bucket_bytes)


@functools.cache  # equal options make one exchange
def _made(dtype: DTypeLike | None, bucket_bytes: int) -> Exchange:
    def meet(tree, state, axis_name, *, weight=None, also=None, group_assignment=None):
        mean, also, total = reduce_and_sum(
            tree,
            axis_name,
            also,
            weight=weight,
            group_assignment=group_assignment,
            dtype=dtype,
        )
        return Met(mean, total, None, state, also)

    def first_half(tree, state, axis_name, *, weight=None):
        many = {"dtype": dtype, "bucket_bytes": bucket_bytes}
        return Met(scatter(tree, axis_name, weight=weight, **many), state=state)

    def encode(x, state):
        sent = x if dtype is None else x.astype(dtype)
        return sent, x - sent.astype(x.dtype), state

    return Exchange(
        lambda tree: (),
        meet,
        linear=True,
        takes_weights=True,
        remembers=False,
        exact=True,
        scatter=first_half,
        bucket_bytes=bucket_bytes,
        code=Code(encode, lambda message, like: message.astype(like.dtype)),
    )
