# SPDX-License-Identifier: Apache-2.0
"""What is on its way between two steps, and the arrays in which it waits."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center.fragments import Partition
from optx_sync.comm.buffers import Joint, one_behind_the_other, shaped
from optx_sync.comm.varying import vary_like, vary_with
from optx_sync.placement.fields import lies_in_pieces
from optx_sync.shapes import Array, Int32
from optx_sync.trees import Tree, is_masked, is_placeholder, zeros_like


class Pending(NamedTuple):
    """The mean or sum of a part before the center absorbs it: equal on all workers."""

    # Arrays of the size of the largest part; of a center in pieces, an `InPieces` for
    # each part.
    values: Tree
    steps: Int32[Array, ""]  # `Round.steps` of its round
    pushed: Any  # float32[], workers in the sum, or () where none can be left out


class Outgoing(NamedTuple):
    """A worker's own contribution to the sum of the next step."""

    values: tuple[jax.Array, ...]  # arrays of the size of the largest part
    steps: Int32[Array, ""]  # `Round.steps` of its round
    weight: Any  # float32[], 0 where the worker is left out, or ()


OnItsWay: TypeAlias = Pending | Outgoing | tuple[()]


class Buffer:
    """Arrays with room for any one part of a tree.

    Where all parts have the same shapes, these are the part's own arrays. Where one
    part has the most rows of every leaf, as with `strided`, there is one array for each
    leaf, which keeps the leaf's other axes and so their sharding. Otherwise there is
    one flat array for each dtype, of a size that the shards of a worker can divide.
    """

    def __init__(self, partition: Partition, tree: Tree):
        """The buffer for the parts of a tree of arrays or of `jax.ShapeDtypeStruct`."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        self._parts = partition.split(shapes)
        forms = [[(x.shape, x.dtype) for x in jax.tree.leaves(p)] for p in self._parts]
        self._sizes: Counter[np.dtype] = Counter()
        for part in self._parts:
            self._sizes |= _sizes_of(part)  # of two Counters, the larger counts
        joined = {dtype: _divisible(size) for dtype, size in self._sizes.items()}
        by_leaf = zip(*map(_with_masked, self._parts), strict=True)
        largest = [max(x, key=_rows) for x in by_leaf]
        whole = not any(map(is_masked, largest))  # a masked leaf has no elements
        # Gives the leaves of a part of which each has an array of the buffer.
        self._leaves: Callable[[Tree], list[Any]] | None = None
        self._form = [((size,), dtype) for dtype, size in joined.items()]
        if all(form == forms[0] for form in forms):
            self._leaves, self._form = jax.tree.leaves, forms[0]
        elif whole and _sizes_of(largest) == self._sizes:
            self._leaves = _with_masked
            self._form = [(x.shape, x.dtype) for x in largest]
        else:
            self._sizes = Counter(joined)

    def zeros(self) -> Tree:
        """An empty buffer; for Optax's tree without leaves a number stands for it."""
        if is_placeholder(self._parts[0]):
            return jnp.zeros(())
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in self._form)

    def pack(self, part: Tree, number: int) -> Tree:
        """The part in the form of the buffer, padded with zeros; any number will do."""
        leaves = jax.tree.leaves(part)
        if self._leaves is not None:
            pairs = zip(self._leaves(part), self._form, strict=True)
            filled = (_with_rows(x, *form, like=leaves) for x, form in pairs)
            return tuple(filled)
        return tuple(
            one_behind_the_other([x for x in leaves if x.dtype == dtype], size, dtype)
            for dtype, size in self._sizes.items()
        )

    def unpack(self, values: Tree, part: int) -> Tree:
        """The part in the buffer; the caller knows its number."""
        like, treedef = jax.tree.flatten(self._parts[part])
        if self._leaves is not None:
            pairs = zip(values, self._leaves(self._parts[part]), strict=True)
            return treedef.unflatten(
                x if x.shape == like.shape else x[: like.shape[0]]
                for x, like in pairs
                if not is_masked(like)
            )
        flat = [jax.ShapeDtypeStruct((x.size,), x.dtype) for x in like]
        joint = Joint(flat, attrgetter("dtype"), math.inf)
        held = dict(zip(self._sizes, values, strict=True))
        found = joint.cut([held[dtype] for dtype in joint.kinds])
        return treedef.unflatten(map(shaped, found, like))


class BufferOfPieces(Buffer):
    """A `Buffer` for a center in pieces: arrays for each part, one of which is in use.

    Joined into one array, pieces would have another number of elements, and `resize`
    could not cut them again.
    """

    def __init__(self, partition: Partition, tree: Tree):
        """The buffer for the parts of a tree in pieces."""
        self._parts = partition.split(tree)

    def zeros(self) -> Tree:
        """An empty buffer."""
        return tuple(vary_like(zeros_like(part), part) for part in self._parts)

    def pack(self, part: Tree, number: int) -> Tree:
        """The part in the form of the buffer, zeros for the others."""
        zeros = self.zeros()
        return (*zeros[:number], part, *zeros[number + 1 :])

    def unpack(self, values: Tree, part: int) -> Tree:
        """The part in the buffer."""
        return values[part]


def buffer_of(partition: Partition, center: Tree) -> Buffer:
    """A buffer for the parts of a center: `BufferOfPieces` where it lies in pieces."""
    kind = BufferOfPieces if lies_in_pieces(center) else Buffer
    return kind(partition, center)


def _sizes_of(tree: Tree) -> Counter[np.dtype]:
    """The number of elements of each dtype."""
    sizes: Counter[np.dtype] = Counter()
    for x in jax.tree.leaves(tree):
        sizes[x.dtype] += x.size
    return sizes


def _divisible(size: int) -> int:
    """A size, made larger by at most 1/64, that usual numbers of shards divide."""
    unit = 2 ** max(min(size // 192, 4096).bit_length() - 1, 0)  # 4096 at most
    return size + -size % (3 * unit) if size >= 192 else size


def _with_masked(part: Tree) -> list[Any]:
    """The leaves of a part, with `optax.MaskedNode` where it has none of a leaf."""
    return jax.tree.leaves(part, is_leaf=is_masked)


def _rows(x: Any) -> int:
    """The number of rows that a part has of a leaf; a scalar is one row."""
    return 0 if is_masked(x) else (*x.shape, 1)[0]


def _with_rows(
    x: Any, shape: tuple[int, ...], dtype: np.dtype, like: Sequence[jax.Array]
) -> jax.Array:
    """Rows of a leaf, padded with zeros; they vary as all of the part does."""
    if is_masked(x):
        return vary_with(jnp.zeros(shape, dtype), like)
    missing = shape[0] - x.shape[0] if shape else 0
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x
