# SPDX-License-Identifier: Apache-2.0
"""Gradient descent scaled by the gradient's variance, with RETURNN's arithmetic."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.optimizers.rule import Moments, from_moments


def grad_variance_scaled(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps scaled by gradient variance: RETURNN's GradVarianceScaledOptimizer.

    .. math::

        m &\leftarrow b_1 m + (1 - b_1) g \\
        s &= (g - m)^2, \qquad v \leftarrow b_2 v + (1 - b_2) s \\
        p &\leftarrow p - \eta g \min\left(\frac{v}{s + \epsilon}, 1\right)

    A gradient that is no further from the average than usual gives a full step, an
    outlier a smaller one. There is no bias correction: the first step is multiplied by
    about :math:`1 - b_2`. Optax has no counterpart.

    In a table, the slots of all rows decay, at the cost of the whole table, but only
    the rows that a row-sparse gradient names move. Rows that occur more than once are
    summed first; the original treats each occurrence by itself.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; no default.
        b1: decay of the average of gradients, in [0, 1].
        b2: decay of the average of squared distances, in [0, 1].
        eps: >= 0. With 0, an element that has had no nonzero gradient yet becomes NaN,
            as in the original.

    Returns:
        A transformation with the slots `m` and `v`, initially 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.grad_variance_scaled(1.0, b1=0.5, b2=0.75)
        >>> state = tx.init(jnp.zeros(1))
        >>> for _ in range(3):
        ...     update, state = tx.update(jnp.array([1.0]), state)
        ...     print(round(update.item(), 4))
        -0.25
        -1.0
        -1.0

    References:
        Zeyer, Alkhouli and Ney, "RETURNN as a Generic Flexible Neural Toolkit with
        Application to Translation and Speech Recognition", 2018, arXiv 1805.05225
        (`GradVarianceScaledOptimizer` in
        `returnn/tf/updater.py`).
    """

    def step(grad, slots, param, at):
        b1, b2, eps = at.hyper
        m = slots.m * b1 + grad * (1.0 - b1)
        distance = jnp.square(grad - m)
        v = slots.v * b2 + distance * (1.0 - b2)
        factor = jnp.minimum(v / (distance + eps), 1.0)
        return -at.learning_rate * grad * factor, Moments(m, v)

    return from_moments(
        step, "decay_all", learning_rate, b1, b2, eps, with_powers=False
    )
