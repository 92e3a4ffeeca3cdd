# SPDX-License-Identifier: Apache-2.0
"""How the numbers of a block become codes of few bits, and become numbers again.

Beside the codes of few bits travels a float32 of each block, its scale. Where a number
of the block is not finite it is NaN, and so is all that is decoded. Padding, which is
not `there`, is 0 and must not change what a block becomes.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm.norms import unit_of
from optx_sync.comm.reduce import or_one
from optx_sync.core.shapes import Array, Bool, Float, Num
from optx_sync.core.trees import round_to

Blocks: TypeAlias = Float[Array, "pieces blocks block"]
Codes: TypeAlias = Num[Array, "pieces blocks block"]  # uint8; of 16 bits uint16
Scales: TypeAlias = Float[Array, "pieces blocks scales"]
There: TypeAlias = Bool[Array, "pieces blocks block"]
Made: TypeAlias = tuple[Codes, Scales]


class CodeKind(NamedTuple):
    """A kind of codes."""

    bits: tuple[int, ...]  # how many a code may have
    code: Callable[[Blocks, There, int], Made]
    read: Callable[[Codes, Scales, int], Blocks]
    scales: int = 1  # of a block


def _linear(x: Blocks, there: There, bits: int) -> Made:
    """Steps of the largest number over m."""
    # XLA's maximum may pass over a NaN, so finiteness is reduced beside it. XLA on
    # CPUs makes one loop of both together, but three of the maximum of a long row
    # alone.
    largest, finite = jax.lax.reduce(
        (jnp.abs(x), jnp.isfinite(x)),
        (np.zeros((), x.dtype), np.True_),
        lambda one, other: (jnp.maximum(one[0], other[0]), one[1] & other[1]),
        (x.ndim - 1,),
    )
    top = _top(bits)
    scales = (largest / top).astype(jnp.float32)
    finite = finite & jnp.isfinite(scales)
    scales = jnp.where(finite, scales, jnp.nan)[..., None]
    # A subnormal largest number may have the scale 0: its block becomes zeros.
    divisor = jnp.where(scales > 0, scales, 1.0).astype(x.dtype)
    steps = jnp.clip(jnp.round(x / divisor), -top, top)
    # A NaN as an integer depends on the platform; the scale tells of it.
    return jnp.where(jnp.isnan(steps), 0.0, steps + top).astype(jnp.uint8), scales


def _read_linear(codes: Codes, scales: Scales, bits: int) -> Blocks:
    return (codes.astype(scales.dtype) - _top(bits)) * scales


def _top(bits: int) -> int:
    """The largest number of steps: m."""
    return 2 ** (bits - 1) - 1


# The levels above 0 of 2, 4, 8 and 16 levels that have the least mean squared error for
# numbers of a normal distribution with variance 1; each is the mean of the numbers that
# are nearest to it (Lloyd 1957, published 1982; Max 1960).
LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.797884561,),
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (
        *(0.128395030, 0.388048299, 0.656759119, 0.942340456),
        *(1.256231197, 1.618046386, 2.069017227, 2.732589571),
    ),
}


def _lloyd(x: Blocks, there: There, bits: int) -> Made:
    """The nearest levels of x over its root mean square, times the scale that fits."""
    levels, half = LEVELS[bits], 2 ** (bits - 1)
    # In units of the largest number: a square may leave the range of its dtype.
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    unit = unit_of(largest)
    x = x / unit
    squares, number = _sums(x * x, there.astype(x.dtype))
    size = jnp.abs(x) / or_one(jnp.sqrt(squares / or_one(number)))
    place, level = jnp.zeros(x.shape, jnp.uint8), jnp.full(x.shape, levels[0], x.dtype)
    for lower, upper in itertools.pairwise(levels):
        above = size > (lower + upper) / 2
        place = place + above.astype(jnp.uint8)
        level = jnp.where(above, np.asarray(upper, x.dtype), level)
    codes = jnp.where(x < 0, half - 1 - place, half + place)
    # The best scale for these levels. Without it the codes of a block with a few large
    # numbers may be further from the block than zeros are.
    products, squares = _sums(jnp.abs(x) * level, jnp.where(there, level * level, 0.0))
    scales = (unit * (products / or_one(squares))).astype(jnp.float32)
    return codes, jnp.where(jnp.isfinite(scales), scales, jnp.nan)


def _read_lloyd(codes: Codes, scales: Scales, bits: int) -> Blocks:
    above = LEVELS[bits]
    levels = [-level for level in reversed(above)] + list(above)
    first, *others = (np.asarray(x, scales.dtype) for x in levels)
    # XLA makes one loop of choices, but not of a gather.
    found = jnp.broadcast_to(first, codes.shape)
    for code, level in enumerate(others, 1):
        found = jnp.where(codes == code, level, found)
    return found * scales


def _sums(*arrays: Blocks) -> list[Float[Array, "pieces blocks 1"]]:
    """The sums of several arrays over each block, in one loop.

    XLA on CPUs computes a sum of one array alone anew for each number that it serves.
    """
    sums = jax.lax.reduce(
        arrays,
        tuple(np.zeros((), x.dtype) for x in arrays),
        lambda one, other: tuple(map(jnp.add, one, other)),
        (arrays[0].ndim - 1,),
    )
    return [x[..., None] for x in sums]


def _bfloat16(x: Blocks, there: There, bits: int) -> Made:
    """The nearest numbers of bfloat16, which need no scale."""
    codes = jax.lax.bitcast_convert_type(
        round_to(x, jnp.bfloat16).astype(jnp.bfloat16), jnp.uint16
    )
    return codes, jnp.zeros((*x.shape[:-1], 0), jnp.float32)


def _read_bfloat16(codes: Codes, scales: Scales, bits: int) -> Blocks:
    return jax.lax.bitcast_convert_type(codes, jnp.bfloat16).astype(scales.dtype)


KINDS = {
    "linear": CodeKind((2, 3, 4, 8), _linear, _read_linear),
    "lloyd": CodeKind((1, 2, 3, 4), _lloyd, _read_lloyd),
    "bfloat16": CodeKind((16,), _bfloat16, _read_bfloat16, scales=0),
}
