# SPDX-License-Identifier: Apache-2.0
"""Where the state of an optimizer lives: specs and axes from those of the parameters.

A state class of this package names in `shared_fields` what is equal on all workers (its
counters, the center). Everything else is the worker's own: it has a worker axis in
front when the states of several workers are held together. `replicated_fields` are
equal too, and have no such axis, where the parameters are replicated themselves.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optx_sync.trees import is_masked


def state_axes(
    tx: optax.GradientTransformation, params: Any, *, replicated: bool = False
) -> Any:
    """`in_axes` and `out_axes` of `jax.vmap` for the state of a transformation.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        replicated: Whether the parameters have no worker axis, being equal on all
            replicas (`in_axes=None`). What follows from them has none then either: the
            state has one only where it is a replica's own, as in `sync_replicas`.

    Returns:
        A tree like the state, of `None` for what is equal on all workers (this
        package's counters and the center: they stay unbatched, so that conditionals on
        them stay conditionals) and 0 for all that is per worker.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> oxs.state_axes(optax.sgd(0.1, momentum=0.9), jnp.zeros(3))
        (TraceState(trace=0), EmptyState())
    """
    state = jax.eval_shape(tx.init, params)
    return _mark(state, lambda shared, _: None if shared else 0, replicated)


def state_specs(
    tx: optax.GradientTransformation,
    params: Any,
    param_specs: Any,
    worker_axis: str | tuple[str, ...] | None,
    *,
    replicated: bool = False,
) -> Any:
    """PartitionSpecs of a transformation's state, for `jax.shard_map` and `jax.jit`.

    A leaf of the state that belongs to a parameter takes its spec; other leaves are
    replicated. What is per worker has the worker axis in front of that, as `stack`
    puts it there; what is equal on all workers has not.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        param_specs: A tree like `params` (or a prefix of it) of their `PartitionSpec`,
            without the worker axis.
        worker_axis: The mesh axis along which the workers lie, or a tuple of them.
            `None` for replicas, whose state is equal: no leaf has a worker axis then.
        replicated: As for `state_axes`: the parameters' own spec has no worker axis.

    Returns:
        A tree like the state, of `PartitionSpec`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from jax.sharding import PartitionSpec as P
        >>> oxs.state_specs(optax.sgd(0.1, 0.9), jnp.zeros(3), P("fsdp"), "workers")
        (TraceState(trace=P('workers', 'fsdp')), EmptyState())
    """
    full_specs = jax.tree.broadcast(
        param_specs, params, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    state = jax.eval_shape(tx.init, params)
    placed = optax.tree.map_params(
        tx,
        lambda leaf, spec: leaf if is_masked(leaf) else spec,
        state,
        full_specs,
        transform_non_params=lambda _: PartitionSpec(),
        is_leaf=is_masked,
    )
    if worker_axis is None:
        return placed
    return _mark(
        placed,
        lambda shared, spec: spec if shared else PartitionSpec(worker_axis, *spec),
        replicated,
    )


def stack(tree: Any, n: int, axes: Any = None) -> Any:
    """Put a worker axis in front: `n` equal copies of every leaf.

    Args:
        tree: A tree of arrays, for example one worker's parameters or state.
        n: The number of workers.
        axes: A tree like `tree`, as `state_axes` gives it: leaves marked `None` are
            equal on all workers and stay as they are. `None`: all leaves are stacked.

    Returns:
        The tree with leaves of shape `[n, ...]`, none aliasing the input's buffers.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> oxs.stack({"w": jnp.zeros(3)}, 4)["w"].shape
        (4, 3)
    """

    def repeat(x):
        return jnp.repeat(jnp.asarray(x)[None], n, axis=0)

    return _map(repeat, tree, axes, shared=jnp.copy)


def unstack(tree: Any, axes: Any = None) -> Any:
    """Take the worker axis off: the first worker's copy of every leaf.

    Inside `jax.shard_map` that is this worker's own. Outside, where workers differ,
    it is one of them: for evaluation and checkpoints take `center_params`.

    Args:
        tree: A tree of arrays of shape `[n, ...]`.
        axes: As for `stack`; leaves marked `None` have no worker axis.

    Returns:
        The tree with leaves of shape `[...]`.

    Raises:
        ValueError: A leaf has no axis to take off.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> oxs.unstack(oxs.stack(jnp.array([1.0, 2.0]), 4))
        Array([1., 2.], dtype=float32)
    """

    def first(x):
        if jnp.ndim(x) == 0:
            raise ValueError(
                "unstack needs leaves with a worker axis in front; got a scalar. Pass "
                "axes=oxs.state_axes(tx, params) if some leaves have none."
            )
        return x[0]

    return _map(first, tree, axes, shared=lambda x: x)


def _map(function: Callable, tree: Any, axes: Any, shared: Callable) -> Any:
    """`function` of the leaves that are per worker, `shared` of those that are not."""
    if axes is None:
        return jax.tree.map(function, tree)
    leaves, treedef = jax.tree.flatten(tree)
    marks = treedef.flatten_up_to(axes)
    return treedef.unflatten(
        shared(leaf) if mark is None else function(leaf)
        for leaf, mark in zip(leaves, marks, strict=True)
    )


def _mark(
    tree: Any,
    mark: Callable[[bool, Any], Any],
    replicated: bool = False,
    around: bool | None = None,
) -> Any:
    """`mark(is it shared, leaf)` for every leaf of a state.

    `around` says whether the field that holds the tree is shared; `None`: no state of
    this package holds it.
    """

    def is_ours(x):
        return hasattr(type(x), "shared_fields")

    def is_leaf(x):
        return is_ours(x) or isinstance(x, PartitionSpec)

    def visit(node):
        if not is_ours(node):
            return mark(replicated if around is None else around, node)
        equal = node.shared_fields
        if replicated:
            equal = (*equal, *getattr(node, "replicated_fields", ()))
        return type(node)(
            **{
                field: _mark(value, mark, replicated, bool(around) or field in equal)
                for field, value in node._asdict().items()
            }
        )

    return jax.tree.map(visit, tree, is_leaf=is_leaf)
