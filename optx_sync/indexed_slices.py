# SPDX-License-Identifier: Apache-2.0
"""Row-sparse gradients: the rows of a table that a batch touched, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

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

    __slots__ = ("_values", "_words")

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
        return _show(self._words)

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
            ([3, 7, 2147483647], [1.0, 2.0, 0.0])
        """
        if self._words.ndim > 1:
            return jax.vmap(IndexedSlices.sum_duplicates)(self)
        if self._words.shape[0] == 0:
            return self
        unique, named = _unique(self.indices)
        values = self._values.astype(at_least_float32(self._values.dtype))
        target = jnp.searchsorted(unique, named)
        summed = jnp.zeros_like(values).at[target].add(values, mode="drop")
        is_row = _like_rows(unique < _FIRST_PADDING, summed)
        summed = jnp.where(is_row, summed, jnp.zeros_like(summed))
        return _rebuild(_hide_words(unique), summed.astype(self._values.dtype))

    def to_dense(self, rows: int) -> jax.Array:
        """The dense array ``[rows, ...]``; rows out of range are dropped."""
        if self._words.ndim > 1:
            return jax.vmap(lambda slices: slices.to_dense(rows))(self)
        wide = at_least_float32(self._values.dtype)
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

    def tree_flatten_with_keys(self) -> tuple[Any, None]:  # noqa: D102 # JAX's protocol
        key = jax.tree_util.GetAttrKey
        return (((key("indices"), self._words), (key("values"), self._values)), None)

    def tree_flatten(self) -> tuple[Any, None]:  # noqa: D102 # JAX's protocol
        return (self._words, self._values), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Any:  # noqa: D102 # JAX's protocol
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
    indices = _known_indices(slices._words)
    if indices is None:
        return
    bad = (indices < 0) | ((indices >= rows) & (indices < _FIRST_PADDING))
    if bad.any():
        raise ValueError(
            f"IndexedSlices{where} name row {int(indices[bad][0])}, which is out of "
            f"range for a table of {rows} rows. Pass indices in [0, {rows}): rows are "
            "never wrapped."
        )


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
    ids = _as_int32(ids, "ids")
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
                f"{_describe(fn)} at {_show_path(path)}. Pass e.g. "
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
                    f"rows names {_show_path(prefix)}, where the parameters have no "
                    f"array; they have {[_show_path(path) for path, _ in leaves]}."
                )
            ids = fn(*args, **kwargs)
            for at in below:
                tables[at] = _gather(leaves[at][1], ids, _show_path(leaves[at][0]))
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
        slices = {at: _rebuild(tables[at].words, row_grads[at]) for at in tables}
        grads = dense_grads | slices
        return value, structure.unflatten([grads[at] for at in range(len(leaves))])

    return run


def on_values(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Run a stateless Optax transformation on the values of row-sparse gradients.

    Duplicate rows are added up first, so that clips and norms are those of the dense
    gradient. Dense leaves pass through ``tx`` as they are. Whatever maps zero to zero
    gives what it would give on the dense gradient, but for a mean over a leaf
    (``optax.clip_by_block_rms``): that is taken over the k entries of the slices, the
    zero entries in place of duplicates included, and not over the table.

    A table's parameters are not handed to ``tx``: weight decay or a trust ratio is
    about all rows, and using them raises. Mask such a table out with ``optax.masked``.

    Args:
        tx: a transformation without state, or with scalars only (a schedule's count).

    Raises:
        TypeError: at ``init`` or ``update``, if ``tx`` has arrays as state; at
            ``update``, if it uses the parameters of a table with row-sparse gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.on_values(optax.clip(0.5))
        >>> grads = oxs.IndexedSlices(jnp.array([3, 3]), jnp.array([0.25, 0.75]))
        >>> clipped, _ = tx.update(grads, tx.init(jnp.zeros([9])))
        >>> clipped.values.tolist()
        [0.5, 0.0]
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        state = tx.init(params)
        _refuse_array_state(state)
        return state

    def update(updates, state, params=None, **extra_args):
        _refuse_array_state(state)
        leaves, structure = jax.tree.flatten(
            updates, is_leaf=lambda leaf: leaf is None or _is_slices(leaf)
        )
        slices = {
            at: leaf.sum_duplicates()
            for at, leaf in enumerate(leaves)
            if _is_slices(leaf)
        }
        values = structure.unflatten(
            slices[at].values if at in slices else leaf
            for at, leaf in enumerate(leaves)
        )
        params_leaves = [] if params is None else structure.flatten_up_to(params)

        def run(tables: dict[int, jax.Array]) -> Any:
            if params is None:
                return tx.update(values, state, None, **extra_args)
            kept = [tables.get(at, leaf) for at, leaf in enumerate(params_leaves)]
            return tx.update(values, state, structure.unflatten(kept), **extra_args)

        # A transformation may look at the dtype of all parameters, as
        # optax.inject_hyperparams does, but not at the numbers of these.
        tables = {
            at: jnp.zeros(slices[at].values.shape, leaf.dtype)
            for at, leaf in enumerate(params_leaves)
            if at in slices
        }
        values, state = run(tables)
        _refuse_use(run, tables)
        updates = structure.unflatten(
            _rebuild(slices[at]._words, new) if at in slices else new
            for at, new in enumerate(structure.flatten_up_to(values))
        )
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


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
        ids = _as_int32(ids, "ids")
        _refuse_known_ids(ids, self.shape[0], f"take from {self.path}")
        known_ids, known_named = _known(ids), _known_indices(self.words)
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
            named = _show(self.words)
            position = jnp.searchsorted(named, ids).astype(jnp.int32)
            found = named.at[position].get(mode="fill", fill_value=_LAST_INDEX) == ids
            # Half precision: the gradients of a frequent id add up in float32.
            wide = self.rows.astype(at_least_float32(self.dtype))
            looked_up = wide.at[position].get(mode="fill", fill_value=0)
            looked_up = looked_up.astype(self.dtype)
        else:
            found = jnp.zeros_like(in_range)
            looked_up = jnp.zeros((*ids.shape, *self.shape[1:]), self.dtype)
        found, in_range = (_like_rows(m, looked_up) for m in (found, in_range))
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
    ids = _as_int32(ids, f"ids for {path}")
    _refuse_known_ids(ids, size, f"rows for {path}")
    ids = jnp.asarray(ids).reshape(-1)
    if ids.shape[0]:
        ids, _ = _unique(jnp.where(ids < size, ids, -1))
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
    return _GatheredRows(_hide_words(ids), rows, tuple(table.shape), path)


def _refuse_known_ids(ids: Any, rows: int, where: str) -> None:
    known = _known(ids)
    if known is None:
        return
    bad = (known < 0) | (known >= rows)
    if bad.any():
        raise ValueError(
            f"{where}: row {int(known[bad][0])} is out of range for a table of {rows} "
            f"rows. Pass ids in [0, {rows}): rows are never wrapped."
        )


def _refuse_array_state(state: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, int | float):
            continue
        number = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_
        if leaf.ndim or not number:
            raise TypeError(
                "on_values takes a transformation without state, or with scalars only; "
                f"got one whose state has a {leaf.dtype}{list(leaf.shape)} at "
                f"{_show_path(path)}. Use an optimizer that knows row-sparse "
                "gradients, such as oxs.adagrad, or dense gradients."
            )


def _refuse_use(run: Callable[..., Any], tables: dict[int, jax.Array]) -> None:
    """Refuse a transformation whose result depends on the tables' parameters."""
    if not tables:
        return
    batch = {
        at: jax.ShapeDtypeStruct((2, *table.shape), table.dtype)
        for at, table in tables.items()
    }
    try:
        # What does not depend on a mapped argument comes out unmapped.
        jax.eval_shape(jax.vmap(run, out_axes=None), batch)
    except ValueError as error:
        raise TypeError(
            "on_values runs a transformation on the values of a row-sparse gradient; "
            "it cannot use the parameters of that table, of which most rows are not "
            "touched. Leave the table out with optax.masked, or use a dense gradient."
        ) from error


def _is_slices(leaf: Any) -> bool:
    return isinstance(leaf, IndexedSlices)


def _under(path: tuple[Any, ...], prefix: tuple[Any, ...]) -> bool:
    """Whether a path begins with a prefix, by name: a dict may describe a module."""

    def names(keys):
        return [jax.tree_util.keystr((key,), simple=True) for key in keys]

    return names(path[: len(prefix)]) == names(prefix)


def _show_path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path) or "the root of the tree"


def _describe(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {x!r}"


def _rebuild(words: Any, values: Any) -> IndexedSlices:
    """Slices of leaves as they are: JAX puts all sorts of things there."""
    slices = object.__new__(IndexedSlices)
    slices._words = words
    slices._values = values
    return slices


def _hide(indices: Any) -> jax.Array:
    """Integers as an array of an extended dtype, which knows no arithmetic."""
    indices = _as_int32(indices, "indices")
    if isinstance(indices, Tracer):
        return _hide_words(indices)
    # What is known stays known while tracing, so that it can be checked.
    with jax.ensure_compile_time_eval():
        return _hide_words(jnp.asarray(indices))


def _hide_words(indices: jax.Array) -> jax.Array:
    word = lax.bitcast_convert_type(indices, jnp.uint32)
    words = jnp.stack([jnp.zeros_like(word), word], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _as_int32(indices: Any, what: str) -> jax.Array | np.ndarray:
    """Integers of any dtype as int32; those that do not fit never wrap to a row."""
    if not isinstance(indices, jax.Array):
        indices = np.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"{what} must be integers, they name rows; got dtype {indices.dtype}. "
            f"Pass {what}.astype(jnp.int32)."
        )
    if jnp.can_cast(indices.dtype, jnp.int32):
        return indices.astype(jnp.int32)
    known = _known(indices)
    if known is None:
        bounds = jnp.iinfo(indices.dtype)
        low, high = max(bounds.min, -_LAST_INDEX - 1), _LAST_INDEX
        return jnp.clip(indices, low, high).astype(jnp.int32)
    if known.size and (known.max() > _LAST_INDEX or known.min() < -_LAST_INDEX - 1):
        raise ValueError(
            f"{what} must fit into int32; got values in [{known.min()}, {known.max()}]."
        )
    return known.astype(np.int32)


def _known(array: Any) -> np.ndarray | None:
    """The numbers where they are not traced and all at this process, else None."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)


def _known_indices(words: Any) -> np.ndarray | None:
    """The hidden indices as numbers where they are known, else None."""
    if isinstance(words, Tracer) or not isinstance(words, jax.Array):
        return None
    with jax.ensure_compile_time_eval():
        return _known(_show(words))


def _show(words: jax.Array) -> jax.Array:
    """The integers that `_hide` has hidden."""
    return lax.bitcast_convert_type(jax.random.key_data(words)[..., 1], jnp.int32)


def _unique(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row once, ascending, then padding; and the indices, the last for no row.

    Two sorts of one array each: XLA:CPU sorts pairs several times slower.
    """
    size = indices.shape[0]
    is_row = (indices >= 0) & (indices < _FIRST_PADDING)
    indices = jnp.where(is_row, indices, _LAST_INDEX)
    ordered = lax.sort(indices)
    first = jnp.concatenate([ordered[:1] >= 0, ordered[1:] != ordered[:-1]])
    unique = lax.sort(jnp.where(first, ordered, _LAST_INDEX))
    padding = _LAST_INDEX - (size - 1) + lax.iota(jnp.int32, size)
    return jnp.where(unique < _FIRST_PADDING, unique, padding), indices


def _like_rows(mask: jax.Array, rows: jax.Array) -> jax.Array:
    """A mask with trailing axes of size one, to select whole rows."""
    return lax.expand_dims(mask, range(mask.ndim, rows.ndim))


def at_least_float32(dtype: Any) -> np.dtype:
    """The dtype to compute and to accumulate in: float32 for half precision."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32 if half else dtype)


def _scatter_add(table: jax.Array, slices: IndexedSlices) -> jax.Array:
    """``table + slices`` in the wider dtype, rounded once to the table's."""
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(table.dtype, slices.values.dtype)
    if wide == table.dtype == at_least_float32(table.dtype):
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
