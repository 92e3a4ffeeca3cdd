# SPDX-License-Identifier: Apache-2.0
"""HeLoCo: an outer optimizer that turns stale pseudo-gradients to its momentum."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.comm.buffers import wide
from optx_sync.comm.collectives import ALONE, AxisName, check_axis_name
from optx_sync.comm.norms import Axes, norm_of, unit_of
from optx_sync.comm.reduce import or_one
from optx_sync.comm.varying import axes_of, sum_over
from optx_sync.core.checks import check_rate, interval
from optx_sync.core.trees import times, zeros_like


class HeLoCoState(NamedTuple):
    """State of `heloco`."""

    momentum: optax.Updates  # like the center


def heloco(
    learning_rate: float | jax.Array | optax.Schedule,
    momentum: float | jax.Array = 0.9,
    *,
    ok: float | jax.Array = 0.5,
    shrink: float | jax.Array = 1.0,
    most: float | jax.Array = 1.0,
    turn: float | jax.Array = 0.1,
    kappa: float | jax.Array = 1.0,
    shard_axes: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""HeLoCo, an outer optimizer for asynchronous DiLoCo: it corrects stale gradients.

    A pseudo-gradient that was computed from an old center may point against the way
    that the center now takes. For each array, with d its pseudo-gradient, m the
    momentum, c the cosine of the angle between them and
    :math:`f = |d| / (|d| + \kappa |m|)`, the confidence in d:

    .. math::

        d' &= d \quad\text{for } c \ge c_{ok} \\
        d' &= d - \min(-k_s c f, b)\, c\, |d|\, \frac{m}{|m|} \quad\text{for } c < 0 \\
        d' &= |d| \, \text{unit}\Big((1 - l) \frac{d}{|d|} + l \frac{m}{|m|}\Big),
            \quad l = \min(k_d (1 - c) f, 1) \quad\text{else} \\
        m &\leftarrow \mu m + (1 - \mu) d', \qquad
        x \leftarrow x - r (d' + \mu m)

    What agrees is kept, what conflicts loses a part of what points against m, and what
    lies between is turned towards m and keeps its length. While m is zero d is kept.
    Use it as `oxs.rules.diloco(outer=oxs.outer.heloco(0.7))` in
    `oxs.simulate.asynchronous` and `oxs.runtime.run`; the factor by which the paper
    weighs a late worker is their `weigh=`.

    **The constants are not the paper's**, which are not published. With these defaults
    neither bound (b, and 1 for l) is ever reached: f is below 1, and a correction is
    never larger than the conflict. A turned d keeps its length, so what is noise in it
    is laid along the momentum, too: hence the small k_d. On a noisy quadratic with
    optima of each worker's own (8 of different speed) a correction only costs: an error
    of 0.31 without, 0.51 with `turn=0`, 0.56 with the defaults, 2.3 with `turn=1`.
    Compare with `shrink=0, turn=0`.

    Args:
        learning_rate: r; a schedule counts arrivals.
        momentum: mu, in [0, 1).
        ok: c_ok, in [0, 1], the cosine from which d is kept: 0.5 is an angle of 60
            degrees. With 0 nothing is turned.
        shrink: k_s, 0 or more. With `shrink=0` and `turn=0` nothing is corrected.
        most: b, in [0, 1]. With 1 all that points against m may go, and no more.
        turn: k_d, 0 or more.
        kappa: 0 or more; the larger it is, the less is corrected of a d that is small
            beside m.
        shard_axes: The axes over which the center is sharded by hand; `()`: none.
            `None`: none, and refused where types (check_vma=True) say that there is
            one.

    Returns:
        The transformation. It needs whole arrays: `shard_state=True` refuses it.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument out of range; at the call, `shard_axes` is needed and
            missing.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.outer.heloco(1.0, momentum=0.5)
        >>> state = tx.init(jnp.zeros(2))
        >>> for d in ([4.0, 0.0], [-2.0, 3.0]):
        ...     updates, state = tx.update(jnp.array(d), state)
        ...     print(updates.round(2))
        [-5. -0.]
        [ 1.11 -3.75]

    References:
        Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under
        data and device heterogeneity", 2026, arXiv 2606.00271.
    """
    interval("[0, 1)", "Pass for example 0.9.", momentum=momentum)
    interval("[0, 1]", ok=ok, most=most)
    interval("[0, inf)", shrink=shrink, turn=turn, kappa=kappa)
    check_rate(learning_rate)
    constants = (ok, shrink, most, turn, kappa)
    axes = None if shard_axes is None else check_axis_name(shard_axes or ALONE)

    def init(params):
        return HeLoCoState(zeros_like(params))

    def update(updates, state, params=None):
        (old,) = state
        if axes is None and (found := sorted(axes_of(updates))):
            raise ValueError(
                "heloco compares norms of whole arrays of the center, but these may be "
                f"in shards over the mesh axes {found}. Pass shard_axes={tuple(found)} "
                "if they are, for sums over the shards, or shard_axes=() if each "
                "position there has a center of its own."
            )
        correct = functools.partial(_corrected, constants, axes or ())
        kept = jax.tree.map(correct, updates, old)
        moved = jax.tree.map(lambda d, m: d + times(momentum, m - d), kept, old)
        step = jax.tree.map(lambda d, m: d + times(momentum, m), kept, moved)
        return step, HeLoCoState(moved)

    corrects = optax.GradientTransformation(init, update)
    return optax.chain(corrects, optax.scale_by_learning_rate(learning_rate))


def _corrected(
    constants: tuple[ArrayLike, ...], axes: Axes, d: jax.Array, m: jax.Array
) -> jax.Array:
    """A pseudo-gradient, corrected by the momentum; its shards lie over the axes."""
    given, d, m = d, wide(d), wide(m)
    ok, shrink, most, turn, kappa = (jnp.asarray(x, d.dtype) for x in constants)
    size, of_m = norm_of([d], axes), norm_of([m], axes)
    u, v = d / unit_of(size), m / unit_of(of_m)
    c = sum_over(jnp.sum(u * v), axes)
    sure = size / or_one(size + kappa * of_m)
    against = d - jnp.minimum(-shrink * c * sure, most) * c * size * v
    part = jnp.minimum(turn * (1 - c) * sure, 1)
    between = (1 - part) * u + part * v
    between = size * between / or_one(norm_of([between], axes))
    corrected = jnp.where(c < 0, against, between)
    corrected = jnp.where((c >= ok) | (of_m == 0), d, corrected)
    return corrected.astype(given.dtype)
