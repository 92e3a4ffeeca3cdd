# SPDX-License-Identifier: Apache-2.0
"""`Landing`: where the mean of all replicas lands, and who steps it.

Whole on every replica, or as pieces, each on the replica that owns it: the owner alone
steps its share, and all gather what came out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import (
    AxisName,
    GroupAssignment,
    axis_size,
    check_axis_name,
)
from optx_sync.comm.reduce import own_weight, reduce
from optx_sync.comm.varying import localize
from optx_sync.core import trees
from optx_sync.core.checks import refuse_placeholder
from optx_sync.core.programs import Elementwise, on_pieces
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange, Met, Scalars, require_dense
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.state.fields import holds_center


class Contribution(NamedTuple):
    """What a replica brings to a meeting."""

    tree: Tree
    memory: Tree  # what the exchange remembers
    weight: ArrayLike | None = None
    also: Scalars | None = None  # its scalars that are to be summed
    # The sum of this of all shares of the mean comes back as `also["mean"]`.
    square: Callable[[Tree], jax.Array] | None = None


@runtime_checkable
class Lands(Protocol):
    """What an agreement asks of the place where its mean lands."""

    @property
    def axis_name(self) -> AxisName:
        """The mapped axis of the replicas."""
        ...

    def meet(self, exchange: Exchange, own: Contribution) -> Met:
        """A meeting of all replicas, whose mean is this replica's share."""
        ...


@dataclasses.dataclass(frozen=True)
class Landing:
    """Whole, on every replica. A step calls `fit`, `meet`, `share`, `step`, `whole`."""

    axis_name: AxisName
    inner: Any = None  # the transformation that steps the mean, if any
    group_assignment: GroupAssignment | None = None

    def init(self, params: Tree) -> Tree:
        """The state of `inner` for this replica's share."""
        return self.inner.init(params)

    def fit(self, grads: Tree, like: Tree, state: Tree) -> "Landing":
        """The landing for trees like this one; refuses what does not fit it."""
        return self

    def meet(self, exchange: Exchange, own: Contribution) -> Met:
        """A meeting of all replicas, whose mean is this replica's share."""
        groups: Any = {"group_assignment": self.group_assignment}
        met = exchange.meet(
            own.tree,
            own.memory,
            self.axis_name,
            weight=own.weight,
            also=own.also,
            **(groups if self.group_assignment else {}),
        )
        if own.square is None:
            return met
        return met._replace(also={**met.also, "mean": own.square(met.mean)})

    def share(self, tree: Tree) -> Tree:
        """This replica's share of a tree that is equal on all replicas."""
        return tree

    def step(
        self, mean: Tree, state: Tree, params: Tree | None, extra_args: dict[str, Any]
    ) -> tuple[Tree, Tree]:
        """(the updates of this replica's share, the state)."""
        return self.inner.update(mean, state, params, **extra_args)

    def whole(self, updates: Tree) -> Tree:
        """The updates of all shares."""
        return updates


@dataclasses.dataclass(frozen=True)
class Pieces(Landing):
    """A piece of every array on each replica; `inner` acts on each number alone."""

    elementwise: Elementwise | None = None  # the check of `inner`
    bucket_bytes: int = BUCKET_BYTES
    like: Tree = None  # the whole arrays; their shapes and dtypes matter

    def init(self, params: Tree) -> Tree:
        """The state of this replica's pieces."""
        refuse_placeholder(params, "shard_state=True")
        if self.elementwise is not None:
            self.elementwise.check(params)
        pieces = own_pieces(self.inner.init, params, self.axis_name)
        refuse_center(pieces, "True")
        return pieces

    def fit(self, grads: Tree, like: Tree, state: Tree) -> Landing:
        """Refuse gradients that have no pieces, and pieces of other replicas."""
        require_cuttable(grads, like, "shard_state=True")
        check_pieces(state, self.inner.init, like, self.axis_name)
        return dataclasses.replace(self, like=like)

    def meet(self, exchange: Exchange, own: Contribution) -> Met:
        """The first half of the exchange, and one sum of scalars."""
        axis_name = self.axis_name
        scatter: Any = exchange.scatter  # there is one, as the wrapper has checked
        met: Met = scatter(own.tree, own.memory, axis_name, weight=own.weight)
        scalars = dict(own.also or {})
        if own.square is not None:
            scalars["mean"] = localize(own.square(met.mean), axis_name)
        weight = own_weight(own.weight, axis_name)
        if weight is not None:
            scalars["weight"] = weight.astype(jnp.float32)
        sums = reduce(scalars, axis_name, reduction="sum")
        total = sums.get("weight", axis_size(axis_name))
        return met._replace(weight=total, also=sums)

    def share(self, tree: Tree) -> Tree:
        """This replica's pieces."""
        return cut(tree, self.axis_name)

    def step(
        self, mean: Tree, state: Tree, params: Tree | None, extra_args: dict[str, Any]
    ) -> tuple[Tree, Tree]:
        """A step of `inner` with the pieces."""
        with on_pieces(check_axis_name(self.axis_name)):
            updates, now = self.inner.update(mean, state.tree, params, **extra_args)
        return updates, dataclasses.replace(
            state, tree=trees.cast_like(now, state.tree)
        )

    def whole(self, updates: Tree) -> Tree:
        """The updates, gathered from all pieces."""
        own = localize(updates, self.axis_name)
        return gather(own, self.like, self.axis_name, self.bucket_bytes)


def refuse_center(state: Tree, option: str) -> None:
    """Refuse a center of one worker, `axis_name=None`, of which each owns a piece."""
    if holds_center(state):
        raise ValueError(
            f"shard_state={option} cuts the state of inner, which holds a center: "
            "nothing puts that together again. Put the center rule around: "
            f"oxs.diloco(oxs.cross_shard(tx, 'data', shard_state={option}), None)."
        )


def require_cuttable(grads: Tree, like: Tree, who: str) -> None:
    """Refuse gradients that are row-sparse, or of integer parameters.

    Updates get the parameters' dtypes.
    """
    require_dense(grads, who)
    found = dict(trees.leaves_with_names(like))
    for path, grad in trees.leaves_with_names(grads):
        if grad is not None and not trees.is_inexact(jnp.result_type(found[path])):
            raise TypeError(
                f"The parameter at {path} has dtype {found[path].dtype}; with "
                "shard_state=True what has a gradient must be floating. Leave it out "
                "with optax.masked, or pass None as its gradient."
            )
