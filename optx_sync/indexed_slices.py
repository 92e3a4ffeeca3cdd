# SPDX-License-Identifier: Apache-2.0
"""Row-sparse gradients: the rows of a table that a batch touched, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LAST_INDEX = 2**31 - 1
# Indices from here on name no row: `sum_duplicates` fills its unused entries with
# them. 2^28 rows in one gradient, and tables of 2^31 - 2^28 rows, are room enough.
_FIRST_PADDING = 2**31 - 2**28


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices:
    """Some rows of a gradient (or update) of a table; all other rows are zero.

    It stands for the dense array ``zeros(table.shape).at[indices].add(values)``: an
    index may occur more than once, and its rows add up. Rows out of range, negative
    ones included, are dropped and never wrapped to another row; where the indices are
    known (outside of compiled code) ``table + slices`` refuses them instead.

    It is a pytree of two leaves. What is not aware of slices sees the indices as an
    array of an extended dtype, which refuses arithmetic: ``optax.scale(2.0)`` on such
    a leaf raises a ``TypeError``, it does not move rows. Use ``oxs.on_values`` to run
    such a transformation on the values alone.

    Args:
        indices: int32[k], the rows; any integer dtype, held as int32.
        values: [k, ...], the values of these rows.

    Raises:
        TypeError: if the indices are not integers.
        ValueError: if the shapes do not fit, or a known index does not fit into int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> slices = oxs.IndexedSlices(jnp.array([2, 0, 2]), jnp.ones([3, 2]))
        >>> (jnp.zeros([4, 2]) + slices)[:, 0].tolist()
        [1.0, 0.0, 2.0, 0.0]

    Reference: ``tf.IndexedSlices``.
    """

    __slots__ = ("_words", "_values")

    # NumPy arrays on the left leave the sum to `__radd__`.
    __array_ufunc__ = None

    def __init__(self, indices: Any, values: Any):
        values = jnp.asarray(values)
        words = _hide(indices)
        if words.ndim != 1:
            raise ValueError(
                f"indices must have one axis, [k]; got shape {words.shape}. Pass "
                "indices.reshape(-1) and values.reshape(-1, *row_shape)."
            )
        if values.shape[:1] != words.shape:
            raise ValueError(
                "values must have one row for each index; got indices of shape "
                f"{words.shape} and values of shape {values.shape}."
            )
        if words.shape[0] > 2**31 - _FIRST_PADDING:
            raise ValueError(
                f"At most 2**28 rows fit into one IndexedSlices; got {words.shape[0]}. "
                "Use a dense gradient."
            )
        self._words = words
        self._values = values

    @property
    def indices(self) -> jax.Array:
        """The rows, int32[k]."""
        if isinstance(self._words, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._words.shape, jnp.int32)  # pyright: ignore[reportReturnType] # an abstract array stands for the array
        words = jax.random.key_data(self._words)
        return lax.bitcast_convert_type(words[..., 1], jnp.int32)

    @property
    def values(self) -> jax.Array:
        """The values of the rows, [k, ...]."""
        return self._values

    def map_values(self, fn: Callable[[jax.Array], Any]) -> "IndexedSlices":
        """The same rows with ``fn(values)`` for values."""
        return _rebuild(self._words, fn(self._values))

    def sum_duplicates(self) -> "IndexedSlices":
        """Each row once, in ascending order, the values of equal rows added up.

        The size stays k, so that it compiles: entries left over hold zeros, and
        distinct ascending indices near the int32 maximum, out of range of any table.
        The result may therefore be scattered with ``indices_are_sorted=True,
        unique_indices=True, mode="drop"``. Negative rows become such entries. It costs
        O(k log k) whatever the size of the table; half precision values are added up
        in float32 and rounded once.

        Returns:
            Slices of the same size and dtype, sorted and unique.

        Example:
            >>> import jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> slices = oxs.IndexedSlices(jnp.array([7, 3, 7]), jnp.arange(3.0))
            >>> unique = slices.sum_duplicates()
            >>> unique.indices.tolist(), unique.values.tolist()
            ([3, 7, 2147483647], [0.0, 2.0, 0.0])
        """
        if self._words.ndim > 1:
            return jax.vmap(IndexedSlices.sum_duplicates)(self)
        size = self._words.shape[0]
        if size == 0:
            return self
        indices = self.indices
        named = (indices >= 0) & (indices < _FIRST_PADDING)
        indices = jnp.where(named, indices, _LAST_INDEX)
        positions = lax.iota(jnp.int32, size)
        indices, order = lax.sort((indices, positions), num_keys=1)
        first = jnp.concatenate(
            [jnp.ones_like(named[:1]), indices[1:] != indices[:-1]], dtype=jnp.bool_
        )
        target = jnp.cumsum(first, dtype=jnp.int32) - 1
        # The k-th row of the result is where its run of equal rows begins.
        starts = jnp.searchsorted(target, positions).astype(jnp.int32)
        unique = indices.at[starts].get(mode="fill", fill_value=_LAST_INDEX)
        padding = _LAST_INDEX - (size - 1) + positions
        wide = _at_least_float32(self._values.dtype)
        summed = jax.ops.segment_sum(
            self._values[order].astype(wide),
            target,
            num_segments=size,
            indices_are_sorted=True,
        )
        is_row = unique < _FIRST_PADDING
        summed = jnp.where(
            lax.expand_dims(is_row, range(1, summed.ndim)),
            summed,
            jnp.zeros_like(summed),
        )
        return _rebuild(
            _hide(jnp.where(is_row, unique, padding)), summed.astype(self._values.dtype)
        )

    def to_dense(self, rows: int) -> jax.Array:
        """The dense array ``[rows, ...]``; rows out of range are dropped."""
        if self._words.ndim > 1:
            return jax.vmap(lambda slices: slices.to_dense(rows))(self)
        wide = _at_least_float32(self._values.dtype)
        dense = jnp.zeros((rows, *self._values.shape[1:]), wide)
        dense = dense.at[self.indices].add(
            self._values.astype(wide), mode="drop", wrap_negative_indices=False
        )
        return dense.astype(self._values.dtype)

    def __radd__(self, table: Any) -> jax.Array:
        if not isinstance(table, jax.Array | np.ndarray):
            return NotImplemented
        table = jnp.asarray(table)
        check_rows(self, table)
        add = _scatter_add
        for _ in range(self._words.ndim - 1):
            add = jax.vmap(add)
        return add(table, self)

    __add__ = __radd__

    def __repr__(self) -> str:
        if isinstance(self._words, jax.Array | jax.ShapeDtypeStruct):
            return f"IndexedSlices(indices={self.indices}, values={self._values})"
        return f"IndexedSlices(indices={self._words!r}, values={self._values!r})"

    def tree_flatten_with_keys(self):  # noqa: D102 # JAX's protocol
        key = jax.tree_util.GetAttrKey
        return (((key("indices"), self._words), (key("values"), self._values)), None)

    def tree_flatten(self):  # noqa: D102 # JAX's protocol
        return (self._words, self._values), None

    @classmethod
    def tree_unflatten(cls, _, leaves):  # noqa: D102 # JAX's protocol
        return _rebuild(*leaves)


def check_rows(slices: IndexedSlices, table: Any, path: str = "") -> None:
    """Refuse slices that do not fit a table.

    Args:
        slices: the rows, with as many leading batch axes as the table has.
        table: an array, or anything that has its shape.
        path: the leaf's path, for the message.

    Raises:
        ValueError: if a row of the values has another shape than a row of the table,
            or if an index is known (not traced) and out of the table's range. The
            entries that ``sum_duplicates`` leaves over pass.
    """
    where = f" at {path}" if path else ""
    batch = slices._words.ndim - 1
    shape, values_shape = tuple(table.shape), tuple(slices.values.shape)
    if (
        len(shape) <= batch
        or shape[:batch] != values_shape[:batch]
        or shape[batch + 1 :] != values_shape[batch + 1 :]
    ):
        raise ValueError(
            f"IndexedSlices{where} do not fit their table: the values, one row for "
            f"each index, must have shape [k, ...] where the table has [rows, ...]; "
            f"got values of shape {values_shape} and a table of shape {shape}."
        )
    rows = shape[batch]
    if rows > _FIRST_PADDING:
        raise ValueError(
            f"A table{where} of {rows} rows is too long for int32 row indices: at most "
            f"{_FIRST_PADDING} rows are supported. Split the table."
        )
    indices = _known_indices(slices)
    if indices is None:
        return
    bad = (indices < 0) | ((indices >= rows) & (indices < _FIRST_PADDING))
    if bad.any():
        raise ValueError(
            f"IndexedSlices{where} name row {int(indices[bad][0])}, which is out of "
            f"range for a table of {rows} rows. Pass indices in [0, {rows}): rows are "
            "never wrapped."
        )


def _rebuild(words: Any, values: Any) -> IndexedSlices:
    """Slices of leaves as they are: JAX puts all sorts of things there."""
    slices = object.__new__(IndexedSlices)
    slices._words = words
    slices._values = values
    return slices


def _hide(indices: Any) -> jax.Array:
    """Integers as an array of an extended dtype, which knows no arithmetic."""
    if not isinstance(indices, jax.Array):
        indices = np.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"indices must be integers, they name rows; got dtype {indices.dtype}. "
            "Pass indices.astype(jnp.int32)."
        )
    if isinstance(indices, jax.core.Tracer):
        return _hide_words(indices)
    if isinstance(indices, np.ndarray) or indices.is_fully_addressable:
        bounds = jnp.iinfo(indices.dtype)
        if bounds.max > _LAST_INDEX and indices.size:
            known = np.asarray(indices)
            if known.max() > _LAST_INDEX or known.min() < -_LAST_INDEX - 1:
                raise ValueError(
                    "indices must fit into int32; got values in "
                    f"[{known.min()}, {known.max()}]."
                )
            indices = known.astype(np.int32)
        # What is known stays known while tracing, so that it can be checked.
        with jax.ensure_compile_time_eval():
            return _hide_words(jnp.asarray(indices))
    return _hide_words(indices)


def _hide_words(indices: jax.Array) -> jax.Array:
    bounds = jnp.iinfo(indices.dtype)
    low = max(int(bounds.min), -_LAST_INDEX - 1)
    high = min(int(bounds.max), _LAST_INDEX)
    if (low, high) != (bounds.min, bounds.max):
        # A cast would wrap 2^32 to row 0; the bounds stay out of range.
        indices = jnp.clip(indices, low, high)
    word = lax.bitcast_convert_type(indices.astype(jnp.int32), jnp.uint32)
    words = jnp.stack([jnp.zeros_like(word), word], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _known_indices(slices: IndexedSlices) -> np.ndarray | None:
    """The indices as numbers where they are not traced, else None."""
    words = slices._words
    if isinstance(words, jax.core.Tracer) or not isinstance(words, jax.Array):
        return None
    if not words.is_fully_addressable:
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(slices.indices)


def _at_least_float32(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return dtype


def _scatter_add(table: jax.Array, slices: IndexedSlices) -> jax.Array:
    """``table + slices`` in the wider dtype, rounded once to the table's."""
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(table.dtype, slices.values.dtype)
    if wide == table.dtype == _at_least_float32(table.dtype):
        return table.at[slices.indices].add(
            slices.values.astype(wide), mode="drop", wrap_negative_indices=False
        )
    # Each row is read, added to and rounded once, so it must occur once.
    unique = slices.map_values(lambda values: values.astype(wide)).sum_duplicates()
    at = table.at[unique.indices]
    rows = at.get(
        mode="fill",
        fill_value=0,
        indices_are_sorted=True,
        unique_indices=True,
        wrap_negative_indices=False,
    )
    return at.set(
        (rows.astype(wide) + unique.values).astype(table.dtype),
        mode="drop",
        indices_are_sorted=True,
        unique_indices=True,
        wrap_negative_indices=False,
    )
