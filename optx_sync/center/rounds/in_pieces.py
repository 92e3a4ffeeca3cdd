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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Round
from optx_sync.center.fragments import Partition, Whole
from optx_sync.center.rounds.meeting import Meeting, Now, Step
from optx_sync.center.worker import Center, Worker
from optx_sync.comm.collectives import check_axis_name
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import localize, vary_like
from optx_sync.elementwise import Elementwise
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.metrics import measure_in_pieces, square_sum
from optx_sync.placement import memory
from optx_sync.placement.fields import InParts, InPieces, is_in_pieces
from optx_sync.trees import Tree, where, zeros_like

_OPTION = "shard_center=True"


class Pieces(NamedTuple):
    """The phases of a round of a sharded center; `pieces` makes one."""

    meeting: Meeting
    delay: int  # steps from a sum until it lands
    elementwise: Elementwise | None  # the check of the outer optimizer

    @property
    def drop_nonfinite(self) -> bool:
        """Whether a worker that is not finite is left out."""
        return self.meeting.drop_nonfinite

    @property
    def coded(self) -> bool:
        """Whether the center comes back coded, and workers keep the decoded center."""
        return self.meeting.exchange.halves is not None

    @property
    def blind(self) -> bool:
        """Whether workers contribute without seeing the center."""
        return not (self.coded or self.meeting.measure)

    @property
    def alone(self) -> bool:
        """Whether `contribute` reads neither `taken` nor the center."""
        return not {"taken", "center"} & {*self.rule.reads}

    @property
    def takes_all(self) -> bool:
        """Whether a worker keeps nothing of its own parameters in a round."""
        kept = self.meeting.keep_local
        return isinstance(kept, int | float) and kept == 0

    def try_on(self, center: Tree) -> None:
        """Refuse an outer optimizer that is not elementwise."""
        if self.elementwise is not None:
            self.elementwise.check(center)

    @property
    def rule(self) -> CenterRule:
        """What is exchanged."""
        return self.meeting.rule

    def start_center(self, parts: Whole, center: Tree) -> Center:
        """The pieces of a whole center, and of the outer state."""
        outer, axis_name = self.rule.outer, self.meeting.axis_name

        def own(init):
            return parts.each(lambda part: own_pieces(init, part, axis_name), center)

        held = own(lambda pieces: pieces)
        if isinstance(parts, Partition):
            held = InParts(held, parts)
        return Center(held, () if outer is None else own(outer.init))

    def remember(self, part: Tree) -> Tree:
        """What the exchange of a part remembers before the first round."""
        return self.meeting.remember(part)

    def check(self, parts: Whole, center: Tree, whole: Tree) -> None:
        """Refuse pieces for another number of workers; `whole` has the shapes."""
        for number in range(parts.number):
            check_pieces(
                parts.pick(center, number),
                lambda pieces: pieces,
                parts.pick(whole, number),
                self.meeting.axis_name,
            )

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, the whole arrays that this worker sends)."""
        meeting, held = self.meeting, now.center
        if not self.blind:
            seen = now.worker.taken if self.coded else self._whole(now)
            seeing = now._replace(center=Center(seen, ()))
            now, contribution = meeting.bring(seeing, step, part)
            return now._replace(center=held), contribution
        sent = localize(self._sent(now, step.at(part)), meeting.axis_name)
        worker = now.worker._replace(accumulated=zeros_like(now.worker.accumulated))
        return meeting.leave_out(now._replace(worker=worker), step, sent), sent

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """(now, this worker's pieces of the sum or mean, the sum of weights or ())."""
        meeting, weight = self.meeting, now.weight
        pushed: int | jax.Array = step.num_workers
        if weight is not None:
            counts = weight if step.alike else (weight > 0)
            pushed = reduce(
                counts.astype(jnp.float32), meeting.axis_name, reduction="sum"
            )
        now, mean = self._mean(now, step, contribution, pushed)
        if meeting.measure:
            now = self._measured(now, step, contribution, mean)
        if self.rule.mean_over is None:
            mean = jax.tree.map(lambda x: x * jnp.asarray(pushed, x.dtype), mean)
        return now, InPieces(mean), pushed if meeting.drop_nonfinite else ()

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The owners absorb their pieces, and this worker takes the gathered center.

        With `drop_nonfinite`, the center stays where nobody contributed.
        """
        meeting, (center, outer) = self.meeting, now.center
        before = Center(
            center.tree, outer.tree if isinstance(outer, InPieces) else outer
        )
        extra = meeting.extra_args(step, now.weight)
        after = work.absorb(self.rule, before, total.tree, **extra)
        if meeting.drop_nonfinite:
            after = where(pushed > 0, after, before)
        state = InPieces(after.outer) if isinstance(outer, InPieces) else after.outer
        held = vary_like(Center(InPieces(after.value), state), now.center)
        info = now.info
        if meeting.measure:
            change = jax.tree.map(jnp.subtract, after.value, before.value)
            square = localize(self._square(now, change), meeting.axis_name)
            norm = jnp.sqrt(reduce(square, meeting.axis_name, reduction="sum"))
            info = info._replace(measured=info.measured._replace(update_norm=norm))
        now = now._replace(center=held, info=info)
        return now._replace(worker=self._taking(now, at))

    def settle(self, now: Now, walked: Tree, center: Tree) -> Now:
        """The other effects of a round; a broken worker takes the whole center."""
        whole = now.worker.params
        takes = self.takes_all and not self.delay and is_in_pieces(center)
        if self.coded:
            whole = now.worker.taken
        elif self.drop_nonfinite and not takes:
            # The center is gathered if any worker needs it.
            broken = localize((~now.well).astype(jnp.float32), self.meeting.axis_name)
            broken = reduce(broken, self.meeting.axis_name, reduction="sum")
            whole = jax.lax.cond(
                broken > 0,
                lambda params: vary_like(self._gathered(center, params), params),
                lambda params: params,
                whole,
            )
        return self.meeting.settle(now, walked, whole)

    def moved(self, center: Tree, change: Tree) -> Tree:
        """The center moved by a whole tree that is equal on all workers."""
        axis_name = self.meeting.axis_name

        def moved(pieces, change):
            own = cut(change, axis_name)
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

    def _mean(
        self, now: Now, step: Step, sent: Tree, pushed: int | jax.Array
    ) -> tuple[Now, Tree]:
        """(now, the mean contribution of all workers to this worker's piece)."""
        exchange, axis_name = self.meeting.exchange, self.meeting.axis_name
        weight, piece = now.weight, now.center.value.tree
        if exchange.halves is not None:
            met = exchange.halves.up(sent, now.exchange, axis_name, weight=weight)
            return now._replace(exchange=met.state), met.mean
        scatter: Any = exchange.scatter  # `pieces` has made sure that there is one
        mean = scatter(sent, axis_name, weight=weight)
        if self.alone or not self.blind:
            return now, mean
        params, accumulated = mean
        # The piece stands in for arrays that the formula does not read.
        mean = work.contribute(
            self.rule,
            params if "params" in self.rule.reads else piece,
            piece,
            accumulated if "accumulated" in self.rule.reads else piece,
            piece,
            step.at(0),
        )
        if weight is not None:
            # Without contributors the mean of parameters is 0: so be the contribution.
            mean = where(pushed > 0, mean, zeros_like(mean))
        return now, mean

    def _measured(self, now: Now, step: Step, contribution: Tree, mean: Tree) -> Now:
        """The measures of the contributions, from the scalars of workers and owners."""
        info = now.info
        measured = measure_in_pieces(
            info.measured,
            (square_sum(contribution, info.distance), self._square(now, mean)),
            self.meeting.axis_name,
            weight=now.weight,
            alike=step.alike,
        )
        return now._replace(info=info._replace(measured=measured))

    def _square(self, now: Now, piece: Tree) -> jax.Array:
        """The squared norm of a piece, summed over its shards on other mesh axes."""
        like = localize(now.info.measured.update_norm, self.meeting.axis_name)
        return square_sum(piece, like)

    def _whole(self, now: Now) -> Tree:
        """The gathered center, in its own dtypes."""
        center = now.center.value
        return self._gathered(center, work.as_center(now.worker.params, center.tree))

    def _gathered(self, center: Tree, like: Tree) -> Tree:
        """The gathered center, or a part of it, in the dtypes of `like`."""
        if isinstance(center, InParts):
            cut = center.partition
            pairs = zip(center.parts, cut.each(lambda part: part, like), strict=True)
            return cut.join([self._gathered(*pair) for pair in pairs])
        buckets = self.meeting.exchange.bucket_bytes
        pieces = memory.on_device(center.tree)
        return gather(pieces, like, self.meeting.axis_name, buckets)

    def _taking(self, now: Now, at: Round) -> Worker:
        """The worker after it took the center that the owners have stepped."""
        meeting, worker = self.meeting, now.worker
        halves = meeting.exchange.halves
        if halves is not None:
            seen, axis_name = worker.taken, meeting.axis_name
            owned = now.center.value.tree
            gap = jax.tree.map(jnp.subtract, owned, cut(seen, axis_name))
            after = jax.tree.map(jnp.add, seen, halves.down(gap, seen, axis_name))
        else:
            # Gathered in the parameters' dtypes where nothing needs more.
            like = worker.params
            if not self.takes_all:
                like = work.as_center(like, now.center.value.tree)
            after = self._gathered(now.center.value, like)
        return work.take(self.rule, worker, after, after, at, meeting.keep_local)


def pieces(meeting: Meeting, delay: int) -> Pieces:
    """The phases of a sharded center; refuse a rule or exchange that needs it whole."""
    rule, axis_name = meeting.rule, meeting.axis_name
    if not axis_name:
        raise ValueError(
            f"{_OPTION} shares a center out among workers, and with axis_name=None "
            f"there is one. Leave {_OPTION} out."
        )
    if rule.penalty is not None or rule.take is not None:
        formula = "penalty" if rule.penalty is not None else "take"
        raise ValueError(
            f"{_OPTION}: between rounds nobody holds the whole center, which this "
            f"rule's `{formula}` reads, as that of elastic_average does. Leave "
            f"{_OPTION} out, or choose a rule whose workers take the center: "
            "local_sgd, diloco, agn."
        )
    if meeting.exchange.scatter is None and meeting.exchange.halves is None:
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
    phases = Pieces(meeting, delay, elementwise)
    if phases.blind and not phases.alone and not rule.affine:
        raise ValueError(
            f"{_OPTION} evaluates `contribute` on the mean of the workers' arrays, "
            "which is the mean of the contributions only where the formula is affine "
            "in them, and this rule does not declare that it is. Declare affine=True "
            f"(oxs.testing.check_rule holds the rule to it), or leave {_OPTION} out."
        )
    return phases
