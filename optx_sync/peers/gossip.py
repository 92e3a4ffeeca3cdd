# SPDX-License-Identifier: Apache-2.0
"""Gossip (`gossip`, `noloco`): workers average with partners, without a center.

Every worker has a center of its own instead of a shared one: `outer` sees how far that
center lies from the mean of the worker and its partners. On a complete graph the
centers are equal, and a round is one of `center/`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optx_sync.center import worker as work
from optx_sync.center.checks import Options, refuse_hidden_center
from optx_sync.center.contract import Period, check_period
from optx_sync.center.fragments import Partition
from optx_sync.center.lockstep import Lockstep, meeting_of
from optx_sync.center.round import (
    CenterRounds,
    RoundState,
    Turn,
    left_out,
    moved_center,
    outer_args,
    weight_of,
)
from optx_sync.center.rules.diloco import diloco_rule
from optx_sync.center.rules.local_sgd import local_sgd_rule
from optx_sync.center.state import CenterState, norm_of
from optx_sync.center.worker import Center
from optx_sync.comm.buffers import Joint, alike, joinable, wide
from optx_sync.comm.collectives import (
    AxisName,
    axis_index,
    check_axis_name,
    permute,
)
from optx_sync.comm.reduce import reduce, weigh, weight_divisor
from optx_sync.comm.varying import localize_where_mapped, vary_like
from optx_sync.core.checks import (
    Refused,
    check_inner,
    check_seed,
    floating,
    refuse,
    shows_call,
)
from optx_sync.core.shapes import Array, Float, Int32
from optx_sync.core.signatures import readable as _readable
from optx_sync.core.trees import (
    Tree,
    at_least_float32,
    is_inexact,
    is_masked,
)
from optx_sync.exchange.agree import SCOPE
from optx_sync.exchange.all_reduce import all_reduce
from optx_sync.exchange.meeting import MeetingState
from optx_sync.peers.graphs import Graph, GraphRound, Weight, exponential, random_pairs
from optx_sync.peers.stability import check_cycle, check_pairs
from optx_sync.state import fields
from optx_sync.state.direct import Direct, direct_transformation


class GossipMetrics(NamedTuple):
    """Metrics of `gossip` and `noloco`, read by `oxs.metrics`; nothing is sent.

    Attributes:
        rounds: int32[], rounds so far.
        steps_since_round: int32[], steps since the last round.
        dropped: int32[], rounds without this worker; 0 without `drop_nonfinite`. [N] in
            a stacked state.
        distance: float32[N], the distance of each worker's parameters from the mean of
            all, given stacked parameters; else `None`, since one worker knows only its
            own.
    """

    rounds: Int32[Array, ""]
    steps_since_round: Int32[Array, ""]
    dropped: Int32[Array, ""]
    distance: Float[Array, " workers"] | None


@fields.declare(
    local_step=fields.SHARED.not_a_slot,
    steps_since_round=fields.SHARED.not_a_slot,
    global_step=fields.SHARED.not_a_slot,
    center=fields.COPIES,
    outer=fields.LIKE_PARAMS,
)
class OwnCenterState(CenterState):
    """State of `gossip`: that of a center rule, with a center of each worker's own.

    Only the counters are equal on all workers.
    """

    __slots__ = ()

    def center_params(self, params: Tree) -> Tree:
        """The mean of the workers' centers, in the structure and dtypes of `params`.

        In a state of one worker, without a worker axis, it is that worker's own center.
        """
        stacked = tuple(range(jnp.ndim(self.info.dropped)))
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else _mean(c, stacked).astype(p.dtype),
            self.center,
            params,
            is_leaf=is_masked,
        )

    def metrics(  # pyright: ignore[reportIncompatibleMethodOverride] # it has other fields
        self, params: Tree | None
    ) -> GossipMetrics:
        """A worker's counters, and with stacked `params` its distance from the mean."""
        distance = None
        if params is not None and jnp.ndim(self.info.dropped) == 1:
            leaves = [x for x in jax.tree.leaves(params) if is_inexact(x.dtype)]
            apart = [wide(x) - _mean(x, (0,))[None] for x in leaves]
            distance = norm_of(apart, 1)
        return GossipMetrics(
            self.global_step, self.steps_since_round, self.info.dropped, distance
        )


_TOGETHER: Refused[Options] = (
    (
        lambda o: o.dtype is not None and at_least_float32(o.dtype) != o.dtype,
        "accumulator_dtype={0.dtype} would send parameters in {0.dtype}, which rounds "
        "them anew in every round until small differences are gone. Leave it out: half "
        "precision parameters then travel in float32.",
    ),
)


@shows_call(
    "oxs.gossip(optax.sgd(0.1), 'workers'), without exchange=: partners send their "
    "parameters as they are"
)
def gossip(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    graph: Graph | None = None,
    communication_period: Period = 1,
    outer: optax.GradientTransformation | None = None,
    seed: int = 0,
    drop_nonfinite: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralised model averaging: a worker averages with some others now and then.

    In every step `inner` turns the worker's own gradient into its update. When the
    steps since the last round reach `communication_period`, worker i averages with the
    partners that the graph's matrix W of this round names. With s_i its own center, the
    parameters that it held after its last round:

    .. math::

        x_i, s_i \leftarrow \text{outer}\Big(s_i,\; s_i - \sum_j W_{ij} x_j\Big)

    one step of `outer` on s_i with that gradient. Without `outer` the result is
    `sum_j W_ij x_j` itself: D-PSGD. A round preserves the mean of all workers, shrinks
    their disagreement, and is a few `collective-permute` (a grouped all-reduce for
    `grid`); other steps send nothing.

    One worker's parameters are not the model: evaluate
    `oxs.by_hand.mean_params(params)`. It computes `params + updates`, so it stands last
    in a chain, and `update` needs `params`. `update` and `apply_gradients` take `meet`
    and `weight` as those of `center_variable` do: with weights w_j the mean is `sum_j
    W_ij w_j x_j` over `sum_j W_ij w_j`.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
        graph: Who meets whom, one of `oxs.graphs`; `None`: `exponential()`.
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step, read where a period begins.
        outer: The optimizer that steps the worker's own center; `None`: plain
            averaging. A momentum under which workers would drift apart is refused.
        seed: For random graphs: equal on all workers.
        drop_nonfinite: A worker that would become NaN or infinite stands still until
            the next round, sends nothing in it, takes the mean of its healthy partners
            (its own center without one), and starts again with a fresh inner state.
        accumulator_dtype: The dtype of the worker's own center, and so of what travels.
            `None`: float32 for half precision parameters, else their own.

    Returns:
        A transformation with an `OwnCenterState`. `oxs.center_params` of a stacked
        state is the mean of the own centers.

    Raises:
        TypeError: Arguments of a wrong type, parameters that are not floating.
        ValueError: A bad period, a half precision `accumulator_dtype`; in `init` or at
            the call, an `outer` whose momentum is too high, a graph that does not fit
            the number of workers, missing `params`, gradients that autodiff has already
            summed or that do not match the parameters, an axis that is not mapped.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.gossip(optax.sgd(1.0), "workers", graph=oxs.graphs.ring())
        >>> params = jnp.zeros(2)
        >>> axes = oxs.by_hand.state_axes(tx, params)
        >>> def step(grads, state, params):
        ...     return oxs.apply_gradients(tx, grads, state, params)
        >>> step = jax.vmap(step, (0, axes, 0), (0, axes), axis_name="workers")
        >>> grads = jnp.array([[0.0, 3.0], [3.0, 0.0], [0.0, 0.0], [6.0, 0.0]])
        >>> params, state = step(
        ...     grads,
        ...     oxs.by_hand.replicate(tx.init(params), 4, axes),
        ...     oxs.by_hand.replicate(params, 4),
        ... )
        >>> oxs.by_hand.mean_params(params).round(4)
        Array([-2.25, -0.75], dtype=float32)

    References:
        Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A
        Case Study for Decentralized Parallel Stochastic Gradient Descent", 2017, arXiv
        1705.09056. Boyd et al., "Randomized gossip algorithms", 2006.
    """
    call = "oxs.gossip(optax.sgd(0.1), 'workers', graph=oxs.graphs.ring())"
    inner = check_inner(inner, call)
    check_axis_name(axis_name)
    graph = exponential() if graph is None else graph
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be one of oxs.graphs, or an oxs.graphs.Graph; got {graph!r}. "
            f"Write for example {call}."
        )
    rule = local_sgd_rule()
    if outer is not None:
        outer = check_inner(outer, "oxs.gossip(..., outer=optax.sgd(0.7, 0.5))")
        rule = diloco_rule(outer)
    options = Options(
        inner,
        rule,
        axis_name,
        check_period(communication_period),
        all_reduce(),
        floating("accumulator_dtype", accumulator_dtype),
        drop_nonfinite=drop_nonfinite,
    )
    refuse(options, _TOGETHER)
    together = CenterRounds(options, meeting_of(options))
    lockstep = Lockstep(Mixing(options, together, graph, check_seed(seed)))

    def init(params):
        state = OwnCenterState(*lockstep.init(params))
        refuse_hidden_center(state.inner)
        # A worker's own fields vary over the axis from the start.
        own = localize_where_mapped((state.center, state.outer), axis_name)
        return state._replace(center=own[0], outer=own[1])

    return direct_transformation(init, Direct(lockstep.apply, options.period))


@shows_call(
    "oxs.noloco(optax.adamw(1e-3), 'workers'), without exchange=: partners send their "
    "parameters as they are"
)
def noloco(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    outer: optax.GradientTransformation | None = None,
    communication_period: Period = 50,
    seed: int = 0,
    drop_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""NoLoCo, DiLoCo without an all-reduce: outer steps on means of random pairs.

    Every `communication_period` steps worker i meets one other worker j, drawn anew.
    With s_i its own center, the parameters that it held after its last round:

    .. math::

        x_i, s_i \leftarrow \text{outer}\Big(s_i,\; s_i - \frac{x_i + x_j}{2}\Big)

    one step of `outer` on s_i with that gradient.

    This is `oxs.gossip` on `oxs.graphs.random_pairs()`. The authors' program sends two
    arrays, the center and what the worker moved. With its settings, where the pull to
    the partner is as strong as the outer step, only their sum matters, and that is sent
    here. No round waits for all workers; a worker sends its parameters once, where an
    all-reduce sends them about twice.

    The outer momentum must be lower than DiLoCo's: under a heavy ball momentum of 0.9
    workers drift apart even without gradients, so an unstable `outer` is refused. The
    workers' shards of the data should look alike. Evaluate
    `oxs.by_hand.mean_params(params)`.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
        outer: See `gossip`; `None`: SGD of rate 0.7 and (heavy ball) momentum 0.5.
        communication_period: Steps between rounds, as for `gossip`.
        seed: For the pairs.
        drop_nonfinite: See `gossip`.

    Returns:
        The transformation; it stands last in a chain.

    Raises:
        TypeError: For the reasons of `gossip`.
        ValueError: In `init`, an `outer` whose momentum is too high for pairs; for
            the reasons of `gossip`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.noloco(optax.adamw(1e-3), "workers", communication_period=100)
        >>> [oxs.by_hand.due(tx, step) for step in (98, 99)]
        [False, True]

    References:
        Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for
        Large Models", 2025, arXiv 2506.10911.
    """
    return gossip(
        inner,
        axis_name,
        graph=random_pairs(),
        communication_period=communication_period,
        outer=optax.sgd(0.7, momentum=0.5) if outer is None else outer,
        seed=seed,
        drop_nonfinite=drop_nonfinite,
    )


class Mixing(NamedTuple):
    """Rounds of a worker and its partners in a graph."""

    options: Options
    together: CenterRounds  # the rounds of a graph in which all meet all
    graph: Graph
    seed: int

    def start(self, parts: Partition, center: Tree) -> tuple[Center, Tree]:
        """(the worker's own center, what the exchange remembers)."""
        if self.graph.choose == "draw":
            check_pairs(self.options.rule.outer)
        return self.together.start(parts, center)

    def meet(self, now: RoundState, turn: Turn, part: int) -> RoundState:
        """The round of this worker and its partners."""
        rounds = self.graph.rounds(turn.num_workers)
        if all(r.groups is not None and len(r.groups) == 1 for r in rounds):
            # All centers are equal, so the workers can send what they moved.
            return self.together.meet(now, turn, part)
        options, center = self.options, now.center
        if self.graph.choose == "cycle":
            check_cycle(options.rule.outer, self.graph, turn.num_workers)
        x = work.as_center(now.worker.params, center.value)
        now = left_out(options, now, turn, x)
        weight = weight_of(now, turn)
        branches = [functools.partial(_mixed, r, options.axis_name) for r in rounds]
        chosen = self._chosen(len(rounds), turn.rounds)
        with jax.named_scope(SCOPE):
            mean, mass = _mean_of_partners(x, weight, branches, chosen)
        sent = work.contribute(
            options.rule, mean, center.value, (), center.value, turn.at
        )
        meeting = self.together.meeting
        move, met = meeting.step(
            meeting.landing,
            sent,
            MeetingState((), now.info, center.outer),
            center.value,
            outer_args(options, turn, weight),
        )
        after = moved_center(center, move, met.inner, mass, weight)
        worker = work.take(options.rule, now.worker, center.value, after.value, turn.at)
        return now._replace(worker=worker, center=after)

    def _chosen(self, rounds: int, global_step: jax.Array) -> Any:
        """This round's place in the graph: equal on all workers, and after a resume."""
        if rounds == 1:
            return 0
        if self.graph.choose == "cycle":
            return global_step % rounds
        # A fixed generator: JAX's default may differ in a resumed run.
        key = jax.random.key(self.seed, impl="threefry2x32")
        return jax.random.randint(jax.random.fold_in(key, global_step), (), 0, rounds)


def _mean_of_partners(
    x: Tree, weight: jax.Array | None, branches: Sequence[Any], chosen: int | jax.Array
) -> tuple[Tree, Any]:
    """(the mean of a worker and its partners, the sum of their weights or ())."""
    sent, treedef = jax.tree.flatten(x)
    if weight is not None:
        # The 1 comes back as the sum of the graph's weights, rounded like the others.
        sent = [*(weigh(x, weight) for x in sent), weight, jnp.ones_like(weight)]
    # Joined, or a program with many partners would hold many permutes.
    kind = joinable()
    # Arrays that are not joined keep their shapes.
    flat = [x.reshape(-1) if kind is alike or not x.ndim else x for x in sent]
    joint = Joint(flat, kind)
    joined = jax.lax.switch(chosen, branches, joint.join(flat))
    got = list(map(jnp.reshape, joint.cut(joined), [x.shape for x in sent]))
    if weight is None:
        return treedef.unflatten(got), ()
    *sums, mass, one = got
    share = one / weight_divisor(mass)
    return treedef.unflatten(x * share.astype(x.dtype) for x in sums), mass


def _mixed(
    round_: GraphRound, axis_name: AxisName, arrays: list[jax.Array]
) -> list[jax.Array]:
    """One round for a list of arrays: this worker's row of the mixing matrix."""
    if round_.groups is not None:
        groups = [list(group) for group in round_.groups]
        means = reduce(
            arrays, axis_name, group_assignment=groups if len(groups) > 1 else None
        )
        return vary_like(means, arrays)

    def mixed(x):
        total = x * _own_weight(round_.own, x.dtype, axis_name)
        for take in round_.takes:
            theirs = permute(x, axis_name, take.source)
            total = total + theirs * _own_weight(take.weight, x.dtype, axis_name)
        return total

    return [mixed(x) for x in arrays]


def _own_weight(weight: Weight, dtype: DTypeLike | None, axis_name: AxisName) -> Any:
    if isinstance(weight, tuple):
        return jnp.asarray(weight, dtype)[axis_index(axis_name)]
    return jnp.asarray(weight, dtype)


def mean_params(params: Tree) -> Tree:
    """The mean over the workers: the model to evaluate where there is no center.

    Args:
        params: The parameters of all workers, leaves [workers, ...].

    Returns:
        Their mean, leaves [...] in their dtypes, summed in float32 at least. Leaves
        that are not floating are not averaged: those of the first worker.

    Raises:
        ValueError: A leaf has no worker axis.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> oxs.by_hand.mean_params({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])})
        {'w': Array([2., 4.], dtype=float32)}
    """

    def mean(x):
        if jnp.ndim(x) == 0:
            raise ValueError(
                "mean_params needs the parameters of all workers, with a worker axis "
                "in front; got a scalar. Inside of a mapped function use oxs.reduce."
            )
        x = jnp.asarray(x)
        return _mean(x, (0,)).astype(x.dtype) if is_inexact(x.dtype) else x[0]

    return jax.tree.map(mean, params)


def _mean(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.mean(wide(x), axis=axes)


_readable(globals())
