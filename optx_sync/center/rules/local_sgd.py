# SPDX-License-Identifier: Apache-2.0
"""Local SGD: workers average their parameters every few steps."""

from typing import Unpack

import optax

from optx_sync.center.contract import CenterRule, Period
from optx_sync.center.lockstep import CenterOptions, center_variable, spelled_out
from optx_sync.comm.collectives import AxisName
from optx_sync.core.checks import shows_call

_CALL = "oxs.local_sgd(optax.adamw(1e-3), 'workers', communication_period=10)"


def local_sgd_rule() -> CenterRule:
    """The rule of `local_sgd`: add the mean of what the workers moved to the center."""
    return CenterRule(
        contribute=lambda own, center, at: own.params - own.taken,
        mean_over="workers",
        reads=("params", "taken"),
    )


@shows_call(_CALL)
@spelled_out
def local_sgd(
    inner: optax.GradientTransformation,
    axis_name: AxisName | None,
    *,
    communication_period: Period = 10,
    **options: Unpack[CenterOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD, or parameter averaging: workers train alone and average now and then.

    Every `communication_period` steps, with N workers and c the center that all of
    them took last:

    .. math::

        c \leftarrow c + \frac{1}{N} \sum_i (x_i - c), \qquad x_i \leftarrow c

    (Exact to the bit with `oxs.apply_gradients`; with `update` and
    `optax.apply_updates` float32 parameters land within one ulp of the larger of the
    two values.)

    `inner` may be any optimizer. A schedule as period gives post-local SGD: a round in
    every step during a warm-up, and every 16 steps after it, with

        communication_period=lambda step: jnp.where(step < 1000, 1, 16)

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them;
            `None`: one worker with a center of its own.
        communication_period: See `center_variable`.
        **options: The other keywords of `center_variable`.

    Returns:
        The transformation; it stands last in a chain.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(1.0), "workers", communication_period=1)
        >>> params = jnp.zeros(())
        >>> axes = oxs.by_hand.state_axes(tx, params)
        >>> state = oxs.by_hand.replicate(tx.init(params), 2, axes)
        >>> def step(gradient, state, params):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates)
        >>> two = jax.vmap(step, in_axes=(0, axes, 0), axis_name="workers")
        >>> two(jnp.array([1.0, 3.0]), state, oxs.by_hand.replicate(params, 2))
        Array([-2., -2.], dtype=float32)

    References:
        Stich, "Local SGD converges fast and communicates little", 2018, arXiv
        1805.09767. Lin et al., "Don't use large mini-batches, use local SGD", 2018,
        arXiv 1808.07217.
    """
    return center_variable(
        inner,
        local_sgd_rule(),
        axis_name,
        communication_period=communication_period,
        **options,
    )
