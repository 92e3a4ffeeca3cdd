# SPDX-License-Identifier: Apache-2.0
"""What a server holds, under a rule or under `SyncReplicas`: the arithmetic of it.

Not safe for several threads: `Server` lets one in at a time.
"""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.formulas import (
    absorb,
    contributions,
    divide,
    own_of,
    start_center,
)
from optx_sync.center.rule import CenterRule, Round
from optx_sync.checks import check_inner, fill_missing
from optx_sync.replicas.accumulator import (
    accumulate,
    clear,
    mean_of,
    start_accumulator,
    unique_rows,
)
from optx_sync.replicas.averages import advance_averages, start_averages
from optx_sync.replicas.sync_replicas import check_variables
from optx_sync.rows.slices import IndexedSlices
from optx_sync.runtime.protocol import (
    Arrays,
    Reply,
    SyncReplicas,
    Traffic,
    path_of,
    traffic,
)
from optx_sync.trees import add_updates


class Variables:
    """The way from a tree to the paths of its arrays, and back."""

    def __init__(self, tree: Any):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.treedef: Any = treedef
        self.paths: tuple[str, ...] = tuple(path_of(path) for path, _ in leaves)

    def tree(self, arrays: Arrays) -> Any:
        """The tree of these arrays."""
        return self.treedef.unflatten([arrays[path] for path in self.paths])

    def arrays(self, tree: Any) -> Arrays:
        """The arrays of a tree, by path."""
        return dict(zip(self.paths, self.treedef.flatten_up_to(tree), strict=True))


class Center:
    """The center under a rule."""

    def __init__(self, params: Any, rule: CenterRule, at: Round, copy_replies: bool):
        center = start_center(params)
        self.variables: Variables = Variables(center)
        self.rule = rule
        self.at = at
        self.copy_replies = copy_replies
        self.traffic: Traffic = traffic(rule, at)
        self.global_step: int = 0
        # The center before a worker's last push, for a worker that did not hear of it.
        self.kept: dict[int, Arrays] = {}
        # The rounds absorbed when a worker last took the center.
        self.seen: list[int] = [0] * at.num_workers
        self.outer: Any = ()
        # A contribution made at the server has not been divided yet.
        self.at_server: bool = self.traffic.sends != ("contribution",)
        self.keeps_before: bool = "before" in self.traffic.replies
        self.adds: bool = rule.outer is None and not self.at_server
        if self.adds:
            self.center: dict[str, Any] = {
                path: np.array(leaf, order="C")
                for path, leaf in self.variables.arrays(center).items()
            }
        else:
            self.center = self.variables.arrays(center)
            if rule.outer is not None:
                self.outer = rule.outer.init(center)
            # The next center is written over this one or, where that is kept, over
            # buffers that are not needed any more: no memory is asked for.
            donated = (1, 2) if self.keeps_before else (0, 1)
            self.step: Any = jax.jit(
                self._step, donate_argnums=donated, keep_unused=True
            )

    def _step(self, center, outer, spare, sent, steps):
        center = self.variables.tree(center)
        if self.at_server:
            at = self.at._replace(steps=steps)
            sent = {name: self.variables.tree(arrays) for name, arrays in sent.items()}
            total = contributions(self.rule, self._own(center, sent), center, at)
            if self.rule.mean_over == "workers":
                total = divide(total, at.num_workers)
        else:
            total = self.variables.tree(sent["contribution"])
        center, outer = absorb(self.rule, center, outer, total)
        return self.variables.arrays(center), outer

    def _own(self, center, sent):
        # The center stands for what the formula does not read and was not sent.
        return own_of(
            self.rule,
            sent.get("params", center),
            sent.get("taken", center),
            sent.get("accumulated", center),
        )

    def absorb(self, worker: int, sent: dict[str, Arrays], steps: int) -> Reply:
        """The next center, and what the worker gets back."""
        before, spare = self.center, None
        if self.keeps_before:
            spare = self.kept.pop(worker, None) or self._buffers()
            self.kept[worker] = before
        if not self.adds:
            self.center, self.outer = self.step(
                before, self.outer, spare, sent, jnp.int32(steps)
            )
        else:
            self.center = spare or before
            for path, added in sent["contribution"].items():
                np.add(before[path], added, out=self.center[path])
        self.global_step += 1
        self.seen[worker] = self.global_step
        return self._reply(before)

    def _buffers(self) -> Arrays:
        like = np.empty_like if self.adds else jnp.empty_like
        return {path: like(array) for path, array in self.center.items()}

    def _reply(self, before: Arrays) -> Reply:
        centers = {"before": before, "after": self.center}
        arrays = {name: self._out(centers[name]) for name in self.traffic.replies}
        return Reply(arrays, self.global_step, 0)

    def _out(self, arrays: Arrays) -> Arrays:
        convert = np.array if self.copy_replies else np.asarray
        return {path: convert(array) for path, array in arrays.items()}

    def reply_again(self, worker: int) -> Reply:
        """What a worker gets back that did not hear the answer."""
        # After a restart nothing is kept, and the center now is as good.
        return self._reply(self.kept.get(worker, self.center))

    def join(self, worker: int) -> None:
        """A worker starts, and takes the center."""
        self.seen[worker] = self.global_step

    def staleness(self, worker: int) -> int:
        """The rounds since a worker last took the center."""
        return self.global_step - self.seen[worker]

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker must wait for a token: never."""
        return False

    def release(self, left: set[int]) -> None:
        """Nobody waits here."""

    def current(self) -> Arrays:
        """What a worker that starts gets."""
        return self._out(self.center)

    def tree(self) -> Any:
        """A copy of the center."""
        copies = {path: np.array(array) for path, array in self.center.items()}
        return self.variables.tree(copies)

    def averages_tree(self) -> Any:
        """There are none."""
        return None

    def save(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "center": {path: np.asarray(array) for path, array in self.center.items()},
            "outer": _numbered(self.outer),
            "global_step": np.array(self.global_step),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint held."""
        for path, array in self.center.items():
            if array.shape != state["center"][path].shape:
                raise ValueError(_other_shape(path, array, state["center"][path]))
        if self.adds:
            for path, array in state["center"].items():
                self.center[path][...] = array
        else:
            self.center = {p: jnp.array(a) for p, a in state["center"].items()}
            self.outer = _like(self.outer, state["outer"])
        self.global_step = int(state["global_step"])
        self.seen = [self.global_step] * self.at.num_workers


class Updates:
    """The parameters under `SyncReplicas`, with the tokens."""

    def __init__(
        self, params: Any, agreement: SyncReplicas, inner: Any, num_workers: int
    ):
        check_variables(params)
        call = "Server(..., inner=optax.adam(1e-3))"
        self.inner: optax.GradientTransformationExtraArgs = check_inner(inner, call)
        self.agreement = agreement
        self.num_workers = num_workers
        self.params: Any = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        self.variables: Variables = Variables(self.params)
        self.accumulator: Any = start_accumulator(self.params)
        self.inner_state: Any = self.inner.init(self.params)
        self.averages: Any = ()
        if agreement.variable_averages is not None:
            self.averages = start_averages(self.params, None)
        self._add = jax.jit(
            lambda accumulator, grads: accumulate(
                accumulator, unique_rows(grads), jnp.bool_(True)
            ),
            donate_argnums=0,
        )
        self._update = jax.jit(self._move, donate_argnums=(0, 1))
        self._start(0)

    def _start(self, global_step: int) -> None:
        """The queue and the counters, as a run or a restart begins."""
        agreement = self.agreement
        required = agreement.replicas_to_aggregate
        self.global_step: int = global_step
        self.count: int = 0
        self.local_steps: list[int] = [global_step] * self.num_workers
        self.accepted_at: list[int] = [-1] * self.num_workers
        self.was_used: list[bool] = [True] * self.num_workers
        self.waiting: list[int] = []
        tokens = required if agreement.num_tokens < 0 else agreement.num_tokens
        self.tokens: deque[int] = deque([global_step] * tokens)

    def _move(self, accumulator, inner_state, params, averages, grads, count, step):
        required = self.agreement.replicas_to_aggregate
        mean = mean_of(accumulator, grads, count, required)
        updates, inner_state = self.inner.update(mean, inner_state, params)
        params = add_updates(params, fill_missing(updates, params))
        if self.agreement.variable_averages is not None:
            averages = advance_averages(
                averages, params, self.agreement.variable_averages, step
            )
        return clear(accumulator, mean), inner_state, params, averages

    def absorb(self, worker: int, sent: dict[str, Arrays], steps: int) -> Reply:
        """Accumulate a gradient or drop it, and update when there are enough."""
        used = self.local_steps[worker] >= self.global_step
        if used:
            grads = self.variables.tree(
                {path: _as_grad(grad) for path, grad in sent["grads"].items()}
            )
            self.accumulator = self._add(self.accumulator, grads)
            self.count += 1
            self.accepted_at[worker] = self.global_step
            if self.count >= self.agreement.replicas_to_aggregate:
                self._complete(grads)
        self.was_used[worker] = used
        self.waiting.append(worker)
        self._hand_out()
        return self._reply(worker)

    def _complete(self, grads: Any) -> None:
        step = self.global_step + 1
        self.accumulator, self.inner_state, self.params, self.averages = self._update(
            self.accumulator, self.inner_state, self.params, self.averages, grads,
            jnp.int32(self.count), jnp.int32(step),
        )  # fmt: skip
        required = self.agreement.replicas_to_aggregate
        if self.num_workers >= required:
            self.tokens.clear()  # There is a new one for every worker.
        self.tokens.extend([step] * max(self.num_workers, required))
        self.count, self.global_step = 0, step

    def _hand_out(self) -> None:
        """Tokens for the workers that wait, first come first served."""
        once = self.num_workers >= self.agreement.replicas_to_aggregate
        for worker in list(self.waiting):
            if not self.tokens:
                return
            if once and self.accepted_at[worker] == self.global_step:
                continue  # It waits for the update that it is part of.
            self.waiting.remove(worker)
            self.local_steps[worker] = self.tokens.popleft()

    def _reply(self, worker: int) -> Reply:
        waiting = worker in self.waiting
        arrays = {} if waiting else {"params": self.current()}
        used = self.was_used[worker]
        return Reply(arrays, self.global_step, 0, used, waiting)

    def reply_again(self, worker: int) -> Reply:
        """How it stands with a worker's token, with the parameters if it has one."""
        return self._reply(worker)

    def join(self, worker: int) -> None:
        """A worker starts: as at the beginning, one gradient before the first token."""
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
        """Let those go on who wait for gradients of workers that have left.

        If all others wait nobody can complete the update. What has been accumulated
        stays, and the next gradients count towards it.
        """
        self.waiting = [worker for worker in self.waiting if worker not in left]
        if left and len(self.waiting) == self.num_workers - len(left):
            for worker in self.waiting:
                self.local_steps[worker] = self.global_step
            self.waiting = []

    def current(self) -> Arrays:
        """What a worker that starts gets."""
        # Never donated, so that an answer stays what it is while it travels.
        return {p: np.asarray(a) for p, a in self.variables.arrays(self.params).items()}

    def tree(self) -> Any:
        """A copy of the parameters."""
        return jax.tree.map(np.array, self.params)

    def averages_tree(self) -> Any:
        """The averages in the parameters' dtypes, or `None`."""
        if self.agreement.variable_averages is None:
            return None
        return jax.tree.map(
            lambda average, p: np.asarray(average.astype(p.dtype)),
            self.averages,
            self.params,
        )

    def save(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "center": self.current(),
            "inner": _numbered(self.inner_state),
            "averages": _numbered(self.averages),
            "global_step": np.array(self.global_step),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint held."""
        for path, array in self.current().items():
            if array.shape != state["center"][path].shape:
                raise ValueError(_other_shape(path, array, state["center"][path]))
        self.params = self.variables.tree(
            {path: jnp.array(array) for path, array in state["center"].items()}
        )
        self.inner_state = _like(self.inner_state, state["inner"])
        self.averages = _like(self.averages, state["averages"])
        # Gradients since the checkpoint are lost; the machine starts as after a start.
        self._start(int(state["global_step"]))


def _as_grad(grad: Any) -> Any:
    return IndexedSlices(*grad) if isinstance(grad, tuple) else grad


def _numbered(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a state of any type, as what a checkpoint can hold."""
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def _like(tree: Any, numbered: dict[str, np.ndarray]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [jnp.array(numbered[str(i)]) for i in range(len(leaves))]
    return treedef.unflatten(arrays)


def _other_shape(path: str, array: Any, saved: Any) -> str:
    return (
        f"The checkpoint holds {path} with shape {saved.shape}; the parameters have "
        f"{array.shape}. Pass another checkpoint_dir."
    )
