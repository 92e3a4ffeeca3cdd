# SPDX-License-Identifier: Apache-2.0
"""Proximal gradient descent (FOBOS), with TensorFlow's arithmetic."""

import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, from_rule, soft_threshold


def proximal_gradient_descent(
    learning_rate: optax.ScalarOrSchedule, l1: ArrayLike = 0.0, l2: ArrayLike = 0.0
) -> optax.GradientTransformationExtraArgs:
    r"""Forward-backward splitting: TensorFlow's ProximalGradientDescentOptimizer.

    .. math::

        w &= p - \eta g \\
        p &\leftarrow \frac{\operatorname{sign}(w) \max(|w| - \eta l_1, 0)}
            {1 + \eta l_2}

    This is a gradient step, then the proximal step of :math:`l_1 |p| + l_2 p^2 / 2`,
    which makes parameters exactly zero. Elements with a zero gradient shrink too; in a
    table, only the rows that a row-sparse gradient names shrink. Optax has the parts
    (`optax.projections`), not the optimizer.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        l1: strength of the l1 norm, >= 0 (the original treats a negative one as 0).
        l2: strength of the squared l2 norm, >= 0.

    Returns:
        A transformation without slots. It needs `params`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite, or `l1` or `l2` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.proximal_gradient_descent(0.5, l1=1.0, l2=2.0)
        >>> params = jnp.array([3.5, -0.25])
        >>> updates, _ = tx.update(jnp.array([2.0, 0.0]), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [1.0, 0.0]

    References:
        Duchi and Singer, "Efficient Learning using Forward-Backward Splitting", 2009,
        NIPS 22.
    """
    interval("[0, inf)", l1=l1, l2=l2)

    def step(grad, slots, param, at):
        l1, l2 = at.hyper
        lr = at.learning_rate
        moved = param - grad * lr
        new_param = soft_threshold(moved, lr * l1) / (1.0 + l2 * lr)
        return new_param - param, slots

    rule = LeafRule(step, rows="touched", hyper=(l1, l2), needs_params=True)
    return from_rule(rule, learning_rate)
