# SPDX-License-Identifier: Apache-2.0
"""The arrays of an Orbax checkpoint, by their names."""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax

from optx_sync.comm.shards import Names
from optx_sync.fingerprints import by_name
from optx_sync.forms import Form
from optx_sync.placement.layout import Arrays
from optx_sync.trees import names_of


def check_manager(manager: Any) -> None:
    """Refuse a folder in place of the manager of its checkpoints."""
    if isinstance(manager, str | os.PathLike):
        raise TypeError(
            f"restore takes an Orbax CheckpointManager; got {str(manager)!r} of type "
            f"{type(manager).__name__}. Pass ocp.CheckpointManager(folder)."
        )


def saved(manager: Any, step: int | None) -> tuple[dict[Names, Any], Any]:
    """(the shapes in an Orbax checkpoint by name, its structure)."""
    import orbax.checkpoint as ocp

    # The manager itself knows it only for what it saved itself.
    folders = {
        int(number[0]): path
        for path in manager.directory.iterdir()
        if (number := re.findall(r"\d+$", path.name))
    }
    if step is None or step not in folders:
        raise ValueError(
            f"There is no checkpoint of step {step} in {manager.directory}; there are "
            f"those of {sorted(folders)}. Begin with what start gave without one."
        )
    tree = ocp.PyTreeCheckpointHandler().metadata(folders[step] / "default").tree
    return by_name(tree), jax.tree.structure(tree)


def saved_names(form: Form, saved: Collection[Names]) -> list[Names]:
    """The names under which a checkpoint holds the arrays of a form."""
    names = []
    for path, variable in zip(form.paths(), form.variables(), strict=True):
        name = names_of(path)
        # The array of a Flax NNX variable may be saved as its `value`.
        inside = (*name, "value")
        names.append(inside if variable and inside in saved else name)
    return names


def check_like(
    saved: Mapping[Names, Any], names: list[Names], arrays: Arrays, step: int | None
) -> None:
    """Refuse a checkpoint of another state than that of these arrays."""
    for name, x in zip(names, arrays, strict=True):
        which = f"The checkpoint of step {step} holds "
        if name not in saved:
            raise ValueError(
                f"{which}no {'.'.join(name)}: it is of another state or optimizer. "
                "Pass one like the saved as like=."
            )
        if len(shape := saved[name].shape) < x.ndim:
            raise ValueError(
                f"{which}{'.'.join(name)} of shape {shape}, without the workers' axes "
                "in front: it was saved before start. Read it by manager.restore(step),"
                " and start it."
            )
