# SPDX-License-Identifier: Apache-2.0
"""The batch size that the gradient's noise asks for: the norm test."""

import math

import jax

from optx_sync.checks import integer, interval


def next_batch_size(
    noise_scale: float | jax.Array | None,
    batch_size: int,
    *,
    noise: float = 1.0,
    multiple: int = 1,
    largest: int | None = None,
) -> int:
    r"""The global batch size of the steps to come, by the norm test.

    With B the simple noise scale, tr(covariance of one example's gradient) over the
    squared norm of the true gradient, a batch of b examples has a gradient whose noise
    is :math:`\sqrt{B / b}` of its norm. The norm test keeps that at most `noise`, and
    never makes a batch smaller:

    .. math::

        b' = \max\left(b, \left\lceil \frac{B}{\text{noise}^2} \right\rceil\right)

    up to the next multiple. For a loop on the host, every some hundred steps: each size
    is another compiled program. An Adam-like inner optimizer then takes a learning rate
    :math:`\sqrt{b' / b}` times as large, SGD one b' / b times.

    Args:
        noise_scale: `oxs.metrics(state).noise_scale` of a transformation with
            `measure=True`, in examples. What is not known yet (`None`, not finite, 0 or
            below) changes nothing.
        batch_size: The examples behind one step so far, of all replicas together.
        noise: The noise of a gradient over its norm that may be, > 0. At 1 a gradient
            is half noise, where time and examples cost alike.
        multiple: What the result must be a multiple of: replicas times the examples
            that one takes at once. `batch_size` is one already.
        largest: A bound, `None` for none; larger batches stay as they are.

    Returns:
        The number of examples, `batch_size` or more.

    Raises:
        TypeError: A number of examples that is no integer.
        ValueError: A number out of range, a `batch_size` that is no such multiple.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.next_batch_size(900.0, 256, multiple=64)
        960
        >>> oxs.next_batch_size(100.0, 256, multiple=64)
        256

    References:
        McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training", 2018,
        arXiv 1812.06162. Lau, Liu, Kolar, "AdAdaGrad: Adaptive Batch Size Schemes for
        Adaptive Gradient Methods", 2024, arXiv 2402.11215 (norm test).
    """
    batch_size = integer("batch_size", batch_size, "Pass for example 256.")
    multiple = integer("multiple", multiple, "Pass 1 for none.")
    interval("noise", noise, "It must be greater than 0.", 0, open_ends=True)
    if batch_size % multiple:
        raise ValueError(
            f"batch_size must be a multiple of multiple={multiple}; got {batch_size}."
        )
    bound = math.inf
    if largest is not None:
        bound = integer("largest", largest, "Leave it out for none.")
    scale = math.nan if noise_scale is None else float(noise_scale)
    if not 0 < scale < math.inf:
        return batch_size
    count = math.ceil(min(scale / noise**2, bound) / multiple)
    if count * multiple > bound:
        count -= 1
    return max(batch_size, count * multiple)
