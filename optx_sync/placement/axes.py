# SPDX-License-Identifier: Apache-2.0
"""Specs and axes of a state, from the kinds of its fields and the parameters' specs.

What is equal on all workers (counters, the center) has no worker axis when the states
of several workers are held together; all else has one in front. What is equal where the
parameters are has none where they are replicated themselves.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optx_sync.comm.buffers import in_rows
from optx_sync.placement import fields
from optx_sync.trees import (
    check_arrays,
    first_worker,
    is_masked,
    is_slices,
    with_shapes,
)


def state_axes(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    replicated: bool = False,
    level: int = 0,
) -> Any:
    """`in_axes` and `out_axes` of `jax.vmap` for the state of a transformation.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        replicated: Whether the parameters have no worker axis, being equal on all
            replicas (`in_axes=None`). What follows from them has none then either: the
            state has one only where it is a replica's own, as in `sync_replicas`.
        level: Of nested wrappers, `oxs.local_sgd(oxs.agn(inner, "data"), "pods")`,
            which one's axis is asked for: 0 is the outermost, here `"pods"`.

    Returns:
        A tree like the state, of `None` for what is equal on all workers (this
        package's counters and the center: they stay unbatched, so that conditionals on
        them stay conditionals) and 0 for all that is per worker. What
        `optax.inject_hyperparams` keeps around a center rule is shared, as it may act
        at the center; a rate of each worker's own is injected inside, in `inner`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> oxs.state_axes(optax.sgd(0.1, momentum=0.9), jnp.zeros(3))
        (TraceState(trace=0), EmptyState())
    """
    check_arrays(params, "The parameter")
    state = jax.eval_shape(tx.init, params)
    _refuse_around_center(state)
    _check_levels(state, level + 1)
    return _axes(state, replicated, level)


def state_specs(
    tx: optax.GradientTransformation,
    params: Any,
    param_specs: Any,
    worker_axis: str | tuple[str, ...] | PartitionSpec | None,
    *,
    replicated: bool = False,
) -> Any:
    """PartitionSpecs of a transformation's state, for `jax.shard_map` and `jax.jit`.

    A leaf of the state that belongs to a parameter takes its spec; other leaves are
    replicated. Of a leaf with fewer axes than its parameter (Adafactor's rows and
    columns) each takes that of the parameter's axis which it kept; where the shapes do
    not tell which one that is, the leaf is replicated. What is per worker has the
    worker axis in front of that, as `stack` puts it there; what is equal on all workers
    has not.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        param_specs: A tree like `params` (or a prefix of it) of their `PartitionSpec`,
            without the worker axis.
        worker_axis: The mesh axis along which the workers lie, or a tuple of them.
            `None` for replicas, whose state is equal: no leaf has a worker axis then.
            For nested wrappers a `PartitionSpec` with one entry for each level, the
            outermost first: `P("pods", "data")`, the parameters' own worker axes.
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
    check_arrays(params, "The parameter")
    full_specs = jax.tree.broadcast(
        param_specs, params, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    state = jax.eval_shape(tx.init, params)
    placed = optax.tree.map_params(
        # Optax's own tree without leaves does not tell what parts there are.
        lambda placeholder: tx.init(with_shapes(placeholder, params)),
        lambda leaf, spec, param: (
            leaf if is_masked(leaf) else _spec_of_kept_axes(leaf, spec, param)
        ),
        state,
        full_specs,
        params,
        transform_non_params=lambda _: PartitionSpec(),
        is_leaf=is_masked,
    )
    # A piece is flat: it has none of its parameter's axes.
    placed = jax.tree.map(
        lambda node: (
            jax.tree.map(lambda _: PartitionSpec(), node, is_leaf=_is_spec)
            if fields.is_in_pieces(node)
            else node
        ),
        placed,
        is_leaf=lambda x: fields.is_in_pieces(x) or _is_spec(x),
    )
    # Of a part of a state whose form only the parameters tell there is one spec.
    placed = jax.tree.broadcast(
        placed, state, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    if worker_axis is None:
        return placed
    levels = worker_axis if isinstance(worker_axis, PartitionSpec) else (worker_axis,)
    _check_levels(state, len(levels))
    for level, axis in reversed(list(enumerate(levels))):
        axes = _axes(state, replicated, level)
        placed = _map(
            lambda spec, axis=axis: PartitionSpec(axis, *spec),
            placed,
            axes,
            shared=lambda spec: spec,
        )
    return placed


def _spec_of_kept_axes(leaf: Any, spec: PartitionSpec, param: Any) -> PartitionSpec:
    """The spec of a leaf whose axes are some of its parameter's, in their order."""
    shape = jnp.shape(param)
    if leaf.shape == shape:
        return spec
    names = (*spec, *[None] * (len(shape) - len(spec)))
    if len(leaf.shape) == len(shape) > 1 and leaf.shape[1:] == shape[1:]:
        return PartitionSpec(None, *names[1:])  # some of its rows
    found = {
        tuple(names[axis] for axis in kept)
        for kept in itertools.combinations(range(len(shape)), len(leaf.shape))
        if leaf.shape == tuple(shape[axis] for axis in kept)
    }
    return PartitionSpec(*found.pop()) if len(found) == 1 else PartitionSpec()


def stack(tree: Any, n: int, axes: Any = None) -> Any:
    """Put a worker axis in front: `n` equal copies of every leaf, but of random keys.

    Of a random key (`jax.random.key`, also inside of `nnx.Rngs`) worker i gets its own,
    `jax.random.fold_in(key, i)`, so that dropout masks differ. Keys in the state of a
    transformation are folded where workers have parameters of their own, in `inner` of
    a center rule or of `gossip`; replicas must draw the same numbers, to stay equal.
    (A transformation of your own for replicas, whose state holds a key, is seen to be
    one by `start_workers` only.)
    Raw keys (`jax.random.PRNGKey`, an array of uint32) cannot be told from data: they
    are copied. With n = 1 nothing is folded: it puts back what `unstack` took off.

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
    return _stack(tree, n, axes, own=True)


def stack_state(state: Any, n: int, axes: Any) -> Any:
    """`stack` of what a transformation's `init` gives, whatever holds its keys."""
    return _stack(state, n, axes, own=False)


def _stack(tree: Any, n: int, axes: Any, own: bool) -> Any:
    """`stack`; `own` says whether keys outside of our states differ."""
    check_arrays(tree, "What is stacked")

    def repeat(x):
        return jnp.broadcast_to(x, (n, *jnp.shape(x)))

    def cut(x):
        return in_rows(x, n) if jnp.ndim(x) else repeat(x)

    def fold(keys, worker):
        one = jax.vmap(lambda key: jax.random.fold_in(key, worker))
        return one(keys.reshape(-1)).reshape(keys.shape)

    stacked = _map(repeat, tree, axes, shared=jnp.copy, pieces=cut)
    if n == 1 or not any(map(_is_key, jax.tree.leaves(tree))):
        return stacked
    workers = jnp.arange(n, dtype=jnp.uint32)
    return jax.tree.map(
        lambda folds, x, copies: (
            jax.vmap(fold)(copies, workers)
            if folds and copies.ndim > x.ndim
            else copies
        ),
        own_keys(tree, own),
        tree,
        stacked,
    )


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
        return first_worker(x)

    return _map(first, tree, axes, shared=lambda x: x)


def _map(
    function: Callable,
    tree: Any,
    axes: Any,
    shared: Callable,
    pieces: Callable | None = None,
) -> Any:
    """`function` of the leaves that are per worker, `shared` of those that are not.

    `pieces`, where given, is for those that are in pieces.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_spec)
    marks = [0] * len(leaves) if axes is None else treedef.flatten_up_to(axes)
    cut = jax.tree.leaves(in_pieces(tree)) if pieces else [False] * len(leaves)
    return treedef.unflatten(
        shared(leaf)
        if mark is None
        else (pieces if flag and pieces else function)(leaf)
        for leaf, mark, flag in zip(leaves, marks, cut, strict=True)
    )


def in_pieces(tree: Any, around: bool = True) -> Any:
    """Whether each leaf is in pieces over the workers of the outermost level."""

    def visit(node):
        if fields.is_level(node):
            return node._replace(
                **{
                    f: in_pieces(x, kind.is_shared)
                    for f, kind, x in fields.fields_of(node)
                }
            )
        found = around and fields.is_in_pieces(node)
        return jax.tree.map(lambda _: found, node)

    return jax.tree.map(visit, tree, is_leaf=_is_level_or_pieces)


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def own_keys(tree: Any, own: bool, ours: bool = False) -> Any:
    """Whether each leaf is a random key of which each worker gets its own.

    `own` says whether keys in it differ, `ours` whether a state of this package holds
    the tree.
    """

    def visit(node):
        if fields.is_level(node):
            differ = own or not ours
            return node._replace(
                **{
                    name: own_keys(x, differ and kind.whose == "own", True)
                    for name, kind, x in fields.fields_of(node)
                }
            )
        if _is_optax(node):
            # It may stand in a chain beside `all_reduce_grads`, and must stay equal.
            return type(node)(*(own_keys(x, own and ours, ours) for x in node))
        # The numbers of rows have a key's dtype, so that nothing adds to them.
        return jax.tree.map(lambda x: own and not is_slices(node) and _is_key(x), node)

    return jax.tree.map(
        visit,
        tree,
        is_leaf=lambda x: fields.is_level(x) or _is_optax(x) or is_slices(x),
    )


def _is_optax(x: Any) -> bool:
    return hasattr(x, "_fields") and type(x).__module__.split(".")[0] == "optax"


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_level_or_pieces(x: Any) -> bool:
    return fields.is_level(x) or fields.is_in_pieces(x)


def _is_injected(x: Any) -> bool:
    """Whether this is what `optax.inject_hyperparams` keeps around a center rule."""
    injected = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState
    return isinstance(x, injected) and any(
        fields.center_of(node)
        for node in fields.nodes_of(x.inner_state, fields.is_level)
    )


# Optax's wrappers that make a step of what they wrap in some steps only.
_SOMETIMES = (
    "ApplyIfFiniteState",
    "ConditionallyMaskState",
    "ConditionallyTransformState",
    "MultiStepsState",
)


def _refuse_around_center(state: Any) -> None:
    """Refuse a wrapper that decides for each worker whether a center rule steps."""

    def sometimes(x):
        return _is_optax(x) and type(x).__name__ in _SOMETIMES

    def is_center(x):
        return hasattr(type(x), "center_params")

    for node in jax.tree.leaves(state, is_leaf=sometimes):
        within = jax.tree.leaves(node, is_leaf=is_center)
        if sometimes(node) and any(map(is_center, within)):
            name = type(node).__name__.removesuffix("State")
            raise ValueError(
                f"Optax's {name} stands around a center rule: it decides by what is a "
                "worker's own whether the rule makes a step, and so whether this "
                "worker meets the others, who wait. Put it inside of the rule, for "
                "example oxs.diloco(optax.apply_if_finite(optax.adam(1e-3), 3), "
                "'workers'), or around optax.MultiSteps(optax.adam(1e-3), "
                "4).gradient_transformation()."
            )


def _check_levels(state: Any, levels: int) -> None:
    """Refuse more levels than there are states that hold another one."""

    def inside(node):
        if fields.is_in_pieces(node):
            return ()
        return [x for _, kind, x in fields.fields_of(node) if not kind.is_shared]

    def depth(tree: Any) -> int:
        nodes = fields.nodes_of(tree, _is_level_or_pieces)
        return max((1 + depth(inside(node)) for node in nodes), default=0)

    found = max(depth(state), 1)
    if not 1 <= levels <= found:
        raise ValueError(
            f"This state has {found} level(s) of workers, numbered from 0; got level "
            f"{levels - 1}. A level is a wrapper with workers or replicas of its own "
            "that stands in another one."
        )


def _axes(tree: Any, replicated: bool, level: int, around: bool | None = None) -> Any:
    """`None` for every leaf of a state that is shared on a level, else 0.

    `around` says whether the field that holds the tree is shared; `None`: no state of
    this package holds it. `level` counts down to that which is asked for.
    """
    shared = replicated if around is None else around

    equal = {"all levels"}
    if level == 0:
        equal |= {"level"}
        if replicated:
            equal |= {"params"}

    def visit(node):
        if fields.is_level(node):
            return node._replace(
                **{
                    field: _axes(
                        value,
                        replicated,
                        level - 1,
                        bool(around) or kind.whose in equal,
                    )
                    for field, kind, value in fields.fields_of(node)
                }
            )
        if _is_injected(node):
            # What acts at the center is no worker's own.
            whose = None if shared or level == 0 else 0
            inside = _axes(node.inner_state, replicated, level, around)
            numbers = jax.tree.map(lambda _: whose, node._replace(inner_state=()))
            return numbers._replace(inner_state=inside)
        cut = fields.is_in_pieces(node) and level == (-1 if around else 0)
        return jax.tree.map(
            lambda x: None if shared and not (cut and jnp.ndim(x)) else 0, node
        )

    return jax.tree.map(
        visit, tree, is_leaf=lambda x: _is_level_or_pieces(x) or _is_injected(x)
    )
