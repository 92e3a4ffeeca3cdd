# SPDX-License-Identifier: Apache-2.0
"""Adadelta with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class AdadeltaSlots(NamedTuple):
    """Slots of `adadelta`."""

    accum: Slot  # running average of squared gradients
    accum_update: Slot  # running average of squared updates, without the learning rate


def adadelta(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    rho: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adadelta: TensorFlow's AdadeltaOptimizer.

    .. math::

        a &\leftarrow \rho a + (1 - \rho) g^2 \\
        u &= \sqrt{d + \epsilon} \, g / \sqrt{a + \epsilon} \\
        p &\leftarrow p - \eta u \\
        d &\leftarrow \rho d + (1 - \rho) u^2

    The paper has no learning rate: pass 1.0 to follow it. TensorFlow's default of 0.001
    is very slow. `optax.adadelta` with the same arguments is equal; its defaults
    differ. In a table, only the rows that a row-sparse gradient names change.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        rho: decay of both averages, in [0, 1].
        eps: >= 0, inside both roots. With 0 no parameter ever moves, and an element
            whose first gradient is 0 becomes NaN.

    Returns:
        A transformation with the slots `accum` and `accum_update`, initially 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.adadelta(1.0, rho=0.75, eps=1.0)
        >>> state = tx.init(jnp.zeros(1))
        >>> update, state = tx.update(jnp.array([2.0]), state)
        >>> round(update.item(), 4), state.slots.accum.item()
        (-1.4142, 1.0)

    References:
        Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, arXiv 1212.5701.
    """
    interval("[0, 1]", rho=rho)
    interval("[0, inf)", eps=eps)

    def step(grad, slots, param, at):
        rho, eps = at.hyper
        accum = slots.accum * rho + jnp.square(grad) * (1.0 - rho)
        change = jnp.sqrt(slots.accum_update + eps) * lax.rsqrt(accum + eps) * grad
        accum_update = slots.accum_update * rho + jnp.square(change) * (1.0 - rho)
        return -change * at.learning_rate, AdadeltaSlots(accum, accum_update)

    slots = AdadeltaSlots(accum=0.0, accum_update=0.0)
    return from_rule(LeafRule(step, slots, "touched", hyper=(rho, eps)), learning_rate)
