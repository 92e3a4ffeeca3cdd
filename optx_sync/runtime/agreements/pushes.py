# SPDX-License-Identifier: Apache-2.0
"""The arrays that a push must have, and what is wrong with others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.coded import decoded, message_shapes
from optx_sync.rows.slices import FIRST_PADDING
from optx_sync.runtime.agreements.bounds import bound
from optx_sync.runtime.messages import Arrays
from optx_sync.runtime.parts import Variables
from optx_sync.trees import Tree, path_name, some


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


def _look(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[str, float]:
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        return f"must be an array; got {type(array).__name__}.", 0.0
    if array.dtype != dtype:
        return f"must have dtype {dtype}; got {array.dtype}.", 0.0
    if array.shape != shape:
        return f"must have shape {shape}; got {array.shape}.", 0.0
    size = bound(np.asarray(array))
    return ("" if np.isfinite(size) else "holds a NaN or infinity."), size
