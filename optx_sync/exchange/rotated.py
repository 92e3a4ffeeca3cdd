# SPDX-License-Identifier: Apache-2.0
"""`rotated`: an exchange codes numbers in another basis, Hadamard's or the DCT's."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm import buffers
from optx_sync.comm.collectives import axis_size
from optx_sync.comm.reduce import own_weight
from optx_sync.core.checks import Refused, check_seed, integer, refuse
from optx_sync.core.shapes import Array, Float
from optx_sync.exchange import contract
from optx_sync.exchange.contract import Code, Exchange, Met
from optx_sync.exchange.pieces import narrowed, require_meetable


def rotated(
    exchange: Exchange,
    basis: Literal["hadamard", "dct"] = "hadamard",
    block: int | None = None,
    *,
    seed: int = 0,
) -> Exchange:
    r"""Rotate blocks of numbers, exchange the result, and rotate the mean back.

    All leaves of a dtype are joined and cut into blocks x of B numbers, of which the
    exchange gets y. With `basis="hadamard"`:

    .. math::

        y = \frac{1}{\sqrt B} H D x, \qquad x = \frac{1}{\sqrt B} D H y

    where H is the Walsh-Hadamard matrix, B a power of two, and D a diagonal of random
    signs. y is nearly normally distributed, whatever x is, so that no number is much
    larger than the others and `quantized` loses less; its levels `code="lloyd"` are
    made for such numbers. A block with one number that is not 0 arrives as it is.

    With `basis="dct"` y is the orthonormal discrete cosine transform (DCT-II) of x:
    what is smooth becomes a few large numbers, for `top_k`, as in DeMo.

    Both are linear and keep norms, so the law of exchanges holds. H takes log2(B)
    additions a number, two of them in a pass over the data, the DCT B products. Padding
    is rotated too: up to B - 1 numbers more travel with each bucket (of one smaller
    than a block the block is the next power of two). A NaN spreads over its block.

    The signs are drawn from `seed` once, not in each round: so the basis is the same
    for feedback, for a state in pieces and for a worker that comes alone, and
    nothing has to be remembered.

    Args:
        exchange: A linear exchange without memory: `quantized`, `top_k`, or your own.
            Feedback stands around: `error_feedback(rotated(quantized(2)))`.
        basis: "hadamard" or "dct".
        block: B; `None`: 256 for "hadamard", 64 for "dct".
        seed: Of the signs, the same on all replicas.

    Returns:
        A linear exchange of dense real floating leaves, which has a code and a first
            half if the exchange inside has. It remembers nothing.

    Raises:
        TypeError: `exchange` is no `Exchange`, `block` or `seed` no integer; at the
            call, a leaf that is not floating.
        ValueError: An exchange that is not linear or has a memory, another basis, a
            `block` below 1 or, for Hadamard's, no power of two; at the call, a leaf
            that is row-sparse or does not vary over the axis.

    Example:
        The share of the square that 2 bits lose, of numbers one of which is large:

        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> x = jnp.ones((1, 256)).at[0, 3].set(100.0)
        >>> for wrap in (lambda exchange: exchange, oxs.exchange.rotated):
        ...     exchange = wrap(oxs.exchange.quantized(bits=2))
        ...     def lost(x):
        ...         return exchange.meet(x, exchange.init(x), "pods").lost
        ...     lost = jax.jit(jax.vmap(lost, axis_name="pods"))(x)
        ...     print(f"{jnp.sum(lost**2) / jnp.sum(x**2):.2f}")
        0.87
        0.14

    References:
        Suresh, Yu, Kumar and McMahan, "Distributed Mean Estimation with Limited
        Communication", 2017, arXiv 1611.00429. Vargaftik et al., "DRIVE: One-bit
        Distributed Mean Estimation", 2021, arXiv 2105.08339. Peng, Quesnelle and
        Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv 2411.19870 (DCT).
    """
    exchange = contract.check_exchange(exchange)
    default = {"hadamard": 256, "dct": 64}.get(basis, 1)
    block = integer("block", default if block is None else block, "The default is 256.")
    turn = _Turn(exchange, basis, block, check_seed(seed))
    refuse(turn, _REFUSED)

    def encode(x, state):
        message, lost, state = coded.encode(turn.forth(x.reshape(-1)), state)
        return message, turn.back(lost, x.size).reshape(x.shape), state

    def decode(message, like):
        rotated = jax.eval_shape(lambda x: turn.forth(x.reshape(-1)), like)
        found = coded.decode(message, rotated)
        return turn.back(found, math.prod(like.shape)).reshape(like.shape)

    coded: Any = exchange.code
    scatter: Any = exchange.scatter
    return exchange._replace(
        meet=_turned(turn, exchange.meet),
        outlier=None,
        code=coded and Code(encode, decode),
        scatter=scatter and _turned(turn, scatter, whole=False),
    )


class _Turn(NamedTuple):
    """A rotation of blocks of the numbers along the last axis."""

    exchange: Exchange
    basis: str
    block: int
    seed: int

    def length(self, size: int) -> int:
        """The numbers in a block, for so many numbers."""
        whole = size if self.basis == "dct" else 1 << (size - 1).bit_length()
        return min(self.block, whole)

    def forth(self, x: Float[Array, "*rows numbers"]) -> Float[Array, "*rows padded"]:
        """The numbers in the other basis."""
        length = self.length(x.shape[-1])
        spare = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % length)]
        return self._turn(jnp.pad(x, spare), length)

    def back(
        self, y: Float[Array, "*rows padded"], size: int
    ) -> Float[Array, "*rows numbers"]:
        """The first so many numbers in their own basis."""
        return self._turn(y, self.length(size), back=True)[..., :size]

    def _turn(self, x: jax.Array, length: int, back: bool = False) -> jax.Array:
        blocks = x.reshape(*x.shape[:-1], -1, length)
        if self.basis == "dct":
            matrix = (_dct(length) if back else _dct(length).T).astype(x.dtype)
            # TPUs would round to bfloat16.
            return jnp.matmul(blocks, matrix, precision="highest").reshape(x.shape)
        key = jax.random.key(self.seed, impl="threefry2x32")
        signs = jax.random.rademacher(key, (length,), x.dtype)
        signs = jnp.broadcast_to(signs, blocks.shape)
        turned = _hadamard(blocks) * signs if back else _hadamard(blocks * signs)
        return turned.reshape(x.shape)


def _turned(
    turn: _Turn, inside: Callable[..., Met], whole: bool = True
) -> Callable[..., Met]:
    """A `meet` that gives the one inside rotated numbers.

    `whole` says whether its mean is of whole arrays, or of a piece of each.
    """

    def meet(tree, state, axis_name, *, weight=None, **more):
        require_meetable(tree, axis_name, "rotated")
        leaves, treedef = jax.tree.flatten(tree)
        pieces = 1 if whole else axis_size(axis_name)
        rows = [buffers.in_rows(buffers.wide(x).reshape(-1), pieces) for x in leaves]
        joint = buffers.Joint(rows, bucket_bytes=turn.exchange.bucket_bytes)
        own = joint.join(rows)
        sizes = [x.shape[-1] for x in own]
        sent = list(map(turn.forth, own))
        met = inside(sent, state, axis_name, weight=weight, **more)
        lost = [jnp.zeros_like(x) for x in sent] if met.lost is None else met.lost
        mean = joint.cut(list(map(turn.back, met.mean, sizes)))
        lost = joint.cut(list(map(turn.back, lost, sizes)))
        if whole:
            mean, owed = narrowed(mean, lost, tree, own_weight(weight, axis_name))
        else:
            mean = treedef.unflatten(buffers.flat(mean))
            owed = treedef.unflatten(map(buffers.shaped, lost, leaves))
        return met._replace(mean=mean, lost=None if met.lost is None else owed)

    return meet


def _hadamard(x: Float[Array, "*rows block"]) -> Float[Array, "*rows block"]:
    """The Walsh-Hadamard transform of the last axis, with norms kept.

    By additions in a fixed order, so that all replicas, a server and its workers get
    the same bits. A product of matrices, no faster on CPUs, does not promise that.
    """
    *rows, size = x.shape
    y, stride = x, size
    while stride > 1:  # two steps of the transform in a pass over the data
        ways = min(4, stride)
        stride //= ways
        y = y.reshape(*rows, size // (ways * stride), ways, stride)
        y = jnp.stack(_sums([y[..., way, :] for way in range(ways)]), axis=-2)
    return y.reshape(x.shape) * np.asarray(1 / math.sqrt(size), x.dtype)


def _sums(parts: list[jax.Array]) -> list[jax.Array]:
    """The transform over a list of arrays, with numbers 1 and -1."""
    if len(parts) == 1:
        return parts
    half = len(parts) // 2
    low, high = _sums(parts[:half]), _sums(parts[half:])
    both = list(zip(low, high, strict=True))
    return [a + b for a, b in both] + [a - b for a, b in both]


def _dct(size: int) -> np.ndarray:
    """The matrix of the orthonormal DCT-II, a row for each frequency."""
    places = np.arange(size)
    waves = np.cos(np.pi / size * np.outer(places, places + 0.5))
    return waves * np.where(places[:, None] > 0, np.sqrt(2 / size), np.sqrt(1 / size))


_REFUSED: Refused[_Turn] = (
    (
        lambda o: o.basis not in ("hadamard", "dct"),
        "basis must be 'hadamard' or 'dct'; got {0.basis!r}.",
    ),
    (
        lambda o: o.basis == "hadamard" and o.block & (o.block - 1),
        "block must be a power of two for basis='hadamard'; got {0.block}. The default "
        "is 256.",
    ),
    (
        lambda o: not o.exchange.linear,
        "rotated takes an exchange that declares linear=True: what a median makes of "
        "rotated arrays is something else. Use the robust exchange alone.",
    ),
    (
        lambda o: o.exchange.remembers,
        "rotated takes an exchange without memory, which would be of rotated arrays. "
        "Put error_feedback around: error_feedback(rotated(quantized(2))).",
    ),
)
