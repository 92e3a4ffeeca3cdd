# SPDX-License-Identifier: Apache-2.0
"""Worker axes and PartitionSpecs of a tree with states, and its copies for workers."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optx_sync.checks import integer
from optx_sync.comm import shards
from optx_sync.comm.buffers import cut_numbers, in_rows
from optx_sync.placement import fields
from optx_sync.placement.leaves import Leaf, Mark, is_optax, leaves_of
from optx_sync.placement.workers import FIT, entries
from optx_sync.trees import Tree, check_arrays

# How an array is cut over n workers.
TO_CUT = {fields.Cut.NUMBERS: cut_numbers, fields.Cut.LEAVES: in_rows}


def equal_on_replicas(tree: Tree) -> list[bool]:
    """Whether each leaf of a tree with states in it is equal on all replicas.

    Leaves outside of states are; a state's table says it of its fields.
    """
    return [leaf.mark(0, replicated=True) is None for leaf in leaves_of(tree)]


def specs_like(
    tree: Tree, params: shards.Named, sizes: Mapping[str, int] | None = None
) -> list[PartitionSpec]:
    """The spec of each leaf of a tree with states in it, from the parameters' own.

    `params` are, by the names in their paths, the parameters and their specs, `None`
    where there is none. A leaf that belongs to a parameter lies like it; `sizes` are
    those of the mesh's axes.
    """

    def spec(leaf: Leaf, like: PartitionSpec) -> PartitionSpec:
        for node, *_ in leaf.around:
            if isinstance(node, fields.InStacks):  # which carry their specs
                return node.spec_of(leaf.x)
            if fields.is_in_pieces(node):  # flat, with none of its parameter's axes
                return PartitionSpec()
        return like

    return list(map(spec, leaves_of(tree), shards.specs_like(tree, params, sizes)))


def map_marked(
    function: Callable[[Leaf, Mark], Tree], tree: Tree, axes: Tree = None
) -> Tree:
    """`function` of each leaf and its mark in `axes`; without these, of 0."""
    marks = entries(0 if axes is None else axes, tree, "axes", FIT)
    return jax.tree.structure(tree).unflatten(map(function, leaves_of(tree), marks))


def stack(tree: Tree, n: int, axes: Tree = None) -> Tree:
    """`oxs.by_hand.replicate`."""
    n = integer("n", n, "Pass the number of workers.")
    check_arrays(tree, "What is stacked")
    return map_marked(lambda leaf, mark: stacked(leaf, leaf.x, n, mark), tree, axes)


def stacked(leaf: Leaf, x: Tree, n: int, mark: Mark, level: int = 0) -> jax.Array:
    """One worker's array with the axis of a level's workers, where its mark is 0.

    Of several levels the innermost comes first.
    """
    if mark is None:
        return jnp.copy(x)
    cut = leaf.cut(level)
    if cut:
        return TO_CUT[cut](x, n)
    copies = jnp.broadcast_to(x, (n, *jnp.shape(x)))
    if n > 1 and leaf.draws_own(level):
        return jax.vmap(fold_keys)(copies, jnp.arange(n, dtype=jnp.uint32))
    return copies


def fold_keys(keys: jax.Array, worker: int | jax.Array) -> jax.Array:
    """Random keys, each folded with a worker's number."""
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
    return folded.reshape(keys.shape)


# Optax's wrappers that step what they wrap in some steps only.
_SOMETIMES = (
    "ApplyIfFiniteState",
    "ConditionallyMaskState",
    "ConditionallyTransformState",
    "MultiStepsState",
)


def refuse_around_center(state: Tree) -> None:
    """Refuse a wrapper that decides for each worker whether a center rule steps."""

    def sometimes(x):
        return is_optax(x) and type(x).__name__ in _SOMETIMES

    def is_center(x):
        return hasattr(type(x), "center_params") and fields.is_level(x)

    for node in fields.nodes_of(state, sometimes):
        if fields.nodes_of(node, is_center):
            name = type(node).__name__.removesuffix("State")
            raise ValueError(
                f"Optax's {name} stands around a center rule: each worker would decide "
                "for itself whether it meets the others, who wait. Put it inside of the"
                " rule, oxs.diloco(optax.apply_if_finite(optax.adam(1e-3), 3), "
                "'workers'); optax.MultiSteps by its gradient_transformation()."
            )
