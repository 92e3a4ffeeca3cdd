# SPDX-License-Identifier: Apache-2.0
"""`IndexedSlices`: row-sparse gradients, the rows of a table that a batch touched."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from optx_sync.core.shapes import Array, Bool, Int32, Key
from optx_sync.core.trees import SlicesLeaf, Tree, at_least_float32, is_slices

# Rows as users may pass them: an array, or a list of numbers.
Numbers: TypeAlias = ArrayLike | Sequence[Any]
Rows: TypeAlias = Int32[Array, " k"]
LAST_INDEX = 2**31 - 1
# Indices from here on name no row: `sum_duplicates` puts them into unused entries.
# That leaves room for 2^28 rows in one gradient, and tables of 2^31 - 2^28 rows.
FIRST_PADDING = 2**31 - 2**28
# Rows are read and written so that ids out of range are dropped, never wrapped.
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
FILL: dict[str, Any] = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
# For indices that `sum_duplicates` has sorted.
ORDERED: dict[str, Any] = {"indices_are_sorted": True, "unique_indices": True}


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices(SlicesLeaf):
    """A row-sparse gradient (or update) of a table: some rows; all others are zero.

    It stands for the dense array ``zeros(table.shape).at[indices].add(values)``: an
    index may occur more than once, and its rows add up. Rows out of range, negative
    ones included, are dropped and never wrapped to another row; where the indices are
    known (outside of compiled code) ``table + slices`` refuses them instead.

    It is a pytree of two leaves. To other code the indices are an array of an extended
    dtype, which refuses arithmetic: ``optax.scale(2.0)`` on such a leaf raises a
    ``TypeError`` instead of moving rows. ``oxs.on_values`` runs such a transformation
    on the values alone.

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

    The original is ``tf.IndexedSlices``.
    """

    __slots__ = ("_values", "_words")

    # NumPy arrays on the left leave the sum to `__radd__`.
    __array_ufunc__ = None

    def __init__(self, indices: Numbers, values: ArrayLike):
        values = jnp.asarray(values)
        words = _hide(indices)
        fits = words.ndim == 1 and words.size <= 2**31 - FIRST_PADDING
        if not fits or values.shape[:1] != words.shape:
            raise ValueError(
                "indices must be [k], at most 2**28 of them, and values have one row "
                f"for each index, [k, ...]; got indices of shape {words.shape} and "
                f"values of shape {values.shape}. Pass indices.reshape(-1) and "
                "values.reshape(-1, *row_shape), or a dense gradient."
            )
        self._words = words
        self._values = values

    @property
    def indices(self) -> Any:
        """The rows, int32[k]; abstract where the slices are."""
        if isinstance(self._words, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._words.shape, jnp.int32)
        return show(self._words)

    @property
    def values(self) -> jax.Array:
        """The values of the rows, [k, ...]."""
        return self._values

    def map_values(self, fn: Callable[[jax.Array], Any]) -> "IndexedSlices":
        """The same rows, with ``fn(values)`` as their values."""
        return rebuild(self._words, fn(self._values))

    def sum_duplicates(self) -> "IndexedSlices":
        """Add up the values of equal rows; each row once, in ascending order.

        The size stays k, as compiled code needs it: unused entries hold zeros, and
        distinct ascending indices near the int32 maximum, out of range of any table.
        So the result may be scattered with ``indices_are_sorted=True,
        unique_indices=True, mode="drop"``. Negative rows become unused entries. It
        costs O(k log k) whatever the size of the table; half precision values are added
        up in float32 and rounded once.

        Returns:
            Slices of the same size and dtype, sorted and unique.

        Example:
            >>> import jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> slices = oxs.IndexedSlices(jnp.array([7, 3, 7]), jnp.arange(3.0))
            >>> unique = slices.sum_duplicates()
            >>> unique.indices.tolist(), unique.values.tolist()
            ([3, 7, 2147483647], [1.0, 2.0, 0.0])
        """
        if self._words.ndim > 1:
            return jax.vmap(IndexedSlices.sum_duplicates)(self)
        if self._words.shape[0] == 0:
            return self
        unique, named = unique_indices(self.indices)
        values = self._values.astype(at_least_float32(self._values.dtype))
        target = search(unique, named)
        summed = jnp.zeros_like(values).at[target].add(values, mode="drop")
        is_row = like_rows(unique < FIRST_PADDING, summed)
        summed = jnp.where(is_row, summed, jnp.zeros_like(summed))
        return rebuild(hide_words(unique), summed.astype(self._values.dtype))

    def to_dense(self, rows: int) -> jax.Array:
        """The dense array ``[rows, ...]``; rows out of range are dropped."""
        if self._words.ndim > 1:
            return jax.vmap(lambda slices: slices.to_dense(rows))(self)
        wide = at_least_float32(self._values.dtype)
        dense = jnp.zeros((rows, *self._values.shape[1:]), wide)
        dense = dense.at[self.indices].add(self._values.astype(wide), **DROP)
        return dense.astype(self._values.dtype)

    def __radd__(self, table: object) -> jax.Array:
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

    def tree_flatten_with_keys(self) -> tuple[tuple[object, ...], None]:  # noqa: D102 # JAX's protocol
        key = jax.tree_util.GetAttrKey
        return (((key("indices"), self._words), (key("values"), self._values)), None)

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> "IndexedSlices":  # noqa: D102 # JAX's protocol
        return rebuild(*leaves)


def unique_rows(grads: Tree) -> Tree:
    """Add up equal rows in the row-sparse leaves of gradients."""
    return jax.tree.map(
        lambda g: g.sum_duplicates() if is_slices(g) else g, grads, is_leaf=is_slices
    )


def check_rows(slices: IndexedSlices, table: Tree, path: str = "") -> None:
    """Raise if slices do not fit a table.

    Args:
        slices: the rows, with as many leading batch axes as the table has.
        table: an array, or anything that has its shape.
        path: the leaf's path, for the message.

    Raises:
        ValueError: if a row of the values has another shape than a row of the table,
            or if an index is known (not traced) and out of the table's range. The
            entries that ``sum_duplicates`` leaves unused pass.
    """
    where = f" at {path}" if path else ""
    batch = slices._words.ndim - 1
    shape, values_shape = tuple(table.shape), tuple(slices.values.shape)
    fits = len(shape) > batch and shape[:batch] == values_shape[:batch]
    fits = fits and shape[batch + 1 :] == values_shape[batch + 1 :]
    if not fits or shape[batch] > FIRST_PADDING:
        raise ValueError(
            f"IndexedSlices{where} do not fit their table: the values, one row for "
            "each index, must have shape [k, ...] where the table has [rows, ...], at "
            f"most {FIRST_PADDING} rows; got values of shape {values_shape} and a "
            f"table of shape {shape}."
        )
    indices = known_indices(slices._words)
    if indices is not None:
        indices = indices[indices < FIRST_PADDING]
    refuse_known_rows(indices, shape[batch], f"IndexedSlices{where}")


def refuse_known_rows(indices: np.ndarray | None, rows: int, who: str) -> None:
    """Refuse numbers of rows that a table of `rows` rows lacks, where they are known.

    The message says that `who` has named it.
    """
    known = np.empty(0, np.int32) if indices is None else indices
    bad = known[(known < 0) | (known >= rows)]
    if bad.size:
        raise ValueError(
            f"{who}: row {int(bad[0])} is out of range for a table of {rows} rows. Pass"
            f" rows in [0, {rows}): they are never wrapped."
        )


def rebuild(words: Any, values: Any) -> IndexedSlices:
    """`IndexedSlices` of these leaves, unchecked, since JAX passes any object."""
    slices = object.__new__(IndexedSlices)
    slices._words = words
    slices._values = values
    return slices


def _hide(indices: Numbers) -> Key[Array, "..."]:
    """Integers as an array of an extended dtype, which knows no arithmetic."""
    indices = as_int32(indices, "indices")
    if isinstance(indices, Tracer):
        return hide_words(indices)
    # Indices that are known stay known while tracing, so that they can be checked.
    with jax.ensure_compile_time_eval():
        return hide_words(jnp.asarray(indices))


def hide_words(indices: Int32[Array, "*k"]) -> Key[Array, "*k"]:
    """Indices as an array of an extended dtype."""
    word = lax.bitcast_convert_type(indices, jnp.uint32)
    words = jnp.stack([jnp.zeros_like(word), word], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def as_int32(indices: Numbers, what: str) -> jax.Array | np.ndarray:
    """Integers of any dtype as int32; those that do not fit never wrap to a row."""
    if not isinstance(indices, jax.Array):
        said = hasattr(indices, "dtype")
        indices = np.asarray(indices)
        if not said and indices.size == 0:  # NumPy makes floats of an empty list.
            indices = indices.astype(np.int32)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"{what} must be integers, they name rows; got dtype {indices.dtype}. "
            f"Pass {what}.astype(jnp.int32)."
        )
    if jnp.can_cast(indices.dtype, jnp.int32):
        return indices.astype(jnp.int32)
    known = known_numbers(indices)
    if known is None:
        bounds = jnp.iinfo(indices.dtype)
        low, high = max(bounds.min, -LAST_INDEX - 1), LAST_INDEX
        return jnp.clip(indices, low, high).astype(jnp.int32)
    if known.size and (known.max() > LAST_INDEX or known.min() < -LAST_INDEX - 1):
        raise ValueError(
            f"{what} must fit into int32; got values in [{known.min()}, {known.max()}]."
        )
    return known.astype(np.int32)


def known_numbers(array: jax.Array | np.ndarray) -> np.ndarray | None:
    """The numbers if they are not traced and this process has all of them, or None."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)


def known_indices(words: object) -> np.ndarray | None:
    """The hidden indices as numbers if they are known, or None."""
    if isinstance(words, Tracer) or not isinstance(words, jax.Array):
        return None
    with jax.ensure_compile_time_eval():
        data = known_numbers(jax.random.key_data(words))
    return None if data is None else _indices_of(data)


def show(words: Key[Array, "*k"]) -> Int32[Array, "*k"]:
    """The integers that `_hide` has hidden."""
    return _indices_of(jax.random.key_data(words))


def _indices_of(data: Any) -> Any:
    """The second word of each key, int32; in NumPy nothing is compiled for it."""
    return data[..., 1].view(np.int32)


def unique_indices(indices: Rows) -> tuple[Rows, Rows]:
    """Each row once, ascending, then padding; and the indices, the last for no row.

    It sorts one array twice: XLA:CPU sorts pairs several times slower.
    """
    size = indices.shape[0]
    is_row = (indices >= 0) & (indices < FIRST_PADDING)
    indices = jnp.where(is_row, indices, LAST_INDEX)
    ordered = lax.sort(indices)
    first = jnp.concatenate([ordered[:1] >= 0, ordered[1:] != ordered[:-1]])
    unique = lax.sort(jnp.where(first, ordered, LAST_INDEX))
    padding = LAST_INDEX - (size - 1) + lax.iota(jnp.int32, size)
    return jnp.where(unique < FIRST_PADDING, unique, padding), indices


def search(ordered: Rows, wanted: Int32[Array, "*ids"]) -> Int32[Array, "*ids"]:
    """Where each wanted number stands, or would stand, among ordered ones."""
    mesh = jax.sharding.get_abstract_mesh()
    partly_manual = 0 < len(mesh.manual_axes) < len(mesh.axis_names)
    # There JAX's binary search fails an assertion under check_vma=True; another method
    # sorts pairs, which takes XLA:CPU several times as long.
    method = "sort" if partly_manual else "scan"
    return jnp.searchsorted(ordered, wanted, method=method).astype(jnp.int32)


def like_rows(mask: Bool[Array, "..."], rows: jax.Array) -> Bool[Array, "..."]:
    """A mask with trailing axes of size one, to select whole rows."""
    return lax.expand_dims(mask, range(mask.ndim, rows.ndim))


def _scatter_add(table: jax.Array, slices: IndexedSlices) -> jax.Array:
    """``table + slices`` in the wider dtype, rounded once to the table's."""
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(table.dtype, slices.values.dtype)
    if wide == table.dtype == at_least_float32(table.dtype):
        return table.at[slices.indices].add(slices.values.astype(wide), **DROP)
    # Each row is read, added to and rounded once, so it must occur once.
    unique = slices.map_values(lambda values: values.astype(wide)).sum_duplicates()
    at = table.at[unique.indices]
    rows = at.get(**FILL, **ORDERED).astype(wide) + unique.values
    return at.set(rows.astype(table.dtype), **DROP, **ORDERED)
