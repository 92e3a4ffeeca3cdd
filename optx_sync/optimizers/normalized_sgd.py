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

    The norm is that of each parameter by itself, where `optax.normalize_by_update_norm`
    takes that of the whole tree. A gradient of zeros does not move anything; one
    shorter than 1e-6 is multiplied by 1e6.

    The norm of a row-sparse gradient is that of its rows after equal rows have been
    summed, hence that of the dense gradient it stands for; the original counts equal
    rows one by one. Inside `jax.shard_map` the norm is that of what this device sees.

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

    Reference: `NormalizedSGD` in RETURNN, `returnn/tf/updater.py`.
    """

    def step(grad, slots, param, at):
        # The bound is tf.nn.l2_normalize's.
        squared_norm = jnp.maximum(jnp.sum(jnp.square(grad)), 1e-12)
        return -at.learning_rate * (grad * lax.rsqrt(squared_norm)), slots

    return from_rule(LeafRule(step), learning_rate)
