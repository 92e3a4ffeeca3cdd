# SPDX-License-Identifier: Apache-2.0
"""The holder of the center: takes one push at a time, checks it, answers it.

Plain Python: no Ray, no processes. A push is absorbed as a whole or refused as a whole,
and applied once however often it is sent. What is applied when is decided in
`protocol`; what a push does to the center stands in `agreements`.
"""

import pathlib
import threading
import time
import uuid
from typing import Any

import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.exchange.contract import Exchange
from optx_sync.runtime import protocol
from optx_sync.runtime.agreements import Agreement, way_of
from optx_sync.runtime.agreements.contract import Held, by_path, check_saved
from optx_sync.runtime.checkpoints import Checkpoints, Damaged
from optx_sync.runtime.messages import (
    Event,
    Joined,
    NoStart,
    Push,
    PushRefused,
    Reply,
)
from optx_sync.runtime.protocol import (
    Answer,
    Book,
    Client,
    Decision,
    Entry,
    Finish,
    Refused,
    Request,
    Restore,
    Send,
    Stay,
    Superseded,
    Turned,
)

# How long a server lets a worker wait for its token before it must ask again: not for
# long, the worker may be dead by then.
TOKEN_SECONDS = 2.0


class Server:
    """The center, or one part of it, and the only one who writes to it.

    Pushes are taken one at a time, from any thread. A bad one raises `PushRefused`, is
    counted and leaves everything as it was. A worker's last push sent again is answered
    and not applied again: with the center as it was before the push where the rule
    takes from that, else with the center as it is now.

    Where a worker has joined its pushes carry the incarnation that `join` told it, and
    those of an earlier one are refused.

    What a worker sends to be added is added in place. Where the center has a part in
    it, or there is an outer transformation, the next center is computed beside this
    one: center and outer state need twice their memory. If the center is split over
    several servers, the outer transformation sees each part alone: a norm over all
    variables is then one over the part.

    Args:
        params: The parameters to start from, a tree of floating arrays.
        agreement: A `CenterRule` or `SyncReplicas`.
        num_workers: N; workers have the numbers 0 to N - 1.
        inner: The optimizer that `SyncReplicas` applies; a rule has no use for it here.
        communication_period: The workers' period, which a rule may read.
        exchange: What the workers code their pushes with; see `run`.
        checkpoint_dir: Where to save the center, a folder or an address like
            `gs://bucket/run`; `None`: nowhere. If there is a checkpoint already, the
            server goes on from the last one that can be read.
        checkpoint_every: Save after so many pushes.
        copy_replies: `False` answers with views of the center, which the next push
            overwrites: for a caller who sends an answer off before taking a push.
        part: Its place among several servers; `None`: it is the only one. Part of
            several it is not ready until `protocol` says so: see `handle`.

    Raises:
        TypeError: An agreement, an inner transformation or parameters of a wrong type.
        ValueError: Numbers out of range; a checkpoint of other variables, workers or
            another optimizer.
    """

    def __init__(
        self,
        params: Any,
        agreement: Agreement,
        *,
        num_workers: int,
        inner: optax.GradientTransformation | None = None,
        communication_period: Period = 10,
        exchange: Exchange | None = None,
        checkpoint_dir: str | pathlib.Path | None = None,
        checkpoint_every: int = 100,
        copy_replies: bool = True,
        part: int | None = None,
    ):
        way = way_of(agreement, num_workers, communication_period, exchange)
        if checkpoint_every < 1:
            raise ValueError(
                f"checkpoint_every must be 1 or more; got {checkpoint_every}."
            )
        self._serve = lambda params: way.serve(params, inner, copy_replies)
        self._holder: Held = self._serve(params)
        self.num_workers = num_workers
        self._changed = threading.Condition()
        self._checkpoints: Checkpoints | None = None
        if checkpoint_dir is not None:
            self._checkpoints = Checkpoints(checkpoint_dir)
        cuts = self._checkpoints.numbers() if self._checkpoints else ()
        self._book = Book(
            (Entry(),) * num_workers,
            # A server that starts later has a higher number.
            (time.time_ns(), 0),
            every=checkpoint_every if self._checkpoints and not part else 0,
            cuts=cuts,
        )
        self._local_steps: list[int] = [0] * num_workers
        self._staged: dict[int, tuple[Push, dict[str, float]]] = {}
        # Workers whose programs have ended.
        self._left: set[int] = set()
        self._events: list[Event] = []
        self._forgotten: int = 0  # events that whoever reads them has
        self._boot = uuid.uuid4().hex
        self.refused: list[int] = [0] * num_workers
        # Whether the parameters to start from are here, or went with a process.
        self._at_start: bool = True
        if part is None:
            self._converse(protocol.begin(Client(1, 1), "look"))

    # For workers in the same process, and for a server that is the only one.

    def join(self, worker: int) -> Joined:
        """The center for a worker that starts, or that replaces one that died."""
        self._check_worker(worker)
        client = protocol.begin(Client(1, 1, int(worker)), "join")
        return self._converse(client)[1]

    def leave(self, worker: int) -> None:
        """A worker's program has ended: nobody waits for its gradients any more.

        Not for a worker that died and will be replaced. It may be said again, and must
        be to a server that has been restarted.
        """
        self._check_worker(worker)
        with self._changed:
            if worker not in self._left:
                self._left.add(worker)
                self._note("left", worker)
            self._holder.release(self._left)
            self._changed.notify_all()

    def everyone_joined(self) -> bool:
        """Whether all workers have joined, since the beginning."""
        entries = self._book.entries
        return all(
            entry.incarnation > 0 or worker in self._left
            for worker, entry in enumerate(entries)
        )

    def push(self, push: Push) -> Reply:
        """Absorb what a worker sends, and answer it.

        Raises:
            PushRefused: An unknown worker, one that has been replaced, a round that was
                applied long ago or comes too early, arrays that are missing, unknown,
                of a wrong shape or dtype, or not finite; a center that would overflow.
        """
        with self._changed:
            # Where the server has restarted behind a worker's back, it is in this one's
            # epoch all the same.
            send = Send(
                "push", self._book.epoch, push.worker, push.incarnation, push.round,
                push.round, 0, 0, 0,
            )  # fmt: skip
            answer, reply = self.handle(send, push)
        if isinstance(answer, Superseded):
            raise PushRefused(_refusal(_superseded(push, answer)))
        if isinstance(answer, Refused):
            raise PushRefused(_refusal(answer.message))
        return reply

    def wait(self, worker: int, timeout: float = 10.0) -> Reply:
        """Wait for a worker's token; after `timeout` seconds it must ask again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holder.is_waiting(worker), timeout)
            number = self._book.entries[worker].round
            return self._holder.reply_again(worker)._replace(round=number)

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
        What lies before `since` is forgotten.
        """
        with self._changed:
            since = since if boot == self._boot else 0
            del self._events[: max(since - self._forgotten, 0)]
            self._forgotten = max(self._forgotten, since)
            return self._boot, list(self._events)

    def checkpoint(self) -> Any:
        """Save the center: written aside, then renamed, in Orbax's format."""
        if self._checkpoints is None:
            return None
        with self._changed:
            number = self._book.cut + 1
            self.handle(protocol.Save(self._book.epoch, 0, number))
            return self._checkpoints.folder / str(number)

    def _converse(self, client: Client) -> tuple[Client, Any]:
        """A client of this server alone does what it has begun."""
        payload = None
        while wanted := protocol.wants(client):
            for request in wanted.values():
                answer, payload = self.handle(request)
                client = protocol.hears(client, 0, answer)
        return client, payload

    # For whoever speaks the protocol.

    def begin(self, params: Any) -> None:
        """The parameters to start from, for a server that was made without them."""
        with self._changed:
            self._holder = self._serve(params)
            self._at_start = True

    def without_start(self) -> "Server":
        """This server, made of shapes: it cannot start, but from a checkpoint."""
        self._at_start = False
        return self

    def _header_problem(self, push: Push) -> str:
        if not self._is_worker(push.worker):
            return self._unknown(push.worker)
        if not _is_integer(push.round):
            return f"round must be an integer; got {push.round!r}."
        return ""

    def handle(self, request: Request, push: Push | None = None) -> tuple[Answer, Any]:
        """What is decided about a request, done: the answer, and what comes with it.

        `Finish` comes with a `Joined`, what ends a push or a wait with a `Reply`.
        """
        with self._changed:
            if isinstance(request, Stay) and request.kind == "token":
                worker = request.worker
                self._changed.wait_for(
                    lambda: not self._holder.is_waiting(worker), TOKEN_SECONDS
                )
            try:
                return self._handle(request, push)
            finally:
                self._changed.notify_all()

    def _handle(self, request: Request, push: Push | None) -> tuple[Answer, Any]:
        if push is not None and (problem := self._header_problem(push)):
            return self._refuse(push, problem), None
        if not self._is_worker(getattr(request, "worker", 0)):
            return Refused(self._unknown(request.worker)), None  # type: ignore
        if isinstance(request, Restore) and request.epoch != self._book.epoch:
            known = request.cut in self._book.cuts
            if not known and not (request.cut == 0 and self._at_start):
                raise NoStart(
                    "A server died, and the center with it. Pass checkpoint_dir, so "
                    "that it can come back."
                )
        decision = protocol.decide(self._book, request)
        book, answer, actions = decision
        sizes: dict[str, float] = {}
        if any(action[0] == "stage" for action in actions) and push is not None:
            problem, sizes, arrays = self._holder.expected.read(push.arrays)
            if problem:
                return self._refuse(push, f"{problem} {_of(push)}"), None
            push = push._replace(arrays=arrays)
        if isinstance(answer, Superseded | Refused) and push is not None:
            message = (
                _superseded(push, answer)
                if isinstance(answer, Superseded)
                else answer.message
            )
            self._refuse(push, message)
        reply: Any = None
        for name, *rest in actions:
            if name == "stage" and push is not None:
                self._staged[rest[0]] = (push, sizes)
            elif name == "drop":
                self._staged.pop(rest[0], None)
            elif name == "again":
                self._note("retry", rest[0])
                reply = self._holder.reply_again(rest[0])
            elif name == "apply":
                staged, staged_sizes = self._staged.pop(rest[0])
                reply = self._apply(staged, staged_sizes, book)
                if reply is None:
                    return self._overflow(request, staged)
            elif name == "save":
                book = self._save(book, *rest)
            elif name == "load" and isinstance(request, Restore):
                return self._load(request), None
        return self._done(request, Decision(book, answer), reply)

    def _done(self, request, decision: Decision, reply) -> tuple[Answer, Any]:
        before, (self._book, answer, _) = self._book, decision
        if isinstance(answer, Turned | Superseded | Refused | protocol.Status):
            return answer, None
        if isinstance(request, protocol.Settle) and not before.ready:
            self._note("restored" if before.whole else "started", -1)
        if isinstance(request, Finish):
            return answer, self._joined(request.worker)
        if isinstance(request, Stay) and request.kind == "token":
            reply = self._holder.reply_again(request.worker)
        if isinstance(request, Stay) and request.kind == "start":
            return answer._replace(busy=not self.everyone_joined()), None
        if reply is None or not isinstance(request, Send | Stay):
            return answer, None
        number = self._book.entries[request.worker].round
        answer = answer._replace(busy=reply.waiting)
        return answer, reply._replace(round=number)

    def _joined(self, worker: int) -> Joined:
        self._left.discard(worker)
        self._holder.join(worker)
        self._note("join", worker)
        entry = self._book.entries[worker]
        return Joined(
            self._holder.current(),
            entry.round,
            self._local_steps[worker],
            self._holder.global_step,
            entry.joins - 1,
            entry.incarnation,
        )

    def _apply(self, push: Push, sizes, book: Book) -> Reply | None:
        worker = push.worker
        staleness = self._holder.staleness(worker)
        reply = self._holder.absorb(worker, push, sizes)
        if reply is None:
            return None
        self._holder.release(self._left)
        self._local_steps[worker] = int(push.local_step)
        if push.lost:
            message = f"{push.lost} of its pushes went with a server"
            self._note("rolled_back", worker, push.lost, message=message)
        kind = "push" if reply.used else "dropped"
        self._note(kind, worker, staleness, push, book.entries[worker].round)
        return reply._replace(staleness=staleness)

    def _overflow(self, request: Request, push: Push) -> tuple[Answer, Any]:
        """The center would not be finite; nothing has changed here."""
        message = f"the center would overflow {_of(push)}"
        refused = self._refuse(push, message)
        if isinstance(request, Send) and request.kind == "push":
            return refused, None
        # Other servers may have applied their part: all go back together.
        self._book = self._book._replace(ready=False)
        return Turned(), None

    def _save(self, book: Book, number: int, of_cut: Book) -> Book:
        if self._checkpoints is None:
            return book
        arrays, notes = self._holder.save()
        staged = {}
        for worker, (push, sizes) in self._staged.items():
            header = push._replace(arrays={})._asdict()
            notes.setdefault("staged", []).append([worker, header, sizes])
            staged[str(worker)] = push.arrays
        notes["entries"] = [list(entry) for entry in of_cut.entries]
        notes["local_steps_of_workers"] = self._local_steps
        notes["made_by"] = self._holder.describe()
        try:
            self._checkpoints.save(number, {**arrays, "staged": staged}, notes)
        except Exception as error:  # A full disk: go on, and try the next one.
            self._note("unsaved", -1, message=f"Checkpoint {number}: {error}"[:500])
            return book
        book = protocol.saved(book, number, of_cut)
        gone = protocol.unneeded(book)
        for old in gone:
            self._checkpoints.delete(old)
        return book._replace(cuts=tuple(n for n in book.cuts if n not in gone))

    def _load(self, request: Restore) -> Answer:
        entries = None
        if request.cut and self._checkpoints is not None:
            try:
                arrays, notes = self._checkpoints.load(request.cut)
            except Damaged as error:
                self._checkpoints.put_aside(request.cut)
                cuts = tuple(n for n in self._book.cuts if n != request.cut)
                self._book = self._book._replace(cuts=cuts)
                self._note("damaged", -1, message=f"{error} An earlier one is taken.")
                return Turned()
            entries = self._read(arrays, notes)
        self._book = protocol.restored(self._book, entries, request)
        return protocol.decide(self._book, request).answer

    def _read(self, arrays, notes) -> tuple[Entry, ...]:
        if len(notes["entries"]) != self.num_workers:
            raise ValueError(
                f"The checkpoint is of {len(notes['entries'])} workers; got "
                f"num_workers={self.num_workers}. Pass another checkpoint_dir."
            )
        made_by = self._holder.describe()
        staged = arrays.pop("staged", {})
        if notes["made_by"] != made_by:
            # Other variables have another state, and are told by name.
            check_saved(by_path(self._holder.tree()), arrays["center"])
            raise ValueError(
                f"The checkpoint was made by {notes['made_by']}, and this server is "
                f"{made_by}. Pass the same rule and optimizer, or another "
                "checkpoint_dir."
            )
        self._holder.load(arrays, notes)
        self._local_steps = list(notes["local_steps_of_workers"])
        self._staged = {}
        for worker, header, sizes in notes.get("staged", []):
            push = Push(**{**header, "arrays": staged[str(worker)]})
            self._staged[worker] = (push, sizes)
        return tuple(
            Entry(inc, round_, tuple(last), tuple(lies), joins)
            for inc, round_, last, lies, joins in notes["entries"]
        )

    def _refuse(self, push: Push, message: str) -> Refused:
        worker = -1
        if self._is_worker(push.worker):
            worker = push.worker
            self.refused[worker] += 1
        self._note("refused", worker, message=message)
        return Refused(message)

    def _check_worker(self, worker: Any) -> None:
        if not self._is_worker(worker):
            raise ValueError(self._unknown(worker))

    def _is_worker(self, worker: Any) -> bool:
        return _is_integer(worker) and 0 <= worker < self.num_workers

    def _unknown(self, worker: Any) -> str:
        return (
            f"There is no worker {worker!r}. Workers have the numbers 0 to "
            f"{self.num_workers - 1}."
        )

    def _note(self, kind, worker, staleness=0, push=None, number=None, message=""):
        if number is None:
            number = self._book.entries[worker].round if worker >= 0 else 0
        self._events.append(
            Event(
                kind=kind,
                worker=int(worker),
                round=int(number),
                local_step=int(self._local_steps[worker]) if worker >= 0 else 0,
                global_step=self._holder.global_step,
                staleness=int(staleness),
                time=time.time(),
                shown=dict(push.shown) if push else {},
                message=message,
                seconds=push.seconds if push else 0.0,
                bytes=push.bytes if push else 0,
            )
        )


def _is_integer(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _of(push: Push) -> str:
    return f"(round {push.round} of worker {push.worker})"


def _superseded(push: Push, answer: Superseded) -> str:
    return (
        f"worker {push.worker} has joined again: incarnation {push.incarnation} is "
        f"not the newest one, {answer.newest}. Only the newest may push; call join()."
    )


def _refusal(message: str) -> str:
    return f"The push was refused and the center not changed: {message}"
