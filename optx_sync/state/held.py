# SPDX-License-Identifier: Apache-2.0
"""Find the parameters in a state, and those of a center in it."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from optx_sync.comm.shards import Names
from optx_sync.core.forms import Form, Structure, is_variable, split
from optx_sync.core.trees import Tree, is_masked, names_of
from optx_sync.state import fields
from optx_sync.state.leaves import (
    Leaf,
    map_leaves,
    refuse_around_center,
)


class HeldParameters(NamedTuple):
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


def centers(tree: Tree) -> list[Tree]:
    """The outermost states in a tree that hold a center from which workers start."""
    return fields.nodes_of(tree, fields.has_center)


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


def known(form: Form, leaves: Sequence[Leaf]) -> dict[Names, Leaf]:
    """The parameters of a state by their names; of several centers those of each."""
    numbered = form.bare(range(len(leaves)))
    if len(centers(numbered)) < 2:
        return params(form.bare(leaf.x for leaf in leaves), leaves)
    numbers = (one.tree(range(len(leaves))) for one in held(form))
    pairs = itertools.chain(*map(jax.tree_util.tree_leaves_with_path, numbers))
    return {names_of(path): leaves[place] for path, place in pairs}


def held(
    form: Form, is_node: Callable[[Tree], bool] = fields.has_center
) -> list[HeldParameters]:
    """For each of the outermost states with a copy, a center, the parameters of it."""
    numbers = range(len(form.paths()))
    state, found = form.bare(numbers), []
    own = outside(state)
    for at, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_node):
        if not is_node(node):
            continue
        center = fields.copy_of(node)
        pairs, treedef = jax.tree_util.tree_flatten_with_path(center, is_leaf=is_masked)
        wanted = [None if is_masked(x) else names_of(path) for path, x in pairs]
        first = min(jax.tree.leaves(node))
        start = _nearest(own, names_of(at), first, [x for x in wanted if x is not None])
        places = [None if name is None else own[start + name] for name in wanted]
        found.append(HeldParameters(treedef, places))
    return found


def outside(state: Tree) -> dict[Names, int]:
    """The arrays that are in no state of an optimizer, by their names."""
    pairs = jax.tree_util.tree_leaves_with_path(state, is_leaf=fields.is_of_optimizer)
    return {names_of(path): x for path, x in pairs if isinstance(x, int)}


def _nearest(
    own: dict[Names, int], at: Names, first: int, wanted: list[Names]
) -> Names:
    """The path to the nearest tree that has arrays of all of these names.

    Nearest is what shares the most of the path `at` to the center, there what is called
    `params` or `model`, else what stands before the center, whose first array is number
    `first`, else what stands behind it. Of two in the same place none is nearest.
    """
    if not wanted:
        return ()
    size, last = len(wanted[0]), wanted[0]
    ends = (name for name in own if len(name) >= size)
    starts = [
        name[: len(name) - size] for name in ends if name[len(name) - size :] == last
    ]
    starts = [x for x in starts if all(x + name in own for name in wanted)]
    if not starts:
        names = "".join(f"[{name!r}]" for name in last) or "the root"
        raise ValueError(
            f"Of the center's {names} there is no parameter in this state. Pass "
            "parameters and optimizer's state together, (params, opt_state), a "
            "TrainState, or {'params': ...}."
        )
    pairs = [
        itertools.takewhile(lambda x: x[0] == x[1], zip(x, at, strict=False))
        for x in starts
    ]
    shared = [len(list(pair)) for pair in pairs]
    most = max(shared)
    near = [x for x, many in zip(starts, shared, strict=True) if many == most]
    named = [x for x in near if x[most : most + 1] in (("params",), ("model",))]
    if not named:
        places = {own[x + last]: x for x in near}
        before = [place for place in places if place < first]
        chosen = places[max(before) if before else min(places)]
        named = [x for x in near if x[most : most + 1] == chosen[most : most + 1]]
    if not last and min(map(len, named)) > most + 1:
        raise ValueError(
            "A center is one array, and the parameters are a tree: optax.flatten stands"
            " around its rule, and hides which parameters these are. Put it inside: "
            "oxs.local_sgd(optax.flatten(inner), 'workers')."
        )
    if len(named) > 1:
        found = " and ".join("".join(f"[{name!r}]" for name in x) for x in named[:2])
        raise ValueError(
            f"A center's parameters may be those at {found}, which are equally near to "
            "its state. Pass each with its own optimizer's state, {'actor': (params, "
            "opt_state), 'critic': (params, opt_state)}."
        )
    return named[0]


def is_state(tree: Tree) -> bool:
    """Whether a tree holds what a step changes: optimizer state or NNX variables."""
    return bool(
        fields.nodes_of(tree, lambda x: fields.is_of_optimizer(x) or is_variable(x))
    )


def part(state: Tree) -> tuple[Names, Tree]:
    """(the path to, the part of a state) with the parameters: of a tuple its first.

    Only optimizers' states tell a tuple of a state's parts from one of layers.
    """
    names: Names = ()
    if (
        type(state) is tuple
        and state
        and not fields.nodes_of(state, fields.is_of_optimizer)
    ):
        return ("0",), state[0]
    while type(state) in (tuple, list) and fields.nodes_of(
        state, fields.is_of_optimizer
    ):
        names, state = (*names, "0"), state[0]
    return names, state


def to_show(form: Form) -> Tree:
    """The parameters or the model, of a tree of this form, with the arrays' numbers.

    Of a tuple the parts that are some center's parameters, and without a center the
    first one.
    """
    state = form.merge(np.arange(len(form.paths())))
    if type(state) is tuple:
        owned = {place for one in held(form) for place in one.places}
        shown = [x for x in state if owned & set(map(int, split(x)[1]))]
        if shown:
            return tuple(shown) if len(shown) > 1 else part((shown[0],))[1]
    return part(state)[1]


def prefix(state: Tree) -> Names:
    """The path to the parameters or the model in the state of a step."""
    names, state = part(state)
    if isinstance(state, Mapping):
        # In a tuple it is the parameters themselves, whatever their names.
        known = (
            state if not names or fields.nodes_of(state, fields.is_of_optimizer) else {}
        )
    else:
        known = [x for x in ("params", "model") if hasattr(state, x)]
        known = known if hasattr(state, "opt_state") else []
    return (*names, *[name for name in ("params", "model") if name in known][:1])
