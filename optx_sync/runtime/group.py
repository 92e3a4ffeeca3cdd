# SPDX-License-Identifier: Apache-2.0
"""A worker that is several processes of `jax.distributed`: one of them is heard.

All run one program on arrays that lie over the devices of all. So that all go the same
way, process 0 hears what servers say, and when, and tells the others.
"""

import pickle
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection as sockets
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optx_sync.runtime.messages import Joined, Pending, Push
from optx_sync.runtime.samples import Lease
from optx_sync.runtime.worker import Connection

# Bytes for an address and a key; all processes must know the size of what they meet by.
ADDRESS_BYTES = 256
# How long process 0 listens to one who connects and does not show the key.
GREETING_SECONDS = 10.0


class Apart(RuntimeError):
    """Another process of the worker is gone, or runs another program."""


class GroupConnection:
    """A connection for a worker that is a group of `jax.distributed` processes.

    Each process makes one after `jax.distributed.initialize`, then a `Worker` with
    equal arguments, and lays the parameters out over the devices of all with
    `worker.shard`. Process 0 talks to the servers; what it hears, answers or an
    exception, goes to the others through a socket to each. So all step, exchange and
    leave alike. They wait for it at no collective: those have time limits of their own.

    Args:
        connection: To the servers. Only process 0 uses it; pass `None` in the others if
            they have none.
        host: The address of process 0's machine, which only that process needs.
            `None`: what the machine's name stands for.

    Raises:
        RuntimeError: While it trains: another process of the group is gone, or is at
            another place of the program. Start all again.

    Example:
        A group of one process; more make it in the same way, each for itself.

        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from optx_sync.runtime import GroupConnection, Server, Worker
        >>> rule, params = oxs.rules.local_sgd(), {"w": jnp.zeros(2)}
        >>> server = Server(params, rule, num_workers=1, communication_period=1)
        >>> worker = Worker(
        ...     GroupConnection(server, "127.0.0.1"), params, optax.sgd(1.0), rule,
        ...     index=0, num_workers=1, communication_period=1,
        ... )
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        >>> worker.shard(jax.NamedSharding(mesh, jax.P()))
        >>> worker.step({"w": jnp.array([-2.0, 0.0])})
        >>> server.center()["w"].tolist()
        [2.0, 0.0]
    """

    def __init__(self, connection: Connection | None, host: str | None = None):
        self._servers: Any = connection
        self._speaks: bool = jax.process_index() == 0
        self._lines: list[Any] = _connected(host)
        self._told: bool = False  # of a notice to leave, by one of the processes

    def join(self, worker: int) -> Joined:
        """See `Server.join`."""
        return self._heard("join", lambda: self._servers.join(worker))

    def everyone_joined(self) -> bool:
        """See `Server.everyone_joined`."""
        return self._heard("start", lambda: self._servers.everyone_joined())

    def send(self, push: Push) -> Pending:
        """See `Server.send`."""
        sent: list[Pending] = []
        self._heard("push", lambda: sent.append(self._servers.send(push)))
        return Pending(
            lambda: self._heard("answer", lambda: sent[0]()),
            lambda: self._heard("look", lambda: sent[0].is_there()),
            lambda: self._heard("hand in", lambda: sent[0].hand_in()),
        )

    def lease(
        self, worker: int, incarnation: int, holds: list[int], count: int
    ) -> list[Lease] | None:
        """See `Server.lease`."""
        given = worker, incarnation, holds, count
        return self._heard("lease", lambda: self._servers.lease(*given))

    def asked(self, worker: int, part: int, met: int) -> bool:
        """See `Server.asked`."""
        return self._heard("ask", lambda: self._servers.asked(worker, part, met))

    def leaves(self, told: bool) -> bool:
        """Whether a process was told that its machine goes: all leave in one step."""
        if told and not self._told and not self._speaks:
            _through(self._lines[0].send_bytes, b"")
        self._told = self._told or told
        return self._heard("notice", self._was_told)

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        self._heard("leave", lambda: self._servers.leave(worker))

    def _was_told(self) -> bool:
        for line in self._lines:
            while line.poll():  # Also where the process is gone.
                _through(line.recv_bytes)
                self._told = True
        return self._told

    def _heard(self, what: str, ask: Callable[[], Any]) -> Any:
        """Process 0 asks; all return, or raise, what came of it."""
        if not self._speaks:
            place, found, error = pickle.loads(_through(self._lines[0].recv_bytes))
            if place != what:
                raise Apart(
                    f"Process {jax.process_index()} of a worker is at {what!r}, and "
                    f"process 0 at {place!r}. All are to run the same program, and to "
                    "decide by what all know alike."
                )
        else:
            found, error = None, None
            try:
                found = ask()
            except Exception as raised:
                error = raised
            message = pickle.dumps((what, found, error), pickle.HIGHEST_PROTOCOL)
            for line in self._lines:
                _through(line.send_bytes, message)
        if error is not None:
            raise error
        return found


def _through(call: Callable[..., Any], *given: bytes) -> Any:
    """Send or receive."""
    try:
        return call(*given)
    except (EOFError, OSError) as error:
        raise Apart("Another process of the same worker is gone.") from error


def _connected(host: str | None) -> list[Any]:
    """In process 0 a socket to each of the others; in these one to process 0."""
    if jax.process_index():
        at, port, key = _from_the_first("").split()
        return [sockets.Client((at, int(port)), authkey=key.encode())]
    key = secrets.token_hex(16)
    at = host or socket.gethostbyname(socket.gethostname())
    with _door(at) as door:
        _from_the_first(f"{at} {door.getsockname()[1]} {key}")
        return _let_in(door, jax.process_count() - 1, key.encode())


def _door(at: str) -> socket.socket:
    """Listen at this address alone."""
    try:
        return socket.create_server((at, 0), backlog=socket.SOMAXCONN)
    except OSError:  # Others reach it there, as behind a NAT: it is not this machine's.
        return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _let_in(door: socket.socket, count: int, key: bytes) -> list[Any]:
    """So many who know the key. A stranger, as of a port scan, is hung up on."""
    lines: list[Any] = []
    while len(lines) < count:
        guest, _ = door.accept()
        line = sockets.Connection(guest.dup().detach())
        # Who says nothing, or a byte now and then, hangs up so.
        limit = threading.Timer(GREETING_SECONDS, guest.shutdown, [socket.SHUT_RDWR])
        limit.daemon = True
        limit.start()
        try:
            sockets.deliver_challenge(line, key)
            sockets.answer_challenge(line, key)
        except Exception:  # whatever its garbage leads to
            line.close()
        else:
            lines.append(line)
        finally:
            limit.cancel()
            limit.join()  # Then the socket, closed now, is shut down no more.
            guest.close()
    return lines


def _from_the_first(text: str) -> str:
    own = np.frombuffer(text.encode().ljust(ADDRESS_BYTES), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(own))).decode()
