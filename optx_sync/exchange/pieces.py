# SPDX-License-Identifier: Apache-2.0
"""Pieces: what replica i owns of every array; and buffers of all arrays as bytes.

What meets in two hops stands on this. `scatter` adds up at its owner what all replicas
have of a piece, `gather` gives every owner's piece to all. An exchange that codes has
one flat buffer per dtype instead, cut into a piece for each replica. What is coded
travels as bytes, because XLA widens narrow floating and integer dtypes on some
platforms, and leaves bytes alone on all of them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync import collectives
from optx_sync.collectives import AxisName
from optx_sync.exchange.contract import require_dense
from optx_sync.placement.fields import InPieces, in_rows
from optx_sync.trees import (
    Tree,
    at_least_float32,
    is_floating,
    leaves_with_names,
    path_name,
    round_to,
)

# The dtype of a buffer, and the mesh axes over which it varies.
Buffer: TypeAlias = tuple[np.dtype, frozenset[str]]


class Layout(NamedTuple):
    """Which leaves of a tree lie where in its buffers."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    buffers: tuple[Buffer, ...]  # of the leaves
    lengths: dict[Buffer, int]  # numbers in each buffer, without padding


def layout_of(tree: Tree) -> Layout:
    """The layout of a tree of arrays.

    Half precision leaves lie in a float32 buffer. A buffer is not empty. Leaves that
    vary over other mesh axes (check_vma=True) lie apart: one that is equal on all
    shards of a worker would be coded beside what differs, and come back unequal.
    """
    leaves, treedef = jax.tree.flatten(tree)
    buffers = tuple(
        (at_least_float32(x.dtype), collectives.varying_axes(x)) for x in leaves
    )
    lengths: dict[Buffer, int] = {}
    for leaf, buffer in zip(leaves, buffers, strict=True):
        if leaf.size:
            lengths[buffer] = lengths.get(buffer, 0) + leaf.size
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    return Layout(treedef, shapes, buffers, lengths)


def flatten(tree: Tree) -> list[jax.Array]:
    """The buffers of a tree, in the order of its layout's `lengths`."""
    layout = layout_of(tree)
    leaves = jax.tree.leaves(tree)
    return [
        jnp.concatenate(
            [
                leaf.astype(buffer[0]).reshape(-1)
                for leaf, own in zip(leaves, layout.buffers, strict=True)
                if own == buffer and leaf.size
            ]
        )
        for buffer in layout.lengths
    ]


def unflatten(layout: Layout, buffers: Sequence[jax.Array]) -> Tree:
    """The tree of which these are the buffers, padded or not, in their dtypes."""
    found = dict(zip(layout.lengths, buffers, strict=True))
    start = dict.fromkeys(layout.lengths, 0)
    leaves = []
    for shape, buffer in zip(layout.shapes, layout.buffers, strict=True):
        size = math.prod(shape)
        if size:
            at = start[buffer]
            leaves.append(found[buffer][at : at + size].reshape(shape))
            start[buffer] += size
        else:
            leaves.append(jnp.zeros(shape, buffer[0]))
    return jax.tree.unflatten(layout.treedef, leaves)


def cut(tree: Tree, axis_name: AxisName | None) -> Tree:
    """This replica's piece of every array of a tree that is equal on all, flat.

    An array of n numbers has pieces of ceil(n / N), the last ones padded with zeros;
    `axis_name=None`: one piece. Half precision becomes float32.
    """
    replicas = 1 if axis_name is None else collectives.axis_size(axis_name)

    def piece(x):
        dtype = at_least_float32(x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((-(-x.size // replicas),), dtype)
        rows = in_rows(x.astype(dtype).reshape(-1), replicas)
        if axis_name is None:
            return rows[0]
        return jax.lax.dynamic_index_in_dim(
            rows, collectives.axis_index(axis_name), keepdims=False
        )

    return jax.tree.map(piece, tree)


def scatter(
    tree: Tree, axis_name: AxisName, *, weight: Any = None, dtype: Any = None
) -> Tree:
    """The mean over the replicas of this replica's piece, cut as `cut` does it.

    All arrays of one dtype travel in one reduce-scatter, half of an all-reduce; those
    that are half precision in float32. `weight` and `dtype` are those of `reduce`.
    """
    replicas = collectives.axis_size(axis_name)
    collectives.require_local(tree, axis_name)
    divisor: Any = replicas
    own = collectives.own_weight(weight, axis_name)
    if own is not None:
        # Normalised before they travel: a sum of token counts may overflow `dtype`.
        own = own / collectives.or_one(
            collectives.reduce(own, axis_name, reduction="sum")
        )
        divisor = 1

    def send(rows):
        wide = rows.dtype
        narrow = dtype is not None and is_floating(wide)
        sent = collectives.weigh(rows, own).astype(dtype if narrow else wide)
        total = collectives.scatter_sum(sent.reshape(-1), axis_name).astype(wide)
        return total / jnp.asarray(divisor, wide)

    leaves, treedef = jax.tree.flatten(tree)
    rows = [
        in_rows(x.astype(at_least_float32(x.dtype)).reshape(-1), replicas)
        for x in leaves
    ]
    return treedef.unflatten(_joined(send, rows, collectives.kinds(rows)))


def gather(pieces: Tree, like: Tree, axis_name: AxisName) -> Tree:
    """The arrays of which all replicas have pieces, equal on all of them.

    All pieces of one dtype travel in one all-gather.

    Args:
        pieces: A tree of pieces as `cut` makes them; `None` where there is none.
        like: A tree of the arrays whose shapes and dtypes they get, `None` where these
            are the piece's own.
        axis_name: The mapped axis.
    """
    replicas = collectives.axis_size(axis_name)

    def send(rows):
        # Bytes, because XLA may widen narrow floating dtypes.
        words = {1: jnp.uint8, 2: jnp.uint16}.get(rows.dtype.itemsize)
        sent = rows if words is None else jax.lax.bitcast_convert_type(rows, words)
        whole = collectives.gather(sent.reshape(-1), axis_name)
        if words is not None:
            whole = jax.lax.bitcast_convert_type(whole, rows.dtype)
        return whole.reshape(replicas, -1)

    places, found = [], []
    leaves, treedef = jax.tree.flatten(pieces, is_leaf=lambda x: x is None)
    shapes = treedef.flatten_up_to(like)
    for place, (piece, whole) in enumerate(zip(leaves, shapes, strict=True)):
        if piece is None:
            continue
        if not piece.size:
            leaves[place] = jnp.zeros(whole.shape, whole.dtype)
            continue
        places.append(place)
        found.append(round_to(piece, whole.dtype).astype(whole.dtype)[None])
    for place, whole in zip(
        places, _joined(send, found, collectives.kinds(found)), strict=True
    ):
        shape = shapes[place].shape
        leaves[place] = whole.reshape(-1)[: math.prod(shape)].reshape(shape)
    return treedef.unflatten(leaves)


def own_pieces(
    init: Callable[[Tree], Any], tree: Tree, axis_name: AxisName
) -> InPieces:
    """`init` of this replica's pieces of a tree; of all of it where no axis is mapped.

    Its arrays vary over the axis, its scalars do not.
    """
    if not collectives.is_mapped(axis_name):
        return InPieces(init(cut(tree, None)))
    state = init(cut(tree, axis_name))
    return InPieces(
        jax.tree.map(
            lambda x: collectives.localize(x, axis_name) if jnp.ndim(x) else x, state
        )
    )


def check_pieces(
    state: InPieces, init: Callable[[Tree], Any], like: Tree, axis_name: AxisName
) -> None:
    """Refuse a state in pieces that are not those of this number of replicas."""
    replicas = collectives.axis_size(axis_name)

    def piece(x):
        size = -(-x.size // replicas)
        return jax.ShapeDtypeStruct((size,), at_least_float32(x.dtype))

    wanted = jax.eval_shape(init, jax.tree.map(piece, like))
    for (path, x), found in zip(
        jax.tree_util.tree_leaves_with_path(wanted),
        jax.tree.leaves(state.tree),
        strict=True,
    ):
        if jnp.shape(found) != x.shape:
            raise ValueError(
                f"The state at {path_name(path)} has shape {jnp.shape(found)}, but "
                f"a piece for one of {replicas} replicas has {x.shape}. Start with "
                "oxs.start_workers(tx, params, n), with oxs.stack(tx.init(params), n, "
                "axes), or call init where the axis is mapped. Inside jax.shard_map "
                "take the worker axis off, oxs.unstack(state, axes)."
            )


def _joined(
    send: Callable[[jax.Array], jax.Array],
    rows: Sequence[jax.Array],
    together: Iterable[list[int]],
) -> list[jax.Array]:
    """`send` of arrays [rows, numbers] that are joined along axis 1, and cut again.

    `together` says which ones are joined. What `send` returns has their numbers along
    the last axis.
    """
    results: list[Any] = [None] * len(rows)
    for places in together:
        widths = [rows[place].shape[1] for place in places]
        sent = jnp.concatenate([rows[place] for place in places], axis=1)
        moved = send(sent) if sent.size else sent[0]
        parts = jnp.split(moved, np.cumsum(widths)[:-1], axis=-1)
        for place, part in zip(places, parts, strict=True):
            results[place] = part
    return results


def travel(
    collective: Callable[[jax.Array, AxisName], jax.Array],
    messages: Sequence[jax.Array],
    axis_name: AxisName,
) -> list[jax.Array]:
    """Messages of bytes, uint8[rows, bytes], together in one collective over rows.

    Those that vary over other mesh axes travel apart, so that what is equal on all
    shards of a worker stays known to be so.
    """
    together: dict[frozenset[str], list[int]] = {}
    for place, message in enumerate(messages):
        together.setdefault(collectives.varying_axes(message), []).append(place)
    return _joined(
        lambda joined: collective(joined, axis_name), messages, together.values()
    )


def require_meetable(
    tree: Tree,
    axis_name: AxisName,
    who: str,
    fits: Callable[[Any], bool] = is_floating,
) -> None:
    """Refuse leaves that are not dense, whose dtype does not fit, or that are reduced.

    By default real floating dtypes fit.
    """
    require_dense(tree, who)
    for path, leaf in leaves_with_names(tree):
        if leaf is not None and not fits(jnp.result_type(leaf)):
            raise TypeError(
                f"{who} does not take dtype {jnp.result_type(leaf)}, which the leaf at "
                f"{path} has: exchanges are of real floating leaves. Use oxs.exchange."
                "all_reduce(), or leave it out with optax.masked."
            )
    collectives.require_local(tree, axis_name)


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
        return lost + collectives.weigh(mean - round_to(mean, like.dtype), weight)

    return jax.tree.map(narrow, mean, like), jax.tree.map(owe, lost, mean, like)


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
    per = 8 // bits
    if per == 1:
        return packed
    mask = np.uint8(2**bits - 1)
    parts = packed[..., None, :]
    parts = (parts >> _places(parts, bits)) & mask
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


def from_bytes(octets: jax.Array, dtype: np.dtype) -> jax.Array:
    """The numbers of which `to_bytes` made bytes."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        octets = octets.reshape(*octets.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(octets, dtype)
