# SPDX-License-Identifier: Apache-2.0
"""`map_workers` runs one worker's function for all workers."""

import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optx_sync.comm import shards
from optx_sync.comm.collectives import (
    AxisName,
    UnequalError,
    VaryingTypeError,
    check_axis_name,
    checked_axes,
    varying_axes,
)
from optx_sync.core import forms
from optx_sync.core.checks import check_function
from optx_sync.core.trees import (
    Tree,
    check_arrays,
    is_inexact,
    one_or_several,
    path_name,
)
from optx_sync.state.leaves import Mark, is_none, marks_of


def map_workers(
    fun: Callable[..., Tree],
    axis_name: AxisName,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_axes: Tree = 0,
    out_axes: Tree = 0,
    specs: Tree = None,
) -> Callable[..., Tree]:
    """Run one worker's function for all workers: `jax.vmap`, or the same on a mesh.

    Without a mesh it is `jax.vmap(fun, in_axes, out_axes, axis_name=axis_name)`: the
    workers are simulated on one device. With a mesh it is `jax.shard_map`, manual over
    `axis_name` alone: each position of that axis is a worker. Arrays that are sharded
    over the mesh's other axes stay so: a worker may itself lie on many devices (FSDP,
    tensor parallel). The program and its numbers are the same.

    An argument with axis 0 is `[workers, ...]` and reaches `fun` without that axis; one
    with `None` is equal for all workers. Compile the result with `jax.jit`, which may
    donate. For workers on two levels, such as data parallel replicas inside of each
    worker, put one `map_workers` inside of another.

    Inside of `jax.grad`, `lax.psum` and `lax.pmean` mean on a mesh what they mean under
    `jax.vmap` and `jax.pmap`: a worker gets the gradient of its own loss. For this a
    mesh runs `fun` without the types of `jax.shard_map(check_vma=True)`, once they have
    shown, in a first tracing, that results with `None` are equal on all workers. Where
    the types cannot follow `fun`, nothing shows it, as under `jax.pmap`.

    Args:
        fun: A function of one worker's arguments. Collectives over `axis_name`, as all
            of this package's wrappers make them, go over the workers.
        axis_name: The worker axis, of the mesh where there is one. With a mesh also a
            tuple of its axes, along which one worker axis lies, the first one major.
        mesh: The devices, with axes of type `Auto` or `Explicit`; `None` to simulate.
        in_axes: 0 or `None` for each positional argument, or a tree of them that is a
            prefix of it, as `oxs.by_hand.state_axes` gives it for a state. Keyword
            arguments have axis 0.
        out_axes: The same for what `fun` returns. `None` is for results that are equal
            on all workers: counters and center of a state, results of `oxs.reduce`.
        specs: With a mesh, how one worker is sharded over its other axes: a tree like
            one worker's parameters, or like its first levels, of their `PartitionSpec`.
            Each device then sends other workers its own shards (see `oxs.Workers`).
            With `None` the compiler decides, and each device sends the codes of whole
            arrays; along axes of type `Explicit` the types say it. Inside of another
            `map_workers`, `None` takes that one's.

    Returns:
        A function of all workers' arguments that returns all workers' results.

    Raises:
        TypeError: `axis_name` is not a str or a tuple of them, or `mesh` no mesh; an
            argument is or holds an NNX object.
        ValueError: The mesh has no such axis; a tuple without a mesh; axes that do not
            fit the arguments; another number of workers than there are positions along
            the mesh axis; a result with `None` that is not equal on all workers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def above_mean(x):
        ...     return x - oxs.reduce(x, "workers")
        >>> x = jnp.array([1.0, 2.0, 6.0])
        >>> jax.jit(oxs.by_hand.map_workers(above_mean, "workers"))(x)
        Array([-2., -1.,  3.], dtype=float32)
    """
    axes = check_axis_name(axis_name)
    for where, marks in (("in_axes", in_axes), ("out_axes", out_axes)):
        for mark in jax.tree.leaves(marks, is_leaf=is_none):
            if mark is not None and not (type(mark) is int and mark == 0):
                raise ValueError(
                    f"{where} of map_workers holds 0 (along the worker axis) and None "
                    f"(equal for all workers); got {mark!r}. Move the worker axis to "
                    "the front, for example with jnp.moveaxis."
                )
    check_function("fun", fun, "Pass one worker's step.")
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes

    workers = _Workers(fun, axes, in_axes, out_axes)
    if mesh is None:
        if len(axes) > 1:
            raise ValueError(
                f"map_workers over the axes {axes!r} needs a mesh, which says how many "
                "workers lie along each of them. To simulate them map over one axis at "
                f"a time: map_workers(map_workers(fun, {axes[-1]!r}), {axes[0]!r})."
            )
        run = workers.simulated
    else:
        size_along(mesh, axes)
        check_threads(mesh)
        if specs is not None:
            specs = shards.specs_by_name(specs, mesh.shape, axes)
            workers = workers._replace(fun=with_specs(fun, specs))
        # JAX runs a shard_map over a part of the mesh's axes only when it is compiled.
        # Inside of the caller's own `jax.jit` this one makes no difference.
        run = jax.jit(functools.partial(workers.on_mesh, mesh), inline=True)

    @functools.wraps(fun)
    def of_all(*args: Tree, **kwargs: Tree) -> Tree:
        for given in (args, kwargs):
            _refuse_objects(given)
            if mesh is not None:
                check_arrays(given, "The argument of map_workers")
        return run(*args, **kwargs)

    return of_all


def _refuse_objects(given: Tree) -> None:
    """Refuse Flax NNX objects, of which a mapped function gets copies.

    What it changes in a copy would be lost: a step would train nothing.
    """
    found = jax.tree_util.tree_leaves_with_path(given, is_leaf=forms.is_of_nnx)
    for path, x in found:
        if forms.is_object(x) or forms.is_variable(x):
            raise TypeError(
                f"The argument {path_name(path)} of map_workers is a "
                f"{type(x).__name__}, a Flax NNX object: use oxs.Workers, whose step "
                "may change it in place, or split it, `nnx.split(model)`, and merge it "
                "inside."
            )


def with_specs(
    fun: Callable[..., Tree], specs: shards.Specs | None
) -> Callable[..., Tree]:
    """The function, inside of which exchanges know how a worker is sharded."""

    @functools.wraps(fun)
    def sharded(*args: Tree, **kwargs: Tree) -> Tree:
        with shards.with_specs(specs):
            return fun(*args, **kwargs)

    return sharded


_STACK = (
    " Give it None in in_axes if it is equal for all workers; stack what is one "
    "worker's first: oxs.by_hand.replicate(x, n), a state with "
    "axes=oxs.by_hand.state_axes(tx, params)."
)


class _Workers(NamedTuple):
    """One worker's function, and over what it is mapped."""

    fun: Callable[..., Tree]
    axes: tuple[str, ...]
    in_axes: Tree
    out_axes: Tree

    def simulated(self, *args: Tree, **kwargs: Tree) -> Tree:
        """All workers, simulated along each of the axes."""
        self.check(args, kwargs, None)
        lanes = self
        for axis in reversed(self.axes):
            lanes = lanes._replace(fun=lanes._over(axis))
        return lanes.fun(*args, **kwargs)

    def on_mesh(
        self, mesh: Mesh | AbstractMesh, /, *args: Tree, **kwargs: Tree
    ) -> Tree:
        """All workers, on a mesh."""
        marks = self.check(args, kwargs, size_along(mesh, self.axes))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        context = jax.sharding.get_abstract_mesh()
        if shards.are_explicit(mesh, self.axes):
            on = context if context.manual_axes else mesh
            pairs = zip(leaves, marks, strict=True)
            leaves = [_lay(x, on, self.axes, mark) for x, mark in pairs]

        def one_worker(*leaves):
            own = (
                x if mark is None else jax.lax.squeeze(x, (0,))
                for x, mark in zip(leaves, marks, strict=True)
            )
            args, kwargs = treedef.unflatten(own)
            return self._with_axes(self.results(*args, **kwargs))

        specs = {None: PartitionSpec(), 0: PartitionSpec(one_or_several(self.axes))}
        mapped = functools.partial(
            jax.shard_map,
            one_worker,
            mesh=None if context.manual_axes else mesh,
            in_specs=tuple(specs[mark] for mark in marks),
            out_specs=jax.tree.map(specs.get, self.out_axes, is_leaf=is_none),
            axis_names=set(self.axes),
        )
        if context.manual_axes:
            typed = bool(checked_axes(context.manual_axes))
            return mapped(check_vma=typed)(*leaves)
        # With types JAX differentiates `lax.pmean` of a loss otherwise than `jax.vmap`
        # and `jax.pmap` do, which give each worker the gradient of its own loss. So
        # they only show what is not equal on all workers, where they can follow the
        # program.
        _look_for_unequal(mapped(check_vma=True), *leaves)
        one_each = isinstance(self.in_axes, tuple)
        whose = self.in_axes if one_each else (self.in_axes,) * len(args)
        whole = [x for x, mark in zip(args, whose, strict=True) if mark is None]
        if any(is_inexact(x.dtype) for x in jax.tree.leaves(whole)):
            # Types take a gradient of these to be summed: then workers are simulated.
            sizes = tuple(mesh.shape[axis] for axis in self.axes)
            shapes = treedef.unflatten(
                jax.ShapeDtypeStruct(
                    x.shape if mark is None else (*sizes, *x.shape[1:]), x.dtype
                )
                for x, mark in zip(leaves, marks, strict=True)
            )
            _look_for_unequal(lambda own, named: self.simulated(*own, **named), *shapes)
        return mapped(check_vma=False)(*leaves)

    def check(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], positions: int | None
    ) -> list[Mark]:
        """The mark of each leaf of the arguments, checked against its shape."""
        marks = marks_of((self.in_axes, 0), (args, kwargs), "in_axes of map_workers")
        leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
        own = {
            path_name(path[1:]): x
            for (path, x), mark in zip(leaves, marks, strict=True)
            if mark is not None
        }
        for where, x in own.items():
            check_arrays(x, "The argument of map_workers", where)
        fronts = {where: jnp.shape(x)[:1] for where, x in own.items()}
        workers = positions or next(itertools.chain(*fronts.values()), None)
        for where, front in fronts.items():
            what = f"The argument {where} of map_workers has "
            if not front:
                raise ValueError(
                    f"{what}axis 0 in in_axes, the workers', but is a scalar.{_STACK}"
                )
            (number,) = front
            what += f"shape {jnp.shape(own[where])}, of {number} workers"
            check_number(what, number, positions, self.axes, _STACK)
            if number != workers:
                raise ValueError(f"{what}; others are of {workers}.{_STACK}")
        if workers is None:
            raise ValueError(
                "No argument of map_workers has axis 0 in in_axes, so nothing tells how"
                " many workers there are. Pass one, such as jnp.arange(8), or a mesh."
            )
        return marks

    def results(self, *args: Tree, **kwargs: Tree) -> Tree:
        """One worker's results, which fit `out_axes`."""
        results = self.fun(*args, **kwargs)
        check_arrays(results, "The result of map_workers")
        marks_of(self.out_axes, results, "out_axes of map_workers")
        return results

    def _with_axes(self, results: Tree) -> Tree:
        """One worker's results on a mesh, with a worker axis where they have one."""
        marks = iter(marks_of(self.out_axes, results, "out_axes of map_workers"))

        def place(path, x):
            if next(marks) is not None:
                return jax.lax.expand_dims(jnp.asarray(x), (0,))
            if varying_axes(x) & set(self.axes):
                raise self._unequal(f"The result {path_name(path)}")
            return x

        return jax.tree_util.tree_map_with_path(place, results)

    def _over(self, axis: str) -> Callable[..., Tree]:
        """The function, with workers simulated along an axis."""

        def over(*args: Tree, **kwargs: Tree) -> Tree:
            mapped = functools.partial(
                jax.vmap, self.results, self.in_axes, axis_name=axis
            )
            try:
                return mapped(self.out_axes)(*args, **kwargs)
            except ValueError as error:
                # Where all results may differ, an error of another cause is left.
                jax.eval_shape(lambda: mapped(0)(*args, **kwargs))
                raise self._unequal("A result") from error

        return over

    def _unequal(self, which: str) -> UnequalError:
        return UnequalError(
            f"{which} of map_workers has None in out_axes, equal on all workers, but is"
            " computed from what is each worker's own. Give it axis 0, or let the "
            f"workers agree with oxs.reduce(x, {self.axes!r}). Parameters that went "
            "through oxs.localize stay its own: apply_gradients takes those from "
            "before it."
        )


def _look_for_unequal(fun: Callable[..., Tree], *args: Tree) -> None:
    """Trace a function for what it shows to be unequal, and for nothing else."""
    try:
        jax.eval_shape(fun, *args)
    except VaryingTypeError:
        raise
    except Exception:  # raised again where it runs, if it has any other cause
        pass


def size_along(mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...]) -> int:
    """The number of workers: positions along the mesh axes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None; got {type(mesh).__name__}. "
            "Make one with jax.make_mesh((8,), ('workers',))."
        )
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"The mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)!r}. "
            "Name one of them as axis_name, or make a mesh that has it."
        )
    return math.prod(mesh.shape[axis] for axis in axes)


def check_number(
    what: str, workers: int, positions: int | None, axes: AxisName, mend: str = ""
) -> None:
    """Refuse another number of workers than positions on the mesh, if there is one."""
    if positions not in (None, workers):
        raise ValueError(
            f"{what}, but the mesh has {positions} positions along {axes!r}, and each "
            "is one worker. Make the two equal, or simulate any number: mesh=None."
            + mend
        )


_looked_at: set[Mesh | AbstractMesh | None] = set()


def check_threads(mesh: Mesh | AbstractMesh | None, stacklevel: int = 3) -> None:
    """Warn of CPU devices that may wait for each other until XLA gives up; once.

    Up to JAX 0.11 all devices run their programs on one pool of threads. A device that
    needs a thread while the others hold all of them in a collective waits for ever.
    This was never seen with two threads for each device, but with one fewer.
    """
    if mesh in _looked_at:
        return
    _looked_at.add(mesh)
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    on_cpus = any(device.platform == "cpu" for device in devices)
    if jax.__version_info__ >= (0, 12) or not on_cpus:
        return
    client = devices[0].client
    used = sum(device.process_index == client.process_index() for device in devices)
    try:
        asked = int(os.environ["NPROC"])
    except (KeyError, ValueError):  # as many as there are cores for this process
        linux = hasattr(os, "sched_getaffinity")
        asked = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    threads = max(asked, client.local_device_count())
    if used > 1 and threads < 2 * used:
        warnings.warn(
            f"{used} CPU devices share {threads} threads of XLA. With fewer than two "
            "for each, steps can wait in a collective until XLA aborts the program. "
            f"Start it with NPROC={2 * used}, or set os.environ['NPROC'] = "
            f"'{2 * used}' before the first array.",
            stacklevel=stacklevel,
        )


def _lay(
    x: jax.Array, mesh: Mesh | AbstractMesh, axes: tuple[str, ...], mark: Mark
) -> jax.Array:
    """Lay an array on explicit axes as `jax.shard_map`, which moves none, needs it."""
    spec = [
        tuple(name for name in shards.axes_in(entry) if name not in axes) or None
        for entry in jax.typeof(x).sharding.spec
    ]
    if mark is not None:
        spec[0] = axes
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
