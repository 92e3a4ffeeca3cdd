# SPDX-License-Identifier: Apache-2.0
"""The arrays of all workers, from those of one and back, and where they lie.

An array has one leading axis per worker axis along which it differs. Its marks, one per
worker axis, say which: 0 where it lies along the axis, `None` where the axis's workers
share it. The states' classes decide the marks.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from optx_sync.comm import shards
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.forms import Form
from optx_sync.placement import held, memory
from optx_sync.placement import workers as placing
from optx_sync.placement.axes import in_pieces, is_key, specs_like, stack, tree_axes
from optx_sync.placement.fields import Cut
from optx_sync.placement.resize import Joiners, resize_tree
from optx_sync.trees import (
    at_least_float32,
    first_worker,
    is_inexact,
    names_of,
    path_name,
)

Marks = list[tuple[int | None, ...]]  # of each array, one for each axis
One = Literal["mean", "first"]


class Layout(NamedTuple):
    """How many workers there are along which axes, and the mesh."""

    sizes: tuple[int, ...]
    axes: tuple[AxisName, ...]  # the outermost first
    mesh: Mesh | None
    specs: shards.Specs | None = None  # of one worker's parameters, where known

    @property
    def number(self) -> int:
        """Of all workers."""
        return math.prod(self.sizes)

    def marks(self, form: Form, arrays: Sequence[Any]) -> Marks:
        """The marks of a tree's arrays, of one worker's or of all."""
        tree = form.bare(arrays)
        levels = range(len(self.sizes))
        of_levels = (form.pick(tree_axes(tree, level)) for level in levels)
        return list(zip(*of_levels, strict=True))

    def numbers(self, form: Form, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Of how many workers along each axis arrays are; as here where none lies."""
        found = list(self.sizes)
        for x, marked in zip(arrays, self.marks(form, arrays), strict=True):
            lies = [level for level, mark in enumerate(marked) if mark is not None]
            for place, level in enumerate(lies):
                found[level] = x.shape[place]
        return tuple(found)

    def check(
        self, form: Form, arrays: Sequence[Any], marks: Marks, whose: str
    ) -> None:
        """Refuse arrays that are not of all workers."""
        for path, x, marked in zip(form.paths(), arrays, marks, strict=True):
            pairs = zip(self.sizes, marked, strict=True)
            front = tuple(n for n, mark in pairs if mark is not None)
            if jnp.shape(x)[: len(front)] != front:
                raise ValueError(
                    f"The state {path_name(path)} of {whose} has shape {jnp.shape(x)}, "
                    f"and that of all workers begins with {front}. Start once, state = "
                    "workers.start(state); what another number of workers has trained "
                    "goes on by state = workers.resize(state)."
                )

    def of_all(self, form: Form, arrays: Sequence[Any]) -> list[jax.Array]:
        """The arrays of all workers; of a key each has its own."""
        tree = form.bare(arrays)
        for level in reversed(range(len(self.sizes))):
            axes = tree_axes(tree, level)
            tree = stack(tree, self.sizes[level], axes, level)
        return list(map(strong, form.pick(tree)))

    def start(self, form: Form, arrays: Sequence[Any]) -> list[jax.Array]:
        """The arrays of all workers, computed where they are to live."""
        places = self.places(form, arrays)
        if self.mesh is not None:
            arrays = [_onto(self.mesh, x) for x in arrays]
        of_all = functools.partial(self.of_all, form)
        return jax.jit(of_all, out_shardings=places)(list(arrays))

    def shapes(self, form: Form, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """What `start` would give: shapes, dtypes and places."""
        of_all = jax.eval_shape(functools.partial(self.of_all, form), list(arrays))
        places = self.places(form, arrays) or [
            SingleDeviceSharding(jax.devices()[0], memory_kind=kind or None)
            for kind in form.pick(memory.kinds(form.bare(arrays)))
        ]
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(of_all, places, strict=True)
        ]

    def place(self, *spec: Any, kind: str = "") -> NamedSharding | None:
        """A place on the mesh, in the memory of this kind if one is named."""
        return self.mesh and NamedSharding(
            self.mesh, PartitionSpec(*spec), memory_kind=kind or None
        )

    def places(self, form: Form, arrays: Sequence[Any]) -> list[Any] | None:
        """Where one worker's arrays belong once they are stacked."""
        mesh, places = self.mesh, []
        if mesh is None:
            return None
        used = tuple(name for axis in self.axes for name in check_axis_name(axis))
        marks, told = self.marks(form, arrays), self.specs_of(form, arrays)
        kinds = form.pick(memory.kinds(form.bare(arrays)))
        for place, (path, x, marked, kind) in enumerate(
            zip(form.paths(), arrays, marks, kinds, strict=True)
        ):
            own = told[place] if told else _spec_of(path, x, mesh, used)
            pairs = zip(self.axes, marked, strict=True)
            front = [axis for axis, mark in pairs if mark is not None]
            in_full = placing.are_explicit(mesh, used)
            missing = jnp.ndim(x) - len(own) if in_full else 0
            if not in_full and 0 in jnp.shape(x):  # as a step returns it
                front, own = [], ()
            places.append(self.place(*front, *own, *[None] * missing, kind=kind))
        return places

    def specs_of(self, form: Form, arrays: Sequence[Any]) -> list[PartitionSpec] | None:
        """The specs of one worker's arrays, where they are known."""
        if self.specs is None or self.mesh is None:
            return None
        tree, sizes = form.bare(arrays), self.mesh.shape
        start, params = held.prefix(tree), {}
        for path, x in zip(form.paths(), arrays, strict=True):
            name = names_of(path)
            if name[: len(start)] == start:
                own = name[len(start) :]
                params[own] = x, shards.spec_of(self.specs, own, jnp.shape(x), sizes)
        specs = specs_like(tree, params)
        return form.pick(jax.tree.structure(tree).unflatten(specs))

    def pinned(
        self, form: Form, arrays: list[jax.Array], marks: Marks
    ) -> list[jax.Array]:
        """All workers' arrays, where they belong if their specs are known.

        The compiler would choose, and compile once more for what it chose.
        """
        mesh = self.mesh
        if self.specs is None or mesh is None or mesh.explicit_axes:
            return arrays
        shapes = [
            jax.ShapeDtypeStruct(x.shape[sum(m is not None for m in marked) :], x.dtype)
            for x, marked in zip(arrays, marks, strict=True)
        ]
        return jax.lax.with_sharding_constraint(arrays, self.places(form, shapes))

    def of_one(
        self, arrays: Sequence[Any], marks: Marks, how: One, outermost: int = 0
    ) -> list[Any]:
        """The arrays of one worker, without the axes from this one on."""
        return _of_one(list(arrays), tuple(marks), how, outermost)

    def resize(
        self,
        form: Form,
        arrays: Sequence[Any],
        joiners: Joiners,
        strict: bool,
        places: list[Any] | None = None,
    ) -> list[jax.Array]:
        """The arrays of as many workers as these, from those of any number, placed.

        `places`: where they belong, if that is known.
        """
        tree, number = form.bare(arrays), number_along_first(form, arrays)
        inside = self.numbers(form, arrays)[1:]
        if inside != self.sizes[1:]:
            raise ValueError(one_number_only((number, *inside), self.sizes))
        one = self.shapes_of_one(form, arrays)
        if number != self.sizes[0]:
            found = held.held(tree, form)
            params, tree = resize_tree(
                found[0].tree(arrays) if found else (),
                tree,
                form.bare(one),
                tree_axes(tree, 0),
                self.sizes[0],
                levels=len(self.sizes),
                joiners=joiners,
                strict=strict,
            )
            arrays = form.pick(tree)
            if found:
                found[0].put(arrays, params)
        places = places or self.places(form, one)
        if places is None:
            kinds = form.pick(memory.kinds(form.bare(arrays)))
            pairs = zip(arrays, kinds, strict=True)
            return [memory.on_host(x) if kind else x for x, kind in pairs]
        # Put where it lies already, an array would be of another type to a step.
        pairs = zip(arrays, places, strict=True)
        return [
            x if getattr(x, "sharding", None) == place else jax.device_put(x, place)
            for x, place in pairs
        ]

    def shapes_of_one(
        self, form: Form, arrays: Sequence[Any]
    ) -> list[jax.ShapeDtypeStruct]:
        """One worker's arrays by their shapes; pieces whole, as their parameters."""
        shapes = [
            x.shape[sum(mark is not None for mark in marked) :]
            for x, marked in zip(arrays, self.marks(form, arrays), strict=True)
        ]
        names, tree = [names_of(path) for path in form.paths()], form.bare(arrays)
        prefix = held.prefix(tree)
        sizes = {
            name[len(prefix) :]: math.prod(shape)
            for name, shape in zip(names, shapes, strict=True)
            if name[: len(prefix)] == prefix
        }
        cut, whole = form.pick(in_pieces(tree)), form.pick(held.sizes(tree, sizes))
        by_name = dict(zip(names, arrays, strict=True))
        for place, name in enumerate(names):
            if cut[place] == Cut.LEAVES and shapes[place]:
                leaves = _first_number(by_name[_name_of_number(name)])
                shapes[place] = (leaves, *shapes[place][1:])
            elif cut[place] and shapes[place]:
                if whole[place] is None:
                    raise ValueError(
                        f"The state {'.'.join(name)} lies in pieces, and no parameter "
                        "tells how many numbers it has. Cut it anew with "
                        "oxs.by_hand.resize(tx, params, state, n)."
                    )
                shapes[place] = (whole[place],)
        return [
            jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, x in zip(shapes, arrays, strict=True)
        ]


def number_along_first(form: Form, arrays: Sequence[Any]) -> int:
    """The number of workers along the outermost axis."""
    marks = form.pick(tree_axes(form.bare(arrays), 0))
    pairs = zip(arrays, marks, strict=True)
    return next(x.shape[0] for x, mark in pairs if mark is not None)


def one_number_only(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """The message for more than the first number of workers changed."""
    return (
        f"resize of Workers {before} changes the first number alone; got {after}. "
        "Start anew from workers.center(state)."
    )


def _onto(mesh: Mesh, x: Any) -> jax.Array:
    """On the devices of the mesh, whole if it was not there before."""
    devices = set(mesh.devices.flat)
    if isinstance(x, jax.Array) and x.sharding.device_set == devices:
        return x
    if is_key(x):  # over several processes JAX puts numbers only
        data = _onto(mesh, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _spec_of(path: Any, x: Any, mesh: Mesh, axes: tuple[str, ...]) -> PartitionSpec:
    """How one worker's parameter is sharded over the mesh."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    spec = getattr(sharding, "spec", PartitionSpec(None))
    used = {name for entry in spec for name in shards.axes_in(entry)}
    if not used or not used <= set(mesh.shape) - set(axes):
        raise ValueError(
            f"The parameter {path_name(path)} is sharded as {sharding}; a worker's may "
            f"be sharded over the mesh's axes besides {axes!r}: {dict(mesh.shape)!r}. "
            "Place one worker's parameters on this mesh first: "
            "jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))."
        )
    return spec


def _name_of_number(name: tuple[str, ...]) -> tuple[str, ...]:
    """Where a state says how many leaves stand in a stack of them: `OwnedState`."""
    own = next(i for i in range(len(name)) if name[i:][:3] == ("own", "tree", "leaves"))
    return (*name[:own], "numbers", name[own + 3])


def _first_number(x: jax.Array) -> int:
    """Of an integer that is equal on all workers, some of whom are elsewhere."""
    return int(np.ravel(x.addressable_shards[0].data)[0])


def strong(x: Any) -> jax.Array:
    """Not weakly typed, or the next step would be compiled once more."""
    return x if is_key(x) else jax.lax.convert_element_type(x, jnp.result_type(x))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _of_one(arrays: list[Any], marks: tuple, how: One, outermost: int) -> list[Any]:
    # Copies, also of what is shared: a step uses the state up.
    found = list(map(memory.copy, arrays))
    for place, marked in enumerate(marks):
        for level in reversed(range(outermost, len(marked))):
            if marked[level] is not None:
                axis = sum(mark is not None for mark in marked[:level])
                found[place] = _one(found[place], axis, how)
    return found


def _one(x: jax.Array, axis: int, how: One) -> jax.Array:
    """The first worker's, or the mean of numbers; of equal ones theirs, to the bit."""
    one = first_worker(x) if axis == 0 else x[:, 0]
    if how == "first" or not is_inexact(x.dtype):
        return one
    wide = at_least_float32(x.dtype)
    apart = x.astype(wide) - jnp.expand_dims(one, axis).astype(wide)
    return (one.astype(wide) + jnp.mean(apart, axis)).astype(x.dtype)
