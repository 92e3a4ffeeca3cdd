# SPDX-License-Identifier: Apache-2.0
"""The landing of `shard_state="leaves"`: whole leaves on their owners, else pieces."""

from typing import Any, NamedTuple

import optax
from jax.typing import ArrayLike

from optx_sync import trees
from optx_sync.checks import refuse_placeholder
from optx_sync.comm import buffers
from optx_sync.comm.collectives import AxisName, axis_size
from optx_sync.comm.varying import localize
from optx_sync.exchange.contract import Exchange, Met, Scalars
from optx_sync.exchange.landing import (
    Landing,
    Square,
    refuse_center,
    require_cuttable,
)
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement import fields
from optx_sync.replicas import owners
from optx_sync.trees import Tree


@fields.declare(
    own=fields.LIKE_PARAMS,
    constants=fields.LIKE_PARAMS,
    numbers=fields.LIKE_PARAMS.told,
)
class OwnedState(NamedTuple):
    """State of `cross_shard(..., shard_state="leaves")`."""

    own: fields.InPieces  # of an `Owned`
    constants: list[Any]  # arrays in the state of `inner` that are not cut
    numbers: dict[str, Any]  # int32[] each, K of each group


class Leaves(NamedTuple):
    """Whole leaves on their owners; those that `inner` treats by numbers, in pieces."""

    axis_name: AxisName
    leaves: owners.Leaves
    plan: Any = None  # an `owners.Plan`
    full: Tree = None  # the whole arrays, as the plan cuts them, padded

    def init(self, inner: optax.GradientTransformationExtraArgs, params: Tree) -> Tree:
        """The state of this replica's leaves and pieces."""
        refuse_placeholder(params, "shard_state='leaves'")
        plan = self.leaves.plan(params)
        tree = plan.cut(params)
        own = own_pieces(
            lambda own: self.leaves.init(plan, *own), tree, self.axis_name, self._cut
        )
        refuse_center(own, "'leaves'")
        constants = self.leaves.constants(cut(tree[0], None))
        return OwnedState(own, constants, plan.numbers())

    def fit(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        like: Tree,
        state: Tree,
    ) -> "Landing":
        """Plan for these parameters; refuse gradients and states that do not fit."""
        del inner
        require_cuttable(grads, like, 'shard_state="leaves"')
        plan = self.leaves.plan(like, set(state.own.tree.leaves))
        check_pieces(
            state.own,
            lambda own: self.leaves.init(plan, *own),
            plan.cut(like),
            self.axis_name,
            self._cut,
        )
        return self._replace(plan=plan, full=self._padded(plan.cut(like)))

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
        """The first half of the exchange; nothing is measured."""
        del also, square
        padded = self._padded(self.plan.cut(tree))
        scatter: Any = exchange.scatter  # there is one, as the wrapper has checked
        pieces = scatter(padded, self.axis_name, weight=weight)
        replicas = axis_size(self.axis_name)
        return Met(self._in_rows(pieces, self.full), replicas, state=memory)

    def share(self, tree: Tree) -> Tree:
        """This replica's leaves and pieces."""
        padded = self._padded(self.plan.cut(tree))
        return self._in_rows(cut(padded, self.axis_name), self.full)

    def step(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Tree,
        state: Tree,
        params: Tree | None,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """A step of `inner` with each leaf, and one with all pieces."""
        del inner
        before = state.own.tree, state.constants
        updates, own, constants = self.leaves.update(
            self.plan, grads, before, params, extra_args
        )
        after = OwnedState(fields.InPieces(own), constants, state.numbers)
        return updates, trees.cast_like(after, state)

    def whole(self, updates: Tree) -> Tree:
        """The updates, gathered from their owners."""
        own = localize((updates[0], buffers.flat(updates[1])), self.axis_name)
        return self.plan.join(*gather(own, self.full, self.axis_name))

    def _cut(self, tree, axis_name):
        """This replica's pieces, and its whole rows of padded stacks."""
        if axis_name is None:
            rest, stacks = tree
            wide = [x.astype(trees.at_least_float32(x.dtype)) for x in stacks]
            return cut(rest, None), wide
        padded = self._padded(tree)
        return self._in_rows(cut(padded, axis_name), padded)

    def _padded(self, tree):
        rest, stacks = tree
        return rest, [owners.padded(x, axis_size(self.axis_name)) for x in stacks]

    def _in_rows(self, pieces, full):
        """The flat pieces of stacks, shaped as the leaves that they hold."""
        rest, stacks = pieces
        rows = [
            owners.reshaped(x, whole.shape[1:])
            for x, whole in zip(stacks, full[1], strict=True)
        ]
        return rest, rows
