# SPDX-License-Identifier: Apache-2.0
"""All-reduce the gradients of all replicas, or of groups of them, in every step."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync import checks, trees
from optx_sync.comm import buffers, by_type, reduce, varying
from optx_sync.comm.collectives import (
    AxisName,
    GroupAssignment,
    axis_size,
    check_axis_name,
)
from optx_sync.comm.reduce import Reduction
from optx_sync.elementwise import Elementwise
from optx_sync.exchange import contract
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.metrics import (
    Info,
    check_batch_size,
    like_params,
    measure_in_pieces,
    measure_of,
    measures,
    square_sum,
    start,
    to_sum,
    told,
)
from optx_sync.placement import fields
from optx_sync.replicas import owners
from optx_sync.step import take_weight
from optx_sync.trees import Tree

Grads = Literal["local", "summed", "averaged", "unreduced"]
_CALL = "oxs.cross_shard(optax.adam(1e-3), 'data')"


class CrossShardMetrics(NamedTuple):
    """Metrics of `cross_shard`, read by `oxs.metrics`; nothing is sent.

    All but the outliers are equal on all replicas. All but the noise scale, a ratio of
    moving averages, are those of the last step. `None` without `measure=True`.
    """

    noise_scale: jax.Array | None  # float32[], in examples; < 0 while |G|^2 is unknown
    agreement: jax.Array | None  # float32[], the mean cosine of two gradients
    contribution_norm: jax.Array | None  # float32[], root of the mean square
    update_norm: jax.Array | None  # float32[], of what `inner` made of the mean
    contributors: jax.Array | None  # float32[], replicas of a weight above 0
    # With a robust exchange, int32[], steps in which this replica's gradient lay far
    # from the others' (see `optx_sync.exchange.robust`); otherwise None.
    outliers: jax.Array | None


@fields.declare(exchange=fields.OWN, info=fields.INFO, inner=fields.LIKE_PARAMS)
class CrossShardState(NamedTuple):
    """State of `cross_shard` where it remembers, counts or measures something."""

    exchange: Tree  # what the exchange remembers, this replica's own, or ()
    info: Info
    inner: optax.OptState  # the state of `inner`

    def metrics(self, params: Tree | None) -> CrossShardMetrics:
        """What `measure=True` measured, and how often this replica was an outlier."""
        del params
        if not jax.tree.leaves(self.info):
            raise ValueError(
                "This cross_shard measures nothing. Pass measure=True to it."
            )
        return CrossShardMetrics(
            **measures(self.info.measured), outliers=told(self.info.outliers)
        )


@fields.declare(exchange=fields.OF_SUMS)
class SummedCrossShardState(CrossShardState):
    """The state for `reduction="sum"`."""

    __slots__ = ()


@fields.declare(inner=fields.SHARED)
class CutCrossShardState(CrossShardState):
    """The state for `shard_state=True`: pieces of `inner`'s state on each replica."""

    __slots__ = ()


@fields.declare(exchange=fields.OF_SUMS)
class SummedCutCrossShardState(CutCrossShardState):
    """The state for `shard_state=True` and `reduction="sum"`."""

    __slots__ = ()


@checks.shows_call(_CALL)
def cross_shard(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    reduction: Reduction = "mean",
    group_assignment: GroupAssignment | None = None,
    grads: Grads = "local",
    exchange: Exchange | None = None,
    shard_state: bool | Literal["leaves"] = False,
    reduce_extra_args: tuple[str, ...] = ("value",),
    measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Data parallel training: all-reduce every step's gradients, then apply `inner`.

    With g_i the gradient of replica i, N replicas (in the group) and weights w_i:

    .. math::

        g &= \frac{1}{N} \sum_i g_i \quad\text{(mean)} \\
        g &= \frac{\sum_i w_i g_i}{\sum_i w_i} \quad\text{(weighted mean)} \\
        g &= \sum_i g_i \quad\text{(sum)}

    and the updates are those of `inner` for g. TensorFlow's `CrossShardOptimizer`
    scales the loss by 1/N; here the gradient is scaled. To put it into a chain, use
    `oxs.all_reduce_grads`.

    `update` takes the extra argument `weight`, a scalar per replica such as its number
    of tokens. A replica of weight 0 leaves no trace, NaN or not; if all are 0 so is g.

    `optax.apply_if_finite(cross_shard(...))` hangs: one replica enters the collective
    and waits for those that do not. Write `cross_shard(optax.apply_if_finite(...))`.

    Args:
        inner: The transformation that gets the reduced gradient.
        axis_name: The mapped axis, or a tuple of them.
        reduction: `"mean"` or `"sum"`.
        group_assignment: A partition of `range(axis_size)` into lists of equal size,
            for example `[[0, 1], [2, 3]]`; each group then trains on its own.
        grads: What `update` is given. `"local"`: each replica's own gradient.
            `"summed"`: autodiff has summed them, as `jax.grad` does in
            `jax.shard_map(check_vma=True)` for a replicated parameter. `"averaged"`:
            their mean. These two send nothing. `"unreduced"`: under plain `jax.jit`,
            typed as still to be summed.
        exchange: How gradients become their mean: gradient compression, or a
            Byzantine-robust mean. `None`: `oxs.exchange.all_reduce()`.
        shard_state: ZeRO-1. `True`: each replica keeps 1/N of the state of an `inner`
            that acts on each number alone, as `optax.adam` does. `"leaves"`: whole
            leaves on their owners, for one that acts on each leaf alone, as
            `optax.contrib.muon` does.
        reduce_extra_args: The names of extra arguments of which `inner` gets the mean.
            All others must be equal on all replicas, or their parameters drift apart.
        measure: Keep measures for `oxs.metrics`: gradient noise scale, agreement,
            norms, contributors. Pass the number of examples behind this replica's
            gradient as the extra argument `batch_size`; 1 if left out.

    Returns:
        A transformation whose `init` gives `inner`'s state (a `CrossShardState` where
        it remembers, counts or measures something), and whose `update` must run where
        `axis_name` is mapped.

    Raises:
        TypeError: A missing axis name, an `inner` that is no transformation, integer
            gradients.
        ValueError: A bad `reduction`, `grads` or `group_assignment`, or one that the
            exchange does not take; `shard_state` with groups, or with an exchange or an
            `inner` that needs whole arrays; at the call, a state for another number of
            replicas, a gradient that is already reduced, a weight where it has no
            meaning, an axis that is not mapped, gradients that do not match the
            parameters.

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
    """
    inner = checks.check_inner(inner, _CALL)
    check_axis_name(axis_name)
    reduce.check_reduction(reduction)
    checks.one_of("grads", grads, Grads)
    _check_unreduced(grads, reduction, shard_state)
    if exchange is not None:
        _require_own(grads, "An exchange")
    exchange = contract.check_exchange(exchange, all_reduce())
    if group_assignment is not None:
        reduce.check_group_assignment(group_assignment)
        _require_own(grads, "group_assignment")
        if not exchange.exact:
            raise ValueError(
                "group_assignment needs an exchange that takes groups; this one does "
                "not. Use oxs.exchange.all_reduce(), or a mesh with an axis per group."
            )
    if measure:
        _require_own(grads, "measure=True")
        contract.require_exact(exchange)
    state_of = None
    if measure or exchange.remembers or exchange.outlier is not None:
        mean_of, sum_of = CrossShardState, SummedCrossShardState
        if shard_state:
            mean_of, sum_of = CutCrossShardState, SummedCutCrossShardState
        state_of = sum_of if reduction == "sum" else mean_of
    replicas = _CrossShard(
        inner,
        axis_name,
        reduction,
        group_assignment,
        grads,
        exchange,
        reduce.check_extra_args(reduce_extra_args),
        measure,
        state_of,
    )
    if shard_state not in (False, True, "leaves"):
        raise ValueError(
            "shard_state must be False, True (pieces of arrays) or 'leaves' (whole "
            f"ones); got {shard_state!r}."
        )
    if not shard_state:
        return optax.GradientTransformationExtraArgs(replicas.init, replicas.update)
    if shard_state == "leaves":
        owned = _InLeaves(
            replicas,
            _check_leaves(replicas),
            owners.Leaves(inner, check_axis_name(axis_name)),
        )
        return optax.GradientTransformationExtraArgs(owned.init, owned.update)
    if grads == "unreduced":
        typed = _CutByType(replicas)
        return optax.GradientTransformationExtraArgs(typed.init, typed.update)
    elementwise = Elementwise(inner, check_axis_name(axis_name), "shard_state=True")
    _check_pieces(replicas, "True", exchange.halves is not None)
    pieces = _InPieces(replicas, elementwise)
    return optax.GradientTransformationExtraArgs(pieces.init, pieces.update)


@checks.shows_call("oxs.all_reduce_grads('data')")
def all_reduce_grads(
    axis_name: AxisName, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """All-reduce the gradients of all replicas, as a link of an `optax.chain`.

    Links before it in the chain see each replica's own gradient, links after it the
    reduced one:

        optax.chain(per_replica_clip, oxs.all_reduce_grads("data"), optax.adam(1e-3))

    An optimizer before it is each replica's own, with moments of its own gradient, and
    what is averaged are its steps. That is seldom meant, and cannot be detected.

    A chain hands extra arguments to each of its links by itself, so the `value` of a
    link behind this one must be reduced before: `value=oxs.reduce(loss, "data")`.

    Args:
        axis_name: The mapped axis, or a tuple of them.
        **options: The keywords of `cross_shard`, except `reduce_extra_args`.

    Returns:
        The transformation; its state has no arrays where the exchange remembers
        nothing.

    Raises:
        TypeError: A missing or bad axis name.
        ValueError: For the reasons of `cross_shard`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = optax.chain(optax.clip(1.0), oxs.all_reduce_grads("data"))
        >>> def clipped_mean(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.vmap(clipped_mean, axis_name="data")(jnp.array([0.5, 7.0]))
        Array([0.75, 0.75], dtype=float32)
    """
    as_it_is = optax.identity()._replace(init=lambda params: fields.Reduced())
    tx = cross_shard(as_it_is, axis_name, reduce_extra_args=(), **options)

    def update(updates, state, params=None, **extra_args):
        reduced, state = tx.update(updates, state, params, **extra_args)
        # So that the next link of the chain sees that there is no gradient.
        return jax.tree.map(
            lambda grad, mean: None if grad is None else mean,
            updates,
            reduced,
            is_leaf=trees.is_gradient_leaf,
        ), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


class _CrossShard(NamedTuple):
    """`init` and `update` of `cross_shard`, with checked arguments."""

    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    reduction: Reduction
    group_assignment: GroupAssignment | None
    grads: Grads
    exchange: Exchange
    reduced_names: tuple[str, ...]
    measure: bool
    state_of: type[CrossShardState] | None  # None: the state is that of `inner`

    def init(self, params):
        """The state of a replica before its first step."""
        checks.check_params(params)

        def own(tree):
            return varying.localize_where_mapped(tree, self.axis_name)

        # The groups' states will differ, so all of the state varies from the start.
        grouped = self.group_assignment is not None
        params = own(params) if grouped else params
        state = self.inner.init(params)
        state = own(state) if grouped else state
        return self.around(state, params)

    def around(self, inner, params):
        """The state, around what `inner` keeps before its first step."""
        if self.state_of is None:
            return inner

        def own(tree):
            return varying.localize_where_mapped(tree, self.axis_name)

        memory, outliers = own(
            (self.exchange.init(params), contract.start_outliers(self.exchange))
        )
        measured = like_params(start(), params, self.axis_name) if self.measure else ()
        return self.state_of(memory, Info(outliers=outliers, measured=measured), inner)

    def update(
        self, updates, state, params=None, *, weight=None, batch_size=None, **extra_args
    ):
        """The updates of `inner` for the reduced gradients, and the state."""
        extra_args = self.check(updates, params, weight, extra_args)
        batch_size = check_batch_size(batch_size)
        before = CrossShardState((), Info(), state) if self.state_of is None else state
        if self.grads == "local":
            mean, now = self.meet(updates, before, weight, batch_size)
        elif self.grads == "unreduced":
            mean, now = by_type.summed(updates, self.axis_name), before
        else:
            mean, now = self.as_asked(updates, axis_size(self.axis_name)), before
        with checks.explains_inner(mean):
            updates, inner = self.inner.update(mean, before.inner, params, **extra_args)
        inner = varying.vary_like(inner, before.inner)
        updates = checks.fill_missing(updates, params)
        return updates, self.after(now, before, updates, inner)

    def after(self, now: CrossShardState, before: CrossShardState, updates, inner):
        """The state after a step, with its measures and `inner`'s state."""
        if self.state_of is None:
            return inner
        info = now.info
        if self.measure:
            norm = jnp.sqrt(self.square(updates, before))
            info = info._replace(measured=info.measured._replace(update_norm=norm))
        info = varying.vary_like(info, before.info)
        return now._replace(info=info, inner=inner)

    def check(self, grads, params, weight, extra_args) -> dict[str, Any]:
        """Refuse arguments that do not fit; returns the extra arguments for `inner`."""
        checks.check_grads(grads, params)
        take_weight(weight)
        if weight is not None:
            _require_own(self.grads, "weight")
            if self.reduction == "sum":
                raise ValueError(
                    "weight= makes a weighted mean and has no meaning with "
                    "reduction='sum'; leave weight out, or pass reduction='mean'."
                )
        if self.grads == "unreduced":
            contract.require_dense(grads, "grads='unreduced'")
            return extra_args
        if self.grads != "local":
            varying.require_reduced(grads, self.axis_name, self.grads)
        return reduce.mean_extra_args(
            extra_args,
            self.reduced_names,
            self.axis_name,
            weight=weight,
            group_assignment=self.group_assignment,
        )

    def meet(self, grads, state: CrossShardState, weight, batch_size):
        """(the mean or sum of all gradients, the state)."""
        exchange, axis_name = self.exchange, self.axis_name
        measured = state.info.measured
        varying.require_local(grads, axis_name, "gradient")
        contract.check_weight(exchange, weight)
        if not exchange.exact:
            contract.require_dense(grads)
        groups = self.group_assignment
        more = {} if groups is None else {"group_assignment": groups}
        also = None
        if self.measure:
            also = to_sum(
                self.square(grads, state),
                axis_name,
                weight=weight,
                alike=weight is not None and jnp.result_type(weight) == jnp.bool_,
                batch_size=batch_size,
            )
        met = exchange.meet(
            grads, state.exchange, axis_name, weight=weight, also=also, **more
        )
        if self.measure:
            square = self.square(met.mean, state)
            measured = measure_of(measured, met.also, met.weight, square, batch_size)
        outliers = contract.count_outlier(
            exchange, grads, met.mean, axis_name, weight, state.info.outliers
        )
        info = state.info._replace(outliers=outliers, measured=measured)
        state = state._replace(exchange=met.state, info=info)
        return self.as_asked(met.mean, met.weight), state

    def as_asked(self, grads, count):
        """The mean or sum, as `reduction` asks, of gradients that are one of them."""
        given = "sum" if self.grads == "summed" else "mean"
        if self.reduction == given:
            return grads

        def turned(leaf):
            number = jnp.asarray(count, jnp.result_type(leaf))
            return leaf * number if given == "mean" else leaf / number

        def turn(leaf):
            return leaf.map_values(turned) if trees.is_slices(leaf) else turned(leaf)

        return jax.tree.map(turn, grads, is_leaf=trees.is_slices)

    def square(self, tree, state: CrossShardState):
        """The squared norm, summed over the shards on other axes of the gradients."""
        return square_sum(
            tree, varying.localize(state.info.measured.update_norm, self.axis_name)
        )


class _InPieces(NamedTuple):
    """`init` and `update` of `cross_shard(..., shard_state=True)`."""

    whole: _CrossShard
    elementwise: Elementwise

    def init(self, params):
        """The state of this replica's pieces."""
        checks.check_params(params)
        inner = self.whole.inner
        checks.refuse_placeholder(params, "shard_state=True")
        self.elementwise.check(params)
        pieces = own_pieces(inner.init, params, self.whole.axis_name)
        _refuse_center(pieces, "True")
        return self.whole.around(pieces, params)

    def update(
        self, updates, state, params=None, *, weight=None, batch_size=None, **extra_args
    ):
        """The updates, gathered from all pieces, and the state."""
        whole, axis_name = self.whole, self.whole.axis_name
        extra_args = whole.check(updates, params, weight, extra_args)
        batch_size = check_batch_size(batch_size)
        contract.require_dense(updates, "shard_state=True")
        like = updates if params is None else params
        _require_floating(updates, like)
        before = CrossShardState((), Info(), state) if whole.state_of is None else state
        held: Any = before.inner  # an `InPieces`
        check_pieces(held, whole.inner.init, like, axis_name)
        if whole.grads == "local":
            pieces, now = self.meet(updates, before, weight, batch_size)
        else:
            pieces, now = cut(updates, axis_name), before
        pieces = whole.as_asked(pieces, axis_size(axis_name))
        own = None if params is None else cut(params, axis_name)
        new, inner = whole.inner.update(pieces, held.tree, own, **extra_args)
        buckets = whole.exchange.bucket_bytes
        new = gather(varying.localize(new, axis_name), like, axis_name, buckets)
        inner = varying.vary_like(trees.cast_like(inner, held.tree), held.tree)
        new = checks.fill_missing(new, params)
        return new, whole.after(now, before, new, fields.InPieces(inner))

    def meet(self, grads, state: CrossShardState, weight, batch_size):
        """(the mean of this replica's piece of every gradient, the state)."""
        whole, axis_name = self.whole, self.whole.axis_name
        exchange = whole.exchange
        if exchange.halves is not None:
            met = exchange.halves.up(grads, state.exchange, axis_name, weight=weight)
            return met.mean, state._replace(exchange=met.state)
        scatter: Any = exchange.scatter  # `cross_shard` has made sure that there is one
        pieces = scatter(grads, axis_name, weight=weight)
        if not whole.measure:
            return pieces, state
        measured = measure_in_pieces(
            state.info.measured,
            (whole.square(grads, state), whole.square(pieces, state)),
            axis_name,
            weight=weight,
            alike=weight is not None and jnp.result_type(weight) == jnp.bool_,
            batch_size=batch_size,
        )
        return pieces, state._replace(info=state.info._replace(measured=measured))


class _CutByType(NamedTuple):
    """The same under plain `jax.jit`, where `inner` sees whole arrays, sharded."""

    whole: _CrossShard

    def init(self, params):
        """The state of `inner`, sharded as the parameters would be."""
        checks.check_params(params)
        if not trees.is_placeholder(params):
            params = by_type.cut(params, self.whole.axis_name)
        return self.whole.inner.init(params)

    def update(self, updates, state, params=None, **extra_args):
        """The updates, sharded like the parameters, and the state."""
        axis_name = self.whole.axis_name
        extra_args = self.whole.check(updates, params, None, extra_args)
        by_type.require_unreduced(updates, axis_name)
        own = None if params is None else by_type.cut(params, axis_name)
        mean = by_type.cut(updates, axis_name)
        with checks.explains_inner(mean):
            new, state = self.whole.inner.update(mean, state, own, **extra_args)
        return checks.fill_missing(by_type.whole(new, axis_name), params), state


class _InLeaves(NamedTuple):
    """`init` and `update` of `cross_shard(..., shard_state="leaves")`."""

    whole: _CrossShard
    scatter: Callable[..., Tree]
    leaves: owners.Leaves

    def init(self, params):
        """The state of this replica's leaves and pieces."""
        checks.check_params(params)
        checks.refuse_placeholder(params, "shard_state='leaves'")
        plan = self.leaves.plan(params)
        tree = plan.cut(params)
        own = own_pieces(
            lambda own: self.leaves.init(plan, *own),
            tree,
            self.whole.axis_name,
            self._cut,
        )
        _refuse_center(own, "'leaves'")
        constants = self.leaves.constants(cut(tree[0], None))
        return fields.OwnedState(own, constants, plan.numbers())

    def update(self, updates, state, params=None, *, weight=None, **extra_args):
        """The updates, gathered from their owners, and the state."""
        whole, axis_name = self.whole, self.whole.axis_name
        extra_args = whole.check(updates, params, weight, extra_args)
        contract.require_dense(updates, 'shard_state="leaves"')
        like = updates if params is None else params
        _require_floating(updates, like)
        plan = self.leaves.plan(like, set(state.own.tree.leaves))
        replicas = axis_size(axis_name)
        check_pieces(
            state.own,
            lambda own: self.leaves.init(plan, *own),
            plan.cut(like),
            axis_name,
            self._cut,
        )
        grads = self._padded(plan.cut(updates), replicas)
        full = self._padded(plan.cut(like), replicas)
        if whole.grads == "local":
            pieces = self.scatter(grads, axis_name, weight=weight)
        else:
            pieces = cut(grads, axis_name)
        pieces = whole.as_asked(pieces, replicas)
        own = None
        if params is not None:
            own = self._in_rows(cut(full, axis_name), full)
        new, inner, constants = self.leaves.update(
            plan,
            self._in_rows(pieces, full),
            (state.own.tree, state.constants),
            own,
            extra_args,
        )
        new = new[0], buffers.flat(new[1])
        rest, stacks = gather(varying.localize(new, axis_name), full, axis_name)
        after = fields.OwnedState(fields.InPieces(inner), constants, state.numbers)
        after = varying.vary_like(trees.cast_like(after, state), state)
        return checks.fill_missing(plan.join(rest, stacks), params), after

    def _cut(self, tree, axis_name):
        """This replica's pieces, and its whole rows of padded stacks."""
        if axis_name is None:
            rest, stacks = tree
            wide = [x.astype(trees.at_least_float32(x.dtype)) for x in stacks]
            return cut(rest, None), wide
        tree = self._padded(tree, axis_size(axis_name))
        return self._in_rows(cut(tree, axis_name), tree)

    def _padded(self, tree, replicas):
        rest, stacks = tree
        return rest, [owners.padded(x, replicas) for x in stacks]

    def _in_rows(self, pieces, full):
        """The flat pieces of stacks, shaped as the leaves that they hold."""
        rest, stacks = pieces
        rows = [
            owners.reshaped(x, whole.shape[1:])
            for x, whole in zip(stacks, full[1], strict=True)
        ]
        return rest, rows


def _check_unreduced(grads: Grads, reduction: Reduction, shard_state: object) -> None:
    """Refuse options that do not work with `grads="unreduced"`."""
    if grads != "unreduced":
        return
    if reduction == "sum":
        raise ValueError(
            "reduction='sum' has no meaning with grads='unreduced', where the gradient "
            "is that of the loss as written. Leave it out, and sum in the loss."
        )
    if shard_state == "leaves":
        raise ValueError(
            "shard_state='leaves' needs a mapped axis, and with grads='unreduced' "
            "there is none. Use shard_state=True: matrices are whole to `inner` there."
        )


def _require_own(grads: Grads, what: str) -> None:
    """Refuse gradients that are already reduced, where `what` needs local ones."""
    if grads != "local":
        raise ValueError(
            f"{what} needs each replica's own gradient, but grads={grads!r} says that "
            "they are reduced already. Use grads='local', with oxs.localize(params, "
            "axis_name) before jax.grad."
        )


def _check_pieces(replicas: _CrossShard, option: str, coded: bool) -> None:
    """Refuse options that do not work with a state in pieces."""
    if replicas.group_assignment is not None:
        raise ValueError(
            f"shard_state={option} cuts the state over all replicas of the axis and "
            "takes no group_assignment. Use a mesh with an axis per group, and name "
            "that of the replicas inside a group."
        )
    if replicas.exchange.scatter is None and not coded:
        others = ", quantized() or error_feedback(quantized())"
        others = others if option == "True" else ""
        raise ValueError(
            f"shard_state={option} needs an exchange that can stop half way, where "
            "each replica has the sum of its piece; this one cannot. Use "
            f"oxs.exchange.all_reduce(){others}, or leave shard_state={option} out."
        )


def _refuse_center(state: Tree, option: str) -> None:
    """Refuse a center of one worker, `axis_name=None`, of which each owns a piece."""
    if fields.nodes_of(state, lambda x: hasattr(type(x), "center_params")):
        raise ValueError(
            f"shard_state={option} cuts the state of inner, which holds a center: "
            "nothing puts that together again. Put the center rule around: "
            f"oxs.diloco(oxs.cross_shard(tx, 'data', shard_state={option}), None)."
        )


def _check_leaves(replicas: _CrossShard) -> Callable[..., Tree]:
    """The function that scatters gradients to the owners of leaves; no `measure`."""
    _check_pieces(replicas, "'leaves'", coded=False)
    if replicas.measure:
        raise ValueError(
            "shard_state='leaves' cannot be combined with measure=True. Leave one of "
            "them out, or use shard_state=True."
        )
    scatter: Any = replicas.exchange.scatter
    return scatter


def _require_floating(grads: Tree, params: Tree | None) -> None:
    """Refuse integer parameters that have a gradient, since updates get their dtype."""
    found = dict(trees.leaves_with_names(params))
    for path, grad in trees.leaves_with_names(grads):
        if grad is not None and not trees.is_inexact(jnp.result_type(found[path])):
            raise TypeError(
                f"The parameter at {path} has dtype {found[path].dtype}; with "
                "shard_state=True what has a gradient must be floating. Leave it out "
                "with optax.masked, or pass None as its gradient."
            )
