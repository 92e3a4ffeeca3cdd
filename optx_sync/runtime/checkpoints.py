# SPDX-License-Identifier: Apache-2.0
"""A server's checkpoints: numbered folders that Orbax writes and reads."""

import contextlib
import functools
import json
import os
import pathlib
import socket
from typing import Any

import jax
import numpy as np

from optx_sync.core.trees import names_of
from optx_sync.workers.fingerprints import (
    Damaged,
    by_name,
    compare,
    sealed,
    unread,
    unsealed,
)

# The item of a checkpoint that holds what is no array, as JSON.
NOTES = "notes"
# The suffix of a damaged checkpoint's folder.
DAMAGED = ".damaged"
# What the name of a folder has in which Orbax has not finished.
UNFINISHED = ".orbax-checkpoint-tmp"
# How long to wait for a lock; that of a killed process is free at once.
LOCK_SECONDS = 5.0


def locked(folder: pathlib.Path) -> Any:
    """The lock on a folder, which this process holds until nobody here has it."""
    import filelock

    path = folder / "lock"
    # The holder rewrites the text; the file itself stays. A link is not followed: what
    # it leads to would be emptied.
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link and would be written to. Delete it, or pass "
            "another checkpoint_dir."
        )
    # Of the process: a server is called by many threads.
    lock = filelock.FileLock(path, LOCK_SECONDS, thread_local=False, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        who = path.read_text(errors="replace")[:200]
        raise ValueError(
            f"Another run saves to {folder}: {who or 'it does not say who'}. Two would "
            "overwrite one another. Wait for its end, or pass another checkpoint_dir."
        ) from None
    with contextlib.suppress(OSError):  # The disk is full: it is held all the same.
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    return lock


def _numbers(folder: Any, prefix: str = "", suffix: str = "") -> tuple[int, ...]:
    """The numbers n of all `prefix` n `suffix` in a folder, in order."""
    names = [path.name for path in folder.iterdir()]
    stems = [name.removeprefix(prefix).removesuffix(suffix) for name in names]
    pairs = zip(names, stems, strict=True)
    found = (x for name, x in pairs if x.isdecimal() and name == prefix + x + suffix)
    return tuple(sorted(map(int, found)))


class Checkpoints:
    """Checkpoints in a local folder or wherever Orbax writes: `gs://bucket/run`.

    A checkpoint is written aside and then renamed, so that an unfinished one has
    another name. A local folder is locked: two runs cannot save to it. One that cannot
    be written is read all the same, and each save tries again.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        try:
            import filelock  # noqa: F401 # by Lock
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError(
                "checkpoint_dir needs Orbax and filelock: pip install 'optx-sync[ray]'."
            ) from error
        self.folder: Any = self.path_of(folder)
        self._lock: Any = None
        try:
            self._hold()
        except OSError:
            if not self.folder.exists():
                self.check_writable()
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        self._as_numpy: Any = ocp.RestoreArgs(restore_type=np.ndarray)

    @staticmethod
    def path_of(folder: str | os.PathLike[str]) -> Any:
        """A path as Orbax takes it, local or not."""
        from etils import epath  # Orbax depends on it.

        path = epath.Path(folder)
        return path if "://" in str(folder) else path.absolute()

    def _hold(self) -> None:
        """Make the folder and lock it, where that is not done."""
        if self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if "://" not in str(self.folder):
                self._lock = locked(pathlib.Path(str(self.folder)))
                self._sweep()

    def check_writable(self) -> None:
        """Refuse to begin a run that cannot save.

        Raises:
            ValueError: The folder cannot be made or locked.
        """
        try:
            self._hold()
        except OSError as error:
            raise ValueError(
                f"checkpoint_dir={str(self.folder)!r} cannot be written: {error}. Pass "
                "a folder that can, or mend this one."
            ) from error

    def numbers(self) -> tuple[int, ...]:
        """The numbers of the finished checkpoints."""
        return _numbers(self.folder)

    def damaged(self) -> tuple[int, ...]:
        """The names of the damaged checkpoints, which were put aside."""
        return _numbers(self.folder, suffix=DAMAGED)

    def save(self, number: int, arrays: dict[str, Any], notes: dict[str, Any]) -> Any:
        """Write a checkpoint and return its path."""
        self._hold()
        path = self.folder / str(number)
        if path.exists():  # The server died before it could note this one.
            path.rmtree()
        arrays = {name: part for name, part in arrays.items() if part}
        notes = sealed(notes, by_name(arrays))
        # Orbax saves nothing that has no elements; the notes have its shape.
        arrays = jax.tree.map(lambda x: x if x.size else np.zeros(1, x.dtype), arrays)
        text = np.frombuffer(json.dumps(notes).encode(), np.uint8)
        try:
            self._checkpointer.save(path, {**arrays, NOTES: text})
        finally:
            self._sweep()
        return path

    def _sweep(self) -> None:
        """Delete what unfinished saves have left, on a full disk or by a death."""
        for path in self.folder.iterdir() if self._lock else ():
            if UNFINISHED in path.name:
                with contextlib.suppress(OSError):
                    path.rmtree()

    def load(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a checkpoint: its arrays and its notes.

        Raises:
            Damaged: It cannot be read, or holds something else than was saved.
        """
        path = self.folder / str(number)
        try:
            tree = self._checkpointer.metadata(path).item_metadata.tree  # pyright: ignore
            how = jax.tree.map(lambda _: self._as_numpy, tree)
            restored = self._checkpointer.restore(path, restore_args=how)
            text = np.asarray(restored.pop(NOTES)).tobytes().decode()
            notes, words = unsealed(path, json.loads(text))
            restored = jax.tree_util.tree_map_with_path(
                functools.partial(_as_saved, words), restored
            )
            compare(path, words, by_name(restored))
        except Damaged:
            raise
        except Exception as error:  # Orbax raises various errors for broken files.
            raise unread(path, error) from error
        return restored, notes

    def delete(self, number: int) -> None:
        """Delete a checkpoint; a failure to delete is ignored."""
        with contextlib.suppress(OSError):
            (self.folder / str(number)).rmtree()

    def put_aside(self, number: int) -> None:
        """Rename a damaged checkpoint, so that it is not read again."""
        path = self.folder / str(number)
        with contextlib.suppress(OSError):
            path.rename(self.folder / f"{number}{DAMAGED}")


def _as_saved(words: dict[tuple[str, ...], Any], path: Any, x: Any) -> Any:
    """An array without elements where that was saved, else what was read."""
    shape, dtype, *_ = words.get(names_of(path), [x.shape, x.dtype])
    return x if all(shape) else np.zeros(shape, dtype)


def folders_of_servers(folder: str | os.PathLike[str]) -> dict[int, Any]:
    """The folders with checkpoints of a run, by server number."""
    path = Checkpoints.path_of(folder)
    there = _numbers(path, "server_") if path.exists() else ()
    folders = {number: path / f"server_{number}" for number in there}
    return {k: x for k, x in folders.items() if _numbers(x) or _numbers(x, "", DAMAGED)}


def set_aside(path: Any) -> None:
    """Rename the folder of an earlier run that has ended."""
    number = 1
    while (there := path.parent / f"{path.name}.before_{number}").exists():
        number += 1
    try:
        lock = None if "://" in str(path) else locked(pathlib.Path(str(path)))
        path.rename(there)
        if lock is not None:  # Its file has gone with the folder.
            lock.release(force=True)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be put aside: {error}. Pass another checkpoint_dir."
        ) from error
