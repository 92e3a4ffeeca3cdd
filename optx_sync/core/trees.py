# SPDX-License-Identifier: Apache-2.0
"""Leaves of parameter and gradient trees: kinds, dtypes, paths, finiteness."""

import inspect
import sys
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

# A pytree of arrays. Where it holds gradients a leaf may also be an `IndexedSlices` or
# `None`, and `optax.MaskedNode` where a wrapper has taken the leaf out.
Tree: TypeAlias = Any
KeyPath: TypeAlias = tuple[Any, ...]  # JAX keys, from the root to a leaf
Item = TypeVar("Item")
# The longest text of an object in a message, in letters.
LONGEST_TEXT = 100
SHOWN_NAMES = 5
_OURS = __name__.split(".")[0]


class SlicesLeaf:
    """A pytree node that stands for one array: the base class of `IndexedSlices`."""

    __slots__ = ()

    @property
    def values(self) -> Any:
        """The array, or the rows of it that are not zero."""
        raise NotImplementedError


def is_slices(x: object) -> bool:
    """Whether this is an `IndexedSlices`; as `is_leaf`, it keeps one in one piece."""
    return isinstance(x, SlicesLeaf)


def is_gradient_leaf(x: object) -> bool:
    """Whether this is a leaf of a gradient tree that JAX would not stop at."""
    return x is None or isinstance(x, SlicesLeaf)


def is_masked(x: object) -> bool:
    """Whether Optax has taken this leaf out of a tree."""
    return isinstance(x, optax.MaskedNode)


def is_placeholder(tree: Tree) -> bool:
    """Whether this is the tree without leaves that `optax.tree.map_params` inits."""
    plain = tree is None or isinstance(tree, dict | list | tuple)
    return not plain and not jax.tree.leaves(tree)


def is_nothing(tree: Tree) -> bool:
    """Whether this is (), the value of a state's field that is not kept."""
    return isinstance(tree, tuple) and not tree


def is_inexact(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating or complex."""
    return jnp.issubdtype(dtype, jnp.inexact)


def is_floating(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating, and not complex."""
    return jnp.issubdtype(dtype, jnp.floating)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """The dtype to compute and to accumulate in: float32 for half precision."""
    half = is_floating(dtype) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32 if half else dtype)


def accumulator_dtype(dtype: DTypeLike, asked: DTypeLike | None = None) -> np.dtype:
    """The dtype of a sum or copy of an array: `asked`, or at least float32.

    Integers and complex numbers keep their dtype: a complex parameter would lose its
    imaginary part in float32.
    """
    if not is_floating(dtype):
        return jnp.dtype(dtype)
    return jnp.dtype(asked or at_least_float32(dtype))


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` rounded to a narrower dtype, in its own.

    It does not cast twice, since XLA may drop such a pair (excess precision).
    """
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return rounded
    # reduce_precision flushes subnormal numbers of the narrower dtype to zero.
    smallest = float(info.smallest_subnormal)
    steps = jax.lax.round(x / smallest, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < float(info.tiny), steps * smallest, rounded)


def values_of(leaf: Tree) -> jax.Array:
    """The array of a leaf: the values of an `IndexedSlices`, else the leaf itself."""
    return leaf.values if isinstance(leaf, SlicesLeaf) else leaf


def path_name(path: tuple[Any, ...], root: str = "the root") -> str:
    """A leaf's path as in Python code, for messages."""
    return jax.tree_util.keystr(path) or root


def kinds_of(tree: Tree) -> Any:
    """The classes of the named tuples of a state, nested as they are; hashable."""
    if not isinstance(tree, tuple):
        return None
    return type(tree), tuple(map(kinds_of, tree))


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names in a path, the same for attributes, keys and places."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def leaves_with_names(tree: Tree) -> list[tuple[str, Tree]]:
    """(path, leaf) for each leaf of a gradient tree, `None` and slices included."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_gradient_leaf)
    return [(path_name(path), leaf) for path, leaf in pairs]


def check_arrays(tree: Tree, what: str, root: str = "the root") -> None:
    """Refuse functions and settings among a tree's leaves, as Equinox modules hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            raise TypeError(
                f"{what} at {path_name(path, root)} is no array; it is of type "
                f"{type(leaf).__name__}. Split the arrays off before, `params, static ="
                " eqx.partition(model, eqx.is_inexact_array)` with Equinox, or "
                "eqx.filter for the first of the two, and put them together inside of "
                "the step, `model = eqx.combine(params, static)`."
            )


def check_transformation(tx: object, name: str, call: str) -> None:
    """Refuse what is no Optax transformation, such as a function that makes one."""
    swapped = " Have two arguments changed places?" if isinstance(tx, str) else ""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{name} must be an Optax gradient transformation; got {brief(tx)}."
            f"{swapped}{call_it(tx)} Write for example {call}."
        )


def one_or_several(items: tuple[Item, ...]) -> Item | tuple[Item, ...]:
    """The one item of a tuple; of several all, as axes are named."""
    return items[0] if len(items) == 1 else items


def brief(x: object) -> str:
    """What was got instead, for a message: its type, its shape or a short text."""
    if isinstance(x, jax.Array | np.ndarray) and x.ndim:
        return f"{x.dtype}{list(x.shape)}"
    text = repr(x)
    text = text if len(text) <= LONGEST_TEXT else "one"
    return f"{text} of type {type(x).__name__}"


def users_level() -> int:
    """For a warning of the function that asks: the `stacklevel` of a user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == _OURS:
        frame, level = frame.f_back, level + 1
    return level


def some(names: list[str]) -> str:
    """A list as text for a message, shortened if it is long."""
    if len(names) <= SHOWN_NAMES:
        return str(names)
    return f"{names[:SHOWN_NAMES]} and {len(names) - SHOWN_NAMES:,} more"


def call_it(x: object) -> str:
    """How to mend it, for a message, if a function was given for what it returns."""
    return f" Call it: {x.__name__}(...)." if inspect.isroutine(x) else ""


def is_finite(tree: Tree) -> jax.Array:
    """bool[], whether no leaf holds a NaN or infinity."""
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree, is_leaf=is_slices):
        finite = finite & jnp.all(jnp.isfinite(values_of(leaf)))
    return finite


def where(flag: ArrayLike, tree: Tree, other: Tree) -> Tree:
    """Select `tree` if the flag holds, else `other`, by leaf; NaN does not leak."""
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), tree, other)


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def times(factor: Any, x: jax.Array) -> jax.Array:
    """A multiple of an array, in its dtype whatever that of the factor."""
    return jnp.asarray(factor, x.dtype) * x


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Cast a tree to the dtypes of another one, so that a state keeps its types.

    Gradients wider than the parameters widen the slots of most Optax optimizers.
    """

    def cast(x, old):
        dtype = getattr(old, "dtype", None)
        kept = dtype is None or getattr(x, "dtype", None) in (None, dtype)
        return x if kept else x.astype(dtype)

    return jax.tree.map(cast, tree, like)


def pure(tree: Tree) -> Tree:
    """The tree with plain arrays in place of Flax NNX variables."""
    # Flax is optional, and has been imported if there is such a tree.
    nnx = sys.modules.get("flax.nnx")
    return tree if nnx is None else nnx.as_pure(tree)


def first_worker(x: jax.Array) -> jax.Array:
    """`x[0]`, also where the first axis lies along a mesh axis of type `Explicit`."""
    sharding = jax.typeof(x).sharding
    if sharding.spec[0] is None:
        return x[0]
    whole = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    return jax.sharding.reshard(x, whole)[0]


def add_updates(params: Tree, updates: Tree) -> Tree:
    """`optax.apply_updates`, which adds in the wider dtype even where JAX is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def row_of(tree: Tree, place: ArrayLike) -> Tree:
    """The row of a traced number of stacked arrays."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), tree
    )


def with_row(tree: Tree, place: ArrayLike, row: Tree) -> Tree:
    """The stacked arrays with one row replaced."""
    return jax.tree.map(
        lambda x, r: jax.lax.dynamic_update_index_in_dim(x, r, place, 0), tree, row
    )
