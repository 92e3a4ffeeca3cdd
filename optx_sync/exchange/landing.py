# SPDX-License-Identifier: Apache-2.0
"""`Landing`: where the mean of all replicas lands, and who steps it.

Whole on every replica, or as pieces, each on the replica that owns it: the owner alone
steps its share, and all gather what came out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optx_sync import trees
from optx_sync.checks import refuse_placeholder
from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import AxisName, GroupAssignment, axis_size
from optx_sync.comm.reduce import own_weight, reduce
from optx_sync.comm.varying import localize
from optx_sync.elementwise import Elementwise
from optx_sync.exchange.contract import Exchange, Met, Scalars, require_dense
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement.fields import InPieces, holds_center
from optx_sync.trees import Tree

Square = Callable[[Tree], jax.Array]


@runtime_checkable
class Lands(Protocol):
    """What an agreement asks of the place where its mean lands."""

    @property
    def axis_name(self) -> AxisName:
        """The mapped axis of the replicas."""
        ...

    def meet(
        self,
        exchange: Exchange,
        tree: Tree,
        memory: Tree,
        *,
        weight: ArrayLike | None = None,
        also: Scalars | None = None,
        square: Square | None = None,
    ) -> Met:
        """A meeting of all replicas, whose mean is this replica's share.

        `square` of all shares of the mean comes back as `also["mean"]`.
        """
        ...


@runtime_checkable
class Landing(Lands, Protocol):
    """Where a mean lands. A step calls `fit`, `meet`, `share`, `step`, `whole`."""

    def init(self, inner: optax.GradientTransformationExtraArgs, params: Tree) -> Tree:
        """The state of `inner` for this replica's share."""
        ...

    def fit(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        like: Tree,
        state: Tree,
    ) -> "Landing":
        """The landing for trees like this one; refuses what does not fit it."""
        ...

    def share(self, tree: Tree) -> Tree:
        """This replica's share of a tree that is equal on all replicas."""
        ...

    def step(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        state: Tree,
        params: Tree | None,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """(the updates of this replica's share, the state)."""
        ...

    def whole(self, updates: Tree) -> Tree:
        """The updates of all shares."""
        ...


class Whole(NamedTuple):
    """Whole, on every replica."""

    axis_name: AxisName
    group_assignment: GroupAssignment | None = None

    def init(self, inner: optax.GradientTransformationExtraArgs, params: Tree) -> Tree:
        """The state of `inner`."""
        return inner.init(params)

    def fit(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        like: Tree,
        state: Tree,
    ) -> "Landing":
        """Anything fits."""
        del inner, grads, like, state
        return self

    def meet(
        self,
        exchange: Exchange,
        tree: Tree,
        memory: Tree,
        *,
        weight: ArrayLike | None = None,
        also: Scalars | None = None,
        square: Square | None = None,
    ) -> Met:
        """The meeting of the exchange, in groups if there are some."""
        groups = self.group_assignment
        met = exchange.meet(
            tree,
            memory,
            self.axis_name,
            weight=weight,
            also=also,
            **({} if groups is None else {"group_assignment": groups}),
        )
        if square is None:
            return met
        return met._replace(also={**met.also, "mean": square(met.mean)})

    def share(self, tree: Tree) -> Tree:
        """All of it."""
        return tree

    def step(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        state: Tree,
        params: Tree | None,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """A step of `inner`."""
        return inner.update(grads, state, params, **extra_args)

    def whole(self, updates: Tree) -> Tree:
        """They are whole."""
        return updates


class Pieces(NamedTuple):
    """A piece of every array on each replica; `inner` acts on each number alone."""

    axis_name: AxisName
    elementwise: Elementwise | None = None  # the check of `inner`
    bucket_bytes: int = BUCKET_BYTES
    like: Tree = None  # the whole arrays; their shapes and dtypes matter

    def init(self, inner: optax.GradientTransformationExtraArgs, params: Tree) -> Tree:
        """The state of this replica's pieces."""
        refuse_placeholder(params, "shard_state=True")
        if self.elementwise is not None:
            self.elementwise.check(params)
        pieces = own_pieces(inner.init, params, self.axis_name)
        refuse_center(pieces, "True")
        return pieces

    def fit(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        like: Tree,
        state: Tree,
    ) -> "Landing":
        """Refuse gradients that have no pieces, and pieces of other replicas."""
        require_cuttable(grads, like, "shard_state=True")
        check_pieces(state, inner.init, like, self.axis_name)
        return self._replace(like=like)

    def meet(
        self,
        exchange: Exchange,
        tree: Tree,
        memory: Tree,
        *,
        weight: ArrayLike | None = None,
        also: Scalars | None = None,
        square: Square | None = None,
    ) -> Met:
        """The first half of the exchange, and one sum of scalars."""
        axis_name = self.axis_name
        scatter: Any = exchange.scatter  # one of the two, as the wrapper has checked
        if exchange.halves is not None:
            met = exchange.halves.up(tree, memory, axis_name, weight=weight)
        else:
            met = Met(scatter(tree, axis_name, weight=weight), state=memory)
        scalars = {} if also is None else dict(also)
        if square is not None:
            scalars["mean"] = localize(square(met.mean), axis_name)
        own = own_weight(weight, axis_name)
        if own is not None:
            scalars["weight"] = own.astype(jnp.float32)
        sums = reduce(scalars, axis_name, reduction="sum")
        total = sums.get("weight", axis_size(axis_name))
        return met._replace(weight=total, also=sums)

    def share(self, tree: Tree) -> Tree:
        """This replica's pieces."""
        return cut(tree, self.axis_name)

    def step(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        state: Tree,
        params: Tree | None,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """A step of `inner` with the pieces."""
        updates, now = inner.update(grads, state.tree, params, **extra_args)
        return updates, InPieces(trees.cast_like(now, state.tree))

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
