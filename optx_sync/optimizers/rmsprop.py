# SPDX-License-Identifier: Apache-2.0
"""RMSProp, plain or centered, with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class RMSPropSlots(NamedTuple):
    """Slots of `rmsprop`."""

    rms: Slot  # running average of squared gradients; initially 1
    momentum: Slot  # decaying sum of steps; present even if momentum is 0


class CenteredRMSPropSlots(NamedTuple):
    """Slots of `rmsprop(..., centered=True)`."""

    rms: Slot
    momentum: Slot
    mg: Slot  # running average of gradients


def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    decay: ArrayLike = 0.9,
    momentum: ArrayLike = 0.0,
    eps: ArrayLike = 1e-10,
    centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp: TensorFlow's RMSPropOptimizer.

    .. math::

        s &\leftarrow s + (1 - \rho)(g^2 - s), \qquad
            c \leftarrow c + (1 - \rho)(g - c) \quad\text{if centered} \\
        m &\leftarrow \mu m + \eta \, g / \sqrt{s - c^2 + \epsilon} \\
        p &\leftarrow p - m

    The average of squares starts at 1, epsilon is inside the root, and the learning
    rate is inside the momentum. `optax.rmsprop` starts at 0, with an epsilon of 1e-8;
    with `initial_scale=1.0` and the same numbers it is equal. In a table, only the rows
    that a row-sparse gradient names change.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        decay: :math:`\rho` of the averages, in [0, 1].
        momentum: :math:`\mu`, any finite number.
        eps: >= 0. With `centered` choose it well above 1e-7: the difference under the
            root can be below zero by rounding.
        centered: whether to subtract the square of the average gradient.

    Returns:
        A transformation with the slots `rms`, `momentum` and, if centered, `mg`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.rmsprop(1.0, decay=0.75, momentum=0.5, eps=0.0)
        >>> state = tx.init(jnp.zeros(2))
        >>> update, state = tx.update(jnp.array([1.0, 5.0]), state)
        >>> print(update.round(4), state.slots.rms)
        [-1.     -1.8898] [1. 7.]

    References:
        Tieleman and Hinton, "Lecture 6.5, RMSProp: Divide the gradient by a running
        average of its recent magnitude", 2012, COURSERA: Neural Networks for Machine
        Learning. Graves, "Generating Sequences With Recurrent Neural Networks", 2013,
        arXiv 1308.0850 (centered).
    """
    interval("[0, 1]", decay=decay)
    interval("(-inf, inf)", momentum=momentum)
    interval("[0, inf)", eps=eps)

    def step(grad, slots, param, at):
        rho, mu, eps = at.hyper
        rms = slots.rms + (jnp.square(grad) - slots.rms) * (1.0 - rho)
        variance = rms
        averages = ()
        if centered:
            mg = slots.mg + (grad - slots.mg) * (1.0 - rho)
            variance = rms - jnp.square(mg)
            averages = (mg,)
        root = jnp.sqrt(variance + eps)
        change = slots.momentum * mu + grad * at.learning_rate / root
        return -change, type(slots)(rms, change, *averages)

    slots = RMSPropSlots(rms=1.0, momentum=0.0)
    if centered:
        slots = CenteredRMSPropSlots(*slots, mg=0.0)
    rule = LeafRule(step, slots, "touched", hyper=(decay, momentum, eps))
    return from_rule(rule, learning_rate)
