# SPDX-License-Identifier: Apache-2.0
"""Where the state of an optimizer lives: specs and axes from those of the parameters.

A state class of this package names in `shared_fields` what is equal on all workers (its
counters, the center). Everything else is the worker's own: it has a worker axis in
front when the states of several workers are held together. `replicated_fields` are
equal too, and have no such axis, where the parameters are replicated themselves.

Where such a state holds another one there are levels, the outermost is 0: workers of
one level share what its state says. `counter_fields` are shared on all levels.

`InPieces` marks what the workers share of which each holds a piece only: `stack` cuts
it instead of copying it.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optx_sync.trees import check_arrays, first_worker, is_masked, is_slices


class InPieces(NamedTuple):
    """A tree whose arrays lie in pieces, one on each worker; its scalars do not.

    An array of n numbers, of any shape, is `[ceil(n / N)]` on each of N workers, the
    last ones padded. Where no axis is mapped, in what `init` returns, N is 1: it is
    flat and whole.
    """

    tree: Any


def is_in_pieces(x: Any) -> bool:
    """Whether this is an `InPieces`; as `is_leaf`, it keeps one in one piece."""
    return isinstance(x, InPieces)


def in_rows(x: Any, n: int) -> Any:
    """A flat array, padded, as a piece for each of n workers: `[n, k]`."""
    return jnp.pad(x, (0, -x.size % n)).reshape(n, -1)


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
        them stay conditionals) and 0 for all that is per worker.

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
    return _mark(state, lambda shared, _: None if shared else 0, replicated, level)


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
        tx,
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
            if is_in_pieces(node)
            else node
        ),
        placed,
        is_leaf=lambda x: is_in_pieces(x) or _is_spec(x),
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
        axes = _mark(state, lambda shared, _: None if shared else 0, replicated, level)
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
        if not jnp.ndim(x):
            return repeat(x)
        return in_rows(x, n)

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
        _own_keys(tree, own),
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
    cut = [False] * len(leaves)
    if pieces is not None:
        cut = jax.tree.leaves(in_pieces(tree))
    return treedef.unflatten(
        shared(leaf)
        if mark is None
        else pieces(leaf)
        if in_pieces and pieces is not None
        else function(leaf)
        for leaf, mark, in_pieces in zip(leaves, marks, cut, strict=True)
    )


def in_pieces(tree: Any, around: bool = True) -> Any:
    """Whether each leaf is in pieces over the workers of the outermost level."""

    def visit(node):
        if _is_ours(node):
            fields = node._asdict().items()
            return type(node)(
                **{f: in_pieces(x, f in node.shared_fields) for f, x in fields}
            )
        found = around and is_in_pieces(node)
        return jax.tree.map(lambda _: found, node)

    return jax.tree.map(visit, tree, is_leaf=lambda x: _is_ours(x) or is_in_pieces(x))


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _own_keys(tree: Any, own: bool, ours: bool = False) -> Any:
    """Whether each leaf is a random key of which each worker gets its own.

    `own` says whether keys in it differ, `ours` whether a state of this package holds
    the tree.
    """

    def visit(node):
        if _is_ours(node):
            equal = *node.shared_fields, *getattr(node, "replicated_fields", ())
            differ = own or not ours
            return type(node)(
                **{
                    field: _own_keys(x, differ and field not in equal, True)
                    for field, x in node._asdict().items()
                }
            )
        if _is_optax(node):
            # It may stand in a chain beside `all_reduce_grads`, and must stay equal.
            return type(node)(*(_own_keys(x, own and ours, ours) for x in node))
        # The numbers of rows have a key's dtype, so that nothing adds to them.
        return jax.tree.map(lambda x: own and not is_slices(node) and _is_key(x), node)

    return jax.tree.map(
        visit, tree, is_leaf=lambda x: _is_ours(x) or _is_optax(x) or is_slices(x)
    )


def _is_optax(x: Any) -> bool:
    return hasattr(x, "_fields") and type(x).__module__.split(".")[0] == "optax"


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_ours(x: Any) -> bool:
    return hasattr(type(x), "shared_fields")


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

    def is_level(x):
        return _is_ours(x) or is_in_pieces(x)

    def own(node):
        if is_in_pieces(node):
            return ()
        return [x for f, x in node._asdict().items() if f not in node.shared_fields]

    def depth(tree: Any) -> int:
        levels = filter(is_level, jax.tree.leaves(tree, is_leaf=is_level))
        return max((1 + depth(own(node)) for node in levels), default=0)

    found = max(depth(state), 1)
    if not 1 <= levels <= found:
        raise ValueError(
            f"This state has {found} level(s) of workers, numbered from 0; got level "
            f"{levels - 1}. A level is a wrapper with workers or replicas of its own "
            "that stands in another one."
        )


def _mark(
    tree: Any,
    mark: Callable[[bool, Any], Any],
    replicated: bool,
    level: int,
    around: bool | None = None,
) -> Any:
    """`mark(is it shared, leaf)` for every leaf of a state.

    `around` says whether the field that holds the tree is shared; `None`: no state of
    this package holds it. `level` counts down to that which is asked for.
    """

    def visit(node):
        shared = replicated if around is None else around
        if not _is_ours(node):
            cut = is_in_pieces(node) and level == (-1 if around else 0)
            return jax.tree.map(
                lambda x: mark(shared and not (cut and jnp.ndim(x)), x), node
            )
        equal = getattr(node, "counter_fields", ())
        if level == 0:
            equal = node.shared_fields
            if replicated:
                equal = (*equal, *getattr(node, "replicated_fields", ()))
        return type(node)(
            **{
                field: _mark(
                    value, mark, replicated, level - 1, bool(around) or field in equal
                )
                for field, value in node._asdict().items()
            }
        )

    return jax.tree.map(visit, tree, is_leaf=lambda x: _is_ours(x) or is_in_pieces(x))
