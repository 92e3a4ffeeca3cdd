# SPDX-License-Identifier: Apache-2.0
"""What `oxs.Workers` stands on, for `jax.shard_map`, `jax.vmap` and `jax.pmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optx_sync.comm.collectives import (
    AxisName,
    axis_index,
    check_axis_name,
    psum,
)
from optx_sync.comm.varying import localize
from optx_sync.core.checks import check_no_train_state, integer, one_of
from optx_sync.core.trees import (
    Tree,
    check_arrays,
    check_transformation,
    first_worker,
    pure,
)
from optx_sync.state import leaves as placing
from optx_sync.state.leaves import Leaf, map_leaves
from optx_sync.workers.fingerprints import by_name
from optx_sync.workers.resize import Joiners, Resize, worker_axes


def state_axes(
    tx: optax.GradientTransformation,
    params: Tree,
    *,
    replicated: bool = False,
    level: int = 0,
) -> Tree:
    """`in_axes` and `out_axes` of `jax.vmap` for the state of a transformation.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        replicated: Whether the parameters have no worker axis, being equal on all
            replicas (`in_axes=None`). State computed from the parameters then has none
            either; only what is a replica's own has one, as in `sync_replicas`.
        level: With nested wrappers, `oxs.local_sgd(oxs.agn(inner, "data"), "pods")`,
            the wrapper whose axis is asked for: 0 is the outermost, here `"pods"`.

    Returns:
        A tree like the state: `None` for what is equal on all workers (this package's
        counters and the center, which stay unbatched, so that conditionals on them stay
        conditionals) and 0 for all that is per worker. What `optax.inject_hyperparams`
        keeps around a center rule is shared, as it may act at the center; inject a rate
        of each worker's own inside, in `inner`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> oxs.by_hand.state_axes(optax.sgd(0.1, momentum=0.9), jnp.zeros(3))
        (TraceState(trace=0), EmptyState())
    """
    level = integer("level", level, "The outermost is 0.", least=-(2**31))
    state = _state_shapes(tx, params)
    placing.check_levels(state, level + 1)
    return map_leaves(lambda leaf: leaf.mark(level, replicated), state)


def state_specs(
    tx: optax.GradientTransformation,
    params: Tree,
    param_specs: Tree,
    worker_axis: str | tuple[str, ...] | PartitionSpec | None,
    *,
    replicated: bool = False,
) -> Tree:
    """PartitionSpecs of a transformation's state, for `jax.shard_map` and `jax.jit`.

    A leaf of the state that belongs to a parameter, by its path, takes its spec. In one
    with fewer axes than its parameter (Adafactor's rows and columns) each axis takes
    the spec of the parameter's axis that it kept; where the shapes do not say which one
    that is, the leaf is replicated. So are other leaves, unless all parameters of their
    shape, but for the number of rows, have one spec. Leaves that are per worker have
    the worker axis in front, where `replicate` puts it; those that are equal on all
    workers have none.

    Args:
        tx: Any Optax transformation, with or without wrappers of this package in it.
        params: One worker's parameters: a tree of arrays or `jax.ShapeDtypeStruct`.
        param_specs: A tree like `params` (or a prefix of it) of their `PartitionSpec`,
            without the worker axis.
        worker_axis: The mesh axis along which the workers lie, or a tuple of them.
            `None` for replicas, whose state is equal: then no leaf has a worker axis.
            For nested wrappers a `PartitionSpec` with one entry for each level, the
            outermost first: `P("pods", "data")`, the parameters' own worker axes.
        replicated: As for `state_axes`: the parameters' own spec has no worker axis.

    Returns:
        A tree like the state, of `PartitionSpec`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from jax.sharding import PartitionSpec as P
        >>> tx = optax.sgd(0.1, 0.9)
        >>> oxs.by_hand.state_specs(tx, jnp.zeros(3), P("fsdp"), "workers")
        (TraceState(trace=P('workers', 'fsdp')), EmptyState())
    """
    state = _state_shapes(tx, params)
    mend = "Pass a PartitionSpec for each of them, or one for all: jax.P()."
    given = placing.entries(param_specs, params, "param_specs", mend, None)
    named = zip(by_name(params).items(), given, strict=True)
    known = {name: (x, spec) for (name, x), spec in named}
    levels = worker_axis if isinstance(worker_axis, PartitionSpec) else (worker_axis,)
    if worker_axis is None:
        levels = ()
    else:
        placing.check_levels(state, len(levels))

    def with_axes(leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        marks = (leaf.mark(level, replicated) for level in range(len(levels)))
        front = [axis for axis, mark in zip(levels, marks, strict=True) if mark == 0]
        return PartitionSpec(*front, *spec)

    return map_leaves(with_axes, state, placing.specs_like(state, known))


def replicate(tree: Tree, n: int, axes: Tree = None) -> Tree:
    """Add a worker axis: `n` copies of every leaf, with different random keys.

    Worker i gets `jax.random.fold_in(key, i)` of a random key (`jax.random.key`, also
    inside of `nnx.Rngs`), so that dropout masks differ. Keys in an optimizer's state
    are folded only where workers have parameters of their own, in `inner` of a center
    rule or of `gossip`; replicas must draw the same numbers to stay equal. In the state
    of a transformation of your own, behind `all_reduce_grads` in a chain, mark a key
    `None` in `axes`.
    Raw keys (`jax.random.PRNGKey`, an array of uint32) look like data and are copied.
    With n = 1 nothing is folded: it puts back the axis that `first` took off.

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
        >>> oxs.by_hand.replicate({"w": jnp.zeros(3)}, 4)["w"].shape
        (4, 3)
    """
    return placing.stack(tree, n, axes)


def first(tree: Tree, axes: Tree = None) -> Tree:
    """Remove the worker axis: the first worker's copy of every leaf.

    Inside `jax.shard_map` it is this worker's own. Outside it is one of workers that
    may differ: for evaluation and checkpoints take `center_params`.

    Args:
        tree: A tree of arrays of shape `[n, ...]`.
        axes: As for `replicate`; leaves marked `None` have no worker axis.

    Returns:
        The tree with leaves of shape `[...]`.

    Raises:
        ValueError: A leaf has no axis to take off.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> oxs.by_hand.first(oxs.by_hand.replicate(jnp.array([1.0, 2.0]), 4))
        Array([1., 2.], dtype=float32)
    """

    def of_first(leaf, mark):
        if mark is None:
            return leaf.x
        if jnp.ndim(leaf.x) == 0:
            raise ValueError(
                "first needs leaves with a worker axis in front; got a scalar. Pass "
                "axes=oxs.by_hand.state_axes(tx, params) for a state."
            )
        return first_worker(leaf.x)

    marks = placing.marks_of(0 if axes is None else axes, tree)
    return map_leaves(of_first, tree, marks)


def equal_start(tree: Tree, axis_name: AxisName) -> Tree:
    """Broadcast a tree from the first worker: make all start from equal parameters.

    For programs that initialise inside of `jax.vmap`, `jax.pmap` or `jax.shard_map`,
    with a random key of each worker's own: wrappers keep equal what is equal, and
    workers that start apart stay apart for ever. What has to be each worker's own, such
    as the key itself, is not passed.

    Args:
        tree: This worker's arrays, random keys among them.
        axis_name: The mapped axis, or a tuple of them.

    Returns:
        Those of the first worker, in the same types.

    Raises:
        ValueError: `axis_name` is not bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def init(key):
        ...     params = jax.random.normal(key, (2,))
        ...     return oxs.by_hand.equal_start(params, "workers")
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = jax.vmap(init, axis_name="workers")(keys)
        >>> bool((params == params[:1]).all())
        True
    """
    first = axis_index(axis_name) == 0

    def broadcast(x: jax.Array) -> jax.Array:
        own = localize(x, axis_name)
        kept = jnp.where(first, own, jnp.zeros_like(own))
        if kept.dtype == jnp.bool_:
            return broadcast(x.astype(jnp.int32)).astype(jnp.bool_)
        return psum([kept], check_axis_name(axis_name))[0]

    return jax.tree.map(lambda x: placing.on_data(broadcast, jnp.asarray(x)), tree)


def resize(
    tx: optax.GradientTransformation,
    params: Tree,
    state: optax.OptState,
    n: int,
    *,
    joiners: Joiners = "mean",
    replicated: bool = False,
    strict: bool = False,
) -> tuple[Tree, Any]:
    """Continue with another number of workers: parameters and state for `n` of them.

    For the state of any transformation, with wrappers of this package anywhere in it,
    stacked as a whole or as `oxs.by_hand.state_axes` says. With fewer workers the last
    ones leave; with more, the new ones come last. What becomes of what:

        shared by all workers (center, outer state, counters)    stays as it is
        parameters of a rule that takes the center whole         the center
        parameters of others                   survivors keep theirs; joiners begin at
                                               the center, without one at the mean
        in pieces (`shard_state`)                                cut anew
        the worker's own, such as Adam's       survivors keep theirs; joiners get the
        moments and counts                     mean, of integers the maximum
        their own counts of rounds, outliers   survivors keep theirs, joiners begin at 0
        error feedback                         what leavers owe is shared out
        gradients accumulated for an update    dropped

    Moments and counts travel together: a joiner's schedules go on, and its second
    moments are never 0 with a count above 0. Right after a round
    (`oxs.metrics(state).steps_since_round == 0`), a rule that takes the center loses
    nothing that was learned. In the middle of a round, what workers learned and
    accumulated since the last one is dropped with a warning, or refused with `strict`.
    With `fragments` most parts are in the middle of a round at any time: survivors keep
    what they have, and only what leavers have learned since is dropped.

    It works on the host, on whole arrays; `Workers.resize` also places the result.
    If `moving_rate` or `num_workers` in the transformation was computed from the number
    of workers, pass as `tx` one that is made for `n`.

    Args:
        tx: The transformation for `n` workers, like the one that made the state.
        params: The parameters of all N workers, `[N, ...]`.
        state: The state of all N workers.
        n: The number of workers to go on with.
        joiners: What a joiner gets where a field is a worker's own: the `"mean"` of the
            others; a copy of the `"first"` one's; or `"fresh"`, what `tx.init` gives.
        replicated: As for `oxs.by_hand.state_axes`: the parameters have no worker axis.
        strict: Refuse what would have to be dropped.

    Returns:
        `(params, state)` of `n` workers, in the form in which they came. With the same
        number they are unchanged, to the bit.

    Raises:
        TypeError: `n` is no integer.
        ValueError: `n` below 1; a state that is not of `tx` or has no worker axis; with
            `strict`, a state in the middle of a round; nested center rules in the
            middle of a round.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(optax.adam(0.1), "workers")
        >>> one = jnp.ones(3)
        >>> params = oxs.by_hand.replicate(one, 8)
        >>> axes = oxs.by_hand.state_axes(tx, one)
        >>> state = oxs.by_hand.replicate(tx.init(one), 8, axes)
        >>> params, state = oxs.by_hand.resize(tx, params, state, 5)
        >>> params.shape, state.inner[0].mu.shape, state.center.shape
        ((5, 3), (5, 3), (3,))
    """
    n = integer("n", n, "Pass the number of workers to go on with.")
    one_of("joiners", joiners, Joiners)
    forms = jax.tree.structure((params, state))
    params, state = pure((params, state))
    levels, one = worker_axes(state), params
    for _ in range(0 if replicated else levels):
        one = jax.tree.map(_shape_of_first, one)
    like = _state_shapes(tx, one)
    if jax.tree.structure(like) != jax.tree.structure(state):
        raise ValueError(
            "This is not a state of tx, built like the transformation that made it: "
            f"{jax.tree.structure(state)} is not {jax.tree.structure(like)}."
        )
    state = map_leaves(_padded, state, jax.tree.leaves(like))
    how = Resize(n, levels, joiners, strict, replicated, tx.init)
    return forms.unflatten(jax.tree.leaves(how.of([params], state, like)))


def _padded(leaf: Leaf, like: jax.ShapeDtypeStruct) -> Tree:
    """An array; one of stacked leaves padded anew, to the rows of this shape."""
    if leaf.stack is None:
        return leaf.x
    return placing.in_rows_of(leaf, like.shape[0], jnp.ndim(leaf.x) - like.ndim)


def _shape_of_first(x: Any) -> jax.ShapeDtypeStruct:
    if jnp.ndim(x) == 0:
        raise ValueError(
            "resize needs the parameters of all workers, [N, ...]; got a scalar. Pass "
            "replicated=True for those of replicas, without a worker axis."
        )
    return jax.ShapeDtypeStruct(jnp.shape(x)[1:], x.dtype)


def _state_shapes(tx: optax.GradientTransformation, params: Tree) -> Tree:
    """The shapes of `tx.init(params)`, of one worker."""
    check_transformation(tx, "tx", "optax.adam(1e-3)")
    check_no_train_state(params)
    check_arrays(params, "The parameter")
    state = jax.eval_shape(tx.init, params)
    placing.refuse_around_center(state)
    return state
