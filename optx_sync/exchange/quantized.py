# SPDX-License-Identifier: Apache-2.0
"""Means of codes of 8 or 4 bits with a scale per block, in two hops."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.checks import integer
from optx_sync.comm import buffers
from optx_sync.comm.collectives import all_to_all, axis_index, axis_size, gather
from optx_sync.comm.reduce import or_one, own_weight, weigh
from optx_sync.exchange.contract import Code, Exchange, Met, summed
from optx_sync.exchange.pieces import narrowed, require_meetable, travel


def quantized(bits: int = 8, block: int = 256) -> Exchange:
    r"""The mean over all replicas of codes of 8 or 4 bits: few bytes, in two hops.

    A buffer x of D numbers is cut into a piece for each of the N replicas and coded in
    blocks of B numbers, with b bits each:

    .. math::

        m = 2^{b-1} - 1, \quad s = \frac{\max |x|}{m}, \quad
        q = \text{round}\Big(\frac{x}{s}\Big), \quad C(x) = s\, q

    Replica j gets everybody's codes of piece j, adds up what they stand for in float32
    (float64 for float64 leaves), and codes the mean again; these codes go to all:

    .. math::

        \text{mean} = C\Big(\frac{\sum_i C(w_i x_i)}{\sum_i w_i}\Big), \qquad
        \text{lost}_i = w_i x_i - C(w_i x_i)

    and at the piece that i owns `lost` has besides what the second coding loses, times
    the sum of the weights.

    All replicas decode the same bits, so their means are equal. All leaves travel in
    two collectives, codes, scales and weights together as bytes: per replica
    2 (N-1)/N D (b/8 + 4/B) bytes, against 8 (N-1)/N D of an all-reduce of float32. The
    blocks of small trees are shorter, so that little is padding.

    A NaN or infinity travels in the scale: the mean of its whole block is NaN. An error
    is at most s/2 per coding and is dropped: without `error_feedback` that biases what
    is smaller than s/2 in every step. It pays where links are slower than about 10
    Gbit/s; within one machine an all-reduce is faster than coding.

    Args:
        bits: Bits of a code, 8 or 4.
        block: Numbers that share a scale, 1 or more.

    Returns:
        A linear exchange that remembers nothing, of dense real floating leaves.

    Raises:
        ValueError: `bits` is neither 8 nor 4, `block` is below 1; at the call, a leaf
            that is row-sparse or does not vary over the axis.
        TypeError: `block` is no integer; at the call, a leaf that is not floating.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.quantized(bits=8)
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "pods").mean
        >>> x = jnp.array([[127.0, 40.2, 0.0, 8.0], [127.0, 40.4, 0.0, 4.0]])
        >>> jax.jit(jax.vmap(mean, axis_name="pods"))(x)[0].tolist()
        [127.0, 40.0, 0.0, 6.0]

    References:
        Wang et al. 2023, "ZeRO++", arXiv:2306.10209 (qgZ: all-to-all, sum, code again).
    """
    if bits not in (4, 8) or isinstance(bits, bool):
        raise ValueError(
            f"bits must be 8 or 4; got {bits!r}. For 2 bits see top_k(bits=2)."
        )
    block = integer("block", block, "The default is 256.")

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "quantized")
        replicas, weight = axis_size(axis_name), own_weight(weight, axis_name)
        leaves = [buffers.wide(x).reshape(-1) for x in jax.tree.leaves(tree)]
        joint = buffers.Joint(leaves)
        own = [
            _in_blocks(weigh(x, weight), replicas, block) for x in joint.join(leaves)
        ]
        scales = [_scales(x, bits) for x in own]
        sent = [_message(*pair, bits) for pair in zip(own, scales, strict=True)]
        received, total = travel(all_to_all, sent, weight, axis_name, replicas)
        divisor = or_one(total)
        # The mean of the piece that is mine, and its codes.
        means = [
            jnp.sum(_read(row, x.shape, bits, x.dtype), 0, keepdims=True)
            / divisor.astype(x.dtype)
            for row, x in zip(received, own, strict=True)
        ]
        again = [_scales(mean, bits) for mean in means]
        back = [_message(*pair, bits) for pair in zip(means, again, strict=True)]
        # Weights once more: what is gathered is known to be equal on all replicas.
        gathered, known = travel(gather, back, weight, axis_name)
        whole = [
            _read(row, x.shape, bits, x.dtype).reshape(-1)
            for row, x in zip(gathered, own, strict=True)
        ]
        mine = jnp.arange(replicas)[:, None, None] == axis_index(axis_name)
        lost = []
        for x, first, mean, second in zip(own, scales, means, again, strict=True):
            at_second = _lost(mean, second, bits) * total.astype(x.dtype)
            of_both = _lost(x, first, bits) + jnp.where(mine, at_second, 0.0)
            lost.append(of_both.reshape(-1))
        mean, lost = narrowed(joint.cut(whole), joint.cut(lost), tree, weight)
        return Met(mean, known, lost, state, summed(also, axis_name))

    def encode(x, state):
        own = _in_blocks(x.reshape(-1), 1, block)
        scales = _scales(own, bits)
        lost = buffers.shaped(_lost(own, scales, bits), x)
        return _message(own, scales, bits)[0], lost, state

    def decode(message, like):
        shape = _blocks(math.prod(like.shape), 1, block)
        return buffers.shaped(_read(message[None], shape, bits, like.dtype), like)

    return Exchange(lambda tree: (), meet, code=Code(encode, decode))


def _in_blocks(buffer: jax.Array, replicas: int, block: int) -> jax.Array:
    """The buffer, padded, as [replicas, blocks, numbers of a block]."""
    shape = _blocks(buffer.size, replicas, block)
    return jnp.pad(buffer, (0, math.prod(shape) - buffer.size)).reshape(shape)


def _blocks(size: int, replicas: int, block: int) -> tuple[int, ...]:
    """(replicas, blocks, numbers of a block) of a buffer."""
    piece = -(-size // replicas)
    blocks = -(-piece // block)
    # Shorter blocks where few full ones would be mostly padding.
    needed = -(-piece // blocks)
    return replicas, blocks, min(block, needed + -needed % 8)


def _scales(x: jax.Array, bits: int) -> jax.Array:
    """float32[pieces, blocks, 1], a NaN where a number of the block is not finite."""
    # XLA's maximum may pass over a NaN, so it is asked for beside: of both together
    # XLA on processors makes one loop, of the maximum of a long row alone three.
    largest, finite = jax.lax.reduce(
        (jnp.abs(x), jnp.isfinite(x)),
        (np.zeros((), x.dtype), np.True_),
        lambda one, other: (jnp.maximum(one[0], other[0]), one[1] & other[1]),
        (x.ndim - 1,),
    )
    scales = (largest / (2 ** (bits - 1) - 1)).astype(jnp.float32)
    finite = finite & jnp.isfinite(scales)
    return jnp.where(finite, scales, jnp.nan)[..., None]


def _steps(x: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """How many steps q of its scale each number is."""
    top = 2 ** (bits - 1) - 1
    # Where the largest is subnormal its scale may be 0: the block then is zeros.
    divisor = jnp.where(scales > 0, scales, 1.0).astype(x.dtype)
    return jnp.clip(jnp.round(x / divisor), -top, top)


def _lost(x: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """What coding loses."""
    return x - _steps(x, scales, bits) * scales.astype(x.dtype)


def _message(x: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """uint8[pieces, bytes]: the codes and scales of each piece."""
    top = 2 ** (bits - 1) - 1
    q = _steps(x, scales, bits)
    # What a NaN is as an integer depends on the platform; its scale says it is there.
    codes = jnp.where(jnp.isnan(q), 0.0, q + top).astype(jnp.uint8)
    packed = buffers.pack(codes.reshape(len(x), -1), bits)
    return jnp.concatenate([packed, buffers.to_bytes(scales.reshape(len(x), -1))], 1)


def _read(
    messages: jax.Array, shape: tuple[int, ...], bits: int, dtype: Any
) -> jax.Array:
    """What the codes and scales of `_message` stand for, in blocks of this shape."""
    _, blocks, length = shape
    octets, scales = jnp.split(messages, [messages.shape[1] - 4 * blocks], axis=1)
    codes = buffers.unpack(octets, bits, blocks * length).reshape(-1, blocks, length)
    scales = buffers.from_bytes(scales, np.dtype(np.float32))[..., None].astype(dtype)
    return (codes.astype(dtype) - (2 ** (bits - 1) - 1)) * scales
