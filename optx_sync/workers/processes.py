# SPDX-License-Identifier: Apache-2.0
"""Processes that wait for one another, and an error that names who does not come."""

import itertools
import json
import re
import socket
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from optx_sync.core.checks import interval

TIMEOUT = 1200.0  # what Orbax gives the writing of a checkpoint
# Processes wait equally often: the number tells one wait from the next in all of them.
_WAITS = itertools.count()
_LETTERS = 64  # of a host's name


class Processes:
    """All processes of a run, which wait for one another at most `timeout` seconds.

    What a collective waits for has no limit, and nobody says whom it waits for: so they
    first meet here, at the coordination service of `jax.distributed`.
    """

    def __init__(self, timeout: float):
        interval("(0, inf)", "Pass seconds, for example 600.", timeout=timeout)
        self._timeout = timeout
        self._hosts: list[str] = []  # known once all have come for the first time

    def wait(self, place: str) -> None:
        """Wait until all processes have come to this place of the program.

        Raises:
            TimeoutError: Some did not come in time, or this one came too late.
        """
        # Several processes without the service: TPUs, whose runtime joins them itself.
        if jax.process_count() == 1 or not jax.distributed.is_initialized():
            return
        import orbax.checkpoint as ocp

        here, limit = f"optx_sync {next(_WAITS)}: {place}", int(1000 * self._timeout)
        try:
            ocp.multihost.get_barrier_sync_fn()(key=here, timeout_ms=limit)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(self._missing(place, str(error))) from error
        # TPUs may number processes otherwise than the service does.
        if not self._hosts and jax.default_backend() != "tpu":
            own = socket.gethostname().encode()[:_LETTERS].ljust(_LETTERS)
            names = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))
            self._hosts = [
                bytes(name).decode(errors="replace").strip()
                for name in np.asarray(names)
            ]

    def agree(self, fine: bool, place: str) -> bool:
        """Whether all is fine in all processes."""
        self.wait(place)
        return bool(np.all(multihost_utils.process_allgather(np.asarray(fine))))

    def told(self, said: Mapping[str, str], place: str) -> list[dict[str, str]]:
        """What each process says, in their order."""
        self.wait(place)
        if jax.process_count() == 1:
            return [dict(said)]
        own = np.frombuffer(json.dumps(dict(said)).encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.asarray(own.size)))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: own.size] = own
        rows = np.asarray(multihost_utils.process_allgather(padded))
        pairs = zip(rows, sizes.tolist(), strict=True)
        return [json.loads(row[:size].tobytes()) for row, size in pairs]

    def require_equal(self, said: Mapping[str, str], place: str) -> None:
        """Refuse, in all processes, what they do not all say alike.

        Raises:
            ValueError: It says which process has which number.
        """
        told = self.told(said, place)
        for name in sorted({name for one in told for name in one}):
            values: dict[str, list[str]] = {}
            for number, one in enumerate(told):
                values.setdefault(one.get(name, "missing"), []).append(
                    self._name(number)
                )
            if len(values) > 1:
                found = "; ".join(
                    f"{value} in {', '.join(names)}" for value, names in values.items()
                )
                raise ValueError(
                    f"The processes of this group differ in also[{name!r}]: {found}. "
                    "Start all with the same settings: replicas whose updates are "
                    "scaled otherwise drift apart, and nothing else says so."
                )

    def _name(self, number: int) -> str:
        host = dict(enumerate(self._hosts)).get(number)
        return f"process {number}" + (f" on {host}" if host else "")

    def _missing(self, place: str, said: str) -> str:
        """Who is missing, from what the service says of the processes it waited for."""
        listed = re.search(r"timed out task names:\s*\n((?:[^\n]*\d\n)+)", said)
        numbers = re.findall(r"(\d+)\n", listed[1]) if listed else []
        names = [self._name(number) for number in sorted(map(int, numbers))]
        # It names no more than twenty.
        counts = re.search(r"reached the barrier: (\d+)/(\d+)", said)
        if counts and (more := int(counts[2]) - int(counts[1]) - len(names)) > 0:
            names.append(f"{more} more")
        return (
            f"Not all {jax.process_count()} processes came to {place} within "
            f"{self._timeout:g} s. Missing: {', '.join(names) or said}. Their own logs "
            "say where they are: one has died, reads or compiles for long, or has gone "
            "another way through the program. Start all again; if it was only slow, "
            "pass a longer timeout."
        )
