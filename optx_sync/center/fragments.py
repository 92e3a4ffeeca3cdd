# SPDX-License-Identifier: Apache-2.0
"""Fragments: parts of the parameters that meet in turn, and sums on their way.

A part has the structure of the whole tree: `optax.MaskedNode` for the leaves that it
does not have, and some of the rows of leaves that it shares with other parts.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.contract import Period
from optx_sync.checks import integer
from optx_sync.comm.buffers import Joint, one_behind_the_other, shaped
from optx_sync.comm.varying import vary_like, vary_with
from optx_sync.placement import memory
from optx_sync.placement.fields import InParts, InPieces
from optx_sync.shapes import Array, Int32
from optx_sync.trees import Tree, is_masked, is_nothing, path_name, pure, zeros_like

Part: TypeAlias = int | Sequence[int] | np.ndarray
Fragments: TypeAlias = int | Callable[[jax.tree_util.KeyPath, jax.Array], Part]
Rows: TypeAlias = slice | np.ndarray
Meeting = TypeVar("Meeting", bound=Any)

# Fields that are trees like the parameters. Of the others each part has its own, except
# `inner`, of which every part sees the whole.
_TREES = ("params", "taken", "accumulated", "center")
# The fields that change when a part sets out, and when one lands.
SETS_OUT = frozenset({"accumulated", "exchange"})
LANDS = frozenset({"params", "taken", "center", "outer", "inner"})
# The fields that change when a broken worker starts again.
MENDS = frozenset({"params", "accumulated", "inner"})


class Pending(NamedTuple):
    """The mean or sum of a part before the center absorbs it: equal on all workers."""

    # Arrays of the size of the largest part; of a center in pieces, an `InPieces` for
    # each part.
    values: Tree
    steps: Int32[Array, ""]  # `Round.steps` of its round
    pushed: Any  # float32[], workers in the sum, or () where none can be left out


class Outgoing(NamedTuple):
    """A worker's own contribution to the sum of the next step."""

    values: tuple[jax.Array, ...]  # arrays of the size of the largest part
    steps: Int32[Array, ""]  # `Round.steps` of its round
    weight: Any  # float32[], 0 where the worker is left out, or ()


class _Strided(NamedTuple):
    """The result of `strided`: a function that knows how many parts it makes."""

    number: int

    def __call__(self, path: jax.tree_util.KeyPath, leaf: jax.Array) -> Part:
        for key in path:
            place = getattr(key, "idx", None)
            if place is not None:
                return place % self.number
            name = getattr(key, "key", getattr(key, "name", ""))
            # A flat name is a path of its own: "layers.0.weight", ("layers", 0).
            for part in name if isinstance(name, tuple) else (name,):
                digits = re.search(r"\d+(?=[./]|$)", str(part))
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
        >>> jax.tree_util.tree_map_with_path(oxs.strided(2), params)
        {'layer_0': 0, 'layer_1': 1, 'scanned': array([0, 1, 0, 1, 0])}

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
        arXiv 2501.18512, section 3.1.
    """
    return _Strided(integer("number", number, "Pass the number of parts."))


def check_fragments(fragments: object) -> Fragments:
    """`fragments=` of a center rule, 1 for `None`; else a TypeError or ValueError."""
    if fragments is None:
        return 1
    if callable(fragments):
        function: Any = fragments
        return function
    mend = "Pass 4, say, or a function (path, leaf) -> parts such as oxs.strided(4)."
    return integer("fragments", fragments, mend)


def steps_between(period: Period, number: int, delay: int) -> Period:
    """L: the steps from one exchange to the next, of `number` parts.

    Raises a ValueError where the parts do not divide the period, or where the delay is
    longer than L: only one part may be on its way at a time.
    """
    if callable(period):
        if number > 1:
            raise ValueError(
                "communication_period is a schedule, which fragments cannot divide; "
                f"got {number} of them. Pass an int as the period, or fragments=1."
            )
        return period
    if period % number:
        raise ValueError(
            f"communication_period={period} is not a multiple of the {number} "
            "fragments: every communication_period / fragments steps one of them "
            f"meets. Pass for example communication_period={-(-period // number)} * "
            f"{number}."
        )
    if delay > period // number:
        raise ValueError(
            f"delay={delay} is longer than communication_period / fragments = "
            f"{period // number} steps; what is summed must land before the next part "
            f"sets out. Pass delay={period // number} or less, a longer "
            "communication_period or fewer fragments."
        )
    return period // number


def number_of_parts(fragments: Fragments) -> int | None:
    """The number of parts; `None` where it depends on the parameters."""
    return getattr(fragments, "number", None) if callable(fragments) else fragments


class Whole:
    """The trivial partition: the whole tree is one part."""

    number = 1

    def pick(self, tree: Tree, part: int) -> Tree:
        """The whole tree."""
        return tree

    def put(self, tree: Tree, part: int, values: Tree) -> Tree:
        """The new values of the whole tree."""
        return values

    def each(self, start: Callable[[Tree], Tree], tree: Tree) -> Tree:
        """A state for the one part."""
        return start(tree)

    def in_turn(
        self,
        part: Tree,
        change: Callable[[Meeting, int], Meeting],
        now: Meeting,
        changes: frozenset[str],
    ) -> Meeting:
        """Call `change(now, part)` for the part whose turn it is.

        `now` is a NamedTuple with the fields `worker`, `center` and `exchange`.
        `change` sees this part of what is cut into parts, and the whole of all else. Of
        the fields in parts it changes `SETS_OUT`, `LANDS`, or both.

        While `change` runs, center and outer state are on the device, wherever they
        live.
        """
        return _with_center_here(change)(now, 0)


class Partition(Whole):
    """Which rows of which leaves belong to which part.

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
        self._forms = tuple((jnp.shape(leaf), leaf.dtype) for _, leaf in leaves)
        found = {int(part) for owner in owners for part in owner}
        self.number = number_of_parts(fragments) or 1 + max(found, default=0)
        missing = sorted(set(range(self.number)) - found)
        if missing:
            raise ValueError(
                f"There are {self.number} fragments, and nothing is in number "
                f"{', '.join(map(str, missing))}. Pass fewer, or a function that gives "
                f"each of them something."
            )
        self._rows = [
            [_rows_of(owner, part) for owner in owners] for part in range(self.number)
        ]

    @property
    def shapes(self) -> Tree:
        """The shapes and dtypes of the tree that was cut."""
        return self._treedef.unflatten(
            jax.ShapeDtypeStruct(*form) for form in self._forms
        )

    def __eq__(self, other: object) -> bool:
        """Whether both cut the same trees in the same way."""
        if self is other:
            return True
        return isinstance(other, Partition) and self._said == other._said

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _said(self) -> tuple[Any, ...]:
        each = (rows for part in self._rows for rows in part)
        rows = (x.tobytes() if isinstance(x, np.ndarray) else str(x) for x in each)
        return self._treedef, self._forms, tuple(rows)

    # JAX hashes it in every step, as part of the states that go into a program.
    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._said)

    def pick(self, tree: Tree, part: int) -> Tree:
        """One part of a tree like the one that was cut; for () it is ()."""
        if is_nothing(tree):
            return tree
        if isinstance(tree, InParts):
            return tree.parts[part]
        leaves = self._treedef.flatten_up_to(tree)
        return self._treedef.unflatten(
            optax.MaskedNode()
            if rows is None
            else jax.tree.map(functools.partial(_take_rows, rows=rows), x)
            for x, rows in zip(leaves, self._rows[part], strict=True)
        )

    def put(self, tree: Tree, part: int, values: Tree) -> Tree:
        """The tree with new values for one part."""
        if is_nothing(tree):
            return tree
        if isinstance(tree, InParts):
            return InParts((*tree.parts[:part], values, *tree.parts[part + 1 :]), self)
        leaves = self._treedef.flatten_up_to(tree)
        values = self._treedef.flatten_up_to(values)
        return self._treedef.unflatten(
            x if rows is None else _put_rows(x, rows, value)
            for x, rows, value in zip(leaves, self._rows[part], values, strict=True)
        )

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The whole tree from all its parts, in their dtypes."""
        leaves = map(self._treedef.flatten_up_to, parts)
        joined = []
        for (shape, dtype), *rows in zip(self._forms, *leaves, strict=True):
            found = [x.dtype for x in rows if not is_masked(x)]
            joined.append(jnp.zeros(shape, found[0] if found else dtype))
        tree = vary_with(self._treedef.unflatten(joined), parts)
        for number, part in enumerate(parts):
            tree = self.put(tree, number, part)
        return tree

    def each(self, start: Callable[[Tree], Tree], tree: Tree) -> Tree:
        """A tuple of states, one for each part."""
        return tuple(start(self.pick(tree, part)) for part in range(self.number))

    def in_turn(
        self,
        part: Tree,
        change: Callable[[Meeting, int], Meeting],
        now: Meeting,
        changes: frozenset[str],
    ) -> Meeting:
        """Call `change(now, part)` for the part whose turn it is.

        Each part has a conditional of its own, which carries only what may change in
        that part: XLA copies whatever several branches of one conditional pass on. What
        is only read is cut inside the branch, and is no operand where nothing reads it.
        Inside the branch, a part of a center that lives on the host is on the device.
        """
        change = _with_center_here(change)
        for number in range(self.number):
            fields = fields_of(now)
            nothing: dict[str, Tree] = dict.fromkeys(fields, ())

            def changed(given, number=number, fields=fields, nothing=nothing):
                seen, rest = given
                read = {
                    name: self._of_part(name, field, number)
                    for name, field in fields.items()
                    if name not in changes
                }
                after = change(with_fields(rest, read | seen), number)
                found = fields_of(after)
                found = {name: found[name] for name in seen}
                return vary_like((found, with_fields(after, nothing)), given)

            seen = {name: self._of_part(name, fields[name], number) for name in changes}
            given = seen, with_fields(now, nothing)
            seen, rest = jax.lax.cond(part == number, changed, lambda same: same, given)
            after = {
                name: self._with_part(name, fields[name], number, value)
                for name, value in seen.items()
            }
            now = with_fields(rest, fields | after)
        return now

    def _of_part(self, name: str, field: Tree, part: int) -> Tree:
        if name in _TREES:
            return self.pick(field, part)
        return field if name == "inner" or is_nothing(field) else field[part]

    def _with_part(self, name: str, field: Tree, part: int, value: Tree) -> Tree:
        if name in _TREES:
            return self.put(field, part, value)
        if name == "inner":
            return value
        if is_nothing(field):
            return field
        return (*field[:part], value, *field[part + 1 :])


def fields_of(now: Any) -> dict[str, Tree]:
    """The fields of worker and center in a round, by name."""
    return {
        **now.worker._asdict(),
        "center": now.center.value,
        "outer": now.center.outer,
        "exchange": now.exchange,
    }


def with_fields(now: Meeting, fields: dict[str, Tree]) -> Meeting:
    """A round with new values for the fields that `fields_of` names."""
    own = {name: fields[name] for name in now.worker._fields}
    return now._replace(
        worker=now.worker._replace(**own),
        center=now.center._replace(value=fields["center"], outer=fields["outer"]),
        exchange=fields["exchange"],
    )


def _with_center_here(
    change: Callable[[Meeting, int], Meeting],
) -> Callable[[Meeting, int], Meeting]:
    """The change, with the center moved to the device before it and back after it."""

    def here(now: Meeting, part: int) -> Meeting:
        if not memory.is_on_host(now.center):
            return change(now, part)
        after = change(now._replace(center=memory.on_device(now.center)), part)
        return after._replace(center=memory.like(after.center, now.center))

    return here


def split(fragments: Fragments, tree: Tree) -> Whole:
    """The parts of a tree of arrays or of `jax.ShapeDtypeStruct`."""
    if not callable(fragments) and fragments == 1:
        return Whole()
    partition = Partition(fragments, tree)
    return partition if partition.number > 1 else Whole()


class Buffer:
    """Arrays with room for any one part of a tree.

    Where all parts have the same shapes, these are the part's own arrays. Where one
    part has the most rows of every leaf, as with `strided`, there is one array for each
    leaf, which keeps the leaf's other axes and so their sharding. Otherwise there is
    one flat array for each dtype.
    """

    def __init__(self, partition: Whole, tree: Tree):
        """The buffer for the parts of a tree of arrays or of `jax.ShapeDtypeStruct`."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        self._parts = [partition.pick(shapes, i) for i in range(partition.number)]
        forms = [[(x.shape, x.dtype) for x in jax.tree.leaves(p)] for p in self._parts]
        self._alike = all(form == forms[0] for form in forms)
        self._sizes: Counter[np.dtype] = Counter()
        for part in self._parts:
            self._sizes |= _sizes_of(part)  # of two Counters, the larger counts
        by_leaf = zip(*map(_with_masked, self._parts), strict=True)
        largest = [max(x, key=_rows) for x in by_leaf]
        whole = not any(map(is_masked, largest))  # a masked leaf has no elements
        self._by_leaf = whole and not self._alike and _sizes_of(largest) == self._sizes
        if self._alike:
            self._form = forms[0]
        elif self._by_leaf:
            self._form = [(x.shape, x.dtype) for x in largest]
        else:
            self._form = [((size,), dtype) for dtype, size in self._sizes.items()]

    def zeros(self) -> Tree:
        """An empty buffer."""
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in self._form)

    def pack(self, part: Tree, number: int) -> Tree:
        """The part in the form of the buffer, padded with zeros; any number will do."""
        leaves = jax.tree.leaves(part)
        if self._alike:
            return tuple(leaves)
        if self._by_leaf:
            pairs = zip(_with_masked(part), self._form, strict=True)
            filled = (_with_rows(x, *form, like=leaves) for x, form in pairs)
            return tuple(filled)
        return tuple(
            one_behind_the_other([x for x in leaves if x.dtype == dtype], size, dtype)
            for dtype, size in self._sizes.items()
        )

    def unpack(self, values: Tree, part: int) -> Tree:
        """The part in the buffer; the caller knows its number."""
        like, treedef = jax.tree.flatten(self._parts[part])
        if self._alike:
            return treedef.unflatten(values)
        if self._by_leaf:
            pairs = zip(values, _with_masked(self._parts[part]), strict=True)
            return treedef.unflatten(
                x if x.shape == like.shape else x[: like.shape[0]]
                for x, like in pairs
                if not is_masked(like)
            )
        flat = [jax.ShapeDtypeStruct((x.size,), x.dtype) for x in like]
        joint = Joint(flat, attrgetter("dtype"), math.inf)
        held = dict(zip(self._sizes, values, strict=True))
        found = joint.cut([held[dtype] for dtype in joint.kinds])
        return treedef.unflatten(map(shaped, found, like))


class BufferOfPieces(Buffer):
    """A `Buffer` for a center in pieces: arrays for each part, one of which is in use.

    Joined into one array, pieces would have another number of elements, and `resize`
    could not cut them again.
    """

    def __init__(self, partition: Whole, tree: Tree):
        """The buffer for the parts of a tree in pieces."""
        self._parts = [partition.pick(tree, part) for part in range(partition.number)]

    def zeros(self) -> Tree:
        """An empty buffer."""
        return tuple(vary_like(zeros_like(part), part) for part in self._parts)

    def pack(self, part: Tree, number: int) -> Tree:
        """The part in the form of the buffer, zeros for the others."""
        zeros = self.zeros()
        return (*zeros[:number], part, *zeros[number + 1 :])

    def unpack(self, values: Tree, part: int) -> Tree:
        """The part in the buffer."""
        return values[part]


def buffer_of(partition: Whole, center: Tree) -> Buffer:
    """A buffer for the parts of a center: `BufferOfPieces` where it lies in pieces."""
    cut = isinstance(center, InPieces | InParts)
    return (BufferOfPieces if cut else Buffer)(partition, center)


def _sizes_of(tree: Tree) -> Counter[np.dtype]:
    """The number of elements of each dtype."""
    sizes: Counter[np.dtype] = Counter()
    for x in jax.tree.leaves(tree):
        sizes[x.dtype] += x.size
    return sizes


def _with_masked(part: Tree) -> list[Any]:
    """The leaves of a part, with `optax.MaskedNode` where it has none of a leaf."""
    return jax.tree.leaves(part, is_leaf=is_masked)


def _rows(x: Any) -> int:
    """The number of rows that a part has of a leaf; a scalar is one row."""
    return 0 if is_masked(x) else (*x.shape, 1)[0]


def _with_rows(
    x: Any, shape: tuple[int, ...], dtype: np.dtype, like: Sequence[jax.Array]
) -> jax.Array:
    """Rows of a leaf, padded with zeros; they vary as all of the part does."""
    if is_masked(x):
        return vary_with(jnp.zeros(shape, dtype), like)
    missing = shape[0] - x.shape[0] if shape else 0
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


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
    strides = np.unique(np.diff(rows)) if rows.size > 1 else np.ones(1, int)
    if strides.size > 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1, int(strides[0]))


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
