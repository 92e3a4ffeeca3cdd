# SPDX-License-Identifier: Apache-2.0
"""Which workers share each field of a state: one table for each class.

    @declare(rounds=SHARED.not_a_slot, dropped=OWN_COUNT, inner=OWN)
    class MyState(NamedTuple):
        rounds: jax.Array
        dropped: jax.Array
        inner: optax.OptState

The table decides the worker axes (`state_axes`, `state_specs`, `replicate`), what
`resize` does to a field, which fields are slots, what a chain may hold behind the
state, and over which axes a field varies.

A state with a field `inner` belongs to a wrapper and is a level of workers. Nested
wrappers are nested levels; 0 is the outermost. A wrapper whose fields all follow the
parameters (a center of one worker, `axis_name=None`) is no level. Other
states with a table are fields of such a state: those of exchanges, and `info`, numbers
to report that no step needs. The fields of an `Info` count as the state's own, with the
kinds of the `Info`'s table.
"""

import abc
import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
from jax.sharding import PartitionSpec

from optx_sync.core.trees import Tree, is_masked


class FieldKind(NamedTuple):
    """Which workers share a field, and what `resize` makes of it."""

    # Shared by: every worker, the workers of this axis, replicas with equal parameters,
    # or nobody ("own").
    whose: Literal["all levels", "level", "params", "own"]
    # What `resize` does. "kept": a shared field stays; of others survivors keep theirs,
    # and joiners get what `resize` was asked for (a field that is equal where the
    # parameters are is never begun anew). "from 0": survivors keep theirs, joiners
    # begin at 0. "anew": all begin as after `init`. "owed": a sum still to be sent;
    # what leavers owe is shared out.
    resized: Literal["kept", "from 0", "anew", "owed"] = "kept"
    # The number that fills its arrays where they begin anew.
    begins: int = 0
    # Whether workers' contributions, of which it owes a rest, are added up. Where they
    # are averaged, `resize` scales the rest to the number of workers.
    added: bool = False
    # Whether it holds arrays for each parameter (slots), or just numbers.
    slots: bool = True
    # Of a field with parameters: who starts from them after `resize`.
    lands: Literal["nobody", "joiners", "everyone"] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether it has no worker axis on its own level."""
        return self.whose in ("all levels", "level")

    @property
    def is_center(self) -> bool:
        """Whether workers start from it."""
        return self.lands in ("joiners", "everyone")

    @property
    def not_a_slot(self) -> "FieldKind":
        """The same kind for a field that `slot` and `slot_names` do not show."""
        return self._replace(slots=False)

    @property
    def like_params(self) -> "FieldKind":
        """The kind of such a field where it is equal wherever the parameters are."""
        lands = "joiners" if self.is_center else None
        return FieldKind("params", slots=self.slots, lands=lands)


COUNTER = FieldKind("all levels").not_a_slot  # also of a `Fact`
SHARED = FieldKind("level")
SHARED_ANEW = FieldKind("level", "anew")
LIKE_PARAMS = FieldKind("params")
OWN = FieldKind("own")
OWN_COUNT = FieldKind("own", "from 0").not_a_slot
OWN_SUM = FieldKind("own", "from 0")
ANEW = FieldKind("own", "anew")
# The field `info`; the fields in it have kinds of their own.
INFO = FieldKind("own").not_a_slot
# The memory of an exchange whose contributions are added up; `OWN` if averaged.
OF_SUMS = FieldKind("own", added=True)
OWED = FieldKind("own", "owed")
# Copies of the parameters, computed from the updated ones.
COPIES = FieldKind("params", lands="nobody")
CENTER = FieldKind("level", lands="joiners")
TAKEN_CENTER = FieldKind("level", lands="everyone")


class Yes(NamedTuple):
    """A fact about a state that holds: it has no leaf, the structure carries it.

    So do all that carry a state: conditionals and loops, axes, checkpoints, Flax.
    """

    def __bool__(self) -> bool:
        return True


class No(NamedTuple):
    """A fact about a state that does not hold."""


Fact: TypeAlias = Yes | No


def fact(holds: bool) -> Fact:
    """A fact for a field of a state, of which the kinds of other fields may depend."""
    return Yes() if holds else No()


# A kind, or a function that returns it for a state.
Table: TypeAlias = Mapping[str, FieldKind | Callable[[Tree], FieldKind]]


State = TypeVar("State")


class Declares(Protocol):
    """A NamedTuple with a table of its fields."""

    @property
    def field_kinds(self) -> Table:
        """The kind of each field."""
        ...

    def _asdict(self) -> dict[str, Tree]: ...


def declare(
    **kinds: FieldKind | Callable[[Tree], FieldKind],
) -> Callable[[type[State]], type[State]]:
    """Decorate a state's class with the kind of each field; bases' tables are kept."""

    def declared(state: type[State]) -> type[State]:
        table = {**getattr(state, "field_kinds", {}), **kinds}
        setattr(state, "field_kinds", MappingProxyType(table))  # noqa: B010 # no field
        return state

    return declared


class WithCenter(abc.ABC):
    """A state with a center; who has one says so by `@WithCenter.register`."""

    @abc.abstractmethod
    def center_params(self, params: Tree) -> Tree:
        """The center in the structure and dtypes of the parameters."""


class WithAverages(abc.ABC):
    """A state with moving averages of the parameters."""

    @abc.abstractmethod
    def averaged_params(self, params: Tree) -> Tree:
        """They in the structure and dtypes of the parameters."""


class WithMetrics(abc.ABC):
    """A state with numbers to log."""

    @abc.abstractmethod
    def metrics(self, params: Tree | None) -> Any:
        """A NamedTuple of them; some only with the parameters."""


class WithLosses(abc.ABC):
    """A state of which `resize` may lose something, in the middle of a round."""

    @abc.abstractmethod
    def lost_by_resize(self, fewer: bool) -> list[tuple[str, str]]:
        """(what it loses, how not to); `fewer`: of workers."""


def declares(x: object) -> bool:
    """Whether this is a state with a table."""
    return hasattr(type(x), "field_kinds")


def is_level(x: Tree) -> bool:
    """Whether this is a wrapper's state, which is a level of workers."""
    if not (declares(x) and "inner" in x.field_kinds):
        return False
    return any(kind_of(x, name).whose in ("level", "own") for name in x.field_kinds)


def kind_of(state: Declares, name: str) -> FieldKind:
    """The kind of a field."""
    kind = state.field_kinds[name]
    return kind if isinstance(kind, FieldKind) else kind(state)


def fields_of(state: Declares) -> Iterator[tuple[str, FieldKind, Tree]]:
    """(name, kind, value) of every field; those of `info` in place of `info`."""
    for name, value in state._asdict().items():
        if kind_of(state, name) is INFO and value:
            yield from fields_of(value)
        else:
            yield name, kind_of(state, name), value


def nodes_of(tree: Tree, is_node: Callable[[Tree], bool] = declares) -> list[Tree]:
    """The outermost states in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_node) if is_node(x)]


def center_of(state: Declares) -> tuple[FieldKind, Tree] | None:
    """(kind, value) of the field from which workers start, if there is one."""
    found = ((kind, value) for _, kind, value in fields_of(state) if kind.is_center)
    return next(found, None)


def may_have_center(x: object) -> bool:
    """Whether this is the state of a center rule or of gossip."""
    return isinstance(x, WithCenter)


def has_center(x: Any) -> bool:
    """Whether it is and has a center."""
    return may_have_center(x) and bool(center_of(x))


def copy_of(state: Declares) -> Tree:
    """The copy of the parameters that a state keeps, a center or averages, or ()."""
    return next((value for _, kind, value in fields_of(state) if kind.lands), ())


def has_copy(x: Any) -> bool:
    """Whether this is a state that keeps a copy of the updated parameters."""
    return declares(x) and bool(jax.tree.leaves(copy_of(x)))


def holds_center(tree: Tree) -> bool:
    """Whether a tree holds the state of a center rule or of gossip anywhere."""
    return bool(nodes_of(tree, may_have_center))


class Reduced(NamedTuple):
    """State of a link that makes one gradient of all replicas', and keeps nothing.

    What stands before it in a chain is each replica's own, and behind it equal.
    """


class Cut(enum.IntEnum):
    """How an array is divided among the workers of a level."""

    NOT = 0
    NUMBERS = 1  # flattened, an equal number of its numbers on each
    LEAVES = 2  # a stack of leaves, an equal number of them on each


class _Saved:
    """A node around one tree; Flax, once it is imported, saves it by that."""

    def __post_init__(self) -> None:
        serialization = sys.modules.get("flax.serialization")
        if serialization is not None:
            _tell(serialization, type(self))


@functools.cache
def _tell(serialization: ModuleType, kind: type) -> None:
    def restored(x, state):
        tree = serialization.from_state_dict(x.tree, state["tree"], "tree")
        return dataclasses.replace(x, tree=tree)

    serialization.register_serialization_state(
        kind, lambda x: {"tree": serialization.to_state_dict(x.tree)}, restored
    )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["sizes"]
)
@dataclasses.dataclass(frozen=True)
class InPieces(_Saved):
    """A tree whose arrays are cut in pieces, one on each worker; scalars are not cut.

    An array of n numbers, of any shape, is `[ceil(n / N)]` on each of N workers, the
    last ones padded. What `init` returns outside of a mapped axis is flat and whole
    (N = 1).

    Attributes:
        tree: The pieces.
        sizes: n, the numbers of each whole array in the order of the leaves: a part of
            the structure, so that another number of workers can cut it anew.
    """

    tree: Tree
    sizes: tuple[int, ...]


class Owned(NamedTuple):
    """The tree in an `InPieces` where workers own whole leaves.

    Leaves that are alike are stacked, `[K, ...]`: N workers have ceil(K / N) of them
    each, the last ones padding. Scalars are on all workers, but for those that depend
    on a leaf: they are `[K]`.
    """

    pieces: Tree  # of leaves whose numbers are updated one by one
    leaves: dict[str, Tree]  # the stack of each group, by its first leaf's path


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tree"],
    meta_fields=["axes", "sizes"],
)
@dataclasses.dataclass(frozen=True)
class InStacks(_Saved):
    """Stacks of whole leaves `[K, ...]`, sharded over axes of one worker's mesh.

    Attributes:
        tree: The stack of each group, by its first leaf's path.
        axes: Those along which they are cut, in rows padded to a multiple of the number
            of devices.
        sizes: K, the number of leaves in each stack in the order of the leaves, 0 for
            scalars: a part of the structure, so that another number of devices can pad
            it anew.
    """

    tree: dict[str, Tree]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def spec_of(self, x: jax.Array) -> PartitionSpec:
        """The `PartitionSpec` of one of its arrays; scalars are on all devices."""
        return PartitionSpec(self.axes) if x.ndim else PartitionSpec()


def is_in_pieces(x: object) -> bool:
    """Whether this is an `InPieces`; for `is_leaf=`."""
    return isinstance(x, InPieces)


def has_sizes(x: object) -> bool:
    """Whether this is an `InPieces` or an `InStacks`."""
    return isinstance(x, InPieces | InStacks)


def is_optax(x: object) -> bool:
    """Whether this is a state of one of Optax's own transformations."""
    return hasattr(x, "_fields") and type(x).__module__.split(".")[0] == "optax"


def is_of_optimizer(x: object) -> bool:
    """Whether this is the state of a transformation of Optax or of this package."""
    ours = hasattr(x, "_fields") and type(x).__module__.startswith("optx_sync.")
    return ours or (is_optax(x) and not is_masked(x)) or declares(x)
