# SPDX-License-Identifier: Apache-2.0
"""`gossip` and `noloco`: workers that average with partners instead of at a center.

Every worker has a center of its own, which takes the place of the shared one: what its
partners and it hold in the mean, less that center, is what `outer` sees. Where the
graph is complete the centers are equal and this is the exchange of `center/`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center import worker as work
from optx_sync.center.checks import check_step, holds_center
from optx_sync.center.contract import CenterRule, Own, Period, Round, check_period
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_inner, check_params, shows_call
from optx_sync.comm.buffers import Joint, alike, joinable
from optx_sync.comm.collectives import AxisName, axis_index, check_axis_name, permute
from optx_sync.comm.reduce import or_one, own_weight, reduce, weigh
from optx_sync.comm.varying import (
    everywhere,
    localize,
    localize_where_mapped,
    vary_like,
)
from optx_sync.peers.graphs import (
    Graph,
    GraphRound,
    Weight,
    exponential,
    random_pairs,
)
from optx_sync.placement import fields
from optx_sync.step import direct_transformation, landing_update, takes_weight
from optx_sync.trees import (
    Tree,
    at_least_float32,
    check_accumulator_dtype,
    is_finite,
    is_floating,
    is_inexact,
    is_masked,
    where,
)

# Above this many workers the matrices of a cycle are not multiplied out to check it.
_CHECKED_WORKERS = 128


class GossipMetrics(NamedTuple):
    """What `oxs.metrics` reads from `gossip` and `noloco`; nothing is sent."""

    rounds: jax.Array  # int32[], rounds so far
    steps_since_round: jax.Array  # int32[]
    dropped: jax.Array  # int32[], rounds without this worker, with `drop_nonfinite`
    # float32[workers], of each worker from the mean of all: given stacked parameters,
    # else None, as one worker knows its own only.
    distance: jax.Array | None


class OwnCenterState(NamedTuple):
    """State of `gossip`; only the counters are equal on all workers."""

    local_step: jax.Array  # int32[], steps of a worker
    steps_since_round: jax.Array  # int32[]
    global_step: jax.Array  # int32[], rounds
    center: optax.Params  # the worker's own: like the parameters, float32 for half
    outer: optax.OptState  # the worker's own state of `outer`, or ()
    broken: Any  # bool[], it has not been finite since the last round, or ()
    dropped: jax.Array  # int32[], rounds that left this worker out
    inner: optax.OptState

    field_kinds = fields.table(
        local_step=fields.SHARED.told,
        steps_since_round=fields.SHARED.told,
        global_step=fields.SHARED.told,
        center=fields.COPIES,
        outer=fields.LIKE_PARAMS,
        broken=fields.ANEW,
        dropped=fields.OWN_COUNT,
        inner=fields.OWN,
    )

    def center_params(self, params: Tree) -> Tree:
        """The mean of the workers' centers, in the structure and dtypes of `params`.

        Of a state without a worker axis, one worker's, it is that worker's own center.
        """
        stacked = tuple(range(jnp.ndim(self.dropped)))
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else _mean(c, stacked).astype(p.dtype),
            self.center,
            params,
            is_leaf=is_masked,
        )

    def metrics(self, params: Tree | None) -> GossipMetrics:
        """A worker's counters, and with stacked `params` its distance from the mean."""
        distance = None
        if params is not None and jnp.ndim(self.dropped) == 1:
            squares = [
                _square_sums(_wide(x) - _mean(x, (0,))[None])
                for x in jax.tree.leaves(params)
                if is_inexact(x.dtype)
            ]
            distance = jnp.sqrt(sum(squares, jnp.zeros_like(self.dropped, jnp.float32)))
        return GossipMetrics(
            self.global_step, self.steps_since_round, self.dropped, distance
        )


class _Now(NamedTuple):
    """What a round changes: the operands and results of the conditional."""

    worker: Worker
    center: Center
    dropped: Any


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
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralised training: every few steps a worker averages with some others.

    In every step `inner` turns the worker's own gradient into its update. When the
    steps since the last round reach `communication_period`, worker i takes from the
    others what the graph's matrix W of this round says. With s_i its own center, what
    it held after its last round:

    .. math::

        x_i, s_i \leftarrow \text{outer}\Big(s_i,\; s_i - \sum_j W_{ij} x_j\Big)

    one step of `outer` on s_i with that gradient.

    Without `outer` that is sum_j W_ij x_j itself: D-PSGD, adapt then combine. The mean
    of all workers stays what it is in a round, their disagreement shrinks.

    A round is one `collective-permute` (a few for graphs with more partners, a grouped
    all-reduce for `grid`) of the parameters, whole trees joined per dtype, inside a
    conditional: other steps send nothing, and nobody waits for all. Workers that are
    sharded themselves send their shards, leaf by leaf, if the worker axis is manual
    alone (`jax.shard_map(axis_names=...)`); `jax.vmap(spmd_axis_name=...)` makes an
    all-gather of it, N times the bytes.

    One worker is not the model: evaluate `oxs.mean_params(params)`. Where workers meet
    seldom or in pairs their shards of the data should look alike; on shards sorted by
    label a center or an all-reduce is far better.

    It computes `params + updates`, so it stands last in a chain, and `update` needs
    `params`. Start as with `center_variable`. `update` and `apply_gradients` take
    `meet` and `weight` as its do: with weights w_j the mean is sum_j W_ij w_j x_j over
    sum_j W_ij w_j, and a worker that meets weights of 0 alone stays where it is.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
        graph: Who meets whom, one of `oxs.graphs`; `None`: `exponential()`.
        communication_period: Steps between rounds: an int, or a schedule of the
            worker's step, read at the step in which a period begins.
        outer: What makes the step on the worker's own center; `None`: plain averaging,
            as `optax.sgd(1.0)`. A momentum under which workers would drift apart
            without any gradient is refused.
        seed: For graphs that are drawn: equal on all workers. A resumed run draws on.
        drop_nonfinite: A worker whose step would bring a NaN or infinity into its
            parameters does not make it: it stands still until the next round, in which
            it sends nothing, takes the mean of those partners that are well, and starts
            with a fresh inner state. If there is none it goes on from where it stood.
            Two floats more travel.
        accumulator_dtype: The dtype of the own center, and so of what travels. `None`:
            float32 for half precision parameters, else their own. Narrower ones are
            refused: parameters, not differences, would be rounded in each round.

    Returns:
        A transformation with an `OwnCenterState`. `oxs.center_params` of a stacked
        state is the mean of the own centers.

    Raises:
        TypeError: An `inner` that is no transformation, a `graph` that is no `Graph`, a
            bad axis name, parameters that are not floating.
        ValueError: A bad period, a half precision `accumulator_dtype`; in `init` or at
            the call, an `outer` whose momentum is too high, a graph that does not fit
            the number of workers, missing `params`, gradients that autodiff has summed
            already or that do not match the parameters, an axis that is not mapped.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.gossip(optax.sgd(1.0), "workers", graph=oxs.graphs.ring())
        >>> params = jnp.zeros(2)
        >>> axes = oxs.state_axes(tx, params)
        >>> def step(grads, state, params):
        ...     return oxs.apply_gradients(tx, grads, state, params)
        >>> step = jax.vmap(step, (0, axes, 0), (0, axes), axis_name="workers")
        >>> grads = jnp.array([[0.0, 3.0], [3.0, 0.0], [0.0, 0.0], [6.0, 0.0]])
        >>> params, state = step(
        ...     grads, oxs.stack(tx.init(params), 4, axes), oxs.stack(params, 4)
        ... )
        >>> oxs.mean_params(params).round(4)
        Array([-2.25, -0.75], dtype=float32)

    References:
        Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
        2017, arXiv 1705.09056. Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip
        algorithms", 2006.
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
    period = check_period(communication_period)
    dtype = _check_wire(accumulator_dtype)
    if outer is not None:
        outer = check_inner(outer, "oxs.gossip(..., outer=optax.sgd(0.7, 0.5))")
    rule = CenterRule(_moved if outer is None else _moved_back, outer)
    static_period = None if callable(period) else period

    def init(params):
        check_params(params)
        if graph.choose == "draw":
            _check_pairs(outer)

        def own(tree):
            # A worker's own fields vary over the axis from the start.
            return localize_where_mapped(tree, axis_name)

        center, within = work.start_center(params, dtype), inner.init(params)
        _refuse_center(within)
        return OwnCenterState(
            local_step=jnp.zeros((), jnp.int32),
            steps_since_round=jnp.zeros((), jnp.int32),
            global_step=jnp.zeros((), jnp.int32),
            center=own(center),
            outer=own(() if outer is None else outer.init(center)),
            broken=own(jnp.bool_(False)) if drop_nonfinite else (),
            dropped=own(jnp.zeros((), jnp.int32)),
            inner=own(within),
        )

    def apply(grads, state, params, *, meet=None, weight=None, **extra_args):
        """One step that returns parameters."""
        num_workers = check_step(grads, state, params, axis_name)
        rounds = graph.rounds(num_workers)
        if graph.choose == "cycle":
            _check_cycle(outer, graph, num_workers)
        steps = state.steps_since_round + 1
        at = Round(num_workers, static_period, steps)
        before = Worker(params, state.inner, (), ())
        passed = extra_args if weight is None else {**extra_args, "weight": weight}
        worker = work.walk(inner, rule, before, state.center, grads, at, **passed)
        # A leaf may have lost its type inside `inner` (a constant, a fresh counter).
        worker = localize(worker, axis_name)
        worker = worker._replace(params=vary_like(worker.params, params))
        weight = None if takes_weight(inner) else own_weight(weight, axis_name)
        well = None
        if drop_nonfinite:
            finite = everywhere(is_finite(worker.params), params, axis_name)
            well = ~(state.broken | ~finite)
            worker = work.stand_still(before, worker, ~well)
            weight = jnp.float32(1) if weight is None else weight
            weight = jnp.where(well, weight, jnp.zeros_like(weight))
            weight = localize(weight, axis_name)

        def meeting(now: _Now) -> _Now:
            """A round."""
            if _complete(rounds):
                # All centers are equal, and what was moved is all that need travel.
                worker, move = work.bring(rule, now.worker, now.center.value, at)
                total = reduce(localize(move, axis_name), axis_name, weight=weight)
            else:
                own_x = work.as_center(now.worker.params, now.center.value)
                k = _chosen(graph, len(rounds), seed, state.global_step)
                mixed = _mix(own_x, weight, rounds, k, axis_name)
                worker, total = work.bring(
                    rule, now.worker._replace(params=mixed), now.center.value, at
                )
            center = work.absorb(rule, now.center, total)
            worker = work.take(
                rule,
                worker._replace(params=now.worker.params),
                now.center.value,
                center.value,
                at,
            )
            dropped = now.dropped
            if well is not None:
                worker = work.mend(inner, worker, center.value, well)
                dropped = dropped + (~well).astype(jnp.int32)
            return vary_like(_Now(worker, center, dropped), now)

        now = _Now(worker, Center(state.center, state.outer), state.dropped)
        due = meet
        if meet is None:
            due = work.is_due(period, steps, state.local_step)
        if isinstance(due, bool):
            now = meeting(now) if due else now
        else:
            now = jax.lax.cond(due, meeting, lambda now: now, now)
        due = jnp.asarray(due)
        return now.worker.params, OwnCenterState(
            local_step=state.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
            global_step=state.global_step + due.astype(jnp.int32),
            center=now.center.value,
            outer=now.center.outer,
            broken=() if well is None else ~well & ~due,
            dropped=now.dropped,
            inner=now.worker.inner,
        )

    return direct_transformation(init, landing_update(apply), apply, period)


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
    r"""DiLoCo without an all-reduce: an outer step on the mean of a random pair.

    Every `communication_period` steps worker i meets one other, j, drawn anew. With s_i
    its own center, which it held after its last round:

    .. math::

        x_i, s_i \leftarrow \text{outer}\Big(s_i,\; s_i - \frac{x_i + x_j}{2}\Big)

    one step of `outer` on s_i with that gradient.

    It is `oxs.gossip` on `oxs.graphs.random_pairs()`. The released program sends two
    arrays, the center and what the worker moved; with its settings, where the pull to
    the partner is as strong as the outer step, their sum is what is sent here. No
    round waits for all; a worker sends its parameters once, an all-reduce about twice.

    The outer momentum must be lower than DiLoCo's: workers drift apart under a heavy
    ball of 0.9, gradients or not, and so an `outer` that is not stable is refused. The
    shards of the workers should look alike; evaluate `oxs.mean_params(params)`.

    Args:
        inner: The worker's own optimizer.
        axis_name: The mapped axis along which the workers lie, or a tuple of them.
        outer: See `gossip`; `None`: SGD with rate 0.7 and (heavy ball) momentum 0.5.
        communication_period: Steps between rounds, as for `gossip`.
        seed: For the pairs.
        drop_nonfinite: See `gossip`.

    Returns:
        The transformation; it stands last in a chain.

    Raises:
        TypeError: What `gossip` refuses.
        ValueError: In `init`, an `outer` whose momentum is too high for pairs; and what
            `gossip` refuses.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.noloco(optax.adamw(1e-3), "workers", communication_period=100)
        >>> [oxs.due(tx, step) for step in (98, 99)]
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


def mean_params(params: Tree) -> Tree:
    """The mean over the workers: the model, where there is no center.

    Args:
        params: The parameters of all workers, leaves [workers, ...].

    Returns:
        Their mean, leaves [...] in their dtypes, summed in float32 at least. Of leaves
        that are not floating, which no worker averages, it is the first worker's.

    Raises:
        ValueError: A leaf has no worker axis.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> oxs.mean_params({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])})
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


def _moved(own: Own, center: Any, at: Round) -> Any:
    """What is added to a center for plain averaging."""
    return own.params - own.taken


def _moved_back(own: Own, center: Any, at: Round) -> Any:
    """What an outer optimizer sees: Optax negates it."""
    return own.taken - own.params


def _complete(rounds: Sequence[GraphRound]) -> bool:
    """Whether everyone meets everyone in each of these rounds."""
    return all(r.groups is not None and len(r.groups) == 1 for r in rounds)


def _chosen(graph: Graph, rounds: int, seed: int, global_step: jax.Array) -> Any:
    """The place of this round's graph: equal on all workers, and after a resume."""
    if rounds == 1:
        return 0
    if graph.choose == "cycle":
        return global_step % rounds
    # Not the user's choice of generator, which a resumed run might have changed.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), global_step)
    return jax.random.randint(key, (), 0, rounds)


def _mix(
    own_x: Tree,
    weight: jax.Array | None,
    rounds: Sequence[GraphRound],
    k: Any,
    axis_name: AxisName,
) -> Tree:
    """What this worker and its partners hold in the mean, of those that have weight."""
    sent, treedef = jax.tree.flatten(own_x)
    if weight is not None:
        # The 1 comes back as the sum of the graph's own weights, rounded as they are.
        sent = [*(weigh(x, weight) for x in sent), weight, jnp.ones_like(weight)]
    # Joined, as a program with many partners would otherwise hold many permutes.
    kind = joinable()
    # What is not joined keeps its shape.
    flat = [x.reshape(-1) if kind is alike or not x.ndim else x for x in sent]
    joint = Joint(flat, kind)
    joined = joint.join(flat)
    branches = [functools.partial(_meet, r, axis_name) for r in rounds]
    if len(branches) == 1:
        joined = branches[0](joined)
    else:
        joined = jax.lax.switch(k, branches, joined)
    got = list(map(jnp.reshape, joint.cut(joined), [x.shape for x in sent]))
    if weight is not None:
        *sums, mass, one = got
        share = one / or_one(mass)
        got = [total * share.astype(total.dtype) for total in sums]
        got = where(mass > 0, got, jax.tree.leaves(own_x))
    return treedef.unflatten(got)


def _meet(
    round_: GraphRound, axis_name: AxisName, arrays: list[jax.Array]
) -> list[jax.Array]:
    """One round of arrays: the rows of its matrix that are this worker's."""
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


def _own_weight(weight: Weight, dtype: Any, axis_name: AxisName) -> Any:
    if isinstance(weight, tuple):
        return jnp.asarray(weight, dtype)[axis_index(axis_name)]
    return jnp.asarray(weight, dtype)


def _refuse_center(state: Any) -> None:
    """Refuse a center rule inside: its center would not move with the parameters."""
    if holds_center(state):
        raise ValueError(
            "There is a center rule in `inner`, whose center would not move when "
            "partners move the parameters. Pass its own inner optimizer; to meet in "
            "groups and between them use oxs.graphs.grid(m)."
        )


def _check_wire(dtype: Any) -> Any:
    dtype = check_accumulator_dtype(dtype)
    if dtype is not None and at_least_float32(dtype) != dtype:
        raise ValueError(
            f"accumulator_dtype={dtype} would send parameters in {dtype}, which rounds "
            "them anew in every round until small differences are gone. Leave it out: "
            "half precision parameters then travel in float32."
        )
    return dtype


def _momentum_of(outer: optax.GradientTransformation | None) -> Any:
    """(rate, momentum, nesterov) of an SGD, found out by four steps; None if other."""
    if outer is None:
        return None

    def response(first: float) -> np.ndarray:
        param = jnp.zeros((), jnp.float32)
        state, seen = outer.init(param), []
        for gradient in (first, 0.0, 0.0, 0.0):
            update, state = outer.update(jnp.float32(gradient), state, param)
            seen.append(-float(jnp.asarray(update)))
        return np.array(seen)

    # Outside of what is traced and mapped here, and as Optax expects it.
    with jax.core.eval_context(), jax.numpy_dtype_promotion("standard"):
        try:
            once, twice = response(1.0), response(2.0)
        except jax.errors.UnexpectedTracerError:
            return None  # An injected hyper-parameter: not known here.
    if not np.allclose(2 * once, twice, rtol=1e-4):
        return None
    momentum = once[2] / once[1] if once[1] else 0.0
    for nesterov in (False, True):
        weights = momentum ** np.arange(4.0)
        if nesterov:
            weights = np.array([1 + momentum, *(momentum * weights[1:])])
        rate = once[0] / weights[0]
        if np.allclose(once, rate * weights, rtol=1e-3, atol=1e-6):
            return float(rate), float(momentum), nesterov
    return None


def _pairs_growth(rate: float, momentum: float, nesterov: bool) -> float:
    """By what a round of random pairs multiplies the squared disagreement.

    Of many workers, where a partner's place is independent of one's own: with z = (s,
    t), s the center and t the trace of one coordinate, z <- A z + B (partner's z), and
    the second moments of z go by A x A + B x B.
    """
    own, other = np.array([0.5, 0.0]), np.array([-0.5, 0.0])  # the gradient
    trace = np.array([0.5, momentum]), other
    step = trace
    if nesterov:
        step = own + momentum * trace[0], other + momentum * trace[1]
    a = np.stack([np.array([1.0, 0.0]) - rate * step[0], trace[0]])
    b = np.stack([-rate * step[1], trace[1]])
    return float(max(abs(np.linalg.eigvals(np.kron(a, a) + np.kron(b, b)))))


def _cycle_growth(
    matrices: np.ndarray, rate: float, momentum: float, nesterov: bool
) -> float:
    """By what a cycle of rounds multiplies the disagreement, in the long run."""
    n = matrices.shape[1]
    one, alone = np.eye(n), np.eye(n) - 1 / n  # `alone` takes the mean away.
    whole = np.eye(2 * n)
    for matrix in matrices:
        gradient = (one - matrix) @ alone
        trace = np.hstack([gradient, momentum * one])
        step = trace
        if nesterov:
            step = np.hstack([gradient, 0 * one]) + momentum * trace
        whole = np.vstack([np.hstack([alone, 0 * one]) - rate * step, trace]) @ whole
    return float(max(abs(np.linalg.eigvals(whole))))


def _check_pairs(outer: optax.GradientTransformation | None) -> None:
    momentum = _momentum_of(outer)
    if momentum is not None:
        _require_stable(_pairs_growth(*momentum), momentum, "random pairs")


def _check_cycle(
    outer: optax.GradientTransformation | None, graph: Graph, workers: int
) -> None:
    momentum = _momentum_of(outer)
    if momentum is not None and 1 < workers <= _CHECKED_WORKERS:
        growth = _cycle_growth(graph.matrices(workers), *momentum)
        _require_stable(growth, momentum, f"this graph of {workers} workers")


def _require_stable(growth: float, momentum: tuple, what: str) -> None:
    rate, beta, nesterov = momentum
    if growth > 1 + 1e-3:
        kind = "Nesterov momentum" if nesterov else "momentum"
        raise ValueError(
            f"With {what}, an outer rate of {rate:.3g} and {kind} {beta:.3g} the "
            "workers drift apart even without gradients: their disagreement grows. "
            "Pass a lower momentum, outer=optax.sgd(0.7, momentum=0.5) for example."
        )


def _square_sums(x: jax.Array) -> jax.Array:
    """float32[workers], of leaves [workers, ...]."""
    return jnp.sum(jnp.square(jnp.abs(x)).astype(jnp.float32), range(1, x.ndim))


def _mean(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.mean(_wide(x), axis=axes)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype)) if is_floating(x.dtype) else x
