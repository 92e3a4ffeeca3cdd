# SPDX-License-Identifier: Apache-2.0
"""Servers and workers as Ray actors, and the way from a worker to the servers.

Arrays travel through Ray's object store: whoever receives them sees the same memory.
Ray is imported when something here is called, not before.
"""

import os
import pathlib
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.exchange.contract import Exchange
from optx_sync.runtime import protocol
from optx_sync.runtime.agreements import Agreement, way_of
from optx_sync.runtime.messages import (
    Joined,
    NoStart,
    Push,
    PushRefused,
    Reply,
)
from optx_sync.runtime.parts import join_parts, partition
from optx_sync.runtime.protocol import Ask, Client, Save, Send
from optx_sync.runtime.server import Server
from optx_sync.runtime.worker import Worker, log, shapes_of
from optx_sync.trees import path_name

# How long a worker waits for a server that is being restarted.
SERVER_PATIENCE_SECONDS = 300.0
# How long it lets another one restore the servers, and how often it looks.
RESTORE_PATIENCE, PAUSE_SECONDS = 40, 0.25


def start_servers(
    params: Any,
    agreement: Agreement,
    *,
    num_workers: int,
    num_servers: int = 1,
    inner: optax.GradientTransformation | None = None,
    communication_period: Period = 10,
    exchange: Exchange | None = None,
    checkpoint_dir: str | pathlib.Path | None = None,
    checkpoint_every: int = 100,
    replay: bool = False,
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
        checkpoint_dir: See `run`.
        checkpoint_every: See `run`.
        replay: See `run`.

    Returns:
        The connection to them. Send it to any Ray task or actor, and make
        `Worker(connection, ...)` there. `ray.kill` each of `connection.servers` at the
        end.

    Raises:
        ValueError: See `run`.
    """
    ray = import_ray()
    shapes = shapes_of(params)
    way = way_of(agreement, num_workers, communication_period, exchange)
    if num_servers != 1 and not way.splits:
        raise ValueError(
            "SyncReplicas accepts or drops a gradient as a whole, and so needs one "
            f"server; got num_servers={num_servers}. Pass num_servers=1."
        )
    if replay and checkpoint_dir is None:
        raise ValueError(
            "replay=True sends again what a server has lost since its last checkpoint, "
            "and there is none. Pass checkpoint_dir."
        )
    if replay and way.waits:
        raise ValueError(
            "replay=True has no use with SyncReplicas: a gradient that is sent again "
            "was computed after the update that it would be for. Leave it out."
        )
    parts = partition(jax.tree.map(np.asarray, params), num_servers)
    options = {
        "num_cpus": 0,
        "max_restarts": 0 if checkpoint_dir is None else -1,
        # A worker that waits for a token must not keep others from pushing. An
        # exchange does not wait, and answers with views: one at a time.
        "max_concurrency": num_workers + 8 if way.waits else 1,
    }
    servers = []
    for number, part in enumerate(partition(shapes, num_servers)):
        settings: dict[str, Any] = {
            "num_workers": num_workers,
            "inner": inner if way.waits else None,
            "communication_period": communication_period,
            "exchange": exchange,
            "checkpoint_every": checkpoint_every,
            "copy_replies": way.waits,
            "part": number,
        }
        if checkpoint_dir is not None:
            settings["checkpoint_dir"] = _below(checkpoint_dir, f"server_{number}")
        actor = ray.remote(ServerActor).options(**options)
        # Shapes, not arrays: what a restarted actor is made of must still be there.
        servers.append(actor.remote(part, agreement, settings))
    owners = {
        path_name(path): number
        for number, part in enumerate(parts)
        for path, _ in jax.tree_util.tree_leaves_with_path(part)
    }
    kept = 2 * checkpoint_every if replay else 0
    connection = RayConnection(servers, owners, kept, checkpoint_dir is not None)
    while True:
        # Raises here what the servers' construction raises.
        connection.call("begin", lambda number: (parts[number],))
        try:
            connection.look()
            return connection
        except NoStart:  # One died before it could save what it started from.
            if checkpoint_dir is None:
                raise


def _below(folder: str | pathlib.Path, name: str) -> str | pathlib.Path:
    text = str(folder)
    if "://" in text:
        return f"{text.rstrip('/')}/{name}"
    return pathlib.Path(folder).absolute() / name


class RayConnection:
    """The way from a worker to the servers; it can be sent to any Ray process.

    What it says to whom is decided in `protocol`. What meets a dead server is said
    again until the server is back.
    """

    def __init__(
        self, servers: list[Any], owners: dict[str, int], replay: int, comes_back: bool
    ):
        self.servers = servers
        self._owners = owners
        self._replay = replay
        self._comes_back = comes_back
        self._forget()

    def _forget(self) -> None:
        # Of this process: the workers' parts of the protocol, the pushes that they may
        # have to send again, and the last round of each of them.
        self._clients: dict[int, Client] = {}
        self._pushes: dict[int, dict[int, list[Push]]] = {}
        self._told: dict[int, int] = {}
        self._number = uuid.uuid4().int >> 66

    def __getstate__(self) -> dict[str, Any]:
        own = ("_clients", "_pushes", "_told", "_number")
        return {name: x for name, x in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _client(self, worker: int) -> Client:
        self._number += 1
        return Client(
            self._number, len(self.servers), worker, self._replay, RESTORE_PATIENCE
        )

    def join(self, worker: int) -> Joined:
        """See `Server.join`."""
        begun = protocol.begin(self._client(worker), "join")
        client, parts = self._converse(begun)
        if client.phase == "refused":
            raise ValueError(client.message)
        arrays = {path: a for part in parts for path, a in part.arrays.items()}
        self._clients[worker], self._told[worker] = client, client.round
        self._pushes[worker] = {}
        return parts[0]._replace(
            arrays=arrays,
            round=client.round,
            restarts=client.joins - 1,
            incarnation=client.incarnation,
        )

    def everyone_joined(self) -> bool:
        """See `Server.everyone_joined`."""
        for worker, client in self._clients.items():
            client, _ = self._converse(protocol.begin(client, "start"))
            self._clients[worker] = client
            return client.phase == "idle"
        return all(self.call("everyone_joined"))

    def push(self, push: Push) -> Reply:
        """See `Server.push`."""
        worker = push.worker
        if worker not in self._clients:  # It has not joined, or is another's.
            hello = protocol.begin(self._client(worker), "hello")
            hello = hello._replace(incarnation=push.incarnation)
            client, _ = self._converse(hello)
            if client.phase != "idle":
                raise PushRefused(_refusal(client))
            self._clients[worker], self._told[worker] = client, client.round
        known = self._clients[worker]
        client = known._replace(incarnation=push.incarnation)
        goal = "push"
        if isinstance(push.round, int) and client == known:
            if push.round == self._told[worker] and known.done:
                goal = "again"
            elif push.round != self._told[worker] + 1:
                client = client._replace(round=push.round - 1)  # The server refuses it.
        try:
            return self._exchange(client, goal, push)
        except PushRefused:
            now = self._clients[worker]
            if push.incarnation != known.incarnation:
                self._clients[worker] = known
            elif now.epoch == known.epoch:
                self._clients[worker] = now._replace(round=known.round)
            raise

    def wait(self, worker: int) -> Reply:
        """See `Server.wait`."""
        return self._exchange(self._clients[worker], "wait", None)

    def finish(self, worker: int) -> None:
        """With `replay`: stay until a checkpoint covers what this worker has pushed."""
        client = self._clients.get(worker)
        if client is not None and client.replay:
            client, _ = self._converse(protocol.begin(client, "leave"))
            self._clients[worker] = client
            if client.kept:
                log.warning(
                    "Worker %d ends, and its last %d pushes are in no checkpoint: the "
                    "servers cannot save.",
                    worker,
                    len(client.kept),
                )

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        self.call("leave", lambda _: (worker,))

    def center(self, params: Any) -> Any:
        """The center in the structure and dtypes of `params`."""
        self.look()
        return join_parts(self.call("center"), params)

    def averages(self) -> Any:
        """See `Server.averages`."""
        return self.call("averages")[0]

    def checkpoint(self) -> None:
        """All servers save their part, as one cut."""
        self.look()
        statuses = [s for s, _ in self.call("handle", lambda _: (Ask(),))]
        number = 1 + max(status.cut for status in statuses)
        save = Save(statuses[0].epoch, 0, number)
        self.call("handle", lambda _: (save,))

    def look(self) -> None:
        """See to it that all servers are there, and of one epoch."""
        self._converse(protocol.begin(self._client(-1), "look"))

    def _exchange(self, client: Client, goal: str, push: Push | None) -> Reply:
        worker = client.worker
        client = protocol.begin(client, goal)
        if push is not None:
            serial = client.sending[-1]
            self._pushes.setdefault(worker, {})[serial] = self._split(push)
        client, replies = self._converse(client)
        needed = {*client.kept, *client.sending, client.serial}
        pushes = self._pushes.get(worker, {})
        self._pushes[worker] = {s: p for s, p in pushes.items() if s in needed}
        self._clients[worker] = client
        if client.phase in ("refused", "superseded"):
            raise PushRefused(_refusal(client))
        if push is not None:
            # In the worker's count, which goes on when some were lost.
            self._told[worker] = push.round
        arrays: dict[str, dict[str, Any]] = {}
        for reply in replies:
            for name, part in reply.arrays.items():
                arrays.setdefault(name, {}).update(part)
        # What waits for a token may have to be sent again; with `replay`, the last one.
        if not self._replay and client.phase != "waiting":
            self._pushes[worker] = {}
        return replies[0]._replace(
            arrays=arrays, round=self._told[worker], lost=client.lost
        )

    def _split(self, push: Push) -> list[Push]:
        count = len(self.servers)
        if not isinstance(push.arrays, dict):
            return [push] * count  # All will refuse it.
        if count == 1:
            return [push]
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, arrays in push.arrays.items():
            for part in parts:
                part[name] = {}
            for path, array in arrays.items():
                # The first one refuses what belongs to none.
                parts[self._owners.get(path, 0)][name][path] = array
        return [push._replace(arrays=part) for part in parts]

    def _converse(self, client: Client) -> tuple[Client, list[Any]]:
        """Do what a client has begun; what came with the last answers."""
        ray = import_ray()
        payloads: list[Any] = [None] * len(self.servers)
        deadline = time.monotonic() + SERVER_PATIENCE_SECONDS
        while asked := protocol.wants(client):
            waited = client.waited
            references = {
                number: self.servers[number].handle.remote(
                    request, self._part(client, number, request)
                )
                for number, request in asked.items()
            }
            lost: Exception | None = None
            for number, reference in references.items():
                try:
                    answer, payload = _unwrap(ray, reference)
                except ray.exceptions.RayActorError as error:
                    self._may_come_back(ray, error)
                    lost = error
                    continue
                now = protocol.wants(client).get(number)
                if now != asked[number] or type(now) is not type(asked[number]):
                    continue  # Another answer has changed what to do.
                client = protocol.hears(client, number, answer)
                if payload is not None:
                    payloads[number] = payload
            if lost is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    "A server died and did not come back within "
                    f"{SERVER_PATIENCE_SECONDS:.0f} seconds."
                ) from lost
            if lost is not None or client.waited > waited:
                time.sleep(PAUSE_SECONDS)
        return client, [payload for payload in payloads if payload is not None]

    def _part(self, client: Client, number: int, request: Any) -> Push | None:
        if not isinstance(request, Send):
            return None
        parts = self._pushes.get(client.worker, {}).get(request.serial)
        if parts is None:
            return None
        if request.kind == "commit":
            return parts[number]._replace(arrays={})
        return parts[number]

    def _may_come_back(self, ray: Any, error: Exception) -> None:
        """Raise at once for a server that is dead for good."""
        if isinstance(error, ray.exceptions.ActorDiedError):
            hint = "" if self._comes_back else " Pass checkpoint_dir, so that it can."
            raise RuntimeError(
                f"A server died, and does not come back.{hint}"
            ) from error

    def call(
        self, name: str, arguments: Callable[[int], tuple] = lambda _: ()
    ) -> list[Any]:
        """What all servers answer to a plain call, each asked again if it died."""
        ray = import_ray()
        deadline = time.monotonic() + SERVER_PATIENCE_SECONDS
        answers: dict[int, Any] = {}
        while len(answers) < len(self.servers):
            asked = {
                number: getattr(server, name).remote(*arguments(number))
                for number, server in enumerate(self.servers)
                if number not in answers
            }
            for number, reference in asked.items():
                try:
                    answers[number] = _unwrap(ray, reference)
                except ray.exceptions.RayActorError as error:
                    self._may_come_back(ray, error)
                    if time.monotonic() > deadline:
                        raise RuntimeError("A server died and is not back.") from error
                    time.sleep(PAUSE_SECONDS)
        return [answers[number] for number in range(len(self.servers))]


def _refusal(client: Client) -> str:
    return f"The push was refused and the center not changed: {client.message}"


class ServerActor:
    """A `Server` in a process of its own, on the CPU."""

    def __init__(self, shapes: Any, agreement: Agreement, settings: dict[str, Any]):
        jax.config.update("jax_platforms", "cpu")
        self._server, self._error = None, None
        try:
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), shapes)
            self._server = Server(zeros, agreement, **settings).without_start()
        except Exception as error:
            # Raised by the first call: Ray would restart an actor that dies here.
            self._error = error

    def pid(self) -> Any:
        """The number of the process, or what went wrong at its start."""
        return self._error or os.getpid()

    # Errors are returned: raised ones would come wrapped in Ray's.

    def _call(self, name: str, *args: Any) -> Any:
        if self._error is not None:
            return self._error
        try:
            return getattr(self._server, name)(*args)
        except (ValueError, RuntimeError) as error:
            return error

    def begin(self, params: Any) -> Any:
        """See `Server.begin`."""
        return self._call("begin", params)

    def handle(self, request: Any, push: Push | None = None) -> Any:
        """See `Server.handle`."""
        return self._call("handle", request, push)

    def everyone_joined(self) -> Any:
        """See `Server.everyone_joined`."""
        return self._call("everyone_joined")

    def leave(self, worker: int) -> Any:
        """See `Server.leave`."""
        return self._call("leave", worker)

    def center(self) -> Any:
        """See `Server.center`."""
        return self._call("center")

    def averages(self) -> Any:
        """See `Server.averages`."""
        return self._call("averages")

    def events(self, boot: str, since: int) -> Any:
        """See `Server.events`."""
        return self._call("events", boot, since)


class WorkerActor:
    """The process in which `worker_fn` runs."""

    def run(self, index: int, start: tuple[Any, ...]) -> tuple[str, Any]:
        """What became of it, "done", "refused" or "error", and what goes with that."""
        worker: Worker | None = None
        worker_fn, connection, params, inner, agreement, *settings = start
        num_workers, communication_period, exchange, synchronous = settings
        try:
            worker = Worker(
                connection,
                params,
                inner,
                agreement,
                index=index,
                num_workers=num_workers,
                communication_period=communication_period,
                exchange=exchange,
                synchronous=synchronous,
            )
            worker_fn(worker)
        except PushRefused as error:
            return "refused", str(error)
        except SystemExit as error:
            if error.code not in (None, 0):
                return "error", RuntimeError(
                    f"Worker {index} left with sys.exit({error.code!r})."
                )
        except Exception as error:
            return "error", portable(error)
        connection.finish(index)
        return "done", worker.unpushed if worker else 0


def portable(error: Exception) -> Exception:
    """An exception that arrives: some can be pickled, but not read again."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle = import_ray().cloudpickle
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError(type(copy))
    except Exception:
        return RuntimeError(f"worker_fn raised {type(error).__name__}: {error}\n{text}")
    copy.add_note(f"In a worker:\n{text}")
    return copy


def _unwrap(ray: Any, reference: Any) -> Any:
    answer = ray.get(reference)
    if isinstance(answer, Exception):
        raise answer
    return answer


def import_ray() -> Any:
    """Ray, or what to install."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "oxs.runtime.run needs Ray: pip install 'optx-sync[ray]'."
        ) from error
    return ray
