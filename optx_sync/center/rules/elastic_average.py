# SPDX-License-Identifier: Apache-2.0
"""Elastic averaging (EASGD): a spring ties each worker to the center."""

import math
from collections.abc import Callable
from typing import Unpack

import jax
import jax.core
import jax.numpy as jnp
import optax

from optx_sync.center.contract import CenterRule, Own, Period, Round
from optx_sync.center.lockstep import CenterOptions, center_variable, spelled_out
from optx_sync.comm.collectives import AxisName
from optx_sync.core.checks import integer, shows_call
from optx_sync.core.trees import Tree, times

_CALL = "oxs.elastic_average(optax.adamw(1e-3), 'workers', learning_rate=1e-3)"


def elastic_rule(
    *,
    moving_rate: float | jax.Array | None = None,
    rho: float | jax.Array | None = None,
    learning_rate: float | jax.Array | None = None,
) -> CenterRule:
    """The rule of `elastic_average`, which describes the arguments."""
    _check("moving_rate", moving_rate, lambda a: 0 <= a <= 1, "in [0, 1]")
    _check("rho", rho, lambda rho: 0 <= rho < math.inf, "finite and at least 0")
    if rho is None:
        if learning_rate is None:
            raise ValueError(
                "rho=None stands for moving_rate / learning_rate and so needs "
                "learning_rate. Pass learning_rate=0.1, say, or rho=0.0 for no penalty "
                "on the gradient."
            )
        _check(
            "learning_rate",
            learning_rate,
            lambda rate: 0 < rate < math.inf,
            "a float > 0, from which rho = moving_rate / learning_rate follows (with "
            "a schedule pass rho)",
        )

    def check(communication_period: Period) -> None:
        if moving_rate is None and callable(communication_period):
            raise ValueError(
                "With a schedule as communication_period there is no default moving "
                "rate, which is 0.9 / communication_period / num_workers. Pass "
                "moving_rate."
            )

    def check_lockstep(num_workers: int) -> None:
        if moving_rate is None or isinstance(moving_rate, jax.core.Tracer):
            return
        # All pull at once: worker - center is multiplied by it where they are equal.
        factor = 1 - (num_workers + 1) * float(moving_rate)
        if factor < -1 - 1e-3:
            raise ValueError(
                f"With moving_rate={moving_rate} a round with {num_workers} workers "
                f"multiplies their distance from the center by {factor:.3g}: they "
                "drift apart even without gradients. In lockstep pass at most "
                f"{2 / (num_workers + 1):.3g}, which is 2 / (num_workers + 1), for "
                "example the paper's 0.9 / num_workers. Workers that come one by one, "
                "as in TensorFlow, oxs.runtime and oxs.simulate.asynchronous, may "
                "have any rate."
            )

    def rate(at: Round) -> float | jax.Array | None:
        if moving_rate is not None or at.communication_period is None:
            return moving_rate
        return 0.9 / at.communication_period / at.num_workers

    def penalty(own: Own, at: Round) -> jax.Array:
        apart = own.params - own.taken
        if rho is not None:
            return times(rho, apart)
        moving = rate(at)
        if isinstance(moving, int | float) and isinstance(learning_rate, int | float):
            return times(moving / learning_rate, apart)
        return times(moving, apart) / jnp.asarray(learning_rate, apart.dtype)

    without_penalty = isinstance(rho, int | float) and rho == 0
    return CenterRule(
        contribute=lambda own, center, at: times(rate(at), own.params - center),
        take=lambda x, before, after, at: x - times(rate(at), x - before),
        penalty=None if without_penalty else penalty,
        check=check,
        check_lockstep=check_lockstep,
        reads=("params", "center", "before"),
    )


@shows_call(_CALL)
@spelled_out
def elastic_average(
    inner: optax.GradientTransformation,
    axis_name: AxisName | None,
    *,
    num_workers: int | None = None,
    moving_rate: float | jax.Array | None = None,
    rho: float | jax.Array | None = None,
    learning_rate: float | jax.Array | None = None,
    communication_period: Period = 10,
    **options: Unpack[CenterOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging (EASGD): workers are pulled towards a center, and it to them.

    In every step worker i, with the parameters x_i, adds a penalty to its gradient g_i.
    With s_i the center at its last round, before the pushes of that round:

    .. math::

        g_i \leftarrow g_i + \rho\, (x_i - s_i)

    and every `communication_period` steps, after the update, with a the moving rate and
    c the center:

    .. math::

        x_i \leftarrow x_i - a (x_i - c), \qquad
        c \leftarrow c + \sum_i a (x_i - c)

    A round conserves the sum of all workers' parameters and the center. Momentum
    inside, `optax.sgd(lr, momentum=0.9, nesterov=True)`, makes it EAMSGD.

    The defaults are those of TensorFlow's `ElasticAverageOptimizer`:
    `moving_rate = 0.9 / communication_period / num_workers` and
    `rho = moving_rate / learning_rate`. The paper's rate does not shrink with the
    period,

        oxs.elastic_average(inner, "workers", moving_rate=0.9 / num_workers, rho=0.0)

    and is far better at long periods. In lockstep all workers pull at once, which is
    stable up to moving_rate = 2 / (num_workers + 1); more is refused.

    TensorFlow's optimizer is asynchronous, where every rate up to 1 is stable; this is
    the paper's synchronous form. A penalty (rho != 0) makes row-sparse gradients dense
    and keeps a second copy of the center.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them;
            `None`: one worker with a center of its own.
        num_workers: If given, checked against the size of the axis.
        moving_rate: a, in [0, 1], and in lockstep at most 2 / (num_workers + 1).
        rho: The strength of the penalty, >= 0; 0.0 switches it off; `None`:
            `moving_rate / learning_rate`.
        learning_rate: The inner learning rate, a float > 0; read only for `rho=None`.
        communication_period: See `center_variable`; with a schedule `moving_rate` must
            be given.
        **options: The other keywords of `center_variable`.

    Returns:
        The transformation; it stands last in a chain.

    Raises:
        ValueError: `rho=None` without a `learning_rate`; a rate out of range, or in a
            step one that is not stable for so many workers; what `center_variable`
            refuses.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.elastic_average(
        ...     optax.sgd(0.1, momentum=0.9), "workers", learning_rate=0.1
        ... )
        >>> state = tx.init(jnp.ones(3))
        >>> oxs.center_params(state, jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)

    References:
        Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", 2015,
        arXiv 1412.6651.
    """
    rule = elastic_rule(moving_rate=moving_rate, rho=rho, learning_rate=learning_rate)
    if num_workers is not None:
        num_workers = integer("num_workers", num_workers, "Leave it out, or pass 8.")
    return center_variable(
        inner,
        rule._replace(num_workers=num_workers),
        axis_name,
        communication_period=communication_period,
        **options,
    )


def _check(name: str, value: Tree, holds: Callable[[float], bool], rule: str) -> None:
    """Refuse a number for which `holds` is false; a traced value passes."""
    if value is None or isinstance(value, jax.core.Tracer):
        return
    number = isinstance(value, int | float) or hasattr(value, "dtype")
    if isinstance(value, bool) or not number or jnp.shape(value) != ():
        raise TypeError(f"{name} must be a number or None; got {value!r}.")
    if not holds(float(value)):
        raise ValueError(f"{name} must be {rule}; got {value}.")
