# SPDX-License-Identifier: Apache-2.0
"""Exchanges that stand up to replicas that are wrong: a broken memory cell, bad data.

The mean follows one replica anywhere. Here no minority can take the result further than
the others reach. Rules need to see all replicas' values of a coordinate side by side.
They do in the transposed form: replica k gets the k-th piece of all replicas' arrays
(an all-to-all), applies the rule to it, and the pieces are gathered. That sends what an
all-reduce sends, and needs memory for one more copy of the arrays, however many
replicas there are. Rules by distance need the N x N matrix of inner products as well:
a sum of N^2 numbers.

`clipped` needs a replica's own norm only.

An outlier, which `oxs.metrics` counts, is a replica that sent what lies more than three
times as far from the result as the median of the distances of those that count, in the
norm over all leaves; or what is not finite. It costs one more number from each replica.
Signs have no distances: there it is a replica that votes against the majority more
often than with it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optx_sync.collectives import (
    AxisName,
    all_to_all,
    axes_of_shards,
    axis_size,
    gather,
    kinds,
    localize,
    norm_axes,
    or_one,
    reduce,
    require_local,
    sum_over,
)
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.rule import Exchange, check_exchange
from optx_sync.trees import (
    Tree,
    at_least_float32,
    is_floating,
    is_inexact,
    is_slices,
    leaves_with_names,
)

# How far from the median, in units of the typical replica's largest value, a value is
# still told from one further away: squares of 10^12 values that far fit into float32.
_FAR = 1e12
# Distances below this part of the typical one drown in the rounding of their squares.
_CLOSE = 1e-3
# How many times the typical distance from the result an outlier is away.
_OUTLYING = 3.0
# Scores that differ by this part of them are equal, but for rounding.
_EQUAL = 1e-5


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
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning:
        Towards Optimal Statistical Rates", 2018, arXiv 1803.01498.
    """

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        return [_median(block, everyone.counts) for block in everyone.blocks]

    return _transposed(rule)


def trimmed_mean(f: int) -> Exchange:
    """The mean of what is left without the `f` lowest and highest, by coordinate.

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
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning:
        Towards Optimal Statistical Rates", 2018, arXiv 1803.01498.
    """
    _check_count(f, "f", "trimmed_mean(1)")

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        replicas = len(everyone.counts)
        _check_enough(replicas, 2 * f + 1, f"trimmed_mean({f})")
        n = _number(everyone.counts)
        cut = jnp.minimum(f, jnp.maximum(n - 1, 0) // 2)
        ranks = jnp.arange(replicas)[:, None]
        kept = (ranks >= cut) & (ranks < n - cut)

        def mean(block):
            ordered = _ordered(block, everyone.counts)
            total = jnp.sum(jnp.where(kept, ordered, jnp.zeros_like(block)), axis=0)
            return total / jnp.maximum(n - 2 * cut, 1).astype(block.dtype)

        return [mean(block) for block in everyone.blocks]

    return _transposed(rule)


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
        Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is
        Communication Efficient and Fault Tolerant", 2018, arXiv 1810.05291.
    """

    def vote(x):
        sign = jnp.sign(x)
        return jnp.where(jnp.isnan(sign), jnp.zeros_like(sign), sign).astype(jnp.int8)

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        votes = [jnp.where(everyone.counts[:, None], b, 0) for b in everyone.blocks]
        totals = [jnp.sum(b, axis=0, dtype=jnp.int32) for b in votes]
        return [jnp.sign(total).astype(jnp.int8) for total in totals]

    def outlier(tree, mean, axis_name, weight):
        axes = axes_of_shards(tree, axis_name)

        def agreed(x, m):
            votes = vote(x).astype(jnp.float32) * m.astype(jnp.float32)
            return sum_over(jnp.sum(votes), axes)

        both = jax.tree.leaves(jax.tree.map(agreed, tree, mean))
        total = functools.reduce(jnp.add, both, jnp.float32(0))
        return _counted(total < 0, weight)

    return _transposed(rule, encode=vote)._replace(outlier=outlier)


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
        Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", 2019,
        arXiv 1912.13445.
    """
    _check_count(steps, "steps", "geometric_median(8)", least=1)

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        counts, near = everyone.counts, _near(everyone)
        gram = _gram(near.blocks, everyone)
        own = jnp.maximum(jnp.diagonal(gram), 0)
        least = _CLOSE * jnp.sqrt(_median(own, counts))
        least = jnp.maximum(least, jnp.finfo(gram.dtype).tiny ** 0.5)

        def weights(squares):
            distances = jnp.maximum(jnp.sqrt(jnp.maximum(squares, 0)), least)
            closeness = jnp.where(counts, least / distances, jnp.zeros_like(distances))
            return closeness / or_one(jnp.sum(closeness))

        def step(_, b):
            across = _dot(gram, b)
            return weights(own - 2 * across + _dot(b, across))

        b = jax.lax.fori_loop(1, steps, step, weights(own))
        return [
            middle + near.scale.astype(block.dtype) * _combine(b, block)
            for middle, block in zip(near.middles, near.blocks, strict=True)
        ]

    return _transposed(_of_finite(rule), shard_axes=shard_axes, sizes=_size)


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
        Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries:
        Byzantine Tolerant Gradient Descent", 2017, arXiv 1703.02757.
    """
    _check_count(f, "f", "krum(1)")
    if m is not None:
        _check_count(m, "m", "krum(1, m=1)", least=1)

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        counts = everyone.counts
        replicas = len(counts)
        needed = max(2 * f + 3 if f else 1, m or 1)
        _check_enough(replicas, needed, f"krum({f}, m={m})")
        gram = _gram(_near(everyone).blocks, everyone)
        own = jnp.diagonal(gram)
        # Symmetric to the bit, so that neighbours' scores are equal where they are.
        squares = own[:, None] + own[None, :] - (gram + gram.T)
        others = counts[:, None] & counts[None, :] & ~jnp.eye(replicas, dtype=bool)
        squares = jnp.where(others, jnp.maximum(squares, 0), jnp.inf)
        n = _number(counts)
        wrong = jnp.clip((n - 3) // 2, 0, f)
        nearest = jnp.arange(replicas) < n - wrong - 2
        squares = jnp.where(nearest, jnp.sort(squares, axis=1), 0)
        score = jnp.where(counts, jnp.sum(squares, axis=1), jnp.inf)
        taken = n - wrong if m is None else jnp.minimum(m, n)
        last = jnp.sort(score)[jnp.maximum(taken - 1, 0)]
        last = last * (1 + _EQUAL)
        chosen = (counts & (score <= last)).astype(gram.dtype)
        chosen = chosen / or_one(jnp.sum(chosen))
        return [_combine(chosen, block) for block in everyone.blocks]

    return _transposed(_of_finite(rule), shard_axes=shard_axes, sizes=_size)


def adasum(*, shard_axes: AxisName | None = None) -> Exchange:
    """Adasum: a sum of what is orthogonal and a mean of what is parallel, by pairs.

        a, b  ->  (1 - a.b / 2 |a|^2) a  +  (1 - a.b / 2 |b|^2) b

    for each leaf on its own, along a binary tree: replica i with i xor 1, the results
    with those of i xor 2, and so on. It does not stand up to replicas that are wrong: a
    NaN travels. A replica that is left out counts as zero, which changes nothing.

    Horovod, where it comes from, reports of users whom it has cost convergence: compare
    it with the mean. Its scale grows with the number of replicas, up to a sum.

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

    def rule(everyone: "_Everyone") -> list[jax.Array]:
        counts = everyone.counts
        replicas = len(counts)
        if replicas & (replicas - 1):
            raise ValueError(
                "adasum adds pairs of pairs and needs a power of two of replicas; the "
                f"axis has {replicas}. Use oxs.exchange.all_reduce() there."
            )
        # In units of each replica's largest value of a leaf: squares stay in range.
        sizes = jnp.where(counts[:, None], everyone.sizes, 0)
        unit = _unit(sizes)
        pieces = []
        for block, ends, places in everyone.by_leaf():
            block = jnp.where(counts[:, None], block, jnp.zeros_like(block))
            pieces += zip(places, jnp.split(block, ends, axis=1), strict=True)
        pieces = [
            piece / unit[:, place, None].astype(piece.dtype)
            for place, piece in sorted(pieces, key=lambda pair: pair[0])
        ]
        grams = jnp.stack([_partial(piece, everyone.shard_axes) for piece in pieces])
        grams = reduce(grams, everyone.axis_name, reduction="sum")
        # Row i of `nodes[leaf]`: what node i of the tree takes of each replica.
        nodes = jnp.eye(replicas)[None] * unit.T[:, None, :].astype(grams.dtype)
        while nodes.shape[1] > 1:
            size = jnp.max(jnp.abs(nodes), axis=2, keepdims=True)
            plain = nodes / or_one(size)
            inner = _einsum("lai,lij,lbj->lab", plain, grams, plain)
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
        return [
            jnp.concatenate([combined[i] for i in places])
            for _, _, places in everyone.by_leaf()
        ]

    def sizes(leaves, axes):
        return jnp.stack([_largest(x, axes) for x in leaves])

    # Its result is no middle: a sum of what is orthogonal lies far from all.
    everyone_in = _transposed(rule, shard_axes=shard_axes, sizes=sizes)
    return everyone_in._replace(outlier=None)


def clipped(
    to: float | Literal["median"] | jax.Array,
    exchange: Exchange | None = None,
    *,
    shard_axes: AxisName | None = None,
) -> Exchange:
    """Cut what each replica sends to a norm, then let them meet as `exchange` says.

        v_i  ->  v_i min(1, to / |v_i|)

    with |v_i| the norm over all leaves of what replica i sends. No replica adds more
    than `to / N` to the mean. `"median"` needs no number to tune: `to` is the median of
    all norms, N numbers more on the wire. A NaN is not cut and travels.

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
        Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust
        Optimization", 2020, arXiv 2012.10333.
    """
    _check_norm(to)
    exchange = check_exchange(exchange, all_reduce())

    def meet(tree, state, axis_name, *, weight=None, group_assignment=None):
        _check_tree(tree, group_assignment, is_inexact)
        require_local(tree, axis_name)
        leaves = jax.tree.leaves(tree)
        axes = norm_axes(tree, axis_name, shard_axes)
        norm = _norm(leaves, axes)
        limit = _median_over(norm, weight, axis_name) if isinstance(to, str) else to
        factor = jnp.minimum(1, jnp.asarray(limit, norm.dtype) / or_one(norm))
        tree = jax.tree.map(
            lambda x: (_wide(x) * factor.astype(_wide(x).dtype)).astype(x.dtype), tree
        )
        return exchange.meet(tree, state, axis_name, weight=weight)

    return Exchange(
        exchange.init,
        meet,
        linear=False,
        takes_weights=exchange.takes_weights,
        outlier=_far_from_result(shard_axes),
    )


class _Everyone(NamedTuple):
    """What a rule sees on one replica: a piece of what each of the N replicas has."""

    blocks: list[jax.Array]  # [N, P]: pieces of leaves that can be joined, side by side
    places: list[list[int]]  # which leaves these are
    widths: list[int]  # of each leaf's piece
    counts: jax.Array  # bool[N], who counts
    sizes: Any  # [N, ...], what each replica says of itself: `sizes` of the rule
    axis_name: AxisName
    shard_axes: tuple[str, ...]

    def by_leaf(self):
        """(block, where its pieces of leaves end, which leaves) for each block."""
        for block, places in zip(self.blocks, self.places, strict=True):
            ends = np.cumsum([self.widths[i] for i in places])[:-1]
            yield block, ends.tolist(), places


class _Near(NamedTuple):
    """The pieces as seen from the median, in units of a typical replica's values."""

    middles: list[jax.Array]  # [P]
    blocks: list[jax.Array]  # [N, P]
    scale: jax.Array


Rule = Callable[[_Everyone], list[jax.Array]]


def _transposed(
    rule: Rule,
    *,
    encode: Callable[[jax.Array], jax.Array] | None = None,
    sizes: Callable[[Sequence[jax.Array], tuple[str, ...]], jax.Array] | None = None,
    shard_axes: AxisName | None = None,
) -> Exchange:
    """The exchange in which each replica applies a rule to a piece of all arrays.

    `encode` is what is done to a leaf before it travels; `sizes` what a replica says of
    itself, a rule that compares whole arrays. A rule returns a piece for each block.
    """

    def meet(tree, state, axis_name, *, weight=None, group_assignment=None):
        _check_tree(tree, group_assignment, is_floating)
        require_local(tree, axis_name)
        every, treedef = jax.tree.flatten(tree)
        # JAX does not compile an all-to-all of empty arrays alone under vmap.
        empty = iter(reduce([x for x in every if not x.size], axis_name))
        originals = [x for x in every if x.size]
        if not originals:
            return treedef.unflatten(empty), None, state
        axes = () if sizes is None else norm_axes(tree, axis_name, shard_axes)
        replicas = axis_size(axis_name)
        leaves = [(encode or _wide)(x) for x in originals]

        counts, said = jnp.ones(replicas, bool), None
        own = [] if sizes is None else [jnp.ravel(sizes(leaves, axes))]
        if weight is not None:
            flag = localize(_flag(weight), axis_name)
            own.append(flag.astype(own[0].dtype if own else jnp.float32)[None])
        if own:
            said = gather(jnp.concatenate(own)[None], axis_name)
        if weight is not None and said is not None:
            counts, said = said[:, -1] > 0, said[:, :-1]

        def rows(x):
            flat = x.reshape(-1)
            padded = jnp.pad(flat, (0, -flat.size % replicas))
            return padded.reshape(replicas, -1)

        cut = [rows(x) for x in leaves]
        places = kinds(leaves)
        blocks = [jnp.concatenate([cut[i] for i in kind], axis=1) for kind in places]
        everyone = _Everyone(
            blocks=[all_to_all(block, axis_name) for block in blocks],
            places=places,
            widths=[x.shape[1] for x in cut],
            counts=counts,
            sizes=said,
            axis_name=axis_name,
            shard_axes=axes,
        )
        pieces = rule(everyone)
        result = list(originals)
        for (_, ends, kind), piece in zip(everyone.by_leaf(), pieces, strict=True):
            whole = jnp.split(gather(piece[None], axis_name), ends, axis=1)
            for i, part in zip(kind, whole, strict=True):
                x = originals[i]
                flat = part.reshape(-1)[: x.size]
                result[i] = flat.reshape(x.shape).astype(x.dtype)
        full = iter(result)
        whole = (next(full if x.size else empty) for x in every)
        return treedef.unflatten(whole), None, state

    return Exchange(
        lambda tree: (),
        meet,
        linear=False,
        takes_weights=False,
        outlier=_far_from_result(shard_axes),
    )


def _far_from_result(
    shard_axes: AxisName | None,
) -> Callable[[Tree, Tree, AxisName, Any], jax.Array]:
    """Whether a replica is more than three times the typical distance away."""

    def outlier(tree, mean, axis_name, weight):
        axes = axes_of_shards(tree, axis_name)
        if shard_axes is not None:
            axes = norm_axes(tree, axis_name, shard_axes)
        apart = jax.tree.map(lambda x, m: _wide(x) - _wide(m), tree, mean)
        distance = _norm(jax.tree.leaves(apart), axes)
        typical = _median_over(distance, weight, axis_name)
        # So that what is not finite is far.
        return _counted(~(distance <= _OUTLYING * typical), weight)

    return outlier


def _counted(flag: jax.Array, weight: Any) -> jax.Array:
    return flag if weight is None else flag & _flag(weight)


def _norm(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> jax.Array:
    """The norm over all leaves, of values of any size; not finite where one is not.

    float64 where a leaf is, else float32.
    """
    sizes = [jnp.abs(_wide(x)) for x in leaves]
    double = any(x.dtype == jnp.float64 for x in sizes)
    dtype = jnp.float64 if double else jnp.float32
    unit = _unit(_size(leaves, axes, dtype))
    squares = (jnp.sum(jnp.square(x.astype(dtype) / unit)) for x in sizes)
    return unit * jnp.sqrt(sum((sum_over(s, axes) for s in squares), dtype(0)))


def _median_over(own: jax.Array, weight: Any, axis_name: AxisName) -> jax.Array:
    """The median of one number of each replica that counts."""
    counts = jnp.ones((), bool) if weight is None else _flag(weight)
    said = jnp.stack([own, localize(counts, axis_name).astype(own.dtype)])
    said = gather(said[None], axis_name)
    return _median(said[:, 0], said[:, 1] > 0)


def _of_finite(rule: Rule) -> Rule:
    """The rule without replicas that are not finite; NaN where there is no other."""

    def apply(everyone: _Everyone) -> list[jax.Array]:
        sizes = everyone.sizes[:, 0]
        finite = everyone.counts & jnp.isfinite(sizes)
        pieces = rule(everyone._replace(counts=finite))
        lost = jnp.any(everyone.counts) & ~jnp.any(finite)
        return [jnp.where(lost, jnp.full_like(p, jnp.nan), p) for p in pieces]

    return apply


def _near(everyone: _Everyone) -> _Near:
    """Relative to the median, so that squares neither cancel nor leave the range."""
    counts = everyone.counts
    scale = _unit(_median(everyone.sizes[:, 0], counts))
    middles = [_median(block, counts) for block in everyone.blocks]

    def seen(block, middle):
        apart = (block - middle[None]) / scale.astype(block.dtype)
        apart = jnp.where(counts[:, None], apart, jnp.zeros_like(apart))
        return jnp.clip(apart, -_FAR, _FAR)

    return _Near(middles, list(map(seen, everyone.blocks, middles)), scale)


def _gram(blocks: Sequence[jax.Array], everyone: _Everyone) -> jax.Array:
    """The inner products of all replicas' arrays, [N, N], on each of them."""
    own = [_partial(block, everyone.shard_axes) for block in blocks]
    dtype = jnp.result_type(*own)
    total = functools.reduce(jnp.add, [x.astype(dtype) for x in own])
    return reduce(total, everyone.axis_name, reduction="sum")


def _partial(block: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The inner products of these pieces, over all shards of them."""
    return sum_over(_einsum("ip,jp->ij", block, block), axes)


def _einsum(which: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(which, *operands, precision=jax.lax.Precision.HIGHEST)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _combine(weights: jax.Array, block: jax.Array) -> jax.Array:
    """The sum of all replicas' pieces; what has no weight leaves no trace."""
    weights = weights.astype(block.dtype)[:, None]
    return jnp.sum(jnp.where(weights == 0, 0, block * weights), axis=0)


def _median(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The median over axis 0 of those that count, 0 if none does."""
    n = _number(counts)
    ordered = _ordered(values, counts)
    low, high = jnp.maximum(n - 1, 0) // 2, n // 2
    half = jnp.asarray(0.5, values.dtype)
    middle = half * ordered[low] + half * ordered[high]
    return jnp.where(n > 0, middle, jnp.zeros_like(middle))


def _ordered(values: jax.Array, counts: jax.Array) -> jax.Array:
    """Sorted along axis 0; what does not count stands last, where a NaN stands too."""
    counts = counts.reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.sort(jnp.where(counts, values, jnp.full_like(values, jnp.nan)), axis=0)


def _number(counts: jax.Array) -> jax.Array:
    return jnp.sum(counts, dtype=jnp.int32)


def _size(
    leaves: Sequence[jax.Array], axes: tuple[str, ...], dtype: Any = jnp.float32
) -> jax.Array:
    """A number as large as the largest value, not finite where one is not."""
    largest = [_largest(x, axes, dtype) for x in leaves]
    return functools.reduce(jnp.maximum, largest, dtype(0))


def _largest(
    x: jax.Array, axes: tuple[str, ...], dtype: Any = jnp.float32
) -> jax.Array:
    largest = jnp.max(jnp.abs(_wide(x)), initial=0).astype(dtype)
    return sum_over(largest, axes)


def _flag(weight: Any) -> jax.Array:
    return jnp.asarray(weight).astype(bool)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype))


def _unit(size: jax.Array) -> jax.Array:
    """A size to divide by: it and its reciprocal, which XLA may take, are in range."""
    least = 8 * jnp.finfo(size.dtype).tiny
    return jnp.clip(or_one(size), least, 1 / least)


def _check_tree(tree: Tree, group_assignment: Any, fits: Callable[[Any], bool]) -> None:
    if group_assignment is not None:
        raise ValueError(
            "This exchange takes no group_assignment. Use oxs.exchange.all_reduce(), "
            "or a mesh with an axis per group."
        )
    for path, leaf in leaves_with_names(tree):
        if is_slices(leaf):
            raise ValueError(
                f"The leaf at {path} is row-sparse, which this exchange does not take. "
                "Use oxs.exchange.all_reduce(), or its to_dense(rows)."
            )
        if leaf is not None and not fits(jnp.result_type(leaf)):
            raise TypeError(
                f"The leaf at {path} has dtype {jnp.result_type(leaf)}, which this "
                "exchange does not take. Leave it out with optax.masked, or use "
                "oxs.exchange.all_reduce()."
            )


def _check_count(value: Any, name: str, call: str, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"{name} must be an integer; got {value!r} of type "
            f"{type(value).__name__}. Write for example oxs.exchange.{call}."
        )
    if value < least:
        raise ValueError(
            f"{name} must be at least {least}; got {value}. Write for example "
            f"oxs.exchange.{call}."
        )


def _check_enough(replicas: int, needed: int, call: str) -> None:
    if replicas < needed:
        raise ValueError(
            f"oxs.exchange.{call} needs at least {needed} replicas; the axis has "
            f"{replicas}. Pass a smaller number."
        )


def _check_norm(to: Any) -> None:
    if isinstance(to, str):
        if to != "median":
            raise ValueError(f"to must be a number or 'median'; got {to!r}.")
        return
    if isinstance(to, jax.core.Tracer):
        return
    if isinstance(to, bool) or not isinstance(to, int | float | np.number | jax.Array):
        raise TypeError(
            f"to must be a number or 'median'; got {to!r} of type {type(to).__name__}. "
            "Write for example oxs.exchange.clipped(1.0)."
        )
    if not 0 < float(to) < math.inf:
        raise ValueError(f"to must be finite and positive; got {to}.")
