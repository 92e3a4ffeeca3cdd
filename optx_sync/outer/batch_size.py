# SPDX-License-Identifier: Apache-2.0
"""The norm test: a batch size that grows with the gradient's noise."""

import math

import jax

from optx_sync.core.checks import integer, interval


def next_batch_size(
    noise_scale: float | jax.Array | None,
    batch_size: int,
    *,
    noise: float = 1.0,
    multiple: int = 1,
    largest: int | None = None,
) -> int:
    r"""The next global batch size from the gradient noise scale: the norm test.

    B, the simple noise scale, is the trace of the covariance of one example's gradient,
    divided by the squared norm of the true gradient. The noise in the gradient of b
    examples is then :math:`\sqrt{B / b}` of its norm. The norm test keeps this ratio at
    most `noise`, and never makes a batch smaller:

    .. math::

        b' = \max\left(b, \left\lceil \frac{B}{\text{noise}^2} \right\rceil\right)

    rounded up to the next multiple. Call it on the host, every few hundred steps, as
    each size needs another compiled program. Then multiply the learning rate of an
    Adam-like inner optimizer by :math:`\sqrt{b' / b}`, that of SGD by b' / b.

    Args:
        noise_scale: `oxs.metrics(state).noise_scale` of a transformation with
            `measure=True`, in examples. An unknown one (`None`, not finite, 0 or below)
            leaves `batch_size` unchanged.
        batch_size: The current number of examples in a step, over all replicas.
        noise: The largest allowed ratio of a gradient's noise to its norm, > 0. At 1 a
            gradient is half noise: the balance between time and examples.
        multiple: The result is a multiple of this number, usually replicas times the
            examples that one takes at once; `batch_size` must be one already.
        largest: The largest result, `None` for no limit; a `batch_size` above it stays
            as it is.

    Returns:
        The number of examples, `batch_size` or more.

    Raises:
        TypeError: A number of examples that is not an integer; a noise scale that is
            no number.
        ValueError: A number out of range, or a `batch_size` that is not a multiple of
            `multiple`.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.outer.next_batch_size(900.0, 256, multiple=64)
        960
        >>> oxs.outer.next_batch_size(100.0, 256, multiple=64)
        256

    References:
        McCandlish, Kaplan and Amodei, "An Empirical Model of Large-Batch Training",
        2018, arXiv 1812.06162. Lau, Liu and Kolar, "AdAdaGrad: Adaptive Batch Size
        Schemes for Adaptive Gradient Methods", 2024, arXiv 2402.11215 (norm test).
    """
    batch_size = integer("batch_size", batch_size, "Pass for example 256.")
    multiple = integer("multiple", multiple, "Pass 1 for none.")
    interval("(0, inf)", noise=noise)
    if batch_size % multiple:
        raise ValueError(
            f"batch_size must be a multiple of multiple={multiple}; got {batch_size}."
        )
    bound = math.inf
    if largest is not None:
        bound = integer("largest", largest, "Leave it out for none.")
    try:
        scale = math.nan if noise_scale is None else float(noise_scale)
    except (TypeError, ValueError):
        raise TypeError(
            f"noise_scale must be a number; got {noise_scale!r}. Pass "
            "oxs.metrics(state).noise_scale, of a wrapper with measure=True."
        ) from None
    if not 0 < scale < math.inf:
        return batch_size
    count = math.ceil(min(scale / noise**2, bound) / multiple)
    if count * multiple > bound:
        count -= 1
    return max(batch_size, count * multiple)
