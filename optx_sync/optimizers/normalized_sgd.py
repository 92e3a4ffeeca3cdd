# SPDX-License-Identifier: Apache-2.0
"""Normalized gradient descent, with RETURNN's arithmetic."""

import jax.numpy as jnp
import optax
from jax import lax

from optx_sync.optimizers.rule import LeafRule, from_rule


def normalized_sgd(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent along normalized gradients: RETURNN's NormalizedSGD.

    .. math::

        p \leftarrow p - \eta \frac{g}{\sqrt{\max(\sum g^2, 10^{-12})}}

    Each parameter's gradient is divided by its own l2 norm;
    `optax.normalize_by_update_norm` divides by that of the whole tree. A gradient of
    zeros moves nothing; one with a norm below 1e-6 is multiplied by 1e6.

    In a row-sparse gradient, rows that occur more than once are summed first, so its
    norm is that of the dense gradient it represents; the original counts each
    occurrence by itself. Inside `jax.shard_map` the norm is that of the local shard.

    Args:
        learning_rate: :math:`\eta`, the length of each parameter's step.

    Returns:
        A transformation without slots.

    Raises:
        TypeError: if `learning_rate` is neither a number nor a schedule.
        ValueError: if it is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.normalized_sgd(5.0)
        >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(1)}
        >>> grads = {"w": jnp.array([0.3, -0.4]), "b": jnp.array([1000.0])}
        >>> updates, _ = tx.update(grads, tx.init(params))
        >>> updates["w"].round(4).tolist(), updates["b"].round(4).tolist()
        ([-3.0, 4.0], [-5.0])

    References:
        Zeyer, Alkhouli and Ney, "RETURNN as a Generic Flexible Neural Toolkit with
        Application to Translation and Speech Recognition", 2018, arXiv 1805.05225
        (`NormalizedSGD` in
        `returnn/tf/updater.py`).
    """

    def step(grad, slots, param, at):
        # tf.nn.l2_normalize has the same lower bound.
        squared_norm = jnp.maximum(jnp.sum(jnp.square(grad)), 1e-12)
        return -at.learning_rate * (grad * lax.rsqrt(squared_norm)), slots

    return from_rule(LeafRule(step, rows="touched"), learning_rate)
