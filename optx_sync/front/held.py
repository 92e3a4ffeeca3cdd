# SPDX-License-Identifier: Apache-2.0
"""Find the parameters of a center in a state, and the arrays of a checkpoint."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from optx_sync.forms import Form, is_variable
from optx_sync.placement import fields
from optx_sync.trees import Tree, is_masked, names_of, path_name

Names = tuple[str, ...]  # of a path; the same for attributes, keys and indices


class Held(NamedTuple):
    """Where the parameters of one center stand."""

    treedef: Any  # of the center, where masked nodes are leaves
    places: list[int | None]  # the number of each array; `None` where there is none

    def tree(self, arrays: Sequence[Any]) -> Tree:
        """The parameters, in the structure that the optimizer knows."""
        return self.treedef.unflatten(
            optax.MaskedNode() if place is None else arrays[place]
            for place in self.places
        )

    def put(self, arrays: list[Any], tree: Tree) -> None:
        """Replace the parameters in the list of arrays."""
        for place, x in zip(self.places, self.treedef.flatten_up_to(tree), strict=True):
            if place is not None and not is_masked(x):
                arrays[place] = x


def centers(tree: Tree) -> list[Any]:
    """The outermost states in a tree that hold a center from which workers start."""

    def has_center(x):
        return fields.declares(x) and hasattr(type(x), "center_params")

    return [
        node for node in fields.nodes_of(tree, has_center) if fields.center_of(node)
    ]


def held(state: Tree, form: Form) -> list[Held]:
    """For each center in a state, the parameters that belong to it."""
    start = prefix(state)
    names = [names_of(path) for path in form.paths()]
    places = {
        name[len(start) :]: place
        for place, name in enumerate(names)
        if name[: len(start)] == start
    }
    found = []
    for node in centers(form.bare(range(len(names)))):
        center: Any = (fields.center_of(node) or ((), ()))[1]
        center = center.tree if fields.is_in_pieces(center) else center
        if isinstance(center, fields.InParts):
            center = center.partition.shapes
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            center, is_leaf=is_masked
        )
        own = [places.get(names_of(path)) for path, _ in leaves]
        for (path, x), place in zip(leaves, own, strict=True):
            if place is None and not is_masked(x):
                raise ValueError(
                    f"Of the center's {path_name(path)} there is no parameter in this "
                    "state. Pass parameters and optimizer's state together, in this "
                    "order: (params, opt_state), (model, optimizer), a TrainState, or "
                    "a dict with 'params' or 'model'."
                )
        found.append(Held(treedef, own))
    return found


def is_state(tree: Tree) -> bool:
    """Whether a tree holds what a step changes: optimizer state or NNX variables."""

    def is_one(x):
        of_optax = hasattr(x, "_fields") and type(x).__module__.startswith("optax.")
        return of_optax or fields.declares(x) or is_variable(x)

    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def prefix(state: Tree) -> Names:
    """The path to the parameters or the model in the state of a step."""
    names: Names = ()
    while type(state) in (tuple, list) and state:
        names, state = (*names, "0"), state[0]
    if isinstance(state, Mapping):
        state = {} if names else state  # a tuple begins with the parameters themselves
    else:
        state = vars(state) if hasattr(state, "opt_state") else {}
    return (*names, *[name for name in ("params", "model") if name in state][:1])


def saved(manager: Any, step: int) -> tuple[dict[Names, Any], Any]:
    """(the shapes in an Orbax checkpoint by name, its structure)."""
    import orbax.checkpoint as ocp

    # The manager itself knows it only for what it saved itself.
    folders = {
        int(number[0]): path
        for path in manager.directory.iterdir()
        if (number := re.findall(r"\d+$", path.name))
    }
    if step not in folders:
        raise ValueError(
            f"There is no checkpoint of step {step} in {manager.directory}; there are "
            f"those of {sorted(folders)}."
        )
    tree = ocp.PyTreeCheckpointHandler().metadata(folders[step] / "default").tree
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    # The array of a Flax NNX variable is saved under the name `value`.
    names = (names_of(path) for path, _ in leaves)
    names = [x[:-1] if x[-1:] == ("value",) else x for x in names]
    return dict(zip(names, (x for _, x in leaves), strict=True)), treedef
