# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous gossip (AD-PSGD): workers that average in pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync.center import worker as work
from optx_sync.center.contract import (
    CenterRule,
    Period,
    Round,
    check_period,
    static_period,
)
from optx_sync.center.worker import Worker
from optx_sync.checks import (
    check_function,
    check_grads,
    check_inner,
    check_seed,
    integer,
)
from optx_sync.peers.gossip import mean_params
from optx_sync.placement.workers import replicate
from optx_sync.shapes import Array, Int32
from optx_sync.simulate.replay import (
    GradFn,
    Record,
    check_workers,
    replay,
)
from optx_sync.trees import Tree, row_of, where, with_row

# A worker's own steps are those of a rule that accumulates nothing.
_ALONE = CenterRule(lambda own, center, at: own.params, reads=("params",))


class GossipWorkers(NamedTuple):
    """State of one worker; of all workers with a worker axis in front, [N, ...]."""

    params: Tree
    read: Tree  # the parameters at which its next gradient is computed
    inner: Tree  # state of the workers' own optimizer
    local_step: Int32[Array, ""]  # its steps
    steps_since_round: Int32[Array, ""]


class GossipRecord(NamedTuple):
    """The history of T events; each array has the values after the event."""

    # [K, ...] each, for the K events that `record` keeps; None if it is a function.
    params: Tree  # those of the worker that stepped
    mean: Tree  # their mean over all workers
    events: Int32[Array, " kept"]  # the numbers of these events, from 0
    local_step: Int32[Array, " events"]  # steps of the event's worker so far
    meetings: Int32[Array, " events"]  # meetings of two workers so far
    # [T, ...], the result of the function `record` after each event; None without one.
    recorded: Tree
    final: GossipWorkers  # after the last event


class _Machine(NamedTuple):
    workers: GossipWorkers  # [N, ...]
    last: Int32[Array, ""]  # the worker that stepped
    meetings: Int32[Array, ""]


def gossip(
    inner: optax.GradientTransformation,
    params: optax.Params,
    grad_fn: GradFn,
    workers: ArrayLike | Sequence[int],
    partners: ArrayLike | Sequence[int] | None = None,
    *,
    num_workers: int,
    communication_period: Period = 1,
    seed: int = 0,
    record: Record = None,
) -> GossipRecord:
    r"""Simulate asynchronous gossip (AD-PSGD): workers that average in pairs.

    An event is the end of a step of the worker w that `workers` names. `inner` turns
    its gradient into its update. When its steps since the last meeting in its own turn
    reach `communication_period`, it averages its parameters with the partner p:

    .. math::

        x_w \leftarrow x_w + \text{update}(\text{gradient at } y_w), \qquad
        x_w, x_p \leftarrow \frac{x_w + x_p}{2}

    Then the worker begins its next step: y_w <- x_w. So y_w are its parameters at the
    beginning of the step: if others have met it since, its gradient is that of older
    parameters, as in a real run. The partner goes on with its own step. A meeting is
    atomic and preserves the mean over all workers.

    The lockstep form is `oxs.gossip`. As there, evaluate the mean over all workers.

    Args:
        inner: The workers' own optimizer.
        params: The parameters at which all start, without a worker axis.
        grad_fn: `(worker, params, event) -> gradients`, traced; `worker` and `event`
            are int32 scalars. Leaves may be `IndexedSlices` or `None`.
        workers: int[T], the worker whose step ends at each event. If it is traced, a
            number that names no worker cannot be refused, and its event changes
            nothing.
        partners: int[T], the worker that it may meet at each event; its own number for
            none. `None`: one of the others, drawn uniformly at each event.
        num_workers: N.
        communication_period: A worker's steps between the meetings in its own turn: an
            int, or a schedule of its own step (0-based).
        seed: The seed for drawing partners.
        record: As for `asynchronous`, of (params, mean). The mean over all workers is
            computed for each event that is kept: with many workers pass an int.

    Returns:
        A `GossipRecord`.

    Raises:
        TypeError: `inner` is not a transformation; `workers` or `partners` are not
            integers; a number or `record` has the wrong type; gradients or parameters
            are not floating.
        ValueError: `workers` or `partners` has a number outside 0 ... N - 1 or is not
            one-dimensional; their lengths differ; `num_workers` or a period is below 1;
            gradients do not match the parameters.

    Example:
        Three workers in a line, each with its own target:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> target = jnp.array([0.0, 3.0, 6.0])
        >>> run = oxs.simulate.gossip(
        ...     optax.sgd(0.02),
        ...     jnp.zeros(()),
        ...     lambda worker, params, event: params - target[worker],
        ...     workers=jnp.array([0, 1, 2] * 200),
        ...     partners=jnp.array([1, 2, 1] * 200),
        ...     num_workers=3,
        ...     record=300,
        ... )
        >>> [f"{mean:.1f}" for mean in run.mean], int(run.meetings[-1])
        (['2.6', '3.0'], 600)

    References:
        Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic
        Gradient Descent", 2018, arXiv 1710.06952.
    """
    call = "oxs.simulate.gossip(optax.sgd(0.1), params, grad_fn, workers, ...)"
    inner = check_inner(inner, call)
    check_function("grad_fn", grad_fn, "It takes (worker, params, event).")
    num_workers = integer("num_workers", num_workers, "Pass for example 8.")
    period = check_period(communication_period)
    workers, seed = check_workers(workers, num_workers), check_seed(seed)
    if partners is None:
        # A fixed generator: the draws do not depend on the user's default generator.
        key = jax.random.key(seed, impl="threefry2x32")
        ahead = jax.random.randint(key, workers.shape, 1, max(num_workers, 2))
        partners = (workers + ahead) % num_workers
    partners = check_workers(partners, num_workers, "partners")
    if partners.shape != workers.shape:
        raise ValueError(
            "partners must name one for each event, itself for nobody; got "
            f"{len(partners)} for the {len(workers)} events of workers."
        )
    run = _Run(inner, period, num_workers, grad_fn)
    pairs = jnp.stack([workers, partners], axis=1)
    machine, (local_steps, meetings), views, recorded, events = replay(
        run.advance, run.view, run.start(params), pairs, record
    )
    kept_params, kept_mean = views
    return GossipRecord(
        params=kept_params,
        mean=kept_mean,
        events=events,
        local_step=local_steps,
        meetings=meetings,
        recorded=recorded,
        final=machine.workers,
    )


class _Run(NamedTuple):
    """The checked arguments of `gossip`, and the functions of a run."""

    inner: optax.GradientTransformationExtraArgs
    period: Period
    num_workers: int
    grad_fn: GradFn

    def start(self, params: Tree) -> _Machine:
        """The initial state: all workers at the parameters."""
        params, zero = jax.tree.map(jnp.asarray, params), jnp.zeros((), jnp.int32)
        work.start_center(params)  # refuses parameters that cannot be averaged
        worker = GossipWorkers(params, params, self.inner.init(params), zero, zero)
        return _Machine(replicate(worker, self.num_workers), zero, zero)

    def advance(
        self, machine: _Machine, event: tuple[jax.Array, jax.Array]
    ) -> tuple[_Machine, tuple[jax.Array, ...]]:
        """The workers after an event, and its counters."""
        (worker, partner), number = event
        everyone, last = machine.workers, self.num_workers - 1
        place, mate = (jnp.clip(w, 0, last) for w in (worker, partner))
        # The conditional skips workers that do not exist, and saves time: see
        # `asynchronous`.
        own, theirs, met = jax.lax.cond(
            (place == worker) & (mate == partner),
            lambda *operands: self.step(number, place, mate, *operands),
            lambda *operands: (*operands, jnp.zeros((), jnp.int32)),
            *(row_of(everyone, place), row_of(everyone.params, mate)),
        )
        everyone = everyone._replace(params=with_row(everyone.params, mate, theirs))
        meetings = machine.meetings + met
        machine = _Machine(with_row(everyone, place, own), place, meetings)
        return machine, (own.local_step, meetings)

    def step(
        self,
        number: jax.Array,
        place: jax.Array,
        mate: jax.Array,
        own: GossipWorkers,
        theirs: Tree,
    ) -> tuple[GossipWorkers, Tree, jax.Array]:
        """(the worker after its step, its partner's parameters, whether they met)."""
        grads = self.grad_fn(place, own.read, number)
        check_grads(grads, own.params)
        steps = own.steps_since_round + 1
        at = Round(self.num_workers, static_period(self.period), steps)
        wide = work.start_center(own.params)
        worker = Worker(own.params, own.inner, (), ())
        worker = work.walk(self.inner, _ALONE, worker, wide, grads, at)
        x = work.as_center(worker.params, wide)
        due = work.is_due(self.period, steps, own.local_step)
        meets = due & (mate != place)

        def mean(x, other):
            half = jnp.asarray(0.5, x.dtype)
            return jnp.where(meets, half * x + half * other.astype(x.dtype), x)

        x = work.round_like(jax.tree.map(mean, x, theirs), own.params)
        own = GossipWorkers(
            params=x,
            read=x,
            inner=worker.inner,
            local_step=own.local_step + 1,
            steps_since_round=jnp.where(due, jnp.zeros_like(steps), steps),
        )
        return own, where(meets, x, theirs), meets.astype(jnp.int32)

    def view(self, machine: _Machine) -> tuple[Tree, Tree]:
        """The trees that a record keeps of an event."""
        everyone = machine.workers.params
        return row_of(everyone, machine.last), mean_params(everyone)
