# SPDX-License-Identifier: Apache-2.0
"""Radial-directional averaging: the mean length times the direction of the mean."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from optx_sync.comm import buffers
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.norms import norm_of, unit_of
from optx_sync.comm.reduce import own_weight, weigh, weight_divisor
from optx_sync.comm.varying import norm_axes
from optx_sync.core.checks import check_function
from optx_sync.core.trees import Tree, is_inexact, path_name, round_to
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.exchange.pieces import require_meetable, shapes_too
from optx_sync.exchange.robust import norms

# A mean of unit vectors that is shorter says nothing of a direction: rounding does.
_SHORT = 1e-3


def radial(
    exchange: Exchange | None = None,
    direct: Callable[[str], bool] | None = None,
    *,
    shard_axes: AxisName | None = None,
) -> Exchange:
    r"""Radial averaging (RDA): the mean length times the direction of the mean.

    For each leaf v_i of replica i, with its weight w_i and phi(x) = x / \|x\|, phi(0) =
    0:

    .. math::

        \frac{\sum_i w_i |v_i|}{\sum_i w_i}\;
        \phi\Big(\frac{\sum_i w_i\, \phi(v_i)}{\sum_i w_i}\Big)

    Equal vectors give themselves. Of N orthogonal ones of one length the mean is
    shorter by sqrt(N), and this is not: the best outer rate moves less with the number
    of workers. Noise keeps its length, too, so let the rate decay.

    What travels is phi(v_i) by the exchange inside, and beside it one float for each
    leaf, in the same all-reduce. Where the directions cancel and their mean is shorter
    than 0.001, the length falls with it, down to 0; the paper takes the plain mean
    there, which has not travelled. A NaN arrives. A leaf of which a part
    (`fragments=`) has some rows counts as these rows.

    Args:
        exchange: What makes the mean of the directions; `None`:
            `oxs.exchange.all_reduce()`. Feedback inside, `error_feedback(quantized(4))`
            say, gives back what the directions lost.
        direct: Which leaves take the plain mean (the paper: embeddings and the head), a
            function of the leaf's path as text, `"['embed']['table']"`. `None`: no
            leaf.
        shard_axes: See `geometric_median`.

    Returns:
        The exchange. It is not linear, takes the weights that `exchange` takes, and
        neither row-sparse leaves nor groups.

    Raises:
        TypeError: `exchange` is no exchange, `direct` no function.
        ValueError: At the call, `shard_axes` is needed and missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(
        ...     optax.adam(1e-3),
        ...     "workers",
        ...     exchange=oxs.exchange.radial(direct=lambda path: "embed" in path),
        ... )
        >>> exchange = oxs.exchange.radial()
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "workers").mean.round(3)
        >>> jax.vmap(mean, axis_name="workers")(jnp.array([[2.0, 0.0], [0.0, 4.0]]))[0]
        Array([2.121, 2.121], dtype=float32)

    References:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026, arXiv 2604.21428.
    """
    exchange = check_exchange(exchange, all_reduce())
    if direct is not None:
        mend = 'Write for example direct=lambda path: "embed" in path.'
        check_function("direct", direct, mend)

    def init(tree):
        return exchange.init(shapes_too(_wide, tree))

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "radial", is_inexact)
        axes = norm_axes(tree, axis_name, shard_axes)
        own = own_weight(weight, axis_name)
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
        sent = jax.tree.leaves(_wide(tree))
        turned = [
            place
            for place, (path, _) in enumerate(pairs)
            if direct is None or not direct(path_name(path))
        ]
        lengths, roots = {}, [math.sqrt(max(1, x.size)) for x in sent]
        for place in turned:
            x, length = sent[place], norm_of([sent[place]], axes)
            unit = unit_of(length)
            # Loud where the norm is too large to divide by.
            length = jnp.where(length > unit, jnp.nan, length)
            # Codes see numbers of about 1 in each leaf: a block may have some of two.
            sent[place] = x / unit.astype(x.dtype) * roots[place]
            lengths[place] = weigh(length, own)
        beside = {"also": also, "lengths": lengths}
        met = exchange.meet(
            treedef.unflatten(sent), state, axis_name, weight=weight, also=beside
        )
        means = jax.tree.leaves(met.mean)
        for place, length in met.also["lengths"].items():
            total = weight_divisor(jnp.asarray(met.weight, length.dtype))
            norm = norm_of([means[place]], axes)
            norm = jnp.maximum(norm, _SHORT * roots[place])
            means[place] = norms.times(length / total / norm, means[place])
        mean = treedef.unflatten(
            round_to(m, x.dtype).astype(x.dtype)
            for m, (_, x) in zip(means, pairs, strict=True)
        )
        return met._replace(mean=mean, lost=None, also=met.also["also"])

    return Exchange(
        init,
        meet,
        linear=False,
        takes_weights=exchange.takes_weights,
        remembers=exchange.remembers,
        needs=exchange.needs,
    )


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(buffers.wide, tree)
