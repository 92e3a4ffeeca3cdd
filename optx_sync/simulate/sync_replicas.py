# SPDX-License-Identifier: Apache-2.0
"""Replay TensorFlow's `SyncReplicasOptimizer`, with its token queue, on one device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import check_function, check_grads, check_inner, integer
from optx_sync.core.shapes import Array, Bool, Int32
from optx_sync.core.slices import unique_rows
from optx_sync.core.trees import Tree
from optx_sync.replicas import tokens as queue
from optx_sync.replicas.accumulator import Accumulator, accumulate
from optx_sync.replicas.averages import check_averages
from optx_sync.replicas.tokens import Chief, Held, Tokens
from optx_sync.simulate.replay import GradFn, Record, check_workers, replay


class SyncReplicasMachine(NamedTuple):
    """State of chief, accumulators and workers after an event of `sync_replicas`.

    Attributes:
        params: The parameters.
        inner: The state of `inner`.
        averages: The moving averages, a tree like the parameters; () without
            `variable_averages`.
        accumulator: The sum of the gradients since the last update.
        accumulated: int32[], the number of gradients in it.
        global_step: int32[], updates, from `initial_global_step`.
        local_step: int32[N], the token that each worker took last.
        blocked: bool[N], whether each worker waits for a token.
        tokens: The tokens in the queue: how many are of the step before, and how many
            of the current one.
    """

    params: Tree
    inner: optax.OptState
    averages: Tree
    accumulator: Accumulator
    accumulated: Int32[Array, ""]
    global_step: Int32[Array, ""]
    local_step: Int32[Array, " workers"]
    blocked: Bool[Array, " workers"]
    tokens: Tokens


class SyncReplicasRecord(NamedTuple):
    """The history of T events; each array has the values after the event.

    `record` keeps K of them, of N workers.

    Attributes:
        params: [K, ...], the parameters; `None` if `record` is a function.
        averages: [K, ...], the moving averages, like the parameters; `None` without
            `variable_averages`, or if `record` is a function.
        blocked: bool[K, N], the workers that wait for a token; `None` if `record` is a
            function.
        local_step: int32[K, N], the token that each worker took last; `None` if
            `record` is a function.
        events: int32[K] of NumPy, the numbers of these events, from 0.
        accepted: bool[T], whether the gradient was accumulated.
        updated: bool[T], whether it completed an update.
        tokens: int32[T], the number of tokens in the queue.
        global_step: int32[T], updates, from `initial_global_step`.
        recorded: [T, ...], the result of the function `record` after each event; `None`
            without one.
        final: The state after the last event.
    """

    params: Tree
    averages: Tree
    blocked: Any
    local_step: Any
    events: np.ndarray
    accepted: Bool[Array, " events"]
    updated: Bool[Array, " events"]
    tokens: Int32[Array, " events"]
    global_step: Int32[Array, " events"]
    recorded: Tree
    final: SyncReplicasMachine


def sync_replicas(
    inner: optax.GradientTransformation,
    params: optax.Params,
    grad_fn: GradFn,
    workers: ArrayLike | Sequence[int],
    *,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    num_tokens: int = -1,
    variable_averages: float | optax.Schedule | None = None,
    initial_global_step: int = 0,
    record: Record = None,
) -> SyncReplicasRecord:
    """Replay TensorFlow's `SyncReplicasOptimizer` with accumulators and token queue.

    With R = `replicas_to_aggregate` and N = `total_num_replicas`, at each event:

        worker w:  g = grad_fn(w, params, event)
                   if local_step[w] >= global_step: accumulate g, else drop it
        chief:     once R gradients are in: params move by inner(their mean),
                   global_step += 1, max(N, R) tokens of this value join the queue,
                   then the moving averages follow
        worker w:  local_step[w] = the first token of the queue; wait if there is none

    A worker that waits goes on as soon as there are tokens; an event of a worker that
    still waits changes nothing. A worker whose gradient was dropped takes a token all
    the same. Tokens are not bound to workers: a fast worker may contribute several
    gradients to one update. A row of a row-sparse gradient is divided by the number of
    gradients that contained it. The lockstep form is `oxs.sync_replicas`.

    Args:
        inner: The transformation that gets the mean gradient.
        params: The parameters to start from.
        grad_fn: `(worker, params, event) -> grads`, traced; `worker` and `event` are
            int32 scalars.
        workers: int[T], the worker that steps at each event. If it is traced, a number
            that names no worker cannot be refused, and its event changes nothing.
        replicas_to_aggregate: R, the gradients that an update needs, 1 or more.
        total_num_replicas: N, the number of workers. `None`: R.
        num_tokens: The tokens in the queue at the start, at least R - N; -1: R. They
            carry the initial step, so a worker that takes one wastes a gradient: its
            first one after the first update is stale. 0 wastes none.
        variable_averages: The decay of a moving average of the parameters, or a
            schedule of the new global step.
        initial_global_step: The step at which a restarted run continues; may be traced.
        record: Which history of `params`, `averages`, `blocked` and `local_step` to
            keep. `None`: all of it if that takes at most 256 MB, else every n-th event
            with the smallest n that fits. `"all"`: all of it. An int n: every n-th
            event. A function of (params, averages): its results are `recorded` instead.

    Returns:
        A `SyncReplicasRecord`. The function can be jitted, with all arguments but the
        arrays static.

    Raises:
        TypeError: `inner` is not a transformation; a number has the wrong type.
        ValueError: There are no parameters; a number is out of range; there are too few
            tokens; `workers` are no integers, or one names no worker; gradients do not
            match the parameters.

    Example:
        Worker 1 is slow, and an update needs only one of two gradients:

        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> run = oxs.simulate.sync_replicas(
        ...     optax.sgd(0.5),
        ...     jnp.float32(1),
        ...     lambda worker, params, event: params,
        ...     jnp.array([0, 0, 1, 0, 1]),
        ...     replicas_to_aggregate=1,
        ...     total_num_replicas=2,
        ... )
        >>> run.accepted.tolist()
        [True, False, False, True, False]
        >>> run.params.tolist()
        [0.5, 0.5, 0.5, 0.25, 0.25]
    """
    inner = check_inner(
        inner, "oxs.simulate.sync_replicas(optax.sgd(0.1), params, ...)"
    )
    queue.check_variables(params)
    required, total = queue.check_replicas(replicas_to_aggregate, total_num_replicas)
    check_averages(variable_averages)
    total = required if total is None else total
    tokens = queue.tokens_at_start(queue.check_num_tokens(num_tokens), total, required)
    if not hasattr(initial_global_step, "dtype"):
        begin = "Pass the step at which the run goes on, 0 for a new one."
        integer("initial_global_step", initial_global_step, begin, least=0)
    workers = check_workers(workers, total)
    check_function("grad_fn", grad_fn, "It takes (worker, params, event).")
    run = _Machine(Chief(inner, required, variable_averages), total, grad_fn)
    start = run.start(params, initial_global_step, tokens)
    done = replay(run.advance, run.view, start, workers, record)
    each, averages, blocked, local_step = done.views
    accepted, updated, in_queue, global_step = done.values
    return SyncReplicasRecord(
        each, averages, blocked, local_step, done.events, accepted, updated, in_queue,
        global_step, done.recorded, done.state,
    )  # fmt: skip


class _Machine(NamedTuple):
    """The checked arguments of `sync_replicas`, and the functions of a run."""

    chief: Chief
    total: int
    grad_fn: GradFn

    def start(
        self, params: Tree, global_step: int | jax.Array, tokens: int
    ) -> SyncReplicasMachine:
        """The machine before the first event."""
        step, zero = jnp.asarray(global_step, jnp.int32), jnp.zeros((), jnp.int32)
        return SyncReplicasMachine(
            **self.chief.start(jax.tree.map(jnp.asarray, params))._asdict(),
            accumulated=zero,
            global_step=step,
            local_step=jnp.full(self.total, step, jnp.int32),
            blocked=jnp.zeros(self.total, jnp.bool_),
            tokens=Tokens(old=zero, new=jnp.full_like(zero, tokens)),
        )

    def advance(
        self, machine: SyncReplicasMachine, event: tuple[jax.Array, jax.Array]
    ) -> tuple[SyncReplicasMachine, tuple[jax.Array, ...]]:
        """The machine after an event, and the values that are kept of every event."""
        worker, number = event
        known = (worker >= 0) & (worker < self.total)
        place = jnp.clip(worker, 0, self.total - 1)
        grads = self.grad_fn(place, machine.params, number)
        check_grads(grads, machine.params)
        grads = unique_rows(grads)
        fresh = machine.local_step[place] >= machine.global_step
        accepted = known & ~machine.blocked[place] & fresh
        machine = machine._replace(
            accumulator=accumulate(machine.accumulator, grads, accepted),
            accumulated=machine.accumulated + accepted.astype(jnp.int32),
        )
        updated = machine.accumulated >= self.chief.required
        machine = jax.lax.cond(
            updated, lambda machine: self.update(machine, grads), lambda m: m, machine
        )
        machine = self.serve(machine, worker)
        tokens = machine.tokens.old + machine.tokens.new
        return machine, (accepted, updated, tokens, machine.global_step)

    def update(self, machine: SyncReplicasMachine, grads: Tree) -> SyncReplicasMachine:
        """The chief's update: parameters move by the mean, tokens join the queue."""
        held = Held(*(getattr(machine, name) for name in Held._fields))
        step, count = machine.global_step + 1, machine.accumulated
        made = queue.tokens_of_update(self.total, self.chief.required)
        return machine._replace(
            **self.chief.update(held, grads, count, step)._asdict(),
            accumulated=jnp.zeros_like(count),
            global_step=step,
            tokens=Tokens(machine.tokens.new, jnp.full_like(count, made)),
        )

    def serve(
        self, machine: SyncReplicasMachine, worker: jax.Array
    ) -> SyncReplicasMachine:
        """All waiting workers and the event's worker take tokens, if there are any."""
        everyone = jnp.arange(self.total, dtype=jnp.int32)
        waits = machine.blocked | (everyone == worker)
        # An update makes tokens for all workers: all that wait are served, or none.
        served, late, tokens = queue.hand_out(machine.tokens, waits, place=1)
        token = machine.global_step - late.astype(jnp.int32)
        return machine._replace(
            local_step=jnp.where(served, token, machine.local_step),
            blocked=waits & ~served,
            tokens=tokens,
        )

    def view(self, machine: SyncReplicasMachine) -> tuple[Tree, ...]:
        """The trees that a record keeps of an event."""
        averages = None if self.chief.decay is None else machine.averages
        return machine.params, averages, machine.blocked, machine.local_step
