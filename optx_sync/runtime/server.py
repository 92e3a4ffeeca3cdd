# SPDX-License-Identifier: Apache-2.0
"""The holder of the center: takes one push at a time, checks it, answers it.

Plain Python: no Ray, no processes. A push is absorbed as a whole or refused as a whole,
and applied once however often it is sent. What travels is a dict from the path of a
variable to its array; which arrays go there and back follows from the rule (`traffic`).
"""

import dataclasses
import math
import pathlib
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.rule import (
    CenterRule,
    Own,
    Period,
    Round,
    absorb,
    contributions,
    divide,
    own_of,
    start_center,
)
from optx_sync.checks import check_inner
from optx_sync.indexed_slices import IndexedSlices
from optx_sync.replicas.accumulator import (
    accumulate,
    clear,
    mean_of,
    start_accumulator,
    unique_rows,
)
from optx_sync.replicas.sync_replicas import (
    advance_averages,
    apply_updates,
    check_averages,
    check_replicas,
    check_variables,
    start_averages,
)

Arrays: TypeAlias = dict[str, Any]  # the path of a variable -> its array
KEPT_CHECKPOINTS = 2
# A formula for each element alone runs on pieces that stay in a core's cache, 2^16
# elements: its intermediate arrays cost nothing then.
PIECE = 2**16
ARITHMETIC = {
    "add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "sqrt",
    "rsqrt", "integer_pow", "exp", "log", "tanh", "convert_element_type",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SyncReplicas:
    """Synchronous replicas with backup workers, as an agreement of `run`.

    Every worker pushes every gradient; the server drops what is stale, applies `inner`
    to the mean of the first `replicas_to_aggregate` of them, and hands out
    max(N, R) tokens of the new step. A worker waits for a token after each push.

    The original is TensorFlow's `SyncReplicasOptimizer`, whose event by event replay is
    `oxs.simulate.sync_replicas`. Here, with N >= R, a worker whose gradient was
    accepted waits for the update that it is part of. The original lets it go on as soon
    as any token is left over. That buys a gradient which is stale when it arrives, and
    costs a third of the updates when one of four workers lags behind.

    Attributes:
        replicas_to_aggregate: R, the gradients that an update needs.
        total_num_replicas: N, checked against the number of workers; `None`: any.
        num_tokens: The tokens at the start; -1: R of them.
        variable_averages: The decay of a moving average of the parameters, or a
            schedule of the new global step. `None`: no average.

    Example:
        >>> from optx_sync.runtime import SyncReplicas
        >>> SyncReplicas(3, total_num_replicas=4).num_tokens
        -1
    """

    replicas_to_aggregate: int
    total_num_replicas: int | None = None
    num_tokens: int = -1
    variable_averages: float | optax.Schedule | None = None

    def __post_init__(self):
        check_replicas(self.replicas_to_aggregate, self.total_num_replicas)
        check_averages(self.variable_averages)
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int):
            raise TypeError(f"num_tokens must be an integer; got {self.num_tokens!r}.")
        if self.num_tokens < -1:
            raise ValueError(
                f"num_tokens must be 0 or more, or -1 for replicas_to_aggregate; got "
                f"{self.num_tokens}."
            )


Agreement: TypeAlias = CenterRule | SyncReplicas


class PushRefused(ValueError):
    """A push that the server did not accept; the center is as it was."""


class Push(NamedTuple):
    """What a worker sends."""

    worker: int
    round: int  # 1 for a worker's first push; a retry has the number of the first try
    arrays: dict[str, Arrays]  # what is sent -> its arrays, see `traffic`
    steps: int = 1  # the worker's steps since its last round
    local_step: int = 0  # the worker's steps so far
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display


class Reply(NamedTuple):
    """What a worker gets back."""

    arrays: dict[str, Arrays]  # "before", "after"; or "params"
    global_step: int
    staleness: int  # the other workers' rounds since this worker's last one
    used: bool = True  # False for a stale gradient, which left no trace
    waiting: bool = False  # whether the worker must wait for a token: ask `wait`


class Joined(NamedTuple):
    """What a worker gets that starts, or starts again."""

    arrays: Arrays  # the center
    round: int  # the worker's last one
    local_step: int  # the worker's steps at its last round
    global_step: int
    restarts: int  # how often the worker has joined before


class Event(NamedTuple):
    """One line of the history."""

    kind: str  # started, restored, join, push, dropped, retry, refused; lost (by `run`)
    worker: int  # -1 for the server's own
    round: int
    local_step: int
    global_step: int  # after the event
    staleness: int
    time: float  # seconds since the epoch
    shown: dict[str, float]
    message: str = ""


class Traffic(NamedTuple):
    """Which arrays travel: no more than the rule's formulas read."""

    sends: tuple[str, ...]  # "contribution", or fields of `Own`
    replies: tuple[str, ...]  # of "before" and "after", the center around the round


def traffic(rule: CenterRule, at: Round) -> Traffic:
    """What a worker and the center send each other under a rule."""

    def own(x, s, a):
        return Own(x, s, None if rule.accumulate is None else a)

    of_x, of_taken, of_accumulated, of_center = _reads(
        lambda x, s, a, c: rule.contribute(own(x, s, a), c, at)
    )
    penalty, keeps = rule.penalty, of_taken
    if penalty is not None:
        keeps |= _reads(lambda x, s, a, _: penalty(own(x, s, a), at))[1]
    take = rule.take
    takes_before, takes_after = False, True
    if take is not None:
        _, takes_before, takes_after, _ = _reads(
            lambda x, before, after, _: take(x, before, after, at)
        )
    if of_center:
        fields = {"params": of_x, "taken": of_taken, "accumulated": of_accumulated}
        sends = tuple(name for name, is_read in fields.items() if is_read)
    else:
        sends = ("contribution",)
    before = takes_before or (keeps and rule.keeps_taken)
    after = takes_after or (keeps and not rule.keeps_taken)
    names = {"before": before, "after": after}
    return Traffic(sends, tuple(name for name, wanted in names.items() if wanted))


class Server:
    """The center, or one part of it, and the only one who writes to it.

    Pushes are taken one at a time, from any thread. A bad one raises `PushRefused`, is
    counted and leaves everything as it was. A worker's last push sent again is answered
    and not applied again: with the center as it was before the push where the rule
    takes from that, else with the center as it is now.

    Contributions that are added are added in place; a rule with an outer transformation
    runs it compiled, on donated buffers. Where the center is split over several servers
    the outer transformation sees each part alone, so a norm over all variables is one
    over the part.

    Args:
        params: The parameters to start from, a tree of floating arrays.
        agreement: A `CenterRule` or `SyncReplicas`.
        num_workers: N; workers have the numbers 0 to N - 1.
        inner: The optimizer that `SyncReplicas` applies; a rule has no use for it here.
        communication_period: The workers' period, which a rule may read.
        checkpoint_dir: Where to save the center; `None`: nowhere. If there is a
            checkpoint already, the server goes on from the last one.
        checkpoint_every: Save after so many pushes.
        copy_replies: `False` answers with views of the center, which the next push
            overwrites: for a caller who sends an answer off before taking a push.

    Raises:
        TypeError: An agreement, an inner transformation or parameters of a wrong type.
        ValueError: Numbers out of range; a checkpoint of other variables.
    """

    def __init__(
        self,
        params: Any,
        agreement: Agreement,
        *,
        num_workers: int,
        inner: optax.GradientTransformation | None = None,
        communication_period: Period = 10,
        checkpoint_dir: str | pathlib.Path | None = None,
        checkpoint_every: int = 100,
        copy_replies: bool = True,
    ):
        check_agreement(agreement, num_workers, communication_period)
        if checkpoint_every < 1:
            raise ValueError(
                f"checkpoint_every must be 1 or more; got {checkpoint_every}."
            )
        if isinstance(agreement, SyncReplicas):
            self._holder = _Updates(params, agreement, inner, num_workers)
        else:
            at = round_of(num_workers, communication_period, 1)
            self._holder = _Center(params, agreement, at, copy_replies)
        self.num_workers = num_workers
        self._changed = threading.Condition()
        self._checkpoint_dir = self._orbax = None
        if checkpoint_dir is not None:
            self._checkpoint_dir = pathlib.Path(checkpoint_dir).absolute()
            self._checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._orbax = _Orbax()
        self._checkpoint_every = checkpoint_every
        # One number per worker, in arrays so that a checkpoint holds them.
        self._rounds = np.zeros(num_workers, np.int64)
        self._local_steps = np.zeros(num_workers, np.int64)
        self._joins = np.zeros(num_workers, np.int64)
        # Workers whose next round may have any number: the rounds between are lost.
        self._lost_rounds: set[int] = set()
        self._pushes = 0
        self._events: list[Event] = []
        self._boot = uuid.uuid4().hex
        self.refused = [0] * num_workers
        restored = self._restore()
        self._note("restored" if restored else "started", -1)

    def join(self, worker: int) -> Joined:
        """The center for a worker that starts, or that replaces one that died."""
        with self._changed:
            if not self._is_worker(worker):
                raise ValueError(self._unknown(worker))
            self._holder.join(worker)
            restarts = int(self._joins[worker])
            self._joins[worker] += 1
            self._note("join", worker)
            return Joined(
                self._holder.current(),
                int(self._rounds[worker]),
                int(self._local_steps[worker]),
                self._holder.global_step,
                restarts,
            )

    def everyone_joined(self) -> bool:
        """Whether all workers have joined, since the beginning."""
        return bool(np.all(self._joins > 0))

    def check(self, push: Push) -> None:
        """Raise `PushRefused` for a push that `push` would refuse."""
        with self._changed:
            self._check(push)

    def push(self, push: Push) -> Reply:
        """Absorb what a worker sends, and answer it.

        Raises:
            PushRefused: An unknown worker, a round that was applied long ago or comes
                too early, arrays that are missing, unknown, of a wrong shape or dtype,
                or not finite.
        """
        with self._changed:
            self._check(push)
            worker = push.worker
            holder = self._holder
            if push.round == self._rounds[worker]:
                self._note("retry", worker)
                return holder.reply_again(worker)
            staleness = holder.staleness(worker)
            reply = holder.absorb(worker, push.arrays, push.steps)
            self._rounds[worker] = push.round
            self._local_steps[worker] = push.local_step
            self._lost_rounds.discard(worker)
            self._note(
                "push" if reply.used else "dropped", worker, staleness, push.shown
            )
            self._pushes += 1
            if self._checkpoint_dir and self._pushes % self._checkpoint_every == 0:
                self.checkpoint()
            self._changed.notify_all()
            return reply._replace(staleness=staleness)

    def wait(self, worker: int, timeout: float = 10.0) -> Reply:
        """Wait for a worker's token; after `timeout` seconds it must ask again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holder.is_waiting(worker), timeout)
            return self._holder.reply_again(worker)

    def center(self) -> Any:
        """The center as it is now, a copy, in the structure of the parameters."""
        with self._changed:
            return self._holder.tree()

    def averages(self) -> Any:
        """The moving averages of `SyncReplicas(variable_averages=)`, or `None`."""
        with self._changed:
            return self._holder.averages_tree()

    @property
    def global_step(self) -> int:
        """The rounds absorbed, or with `SyncReplicas` the updates made."""
        return self._holder.global_step

    def events(self, boot: str = "", since: int = 0) -> tuple[str, list[Event]]:
        """This server's name, and its events from number `since` on.

        A server that has been restarted has another name, and counts from 0 again.
        """
        with self._changed:
            return self._boot, self._events[since if boot == self._boot else 0 :]

    def checkpoint(self) -> pathlib.Path | None:
        """Save the center: written aside, then renamed, in Orbax's format."""
        if self._checkpoint_dir is None or self._orbax is None:
            return None
        with self._changed:
            number = 1 + max(self._saved(), default=0)
            path = self._checkpoint_dir / str(number)
            self._orbax.save(path, self._state())
            for old in sorted(self._saved())[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(self._checkpoint_dir / str(old), ignore_errors=True)
            return path

    def _saved(self) -> list[int]:
        """The numbers of the finished checkpoints; others have longer names."""
        if self._checkpoint_dir is None:
            return []
        names = (path.name for path in self._checkpoint_dir.iterdir())
        return [int(name) for name in names if name.isdecimal()]

    def _state(self) -> dict[str, Any]:
        counts = {
            "rounds": self._rounds,
            "local_steps": self._local_steps,
            "joins": self._joins,
        }
        return {"counts": counts, **self._holder.save()}

    def _restore(self) -> bool:
        if self._checkpoint_dir is None or self._orbax is None:
            return False
        saved = self._saved()
        if not saved:
            return False
        path = self._checkpoint_dir / str(max(saved))
        state = self._orbax.restore(path, self._state())
        counts = state.pop("counts")
        if counts["rounds"].shape != self._rounds.shape:
            raise ValueError(
                f"The checkpoint {path} is of {len(counts['rounds'])} workers; got "
                f"num_workers={self.num_workers}. Pass another checkpoint_dir."
            )
        self._holder.load(state)
        self._rounds[:] = counts["rounds"]
        self._local_steps[:] = counts["local_steps"]
        self._joins[:] = counts["joins"]
        self._lost_rounds = set(range(self.num_workers))
        return True

    def _check(self, push: Push) -> None:
        worker = push.worker
        if not self._is_worker(worker):
            self._refuse(push, self._unknown(worker))
        last = int(self._rounds[worker])
        number = push.round
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            self._refuse(push, f"round must be an integer; got {number!r}.")
        if number < last or number < 1:
            self._refuse(
                push,
                f"round {number} of worker {worker} is over: round {last} has been "
                "applied. Number the rounds 1, 2, 3, ..., and after a restart go on "
                "from what join() says.",
            )
        if number > last + 1 and worker not in self._lost_rounds:
            self._refuse(
                push,
                f"round {number} of worker {worker} comes too early: the next one is "
                f"{last + 1}.",
            )
        problem = self._holder.problem(push.arrays)
        if problem:
            self._refuse(push, f"{problem} (round {number} of worker {worker})")

    def _refuse(self, push: Push, message: str) -> None:
        worker = -1
        if self._is_worker(push.worker):
            worker = push.worker
            self.refused[worker] += 1
        self._note("refused", worker, message=message)
        raise PushRefused(f"The push was refused and the center not changed: {message}")

    def _is_worker(self, worker: Any) -> bool:
        is_number = isinstance(worker, int | np.integer)
        is_number = is_number and not isinstance(worker, bool)
        return is_number and 0 <= worker < self.num_workers

    def _unknown(self, worker: Any) -> str:
        return (
            f"There is no worker {worker!r}. Workers have the numbers 0 to "
            f"{self.num_workers - 1}."
        )

    def _note(self, kind, worker, staleness=0, shown=None, message=""):
        self._events.append(
            Event(
                kind=kind,
                worker=int(worker),
                round=int(self._rounds[worker]) if worker >= 0 else 0,
                local_step=int(self._local_steps[worker]) if worker >= 0 else 0,
                global_step=self._holder.global_step,
                staleness=int(staleness),
                time=time.time(),
                shown=dict(shown or {}),
                message=message,
            )
        )


class _Variables:
    """The paths, shapes and dtypes of a tree, and the way back from paths to a tree."""

    def __init__(self, tree: Any):
        leaves, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.paths = tuple(path_of(path) for path, _ in leaves)
        self.shapes = tuple(jnp.shape(leaf) for _, leaf in leaves)
        self.dtypes = tuple(np.dtype(leaf.dtype) for _, leaf in leaves)

    def tree(self, arrays: Arrays) -> Any:
        return self.treedef.unflatten([arrays[path] for path in self.paths])

    def arrays(self, tree: Any) -> Arrays:
        return dict(zip(self.paths, self.treedef.flatten_up_to(tree), strict=True))

    def problem(self, what: str, arrays: Any, check_leaf: Callable) -> str:
        """What is wrong with arrays that a worker sent; "" if nothing is."""
        if not isinstance(arrays, dict):
            return f"{what} must be a dict from paths to arrays; got {type(arrays)}."
        unknown = [path for path in arrays if path not in self.paths]
        missing = [path for path in self.paths if path not in arrays]
        if unknown or missing:
            return (
                f"{what} does not have the structure of the parameters: unknown "
                f"{unknown}, missing {missing}. Push what Worker.step was given for "
                "the same parameters."
            )
        for path, shape, dtype in zip(
            self.paths, self.shapes, self.dtypes, strict=True
        ):
            problem = check_leaf(arrays[path], shape, dtype)
            if problem:
                return f"{what} at {path} {problem}"
        return ""


class _Center:
    """The center under a rule."""

    def __init__(self, params, rule: CenterRule, at: Round, copy_replies: bool):
        center = start_center(params)
        self.variables = _Variables(center)
        self.rule = rule
        self.at = at
        self.copy_replies = copy_replies
        self.traffic = traffic(rule, at)
        self.global_step = 0
        # The center before a worker's last push, for a worker that did not hear of it.
        self.kept: dict[int, Arrays] = {}
        # The rounds absorbed when a worker last took the center.
        self.seen = [0] * at.num_workers
        self.outer: Any = ()
        # A contribution made at the server has not been divided yet.
        self.at_server = self.traffic.sends != ("contribution",)
        self.adds = rule.outer is None and not (
            self.at_server and rule.mean_over == "workers"
        )
        self.piecewise = _is_elementwise(rule, at)
        keeps_before = "before" in self.traffic.replies
        if self.adds:
            self.center: dict[str, Any] = {
                path: np.array(leaf, order="C")
                for path, leaf in self.variables.arrays(center).items()
            }
        else:
            self.center = self.variables.arrays(center)
            if rule.outer is not None:
                self.outer = rule.outer.init(center)
            self.step = jax.jit(
                self._step, donate_argnums=(1,) if keeps_before else (0, 1)
            )

    def _step(self, center, outer, sent, steps):
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

    def problem(self, sent: Any) -> str:
        if not isinstance(sent, dict) or set(sent) != set(self.traffic.sends):
            got = sorted(sent) if isinstance(sent, dict) else type(sent)
            return f"The rule needs {sorted(self.traffic.sends)}; got {got}."
        for name in self.traffic.sends:
            problem = self.variables.problem(name, sent[name], _array_problem)
            if problem:
                return problem
        return ""

    def absorb(self, worker: int, sent: dict[str, Arrays], steps: int) -> Reply:
        keeps_before = "before" in self.traffic.replies
        before = self.center
        if not self.adds:
            self.center, self.outer = self.step(
                self.center, self.outer, sent, jnp.int32(steps)
            )
        else:
            if keeps_before:
                # The buffers of what was kept for this worker become the new center:
                # nothing is copied, and no memory is asked for.
                self.center = self.kept.pop(worker, None) or {
                    path: np.empty_like(array) for path, array in before.items()
                }
            self._add(before, sent, steps)
        if keeps_before:
            self.kept[worker] = before
        self.global_step += 1
        self.seen[worker] = self.global_step
        return self._reply(before)

    def _add(self, before: Arrays, sent: dict[str, Arrays], steps: int) -> None:
        """The center after, in its buffers: before + what is contributed."""
        at = self.at._replace(steps=np.int32(steps))
        for path, array in before.items():
            after = self.center[path]
            of_path = {name: arrays[path] for name, arrays in sent.items()}
            if not self.at_server:
                np.add(array, of_path["contribution"], out=after)
                continue
            pieces: list[Any] = [...]
            if self.piecewise:
                array, after = array.reshape(-1), after.reshape(-1)
                of_path = {n: np.asarray(x).reshape(-1) for n, x in of_path.items()}
                starts = range(0, array.size, PIECE)
                pieces = [slice(start, start + PIECE) for start in starts]
            for piece in pieces:
                center = array[piece]
                own = self._own(center, {n: x[piece] for n, x in of_path.items()})
                total = contributions(self.rule, own, center, at)
                np.add(center, total, out=after[piece])

    def _reply(self, before: Arrays) -> Reply:
        centers = {"before": before, "after": self.center}
        arrays = {name: self._out(centers[name]) for name in self.traffic.replies}
        return Reply(arrays, self.global_step, 0)

    def _out(self, arrays: Arrays) -> Arrays:
        convert = np.array if self.copy_replies else np.asarray
        return {path: convert(array) for path, array in arrays.items()}

    def reply_again(self, worker: int) -> Reply:
        # After a restart nothing is kept, and the center now is as good.
        return self._reply(self.kept.get(worker, self.center))

    def join(self, worker: int) -> None:
        self.seen[worker] = self.global_step

    def staleness(self, worker: int) -> int:
        return self.global_step - self.seen[worker]

    def is_waiting(self, worker: int) -> bool:
        return False

    def current(self) -> Arrays:
        return self._out(self.center)

    def tree(self) -> Any:
        copies = {path: np.array(array) for path, array in self.center.items()}
        return self.variables.tree(copies)

    def averages_tree(self) -> Any:
        return None

    def save(self) -> dict[str, Any]:
        return {
            "center": {path: np.asarray(array) for path, array in self.center.items()},
            "outer": _numbered(self.outer),
            "global_step": np.array(self.global_step),
        }

    def load(self, state: dict[str, Any]) -> None:
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


class _Updates:
    """The parameters under `SyncReplicas`, with the tokens."""

    def __init__(self, params, agreement: SyncReplicas, inner, num_workers: int):
        check_variables(params)
        self.inner = check_inner(inner, "Server(..., inner=optax.adam(1e-3))")
        self.agreement = agreement
        self.num_workers = num_workers
        self.params = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        self.variables = _Variables(self.params)
        self.accumulator = start_accumulator(self.params)
        self.inner_state = self.inner.init(self.params)
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
        self.global_step = global_step
        self.count = 0
        self.local_steps = [global_step] * self.num_workers
        self.accepted_at = [-1] * self.num_workers
        self.was_used = [True] * self.num_workers
        self.waiting: list[int] = []
        tokens = required if agreement.num_tokens < 0 else agreement.num_tokens
        self.tokens = deque([global_step] * tokens)

    def _move(self, accumulator, inner_state, params, averages, grads, count, step):
        required = self.agreement.replicas_to_aggregate
        mean = mean_of(accumulator, grads, count, required)
        updates, inner_state = self.inner.update(mean, inner_state, params)
        updates = jax.tree.map(
            lambda u, p: jnp.zeros_like(p) if u is None else u,
            updates,
            params,
            is_leaf=_is_grad,
        )
        params = apply_updates(params, updates)
        if self.agreement.variable_averages is not None:
            averages = advance_averages(
                averages, params, self.agreement.variable_averages, step
            )
        return clear(accumulator, mean), inner_state, params, averages

    def problem(self, sent: Any) -> str:
        if not isinstance(sent, dict) or set(sent) != {"grads"}:
            got = sorted(sent) if isinstance(sent, dict) else type(sent)
            return f"SyncReplicas needs ['grads']; got {got}."
        return self.variables.problem("grads", sent["grads"], _grad_problem)

    def absorb(self, worker: int, sent: dict[str, Arrays], steps: int) -> Reply:
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
        return self._reply(worker)

    def join(self, worker: int) -> None:
        # As at the start: one gradient before the first token.
        self.local_steps[worker] = self.global_step
        if worker in self.waiting:
            self.waiting.remove(worker)

    def staleness(self, worker: int) -> int:
        return max(self.global_step - self.local_steps[worker], 0)

    def is_waiting(self, worker: int) -> bool:
        return worker in self.waiting

    def current(self) -> Arrays:
        # Never donated, so that an answer stays what it is while it travels.
        return {p: np.asarray(a) for p, a in self.variables.arrays(self.params).items()}

    def tree(self) -> Any:
        return jax.tree.map(np.array, self.params)

    def averages_tree(self) -> Any:
        if self.agreement.variable_averages is None:
            return None
        return jax.tree.map(
            lambda average, p: np.asarray(average.astype(p.dtype)),
            self.averages,
            self.params,
        )

    def save(self) -> dict[str, Any]:
        return {
            "center": self.current(),
            "inner": _numbered(self.inner_state),
            "averages": _numbered(self.averages),
            "global_step": np.array(self.global_step),
        }

    def load(self, state: dict[str, Any]) -> None:
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


def check_agreement(
    agreement: Any, num_workers: Any, communication_period: Period
) -> None:
    """Refuse an agreement that does not fit the number of workers or the period."""
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise TypeError(f"num_workers must be an integer; got {num_workers!r}.")
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more; got {num_workers}.")
    if isinstance(agreement, SyncReplicas):
        total = agreement.total_num_replicas
        if total not in (None, num_workers):
            raise ValueError(
                f"total_num_replicas={total}, but there are {num_workers} workers. "
                "Leave it out, or make them equal."
            )
        required = agreement.replicas_to_aggregate
        if 0 <= agreement.num_tokens < required - num_workers:
            raise ValueError(
                f"num_tokens={agreement.num_tokens} is too few for a first update: "
                f"{num_workers} workers have {num_workers} gradients without a token, "
                f"and it needs {required}. Pass {required - num_workers} or more, or "
                "-1."
            )
        return
    if not isinstance(agreement, CenterRule):
        raise TypeError(
            "agreement must be a center rule such as oxs.local_sgd_rule(), or "
            f"oxs.runtime.SyncReplicas(3); got {agreement!r}."
        )
    if agreement.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for {agreement.num_workers} workers, but there are "
            f"{num_workers}. Make them equal."
        )
    if agreement.check is not None:
        agreement.check(communication_period)


def partition(params: Any, num_parts: int) -> list[Any]:
    """Split the variables into trees of about equal size, `None` where one has none.

    Args:
        params: A tree of arrays.
        num_parts: How many parts, at most one for each variable.

    Returns:
        Trees like `params`; each variable is in one of them.

    Raises:
        ValueError: More parts than variables.

    Example:
        >>> import numpy as np
        >>> from optx_sync.runtime import partition
        >>> parts = partition({"a": np.zeros(9), "b": np.zeros(5), "c": np.zeros(4)}, 2)
        >>> [[name for name, x in part.items() if x is not None] for part in parts]
        [['a'], ['b', 'c']]
    """
    leaves, treedef = jax.tree.flatten(params)
    if not 1 <= num_parts <= len(leaves):
        raise ValueError(
            f"{len(leaves)} variables cannot be split among {num_parts} servers: each "
            "needs one or more. Pass a smaller num_servers."
        )
    if num_parts == 1:
        return [params]
    owner, sizes = [0] * len(leaves), [0] * num_parts
    bytes_of = [math.prod(jnp.shape(x)) * x.dtype.itemsize for x in leaves]
    filled = [0] * num_parts
    for i in sorted(range(len(leaves)), key=lambda i: -bytes_of[i]):
        # Variables of size 0 must not leave a part empty.
        owner[i] = min(range(num_parts), key=lambda part: (sizes[part], filled[part]))
        sizes[owner[i]] += bytes_of[i]
        filled[owner[i]] += 1
    return [
        treedef.unflatten([x if owner[i] == k else None for i, x in enumerate(leaves)])
        for k in range(num_parts)
    ]


def join_parts(parts: list[Any], params: Any) -> Any:
    """The whole tree from the parts that `partition` made, in the dtypes of `params`.

    Args:
        parts: The parts, each with arrays of its own.
        params: The tree that was split; its structure and dtypes are those of the
            result.

    Returns:
        A tree like `params`.
    """
    found = {}
    for part in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            found[path_of(path)] = leaf
    return jax.tree_util.tree_map_with_path(
        lambda path, param: np.asarray(found[path_of(path)]).astype(param.dtype), params
    )


def path_of(path: Any) -> str:
    """The name of a variable in messages, checkpoints and on the wire."""
    return jax.tree_util.keystr(path) or "the root"


def round_of(num_workers: int, communication_period: Period, steps: Any) -> Round:
    """What a rule may know of a round."""
    period = None if callable(communication_period) else communication_period
    return Round(num_workers, period, jnp.int32(steps))


def _reads(formula: Callable) -> list[bool]:
    """Which of its four arguments a formula for one array reads."""
    example = jax.ShapeDtypeStruct((2,), jnp.float32)
    jaxpr = jax.make_jaxpr(formula)(*[example] * 4).jaxpr
    read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    read |= {id(var) for var in jaxpr.outvars}
    return [id(var) in read for var in jaxpr.invars]


def _is_elementwise(rule: CenterRule, at: Round) -> bool:
    """Whether a contribution is known to be made of each element alone."""

    def contribute(x, s, a, c):
        own = Own(x, s, None if rule.accumulate is None else a)
        return rule.contribute(own, c, at)

    example = jax.ShapeDtypeStruct((2,), jnp.float32)
    jaxpr = jax.make_jaxpr(contribute)(*[example] * 4)
    constants = all(jnp.ndim(constant) == 0 for constant in jaxpr.consts)
    return constants and all(e.primitive.name in ARITHMETIC for e in jaxpr.jaxpr.eqns)


def _array_problem(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> str:
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        return f"must be an array; got {type(array).__name__}."
    if array.dtype != dtype:
        return f"must have dtype {dtype}; got {array.dtype}."
    if array.shape != shape:
        return f"must have shape {shape}; got {array.shape}."
    if not _is_finite(np.asarray(array)):
        return "holds a NaN or infinity."
    return ""


def _grad_problem(grad: Any, shape: tuple[int, ...], dtype: np.dtype) -> str:
    if grad is None:
        return ""
    if not isinstance(grad, tuple):
        return _array_problem(grad, shape, dtype)
    indices, values = grad
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim != 1:
        return f"must have integer indices in one row; got {indices.dtype}."
    return _array_problem(values, (len(indices), *shape[1:]), dtype)


def _is_finite(array: np.ndarray) -> bool:
    """One pass without a temporary array: a sum is finite only if its terms are."""
    if array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            flat = array.reshape(-1)
            if np.isfinite(np.dot(flat, flat)):
                return True
    # Squares of finite terms may overflow.
    return bool(np.isfinite(array).all())


def _as_grad(grad: Any) -> Any:
    return IndexedSlices(*grad) if isinstance(grad, tuple) else grad


def _is_grad(x: Any) -> bool:
    return x is None or isinstance(x, IndexedSlices)


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


class _Orbax:
    """Orbax, synchronously: it writes to a directory aside and renames that."""

    def __init__(self):
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoint_dir needs Orbax: pip install 'optx-sync[ray]'."
            ) from error
        self._module = orbax.checkpoint
        self._checkpointer = self._module.Checkpointer(
            self._module.PyTreeCheckpointHandler()
        )

    def save(self, path: pathlib.Path, state: Any) -> None:
        self._checkpointer.save(path, state)

    def restore(self, path: pathlib.Path, like: Any) -> Any:
        as_numpy = self._module.RestoreArgs(restore_type=np.ndarray)
        return self._checkpointer.restore(
            path,
            item=like,
            restore_args=jax.tree.map(lambda _: as_numpy, like),
        )
