# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes of a machine, through memory that both see."""

import mmap
import os
import pickle
import uuid
import weakref
from typing import Any, TypeAlias

# Messages up to here are packed into one piece.
SHORT_BYTES = 2**16
ALIGNED = 64  # what JAX and vector instructions like arrays to begin at

# A process, a file that it has open, and the file's name.
Address: TypeAlias = tuple[int, int, str]


class Unseen(Exception):
    """A message lies in memory that this process cannot see."""


class Memory:
    """Memory of this process that others of its user on the machine can see.

    It has no place in the file system, and goes when nobody has it any more.
    """

    def __init__(self, size: int):
        name = f"optx_sync_{uuid.uuid4().hex}"
        file = os.memfd_create(name)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, size)
        self.address: Address = (os.getpid(), file, name)
        self.view: memoryview = memoryview(mmap.mmap(file, size))


def seen(address: Address) -> memoryview:
    """The memory of another process.

    Raises:
        OSError: The process is on another machine, or gone.
    """
    process, number, name = address
    path = f"/proc/{process}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise FileNotFoundError(path)  # Another process has that number here.
    with open(path, "r+b", buffering=0) as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class Line:
    """One end between a worker and a server, who speak in turns.

    What is sent through memory is overwritten by the next message of the same side.
    """

    def __init__(self, near: bool = False):
        # Whether the other one sees this one's memory, and is to answer through it.
        self.near: bool = near and hasattr(os, "memfd_create")
        self.busy: bool = False  # whether an answer is awaited
        self._own: Memory | None = None
        self._others: tuple[Address, memoryview] | None = None

    def packed(self, message: object, short: int = SHORT_BYTES) -> Any:
        """A message as bytes, which Ray sends faster than anything else.

        A long one lies in memory that both see. For one who is elsewhere it stays what
        it is: Ray lays its arrays into memory of its own.
        """
        found: list[pickle.PickleBuffer] = []
        header = pickle.dumps(message, 5, buffer_callback=found.append)
        buffers = [buffer.raw() for buffer in found]
        places, end = [], 0
        for buffer in buffers:
            places.append((end, end + buffer.nbytes))
            end += -(-buffer.nbytes // ALIGNED) * ALIGNED
        if not self.near and end > SHORT_BYTES:
            return message
        if not self.near or end <= short:
            pieces = [bytes(buffer) for buffer in buffers]
            return pickle.dumps((header, pieces, None, self.near))
        if self._own is None or len(self._own.view) < end:
            self._own = Memory(max(end, ALIGNED))
        for (start, stop), buffer in zip(places, buffers, strict=True):
            self._own.view[start:stop] = buffer
        return pickle.dumps((header, places, self._own.address, self.near))

    def unpacked(self, message: object) -> Any:
        """What `packed` was given; its arrays may be views of memory.

        Raises:
            Unseen: It lies in memory of a process that is elsewhere, or gone.
        """
        self.near = False
        if not isinstance(message, bytes):
            return message
        header, buffers, address, self.near = pickle.loads(message)
        if address is not None:
            if self._others is None or self._others[0] != address:
                try:
                    self._others = address, seen(address)
                except OSError as error:
                    self.near = False
                    raise Unseen(str(error)) from error
            view = self._others[1]
            buffers = [view[start:stop] for start, stop in buffers]
        return pickle.loads(header, buffers=buffers)
