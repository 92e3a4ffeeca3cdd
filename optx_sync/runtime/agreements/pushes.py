# SPDX-License-Identifier: Apache-2.0
"""The arrays that a push must have, and what is wrong with others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.core.slices import FIRST_PADDING
from optx_sync.core.trees import Tree, path_name, some
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.coded import decoded, message_shapes
from optx_sync.runtime.messages import Arrays, PushRefused
from optx_sync.runtime.parts import Variables


class Expected:
    """The arrays that a push must have."""

    def __init__(self, names: tuple[str, ...], tree: Tree, of_rows: bool = False):
        self.names = names
        self.of_rows = of_rows  # whether an array may be missing, or be rows
        self.leaves: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            path_name(path): (jnp.shape(leaf), np.dtype(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    def read(self, sent: Any) -> tuple[dict[str, Arrays], dict[str, float]]:
        """Check a push: its arrays, and bounds of their elements by path.

        Raises:
            PushRefused: Says what is wrong with it.
        """
        if not isinstance(sent, dict) or set(sent) != set(self.names):
            got = sorted(sent) if isinstance(sent, dict) else type(sent)
            raise PushRefused(f"a push holds {sorted(self.names)}; got {got}.")
        sizes: dict[str, float] = {}
        for name in self.names:
            sizes |= self._sizes(name, sent[name])
        return sent, sizes

    def _sizes(self, name: str, arrays: Any) -> dict[str, float]:
        if not isinstance(arrays, dict):
            raise PushRefused(
                f"{name} must be a dict from paths to arrays; got {type(arrays)}."
            )
        if arrays.keys() != self.leaves.keys():
            unknown = [path for path in arrays if path not in self.leaves]
            missing = [path for path in self.leaves if path not in arrays]
            raise PushRefused(
                f"{name} does not have the structure of the parameters: unknown "
                f"{some(unknown)}, missing {some(missing)}. Push what Worker.step was "
                "given for the same parameters."
            )
        sizes = {}
        for path, (shape, dtype) in self.leaves.items():
            array, where = arrays[path], f"{name} at {path}"
            if self.of_rows and array is None:
                continue
            if self.of_rows and isinstance(array, tuple):
                indices, array = array
                _check_rows(where, indices, shape[0])
                shape = (len(indices), *shape[1:])
            sizes[path] = _look(where, array, shape, dtype)
        return sizes


class ExpectedCodes(Expected):
    """The messages that a coded push must have, and the arrays that they encode."""

    def __init__(self, names: tuple[str, ...], tree: Tree, exchange: Exchange):
        super().__init__(names, tree)
        messages = message_shapes(exchange, tree)
        self.messages: Expected = Expected(names, messages)
        self.variables: Variables = Variables(tree)
        self._decode = jax.jit(lambda messages: decoded(exchange, messages, tree))

    def read(self, sent: Any) -> tuple[dict[str, Arrays], dict[str, float]]:
        """See `Expected.read`; the arrays are decoded."""
        self.messages.read(sent)
        return super().read({name: self._arrays(coded) for name, coded in sent.items()})

    def _arrays(self, messages: Arrays) -> Arrays:
        found = self.variables.arrays(self._decode(self.variables.tree(messages)))
        return {path: np.asarray(array) for path, array in found.items()}


def _check_rows(where: str, indices: Any, rows: int) -> None:
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim != 1:
        raise PushRefused(
            f"{where} must have integer indices in one row; got {indices.dtype}."
        )
    # Unused entries after `sum_duplicates` are no rows.
    wrong = indices[(indices < 0) | (indices >= rows) & (indices < FIRST_PADDING)]
    if wrong.size:
        raise PushRefused(
            f"{where} has row {wrong[0]}, and the table has the rows 0 to {rows - 1}."
        )


def _look(where: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> float:
    """A bound of the elements of an array; refuse another one than is expected."""
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        raise PushRefused(f"{where} must be an array; got {type(array).__name__}.")
    if array.dtype != dtype:
        raise PushRefused(f"{where} must have dtype {dtype}; got {array.dtype}.")
    if array.shape != shape:
        raise PushRefused(f"{where} must have shape {shape}; got {array.shape}.")
    size = bound(np.asarray(array))
    if not np.isfinite(size):
        raise PushRefused(f"{where} holds a NaN or infinity.")
    return size


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
