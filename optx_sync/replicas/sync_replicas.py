# SPDX-License-Identifier: Apache-2.0
"""Apply the mean of the first R fresh gradients: `sync_replicas`."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax

from optx_sync.checks import (
    check_count,
    check_grads,
    check_inner,
    check_one_worker,
    check_params,
    fill_missing,
)
from optx_sync.comm.collectives import (
    AxisName,
    axis_index,
    axis_size,
    check_axis_name,
    require_whole_lanes,
)
from optx_sync.comm.reduce import (
    check_extra_args,
    mean_extra_args,
    or_one,
    own_weight,
    reduce,
)
from optx_sync.comm.varying import (
    localize,
    localize_where_mapped,
    require_local,
    vary_like,
)
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import (
    Exchange,
    check_exchange,
    check_weight,
    count_outlier,
    require_dense,
    require_exact,
    start_outliers,
)
from optx_sync.measures import (
    check_batch_size,
    like_params,
    measure_of,
    measures,
    square_sum,
    start,
)
from optx_sync.placement import fields
from optx_sync.replicas.accumulator import (
    Accumulator,
    accumulate,
    clear,
    mean_of,
    start_accumulator,
    unique_rows,
)
from optx_sync.replicas.averages import (
    advance_averages,
    check_averages,
    start_averages,
)
from optx_sync.rows.slices import IndexedSlices
from optx_sync.step import direct_transformation
from optx_sync.trees import (
    Tree,
    add_updates,
    cast_like,
    check_accumulator_dtype,
    explains_inner,
    is_finite,
    is_gradient_leaf,
    is_masked,
    is_placeholder,
    is_slices,
    zeros_like,
)


class Outcomes(NamedTuple):
    """What may become of a replica's gradient; one of them does.

    Where several reasons apply to one that is not used, not_contributed counts before
    stale, stale before nonfinite, and nonfinite before no_token.
    """

    used: Any  # accumulated
    stale: Any  # computed before the last update
    nonfinite: Any  # held a NaN or infinity, with `drop_nonfinite`
    not_contributed: Any  # `contributes` was False, or the weight 0
    no_token: Any  # the tokens of this update were gone


class SyncReplicasMetrics(NamedTuple):
    """What `oxs.metrics` reads: what became of a replica's own gradients.

    At most one of the flags holds for the last gradient; before the first one none.
    """

    used: jax.Array  # bool[], it was accumulated
    stale: jax.Array  # bool[], it was computed before the last update
    nonfinite: jax.Array  # bool[], it held a NaN or infinity, with `drop_nonfinite`
    not_contributed: jax.Array  # bool[], `contributes` was False, or the weight 0
    no_token: jax.Array  # bool[], the tokens of this update were gone
    counts: Outcomes  # int32[] each, how often since the start
    # Of the last update, equal on all replicas, with `measure=True`; otherwise None.
    noise_scale: jax.Array | None = None  # float32[], a ratio of moving averages
    agreement: jax.Array | None = None  # float32[], the mean cosine of two gradients
    contribution_norm: jax.Array | None = None  # float32[], the root mean square
    update_norm: jax.Array | None = None  # float32[], of what `inner` made of the mean
    contributors: jax.Array | None = None  # float32[], gradients in the mean
    # int32[], updates in which what it had accumulated lay far from the others', with a
    # robust exchange (see `optx_sync.exchange.robust`); otherwise None.
    outliers: jax.Array | None = None


class Gathered(NamedTuple):
    """What `measure=True` sums up of a replica's own gradients between updates.

    With w the weight of a gradient, |g| its norm, b the examples behind it; named as
    `optx_sync.measures.to_sum` names them.
    """

    squares: jax.Array  # float32[], w |g|^2
    own_squares: jax.Array  # float32[], w^2 |g|^2
    inverse: jax.Array  # float32[], w / b
    own_inverse: jax.Array  # float32[], w^2 / b


class SyncReplicasState(NamedTuple):
    """State of `sync_replicas`."""

    global_step: jax.Array  # int32[], updates
    accumulated: jax.Array  # int32[], gradients since the last one, of all replicas
    # float32[], or float64[] where a sum is: the sum of the weights of these. All kept
    # weights are multiples of `weight_unit`, the largest of the first ones ever; 0
    # before. So weights that are all equal are 1, and half precision sums stay small.
    total_weight: jax.Array
    weight_unit: jax.Array
    accumulator: Accumulator  # of this replica
    outcome: jax.Array  # int32[], the place in `Outcomes`; -1 before the first gradient
    outcome_counts: Outcomes  # int32[] each
    exchange: Any  # what the exchange remembers, or ()
    # The weights of its own gradients since the last update, () with a linear exchange
    contributed: Any
    outliers: Any  # int32[], updates in which it was an outlier, or ()
    gathered: Any  # `Gathered`, of this replica, or ()
    measured: Any  # `Measured`, of the last update, or ()
    inner: optax.OptState
    averages: Any  # like the parameters, MaskedNode where there is none, or ()

    field_kinds = fields.table(
        global_step=fields.SHARED.told,
        accumulated=fields.SHARED_ANEW.told,
        total_weight=fields.SHARED_ANEW.told,
        weight_unit=fields.SHARED.told,
        accumulator=fields.ANEW,
        outcome=fields.ANEW,
        outcome_counts=fields.OWN_COUNT,
        exchange=fields.OF_SUMS,
        contributed=fields.ANEW,
        outliers=fields.OWN_COUNT,
        gathered=fields.ANEW.told,
        measured=fields.LIKE_PARAMS.told,
        inner=fields.LIKE_PARAMS,
        averages=fields.COPIES,
    )

    def metrics(self, params: Tree | None) -> SyncReplicasMetrics:
        """What became of the last gradient, and of all of them."""
        del params
        last = (self.outcome == place for place in range(len(Outcomes._fields)))
        return SyncReplicasMetrics(
            *last,
            counts=self.outcome_counts,
            **measures(self.measured),
            outliers=None if isinstance(self.outliers, tuple) else self.outliers,
        )

    def lost_by_resize(self, fewer: bool) -> list[str]:
        """What another number of replicas costs in the middle of an update."""
        del fewer
        waiting = int(jnp.ravel(self.accumulated)[0])
        return [f"{waiting} gradient(s) accumulated for the next update"][: waiting > 0]

    def averaged_params(self, params: Tree) -> Tree:
        """The averages in the structure and dtypes of `params`."""
        if isinstance(self.averages, tuple) and self.averages == ():
            raise ValueError(
                "This state holds no averages. Pass variable_averages= to "
                "sync_replicas."
            )
        return jax.tree.map(
            lambda average, param: (
                param if is_masked(average) else average.astype(param.dtype)
            ),
            self.averages,
            params,
            is_leaf=is_masked,
        )


class _Kept(NamedTuple):
    """What a replica keeps for the exchange: as the fields of the state."""

    remembered: Any
    contributed: Any
    outliers: Any
    gathered: Any
    measured: Any


def sync_replicas(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    replicas_to_aggregate: int,
    *,
    total_num_replicas: int | None = None,
    variable_averages: float | optax.Schedule | None = None,
    variables_to_average: Any = None,
    drop_nonfinite: bool = False,
    accumulator_dtype: Any = None,
    reduce_extra_args: tuple[str, ...] = ("value",),
    exchange: Exchange | None = None,
    measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` to the mean of gradients once enough of them have come in.

    With R = `replicas_to_aggregate`, N replicas on the axis, and the set A of gradients
    g_i, of weight w_i (1 if left out), accumulated since the last update:

        |A| >= R:  updates = inner(sum w_i g_i / sum w_i);  A = {};  global_step += 1
        |A| <  R:  updates = 0; parameters, inner state and averages stay as they are

    A gradient is accumulated if its replica `contributes`, if it is fresh
    (`gradient_step >= global_step`), if it is finite (with `drop_nonfinite`), and if a
    token is left. N > R makes the others backup replicas: an update needs R of them,
    and takes what came in with these. N < R lets each replica run several batches.

    An update has exactly max(N, R) tokens, and only an accumulated gradient uses one.
    Where more gradients come in than tokens are left, the replicas with the numbers
    s, s + 1, ... (modulo N), s = `global_step` modulo N, are served first. Every update
    starts with another replica, so that over N updates none is preferred.

    The original is TensorFlow's `SyncReplicasOptimizer`, whose workers do not march in
    step: there tokens wait in a queue, and late workers waste some of them. That
    machine is `oxs.simulate.sync_replicas`. As there, a row of a row-sparse gradient is
    divided by the number of gradients that contained the row, not by |A|. (The original
    merges rows correctly only if each gradient's are sorted and unique. Here equal rows
    are summed first.)

    `update` takes more arguments. Three are scalars that may differ between replicas:

    * `contributes` (bool): `False` leaves this replica's gradient out, whatever it
      holds. Default: `True`.
    * `weight` (a number that is not negative, or a bool): the weight of this gradient
      in the mean, its number of tokens, say. A gradient of weight 0 leaves no trace and
      is not counted, as with `contributes=False`; every other one counts as one of the
      R. A row of a row-sparse gradient is divided by the weights of those gradients
      that contained it. Where all weights are and stay the same the result is to the
      bit that without weights.
    * `gradient_step` (int): the `global_step` at which the gradient was computed.
      Default: the current one.

    One says when, and is equal on all of them:

    * `meet` (bool): in place of the counter, whether the update is made in this step,
      of what has been accumulated so far, fewer gradients than R or more. A bool of
      Python's leaves the conditional out of the program (see `oxs.due`), unless this
      step's gradients may be left out. Where nothing has been accumulated `True`
      changes nothing, as a step without an update. Default: the counter decides.

    Each replica keeps the sum of its own gradients. A step that cannot complete an
    update sends one flag per replica and nothing else; `inner` runs, and the sums
    are reduced, inside a conditional. All replicas' parameters stay equal, bit for bit.

    With `variable_averages` it computes `params + updates`, so it stands last in a
    chain, `update` needs `params`, and `oxs.averaged_params(state, params)` reads the
    averages: e = e - (1 - decay) (e - params), after each update.

    Row-sparse gradients (`IndexedSlices` of k rows) are accumulated in a dense array,
    which is what travels, with the sum of the weights per row. `inner` gets row-sparse
    means of min(rows, max(N, R) k) rows. An average moves the whole table. For a `None`
    gradient `inner` gets what Optax does with `None`, and the update is zeros.

    The state holds what is each replica's own: start with `oxs.stack(tx.init(params),
    n, oxs.state_axes(tx, params))`, or call `init` where the axis is mapped. Where the
    parameters are not stacked but replicated (`P()` in `jax.shard_map`), pass
    `replicated=True` to `state_axes` and `state_specs`: `inner` is then replicated too.

    Args:
        inner: The transformation that gets the mean gradient.
        axis_name: The mapped axis, or a tuple of them.
        replicas_to_aggregate: R, the gradients that an update needs, 1 or more.
        total_num_replicas: N, checked against the axis. `None`: the axis size.
        variable_averages: The decay of a moving average of the parameters, a float or a
            schedule that is called with the new `global_step` (1 at the first update):
            the original's `num_updates=global_step` is
            `lambda step: jnp.minimum(decay, (1 + step) / (10 + step))`.
        variables_to_average: Which parameters to average, a tree of bools or a function
            of the parameters that returns one, as in `optax.masked`. `None`: all.
        drop_nonfinite: Leave out a gradient with a NaN or infinity anywhere, all leaves
            of it. If none is left nothing changes. (Where a replica is itself sharded
            by hand, over another axis of `jax.shard_map`, a device sees a part of the
            gradient only: agree on `contributes` over that axis instead.)
        accumulator_dtype: The dtype of sums and averages. `None`: float32 for half
            precision parameters, else their own.
        reduce_extra_args: The names of extra arguments of which `inner` gets the mean
            over the replicas whose gradients this step used, by their weights, as for
            `cross_shard`.
        exchange: How the replicas' sums become one; `None`: an all-reduce. The weights
            of rows are summed exactly whatever it is, and row-sparse gradients need
            `oxs.exchange.all_reduce`. A robust one gets from each replica of which
            gradients were accumulated the mean of these, one vote each however many
            (`clipped`: by their weights, 1 each if left out), and `oxs.metrics(state)`
            counts how often a replica was an outlier. One that counts all replicas
            alike takes a bool for a weight.
        measure: As for `cross_shard`, of the gradients of each update, with the extra
            argument `batch_size`. Four scalars travel with each update. Dense gradients
            only.

    Returns:
        A transformation with a `SyncReplicasState`, whose `update` must run where
        `axis_name` is mapped. `oxs.metrics(state)` tells what became of gradients.

    Raises:
        TypeError: An `inner` that is no transformation, a bad axis name, extra
            arguments that are no bool or int, integer gradients.
        ValueError: A number below 1, a decay outside of [0, 1], a mask without
            averages; at the call, no variables, an axis
            that is not mapped or whose size is not `total_num_replicas`, gradients that
            autodiff has summed already or that do not match the parameters, missing
            `params`, a weight that has no meaning or is negative.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.sync_replicas(optax.sgd(0.5), "data", replicas_to_aggregate=2)
        >>> params = jnp.zeros(2)
        >>> state = tx.init(params)
        >>> def step(gradient, contributes):
        ...     updates, new = tx.update(
        ...         gradient, state, params, contributes=contributes
        ...     )
        ...     return optax.apply_updates(params, updates), oxs.metrics(new).used
        >>> gradients = jnp.array([[1.0, 2.0], [jnp.nan, 0.0], [3.0, 6.0]])
        >>> in_time = jnp.array([True, False, True])
        >>> params, used = jax.vmap(step, axis_name="data")(gradients, in_time)
        >>> params[0].tolist(), used.tolist()
        ([-1.0, -2.0], [True, False, True])

    References:
        TensorFlow 1.15, `tf.train.SyncReplicasOptimizer`. Chen, Pan, Monga, Bengio,
        Jozefowicz 2016, "Revisiting Distributed Synchronous SGD", arXiv:1604.00981.
    """
    inner = check_inner(inner, "oxs.sync_replicas(optax.adam(1e-3), 'data', 6)")
    check_axis_name(axis_name)
    replicas_to_aggregate, total_num_replicas = check_replicas(
        replicas_to_aggregate, total_num_replicas
    )
    check_averages(variable_averages)
    if variables_to_average is not None and variable_averages is None:
        raise ValueError(
            "variables_to_average says which parameters to average, but there is no "
            "average. Pass variable_averages=, a decay or a schedule, too."
        )
    dtype = check_accumulator_dtype(accumulator_dtype)
    reduced_names = check_extra_args(reduce_extra_args)
    exchange = check_exchange(exchange, all_reduce())

    if measure:
        require_exact(exchange)

    def init(params):
        check_params(params)
        check_variables(params)
        averages: Any = ()
        if variable_averages is not None:
            averages = start_averages(params, variables_to_average, dtype)

        def own(tree: Any) -> Any:
            # What is a replica's own varies over the axis from the start.
            return localize_where_mapped(tree, axis_name)

        accumulator = start_accumulator(params, dtype)
        weights = accumulator.row_weights.dtype
        return SyncReplicasState(
            global_step=jnp.zeros((), jnp.int32),
            accumulated=jnp.zeros((), jnp.int32),
            total_weight=jnp.zeros((), weights),
            weight_unit=jnp.zeros((), weights),
            accumulator=own(accumulator),
            outcome=own(jnp.full((), -1, jnp.int32)),
            outcome_counts=own(
                Outcomes(*(jnp.zeros((), jnp.int32) for _ in Outcomes._fields))
            ),
            exchange=own(exchange.init(params)),
            contributed=() if exchange.linear else own(jnp.zeros((), weights)),
            outliers=own(start_outliers(exchange)),
            gathered=own(
                Gathered(*(jnp.zeros((), jnp.float32) for _ in Gathered._fields))
            )
            if measure
            else (),
            measured=like_params(start(), params, axis_name) if measure else (),
            inner=inner.init(params),
            averages=averages,
        )

    def step(
        direct,
        grads,
        state,
        params,
        *,
        contributes=True,
        weight=None,
        gradient_step=None,
        meet=None,
        batch_size=None,
        **extra_args,
    ):
        """One step: (new parameters if `direct`, else updates; the next state)."""
        check_variables(grads if params is None else params)
        check_grads(grads, params)
        if params is None and variable_averages is not None:
            raise ValueError(
                "A moving average of the parameters needs them; got params=None. Call "
                "update(grads, state, params)."
            )
        require_local(
            grads,
            axis_name,
            "gradient",
            "Which replicas count is decided one by one: write `params = oxs.localize("
            f"params, {axis_name!r})` before jax.grad, so that gradients stay local.",
        )
        require_whole_lanes(grads, axis_name)
        check_one_worker(state.global_step, state.accumulator.sums, params)
        replicas = axis_size(axis_name)
        if total_num_replicas not in (None, replicas):
            raise ValueError(
                f"total_num_replicas={total_num_replicas}, but the axis {axis_name!r} "
                f"has {replicas} replicas. Leave it out, or make them equal."
            )
        tokens = max(replicas, replicas_to_aggregate)
        batch_size = check_batch_size(batch_size)
        if measure:
            require_dense(grads, "measure=True")
        elif not exchange.exact:
            require_dense(grads)
        grads = unique_rows(grads)

        check_weight(exchange, weight)
        all_count = contributes is True and weight is None and gradient_step is None
        all_count = all_count and not drop_nonfinite
        given: Any = own_weight(1 if weight is None else weight, axis_name)
        given = given.astype(state.total_weight.dtype)
        contributes = _extra(contributes, "contributes", jnp.bool_) & (given != 0)
        finite = is_finite((grads, given)) if drop_nonfinite else jnp.bool_(True)
        fresh = jnp.bool_(True)
        if gradient_step is not None:
            gradient_step = _extra(gradient_step, "gradient_step", jnp.integer)
            fresh = gradient_step.astype(jnp.int32) >= state.global_step
        used, arrived = _hand_out(
            contributes & fresh & finite,
            given,
            tokens - state.accumulated,
            state.global_step,
            axis_name,
        )
        outcome = _outcome(used, fresh, finite, contributes)
        accumulated = state.accumulated + jnp.sum(arrived != 0, dtype=jnp.int32)
        first = jnp.max(jnp.where(jnp.isfinite(arrived), arrived, 0))
        weight_unit = jnp.where(state.weight_unit > 0, state.weight_unit, first)

        def in_units(weights):
            unit = or_one(weight_unit)
            # Not every device divides a number by itself to 1.
            return jnp.where(weights == unit, 1, weights / unit)

        total_weight = state.total_weight + jnp.sum(in_units(arrived))
        own = jnp.where(used, in_units(given), 0)
        complete = accumulated >= replicas_to_aggregate if meet is None else meet
        if meet is not None and meet is not False and not all_count:
            # Of no gradients there is no mean.
            complete = jnp.logical_and(meet, accumulated > 0)
        new_step = state.global_step + jnp.asarray(complete).astype(jnp.int32)
        # Over other axes along which gradients vary lie shards.
        alone = localize(state.measured.update_norm, axis_name) if measure else None

        def gather(gathered) -> Any:
            """What has been gathered, this step's gradient included if it is used."""
            if not measure:
                return ()
            square = square_sum(grads, alone)
            inverse = 1 / jnp.asarray(batch_size, jnp.float32)
            once = own.astype(jnp.float32)
            twice = once * once
            now = Gathered(
                *(once * square, twice * square, once * inverse, twice * inverse)
            )
            return jax.tree.map(lambda x, y: x + jnp.where(used, y, 0), gathered, now)

        def move(_, accumulator, kept, inner_state, averages):
            """The update: the mean of all that was accumulated goes through inner."""
            remembered, contributed, outliers, gathered, measured = kept
            gathered, scalars = gather(gathered), {}

            def like_grads(sums):
                # Like the gradients, whose leaves the exchange remembers.
                treedef = jax.tree.structure(grads, is_leaf=is_gradient_leaf)
                return treedef.unflatten(sums)

            def total(sums):
                nonlocal remembered, scalars
                sums, row_weights = like_grads(sums[0]), sums[1]
                also = gathered._asdict() if measure else None
                met = exchange.meet(sums, remembered, axis_name, also=also)
                remembered, scalars = met.state, met.also
                sums = jax.tree.map(
                    lambda x: x * jnp.asarray(met.weight, x.dtype), met.mean
                )
                row_weights = reduce(row_weights, axis_name, reduction="sum")
                return jax.tree.leaves(sums, is_leaf=is_gradient_leaf), row_weights

            def voted(sums):
                """What a rule makes of the replicas' own means, of those that count."""
                nonlocal remembered, outliers
                sums, row_weights = sums
                some = or_one(contributed)
                means = jax.tree.map(lambda x: x / some.astype(x.dtype), sums)
                means, weight = like_grads(means), contributed > 0
                if exchange.takes_weights:
                    weight = contributed
                met = exchange.meet(means, remembered, axis_name, weight=weight)
                result, remembered = met.mean, met.state
                outliers = count_outlier(
                    exchange, means, result, axis_name, contributed > 0, outliers
                )
                return jax.tree.leaves(result, is_leaf=is_gradient_leaf), row_weights

            if exchange.linear:
                mean = mean_of(accumulator, grads, total_weight, tokens, total)
            else:
                contributed = contributed + own
                one = jnp.ones((), jnp.int32)
                mean = mean_of(accumulator, grads, one, tokens, voted)
                contributed = jnp.zeros_like(contributed)
            extra = mean_extra_args(
                extra_args, reduced_names, axis_name, weight=jnp.where(used, given, 0)
            )
            with explains_inner(grads):
                moved, new_inner = inner.update(mean, inner_state, params, **extra)
            inner_state = cast_like(new_inner, inner_state)
            moved = fill_missing(moved, params)
            new_params = None if params is None else add_updates(params, moved)
            if measure:
                scalars["contributors"] = accumulated.astype(jnp.float32)
                square = square_sum(mean, alone)
                measured = measure_of(measured, scalars, total_weight, square)._replace(
                    update_norm=jnp.sqrt(square_sum(moved, alone))
                )
                gathered = zeros_like(gathered)
            if variable_averages is not None:
                averages = advance_averages(
                    averages, new_params, variable_averages, new_step
                )
            result = new_params if direct else moved
            kept = _Kept(remembered, contributed, outliers, gathered, measured)
            accumulator = clear(accumulator, mean, accumulated)
            return result, accumulator, kept, inner_state, averages

        def wait(_, accumulator, kept, inner_state, averages):
            """No update yet: the gradient has been accumulated, nothing else moves."""
            result = params if direct else _no_updates(shapes)
            kept = kept._replace(gathered=gather(kept.gathered))
            if not exchange.linear:
                kept = kept._replace(contributed=kept.contributed + own)
            return result, accumulator, kept, inner_state, averages

        # The parameters are an operand so that XLA hands them on in place.
        before = (
            params if direct else (),
            accumulate(state.accumulator, grads, used, own),
            _Kept(
                state.exchange,
                state.contributed,
                state.outliers,
                state.gathered,
                state.measured,
            ),
            state.inner,
            state.averages,
        )
        shapes, *_ = types = jax.eval_shape(move, *before)
        like = (shapes, *before[1:])

        def branch(body):
            return lambda *before: vary_like(vary_like(body(*before), like), types)

        if isinstance(complete, bool):
            after = branch(move if complete else wait)(*before)
        else:
            after = jax.lax.cond(complete, branch(move), branch(wait), *before)
        result, accumulator, kept, inner_state, averages = after
        counts = (
            count + (outcome == place).astype(jnp.int32)
            for place, count in enumerate(state.outcome_counts)
        )
        return result, SyncReplicasState(
            global_step=new_step,
            accumulated=jnp.where(complete, jnp.zeros_like(accumulated), accumulated),
            total_weight=jnp.where(
                complete, jnp.zeros_like(total_weight), total_weight
            ),
            weight_unit=weight_unit,
            accumulator=accumulator,
            outcome=outcome,
            outcome_counts=Outcomes(*counts),
            exchange=kept.remembered,
            contributed=kept.contributed,
            outliers=kept.outliers,
            gathered=kept.gathered,
            measured=kept.measured,
            inner=inner_state,
            averages=averages,
        )

    def update(updates, state, params=None, **extra_args):
        return step(False, updates, state, params, **extra_args)

    def apply(grads, state, params, **extra_args):
        return step(True, grads, state, params, **extra_args)

    return direct_transformation(init, update, apply)


def check_replicas(
    replicas_to_aggregate: Any, total_num_replicas: Any
) -> tuple[int, int | None]:
    """Both numbers as ints; refuse what is not an integer of 1 or more."""
    required = check_count(
        "replicas_to_aggregate",
        replicas_to_aggregate,
        "Pass the number of gradients that an update needs.",
    )
    if total_num_replicas is None:
        return required, None
    total = check_count(
        "total_num_replicas", total_num_replicas, "Pass the number of replicas."
    )
    return required, total


def check_variables(tree: Any) -> None:
    """Refuse a tree of parameters or gradients that has no leaf at all."""
    if jax.tree.leaves(tree) or is_placeholder(tree):
        return
    raise ValueError(
        f"sync_replicas needs at least one variable; got the empty tree {tree!r}. Pass "
        "the parameters, and gradients like them."
    )


def _outcome(used, fresh, finite, contributes):
    """int32[], the place in `Outcomes` of what becomes of a gradient."""
    outcome = jnp.int32(Outcomes._fields.index("no_token"))
    for name, applies in (
        ("used", used),
        ("nonfinite", ~finite),
        ("stale", ~fresh),
        ("not_contributed", ~contributes),
    ):
        place = jnp.int32(Outcomes._fields.index(name))
        outcome = jnp.where(applies, place, outcome)
    return outcome


def _hand_out(candidate, weight, tokens, global_step, axis_name):
    """Whether this replica's gradient gets a token, and the weights [N] of all that do.

    Of the others the weight is 0.
    """
    replicas = axis_size(axis_name)
    numbers = jnp.arange(replicas, dtype=jnp.int32)
    mine = numbers == axis_index(axis_name)
    sent = jnp.where(mine & candidate, weight, jnp.zeros_like(weight))
    everyone = reduce(sent, axis_name, reduction="sum")
    flags = (everyone != 0).astype(jnp.int32)
    # Another replica is the first one in each update; those before it are the last.
    last = numbers < global_step % replicas
    before = jnp.sum(flags, where=last, dtype=jnp.int32)
    ahead = jnp.where(last, jnp.sum(flags, dtype=jnp.int32), 0) - before
    place = ahead + jnp.cumsum(flags, dtype=jnp.int32)
    served = (flags > 0) & (place <= tokens)
    arrived = jnp.where(served, everyone, jnp.zeros_like(everyone))
    return jnp.any(mine & served), arrived


def _no_updates(shapes):
    """Updates that leave parameters as they are, bit for bit."""

    def none(leaf):
        if isinstance(leaf, IndexedSlices):
            nowhere = jnp.full(leaf.values.shape[:1], -1, jnp.int32)
            values = jnp.zeros(leaf.values.shape, leaf.values.dtype)
            return IndexedSlices(nowhere, values).sum_duplicates()
        # Minus zero, because 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full(leaf.shape, -0.0, leaf.dtype)

    return jax.tree.map(none, shapes, is_leaf=is_slices)


def _extra(value, name, kind):
    """An extra argument as a scalar array."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, kind):
        wanted = "a bool" if kind is jnp.bool_ else "an integer"
        raise TypeError(f"{name} must be {wanted} per replica; got {value.dtype}.")
    if value.ndim:
        raise ValueError(
            f"{name} must be a scalar per replica; got an array of shape "
            f"{value.shape}. Split it over the replicas as the batch is."
        )
    return value
