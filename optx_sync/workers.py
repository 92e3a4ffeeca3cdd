# SPDX-License-Identifier: Apache-2.0
"""Workers without boilerplate: one worker's function for all, and a run's start."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optx_sync.checks import check_no_train_state
from optx_sync.comm.collectives import AxisName, check_axis_name, varying_axes
from optx_sync.in_place import returns_changes
from optx_sync.placement.axes import stack, stack_state, state_axes, state_specs
from optx_sync.trees import Tree, check_arrays, path_name

_STACK = "oxs.stack(x, n), or oxs.start_workers(tx, params, n)"


def map_workers(
    fun: Callable[..., Any],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
) -> Callable[..., Any]:
    """Run one worker's function for all workers: `jax.vmap`, or the same on a mesh.

    Without a mesh it is `jax.vmap(fun, in_axes, out_axes, axis_name=axis_name)`: the
    workers are simulated on one device. With a mesh it is `jax.shard_map`, manual over
    `axis_name` alone: each position of that axis is a worker, and what is sharded over
    the mesh's other axes stays so, so that a worker may itself lie on many devices
    (FSDP, tensor parallel). The program and its numbers are the same.

    What has axis 0 lies along the worker axis, `[workers, ...]`, and reaches `fun`
    without it; what has `None` is equal for all workers. Compile the result with
    `jax.jit`, which may donate. Workers on two levels, as data parallel replicas inside
    of each worker, are one `map_workers` inside of another.

    `fun` gets copies: what it changes in place, as Flax NNX does, it returns as well.

    Args:
        fun: A function of one worker's arguments. Collectives over `axis_name`, as all
            of this package's wrappers make them, go over the workers.
        axis_name: The worker axis, of the mesh where there is one. With a mesh also a
            tuple of its axes, along which one worker axis lies, the first one major.
        mesh: The devices, with axes of type `Auto` or `Explicit`; `None` to simulate.
        in_axes: 0 or `None` for each positional argument, or a tree of them that is a
            prefix of it, as `oxs.start_workers` gives it for a state. Keyword arguments
            have axis 0. (Only these: stack workers in front.)
        out_axes: The same for what `fun` returns. `None` is for what is equal on all
            workers by itself: counters and center of a state, what `oxs.reduce` gave.

    Returns:
        A function of all workers' arguments that returns all workers' results.

    Raises:
        TypeError: `axis_name` is not a str or a tuple of them, or `mesh` no mesh.
        ValueError: The mesh has no such axis; a tuple without a mesh; axes that do not
            fit the arguments; another number of workers than there are positions along
            the mesh axis; a result that is said to be equal on all workers and is not;
            NNX variables that `fun` changes in place and does not return.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def above_mean(x):
        ...     return x - oxs.reduce(x, "workers")
        >>> x = jnp.array([1.0, 2.0, 6.0])
        >>> jax.jit(oxs.map_workers(above_mean, "workers"))(x)
        Array([-2., -1.,  3.], dtype=float32)
    """
    axes = check_axis_name(axis_name)
    for where, marks in (("in_axes", in_axes), ("out_axes", out_axes)):
        _check_marks(marks, where)
    fun = _one_worker(fun)
    if mesh is None:
        if len(axes) > 1:
            raise ValueError(
                f"map_workers over the axes {axes!r} needs a mesh, which says how many "
                "workers lie along each of them. To simulate them on one device name "
                "one axis, or map over one axis at a time: "
                f"oxs.map_workers(oxs.map_workers(fun, {axes[-1]!r}), {axes[0]!r})."
            )
        mapped = jax.vmap(fun, in_axes, out_axes, axis_name=_entry(axes))

        @functools.wraps(fun)
        def simulated(*args: Any, **kwargs: Any) -> Any:
            _check_arguments(args, kwargs, in_axes, None, axes)
            try:
                return mapped(*args, **kwargs)
            except ValueError as error:
                # Only `jax.vmap` knows; the words are its own.
                if "mapped output" not in str(error):
                    raise
                raise ValueError(
                    "A result of map_workers has None in out_axes, equal on all "
                    "workers, but is computed from what is each worker's own. "
                    f"{_agree(axes)}"
                ) from error

        return simulated
    workers = _size_along(mesh, axes)
    spec = PartitionSpec(_entry(axes))

    # Compiled also where the caller does not: JAX runs no shard_map over a part of the
    # mesh's axes otherwise. In the caller's `jax.jit` it leaves no trace.
    @functools.partial(jax.jit, inline=True)
    def on_mesh(args, kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        marks = _check_arguments(args, kwargs, in_axes, workers, axes)
        context = jax.sharding.get_abstract_mesh()
        inside = bool(context.manual_axes)
        placed = leaves
        if _are_explicit(mesh, axes):
            placed = [
                _lay(leaf, context if inside else mesh, axes, mark)
                for leaf, mark in zip(leaves, marks, strict=True)
            ]

        def one_worker(*leaves):
            own = (
                leaf if mark is None else jax.lax.squeeze(leaf, (0,))
                for leaf, mark in zip(leaves, marks, strict=True)
            )
            args, kwargs = treedef.unflatten(own)
            return _results(fun(*args, **kwargs), out_axes, axes)

        return jax.shard_map(
            one_worker,
            mesh=None if inside else mesh,
            in_specs=tuple(PartitionSpec() if m is None else spec for m in marks),
            out_specs=jax.tree.map(
                lambda mark: PartitionSpec() if mark is None else spec,
                out_axes,
                is_leaf=_is_none,
            ),
            axis_names=set(axes),
        )(*placed)

    @functools.wraps(fun)
    def mapped_on_mesh(*args: Any, **kwargs: Any) -> Any:
        check_arrays(args, "The argument of map_workers")
        check_arrays(kwargs, "The argument of map_workers")
        return on_mesh(args, kwargs)

    return mapped_on_mesh


def start_workers(
    tx: optax.GradientTransformation,
    params: Tree,
    n: int,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Tree, optax.OptState, Any]:
    """What a run of `n` workers starts from: parameters, optimizer state, and its axes.

    All workers start from the same parameters. Parameters and state are stacked,
    `[n, ...]`, but for what the workers share: counters and center. With a mesh they
    are placed along its axis `axis_name`, computed where they are to live; parameters
    that lie sharded on the mesh already keep their shards, and so does the state. Of
    random keys in the state each worker gets its own where workers may differ, as
    `oxs.stack` says.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters.
        n: The number of workers.
        mesh: The devices; `None` to simulate the workers on one.
        axis_name: The mesh axis along which the workers lie, or a tuple of them.

    Returns:
        `(params, state, axes)`: the last one is `oxs.state_axes(tx, params)`, what
        `map_workers` takes for the state in `in_axes` and `out_axes`.

    Raises:
        ValueError: The mesh has no such axis, or not as many positions along it as
            there are workers; parameters that are sharded over it already.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=2)
        >>> params, state, axes = oxs.start_workers(tx, {"w": jnp.zeros(3)}, 4)
        >>> params["w"].shape, state.center["w"].shape, axes.center["w"]
        ((4, 3), (3,), None)
        >>> def step(params, state, grads):
        ...     return oxs.apply_gradients(tx, grads, state, params)
        >>> step = jax.jit(
        ...     oxs.map_workers(
        ...         step, "workers", in_axes=(0, axes, 0), out_axes=(0, axes)
        ...     )
        ... )
        >>> for _ in range(2):
        ...     params, state = step(params, state, {"w": jnp.ones((4, 3))})
        >>> oxs.center_params(state, params)["w"]
        Array([-0.2, -0.2, -0.2], dtype=float32)
    """
    check_no_train_state(params)
    axes = state_axes(tx, params)
    if mesh is None:
        return *_started(tx, params, n), axes
    shardings = state_shardings(tx, params, mesh=mesh, axis_name=axis_name)
    positions = _size_along(mesh, check_axis_name(axis_name))
    if n != positions:
        raise ValueError(_wrong_number(f"{n} workers", axis_name, positions))
    on_mesh = jax.tree.map(lambda x: _on_mesh(x, mesh), params)
    start = jax.jit(lambda params: _started(tx, params, n), out_shardings=shardings)
    return *start(on_mesh), axes


def state_shardings(
    tx: optax.GradientTransformation,
    params: Tree,
    *,
    mesh: Mesh,
    axis_name: AxisName | None,
) -> tuple[Any, Any]:
    """Where `start_workers` puts parameters and state: to restore a checkpoint there.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: arrays, or `jax.ShapeDtypeStruct` with or
            without a sharding. What is sharded over other axes of the mesh stays so.
        mesh: The devices.
        axis_name: The mesh axis along which the workers lie, or a tuple of them.

    Returns:
        `(params, state)` as trees of `NamedSharding`, worker axis included.

    Raises:
        ValueError: The mesh has no such axis, or parameters are sharded over it.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> mesh = jax.make_mesh((jax.device_count(),), ("workers",))
        >>> tx = optax.sgd(0.1, momentum=0.9)
        >>> params, state = oxs.state_shardings(
        ...     tx, jnp.zeros(3), mesh=mesh, axis_name="workers"
        ... )
        >>> params.spec[0], state[0].trace.spec[0]
        ('workers', 'workers')
    """
    axes = check_axis_name(axis_name)
    _size_along(mesh, axes)
    own = jax.tree_util.tree_map_with_path(
        lambda path, x: _spec_of(path, x, mesh, axes), params
    )
    front = _entry(axes)
    specs = (
        jax.tree.map(lambda spec: PartitionSpec(front, *spec), own, is_leaf=_is_spec),
        state_specs(tx, params, own, front),
    )

    def place(spec, x):
        # A compiled step returns specs of explicit axes in full. With others at the
        # start it would be compiled twice.
        missing = len(x.shape) - len(spec) if _are_explicit(mesh, axes) else 0
        return NamedSharding(mesh, PartitionSpec(*spec, *[None] * missing))

    shapes = jax.eval_shape(lambda params: _started(tx, params, 1), params)
    return jax.tree.map(place, specs, shapes, is_leaf=_is_spec)


def _started(tx: Any, params: Any, n: int) -> tuple[Any, Any]:
    """Parameters and state of `n` workers."""
    return stack(params, n), stack_state(tx.init(params), n, state_axes(tx, params))


def _one_worker(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one worker, whose results are looked at."""
    fun = returns_changes(fun, "map_workers")

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        results = fun(*args, **kwargs)
        check_arrays(results, "The result of map_workers")
        return results

    return checked


def _entry(axes: tuple[str, ...]) -> AxisName:
    """One axis by its name, several as a tuple: an entry of a `PartitionSpec`."""
    return axes if len(axes) > 1 else "".join(axes)


def _is_none(x: Any) -> bool:
    return x is None


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _check_marks(marks: Any, where: str) -> None:
    """Refuse axes other than 0 and `None`."""
    for mark in jax.tree.leaves(marks, is_leaf=_is_none):
        if mark is not None and not (type(mark) is int and mark == 0):
            raise ValueError(
                f"{where} of map_workers holds 0 (along the worker axis) and None "
                f"(equal for all workers); got {mark!r}. Move the worker axis to the "
                "front, for example with jnp.moveaxis."
            )


def _size_along(mesh: Any, axes: tuple[str, ...]) -> int:
    """The number of workers: positions along the mesh axes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None; got {type(mesh).__name__}. "
            "Make one with jax.make_mesh((8,), ('workers',))."
        )
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"The mesh has no axis {missing[0]!r}; its axes are "
            f"{dict(mesh.shape)!r}. Name one of them as axis_name, or make a mesh that "
            f"has it: jax.make_mesh((8,), ({missing[0]!r},))."
        )
    return math.prod(mesh.shape[axis] for axis in axes)


def _wrong_number(what: str, axes: Any, positions: int) -> str:
    return (
        f"{what}, but the mesh has {positions} positions along {axes!r}, and each is "
        "one worker. Make the two equal, or simulate any number of workers on one "
        "device: mesh=None."
    )


def _agree(axes: tuple[str, ...]) -> str:
    return (
        f"Give it axis 0, or let the workers agree with oxs.reduce(x, {axes!r}). "
        "Parameters that went through oxs.localize stay each worker's own: only the "
        "loss needs these, oxs.value_and_grad(loss, axis_name=...), and "
        "apply_gradients those from before it."
    )


def _fit(marks: Any, tree: Any, what: str) -> list[int | None]:
    """The mark of each leaf of a tree, from a prefix of it."""
    found = []
    try:
        jax.tree.map(
            lambda mark, part: found.extend([mark] * len(jax.tree.leaves(part))),
            marks,
            tree,
            is_leaf=_is_none,
        )
    except ValueError as error:
        raise ValueError(
            f"{what} do not fit: {str(error).rstrip('.')}. Axes are 0 or None, or a "
            "tree of them like the first levels of the value; oxs.start_workers gives "
            "those of a state."
        ) from None
    return found


def _check_arguments(
    args: tuple, kwargs: dict, in_axes: Any, positions: int | None, axes: Any
) -> list[int | None]:
    """The mark of each leaf of the arguments, checked against its shape."""
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"in_axes of map_workers is for {len(in_axes)} positional arguments; got "
            f"{len(args)}. Give one entry for each; keyword arguments have axis 0."
        )
    marks = _fit((in_axes, 0), (args, kwargs), "in_axes of map_workers")
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    for (path, leaf), mark in zip(leaves, marks, strict=True):
        if mark is not None:
            check_arrays(leaf, "The argument of map_workers", path_name(path[1:]))
    workers = positions
    for (path, leaf), mark in zip(leaves, marks, strict=True):
        if mark is None:
            continue
        where = f"The argument {path_name(path[1:])} of map_workers"
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"{where} has axis 0 in in_axes, the workers', but is a scalar. Give "
                "it None in in_axes if it is equal for all workers, else "
                "oxs.stack(x, n); oxs.start_workers stacks one worker's parameters and "
                "the state that tx.init gives of them."
            )
        size = jnp.shape(leaf)[0]
        workers = size if workers is None else workers
        if size != workers and positions is None:
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}, of {size} workers; others are "
                f"of {workers}. Give it None in in_axes if it is equal for all workers,"
                f" and stack it first if it is one worker's: {_STACK}."
            )
        if size != workers:
            what = f"{where} has shape {jnp.shape(leaf)}, of {size} workers"
            wrong = _wrong_number(what, axes, workers)
            raise ValueError(
                f"{wrong} What is one worker's is stacked first: {_STACK}."
            )
    if workers is None:
        raise ValueError(
            "No argument of map_workers holds an array that has axis 0 in in_axes, so "
            "nothing tells how many workers there are. Pass one, for example "
            "jnp.arange(8), or a mesh."
        )
    return marks


def _are_explicit(mesh: Any, axes: tuple[str, ...]) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(types[axis] == AxisType.Explicit for axis in axes)


def _lay(x: Any, mesh: Any, axes: tuple[str, ...], mark: int | None) -> Any:
    """An array on explicit axes as `jax.shard_map` asks for: it moves none itself."""
    spec = [_without(entry, axes) for entry in jax.typeof(x).sharding.spec]
    if mark is not None:
        spec[0] = axes
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    """One entry of a spec, without some axes."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name not in axes) or None


def _results(results: Any, out_axes: Any, axes: tuple[str, ...]) -> Any:
    """One worker's results with a worker axis in front of what is its own."""
    leaves, treedef = jax.tree.flatten(results)
    paths = jax.tree_util.tree_leaves_with_path(results)
    marks = _fit(out_axes, results, "out_axes of map_workers")
    for i, mark in enumerate(marks):
        if mark is not None:
            leaves[i] = jax.lax.expand_dims(jnp.asarray(leaves[i]), (0,))
        elif varying_axes(leaves[i]) & set(axes):
            raise ValueError(
                f"The result {path_name(paths[i][0])} of map_workers has None in "
                "out_axes, equal on all workers, but is each worker's own: its type is "
                f"{jax.typeof(leaves[i])}. {_agree(axes)}"
            )
    return treedef.unflatten(leaves)


def _spec_of(path: Any, x: Any, mesh: Any, axes: tuple[str, ...]) -> PartitionSpec:
    """How one worker's parameter is sharded over the mesh."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    spec = getattr(sharding, "spec", PartitionSpec(None))
    used = {n for e in spec for n in ((e,) if isinstance(e, str) else e or ())}
    if not used or not used <= set(mesh.shape) - set(axes):
        raise ValueError(
            f"The parameter {path_name(path)} is sharded as {sharding}; a worker's may "
            f"be sharded over the mesh's axes besides {axes!r}: {dict(mesh.shape)!r}. "
            "Place one worker's parameters on this mesh first: "
            "jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))."
        )
    return spec


def _on_mesh(x: Any, mesh: Mesh) -> Any:
    """An array that lies on the devices of the mesh, whole if it did not before."""
    there = isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)
    return x if there else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
