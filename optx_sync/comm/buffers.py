# SPDX-License-Identifier: Apache-2.0
"""Arrays side by side, in pieces, and as bytes: what is sent is joined and cut here.

Many small arrays travel in one collective, side by side. A flat array is cut into a
piece for each replica. What is coded travels as bytes, because XLA widens narrow
floating and integer dtypes on some platforms, and leaves bytes alone on all of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optx_sync.comm.collectives import varying_axes
from optx_sync.comm.varying import axes_of, localize
from optx_sync.shapes import Array, Num, Shaped, UInt8
from optx_sync.trees import at_least_float32

Octets: TypeAlias = UInt8[Array, "... bytes"]
# An array, or a `jax.ShapeDtypeStruct`, whose parameters of type nobody knows.
Like: TypeAlias = Any
# What is joined, unless a user says otherwise: enough to fill a link, and more than XLA
# joins again by itself (30 MiB on GPUs), but little beside a large model.
BUCKET_BYTES = 2**25


def alike(x: Like) -> Any:
    """The dtype and type of an array: joined arrays get one.

    One that is equal on all shards of a worker would come back unequal from beside
    what differs.
    """
    return jnp.dtype(x.dtype), varying_axes(x)


def joinable() -> Callable[[Like], Any]:
    """Which arrays to join: `alike` ones, or none where that would gather them.

    So it would where the compiler lays arrays out over mesh axes of its own
    (`axis_names` of `jax.shard_map`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    return id if mesh.manual_axes and mesh.size > manual else alike


class Joint:
    """Which arrays lie side by side in one, along their last axis.

    Arrays are joined until they fill a bucket, so that the first bucket travels while
    the next one is computed; none is cut.

    Attributes:
        kinds: The kind of each joined array.
        places: For each of the joined arrays, which ones are in it. What has no
            elements is in none: none is empty.
    """

    def __init__(
        self,
        arrays: Sequence[Like],
        kind: Callable[[Like], Any] = alike,
        bucket_bytes: float = BUCKET_BYTES,
    ):
        """Those of one kind; of arrays or `jax.ShapeDtypeStruct`."""
        self.kinds: list[Any] = []
        self.places: list[list[int]] = []
        self._like = list(arrays)
        # Of each kind, which joined array is being filled, and the bytes in it.
        filling: dict[Any, tuple[int, int]] = {}
        for place, x in enumerate(arrays):
            size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            if not size:
                continue
            number, before = filling.get(kind(x), (-1, 0))
            if number < 0 or before + size > bucket_bytes:
                number, before = len(self.places), 0
                self.kinds.append(kind(x))
                self.places.append([])
            self.places[number].append(place)
            filling[kind(x)] = number, before + size

    def join(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The joined arrays."""
        together = ([arrays[i] for i in places] for places in self.places)
        return [jnp.concatenate(arrays, axis=-1) for arrays in together]

    def cut(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """What has the numbers of each along the last axis, padded or not, cut again.

        For what has no elements it is a constant.
        """
        found: list[Any] = [
            x if x.size else jnp.zeros(x.shape, x.dtype) for x in self._like
        ]
        for places, whole in zip(self.places, joined, strict=True):
            start = 0
            for place in places:
                end = start + self._like[place].shape[-1]
                found[place] = whole
                if end - start < whole.shape[-1]:
                    found[place] = jax.lax.slice_in_dim(whole, start, end, axis=-1)
                start = end
        return found


def through(
    send: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    kind: Callable[[Like], Any] = alike,
    bucket_bytes: float = BUCKET_BYTES,
) -> list[jax.Array]:
    """`send` of arrays [..., numbers] that are joined, and cut again."""
    joint = Joint(arrays, kind, bucket_bytes)
    return joint.cut([send(x) for x in joint.join(arrays)])


def wide(x: jax.Array) -> jax.Array:
    """The array, in float32 where it is half precision."""
    return x.astype(at_least_float32(x.dtype))


def flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of one axis each."""
    return [x.reshape(-1) for x in arrays]


def shaped(x: jax.Array, like: Like) -> jax.Array:
    """The first numbers of an array in the shape of another one."""
    return x.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def in_rows(x: jax.Array | np.ndarray, n: int) -> Shaped[Array, "{n} _"]:
    """A flat array, padded, as a piece for each of n replicas; of others the rows."""
    spare = [(0, -x.shape[0] % n)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, spare).reshape(n, -(-x.shape[0] // n), *x.shape[1:])


def one_behind_the_other(
    arrays: Sequence[jax.Array], size: int, dtype: DTypeLike
) -> Shaped[Array, " {size}"]:
    """Arrays as one flat one, and zeros to the size."""
    missing = size - sum(x.size for x in arrays)
    padding = [jnp.zeros(missing, dtype)] if missing else []
    if padding and axes_of(arrays):
        padding = [localize(padding[0], tuple(sorted(axes_of(arrays))))]
    return jnp.concatenate([*flat(arrays), *padding])


def pack(codes: UInt8[Array, "... codes"], bits: int) -> Octets:
    """N codes of 1, 2, 4 or 8 bits as ceil(n bits / 8) bytes.

    A byte holds numbers that lie far apart, so that both sides are contiguous.
    """
    per = 8 // bits
    if per == 1:
        return codes
    spare = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)]
    parts = jnp.pad(codes, spare).reshape(*codes.shape[:-1], per, -1)
    # Joined along an axis: slices of what is computed XLA does not vectorise.
    return jnp.bitwise_or.reduce(parts << _places(parts, bits), axis=-2)


def unpack(packed: Octets, bits: int, count: int) -> UInt8[Array, "... {count}"]:
    """The `count` codes along the last axis that `pack` made bytes of."""
    if bits == 8:
        return packed
    parts = packed[..., None, :]
    parts = (parts >> _places(parts, bits)) & np.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :count]


def _places(parts: UInt8[Array, "... _ _"], bits: int) -> np.ndarray:
    """Where in a byte the codes of each part stand; parts lie along the axis -2."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return places.reshape(*[1] * (parts.ndim - 2), -1, 1)


def to_bytes(x: Num[Array, "... numbers"]) -> Octets:
    """The bytes of numbers along the last axis."""
    octets = jax.lax.bitcast_convert_type(x, jnp.uint8)
    if octets.ndim == x.ndim:  # of one byte each
        return octets
    return octets.reshape(*x.shape[:-1], -1)


def from_bytes(octets: Octets, dtype: DTypeLike) -> Num[Array, "... numbers"]:
    """The numbers of which `to_bytes` made bytes."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        octets = octets.reshape(*octets.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(octets, dtype)
