# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes of a machine, by shared memory and pipes."""

import fcntl
import mmap
import os
import pickle
import uuid
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

# Up to this size, in bytes, a message is packed into one piece.
SHORT_BYTES = 2**16
ALIGNED = 64  # the alignment that JAX and vector instructions want, in bytes

# (process, file descriptor in that process, the file's name).
Address: TypeAlias = tuple[int, int, str]


class Unseen(Exception):
    """A message lies in memory that this process cannot see."""


class Memory:
    """Shared memory that other processes of the same user can map.

    It has no name in the file system, and is freed when no process maps it any more.
    Nobody can make it shorter, which would kill whoever reads it.
    """

    def __init__(self, size: int):
        name = f"optx_sync_{uuid.uuid4().hex}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.address: Address = (os.getpid(), file, name)
        self.view: memoryview = memoryview(mmap.mmap(file, size))


def seen(address: Address) -> memoryview:
    """Map the memory of another process.

    Raises:
        OSError: The process is on another machine, or gone.
    """
    process, number, name = address
    path = f"/proc/{process}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise FileNotFoundError(path)  # The number belongs to another process here.
    with open(path, "r+b", buffering=0) as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class SharedLine:
    """One end of the line between a worker and a server, which speak in turns.

    The worker begins with calls of Ray, and offers two pipes with its first messages.
    If the server can map the worker's memory, it opens the pipes, and both use them
    from then on: a call of Ray takes longer than 4 MB take through memory. A message
    in memory is overwritten by the next one of the same side.
    """

    def __init__(self, begins: bool = False):
        self._begins: bool = begins
        # Whether the other end can map this end's memory and should answer through it.
        self.near: bool = begins
        self.busy: bool = False  # whether an answer is awaited
        self._own: Memory | None = None
        self._others: tuple[Address, memoryview] | None = None
        self._pipes: tuple[Connection, Connection] | None = None  # to hear, to speak
        # The other end's descriptors of these, until it has opened them.
        self._offered: tuple[Connection, Connection] | None = None

    @property
    def is_open(self) -> bool:
        """Whether both ends use the pipes."""
        return self.near and self._pipes is not None and self._offered is None

    def packed(self, message: object) -> bytes:
        """A message as bytes, which Ray sends faster than anything else.

        A long one lies in shared memory, if both can map it.
        """
        found: list[pickle.PickleBuffer] = []
        header = pickle.dumps(message, 5, buffer_callback=found.append)
        buffers = [buffer.raw() for buffer in found]
        places, end = [], 0
        for buffer in buffers:
            places.append((end, end + buffer.nbytes))
            end += -(-buffer.nbytes // ALIGNED) * ALIGNED
        offer = self._offer() if self.near and self._begins else None
        # A message with an offer also shows whether the memory can be mapped.
        if not self.near or (end <= SHORT_BYTES and offer is None):
            return pickle.dumps((header, found, None, self.near, None), 5)
        if self._own is None or len(self._own.view) < end:
            self._own = Memory(max(end, ALIGNED))
        for (start, stop), buffer in zip(places, buffers, strict=True):
            self._own.view[start:stop] = buffer
        return pickle.dumps((header, places, self._own.address, self.near, offer))

    def unpacked(self, message: bytes) -> Any:
        """Unpack a message of `packed`; its arrays may be views of shared memory.

        Raises:
            Unseen: It lies in memory of a process that is elsewhere, or gone.
        """
        header, buffers, address, self.near, offer = pickle.loads(message)
        try:
            if address is not None:
                if self._others is None or self._others[0] != address:
                    self._others = address, seen(address)
                view = self._others[1]
                buffers = [view[start:stop] for start, stop in buffers]
            if offer is not None:
                self._pipes = _opened(offer)
        except OSError as error:
            self.near = False
            raise Unseen(str(error)) from error
        if self.near:  # The other end has opened the pipes.
            self._offered = None
        return pickle.loads(header, buffers=buffers)

    def _offer(self) -> tuple[int, int, int] | None:
        """(this process, the other end's descriptor to read, and the one to write)."""
        if self.is_open:
            return None
        hear, far_speak = Pipe(duplex=False)
        far_hear, speak = Pipe(duplex=False)
        self._pipes, self._offered = (hear, speak), (far_hear, far_speak)
        return os.getpid(), far_hear.fileno(), far_speak.fileno()

    def say(self, message: bytes) -> None:
        """Send a packed message; raises `OSError` if the other end is gone."""
        if self._pipes is None:
            raise BrokenPipeError
        self._pipes[1].send_bytes(message)

    def hear(self) -> bytes:
        """Receive a message; `EOFError` or `OSError` if the other end is gone."""
        if self._pipes is None:
            raise EOFError
        return self._pipes[0].recv_bytes()

    def has_message(self) -> bool:
        """Whether `hear` returns at once, or raises."""
        return self._pipes is None or self._pipes[0].poll(0)

    def hang_up(self) -> None:
        """Close the pipes and use Ray again."""
        self._pipes = self._offered = None


def _opened(offer: tuple[int, int, int]) -> tuple[Connection, Connection]:
    process, hear, speak = offer
    ends = (hear, os.O_RDONLY), (speak, os.O_WRONLY)
    one, two = (os.open(f"/proc/{process}/fd/{n}", how) for n, how in ends)
    return Connection(one, writable=False), Connection(two, readable=False)
