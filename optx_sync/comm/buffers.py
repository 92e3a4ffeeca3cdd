# SPDX-License-Identifier: Apache-2.0
"""Arrays side by side, in pieces, and as bytes: what is sent is joined and cut here.

Many small arrays travel in one collective, side by side. A flat array is cut into a
piece for each replica. What is coded travels as bytes, because XLA widens narrow
floating and integer dtypes on some platforms, and leaves bytes alone on all of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm.collectives import varying_axes
from optx_sync.comm.varying import axes_of, localize
from optx_sync.trees import at_least_float32


def alike(x: Any) -> Any:
    """The dtype and type of an array: joined arrays get one.

    One that is equal on all shards of a worker would come back unequal from beside
    what differs.
    """
    return jnp.dtype(x.dtype), varying_axes(x)


def joinable() -> Callable[[Any], Any]:
    """Which arrays to join: `alike` ones, or none where that would gather them.

    So it would where the compiler lays arrays out over mesh axes of its own
    (`axis_names` of `jax.shard_map`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    return id if mesh.manual_axes and mesh.size > manual else alike


class Joint:
    """Which arrays lie side by side in one, along their last axis.

    Attributes:
        kinds: The kind of each joined array.
        places: For each of the joined arrays, which ones are in it. What has no
            elements is in none: none is empty.
    """

    def __init__(self, arrays: Sequence[Any], kind: Callable[[Any], Any] = alike):
        """Those of one kind; of arrays or `jax.ShapeDtypeStruct`."""
        found: dict[Any, list[int]] = {}
        for place, x in enumerate(arrays):
            if math.prod(x.shape):
                found.setdefault(kind(x), []).append(place)
        self.kinds: list[Any] = list(found)
        self.places: list[list[int]] = list(found.values())
        self._like = list(arrays)

    def join(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The joined arrays."""
        return [
            jnp.concatenate([arrays[i] for i in places], axis=-1)
            for places in self.places
        ]

    def cut(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """What has the numbers of each along the last axis, padded or not, cut again.

        For what has no elements it is a constant.
        """
        found = [jnp.zeros(x.shape, x.dtype) if not x.size else x for x in self._like]
        for places, whole in zip(self.places, joined, strict=True):
            start = 0
            for place in places:
                width = self._like[place].shape[-1]
                found[place] = whole
                if width < whole.shape[-1]:
                    found[place] = jax.lax.slice_in_dim(
                        whole, start, start + width, axis=-1
                    )
                start += width
        return found


def through(
    send: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    kind: Callable[[Any], Any] = alike,
) -> list[jax.Array]:
    """`send` of arrays [..., numbers] that are joined, and cut again."""
    joint = Joint(arrays, kind)
    return joint.cut([send(x) for x in joint.join(arrays)])


def wide(x: Any) -> Any:
    """The array, in float32 where it is half precision."""
    return x.astype(at_least_float32(x.dtype))


def flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of one axis each."""
    return [x.reshape(-1) for x in arrays]


def shaped(x: jax.Array, like: Any) -> jax.Array:
    """The first numbers of an array in the shape of another one."""
    return x.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def in_rows(x: Any, n: int) -> Any:
    """A flat array, padded, as a piece for each of n replicas: `[n, k]`."""
    return jnp.pad(x, (0, -x.size % n)).reshape(n, -1)


def one_behind_the_other(
    arrays: Sequence[jax.Array], size: int, dtype: Any
) -> jax.Array:
    """Arrays as one flat one, and zeros to the size."""
    missing = size - sum(x.size for x in arrays)
    padding = [jnp.zeros(missing, dtype)] if missing else []
    if padding and axes_of(arrays):
        padding = [localize(padding[0], tuple(sorted(axes_of(arrays))))]
    return jnp.concatenate([*flat(arrays), *padding])


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8[..., n] codes of 1, 2, 4 or 8 bits as bytes, uint8[..., ceil(n bits / 8)].

    A byte holds numbers that lie far apart, so that both sides are contiguous.
    """
    per = 8 // bits
    if per == 1:
        return codes
    spare = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)]
    parts = jnp.pad(codes, spare).reshape(*codes.shape[:-1], per, -1)
    # Joined along an axis: slices of what is computed XLA does not vectorise.
    return jnp.bitwise_or.reduce(parts << _places(parts, bits), axis=-2)


def unpack(packed: jax.Array, bits: int, count: int) -> jax.Array:
    """The `count` codes along the last axis that `pack` made bytes of."""
    if bits == 8:
        return packed
    parts = packed[..., None, :]
    parts = (parts >> _places(parts, bits)) & np.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :count]


def _places(parts: jax.Array, bits: int) -> np.ndarray:
    """Where in a byte the codes of each part stand; parts lie along the axis -2."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return places.reshape(*[1] * (parts.ndim - 2), -1, 1)


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of numbers along the last axis, uint8[..., bytes]."""
    octets = jax.lax.bitcast_convert_type(x, jnp.uint8)
    if octets.ndim == x.ndim:  # of one byte each
        return octets
    return octets.reshape(*x.shape[:-1], -1)


def from_bytes(octets: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of which `to_bytes` made bytes."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        octets = octets.reshape(*octets.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(octets, dtype)
