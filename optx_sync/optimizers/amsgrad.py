# SPDX-License-Identifier: Apache-2.0
"""AMSGrad without bias correction, with RETURNN's arithmetic."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval, one_of
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class AMSGradSlots(NamedTuple):
    """Slots of `amsgrad`."""

    m: Slot  # running average of gradients
    v: Slot  # running average of squared gradients
    v_hat: Slot  # the largest v so far


def amsgrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    decay: bool = False,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""AMSGrad: RETURNN's AMSGradOptimizer.

    .. math::

        m &\leftarrow b_1 m + (1 - b_1) g \\
        v &\leftarrow b_2 v + (1 - b_2) g^2, \qquad
            \hat v \leftarrow \max(\hat v, v) \\
        p &\leftarrow p - \eta_t m / (\epsilon + \sqrt{\hat v}), \qquad
            \eta_t = \eta / \sqrt{t} \text{ with decay, else } \eta

    There is no bias correction, as in the paper; `optax.amsgrad` corrects both averages
    by default, and its other defaults differ.

    With `eps=0`, the default, an element that has had no nonzero gradient yet stays
    unchanged; in the original it becomes NaN. Row-sparse gradients are refused, since
    the original has no form for them.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        decay: whether to divide the learning rate by :math:`\sqrt t`. This flag is the
            second argument, as in the original; do not mistake it for `b1`.
        b1: decay of the average of gradients, in [0, 1].
        b2: decay of the average of their squares, in [0, 1].
        eps: >= 0.

    Returns:
        A transformation with the slots `m`, `v` and `v_hat`, initially 0.

    Raises:
        TypeError: if an argument is not a number; in `update`, if a gradient is
            row-sparse.
        ValueError: if an argument is out of its range, or `decay` is not a bool.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.amsgrad(0.1, decay=True, b1=0.5, b2=0.75)
        >>> state = tx.init(jnp.zeros(2))
        >>> for _ in range(2):
        ...     update, state = tx.update(jnp.array([4.0, 0.0]), state)
        >>> print(update.round(4), state.slots.v_hat)
        [-0.0802  0.    ] [7. 0.]

    References:
        Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018, arXiv
        1904.09237.
    """
    one_of("decay", decay, Literal[True, False])
    interval("[0, 1]", b1=b1, b2=b2)
    interval("[0, inf)", eps=eps)

    def step(grad, slots, param, at):
        b1, b2, rest1, rest2, eps = at.hyper
        lr = at.learning_rate
        if decay:
            lr = lr / jnp.sqrt((at.count + 1).astype(lr.dtype))
        m = b1 * slots.m + rest1 * grad
        v = b2 * slots.v + rest2 * jnp.square(grad)
        v_hat = jnp.maximum(slots.v_hat, v)
        denominator = eps + jnp.sqrt(v_hat)
        moves = denominator > 0.0
        safe = jnp.where(moves, denominator, jnp.ones_like(denominator))
        update = jnp.where(moves, -lr * m / safe, jnp.zeros_like(m))
        return update, AMSGradSlots(m, v, v_hat)

    rule = LeafRule(
        step,
        AMSGradSlots(m=0.0, v=0.0, v_hat=0.0),
        rows="refused",
        # The original computes 1 - b in double precision; all other rules in float32.
        hyper=(b1, b2, 1.0 - b1, 1.0 - b2, eps),
    )
    return from_rule(rule, learning_rate)
