# SPDX-License-Identifier: Apache-2.0
"""Adagrad with dual averaging, with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule, soft_threshold


class AdagradDASlots(NamedTuple):
    """Slots of `adagrad_da`."""

    gradient_accumulator: Slot  # sum of gradients
    gradient_squared_accumulator: Slot  # initial value plus the sum of their squares


def adagrad_da(
    learning_rate: optax.ScalarOrSchedule,
    initial_gradient_squared_accumulator_value: ArrayLike = 0.1,
    l1: ArrayLike = 0.0,
    l2: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with dual averaging: TensorFlow's AdagradDAOptimizer.

    .. math::

        G &\leftarrow G + g, \qquad Q \leftarrow Q + g^2 \\
        p &\leftarrow -\eta \, \frac{\operatorname{sign}(G) \max(|G| - T l_1, 0)}
            {l_2 T \eta + \sqrt{Q}}

    with :math:`T = 1` at the first update. Each update computes the parameter from the
    sums alone: the first one forgets its initial value, and `l1` makes parameters
    exactly zero. Optax has no counterpart. Initialise linear models with zeros; use
    `adagrad` for deep ones.

    :math:`T` is this transformation's own count of updates; the original reads a
    `global_step` that the caller may forget to pass. In a table, rows that a row-sparse
    gradient does not name stay unchanged; when named again, they use the current
    :math:`T`.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        initial_gradient_squared_accumulator_value: initial value of :math:`Q`, > 0.
        l1: strength of the l1 norm, >= 0.
        l2: strength of the squared l2 norm, >= 0.

    Returns:
        A transformation with the slots `gradient_accumulator` and
        `gradient_squared_accumulator`. It needs `params`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        The second gradient is smaller than `l1`, so its parameter becomes zero:

        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.adagrad_da(0.5, l1=0.25)
        >>> params = jnp.array([8.0, 8.0])
        >>> grads = jnp.array([2.25, 0.125])
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> [round(p, 3) for p in optax.apply_updates(params, updates).tolist()]
        [-0.44, 0.0]

    References:
        Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization", 2011, Journal of Machine Learning Research 12.
    """
    initial = initial_gradient_squared_accumulator_value
    interval("(0, inf)", initial_gradient_squared_accumulator_value=initial)
    interval("[0, inf)", l1=l1, l2=l2)

    def step(grad, slots, param, at):
        l1, l2 = at.hyper
        lr = at.learning_rate
        t = (at.count + 1).astype(lr.dtype)
        total = slots.gradient_accumulator + grad
        squares = slots.gradient_squared_accumulator + jnp.square(grad)
        denominator = l2 * (t * lr) + jnp.sqrt(squares)
        new_param = -lr * soft_threshold(total, t * l1) / denominator
        return new_param - param, AdagradDASlots(total, squares)

    slots = AdagradDASlots(
        gradient_accumulator=0.0, gradient_squared_accumulator=initial
    )
    rule = LeafRule(step, slots, "touched", hyper=(l1, l2), needs_params=True)
    return from_rule(rule, learning_rate)
