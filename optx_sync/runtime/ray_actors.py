# SPDX-License-Identifier: Apache-2.0
"""Servers and workers as Ray actors, and the connection between them.

On one machine they use pipes and shared memory (`shared`); otherwise, and at first,
calls of Ray. Ray is imported when something here is called, not before.
"""

import collections
import contextlib
import functools
import os
import pathlib
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.center.fragments import Fragments
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime import protocol
from optx_sync.runtime.agreements import Agreement, way_of
from optx_sync.runtime.agreements.contract import Settings
from optx_sync.runtime.checkpoints import Checkpoints, folders_of_servers, set_aside
from optx_sync.runtime.group import GroupConnection
from optx_sync.runtime.messages import Joined, Pending, Push, PushRefused, Reply
from optx_sync.runtime.parts import PartsLayout, lay_out, shapes_of
from optx_sync.runtime.protocol import Client
from optx_sync.runtime.samples import Lease, Samples
from optx_sync.runtime.server import TOKEN_SECONDS, Server, refusal
from optx_sync.runtime.shared import SharedLine, Unseen
from optx_sync.runtime.system import here
from optx_sync.runtime.worker import Preempted, Worker

# Seconds that a worker waits for a server's restart, and between two attempts.
SERVER_PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 0.25


def start_servers(
    params: Tree,
    agreement: Agreement,
    *,
    num_workers: int,
    num_servers: int = 1,
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
) -> "RayConnection":
    """Start the servers as Ray actors, for those who start workers themselves.

    Args:
        params: The parameters to start from.
        agreement: See `run`.
        num_workers: See `run`.
        num_servers: See `run`.
        inner: The optimizer that `SyncReplicas` applies.
        communication_period: See `run`.
        exchange: See `run`.
        pull_exchange: See `run`.
        fragments: See `run`.
        delay: See `run`.
        meet: See `run`.
        samples: See `run`.
        checkpoint_dir: See `run`.
        checkpoint_every: See `run`.
        resume: See `run`.

    Returns:
        The connection to them. Send it to any Ray task or actor, and make
        `Worker(connection, ...)` there. `ray.kill` each of `connection.servers` at the
        end. Where memory is short, Ray kills the newest of the actors that may restart
        first; servers with checkpoints may, so give your workers `max_restarts=1`.

    Raises:
        ValueError: See `run`.
    """
    ray = here().ray()
    shapes = shapes_of(params)
    settings = Settings(
        num_workers, communication_period, exchange, fragments, delay, pull_exchange,
        meet, num_servers,
    )  # fmt: skip
    way = way_of(agreement, settings)
    lay_out(shapes, way.fragments, num_servers)  # Refuses what cannot be split.
    if checkpoint_dir is not None:
        _look_at(checkpoint_dir, num_servers, resume)
    actor = ray.remote(ServerActor).options(
        num_cpus=0,
        max_restarts=0 if checkpoint_dir is None else -1,
        # Threads: a worker that waits must not keep others from pushing.
        max_concurrency=4 * num_workers + 8 if way.waits else 1,
        # A push that is long on its way must not keep back that its worker lives.
        allow_out_of_order_execution=True,
    )
    servers = []
    for number in range(num_servers):
        given = {
            **settings._asdict(),
            "inner": None if way.of_center else inner,
            "checkpoint_every": checkpoint_every,
            "copy_replies": way.waits,
            "samples": None if number else samples,
            "number": number,
        }
        if checkpoint_dir is not None:
            below = Checkpoints.path_of(checkpoint_dir) / f"server_{number}"
            given["checkpoint_dir"] = str(below)
        # Shapes alone: Ray keeps an actor's arguments for its restarts.
        with naming_what_cannot_be_sent(agreement=agreement, **given):
            servers.append(actor.remote(shapes, agreement, given))
    saved_in = None if checkpoint_dir is None else str(checkpoint_dir)
    connection = RayConnection(servers, shapes, way.fragments, saved_in)
    values = ray.put(jax.tree.map(np.asarray, params))
    try:
        connection.ask_actors(servers, "begin", values)
    except BaseException:
        for actor in servers:
            ray.kill(actor)
        raise
    return connection


def _look_at(folder: str | pathlib.Path, num_servers: int, resume: bool) -> None:
    """Refuse a folder whose checkpoints do not fit these servers."""
    found = folders_of_servers(folder)
    if not resume:
        for path in found.values():
            set_aside(path)
    elif found and sorted(found) != list(range(num_servers)):
        names = ", ".join(found[number].name for number in sorted(found))
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} holds checkpoints of {names} alone; got "
            f"num_servers={num_servers}. A server goes on from its own. Pass the "
            "num_servers that they were saved with, another checkpoint_dir, or "
            "resume=False to start afresh: what is there is put aside."
        )


class RayConnection:
    """A connection from a worker to the servers; any Ray process can receive it.

    `protocol` decides what it sends to whom. Requests to a dead server are repeated
    until the server is back. The arrays of an answer may be views, which the same
    server's next answer to the same worker overwrites.
    """

    def __init__(
        self,
        servers: list[Any],
        shapes: Tree,
        fragments: Fragments,
        saved_in: str | None,
    ):
        self._given: tuple[object, ...] = servers, shapes, fragments, saved_in
        self.servers = servers
        self.saved_in = saved_in
        self._shapes = shapes
        # Of this process, by worker and server: the workers' sides of the protocol.
        self._clients: dict[tuple[int, int], Client] = {}
        # What servers have lost of their pushes, and no answer has told yet.
        self._untold = collections.Counter[tuple[int, int]]()
        self._lines: dict[tuple[int, int], SharedLine] = {}
        # By worker and part the call of `asked` that waits at a server, and what for.
        self._asked: dict[tuple[int, int], tuple[int, Any]] = {}
        # When each worker of this process said last that it waits.
        self._said: dict[int, float] = {}
        self.layout: PartsLayout = lay_out(shapes, fragments, len(servers))

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return RayConnection, self._given

    def join(self, worker: int) -> Joined:
        """See `Server.join`."""
        client, found, lost = Client(worker), [], 0
        while (server := len(found)) < len(self.servers):
            self._lines[worker, server] = SharedLine(begins=here().shares_memory)
            # It joins all servers with the incarnation that the first one hands out.
            key = worker, server
            known = self._clients.get(key, Client(worker))._replace(
                phase="idle", incarnation=client.incarnation, above=client.above,
                asked=secrets.randbits(62) + 1,
            )  # fmt: skip
            client, joined = self._converse(server, protocol.begin(known, "enter"))
            if client.phase == "superseded" and server:
                # The first one's clock may be behind. It knows who has joined since.
                found = []
                continue
            if client.phase != "idle":
                raise ValueError(client.message)
            self._clients[key] = client
            found.append(joined)
            lost += client.lost + self._untold.pop(key, 0)
        parts = {part: x for one in found for part, x in one.parts.items()}
        newest = max(found, key=lambda one: one.local_step)  # of its predecessor
        step, place = newest.local_step, newest.place
        return found[0]._replace(parts=parts, local_step=step, place=place, lost=lost)

    def everyone_joined(self) -> bool:
        """See `Server.everyone_joined`."""
        for (worker, server), client in self._clients.items():
            if server == 0:
                client, _ = self._converse(0, protocol.begin(client, "start"))
                self._clients[worker, 0] = client
                return client.phase == "idle"
        return all(self.call("everyone_joined"))

    def push(self, push: Push) -> Reply:
        """See `Server.push`."""
        return self.send(push)()

    def send(self, push: Push) -> Pending:
        """See `Server.send`."""
        number, position, round_ = 0, 0, 0
        if not push.problem() and 0 <= push.part < len(self.layout.owners):
            number = self.layout.owners[push.part]
            position = self.layout.of_server(number).index(push.part)
            round_ = push.round
        key = push.worker, number
        # It joined in another process, or not at all.
        client = self._clients.get(key, Client(push.worker))
        stale = client.incarnation != push.incarnation
        client = protocol.begin(
            client._replace(incarnation=push.incarnation), "send", position, round_
        )
        talk = _Conversation(self, number, client, push)

        def answer() -> Reply:
            after, reply = talk.end()
            if after.phase == "superseded" or (stale and key in self._clients):
                raise PushRefused(refusal(after.message))
            self._clients[key] = _with_news(after, self._clients.get(key, after))
            if after.phase == "refused":
                raise PushRefused(refusal(after.message))
            self._untold[key] -= after.lost
            return reply._replace(round=push.round, lost=after.lost + reply.lost)

        return Pending(answer, talk.has_ended, talk.hand_in)

    def lease(
        self, worker: int, incarnation: int, holds: list[int], count: int
    ) -> list[Lease] | None:
        """See `Server.lease`."""
        given = worker, incarnation, holds, count
        return self.ask_actors(self.servers[:1], "call", "lease", *given)[0]

    def asked(self, worker: int, part: int, met: int) -> bool:
        """See `Server.asked`: by a call that waits at the server while this returns."""
        ray, key = here().ray(), (worker, part)
        before, waits = self._asked.get(key, (None, None))
        if before != met:
            server = self.servers[self.layout.owners[part]]
            waits = server.call.remote("asked", worker, part, met, TOKEN_SECONDS)
            self._asked[key] = met, waits
        ready, _ = ray.wait([waits], timeout=0)
        if not ready:
            return False
        del self._asked[key]
        try:
            return _raised(ray.get(waits))
        except ray.exceptions.RayActorError:
            return False  # The push will find out whether it comes back.

    def leaves(self, told: bool) -> bool:
        """See `Server.leaves`."""
        return told

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        self.call("leave", worker)

    def center(self, params: Tree) -> Tree:
        """The center in the structure and dtypes of `params`."""
        of_servers = self.call("center_of_parts")
        parts = {part: arrays for found in of_servers for part, arrays in found.items()}
        center = self.layout.join(parts, self._shapes)
        return jax.tree.map(lambda x, p: np.asarray(x.astype(p.dtype)), center, params)

    def averages(self) -> Tree | None:
        """See `Server.averages`."""
        return self.call("averages")[0]

    def checkpoint(self) -> None:
        """All servers save their parts."""
        self.call("checkpoint")

    def _converse(self, server: int, client: Client) -> tuple[Client, Any]:
        """Complete a client's operation; return what the last answer brought."""
        return _Conversation(self, server, client).end()

    def may_come_back(self, error: Exception, deadline: float) -> None:
        """Raise if a server is dead for good, or has been for too long."""
        if isinstance(error, here().ray().exceptions.ActorDiedError):
            hint = "" if self.saved_in else " Pass checkpoint_dir, so that it can."
            raise RuntimeError(
                f"A server died, and does not come back.{hint}"
            ) from None
        if here().now() > deadline:
            raise RuntimeError(
                "A server died and did not come back within "
                f"{SERVER_PATIENCE_SECONDS:.0f} seconds."
            ) from error

    def call(self, name: str, *arguments: object) -> list[Any]:
        """What a method of `Server` returns, from all servers."""
        return self.ask_actors(self.servers, "call", name, *arguments)

    def ask_actors(
        self, servers: list[Any], name: str, *arguments: object
    ) -> list[Any]:
        """What these actors' method returns; one that died is asked again."""
        ray, deadline = here().ray(), here().now() + SERVER_PATIENCE_SECONDS
        answers: dict[int, Any] = {}
        while left := [k for k in range(len(servers)) if k not in answers]:
            asked = {k: getattr(servers[k], name).remote(*arguments) for k in left}
            for number, reference in asked.items():
                try:
                    answers[number] = _raised(ray.get(reference))
                except ray.exceptions.RayActorError as error:
                    self.may_come_back(error, deadline)
                    here().sleep(PAUSE_SECONDS)
        return [answers[number] for number in range(len(servers))]


class _Conversation:
    """An operation of a worker's client with a server, which may take several requests.

    A push that waits for others to come is asked for again, until it is answered.
    """

    def __init__(
        self,
        connection: RayConnection,
        server: int,
        client: Client,
        push: Push | None = None,
    ):
        self._connection, self._server, self._client = connection, server, client
        self._key: tuple[int, int] = client.worker, server
        self._push = push  # of an operation that sends one
        self._payload: Any = None  # what the last answer brought
        self._deadline: float = here().now() + SERVER_PATIENCE_SECONDS
        self._rests_until: float = 0.0  # where a server is being restarted
        self._line: SharedLine | None = None
        self._asked: tuple[SharedLine, Any] | None = None  # the request under way
        self._ask()

    def end(self) -> tuple[Client, Any]:
        """Wait for its end: the client then, and what the last answer brought."""
        while protocol.wants(self._client) is not None:
            self._hear()
        return self._client, self._payload

    def hand_in(self) -> None:
        """Wait until the server has a push, answered or not."""
        while self._client.phase == "send":
            self._hear()

    def has_ended(self) -> bool:
        """Hear what has come, without waiting: whether that was all."""
        while protocol.wants(self._client) is not None:
            if here().now() < self._rests_until:
                return False
            line, reference = self._ask()
            if reference is None:
                there = line.has_message()
            else:
                there = self._is_answered(reference)
            if not there:
                return False
            self._hear()
            if self._client.phase == "token":  # Others have to come: ask again.
                self._ask()
                return False
        return True

    def _ask(self) -> tuple[SharedLine, Any]:
        """Send a request, if none is under way: its line, and Ray's reference."""
        if self._asked is not None:
            return self._asked
        line = self._line or self._connection._lines.setdefault(self._key, SharedLine())
        if line.busy:  # Its memory holds an answer that has not been read.
            line = SharedLine()
        request, reference = protocol.wants(self._client), None
        push = self._push if self._client.phase == "send" else None
        message, line.busy = line.packed((request, push)), True
        if line.is_open:
            try:
                line.say(message)
            except OSError:  # The server died: ask through Ray, which restarts it.
                line.hang_up()
        if not line.is_open:
            handle = self._connection.servers[self._server].handle
            reference = handle.remote(self._client.worker, message)
        self._asked = line, reference
        return self._asked

    def _is_answered(self, reference: Any) -> bool:
        """Whether an answer is there; if not, tell the server now and then who waits.

        On a slow link a push may take longer than a worker may be silent.
        """
        there, _ = here().ray().wait([reference], timeout=0)
        worker, said, now = self._client.worker, self._connection._said, here().now()
        if not there and now - said.get(worker, now - TOKEN_SECONDS) >= TOKEN_SECONDS:
            said[worker] = now
            self._connection.servers[self._server].call.remote("hears", worker)
        return bool(there)

    def _hear(self) -> None:
        """Take an answer: the end, or others have to come, or the server is gone."""
        here().sleep(max(self._rests_until - here().now(), 0))
        ray, (line, reference) = here().ray(), self._ask()
        self._line, self._asked, heard = line, None, False
        try:
            while not (reference is None or self._is_answered(reference)):
                ray.wait([reference], timeout=TOKEN_SECONDS)
            message = line.hear() if reference is None else ray.get(reference)
            heard = True
            answer, came = _raised(line.unpacked(message))
        except Unseen:  # Use Ray from now on.
            line.hang_up()
        except ray.exceptions.RayActorError as error:
            self._connection.may_come_back(error, self._deadline)
            self._rests_until = here().now() + PAUSE_SECONDS
        except (EOFError, OSError):  # The server died: ask through Ray.
            pass
        else:
            # Other pushes of the same worker have heard of its parts meanwhile.
            others = self._connection._clients
            newest = others.get(self._key, self._client)
            client = protocol.hears(_with_news(self._client, newest), answer)
            if self._key in others:
                others[self._key] = _with_news(newest, client)
            if self._push is not None:  # A worker that pulls does not hear its end.
                gone = client.lost - self._client.lost
                self._connection._untold[self._key] += gone
            self._client, self._payload = client, came or self._payload
        finally:
            line.busy = False
            if not heard:  # A late answer must not reach the next request.
                line.hang_up()


def _with_news(client: Client, newest: Client) -> Client:
    """A client with what another one of its worker has heard of their pushes."""
    if newest.incarnation != client.incarnation:
        return client
    return client._replace(lines=newest.lines, epoch=newest.epoch)


class ServerActor:
    """A `Server` in a process of its own, on the CPU."""

    def __init__(self, shapes: Tree, agreement: Agreement, settings: dict[str, Any]):
        jax.config.update("jax_platforms", "cpu")
        self._made: Any = functools.partial(Server, agreement=agreement, **settings)
        # By worker.
        self._lines: dict[int, SharedLine] = collections.defaultdict(SharedLine)
        # Answers of an exchange are views of the center until they have been packed.
        views = not settings.get("copy_replies", True)
        self._turn: Any = threading.Lock() if views else contextlib.nullcontext()
        # One that died comes back before anybody asks.
        self._server: Server | Exception = self._started(shapes)

    def _started(self, params: Tree) -> Server | Exception:
        try:
            return self._made(params)
        except Exception as error:
            # Calls return it: Ray would restart an actor that dies here.
            return error

    def begin(self, params: Tree) -> object:
        """Start from the parameters, where no checkpoint has been found."""
        if isinstance(self._server, Exception):
            self._server = self._started(params)
        return self.call("check_writable")

    def pid(self) -> int | Exception:
        """The process's number, or the error at its start."""
        return self._server if isinstance(self._server, Exception) else os.getpid()

    # Errors are returned: Ray would wrap raised ones.

    def call(self, name: str, *arguments: object) -> object:
        """What a method of `Server` returns, or the error that it raises."""
        if isinstance(self._server, Exception):
            return self._server
        try:
            return getattr(self._server, name)(*arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            return error

    def handle(self, worker: int, message: bytes) -> bytes:
        """See `Server.handle`: answer a message that comes through Ray."""
        line = self._lines[worker]
        answer = self._answered(line, worker, message)
        if line.is_open:
            # The worker's successor offers pipes of its own.
            self._lines[worker] = SharedLine()
            threading.Thread(
                target=self._listen, args=(line, worker), daemon=True
            ).start()
        return answer

    def _listen(self, line: SharedLine, worker: int) -> None:
        """Answer a worker's messages through its pipes until it is gone."""
        try:
            while True:
                line.say(self._answered(line, worker, line.hear()))
        except (EOFError, OSError):
            line.hang_up()

    def _answered(self, line: SharedLine, worker: int, message: bytes) -> bytes:
        with self._turn:
            try:
                request, push = line.unpacked(message)
            except Unseen as error:
                return line.packed(error)
            return line.packed(self.call("handle", request, push))


class WorkerActor:
    """The process in which `worker_fn` runs, or one of several of the same worker."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._is_told: bool = False  # that its machine goes

    def is_here(self) -> str:
        """Answered once there is a process: an address that is free in its machine."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{_own_host()}:{free.getsockname()[1]}"

    def run(
        self, index: int, start: list[Any], process: int, processes: int, at: str
    ) -> int | None:
        """Run it: how many steps it has not pushed; `None` if it left on notice.

        Args:
            index: The worker's number.
            start: What `worker_fn` and a `Worker` need, as a reference in a list.
            process: The number of this process among the worker's.
            processes: How many it has.
            at: The address at which these find one another.
        """
        if processes > 1:  # Before arrays arrive, with which JAX would start.
            jax.distributed.initialize(at, processes, process)
        here().on_notice(self._hear_notice)
        given = here().ray().get(start[0])
        worker_fn, connection, params, inner, agreement, options = given
        if processes > 1:
            connection = GroupConnection(connection, _own_host())
        worker = Worker(connection, params, inner, agreement, index=index, **options)
        self._worker = worker
        worker.preempted, again = self._is_told, True
        while again:
            try:
                worker_fn(worker)
            except Preempted:
                connection.leave(index)
                return None
            except SystemExit as error:  # Ray would take the process for dead.
                if error.code not in (None, 0):
                    raise RuntimeError(
                        f"Worker {index} left with sys.exit({error.code!r})."
                    ) from None
            worker.hand_in_samples()
            connection.leave(index)  # Nobody waits for this worker any more.
            worker.land()
            again = worker.resumes()
        return worker.unpushed

    def _hear_notice(self) -> None:
        self._is_told = True  # also while the worker starts
        if self._worker is not None:
            self._worker.preempted = True


def _own_host() -> str:
    return here().ray().util.get_node_ip_address()


@contextlib.contextmanager
def naming_what_cannot_be_sent(**things: object) -> Iterator[None]:
    """Say which of these cannot be pickled; Ray's error shows all that they hold."""
    try:
        yield
    except Exception:
        for name, thing in things.items():
            try:
                here().ray().cloudpickle.dumps(thing)
            except Exception as error:
                raise TypeError(
                    f"{name} cannot be sent to another process: {str(error)[:200]}. "
                    "Make such an object inside of the function that uses it."
                ) from None
        raise


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
