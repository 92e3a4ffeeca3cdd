# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: how far the workers moved is the gradient of an outer optimizer."""

from typing import Unpack

import optax

from optx_sync.center.contract import CenterRule, Period
from optx_sync.center.lockstep import CenterOptions, center_variable, spelled_out
from optx_sync.comm.collectives import AxisName
from optx_sync.core.checks import check_inner, shows_call

_CALL = "oxs.diloco(optax.adamw(1e-3), 'workers', communication_period=500)"


def diloco_rule(outer: optax.GradientTransformation | None = None) -> CenterRule:
    """The rule of `diloco`; `None`: Nesterov SGD, learning rate 0.7, momentum 0.9."""
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return CenterRule(
        # Optax negates: the gradient points from where the worker went to the center.
        contribute=lambda own, center, at: own.taken - own.params,
        outer=check_inner(
            outer, "oxs.rules.diloco(optax.sgd(0.7, 0.9, nesterov=True))", "outer"
        ),
        mean_over="workers",
        reads=("params", "taken"),
    )


@shows_call(_CALL)
@spelled_out
def diloco(
    inner: optax.GradientTransformation,
    axis_name: AxisName | None,
    *,
    outer: optax.GradientTransformation | None = None,
    communication_period: Period = 500,
    **options: Unpack[CenterOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: how far the workers moved is the gradient of an outer optimizer.

    Every `communication_period` steps, with N workers and c the center that all of
    them took last:

    .. math::

        d &= \frac{1}{N} \sum_i (c - x_i) \\
        c &\leftarrow \text{outer}(c, d), \qquad x_i \leftarrow c

    where outer(c, d) is one step of `outer` on c with the gradient d.

    (Exact to the bit with `oxs.apply_gradients`; with `update` and
    `optax.apply_updates` float32 parameters land within one ulp of the larger of the
    two values.)

    With `outer=optax.sgd(1.0)` this is local SGD. The paper's settings: AdamW inside,
    500 steps between rounds, and the default outer optimizer. The best outer learning
    rate grows with the number of workers and with the period; outer momentum pays off
    only after 50 rounds or more.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them;
            `None`: one worker with a center of its own (SNOO, Lookahead).
        outer: The optimizer that absorbs the pseudo-gradient; `None`: Nesterov SGD
            with learning rate 0.7 and momentum 0.9.
        communication_period: See `center_variable`.
        **options: The other keywords of `center_variable`.

    Returns:
        The transformation; it stands last in a chain.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(optax.adamw(1e-3), "workers", communication_period=50)
        >>> state = tx.init({"w": jnp.full(2, 3.0)})
        >>> oxs.center_params(state, {"w": jnp.zeros(2)})
        {'w': Array([3., 3.], dtype=float32)}

    References:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
        Models", 2023, arXiv 2311.08105. Charles et al., "Communication-Efficient
        Language Model Training Scales Reliably and Robustly", 2025, arXiv 2503.09799.
        Kallusky et al., "SNOO: Step-K Nesterov Outer Optimizer", 2025, arXiv
        2510.15830 (of one worker).
    """
    return center_variable(
        inner,
        diloco_rule(outer),
        axis_name,
        communication_period=communication_period,
        **options,
    )
