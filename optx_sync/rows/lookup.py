# SPDX-License-Identifier: Apache-2.0
"""Row-sparse gradients of looked-up tables: `take` and `value_and_grad`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.rows.slices import (
    LAST_INDEX,
    as_int32,
    hide_words,
    known_indices,
    known_numbers,
    like_rows,
    rebuild,
    show,
    unique_indices,
)
from optx_sync.trees import at_least_float32, path_name


def take(table: Any, ids: Any) -> jax.Array:
    """Rows of a table, ``table[ids]``, inside the loss of ``value_and_grad``.

    Departs from ``table[ids]`` in that a row out of range, a negative one included, is
    refused where ``ids`` are known (outside of compiled code), and in compiled code
    gives zeros and takes no gradient. It is never wrapped and never clamped.

    Inside a loss under ``oxs.value_and_grad``, whose ``rows`` names this table, only
    the named rows are there. An id in range that ``rows`` did not name is an error:
    a ``ValueError`` where the ids are known; compiled code cannot raise, so there the
    looked-up row is NaN, and the loss with it.

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

    Reference: ``tf.nn.embedding_lookup``.
    """
    if isinstance(table, _GatheredRows):
        return table.look_up(ids)
    if not isinstance(table, jax.Array | np.ndarray) or table.ndim == 0:
        raise TypeError(
            "take looks rows up in an array of shape [rows, ...]; got "
            f"{_describe(table)}. Pass the table, e.g. params['embedding']."
        )
    ids = as_int32(ids, "ids")
    _refuse_known_ids(ids, table.shape[0], "take")
    return (
        jnp.asarray(table)
        .at[ids]
        .get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )


def value_and_grad(
    loss: Callable[..., Any], rows: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` whose gradients of looked-up tables are row-sparse.

    The rows that a batch names are gathered once, the loss sees only them, and is
    differentiated with respect to them: no array of the table's size is made. Inside
    the loss a table is read by ``oxs.take(params["embedding"], ids)`` and in no other
    way. Each gradient is an ``IndexedSlices`` as ``sum_duplicates`` leaves it, sorted
    and unique, with one entry for each id that ``rows`` returned.

    Args:
        loss: ``loss(params, *args, **kwargs)``, a scalar, or with ``has_aux`` a pair
            of a scalar and anything.
        rows: a prefix of the parameters' tree. A leaf is a function of the loss's
            other arguments, ``fn(*args, **kwargs)``, that returns all ids (integers of
            any shape) which the loss will look up in the tables below that leaf. What
            is None, or not there, has an ordinary dense gradient.
        has_aux: as in ``jax.value_and_grad``.

    Returns:
        A function of the loss's arguments that returns ``(value, grads)``, or
        ``((value, aux), grads)`` with ``has_aux``.

    Raises:
        TypeError: if a leaf of ``rows`` is not a function, if ids are not integers, or
            if the loss uses a table other than by ``oxs.take``.
        ValueError: if ``rows`` names what the parameters do not have, or if known ids
            are out of the table's range. In compiled code such ids are dropped.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def loss(params, batch):
        ...     return jnp.sum(oxs.take(params["embedding"], batch["ids"]) ** 2)
        >>> grad_fn = oxs.value_and_grad(loss, rows={"embedding": lambda b: b["ids"]})
        >>> params = {"embedding": jnp.ones([1000, 2])}
        >>> value, grads = grad_fn(params, {"ids": jnp.array([5, 9])})
        >>> float(value), grads["embedding"].values.tolist()
        (4.0, [[2.0, 2.0], [2.0, 2.0]])
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function; got {_describe(loss)}.")
    named = []
    for path, fn in jax.tree_util.tree_leaves_with_path(rows):
        if not callable(fn):
            raise TypeError(
                f"A leaf of rows must be a function that returns ids; got "
                f"{_describe(fn)} at {path_name(path)}. Pass e.g. "
                "rows={'embedding': lambda batch: batch['ids']}."
            )
        named.append((path, fn))

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        tables: dict[int, _GatheredRows] = {}
        for prefix, fn in named:
            below = [at for at, (path, _) in enumerate(leaves) if _under(path, prefix)]
            if not below:
                raise ValueError(
                    f"rows names {path_name(prefix)}, where the parameters have no "
                    f"array; they have {[path_name(path) for path, _ in leaves]}."
                )
            ids = fn(*args, **kwargs)
            for at in below:
                tables[at] = _gather(leaves[at][1], ids, path_name(leaves[at][0]))
        dense = {at: leaf for at, (_, leaf) in enumerate(leaves) if at not in tables}

        def of_leaves(dense: dict[int, Any], gathered: dict[int, jax.Array]) -> Any:
            with_rows = {at: tables[at].with_rows(gathered[at]) for at in tables}
            all_leaves = dense | with_rows
            tree = [all_leaves[at] for at in range(len(leaves))]
            return loss(structure.unflatten(tree), *args, **kwargs)

        gathered = {at: table.rows for at, table in tables.items()}
        value, (dense_grads, row_grads) = jax.value_and_grad(
            of_leaves, argnums=(0, 1), has_aux=has_aux
        )(dense, gathered)
        slices = {at: rebuild(tables[at].words, row_grads[at]) for at in tables}
        grads = dense_grads | slices
        return value, structure.unflatten([grads[at] for at in range(len(leaves))])

    return run


class _TableUseError(TypeError, AttributeError):
    """A stand-in was used as an array; also what `hasattr` and JAX's probes expect."""


@jax.tree_util.register_pytree_with_keys_class
class _GatheredRows:
    """The rows of a table that a batch names: what the loss of `value_and_grad` sees.

    `words` are the hidden indices, sorted and unique, `rows` their values; `shape` and
    `dtype` are the table's.
    """

    __slots__ = ("path", "rows", "shape", "words")
    __array_ufunc__ = None

    def __init__(self, words: Any, rows: Any, shape: tuple[int, ...], path: str):
        self.words = words
        self.rows = rows
        self.shape = shape
        self.path = path

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def with_rows(self, rows: jax.Array) -> "_GatheredRows":
        return _GatheredRows(self.words, rows, self.shape, self.path)

    def look_up(self, ids: Any) -> jax.Array:
        ids = as_int32(ids, "ids")
        _refuse_known_ids(ids, self.shape[0], f"take from {self.path}")
        known_ids, known_named = known_numbers(ids), known_indices(self.words)
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
        if self.rows.shape[0]:
            named = show(self.words)
            position = jnp.searchsorted(named, ids).astype(jnp.int32)
            found = named.at[position].get(mode="fill", fill_value=LAST_INDEX) == ids
            # Half precision: the gradients of a frequent id add up in float32.
            wide = self.rows.astype(at_least_float32(self.dtype))
            looked_up = wide.at[position].get(mode="fill", fill_value=0)
            looked_up = looked_up.astype(self.dtype)
        else:
            found = jnp.zeros_like(in_range)
            looked_up = jnp.zeros((*ids.shape, *self.shape[1:]), self.dtype)
        found, in_range = (like_rows(m, looked_up) for m in (found, in_range))
        zeros = jnp.zeros_like(looked_up)
        not_named = jnp.where(in_range, jnp.full_like(zeros, jnp.nan), zeros)
        return jnp.where(found & in_range, looked_up, not_named)

    def _refuse(self, *_: Any, **__: Any) -> Any:
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<rows of {self.path}, look them up with oxs.take>"

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        children = ((key("indices"), self.words), (key("values"), self.rows))
        return children, (self.shape, self.path)

    def tree_flatten(self):
        return (self.words, self.rows), (self.shape, self.path)

    @classmethod
    def tree_unflatten(cls, fixed, leaves):
        return cls(*leaves, *fixed)


def _gather(table: Any, ids: Any, path: str) -> _GatheredRows:
    """The rows of `table` that `ids` name, each once."""
    if (
        not isinstance(table, jax.Array | np.ndarray)
        or table.ndim == 0
        or not jnp.issubdtype(table.dtype, jnp.inexact)
    ):
        raise TypeError(
            f"rows names {path}, which is not a table to differentiate: it must be a "
            f"floating-point array of shape [rows, ...]; got {_describe(table)}."
        )
    size = table.shape[0]
    ids = as_int32(ids, f"ids for {path}")
    _refuse_known_ids(ids, size, f"rows for {path}")
    ids = jnp.asarray(ids).reshape(-1)
    if ids.shape[0]:
        ids, _ = unique_indices(jnp.where(ids < size, ids, -1))
    rows = (
        jnp.asarray(table)
        .at[ids]
        .get(
            mode="fill",
            fill_value=0,
            indices_are_sorted=True,
            unique_indices=True,
            wrap_negative_indices=False,
        )
    )
    return _GatheredRows(hide_words(ids), rows, tuple(table.shape), path)


def _refuse_known_ids(ids: Any, rows: int, where: str) -> None:
    known = known_numbers(ids)
    if known is None:
        return
    bad = (known < 0) | (known >= rows)
    if bad.any():
        raise ValueError(
            f"{where}: row {int(known[bad][0])} is out of range for a table of {rows} "
            f"rows. Pass ids in [0, {rows}): rows are never wrapped."
        )


def _under(path: tuple[Any, ...], prefix: tuple[Any, ...]) -> bool:
    """Whether a path begins with a prefix, by name: a dict may describe a module."""

    def names(keys):
        return [jax.tree_util.keystr((key,), simple=True) for key in keys]

    return names(path[: len(prefix)]) == names(prefix)


def _describe(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {x!r}"
