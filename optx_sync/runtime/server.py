# SPDX-License-Identifier: Apache-2.0
"""A parameter server: takes one push at a time, checks it, applies it, answers it.

Plain Python: no Ray, no processes. A push is absorbed or refused as a whole, and
applied once however often it is sent. `protocol` decides what is applied when;
`agreements` say what a push does to the center.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.center.fragments import Fragments
from optx_sync.core.checks import integer
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.coded import bytes_of
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime import protocol
from optx_sync.runtime.agreements import Agreement, Held, way_of
from optx_sync.runtime.agreements.contract import Settings
from optx_sync.runtime.agreements.saved import Notes, check_saved, difference
from optx_sync.runtime.checkpoints import Checkpoints, Damaged, set_aside
from optx_sync.runtime.messages import (
    Arrays,
    Event,
    Joined,
    JoinedPart,
    Pending,
    Push,
    PushRefused,
    Reply,
)
from optx_sync.runtime.parts import PartsLayout, lay_out
from optx_sync.runtime.protocol import Answer, Book, Request
from optx_sync.runtime.samples import Lease, Ledger, Samples
from optx_sync.runtime.system import here

# Seconds that a worker may wait for its token before it must ask again: few, since the
# worker may have died.
TOKEN_SECONDS = 2.0


class Server:
    """A parameter server: it holds the center or parts of it, and alone writes to it.

    Pushes are taken one at a time, from any thread. A bad one raises `PushRefused`, is
    counted and changes nothing. A worker's last push of a part, sent again, is answered
    and not applied again: with the center before that push if the rule takes from it,
    else with the center as it is now.

    Once a worker has joined, its pushes carry the incarnation that `join` gave it, and
    those of an earlier incarnation are refused.

    Contributions that are only added are added in place. If the rule's formula reads
    the center, or there is an outer transformation, the next center is computed beside
    this one: center and outer state need twice their memory. The outer transformation
    sees each part alone: a norm over all variables is then one over the part.

    Args:
        params: The parameters to start from, a tree of floating arrays; or their
            shapes, for a server that comes back and must find a checkpoint.
        agreement: A `CenterRule` or `SyncReplicas`.
        num_workers: N; workers have the numbers 0 to N - 1.
        inner: The optimizer that `SyncReplicas` applies; a rule does not use it here.
        communication_period: The workers' period, which a rule may read.
        exchange: What the workers code their pushes with; see `run`.
        pull_exchange: What the server codes its answers with; see `run`.
        fragments: The parts that meet one after the other; see `run`.
        delay: The workers' steps from a push until they take the answer.
        meet: When a meeting is full; see `run`.
        samples: What workers lease, at the first server; see `run`.
        checkpoint_dir: Where to save the center, a folder or an address like
            `gs://bucket/run`; `None`: nowhere. If there is a checkpoint already, the
            server continues from the last one that can be read.
        checkpoint_every: Save after so many pushes.
        resume: `False`: do not continue from a checkpoint; existing ones are put aside.
        copy_replies: `False` answers with views of the center, which the next push
            overwrites: for a caller who sends an answer off before taking a push.
        number: Its number among several servers, from 0.
        num_servers: The number of servers.

    Raises:
        RuntimeError: Shapes, and no checkpoint.
        TypeError: An agreement, an inner transformation or parameters of a wrong type.
        ValueError: Numbers out of range; a checkpoint of other variables, workers or
            another optimizer; checkpoints none of which can be read; a folder to which
            another run saves, or which cannot be written.
    """

    def __init__(
        self,
        params: Tree,
        agreement: Agreement,
        *,
        num_workers: int,
        inner: optax.GradientTransformation | None = None,
        communication_period: Period = 10,
        exchange: Exchange | None = None,
        pull_exchange: Exchange | None = None,
        fragments: Fragments | None = None,
        delay: int | None = None,
        meet: Quorum | None = None,
        samples: Samples | None = None,
        checkpoint_dir: str | pathlib.Path | None = None,
        checkpoint_every: int = 100,
        resume: bool = True,
        copy_replies: bool = True,
        number: int = 0,
        num_servers: int = 1,
    ):
        settings = Settings(
            num_workers, communication_period, exchange, fragments, delay,
            pull_exchange, meet, num_servers,
        )  # fmt: skip
        way = way_of(agreement, settings)
        needs = 1 if meet is None or meet.merge is None else meet.merge.needs
        if samples is not None and needs > 1:
            raise ValueError(
                f"samples= counts each sample once, and merge= needs {needs} "
                "contributions: it could not merge the last samples, which fewer "
                "workers have. Pass a merge that needs one, such as "
                "oxs.exchange.median(), or leave out samples=."
            )
        integer("checkpoint_every", checkpoint_every, "Pass for example 100.")
        self.layout: PartsLayout = lay_out(params, way.fragments, num_servers)
        if integer("number", number, "The first server has 0.", 0) >= num_servers:
            raise ValueError(
                f"number is below num_servers={num_servers}; got {number}. Servers are "
                "numbered from 0."
            )
        self.parts: tuple[int, ...] = self.layout.of_server(number)
        self._like: Tree = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
        )
        self._serve = lambda part: way.serve(part, inner, copy_replies)
        self._held: list[Held] = []
        self.num_workers = num_workers
        self._changed: Any = here().condition()
        self._checkpoints: Checkpoints | None = None
        if checkpoint_dir is not None:
            folder = Checkpoints.path_of(checkpoint_dir)
            if not resume and folder.exists() and any(folder.iterdir()):
                set_aside(folder)
            self._checkpoints = Checkpoints(folder)
        every = checkpoint_every if self._checkpoints else 0
        epoch = here().stamp()  # A later start has a higher number.
        self._book: Book = protocol.new_book(num_workers, len(self.parts), epoch, every)
        self._resizes: bool = way.of_center
        self._ended: bool = False
        self._events: list[Event] = []
        self._forgotten: int = 0  # events that the reader has and that are gone here
        self._ledger: Ledger = Ledger(samples)
        # What an earlier run has counted, where this one takes no samples.
        self._counted_before: list[Any] | None = None
        comes_back = any(
            isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)
        )
        if not comes_back:
            self.check_writable()
        if self._go_on(comes_back):
            return
        if comes_back:
            raise RuntimeError(
                "A server died, and the center with it: "
                f"checkpoint_dir={str(checkpoint_dir)!r} holds no checkpoint any more."
            )
        picked = (self.layout.pick(params, part) for part in self.parts)
        self._held = [*map(self._serve, picked)]
        self._save()  # From now on there is a checkpoint to restore.
        self._note("started")

    def check_writable(self) -> None:
        """Refuse to begin a run that cannot save; one that comes back goes on."""
        if self._checkpoints is not None:
            self._checkpoints.check_writable()

    # For workers in the same process, and for a single server.

    def join(self, worker: int) -> Joined:
        """Hand the center to a worker that starts, or that replaces one that died."""
        self._check(worker)
        return self.handle(Request("enter", int(worker), 0))[1]

    def leave(self, worker: int) -> None:
        """A worker's program has ended: nobody waits for its gradients any more.

        Not for a worker that died and will be replaced. A second call does no harm, and
        a server that has been restarted needs one.
        """
        self._check(worker)
        with self._changed:
            if not self._book.entries[worker].left:
                self._book = self._book.with_entry(worker, left=True)
                self._note("left", worker)
                self._ledger.gone(worker)
            for held in self._held:
                held.release(self._left)
            self._count_samples()
            self._changed.notify_all()

    def everyone_joined(self) -> bool:
        """Whether all workers have joined since the run began."""
        return all(x.incarnation > 0 or x.left for x in self._book.entries)

    @property
    def refused(self) -> list[int]:
        """The pushes of each worker that were refused since this server started."""
        return [entry.refused for entry in self._book.entries]

    @property
    def _left(self) -> set[int]:
        """The workers whose programs have ended."""
        return {w for w, entry in enumerate(self._book.entries) if entry.left}

    def _hear(self, worker: int) -> None:
        """Count a request of a worker."""
        heard = self._book.entries[worker].heard + 1
        self._book = self._book.with_entry(worker, heard=heard)

    def push(self, push: Push) -> Reply:
        """Absorb a worker's push, and answer it.

        Raises:
            PushRefused: An unknown worker, one that has been replaced, a round that was
                applied long ago or comes too early, arrays that are missing, unknown,
                of a wrong shape or dtype, or not finite; a center that would overflow.
        """
        with self._changed:
            # The message gets the current epoch: for a worker in the same process a
            # restart of the server makes no difference.
            part = self.parts.index(push.part) if push.part in self.parts else -1
            send = Request(
                "send", push.worker, push.incarnation, self._book.epoch, part=part,
                round=push.round, counted=push.round,
            )  # fmt: skip
            answer, reply = self.handle(send, push)
        if isinstance(answer, protocol.Superseded | protocol.Refused):
            raise PushRefused(refusal(answer.message))
        return reply

    def send(self, push: Push) -> Pending:
        """As `push`, for a worker that reads the answer later."""
        try:
            reply = self.push(push)
        except PushRefused as error:
            return Pending(functools.partial(_raise, error))

        def wait():
            late = reply
            while late.waiting:
                late = self.wait(push.worker, part=push.part)
            return late._replace(staleness=reply.staleness)

        def is_there():
            with self._changed:
                held = self._held[self.parts.index(push.part)]
                return not held.is_waiting(push.worker)

        return Pending(wait, is_there)

    def wait(self, worker: int, timeout: float = 10.0, part: int = 0) -> Reply:
        """Wait `timeout` seconds at most for the answer to a push of a part."""
        place = self.parts.index(part)
        with self._changed:
            self._wait_for(worker, place, timeout)
            return self._reply_again(worker, place)

    def _wait_for(self, worker: int, place: int, seconds: float) -> None:
        held = self._held[place]
        self._wait(held, lambda: held.is_waiting(worker), seconds)

    def asked(self, worker: int, part: int, met: int, seconds: float = 0.0) -> bool:
        """Whether a worker should push a part now, though it may not be its turn yet.

        It should where others have opened a meeting of the part, or have met without it
        since it took `met` meetings. Waits `seconds` at most until that is so.
        """
        with self._changed:
            self._hear(worker)
            held = self._held[self.parts.index(part)]
            self._wait(held, lambda: not held.asks(worker, met), seconds)
            return held.asks(worker, met)

    def hears(self, worker: int) -> None:
        """Note that a worker lives, whose push or answer is long on its way."""
        with self._changed:
            self._hear(worker)

    def leaves(self, told: bool) -> bool:
        """Whether a worker leaves that was `told` to, or not: of a group, all do."""
        return told

    def lease(
        self, worker: int, incarnation: int, holds: list[int], count: int
    ) -> list[Lease] | None:
        """Hand out ranges of samples; `None`: ask again soon. See `Ledger.lease`."""
        with self._changed:
            if incarnation < self._book.entries[worker].incarnation:
                return []  # Its successor has them.
            self._hear(worker)
            for held in self._held:
                held.settle()
            self._count_samples()
            return self._ledger.lease(worker, holds, count)

    def _count_samples(self) -> None:
        """Note what became of the ranges of all pushes until now."""
        for held in self._held:
            outcomes, held.outcomes = held.outcomes, ()
            for outcome in outcomes if self._ledger.samples is not None else ():
                self._ledger.note(outcome)

    def _wait(self, held: Held, waits: Callable[[], bool], seconds: float) -> None:
        """Wait while this holds; a meeting may close meanwhile, by the clock."""
        end, step = here().now() + seconds, held.global_step
        while True:
            pause, left = held.settle(), end - here().now()
            if left <= 0 or not waits():
                break
            self._changed.wait(min(left, pause))
        if held.global_step != step:
            self._changed.notify_all()

    def end(self) -> None:
        """Refuse pushes from now on: what is saved next is all that was applied."""
        with self._changed:
            self._count_samples()
            if not self._ended and (left := self._ledger.uncounted):
                message = (
                    f"{left} ranges of samples were not counted: the run has ended "
                    "before. A program that takes samples goes on to their end."
                )
                self._note("uncounted", message=message)
            self._ended = True

    def center(self) -> Tree:
        """A copy of the center, in the structure of the parameters."""
        parts = self.center_of_parts()
        return jax.tree.map(np.array, self.layout.join(parts, self._like))

    def center_of_parts(self) -> dict[int, Arrays]:
        """A copy of the center of each part that lives here."""
        with self._changed:
            return {
                part: {path: np.array(x) for path, x in held.current().items()}
                for part, held in zip(self.parts, self._held, strict=True)
            }

    def averages(self) -> Tree:
        """The moving averages of `SyncReplicas(variable_averages=)`, or `None`."""
        with self._changed:
            return self._held[0].averages_tree()

    @property
    def global_step(self) -> int:
        """The rounds absorbed, over all parts; the updates of `SyncReplicas`."""
        return sum(held.global_step for held in self._held)

    def events(self, boot: str = "", since: int = 0) -> tuple[str, list[Event]]:
        """This server's name, and its events from number `since` on.

        A server that has been restarted has another name, and counts from 0 again.
        Events before `since` are dropped.
        """
        with self._changed:
            for part, held in zip(self.parts, self._held, strict=True):
                said, held.short = held.short, ()
                for what in said:
                    what = f"A meeting of part {part} is short: {what}."
                    self._note("short", message=what)
            name = str(self._book.epoch)
            since = since if boot == name else 0
            del self._events[: max(since - self._forgotten, 0)]
            self._forgotten = max(self._forgotten, since)
            return name, list(self._events)

    def news(self, boot: str, since: int) -> tuple[str, list[Event], list[int]]:
        """`events`, and how many requests of each worker this server has heard."""
        return *self.events(boot, since), [x.heard for x in self._book.entries]

    def checkpoint(self) -> Any:
        """Save the center in Orbax's format: written aside, then renamed.

        Returns:
            The path of the newest checkpoint; `None` if there is none.
        """
        with self._changed:
            self._save()
            if self._checkpoints is None or not self._book.saved:
                return None
            return self._checkpoints.folder / str(self._book.saved[-1])

    # For connections, which speak the protocol.

    def handle(self, request: Request, push: Push | None = None) -> tuple[Answer, Any]:
        """Carry out the decision about a request: the answer, and what comes with it.

        "enter" is answered with a `Joined`; the end of a push or a wait with a `Reply`.
        """
        with self._changed:
            if request.kind == "token":
                self._wait_for(request.worker, request.part, TOKEN_SECONDS)
            try:
                return self._handle(request, push)
            finally:
                self._changed.notify_all()

    def _handle(self, request: Request, push: Push | None) -> tuple[Answer, Any]:
        worker = request.worker
        problem = self._unknown(worker)
        if push is not None:  # The whole push is checked before anything changes.
            problem = problem or push.problem()
            if not problem and push.part not in self.parts:
                problem = f"part {push.part} does not live here, but {self.parts}."
        if problem:
            return self._refuse(push, problem), None
        self._hear(worker)
        book, answer, applies = protocol.decide(self._book, request)
        if isinstance(answer, protocol.Superseded | protocol.Refused):
            self._refuse(push, answer.message)
        if not isinstance(answer, protocol.Standing):
            return answer, None
        if applies:
            return self._apply(request, push, book)
        self._book = book
        match request.kind:
            case "enter":
                if not request.above:
                    self._note("join", worker)
                return answer, self._joined(worker)
            case "start":
                return answer._replace(busy=not self.everyone_joined()), None
            case "send":
                self._note("retry", worker, push)
        reply = self._reply_again(worker, request.part)
        return answer._replace(busy=reply.waiting), reply

    def _reply_again(self, worker: int, place: int) -> Reply:
        """The answer to a worker's last push of a part, or that it is to wait."""
        reply = self._held[place].reply_again(worker)
        number = self._book.entries[worker].places[place].counted
        return reply._replace(round=number)

    def _joined(self, worker: int) -> Joined:
        self._book = self._book.with_entry(worker, left=False)
        self._ledger.gone(worker)
        entry, parts = self._book.entries[worker], {}
        for part, held, place in zip(self.parts, self._held, entry.places, strict=True):
            held.join(worker)
            parts[part] = JoinedPart(held.current(), place.counted, held.global_step)
        return Joined(
            parts, entry.step, entry.joins - 1, entry.incarnation, entry.notes
        )

    def _apply(
        self, request: Request, push: Push | None, book: Book
    ) -> tuple[Answer, Reply | None]:
        if push is None:
            raise ValueError("A push has arrays: pass push=Push(...).")
        if self._ended:  # This is no fault of the worker, and so no event.
            return protocol.Refused("the run has ended."), None
        worker, held = push.worker, self._held[request.part]
        staleness, said = held.staleness(worker), ""
        self._count_samples()
        # After a death of this server others may have made some of its ranges.
        if not self._ledger.may_count(worker, push.leases):
            said = "It has samples that others have, or that are counted already."
        try:
            arrays, sizes = held.expected.read(push.arrays)
            push = push._replace(arrays=arrays)
            if said:
                reply = held.drop(worker, push)
            else:
                reply = held.absorb(worker, push, sizes)
        except PushRefused as error:
            message = f"{error} (round {push.round} of worker {worker})"
            return self._refuse(push, message), None
        if not reply.used:
            book = protocol.dropped(book, worker, request.part)
        self._book = book.with_entry(
            worker, step=int(push.local_step), notes=push.place
        )
        held.release(self._left)
        self._count_samples()
        if push.lost:
            message = f"{push.lost} of its pushes went with a server"
            self._note("rolled_back", worker, staleness=int(push.lost), message=message)
        kind, pulled = "push" if reply.used else "dropped", bytes_of(reply.arrays)
        more = {"staleness": int(staleness), "pulled": pulled, "message": said}
        self._note(kind, worker, push, **more)
        if protocol.is_due(book):
            self._save()
        number = book.entries[worker].places[request.part].counted
        reply = reply._replace(staleness=staleness, round=number)
        return protocol.standing(self._book, worker, reply.waiting), reply

    # Checkpoints on the disk.

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        self._count_samples()
        arrays, of_parts = {}, []
        for part, held in zip(self.parts, self._held, strict=True):
            arrays[f"part_{part}"], more = held.save()
            of_parts.append({**more, "made_by": self._made_by(part, held)})
        number = self._book.number + 1
        self._book = self._book._replace(number=number, since=0)
        notes = {"parts": of_parts, **protocol.notes_of(self._book.entries)}
        if self._ledger.samples is not None:
            notes["ledger"] = self._ledger.saved()
        elif self._counted_before is not None:
            notes["ledger"] = self._counted_before
        try:
            self._checkpoints.save(number, arrays, notes)
        except Exception as error:  # A full disk, for example: try again later.
            self._note("unsaved", message=f"Checkpoint {number}: {error}"[:500])
            return
        old = self._book.saved
        self._book = protocol.saved(self._book, number)
        self._note("saved")
        for gone in set(old) - set(self._book.saved):
            self._checkpoints.delete(gone)

    def _go_on(self, comes_back: bool) -> bool:
        """Restore the newest checkpoint that can be read."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return False
        numbers, damaged = checkpoints.numbers(), []
        for number in reversed(numbers):
            try:
                arrays, notes = checkpoints.load(number)
            except Damaged as error:
                damaged.append((number, error))
                continue
            newest = max((*numbers, *checkpoints.damaged()))
            self._book = self._book._replace(number=newest)
            self._read(arrays, notes)
            for one, error in damaged:
                checkpoints.put_aside(one)
                self._note("damaged", message=f"{error} An earlier one is taken.")
            if not comes_back:  # All begin anew, and join.
                notes["left"] = []
            entries = protocol.noted(notes, self._book.entries)
            saved = tuple(one for one in numbers if one <= number)
            self._book = self._book._replace(entries=entries, saved=saved)
            for held in self._held if comes_back else ():
                held.release(self._left)
            if self._ledger.samples is None:
                self._counted_before = notes.get("ledger")
            elif "ledger" in notes:
                # Who joined after the checkpoint may hold ranges, too.
                alive = set(range(self.num_workers)) - self._left
                waits = set().union(*(held.waiting_ranges() for held in self._held))
                self._ledger.restore(
                    notes["ledger"], alive if comes_back else set(), waits
                )
            self._note("restored", message=f"from {checkpoints.folder}/{number}")
            return True
        if damaged or checkpoints.damaged():
            those = "; ".join(str(error) for _, error in damaged)
            raise ValueError(
                f"No checkpoint in {checkpoints.folder} can be read: "
                f"{those or 'all are damaged'}. Pass another checkpoint_dir, or "
                "resume=False, to start afresh: what is there is put aside."
            )
        return False

    def _made_by(self, part: int, held: Held) -> list[Any]:
        """What a part of a checkpoint must have been saved by, and of which rows."""
        return [held.describe(), self.layout.mark(self._like, part)]

    def _read(self, arrays: dict[str, Any], notes: Notes) -> None:
        other = "Pass another checkpoint_dir, or resume=False to start afresh."
        if len(notes["entries"]) != self.num_workers and not self._resizes:
            raise ValueError(
                f"The checkpoint is of {len(notes['entries'])} workers, who wait for "
                f"each other; got num_workers={self.num_workers}. {other}"
            )
        names = {f"part_{part}" for part in self.parts}
        if set(arrays) != names:
            raise ValueError(
                f"The checkpoint holds {sorted(arrays)}, and this server has "
                f"{sorted(names)}: it was saved with other fragments. {other}"
            )
        helds: dict[int, Held] = {}
        for part in self.parts:
            shapes = self.layout.pick(self._like, part)
            helds[part] = self._serve(
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            )
        for (part, held), note in zip(helds.items(), notes["parts"], strict=True):
            of_part, made_by = arrays[f"part_{part}"], self._made_by(part, held)
            if note["made_by"] != made_by:
                # Other variables, of any part, have another state: name them.
                several = len(self.layout.owners) > 1
                for number, other_held in helds.items():
                    saved = arrays[f"part_{number}"]["center"]
                    check_saved(other_held.current(), saved, several)
                if note["made_by"][0] == made_by[0]:
                    raise ValueError(
                        "The checkpoint was saved with other fragments, or the parts "
                        f"are others. {other}"
                    )
                was, now = difference(note["made_by"][0], made_by[0])
                raise ValueError(
                    f"The checkpoint was made by {was}, and this server has {now}. "
                    "Pass the rule and optimizer of before, another checkpoint_dir, or "
                    "resume=False to start afresh."
                )
            held.load(of_part, note)
            self._held.append(held)

    # Events and messages.

    def _refuse(self, push: Push | None, message: str) -> protocol.Refused:
        """Count and tell of a push that is refused."""
        if push is not None:
            worker = -1 if self._unknown(push.worker) else push.worker
            if worker >= 0:
                refused = self._book.entries[worker].refused + 1
                self._book = self._book.with_entry(worker, refused=refused)
            self._note("refused", worker, message=message)
        return protocol.Refused(message)

    def _check(self, worker: Any) -> None:
        if problem := self._unknown(worker):
            raise ValueError(problem)

    def _unknown(self, worker: Any) -> str:
        known = isinstance(worker, int | np.integer) and not isinstance(worker, bool)
        if known and 0 <= worker < self.num_workers:
            return ""
        return (
            f"There is no worker {worker!r}. Workers have the numbers 0 to "
            f"{self.num_workers - 1}."
        )

    def _note(
        self, kind: str, worker: int = -1, push: Push | None = None, **more: Any
    ) -> None:
        """Add an event, of which `more` are further fields."""
        for name in ("shown", "seconds", "bytes", "part") if push is not None else ():
            more[name] = getattr(push, name)
        part = more.setdefault("part", self.parts[0])
        if worker >= 0:
            entry = self._book.entries[worker]
            more["round"] = entry.places[self.parts.index(part)].counted
            more["local_step"] = entry.step
        event = Event(
            kind, int(worker), 0, 0, self.global_step, 0, here().stamp() / 1e9, {}
        )
        self._events.append(event._replace(**more))


def refusal(message: str) -> str:
    """The message for a worker whose push was refused."""
    return f"The push was refused and the center not changed: {message}"


def _raise(error: Exception) -> NoReturn:
    raise error
