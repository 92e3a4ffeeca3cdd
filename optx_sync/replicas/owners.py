# SPDX-License-Identifier: Apache-2.0
"""Whole leaves per owner, for `cross_shard(..., shard_state="leaves")` and `stacked`.

Leaves of one shape and dtype that `inner` treats alike are a group. Its K leaves are
stacked, `[K, ...]`, and padded to N rows of J = ceil(K / N): replica i owns J of them,
from leaf i J on, and `inner` works on each of them whole. A leaf that `inner` treats
number by number lies in pieces instead, as with `shard_state=True`.
"""

import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync import elementwise
from optx_sync.elementwise import FAILURES, Elementwise
from optx_sync.exchange.pieces import shapes_too
from optx_sync.placement.fields import Owned
from optx_sync.placement.leaves import is_key
from optx_sync.trees import Tree, cast_like, path_name

_MASKED = optax.MaskedNode()


class Group(NamedTuple):
    """Leaves that are owned whole, by their numbers in the tree."""

    name: str  # the path of the first one
    members: tuple[int, ...]


class Plan(NamedTuple):
    """Which leaves are owned whole, and which lie in pieces."""

    treedef: Any
    groups: tuple[Group, ...]

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
        return {group.name: jnp.int32(len(group.members)) for group in self.groups}

    def join(self, rest: Tree, stacks: list[jax.Array]) -> Tree:
        """The tree that `cut` has cut; rows of padding are left out."""
        leaves = self.treedef.flatten_up_to(rest)
        for group, stack in zip(self.groups, stacks, strict=True):
            for row, place in enumerate(group.members):
                leaves[place] = stack[row]
        return self.treedef.unflatten(leaves)


class Leaves(NamedTuple):
    """`inner` on whole leaves and on pieces, and the trials that tell which is which.

    Attributes:
        inner: The transformation.
        axes: The mapped axes along which the owners lie, if any.
        option: The option that asked for owners, as the user wrote it, for
            messages.
        around: A chain in which another link sees all leaves, for messages.
    """

    inner: optax.GradientTransformationExtraArgs
    axes: tuple[str, ...]
    option: str = "shard_state='leaves'"
    around: str = (
        "optax.chain(oxs.all_reduce_grads('data'), optax.clip_by_global_norm(1.0), "
        "oxs.cross_shard(inner, 'data', grads='averaged', shard_state='leaves'))"
    )

    def plan(self, params: Tree, names: set[str] | None = None) -> Plan:
        """Which leaves are owned whole: those not elementwise, or those of `names`.

        Raises:
            ValueError: What `inner` does to a leaf depends on other leaves, or it
                cannot be tried.
        """
        pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in pairs]
        alike: dict[Any, list[int]] = {}
        for place, x in enumerate(shapes):
            if x.size:
                label = x.shape, x.dtype, self._treatment(treedef, shapes, place)
                alike.setdefault(label, []).append(place)
        firsts = [path_name(pairs[found[0]][0]) for found in alike.values()]
        groups = list(map(Group, firsts, map(tuple, alike.values())))
        if names is None:
            names = {group.name for group in self._whole(treedef, shapes, groups)}
        return Plan(treedef, tuple(group for group in groups if group.name in names))

    def init(self, plan: Plan, rest: Tree, stacks: list[Any]) -> Owned:
        """The state of pieces, and of the leaves of stacks `[J, ...]`."""
        found = {}
        for group, stack in zip(plan.groups, stacks, strict=True):
            alone = self._alone(plan.treedef, group.members[0])
            found[group.name] = jax.vmap(alone.init, out_axes=_axes(alone, stack))(
                stack
            )
        return Owned(self._split(self.inner.init(rest), rest)[0], found)

    def constants(self, rest: Tree) -> list[jax.Array]:
        """Arrays in the state of pieces that do not depend on what the pieces hold."""
        return self._split(self.inner.init(rest), rest)[1]

    def update(
        self,
        plan: Plan,
        grads: tuple[Tree, list[Any]],
        state: tuple[Owned, list[Any]],
        params: tuple[Tree, list[Any]] | None,
        extra: dict[str, Any],
    ) -> tuple[tuple[Tree, list[jax.Array]], Owned, list[jax.Array]]:
        """The updates of pieces and of stacks, and the state: (owned, constant)."""
        (own, constants), (rest, stacks) = state, grads
        params = params or (None, [None] * len(stacks))
        whole = self._merged(own.pieces, constants, rest)
        new, now = self.inner.update(rest, whole, params[0], **extra)
        pieces, constants = self._split(now, rest)
        updates, found = [], {}
        for group, *given in zip(plan.groups, stacks, params[1], strict=True):
            alone = self._alone(plan.treedef, group.members[0])
            axes = _axes(alone, given[0])

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

    def _treatment(self, treedef, shapes, place: int) -> Hashable:
        """What `inner` does to one leaf: of equal ones it treats the leaves alike."""
        own, alone = shapes[place], self._alone(treedef, place)

        def step(grads, state, params):
            return alone.update(grads, state, params, value=jnp.float32(1))[0]

        try:
            with elementwise.as_optax_expects():
                init, state = jax.make_jaxpr(alone.init, return_shape=True)(own)
                update = jax.make_jaxpr(step)(own, state, own)
        except FAILURES as error:
            raise ValueError(
                f"{self.option} needs to try inner on each leaf alone, and that "
                f"failed: {error} Leave {self.option} out."
            ) from error
        # The text may contain JAX functions with their addresses, and shows constants
        # by their shapes alone.
        text = re.sub(r"0x[0-9a-f]+", "", f"{init}{update}")
        return text, tuple(map(_value, [*_constants(init), *_constants(update)]))

    def _whole(self, treedef, shapes, groups: list[Group]) -> list[Group]:
        """The groups whose leaves must be whole, found by trial."""
        small = [elementwise.small(x, 3, 2) for x in shapes]
        # One leaf for each kind of treatment is enough, whatever its size.
        by_numbers: dict[Hashable, bool] = {}

        def is_whole(group):
            place = group.members[0]
            kind = self._treatment(treedef, small, place)
            if kind not in by_numbers:
                alone = self._alone(treedef, place)
                check = Elementwise(alone, self.axes, self.option)
                by_numbers[kind] = check.holds_for(small[place])
            return not by_numbers[kind]

        whole = list(filter(is_whole, groups))
        if whole:
            # Up to three leaves: the first must be whole, and not all are alike.
            tried = [whole[0].members[0], *whole[0].members[1:2]]
            others = [g.members[0] for g in groups if g.members[0] not in tried]
            self._try(treedef, small, [*tried, *others][:3])
        return whole

    def _try(self, treedef, small, places: list[int]) -> None:
        """Refuse an `inner` whose update of a leaf depends on other leaves."""
        with elementwise.eager():
            drawn = elementwise.draw({place: small[place] for place in places})
            # A NaN in the first leaf must not reach the others.
            for place in places[1:]:
                drawn[1][place] = np.nan_to_num(drawn[1][place], nan=1.0)
            together, *alone = elementwise.updates_of(
                self.inner,
                self.axes,
                *(
                    [_only(treedef, {k: x[k][None] for k in some}) for x in drawn]
                    for some in (places, *([place] for place in places))
                ),
            )
        for place, own in zip(places, alone, strict=True):
            one, two = (treedef.flatten_up_to(x)[place][0] for x in (together, own))
            # By the size of a leaf's update: it may be a millionth of the leaf.
            size = np.abs(np.nan_to_num(two))
            size = size.max(axis=tuple(range(2, two.ndim)), keepdims=True)
            if not np.allclose(one, two, rtol=1e-3, atol=1e-5 * size, equal_nan=True):
                raise ValueError(
                    f"{self.option} gives inner each leaf where it is owned, but with "
                    "this inner the update of a leaf depends on the others, as with "
                    "clip_by_global_norm, or with rates that are estimated from all "
                    f"leaves (Prodigy, DoG). Leave {self.option} out, or put what "
                    f"needs all leaves into a chain around it: {self.around}."
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


def _axes(alone: optax.GradientTransformationExtraArgs, stack: Any) -> Tree:
    """Of the state of stacked leaves: 0 for what each leaf has of its own, else `None`.

    That are arrays, and scalars that depend on the leaf.
    """

    def update(x, state):
        return alone.update(x, state, x, value=jnp.float32(1))[1]

    x = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    with elementwise.as_optax_expects():
        state = jax.eval_shape(alone.init, x)
        leaves, structure = jax.tree.flatten(state)
        numbers = range(len(leaves))

        def axes(own):
            return structure.unflatten(0 if k in own else None for k in numbers)

        own, found = set(), {k for k in numbers if leaves[k].ndim}
        found = found | _mapped(alone.init, (0,), x)
        # A scalar that becomes a leaf's own may make others so a step later.
        while found != own:
            own = found
            found = own | _mapped(update, (0, axes(own)), x, state)
    return axes(own)


def _mapped(function: Callable[..., Tree], axes: Tree, *given: Any) -> set[int]:
    """The numbers of the results that depend on any argument of axis 0."""
    found: set[int] = set()
    watch = jax.custom_batching.custom_vmap(lambda *results: results)

    @watch.def_vmap
    def _(size, mapped, *results):  # it is called if any depends on the axis
        del size
        found.update(number for number, depends in enumerate(mapped) if depends)
        return results, tuple(mapped)

    def run(*given):
        watch(*jax.tree.leaves(function(*given)))

    def row(axis, x):
        return x if axis is None else jax.ShapeDtypeStruct((1, *x.shape), x.dtype)

    rows = jax.tree.map(row, axes, given, is_leaf=lambda axis: axis is None)
    jax.eval_shape(jax.vmap(run, in_axes=axes, axis_size=1), *rows)
    return found


def _constants(closed: Any) -> Iterator[Any]:
    """The values that a program holds, also in the functions that it calls."""
    yield from getattr(closed, "consts", ())
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for x in jax.tree.leaves([*equation.params.values()]):
            if hasattr(getattr(x, "jaxpr", x), "eqns"):
                yield from _constants(x)


def _value(x: Any) -> Hashable:
    """Equal for equal arrays, where they can be read; else the array's identity."""
    if isinstance(x, jax.core.Tracer) or is_key(x):
        return id(x)
    if isinstance(x, jax.Array) and not x.is_fully_replicated:
        return id(x)
    x = np.asarray(x)
    return x.shape, x.dtype.str, x.tobytes()


def _only(treedef, found: dict[int, Any]) -> Tree:
    """A tree with the leaves of these numbers; Optax takes the others for masked."""
    leaves = range(treedef.num_leaves)
    return treedef.unflatten(found.get(place, _MASKED) for place in leaves)
