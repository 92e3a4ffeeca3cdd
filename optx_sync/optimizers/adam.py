# SPDX-License-Identifier: Apache-2.0
"""Adam in its epsilon-hat form, with TensorFlow's arithmetic."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.optimizers import rule


def adam(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam: TensorFlow's AdamOptimizer.

    .. math::

        m &\leftarrow m + (1 - b_1)(g - m) \\
        v &\leftarrow v + (1 - b_2)(g^2 - v) \\
        \alpha &= \eta \sqrt{1 - b_2^t} / (1 - b_1^t) \\
        p &\leftarrow p - \alpha m / (\sqrt{v} + \epsilon)

    This is the paper's epsilon-hat form: epsilon is added before the bias correction.
    `optax.adam` adds it after, where the same epsilon counts about 30 times less in the
    first steps. The powers of `b1` and `b2` are running float32 products.

    A row-sparse gradient acts as the dense gradient it represents: the slots of all
    rows decay and all rows move, at the cost of the whole table. `custom_adam` updates
    only the named rows.

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
        Epsilon has more weight than in `optax.adam`, whose first step here is -0.0909:

        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.adam(0.1, eps=0.1)
        >>> update, state = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)))
        >>> round(update.item(), 4), round(state.powers.beta1_power.item(), 4)
        (-0.024, 0.81)

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, arXiv
        1412.6980 (end of section 2).
    """

    def step(grad, slots, param, at):
        b1, b2, eps = at.hyper
        m = slots.m + (grad - slots.m) * (1.0 - b1)
        v = slots.v + (jnp.square(grad) - slots.v) * (1.0 - b2)
        update = -(m * rule.bias_corrected_rate(at)) / (jnp.sqrt(v) + eps)
        return update, rule.Moments(m, v)

    return rule.from_moments(step, "all", learning_rate, b1, b2, eps)
