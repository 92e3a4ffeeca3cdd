# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: low-rank compression of matrices, by one step of power iteration."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.comm import buffers
from optx_sync.comm.reduce import own_weight, reduce, reduce_and_sum, weigh
from optx_sync.comm.varying import localize, sum_shards, vary_like
from optx_sync.core.checks import integer, interval
from optx_sync.core.shapes import Array, Float
from optx_sync.core.trees import Tree, is_masked, leaves_with_names, path_name
from optx_sync.exchange.contract import Code, Exchange, Met
from optx_sync.exchange.pieces import narrowed, require_meetable
from optx_sync.state.fields import LIKE_PARAMS, declare


@declare(factors=LIKE_PARAMS)
class PowerSGDState(NamedTuple):
    """State of `power_sgd`, equal on all replicas."""

    # Like the tree: float32[rank, ...] for a leaf (n, ...), its last Q transposed, and
    # `optax.MaskedNode` for a leaf that travels whole.
    factors: Tree


def power_sgd(rank: int = 1, min_rate: float = 2) -> Exchange:
    r"""PowerSGD, low-rank gradient compression: two factors of each matrix travel.

    A leaf of shape (n, ...) is a matrix X of n rows and m columns. With Q from the last
    call, its columns made orthonormal, w_i the weights and W their sum:

    .. math::

        P &= \text{orthonormal}\Big(\frac{1}{W} \sum_i w_i X_i Q\Big) \\
        Q &= \frac{1}{W} \sum_i w_i X_i^T P \\
        \text{mean} &= P Q^T \\
        \text{lost}_i &= w_i\, (X_i - P P^T X_i)

    Q is remembered: over the rounds it turns to the directions in which the matrices
    are largest. Two all-reduces send rank (n + m) numbers per matrix. Vectors, scalars
    and matrices that this would not make `min_rate` times smaller travel whole, in the
    first of them. Leaves keep their shapes, so that a sharded worker stays sharded.
    Where its shards' axes are manual too (`jax.shard_map`), each shard is a matrix of
    its own, and shards of the same columns have one Q.

    Use it as `error_feedback(power_sgd(...))`: alone it never sends what lies outside
    of its `rank` directions. A NaN makes the mean of its leaf NaN, and leaves Q as it
    was.

    Args:
        rank: Columns of P and Q, 1 or more; at most min(n, m) of them are used.
        min_rate: How many times smaller a matrix must become to be compressed.

    Returns:
        A linear exchange that remembers Q, of dense real floating leaves.

    Raises:
        ValueError: `rank` below 1, a `min_rate` that is not positive; at the call, a
            leaf that is row-sparse or does not vary over the axis, a gradient that is
            `None` where there was a parameter.
        TypeError: `rank` is no integer; at the call, a leaf that is not floating.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.power_sgd(rank=1)
        >>> def mean(x):
        ...     return exchange.meet(x, exchange.init(x), "pods").mean
        >>> x = jnp.ones((2, 8, 8)) * jnp.array([1.0, 3.0])[:, None, None]
        >>> bool(jnp.allclose(jax.vmap(mean, axis_name="pods")(x), 2.0))
        True

    References:
        Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
        Compression for Distributed Optimization", 2019, arXiv 1905.13727.
    """
    rank = integer("rank", rank, "The default is 1.")
    interval("(0, inf)", "The default is 2.", min_rate=min_rate)

    def size_of(leaf) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a leaf to be compressed, else None."""
        if leaf.ndim < 2 or leaf.size == 0:
            return None
        rows, columns = leaf.shape[0], math.prod(leaf.shape[1:])
        used = min(rank, rows, columns)
        worth = (rows + columns) * used * min_rate < rows * columns
        return (rows, columns, used) if worth else None

    def init(tree):
        leaves, treedef = jax.tree.flatten(tree)
        sizes = [size_of(leaf) for leaf in leaves]
        numbers = [0 if size is None else size[1] * size[2] for size in sizes]
        # Drawn from a fixed key, so equal on all replicas.
        drawn = jax.random.normal(jax.random.key(0), (sum(numbers),))
        parts = jnp.split(drawn, np.cumsum(numbers)[:-1]) if leaves else []

        factors: list[Any] = [optax.MaskedNode()] * len(leaves)
        for place, (leaf, size) in enumerate(zip(leaves, sizes, strict=True)):
            if size is not None:
                last = parts[place].reshape(*size[1:]).T
                last = last.reshape(size[2], *leaf.shape[1:])
                factors[place] = vary_like(last, leaf)
        return PowerSGDState(treedef.unflatten(factors))

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "power_sgd")
        weight = own_weight(weight, axis_name)
        leaves, treedef = jax.tree.flatten(tree)
        factors = _factors_of(tree, state.factors)
        wide = [buffers.wide(leaf) for leaf in leaves]
        low = [i for i, factor in enumerate(factors) if not is_masked(factor)]
        matrices = {i: wide[i].reshape(leaves[i].shape[0], -1) for i in low}
        # Leaves that travel whole do so with the first factors.
        first = list(wide)
        for i in low:
            last = factors[i].reshape(len(factors[i]), -1).T.astype(wide[i].dtype)
            first[i] = matrices[i] @ _orthonormal(last)
        first, also, total = reduce_and_sum(first, axis_name, also, weight=weight)
        left = {i: _orthonormal(first[i]) for i in low}
        right = reduce([matrices[i].T @ left[i] for i in low], axis_name, weight=weight)
        lost = [jnp.zeros_like(x) for x in wide]
        for i, factor in zip(low, right, strict=True):
            first[i] = (left[i] @ factor.T).reshape(leaves[i].shape)
            kept = left[i] @ (left[i].T @ matrices[i])
            lost[i] = weigh(wide[i] - kept.reshape(leaves[i].shape), weight)
            # Shards of the rows share one Q, as they did when it was drawn.
            new = factor.T.reshape(factors[i].shape).astype(jnp.float32)
            new = sum_shards(new, factors[i])
            factors[i] = jnp.where(jnp.isfinite(new), new, factors[i])
        mean, lost = narrowed(first, lost, tree, weight)
        state = PowerSGDState(localize(treedef.unflatten(factors), axis_name))
        return Met(mean, total, lost, state, also)

    def encode(x, state):
        size = size_of(x)
        if size is None:
            return x, jnp.zeros_like(x), state
        rows, columns, used = size
        matrix = x.reshape(rows, columns)
        last = state.factors.reshape(used, columns).T.astype(x.dtype)
        left = _orthonormal(matrix @ _orthonormal(last))
        right = matrix.T @ left
        message = jnp.concatenate([left.reshape(-1), right.reshape(-1)])
        new = right.T.reshape(state.factors.shape).astype(jnp.float32)
        factors = jnp.where(jnp.isfinite(new), new, state.factors)
        return message, x - decode(message, x), PowerSGDState(factors)

    def decode(message, like):
        size = size_of(like)
        if size is None:
            return message
        rows, columns, used = size
        left, right = jnp.split(message, [rows * used])
        product = left.reshape(rows, used) @ right.reshape(columns, used).T
        return product.reshape(like.shape)

    code = Code(encode, decode)
    return Exchange(init, meet, linear=True, takes_weights=True, code=code)


def _orthonormal(matrix: Float[Array, "n m"]) -> Float[Array, "n _"]:
    return jnp.linalg.qr(matrix)[0]


def _factors_of(tree: Tree, factors: Tree) -> list[Any]:
    """The last Q of each leaf; refuse leaves other than those of `init`."""
    kept = dict(jax.tree_util.tree_leaves_with_path(factors, is_leaf=is_masked))
    # Both trees mask what a part does not have.
    found = dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked))
    if kept.keys() != found.keys():
        paths = [path for path, leaf in leaves_with_names(tree) if leaf is None]
        raise ValueError(
            f"power_sgd remembers factors of {len(kept)} leaves, and these are "
            f"{len(found)}; leaves that are None: {paths or 'none'}. Its leaves must "
            "be those of init: give zeros for a gradient that is missing."
        )
    for path, factor in kept.items():
        if is_masked(factor):
            continue
        used, *columns = factor.shape
        shape = found[path].shape
        if columns != list(shape[1:]) or used > min(shape[0], math.prod(columns)):
            raise ValueError(
                f"The leaf at {path_name(path)} has shape {shape}, which does not fit "
                f"the factor of shape {factor.shape} that power_sgd remembers, [rank, "
                "columns]. Where a worker is in shards, place the state as oxs."
                "state_specs(tx, params, param_specs, worker_axis) says, and let no "
                "shard have fewer rows or columns than `rank`."
            )
    return [factor for path, factor in kept.items() if not is_masked(found[path])]
