# SPDX-License-Identifier: Apache-2.0
"""Whole leaves per owner, for `cross_shard(..., shard_state="leaves")` and `stacked`.

Leaves of one shape and dtype that `inner` treats alike are a group. Its K leaves are
stacked, `[K, ...]`, and padded to N rows of J = ceil(K / N): replica i owns J of them,
from leaf i J on, and `inner` works on each of them whole. A leaf that `inner` treats
number by number lies in pieces instead, as with `shard_state=True`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.core import programs
from optx_sync.core.programs import Elementwise, Leafwise, Mixes, Values
from optx_sync.core.trees import Tree, cast_like, path_name
from optx_sync.exchange.pieces import shapes_too
from optx_sync.state.fields import Owned

_MASKED = optax.MaskedNode()


class AlikeLeaves(NamedTuple):
    """Leaves that are owned whole, by their numbers in the tree."""

    name: str  # the path of the first one
    members: tuple[int, ...]
    own: frozenset[str]  # the names of the state that each leaf has of its own


class OwnersPlan(NamedTuple):
    """Which leaves are owned whole, and which lie in pieces."""

    treedef: Any
    groups: tuple[AlikeLeaves, ...]

    def cut(self, tree: Tree) -> tuple[Tree, list[jax.Array]]:
        """(the tree without what is owned whole, a stack `[K, ...]` of each group)."""
        leaves = self.treedef.flatten_up_to(tree)
        groups = ([leaves[k] for k in group.members] for group in self.groups)
        stacks = [shapes_too(jnp.stack, group) for group in groups]
        owned = {k for group in self.groups for k in group.members}
        rest = {k: x for k, x in enumerate(leaves) if k not in owned}
        return _only(self.treedef, rest), stacks

    def numbers(self) -> dict[str, jax.Array]:
        """The number of leaves of each group: int32[] each, by the group's name."""
        return {name: jnp.int32(leaves) for name, leaves in self.members().items()}

    def members(self) -> dict[str, int]:
        """The number of leaves of each group, by the group's name."""
        return {group.name: len(group.members) for group in self.groups}

    def join(self, rest: Tree, stacks: list[jax.Array]) -> Tree:
        """The tree that `cut` has cut; rows of padding are left out."""
        leaves = self.treedef.flatten_up_to(rest)
        for group, stack in zip(self.groups, stacks, strict=True):
            for row, place in enumerate(group.members):
                leaves[place] = stack[row]
        return self.treedef.unflatten(leaves)


class Leaves(NamedTuple):
    """`inner` on whole leaves and on pieces, and its program that says which is which.

    Attributes:
        inner: The transformation.
        axes: The mapped axes along which the owners lie, if any.
        option: The option that asked for owners, as the user wrote it, for
            messages.
        around: A chain in which another link sees all leaves, for messages.
    """

    inner: optax.GradientTransformationExtraArgs
    axes: tuple[str, ...]
    option: str
    around: str

    def plan(self, params: Tree, names: set[str] | None = None) -> OwnersPlan:
        """Which leaves are owned whole: those not elementwise, or those of `names`.

        Raises:
            ValueError: What `inner` does to a leaf depends on other leaves, or it
                cannot be traced.
        """
        pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in pairs]
        values = Values()
        read = self._read(self.inner, treedef.unflatten(shapes), values)
        alike: dict[Any, list[int]] = {}
        for place, x in enumerate(shapes):
            if x.size:
                label = x.shape, x.dtype, read.kinds[place]
                alike.setdefault(label, []).append(place)
        groups = [
            AlikeLeaves(path_name(pairs[first][0]), (first, *others), read.own[first])
            for first, *others in alike.values()
        ]

        def is_whole(group):
            place = group.members[0]
            if names is not None:
                return group.name in names
            return self._is_whole(treedef, place, shapes[place], read, values)

        return OwnersPlan(treedef, tuple(filter(is_whole, groups)))

    def init(self, plan: OwnersPlan, rest: Tree, stacks: list[Any]) -> Owned:
        """The state of pieces, and of the leaves of stacks `[J, ...]`."""
        found = {}
        for group, stack in zip(plan.groups, stacks, strict=True):
            alone = self._alone(plan.treedef, group.members[0])
            axes = _axes(alone, group, stack)
            found[group.name] = jax.vmap(alone.init, out_axes=axes)(stack)
        return Owned(self._split(self.inner.init(rest), rest)[0], found)

    def constants(self, rest: Tree) -> list[jax.Array]:
        """Arrays in the state of pieces that do not depend on what the pieces hold."""
        return self._split(self.inner.init(rest), rest)[1]

    def update(
        self,
        plan: OwnersPlan,
        grads: tuple[Tree, list[Any]],
        state: tuple[Owned, list[Any]],
        params: tuple[Tree, list[Any]] | None,
        extra: dict[str, Any],
    ) -> tuple[tuple[Tree, list[jax.Array]], Owned, list[jax.Array]]:
        """The updates of pieces and of stacks, and the state: (owned, constant)."""
        (own, constants), (rest, stacks) = state, grads
        params = params or (None, [None] * len(stacks))
        whole = self._merged(own.pieces, constants, rest)
        with programs.on_pieces(self.axes):
            new, now = self.inner.update(rest, whole, params[0], **extra)
        pieces, constants = self._split(now, rest)
        updates, found = [], {}
        for group, *given in zip(plan.groups, stacks, params[1], strict=True):
            alone = self._alone(plan.treedef, group.members[0])
            axes = _axes(alone, group, given[0])

            def one(state, grads, params, alone=alone):
                new, now = alone.update(grads, state, params, **extra)
                return new, cast_like(now, state)

            step = jax.vmap(one, in_axes=(axes, 0, 0), out_axes=(0, axes))
            update, found[group.name] = step(own.leaves[group.name], *given)
            updates.append(update)
        return (new, updates), Owned(pieces, found), constants

    def _constant(self, rest: Tree) -> tuple[Tree, list[bool]]:
        """The structure of the state of pieces, and which of its leaves are constants.

        These are arrays of one shape, whatever the sizes of the pieces.
        """

        def flat(x):
            return jax.ShapeDtypeStruct((2 * x.size + 1,), x.dtype)

        one = jax.eval_shape(self.inner.init, rest)
        other = jax.eval_shape(self.inner.init, jax.tree.map(flat, rest))
        one, treedef = jax.tree.flatten(one)
        pairs = zip(one, jax.tree.leaves(other), strict=True)
        return treedef, [x.ndim > 0 and x.shape == y.shape for x, y in pairs]

    def _split(self, state: Tree, rest: Tree) -> tuple[Tree, list[Any]]:
        """(the state with `None` for its constant arrays, these arrays)."""
        leaves, treedef = jax.tree.flatten(state)
        pairs = list(zip(leaves, self._constant(rest)[1], strict=True))
        kept = treedef.unflatten(None if constant else x for x, constant in pairs)
        return kept, [x for x, constant in pairs if constant]

    def _merged(self, state: Tree, constants: list[Any], rest: Tree) -> Tree:
        """The inverse of `_split`."""
        treedef, flags = self._constant(rest)
        found, left = iter(jax.tree.leaves(state)), iter(constants)
        return treedef.unflatten(next(left if flag else found) for flag in flags)

    def _read(self, inner: Any, tree: Tree, values: Values) -> Leafwise:
        """What `inner` does to each leaf of a tree, if it acts on each alone."""
        try:
            return programs.leafwise(inner, tree, self.axes, values)
        except Mixes as why:
            raise ValueError(self._refused(str(why))) from why

    def _is_whole(self, treedef, place: int, x: Any, read: Leafwise, values) -> bool:
        """Whether a leaf must be whole: `inner` does not act on each number alone."""
        alone = self._alone(treedef, place)
        if not read.has(place, self._read(alone, x, values)):
            raise ValueError(self._refused("its program for one leaf is another one"))
        try:
            Elementwise(alone, self.axes, self.option).require(x, constants=True)
        except Mixes:
            return True
        return False

    def _refused(self, why: str) -> str:
        return (
            f"{self.option} gives inner each leaf where it is owned, which is right "
            "for transformations that act on each leaf alone, such as Muon; but with "
            f"this one {why}. Put what needs all leaves into a chain around it: "
            f"{self.around}. Or leave {self.option} out."
        )

    def _alone(self, treedef, place: int) -> optax.GradientTransformationExtraArgs:
        """`inner` for one leaf, which is given as an array."""

        def only(x) -> Tree:
            return None if x is None else _only(treedef, {place: x})

        def update(updates, state, params=None, **extra_args):
            new, state = self.inner.update(
                only(updates), state, only(params), **extra_args
            )
            return treedef.flatten_up_to(new)[place], state

        return optax.GradientTransformationExtraArgs(
            lambda params: self.inner.init(only(params)), update
        )


def padded(stack: jax.Array, replicas: int) -> jax.Array:
    """The stack with zero rows added, up to a multiple of the number of replicas."""
    missing = -stack.shape[0] % replicas
    return jnp.pad(stack, [(0, missing)] + [(0, 0)] * (stack.ndim - 1))


def _axes(
    alone: optax.GradientTransformationExtraArgs, group: AlikeLeaves, x: Any
) -> Tree:
    """Of the state of stacked leaves: 0 for what each leaf has of its own, else `None`.

    That are arrays, and scalars that depend on the leaf.
    """
    x = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    with programs.as_optax_expects():
        state = jax.eval_shape(alone.init, x)

    def axis(path, x):
        return 0 if x.ndim or path_name(path) in group.own else None

    return jax.tree_util.tree_map_with_path(axis, state)


def _only(treedef, found: dict[int, Any]) -> Tree:
    """A tree with the leaves of these numbers; Optax takes the others for masked."""
    leaves = range(treedef.num_leaves)
    return treedef.unflatten(found.get(place, _MASKED) for place in leaves)
