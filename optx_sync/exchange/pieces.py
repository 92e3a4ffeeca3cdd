# SPDX-License-Identifier: Apache-2.0
"""A tree as one flat buffer per dtype, cut into a piece for each replica; its bytes.

What exchanges in two hops stand on: replica i owns piece i of a buffer. `scatter` adds
up what all replicas have of each piece, at its owner; `gather` gives every owner's
piece to all. What is coded travels as bytes, because XLA widens narrow floating and
integer dtypes on some platforms, and leaves bytes alone on all of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync import collectives
from optx_sync.collectives import AxisName, axis_size, require_local, weigh
from optx_sync.exchange.rule import require_dense
from optx_sync.trees import (
    Tree,
    at_least_float32,
    is_floating,
    leaves_with_names,
    round_to,
)


class Layout(NamedTuple):
    """Which leaves of a tree lie where in its buffers."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    dtypes: tuple[np.dtype, ...]  # of the leaves in their buffers
    lengths: dict[np.dtype, int]  # numbers in each buffer, without padding


def layout_of(tree: Tree) -> Layout:
    """The layout of a tree of arrays or `jax.ShapeDtypeStruct`.

    Half precision leaves lie in the float32 buffer. A buffer is not empty.
    """
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = tuple(at_least_float32(leaf.dtype) for leaf in leaves)
    lengths: dict[np.dtype, int] = {}
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        if leaf.size:
            lengths[dtype] = lengths.get(dtype, 0) + leaf.size
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    return Layout(treedef, shapes, dtypes, lengths)


def flatten(tree: Tree) -> list[jax.Array]:
    """The buffers of a tree, in the order of its layout's `lengths`."""
    layout = layout_of(tree)
    leaves = jax.tree.leaves(tree)
    return [
        jnp.concatenate(
            [
                leaf.astype(wide).reshape(-1)
                for leaf, wide in zip(leaves, layout.dtypes, strict=True)
                if wide == dtype and leaf.size
            ]
        )
        for dtype in layout.lengths
    ]


def unflatten(layout: Layout, buffers: Sequence[jax.Array]) -> Tree:
    """The tree of which these are the buffers, padded or not, in their dtypes."""
    found = dict(zip(layout.lengths, buffers, strict=True))
    start = dict.fromkeys(layout.lengths, 0)
    leaves = []
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        size = math.prod(shape)
        if size:
            at = start[dtype]
            leaves.append(found[dtype][at : at + size].reshape(shape))
            start[dtype] += size
        else:
            leaves.append(jnp.zeros(shape, dtype))
    return jax.tree.unflatten(layout.treedef, leaves)


def scatter(buffer: jax.Array, axis_name: AxisName) -> jax.Array:
    """The sum over the replicas of this replica's piece of a buffer."""
    padded = jnp.pad(buffer, (0, -buffer.size % axis_size(axis_name)))
    return collectives.scatter_sum(padded, axis_name)


def gather(piece: jax.Array, axis_name: AxisName) -> jax.Array:
    """The buffer, padded as it was scattered, from the pieces of all replicas."""
    return collectives.gather(piece, axis_name)


def travel(
    collective: Callable[[jax.Array, AxisName], jax.Array],
    messages: Sequence[jax.Array],
    axis_name: AxisName,
) -> list[jax.Array]:
    """Messages of bytes, uint8[rows, bytes], together in one collective over rows."""
    if not messages:
        return []
    ends = np.cumsum([message.shape[1] for message in messages])
    moved = collective(jnp.concatenate(messages, axis=1), axis_name)
    return jnp.split(moved, ends[:-1], axis=1)


def require_meetable(tree: Tree, axis_name: AxisName, who: str) -> None:
    """Refuse leaves that are not dense, real and floating, or that are reduced."""
    require_dense(tree, who)
    for path, leaf in leaves_with_names(tree):
        if leaf is not None and not is_floating(leaf.dtype):
            raise TypeError(
                f"{who} takes real floating leaves, but the one at {path} has dtype "
                f"{leaf.dtype}. Use oxs.exchange.all_reduce(), or leave it out with "
                "optax.masked."
            )
    require_local(tree, axis_name)


def narrowed(
    mean: Tree, lost: Tree, like: Tree, weight: jax.Array | None
) -> tuple[Tree, Tree]:
    """A mean in the dtypes of `like`, and what is lost with what its rounding loses.

    All replicas round the same mean. Each owes the share of its weight.
    """

    def narrow(mean, like):
        return round_to(mean, like.dtype).astype(like.dtype)

    def owe(lost, mean, like):
        if mean.dtype == like.dtype:
            return lost
        return lost + weigh(mean - round_to(mean, like.dtype), weight)

    return jax.tree.map(narrow, mean, like), jax.tree.map(owe, lost, mean, like)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8[..., n] codes of 1, 2, 4 or 8 bits as bytes, uint8[..., ceil(n bits / 8)].

    A byte holds numbers that lie far apart, so that both sides are contiguous.
    """
    per = 8 // bits
    if per == 1:
        return codes
    spare = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)]
    parts = jnp.split(jnp.pad(codes, spare), per, axis=-1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], 1):
        packed = packed | (part << np.uint8(bits * place))
    return packed


def unpack(packed: jax.Array, bits: int, count: int) -> jax.Array:
    """The `count` codes along the last axis that `pack` made bytes of."""
    per = 8 // bits
    if per == 1:
        return packed
    mask = np.uint8(2**bits - 1)
    parts = [(packed >> np.uint8(bits * place)) & mask for place in range(per)]
    return jnp.concatenate(parts, axis=-1)[..., :count]


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of numbers along the last axis, uint8[..., bytes]."""
    octets = jax.lax.bitcast_convert_type(x, jnp.uint8)
    if octets.ndim == x.ndim:  # of one byte each
        return octets
    return octets.reshape(*x.shape[:-1], -1)


def from_bytes(octets: jax.Array, dtype: np.dtype) -> jax.Array:
    """The numbers of which `to_bytes` made bytes."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        octets = octets.reshape(*octets.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(octets, dtype)
