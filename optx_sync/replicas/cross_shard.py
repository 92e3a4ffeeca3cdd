# SPDX-License-Identifier: Apache-2.0
"""All-reduce the gradients of all replicas, or of groups of them, in every step."""

from typing import Any, Literal, NamedTuple

import jax
import optax

from optx_sync.comm import collectives, reduce, varying
from optx_sync.comm.collectives import AxisName, GroupAssignment
from optx_sync.comm.reduce import Reduction
from optx_sync.core import checks, trees
from optx_sync.core.checks import Refused, refuse
from optx_sync.core.programs import Elementwise
from optx_sync.core.trees import Tree
from optx_sync.exchange import contract, measures
from optx_sync.exchange.agree import times
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.landing import Landing, Pieces
from optx_sync.exchange.meeting import Meeting
from optx_sync.replicas import owners
from optx_sync.replicas.landing import OwnedLanding
from optx_sync.state import fields
from optx_sync.state.direct import refuse_unread, take_weight
from optx_sync.state.metrics import Info, or_none

Grads = Literal["local", "summed", "averaged"]
_CALL = "oxs.cross_shard(optax.adam(1e-3), 'data')"


class CrossShardMetrics(NamedTuple):
    """Metrics of `cross_shard`, read by `oxs.metrics`; nothing is sent.

    All but the outliers are equal on all replicas. All but the noise scale, a ratio of
    moving averages, are those of the last step. `None` without `measure=True`.

    Attributes:
        noise_scale: float32[], the gradient noise scale, in examples; below 0 while
            |G|^2, the squared norm of the true gradient, is unknown.
        agreement: float32[], the mean cosine of two replicas' gradients.
        contribution_norm: float32[], the root of the mean square of the gradients'
            norms.
        update_norm: float32[], the norm of what `inner` made of the mean.
        contributors: float32[], replicas of a weight above 0.
        outliers: int32[], with a robust exchange: steps in which this replica's
            gradient lay far from the others' (see `optx_sync.exchange.robust`);
            otherwise `None`.
    """

    noise_scale: jax.Array | None
    agreement: jax.Array | None
    contribution_norm: jax.Array | None
    update_norm: jax.Array | None
    contributors: jax.Array | None
    outliers: jax.Array | None


@fields.WithMetrics.register
@fields.declare(
    exchange=lambda state: fields.OF_SUMS if state.summed else fields.OWN,
    info=fields.INFO,
    inner=lambda state: fields.SHARED if state.cut else fields.LIKE_PARAMS,
    summed=fields.COUNTER,
    cut=fields.COUNTER,
)
class CrossShardState(NamedTuple):
    """State of `cross_shard` where it remembers, counts or measures something.

    Attributes:
        exchange: What the exchange remembers, this replica's own; or ().
        info: What is measured and counted for `oxs.metrics`; no step needs it.
        inner: The state of `inner`; with `shard_state` this replica's pieces.
        summed: Whether the replicas' gradients are added up, `reduction="sum"`, so that
            what the exchange remembers is of sums. It has no array.
        cut: Whether `inner` holds pieces, with `shard_state`. It has no array.
    """

    exchange: Tree
    info: Info
    inner: optax.OptState
    summed: fields.Fact = fields.No()
    cut: fields.Fact = fields.No()

    def metrics(self, params: Tree | None) -> CrossShardMetrics:
        """What `measure=True` measured, and how often this replica was an outlier."""
        del params
        if not jax.tree.leaves(self.info):
            raise ValueError(
                "This cross_shard measures nothing. Pass measure=True to it."
            )
        return CrossShardMetrics(
            **measures.shown(self.info.measured), outliers=or_none(self.info.outliers)
        )


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
    reduce_extra_args: tuple[str, ...] = ("value", "grad"),
    equal_extra_args: tuple[str, ...] = (),
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
            their mean. These two send nothing.
        exchange: How gradients become their mean: gradient compression, or a
            Byzantine-robust mean. `None`: `oxs.exchange.all_reduce()`.
        shard_state: ZeRO-1. `True`: each replica keeps 1/N of the state of an `inner`
            that acts on each number alone, as `optax.adam` does. `"leaves"`: whole
            leaves on their owners, for one that acts on each leaf alone, as
            `optax.contrib.muon` does.
        reduce_extra_args: The names of extra arguments of which `inner` gets the mean.
        equal_extra_args: The names of those that are equal on all replicas. Of others
            functions (but `oxs.value_fn`) and arrays are refused: by what is each
            replica's own their parameters would drift apart.
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
    collectives.check_axis_name(axis_name)
    checks.one_of("reduction", reduction, reduce.Reduction)
    checks.one_of("grads", grads, Grads)
    if group_assignment is not None:
        reduce.check_group_assignment(group_assignment)
    options = _Options(
        inner,
        axis_name,
        reduction,
        group_assignment,
        grads,
        contract.check_exchange(exchange, all_reduce()),
        shard_state,
        reduce.check_extra_args(reduce_extra_args, "reduce_extra_args"),
        reduce.check_extra_args(equal_extra_args, "equal_extra_args"),
        measure,
    )
    refuse(options, _TOGETHER)
    summed = reduction == "sum"
    meeting = Meeting(options.exchange, _landing(options), summed)
    replicas = _CrossShard(options, meeting)
    return optax.GradientTransformationExtraArgs(replicas.init, replicas.update)


# Extra arguments that a link behind the reduced gradients may read.
_OF_LINKS = ("meet", "contributes", "gradient_step", "mask")


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
        own = {name: x for name, x in extra_args.items() if name not in _OF_LINKS}
        reduced, state = tx.update(updates, state, params, **own)
        # So that the next link of the chain sees that there is no gradient.
        return jax.tree.map(
            lambda grad, mean: None if grad is None else mean,
            updates,
            reduced,
            is_leaf=trees.is_gradient_leaf,
        ), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


class _Options(NamedTuple):
    """The checked options of `cross_shard`."""

    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    reduction: Reduction
    group_assignment: GroupAssignment | None
    grads: Grads
    exchange: Exchange
    shard_state: bool | str
    reduced_names: tuple[str, ...]
    equal_names: tuple[str, ...]
    measure: bool

    @property
    def leaves(self) -> bool:
        """Whether whole leaves of the state lie on their owners."""
        return self.shard_state == "leaves"


_REDUCED = (
    " needs each replica's own gradient, but grads={0.grads!r} says that they are "
    "reduced already. Use grads='local', with oxs.localize(params, axis_name) before "
    "jax.grad."
)
_HALF_WAY = (
    "shard_state={0.shard_state!r} needs an exchange that can stop half way, where "
    "each replica has the sum of its piece; this one cannot. Use "
)
_TOGETHER: Refused[_Options] = (
    (
        lambda o: o.shard_state not in (False, True, "leaves"),
        "shard_state must be False, True (pieces of arrays) or 'leaves' (whole ones); "
        "got {0.shard_state!r}.",
    ),
    (
        lambda o: o.grads != "local" and o.exchange is not all_reduce(),
        "An exchange" + _REDUCED,
    ),
    (
        lambda o: o.grads != "local" and o.group_assignment is not None,
        "group_assignment" + _REDUCED,
    ),
    (
        lambda o: o.group_assignment is not None and not o.exchange.exact,
        "group_assignment needs an exchange that takes groups; this one does not. Use "
        "oxs.exchange.all_reduce(), or a mesh with an axis per group.",
    ),
    (lambda o: o.grads != "local" and o.measure, "measure=True" + _REDUCED),
    (
        lambda o: o.shard_state and o.group_assignment is not None,
        "shard_state={0.shard_state!r} cuts the state over all replicas of the axis "
        "and takes no group_assignment. Use a mesh with an axis per group, and name "
        "that of the replicas inside a group.",
    ),
    (
        lambda o: o.leaves and not (o.exchange.exact and o.exchange.scatter),
        _HALF_WAY + "oxs.exchange.all_reduce(), or leave shard_state out.",
    ),
    (
        lambda o: o.shard_state and not o.exchange.scatter,
        _HALF_WAY + "oxs.exchange.all_reduce(), quantized() or "
        "error_feedback(quantized()), or leave shard_state out.",
    ),
    (
        lambda o: o.leaves and o.measure,
        "shard_state='leaves' cannot be combined with measure=True. Leave one of them "
        "out, or use shard_state=True.",
    ),
    (lambda o: o.measure and not o.exchange.exact, contract.INEXACT),
)
_WEIGHED: Refused[_Options] = (
    (lambda o: o.grads != "local", "weight" + _REDUCED),
    (lambda o: o.reduction == "sum", reduce.WEIGHED_SUM),
)


def _landing(options: _Options) -> Landing:
    """Where the mean lands, as `shard_state` says."""
    inner, axis_name = options.inner, options.axis_name
    if not options.shard_state:
        return Landing(axis_name, inner, options.group_assignment)
    axes = collectives.check_axis_name(axis_name)
    option = f"shard_state={options.shard_state!r}"
    around = (
        f"optax.chain(oxs.all_reduce_grads({axis_name!r}), optax.clip_by_global_norm("
        f"1.0), oxs.cross_shard(inner, {axis_name!r}, grads='averaged', {option}))"
    )
    if options.leaves:
        return OwnedLanding(
            axis_name, leaves=owners.Leaves(inner, axes, option, around)
        )
    check = Elementwise(inner, axes, option, around=around)
    size = options.exchange.bucket_bytes
    return Pieces(axis_name, inner, elementwise=check, bucket_bytes=size)


class _CrossShard(NamedTuple):
    """`init` and `update` of `cross_shard`."""

    options: _Options
    meeting: Meeting

    @property
    def keeps(self) -> bool:
        """Whether the state is more than that of `inner`."""
        exchange = self.options.exchange
        counts = exchange.outlier is not None
        return self.options.measure or exchange.remembers or counts

    def init(self, params):
        """The state of a replica before its first step."""
        options = self.options
        checks.check_params(params)

        def own(tree):
            return varying.localize_where_mapped(tree, options.axis_name)

        def in_groups(tree):
            # Their states will differ, so all of the state varies from the start.
            return tree if options.group_assignment is None else own(tree)

        params = in_groups(params)
        inner = in_groups(self.meeting.init(params))
        if not self.keeps:
            return inner
        outliers = contract.start_outliers(options.exchange)
        info = Info(outliers=own(outliers))
        if options.measure:
            measured = measures.start_like(params, options.axis_name)
            info = info._replace(measured=measured)
        return CrossShardState(
            own(options.exchange.init(params)),
            info,
            inner,
            summed=fields.fact(options.reduction == "sum"),
            cut=fields.fact(bool(options.shard_state)),
        )

    def update(
        self, updates, state, params=None, *, weight=None, batch_size=None, **extra_args
    ):
        """The updates of `inner` for the reduced gradients, and the state."""
        options = self.options
        self.check(updates, params, weight)
        take_weight(weight)
        read = "weight", "batch_size"
        refuse_unread("cross_shard", read, extra_args, options.inner, updates, params)
        extra_args = reduce.mean_extra_args(
            extra_args,
            options.reduced_names,
            options.axis_name,
            weight=weight,
            group_assignment=options.group_assignment,
            equal=options.equal_names,
        )
        batch_size = measures.check_batch_size(batch_size)
        before = state if self.keeps else CrossShardState((), Info(), state)
        landing = self.meeting.fit(updates, params, before)
        if options.grads == "local":
            mean, now, _ = self.meeting.agree(
                landing, updates, before, weight=weight, batch_size=batch_size
            )
        else:
            mean, now = landing.share(self.reduced(updates)), before
        new, now = self.meeting.step(landing, mean, now, params, extra_args)
        now = now._replace(info=varying.vary_like(now.info, before.info))
        return checks.fill_missing(new, params), now if self.keeps else now.inner

    def reduced(self, grads: Tree) -> Tree:
        """The mean or sum of all gradients, which the caller has summed or averaged."""
        given, asked = self.options.grads == "summed", self.meeting.summed
        if given == asked:
            return grads
        replicas = collectives.axis_size(self.options.axis_name)
        return times(grads, replicas, divided=given)

    def check(self, grads, params, weight) -> None:
        """Refuse arguments that do not fit."""
        options = self.options
        checks.check_grads(grads, params)
        if weight is not None:
            refuse(options, _WEIGHED)
        if options.grads != "local":
            varying.require_reduced(grads, options.axis_name, options.grads)
        else:
            varying.require_local(grads, options.axis_name, "gradient")
            contract.check_call(options.exchange, grads, weight)
