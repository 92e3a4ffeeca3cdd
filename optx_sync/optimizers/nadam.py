# SPDX-License-Identifier: Apache-2.0
"""Nadam, Adam with Nesterov's momentum, with the arithmetic of TensorFlow's contrib."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.optimizers import rule


def nadam(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Nadam: NadamOptimizer of TensorFlow's contrib and of RETURNN.

    .. math::

        m &\leftarrow m + (1 - b_1)(g - m) \\
        v &\leftarrow v + (1 - b_2)(g^2 - v) \\
        \alpha &= \eta \sqrt{1 - b_2^t} / (1 - b_1^t) \\
        p &\leftarrow p - \alpha \frac{b_1 m + (1 - b_1) g}{\sqrt{v} + \epsilon}

    The bias correction of both terms uses the current :math:`t`. The paper,
    `optax.nadam` and Keras correct the momentum term with :math:`t + 1`, and add
    epsilon after the correction.

    In a table, the slots of all rows decay, at the cost of the whole table, but only
    the rows that a row-sparse gradient names move.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the average of gradients, in [0, 1].
        b2: decay of the average of their squares, in [0, 1].
        eps: :math:`\hat\epsilon`, >= 0. With 0, an element that has had no nonzero
            gradient yet becomes NaN, as in the original.

    Returns:
        A transformation with the slots `m` and `v`, initially 0, and the powers
        `beta1_power` and `beta2_power`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        The Nesterov term makes the first step longer than the learning rate:

        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.nadam(0.01, b1=0.75)
        >>> update, _ = tx.update(jnp.array([5.0, -2.0]), tx.init(jnp.zeros(2)))
        >>> print(update.round(4))
        [-0.0175  0.0175]

    References:
        Dozat, "Incorporating Nesterov Momentum into Adam", 2016, ICLR Workshop.
    """

    def step(grad, slots, param, at):
        b1, b2, eps = at.hyper
        m = slots.m + (grad - slots.m) * (1.0 - b1)
        v = slots.v + (jnp.square(grad) - slots.v) * (1.0 - b2)
        ahead = grad * (1.0 - b1) + b1 * m
        update = -(ahead * rule.bias_corrected_rate(at)) / (jnp.sqrt(v) + eps)
        return update, rule.Moments(m, v)

    return rule.from_moments(step, "decay_all", learning_rate, b1, b2, eps)
