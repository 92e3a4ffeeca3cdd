# SPDX-License-Identifier: Apache-2.0
"""Delayed Nesterov: a momentum for centers that workers reach one by one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.checks import integer, interval
from optx_sync.shapes import Array, Int32
from optx_sync.trees import where, zeros_like


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`."""

    arrived: Int32[Array, ""]  # contributions since the momentum moved
    momentum: optax.Updates  # like the center
    delayed: optax.Updates  # the sum of what has arrived since


def delayed_nesterov(
    learning_rate: float | jax.Array | optax.Schedule,
    momentum: float | jax.Array = 0.9,
    every: int | None = None,
    c: float | jax.Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Nesterov momentum for asynchronous DiLoCo: the momentum waits for all workers.

    Where contributions arrive one by one, Nesterov's momentum sees each of N workers
    alone and moves N times as often as with their mean. Here it moves with every n-th
    arrival, n = `every`. With g what arrives, divided by the number of workers as
    `diloco_rule` does, m the momentum, b its factor and r the learning rate:

    .. math::

        m &\leftarrow b m + \text{the sum of the last } n \; g, \quad\text{then} \\
        x &\leftarrow x - r ((1 - c n + c) b m + g)
            \quad\text{at an n-th arrival} \\
        x &\leftarrow x - r (c b m + g) \quad\text{at the others}

    with x the center.

    With n = 1 it is `optax.sgd(r, b, nesterov=True)`. It is an outer optimizer,
    `oxs.diloco_rule(outer=oxs.delayed_nesterov(0.7))`, for `oxs.simulate.asynchronous`
    and `oxs.runtime.run`.

    Args:
        learning_rate: r; a schedule counts arrivals.
        momentum: b.
        every: n. `None`: the number of workers where they come one by one, 1 in
            lockstep, where they come together.
        c: Which part of the momentum's step the others take; 0 to 1 / n.

    Returns:
        The transformation.

    Raises:
        TypeError: An `every` that is no integer.
        ValueError: An `every` below 1, a `momentum` or `c` outside of [0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.delayed_nesterov(1.0, momentum=0.5, every=2)
        >>> state = tx.init(jnp.zeros(()))
        >>> for g in (1.0, 2.0, 4.0):
        ...     updates, state = tx.update(jnp.float32(g), state)
        ...     print(updates)
        -1.0
        -3.5
        -4.0

    References:
        Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv
        2401.09135.
    """
    if every is not None:
        every = integer("every", every, "Pass the number of workers, or None.")
    for name, value in (("momentum", momentum), ("c", c)):
        interval(name, value, "Pass for example 0.5.", 0, 1)
    rate = optax.scale_by_learning_rate(learning_rate)

    def init(params):
        state = DelayedNesterovState(
            jnp.zeros((), jnp.int32), zeros_like(params), zeros_like(params)
        )
        return state, rate.init(params)

    def update(updates, state, params=None, *, num_workers=1, **extra_args):
        del extra_args
        own, of_rate = state
        number = every or num_workers
        delayed = jax.tree.map(jnp.add, own.delayed, updates)
        complete = own.arrived + 1 >= number
        moved = jax.tree.map(
            lambda m, d: jnp.where(complete, _times(momentum, m) + d, m),
            own.momentum,
            delayed,
        )
        delayed = where(complete, zeros_like(delayed), delayed)
        share = jnp.where(complete, 1 - c * number + c, c)
        step = jax.tree.map(
            lambda g, m: g + _times(share * momentum, m), updates, moved
        )
        arrived = jnp.where(complete, 0, own.arrived + 1)
        step, of_rate = rate.update(step, of_rate, params)
        return step, (DelayedNesterovState(arrived, moved, delayed), of_rate)

    return optax.GradientTransformationExtraArgs(init, update)


def _times(factor: ArrayLike, x: jax.Array) -> jax.Array:
    return jnp.asarray(factor, x.dtype) * x
