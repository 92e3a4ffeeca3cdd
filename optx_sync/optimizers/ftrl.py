# SPDX-License-Identifier: Apache-2.0
"""FTRL-Proximal (follow the regularized leader), with TensorFlow's arithmetic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import interval
from optx_sync.optimizers.rule import LeafRule, Slot, from_rule


class FtrlSlots(NamedTuple):
    """Slots of `ftrl`."""

    accum: Slot  # initial value plus the sum of squared gradients
    linear: Slot  # the linear term of the leader's objective


def ftrl(
    learning_rate: optax.ScalarOrSchedule,
    learning_rate_power: ArrayLike = -0.5,
    initial_accumulator_value: ArrayLike = 0.1,
    l1: ArrayLike = 0.0,
    l2: ArrayLike = 0.0,
    l2_shrinkage: ArrayLike = 0.0,
    beta: ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""FTRL-Proximal: TensorFlow's FtrlOptimizer.

    .. math::

        n' &= n + g^2, \qquad k = -\text{learning\_rate\_power} \\
        z &\leftarrow z + g + 2 l_2^{shrinkage} p - \frac{n'^k - n^k}{\eta} p \\
        p &\leftarrow \begin{cases} \dfrac{\operatorname{sign}(z) l_1 - z}
            {n'^k / \eta + 2 l_2 + \beta / \eta} & |z| > l_1 \\ 0 & \text{else}
            \end{cases}, \qquad n \leftarrow n'

    Each step computes the parameter from the sums; its initial value enters only
    through `linear`. An element whose first gradient is zero therefore becomes zero at
    once (without `l2_shrinkage`), and `l1` makes parameters exactly zero: dense ones
    already in the first step, whatever their values, if the gradient (the mean of
    replicas) is well below `l1`, as :math:`n` then hardly grows. A schedule
    must never return 0, since the formula divides by the current learning rate. Optax
    has no counterpart. In a table, only the rows that a row-sparse gradient names
    change or shrink. The update is the difference to the new value, and adding it
    rounds: a dense step corrects the rounding of the step before, a row-sparse step
    only in the rows that it names.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule, not 0.
        learning_rate_power: :math:`-k`, <= 0; 0 keeps the rate constant.
        initial_accumulator_value: initial value of :math:`n`, >= 0.
        l1: strength of the l1 norm, >= 0.
        l2: strength of the squared l2 norm of the leader, >= 0.
        l2_shrinkage: strength of the squared l2 norm in the loss, >= 0: it is added to
            the gradient, but not to the gradient that is squared for :math:`n`.
        beta: the paper's :math:`\beta`, >= 0 (the original takes any number).

    Returns:
        A transformation with the slots `accum` and `linear`. It needs `params`.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite or out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.optimizers.ftrl(0.5, l1=1.0)
        >>> params = jnp.zeros(3)
        >>> grads = jnp.array([3.0, 0.5, -2.0])
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> [round(p, 3) for p in optax.apply_updates(params, updates).tolist()]
        [-0.331, 0.0, 0.247]

    References:
        McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, KDD.
    """
    interval("(-inf, 0]", learning_rate_power=learning_rate_power)
    interval("[0, inf)", initial_accumulator_value=initial_accumulator_value)
    interval("[0, inf)", l1=l1, l2=l2, l2_shrinkage=l2_shrinkage, beta=beta)
    if isinstance(learning_rate, int | float) and learning_rate == 0:
        raise ValueError("learning_rate must not be 0 for ftrl, which divides by it.")
    known_power = not isinstance(learning_rate_power, jax.Array)
    is_root = known_power and learning_rate_power == -0.5

    def to_the_k(x, power):
        return jnp.sqrt(x) if is_root else jnp.power(x, -power)

    def step(grad, slots, param, at):
        power, l1, l2, l2_shrinkage, beta = at.hyper
        lr = at.learning_rate
        before, after = slots.accum, slots.accum + jnp.square(grad)
        # TensorFlow adds beta to l2, with the same guard against a rate of zero.
        l2 = l2 + beta / (2.0 * jnp.maximum(lr, 1e-36))
        shrunk = grad + 2.0 * l2_shrinkage * param
        growth = to_the_k(after, power) - to_the_k(before, power)
        # Multiplied before divided: compiled, this order is closest to TensorFlow's.
        linear = slots.linear + (shrunk - growth * param / lr)
        quadratic = to_the_k(after, power) / lr + 2.0 * l2
        leader = (jnp.sign(linear) * l1 - linear) / quadratic
        new_param = jnp.where(jnp.abs(linear) > l1, leader, jnp.zeros_like(leader))
        return new_param - param, FtrlSlots(after, linear)

    slots = FtrlSlots(accum=initial_accumulator_value, linear=0.0)
    hyper = (learning_rate_power, l1, l2, l2_shrinkage, beta)
    rule = LeafRule(step, slots, "touched", hyper=hyper, needs_params=True)
    return from_rule(rule, learning_rate)
