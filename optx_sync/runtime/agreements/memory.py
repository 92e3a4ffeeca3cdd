# SPDX-License-Identifier: Apache-2.0
"""Memory of a worker's arrays: results that share it, and memory that is used again.

Fresh memory costs more than what is computed: the system hands it out page by page, and
sets it to zero.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.core.trees import Tree
from optx_sync.runtime.agreements.arrays import own_buffers
from optx_sync.runtime.messages import Arrays
from optx_sync.runtime.parts import tree_of

# Below this size, in bytes, fresh memory costs less than to hand out kept one.
SMALL_BYTES = 2**18
ALIGNED = 64  # in bytes: JAX reads NumPy arrays where they lie if they are


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Known:
    """Stands for an array that need not be a result: its number among the known."""

    number: int


class Sharing:
    """A compiled function whose results may be arrays that are there already.

    A program of JAX copies what it passes through. Here it is left out of the program,
    and the array that was given is handed out.

    Args:
        function: `(fixed, passing, read, donated) -> (held, shown)`. Of its arguments,
            `fixed` is hashable and the others are trees. `donated` is overwritten, and
            `held` shares memory with nothing, so that it can be donated later. Leaves
            of `shown` that are in `passing` or `held` are not computed again.
    """

    def __init__(self, function: Callable[..., tuple[Tree, Tree]]):
        self._function = function
        self._compiled: Any = jax.jit(
            self._traced, static_argnums=0, donate_argnums=3, keep_unused=True
        )
        self._known: dict[Hashable, tuple[Tree, Tree]] = {}  # where all is known

    def _traced(self, fixed: Hashable, passing: Tree, read: Tree, donated: Tree):
        held, shown = self._function(fixed, passing, read, donated)
        held = own_buffers(held, (passing, read, donated))
        known = {id(x): i for i, x in enumerate(jax.tree.leaves((passing, held)))}
        shown = jax.tree.map(
            lambda x: _Known(known[id(x)]) if id(x) in known else x, shown
        )
        return held, shown

    def __call__(
        self, fixed: Hashable, passing: Tree, read: Tree, donated: Tree = ()
    ) -> tuple[Tree, Tree]:
        """Run it: (held, shown)."""
        key = fixed, jax.tree.structure((passing, read, donated))
        results = self._known.get(key) or self._compiled(fixed, passing, read, donated)
        if not jax.tree.leaves(results):
            self._known[key] = results
        held, shown = results
        known = jax.tree.leaves((passing, held))
        is_known = lambda x: isinstance(x, _Known)  # noqa: E731
        return held, jax.tree.map(
            lambda x: known[x.number] if is_known(x) else x, shown, is_leaf=is_known
        )


class _Lent:
    """Memory that is free again when the last array in it is gone."""

    def __init__(self, memory: np.ndarray, owner: "Received"):
        self._memory, self._owner = memory, owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self):
        self._owner.free[self._memory.size].append(self._memory)


class Received:
    """Copies of received arrays, in memory that is used again.

    Received arrays may be views, which the next message overwrites. A copy's memory is
    used again once nobody has an array in it any more: the user, NumPy or a program.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)  # by size, in bytes

    def tree(self, arrays: Arrays, shapes: Tree) -> Tree:
        """A tree of JAX arrays with these values."""
        leaves, treedef = jax.tree.flatten(tree_of(arrays, shapes))
        # What is free and is not needed now is let go: who kept it is done with it.
        free, self.free = self.free, defaultdict(list)
        small = [x for x in leaves if x.nbytes < SMALL_BYTES]
        copies = iter(jax.block_until_ready(_copied(small)))
        large = [self._copy(x, free) for x in leaves if x.nbytes >= SMALL_BYTES]
        lent = iter(jax.device_put(large))
        return treedef.unflatten(
            next(copies if x.nbytes < SMALL_BYTES else lent) for x in leaves
        )

    def _copy(self, array: np.ndarray, free: dict[int, list[np.ndarray]]) -> np.ndarray:
        of_size = free[array.nbytes]
        memory = of_size.pop() if of_size else _aligned(array.nbytes)
        copy = np.asarray(_Lent(memory, self)).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy


@jax.jit
def _copied(arrays: list[np.ndarray]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + size]
