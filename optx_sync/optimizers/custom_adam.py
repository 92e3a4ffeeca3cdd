# SPDX-License-Identifier: Apache-2.0
"""Lazy Adam: only rows with a gradient decay and move, with TensorFlow's arithmetic."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.optimizers import rule


def custom_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Lazy Adam, only for rows with a gradient: RETURNN's CustomAdamOptimizer.

    It is also LazyAdamOptimizer of TensorFlow's contrib.

    .. math::

        m &\leftarrow b_1 m + (1 - b_1) g \\
        v &\leftarrow b_2 v + (1 - b_2) g^2 \\
        \alpha &= \eta \sqrt{1 - b_2^t} / (1 - b_1^t) \\
        p &\leftarrow p - \alpha m / (\sqrt{v} + \epsilon)

    For dense gradients this is `adam`, with the same epsilon. In a table, only the rows
    that a row-sparse gradient names decay and move, and the cost does not grow with the
    table; :math:`t` counts all updates, whichever rows they name. A rare row therefore
    keeps its averages from its last update, and learns differently than with `adam`.

    Rows that occur more than once in a gradient are summed first, as in LazyAdam;
    CustomAdam keeps the slots of the last occurrence and moves the row once for each.
    Optax has no counterpart.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; no default.
        b1: decay of the average of gradients, in [0, 1].
        b2: decay of the average of their squares, in [0, 1].
        eps: :math:`\hat\epsilon`, >= 0. With 0, an element of a named row that has
            had no nonzero gradient yet becomes NaN.

    Returns:
        A transformation with the slots `m` and `v`, initially 0, and the powers
        `beta1_power` and `beta2_power`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        In the second update row 1 is not named and does not even decay:

        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.custom_adam(0.1, b1=0.5)
        >>> table, update = jnp.zeros([2, 1]), jax.jit(tx.update)
        >>> _, state = update(jnp.ones([2, 1]), tx.init(table), table)
        >>> grads = oxs.IndexedSlices(jnp.array([0]), jnp.zeros([1, 1]))
        >>> _, state = update(grads, state, table)
        >>> state.slots.m[:, 0].tolist()
        [0.25, 0.5]

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, arXiv
        1412.6980.
    """

    def step(grad, slots, param, at):
        b1, b2, eps = at.hyper
        m = b1 * slots.m + (1.0 - b1) * grad
        v = b2 * slots.v + (1.0 - b2) * jnp.square(grad)
        update = -rule.bias_corrected_rate(at) * m / (jnp.sqrt(v) + eps)
        return update, rule.Moments(m, v)

    return rule.from_moments(step, "touched", learning_rate, b1, b2, eps)
