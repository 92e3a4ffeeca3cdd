# SPDX-License-Identifier: Apache-2.0
"""The landing of `shard_state="leaves"`: whole leaves on their owners, else pieces."""

import dataclasses
from typing import Any, NamedTuple

from optx_sync.comm import buffers
from optx_sync.comm.collectives import AxisName, axis_size
from optx_sync.comm.varying import localize
from optx_sync.core import trees
from optx_sync.core.checks import refuse_placeholder
from optx_sync.core.trees import Tree
from optx_sync.exchange import landing, pieces
from optx_sync.exchange.contract import Exchange, Met
from optx_sync.exchange.landing import Contribution, Landing
from optx_sync.replicas import owners
from optx_sync.state import fields


@fields.declare(
    own=fields.LIKE_PARAMS,
    constants=fields.LIKE_PARAMS,
    numbers=fields.LIKE_PARAMS.not_a_slot,
)
class OwnedState(NamedTuple):
    """State of `cross_shard(..., shard_state="leaves")`."""

    own: fields.InPieces  # of an `Owned`
    constants: list[Any]  # arrays in the state of `inner` that are not cut
    numbers: dict[str, Any]  # int32[] each, K of each group


@dataclasses.dataclass(frozen=True)
class OwnedLanding(Landing):
    """Whole leaves on their owners; those that `inner` treats by numbers, in pieces."""

    leaves: Any = None  # the `owners.Leaves` of `inner`
    plan: Any = None  # an `owners.OwnersPlan`
    full: Tree = None  # the whole arrays, as the plan cuts them, padded

    def init(self, params: Tree) -> Tree:
        """The state of this replica's leaves and pieces."""
        refuse_placeholder(params, "shard_state='leaves'")
        plan = self.leaves.plan(params)
        tree = plan.cut(params)
        own = pieces.own_pieces(
            lambda own: self.leaves.init(plan, *own), tree, self.axis_name, _cut
        )
        landing.refuse_center(own, "'leaves'")
        rest = pieces.shapes_too(lambda rest: pieces.cut(rest, None), tree[0])
        constants = self.leaves.constants(rest)
        return OwnedState(own, constants, plan.numbers())

    def fit(self, grads: Tree, like: Tree, state: Tree) -> Landing:
        """Plan for these parameters; refuse gradients and states that do not fit."""
        landing.require_cuttable(grads, like, 'shard_state="leaves"')
        plan = self.leaves.plan(like, set(state.own.tree.leaves))
        tree = plan.cut(like)
        pieces.check_pieces(
            state.own,
            lambda own: self.leaves.init(plan, *own),
            tree,
            self.axis_name,
            _cut,
        )
        return dataclasses.replace(self, plan=plan, full=_padded(tree, self.axis_name))

    def meet(self, exchange: Exchange, own: Contribution) -> Met:
        """The first half of the exchange; nothing is measured."""
        padded = _padded(self.plan.cut(own.tree), self.axis_name)
        scatter: Any = exchange.scatter  # there is one, as the wrapper has checked
        met: Met = scatter(padded, own.memory, self.axis_name, weight=own.weight)
        replicas = axis_size(self.axis_name)
        return met._replace(mean=_in_rows(met.mean, padded), weight=replicas)

    def share(self, tree: Tree) -> Tree:
        """This replica's leaves and pieces."""
        return _cut(self.plan.cut(tree), self.axis_name)

    def step(
        self, mean: Tree, state: Tree, params: Tree | None, extra_args: dict[str, Any]
    ) -> tuple[Tree, Tree]:
        """A step of `inner` with each leaf, and one with all pieces."""
        before = state.own.tree, state.constants
        updates, own, constants = self.leaves.update(
            self.plan, mean, before, params, extra_args
        )
        now = dataclasses.replace(state.own, tree=own)
        after = OwnedState(now, constants, state.numbers)
        return updates, trees.cast_like(after, state)

    def whole(self, updates: Tree) -> Tree:
        """The updates, gathered from their owners."""
        own = localize((updates[0], buffers.flat(updates[1])), self.axis_name)
        return self.plan.join(*pieces.gather(own, self.full, self.axis_name))


def _cut(tree: Tree, axis_name: AxisName | None) -> Tree:
    """This replica's pieces, and its whole rows of padded stacks."""
    padded = _padded(tree, axis_name)
    return _in_rows(pieces.cut(padded, axis_name), padded)


def _padded(tree: Tree, axis_name: AxisName | None) -> Tree:
    rest, stacks = tree
    replicas = 1 if axis_name is None else axis_size(axis_name)
    return rest, [owners.padded(x, replicas) for x in stacks]


def _in_rows(flat: Tree, full: Tree) -> Tree:
    """The flat pieces of stacks, shaped as the leaves that they hold."""
    rest, stacks = flat
    pairs = zip(stacks, full[1], strict=True)
    return rest, [x.reshape(-1, *whole.shape[1:]) for x, whole in pairs]
