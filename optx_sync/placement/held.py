# SPDX-License-Identifier: Apache-2.0
"""Find the parameters in a state, and those of a center in it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from optx_sync.comm.shards import Names
from optx_sync.forms import Form, Structure, is_variable
from optx_sync.placement import fields
from optx_sync.placement.leaves import (
    Leaf,
    is_optax,
    map_leaves,
    refuse_around_center,
)
from optx_sync.trees import Tree, is_masked, names_of, path_name

_PACKAGE = __name__.split(".")[0]


class Held(NamedTuple):
    """Where the parameters of one center stand."""

    treedef: Structure  # of the center, where masked nodes are leaves
    places: list[int | None]  # the number of each array; `None` where there is none

    def tree(self, arrays: Sequence[Tree]) -> Tree:
        """The parameters, in the structure that the optimizer knows."""
        return self.treedef.unflatten(
            optax.MaskedNode() if place is None else arrays[place]
            for place in self.places
        )

    def put(self, arrays: list[Tree], tree: Tree) -> None:
        """Replace the parameters in the list of arrays."""
        for place, x in zip(self.places, self.treedef.flatten_up_to(tree), strict=True):
            if place is not None and not is_masked(x):
                arrays[place] = x


NOTHING = Held(jax.tree.structure(()), [])  # where there is no center


def centers(tree: Tree) -> list[Tree]:
    """The outermost states in a tree that hold a center from which workers start."""

    def has_center(x):
        return fields.declares(x) and hasattr(type(x), "center_params")

    return [
        node for node in fields.nodes_of(tree, has_center) if fields.center_of(node)
    ]


def leaves(form: Form, arrays: Iterable[Tree]) -> list[Leaf]:
    """The arrays of a tree, with the fields of states that hold each."""
    tree = form.bare(arrays)
    refuse_around_center(tree)
    return form.pick(map_leaves(lambda leaf: leaf, tree))


def params(state: Tree, leaves: Iterable[Leaf]) -> dict[Names, Leaf]:
    """Of these leaves of a state its parameters, by their names among themselves."""
    start = prefix(state)
    named = ((names_of(leaf.path), leaf) for leaf in leaves)
    return {
        name[len(start) :]: leaf for name, leaf in named if name[: len(start)] == start
    }


def held(form: Form) -> list[Held]:
    """For each center in a state, the parameters that belong to it."""
    numbers = range(len(form.paths()))
    state, found = form.bare(numbers), []
    own = params(state, leaves(form, numbers))
    for node in centers(state):
        center: Tree = (fields.center_of(node) or ((), ()))[1]
        pairs, treedef = jax.tree_util.tree_flatten_with_path(center, is_leaf=is_masked)
        places = []
        for path, x in pairs:
            leaf = own.get(names_of(path))
            places.append(leaf and leaf.x)
            if leaf is None and not is_masked(x):
                raise ValueError(
                    f"Of the center's {path_name(path)} there is no parameter in this "
                    "state. Pass parameters and optimizer's state together, in this "
                    "order: (params, opt_state), a TrainState, or {'params': ...}."
                )
        found.append(Held(treedef, places))
    return found


def is_state(tree: Tree) -> bool:
    """Whether a tree holds what a step changes: optimizer state or NNX variables."""
    return bool(fields.nodes_of(tree, lambda x: is_of_optimizer(x) or is_variable(x)))


def part(state: Tree) -> tuple[Names, Tree]:
    """(the path to, the part of a state) with the parameters: of a tuple its first.

    Only optimizers' states tell a tuple of a state's parts from one of layers.
    """
    names: Names = ()
    if type(state) is tuple and state and not fields.nodes_of(state, is_of_optimizer):
        return ("0",), state[0]
    while type(state) in (tuple, list) and fields.nodes_of(state, is_of_optimizer):
        names, state = (*names, "0"), state[0]
    return names, state


def prefix(state: Tree) -> Names:
    """The path to the parameters or the model in the state of a step."""
    names, state = part(state)
    if isinstance(state, Mapping):
        # In a tuple it is the parameters themselves, whatever their names.
        known = state if not names or fields.nodes_of(state, is_of_optimizer) else {}
    else:
        known = [x for x in ("params", "model") if hasattr(state, x)]
        known = known if hasattr(state, "opt_state") else []
    return (*names, *[name for name in ("params", "model") if name in known][:1])


def is_of_optimizer(x: object) -> bool:
    """Whether this is the state of a transformation of Optax or of this package."""
    ours = hasattr(x, "_fields") and type(x).__module__.startswith(f"{_PACKAGE}.")
    return ours or (is_optax(x) and not is_masked(x)) or fields.declares(x)
