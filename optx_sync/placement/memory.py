# SPDX-License-Identifier: Apache-2.0
"""In which memory an array of a state lives: that of its device, or of its host.

A field whose kind is `on_host` (`fields.Kind`) stays in the host's memory, pinned, so
that the device can read it: a program that only hands it on holds nothing of it on the
device. JAX's types tell the two memories apart, and nothing is computed of an array on
the host before it is moved to the device. Scalars always are on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optx_sync.placement import fields
from optx_sync.trees import Tree

HOST = "pinned_host"
_SPACES = jax.memory.Space


def is_on_host(tree: Tree) -> bool:
    """Whether any array of a tree is on the host."""
    return any(map(_on_host, jax.tree.leaves(tree)))


def on_device(tree: Tree) -> Tree:
    """The tree, what is on the host moved to its device."""
    return jax.tree.map(lambda x: _moved(x, _SPACES.Device) if _on_host(x) else x, tree)


def on_host(tree: Tree) -> Tree:
    """The tree, all arrays but its scalars moved to the host of their device."""
    return jax.tree.map(lambda x: _moved(x, _SPACES.Host) if jnp.ndim(x) else x, tree)


def like(tree: Tree, reference: Tree) -> Tree:
    """The tree, each array in the memory of its counterpart."""
    return jax.tree.map(
        lambda x, there: _moved(x, _SPACES.Host) if _on_host(there) else x,
        tree,
        reference,
    )


def copy(x: Any) -> jax.Array:
    """A copy that shares no buffer, in the same memory."""
    if not _on_host(x):
        return jnp.copy(x)
    return _moved(jnp.copy(_moved(x, _SPACES.Device)), _SPACES.Host)


def kinds(tree: Tree) -> Tree:
    """`HOST` for each leaf of a tree with states in it that belongs there, else ''."""

    def field(_, kind, value):
        if kind.memory == "device":
            return kinds(value)
        return jax.tree.map(lambda x: HOST if jnp.ndim(x) else "", value)

    return jax.tree.map(
        lambda node: fields.map_fields(field, node) if fields.is_level(node) else "",
        tree,
        is_leaf=fields.is_level,
    )


def _on_host(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "memory_kind", None) == HOST
    return jax.typeof(x).memory_space == _SPACES.Host


def _moved(x: Any, space: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, space)
