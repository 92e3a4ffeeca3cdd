# SPDX-License-Identifier: Apache-2.0
"""Quantized means: codes of 1 to 16 bits in two hops."""

import math
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optx_sync.comm import buffers, collectives
from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import AxisName, axis_index, axis_size
from optx_sync.comm.reduce import own_weight, weigh, weight_divisor
from optx_sync.core.checks import Refused, integer, refuse
from optx_sync.core.shapes import Array, Float, Int32, UInt8
from optx_sync.exchange import pieces
from optx_sync.exchange.codes import KINDS, Blocks, Codes, Scales
from optx_sync.exchange.contract import Code, Exchange, Met

Weight: TypeAlias = Float[Array, ""]
Messages: TypeAlias = UInt8[Array, "pieces bytes"]
_BLOCK = 256


def quantized(
    bits: int = 8,
    block: int = _BLOCK,
    *,
    code: Literal["linear", "lloyd", "bfloat16"] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Exchange:
    r"""Gradient compression to codes of 1 to 16 bits, which travel in two hops.

    A buffer x of D numbers is cut into a piece for each of the N replicas. Each piece
    is coded in blocks of B numbers, b bits each. `code="linear"`:

    .. math::

        s = \frac{\max |x|}{2^{b-1} - 1}, \qquad
        C(x) = s\, \text{round}\Big(\frac{x}{s}\Big)

    Replica j gets everybody's codes of piece j, sums the decoded numbers in float32
    (float64 for float64 leaves), and codes their mean again; these codes go to all:

    .. math::

        \text{mean} = C\Big(\frac{\sum_i C(w_i x_i)}{\sum_i w_i}\Big), \qquad
        \text{lost}_i = w_i x_i - C(w_i x_i)

    To `lost_i`, at the piece that replica i owns, comes what the second coding loses,
    times the sum of the weights.

    `code="lloyd"`: L_q is the nearest to x / rms(x) of the 2^b levels that err least
    for normally distributed numbers, and s fits them:

    .. math::

        C(x) = s\, L_q, \qquad s = \frac{\sum x L_q}{\sum L_q^2}

    Of such numbers 1, 2, 3 and 4 bits lose .363, .117, .035 and .0095 of the square;
    `rotated` makes nearly any numbers so. No level is 0.

    16 bits: C(x) is the nearest bfloat16, without scale. That rounds twice, whatever N
    is, where `all_reduce(jnp.bfloat16)` rounds at each hop of a ring (Megatron-LM's
    `reduce_scatter_with_fp32_accumulation`).

    All replicas decode the same bits: their means are equal. Leaves of a bucket
    travel in two collectives, codes, scales and weights as bytes: per replica
    2 (N-1)/N D (b/8 + 4/B), against 8 (N-1)/N D for an all-reduce of float32.

    A NaN or infinity travels in the scale: the mean of its block is NaN (16 bits: it
    arrives itself). A linear coding errs by at most s/2. Without `error_feedback` what
    is smaller than s/2 is biased in every step; below 4 bits feed it back, or rotate.

    Args:
        bits: Bits of a code, 1, 2, 3, 4, 8 or 16.
        block: Numbers that share a scale; not of 16 bits.
        code: "linear" (2, 3, 4, 8 bits), "lloyd" (1 to 4) or "bfloat16" (16). `None`:
            linear for 4 and 8 bits, lloyd below.
        bucket_bytes: Leaves are joined until they fill so many.

    Returns:
        A linear exchange of dense real floating leaves, without memory.

    Raises:
        ValueError: `bits` with this `code` is none of these; `block` or `bucket_bytes`
            is below 1, or there is a `block` of 16 bits; at the call, a leaf is
            row-sparse or does not vary over the axis.
        TypeError: One of them is no integer; at the call, a leaf is not floating.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> x = jnp.array([[127.0, 40.2, 8.0], [127.0, 40.3, 4.0]])
        >>> for bits in (8, 16):
        ...     exchange = oxs.exchange.quantized(bits)
        ...     def mean(x):
        ...         return exchange.meet(x, (), "pods").mean
        ...     jax.jit(jax.vmap(mean, axis_name="pods"))(x)[0].tolist()
        [127.0, 40.0, 6.0]
        [127.0, 40.25, 6.0]

    References:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant
        Model Training", 2023, arXiv 2306.10209 (qgZ). Lloyd, "Least Squares
        Quantization in PCM", 1982. Max, "Quantizing for Minimum Distortion", 1960.
    """
    bits = integer("bits", bits, "The default is 8.")
    block = integer("block", block, "The default is 256.")
    bucket_bytes = integer("bucket_bytes", bucket_bytes, "The default is 2**25.")
    kind = code or {4: "linear", 8: "linear", 16: "bfloat16"}.get(bits, "lloyd")
    coder = _Coder(bits, block, bucket_bytes, kind)
    refuse(coder, _REFUSED)

    def meet_buffers(whole, weight, axis_name):
        replicas, place = axis_size(axis_name), axis_index(axis_name)
        cut = [coder.in_blocks(x[None], replicas) for x in whole]
        own = [coder.code(*x) for x in cut]
        means, total = coder.to_owners(own, weight, axis_name)
        second = [
            coder.code(x, numbers[place][None], padded=False)
            for x, (_, numbers) in zip(means, cut, strict=True)
        ]
        # The weights travel again, so that their type, too, is equal on all replicas.
        read, known = coder.to_all(second, weight, axis_name)
        owners = jnp.arange(replicas, dtype=jnp.int32)[:, None, None]
        mine = owners == place
        lost = []
        for coded, again in zip(own, second, strict=True):
            at_second = again.lost * total.astype(coded.x.dtype)
            lost.append(coded.lost + jnp.where(mine, at_second, 0.0))
        read, lost = (list(map(jax.lax.optimization_barrier, x)) for x in (read, lost))
        return buffers.flat(read), buffers.flat(lost), known

    def encode(x, state):
        coded = coder.code(*coder.in_blocks(x.reshape(1, -1), 1))
        lost = buffers.shaped(coded.lost, x)
        return coder.message(coded)[0], lost, state

    def decode(message, like):
        shape = coder.blocks(math.prod(like.shape), 1)
        return buffers.shaped(coder.read(message[None], shape, like.dtype), like)

    def scatter(tree, state, axis_name, *, weight=None):
        pieces.require_meetable(tree, axis_name, "quantized")
        replicas, weight = axis_size(axis_name), own_weight(weight, axis_name)
        leaves, treedef = jax.tree.flatten(tree)
        rows = [buffers.in_rows(buffers.wide(x).reshape(-1), replicas) for x in leaves]
        joint = buffers.Joint(rows, bucket_bytes=bucket_bytes)
        cut = [coder.in_blocks(weigh(x, weight), replicas) for x in joint.join(rows)]
        own = [coder.code(*x) for x in cut]
        means, total = coder.to_owners(own, weight, axis_name)
        mean = buffers.flat(joint.cut(buffers.flat(means)))
        lost = [coded.lost.reshape(replicas, -1) for coded in own]
        owed = map(buffers.shaped, joint.cut(lost), leaves)
        return Met(treedef.unflatten(mean), total, treedef.unflatten(owed), state)

    exchange = pieces.joined(
        "quantized", meet_buffers, Code(encode, decode), bucket_bytes
    )
    return exchange._replace(scatter=scatter, in_buckets=True)


class _Coded(NamedTuple):
    """Numbers in blocks, and their codes."""

    x: Blocks
    codes: Codes
    scales: Scales
    lost: Blocks  # x minus what everybody decodes


class _Coder(NamedTuple):
    """How buffers become messages of codes, and how these become numbers again."""

    bits: int
    block: int
    bucket_bytes: int
    kind: str

    def blocks(self, size: int, replicas: int) -> tuple[int, int, int]:
        """(replicas, blocks, numbers per block) for a buffer."""
        piece = -(-size // replicas)
        blocks = -(-piece // self.block)
        # Shorter blocks where a few full ones would be mostly padding.
        needed = -(-piece // blocks)
        length = min(self.block, needed + -needed % 8)
        # Where it costs little, so many that their codes fill bytes.
        return (
            replicas,
            blocks + (-blocks % self._per if self._many(blocks) else 0),
            length,
        )

    def in_blocks(
        self, rows: Float[Array, "rows numbers"], pieces: int
    ) -> tuple[Blocks, Int32[Array, "pieces 2"]]:
        """(the rows in so many pieces of blocks, padded; how full each piece is).

        That is its full blocks and the numbers in the next one: all its numbers may be
        more than an int32 counts.
        """
        shape = self.blocks(rows.size, pieces)
        width, many = shape[1] * shape[2], pieces // len(rows)
        padded = jnp.pad(rows, ((0, 0), (0, many * width - rows.shape[1])))
        starts = [piece % many * width for piece in range(pieces)]
        numbers = [min(max(rows.shape[1] - start, 0), width) for start in starts]
        full = [divmod(number, shape[2]) for number in numbers]
        return padded.reshape(shape), jnp.array(full, jnp.int32)

    def code(
        self,
        x: Blocks,
        numbers: Int32[Array, "pieces 2"],
        padded: bool = True,
    ) -> _Coded:
        """The codes of the first numbers of each piece, so many as `in_blocks` says.

        `padded` says whether the others are 0 already.
        """
        kind = KINDS[self.kind]
        full, rest = jnp.moveaxis(numbers[..., None, None], 1, 0)
        block, place = (jax.lax.broadcasted_iota(jnp.int32, x.shape, i) for i in (1, 2))
        there = (block < full) | ((block == full) & (place < rest))
        x = x if padded else jnp.where(there, x, 0.0)
        codes, scales = kind.code(x, there, self.bits)
        read = kind.read(codes, scales.astype(x.dtype), self.bits)
        return _Coded(x, codes, scales, x - read)

    def message(self, coded: _Coded) -> Messages:
        """The codes of each piece, and their scales."""
        pieces, blocks, length = coded.codes.shape
        rows = coded.codes.reshape(pieces, *self._rows(blocks, length))
        packed = buffers.pack(rows, self.bits).reshape(pieces, -1)
        scales = buffers.to_bytes(coded.scales.reshape(pieces, -1))
        spare = self._scale_bytes(blocks) - scales.shape[1]
        return jnp.concatenate([packed, jnp.pad(scales, ((0, 0), (0, spare)))], 1)

    def read(self, sent: Messages, shape: tuple[int, ...], dtype: DTypeLike) -> Blocks:
        """The numbers of decoded messages, in blocks of this shape."""
        kind, (_, blocks, length) = KINDS[self.kind], shape
        size = sent.shape[1] - self._scale_bytes(blocks)
        packed, scales = jnp.split(sent, [size], axis=1)
        count, more = self._rows(blocks, length)
        codes = buffers.unpack(packed.reshape(len(sent), -1, more), self.bits, count)
        scales = buffers.from_bytes(scales[:, : 4 * blocks], jnp.float32).astype(dtype)
        return kind.read(
            codes.reshape(-1, blocks, length),
            scales.reshape(len(sent), blocks, -1),
            self.bits,
        )

    def to_owners(
        self, own: list[_Coded], weight: Weight | None, axis_name: AxisName
    ) -> tuple[list[Blocks], Weight]:
        """The mean of this replica's piece of each array, and the sum of the weights.

        Every replica sends its codes of a piece to the owner.
        """
        sent, replicas = list(map(self.message, own)), axis_size(axis_name)
        received, total = pieces.travel(
            collectives.all_to_all, sent, weight, axis_name, self._full, replicas
        )
        divisor, means = weight_divisor(total), []
        for row, (x, *_) in zip(received, own, strict=True):
            piece = jnp.sum(self.read(row, x.shape, x.dtype), 0, keepdims=True)
            means.append(piece / divisor.astype(x.dtype))
        return means, total

    def to_all(
        self, own: list[_Coded], weight: Weight | None, axis_name: AxisName
    ) -> tuple[list[Blocks], Weight]:
        """All replicas' pieces of each array, decoded, and the sum of the weights."""
        sent = list(map(self.message, own))
        gathered, total = pieces.travel(
            collectives.gather, sent, weight, axis_name, self._full
        )
        pairs = zip(gathered, own, strict=True)
        return [self.read(row, x.shape, x.dtype) for row, (x, *_) in pairs], total

    @property
    def _per(self) -> int:
        """Of so many codes the bits fill whole bytes."""
        return 8 // math.gcd(8, self.bits)

    def _many(self, blocks: int) -> bool:
        """Whether a few more bytes of padding are a small part of a message."""
        return blocks >= 64 * self._per

    def _rows(self, blocks: int, length: int) -> tuple[int, int]:
        """How codes are packed: those of whole blocks, where these fill bytes."""
        return (blocks * length, 1) if blocks % self._per else (blocks, length)

    def _scale_bytes(self, blocks: int) -> int:
        """The bytes of the scales of a piece, which end with a line of a message."""
        size = 4 * blocks * KINDS[self.kind].scales
        return size + (-size % pieces.LINE if self._many(blocks) else 0)

    @property
    def _full(self) -> float:
        """The bytes of a bucket that in 4 bits is as large as a full one in these."""
        return self.bucket_bytes * min(1, self.bits / 4)


_REFUSED: Refused[_Coder] = (
    (
        lambda o: o.kind not in KINDS or o.bits not in KINDS[o.kind].bits,
        "bits must be 1, 2, 3, 4, 8 or 16, and code 'linear' (2, 3, 4 or 8 bits), "
        "'lloyd' (1, 2, 3 or 4) or 'bfloat16' (16); got bits={0.bits} and "
        "code={0.kind!r}. Leave code out, and it is one that these bits have.",
    ),
    (
        lambda o: not KINDS[o.kind].scales and o.block != _BLOCK,
        "{0.bits} bits need no scale, so no block shares one; got block={0.block}. "
        "Leave block out.",
    ),
)
