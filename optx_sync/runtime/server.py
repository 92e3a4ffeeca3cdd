# SPDX-License-Identifier: Apache-2.0
"""The holder of the center: takes one push at a time, checks it, answers it.

Plain Python: no Ray, no processes. A push is absorbed as a whole or refused as a whole,
and applied once however often it is sent.
"""

import pathlib
import shutil
import threading
import time
import uuid
from typing import Any

import jax
import numpy as np
import optax

from optx_sync.center.rule import Period
from optx_sync.runtime.holders import Center, Updates
from optx_sync.runtime.protocol import (
    Agreement,
    Event,
    Joined,
    Push,
    PushRefused,
    Reply,
    SyncReplicas,
    check_agreement,
    expected,
    round_of,
)

KEPT_CHECKPOINTS = 2


class Server:
    """The center, or one part of it, and the only one who writes to it.

    Pushes are taken one at a time, from any thread. A bad one raises `PushRefused`, is
    counted and leaves everything as it was. A worker's last push sent again is answered
    and not applied again: with the center as it was before the push where the rule
    takes from that, else with the center as it is now.

    What a worker sends to be added is added in place. Where the center has a part in
    it, or there is an outer transformation, the round is compiled and writes over
    buffers that are not needed any more. If the center is split over several servers,
    the outer transformation sees each part alone: a norm over all variables is then
    one over the part.

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
        at = round_of(num_workers, communication_period, 1)
        if isinstance(agreement, SyncReplicas):
            self._holder = Updates(params, agreement, inner, num_workers)
        else:
            self._holder = Center(params, agreement, at, copy_replies)
        self._expected = expected(agreement, params, at)
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
        # Workers whose programs have ended.
        self._left: set[int] = set()
        # Workers whose next round may have any number: the rounds between are lost.
        self._lost_rounds: set[int] = set()
        self._pushes = 0
        self._events: list[Event] = []
        self._boot = uuid.uuid4().hex
        self.refused: list[int] = [0] * num_workers
        restored = self._restore()
        self._note("restored" if restored else "started", -1)

    def join(self, worker: int) -> Joined:
        """The center for a worker that starts, or that replaces one that died."""
        with self._changed:
            if not self._is_worker(worker):
                raise ValueError(self._unknown(worker))
            self._left.discard(worker)
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

    def leave(self, worker: int) -> None:
        """A worker's program has ended: nobody waits for its gradients any more.

        Not for a worker that died and will be replaced. It may be said again, and must
        be to a server that has been restarted.
        """
        with self._changed:
            if not self._is_worker(worker):
                raise ValueError(self._unknown(worker))
            if worker not in self._left:
                self._left.add(worker)
                self._note("left", worker)
            self._holder.release(self._left)
            self._changed.notify_all()

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
            holder.release(self._left)
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
        problem = self._expected.problem(push.arrays)
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
