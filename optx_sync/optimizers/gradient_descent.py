# SPDX-License-Identifier: Apache-2.0
"""Gradient descent with TensorFlow's arithmetic."""

import optax

from optx_sync.optimizers.rule import LeafRule, from_rule


def gradient_descent(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent: TensorFlow's GradientDescentOptimizer.

    It is also RETURNN's CustomGradientDescentOptimizer.

    .. math::

        p \leftarrow p - \eta g

    It is equal to `optax.sgd(learning_rate)` and also takes row-sparse gradients, which
    move only the rows that they name.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.

    Returns:
        A transformation without slots.

    Raises:
        TypeError: if `learning_rate` is neither a number nor a schedule.
        ValueError: if it is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> params = {"table": jnp.ones([4, 1])}
        >>> grads = {"table": oxs.IndexedSlices(jnp.array([2, 2]), jnp.ones([2, 1]))}
        >>> tx = oxs.optimizers.gradient_descent(0.25)
        >>> updates, _ = tx.update(grads, tx.init(params), params)
        >>> optax.apply_updates(params, updates)["table"][:, 0].tolist()
        [1.0, 1.0, 0.5, 1.0]

    References:
        Robbins and Monro, "A Stochastic Approximation Method", 1951, The Annals of
        Mathematical Statistics 22.
    """

    def step(grad, slots, param, at):
        return -at.learning_rate * grad, slots

    return from_rule(LeafRule(step, rows="touched"), learning_rate)
