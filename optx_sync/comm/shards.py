# SPDX-License-Identifier: Apache-2.0
"""Workers that are sharded themselves, over mesh axes that the compiler partitions.

Such workers communicate shard by shard: in a `jax.shard_map` inside the workers' one,
each device has one shard and sends only that. If it were left to the compiler, a coded
collective would make each device gather and send all of the worker's arrays.

`oxs.by_hand.map_workers(specs=)` says how a worker is sharded while it traces, in a JAX
user context, which is part of the key of compiled programs. Along `Explicit` axes the
types say it.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from optx_sync.comm.collectives import (
    AxisName,
    check_axis_name,
    checked_axes,
    vary,
    without_types,
)
from optx_sync.core.trees import (
    Tree,
    is_masked,
    names_of,
    one_or_several,
    path_name,
    pure,
)

Names: TypeAlias = tuple[str, ...]  # in a path
# The specs of one worker's parameters by the names in their paths.
Specs: TypeAlias = tuple[tuple[Names, PartitionSpec], ...]
# The parameters, with their specs where they have one.
Named: TypeAlias = Mapping[Names, tuple[Any, Any]]


class _KnownSpecs(NamedTuple):
    """How a worker is sharded, as known while it is traced."""

    specs: Specs | None = None
    inside: tuple[str, ...] = ()  # inside `in_shards`: the axes of the shards


_context = jax.make_user_context(default_value=_KnownSpecs())


def with_specs(specs: Specs | None) -> Any:
    """A context in which workers have these specs; `None` keeps the current ones."""
    now: _KnownSpecs = _context.value
    return _context(now if specs is None else _KnownSpecs(specs))


def axes_in(entry: Any) -> tuple[str, ...]:
    """The axis names in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The axis names in a `PartitionSpec`."""
    return tuple(axis for entry in spec for axis in axes_in(entry))


def are_explicit(mesh: Mesh | AbstractMesh, axes: Collection[str]) -> bool:
    """Whether all of these axes of the mesh are of type `Explicit`."""
    return set(axes) <= set(mesh.explicit_axes)


def specs_by_name(specs: Tree, sizes: Mapping[str, int], axes: AxisName) -> Specs:
    """The specs of one worker's parameters by the names in their paths, checked.

    `sizes` are the sizes of the mesh's axes; `axes` are the workers' axes, which specs
    must not name.
    """
    found = []
    inner = {name: n for name, n in sizes.items() if name not in check_axis_name(axes)}
    # nnx.get_partition_spec leaves variables around them, which parameters lose.
    specs = pure(specs)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "specs is a tree of the jax.sharding.PartitionSpec of one worker's "
                f"parameters; at {path_name(path)} it holds a {type(spec).__name__}. "
                "Write for example specs={'w': P('shards')}, or P() for what is whole."
            )
        if unknown := set(axes_of(spec)) - set(inner):
            raise ValueError(
                f"specs at {path_name(path)} is {spec}, and {sorted(unknown)[0]!r} is "
                "no axis of the mesh along which a worker's parameters may be sharded; "
                f"these are {inner}. Give the specs of one worker's parameters, "
                "without the workers' own axis."
            )
        found.append((names_of(path), spec))
    return tuple(found)


class Shards(NamedTuple):
    """How the arrays of a tree are sharded over the devices of one worker."""

    axes: tuple[str, ...]
    specs: Tree  # the `PartitionSpec` of each leaf


def shards_of(tree: Tree, axis_name: AxisName) -> Shards | None:
    """How one worker's arrays are sharded; `None` if they are not, as far as known.

    Raises:
        ValueError: `specs` does not cover a leaf.
    """
    mesh = jax.sharding.get_abstract_mesh()
    own = check_axis_name(axis_name)
    mapped = own and set(own) <= set(mesh.manual_axes)
    rest = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    typed = are_explicit(mesh, rest)
    specs = _context.value.specs
    if not (mapped and rest and (typed or specs is not None)):
        return None
    if not typed:
        return Shards(rest, _asked(specs or (), tree, mesh.shape))
    found = jax.tree.map(_typed, tree)
    return Shards(rest, found) if any(map(_is_cut, jax.tree.leaves(found))) else None


def like(memory: Tree, tree: Tree, shards: Shards) -> Tree:
    """The specs of an exchange's memory, which has arrays like those of `tree`.

    Along `Explicit` axes the types say them. Elsewhere an array is sharded like the
    leaf that it resembles (`spec_like`), or whole on each device.
    """
    if are_explicit(jax.sharding.get_abstract_mesh(), shards.axes):
        return jax.tree.map(_typed, memory)
    specs, named = iter(jax.tree.leaves(shards.specs)), {}
    # A part of the parameters lacks some leaves, and so does what is owed of it.
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked):
        pair = (None, None) if is_masked(x) else (x, next(specs))
        named[names_of(path)] = pair
    return jax.tree.structure(memory).unflatten(specs_like(memory, named))


def of_part(part: Tree, params: Tree) -> Any:
    """A context in which a part of the parameters lies by `spec_of_rows`.

    It warns where parts that all shards send are more than what one of them sends.
    """
    specs, sizes = _context.value.specs, jax.sharding.get_abstract_mesh().shape
    if specs is None:
        return with_specs(None)
    asked = jax.tree_util.tree_leaves_with_path(_asked(specs, params, sizes))
    known = {names_of(path): spec for path, spec in asked}
    found = [
        (x.nbytes, name, x.shape, spec_of_rows(x.shape, known[name], sizes))
        for path, x in jax.tree_util.tree_leaves_with_path(part)
        if (name := names_of(path)) in known
    ]
    shards = math.prod(
        sizes[axis] for axis in {*itertools.chain(*map(axes_of, known.values()))}
    )
    whole = [one[:3] for one in found if one[3] is None]
    if whole and sum(one[0] for one in whole) * shards > sum(one[0] for one in found):
        _, name, shape = max(whole)
        warnings.warn(
            f"Each of the {shards} shards of a worker sends all of {'.'.join(name)}, an"
            f" array of shape {shape}, as {shards} divides none of its axes. Cut it "
            "otherwise: pass fragments=oxs.rules.strided(P), or a function that gives "
            f"whole leaves to a part, or {shards} rows or a multiple.",
            stacklevel=2,
        )
    own = ((name, spec or PartitionSpec()) for _, name, _, spec in found)
    return with_specs((*own, *specs))  # of equally long names the first counts


def in_shards(
    fun: Callable[..., Tree], shards: Shards, in_specs: Tree, out_specs: Tree
) -> Callable[..., Tree]:
    """Apply `fun`, a function of one device's shards, to one worker's whole arrays.

    Inside types say which arrays are in shards and which are whole on each device, also
    where the workers' own `shard_map` has none.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    untyped = set(manual) - set(checked_axes(manual))

    def inside(*args):
        args = jax.tree.map(lambda x: vary(x, untyped), args)
        with _context(_KnownSpecs(inside=shards.axes)):
            return fun(*args)

    mapped = jax.shard_map(
        inside, in_specs=in_specs, out_specs=out_specs, axis_names=set(shards.axes)
    )
    if not untyped:
        return mapped
    return lambda *args: jax.tree.map(without_types, mapped(*args))


def axes_inside() -> tuple[str, ...]:
    """The axes of the shards, inside a function of `in_shards`; elsewhere ()."""
    return _context.value.inside


def spec_of_kept_axes(
    leaf: Any, spec: PartitionSpec, param: Any, sizes: Mapping[str, int] | None = None
) -> PartitionSpec:
    """The spec of a leaf whose axes are some of its parameter's, in the same order.

    Axis 0 may have another size; it is then whole, or by `sizes`, those of the mesh's
    axes, as `spec_of_rows` says. If the shapes do not say which axes the leaf has, the
    leaf is whole.
    """
    shape = jnp.shape(param)
    if leaf.shape == shape:
        return spec
    names = (*spec, *[None] * (len(shape) - len(spec)))
    if len(leaf.shape) == len(shape) > 1 and leaf.shape[1:] == shape[1:]:
        if sizes is not None:
            return spec_of_rows(leaf.shape, spec, sizes) or PartitionSpec()
        return PartitionSpec(None, *names[1:])  # some of its rows
    found = {
        tuple(names[axis] for axis in kept)
        for kept in itertools.combinations(range(len(shape)), len(leaf.shape))
        if leaf.shape == tuple(shape[axis] for axis in kept)
    }
    return PartitionSpec(*found.pop()) if len(found) == 1 else PartitionSpec()


def spec_of_rows(
    shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """The spec of some rows of a parameter; `None` if they can only be whole.

    If the shards cannot divide these rows among them, they divide another axis. Inside
    of a worker the array then moves.
    """
    kept = _fitting(spec, shape, sizes)
    if kept == spec:
        return spec
    axes = axes_of(spec)
    pieces = math.prod(sizes[axis] for axis in axes)
    for place, size in enumerate(shape):
        if size and size % pieces == 0:
            return PartitionSpec(*[None] * place, one_or_several(axes))
    return kept if _is_cut(kept) else None


def _fitting(
    spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec without the axes that do not divide their dimension evenly."""

    def fits(entry, size):
        pieces = math.prod(sizes[axis] for axis in axes_in(entry))
        return entry if size % pieces == 0 else None

    return PartitionSpec(*map(fits, spec, shape))


def spec_of(
    specs: Specs, names: Names, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """A parameter's spec: that of the longest prefix of its path, `None` without one.

    `sizes` are the sizes of the mesh's axes. A dimension that its mesh axes do not
    divide evenly stays whole: some devices might get no rows of a part.
    """
    starts = [
        (len(start), spec) for start, spec in specs if names[: len(start)] == start
    ]
    _, found = max(starts, key=lambda start: start[0], default=(0, None))
    if found is None:
        return None
    if len(found) > len(shape):
        raise ValueError(
            f"The parameter {'.'.join(names)} has shape {shape}, and specs has {found} "
            "for it. Give one entry for each of its axes at most, none for the workers."
        )
    return _fitting(found, shape, sizes)


def parameters_of(tree: Tree, params: Collection[Names]) -> list[Names | None]:
    """The parameter to which each array of a state belongs, by their paths.

    A tree in a state is like the parameters if all its paths are theirs: that is so of
    Adam's `mu`, not of the state around it.
    """
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
    names = [names_of(path) for path, _ in pairs]
    around = {
        name[:start]
        for name in names
        for start in range(len(name) + 1)
        if name[start:] not in params
    }
    return [
        next((name[k:] for k in range(len(name) + 1) if name[:k] not in around), None)
        for name, (_, x) in zip(names, pairs, strict=True)
        if not is_masked(x)
    ]


def specs_like(
    tree: Tree, params: Named, sizes: Mapping[str, int] | None = None
) -> list[PartitionSpec]:
    """The spec of each array of a tree: `spec_like` the parameters that have one."""
    known: Any = {name: pair for name, pair in params.items() if pair[1] is not None}
    owners = parameters_of(tree, params)
    return [
        spec_like(owner, x, known, sizes)
        for owner, x in zip(owners, jax.tree.leaves(tree), strict=True)
    ]


def spec_like(
    owner: Names | None,
    leaf: Any,
    params: Named,
    sizes: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """The spec of a state's array: that of the parameter to which it belongs.

    An array without such a parameter has the spec that all parameters share whose shape
    is equal but for the number of rows. If these specs differ, it is whole.
    """
    if owner is not None and owner in params:
        param, spec = params[owner]
        return spec_of_kept_axes(leaf, spec, param, sizes)
    like = {
        spec_of_kept_axes(leaf, spec, param)
        for param, spec in params.values()
        if len(leaf.shape) == len(param.shape) and leaf.shape[1:] == param.shape[1:]
    }
    if len(like) == 1 and _is_cut(own := like.pop()):
        return own
    return PartitionSpec()


def _asked(specs: Specs, tree: Tree, sizes: Mapping[str, int]) -> Tree:
    """The spec of each leaf of a tree that is to be sent."""

    def asked(path, x):
        spec = spec_of(specs, names_of(path), jnp.shape(x), sizes)
        if spec is None:
            known = [".".join(names) for names, _ in specs]
            known = ", ".join(known[:3] + ["..."] * (len(known) > 3)) or "no parameter"
            raise ValueError(
                f"The array at {path_name(path)}, of shape {jnp.shape(x)}, is to be "
                f"sent, and specs says nothing of it: it has {known}. specs= of "
                "map_workers and Workers is a tree like one worker's parameters, with "
                "the same names, or like its first levels, of their PartitionSpecs."
            )
        return spec

    return jax.tree_util.tree_map_with_path(asked, tree)


def _typed(x: jax.Array) -> PartitionSpec:
    """The spec that the type of an array says."""
    return jax.typeof(x).sharding.spec


def _is_cut(spec: PartitionSpec) -> bool:
    return any(entry is not None for entry in spec)
