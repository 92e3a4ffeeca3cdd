# SPDX-License-Identifier: Apache-2.0
"""Norms of arrays whose squares may leave float32, over all shards of them."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optx_sync.comm.buffers import wide
from optx_sync.comm.reduce import or_one
from optx_sync.comm.varying import sum_over
from optx_sync.core.shapes import Array, Float

Number: TypeAlias = Float[Array, ""]
Axes: TypeAlias = tuple[str, ...]


def norm_of(leaves: Sequence[jax.Array], axes: Axes) -> Number:
    """The norm over all leaves, of values of any size; not finite where one is not.

    float64 where a leaf is, else float32.
    """
    sizes = [jnp.abs(wide(x)) for x in leaves]
    dtype = widest(sizes)
    unit = unit_of(size_of(leaves, axes, dtype))
    squares = (jnp.sum(jnp.square(x.astype(dtype) / unit)) for x in sizes)
    return unit * jnp.sqrt(sum((sum_over(s, axes) for s in squares), dtype.type(0)))


def widest(arrays: Sequence[jax.Array]) -> np.dtype:
    """float64 if one of the arrays is, else float32.

    `jnp.result_type` refuses both under `jax_numpy_dtype_promotion="strict"`.
    """
    double = any(x.dtype == jnp.float64 for x in arrays)
    return np.dtype(np.float64 if double else np.float32)


def size_of(
    leaves: Sequence[jax.Array], axes: Axes, dtype: DTypeLike = jnp.float32
) -> Number:
    """A number as large as the largest value, not finite where one is not."""
    largest = [largest_of(x, axes, dtype) for x in leaves]
    return functools.reduce(jnp.maximum, largest, jnp.zeros((), dtype))


def largest_of(x: jax.Array, axes: Axes, dtype: DTypeLike = jnp.float32) -> Number:
    """The largest absolute value, over all shards; not finite where one is not."""
    largest = jnp.max(jnp.abs(wide(x)), initial=0).astype(dtype)
    return sum_over(largest, axes)


def unit_of(size: Float[Array, "*sizes"]) -> Float[Array, "*sizes"]:
    """A size to divide by: it and its reciprocal, which XLA may take, are in range."""
    least = 8 * jnp.finfo(size.dtype).tiny
    return jnp.clip(or_one(size), least, 1 / least)
