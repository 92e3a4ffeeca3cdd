# SPDX-License-Identifier: Apache-2.0
"""Where a center lands: `Landing`, whole on every worker."""

import dataclasses

import jax
import jax.numpy as jnp

from optx_sync.center import fragments
from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Round
from optx_sync.center.rounds.turns import Now
from optx_sync.center.state import norm_of
from optx_sync.center.worker import Center, Worker
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.varying import vary_with
from optx_sync.exchange import landing
from optx_sync.exchange.contract import Exchange, Met
from optx_sync.exchange.landing import Brought
from optx_sync.trees import Tree


@dataclasses.dataclass(frozen=True)
class Landing:
    """How workers hold a center, see it, and take it: here each has all of it."""

    rule: CenterRule
    axis_name: AxisName

    @property
    def coded(self) -> bool:
        """Whether the center comes back coded, and workers keep the decoded center."""
        return False

    def try_on(self, center: Tree) -> None:
        """Refuse a rule or an outer optimizer that needs another landing."""

    def fit(self, parts: fragments.Whole, held: Tree, like: Tree) -> None:
        """Refuse a center that was made for another number of workers."""

    def start(self, parts: fragments.Whole, center: Tree) -> Center:
        """What a worker holds of a whole center, and an outer state for each part."""
        outer = self.rule.outer
        state = () if outer is None else parts.each(outer.init, center)
        return Center(center, vary_with(state, center))

    def seen(self, now: Now) -> Tree | None:
        """The center as this worker sees it before a round; `None` if it does not."""
        return now.center.value

    def bring(self, now: Now, seen: Tree | None, at: Round) -> tuple[Worker, Tree]:
        """(the worker with its sums reset, what it sends)."""
        return work.bring(self.rule, now.worker, seen, at)

    def of(self, now: Now, at: Round) -> "Landing":
        """The landing for one meeting."""
        return self

    def meet(self, exchange: Exchange, own: Brought) -> Met:
        """A meeting of all workers, whose mean is this worker's share."""
        return landing.Landing(self.axis_name).meet(exchange, own)

    def open(self, center: Center) -> Center:
        """The arrays of this worker's share, which its formulas get."""
        return center

    def close(self, share: Center, held: Center) -> Center:
        """A share as the state holds it."""
        return share

    def norm(self, change: Tree, like: jax.Array) -> jax.Array:
        """The norm of a change of the center, over all shares."""
        return norm_of(change, like=like)

    def taken(self, now: Now, before: Center) -> tuple[Tree, Tree]:
        """The center before and after a round, as `take` gets it."""
        return before.value, now.center.value

    def for_broken(self, now: Now, center: Tree) -> Tree:
        """The center for a worker that starts again."""
        return center

    def moved(self, center: Tree, change: Tree) -> Tree:
        """The center moved by a whole tree that is equal on all workers."""
        return jax.tree.map(jnp.add, center, change)
