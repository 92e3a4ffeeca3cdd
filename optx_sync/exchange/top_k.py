# SPDX-License-Identifier: Apache-2.0
"""Top-k compression: the largest numbers of each chunk, as positions and values."""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm import buffers
from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import gather
from optx_sync.comm.reduce import or_one, weight_divisor
from optx_sync.comm.varying import vary_with
from optx_sync.core.checks import Refused, integer, refuse
from optx_sync.core.shapes import Array, Bool, Float, Int32, UInt8
from optx_sync.exchange.contract import Code, Exchange
from optx_sync.exchange.pieces import joined, travel

Chunks: TypeAlias = Float[Array, "chunks chunk"]
Chosen: TypeAlias = Float[Array, "chunks k"]  # the k largest numbers of each chunk


def top_k(k: int = 32, chunk: int = 4096, bits: int | None = None) -> Exchange:
    r"""Sparse gradient compression: the mean of the k largest numbers of each chunk.

    With x_i the tree of replica i as one buffer in chunks of C numbers, and w_i its
    weight:

    .. math::

        \text{mean} = \frac{\sum_i T(w_i x_i)}{\sum_i w_i}, \qquad
        \text{lost}_i = w_i x_i - T(w_i x_i)

    where T keeps the k numbers of each chunk that are largest in magnitude, and makes
    the others 0.

    Every replica sends its positions and values to all others in one all-gather: per
    chunk k (2 + 4) bytes, or 2.25 k + 16 with `bits=2`. The bytes that arrive grow with
    the number of replicas: for k = 32 and C = 4096 they stay below the 8 bytes per
    number of an all-reduce up to about 170 replicas. A tree smaller than a chunk is one
    chunk. The replicas' values are added in a fixed order, so that all replicas get the
    same bits, on a GPU too.

    The mean divides by the sum of all weights, not of those replicas that sent a
    number, so that the law of exchanges holds. Without `error_feedback` small numbers
    are never sent. SparseLoCo is `diloco` with feedback in place of the outer momentum:

        exchange = oxs.exchange.error_feedback(oxs.exchange.top_k(64, bits=2), 0.95)
        oxs.diloco(inner, "pods", outer=optax.sgd(0.7), exchange=exchange)

    A NaN counts as the largest and arrives.

    Args:
        k: How many numbers of each chunk are sent.
        chunk: Numbers in a chunk. A position takes 1 byte up to 256, 2 bytes up to
            65536, and 4 above.
        bits: `None`: values travel whole. 2: each value travels as one of four bins
            (negative or not, each below or above the mean magnitude of its sign)
            and becomes the mean of its bin.

    Returns:
        A linear exchange that remembers nothing, of dense real floating leaves.

    Raises:
        ValueError: `k` or `chunk` below 1, `k` above `chunk`, `bits` neither `None` nor
            2; at the call, a leaf that is row-sparse or does not vary over the axis.
        TypeError: `k` or `chunk` is no integer; at the call, a leaf that is not
            floating.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.top_k(k=1, chunk=2)
        >>> def meet(x):
        ...     met = exchange.meet(x, exchange.init(x), "pods")
        ...     return met.mean, met.lost
        >>> x = jnp.array([[3.0, 1.0, 0.0, -4.0], [1.0, 5.0, 0.0, -2.0]])
        >>> mean, lost = jax.jit(jax.vmap(meet, axis_name="pods"))(x)
        >>> mean[0].tolist(), lost.tolist()
        ([1.5, 2.5, 0.0, -3.0], [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])

    References:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017,
        arXiv 1704.05021. Sarfi et al., "Communication Efficient LLM Pre-training with
        SparseLoCo", 2025, arXiv 2508.15706.
    """
    k = integer("k", k, "The default is 32.")
    chunk = integer("chunk", chunk, "The default is 4096.")
    coder = _LargestCoder(k, chunk, bits)
    refuse(coder, _REFUSED)

    def meet_buffers(whole, weight, axis_name):
        own = [coder.in_chunks(x) for x in whole]
        sent, lost = [], []
        for x in own:
            sent.append(coder.encode(x))
            positions, values = coder.decode(sent[-1], x)
            lost.append(_add(x, positions[0], -values[0]).reshape(-1))
        gathered, total = travel(gather, sent, weight, axis_name, BUCKET_BYTES)
        divisor = weight_divisor(total)
        means = []
        for x, messages in zip(own, gathered, strict=True):
            everyone = coder.decode(messages, x)
            # In a fixed order, one replica after the other: all at once, a GPU adds
            # equal positions in an order that differs from replica to replica.
            summed_up, _ = jax.lax.scan(
                lambda so_far, one: (_add(so_far, *one), None),
                vary_with(jnp.zeros(x.shape, x.dtype), everyone),
                everyone,
            )
            means.append((summed_up / divisor.astype(x.dtype)).reshape(-1))
        return means, lost, total

    def encode(x, state):
        message = coder.encode(coder.in_chunks(x.reshape(-1)))[0]
        return message, x - decode(message, x), state

    def decode(message, like):
        rows = coder.in_chunks(jnp.zeros(math.prod(like.shape), like.dtype))
        positions, values = coder.decode(message[None], rows)
        return buffers.shaped(_add(rows, positions[0], values[0]), like)

    return joined("top_k", meet_buffers, Code(encode, decode), BUCKET_BYTES)


class _LargestCoder(NamedTuple):
    """How the largest numbers become positions and values, and how these are read."""

    k: int
    chunk: int
    bits: int | None

    def in_chunks(self, buffer: Float[Array, " numbers"]) -> Chunks:
        """The buffer in chunks, padded."""
        length = min(self.chunk, buffer.size)
        return jnp.pad(buffer, (0, -buffer.size % length)).reshape(-1, length)

    def encode(self, x: Chunks) -> UInt8[Array, "1 bytes"]:
        """The k largest numbers of each chunk: positions, then values."""
        _, positions = jax.lax.top_k(jnp.abs(x), min(self.k, x.shape[1]))
        values = jnp.take_along_axis(x, positions, axis=1)
        parts = [buffers.to_bytes(positions.astype(_position_dtype(x.shape[1])))]
        if self.bits is None:
            parts.append(buffers.to_bytes(values))
        else:
            bins = _bins(values)
            means = [_mean_where(values, bins == n) for n in range(4)]
            table = buffers.to_bytes(jnp.stack(means, axis=1).astype(jnp.float32))
            parts += [buffers.pack(bins[..., None], 2)[..., 0], table]
        return jnp.concatenate(parts, axis=1).reshape(1, -1)

    def decode(
        self, messages: UInt8[Array, "messages bytes"], like: Chunks
    ) -> tuple[Int32[Array, "messages chunks k"], Float[Array, "messages chunks k"]]:
        """Decoded positions and values, for chunks like `like`."""
        chunks, length = like.shape
        dtype = _position_dtype(length)
        rows = messages.reshape(messages.shape[0], chunks, -1)
        k = min(self.k, length)
        octets, rest = jnp.split(rows, [k * dtype.itemsize], axis=-1)
        positions = buffers.from_bytes(octets, dtype).astype(jnp.int32)
        if self.bits is None:
            return positions, buffers.from_bytes(rest, like.dtype)
        packed, table = jnp.split(rest, [rest.shape[-1] - 16], axis=-1)
        bins = buffers.unpack(packed[..., None], 2, k)[..., 0].astype(jnp.int32)
        table = buffers.from_bytes(table, np.dtype(np.float32)).astype(like.dtype)
        return positions, jnp.take_along_axis(table, bins, axis=-1)


_REFUSED: Refused[_LargestCoder] = (
    (
        lambda coder: coder.k > coder.chunk,
        "k numbers of each chunk are sent, so k can be at most chunk; got k={0.k} and "
        "chunk={0.chunk}. The defaults are 32 of 4096.",
    ),
    (
        lambda coder: coder.bits not in (None, 2) or isinstance(coder.bits, bool),
        "bits must be None, for whole values, or 2; got {0.bits!r}. For all numbers in "
        "8 or 4 bits see oxs.exchange.quantized.",
    ),
)


def _position_dtype(length: int) -> np.dtype:
    return np.min_scalar_type(length - 1)


def _bins(values: Chosen) -> UInt8[Array, "chunks k"]:
    """Bins 0 to 3: below and above the mean, of the negative and the other values."""
    size, negative = jnp.abs(values), values < 0
    means = _mean_where(size, negative), _mean_where(size, ~negative)
    middle = jnp.where(negative, *(mean[:, None] for mean in means))
    above = (size > middle).astype(jnp.uint8)
    return jnp.where(negative, 0, 2).astype(jnp.uint8) | above


def _mean_where(values: Chosen, chosen: Bool[Array, "chunks k"]) -> jax.Array:
    """The mean of the chosen numbers of each row; 0 if there are none."""
    number = jnp.sum(chosen, axis=1, dtype=values.dtype)
    return jnp.sum(jnp.where(chosen, values, 0.0), axis=1) / or_one(number)


def _add(x: Chunks, positions: Int32[Array, "chunks k"], values: Chosen) -> Chunks:
    rows = jnp.arange(x.shape[0])[:, None]
    at = x.at[rows, positions]
    return at.add(values, unique_indices=True, mode="promise_in_bounds")
