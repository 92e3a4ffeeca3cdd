# SPDX-License-Identifier: Apache-2.0
"""Delayed Nesterov momentum: an outer optimizer for asynchronous DiLoCo."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.core.checks import check_rate, integer, interval
from optx_sync.core.shapes import Array, Int32
from optx_sync.core.trees import times, where, zeros_like


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`."""

    arrived: Int32[Array, ""]  # contributions since the momentum last changed
    momentum: optax.Updates  # like the center
    delayed: optax.Updates  # their sum, like the center


def delayed_nesterov(
    learning_rate: float | jax.Array | optax.Schedule,
    momentum: float | jax.Array = 0.9,
    every: int | None = None,
    c: float | jax.Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Delayed Nesterov momentum, an outer optimizer for asynchronous DiLoCo.

    When the contributions of N workers arrive one by one, plain Nesterov momentum
    changes with each of them, N times as often as with their mean. Here it changes only
    with every n-th arrival, n = `every`. With g the contribution that arrives, divided
    by the number of workers as `diloco_rule` does, m the momentum, b its factor, r the
    learning rate and x the center:

    .. math::

        m &\leftarrow b m + \text{the sum of the last } n \; g, \quad\text{then} \\
        x &\leftarrow x - r ((1 - c n + c) b m + g)
            \quad\text{at an n-th arrival} \\
        x &\leftarrow x - r (c b m + g) \quad\text{at the others}

    With n = 1 it is `optax.sgd(r, b, nesterov=True)`. Use it as
    `oxs.rules.diloco(outer=oxs.outer.delayed_nesterov(0.7))` in
    `oxs.simulate.asynchronous` and `oxs.runtime.run`.

    Args:
        learning_rate: r; a schedule counts arrivals.
        momentum: b, in [0, 1].
        every: n. `None`: the number of workers where they arrive one by one, and 1 in
            lockstep, where they arrive together.
        c: The fraction of the momentum's step at each of the other arrivals; 0 to
            1 / n.

    Returns:
        The transformation.

    Raises:
        TypeError: `every` is not an integer.
        ValueError: `every` is below 1, or `momentum` or `c` is outside [0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.outer.delayed_nesterov(1.0, momentum=0.5, every=2)
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
    interval("[0, 1]", "Pass for example 0.5.", momentum=momentum, c=c)
    check_rate(learning_rate)

    def init(params):
        return DelayedNesterovState(
            jnp.zeros((), jnp.int32), zeros_like(params), zeros_like(params)
        )

    def update(updates, state, params=None, *, num_workers=1, **extra_args):
        del extra_args
        number = every or num_workers
        delayed = jax.tree.map(jnp.add, state.delayed, updates)
        complete = state.arrived + 1 >= number
        moved = jax.tree.map(
            lambda m, d: jnp.where(complete, times(momentum, m) + d, m),
            state.momentum,
            delayed,
        )
        delayed = where(complete, zeros_like(delayed), delayed)
        share = jnp.where(complete, 1 - c * number + c, c)
        step = jax.tree.map(lambda g, m: g + times(share * momentum, m), updates, moved)
        arrived = jnp.where(complete, 0, state.arrived + 1)
        return step, DelayedNesterovState(arrived, moved, delayed)

    delays = optax.GradientTransformationExtraArgs(init, update)
    return optax.chain(delays, optax.scale_by_learning_rate(learning_rate))
