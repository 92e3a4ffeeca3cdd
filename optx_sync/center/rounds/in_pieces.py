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
    Round,
    reads,
    static_period,
)
from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.meeting import Meeting, Now, Step, either
from optx_sync.center.worker import Center, absorb, as_center, contribute
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import localize, vary_like
from optx_sync.elementwise import Elementwise
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.pieces import check_pieces, cut, gather, own_pieces
from optx_sync.placement.fields import InPieces
from optx_sync.trees import Tree, is_placeholder, where, zeros_like

_OPTION = "shard_center=True"


class ShardedCenter:
    """What a round does where the center lies in pieces."""

    def __init__(
        self, rule: CenterRule, period: Period, axis_name: AxisName, exchange: Exchange
    ):
        """Refuse a rule or an exchange that needs the center whole."""
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
        if exchange.scatter is None:
            raise ValueError(
                f"{_OPTION} needs an exchange that can stop half way, where each "
                "worker has the sum of its piece; this one cannot. (What is coded is "
                "a difference from the whole center, which nobody holds.) Use "
                f"oxs.exchange.all_reduce(), or leave {_OPTION} out."
            )
        self._rule, self._period, self._axis_name = rule, period, axis_name
        self._scatter = exchange.scatter
        read = reads(rule, period)
        # A contribution that is the worker's alone travels itself.
        self._alone = not (read.taken or read.center)
        self._read = read
        self._elementwise = None
        if rule.outer is not None:
            self._elementwise = Elementwise(
                optax.with_extra_args_support(rule.outer),
                check_axis_name(axis_name),
                _OPTION,
                "the outer optimizer",
            )

    def start(self, center: Tree) -> tuple[InPieces, Any]:
        """(center, outer state), from a whole center.

        Refuse a rule or an outer optimizer that does not act on each number alone.
        """
        if is_placeholder(center):
            outer = self._rule.outer
            return InPieces(center), (
                () if outer is None else InPieces(outer.init(center))
            )
        if not self._alone and not _is_affine(self._rule, self._period):
            raise ValueError(
                f"{_OPTION} evaluates `contribute` on the mean of the workers' arrays, "
                "which is the mean of the contributions only where the formula is "
                f"affine in them; this rule's is not. Leave {_OPTION} out."
            )
        pieces = own_pieces(lambda pieces: pieces, center, self._axis_name)
        if self._rule.outer is None or self._elementwise is None:
            return pieces, ()
        self._elementwise.check(center)
        return pieces, own_pieces(self._rule.outer.init, center, self._axis_name)

    def check(self, center: InPieces, params: Tree) -> None:
        """Refuse pieces for another number of workers."""
        check_pieces(center, lambda pieces: pieces, params, self._axis_name)

    def sent(
        self, params: Tree, accumulated: Tree, center: InPieces, at: Round
    ) -> Tree:
        """What a worker sends, whole arrays: a contribution, or what it is made of."""
        wide = as_center(params, center.tree)
        if self._alone:
            return contribute(self._rule, wide, wide, accumulated, wide, at)
        return (
            wide if self._read.params else (),
            accumulated if self._read.accumulated else (),
        )

    def meet(
        self,
        center: InPieces,
        outer: Any,
        sent: Tree,
        at: Round,
        *,
        weight: Any,
        pushed: Any,
        keeps: bool,
        extra: dict[str, Any],
    ) -> tuple[InPieces, Any]:
        """The next center and outer state, from what all workers sent.

        `weight` is 0 where this worker is left out; `pushed` is the number of workers
        that are not; where there is none the center stays, with `keeps`.
        """
        now = center.tree
        mean = self._scatter(sent, self._axis_name, weight=weight)
        if not self._alone:
            params, accumulated = mean
            # The piece of the center stands for what the formula does not read.
            mean = contribute(
                self._rule,
                params if self._read.params else now,
                now,
                accumulated if self._read.accumulated else now,
                now,
                at,
            )
            if weight is not None:
                # Of nobody's parameters the mean is 0, and so is what they contribute.
                mean = where(pushed > 0, mean, zeros_like(mean))
        if self._rule.mean_over is None:
            mean = jax.tree.map(lambda x: x * jnp.asarray(pushed, x.dtype), mean)
        before = outer.tree if isinstance(outer, InPieces) else outer
        after, state = absorb(self._rule, Center(now, before), mean, **extra)
        if keeps:
            after, state = where(pushed > 0, (after, state), (now, before))
        next_outer = InPieces(state) if isinstance(outer, InPieces) else state
        return vary_like((InPieces(after), next_outer), (center, outer))

    def whole(self, center: InPieces, like: Tree) -> Tree:
        """The center, gathered, in the shapes and dtypes of a tree."""
        return gather(center.tree, like, self._axis_name)

    def moved(self, center: InPieces, change: Tree) -> InPieces:
        """The center once it has moved by a whole tree that is equal on all."""
        own = cut(change, self._axis_name)
        return InPieces(jax.tree.map(jnp.add, center.tree, own))


class Pieces(NamedTuple):
    """A round at once, of a center in pieces."""

    meeting: Meeting
    sharded: ShardedCenter

    def start(self, parts: Whole, center: Any) -> tuple[Any, Any]:
        """(what is pending, what the exchange remembers) before the first round."""
        return (), ()

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        return either(step.due, lambda now: self._round(now, step), now)

    def _round(self, now: Now, step: Step) -> Now:
        meeting, worker = self.meeting, now.worker
        axis_name, walked = meeting.axis_name, worker.params
        at = step.at(0)
        sent = self.sharded.sent(walked, worker.accumulated, now.center.value, at)
        sent = localize(sent, axis_name)
        now = meeting.leave_out(now, step, sent)
        pushed: Any = step.num_workers
        if now.weight is not None:
            counts = now.weight if step.alike else (now.weight > 0)
            pushed = reduce(counts.astype(jnp.float32), axis_name, reduction="sum")
        center, outer = self.sharded.meet(
            *now.center,
            sent,
            at,
            weight=now.weight,
            pushed=pushed,
            keeps=meeting.drop_nonfinite,
            extra=meeting.extra_args(step, now.weight),
        )
        worker = worker._replace(
            params=self.sharded.whole(center, walked),
            accumulated=zeros_like(worker.accumulated),
        )
        now = now._replace(worker=worker, center=Center(center, outer))
        return meeting.settle(now, walked, worker.params)


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
