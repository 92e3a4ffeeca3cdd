# SPDX-License-Identifier: Apache-2.0
"""Gradients reduced over all replicas, or over groups of them, in every step."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optx_sync.checks import (
    check_grads,
    check_inner,
    check_params,
    fill_missing,
    shows_call,
)
from optx_sync.comm.collectives import (
    AxisName,
    GroupAssignment,
    axis_size,
    check_axis_name,
)
from optx_sync.comm.reduce import (
    Reduction,
    check_extra_args,
    check_group_assignment,
    check_reduction,
    mean_extra_args,
)
from optx_sync.comm.varying import (
    localize,
    localize_where_mapped,
    require_local,
    require_reduced,
    vary_like,
)
from optx_sync.elementwise import Elementwise
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import (
    Exchange,
    check_exchange,
    check_weight,
    count_outlier,
    remembers,
    require_dense,
    require_exact,
    start_outliers,
)
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.measures import (
    check_batch_size,
    like_params,
    measure_of,
    measures,
    square_sum,
    start,
    to_sum,
)
from optx_sync.placement import fields
from optx_sync.rows.slices import IndexedSlices
from optx_sync.trees import (
    Tree,
    cast_like,
    explains_inner,
    is_gradient_leaf,
    is_inexact,
    is_placeholder,
    is_slices,
    leaves_with_names,
)

Grads = Literal["local", "summed", "averaged"]
_CALL = "oxs.cross_shard(optax.adam(1e-3), 'data')"


class CrossShardMetrics(NamedTuple):
    """What `oxs.metrics` reads from `cross_shard`; nothing is sent.

    Equal on all replicas but for the outliers, and of the last step but for the noise
    scale, which is a ratio of moving averages. `None` without `measure=True`.
    """

    noise_scale: jax.Array | None  # float32[], in examples; < 0 while |G|^2 is unknown
    agreement: jax.Array | None  # float32[], the mean cosine of two gradients
    contribution_norm: jax.Array | None  # float32[], root of the mean square
    update_norm: jax.Array | None  # float32[], of what `inner` made of the mean
    contributors: jax.Array | None  # float32[], replicas of a weight above 0
    # int32[], steps in which this replica's gradient lay far from the others', with a
    # robust exchange (see `optx_sync.exchange.robust`); otherwise None.
    outliers: jax.Array | None


class CrossShardState(NamedTuple):
    """State of `cross_shard` where it remembers, counts or measures something."""

    exchange: Any  # what the exchange remembers, this replica's own, or ()
    outliers: Any  # int32[], steps in which this replica was an outlier, or ()
    measured: Any  # `Measured`, of the last step, or ()
    inner: optax.OptState  # the state of `inner`

    field_kinds = fields.table(
        exchange=fields.OWN,
        outliers=fields.OWN_COUNT,
        measured=fields.LIKE_PARAMS.told,
        inner=fields.LIKE_PARAMS,
    )

    def metrics(self, params: Tree | None) -> CrossShardMetrics:
        """What `measure=True` has measured, and how often this one was an outlier."""
        del params
        counts, measured = self.outliers, self.measured
        if isinstance(counts, tuple) and isinstance(measured, tuple) and not measured:
            raise ValueError(
                "This cross_shard measures nothing. Pass measure=True to it."
            )
        return CrossShardMetrics(
            **measures(measured),
            outliers=None if isinstance(counts, tuple) else counts,
        )


class SummedCrossShardState(CrossShardState):
    """Of `reduction="sum"`."""

    __slots__ = ()
    field_kinds = fields.table(CrossShardState.field_kinds, exchange=fields.OF_SUMS)


@shows_call(_CALL)
def cross_shard(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    reduction: Reduction = "mean",
    group_assignment: GroupAssignment | None = None,
    grads: Grads = "local",
    exchange: Exchange | None = None,
    shard_state: bool = False,
    reduce_extra_args: tuple[str, ...] = ("value",),
    measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Reduce the gradients of all replicas in every step, then apply `inner`.

    For the gradient g_i of replica i, with N replicas (of the group) and weights w_i:

    .. math::

        g &= \frac{1}{N} \sum_i g_i \quad\text{(mean)} \\
        g &= \frac{\sum_i w_i g_i}{\sum_i w_i} \quad\text{(weighted mean)} \\
        g &= \sum_i g_i \quad\text{(sum)}

    and the updates are those of `inner` for g.

    The original is TensorFlow's `CrossShardOptimizer`. It scales the *loss* by 1/N for
    a mean; here the gradient is scaled, so that what comes before in a chain, such as
    clipping per replica, sees the replica's own gradient.

    As a link of a chain it is `oxs.all_reduce_grads`.

    The extra argument `weight` of `update` (a scalar per replica, for example its
    number of tokens) makes the mean a weighted one, over the group's weights where
    there are groups. A replica of weight 0 leaves no trace, NaN or not; if all weights
    are 0 the gradient is zero.

    `inner` must get the same on all replicas, or their parameters drift apart. An extra
    argument `value`, the loss for `optax.contrib.reduce_on_plateau` or
    `optax.polyak_sgd`, is therefore the mean over the replicas, with the gradients'
    weights, when `inner` sees it.

    Row-sparse gradients (`IndexedSlices`) travel as rows, see `reduce`. For a `None`
    gradient `inner` gets what Optax does with `None`, and the update is zeros.

    A guard that decides by one replica's own values, such as
    `optax.apply_if_finite(cross_shard(...))`, hangs: one replica enters the
    collective and the others wait for it. Put it inside:
    `cross_shard(optax.apply_if_finite(...))` sees the same gradient everywhere.

    With `shard_state=True` the state of `inner` takes 1/N of the memory (ZeRO-1).
    Replica i owns piece i of every array: the gradients are added up where they are
    owned, `inner` works on the piece, and the updates are gathered,

    .. math::

        g_i &= \text{scatter}(g) \\
        u_i, \text{state}_i &= \text{inner}(g_i,\; \text{state}_i,
        \text{piece } i \text{ of params}) \\
        \text{updates} &= \text{gather}(u)

    which sends as much as the all-reduce of the gradients, and half precision leaves
    less. Numbers and slots are those of `inner` on whole arrays, of half precision
    ones in float32. The state is an `InPieces`: stacked, `[N, k]` for an array of N k
    numbers. `init` where the axis is mapped gives a replica its piece; outside it gives
    whole arrays, flat, which `oxs.stack` and `oxs.start_workers` cut.

    Args:
        inner: The transformation that gets the reduced gradient.
        axis_name: The mapped axis, or a tuple of them.
        reduction: `"mean"` or `"sum"`.
        group_assignment: A partition of `range(axis_size)` into lists of equal size,
            for example `[[0, 1], [2, 3]]`; each group then trains on its own. Inside
            `jax.shard_map(check_vma=True)` the groups' parameters differ: call `init`
            there, where the axis is known, or on parameters that vary over it.
        grads: What `update` is given. `"local"`: each replica's own gradient.
            `"summed"`: gradients that autodiff has summed over the axis already, as
            `jax.grad` of a replicated parameter does in
            `jax.shard_map(check_vma=True)`. `"averaged"`: the mean, for example of
            `jax.grad` of a loss under `lax.pmean`. The latter two communicate nothing.
        exchange: How the gradients become their mean; `None`:
            `oxs.exchange.all_reduce()`. With a robust one `oxs.metrics(state)` counts
            how often a replica was an outlier. Gradients that are reduced already
            (`grads`) take none.
        shard_state: Keep `inner`'s state in pieces, one on each replica. `inner` must
            act on each number alone, as `optax.adam` does; what does not is found out
            by trying it. One that needs a norm may add it up itself, over `axis_name`.
        reduce_extra_args: The names of extra arguments (scalars, trees of arrays) of
            which `inner` gets the mean; `()` switches it off. Others reach `inner` as
            they are: pass them equal on all replicas. Inside
            `jax.shard_map(check_vma=True)` a scalar that is not is refused.
        measure: Keep for `oxs.metrics` the gradient noise scale, how well the
            replicas' gradients agree, their norm, that of the update, and how many
            contributed. Their scalars travel with the gradients. Pass the number of
            examples behind this replica's gradient as the extra argument `batch_size`
            of `update`: a number that is the same on all replicas, or each one's own as
            an array; 1 if left out. With groups: of one's own group.

    Returns:
        A transformation whose `init` gives `inner`'s state (a `CrossShardState` where
        it remembers, counts or measures something), and whose `update` must run where
        `axis_name` is mapped.

    Raises:
        TypeError: A missing axis name, an `inner` that is no transformation, integer
            gradients.
        ValueError: A bad `reduction`, `grads` or `group_assignment`, or one that the
            exchange does not take; `shard_state` with groups, with an exchange that
            cannot be halved, or with an `inner` that needs whole arrays;
            at the call, a state of pieces for another number of replicas, a gradient
            that has been reduced already, a weight that has no meaning, an axis that is
            not mapped, gradients that do not match the parameters.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.cross_shard(optax.sgd(0.5), "data")
        >>> params = jnp.zeros(2)
        >>> state = tx.init(params)
        >>> def step(gradient):
        ...     updates, _ = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates)
        >>> jax.vmap(step, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
        Array([[-1., -2.],
               [-1., -2.]], dtype=float32)

    References:
        TensorFlow 1.15, `tf.compat.v1.tpu.CrossShardOptimizer`.
    """
    inner = check_inner(inner, _CALL)
    check_axis_name(axis_name)
    check_reduction(reduction)
    if grads not in get_args(Grads):
        raise ValueError(
            f"grads must be one of 'local', 'summed' and 'averaged'; got {grads!r}."
        )
    state_of = SummedCrossShardState if reduction == "sum" else CrossShardState
    if grads != "local" and exchange is not None:
        raise ValueError(
            f"An exchange needs each replica's own gradient, but grads={grads!r} says "
            "that they are reduced already. Use grads='local', with "
            "oxs.localize(params, axis_name) before jax.grad."
        )
    exchange = check_exchange(exchange, all_reduce())
    keeps_state = remembers(exchange) or exchange.outlier is not None
    reduced_names = check_extra_args(reduce_extra_args)
    if group_assignment is not None:
        check_group_assignment(group_assignment)
        if grads != "local":
            raise ValueError(
                "group_assignment needs each replica's own gradient, but "
                f"grads={grads!r} says that they are reduced over the whole axis. Use "
                "grads='local', with oxs.localize(params, axis_name) before jax.grad."
            )
        if not exchange.exact:
            raise ValueError(
                "group_assignment needs an exchange that takes groups; this one does "
                "not. Use oxs.exchange.all_reduce(), or a mesh with an axis per group."
            )
    if measure and grads != "local":
        raise ValueError(
            "measure=True compares the replicas' own gradients, but "
            f"grads={grads!r} says that they are reduced already. Use grads='local', "
            "with oxs.localize(params, axis_name) before jax.grad."
        )
    if measure:
        require_exact(exchange)
        keeps_state = True

    if shard_state:
        if measure:
            raise ValueError(
                "shard_state=True cannot be combined with measure=True: no replica has "
                "the whole mean before its update. Leave one of them out."
            )
        return _in_pieces(
            inner,
            axis_name,
            exchange,
            reduction=reduction,
            grads=grads,
            grouped=group_assignment is not None,
            reduced_names=reduced_names,
        )

    def reduced(updates, memory, outliers, measured, weight, batch_size):
        _check_weight_argument(weight, reduction, grads)
        if grads == "local":
            return _exchanged(
                updates,
                memory,
                outliers,
                measured,
                exchange,
                axis_name,
                reduction=reduction,
                weight=weight,
                batch_size=batch_size,
                group_assignment=group_assignment,
            )
        require_reduced(updates, axis_name, grads)
        size = axis_size(axis_name)
        if grads == "summed" and reduction == "mean":
            updates = _map_values(lambda g: g / size, updates)
        if grads == "averaged" and reduction == "sum":
            updates = _map_values(lambda g: g * size, updates)
        return updates, memory, outliers, measured

    def init(params):
        check_params(params)
        own = localize_where_mapped
        if group_assignment is not None:
            # The groups' states will differ, so all of it varies from the start.
            params = own(params, axis_name)
        state = inner.init(params)
        if group_assignment is not None:
            state = own(state, axis_name)
        if not keeps_state:
            return state
        kept = own((exchange.init(params), start_outliers(exchange)), axis_name)
        measured = like_params(start(), params, axis_name) if measure else ()
        return state_of(*kept, measured, state)

    def update(
        updates, state, params=None, *, weight=None, batch_size=None, **extra_args
    ):
        check_grads(updates, params)
        memory, outliers, measured, inner_state = (
            state if keeps_state else ((), (), (), state)
        )
        extra_args = mean_extra_args(
            extra_args,
            reduced_names,
            axis_name,
            weight=weight,
            group_assignment=group_assignment,
        )
        batch_size = check_batch_size(batch_size)
        updates, memory, outliers, now = reduced(
            updates, memory, outliers, measured, weight, batch_size
        )
        with explains_inner(updates):
            updates, new_state = inner.update(
                updates, inner_state, params, **extra_args
            )
        state = vary_like(new_state, inner_state)
        if measure:
            own = localize(now.update_norm, axis_name)
            now = now._replace(update_norm=jnp.sqrt(square_sum(updates, own)))
        if keeps_state:
            state = state_of(memory, outliers, vary_like(now, measured), state)
        return fill_missing(updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


@shows_call("oxs.all_reduce_grads('data')")
def all_reduce_grads(
    axis_name: AxisName, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Reduce the gradients of all replicas, as a link of an `optax.chain`.

    What stands before it in the chain sees each replica's own gradient, what stands
    after it the reduced one:

        optax.chain(per_replica_clip, oxs.all_reduce_grads("data"), optax.adam(1e-3))

    An optimizer in front of it is each replica's own, with moments of its own gradient,
    and what is averaged are its steps: seldom what is meant, and nothing can tell.

    A chain hands extra arguments to each of its links by itself, so the `value` of a
    link behind this one must be reduced before: `value=oxs.reduce(loss, "data")`.

    Args:
        axis_name: The mapped axis, or a tuple of them.
        **options: The keywords of `cross_shard`, but `reduce_extra_args`.

    Returns:
        The transformation; its state is empty where the exchange remembers nothing.

    Raises:
        TypeError: A missing or bad axis name.
        ValueError: What `cross_shard` refuses.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = optax.chain(optax.clip(1.0), oxs.all_reduce_grads("data"))
        >>> def clipped_mean(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.vmap(clipped_mean, axis_name="data")(jnp.array([0.5, 7.0]))
        Array([0.75, 0.75], dtype=float32)
    """
    tx = cross_shard(optax.identity(), axis_name, reduce_extra_args=(), **options)

    def update(updates, state, params=None, **extra_args):
        reduced, state = tx.update(updates, state, params, **extra_args)
        # The next link of the chain shall see that there is no gradient.
        return jax.tree.map(
            lambda grad, mean: None if grad is None else mean,
            updates,
            reduced,
            is_leaf=is_gradient_leaf,
        ), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _in_pieces(
    inner: optax.GradientTransformationExtraArgs,
    axis_name: AxisName,
    exchange: Exchange,
    *,
    reduction: Reduction,
    grads: Grads,
    grouped: bool,
    reduced_names: tuple[str, ...],
) -> optax.GradientTransformationExtraArgs:
    """`cross_shard(..., shard_state=True)`."""
    if grouped:
        raise ValueError(
            "shard_state=True cuts the state over all replicas of the axis and takes "
            "no group_assignment. Use a mesh with an axis per group, and name that of "
            "the replicas inside a group."
        )
    scatter = exchange.scatter
    if scatter is None:
        raise ValueError(
            "shard_state=True needs an exchange that can stop half way, where each "
            "replica has the sum of its piece; this one cannot. Use "
            "oxs.exchange.all_reduce(), or leave shard_state=True out."
        )
    elementwise = Elementwise(inner, check_axis_name(axis_name), "shard_state=True")

    def init(params):
        check_params(params)
        if is_placeholder(params):
            return fields.InPieces(inner.init(params))
        elementwise.check(params)
        return own_pieces(inner.init, params, axis_name)

    def update(updates, state, params=None, *, weight=None, **extra_args):
        check_grads(updates, params)
        require_dense(updates, "shard_state=True")
        _check_weight_argument(weight, reduction, grads)
        like = updates if params is None else params
        _require_floating(updates, like)
        check_pieces(state, inner.init, like, axis_name)
        extra_args = mean_extra_args(
            extra_args, reduced_names, axis_name, weight=weight
        )
        replicas = axis_size(axis_name)
        if grads == "local":
            pieces = scatter(updates, axis_name, weight=weight)
            factor = replicas if reduction == "sum" else 1
        else:
            require_reduced(updates, axis_name, grads)
            pieces = cut(updates, axis_name)
            summed = 1 if grads == "summed" else replicas
            factor = summed if reduction == "sum" else summed / replicas
        if factor != 1:
            pieces = _map_values(lambda g: g * jnp.asarray(factor, g.dtype), pieces)
        own_params = None if params is None else cut(params, axis_name)
        new, inner_state = inner.update(pieces, state.tree, own_params, **extra_args)
        new = gather(localize(new, axis_name), like, axis_name)
        state = fields.InPieces(
            vary_like(cast_like(inner_state, state.tree), state.tree)
        )
        return fill_missing(new, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _require_floating(grads: Any, params: Any) -> None:
    """Refuse integer parameters that have a gradient: updates get their dtype."""
    found = dict(leaves_with_names(params))
    for path, grad in leaves_with_names(grads):
        if grad is not None and not is_inexact(jnp.result_type(found[path])):
            raise TypeError(
                f"The parameter at {path} has dtype {found[path].dtype}; with "
                "shard_state=True what has a gradient must be floating. Leave it out "
                "with optax.masked, or pass None as its gradient."
            )


def _check_weight_argument(weight: Any, reduction: Reduction, grads: Grads) -> None:
    """Refuse a weight that has no meaning."""
    if weight is not None and grads != "local":
        raise ValueError(
            f"weight needs each replica's own gradient, but grads={grads!r} says "
            "that they are reduced already. Use grads='local', with "
            "oxs.localize(params, axis_name) before jax.grad."
        )
    if weight is not None and reduction == "sum":
        raise ValueError(
            "weight= makes a weighted mean and has no meaning with reduction='sum'; "
            "leave weight out, or pass reduction='mean'."
        )


def _exchanged(
    grads: Tree,
    memory: Any,
    outliers: Any,
    measured: Any,
    exchange: Exchange,
    axis_name: AxisName,
    *,
    reduction: Reduction,
    weight: Any,
    batch_size: Any,
    group_assignment: GroupAssignment | None,
) -> tuple[Tree, Any, Any, Any]:
    """The mean or sum of all gradients, what the exchange remembers, and measures."""
    require_local(grads, axis_name, "gradient")
    check_weight(exchange, weight)
    if not exchange.exact:
        require_dense(grads)
    groups = {} if group_assignment is None else {"group_assignment": group_assignment}
    own = also = None
    if measured:
        # Over other axes along which gradients vary lie shards.
        own = localize(measured.update_norm, axis_name)
        also = to_sum(
            square_sum(grads, own),
            axis_name,
            weight=weight,
            alike=weight is not None and jnp.result_type(weight) == jnp.bool_,
            batch_size=batch_size,
        )
    met = exchange.meet(grads, memory, axis_name, weight=weight, also=also, **groups)
    mean = met.mean
    if measured:
        mean_square = square_sum(mean, own)
        measured = measure_of(measured, met.also, met.weight, mean_square, batch_size)
    outliers = count_outlier(exchange, grads, mean, axis_name, weight, outliers)
    if reduction == "sum":
        mean = _map_values(lambda g: g * jnp.asarray(met.weight, g.dtype), mean)
    return mean, met.state, outliers, measured


def _map_values(function, grads):
    def apply(leaf):
        sparse = isinstance(leaf, IndexedSlices)
        return leaf.map_values(function) if sparse else function(leaf)

    return jax.tree.map(apply, grads, is_leaf=is_slices)
