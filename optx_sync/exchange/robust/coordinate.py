# SPDX-License-Identifier: Apache-2.0
"""Rules by coordinate: `median`, `trimmed_mean` and `sign_majority`."""

import jax
import jax.numpy as jnp

from optx_sync.comm.varying import axes_of_shards, sum_over
from optx_sync.core.checks import integer
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.robust import norms
from optx_sync.exchange.robust.transposed import Everyone, check_enough, transposed


def median() -> Exchange:
    """The median over the replicas, coordinate by coordinate.

    Of an even number of replicas it is the mean of the middle two. It stands up to
    (n - 1) // 2 of n replicas, whatever they send: a NaN or infinity too.

    Where nobody lies it is not the mean: on shards that do not look alike (sorted by
    label, say) the rules by coordinate cost 20 points of accuracy and more.

    Returns:
        The exchange. It is not linear, and takes a weight as a flag: 0 leaves a replica
        out. It takes neither row-sparse leaves nor groups.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=oxs.exchange.median())
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([1.0, 2.0, 1e30]))
        Array([-2., -2., -2.], dtype=float32)

    References:
        Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning:
        Towards Optimal Statistical Rates", 2018, arXiv 1803.01498.
    """

    def rule(everyone: Everyone) -> list[jax.Array]:
        return [norms.median_of(block, everyone.counts) for block in everyone.blocks]

    return transposed(rule)


def trimmed_mean(f: int) -> Exchange:
    """The mean without the `f` lowest and `f` highest values, coordinate by coordinate.

    It stands up to f replicas, whatever they send: a NaN counts as high. Where n, the
    number of replicas that count, is small, (n - 1) // 2 of each side are left out at
    most. `f=0` is the mean. See `median` for what rules by coordinate cost.

    Args:
        f: How many replicas may be wrong; 2 f must be below the number of replicas.

    Returns:
        The exchange, which takes what `median` takes.

    Raises:
        TypeError: `f` is no integer.
        ValueError: `f` is negative; at the call, too large for the axis.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.trimmed_mean(1)
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=exchange)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> step = jax.jit(jax.vmap(step, axis_name="data"))
        >>> step(jnp.array([1.0, 2.0, 4.0, jnp.nan]))
        Array([-3., -3., -3., -3.], dtype=float32)

    References:
        Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning:
        Towards Optimal Statistical Rates", 2018, arXiv 1803.01498.
    """
    f = integer("f", f, "Write for example oxs.exchange.trimmed_mean(1).", least=0)
    needs = 2 * f + 1

    def rule(everyone: Everyone) -> list[jax.Array]:
        replicas = len(everyone.counts)
        check_enough(replicas, needs, f"trimmed_mean({f})")
        n = norms.number_of(everyone.counts)
        cut = jnp.minimum(f, jnp.maximum(n - 1, 0) // 2)
        ranks = jnp.arange(replicas, dtype=jnp.int32)[:, None]
        kept = (ranks >= cut) & (ranks < n - cut)
        means = []
        for block in everyone.blocks:
            values = norms.ordered(block, everyone.counts)
            total = jnp.sum(jnp.where(kept, values, jnp.zeros_like(block)), axis=0)
            means.append(total / jnp.maximum(n - 2 * cut, 1).astype(block.dtype))
        return means

    return transposed(rule)._replace(needs=needs)


def sign_majority() -> Exchange:
    r"""The sign that most replicas have, coordinate by coordinate: -1, 0 or 1.

    .. math::

        \text{sign}\Big(\sum_i \text{sign}(v_i)\Big)

    A tie is 0; a NaN has no vote. Signs travel as int8, a quarter of float32's bytes.
    What is exchanged has lost its scale: the learning rate alone is the size of a step.
    For signum let the momentum stand before it, where each replica has its own:
    `optax.chain(optax.trace(0.9), oxs.all_reduce_grads("data",
    exchange=oxs.exchange.sign_majority()), optax.sgd(1e-4))`.

    Returns:
        The exchange, which takes what `median` takes.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.sign_majority()
        >>> tx = oxs.cross_shard(optax.sgd(0.5), "data", exchange=exchange)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([3.0, 0.1, -50.0]))
        Array([-0.5, -0.5, -0.5], dtype=float32)

    References:
        Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with Majority Vote is
        Communication Efficient and Fault Tolerant", 2018, arXiv 1810.05291.
    """

    def vote(x):
        sign = jnp.sign(x)
        return jnp.where(jnp.isnan(sign), jnp.zeros_like(sign), sign).astype(jnp.int8)

    def rule(everyone: Everyone) -> list[jax.Array]:
        votes = [jnp.where(everyone.counts[:, None], b, 0) for b in everyone.blocks]
        totals = [jnp.sum(b, axis=0, dtype=jnp.int32) for b in votes]
        return [jnp.sign(total).astype(jnp.int8) for total in totals]

    def outlier(tree, met, axis_name, weight):
        axes, agreed = axes_of_shards(tree, axis_name), jnp.float32(0)
        for x, m in zip(*map(jax.tree.leaves, (tree, met.mean)), strict=True):
            votes = vote(x).astype(jnp.float32) * m.astype(jnp.float32)
            agreed += sum_over(jnp.sum(votes), axes)
        return norms.counted(agreed < 0, weight)

    return transposed(rule, encode=vote)._replace(outlier=outlier)
