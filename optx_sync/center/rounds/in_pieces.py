# SPDX-License-Identifier: Apache-2.0
"""A sharded center: each worker holds 1/N of the center and of the outer state.

The workers' arrays are reduced to their owners (reduce-scatter), each owner steps its
piece of the center, and all workers gather the new center. With x_i the parameters of
worker i, c_j the piece of the center that worker j owns and x_ij piece j of x_i:

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

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Round
from optx_sync.center.fragments import Partition, Whole
from optx_sync.center.landing import Landing
from optx_sync.center.rounds.turns import Now
from optx_sync.center.worker import Center, Worker
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import localize, vary_like
from optx_sync.elementwise import Elementwise
from optx_sync.exchange import landing
from optx_sync.exchange.contract import Exchange, Met
from optx_sync.exchange.landing import Brought
from optx_sync.exchange.measures import square_sum
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement import memory
from optx_sync.placement.fields import InParts, InPieces, is_in_pieces
from optx_sync.trees import Tree, where, zeros_like

_OPTION = "shard_center=True"


@dataclasses.dataclass(frozen=True)
class Pieces(Landing):
    """1/N of the center on each worker; `pieces` makes one."""

    exchange: Exchange
    measure: bool
    takes: bool  # whether a worker that is not broken has the whole center at hand
    elementwise: Elementwise | None  # the check of the outer optimizer
    # Of one meeting:
    piece: Tree = None  # this worker's, of the center before it
    at: Any = None  # its `Round`

    @property
    def coded(self) -> bool:
        """Whether the center comes back coded, and workers keep the decoded center."""
        return self.exchange.halves is not None

    @property
    def blind(self) -> bool:
        """Whether workers contribute without seeing the center."""
        return not (self.coded or self.measure)

    @property
    def alone(self) -> bool:
        """Whether `contribute` reads neither `taken` nor the center."""
        return not {"taken", "center"} & {*self.rule.reads}

    def try_on(self, center: Tree) -> None:
        """Refuse an outer optimizer that is not elementwise."""
        if self.elementwise is not None:
            self.elementwise.check(center)

    def start(self, parts: Whole, center: Tree) -> Center:
        """The pieces of a whole center, and of the outer state."""
        outer = self.rule.outer

        def own(init):
            return parts.each(
                lambda part: own_pieces(init, part, self.axis_name), center
            )

        held = own(lambda pieces: pieces)
        if isinstance(parts, Partition):
            held = InParts(held, parts)
        return Center(held, () if outer is None else own(outer.init))

    def fit(self, parts: Whole, held: Tree, like: Tree) -> None:
        """Refuse pieces for another number of workers; `like` has the whole shapes."""
        for number in range(parts.number):
            check_pieces(
                parts.pick(held, number),
                lambda pieces: pieces,
                parts.pick(like, number),
                self.axis_name,
            )

    def seen(self, now: Now) -> Tree | None:
        """The decoded or the gathered center."""
        if self.blind:
            return None
        return now.worker.taken if self.coded else self._gathered_wide(now)

    def bring(self, now: Now, seen: Tree | None, at: Round) -> tuple[Worker, Tree]:
        """(the worker with its sums reset, the whole arrays that it sends)."""
        if seen is not None:
            return work.bring(self.rule, now.worker, seen, at)
        sums = zeros_like(now.worker.accumulated)
        return now.worker._replace(accumulated=sums), self._sent(now, at)

    def of(self, now: Now, at: Round) -> "Pieces":
        """The landing for one meeting, with the piece of the center that it is for."""
        return dataclasses.replace(self, piece=now.center.value.tree, at=at)

    def meet(self, exchange: Exchange, own: Brought) -> Met:
        """The first half of the exchange, and what the rule makes of it."""
        met = landing.Pieces(self.axis_name).meet(exchange, own)
        mean = met.mean
        if self.blind and not self.alone:
            mean = self._of_means(mean, met.weight, own.weight is not None)
        return met._replace(mean=InPieces(mean))

    def open(self, center: Center) -> Center:
        """The arrays in the pieces."""
        return Center(*(x.tree if isinstance(x, InPieces) else x for x in center))

    def close(self, share: Center, held: Center) -> Center:
        """Pieces, varying as those before."""
        value, outer = share
        outer = InPieces(outer) if is_in_pieces(held.outer) else outer
        return vary_like(Center(InPieces(value), outer), held)

    def norm(self, change: Tree, like: jax.Array) -> jax.Array:
        """The norm of a change of the center, over all pieces."""
        square = self._square(change, like)
        return jnp.sqrt(reduce(square, self.axis_name, reduction="sum"))

    def for_broken(self, now: Now, center: Tree) -> Tree:
        """The whole center, which a broken worker takes: gathered if any needs it."""
        whole = now.worker.params
        if self.coded:
            return now.worker.taken
        if self.takes and is_in_pieces(center):
            return whole
        broken = localize((~now.well).astype(jnp.float32), self.axis_name)
        broken = reduce(broken, self.axis_name, reduction="sum")
        return jax.lax.cond(
            broken > 0,
            lambda params: vary_like(self._gathered(center, params), params),
            lambda params: params,
            whole,
        )

    def moved(self, center: Tree, change: Tree) -> Tree:
        """The center moved by a whole tree that is equal on all workers."""

        def moved(pieces, change):
            own = cut(change, self.axis_name)
            return InPieces(jax.tree.map(jnp.add, pieces.tree, own))

        if is_in_pieces(center):
            return moved(center, change)
        changes = center.partition.each(lambda part: part, change)
        return InParts(tuple(map(moved, center.parts, changes)), center.partition)

    def _sent(self, now: Now, at: Round) -> Tree:
        """The whole arrays that a worker sends: its contribution, or its parameters."""
        accumulated = now.worker.accumulated
        wide = work.as_center(now.worker.params, now.center.value.tree)
        if self.alone:
            return work.contribute(self.rule, wide, wide, accumulated, wide, at)
        return (
            wide if "params" in self.rule.reads else (),
            accumulated if "accumulated" in self.rule.reads else (),
        )

    def _of_means(self, means: Tree, total: Any, weighted: bool) -> Tree:
        """The contribution to this worker's piece, from the means of all workers."""
        piece, (params, accumulated) = self.piece, means
        # The piece stands in for arrays that the formula does not read.
        mean = work.contribute(
            self.rule,
            params if "params" in self.rule.reads else piece,
            piece,
            accumulated if "accumulated" in self.rule.reads else piece,
            piece,
            self.at,
        )
        if not weighted:
            return mean
        # Without contributors the mean of parameters is 0: so be the contribution.
        return where(total > 0, mean, zeros_like(mean))

    def _square(self, piece: Tree, like: jax.Array) -> jax.Array:
        """The squared norm of a piece, summed over its shards on other mesh axes."""
        square = square_sum(piece, localize(like, self.axis_name))
        return localize(square, self.axis_name)

    def _gathered_wide(self, now: Now) -> Tree:
        """The gathered center, in its own dtypes."""
        center = now.center.value
        return self._gathered(center, work.as_center(now.worker.params, center.tree))

    def _gathered(self, center: Tree, like: Tree) -> Tree:
        """The gathered center, or a part of it, in the dtypes of `like`."""
        if isinstance(center, InParts):
            cut = center.partition
            pairs = zip(center.parts, cut.each(lambda part: part, like), strict=True)
            return cut.join([self._gathered(*pair) for pair in pairs])
        pieces = memory.on_device(center.tree)
        return gather(pieces, like, self.axis_name, self.exchange.bucket_bytes)

    def taken(self, now: Now, before: Center) -> tuple[Tree, Tree]:
        """The center that the owners have stepped, decoded or gathered, twice."""
        worker, halves = now.worker, self.exchange.halves
        if halves is not None:
            seen, owned = worker.taken, now.center.value.tree
            gap = jax.tree.map(jnp.subtract, owned, cut(seen, self.axis_name))
            after = jax.tree.map(jnp.add, seen, halves.down(gap, seen, self.axis_name))
        elif self.rule.take is None:
            # Gathered in the parameters' dtypes where nothing needs more.
            after = self._gathered(now.center.value, worker.params)
        else:
            after = self._gathered_wide(now)
        return after, after


def pieces(
    rule: CenterRule, axis_name: AxisName, exchange: Exchange, measure: bool, delay: int
) -> Pieces:
    """A center in pieces; refuse a rule or exchange that needs it whole."""
    if not axis_name:
        raise ValueError(
            f"{_OPTION} shares a center out among workers, and with axis_name=None "
            f"there is one. Leave {_OPTION} out."
        )
    if rule.penalty is not None or not work.takes_center(rule):
        formula = "penalty" if rule.penalty is not None else "take"
        raise ValueError(
            f"{_OPTION}: between rounds nobody holds the whole center, which this "
            f"rule's `{formula}` reads, as that of elastic_average does. Leave "
            f"{_OPTION} out, or choose a rule whose workers take the center: "
            "local_sgd, diloco, agn."
        )
    if exchange.scatter is None and exchange.halves is None:
        raise ValueError(
            f"{_OPTION} needs an exchange that can stop half way, where each "
            "worker has the sum of its piece; this one cannot. Use "
            "oxs.exchange.all_reduce(), quantized() or error_feedback(quantized()), "
            f"or leave {_OPTION} out."
        )
    elementwise = None
    if rule.outer is not None:
        elementwise = Elementwise(
            optax.with_extra_args_support(rule.outer),
            check_axis_name(axis_name),
            _OPTION,
            "the outer optimizer",
        )
    takes = rule.take is None and not delay
    made = Pieces(rule, axis_name, exchange, measure, takes, elementwise)
    if made.blind and not made.alone and not rule.affine:
        raise ValueError(
            f"{_OPTION} evaluates `contribute` on the mean of the workers' arrays, "
            "which is the mean of the contributions only where the formula is affine "
            "in them, and this rule does not declare that it is. Declare affine=True "
            f"(oxs.testing.check_rule holds the rule to it), or leave {_OPTION} out."
        )
    return made
