# SPDX-License-Identifier: Apache-2.0
"""QSR (quadratic synchronization rule): the period grows as the learning rate falls."""

import jax.numpy as jnp
import optax

from optx_sync.core.checks import check_rate, integer, interval


def qsr(
    learning_rate: optax.ScalarOrSchedule,
    alpha: float,
    base: int = 4,
    *,
    power: float = 2,
    warmup: int = 0,
    total_steps: int | None = None,
) -> optax.Schedule:
    r"""Quadratic synchronization rule (QSR): a period that grows as the rate falls.

    A communication period that begins in step t, with the learning rate :math:`\eta_t`
    of that step, has

    .. math::

        H = \max\left(\text{base},
            \left\lfloor \left(\frac{\alpha}{\eta_t}\right)^{\text{power}}
            \right\rfloor\right)

    steps. A period that begins in the first `warmup` steps has the length of one that
    begins in step `warmup`. Longer periods find flatter minima, as long as the learning
    rate is small enough for them to be safe: in the paper's runs with ViT-B, QSR needs
    fewer rounds than a constant period and reaches a better validation accuracy.

    Args:
        learning_rate: The inner optimizer's, a number or a schedule of the step.
        alpha: The learning rate at which H would be 1 without `base`, > 0: about the
            peak learning rate times the square root of `base`. The paper has 0.0175
            for AdamW with a peak learning rate of 0.008.
        base: The shortest period, in steps.
        power: 2; the paper also tries 1 and 3.
        warmup: The steps in which the learning rate grows.
        total_steps: The steps of the run. A shorter last period, if necessary, ends
            with the run's last step. `None`: the run may end in the middle of a period.

    Returns:
        A schedule for `communication_period=`, which `oxs.by_hand.due` reads too. Where
        the learning rate is 0 the period is infinite: no round is due.

    Raises:
        TypeError: A number of steps or `base` is not an integer.
        ValueError: A number is out of range.

    Example:
        >>> import optax
        >>> import optx_sync as oxs
        >>> rate = optax.cosine_decay_schedule(0.1, 60)
        >>> period = oxs.outer.qsr(rate, 0.2, total_steps=60)
        >>> [step for step in range(60) if oxs.by_hand.due(period, step)]
        [3, 7, 11, 15, 20, 27, 40, 59]
        >>> tx = oxs.local_sgd(optax.sgd(rate), "workers", communication_period=period)

    References:
        Gu, Lyu, Arora, Zhang and Huang, "A Quadratic Synchronization Rule for
        Distributed Deep Learning", 2024, arXiv 2310.14423.
    """
    check_rate(learning_rate)
    base = integer("base", base, "Pass for example 4.")
    warmup = integer("warmup", warmup, "Pass 0 for none.", least=0)
    if total_steps is not None:
        total_steps = integer("total_steps", total_steps, "Leave it out for none.")
    interval("(0, inf)", alpha=alpha, power=power)

    def period(step):
        rate = learning_rate
        if callable(rate):
            rate = rate(jnp.maximum(step, warmup))
        ratio = jnp.asarray(alpha, jnp.float32) / jnp.asarray(rate, jnp.float32)
        # A length that is a whole number but for float32's rounding is rounded to it.
        length = jnp.floor(ratio ** jnp.float32(power) * jnp.float32(1 + 1e-6))
        length = jnp.maximum(length, jnp.float32(base))
        if total_steps is None:
            return length
        left = (total_steps - jnp.asarray(step)).astype(jnp.float32)
        return jnp.where(left > 0, jnp.minimum(length, left), length)

    return period
