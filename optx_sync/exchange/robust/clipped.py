# SPDX-License-Identifier: Apache-2.0
"""`clipped`: clip what each replica sends to a norm."""

from typing import Literal

import jax
import jax.numpy as jnp

from optx_sync.comm.collectives import AxisName
from optx_sync.comm.norms import norm_of
from optx_sync.comm.reduce import or_one
from optx_sync.comm.varying import norm_axes
from optx_sync.core.checks import interval
from optx_sync.core.trees import is_inexact
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.exchange.pieces import require_meetable
from optx_sync.exchange.robust import norms


def clipped(
    to: float | Literal["median"] | jax.Array,
    exchange: Exchange | None = None,
    *,
    shard_axes: AxisName | None = None,
) -> Exchange:
    """Clip what each replica sends to a norm, then exchange it as `exchange` says.

        v_i  ->  v_i min(1, to / |v_i|)

    with |v_i| the norm over all leaves of what replica i sends. No replica adds more
    than `to / N` to the mean. `"median"` needs no number to tune: `to` is the median of
    all norms, N numbers more on the wire. A NaN passes unclipped.

    Clipping each replica's gradient is not clipping the mean: it takes away more. In a
    wrapper with a center, what is cut is what the worker moved since the last round.

    Args:
        to: The largest norm, or `"median"`.
        exchange: What follows; `None`: `oxs.exchange.all_reduce()`.
        shard_axes: See `geometric_median`.

    Returns:
        The exchange. It is not linear, takes the weights that `exchange` takes, and
        neither row-sparse leaves nor groups.

    Raises:
        TypeError: `to` is no number, `exchange` no exchange.
        ValueError: `to` is not positive, or another word than "median"; `shard_axes` is
            needed and missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.clipped("median")
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=exchange)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([1.0, 4.0, 1e30]))
        Array([-3., -3., -3.], dtype=float32)

    References:
        Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
        Optimization", 2020, arXiv 2012.10333.
    """
    if not (isinstance(to, str) and to == "median"):
        mend = "Write for example oxs.exchange.clipped(1.0), or 'median'."
        interval("(0, inf)", mend, to=to)
    exchange = check_exchange(exchange, all_reduce())

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "this exchange", is_inexact)
        leaves = jax.tree.leaves(tree)
        axes = norm_axes(tree, axis_name, shard_axes)
        norm = norm_of(leaves, axes)
        limit = to
        if isinstance(to, str):
            limit = norms.median_over(norm, weight, axis_name)
        factor = jnp.minimum(1, jnp.asarray(limit, norm.dtype) / or_one(norm))
        sent = jax.tree.map(lambda x: norms.times(factor, x), tree)
        return exchange.meet(sent, state, axis_name, weight=weight, also=also)

    return Exchange(
        exchange.init,
        meet,
        linear=False,
        takes_weights=exchange.takes_weights,
        remembers=exchange.remembers,
        needs=exchange.needs,
        outlier=norms.far_from_result(shard_axes),
    )
