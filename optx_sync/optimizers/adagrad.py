# SPDX-License-Identifier: Apache-2.0
"""Adagrad with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class AdagradSlots(NamedTuple):
    """Slots of `adagrad`."""

    accumulator: Slot  # initial value plus the sum of squared gradients


def adagrad(
    learning_rate: optax.ScalarOrSchedule, initial_accumulator_value: ArrayLike = 0.1
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad: TensorFlow's AdagradOptimizer.

    .. math::

        a &\leftarrow a + g^2 \\
        p &\leftarrow p - \eta \frac{g}{\sqrt{a}}

    There is no epsilon: the accumulator's positive initial value takes its place.
    `optax.adagrad` has the same initial value but also an epsilon of 1e-7 inside the
    root; with `eps=0.0` it is equal. In a table, only the rows that a row-sparse
    gradient names accumulate and move.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        initial_accumulator_value: initial value of :math:`a`, > 0.

    Returns:
        A transformation with the slot `accumulator`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if `initial_accumulator_value` is not positive and finite, or
            `learning_rate` is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.adagrad(1.0, initial_accumulator_value=7.0)
        >>> state = tx.init(jnp.zeros(2))
        >>> update, state = tx.update(jnp.array([3.0, -3.0]), state)
        >>> update.round(4).tolist(), state.slots.accumulator.tolist()
        ([-0.75, 0.75], [16.0, 16.0])

    References:
        Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization", 2011, Journal of Machine Learning Research 12.
    """
    interval("(0, inf)", initial_accumulator_value=initial_accumulator_value)

    def step(grad, slots, param, at):
        accumulator = slots.accumulator + jnp.square(grad)
        update = -grad * at.learning_rate * lax.rsqrt(accumulator)
        return update, AdagradSlots(accumulator)

    return from_rule(
        LeafRule(step, AdagradSlots(initial_accumulator_value), "touched"),
        learning_rate,
    )
