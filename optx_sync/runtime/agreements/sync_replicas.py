# SPDX-License-Identifier: Apache-2.0
"""Synchronous replicas with backup workers: the server's side and the workers'."""

import copy
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.core.checks import check_inner
from optx_sync.core.slices import IndexedSlices, unique_rows
from optx_sync.core.trees import Tree, cast_like, is_finite
from optx_sync.replicas.accumulator import accumulate
from optx_sync.replicas.tokens import (
    Chief,
    Held,
    SyncReplicas,
    check_variables,
    tokens_of_update,
    tokens_with,
)
from optx_sync.runtime.agreements import contract, saved
from optx_sync.runtime.agreements.arrays import arrays_of, copied
from optx_sync.runtime.agreements.memory import Received
from optx_sync.runtime.agreements.pushes import Expected
from optx_sync.runtime.agreements.saved import Notes
from optx_sync.runtime.messages import OVERFLOW, Arrays, Push, PushRefused, Reply
from optx_sync.runtime.parts import Variables


def sync_replicas_way(agreement: SyncReplicas, num_workers: int) -> contract.Way:
    """The server's and workers' sides of synchronous replicas."""
    tokens_with(agreement, num_workers)
    return contract.Way(
        serve=lambda params, inner, _: Updates(params, agreement, inner, num_workers),
        work=lambda shapes, inner, layout: OfUpdates(shapes),
        of_center=False,
        waits=True,
    )


# The notes of a checkpoint of `Updates`, beside the tokens.
_NOTED = ("global_step", "count", "local_steps", "accepted_at", "was_used", "waiting")


class Updates(contract.AtOnce):
    """The server's side: the parameters, an accumulator and the tokens."""

    def __init__(
        self, params: Tree, agreement: SyncReplicas, inner: Any, num_workers: int
    ):
        check_variables(params)
        inner = check_inner(inner, "Server(..., inner=optax.adam(1e-3))")
        params = jax.tree.map(jnp.asarray, params)
        required = agreement.replicas_to_aggregate
        self.agreement = agreement
        self.num_workers = num_workers
        self.variables: Variables = Variables(params)
        self.expected: Expected = Expected(("grads",), params, of_rows=True)
        self.chief: Chief = Chief(inner, required, agreement.variable_averages)
        self.held: Held = copied(self.chief.start(params))
        self._add: Any = jax.jit(_accumulated, donate_argnums=0)
        # Nothing is donated: an update that is not finite is discarded.
        self._update: Any = jax.jit(self._move)
        self.global_step: int = 0
        self.count: int = 0
        self.local_steps: list[int] = [0] * num_workers
        self.accepted_at: list[int] = [-1] * num_workers
        self.was_used: list[bool] = [True] * num_workers
        self.waiting: list[int] = []
        self.tokens: deque[int] = deque([0] * tokens_with(agreement, num_workers))

    def _move(self, held, grads, count, step):
        accumulated = _accumulated(held.accumulator, grads)
        held = held._replace(accumulator=accumulated)
        held = self.chief.update(held, grads, count, step)
        # An array that passes through must not be donated with the next accumulator.
        return jax.tree.map(jnp.copy, held), is_finite(held.params)

    def absorb(self, worker: int, push: Push, sizes: dict[str, float]) -> Reply:
        """Accumulate a gradient or drop it, and update when there are enough."""
        used = self.local_steps[worker] >= self.global_step
        completes = self.count + 1 >= self.agreement.replicas_to_aggregate
        if used:
            grads = self.variables.tree(
                {path: _as_grad(grad) for path, grad in push.arrays["grads"].items()}
            )
            if completes:
                count, step = jnp.int32(self.count + 1), jnp.int32(self.global_step + 1)
                after, finite = self._update(self.held, grads, count, step)
                if not finite:
                    raise PushRefused(OVERFLOW)
                self.held = after
            else:
                added = self._add(self.held.accumulator, grads)
                # The message may be overwritten after the answer.
                self.held = self.held._replace(accumulator=jax.block_until_ready(added))
            self.count += 1
            self.accepted_at[worker] = self.global_step
            if completes:
                self._complete()
        return self._answered(worker, push, used)

    def drop(self, worker: int, push: Push) -> Reply:
        """Answer a gradient that is not to be accumulated."""
        return self._answered(worker, push, False)

    def _answered(self, worker: int, push: Push, used: bool) -> Reply:
        """The answer to a gradient, for which its worker gets a token."""
        self.was_used[worker] = used
        self.tell(worker, push.leases, "absorbed" if used else "dropped")
        # A worker that waited when the checkpoint was made may have gone on since:
        # after a restore it pushes, and still waits for only one token.
        if worker not in self.waiting:
            self.waiting.append(worker)
        self._hand_out()
        return self.reply_again(worker)

    def _complete(self) -> None:
        step = self.global_step + 1
        required = self.agreement.replicas_to_aggregate
        if self.num_workers >= required:
            self.tokens.clear()  # Every worker gets a new one.
        self.tokens.extend([step] * tokens_of_update(self.num_workers, required))
        self.count, self.global_step = 0, step

    def _hand_out(self) -> None:
        """Hand tokens to the workers that wait, first come, first served."""
        once = self.num_workers >= self.agreement.replicas_to_aggregate
        for worker in list(self.waiting):
            if not self.tokens:
                return
            if once and self.accepted_at[worker] == self.global_step:
                continue  # It waits for the update that it is part of.
            self.waiting.remove(worker)
            self.local_steps[worker] = self.tokens.popleft()

    def reply_again(self, worker: int) -> Reply:
        """The state of a worker's token, with the parameters if it has one."""
        waiting = worker in self.waiting
        arrays = {} if waiting else {"params": self.current()}
        used = self.was_used[worker]
        return Reply(arrays, self.global_step, 0, used, waiting)

    def join(self, worker: int) -> None:
        """A worker starts: it sends one gradient before it needs a token."""
        self.local_steps[worker] = self.global_step
        if worker in self.waiting:
            self.waiting.remove(worker)

    def staleness(self, worker: int) -> int:
        """The updates since the token of a worker."""
        return max(self.global_step - self.local_steps[worker], 0)

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker waits for a token."""
        return worker in self.waiting

    def release(self, left: set[int]) -> None:
        """Release the workers that wait for gradients of workers that have left.

        If all others wait, nobody can complete the update. The accumulated gradients
        stay, and the next ones are added to them.
        """
        self.waiting = [worker for worker in self.waiting if worker not in left]
        if left and len(self.waiting) == self.num_workers - len(left):
            for worker in self.waiting:
                self.local_steps[worker] = self.global_step
            self.waiting = []

    def current(self) -> Arrays:
        """The arrays for a worker that starts."""
        # Never donated, so that an answer does not change while it travels.
        arrays = self.variables.arrays(self.held.params)
        return {path: np.asarray(array) for path, array in arrays.items()}

    def averages_tree(self) -> Tree:
        """The averages in the parameters' dtypes, or `None`."""
        if self.agreement.variable_averages is None:
            return None
        averages = cast_like(self.held.averages, self.held.params)
        return jax.tree.map(np.asarray, averages)

    def describe(self) -> str:
        """The optimizer, described by its state."""
        state = self.held.inner, self.held.averages
        return saved.described("sync_replicas", [], state)

    def save(self) -> tuple[dict[str, Arrays], Notes]:
        """The arrays and notes for a checkpoint, with accumulated gradients and tokens.

        A worker whose gradient waits may have gone on already.
        """
        arrays = {
            "center": self.current(),
            "inner": saved.numbered(self.held.inner),
            "averages": saved.numbered(self.held.averages),
            "accumulated": saved.numbered(self.held.accumulator),
        }
        notes = {name: getattr(self, name) for name in _NOTED}
        return arrays, {**notes, "tokens": list(self.tokens)}

    def load(self, arrays: dict[str, Arrays], notes: Notes) -> None:
        """Restore from a checkpoint."""
        saved.check_saved(self.current(), arrays["center"])
        self.held = Held(
            self.variables.tree(jax.tree.map(jnp.array, arrays["center"])),
            saved.like(self.held.inner, arrays.get("inner", {})),
            saved.like(self.held.averages, arrays.get("averages", {})),
            saved.like(self.held.accumulator, arrays["accumulated"]),
        )
        for name in _NOTED:
            setattr(self, name, copy.copy(notes[name]))
        self.tokens = deque(notes["tokens"])


class OfUpdates:
    """The worker's side: the parameters, and a gradient to send."""

    params: Tree
    grads: Tree

    def __init__(self, shapes: Tree):
        self.like: Tree = shapes
        self.received: Received = Received()
        self.steps: int = 0
        self.ages: list[int] = [0]

    def start(self, parts: dict[int, Arrays], place: contract.Place) -> None:
        """Begin with the parameters."""
        self.params = place(self.received.tree(parts[0], self.like))

    def place(self, place: contract.Place) -> None:
        """Lay them out over devices."""
        self.params = place(self.params)

    def is_due(self, step: int) -> bool:
        """Every step is due."""
        return True

    def step(self, grads: Tree, parts: tuple[int, ...]) -> None:
        """Keep the gradient."""
        self.grads = grads
        self.ages = [1]

    def outgoing(self, parts: tuple[int, ...]) -> dict[int, contract.Sent]:
        """The gradient to push."""
        self.ages = [0]
        return {0: contract.Sent({"grads": arrays_of(self.grads)})}

    def give_back(self, part: int) -> None:
        """Drop the refused gradient; the next step has another one."""

    def land(self, part: int, reply: Reply, place: contract.Place) -> None:
        """Take the parameters."""
        self.params = place(self.received.tree(reply.arrays["params"], self.like))


def _accumulated(accumulator: Tree, grads: Tree) -> Tree:
    return accumulate(accumulator, unique_rows(grads), jnp.bool_(True))


def _as_grad(grad: Any) -> Tree:
    """A received gradient, with rows padded so that few programs are compiled.

    Each number of rows needs a program of its own, so it is rounded up to a power of
    two. The added rows have indices out of range, which are dropped.
    """
    if not isinstance(grad, tuple):
        return grad
    indices, values = grad
    missing = (1 << max(len(indices) - 1, 0).bit_length()) - len(indices)
    indices = np.pad(np.asarray(indices), (0, missing), constant_values=-1)
    values = np.pad(np.asarray(values), [(0, missing)] + [(0, 0)] * (values.ndim - 1))
    return IndexedSlices(indices, values)
