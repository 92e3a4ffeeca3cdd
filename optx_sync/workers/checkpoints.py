# SPDX-License-Identifier: Apache-2.0
"""The arrays of an Orbax checkpoint, by their names."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from optx_sync.comm.shards import Names
from optx_sync.core.forms import Form
from optx_sync.core.trees import Tree, names_of
from optx_sync.workers.fingerprints import by_name
from optx_sync.workers.layout import Arrays
from optx_sync.workers.processes import Processes

# What Orbax calls the arrays of a checkpoint: its CheckpointManager, and its v1.
_ITEMS = ("default", "state")


class Source(NamedTuple):
    """Where `Workers.restore` finds checkpoints, and how it reads one.

    Attributes:
        directory: The path of the folder that has a folder for each checkpoint.
        latest: The step of the newest checkpoint; `None` if there is none.
        read: `(folder, shapes) -> arrays`: reads the arrays in a folder, as a tree like
            that of the shapes.
    """

    directory: Any
    latest: int | None
    read: Callable[[Any, Tree], Tree]


def source(manager: Any, timeout: float) -> Source:
    """The checkpoints of an Orbax manager, of v0 or v1.

    Their files are the same. They are read here: after its own reading, either lets
    all processes wait for one another.
    """
    import orbax.checkpoint as ocp

    processes = Processes(timeout)

    def read(folder: Any, shapes: Tree) -> Tree:
        processes.wait(f"the reading of {folder}")
        args = ocp.args.StandardRestore(shapes)
        arrays = ocp.StandardCheckpointHandler().restore(folder, args=args)
        processes.wait(f"the end of the reading of {folder}")
        return arrays

    if isinstance(manager, Source):
        return manager
    if isinstance(manager, ocp.CheckpointManager):
        return Source(manager.directory, manager.latest_step(), read)
    v1 = getattr(ocp, "v1", None)  # older ones of Orbax have none
    if v1 is not None and isinstance(manager, v1.training.Checkpointer):
        last = manager.latest
        return Source(manager.directory, None if last is None else last.step, read)
    raise TypeError(
        f"restore takes an Orbax CheckpointManager; got {str(manager)!r} of type "
        f"{type(manager).__name__}. Pass ocp.CheckpointManager(folder). Of Orbax v1 "
        "pass an ocp.training.Checkpointer."
    )


def saved(source: Source, step: int | None) -> tuple[Any, dict[Names, Any], Any]:
    """(the folder of a checkpoint's arrays, their shapes by name, their structure)."""
    import orbax.checkpoint as ocp

    # The manager itself knows it only for what it saved itself.
    folders = {
        int(number[0]): path
        for path in source.directory.iterdir()
        if (number := re.findall(r"\d+$", path.name))
    }
    if step is None or step not in folders:
        raise ValueError(
            f"There is no checkpoint of step {step} in {source.directory}; there are "
            f"those of {sorted(folders)}. Begin with what start gave without one."
        )
    items = [folders[step] / name for name in _ITEMS]
    folder = next((item for item in items if item.exists()), items[0])
    tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    return folder, by_name(tree), jax.tree.structure(tree)


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
