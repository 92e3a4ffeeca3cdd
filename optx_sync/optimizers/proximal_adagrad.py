# SPDX-License-Identifier: Apache-2.0
"""Proximal Adagrad, with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule, soft_threshold


class ProximalAdagradSlots(NamedTuple):
    """Slots of `proximal_adagrad`."""

    accumulator: Slot  # initial value plus the sum of squared gradients


def proximal_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: ArrayLike = 0.1,
    l1: ArrayLike = 0.0,
    l2: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with a proximal step: TensorFlow's ProximalAdagradOptimizer.

    .. math::

        a &\leftarrow a + g^2, \qquad e = \eta / \sqrt{a} \\
        w &= p - e g \\
        p &\leftarrow \frac{\operatorname{sign}(w) \max(|w| - e l_1, 0)}{1 + e l_2}

    Each element's own learning rate :math:`e` also scales its regularization; `l1`
    makes parameters exactly zero. Without `l1` and `l2` it is `adagrad`. Optax has no
    counterpart. In a table, only the rows that a row-sparse gradient names shrink, so
    rare rows hardly ever become zero: use `ftrl` for sparse weights.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        initial_accumulator_value: initial value of :math:`a`, > 0.
        l1: strength of the l1 norm, >= 0.
        l2: strength of the squared l2 norm, >= 0.

    Returns:
        A transformation with the slot `accumulator`. It needs `params`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> adagrad = oxs.optimizers.proximal_adagrad
        >>> tx = adagrad(2.0, initial_accumulator_value=3.0, l1=0.5)
        >>> params = jnp.array([4.0, 1.25])
        >>> updates, _ = tx.update(jnp.ones(2), tx.init(params), params)
        >>> optax.apply_updates(params, updates).round(4).tolist()
        [2.5, 0.0]

    References:
        Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization", 2011, Journal of Machine Learning Research 12. Duchi
        and Singer, "Efficient Learning using Forward-Backward Splitting", 2009, NIPS
        22.
    """
    interval("(0, inf)", initial_accumulator_value=initial_accumulator_value)
    interval("[0, inf)", l1=l1, l2=l2)

    def step(grad, slots, param, at):
        l1, l2 = at.hyper
        accumulator = slots.accumulator + jnp.square(grad)
        rate = at.learning_rate * lax.rsqrt(accumulator)
        moved = param - grad * rate
        new_param = soft_threshold(moved, rate * l1) / (1.0 + l2 * rate)
        return new_param - param, ProximalAdagradSlots(accumulator)

    slots = ProximalAdagradSlots(accumulator=initial_accumulator_value)
    rule = LeafRule(step, slots, "touched", hyper=(l1, l2), needs_params=True)
    return from_rule(rule, learning_rate)
