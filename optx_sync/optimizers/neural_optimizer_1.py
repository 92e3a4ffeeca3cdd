# SPDX-License-Identifier: Apache-2.0
"""NeuralOptimizer1: smaller steps against the average gradient, like PowerSign."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class NeuralOptimizer1Slots(NamedTuple):
    """Slots of `neural_optimizer_1`."""

    m: Slot  # running average of gradients


def neural_optimizer_1(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    decrease_factor: ArrayLike = 0.1,
) -> optax.GradientTransformationExtraArgs:
    r"""Smaller steps against the average gradient: RETURNN's NeuralOptimizer1.

    .. math::

        m &\leftarrow b_1 m + (1 - b_1) g \\
        p &\leftarrow p - \eta g \cdot \begin{cases}
            1 & \operatorname{sign}(m) = \operatorname{sign}(g) \\
            \text{decrease\_factor} & \text{else} \end{cases}

    The paper's rule is PowerSign,
    :math:`g \exp(\operatorname{sign}(g) \operatorname{sign}(m))`. This rule differs
    only in constants: steps where the signs differ are 0.1 of the others by default;
    in PowerSign they are :math:`e^{-2} \approx 0.135` of them. Optax has no
    counterpart.

    In a table, the slots of all rows decay, at the cost of the whole table, but only
    the rows that a row-sparse gradient names move. Rows that occur more than once are
    summed first; the original treats each occurrence by itself.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; no default.
        b1: decay of the average of gradients, in [0, 1].
        decrease_factor: factor of the step where the signs differ, any finite number.

    Returns:
        A transformation with the slot `m`, initially 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite, or `b1` is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.neural_optimizer_1(1.0, b1=0.75, decrease_factor=0.25)
        >>> state = tx.init(jnp.zeros(1))
        >>> for grad in [8.0, -2.0, -16.0]:
        ...     update, state = tx.update(jnp.array([grad]), state)
        ...     print(update.item(), state.slots.m.item())
        -8.0 2.0
        0.5 1.0
        16.0 -3.25

    References:
        Bello, Zoph, Vasudevan and Le, "Neural Optimizer Search with Reinforcement
        Learning", 2017, arXiv 1709.07417.
    """
    interval("[0, 1]", b1=b1)
    interval("(-inf, inf)", decrease_factor=decrease_factor)

    def step(grad, slots, param, at):
        b1, decrease_factor = at.hyper
        m = slots.m * b1 + grad * (1.0 - b1)
        agree = jnp.sign(m) == jnp.sign(grad)
        factor = jnp.where(agree, jnp.ones_like(grad), decrease_factor)
        return -at.learning_rate * grad * factor, NeuralOptimizer1Slots(m)

    def decay(slots, at):
        b1, _ = at.hyper
        return NeuralOptimizer1Slots(slots.m * b1)

    slots = NeuralOptimizer1Slots(m=0.0)
    rule = LeafRule(step, slots, "decay_all", decay, hyper=(b1, decrease_factor))
    return from_rule(rule, learning_rate)
