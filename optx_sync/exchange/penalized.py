# SPDX-License-Identifier: Apache-2.0
"""Pseudo-gradient penalty (EDiT): long contributions count little, outliers nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optx_sync.comm.collectives import AxisName, axis_index, gather
from optx_sync.comm.norms import Number, norm_of
from optx_sync.comm.reduce import or_one, own_weight, weight_divisor
from optx_sync.comm.varying import localize, norm_axes
from optx_sync.core.checks import Refused, check_function, integer, interval, refuse
from optx_sync.core.shapes import Array, Bool, Float, Int32
from optx_sync.core.trees import Tree, is_inexact, path_name, where
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange, check_exchange
from optx_sync.exchange.pieces import require_meetable
from optx_sync.exchange.robust import norms
from optx_sync.state.fields import OF_SUMS, OWN_COUNT, OWN_SUM, declare


class NormHistory(NamedTuple):
    """What a worker remembers of the norms of one group of leaves."""

    rounds: Int32[Array, ""]  # how many norms it has seen
    mean: Float[Array, ""]
    variance: Float[Array, ""]
    spread: Float[Array, ""]  # the mean square of the last z


# Weights inside add up to 1 for any number of workers, so what is owed keeps its scale.
@declare(histories=OWN_SUM.not_a_slot, outlier=OWN_COUNT, exchange=OF_SUMS)
class PenalizedState(NamedTuple):
    """State of `penalized`, each replica's own."""

    histories: dict[str, NormHistory]  # by group
    outlier: Bool[Array, ""]  # whether the last meeting left a group of it out
    exchange: Tree  # the state of the exchange inside


class _PenalizedOptions(NamedTuple):
    exchange: Exchange
    groups: Callable[[str], str] | None
    warmup: int
    rate: Any
    limit: Any


def penalized(
    exchange: Exchange | None = None,
    *,
    groups: Callable[[str], str] | None = None,
    warmup: int = 120,
    rate: float | jax.Array = 0.02,
    limit: float | jax.Array = 3.0,
    temperature: float | jax.Array = 1.0,
    clip: float | jax.Array | None = 10.0,
    shard_axes: AxisName | None = None,
) -> Exchange:
    r"""Pseudo-gradient penalty (EDiT): a mean that trusts short contributions more.

    With v_i what replica i sends, w_i its weight, G_i the norm of v_i, T the
    `temperature`:

    .. math::

        d = \frac{\sum_i w_i e^{-G_i / T} v_i}{\sum_i w_i e^{-G_i / T}}, \qquad
        \text{result} = d\, \min\Big(1, \frac{\text{clip}}{|d| + 10^{-6}}\Big)

    An outlier leaves no trace: a replica whose norm is not finite, or lies far above
    its own earlier ones. Each replica keeps their mean and variance, with a = `rate`:

    .. math::

        \mu' = \mu + a\, (G - \mu), \qquad
        \sigma^2 \leftarrow (1 - a) \big(\sigma^2 + a\, (G - \mu)(G - \mu')\big)

    After `warmup` rounds a replica is an outlier if z = (G - mu) / sigma, of the rounds
    before, exceeds `limit` max(1, s), with s the root of the mean square of the last z.
    It enters the mean and variance with the largest norm that is none, so that norms
    that stay higher count again after some ten rounds. (The source takes no note of an
    outlier, and would leave such a replica out for good.)

    `oxs.metrics` counts outliers. If all are, the result is 0, and so is the sum of the
    weights: with `drop_nonfinite=True` a center then makes no step, else its momentum
    goes on. A replica of weight 0 leaves no trace, and remembers what it did.

    Norms are absolute: T = 1 and clip = 10 are meant for `diloco`'s contributions, with
    norms of about 1. One small all-gather of a float for each group and replica comes
    before the arrays; they travel by the exchange inside.

    Args:
        exchange: What makes the mean, by the weights above; `None`:
            `oxs.exchange.all_reduce()`.
        groups: The leaves that are judged, weighed and clipped together have the same
            name, by a function of the leaf's path as text: `lambda path: path` for each
            alone. `None`: all leaves are one group.
        warmup: Rounds in which no norm is too large.
        rate: The share of a new norm in mean and variance.
        limit: How many deviations above the mean an outlier lies.
        temperature: T. Large: all count alike.
        clip: The largest norm of the result (published: 1 or 10); `None`: any.
        shard_axes: See `geometric_median`.

    Returns:
        The exchange. It is not linear, takes weights, remembers norms, and takes
        neither row-sparse leaves nor groups of replicas.

    Raises:
        TypeError: `exchange` is no exchange, `groups` no function, `warmup` no integer.
        ValueError: A number out of range; an exchange that takes no weights, or with
            `groups` one that is not linear; at the call, `shard_axes` is needed and
            missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.penalized()
        >>> tx = oxs.diloco(optax.adam(1e-3), "workers", exchange=exchange)
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "workers").mean
        >>> x = jnp.array([1.0, -1.0, 9.0, jnp.nan])
        >>> jax.jit(jax.vmap(mean, axis_name="workers"))(x).round(3)
        Array([0.002, 0.002, 0.002, 0.002], dtype=float32)

    References:
        Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for
        Large Language Models", 2024, arXiv 2412.07210.
    """
    exchange = check_exchange(exchange, all_reduce())
    if groups is not None:
        mend = "Write for example groups=lambda path: path."
        check_function("groups", groups, mend)
    warmup = integer("warmup", warmup, "The default is 120.", least=0)
    interval("(0, 1)", "The default is 0.02.", rate=rate)
    interval(
        "(0, inf)", "The defaults are 3 and 1.", limit=limit, temperature=temperature
    )
    if clip is not None:
        interval("(0, inf)", "Pass for example 10.0, or None.", clip=clip)
    options = _PenalizedOptions(exchange, groups, warmup, rate, limit)
    refuse(options, _REFUSED)

    def init(tree):
        def start():  # each in a buffer of its own, so that all can be donated
            three = [jnp.zeros((), jnp.float32) for _ in range(3)]
            return NormHistory(jnp.zeros((), jnp.int32), *three)

        histories = {name: start() for name in _members(tree, groups)}
        return PenalizedState(histories, jnp.zeros((), bool), exchange.init(tree))

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "penalized", is_inexact)
        axes = norm_axes(tree, axis_name, shard_axes)
        own = own_weight(weight, axis_name)
        leaves, treedef = jax.tree.flatten(tree)
        members, histories = _members(tree, groups), dict(state.histories)
        counts, left_out = jnp.bool_(True) if own is None else own > 0, jnp.bool_(False)
        said = []
        for name, places in members.items():
            norm = norm_of([leaves[i] for i in places], axes).astype(jnp.float32)
            out, history = _judge(norm, histories[name], options)
            histories[name] = where(counts, history, histories[name])
            left_out |= counts & out
            said.append(jnp.where(out, jnp.inf, norm))
        said.append(jnp.float32(1) if own is None else own.astype(jnp.float32))
        said = gather(jnp.stack(localize(said, axis_name))[None], axis_name)
        weights = said[:, -1]
        shares, used = _shares(said[:, :-1], weights, temperature)

        # Inside, a replica's weight is its largest share: the others are below it.
        largest = jnp.max(shares, axis=1, initial=0)
        me = axis_index(axis_name)
        parts = shares[me] / or_one(largest[me])
        sent = treedef.unflatten(_scaled(leaves, members, parts))
        # Their sums are divided by the weights of those that are used.
        there = used[me] | (weights[me] == 0)
        also = jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), also)
        met = exchange.meet(
            sent, state.exchange, axis_name, weight=largest[me], also=also
        )
        means, scale = jax.tree.leaves(met.mean), jnp.sum(largest)
        factors = [scale] * len(members)
        if clip is not None:
            each = [[means[i] for i in places] for places in members.values()]
            factors = [_clipped(norm_of(x, axes), scale, clip) for x in each]
        mean = treedef.unflatten(_scaled(means, members, factors))
        memory = localize(PenalizedState(histories, left_out, met.state), axis_name)
        total = jnp.sum(jnp.where(used, weights, 0))
        return met._replace(mean=mean, weight=total, lost=None, state=memory)

    return Exchange(
        init,
        meet,
        linear=False,
        takes_weights=True,
        needs=exchange.needs,
        outlier=lambda tree, met, axis_name, weight: met.state.outlier,
    )


_REFUSED: Refused[_PenalizedOptions] = (
    (
        lambda o: not o.exchange.takes_weights,
        "penalized gives each replica a weight of its own, and exchange= counts all "
        "alike. Pass one that takes weights, such as oxs.exchange.all_reduce().",
    ),
    (
        lambda o: o.groups is not None and not o.exchange.linear,
        "With groups= what a replica sends is scaled group by group, which is right in "
        "a mean alone, and exchange= is none. Leave groups out, or pass a linear "
        "exchange such as oxs.exchange.all_reduce().",
    ),
)


def _members(tree: Tree, groups: Callable[[str], str] | None) -> dict[str, list[int]]:
    """The places of the leaves of each group, by its name."""
    found: dict[str, list[int]] = {}
    for place, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        name = "all" if groups is None else groups(path_name(path))
        found.setdefault(name, []).append(place)
    return found


def _clipped(norm: Number, scale: Number, clip: Any) -> Number:
    """By what to multiply: `scale`, or what makes the norm `clip`."""
    scale = scale.astype(norm.dtype)
    norm = scale * norm
    limited = jnp.asarray(clip, norm.dtype) / (norm + 1e-6)
    # An infinite mean is loud: times 0 it would be hidden.
    return scale * jnp.where(jnp.isinf(norm), jnp.nan, jnp.minimum(1, limited))


def _scaled(
    leaves: list[jax.Array], members: dict[str, list[int]], factors: Any
) -> list[jax.Array]:
    """The leaves of each group times a factor; by 0 all becomes 0, a NaN, too."""
    scaled = list(leaves)
    for factor, places in zip(factors, members.values(), strict=True):
        for i in places:
            whole = norms.times(factor, leaves[i])
            scaled[i] = jnp.where(factor == 0, jnp.zeros_like(whole), whole)
    return scaled


def _judge(
    norm: Number, history: NormHistory, options: _PenalizedOptions
) -> tuple[Bool[Array, ""], NormHistory]:
    """(whether a norm is an outlier, the history with it)."""
    rounds, mean, variance, spread = history
    rate, limit = (jnp.asarray(x, norm.dtype) for x in (options.rate, options.limit))
    sigma = jnp.sqrt(variance)
    z = jnp.where(rounds < options.warmup, 0, (norm - mean) / or_one(sigma))
    z = jnp.where(sigma > 0, z, 0)
    most = limit * jnp.maximum(1, jnp.sqrt(spread))
    out = ~jnp.isfinite(norm) | (z > most)
    seen = jnp.where(z > most, mean + most * sigma, norm)
    apart = jnp.where(rounds == 0, 0, seen - mean)
    moved = jnp.where(rounds == 0, seen, mean + rate * apart)
    variance = (1 - rate) * (variance + rate * apart * (seen - moved))
    spread += rate * (jnp.square(jnp.clip(z, -most, most)) - spread)
    new = NormHistory(rounds + 1, moved, variance, spread)
    return out, where(jnp.isfinite(norm) & jnp.isfinite(variance), new, history)


def _shares(
    sizes: Float[Array, "replicas groups"],
    weights: Float[Array, " replicas"],
    temperature: Any,
) -> tuple[Float[Array, "replicas groups"], Bool[Array, " replicas"]]:
    """Each replica's share in each group, and whether it may have one in any."""
    fine = jnp.isfinite(sizes) & (weights != 0)[:, None]
    least = jnp.min(jnp.where(fine, sizes, jnp.inf), axis=0, keepdims=True)
    # Relative to the shortest, whose exponential is 1.
    apart = jnp.where(fine, sizes - least, 0) / jnp.asarray(temperature, sizes.dtype)
    shares = jnp.where(fine, weights[:, None] * jnp.exp(-apart), 0)
    shares /= weight_divisor(jnp.sum(shares, axis=0, keepdims=True))
    return shares, jnp.any(fine, axis=1) if sizes.shape[1] else weights != 0
