# SPDX-License-Identifier: Apache-2.0
"""Momentum, Polyak's or Nesterov's, with TensorFlow's arithmetic."""

from typing import NamedTuple

import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class MomentumSlots(NamedTuple):
    """Slots of `momentum`."""

    momentum: Slot  # decaying sum of gradients, without the learning rate


def momentum(
    learning_rate: optax.ScalarOrSchedule, momentum: ArrayLike, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent with momentum: TensorFlow's MomentumOptimizer.

    .. math::

        a &\leftarrow \mu a + g \\
        p &\leftarrow p - \eta a
            \quad\text{or, with nesterov,}\quad p - (\eta g + \eta \mu a)

    It is equal to `optax.sgd(learning_rate, momentum, nesterov)`. As there, the
    learning rate is outside the sum, where the paper has it inside: a change of the
    rate also rescales the momentum accumulated so far. In a table, rows that a
    row-sparse gradient does not name neither decay nor move.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        momentum: :math:`\mu`, any finite number; no default, as in the original.
        nesterov: whether to use Nesterov momentum, as Sutskever et al. do.

    Returns:
        A transformation with the slot `momentum`, initially 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.momentum(0.5, momentum=0.5)
        >>> state = tx.init(jnp.array([1.0]))
        >>> for _ in range(3):
        ...     update, state = tx.update(jnp.array([1.0]), state)
        ...     print(update.item(), state.slots.momentum.item())
        -0.5 1.0
        -0.75 1.5
        -0.875 1.75

    References:
        Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and
        momentum in deep learning", 2013, ICML.
    """
    interval("(-inf, inf)", momentum=momentum)

    def step(grad, slots, param, at):
        (mu,) = at.hyper
        total = slots.momentum * mu + grad
        if nesterov:
            update = -(grad * at.learning_rate + total * mu * at.learning_rate)
        else:
            update = -total * at.learning_rate
        return update, MomentumSlots(total)

    rule = LeafRule(step, MomentumSlots(0.0), "touched", hyper=(momentum,))
    return from_rule(rule, learning_rate)
