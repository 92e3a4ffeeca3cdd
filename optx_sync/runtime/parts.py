# SPDX-License-Identifier: Apache-2.0
"""Parts of the parameters: when each is exchanged, and on which server it lives."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center.fragments import Fragments, Partition, number_of_parts
from optx_sync.center.worker import start_center
from optx_sync.core.checks import integer
from optx_sync.core.trees import Tree, path_name
from optx_sync.meetings.coded import bytes_of
from optx_sync.runtime.messages import Arrays


class PartsLayout(NamedTuple):
    """The parts of a tree. A part lives on one server and is pushed on its own."""

    whole: Partition  # cuts a tree into parts
    turns: tuple[tuple[int, ...], ...]  # the parts that meet in the same round
    owners: tuple[int, ...]  # the server of each part

    def of_server(self, server: int) -> tuple[int, ...]:
        """The parts that live on a server."""
        return tuple(p for p, owner in enumerate(self.owners) if owner == server)

    def pick(self, tree: Tree, part: int) -> Tree:
        """A part of a tree, or of shapes."""
        if len(self.owners) > 1:  # `Partition` does not cut rows of NumPy arrays.
            tree = jax.tree.map(
                lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
            )
        return self.whole.pick(tree, part)

    def join(self, parts: dict[int, Arrays], shapes: Tree) -> Tree:
        """The tree made of these parts, as new JAX arrays in the parameters' dtypes."""
        trees = {
            part: jax.tree.map(jnp.array, tree_of(arrays, self.pick(shapes, part)))
            for part, arrays in parts.items()
        }
        if len(self.owners) == 1:
            return trees[0]
        center = start_center(shapes_of(shapes))
        tree = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), center)
        for part, values in trees.items():
            tree = self.whole.put(tree, part, values)
        return tree

    def mark(self, shapes: Tree, part: int) -> int:
        """A number that identifies the rows of a part."""
        rows = jax.tree.map(lambda x: np.arange(x.shape[0] if x.shape else 1), shapes)
        picked = jax.tree.leaves(self.pick(rows, part))
        return zlib.crc32(b"".join(np.asarray(x).tobytes() + b"," for x in picked))


def lay_out(shapes: Tree, fragments: Fragments, num_servers: int = 1) -> PartsLayout:
    """Split parameters into parts and spread these evenly over servers.

    Fragments, which meet in turn, go to servers as evenly as their bytes allow. With
    several servers and no fragments, the variables are split into one part for each
    server, and all parts meet in the same round.

    Raises:
        ValueError: More servers than parts or variables.
    """
    shapes = start_center(shapes_of(shapes))  # Parts are cut from the center.
    integer("num_servers", num_servers, "Pass for example 1.")
    number = number_of_parts(fragments)
    if number == 1 and num_servers > 1:
        pairs = jax.tree_util.tree_leaves_with_path(shapes)
        leaves = {path_name(path): leaf for path, leaf in pairs}
        if num_servers > len(leaves):
            raise ValueError(
                f"{len(leaves)} variables cannot be split among {num_servers} servers: "
                "each needs one or more. Pass a smaller num_servers."
            )
        owners = _evenly([*map(bytes_of, leaves.values())], num_servers)
        owner = dict(zip(leaves, owners, strict=True))
        whole = Partition(lambda path, _: owner[path_name(path)], shapes)
        servers = tuple(range(num_servers))
        return PartsLayout(whole, (servers,), servers)
    whole = Partition(fragments, shapes)
    if whole.number < num_servers:
        raise ValueError(
            f"{whole.number} fragments cannot be split among {num_servers} servers: "
            "each needs one or more. Pass a smaller num_servers, or more fragments."
        )
    turns = tuple((part,) for part in range(whole.number))
    sizes = [*map(bytes_of, whole.split(shapes))]
    return PartsLayout(whole, turns, tuple(_evenly(sizes, num_servers)))


def shapes_of(params: Tree) -> Tree:
    """The shapes of the parameters; a TypeError for what workers cannot exchange."""

    def shape_of(x: Any) -> Any:
        dtype = getattr(x, "dtype", None)
        return x if dtype is None else jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    start_center(shapes := jax.tree.map(shape_of, params))
    return shapes


def tree_of(arrays: Arrays, shapes: Tree) -> Tree:
    """A tree of received arrays: views, which the next message overwrites."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: np.asarray(arrays[path_name(path)]), shapes
    )


class Variables:
    """Conversion between a tree and a dict of its arrays by path."""

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
    """Assign sizes to bins evenly, the largest first: the bin of each."""
    owner, full, filled = [0] * len(sizes), [0] * number, [0] * number
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Variables of size 0 must not leave a part empty.
        owner[i] = min(range(number), key=lambda part: (full[part], filled[part]))
        full[owner[i]] += sizes[i]
        filled[owner[i]] += 1
    return owner
