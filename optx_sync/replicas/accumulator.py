# SPDX-License-Identifier: Apache-2.0
"""Accumulators: sums of gradients, dense or row-sparse, until an update takes them.

They divide as TensorFlow's do: dense gradients by the number accumulated, and each row
of a row-sparse gradient by the number of gradients that contained this row. With
weights both numbers are sums of weights.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optx_sync.core import trees
from optx_sync.core.shapes import Array, Bool
from optx_sync.core.slices import DROP, FILL, IndexedSlices, like_rows
from optx_sync.core.trees import Tree

# The dtypes of sums whose weights are kept in float64.
_WIDE = {jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)}


class Accumulator(NamedTuple):
    """What has been accumulated since the last update."""

    sums: Tree  # like the parameters, float32 for half precision
    # Like the parameters, [rows] of each in the dtype of weights, and () of a scalar:
    # the sum of the weights of the gradients that contained a row.
    row_weights: Tree


def start_accumulator(params: Tree, dtype: DTypeLike | None = None) -> Accumulator:
    """An empty accumulator for parameters or their `jax.ShapeDtypeStruct`."""
    sums = jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=trees.accumulator_dtype(p.dtype, dtype)),
        params,
    )
    dtype = weight_dtype(sums)

    def of_rows(x):  # made of the sums, so that they lie as these do
        return jnp.zeros_like(jnp.sum(x, range(1, x.ndim)), dtype=dtype)

    # Optax shall not take them for arrays of the parameters' shapes.
    other = trees.is_placeholder(params)
    return Accumulator(
        sums, of_rows(jnp.zeros(())) if other else jax.tree.map(of_rows, sums)
    )


def weight_dtype(sums: Tree) -> DTypeLike:
    """The dtype of the weights of gradients that have such sums."""
    wide = {x.dtype for x in jax.tree.leaves(sums)} & _WIDE
    return jnp.float64 if wide else jnp.float32


def accumulate(
    accumulator: Accumulator,
    grads: Tree,
    accepted: Bool[Array, ""] | bool,
    weight: ArrayLike = 1,
) -> Accumulator:
    """Add a gradient where `accepted` holds; otherwise it leaves no trace, NaN or not.

    Its weight, a scalar, multiplies it. Row-sparse leaves must have unique
    indices, as from `sum_duplicates`.
    """
    sums, row_weights = [], []
    weight = jnp.asarray(weight, weight_dtype(accumulator.sums))

    def weighed(x, dtype):
        wide = trees.at_least_float32(x.dtype)
        return (x.astype(wide) * weight.astype(wide)).astype(dtype)

    treedef, matched = _match(accumulator, grads)
    for grad, old, weights in matched:
        if grad is None:
            sums.append(old)
        elif isinstance(grad, IndexedSlices):
            indices = jnp.where(accepted, grad.indices, jnp.full_like(grad.indices, -1))
            sums.append(old.at[indices].add(weighed(grad.values, old.dtype), **DROP))
            weights = weights.at[indices].add(weight, **DROP)
        else:
            sums.append(jnp.where(accepted, old + weighed(grad, old.dtype), old))
        row_weights.append(weights)
    return Accumulator(treedef.unflatten(sums), treedef.unflatten(row_weights))


def sums_of(accumulator: Accumulator, grads: Tree) -> tuple[Tree, list[jax.Array]]:
    """(sums, weights of rows): what a mean in the form of `grads` is made of.

    The sums are a tree like `grads`, `None` where there is no gradient; the weights are
    those of the rows of each row-sparse leaf.
    """
    sums, row_weights = [], []
    treedef, matched = _match(accumulator, grads)
    for grad, own, weights in matched:
        sums.append(None if grad is None else own)
        if isinstance(grad, IndexedSlices):
            row_weights.append(weights)
    return treedef.unflatten(sums), row_weights


def mean_of(
    sums: Tree,
    row_weights: list[jax.Array],
    grads: Tree,
    count: jax.Array,
    at_most: int,
) -> Tree:
    """The mean of what was accumulated, in the form and the dtypes of `grads`.

    Args:
        sums: From `sums_of`, added up over all replicas.
        row_weights: The same.
        grads: A gradient, of which only the form, number of rows and dtypes matter.
        count: The number of gradients in the sums; with weights, the sum of these.
        at_most: The largest number of gradients that can have been accumulated.

    Returns:
        A tree like `grads`. A row-sparse leaf has min(table's rows, `at_most` times the
        rows of a gradient) entries, sorted and unique.
    """
    of_rows = iter(row_weights)

    def mean(grad, summed):
        if grad is None:
            return None
        if isinstance(grad, IndexedSlices):
            weights = next(of_rows)
            size = min(len(weights), at_most * grad.values.shape[0])
            rows = _rows_mean(summed, weights, size)
            return rows.map_values(lambda values: values.astype(grad.values.dtype))
        summed = summed.astype(trees.at_least_float32(summed.dtype))
        return (summed / count.astype(summed.dtype)).astype(grad.dtype)

    return jax.tree.map(mean, grads, sums, is_leaf=trees.is_gradient_leaf)


def clear(accumulator: Accumulator, mean: Tree, count: jax.Array) -> Accumulator:
    """What is left after an update took `mean`, of `count` gradients: nothing.

    If more rows were accumulated than `mean` has room for, the rest stay for the next
    update.
    """
    sums, row_weights = [], []
    treedef, matched = _match(accumulator, mean)
    for taken, old, weights in matched:
        if isinstance(taken, IndexedSlices):
            sums.append(old.at[taken.indices].set(0, **DROP))
            weights = weights.at[taken.indices].set(0, **DROP)
        else:
            sums.append(old if old is None else _zeros_after(taken, old, count))
        row_weights.append(weights)
    return Accumulator(treedef.unflatten(sums), treedef.unflatten(row_weights))


def _zeros_after(mean: Tree, sums: jax.Array, count: jax.Array) -> jax.Array:
    """Zeros in place of `sums`, once `mean` has been made of them.

    A count is never negative, but XLA does not know: it sees zeros that need the mean,
    and so writes them where the sums were. Zeros that depend on nothing it may write
    before the sums are read, and then it copies both.
    """
    if mean is None:
        return jnp.zeros_like(sums)
    return jnp.where(count < 0, mean.astype(sums.dtype), jnp.zeros_like(sums))


def _rows_mean(sums: jax.Array, weights: jax.Array, size: int) -> IndexedSlices:
    """The mean of the touched rows, each divided by its own weights."""
    rows = jnp.nonzero(weights > 0, size=size, fill_value=-1)[0].astype(jnp.int32)
    values = sums.at[rows].get(**FILL).astype(trees.at_least_float32(sums.dtype))
    divisor = weights.at[rows].get(**dict(FILL, fill_value=1))
    divisor = like_rows(divisor.astype(values.dtype), values)
    # Spare entries get the indices that `sum_duplicates` gives to them.
    return IndexedSlices(rows, values / divisor).sum_duplicates()


def _match(accumulator: Accumulator, grads: Tree) -> tuple[Tree, list[Tree]]:
    """(the tree of the gradients, for each (gradient, sum, weights of its rows))."""
    leaves, treedef = jax.tree.flatten(grads, is_leaf=trees.is_gradient_leaf)
    own = map(treedef.flatten_up_to, accumulator)
    return treedef, list(zip(leaves, *own, strict=True))
