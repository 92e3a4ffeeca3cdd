# SPDX-License-Identifier: Apache-2.0
"""A center in pieces: each worker holds 1/N of it, and of the outer state.

What the workers have is added up where it is owned, the owner makes the step of the
center on its piece, and all workers gather the new center. With x_i the parameters of
worker i, c_j the piece of the center that worker j owns and x_ij the piece of x_i:

    r_j = sum_i x_ij / N      c_j <- outer(c_j, contribution of r_j)      x_i <- all c_j

Between rounds nobody holds the whole center, so what travels is the parameters, and not
how far they are from it: a rule whose contribution is affine in them gives the same
mean. The two halves send what an all-reduce sends.
"""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.contract import (
    CenterRule,
    Own,
    Period,
    Reads,
    Round,
    reads,
    static_period,
)
from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.meeting import Meeting, Now, OnItsWay, Step, either
from optx_sync.center.worker import Center, absorb, as_center, contribute
from optx_sync.comm.collectives import check_axis_name
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import localize, vary_like
from optx_sync.elementwise import Elementwise
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement.fields import InPieces
from optx_sync.trees import Tree, is_placeholder, where, zeros_like

_OPTION = "shard_center=True"


class Pieces(NamedTuple):
    """A round at once, of a center in pieces; `pieces` makes one."""

    meeting: Meeting
    period: Period
    read: Reads
    elementwise: Elementwise | None  # what asks it of the outer optimizer

    @property
    def alone(self) -> bool:
        """Whether a contribution is the worker's alone, and so travels itself."""
        return not (self.read.taken or self.read.center)

    def start_center(self, center: Tree) -> Center:
        """The pieces of a whole center, and the outer state.

        Refuse a rule or an outer optimizer that does not act on each number alone.
        """
        rule, axis_name = self.meeting.rule, self.meeting.axis_name
        if is_placeholder(center):
            outer = () if rule.outer is None else InPieces(rule.outer.init(center))
            return Center(InPieces(center), outer)
        if not self.alone and not _is_affine(rule, self.period):
            raise ValueError(
                f"{_OPTION} evaluates `contribute` on the mean of the workers' arrays, "
                "which is the mean of the contributions only where the formula is "
                f"affine in them; this rule's is not. Leave {_OPTION} out."
            )
        held = own_pieces(lambda pieces: pieces, center, axis_name)
        if rule.outer is None or self.elementwise is None:
            return Center(held, ())
        self.elementwise.check(center)
        return Center(held, own_pieces(rule.outer.init, center, axis_name))

    def start(self, parts: Whole, center: Tree) -> tuple[OnItsWay, Tree]:
        """(what is pending, what the exchange remembers) before the first round."""
        return (), ()

    def check(self, center: InPieces, params: Tree) -> None:
        """Refuse pieces for another number of workers."""
        check_pieces(center, lambda pieces: pieces, params, self.meeting.axis_name)

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        return either(step.due, lambda now: self._round(now, step), now)

    def _round(self, now: Now, step: Step) -> Now:
        meeting, walked = self.meeting, now.worker.params
        sent = localize(self._sent(now, step.at(0)), meeting.axis_name)
        now = meeting.leave_out(now, step, sent)
        pushed: int | jax.Array = step.num_workers
        if now.weight is not None:
            counts = now.weight if step.alike else (now.weight > 0)
            pushed = reduce(
                counts.astype(jnp.float32), meeting.axis_name, reduction="sum"
            )
        center = self._absorbed(now, step, sent, pushed)
        buckets = meeting.exchange.bucket_bytes
        params = gather(center.value.tree, walked, meeting.axis_name, buckets)
        worker = now.worker._replace(
            params=params, accumulated=zeros_like(now.worker.accumulated)
        )
        now = now._replace(worker=worker, center=center)
        return meeting.settle(now, walked, params)

    def _sent(self, now: Now, at: Round) -> Tree:
        """What a worker sends, whole arrays: a contribution, or what it is made of."""
        accumulated = now.worker.accumulated
        wide = as_center(now.worker.params, now.center.value.tree)
        if self.alone:
            return contribute(self.meeting.rule, wide, wide, accumulated, wide, at)
        return (
            wide if self.read.params else (),
            accumulated if self.read.accumulated else (),
        )

    def _absorbed(
        self, now: Now, step: Step, sent: Tree, pushed: int | jax.Array
    ) -> Center:
        """The center after what all workers sent; `pushed` of them are not left out.

        Where there is none the center stays, with `drop_nonfinite`.
        """
        meeting, (center, outer) = self.meeting, now.center
        rule, piece, weight = meeting.rule, center.tree, now.weight
        scatter: Any = meeting.exchange.scatter  # which `pieces` has asked for
        mean = scatter(sent, meeting.axis_name, weight=weight)
        if not self.alone:
            params, accumulated = mean
            # The piece of the center stands for what the formula does not read.
            mean = contribute(
                rule,
                params if self.read.params else piece,
                piece,
                accumulated if self.read.accumulated else piece,
                piece,
                step.at(0),
            )
            if weight is not None:
                # Of nobody's parameters the mean is 0, and so is what they contribute.
                mean = where(pushed > 0, mean, zeros_like(mean))
        if rule.mean_over is None:
            mean = jax.tree.map(lambda x: x * jnp.asarray(pushed, x.dtype), mean)
        before = Center(piece, outer.tree if isinstance(outer, InPieces) else outer)
        extra = meeting.extra_args(step, weight)
        after = absorb(rule, before, mean, **extra)
        if meeting.drop_nonfinite:
            after = where(pushed > 0, after, before)
        state = InPieces(after.outer) if isinstance(outer, InPieces) else after.outer
        return vary_like(Center(InPieces(after.value), state), now.center)

    def moved(self, center: InPieces, change: Tree) -> InPieces:
        """The center once it has moved by a whole tree that is equal on all."""
        own = cut(change, self.meeting.axis_name)
        return InPieces(jax.tree.map(jnp.add, center.tree, own))


def pieces(meeting: Meeting, period: Period) -> Pieces:
    """Rounds of a center in pieces; refuse a rule or exchange that needs it whole."""
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
    if meeting.exchange.scatter is None:
        raise ValueError(
            f"{_OPTION} needs an exchange that can stop half way, where each "
            "worker has the sum of its piece; this one cannot. (What is coded is "
            "a difference from the whole center, which nobody holds.) Use "
            f"oxs.exchange.all_reduce(), or leave {_OPTION} out."
        )
    elementwise = None
    if rule.outer is not None:
        elementwise = Elementwise(
            optax.with_extra_args_support(rule.outer),
            check_axis_name(axis_name),
            _OPTION,
            "the outer optimizer",
        )
    return Pieces(meeting, period, reads(rule, period), elementwise)


def _is_affine(rule: CenterRule, period: Period) -> bool:
    """Whether the mean of contributions is the contribution of the means."""
    numbers = np.random.default_rng(0)
    x, a = (numbers.normal(size=(2, 2, 3)).astype(np.float32) for _ in range(2))
    s = numbers.normal(size=(2, 3)).astype(np.float32)
    at = Round(rule.num_workers or 2, static_period(period), np.int32(2))

    def contribute(x, a):
        accumulated = None if rule.accumulate is None else jnp.asarray(a)
        own = Own(jnp.asarray(x), jnp.asarray(s), accumulated)
        return rule.contribute(own, jnp.asarray(s), at)

    with jax.core.eval_context(), jax.numpy_dtype_promotion("standard"):
        try:
            each = [contribute(x[i], a[i]) for i in range(2)]
            of_means = contribute(x.mean(0), a.mean(0))
            return np.allclose(of_means, (each[0] + each[1]) / 2, 1e-4, 1e-5)
        except jax.errors.UnexpectedTracerError:
            return True  # It closes over a tracer and cannot be evaluated: trust it.
