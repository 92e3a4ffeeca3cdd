# SPDX-License-Identifier: Apache-2.0
"""`sync_replicas`: backup replicas, the mean of the first R fresh gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optx_sync.comm import collectives, reduce, varying
from optx_sync.comm.collectives import AxisName
from optx_sync.core import checks, trees
from optx_sync.core.checks import Refused, refuse
from optx_sync.core.shapes import Array, Bool, Float, Int32
from optx_sync.core.slices import IndexedSlices, unique_rows
from optx_sync.core.trees import Tree
from optx_sync.exchange import contract, measures
from optx_sync.exchange.agree import agree, square_within, with_update
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.landing import Landing
from optx_sync.replicas import accumulator, averages, tokens
from optx_sync.replicas.accumulator import Accumulator
from optx_sync.replicas.averages import Decay
from optx_sync.state import fields
from optx_sync.state.direct import (
    Direct,
    direct_transformation,
    refuse_unread,
    take_weight,
)
from optx_sync.state.metrics import Info, or_none

_CALL = "oxs.sync_replicas(optax.adam(1e-3), 'data', 6)"

# Flags for the last gradient, or counts of all gradients.
Outcome: TypeAlias = Bool[Array, ""] | Int32[Array, ""]


class Outcomes(NamedTuple):
    """What may become of a replica's gradient; exactly one of them does.

    If several reasons keep a gradient from being used, the first of not_contributed,
    stale, nonfinite and no_token counts. Each field is an int32[] that counts gradients
    since the start, in `SyncReplicasMetrics.counts`.

    Attributes:
        used: It was accumulated.
        stale: It was computed before the last update.
        nonfinite: It held a NaN or infinity, with `drop_nonfinite`.
        not_contributed: `contributes` was False, or the weight 0.
        no_token: The tokens of this update were gone.
    """

    used: Outcome
    stale: Outcome
    nonfinite: Outcome
    not_contributed: Outcome
    no_token: Outcome


class SyncReplicasMetrics(NamedTuple):
    """Metrics of `sync_replicas`: what became of a replica's own gradients.

    At most one of the flags, for the last gradient, holds; before the first none.
    """

    used: Bool[Array, ""]  # it was accumulated
    stale: Bool[Array, ""]  # it was computed before the last update
    nonfinite: Bool[Array, ""]  # it held a NaN or infinity, with `drop_nonfinite`
    not_contributed: Bool[Array, ""]  # `contributes` was False, or the weight 0
    no_token: Bool[Array, ""]  # the tokens of this update were gone
    counts: Outcomes  # int32[] each, how often since the start
    # Of the last update, equal on all replicas, with `measure=True`; otherwise None.
    noise_scale: Float[Array, ""] | None = None  # a ratio of moving averages
    agreement: Float[Array, ""] | None = None  # the mean cosine of two gradients
    contribution_norm: Float[Array, ""] | None = None  # the root mean square
    update_norm: Float[Array, ""] | None = None  # of what `inner` made of the mean
    contributors: Float[Array, ""] | None = None  # gradients in the mean
    # With a robust exchange, int32[], updates in which what this replica had
    # accumulated lay far from the others' (see `optx_sync.exchange.robust`); otherwise
    # None.
    outliers: jax.Array | None = None


class Gathered(NamedTuple):
    """What `measure=True` sums up of a replica's own gradients between updates.

    With w the weight of a gradient, |g| its norm, b the number of examples behind it.
    The names are those of `optx_sync.exchange.measures.to_sum`.
    """

    squares: Float[Array, ""]  # w |g|^2
    own_squares: Float[Array, ""]  # w^2 |g|^2
    inverse: Float[Array, ""]  # w / b
    own_inverse: Float[Array, ""]  # w^2 / b


@fields.WithLosses.register
@fields.WithAverages.register
@fields.WithMetrics.register
@fields.declare(
    global_step=fields.SHARED.not_a_slot,
    accumulated=fields.SHARED_ANEW.not_a_slot,
    total_weight=fields.SHARED_ANEW.not_a_slot,
    weight_unit=fields.SHARED.not_a_slot,
    accumulator=fields.ANEW,
    exchange=fields.OF_SUMS,
    contributed=fields.ANEW,
    info=fields.INFO,
    inner=fields.LIKE_PARAMS,
    averages=fields.COPIES,
)
class SyncReplicasState(NamedTuple):
    """State of `sync_replicas`.

    All kept weights are in units of `weight_unit`. So equal weights are 1, and half
    precision sums stay small.

    Attributes:
        global_step: int32[], updates so far.
        accumulated: int32[], gradients since the last update, of all replicas.
        total_weight: float32[], or float64[] where a sum is: the sum of the weights of
            these gradients.
        weight_unit: The largest weight of the first gradients ever, in the dtype of
            `total_weight`; 0 before them.
        accumulator: The sum of this replica's own gradients since the last update.
        exchange: What the exchange remembers, this replica's own; or ().
        contributed: The sum of the weights of this replica's own gradients since the
            last update, in the dtype of `total_weight`; () with a linear exchange.
        info: What is measured and counted for `oxs.metrics`, with this replica's
            `Outcomes` and `Gathered`; no step needs it.
        inner: The state of `inner`.
        averages: The moving averages, a tree like the parameters with a MaskedNode
            where there is none; () without `variable_averages`.
    """

    global_step: Int32[Array, ""]
    accumulated: Int32[Array, ""]
    total_weight: jax.Array
    weight_unit: jax.Array
    accumulator: Accumulator
    exchange: Tree
    contributed: Tree
    info: Info
    inner: optax.OptState
    averages: Tree

    def metrics(self, params: Tree | None) -> SyncReplicasMetrics:
        """What became of the last gradient, and of all of them."""
        del params
        info = self.info
        last = (info.outcome == place for place in range(len(Outcomes._fields)))
        return SyncReplicasMetrics(
            *last,
            counts=info.outcome_counts,
            **measures.shown(info.measured),
            outliers=or_none(info.outliers),
        )

    def lost_by_resize(self, fewer: bool) -> list[tuple[str, str]]:
        """(what another number of replicas loses before an update, how not to)."""
        del fewer
        waiting = int(jnp.ravel(self.accumulated)[0])
        what = f"{waiting} gradient(s) accumulated for the next update"
        mend = "Resize right after an update, when nothing has been accumulated."
        return [(what, mend)][: waiting > 0]

    def averaged_params(self, params: Tree) -> Tree:
        """The averages in the structure and dtypes of `params`."""
        if trees.is_nothing(self.averages):
            raise ValueError(
                "This state holds no averages. Pass variable_averages= to "
                "sync_replicas."
            )

        def own(average, param):
            masked = trees.is_masked(average)
            return param if masked else jnp.array(average, param.dtype, copy=True)

        return jax.tree.map(own, self.averages, params, is_leaf=trees.is_masked)


@checks.shows_call(_CALL)
def sync_replicas(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    replicas_to_aggregate: int,
    *,
    total_num_replicas: int | None = None,
    variable_averages: float | optax.Schedule | None = None,
    variables_to_average: Tree | Callable[[Tree], Tree] = None,
    drop_nonfinite: bool = False,
    accumulator_dtype: DTypeLike | None = None,
    reduce_extra_args: tuple[str, ...] = ("value",),
    equal_extra_args: tuple[str, ...] = (),
    exchange: Exchange | None = None,
    measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Backup replicas: apply `inner` to the mean of gradients once enough have come in.

    Fault tolerance in lockstep: TensorFlow's `SyncReplicasOptimizer`. With R =
    `replicas_to_aggregate`, N replicas, and A the gradients g_i, of weight w_i,
    accumulated since the last update:

        |A| >= R:  updates = inner(sum w_i g_i / sum w_i);  A = {};  global_step += 1
        |A| <  R:  updates = 0; parameters, inner state and averages stay as they are

    A gradient is accumulated if its replica `contributes`, if it is fresh
    (`gradient_step >= global_step`), if it is finite (with `drop_nonfinite`), and if
    one of the update's max(N, R) tokens is left. A step without an update sends one
    flag per replica; all else stands in a conditional.

    A row of a row-sparse gradient is divided by the weights of the gradients that
    contain it. The sums, which an update sends, are of the table's size all the same.

    `update` takes scalars that may differ between replicas: `contributes` (bool),
    `gradient_step` (the `global_step` at which the gradient was computed), and `weight`
    (a number such as its tokens, or a bool; 0 is not counted). `meet` (bool, equal on
    all replicas) decides in place of the counter.

    With `variable_averages` it computes `params + updates`: it stands last in a chain,
    and `oxs.averaged_params(state, params)` reads the averages.

    Args:
        inner: What gets the mean gradient.
        axis_name: The mapped axis, or a tuple of them.
        replicas_to_aggregate: R, the gradients that an update needs, 1 or more.
        total_num_replicas: N, checked against the axis. `None`: the axis size.
        variable_averages: The decay of the parameters' moving average, a float or a
            schedule of `global_step`.
        variables_to_average: Which parameters to average, a tree of bools or a function
            that returns one. `None`: all.
        drop_nonfinite: Leave out a gradient with a NaN or infinity.
        accumulator_dtype: The dtype of sums and averages. `None`: float32 for half
            precision parameters, else their own.
        reduce_extra_args: As for `cross_shard`, over the replicas whose gradients are
            used.
        equal_extra_args: As for `cross_shard`.
        exchange: How the replicas' sums become one. A robust one gets each replica's
            mean: one vote. `None`: an all-reduce.
        measure: As for `cross_shard`, of the gradients of each update. Dense ones only.

    Returns:
        A transformation with a `SyncReplicasState`; `oxs.metrics(state)` says what
        became of each gradient.

    Raises:
        TypeError: Arguments of a wrong type, integer gradients.
        ValueError: A number below 1, a decay outside of [0, 1]; an axis that is not
            mapped or of another size, gradients that autodiff has summed or that do not
            match the parameters, a weight that is negative or has no meaning.

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
        Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous
        SGD", 2016, arXiv 1604.00981.
    """
    inner = checks.check_inner(inner, _CALL)
    collectives.check_axis_name(axis_name)
    required, total = tokens.check_replicas(replicas_to_aggregate, total_num_replicas)
    averages.check_averages(variable_averages)
    exchange = contract.check_exchange(exchange, all_reduce())
    replicas = _SyncReplicas(
        inner,
        axis_name,
        required,
        total,
        variable_averages,
        variables_to_average,
        drop_nonfinite,
        checks.floating("accumulator_dtype", accumulator_dtype),
        reduce.check_extra_args(reduce_extra_args, "reduce_extra_args"),
        reduce.check_extra_args(equal_extra_args, "equal_extra_args"),
        exchange,
        measure,
    )
    refuse(replicas, _TOGETHER)
    return direct_transformation(replicas.init, Direct(replicas.apply), replicas.update)


class _Step(NamedTuple):
    """What is known of a step once its gradients have been accumulated."""

    grads: Tree  # this replica's, with equal rows summed
    params: Tree
    tokens: int  # the number of gradients that an update can have
    weight: Float[Array, ""]  # of this replica's gradient, 0 where it is not used
    due: Bool[Array, ""] | bool  # whether the update is made in this step
    extra_args: dict[str, Any]


class _SyncReplicas(NamedTuple):
    """`init`, `update` and `apply` of `sync_replicas`, with checked arguments."""

    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    required: int
    total: int | None
    decay: Decay | None
    averaged: Tree | Callable[[Tree], Tree]
    drop_nonfinite: bool
    dtype: DTypeLike | None
    reduced_names: tuple[str, ...]
    equal_names: tuple[str, ...]
    exchange: Exchange
    measure: bool

    def init(self, params: Tree) -> SyncReplicasState:
        """The state of a replica before its first step."""
        checks.check_params(params)
        tokens.check_variables(params)
        empty = accumulator.start_accumulator(params, self.dtype)
        weights = accumulator.weight_dtype(empty.sums)

        def own(tree: Tree) -> Tree:
            # A replica's own fields vary over the axis from the start.
            return varying.localize_where_mapped(tree, self.axis_name)

        def zeros(kind, dtype):  # an array for each, as it can be donated only once
            return kind(*(jnp.zeros((), dtype) for _ in kind._fields))

        info = own(
            Info(
                outliers=contract.start_outliers(self.exchange),
                outcome=jnp.full((), -1, jnp.int32),
                outcome_counts=zeros(Outcomes, jnp.int32),
                gathered=zeros(Gathered, jnp.float32) if self.measure else (),
            )
        )
        if self.measure:
            measured = measures.start_like(params, self.axis_name)
            info = info._replace(measured=measured)
        return SyncReplicasState(
            global_step=jnp.zeros((), jnp.int32),
            accumulated=jnp.zeros((), jnp.int32),
            total_weight=jnp.zeros((), weights),
            weight_unit=jnp.zeros((), weights),
            accumulator=own(empty),
            exchange=own(self.exchange.init(params)),
            contributed=() if self.exchange.linear else own(jnp.zeros((), weights)),
            info=info,
            inner=self.inner.init(params),
            averages=averages.start_averages(
                params, self.decay, self.averaged, self.dtype
            ),
        )

    def update(self, updates, state, params=None, **extra_args):
        """One step that returns updates."""
        step, state = self.accept(updates, state, params, **extra_args)

        def move(state):
            moved, _, state = self.move(step, state)
            return moved, state

        def wait(like, state):
            return _no_updates(like), state

        return _either(step.due, move, wait, state)

    def apply(self, grads, state, params, **extra_args):
        """One step that returns parameters."""
        step, state = self.accept(grads, state, params, **extra_args)

        def move(_, state):
            return self.move(step, state)[1:]

        def wait(_, params, state):
            return params, state

        # The parameters are an operand so that XLA can pass them on in place.
        return _either(step.due, move, wait, params, state)

    def accept(
        self,
        grads,
        state: SyncReplicasState,
        params,
        *,
        contributes=True,
        weight=None,
        gradient_step=None,
        meet=None,
        batch_size=None,
        **extra_args,
    ) -> tuple[_Step, SyncReplicasState]:
        """(what is known of the step, the state with this step's gradients added)."""
        self.check(grads, state, params, weight)
        take_weight(weight)
        read = "weight", "contributes", "gradient_step", "meet", "batch_size"
        refuse_unread("sync_replicas", read, extra_args, self.inner, grads, params)
        batch_size = measures.check_batch_size(batch_size)
        grads = unique_rows(grads)
        all_count = contributes is True and weight is None and gradient_step is None
        given = reduce.own_weight(1 if weight is None else weight, self.axis_name)
        given = jnp.asarray(given, state.total_weight.dtype)
        contributes = _extra(contributes, "contributes", jnp.bool_) & (given != 0)
        fresh = finite = jnp.bool_(True)
        if gradient_step is not None:
            gradient_step = _extra(gradient_step, "gradient_step", jnp.integer)
            fresh = gradient_step.astype(jnp.int32) >= state.global_step
        if self.drop_nonfinite:
            finite = trees.is_finite((grads, given))
        replicas = collectives.axis_size(self.axis_name)
        most = tokens.tokens_of_update(replicas, self.required)
        used, arrived = _hand_out(
            contributes & fresh & finite,
            given,
            tokens.Tokens(old=0, new=most - state.accumulated),
            state.global_step,
            self.axis_name,
        )
        accumulated = state.accumulated + jnp.sum(arrived != 0, dtype=jnp.int32)
        due = accumulated >= self.required if meet is None else meet
        sure = meet is False or (all_count and not self.drop_nonfinite)
        if meet is not None and not sure:
            # The mean of no gradients does not exist.
            due = jnp.logical_and(meet, accumulated > 0)
        outcome = _outcome(used, fresh, finite, contributes)
        counts = (
            count + (outcome == place).astype(jnp.int32)
            for place, count in enumerate(state.info.outcome_counts)
        )
        state = state._replace(
            global_step=state.global_step + jnp.asarray(due).astype(jnp.int32),
            accumulated=accumulated,
            info=state.info._replace(outcome=outcome, outcome_counts=Outcomes(*counts)),
        )
        weight = jnp.where(used, given, 0)
        state = self.add(grads, state, used, weight, arrived, batch_size)
        return _Step(grads, params, most, weight, due, extra_args), state

    def check(self, grads, state: SyncReplicasState, params, weight) -> None:
        """Refuse what does not fit a step of a replica."""
        axis_name = self.axis_name
        tokens.check_variables(grads if params is None else params)
        checks.check_grads(grads, params)
        refuse(_Given(self, params), _AT_THE_CALL)
        varying.require_local(
            grads,
            axis_name,
            "gradient",
            "Which replicas count is decided one by one: write `params = oxs.localize("
            f"params, {axis_name!r})` before jax.grad, so that gradients stay local.",
        )
        collectives.require_whole_lanes(grads, axis_name)
        checks.check_one_worker(state.global_step, state.accumulator.sums, params)
        if self.measure:
            contract.require_dense(grads, "measure=True")
        contract.check_call(self.exchange, grads, weight)

    def add(self, grads, state: SyncReplicasState, used, weight, arrived, batch_size):
        """The state with the gradient in this replica's own sums, if it is used."""
        first = jnp.max(jnp.where(jnp.isfinite(arrived), arrived, 0))
        weight_unit = jnp.where(state.weight_unit > 0, state.weight_unit, first)

        def in_units(weights):
            unit = reduce.or_one(weight_unit)
            # Not every device divides a number by itself to exactly 1.
            return jnp.where(weights == unit, 1, weights / unit)

        own = in_units(weight)
        state = state._replace(
            total_weight=state.total_weight + jnp.sum(in_units(arrived)),
            weight_unit=weight_unit,
            accumulator=accumulator.accumulate(state.accumulator, grads, used, own),
        )
        if not self.exchange.linear:
            state = state._replace(contributed=state.contributed + own)
        if self.measure:
            now = measures.to_sum(
                square_within(state.info.measured, self.axis_name, grads),
                self.axis_name,
                weight=own,
                batch_size=jnp.asarray(batch_size),
            )
            before = state.info.gathered._asdict().items()
            gathered = Gathered(*(so_far + now[name] for name, so_far in before))
            state = state._replace(info=state.info._replace(gathered=gathered))
        return state

    def move(self, step: _Step, state: SyncReplicasState):
        """(updates, new parameters, state): the mean goes through `inner`."""
        mean, state = self.agree(step, state)
        extra = reduce.mean_extra_args(
            step.extra_args,
            self.reduced_names,
            self.axis_name,
            weight=step.weight,
            equal=self.equal_names,
        )
        chief = tokens.Chief(self.inner, self.required, self.decay)
        before = step.params, state.inner, state.averages, state.accumulator
        count, number = state.accumulated, state.global_step
        moved, held = chief.take(
            tokens.Held(*before), mean, step.grads, count, number, extra
        )
        info = with_update(state.info, moved, self.axis_name)
        state = state._replace(
            accumulated=jnp.zeros_like(state.accumulated),
            total_weight=jnp.zeros_like(state.total_weight),
            accumulator=held.accumulator,
            contributed=trees.zeros_like(state.contributed),
            info=info._replace(gathered=trees.zeros_like(info.gathered)),
            inner=held.inner,
            averages=held.averages,
        )
        return moved, held.params, state

    def agree(self, step: _Step, state: SyncReplicasState):
        """(the mean of all that was accumulated, the state, which measured it)."""
        exchange, axis_name = self.exchange, self.axis_name
        sums, rows = accumulator.sums_of(state.accumulator, step.grads)
        weight = None
        if not exchange.linear:
            # Each replica has one vote: the mean of its own gradients.
            weight, some = state.contributed, reduce.or_one(state.contributed)
            sums = jax.tree.map(lambda x: x / some.astype(x.dtype), sums)
            weight = weight if exchange.takes_weights else weight > 0
        agreed = agree(
            exchange,
            Landing(axis_name),
            sums,
            state.exchange,
            state.info,
            weight=weight,
            own=state.info.gathered._asdict() if self.measure else None,
        )
        count = jnp.ones((), jnp.int32)
        if exchange.linear:
            # The sum is the mean times the number of replicas.
            replicas = jnp.asarray(agreed.weight, state.total_weight.dtype)
            count = reduce.weight_divisor(state.total_weight) / replicas
            rows = reduce.reduce(rows, axis_name, reduction="sum")
            rows = [weights / replicas for weights in rows]
        mean = accumulator.mean_of(agreed.mean, rows, step.grads, count, step.tokens)
        info = agreed.info
        if self.measure:
            of_all = {
                **agreed.sums,
                "contributors": state.accumulated.astype(jnp.float32),
                "mean": square_within(info.measured, axis_name, mean),
            }
            now = measures.measure_of(info.measured, of_all, state.total_weight)
            info = info._replace(measured=now)
        return mean, state._replace(exchange=agreed.memory, info=info)


class _Given(NamedTuple):
    """What is checked of a call."""

    options: _SyncReplicas
    params: Tree

    @property
    def replicas(self) -> int:
        """How many they are."""
        return collectives.axis_size(self.options.axis_name)


_TOGETHER: Refused[_SyncReplicas] = (
    (
        lambda o: o.averaged is not None and o.decay is None,
        "variables_to_average says which parameters to average, but there is no "
        "average. Pass variable_averages=, a decay or a schedule, too.",
    ),
    (lambda o: o.measure and not o.exchange.exact, contract.INEXACT),
    (lambda o: o.exchange.linear is None, "sync_replicas" + contract.UNDECLARED),
)
_AT_THE_CALL: Refused[_Given] = (
    (
        lambda call: call.params is None and call.options.decay is not None,
        "A moving average of the parameters needs them; got params=None. Call "
        "update(grads, state, params).",
    ),
    (
        lambda call: call.options.total not in (None, call.replicas),
        "total_num_replicas={0.options.total}, but the axis {0.options.axis_name!r} "
        "has {0.replicas} replicas. Leave it out, or make them equal.",
    ),
)


def _either(
    due: Bool[Array, ""] | bool,
    move: Callable[..., tuple[Tree, Tree]],
    wait: Callable[..., tuple[Tree, Tree]],
    *before: Tree,
) -> tuple[Tree, Tree]:
    """(result, state) of `move(*before)` if due, else of `wait(shapes, *before)`.

    `before` ends with the state; `shapes` are the shapes of `move`'s result. If `due`
    is a Python bool there is no conditional.
    """
    types = jax.eval_shape(move, *before)
    shapes = types[0]
    like = (shapes, before[-1])

    def moved(*before):
        return varying.vary_like(varying.vary_like(move(*before), like), types)

    def waited(*before):
        return varying.vary_like(varying.vary_like(wait(shapes, *before), like), types)

    if isinstance(due, bool):
        return moved(*before) if due else waited(*before)
    return jax.lax.cond(due, moved, waited, *before)


def _outcome(used, fresh, finite, contributes):
    """int32[], the field of `Outcomes` that is the gradient's."""
    place = Outcomes._fields.index
    outcome = jnp.int32(place("no_token"))
    for name, applies in (
        ("used", used),
        ("nonfinite", ~finite),
        ("stale", ~fresh),
        ("not_contributed", ~contributes),
    ):
        outcome = jnp.where(applies, jnp.int32(place(name)), outcome)
    return outcome


def _hand_out(candidate, weight, queue, global_step, axis_name):
    """(whether this replica's gradient gets a token, the weights [N] of all that do).

    The weights of the others are 0.
    """
    replicas = collectives.axis_size(axis_name)
    numbers = jnp.arange(replicas, dtype=jnp.int32)
    mine = numbers == collectives.axis_index(axis_name)
    sent = jnp.where(mine & candidate, weight, jnp.zeros_like(weight))
    everyone = reduce.reduce(sent, axis_name, reduction="sum")
    flags = (everyone != 0).astype(jnp.int32)
    # Each update starts with the next replica; those before it come last.
    last = numbers < global_step % replicas
    before = jnp.sum(flags, where=last, dtype=jnp.int32)
    ahead = jnp.where(last, jnp.sum(flags, dtype=jnp.int32), 0) - before
    place = ahead + jnp.cumsum(flags, dtype=jnp.int32)
    served, _, _ = tokens.hand_out(queue, flags > 0, place)
    arrived = jnp.where(served, everyone, jnp.zeros_like(everyone))
    return jnp.any(mine & served), arrived


def _no_updates(shapes):
    """Updates that leave the parameters as they are, bit for bit."""

    def none(leaf):
        if isinstance(leaf, IndexedSlices):
            nowhere = jnp.full(leaf.values.shape[:1], -1, jnp.int32)
            values = jnp.zeros(leaf.values.shape, leaf.values.dtype)
            return IndexedSlices(nowhere, values).sum_duplicates()
        # Minus zero, because 0.0 would turn a parameter of -0.0 into 0.0.
        zeros = jnp.full(leaf.shape, -0.0, leaf.dtype)
        # Where types carry shardings, both branches must have the same.
        lies = leaf.sharding and leaf.sharding.spec
        return jax.reshard(zeros, lies) if lies and any(lies.partitions) else zeros

    return jax.tree.map(none, shapes, is_leaf=trees.is_slices)


def _extra(value, name, kind):
    """An extra argument as a scalar array."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, kind):
        wanted = "a bool" if kind is jnp.bool_ else "an integer"
        raise TypeError(f"{name} must be {wanted} per replica; got {value.dtype}.")
    if value.ndim:
        mend = "Split it over the replicas as the batch is"
        if value.size == 1:
            mend = f"It is split already: pass its one number, {name}[0]"
        raise ValueError(
            f"{name} must be a scalar per replica; got an array of shape "
            f"{value.shape}. {mend}."
        )
    return value
