# SPDX-License-Identifier: Apache-2.0
"""The arrays of all workers, from those of one and back, and where they lie.

An array has one leading axis per worker axis along which it differs. The states'
classes decide along which ones: the outermost is level 0.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from optx_sync.comm import shards
from optx_sync.comm.buffers import rows_on
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.core.forms import Form
from optx_sync.core.trees import (
    Tree,
    at_least_float32,
    first_worker,
    is_inexact,
    path_name,
    some,
)
from optx_sync.state import fields, held
from optx_sync.state.leaves import (
    Leaf,
    Mark,
    in_rows_of,
    is_key,
    on_data,
    specs_like,
    stacked,
)
from optx_sync.workers.joiners import Given, fill
from optx_sync.workers.resize import Resize

One: TypeAlias = Literal["mean", "first"]
# Of each array of a tree, the levels along whose worker axes it lies.
Levels: TypeAlias = tuple[tuple[int, ...], ...]
Arrays: TypeAlias = Sequence[Tree]  # of a tree, in the order of its form


class Layout(NamedTuple):
    """How many workers there are along which axes, and the mesh."""

    sizes: tuple[int, ...]
    axes: tuple[AxisName, ...]  # the outermost first
    mesh: Mesh | AbstractMesh | None
    specs: shards.Specs | None = None  # of one worker's parameters, where known

    @property
    def number(self) -> int:
        """Of all workers."""
        return math.prod(self.sizes)

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has no devices."""
        return isinstance(self.mesh, AbstractMesh)

    def check_devices(self, what: str) -> None:
        """Refuse to compute anything on a mesh without devices."""
        if self.is_abstract:
            raise ValueError(
                f"{what} needs devices, and got {self.mesh}, which has none: such a "
                "mesh is for workers.expect and oxs.audit.collectives. To run, give "
                "Workers a jax.sharding.Mesh or mesh=True, or simulate: mesh=None."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the mesh's axes along which workers lie."""
        return tuple(name for axis in self.axes for name in check_axis_name(axis))

    @property
    def whole(self) -> Sharding:
        """Where an array lies that each device holds all of."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, PartitionSpec())

    def levels(self, leaves: Sequence[Leaf]) -> Levels:
        """Along which axes each array of a tree lies, of one worker's or of all."""
        return tuple(leaf.along(range(len(self.sizes))) for leaf in leaves)

    def numbers(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Of how many workers along each axis arrays are; as here where none lies."""
        found = list(self.sizes)
        for leaf in leaves:
            for place, level in enumerate(leaf.along(range(len(found)))):
                found[level] = leaf.x.shape[place]
        return tuple(found)

    def check(self, leaves: Sequence[Leaf], whose: str) -> Levels:
        """`levels`; refuses arrays that are not of all workers."""
        for leaf in leaves:
            front, shape = leaf.along(self.sizes), jnp.shape(leaf.x)
            if shape[: len(front)] != front:
                mend = "" if shape else f" {new_value('value')}"
                raise ValueError(
                    f"The state {path_name(leaf.path)} of {whose} has shape {shape}, "
                    f"and that of all workers begins with {front}. Start once, state = "
                    "workers.start(state), or resize that of another number of workers."
                    f"{mend}"
                )
        return self.levels(leaves)

    def of_all(self, form: Form, arrays: Arrays) -> list[jax.Array]:
        """The arrays of all workers; of a key each has its own."""
        return [strong(self._of_all(leaf)) for leaf in held.leaves(form, arrays)]

    def _of_all(self, leaf: Leaf) -> jax.Array:
        x = leaf.x
        for level in reversed(range(len(self.sizes))):
            x = stacked(leaf, x, self.sizes[level], leaf.mark(level), level)
        return x

    def start(self, form: Form, arrays: Arrays) -> list[jax.Array]:
        """The arrays of all workers, computed where they are to live."""
        self.check_devices("workers.start")
        for path, x in zip(form.paths(), arrays, strict=True):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"workers.start takes arrays; the state {path_name(path)} is a "
                    "jax.ShapeDtypeStruct. Shapes alone, for workers.restore, are "
                    "declared by workers.expect(state)."
                )
        places = self.places(form, arrays)
        if self.mesh is not None:
            arrays = [self._onto_mesh(x) for x in arrays]
        of_all = functools.partial(self.of_all, form)
        return jax.jit(of_all, out_shardings=places)(list(arrays))

    def _onto_mesh(self, x: Tree) -> jax.Array:
        """On the devices of the mesh, whole if it was not there before."""
        if isinstance(x, jax.Array) and x.sharding.device_set == self.whole.device_set:
            return x
        return _put(x, self.whole)

    def shapes(self, form: Form, arrays: Arrays) -> list[jax.ShapeDtypeStruct]:
        """What `start` would give: shapes, dtypes and places."""
        of_all = jax.eval_shape(functools.partial(self.of_all, form), list(arrays))
        places = self.places(form, arrays) or [self.whole] * len(arrays)
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(of_all, places, strict=True)
        ]

    def places(self, form: Form, arrays: Arrays) -> list[NamedSharding] | None:
        """Where one worker's arrays belong once they are stacked."""
        mesh, leaves = self.mesh, held.leaves(form, arrays)
        if mesh is None:
            return None
        if self.specs is None:
            specs = [_spec_of(leaf, mesh, self.names) for leaf in leaves]
        else:
            tree = form.bare(arrays)
            known = {
                name: (x, shards.spec_of(self.specs, name, jnp.shape(x), mesh.shape))
                for name, (_, x, *_) in held.known(form, leaves).items()
            }
            specs = specs_like(tree, known, mesh.shape)
            specs = form.pick(jax.tree.structure(tree).unflatten(specs))
        explicit = shards.are_explicit(mesh, self.names)
        places = []
        for leaf, spec in zip(leaves, specs, strict=True):
            entries, shape = (*leaf.along(self.axes), *spec), jnp.shape(leaf.x)
            if explicit:  # in full, and as a step returns it
                entries += (None,) * (len(shape) - len(spec))
            elif 0 in shape:
                entries = ()
            places.append(NamedSharding(mesh, PartitionSpec(*entries)))
        return places

    def check_specs(self, form: Form, arrays: Arrays) -> None:
        """Refuse specs that have the name of no parameter in a wrapper's state."""
        leaves, numbered = held.leaves(form, arrays), form.bare(range(len(arrays)))
        trained = any(leaf.levels for leaf in leaves) and held.outside(numbered)
        names = held.known(form, leaves)
        starts = [start for start, _ in self.specs or ()]
        found = any(x[: len(start)] == start for start in starts for x in names)
        if trained and starts and not found:
            raise ValueError(
                f"specs has {some(['.'.join(x) for x in starts])}, and the parameters "
                f"are {some(['.'.join(x) for x in names])}: none of them would be "
                "sharded. Give specs the parameters' names, or their first levels: of "
                "Linen's variables nn.get_partition_spec(variables)['params']."
            )

    def pinned(self, form: Form, arrays: Arrays) -> list[jax.Array]:
        """All workers' arrays, where they belong if their specs are known.

        The compiler would choose, and compile once more for what it chose.
        """
        mesh = self.mesh
        if self.specs is None or mesh is None or mesh.explicit_axes:
            return list(arrays)
        one = map(self._of_one, held.leaves(form, arrays))
        return jax.lax.with_sharding_constraint(arrays, self.places(form, list(one)))

    def _of_one(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """One worker's array by its shape; of one in pieces the whole."""
        shape, size = leaf.x.shape[len(leaf.along(self.sizes)) :], leaf.size or 0
        if shape and leaf.cut() == fields.Cut.NUMBERS:
            shape = (size,)
        elif shape and leaf.cut():
            shape = (size // math.prod(shape[1:]), *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.x.dtype)

    def _padded(self, leaf: Leaf) -> Tree:
        """An array; one of stacked leaves padded anew, for the devices of this mesh."""
        if leaf.stack is None or self.mesh is None:
            return leaf.x
        axes, sizes = leaf.stack.axes, self.mesh.shape
        missing = [name for name in axes if name not in sizes]
        if missing:
            raise ValueError(
                f"The state {path_name(leaf.path)} lies over the axes {axes} of "
                f"oxs.stacked, and the mesh of these workers has not {missing}: "
                f"{tuple(sizes)}. Save it, and give workers.restore, by "
                "workers.expect, the state of an oxs.stacked over axes of this mesh."
            )
        rows = rows_on(leaf.size or 0, [sizes[name] for name in axes])
        return in_rows_of(leaf, rows, len(leaf.along(self.sizes)))

    def resize(
        self,
        form: Form,
        arrays: Arrays,
        how: Resize,
        places: Sequence[Sharding] | None,
        joiners: Given = None,
    ) -> list[jax.Array]:
        """The arrays of as many workers as these, from those of any number, placed.

        `places`: where they belong, if that is known.
        """
        self.check_devices("workers.resize")
        tree, leaves = form.bare(arrays), held.leaves(form, arrays)
        numbers = self.numbers(leaves)
        check_one_number(numbers, self.sizes)
        one = list(map(self._of_one, leaves))
        if numbers[0] != self.sizes[0]:
            centers = held.held(form)
            params = [center.tree(arrays) for center in centers]
            params, new = how.of(params, tree, form.bare(one))
            resized = form.pick(new)
            for center, x in zip(centers, params, strict=True):
                center.put(resized, x)
            if self.sizes[0] > numbers[0]:
                fill(form, arrays, resized, joiners)
            arrays = resized
        arrays = list(map(self._padded, held.leaves(form, arrays)))
        places = places or self.places(form, one)
        if places is None:
            return list(arrays)
        # Put where it lies already, an array would be of another type to a step.
        pairs = zip(arrays, places, strict=True)
        return [
            x if getattr(x, "sharding", None) == place else _put(x, place)
            for x, place in pairs
        ]


def new_value(value: object) -> str:
    """How to set a scalar in the state of all workers, for a message."""
    return (
        "In a started state a scalar of each worker's own, such as a learning rate, "
        f"has the shape [n]. Set a new one by jnp.full_like(old, {value})."
    )


def check_one_number(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Refuse to change more than the first number of workers."""
    if before[1:] != after[1:]:
        raise ValueError(
            f"resize of Workers {before} changes the first number alone; got {after}. "
            "Start anew from workers.center(state)."
        )


def _put(x: Tree, place: Sharding) -> jax.Array:
    """The array there; of keys JAX puts the numbers on several processes' devices."""
    return on_data(functools.partial(jax.device_put, device=place), x)


def marks(levels: Levels, level: int) -> list[Mark]:
    """Whether each array lies along the axis of a level."""
    return [0 if level in along else None for along in levels]


def _spec_of(
    leaf: Leaf, mesh: Mesh | AbstractMesh, workers: tuple[str, ...]
) -> PartitionSpec:
    """How one worker's parameter is sharded over the mesh's other axes."""
    sharding = getattr(leaf.x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    spec = getattr(sharding, "spec", PartitionSpec(None))
    used = set(shards.axes_of(spec))
    if not used or not used <= set(mesh.shape) - set(workers):
        raise ValueError(
            f"The parameter {path_name(leaf.path)} is sharded as {sharding}; a "
            f"worker's may be sharded over the mesh's axes besides {workers!r}: "
            f"{dict(mesh.shape)!r}. Place one worker's on this mesh: jax.device_put."
        )
    return spec


def strong(x: Tree) -> jax.Array:
    """Not weakly typed, or the next step would be compiled once more."""
    return x if is_key(x) else jax.lax.convert_element_type(x, jnp.result_type(x))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def of_one(
    arrays: list[jax.Array], levels: Levels, how: One, outermost: int = 0
) -> list[jax.Array]:
    """The arrays of one worker, without the axes of the levels from this one on."""
    # Copies, also of what is shared: a step uses the state up.
    found = list(map(jnp.copy, arrays))
    for place, along in enumerate(levels):
        for axis, level in reversed(list(enumerate(along))):
            if level >= outermost:
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
