# SPDX-License-Identifier: Apache-2.0
"""TIES: by coordinate, the mean of the values that have the sign of the sum."""

import jax
import jax.numpy as jnp

from optx_sync.comm.reduce import or_one, weight_divisor
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.exchange.robust import norms
from optx_sync.exchange.robust.transposed import Everyone, transposed
from optx_sync.options import Refused, refuse


def elected(exchange: Exchange | None = None) -> Exchange:
    r"""TIES merging: the mean of the values that have the sign of the sum.

    For each coordinate, with v_i the value of replica i and w_i its weight:

    .. math::

        s = \text{sign}\Big(\sum_i w_i v_i\Big), \qquad
        \frac{\sum_{i:\, \text{sign}(v_i) = s} w_i v_i}
        {\sum_{i:\, \text{sign}(v_i) = s} w_i}

    So what some replicas know is not watered down by others' zeros and by values that
    pull the other way. Where the sum is 0 the result is 0. A NaN arrives.

    It sends what an all-reduce sends, and needs memory for one more copy of the arrays.
    TIES also trims what is small, which is left to you.

    Args:
        exchange: How the values and the result are coded on their way, such as
            `quantized(bits=4)`; `None`: not at all. What a code loses is not fed back.

    Returns:
        The exchange. It is not linear, takes weights, and neither row-sparse leaves nor
        groups.

    Raises:
        TypeError: `exchange` is no exchange.
        ValueError: It codes nothing, or remembers something.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.elected()
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "workers").mean
        >>> x = jnp.array([[2.0, 0.0], [4.0, 6.0], [-1.0, -1.0]])
        >>> jax.jit(jax.vmap(mean, axis_name="workers"))(x)[0]
        Array([3., 6.], dtype=float32)

    References:
        Yadav, Tam, Choshen, Raffel, Bansal, "TIES-Merging: Resolving Interference When
        Merging Models", 2023, arXiv 2306.01708.
    """
    exchange = check_exchange(exchange, all_reduce())
    refuse(exchange, _REFUSED)

    def rule(everyone: Everyone) -> list[jax.Array]:
        weights = everyone.weights
        shares = weights / weight_divisor(jnp.sum(weights))
        return [_elect(block, shares) for block in everyone.blocks]

    return transposed(rule, code=exchange.code, takes_weights=True)


_REFUSED: Refused[Exchange] = (
    (
        lambda x: x.code is None or x.remembers,
        "elected takes an exchange that has a code and no memory, which would be of "
        "sums. Write for example elected(oxs.exchange.quantized(bits=4)).",
    ),
)


def _elect(block: norms.OfEach, shares: norms.OfEach) -> jax.Array:
    """The mean of those of a piece's values that have the sign of their sum."""
    shares = shares.astype(block.dtype)[:, None]
    sent = jnp.where(shares == 0, 0, block * shares)
    total = jnp.sum(sent, axis=0, keepdims=True)
    kept = jnp.sign(sent) == jnp.sign(total)
    chosen = jnp.sum(jnp.where(kept, sent, 0), axis=0)
    chosen /= or_one(jnp.sum(jnp.where(kept, shares, 0), axis=0))
    return jnp.where(jnp.isnan(total[0]), total[0], chosen)
