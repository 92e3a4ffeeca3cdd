# SPDX-License-Identifier: Apache-2.0
"""Whole leaves per owner, for `cross_shard(..., shard_state="leaves")` and `stacked`.

Leaves of one shape and dtype that `inner` treats alike are a group. Its K leaves are
stacked, `[K, ...]`, and padded to N rows of J = ceil(K / N): replica i owns J of them,
from leaf i J on, and `inner` works on each of them whole. A leaf that `inner` treats
number by number lies in pieces instead, as with `shard_state=True`.
"""

import functools
import math
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
    # Of each group's state: 0 for what each leaf has of its own, `None` for scalars
    # that are for all of them.
    axes: tuple[Any, ...]

    def cut(self, tree: Tree) -> tuple[Tree, list[jax.Array]]:
        """(the tree without what is owned whole, a stack `[K, ...]` of each group)."""
        leaves = self.treedef.flatten_up_to(tree)
        stacks = [_stack([leaves[k] for k in group.members]) for group in self.groups]
        owned = {k for group in self.groups for k in group.members}
        rest = [_MASKED if k in owned else x for k, x in enumerate(leaves)]
        return self.treedef.unflatten(rest), stacks

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


class Leaves:
    """`inner` on whole leaves and on pieces, and the trials that tell which is which.

    Args:
        inner: The transformation.
        axes: The mapped axes along which the owners lie, if any.
        option: The option that asked for owners, as the user wrote it, for
            messages.
        around: A chain in which another link sees all leaves, for messages.
    """

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        axes: tuple[str, ...],
        option: str = "shard_state='leaves'",
        around: str = (
            "optax.chain(oxs.all_reduce_grads('data'), "
            "optax.clip_by_global_norm(1.0), oxs.cross_shard(inner, 'data', "
            "grads='averaged', shard_state='leaves'))"
        ),
    ):
        self.inner: optax.GradientTransformationExtraArgs = inner
        self.axes: tuple[str, ...] = axes
        self.option: str = option
        self._around: str = around

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
        groups = [
            Group(path_name(pairs[found[0]][0]), tuple(found))
            for found in alike.values()
        ]
        if names is None:
            whole = self._whole(treedef, shapes, groups)
            names = {group.name for group in whole}
        found = tuple(group for group in groups if group.name in names)
        axes = (self._axes(treedef, shapes, group.members[0]) for group in found)
        return Plan(treedef, found, tuple(axes))

    def init(self, plan: Plan, rest: Tree, stacks: list[Any]) -> Owned:
        """The state of pieces, and of the leaves of stacks `[J, ...]`."""
        found = {
            group.name: self._init(plan, number, stack)
            for number, (group, stack) in enumerate(
                zip(plan.groups, stacks, strict=True)
            )
        }
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
        own, constants = state
        rest, stacks = (None, [None] * len(grads[1])) if params is None else params
        whole = self._merged(own.pieces, constants, grads[0])
        new, now = self.inner.update(grads[0], whole, rest, **extra)
        pieces, constants = self._split(now, grads[0])
        updates, found = [], {}
        for number, group in enumerate(plan.groups):
            given = grads[1][number], own.leaves[group.name], stacks[number]
            update, after = self._update(plan, number, *given, extra)
            updates.append(update)
            found[group.name] = after
        return (new, updates), Owned(pieces, found), constants

    def _constant(self, rest: Tree) -> list[bool]:
        """For each leaf of the state of pieces, whether it is a constant array."""
        sizes = (
            jax.tree.map(
                lambda x, more=more: (
                    jax.ShapeDtypeStruct((2 * x.size + more,), x.dtype)
                    if more
                    else jax.ShapeDtypeStruct(x.shape, x.dtype)
                ),
                rest,
            )
            for more in (0, 1)
        )
        one, other = (
            jax.tree.leaves(jax.eval_shape(self.inner.init, t)) for t in sizes
        )
        return [
            x.ndim > 0 and x.shape == y.shape for x, y in zip(one, other, strict=True)
        ]

    def _split(self, state: Tree, rest: Tree) -> tuple[Tree, list[Any]]:
        """(the state with `None` for its constant arrays, these arrays)."""
        leaves, treedef = jax.tree.flatten(state)
        flags = self._constant(rest)
        kept = [None if f else x for x, f in zip(leaves, flags, strict=True)]
        return treedef.unflatten(kept), [
            x for x, f in zip(leaves, flags, strict=True) if f
        ]

    def _merged(self, state: Tree, constants: list[Any], rest: Tree) -> Tree:
        """The inverse of `_split`."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rest)
        treedef = jax.tree.structure(jax.eval_shape(self.inner.init, shapes))
        found, left = iter(jax.tree.leaves(state)), iter(constants)
        return treedef.unflatten(
            next(left) if flag else next(found) for flag in self._constant(rest)
        )

    def _init(self, plan: Plan, number: int, stack: Any) -> Tree:
        """The state of `inner` for the leaves of a stack `[J, ...]`."""
        place = plan.groups[number].members[0]

        def one(x):
            return self.inner.init(_only(plan.treedef, place, x))

        return jax.vmap(one, out_axes=plan.axes[number])(stack)

    def _update(
        self, plan: Plan, number: int, grads: Any, state: Tree, params: Any, extra: Any
    ) -> tuple[jax.Array, Tree]:
        """The updates `[J, ...]` for the leaves of a stack, and the state."""
        place, axes = plan.groups[number].members[0], plan.axes[number]

        def one(grads, state, params):
            params = None if params is None else _only(plan.treedef, place, params)
            tree = _only(plan.treedef, place, grads)
            new, now = self.inner.update(tree, state, params, **extra)
            return plan.treedef.flatten_up_to(new)[place], cast_like(now, state)

        return jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes))(
            grads, state, params
        )

    def _axes(self, treedef, shapes, place: int) -> Tree:
        """The `Plan.axes` of a group's state: what depends on a leaf is its own."""

        def init(x):
            return self.inner.init(_only(treedef, place, x))

        def update(x, state):
            own = _only(treedef, place, x)
            return self.inner.update(own, state, own, value=jnp.float32(1))[1]

        x = shapes[place]
        with elementwise.as_optax_expects():
            state = jax.eval_shape(init, x)
            leaves, structure = jax.tree.flatten(state)
            numbers = range(len(leaves))
            own: set[int] = set()
            found = {k for k in numbers if leaves[k].ndim} | _mapped(init, (0,), x)
            # A scalar that becomes a leaf's own may make others so a step later.
            while found != own:
                own = found
                axes = structure.unflatten(0 if k in own else None for k in numbers)
                found = own | _mapped(update, (0, axes), x, state)
        return structure.unflatten(0 if k in own else None for k in numbers)

    def _treatment(self, treedef, shapes, place: int) -> Hashable:
        """What `inner` does to one leaf: of equal ones it treats the leaves alike."""
        own = _only(treedef, place, shapes[place])
        try:
            with elementwise.as_optax_expects():
                init, state = jax.make_jaxpr(self.inner.init, return_shape=True)(own)
                update = jax.make_jaxpr(
                    lambda grads, state, params: self.inner.update(
                        grads, state, params, value=jnp.float32(1)
                    )[0]
                )(own, state, own)
        except FAILURES as error:
            raise ValueError(
                f"{self.option} needs to try inner on each leaf alone, and that "
                f"failed: {error} Leave {self.option} out."
            ) from error
        # The text may contain JAX functions with their addresses, and shows constants
        # by their shapes alone.
        text = re.sub(r"0x[0-9a-f]+", "", f"{init}{update}")
        values = map(_value, [*_constants(init), *_constants(update)])
        return text, tuple(values)

    def _whole(self, treedef, shapes, groups: list[Group]) -> list[Group]:
        """The groups whose leaves must be whole, found by trial."""
        # One leaf for each kind of treatment is enough, whatever its size.
        small = [
            jax.ShapeDtypeStruct(
                tuple(min(2 if axis else 3, n) for axis, n in enumerate(x.shape)),
                np.float32,
            )
            for x in shapes
        ]
        kinds: dict[Hashable, int] = {}
        kind_of = {}
        for group in groups:
            place = group.members[0]
            kind_of[group] = self._treatment(treedef, small, place)
            kinds.setdefault(kind_of[group], place)
        alone = {
            kind: Elementwise(
                _of_one(self.inner, treedef, place), self.axes, self.option
            ).holds_for(small[place])
            for kind, place in kinds.items()
        }
        whole = [group for group in groups if not alone[kind_of[group]]]
        if not whole:
            return []
        # Up to three leaves: the first must be whole, and not all are treated alike.
        tried = [whole[0].members[0], *whole[0].members[1:2]]
        others = [g.members[0] for g in groups if g.members[0] not in tried]
        self._try(treedef, small, [*tried, *others][:3])
        return whole

    def _try(self, treedef, small, places: list[int]) -> None:
        """Refuse an `inner` whose update of a leaf depends on other leaves."""

        def tree_of(some, found):
            leaves: list[Any] = [_MASKED] * len(small)
            for place in some:
                leaves[place] = found[str(place)]
            return treedef.unflatten(leaves)

        def steps(some, params, grads):
            one = jax.vmap(functools.partial(elementwise.steps, self.inner))
            for axis in self.axes:
                one = elementwise.along(one, axis)
            leaves = treedef.flatten_up_to(
                one(tree_of(some, params), tree_of(some, grads))
            )
            return {str(place): leaves[place] for place in some}

        with elementwise.eager():
            drawn = elementwise.draw({str(place): small[place] for place in places})
            # A NaN in the first leaf must not reach the others.
            for place in map(str, places[1:]):
                drawn[1][place] = np.nan_to_num(drawn[1][place], nan=1.0)
            run = jax.jit(
                lambda drawn: [
                    steps(some, *drawn) for some in (places, *([p] for p in places))
                ],
                compiler_options={"xla_backend_optimization_level": 0},
            )
            together, *alone = run(drawn)
        for place, own in zip(places, alone, strict=True):
            one, two = together[str(place)], own[str(place)]
            # By the size of a leaf's update: it may be a millionth of the leaf.
            size = np.abs(np.nan_to_num(two))
            size = size.max(axis=tuple(range(2, two.ndim)), keepdims=True)
            if not np.allclose(one, two, rtol=1e-3, atol=1e-5 * size, equal_nan=True):
                raise ValueError(
                    f"{self.option} gives inner each leaf where it is owned, but with "
                    "this inner the update of a leaf depends on the others, as with "
                    "clip_by_global_norm, or with rates that are estimated from all "
                    f"leaves (Prodigy, DoG). Leave {self.option} out, or put what "
                    f"needs all leaves into a chain around it: {self._around}."
                )


def padded(stack: Any, replicas: int) -> Any:
    """The stack with zero rows added, up to a multiple of the number of replicas."""
    missing = -stack.shape[0] % replicas
    shape = stack.shape[0] + missing, *stack.shape[1:]
    if isinstance(stack, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, stack.dtype)
    return jnp.pad(stack, [(0, missing)] + [(0, 0)] * (stack.ndim - 1))


def reshaped(flat: Any, shape: tuple[int, ...]) -> Any:
    """Flat numbers of whole leaves, as `[J, ...]`."""
    rows = flat.size // math.prod(shape), *shape
    if isinstance(flat, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(rows, flat.dtype)
    return flat.reshape(rows)


def _stack(leaves: list[Any]) -> Any:
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        shape = len(leaves), *leaves[0].shape
        return jax.ShapeDtypeStruct(shape, leaves[0].dtype)
    return jnp.stack(leaves)


def _mapped(function: Callable[..., Tree], axes: Tree, *given: Any) -> set[int]:
    """The numbers of the results that depend on any argument of axis 0."""
    found: set[int] = set()

    def watch(number, result):
        same = jax.custom_batching.custom_vmap(lambda x: x)

        @same.def_vmap
        def _(size, mapped, x):  # it is called for what depends on the axis alone
            del size
            found.add(number)
            return x, *mapped

        same(result)

    def run(*given):
        for number, result in enumerate(jax.tree.leaves(function(*given))):
            watch(number, result)

    def of_one(*given):
        rows = jax.tree.map(
            lambda axis, x: x if axis is None else x[None],
            axes,
            given,
            is_leaf=lambda axis: axis is None,
        )
        jax.vmap(run, in_axes=axes, axis_size=1)(*rows)

    jax.eval_shape(of_one, *given)
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


def _only(treedef, place: int, x: Any) -> Tree:
    """A tree with this leaf alone; Optax takes the others for masked."""
    leaves: list[Any] = [_MASKED] * treedef.num_leaves
    leaves[place] = x
    return treedef.unflatten(leaves)


def _of_one(inner, treedef, place: int) -> optax.GradientTransformationExtraArgs:
    """`inner` for one leaf, which is given as an array."""

    def init(params):
        return inner.init(_only(treedef, place, params))

    def update(updates, state, params=None, **extra_args):
        params = None if params is None else _only(treedef, place, params)
        updates = _only(treedef, place, updates)
        new, state = inner.update(updates, state, params, **extra_args)
        return treedef.flatten_up_to(new)[place], state

    return optax.GradientTransformationExtraArgs(init, update)
