# SPDX-License-Identifier: Apache-2.0
"""The interfaces of an agreement's two sides, and the checks of a push."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center.coded import decoded, message_shapes
from optx_sync.center.contract import Period
from optx_sync.center.fragments import Fragments
from optx_sync.exchange.contract import Exchange
from optx_sync.placement.leaves import is_key
from optx_sync.rows.slices import FIRST_PADDING, IndexedSlices
from optx_sync.runtime.messages import Arrays
from optx_sync.runtime.parts import Variables
from optx_sync.trees import Tree, is_gradient_leaf, path_name

SHOWN_NAMES = 5
Place: TypeAlias = Callable[[Tree], Tree]  # lays a tree out over devices
Notes: TypeAlias = dict[str, Any]  # what JSON can hold


class Settings(NamedTuple):
    """The settings of a run that servers and workers share."""

    num_workers: int
    communication_period: Period = 10
    exchange: Exchange | None = None
    fragments: Fragments | None = None
    delay: int | None = None
    keep_local: float | None = None
    pull_exchange: Exchange | None = None

    def served(self) -> dict[str, Any]:
        """The settings that a server needs."""
        known = self._asdict()
        return {x: known[x] for x in known if x not in ("delay", "keep_local")}


class Way(NamedTuple):
    """Both sides of an agreement: constructors for server and worker."""

    # (a part, inner, copy_replies) -> the server's side: state and arithmetic.
    serve: Callable[..., Any]
    # (shapes of the parameters, inner, layout) -> the worker's side.
    work: Callable[..., Any]
    fragments: Fragments
    delay: int
    splits: bool  # whether the variables may be split over several servers
    waits: bool  # whether a worker may wait at the server for the others


class Expected:
    """The arrays that a push must have."""

    def __init__(self, names: tuple[str, ...], tree: Tree, of_rows: bool = False):
        self.names = names
        self.of_rows = of_rows  # whether an array may be missing, or be rows
        self.leaves: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            path_name(path): (jnp.shape(leaf), np.dtype(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    def read(self, sent: Any) -> tuple[str, dict[str, float], dict[str, Arrays]]:
        """Check a push: (what is wrong or "", bounds of elements, the arrays)."""
        sizes: dict[str, float] = {}
        if not isinstance(sent, dict) or set(sent) != set(self.names):
            got = sorted(sent) if isinstance(sent, dict) else type(sent)
            return f"a push holds {sorted(self.names)}; got {got}.", sizes, sent
        for name in self.names:
            problem = self._problem_of(name, sent[name], sizes)
            if problem:
                return problem, sizes, sent
        return "", sizes, sent

    def _problem_of(self, name: str, arrays: Any, sizes: dict[str, float]) -> str:
        if not isinstance(arrays, dict):
            return f"{name} must be a dict from paths to arrays; got {type(arrays)}."
        if arrays.keys() != self.leaves.keys():
            unknown = [path for path in arrays if path not in self.leaves]
            missing = [path for path in self.leaves if path not in arrays]
            return (
                f"{name} does not have the structure of the parameters: unknown "
                f"{some(unknown)}, missing {some(missing)}. Push what Worker.step was "
                "given for the same parameters."
            )
        for path, (shape, dtype) in self.leaves.items():
            array = arrays[path]
            if self.of_rows and array is None:
                continue
            if self.of_rows and isinstance(array, tuple):
                indices, array = array
                if problem := _rows_problem(indices, shape[0]):
                    return f"{name} at {path} {problem}"
                shape = (len(indices), *shape[1:])
            problem, size = _look(array, shape, dtype)
            if problem:
                return f"{name} at {path} {problem}"
            sizes[path] = size
        return ""


class ExpectedCodes(Expected):
    """The messages that a coded push must have, and the arrays that they encode."""

    def __init__(self, names: tuple[str, ...], tree: Tree, exchange: Exchange):
        super().__init__(names, tree)
        messages = message_shapes(exchange, tree)
        self.messages: Expected = Expected(names, messages)
        self.variables: Variables = Variables(tree)
        self._decode = jax.jit(lambda messages: decoded(exchange, messages, tree))

    def read(self, sent: Any) -> tuple[str, dict[str, float], dict[str, Arrays]]:
        """See `Expected.read`; the arrays are decoded."""
        problem, *_ = self.messages.read(sent)
        if problem:
            return problem, {}, sent
        arrays = {
            name: self._arrays(self.variables.tree(messages))
            for name, messages in sent.items()
        }
        return super().read(arrays)

    def _arrays(self, messages: Tree) -> Arrays:
        found = self.variables.arrays(self._decode(messages))
        return {path: np.asarray(array) for path, array in found.items()}


def _rows_problem(indices: Any, rows: int) -> str:
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim != 1:
        return f"must have integer indices in one row; got {indices.dtype}."
    # Unused entries after `sum_duplicates` are no rows.
    wrong = indices[(indices < 0) | (indices >= rows) & (indices < FIRST_PADDING)]
    if wrong.size:
        return f"has row {wrong[0]}, and the table has the rows 0 to {rows - 1}."
    return ""


def some(names: list[str]) -> str:
    """A list as text for a message, shortened if it is long."""
    if len(names) <= SHOWN_NAMES:
        return str(names)
    return f"{names[:SHOWN_NAMES]} and {len(names) - SHOWN_NAMES:,} more"


def _look(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[str, float]:
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        return f"must be an array; got {type(array).__name__}.", 0.0
    if array.dtype != dtype:
        return f"must have dtype {dtype}; got {array.dtype}.", 0.0
    if array.shape != shape:
        return f"must have shape {shape}; got {array.shape}.", 0.0
    size = bound(np.asarray(array))
    return ("" if np.isfinite(size) else "holds a NaN or infinity."), size


def bound(array: np.ndarray) -> float:
    """An upper bound of |x|, not finite if any element is not finite.

    One pass without a temporary array: a sum of squares is finite only if its terms
    are.
    """
    if array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            flat = array.reshape(-1)
            squares = float(np.dot(flat, flat))
        if np.isfinite(squares):
            # Rounding may make the sum of squares a little too small.
            return 1.001 * squares**0.5
    # Squares of finite terms may overflow.
    return float(np.abs(array).max(initial=0))


def copied(tree: Tree) -> Tree:
    """A copy of a state, with arrays of its own.

    Some Optax states hold the parameters that they were made for.
    """
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def own_buffers(after: Tree, given: Tree) -> Tree:
    """The results of a compiled step, none of which shares memory with an input.

    An array that passes through unchanged would share its memory, and be donated later.
    """
    ids = {id(x) for x in jax.tree.leaves(given)}
    seen: set[int] = set()

    def own(x):
        passes = id(x) in ids or id(x) in seen
        seen.add(id(x))
        return jnp.copy(x) if passes else x

    return jax.tree.map(own, after)


def numbered(tree: Tree) -> dict[str, np.ndarray]:
    """The leaves of any state, numbered, as a checkpoint can hold them."""
    leaves = jax.tree.leaves(jax.tree.map(_words, tree))
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}


def _words(x: Any) -> Any:
    """A typed key as the words that it is made of; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def _made_of(words: Any, old: Any) -> Any:
    words = jnp.array(words)
    if is_key(old):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(old))
    return words


def like(tree: Tree, leaves: dict[str, np.ndarray]) -> Tree:
    """The state from its numbered leaves."""
    old, treedef = jax.tree.flatten(tree)
    shapes = {str(i): jnp.shape(_words(x)) for i, x in enumerate(old)}
    found = {name: jnp.shape(x) for name, x in leaves.items()}
    if shapes != found:
        raise ValueError(
            "What was saved is the state of another optimizer: its arrays have the "
            f"shapes {some([*map(str, found.values())])}, not "
            f"{some([*map(str, shapes.values())])}. Pass the optimizer of before, or "
            "resume=False to start afresh."
        )
    return treedef.unflatten([_made_of(leaves[str(i)], x) for i, x in enumerate(old)])


def described(kind: str, formulas: Sequence[Callable[..., object]], state: Tree) -> str:
    """A description for a checkpoint: formulas by name, an optimizer by its state."""
    names = [
        f"{f.__module__}.{f.__qualname__}" if hasattr(f, "__qualname__") else repr(f)
        for f in formulas
    ]
    leaves, treedef = jax.tree.flatten(state)
    shapes = [f"{jnp.shape(x)} {jnp.result_type(x)}" for x in leaves]
    return json.dumps([kind, names, str(treedef), shapes])


def difference(saved: str, own: str) -> tuple[str, str]:
    """What two descriptions by `described` differ in, as words for a message."""
    pairs = zip(json.loads(saved), json.loads(own), strict=True)
    for say, (one, other) in zip(_SAID, pairs, strict=True):
        if say(one) != say(other):
            return say(one), say(other)
    return "another rule or optimizer", "its own"


_SAID: tuple[Callable[[Any], str], ...] = (
    {"center": "a center rule", "sync_replicas": "SyncReplicas"}.__getitem__,
    # A function that was made in another one, by the name of that.
    lambda names: some(
        [*{n.partition(".<locals>")[0]: 0 for n in names if n != "None"}]
    ),
    # Of a treedef the classes.
    lambda treedef: "a state of " + some(re.findall(r"namedtuple.(\w+)", treedef)),
    lambda shapes: "a state with the arrays " + some(shapes),
)


def check_saved(center: Arrays, saved: Arrays, is_part: bool = False) -> None:
    """Refuse a checkpoint of other variables, or of other parts of them."""
    here = "this server's part of the parameters" if is_part else "the parameters"
    mend = "Pass another checkpoint_dir, or resume=False to start afresh"
    mend += ", or the fragments of before." if is_part else "."
    unknown = [path for path in saved if path not in center]
    missing = [path for path in center if path not in saved]
    if unknown or missing:
        raise ValueError(
            f"The checkpoint is of other variables than {here}: it has "
            f"{some(unknown)}, which are not there, and lacks {some(missing)}. {mend}"
        )
    for path, array in center.items():
        if array.shape != saved[path].shape:
            raise ValueError(
                f"The checkpoint holds {path} with shape {saved[path].shape}; {here} "
                f"has it with shape {array.shape}. {mend}"
            )


def tree_of(arrays: Arrays, shapes: Tree) -> Tree:
    """A tree of new arrays: received ones may be views of the center."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.array(arrays[path_name(path)], copy=True), shapes
    )


def arrays_of(tree: Tree) -> Arrays:
    """A tree as arrays by path; row-sparse leaves as (indices, values)."""
    return {
        path_name(path): _sent(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=is_gradient_leaf
        )
    }


def _sent(leaf: Any) -> Tree:
    if isinstance(leaf, IndexedSlices):
        return np.asarray(leaf.indices), np.asarray(leaf.values)
    return None if leaf is None else np.asarray(leaf)
