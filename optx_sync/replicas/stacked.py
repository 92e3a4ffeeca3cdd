# SPDX-License-Identifier: Apache-2.0
"""Whole matrices per device under plain `jax.jit`, where parameters are sharded."""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optx_sync.comm.buffers import rows_on, with_rows
from optx_sync.core import checks
from optx_sync.core.trees import Tree
from optx_sync.exchange import contract
from optx_sync.exchange.pieces import shapes_too
from optx_sync.replicas import owners
from optx_sync.state import fields
from optx_sync.state.fields import InStacks, Owned

Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

_NOT_CUT = None, PartitionSpec.UNCONSTRAINED
_CALL = "oxs.stacked(optax.contrib.muon(0.02), jax.P('fsdp'))"
_OPTION = "oxs.stacked"
_AROUND = "optax.chain(optax.clip_by_global_norm(1.0), oxs.stacked(inner, spec))"


@fields.declare(
    stacks=fields.LIKE_PARAMS, rest=fields.LIKE_PARAMS, constants=fields.LIKE_PARAMS
)
class StackedState(NamedTuple):
    """State of `stacked`.

    Attributes:
        stacks: The state of `inner` for each group of leaves that are alike, by the
            path of the group's first leaf. Its arrays are stacks, [K, ...], with K, the
            number of leaves, padded to a multiple of the number of devices.
        rest: The state of `inner` for the leaves that are treated number by number,
            with `None` for `constants`.
        constants: The arrays in that state which do not depend on the leaves.
    """

    stacks: InStacks
    rest: Any
    constants: list[Any]


@checks.shows_call(_CALL)
def stacked(
    inner: optax.GradientTransformation, spec: PartitionSpec | NamedSharding
) -> optax.GradientTransformationExtraArgs:
    r"""Run Muon and others that need whole matrices on parameters sharded by FSDP.

    Under plain `jax.jit` Newton-Schulz on a sharded matrix communicates in each of its
    multiplications, or the compiler gathers every matrix on every device. Here leaves
    of one shape and dtype that `inner` treats alike are stacked, and the stack is
    resharded so that each device holds whole leaves:

    .. math::

        G &= \text{stack}(g_1, \ldots, g_K), \quad
            [K, n, m] \text{ cut along } K \text{ by } spec \\
        u_k &= \text{inner}(G_k) \quad \text{where } G_k \text{ lies} \\
        \text{updates} &= u_1, \ldots, u_K, \text{ cut as the parameters are}

    This is one all-to-all in and one out for each group, and none in between. Each of N
    devices computes 1/N of the matrices and holds 1/N of `inner`'s state. Leaves that
    `inner` treats number by number, such as Adam's in `optax.contrib.muon`, stay as the
    parameters lie. Where N does not divide K the stack is padded with zeros, which
    travel, too: a matrix that is alone in its group saves nothing.

    An axis in `spec` over which parameters are replicated, as in `jax.P(("data",
    "fsdp"))`, divides the work further, and adds an all-gather of the updates over it.
    `cross_shard(..., shard_state="leaves")` is the same for a mapped axis, where
    gradients are still to be reduced.

    Args:
        inner: The transformation. It must act on each leaf alone, as
            `optax.contrib.muon` does; `init` reads that off its program.
        spec: How the stacks lie along their first dimension: `jax.P("fsdp")`, or a
            tuple of axes. A `NamedSharding` brings its mesh; otherwise `init` and
            `update` run under `jax.set_mesh(mesh)`. Axes may be Auto or Explicit.

    Returns:
        A transformation for `jax.jit` with a `StackedState`. One that was saved on
            another number of devices, or along other axes, goes on: `Workers.restore`
            and `resize` pad its stacks anew, and so does `update` with those that
            Orbax has read, `StandardRestore(like, strict=False)`.

    Raises:
        TypeError: `inner` is no transformation, `spec` is neither of the two.
        ValueError: `spec` names no axis, or other dimensions than the first; no
            mesh, or one without these axes; an `inner` whose update of a leaf
            depends on other leaves; the state of another number of leaves.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> tx = oxs.stacked(optax.lars(0.02), jax.P("fsdp"))
        >>> params = {"a": jnp.eye(2), "b": jnp.ones((2, 2))}
        >>> with jax.set_mesh(mesh):
        ...     state = jax.jit(tx.init)(params)
        ...     updates, state = jax.jit(tx.update)(params, state, params)
        >>> sorted(state.stacks.tree), updates["a"].shape
        (["['a']"], (2, 2))

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
        https://kellerjordan.github.io/posts/muon.
    """
    inner = checks.check_inner(inner, _CALL)
    places = _Places(_check_spec(spec), spec)
    leaves = owners.Leaves(inner, (), _OPTION, _AROUND)
    stacks = _Stacked(leaves, places)
    return optax.GradientTransformationExtraArgs(stacks.init, stacks.update)


class _Places(NamedTuple):
    """Where stacks lie: cut along the first dimension over these axes."""

    names: tuple[str, ...]
    spec: PartitionSpec | NamedSharding

    def mesh(self) -> Mesh:
        """The mesh of `spec`, or the current one."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        if isinstance(self.spec, NamedSharding):
            mesh = self.spec.mesh
        missing = [name for name in self.names if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"oxs.stacked lays its stacks over {missing}, and the mesh has the "
                f"axes {tuple(mesh.axis_names)}. Call init and update under "
                "jax.set_mesh(mesh), or pass jax.NamedSharding(mesh, spec)."
            )
        return mesh

    def sizes(self) -> list[int]:
        """The number of devices along each of the axes."""
        return [self.mesh().shape[name] for name in self.names]

    def laid(self, stack: jax.Array) -> jax.Array:
        """A padded stack `[K, ...]`, placed as `spec` says."""
        return self._put(stack, PartitionSpec(self.names))

    def whole(self, stack: jax.Array) -> jax.Array:
        """A stack of which each device has all rows."""
        return self._put(stack, PartitionSpec())

    def give(self, stack: jax.Array) -> jax.Array:
        """A stack `[K, ...]`, padded and resharded to whole leaves on each device."""
        stack = owners.padded(stack, math.prod(self.sizes()))
        # One axis after the other: for both at once the compiler gathers the stack.
        grid = stack.reshape(*self.sizes(), -1, *stack.shape[1:])
        for spec in self._ways(stack):
            grid = self._put(grid, spec)
        return self.laid(grid.reshape(stack.shape))

    def take(self, updates: jax.Array, like: jax.Array) -> jax.Array:
        """The rows of `like` `[K, ...]`, sharded as it is."""
        grid = updates.reshape(*self.sizes(), -1, *like.shape[1:])
        for spec in reversed(self._ways(like)):
            grid = self._put(grid, spec)
        return grid.reshape(-1, *like.shape[1:])[: like.shape[0]]

    def _ways(self, stack: jax.Array) -> list[PartitionSpec]:
        """How `[*sizes, K / N, ...]` lies: as leaves do, then cut by one axis more."""
        rest: list[Any] = [PartitionSpec.UNCONSTRAINED] * (stack.ndim - 1)
        if self._is_explicit():
            own = list(jax.typeof(stack).sharding.spec)[1:]
            rest = [*own, *[None] * (stack.ndim - 1 - len(own))]
        ways = []
        for done in range(len(self.names) + 1):
            taken = self.names[:done]
            first = *taken, *[None] * (len(self.names) - done)
            other = [_without(part, {*taken}) for part in rest]
            if taken == self.names:
                other = [None] * len(rest)
            ways.append(PartitionSpec(*first, None, *other))
        return ways

    def _is_explicit(self) -> bool:
        return {*self.names} <= {*self.mesh().explicit_axes}

    def _put(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        where: Any = spec
        if isinstance(self.spec, NamedSharding):
            where = NamedSharding(self.spec.mesh, spec)
        if self._is_explicit():
            return jax.reshard(x, where)
        return jax.lax.with_sharding_constraint(x, where)


class _Stacked(NamedTuple):
    """`init` and `update` of `stacked`."""

    leaves: owners.Leaves
    places: _Places

    def init(self, params):
        """The state of the stacks, and of what lies as the parameters do."""
        checks.check_params(params)
        checks.refuse_placeholder(params, "stacked")
        plan = self.leaves.plan(params)
        rest, stacks = plan.cut(params)
        given = [shapes_too(self.places.give, x) for x in stacks]
        own = self.leaves.init(plan, rest, given)
        return self._state(plan, own, self.leaves.constants(rest))

    def update(self, updates, state, params=None, **extra_args):
        """The updates, sharded like the parameters, and the state."""
        checks.check_grads(updates, params)
        contract.require_dense(updates, _OPTION)
        like = updates if params is None else params
        plan = self.leaves.plan(like, set(state.stacks.tree))
        own = Owned(state.rest, self._padded(plan, state.stacks))
        grads, full = plan.cut(updates), plan.cut(like)

        def given(tree):
            return tree[0], [self.places.give(x) for x in tree[1]]

        before = None if params is None else given(full)
        (rest, stacks), own, constants = self.leaves.update(
            plan, given(grads), (own, state.constants), before, extra_args
        )
        stacks = list(map(self.places.take, stacks, full[1]))
        new = checks.fill_missing(plan.join(rest, stacks), params)
        return new, self._state(plan, own, constants)

    def _state(self, plan: owners.OwnersPlan, own: Owned, constants: list[Any]) -> Tree:
        """The state, with its stacks placed."""
        laid = self.places.laid
        stacks = jax.tree.map(lambda x: laid(x) if x.ndim else x, own.leaves)
        many = plan.members()
        found = {
            name: jax.tree.map(lambda x, k=many[name]: k if x.ndim else 0, tree)
            for name, tree in stacks.items()
        }
        sizes = tuple(jax.tree.leaves(found))
        stacks = InStacks(stacks, self.places.names, sizes)
        return StackedState(stacks, own.pieces, constants)

    def _padded(self, plan: owners.OwnersPlan, stacks: InStacks) -> dict[str, Tree]:
        """The stacks of a state, padded anew where it was of other devices."""
        devices, many = self.places.sizes(), plan.members()
        before = jax.tree.structure(stacks.tree).unflatten(stacks.sizes)
        for name, sizes in before.items():
            leaves = max(jax.tree.leaves(sizes), default=0)
            if leaves and leaves != many.get(name):
                raise ValueError(
                    f"The state of oxs.stacked at {name} is of {leaves} leaves that "
                    f"are alike, and these parameters have {many.get(name, 0)}: it "
                    "belongs to others. Pass those that tx.init was given, or begin "
                    "with tx.init(params)."
                )

        def padded(x, leaves):
            if not x.ndim:
                return x
            rows = rows_on(leaves, devices)
            if x.shape[0] != rows:
                x = with_rows(self.places.whole(x), leaves, rows)
            return self.places.laid(x)

        return jax.tree.map(padded, stacks.tree, before)


def _check_spec(spec: object) -> tuple[str, ...]:
    """The axes of a spec that cuts the first dimension only."""
    parts = spec.spec if isinstance(spec, NamedSharding) else spec
    if not isinstance(parts, PartitionSpec):
        raise TypeError(
            "spec must be a jax.P or a jax.NamedSharding that says how stacks of "
            f"leaves lie, such as jax.P('fsdp'); got {spec!r}."
        )
    first, *others = parts or (None,)
    if first in _NOT_CUT or any(x is not None for x in others):
        raise ValueError(
            "spec must name the axes along which stacks of whole leaves are cut, in "
            "its first place and no other, such as jax.P('fsdp') or "
            f"jax.P(('data', 'fsdp')); got {parts}."
        )
    return (first,) if isinstance(first, str) else tuple(first)


def _without(part: Any, taken: set[str]) -> Any:
    """How a dimension is cut once these axes cut another one."""
    if part in _NOT_CUT:
        return part
    names = (part,) if isinstance(part, str) else part
    return tuple(name for name in names if name not in taken) or None
