# SPDX-License-Identifier: Apache-2.0
"""Quantized means: codes of 8 or 4 bits with a scale per block, in two hops."""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optx_sync.checks import integer
from optx_sync.comm import buffers, collectives
from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import AxisName, axis_index, axis_size
from optx_sync.comm.reduce import own_weight, weigh, weight_divisor
from optx_sync.exchange.contract import Code, Exchange, Halves, Met
from optx_sync.exchange.pieces import joined, require_meetable, travel
from optx_sync.options import Refused, refuse
from optx_sync.shapes import Array, Float, UInt8

Weight: TypeAlias = Float[Array, ""]
Blocks: TypeAlias = Float[Array, "pieces blocks block"]
Messages: TypeAlias = UInt8[Array, "pieces bytes"]


def quantized(
    bits: int = 8, block: int = 256, *, bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
    r"""Gradient compression to codes of 8 or 4 bits, which travel in two hops.

    A buffer x of D numbers is cut into a piece for each of the N replicas. Each piece
    is coded in blocks of B numbers, with b bits each:

    .. math::

        m = 2^{b-1} - 1, \quad s = \frac{\max |x|}{m}, \quad
        q = \text{round}\Big(\frac{x}{s}\Big), \quad C(x) = s\, q

    Replica j gets everybody's codes of piece j, sums the decoded numbers in float32
    (float64 for float64 leaves), and codes their mean again; these codes go to all:

    .. math::

        \text{mean} = C\Big(\frac{\sum_i C(w_i x_i)}{\sum_i w_i}\Big), \qquad
        \text{lost}_i = w_i x_i - C(w_i x_i)

    To `lost_i`, at the piece that replica i owns, comes what the second coding loses,
    times the sum of the weights.

    All replicas decode the same bits, so their means are equal. All leaves of a bucket
    travel in two collectives, codes, scales and weights together as bytes: per replica
    2 (N-1)/N D (b/8 + 4/B) bytes, against 8 (N-1)/N D for an all-reduce of float32.
    Small trees have shorter blocks, to save padding.

    A NaN or infinity travels in the scale: the mean of its whole block is NaN. Each
    coding errs by at most s/2. Without `error_feedback` the error is dropped, so that
    what is smaller than s/2 is biased in every step. Coding pays off where links are
    slower than about 10 Gbit/s; within one machine an all-reduce is faster.

    Args:
        bits: Bits of a code, 8 or 4.
        block: Numbers that share a scale, 1 or more.
        bucket_bytes: Leaves are joined until they fill so many bytes; a larger leaf
            stands alone. Each bucket travels as soon as it is coded.

    Returns:
        A linear exchange that remembers nothing, of dense real floating leaves.

    Raises:
        ValueError: `bits` is neither 8 nor 4, `block` or `bucket_bytes` is below 1; at
            the call, a leaf that is row-sparse or does not vary over the axis.
        TypeError: `block` or `bucket_bytes` is no integer; at the call, a leaf that is
            not floating.

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
    block = integer("block", block, "The default is 256.")
    bucket_bytes = integer("bucket_bytes", bucket_bytes, "The default is 2**25.")
    coder = _Coder(bits, block, bucket_bytes)
    refuse(coder, _REFUSED)

    def meet_buffers(whole, weight, axis_name):
        replicas = axis_size(axis_name)
        own = [coder.code(coder.in_blocks(x, replicas)) for x in whole]
        means, total = coder.to_owners(own, weight, axis_name)
        # The weights travel again, so that their type, too, is equal on all replicas.
        second = [coder.code(mean) for mean in means]
        read, known = coder.to_all(second, weight, axis_name)
        owners = jnp.arange(replicas, dtype=jnp.int32)[:, None, None]
        mine = owners == axis_index(axis_name)
        lost = []
        for codes, again in zip(own, second, strict=True):
            at_second = again.lost * total.astype(codes.x.dtype)
            lost.append(codes.lost + jnp.where(mine, at_second, 0.0))
        return buffers.flat(read), buffers.flat(lost), known

    def encode(x, state):
        codes = coder.code(coder.in_blocks(x.reshape(-1), 1))
        return coder.message(codes)[0], buffers.shaped(codes.lost, x), state

    def decode(message, like):
        shape = coder.blocks(math.prod(like.shape), 1)
        return buffers.shaped(coder.read(message[None], shape, like.dtype), like)

    def up(tree, state, axis_name, *, weight=None):
        require_meetable(tree, axis_name, "quantized")
        replicas, weight = axis_size(axis_name), own_weight(weight, axis_name)
        leaves, treedef = jax.tree.flatten(tree)
        rows = [buffers.in_rows(buffers.wide(x).reshape(-1), replicas) for x in leaves]
        joint = buffers.Joint(rows, bucket_bytes=bucket_bytes)
        own = [coder.code(coder.by_rows(weigh(x, weight))) for x in joint.join(rows)]
        means, total = coder.to_owners(own, weight, axis_name)
        mean = buffers.flat(joint.cut(buffers.flat(means)))
        lost = [codes.lost.reshape(replicas, -1) for codes in own]
        owed = map(buffers.shaped, joint.cut(lost), leaves)
        return Met(treedef.unflatten(mean), total, treedef.unflatten(owed), state)

    def down(pieces, like, axis_name):
        replicas = axis_size(axis_name)
        leaves, treedef = jax.tree.flatten(pieces)
        rows = [x[None] for x in leaves]
        joint = buffers.Joint(rows, bucket_bytes=bucket_bytes / replicas)
        own = [coder.code(coder.by_rows(x)) for x in joint.join(rows)]
        read, _ = coder.to_all(own, None, axis_name)
        read = joint.cut([x.reshape(replicas, -1) for x in read])
        found = map(buffers.shaped, read, treedef.flatten_up_to(like))
        return treedef.unflatten(found)

    exchange = joined("quantized", meet_buffers, Code(encode, decode), bucket_bytes)
    return exchange._replace(halves=Halves(up, down))


class _Codes(NamedTuple):
    """Numbers in blocks, and their codes."""

    x: Blocks
    scales: Float[Array, "pieces blocks 1"]  # NaN for a block that is not all finite
    steps: Blocks  # each number, divided by its scale and rounded

    @property
    def lost(self) -> Blocks:
        """What the coding loses."""
        return self.x - self.steps * self.scales.astype(self.x.dtype)


class _Coder(NamedTuple):
    """How numbers become codes and scales, and how these become numbers again."""

    bits: int
    block: int
    bucket_bytes: int

    @property
    def top(self) -> int:
        """The largest number of steps: m."""
        return 2 ** (self.bits - 1) - 1

    def blocks(self, size: int, replicas: int) -> tuple[int, int, int]:
        """(replicas, blocks, numbers per block) for a buffer."""
        piece = -(-size // replicas)
        blocks = -(-piece // self.block)
        # Shorter blocks where a few full ones would be mostly padding.
        needed = -(-piece // blocks)
        return replicas, blocks, min(self.block, needed + -needed % 8)

    def in_blocks(self, buffer: Float[Array, " numbers"], replicas: int) -> Blocks:
        """The buffer in blocks, padded."""
        shape = self.blocks(buffer.size, replicas)
        return jnp.pad(buffer, (0, math.prod(shape) - buffer.size)).reshape(shape)

    def by_rows(self, rows: Float[Array, "pieces numbers"]) -> Blocks:
        """The rows in blocks, each padded."""
        shape = self.blocks(rows.size, len(rows))
        spare = shape[1] * shape[2] - rows.shape[1]
        return jnp.pad(rows, ((0, 0), (0, spare))).reshape(shape)

    def code(self, x: Blocks) -> _Codes:
        """The scales, float32, and each number in steps of its scale."""
        # XLA's maximum may pass over a NaN, so finiteness is reduced beside it. XLA on
        # CPUs makes one loop of both together, but three of the maximum of a long row
        # alone.
        largest, finite = jax.lax.reduce(
            (jnp.abs(x), jnp.isfinite(x)),
            (np.zeros((), x.dtype), np.True_),
            lambda one, other: (jnp.maximum(one[0], other[0]), one[1] & other[1]),
            (x.ndim - 1,),
        )
        scales = (largest / self.top).astype(jnp.float32)
        finite = finite & jnp.isfinite(scales)
        scales = jnp.where(finite, scales, jnp.nan)[..., None]
        # A subnormal largest number may have the scale 0: its block becomes zeros.
        divisor = jnp.where(scales > 0, scales, 1.0).astype(x.dtype)
        steps = jnp.clip(jnp.round(x / divisor), -self.top, self.top)
        return _Codes(x, scales, steps)

    def message(self, codes: _Codes) -> Messages:
        """The codes and scales of each piece."""
        pieces, steps = len(codes.x), codes.steps
        # A NaN as an integer depends on the platform; the scale tells of it.
        octets = jnp.where(jnp.isnan(steps), 0.0, steps + self.top).astype(jnp.uint8)
        packed = buffers.pack(octets.reshape(pieces, -1), self.bits)
        scales = buffers.to_bytes(codes.scales.reshape(pieces, -1))
        return jnp.concatenate([packed, scales], 1)

    def read(self, sent: Messages, shape: tuple[int, ...], dtype: DTypeLike) -> Blocks:
        """The numbers of decoded messages, in blocks of this shape."""
        _, blocks, length = shape
        octets, scales = jnp.split(sent, [sent.shape[1] - 4 * blocks], axis=1)
        codes = buffers.unpack(octets, self.bits, blocks * length)
        scales = buffers.from_bytes(scales, jnp.float32)[..., None].astype(dtype)
        return (codes.reshape(-1, blocks, length).astype(dtype) - self.top) * scales

    def to_owners(
        self, own: list[_Codes], weight: Weight | None, axis_name: AxisName
    ) -> tuple[list[Blocks], Weight]:
        """The mean of this replica's piece of each array, and the sum of the weights.

        Every replica sends its codes of a piece to the owner.
        """
        sent, replicas = list(map(self.message, own)), axis_size(axis_name)
        received, total = travel(
            collectives.all_to_all, sent, weight, axis_name, self.bucket_bytes, replicas
        )
        divisor, means = weight_divisor(total), []
        for row, (x, *_) in zip(received, own, strict=True):
            piece = jnp.sum(self.read(row, x.shape, x.dtype), 0, keepdims=True)
            means.append(piece / divisor.astype(x.dtype))
        return means, total

    def to_all(
        self, own: list[_Codes], weight: Weight | None, axis_name: AxisName
    ) -> tuple[list[Blocks], Weight]:
        """All replicas' pieces of each array, decoded, and the sum of the weights."""
        sent = list(map(self.message, own))
        gathered, total = travel(
            collectives.gather, sent, weight, axis_name, self.bucket_bytes
        )
        pairs = zip(gathered, own, strict=True)
        return [self.read(row, x.shape, x.dtype) for row, (x, *_) in pairs], total


_REFUSED: Refused[_Coder] = (
    (
        lambda coder: coder.bits not in (4, 8) or isinstance(coder.bits, bool),
        "bits must be 8 or 4; got {0.bits!r}. For 2 bits see top_k(bits=2).",
    ),
)
