# SPDX-License-Identifier: Apache-2.0
"""Buffers to send: joined arrays, pieces for replicas, and codes packed into bytes.

Many small arrays are joined and travel in one collective. A flat array is cut into a
piece for each replica. Coded arrays travel as bytes, because XLA widens narrow floating
and integer dtypes on some platforms, but bytes on none.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optx_sync.comm.collectives import varying_axes
from optx_sync.core.shapes import Array, Num, Shaped, UInt8
from optx_sync.core.trees import Tree, at_least_float32

# An array or a `jax.ShapeDtypeStruct`, whose attributes type checkers do not know.
Like: TypeAlias = Any
# Default size of a joined array: enough to saturate a link, and more than XLA combines
# by itself (30 MiB on GPUs), but little memory beside a large model.
BUCKET_BYTES = 2**25


def alike(x: Like) -> Any:
    """The dtype and varying mesh axes of an array: joined arrays are equal in both.

    A joined array has one type: one that is equal on all shards of a worker, joined
    with one that is not, would vary over them.
    """
    return jnp.dtype(x.dtype), varying_axes(x)


def joinable() -> Callable[[Like], Any]:
    """The kind by which to join arrays: `alike`, or `id`, which joins none.

    Joining would gather arrays that the compiler shards over mesh axes that are not
    manual (`axis_names` of `jax.shard_map`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    return id if mesh.manual_axes and mesh.size > manual else alike


class Joint:
    """A plan to join arrays along their last axis into buckets.

    A bucket takes whole arrays until the next one would not fit, so that the first
    bucket travels while the next one is computed.

    Attributes:
        kinds: The kind of each joined array.
        places: The numbers of the arrays in each joined array. Arrays without elements
            are in none, so no joined array is empty.
    """

    def __init__(
        self,
        arrays: Sequence[Like],
        kind: Callable[[Like], Any] = alike,
        bucket_bytes: float = BUCKET_BYTES,
    ):
        """Plan for arrays or `jax.ShapeDtypeStruct`, to join those of equal `kind`."""
        self.kinds: list[Any] = []
        self.places: list[list[int]] = []
        self._like = list(arrays)
        # By kind: the number of the joined array that is being filled, and its bytes.
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
        """Join arrays of the planned shapes."""
        together = ([arrays[i] for i in places] for places in self.places)
        return [jnp.concatenate(arrays, axis=-1) for arrays in together]

    def cut(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """Cut joined arrays along the last axis, where they may be padded at the end.

        An array without elements comes back as a constant.
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


def in_groups(arrays: Sequence[Like], bucket_bytes: float) -> list[list[int]]:
    """The numbers of the arrays of each bucket; small buckets are a group together.

    Half precision arrays count as float32. Those without elements are in the first.
    """
    like = [jax.eval_shape(lambda x: wide(x).reshape(-1), x) for x in arrays]
    sizes = [x.size * x.dtype.itemsize for x in like]
    groups, filled = [[place for place, size in enumerate(sizes) if not size]], 0
    for places in Joint(like, bucket_bytes=bucket_bytes).places:
        size = sum(sizes[place] for place in places)
        if filled and filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1] += places
        filled += size
    return groups


def through(
    send: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    kind: Callable[[Like], Any] = alike,
    bucket_bytes: float = BUCKET_BYTES,
) -> list[jax.Array]:
    """Join arrays `[..., numbers]`, apply `send` to each joined one, and cut these."""
    joint = Joint(arrays, kind, bucket_bytes)
    return joint.cut([send(x) for x in joint.join(arrays)])


def wide(x: jax.Array) -> jax.Array:
    """The array, cast to float32 if it is half precision."""
    return x.astype(at_least_float32(x.dtype))


def flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, each reshaped to one axis."""
    return [x.reshape(-1) for x in arrays]


def shaped(x: jax.Array, like: Like) -> jax.Array:
    """The first numbers of an array, in the shape of `like`; padding is dropped."""
    return x.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def in_rows(x: jax.Array | np.ndarray, n: int) -> Shaped[Array, "{n} ..."]:
    """Cut axis 0 into n equal pieces, padded with zeros: `[n, ceil(rows / n), ...]`."""
    spare = [(0, -x.shape[0] % n)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, spare).reshape(n, -(-x.shape[0] // n), *x.shape[1:])


def rows_on(leaves: int, devices: Sequence[int]) -> int:
    """The rows of a stack of leaves over axes with so many devices: a multiple."""
    return leaves + -leaves % math.prod(devices)


def with_rows(x: Tree, leaves: int, rows: int, axis: int = 0) -> Tree:
    """A stack of this many leaves along an axis, padded anew, to so many rows.

    By the last leaf's, which are numbers that every formula can take.
    """
    return x.take(np.minimum(np.arange(rows), leaves - 1), axis)


def cut_numbers(x: jax.Array | np.ndarray, n: int) -> Shaped[Array, "{n} ..."]:
    """The same along the last axis, whatever axes of workers are in front of it."""
    cut = in_rows(jnp.moveaxis(x, -1, 0), n)
    return jnp.moveaxis(cut, 1, -1)


def pack(codes: Num[Array, "... codes more"], bits: int) -> UInt8[Array, "... _ more"]:
    """Pack n codes of 1 to 4, 8 or 16 bits into bytes, on the last axis but one.

    A byte holds codes that are far apart, so that reads and writes are contiguous, and
    arrays keep their last axis, so that XLA need not move them on TPUs. What is missing
    to whole bytes is 0. Of 3 bits the lower two are packed, then the third; of 16 the
    lower byte, then the upper one.
    """
    if bits == 16:
        return to_bytes(codes, axis=-2)
    if bits == 3:
        return jnp.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], axis=-2)
    per, (*before, count, more) = 8 // bits, codes.shape
    if per == 1:
        return codes
    spare = [(0, 0)] * len(before) + [(0, -count % per), (0, 0)]
    parts = jnp.pad(codes, spare).reshape(*before, per, -(-count // per), more)
    # Reduced along an axis: XLA does not vectorise slices of computed arrays.
    return jnp.bitwise_or.reduce(parts << _places(bits, parts.ndim), axis=-3)


def unpack(
    packed: UInt8[Array, "... bytes more"], bits: int, count: int
) -> Num[Array, "... {count} more"]:
    """The inverse of `pack`: `count` codes along the last axis but one."""
    if bits == 16:
        return from_bytes(packed, jnp.uint16, axis=-2)
    if bits == 8:
        return packed
    if bits == 3:
        lower, third = jnp.split(packed, [-(-count // 4)], axis=-2)
        return unpack(lower, 2, count) | unpack(third, 1, count) << 2
    *before, some, more = packed.shape
    parts = packed[..., None, :, :] >> _places(bits, packed.ndim + 1)
    parts = (parts & np.uint8(2**bits - 1)).reshape(*before, 8 // bits * some, more)
    return parts[..., :count, :]


def _places(bits: int, axes: int) -> np.ndarray:
    """The bit offset within a byte of each part's codes; parts are along axis -3."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return places.reshape(*[1] * (axes - 3), -1, 1, 1)


def to_bytes(x: Num[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """The bytes of the numbers, along an axis: all first ones, all second ones.

    So they lie side by side as the numbers do: a short axis of the bytes of a number
    is one that XLA fills up to 128 on TPUs.
    """
    size = x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * size}")
    octets = [(words >> (8 * n)).astype(jnp.uint8) for n in range(size)]
    return jnp.concatenate(octets, axis=axis)


def from_bytes(
    octets: UInt8[Array, "..."], dtype: DTypeLike, axis: int = -1
) -> Num[Array, "..."]:
    """The inverse of `to_bytes`."""
    size = jnp.dtype(dtype).itemsize
    words = jnp.split(octets.astype(f"uint{8 * size}"), size, axis=axis)
    whole = functools.reduce(
        jnp.bitwise_or, [word << (8 * n) for n, word in enumerate(words)]
    )
    return jax.lax.bitcast_convert_type(whole, dtype)
