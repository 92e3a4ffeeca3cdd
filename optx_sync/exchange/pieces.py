# SPDX-License-Identifier: Apache-2.0
"""Pieces: scatter and gather what replica i owns of every array of a tree.

Meetings in two hops are made of these: `scatter` sums, at its owner, what all replicas
have of a piece, and `gather` gives every owner's piece to all.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optx_sync.comm import buffers, collectives
from optx_sync.comm.collectives import AxisName, axis_index, axis_size
from optx_sync.comm.reduce import own_weight, reduce, weigh, weight_divisor
from optx_sync.comm.varying import localize_where_mapped, require_local
from optx_sync.core.shapes import Array, Float, UInt8
from optx_sync.core.trees import (
    Tree,
    at_least_float32,
    is_floating,
    path_name,
    round_to,
)
from optx_sync.exchange.contract import Code, Exchange, Met, require_dense, summed
from optx_sync.state.fields import InPieces

# (buffers w_i x_i, the weight, the axis) -> (the means of these buffers, what this
# replica owes of each, the sum of the weights).
MeetBuffers: TypeAlias = Callable[
    [list[Float[Array, " numbers"]], Float[Array, ""] | None, AxisName],
    tuple[list[Float[Array, " padded"]], list[Float[Array, " padded"]], jax.Array],
]


# A message of whole lines of so many bytes travels as these: one long axis of bytes XLA
# fills up to eight times its size on TPUs, and takes ten times as long to compile.
LINE = 256
# Of fewer lines one more would be a large part of a message.
_MANY = 64


def joined(
    who: str, meet_buffers: MeetBuffers, code: Code, bucket_bytes: int
) -> Exchange:
    """An exchange that meets in buckets of all leaves of one dtype, without memory.

    Half precision leaves travel as float32.
    """

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, who)
        weight = own_weight(weight, axis_name)
        leaves = [buffers.wide(x).reshape(-1) for x in jax.tree.leaves(tree)]
        joint = buffers.Joint(leaves, bucket_bytes=bucket_bytes)
        own = [weigh(x, weight) for x in joint.join(leaves)]
        means, lost, total = meet_buffers(own, weight, axis_name)
        mean, lost = narrowed(joint.cut(means), joint.cut(lost), tree, weight)
        return Met(mean, total, lost, state, summed(also, axis_name))

    return Exchange(
        lambda tree: (),
        meet,
        linear=True,
        takes_weights=True,
        remembers=False,
        code=code,
        bucket_bytes=bucket_bytes,
    )


def cut(tree: Tree, axis_name: AxisName | None) -> Tree:
    """This replica's flat piece of every array of a tree that is equal on all replicas.

    An array of n numbers has pieces of ceil(n / N), the last ones padded with zeros;
    with `axis_name=None` it is one piece. Half precision becomes float32.
    """
    replicas = 1 if axis_name is None else axis_size(axis_name)

    def piece(x):
        rows = buffers.in_rows(buffers.wide(x).reshape(-1), replicas)
        if axis_name is None:
            return rows[0]
        return jax.lax.dynamic_index_in_dim(rows, axis_index(axis_name), keepdims=False)

    return jax.tree.map(piece, tree)


def shapes_too(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`function(tree)`; for a tree of `jax.ShapeDtypeStruct`, the shapes of that."""
    leaves = jax.tree.leaves(tree)
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    return jax.eval_shape(function, tree) if shapes else function(tree)


def scatter(
    tree: Tree,
    axis_name: AxisName,
    *,
    weight: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    bucket_bytes: int = buffers.BUCKET_BYTES,
) -> Tree:
    """Reduce-scatter: the mean over the replicas of this replica's piece of each array.

    Pieces are those of `cut`. The arrays of one dtype that fill a bucket travel in one
    reduce-scatter, half of an all-reduce; half precision travels as float32. `weight`
    and `dtype` are those of `reduce`.
    """
    divisor = replicas = axis_size(axis_name)
    own = own_weight(weight, axis_name)
    if own is not None:
        # Normalised before they travel: a sum of token counts may overflow `dtype`.
        own = own / weight_divisor(reduce(own, axis_name, reduction="sum"))
        divisor = 1

    def send(rows: jax.Array) -> jax.Array:
        wide = rows.dtype
        asked = dtype if dtype is not None and is_floating(wide) else wide
        many, sent = jnp.asarray(divisor, wide), weigh(rows, own)
        # In a narrow dtype the mean fits where the sum may overflow: divided first.
        first = asked != at_least_float32(asked)
        sent = (sent / many if first else sent).astype(asked)
        total = collectives.scatter_sum(sent.reshape(-1), axis_name).astype(wide)
        return total if first else total / many

    leaves, treedef = jax.tree.flatten(tree)
    rows = [buffers.in_rows(buffers.wide(x).reshape(-1), replicas) for x in leaves]
    sent = buffers.through(send, rows, buffers.joinable(), bucket_bytes)
    return treedef.unflatten(buffers.flat(sent))


def gather(
    pieces: Tree,
    like: Tree,
    axis_name: AxisName,
    bucket_bytes: int = buffers.BUCKET_BYTES,
) -> Tree:
    """All-gather: the whole arrays of which each replica has a piece.

    They are equal on all replicas. The pieces of one dtype whose arrays fill a bucket
    travel in one all-gather.

    Args:
        pieces: A tree of pieces as `cut` makes them; `None` where there is none.
        like: A tree of arrays whose shapes and dtypes the results get; `None` where
            the dtype and shape are those of the piece.
        axis_name: The mapped axis.
        bucket_bytes: How many bytes one collective brings.
    """
    replicas = axis_size(axis_name)

    def send(rows: jax.Array) -> jax.Array:
        # Bytes, because XLA may widen narrow floating dtypes.
        words = {1: jnp.uint8, 2: jnp.uint16}.get(rows.dtype.itemsize, rows.dtype)
        sent = jax.lax.bitcast_convert_type(rows, words).reshape(-1)
        whole = collectives.gather(sent, axis_name)
        return jax.lax.bitcast_convert_type(whole, rows.dtype).reshape(replicas, -1)

    leaves, treedef = jax.tree.flatten(pieces, is_leaf=lambda x: x is None)
    pairs = zip(leaves, treedef.flatten_up_to(like), strict=True)
    pairs = [(piece, whole) for piece, whole in pairs if piece is not None]
    rows = [round_to(x, whole.dtype).astype(whole.dtype)[None] for x, whole in pairs]
    # A bucket is full by what arrives, not by what is sent.
    found = buffers.through(send, rows, buffers.joinable(), bucket_bytes / replicas)
    full = (buffers.shaped(x, like) for x, (_, like) in zip(found, pairs, strict=True))
    return treedef.unflatten(None if x is None else next(full) for x in leaves)


def own_pieces(
    init: Callable[[Tree], Tree],
    tree: Tree,
    axis_name: AxisName,
    cut: Callable[[Tree, AxisName | None], Tree] = cut,
) -> InPieces:
    """`init` on this replica's pieces of a tree; on all of it where no axis is mapped.

    Its arrays vary over the axis, its scalars do not.
    """
    of = axis_name if collectives.is_mapped(axis_name) else None
    state = init(shapes_too(lambda tree: cut(tree, of), tree))

    def own(x):
        return localize_where_mapped(x, axis_name) if jnp.ndim(x) else x

    whole = jax.eval_shape(lambda tree: init(cut(tree, None)), tree)
    sizes = tuple(x.size if x.ndim else 1 for x in jax.tree.leaves(whole))
    return InPieces(jax.tree.map(own, state), sizes)


def check_pieces(
    state: InPieces,
    init: Callable[[Tree], Tree],
    like: Tree,
    axis_name: AxisName,
    cut: Callable[[Tree, AxisName | None], Tree] = cut,
) -> None:
    """Refuse a state in pieces that was cut for another number of replicas."""
    replicas = axis_size(axis_name)
    wanted = jax.eval_shape(lambda like: init(cut(like, axis_name)), like)
    wanted = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, x), found in zip(wanted, jax.tree.leaves(state.tree), strict=True):
        if jnp.shape(found) != x.shape:
            raise ValueError(
                f"The state at {path_name(path)} has shape {jnp.shape(found)}, but a"
                f" piece for one of {replicas} replicas has {x.shape}. Start with"
                " oxs.Workers(n, axis_name).start(state), with"
                " oxs.by_hand.replicate(state, n, axes), or call init where the axis"
                " is mapped. Inside jax.shard_map take the worker axis off,"
                " oxs.by_hand.first(state, axes)."
            )


def travel(
    collective: Callable[[jax.Array, AxisName], jax.Array],
    messages: Sequence[UInt8[Array, "rows _"]],
    weight: Float[Array, ""] | None,
    axis_name: AxisName,
    bucket_bytes: float,
    rows: int = 1,
) -> tuple[list[UInt8[Array, "replicas _"]], Float[Array, ""]]:
    """Send messages of bytes together with the weights; and the sum of the weights.

    Without weights the sum is the number of replicas.
    """
    sent, carrier, share = list(messages), 0, None
    if weight is not None:
        share = buffers.to_bytes(weight[None])
        share = jnp.broadcast_to(share, (rows, share.size))
        kinds = list(map(buffers.alike, sent))
        if buffers.alike(share) not in kinds:
            sent.append(share[:, :0])
            kinds = [*kinds, buffers.alike(share)]
        carrier = kinds.index(buffers.alike(share))
        # With a line of its own where the message is large and has whole lines.
        lines, rest = divmod(sent[carrier].shape[1], LINE)
        spare = 0 if rest or lines < _MANY else -share.shape[1] % LINE
        share = jnp.pad(share, ((0, 0), (0, spare)))
        sent[carrier] = jnp.concatenate([sent[carrier], share], axis=1)
    # The codes of a full bucket at 4 bits. A replica sends one row of it, or all rows.
    full = bucket_bytes / 8 * rows / axis_size(axis_name)

    def send(x):
        lines = x if x.shape[1] % LINE else x.reshape(len(x), -1, LINE)
        return collective(lines, axis_name).reshape(-1, x.shape[1])

    arrived = buffers.through(send, sent, bucket_bytes=full)
    if weight is None or share is None:
        return arrived, jnp.float32(axis_size(axis_name))
    end = sent[carrier].shape[1] - share.shape[1]
    shares = arrived[carrier][:, end : end + weight.dtype.itemsize]
    arrived[carrier] = arrived[carrier][:, :end]
    total = jnp.sum(buffers.from_bytes(shares, weight.dtype))
    return arrived[: len(messages)], total


def require_meetable(
    tree: Tree,
    axis_name: AxisName,
    who: str,
    fits: Callable[[np.dtype], bool] = is_floating,
) -> None:
    """Refuse leaves that are row-sparse, of the wrong dtype, or reduced already.

    By default real floating dtypes are right.
    """
    require_dense(tree, who)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not fits(jnp.result_type(leaf)):
            raise TypeError(
                f"{who} does not take dtype {jnp.result_type(leaf)}, which the leaf at "
                f"{path_name(path)} has: exchanges are of real floating leaves. Use "
                "oxs.exchange.all_reduce(), or leave it out with optax.masked."
            )
    require_local(tree, axis_name)


def narrowed(
    mean: Sequence[jax.Array],
    lost: Sequence[jax.Array],
    like: Tree,
    weight: jax.Array | None,
) -> tuple[Tree, Tree]:
    """A mean in the dtypes of another tree, and the loss with what this rounds off.

    All replicas round the same mean. Each owes its share, by its weight.
    """
    leaves, treedef = jax.tree.flatten(like)
    means, owed = [], []
    for x, m, own in zip(leaves, mean, lost, strict=True):
        m, own = m.reshape(x.shape), own.reshape(x.shape)
        rounded = round_to(m, x.dtype)
        means.append(rounded.astype(x.dtype))
        owed.append(own if m.dtype == x.dtype else own + weigh(m - rounded, weight))
    return treedef.unflatten(means), treedef.unflatten(owed)
