# SPDX-License-Identifier: Apache-2.0
"""Trees as the arrays of a message, and buffers of one's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from optx_sync.core.slices import IndexedSlices
from optx_sync.core.trees import Tree, leaves_with_names
from optx_sync.runtime.messages import Arrays


def arrays_of(tree: Tree) -> Arrays:
    """A tree as arrays by path; row-sparse leaves as (indices, values)."""
    return {path: _sent(leaf) for path, leaf in leaves_with_names(tree)}


def _sent(leaf: Any) -> Tree:
    if isinstance(leaf, IndexedSlices):
        return whole(leaf.indices), whole(leaf.values)
    return None if leaf is None else whole(leaf)


def whole(x: Any) -> np.ndarray:
    """An array in the memory of this process, also one that lies over several."""
    here = not isinstance(x, jax.Array) or x.is_fully_addressable
    if here or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def beside(tree: Tree, params: Tree) -> Tree:
    """A tree whose arrays lie over the same devices as the parameters.

    One program takes both. Arrays that lie elsewhere, such as a count that was made in
    each process, are replicated.
    """
    over = next((x.sharding for x in jax.tree.leaves(params)), None)
    if not isinstance(over, NamedSharding):
        return tree
    everywhere = NamedSharding(over.mesh, PartitionSpec())

    def placed(x):
        if x.sharding.device_set == over.device_set:
            return x
        return jax.make_array_from_callback(x.shape, everywhere, lambda at: x[at])

    return jax.tree.map(placed, tree)


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
