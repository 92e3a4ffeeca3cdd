# SPDX-License-Identifier: Apache-2.0
"""Split a tree into its arrays and its form, for which a program is compiled.

The form keeps what is no array: functions, flags and settings, as in Equinox modules.
Variables of Flax NNX are taken apart and put together again; one that stands in two
places, such as tied weights, stays one.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optx_sync.core.trees import Item, KeyPath, Tree, path_name

# Marks a leaf that is an array. Each step compares all marks, and `None` is quick.
_ARRAY = None


class Kept(NamedTuple):
    """A leaf that is no array."""

    kind: type  # since True == 1
    value: object


Structure: TypeAlias = Any  # a `PyTreeDef`, which is no type to a type checker
# What stands at a leaf: an array; the arrays of a variable, by its structure; the place
# of an earlier leaf that is the same variable; or what is no array, `Kept`.
Entry: TypeAlias = Any


class Form(NamedTuple):
    """A tree without its arrays; equal where the trees differ in arrays alone."""

    treedef: Structure  # variables are its leaves
    leaves: tuple[Entry, ...]

    def merge(self, arrays: Iterable[Tree]) -> Tree:
        """The tree with these arrays."""
        return self.treedef.unflatten(
            self._filled(arrays, lambda leaf, own: leaf.unflatten(own))
        )

    def bare(self, arrays: Iterable[Tree]) -> Tree:
        """The tree with arrays for variables, and `None` for what is no array."""
        leaves = self._filled(arrays, lambda _, own: own[0] if len(own) == 1 else own)
        return self.treedef.unflatten(
            None if isinstance(leaf, Kept) else x
            for x, leaf in zip(leaves, self.leaves, strict=True)
        )

    def _filled(
        self,
        arrays: Iterable[Tree],
        variable: Callable[[Structure, list[Tree]], Tree],
    ) -> list[Tree]:
        """The leaves, with these arrays."""
        arrays, leaves = iter(arrays), []
        for leaf in self.leaves:
            if leaf is _ARRAY:
                leaves.append(next(arrays))
            elif isinstance(leaf, Kept):
                leaves.append(leaf.value)
            elif isinstance(leaf, int):
                leaves.append(leaves[leaf])
            else:
                own = [next(arrays) for _ in range(leaf.num_leaves)]
                leaves.append(variable(leaf, own))
        return leaves

    def pick(self, tree: Tree) -> list[Tree]:
        """For each array the entry of a tree that has the structure of `bare`."""
        found = self.treedef.flatten_up_to(tree)
        return [
            x
            for value, leaf in zip(found, self.leaves, strict=True)
            for x in (value if _count(leaf) > 1 else [value] * _count(leaf))
        ]

    def paths(self) -> list[KeyPath]:
        """The path to each array."""
        return self._each(self.paths_of_leaves())

    def paths_of_leaves(self) -> list[KeyPath]:
        """The path to each leaf, array or not."""
        numbered = self.treedef.unflatten(range(len(self.leaves)))
        return [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]

    def variables(self) -> list[type | None]:
        """The class of the variable that holds each array, `None` without one."""
        kinds = [getattr(x, "node_data", lambda: [None])()[0] for x in self.leaves]
        return self._each(kinds)

    def _each(self, values: Sequence[Item]) -> list[Item]:
        """For each array the value of its leaf."""
        pairs = zip(values, self.leaves, strict=True)
        return [value for value, leaf in pairs for _ in range(_count(leaf))]

    def update(
        self, trees: Sequence[Tree], arrays: Iterable[Tree], variables: Iterable[Any]
    ) -> list[Tree]:
        """The trees of a tuple of this form, with these arrays.

        Variables are set in place, and objects of NNX that hold them stay.
        """
        if {*map(type, self.leaves)} <= {type(_ARRAY)}:  # quick, for each step
            return list(self.treedef.unflatten(arrays))
        variables = iter(variables)

        def in_place(leaf: Structure, own: list[Tree]) -> Tree:
            variable = next(variables)
            variable.update_from_state(leaf.unflatten(own))
            return variable

        leaves = iter(self._filled(arrays, in_place))
        each = zip(trees, self.treedef.children(), strict=True)
        return [
            old if is_object(old) else treedef.unflatten(own)
            for old, treedef in each
            for own in [[*itertools.islice(leaves, treedef.num_leaves)]]
        ]


def split(tree: Tree, numbers: bool = False) -> tuple[Form, list[jax.Array]]:
    """The form and the arrays of a tree; with `numbers` Python's count as arrays."""
    return _split(tree, numbers)[:2]


def _split(
    tree: Tree, numbers: bool = False
) -> tuple[Form, list[jax.Array], list[Any]]:
    """The same, and the variables, each once."""
    stops = is_variable if "flax.nnx" in sys.modules else None
    leaves, treedef = jax.tree.flatten(tree, is_leaf=stops)
    arrays, found, places, variables = [], [], {}, []
    for leaf in leaves:
        if stops and is_variable(leaf):
            if id(leaf) in places:
                found.append(places[id(leaf)])
                continue
            places[id(leaf)] = len(found)
            variables.append(leaf)
            own, structure = jax.tree.flatten(leaf)
            arrays.extend(own)
            found.append(structure)
        elif hasattr(leaf, "dtype") or (numbers and is_number(leaf)):
            arrays.append(leaf)
            found.append(_ARRAY)
        else:
            found.append(Kept(type(leaf), leaf))
    return Form(treedef, tuple(found)), arrays, variables


class Forms:
    """The forms of trees that were split before, which JAX's own structure tells.

    That of a tree whose leaves are arrays: then no function of Python runs for each.
    """

    def __init__(self) -> None:
        self._known: dict[Structure, Form] = {}
        self._with_variables: bool = False  # whether there was one

    def split(self, tree: Tree) -> tuple[Form, list[jax.Array], list[Any]]:
        """(the form, the arrays, the variables, each once); see `split`."""
        variables = []

        def see(x: Tree) -> bool:
            if is_variable(x):
                variables.append(x)
            return False

        stops = see if self._with_variables else None
        leaves, treedef = jax.tree.flatten(tree, is_leaf=stops)
        plain = all(hasattr(kind, "dtype") for kind in {*map(type, leaves)})
        plain = plain and len({*map(id, variables)}) == len(variables)
        if plain and (known := self._known.get(treedef)):
            return known, leaves, variables
        form, arrays, variables = _split(tree)
        if plain and bool(variables) <= self._with_variables:
            self._known[treedef] = form
        self._with_variables |= bool(variables)
        return form, arrays, variables


def shapes_of(function: Callable[[], Tree]) -> Tree:
    """The tree that a function returns, with `jax.ShapeDtypeStruct` for arrays."""
    forms: list[Form] = []

    def traced() -> list[jax.Array]:
        form, arrays = split(with_arrays(function()))
        forms.append(form)
        return arrays

    arrays = jax.eval_shape(traced)
    return forms[0].merge(arrays)


def is_function(x: object) -> bool:
    """Whether this is a function, rather than a model that can be called."""
    return inspect.isroutine(x) or isinstance(x, functools.partial)


def with_arrays(tree: Tree) -> Tree:
    """The tree with arrays for Python's numbers, except in Equinox modules."""
    module = getattr(sys.modules.get("equinox"), "Module", ())
    return jax.tree.map(
        lambda x: jnp.asarray(x) if is_number(x) else x,
        tree,
        is_leaf=lambda x: isinstance(x, module) or is_variable(x),
    )


def difference(form: Form, other: Form) -> str:
    """The first place where two forms differ, in words."""
    names, others = (
        dict(zip(map(path_name, f.paths_of_leaves()), f.leaves, strict=True))
        for f in (form, other)
    )
    for name in names | others:
        if name not in others:
            return f"{name} is missing"
        if name not in names:
            return f"{name} is new"
        if names[name] != others[name]:
            return f"{name} has changed in kind or value"
    return "the containers differ"


def number_for_array(form: Form, other: Form) -> tuple[KeyPath, object] | None:
    """(where, which) a form holds a number of Python and the other one an array."""
    if form.treedef != other.treedef:
        return None
    for path, x, y in zip(
        form.paths_of_leaves(), form.leaves, other.leaves, strict=True
    ):
        if y is _ARRAY and isinstance(x, Kept) and is_number(x.value):
            return path, x.value
    return None


def is_number(x: object) -> bool:
    """Whether this is a Python number other than a bool."""
    return isinstance(x, int | float | complex) and not isinstance(x, bool)


def is_variable(x: object) -> bool:
    """Whether this is a variable of Flax NNX; does not import NNX."""
    return _is_of_nnx(type(x), "Variable")


def is_trained(variable: type | None) -> bool:
    """Whether an array in a variable of this class, or in none, may be a parameter."""
    return variable is None or _is_of_nnx(variable, "Param")


def is_statistic(variable: type | None) -> bool:
    """Whether an array in a variable of this class is a statistic of batches."""
    return variable is not None and _is_of_nnx(variable, "BatchStat")


def is_of_nnx(x: object) -> bool:
    """Whether this is an object, a variable or a state of Flax NNX; for `is_leaf=`."""
    return is_object(x) or is_variable(x) or _is_of_nnx(type(x), "State")


def is_object(x: object) -> bool:
    """Whether this is a Flax NNX object, which changes in place."""
    return _is_of_nnx(type(x), "Pytree")


@functools.cache  # of a class: a step asks of each node in its state
def _is_of_nnx(kind: type, base: str) -> bool:
    return issubclass(kind, getattr(sys.modules.get("flax.nnx"), base, ()))


def _count(leaf: Entry) -> int:
    if leaf is _ARRAY:
        return 1
    return 0 if isinstance(leaf, Kept | int) else leaf.num_leaves
