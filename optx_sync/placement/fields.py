# SPDX-License-Identifier: Apache-2.0
"""Whose the fields of a state are: each class says it once, in one table.

    @declare(rounds=SHARED.told, dropped=OWN_COUNT, inner=OWN)
    class MyState(NamedTuple):
        rounds: jax.Array
        dropped: jax.Array
        inner: optax.OptState

From the table follow the worker axes (`state_axes`, `state_specs`, `replicate`), what
another number of workers does to a field (`resize`), which fields are slots, what a
chain may hold behind the state, and over which axes a field varies.

A state with a field `inner` belongs to a wrapper and is a level of workers. Nested
wrappers are nested levels; 0 is the outermost. Other states with a table stand in a
field of one: those of exchanges, and its `info`, the numbers that are told and that no
step needs. What these are says the `Info`'s own table, as if they were the state's
fields.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
from jax.sharding import PartitionSpec


class Kind(NamedTuple):
    """Whose a field is, and what becomes of it."""

    # Equal on the workers of all levels; on those of its own; where the parameters are
    # equal; or on none: a worker's own.
    whose: Literal["all levels", "level", "params", "own"]
    # What another number of workers makes of it. "kept": of what is shared all of it;
    # survivors keep their own, and joiners get what `resize` is asked for (what is
    # equal where the parameters are never a fresh one). "from 0": survivors keep
    # theirs, joiners begin at 0. "anew": all begin as `init` does. "owed": a sum
    # still to be sent; what leavers owe is shared out.
    resized: Literal["kept", "from 0", "anew", "owed"] = "kept"
    # What its arrays hold where they are anew.
    begins: int = 0
    # Whether what is owed in it is added up. Otherwise it is averaged, so that it
    # counts as a share of all workers and is scaled to their number.
    added: bool = False
    # Whether there are arrays for each parameter in it, and not just numbers.
    slots: bool = True
    # Who begins there with another number of workers, where it holds parameters.
    lands: Literal["nobody", "joiners", "everyone"] | None = None
    # Where its arrays live between the steps that touch them: `placement/memory.py`.
    memory: Literal["device", "pinned_host"] = "device"

    @property
    def is_shared(self) -> bool:
        """Whether it has no worker axis on its own level."""
        return self.whose in ("all levels", "level")

    @property
    def is_center(self) -> bool:
        """Whether parameters begin there."""
        return self.lands in ("joiners", "everyone")

    @property
    def told(self) -> "Kind":
        """The same for numbers that are no slots."""
        return self._replace(slots=False)

    @property
    def on_host(self) -> "Kind":
        """The same for arrays that live in the memory of the host."""
        return self._replace(memory="pinned_host")


COUNTER = Kind("all levels").told
SHARED = Kind("level")
SHARED_ANEW = Kind("level", "anew")
LIKE_PARAMS = Kind("params")
OWN = Kind("own")
OWN_COUNT = Kind("own", "from 0").told
OWN_SUM = Kind("own", "from 0")
ANEW = Kind("own", "anew")
# Of the field `info`: the table of what it holds says more.
INFO = Kind("own").told
# What an exchange remembers of contributions that are added up; `OWN` if averaged.
OF_SUMS = Kind("own", added=True)
OWED = Kind("own", "owed")
# Copies of the parameters, which are computed from the new ones.
COPIES = Kind("params", lands="nobody")
CENTER = Kind("level", lands="joiners")
TAKEN_CENTER = Kind("level", lands="everyone")

# A kind, or what tells it from a state.
Table: TypeAlias = Mapping[str, Kind | Callable[[Any], Kind]]


State = TypeVar("State")


class Declares(Protocol):
    """A NamedTuple with a table of its fields."""

    @property
    def field_kinds(self) -> Table:
        """The kind of each field."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def declare(
    **kinds: Kind | Callable[[Any], Kind],
) -> Callable[[type[State]], type[State]]:
    """Decorate a state's class: the kind of each of its fields, over its base's."""

    def declared(state: type[State]) -> type[State]:
        table = {**getattr(state, "field_kinds", {}), **kinds}
        setattr(state, "field_kinds", MappingProxyType(table))  # noqa: B010 # no field
        return state

    return declared


def declares(x: Any) -> bool:
    """Whether this is a state with a table."""
    return hasattr(type(x), "field_kinds")


def is_level(x: Any) -> bool:
    """Whether this is a wrapper's state, which is a level of workers."""
    return declares(x) and hasattr(type(x), "inner")


def kind_of(state: Declares, name: str) -> Kind:
    """The kind of a field."""
    kind = state.field_kinds[name]
    return kind if isinstance(kind, Kind) else kind(state)


def fields_of(state: Declares) -> Iterator[tuple[str, Kind, Any]]:
    """(name, kind, value) of every field, and of those of its `info`."""
    for name, value in state._asdict().items():
        if name == "info" and value:
            yield from fields_of(value)
        else:
            yield name, kind_of(state, name), value


def map_fields(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """The state with `function(name, kind, value, ...)` of every field.

    Of its `info` it is that of the `info`'s fields. `others` are states like this one,
    whose values the function gets as well.
    """

    def field(name, value, *values):
        if name == "info" and value:
            return map_fields(function, value, *values)
        return function(name, kind_of(state, name), value, *values)

    return type(state)(*map(field, state._fields, state, *others))


def nodes_of(tree: Any, is_node: Callable[[Any], bool] = declares) -> list[Any]:
    """The states in a tree that are in no other one."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_node) if is_node(x)]


def center_of(state: Declares) -> tuple[Kind, Any] | None:
    """(kind, value) of the field where parameters begin, if there is one."""
    for _, kind, value in fields_of(state):
        if kind.is_center:
            return kind, value
    return None


def stands_last(state: Any) -> bool:
    """Whether nothing may stand after it in a chain: it has seen the new parameters."""
    return declares(state) and any(
        kind.lands and jax.tree.leaves(value) for _, kind, value in fields_of(state)
    )


def map_but_counters(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of every leaf of a state, but for what workers of all levels share.

    Conditionals on these are agreed on.
    """

    def field(_, kind, value):
        shared = kind.whose == "all levels"
        return value if shared else map_but_counters(function, value)

    return jax.tree.map(
        lambda node: map_fields(field, node) if is_level(node) else function(node),
        tree,
        is_leaf=is_level,
    )


class Cut(enum.IntEnum):
    """How an array lies on the workers of a level."""

    NOT = 0
    NUMBERS = 1  # flat, so many numbers on each
    LEAVES = 2  # stacked leaves, so many on each


class InPieces(NamedTuple):
    """A tree whose arrays lie in pieces, one on each worker; its scalars do not.

    An array of n numbers, of any shape, is `[ceil(n / N)]` on each of N workers, the
    last ones padded. Where no axis is mapped, in what `init` returns, N is 1: it is
    flat and whole.
    """

    tree: Any


class Owned(NamedTuple):
    """What lies in an `InPieces` where whole leaves have owners.

    Leaves that are alike are stacked, `[K, ...]`: N workers have ceil(K / N) of them
    each, the last ones padding. Scalars are for all.
    """

    pieces: Any  # of leaves of which each number is treated alone, as ever
    leaves: dict[str, Any]  # of each group, by its first leaf's path


@declare(own=LIKE_PARAMS, constants=LIKE_PARAMS, numbers=LIKE_PARAMS.told)
class OwnedState(NamedTuple):
    """State of `cross_shard(..., shard_state="leaves")`."""

    own: InPieces  # of an `Owned`
    constants: list[Any]  # arrays that stand in the state of pieces and are not cut
    numbers: dict[str, Any]  # int32[] each, K of each group


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["axes"]
)
@dataclasses.dataclass(frozen=True)
class InStacks:
    """Stacks of whole leaves `[K, ...]` that lie along axes of one worker's mesh."""

    tree: dict[str, Any]  # of each group, by its first leaf's path
    axes: tuple[str, ...]

    def specs(self) -> "InStacks":
        """The spec of each array; its scalars are on all devices."""
        cut, whole = PartitionSpec(self.axes), PartitionSpec()
        tree = jax.tree.map(lambda x: cut if x.ndim else whole, self.tree)
        return dataclasses.replace(self, tree=tree)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["partition"]
)
@dataclasses.dataclass(frozen=True)
class InParts:
    """A tree of which each part lies in pieces of its own.

    How it is cut in parts is no array, but belongs to the tree's structure: a
    `Partition` of `center/fragments.py`.
    """

    parts: tuple[InPieces, ...]
    partition: Any

    def whole(self) -> Any:
        """The tree, from the pieces of all workers or as `init` makes it."""
        shapes = self.partition.each(lambda part: part, self.partition.shapes)
        return self.partition.join(
            [
                jax.tree.map(_joined, part.tree, shape)
                for part, shape in zip(self.parts, shapes, strict=True)
            ]
        )


def _joined(pieces: Any, like: Any) -> Any:
    """Pieces of an array `[N, k]`, or all of it, flat, in its shape."""
    size = math.prod(like.shape)
    if pieces.size < size:
        raise ValueError(ONE_PIECE)
    return pieces.reshape(-1)[:size].reshape(like.shape)


ONE_PIECE = (
    "The state holds one piece of its center, or pieces for other parameters. Ask for "
    "the center outside of the mapped function, of the state of all workers together."
)


def is_in_stacks(x: Any) -> bool:
    """Whether this is an `InStacks`; as `is_leaf`, it keeps one in one piece."""
    return isinstance(x, InStacks)


def is_in_pieces(x: Any) -> bool:
    """Whether this is an `InPieces`; as `is_leaf`, it keeps one in one piece."""
    return isinstance(x, InPieces)
