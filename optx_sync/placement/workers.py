# SPDX-License-Identifier: Apache-2.0
"""`map_workers` runs one worker's function for all workers."""

import functools
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optx_sync import forms
from optx_sync.checks import check_function
from optx_sync.comm import shards
from optx_sync.comm.collectives import (
    AxisName,
    VaryingTypeError,
    check_axis_name,
    checked_axes,
    varying_axes,
)
from optx_sync.trees import (
    Tree,
    check_arrays,
    is_inexact,
    path_name,
)


def map_workers(
    fun: Callable[..., Any],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    in_axes: Tree = 0,
    out_axes: Tree = 0,
    specs: Tree = None,
) -> Callable[..., Any]:
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

    Flax NNX objects, which a step changes in place, go through `oxs.Workers` alone.

    Args:
        fun: A function of one worker's arguments. Collectives over `axis_name`, as all
            of this package's wrappers make them, go over the workers.
        axis_name: The worker axis, of the mesh where there is one. With a mesh also a
            tuple of its axes, along which one worker axis lies, the first one major.
        mesh: The devices, with axes of type `Auto` or `Explicit`; `None` to simulate.
        in_axes: 0 or `None` for each positional argument, or a tree of them that is a
            prefix of it, as `oxs.by_hand.state_axes` gives it for a state. Keyword
            arguments have axis 0. (Only these: stack workers in front.)
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
        for mark in jax.tree.leaves(marks, is_leaf=_is_none):
            if mark is not None and not (type(mark) is int and mark == 0):
                raise ValueError(
                    f"{where} of map_workers holds 0 (along the worker axis) and None "
                    f"(equal for all workers); got {mark!r}. Move the worker axis to "
                    "the front, for example with jnp.moveaxis."
                )
    check_function("fun", fun, "Pass one worker's step.")
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes

    def one_worker(*args: Any, **kwargs: Any) -> Any:
        results = fun(*args, **kwargs)
        check_arrays(results, "The result of map_workers")
        return results

    if mesh is None:
        run = _simulated(one_worker, axes, in_axes, out_axes)
    else:
        size_along(mesh, axes)
        check_threads(mesh)
        if specs is not None:
            specs = shards.specs_by_name(specs, mesh.shape, axes)
            one_worker = with_specs(one_worker, specs)
        run = functools.partial(_run_on_mesh, one_worker, mesh, axes, in_axes, out_axes)
        # JAX runs a shard_map over a part of the mesh's axes only when it is compiled.
        # Inside of the caller's own `jax.jit` this one makes no difference.
        run = jax.jit(run, inline=True)

    @functools.wraps(fun)
    def of_all(*args: Any, **kwargs: Any) -> Any:
        for given in (args, kwargs):
            _refuse_objects(given)
            if mesh is not None:
                check_arrays(given, "The argument of map_workers")
        return run(*args, **kwargs)

    return of_all


def _simulated(
    fun: Callable[..., Any], axes: tuple[str, ...], in_axes: Tree, out_axes: Tree
) -> Any:
    """`map_workers` without a mesh."""
    if len(axes) > 1:
        raise ValueError(
            f"map_workers over the axes {axes!r} needs a mesh, which says how many"
            " workers lie along each of them. To simulate them on one device name one"
            " axis, or map over one at a time:"
            f" oxs.by_hand.map_workers(oxs.by_hand.map_workers(fun, {axes[-1]!r}),"
            f" {axes[0]!r})."
        )
    mapped = jax.vmap(fun, in_axes, out_axes, axis_name=entry_of(axes))

    def simulated(*args: Any, **kwargs: Any) -> Any:
        _marks_of(args, kwargs, in_axes, None, axes)
        try:
            return mapped(*args, **kwargs)
        except ValueError as error:
            # Only `jax.vmap` finds this out; the words are from its message.
            if "mapped output" not in str(error):
                raise
            raise VaryingTypeError(_unequal("A result", axes)) from error

    return simulated


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
                "may change it in place. By hand split it before, `graph, state = "
                "nnx.split(model)`, and merge it inside."
            )


def with_specs(
    fun: Callable[..., Any], specs: shards.Specs | None
) -> Callable[..., Any]:
    """The function, inside of which exchanges know how a worker is sharded."""

    @functools.wraps(fun)
    def told(*args: Any, **kwargs: Any) -> Any:
        with shards.told(specs):
            return fun(*args, **kwargs)

    return told


def _run_on_mesh(
    fun: Callable[..., Any],
    mesh: Mesh,
    axes: tuple[str, ...],
    in_axes: Tree,
    out_axes: Tree,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`map_workers` on a mesh, of these arguments."""
    marks = _marks_of(args, kwargs, in_axes, size_along(mesh, axes), axes)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    context = jax.sharding.get_abstract_mesh()
    inside = bool(context.manual_axes)
    if are_explicit(mesh, axes):
        on = context if inside else mesh
        leaves = [_lay(x, on, axes, m) for x, m in zip(leaves, marks, strict=True)]

    def one_worker(*leaves):
        own = (
            x if mark is None else jax.lax.squeeze(x, (0,))
            for x, mark in zip(leaves, marks, strict=True)
        )
        args, kwargs = treedef.unflatten(own)
        return _results(fun(*args, **kwargs), out_axes, axes)

    specs = {None: PartitionSpec(), 0: PartitionSpec(entry_of(axes))}
    mapped = functools.partial(
        jax.shard_map,
        one_worker,
        mesh=None if inside else mesh,
        in_specs=tuple(specs[mark] for mark in marks),
        out_specs=jax.tree.map(specs.get, out_axes, is_leaf=_is_none),
        axis_names=set(axes),
    )
    if inside:
        return mapped(check_vma=bool(checked_axes(context.manual_axes)))(*leaves)
    # With types JAX differentiates `lax.pmean` of a loss otherwise than `jax.vmap` and
    # `jax.pmap` do, which give each worker the gradient of its own loss. So they only
    # show what is not equal on all workers, where they can follow the program.
    _look_for_unequal(mapped(check_vma=True), *leaves)
    whole = zip(_entries(in_axes, args), args, strict=True)
    if any(mark is None and _holds_numbers(argument) for mark, argument in whole):
        # Types take a gradient of these to be summed: then workers are simulated, too.
        one_by_one, shapes = _lanes(fun, mesh, axes, in_axes, out_axes, args, kwargs)
        _look_for_unequal(one_by_one, *shapes)
    return mapped(check_vma=False)(*leaves)


def _look_for_unequal(fun: Callable[..., Any], *args: Any) -> None:
    """Trace a function for what it shows to be unequal, and for nothing else."""
    try:
        jax.eval_shape(fun, *args)
    except VaryingTypeError:
        raise
    except Exception:  # raised again where it runs, if it has any other cause
        pass


def _entries(in_axes: Tree, args: tuple) -> tuple:
    """The entry of `in_axes` for each positional argument."""
    return in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)


def _holds_numbers(tree: Tree) -> bool:
    return any(is_inexact(jnp.result_type(x)) for x in jax.tree.leaves(tree))


def _lanes(
    fun: Callable[..., Any],
    mesh: Mesh,
    axes: tuple[str, ...],
    in_axes: Tree,
    out_axes: Tree,
    args: tuple,
    kwargs: dict,
) -> tuple[Callable[..., Any], tuple]:
    """(all workers simulated along the mesh's axes, the shapes of its arguments)."""
    for axis in reversed(axes):
        fun = _simulated(fun, (axis,), in_axes, out_axes)
    sizes = tuple(mesh.shape[axis] for axis in axes)

    def shape(x, mark):
        rest = jnp.shape(x) if mark is None else (*sizes, *jnp.shape(x)[1:])
        return jax.ShapeDtypeStruct(rest, jnp.asarray(x).dtype)

    leaves, treedef = jax.tree.flatten((args, kwargs))
    marks = _fit((in_axes, 0), (args, kwargs), "in_axes of map_workers")
    shapes = treedef.unflatten(map(shape, leaves, marks))
    return lambda args, kwargs: fun(*args, **kwargs), shapes


def _is_none(mark: Any) -> bool:
    return mark is None


def entry_of(axes: tuple[str, ...]) -> AxisName:
    """An entry of a `PartitionSpec`: one axis by its name, several as a tuple."""
    return axes if len(axes) > 1 else "".join(axes)


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


@functools.cache  # once for each mesh
def check_threads(mesh: Mesh | AbstractMesh) -> None:
    """Warn of CPU devices that may wait for each other until XLA gives up.

    Up to JAX 0.11 all devices run their programs on one pool of threads. A device that
    needs a thread while the others hold all of them in a collective waits for ever.
    This was never seen with two threads for each device, but with one fewer.
    """
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
            "for each, steps that are not waited for can stand in a collective until "
            f"XLA aborts the program. Start it with NPROC={2 * used} in its "
            f"environment, or set os.environ['NPROC'] = '{2 * used}' before the first "
            "array.",
            stacklevel=3,
        )


def wrong_number(what: str, axes: Any, positions: int) -> str:
    """The message for another number of workers than positions on the mesh."""
    return (
        f"{what}, but the mesh has {positions} positions along {axes!r}, and each is "
        "one worker. Make the two equal, or simulate any number of workers on one "
        "device: mesh=None."
    )


def _unequal(which: str, axes: tuple[str, ...]) -> str:
    return (
        f"{which} of map_workers has None in out_axes, equal on all workers, but is "
        "computed from what is each worker's own. Give it axis 0, or let the workers "
        f"agree with oxs.reduce(x, {axes!r}). Parameters that went through "
        "oxs.localize stay each worker's own: only the loss needs these, "
        "oxs.value_and_grad(loss, axis_name=...), and apply_gradients those from "
        "before it."
    )


def _fit(marks: Tree, tree: Tree, what: str) -> list[int | None]:
    """The mark of each leaf of a tree, from a prefix of it."""
    try:
        broadcast = jax.tree.map(
            lambda mark, part: [mark] * len(jax.tree.leaves(part)),
            marks,
            tree,
            is_leaf=_is_none,
        )
    except ValueError as error:
        raise ValueError(
            f"{what} do not fit: {str(error).rstrip('.')}. Axes are 0 or None, or a"
            " tree of them like the first levels of the value;"
            " oxs.by_hand.state_axes(tx, params) gives those of a state."
        ) from None
    return jax.tree.leaves(broadcast, is_leaf=_is_none)


def _marks_of(
    args: tuple,
    kwargs: dict,
    in_axes: Tree,
    positions: int | None,
    axes: tuple[str, ...],
) -> list[int | None]:
    """The mark of each leaf of the arguments, checked against its shape."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"in_axes of map_workers is for {len(in_axes)} positional arguments; got "
            f"{len(args)}. Give one entry for each; keyword arguments have axis 0."
        )
    marks = _fit((in_axes, 0), (args, kwargs), "in_axes of map_workers")
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    own = [x for x, mark in zip(leaves, marks, strict=True) if mark is not None]
    for path, leaf in own:
        check_arrays(leaf, "The argument of map_workers", path_name(path[1:]))
    workers = positions
    for path, leaf in own:
        where = f"The argument {path_name(path[1:])} of map_workers"
        shape = jnp.shape(leaf)
        if not shape:
            raise ValueError(
                f"{where} has axis 0 in in_axes, the workers', but is a scalar. Give it"
                " None in in_axes if it is equal for all workers, else"
                " oxs.by_hand.replicate(x, n), which stacks a state that tx.init gives"
                " with axes=oxs.by_hand.state_axes(tx, params)."
            )
        workers = shape[0] if workers is None else workers
        if shape[0] != workers:
            what = f"{where} has shape {shape}, of {shape[0]} workers"
            if positions is None:
                what = f"{what}; others are of {workers}."
            else:
                what = wrong_number(what, axes, positions)
            raise ValueError(
                f"{what} What is one worker's is stacked first:"
                " oxs.by_hand.replicate(x, n), a state with"
                " axes=oxs.by_hand.state_axes(tx, params); what is equal for all has"
                " None in in_axes."
            )
    if workers is None:
        raise ValueError(
            "No argument of map_workers holds an array that has axis 0 in in_axes, so "
            "nothing tells how many workers there are. Pass one, for example "
            "jnp.arange(8), or a mesh."
        )
    return marks


def are_explicit(mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether all of these axes of the mesh are of type `Explicit`."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(types[axis] == AxisType.Explicit for axis in axes)


def _lay(
    x: Any, mesh: Mesh | AbstractMesh, axes: tuple[str, ...], mark: int | None
) -> Any:
    """Lay an array on explicit axes as `jax.shard_map`, which moves none, needs it."""
    spec = [
        tuple(name for name in shards.axes_in(entry) if name not in axes) or None
        for entry in jax.typeof(x).sharding.spec
    ]
    if mark is not None:
        spec[0] = axes
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _results(results: Tree, out_axes: Tree, axes: tuple[str, ...]) -> Tree:
    """One worker's results, with a worker axis where `out_axes` says 0."""
    marks = iter(_fit(out_axes, results, "out_axes of map_workers"))

    def place(path, x):
        if next(marks) is not None:
            return jax.lax.expand_dims(jnp.asarray(x), (0,))
        if varying_axes(x) & set(axes):
            raise VaryingTypeError(_unequal(f"The result {path_name(path)}", axes))
        return x

    return jax.tree_util.tree_map_with_path(place, results)
