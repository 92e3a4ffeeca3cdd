# SPDX-License-Identifier: Apache-2.0
"""Which part of the parameters meets when, and on which server it lives."""

import math
import zlib
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center.fragments import Fragments, Whole, number_of_parts, split
from optx_sync.center.worker import start_center
from optx_sync.checks import integer
from optx_sync.runtime.messages import Arrays
from optx_sync.trees import Tree, path_name

# An array, or a `jax.ShapeDtypeStruct`, whose parameters of type nobody knows.
Shaped: TypeAlias = Any


class Layout(NamedTuple):
    """The parts of a tree. A part lives on one server, and is pushed alone."""

    whole: Whole  # cuts a tree into parts
    turns: tuple[tuple[int, ...], ...]  # the parts that meet in the same round
    owners: tuple[int, ...]  # the server of each part

    def of_server(self, server: int) -> tuple[int, ...]:
        """The parts that live on a server."""
        return tuple(p for p, owner in enumerate(self.owners) if owner == server)

    def pick(self, tree: Tree, part: int) -> Tree:
        """A part of a tree, or of shapes."""
        if len(self.owners) > 1:  # Rows of NumPy's arrays are not cut.
            tree = jax.tree.map(
                lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
            )
        return self.whole.pick(tree, part)

    def join(self, parts: dict[int, Arrays], shapes: Tree) -> Tree:
        """The tree whose parts these are, JAX arrays of its own in their dtypes."""
        trees = {
            part: Variables(self.pick(shapes, part)).tree(
                {path: jnp.array(array, copy=True) for path, array in arrays.items()}
            )
            for part, arrays in parts.items()
        }
        if len(self.owners) == 1:
            return trees[0]
        dtypes = {
            path: x.dtype for arrays in parts.values() for path, x in arrays.items()
        }
        tree = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.zeros(x.shape, dtypes[path_name(path)]), shapes
        )
        for part, values in trees.items():
            tree = self.whole.put(tree, part, values)
        return tree

    def mark(self, shapes: Tree, part: int) -> int:
        """A number that differs where other rows are in the part."""
        rows = jax.tree.map(lambda x: np.arange(x.shape[0] if x.shape else 1), shapes)
        picked = jax.tree.leaves(self.pick(rows, part))
        return zlib.crc32(b"".join(np.asarray(x).tobytes() + b"," for x in picked))


def lay_out(shapes: Tree, fragments: Fragments, num_servers: int = 1) -> Layout:
    """The parts of parameters, evenly on servers.

    Parts that meet one after the other go to servers as evenly as their bytes allow.
    Where there is one only, and several servers, the variables are split into as many
    parts as servers, which meet in the same round.

    Raises:
        ValueError: More servers than parts or variables.
    """
    shapes = jax.eval_shape(start_center, shapes)  # It is the center that is cut.
    integer("num_servers", num_servers, "Pass for example 1.")
    number = number_of_parts(fragments)
    if number == 1 and num_servers > 1:
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        if num_servers > len(leaves):
            raise ValueError(
                f"{len(leaves)} variables cannot be split among {num_servers} servers: "
                "each needs one or more. Pass a smaller num_servers."
            )
        owner = _evenly([_bytes_of(leaf) for _, leaf in leaves], num_servers)
        paths = [path_name(path) for path, _ in leaves]
        of_path = dict(zip(paths, owner, strict=True))
        whole = split(lambda path, leaf: of_path[path_name(path)], shapes)
        servers = tuple(range(num_servers))
        return Layout(whole, (servers,), servers)
    whole = split(fragments, shapes)
    if whole.number < num_servers:
        raise ValueError(
            f"{whole.number} fragments cannot be split among {num_servers} servers: "
            "each needs one or more. Pass a smaller num_servers, or more fragments."
        )
    turns = tuple((part,) for part in range(whole.number))
    if num_servers == 1:
        return Layout(whole, turns, (0,) * whole.number)
    sizes = [whole.pick(shapes, part) for part in range(whole.number)]
    sizes = [sum(map(_bytes_of, jax.tree.leaves(part))) for part in sizes]
    return Layout(whole, turns, tuple(_evenly(sizes, num_servers)))


class Variables:
    """The way from a tree to the paths of its arrays, and back."""

    def __init__(self, tree: Tree):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.treedef: Any = treedef
        self.paths: tuple[str, ...] = tuple(path_name(path) for path, _ in leaves)

    def tree(self, arrays: Arrays) -> Tree:
        """The tree of these arrays."""
        return self.treedef.unflatten([arrays[path] for path in self.paths])

    def arrays(self, tree: Tree) -> Arrays:
        """The arrays of a tree, by path."""
        return dict(zip(self.paths, self.treedef.flatten_up_to(tree), strict=True))


def _evenly(sizes: list[int], number: int) -> list[int]:
    """Which of so many bins each of these goes to, the largest first."""
    owner, full, filled = [0] * len(sizes), [0] * number, [0] * number
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Variables of size 0 must not leave a part empty.
        owner[i] = min(range(number), key=lambda part: (full[part], filled[part]))
        full[owner[i]] += sizes[i]
        filled[owner[i]] += 1
    return owner


def _bytes_of(x: Shaped) -> int:
    return math.prod(jnp.shape(x)) * np.dtype(x.dtype).itemsize
