# SPDX-License-Identifier: Apache-2.0
"""`take`: look up rows of a table, as embeddings do, with row-sparse gradients."""

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.core import slices
from optx_sync.core.shapes import Array, Key, Shaped
from optx_sync.core.slices import FILL, ORDERED, as_int32, known_numbers
from optx_sync.core.trees import Tree, at_least_float32, brief


def take(table: Tree, ids: slices.Numbers) -> jax.Array:
    """Look up rows of a table, ``table[ids]``, inside the loss of ``value_and_grad``.

    Unlike ``table[ids]`` it never wraps or clamps an id out of range, or a negative
    one: it raises where ``ids`` are known (outside of compiled code); compiled code
    returns zeros for it, without a gradient.

    Inside a loss under ``oxs.value_and_grad`` with ``rows`` for this table, only the
    rows that it names can be read. Another id in range is an error: a ``ValueError``
    where the ids are known; compiled code cannot raise, so the row is NaN there, and
    the loss with it.

    Args:
        table: [rows, ...], an array, or what ``value_and_grad`` puts in its place.
        ids: integers of any shape.

    Returns:
        An array of shape ``[*ids.shape, ...]`` and the table's dtype.

    Raises:
        TypeError: if ``ids`` are not integers or ``table`` is not a table.
        ValueError: if a known id is out of range, or not named by ``rows``.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> oxs.take(jnp.arange(8.0).reshape(4, 2), jnp.array([[3], [0]])).tolist()
        [[[6.0, 7.0]], [[0.0, 1.0]]]

    The original is ``tf.nn.embedding_lookup``.
    """
    if isinstance(table, _GatheredRows):
        return table.look_up(ids)
    _check_table(table, "take")
    ids = as_int32(ids, "ids")
    slices.refuse_known_rows(known_numbers(ids), table.shape[0], "take")
    return jnp.asarray(table).at[ids].get(**FILL)


class _TableUseError(TypeError, AttributeError):
    """A stand-in was used as an array; bases are what `hasattr` and JAX expect."""


@dataclasses.dataclass(eq=False)
class _GatheredRows:
    """Stands for a table in the loss of `value_and_grad`: the rows that a batch names.

    `words` are the hidden indices, sorted and unique, `values` the rows; `shape` is
    the table's.
    """

    words: Key[Array, " named"]
    values: Shaped[Array, "named ..."]
    shape: tuple[int, ...]
    path: str

    __array_ufunc__ = None

    @property
    def dtype(self) -> np.dtype:
        """The table's."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """The table's."""
        return len(self.shape)

    def look_up(self, ids: slices.Numbers) -> jax.Array:
        """`take` of this table."""
        ids = as_int32(ids, "ids")
        known_ids, known_named = known_numbers(ids), slices.known_indices(self.words)
        slices.refuse_known_rows(known_ids, self.shape[0], f"take from {self.path}")
        if known_ids is not None and known_named is not None:
            missing = np.setdiff1d(known_ids, known_named)
            if missing.size:
                raise ValueError(
                    f"The loss looks up row {missing[0]} of {self.path}, which rows "
                    "did not name. Let the function in rows return all ids that the "
                    "loss passes to take."
                )
        ids = jnp.asarray(ids)
        in_range = (ids >= 0) & (ids < self.shape[0])
        if self.values.shape[0]:
            named = slices.show(self.words)
            position = slices.search(named, ids)
            found = (
                named.at[position].get(mode="fill", fill_value=slices.LAST_INDEX) == ids
            )
            # Half precision: the gradients of a frequent id add up in float32.
            wide = self.values.astype(at_least_float32(self.dtype))
            looked_up = wide.at[position].get(**FILL).astype(self.dtype)
        else:
            found = jnp.zeros_like(in_range)
            looked_up = jnp.zeros((*ids.shape, *self.shape[1:]), self.dtype)
        found, in_range = (slices.like_rows(m, looked_up) for m in (found, in_range))
        rows = jnp.where(found & in_range, looked_up, jnp.zeros_like(looked_up))
        # The NaN is no array of its own: `jax_debug_nans` would stop at that.
        not_a_number = np.asarray(np.nan, self.dtype)
        return jnp.where(in_range & ~found, not_a_number, rows)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _TableUseError(
            f"{self.path} is a table with row-sparse gradient: inside the loss only "
            "the rows named by `rows` are there. Use oxs.take(table, ids) to look rows "
            "up, or leave the table out of `rows` for a dense gradient."
        )

    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = __float__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<rows of {self.path}, look them up with oxs.take>"


jax.tree_util.register_dataclass(
    _GatheredRows, data_fields=["words", "values"], meta_fields=["shape", "path"]
)


def _gather(table: Any, ids: slices.Numbers, path: str) -> _GatheredRows:
    """The rows of `table` that `ids` name, each once."""
    _check_table(table, f"rows for {path}")
    size = table.shape[0]
    ids = as_int32(ids, f"ids for {path}")
    slices.refuse_known_rows(known_numbers(ids), size, f"rows for {path}")
    ids = jnp.asarray(ids).reshape(-1)
    if ids.shape[0]:
        ids, _ = slices.unique_indices(jnp.where(ids < size, ids, -1))
    rows = jnp.asarray(table).at[ids].get(**FILL, **ORDERED)
    return _GatheredRows(slices.hide_words(ids), rows, tuple(table.shape), path)


def _check_table(table: object, who: str) -> None:
    if not (isinstance(table, jax.Array | np.ndarray) and table.ndim):
        raise TypeError(
            f"{who} needs a table, an array of shape [rows, ...]; got {brief(table)}. "
            "Pass for example params['embedding']."
        )
