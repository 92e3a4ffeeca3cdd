# SPDX-License-Identifier: Apache-2.0
"""Fragments: parts of the parameters that meet in turn.

A part has the structure of the whole tree: `optax.MaskedNode` for the leaves that it
does not have, and some of the rows of leaves that it shares with other parts.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.core.checks import Refused, integer, refuse
from optx_sync.core.trees import Tree, is_nothing, path_name, pure

Part: TypeAlias = int | Sequence[int] | np.ndarray
Fragments: TypeAlias = int | Callable[[jax.tree_util.KeyPath, jax.Array], Part]
Rows: TypeAlias = slice | np.ndarray


class _Strided(NamedTuple):
    """The result of `strided`: a function that knows how many parts it makes."""

    number: int

    def __call__(self, path: jax.tree_util.KeyPath, leaf: jax.Array) -> Part:
        names: list[Any] = []
        for key in path:
            kinds = (getattr(key, kind, None) for kind in ("idx", "key", "name"))
            name = next((name for name in kinds if name is not None), "")
            # A flat name is a path of its own: "layers.0.weight", ("layers", 0).
            names += name if isinstance(name, tuple) else (name,)
        digits = re.search(r"\d+(?=[./]|$)", "/".join(map(str, names)))
        if digits is not None:
            return int(digits.group()) % self.number
        if not leaf.shape:
            return 0
        return np.arange(leaf.shape[0]) % self.number


def strided(number: int) -> Fragments:
    """Fragments that take every n-th layer, for `fragments=` of a center rule.

    A leaf with a number in its path (`params["layers"][3]["kernel"]`,
    `params["block_3"]["kernel"]`, or the flat `params["layers.3.kernel"]`) belongs as a
    whole to layer 3, and so to part 3 mod n. The first number counts that stands at the
    end of a name, or before a dot or slash in it. In every other leaf, row i along axis
    0 belongs to part i mod n. So scanned layers, one leaf with the layers along axis 0,
    are dealt out like single layers, and what is no layer, such as an embedding, is
    split evenly. A scalar belongs to part 0.

    Args:
        number: n, the number of parts.

    Returns:
        A function of (path, leaf).

    Raises:
        TypeError: A number that is no integer.
        ValueError: A number below 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> params = {"layer_0": jnp.zeros(2), "layer_1": jnp.zeros(2)}
        >>> params["scanned"] = jnp.zeros((5, 2))
        >>> jax.tree_util.tree_map_with_path(oxs.rules.strided(2), params)
        {'layer_0': 0, 'layer_1': 1, 'scanned': array([0, 1, 0, 1, 0])}

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
        Distributed Free Lunch", 2025, arXiv 2501.18512 (section 3.1).
    """
    return _Strided(integer("number", number, "Pass the number of parts."))


def check_fragments(fragments: object) -> Fragments:
    """`fragments=` of a center rule, 1 for `None`; else a TypeError or ValueError."""
    if callable(fragments):
        function: Any = fragments
        return function
    mend = (
        "Pass 4, say, or a function (path, leaf) -> parts such as oxs.rules.strided(4)."
    )
    return 1 if fragments is None else integer("fragments", fragments, mend)


class _Turns(NamedTuple):
    """How often one of several parts meets."""

    period: Any  # a `Period`
    number: int
    delay: int

    @property
    def between(self) -> Any:
        """Steps from one exchange to the next."""
        return self.period if callable(self.period) else self.period // self.number

    @property
    def fitting(self) -> int:
        """By what to multiply the parts for a period that is not shorter."""
        return -(-self.period // self.number)


_NOT_IN_TURN: Refused[_Turns] = (
    (
        lambda o: callable(o.period) and o.number > 1,
        "communication_period is a schedule, which fragments cannot divide; got "
        "{0.number} of them. Pass an int as the period, or fragments=1.",
    ),
    (
        lambda o: not callable(o.period) and o.period % o.number,
        "communication_period={0.period} is not a multiple of the {0.number} "
        "fragments: every communication_period / fragments steps one of them meets. "
        "Pass for example communication_period={0.fitting} * {0.number}.",
    ),
    (
        lambda o: not callable(o.period) and o.delay > o.between,
        "delay={0.delay} is longer than communication_period / fragments = {0.between} "
        "steps; what is summed must land before the next part sets out. Pass "
        "delay={0.between} or less, a longer communication_period or fewer fragments.",
    ),
)


def steps_between(period: Period, number: int, delay: int = 0) -> Period:
    """L: the steps from one exchange to the next, of `number` parts.

    Raises a ValueError where the parts do not divide the period, or where the delay is
    longer than L: only one part may be on its way at a time.
    """
    turns = _Turns(period, number, delay)
    refuse(turns, _NOT_IN_TURN)
    return turns.between


def number_of_parts(fragments: Fragments) -> int | None:
    """The number of parts; `None` where it depends on the parameters."""
    return getattr(fragments, "number", None) if callable(fragments) else fragments


class Partition:
    """Which rows of which leaves belong to which part; a single part has all of them.

    Attributes:
        number: P, the number of parts.
    """

    number: int

    def __init__(self, fragments: Fragments, tree: Tree):
        """Cut a tree of arrays or of `jax.ShapeDtypeStruct`."""
        # A state is made of NNX variables, and stepped without them.
        tree = pure(tree)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        owners = (
            [_asked(fragments, path, leaf) for path, leaf in leaves]
            if callable(fragments)
            else _balanced([leaf for _, leaf in leaves], fragments)
        )
        self._treedef = jax.tree.structure(tree)
        found: set[int] = set().union(*(np.unique(x).tolist() for x in owners))
        self.number = number_of_parts(fragments) or 1 + max(found, default=0)
        missing = sorted(set(range(self.number)) - found)
        if missing and self.number > 1:
            raise ValueError(
                f"There are {self.number} fragments, and nothing is in number "
                f"{', '.join(map(str, missing))}. Pass fewer, or a function that gives "
                f"each of them something."
            )
        self._rows = [
            [_rows_of(owner, part) for owner in owners] for part in range(self.number)
        ]

    def pick(self, tree: Tree, part: int) -> Tree:
        """One part of a tree like the one that was cut; for () it is ()."""
        if self.number == 1 or is_nothing(tree):
            return tree
        leaves = self._treedef.flatten_up_to(tree)
        return self._treedef.unflatten(
            optax.MaskedNode()
            if rows is None
            else jax.tree.map(functools.partial(_take_rows, rows=rows), x)
            for x, rows in zip(leaves, self._rows[part], strict=True)
        )

    def put(self, tree: Tree, part: int, values: Tree) -> Tree:
        """The tree with new values for one part."""
        if self.number == 1 or is_nothing(tree):
            return values
        leaves = self._treedef.flatten_up_to(tree)
        values = self._treedef.flatten_up_to(values)
        return self._treedef.unflatten(
            x if rows is None else _put_rows(x, rows, value)
            for x, rows, value in zip(leaves, self._rows[part], values, strict=True)
        )

    def split(self, tree: Tree) -> tuple[Tree, ...]:
        """All parts of a tree like the one that was cut."""
        return tuple(self.pick(tree, part) for part in range(self.number))

    def each(self, start: Callable[[Tree], Tree], tree: Tree) -> Tree:
        """A state for the one part, or a tuple of states, one for each part."""
        states = tuple(map(start, self.split(tree)))
        return states if self.number > 1 else states[0]

    def of_each(self, states: Tree, part: int) -> Tree:
        """The state of a part, of those that `each` made; for () it is ()."""
        whole = self.number == 1 or is_nothing(states)
        return states if whole else states[part]

    def with_each(self, states: Tree, part: int, state: Tree) -> Tree:
        """The states that `each` made, with a new one for a part."""
        if self.number == 1 or is_nothing(states):
            return state
        return (*states[:part], state, *states[part + 1 :])


def _asked(
    function: Callable, path: jax.tree_util.KeyPath, leaf: jax.Array
) -> np.ndarray:
    """The part of each row by the user's function: one int for all rows, or int[n]."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    answer = function(path, shape)
    call = f"fragments{path_name(path)}"
    owner = None if isinstance(answer, jax.core.Tracer) else np.asarray(answer)
    if owner is None or owner.dtype.kind not in "iu":
        raise TypeError(
            f"The function fragments must return an int or a sequence of ints; for "
            f"{call} it returned {answer!r}."
        )
    rows = leaf.shape[0] if leaf.shape else None
    if owner.ndim > 1 or (owner.ndim == 1 and owner.size != rows):
        raise ValueError(
            f"For {call}, of shape {leaf.shape}, the function fragments returned "
            f"{owner.size} numbers. Return one int for the leaf, or one for each of "
            "its rows along axis 0."
        )
    if owner.size and owner.min() < 0:
        raise ValueError(
            f"Fragments are numbered from 0; for {call} the function returned "
            f"{answer!r}."
        )
    return owner.reshape(-1) if owner.ndim else np.full(max(rows or 1, 1), owner)


def _balanced(leaves: list[jax.Array], number: int) -> list[np.ndarray]:
    """Parts of about equal bytes, leaves in order; leaves are cut between rows."""
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves]
    total, start, owners = max(sum(sizes), 1), 0, []
    for x, size in zip(leaves, sizes, strict=True):
        rows = max(x.shape[0], 1) if x.shape else 1
        middles = start + (np.arange(rows) + 0.5) * (size / rows)
        owners.append(np.minimum(number * middles // total, number - 1).astype(int))
        start += size
    return owners


def _rows_of(owner: np.ndarray, part: int) -> Rows | None:
    """The rows of a part: a slice if they are contiguous, `None` if there are none."""
    rows = np.flatnonzero(owner == part)
    if not rows.size:
        return None
    if rows.size == owner.size:
        return slice(None)
    strides = np.unique(np.diff(rows)).tolist() or [1]
    if len(strides) > 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1, strides[0])


def _take_rows(x: Any, rows: Rows) -> Any:
    if isinstance(rows, slice) and rows == slice(None):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        many = len(np.arange(x.shape[0])[rows])
        return jax.ShapeDtypeStruct((many, *x.shape[1:]), x.dtype)
    if isinstance(rows, slice):
        return x[rows]
    return x.at[jnp.asarray(rows)].get(unique_indices=True, indices_are_sorted=True)


def _put_rows(x: jax.Array, rows: Rows, values: jax.Array) -> jax.Array:
    if isinstance(rows, slice):
        return values if rows == slice(None) else x.at[rows].set(values)
    return x.at[jnp.asarray(rows)].set(
        values, unique_indices=True, indices_are_sorted=True
    )
