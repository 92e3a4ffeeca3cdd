# SPDX-License-Identifier: Apache-2.0
"""AGN: workers push accumulated normalised gradients to a center, and pull it."""

from typing import Literal, Unpack

import optax

from optx_sync.center.contract import CenterRule, Period
from optx_sync.center.lockstep import CenterOptions, center_variable, spelled_out
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import Reduction
from optx_sync.core.checks import check_inner, one_of, shows_call

Accumulate = Literal["gradients", "updates"]
_CALL = "oxs.agn(optax.adamw(1e-3), 'workers', communication_period=10)"


def agn_rule(
    outer: optax.GradientTransformation | None,
    *,
    accumulate: Accumulate = "gradients",
    reduction: Reduction = "mean",
) -> CenterRule:
    """The rule of `agn`, which describes the arguments; `outer` has no default here."""
    one_of("reduction", reduction, Reduction)
    one_of("accumulate", accumulate, Accumulate)
    if accumulate == "updates" and outer is not None:
        raise ValueError(
            "accumulate='updates' adds the workers' updates to the center, so outer "
            "has no part in it. Leave outer out, or pass accumulate='gradients'."
        )
    if accumulate == "gradients":
        outer = check_inner(outer, "oxs.rules.agn(optax.sgd(0.1))", "outer")
    return CenterRule(
        contribute=lambda own, center, at: (
            own.accumulated / at.steps.astype(own.accumulated.dtype)
        ),
        outer=outer,
        mean_over="pushed" if reduction == "mean" else None,
        accumulate=accumulate,
        reads=("accumulated",),
    )


@shows_call(_CALL)
@spelled_out
def agn(
    inner: optax.GradientTransformation,
    axis_name: AxisName | None,
    *,
    outer: optax.GradientTransformation | None = None,
    accumulate: Accumulate = "gradients",
    reduction: Reduction = "mean",
    communication_period: Period = 10,
    **options: Unpack[CenterOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""AGN: workers push an accumulated normalised gradient and pull the center.

    Every worker trains on its own with `inner` and sums up its gradients. After
    `communication_period` steps, k of them, with N workers and c the center:

    .. math::

        d &= \frac{1}{N} \sum_i \frac{\text{sum of worker } i \text{'s gradients}}{k} \\
        c &\leftarrow \text{outer}(c, d), \qquad x_i \leftarrow c

    where outer(c, d) is one step of `outer` on c with the gradient d.

    (Exact to the bit with `oxs.apply_gradients`; with `update` and
    `optax.apply_updates` float32 parameters land within one ulp of the larger of the
    two values.)

    The original is TensorFlow's `AGNOptimizer`. It runs the worker's optimizer a second
    time, on the center, with slots of the center's own; `outer=None` does the same. The
    paper accumulates the worker's *updates* and adds them to the center:
    `accumulate="updates"`. For SGD without momentum the two are equal.

    In the original the workers push one after the other. In lockstep their
    contributions are averaged, which keeps the center's step at the worker's learning
    rate; `reduction="sum"` adds them, which for SGD equals pushing one after the other.
    With the sum and `communication_period=1` it is DOWNPOUR. In the original a worker
    and the center share Adam's powers of beta; here each has its own count.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them;
            `None`: one worker with a center of its own.
        outer: The center's optimizer for the contributions; `None`: `inner` again.
        accumulate: `"gradients"` (the original) or `"updates"` (the paper).
        reduction: `"mean"` or `"sum"` of the workers' contributions.
        communication_period: See `center_variable`.
        **options: The other keywords of `center_variable`.

    Returns:
        The transformation; it stands last in a chain.

    Raises:
        ValueError: `outer` was given together with `accumulate="updates"`; or for
            one of the reasons of `center_variable`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.agn(optax.adam(1e-3), "workers", communication_period=20)
        >>> oxs.metrics(tx.init(jnp.ones(3))).rounds
        Array(0, dtype=int32)

    References:
        Hermans, Spanakis and Moeckel, "Accumulated Gradient Normalization", 2017, arXiv
        1710.02368.
    """
    if outer is None and accumulate == "gradients":
        outer = inner
    return center_variable(
        inner,
        agn_rule(outer, accumulate=accumulate, reduction=reduction),
        axis_name,
        communication_period=communication_period,
        **options,
    )
