# SPDX-License-Identifier: Apache-2.0
"""The memory in which an array of a state lives: its device's, or the host's.

A field whose kind is `on_host` (`fields.Kind`) stays in pinned host memory, which the
device can read: a program that only passes it on needs no room for it on the device.
JAX's types distinguish the two memories, and an array on the host must be moved to the
device before anything is computed from it. Scalars are always on the device.
"""

import jax
import jax.numpy as jnp

from optx_sync.trees import Tree

HOST = "pinned_host"
_SPACES = jax.memory.Space


def is_on_host(tree: Tree) -> bool:
    """Whether any array of a tree is in host memory."""
    return any(map(_on_host, jax.tree.leaves(tree)))


def on_device(tree: Tree) -> Tree:
    """The tree, with arrays in host memory moved to their device."""
    return jax.tree.map(lambda x: _moved(x, _SPACES.Device, _on_host(x)), tree)


def on_host(tree: Tree) -> Tree:
    """The tree with all arrays but scalars moved to their device's host memory."""
    return jax.tree.map(lambda x: _moved(x, _SPACES.Host, jnp.ndim(x) > 0), tree)


def like(tree: Tree, reference: Tree) -> Tree:
    """The tree, each array in the memory of its counterpart."""
    return jax.tree.map(
        lambda x, there: _moved(x, _SPACES.Host, _on_host(there)),
        tree,
        reference,
    )


def copy(x: Tree) -> jax.Array:
    """A copy that shares no buffer, in the same memory."""
    if not _on_host(x):
        return jnp.copy(x)
    return _moved(jnp.copy(_moved(x, _SPACES.Device)), _SPACES.Host)


def _on_host(x: Tree) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "memory_kind", None) == HOST
    return jax.typeof(x).memory_space == _SPACES.Host


def _moved(x: Tree, space: Tree, moves: bool = True) -> Tree:
    """The array in another memory, if it moves; a shape stays as it is."""
    moves = moves and not isinstance(x, jax.ShapeDtypeStruct)
    return jax.device_put(x, space) if moves else x
