# SPDX-License-Identifier: Apache-2.0
"""Where a center lands: `Landing`, whole on every worker, and `Pieces`.

Of one in pieces each worker holds 1/N, and 1/N of the outer state. The workers' arrays
are reduced to their owners (reduce-scatter), each owner steps its piece of the center,
and all workers gather the new center. With x_i the parameters of worker i, c_j the
piece of the center that worker j owns and x_ij piece j of x_i:

    r_j = sum_i x_ij / N      c_j <- outer(c_j, contribution of r_j)      x_i <- all c_j

Between rounds nobody holds the whole center, so workers send their parameters and not
their distance from it. Where a rule's contribution is affine in the parameters, the
mean is the same. The two halves send as much as an all-reduce. With `measure` the
center is gathered before the round, too.

With codes all workers keep s, the center as they have decoded it. With C the code:

    up      m_j = mean of C(contribution_ij to s)        c_j <- outer(c_j, m_j)
    down    d_j = C(c_j - s_j)                           s <- s + all d_j

What coding loses on the way down stays in the next gap c_j - s_j and is sent with it.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.checks import Options
from optx_sync.center.contract import Round
from optx_sync.center.fragments import Partition
from optx_sync.center.state import norm_of
from optx_sync.center.turns import Now
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import refuse_placeholder
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import localize, vary_like, vary_with
from optx_sync.exchange import landing
from optx_sync.exchange.contract import Exchange, Met
from optx_sync.exchange.measures import square_sum
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement import memory
from optx_sync.placement.fields import InParts, InPieces, is_in_pieces
from optx_sync.programs import Elementwise, on_pieces
from optx_sync.trees import Tree, is_nothing, where, zeros_like


@dataclasses.dataclass(frozen=True)
class Landing:
    """How workers hold a center, see it, and take it: here each has all of it."""

    options: Options

    def fit(self, parts: Partition, held: Tree, like: Tree) -> None:
        """Refuse a center that was made for another number of workers."""

    def start(self, parts: Partition, center: Tree) -> Center:
        """What a worker holds of a whole center, and an outer state for each part."""
        outer = self.options.rule.outer
        state = () if outer is None else parts.each(outer.init, center)
        return Center(center, vary_with(state, center))

    def seen(self, now: Now) -> Tree | None:
        """The center as this worker sees it before a round; `None` if it does not."""
        return now.center.value

    def bring(self, now: Now, seen: Tree | None, at: Round) -> tuple[Worker, Tree]:
        """(the worker with its sums reset, what it sends)."""
        return work.bring(self.options.rule, now.worker, seen, at)

    def of(self, now: Now, at: Round) -> landing.Lands:
        """Where the mean of one meeting lands: this worker's share of it."""
        return landing.Landing(self.options.axis_name)

    def open(self, center: Center) -> Center:
        """The arrays of this worker's share, which its formulas get."""
        return center

    def close(self, share: Center, held: Center) -> Center:
        """A share as the state holds it."""
        return share

    def stepped(self) -> Any:
        """A context in which the outer optimizer gets this share."""
        return contextlib.nullcontext()

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


class Pieces(Landing):
    """1/N of the center on each worker: an `InPieces` for each part, in an `InParts`.

    A round of a part sees the pieces of that part.
    """

    @functools.cached_property
    def elementwise(self) -> Elementwise:
        """The check of the outer optimizer."""
        outer: Any = self.options.rule.outer
        return Elementwise(
            optax.with_extra_args_support(outer),
            check_axis_name(self.options.axis_name),
            "shard_center=True",
            "the outer optimizer",
        )

    def start(self, parts: Partition, center: Tree) -> Center:
        """The pieces of a whole center, and of the outer state."""
        refuse_placeholder(center, "shard_center=True")
        outer, axis_name = self.options.rule.outer, self.options.axis_name
        held = [
            own_pieces(lambda pieces: pieces, part, axis_name)
            for part in parts.split(center)
        ]
        state: Tree = ()
        if outer is not None:
            self.elementwise.check(center)
            state = parts.each(
                lambda part: own_pieces(outer.init, part, axis_name), center
            )
        return Center(InParts(tuple(held), parts), state)

    def fit(self, parts: Partition, held: Tree, like: Tree) -> None:
        """Refuse pieces for another number of workers; `like` has the whole shapes."""
        for pieces, shapes in zip(held.parts, parts.split(like), strict=True):
            check_pieces(pieces, lambda x: x, shapes, self.options.axis_name)

    def seen(self, now: Now) -> Tree | None:
        """The decoded or the gathered center."""
        if self.options.blind:
            return None
        return now.worker.taken if self.options.coded else self._gathered_wide(now)

    def bring(self, now: Now, seen: Tree | None, at: Round) -> tuple[Worker, Tree]:
        """(the worker with its sums reset, the whole arrays that it sends)."""
        if seen is not None:
            return super().bring(now, seen, at)
        rule, accumulated = self.options.rule, now.worker.accumulated
        wide = work.as_center(now.worker.params, now.center.value.tree)
        if self.options.alone:
            sent = work.contribute(rule, wide, wide, accumulated, wide, at)
        else:
            own = {"params": wide, "accumulated": accumulated}
            sent = tuple(x if name in rule.reads else () for name, x in own.items())
        return now.worker._replace(accumulated=zeros_like(accumulated)), sent

    def of(self, now: Now, at: Round) -> landing.Lands:
        """At the owners of its pieces."""
        return _ToOwners(self.options, now.center.value.tree, at)

    def open(self, center: Center) -> Center:
        """The arrays in the pieces."""
        return Center(*(x.tree if isinstance(x, InPieces) else x for x in center))

    def close(self, share: Center, held: Center) -> Center:
        """Pieces, varying as those before."""
        outer = InPieces(share.outer) if is_in_pieces(held.outer) else share.outer
        return vary_like(Center(InPieces(share.value), outer), held)

    def stepped(self) -> Any:
        """A context in which the outer optimizer gets pieces."""
        return on_pieces(check_axis_name(self.options.axis_name))

    def norm(self, change: Tree, like: jax.Array) -> jax.Array:
        """The norm of a change of the center, over all pieces."""
        axis_name = self.options.axis_name
        square = localize(square_sum(change, localize(like, axis_name)), axis_name)
        return jnp.sqrt(reduce(square, axis_name, reduction="sum"))

    def taken(self, now: Now, before: Center) -> tuple[Tree, Tree]:
        """The center that the owners have stepped, decoded or gathered, twice."""
        worker, axis_name = now.worker, self.options.axis_name
        halves, owned = self.options.exchange.halves, now.center.value.tree
        if halves is not None:
            seen = worker.taken
            gap = jax.tree.map(jnp.subtract, owned, cut(seen, axis_name))
            after = jax.tree.map(jnp.add, seen, halves.down(gap, seen, axis_name))
        elif self.options.rule.take is None:
            # Gathered in the parameters' dtypes where nothing needs more.
            after = self._gathered(now.center.value, worker.params)
        else:
            after = self._gathered_wide(now)
        return after, after

    def for_broken(self, now: Now, center: Tree) -> Tree:
        """The whole center, which a broken worker takes: gathered if any needs it."""
        options, whole = self.options, now.worker.params
        if options.coded:
            return now.worker.taken
        at_once = options.rule.take is None and not options.delay
        if at_once and center.partition.number == 1:  # It has taken all of it.
            return whole
        broken = localize((~now.well).astype(jnp.float32), options.axis_name)
        broken = reduce(broken, options.axis_name, reduction="sum")
        return jax.lax.cond(
            broken > 0,
            lambda params: vary_like(self._gathered(center, params), params),
            lambda params: params,
            whole,
        )

    def moved(self, center: Tree, change: Tree) -> Tree:
        """The center moved by a whole tree that is equal on all workers."""
        pairs = zip(center.parts, center.partition.split(change), strict=True)
        moved = (
            jax.tree.map(jnp.add, pieces.tree, cut(part, self.options.axis_name))
            for pieces, part in pairs
        )
        return InParts(tuple(map(InPieces, moved)), center.partition)

    def _gathered_wide(self, now: Now) -> Tree:
        """The gathered center of a part, in its own dtypes."""
        pieces = now.center.value
        return self._gathered(pieces, work.as_center(now.worker.params, pieces.tree))

    def _gathered(self, center: Tree, like: Tree) -> Tree:
        """The gathered center, or a part of it, in the dtypes of `like`."""
        if isinstance(center, InParts):
            pairs = zip(center.parts, center.partition.split(like), strict=True)
            return center.partition.join([self._gathered(*pair) for pair in pairs])
        bucket_bytes = self.options.exchange.bucket_bytes
        pieces = memory.on_device(center.tree)
        return gather(pieces, like, self.options.axis_name, bucket_bytes)


class _ToOwners(NamedTuple):
    """Where the mean of one meeting lands: each piece at its owner."""

    options: Options
    piece: Tree  # this worker's, of the center before the meeting
    at: Round

    @property
    def axis_name(self) -> AxisName:
        """The mapped axis of the workers."""
        return self.options.axis_name

    def meet(self, exchange: Exchange, own: landing.Brought) -> Met:
        """The first half of the exchange, and what the rule makes of it."""
        met = landing.Pieces(self.axis_name).meet(exchange, own)
        mean = met.mean
        if self.options.blind and not self.options.alone:
            # The piece stands in for arrays that the formula does not read.
            params, sums = (self.piece if is_nothing(x) else x for x in mean)
            mean = work.contribute(
                self.options.rule, params, self.piece, sums, self.piece, self.at
            )
            if own.weight is not None:
                # Without contributors the mean of parameters is 0: so be this.
                total: Any = met.weight
                mean = where(total > 0, mean, zeros_like(mean))
        return met._replace(mean=InPieces(mean))
