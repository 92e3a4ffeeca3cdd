# SPDX-License-Identifier: Apache-2.0
"""A server's checkpoints: numbered folders that Orbax writes and reads."""

import json
import pathlib
from typing import Any

import jax
import numpy as np

# Under which name what is no array lies in a checkpoint.
NOTES = "notes"


class Damaged(Exception):
    """A checkpoint that cannot be read."""


class Checkpoints:
    """A folder, here or wherever Orbax can write: `gs://bucket/run`.

    A checkpoint is written aside and then renamed, so that an unfinished one has
    another name.
    """

    def __init__(self, folder: str | pathlib.Path):
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoint_dir needs Orbax: pip install 'optx-sync[ray]'."
            ) from error
        self.folder: Any = self.path_of(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._module = orbax.checkpoint
        self._checkpointer = self._module.Checkpointer(
            self._module.PyTreeCheckpointHandler()
        )

    @staticmethod
    def path_of(folder: str | pathlib.Path) -> Any:
        """A path as Orbax takes it, here or elsewhere."""
        from etils import epath  # Orbax stands on it.

        path = epath.Path(folder)
        return path if "://" in str(folder) else path.absolute()

    def numbers(self) -> tuple[int, ...]:
        """The finished checkpoints."""
        names = (path.name for path in self.folder.iterdir())
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def save(self, number: int, arrays: dict[str, Any], notes: dict[str, Any]) -> Any:
        """Write a checkpoint, and its path."""
        path = self.folder / str(number)
        if path.exists():  # Of an earlier run, never finished by all servers.
            path.rmtree()
        text = np.frombuffer(json.dumps(notes).encode(), np.uint8)
        arrays = {name: part for name, part in arrays.items() if part}
        self._checkpointer.save(path, {**arrays, NOTES: text})
        return path

    def load(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: arrays, and notes.

        Raises:
            Damaged: It cannot be read.
        """
        path = self.folder / str(number)
        try:
            tree = self._checkpointer.metadata(path).item_metadata.tree  # pyright: ignore
            as_numpy = self._module.RestoreArgs(restore_type=np.ndarray)
            restored = self._checkpointer.restore(
                path, restore_args=jax.tree.map(lambda _: as_numpy, tree)
            )
            notes = json.loads(np.asarray(restored.pop(NOTES)).tobytes().decode())
        except Exception as error:  # Whatever Orbax makes of broken files.
            raise Damaged(f"{path} cannot be read: {error}"[:500]) from error
        return restored, notes

    def delete(self, number: int) -> None:
        """Delete a checkpoint; that it could not be deleted is no reason to stop."""
        try:
            (self.folder / str(number)).rmtree()
        except OSError:
            pass

    def put_aside(self, number: int) -> None:
        """Take a damaged checkpoint out of the way."""
        path = self.folder / str(number)
        try:
            path.rename(self.folder / f"{number}.damaged")
        except OSError:
            pass
