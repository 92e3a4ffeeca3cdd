# SPDX-License-Identifier: Apache-2.0
"""What happens to the arrays of a worker and of the center, whoever says when.

`asynchronous` calls it in a given order of workers, `decoupled` in that of a clock.
Where each contribution meets the center alone, both do the same in the same calls:
`walk`, `bring`, `land`, `take`.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import contract
from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import Fragments, Partition, check_fragments
from optx_sync.center.round import of_part
from optx_sync.center.worker import Center, Worker
from optx_sync.core.checks import check_function, check_grads, check_inner
from optx_sync.core.trees import Tree, is_finite, where
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings import coded
from optx_sync.meetings.alone import absorb, check_suits, share_of_one, weighed
from optx_sync.optimizers.rule import RuleState
from optx_sync.simulate.replay import GradFn

# A part of the center before and after a meeting.
Around: TypeAlias = tuple[Tree, Tree]


def engine_of(
    call: str,
    inner: optax.GradientTransformation,
    rule: CenterRule,
    params: Tree,
    grad_fn: GradFn,
    *,
    num_workers: int,
    communication_period: Period,
    exchange: Exchange | None,
    fragments: Fragments | None,
    weigh: Weigh | None,
    alone: bool = True,
    drop_nonfinite: bool = False,
) -> tuple["Engine", Tree]:
    """(the engine of checked arguments, the parameters as arrays of JAX)."""
    inner = check_inner(inner, call)
    check_function("grad_fn", grad_fn, "It takes (worker, params, number).")
    contract.check_rule(rule, call)
    rule = weighed(rule, weigh)
    period = contract.check_period(communication_period)
    check_suits(rule, num_workers, period)
    exchange = coded.check_code(exchange, rule)
    params = jax.tree.map(jnp.asarray, params)
    parts = Partition(check_fragments(fragments), work.start_center(params))
    at = Round(num_workers, contract.static_period(period), 1)
    engine = Engine(inner, rule, exchange, parts, at, grad_fn, alone, drop_nonfinite)
    return engine, params


class Engine(NamedTuple):
    """The phases of a round: those of `center.worker`, for one part of P.

    What one worker holds, `own`, is a NamedTuple with the fields `worker`, `exchange`
    (what the code of its pushes remembers, for each part) and, with `drop_nonfinite`,
    `broken` (bool[], whether it was not finite since its last round).
    """

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    exchange: Exchange | None  # the code of the workers' pushes
    parts: Partition
    at: Round  # N and the period, and nothing of a round
    grad_fn: GradFn
    alone: bool  # whether each contribution is absorbed alone
    drop_nonfinite: bool

    def start(self, params: Tree, center: Tree) -> tuple[Worker, Tree]:
        """(a worker that starts from the center, what its code remembers)."""
        rule = self.rule
        # Others move the center meanwhile, so each worker keeps the center it took.
        keeps_taken = rule.take is None or contract.keeps_before(rule)
        worker = Worker(
            params,
            self.inner.init(params),
            center if keeps_taken else (),
            work.start_accumulated(rule, center),
        )
        if self.exchange is None:
            return worker, ()
        remember = functools.partial(coded.start_codes, self.exchange)
        return worker, self.parts.each(remember, center)

    def start_outer(self, center: Tree) -> Tree:
        """The state of the rule's outer transformation, for each part, or ()."""
        outer = self.rule.outer
        return () if outer is None else self.parts.each(outer.init, center)

    def part_bytes(self, params: Tree) -> list[float]:
        """The bytes of a contribution to each part of such parameters."""
        messages = functools.partial(coded.message_shapes, self.exchange)
        parts = self.parts.split(jax.eval_shape(work.start_center, params))
        return [float(coded.bytes_of(messages(part))) for part in parts]

    def walk(self, own: Any, center: Tree, who: Any, number: Any, steps: Any) -> Any:
        """A worker makes a step of its own, the `steps`-th since it contributed."""
        grads = self.grad_fn(who, own.worker.params, number)
        check_grads(grads, own.worker.params)
        at = self.at._replace(steps=steps)
        worker = work.walk(self.inner, self.rule, own.worker, center, grads, at)
        if self.drop_nonfinite:
            own = own._replace(broken=own.broken | ~is_finite(worker.params))
            worker = work.stand_still(own.worker, worker, own.broken)
        return own._replace(worker=worker)

    def bring(
        self, part: int, own: Any, center: Tree, at: Round
    ) -> tuple[Any, Tree, Any]:
        """(a worker with its sums of a part reset, its contribution, if all is well).

        The contribution is as the center gets it.
        """
        parts, worker, well = self.parts, own.worker, jnp.bool_(True)
        cut, center = of_part(parts, worker, part), parts.pick(center, part)
        cut, brought = work.bring(self.rule, cut, center, at)
        sums = parts.put(worker.accumulated, part, cut.accumulated)
        own = own._replace(worker=worker._replace(accumulated=sums))
        if self.drop_nonfinite:
            well = ~own.broken & is_finite(brought)
        if self.alone:
            brought = share_of_one(self.rule, brought, at)
        if self.exchange is None:
            return own, brought, well
        known = parts.of_each(own.exchange, part)
        messages, kept = coded.encoded(self.exchange, brought, known)
        kept = where(well, kept, known) if self.drop_nonfinite else kept
        own = own._replace(exchange=parts.with_each(own.exchange, part, kept))
        return own, coded.decoded(self.exchange, messages, brought), well

    def land(
        self, part: int, own: Any, center: Center, total: Tree, counts: Any
    ) -> tuple[Any, Center, Around]:
        """The center absorbs what a worker brings alone, if that counts.

        A worker's optimizer that is the rule's outer one, too, shares its running
        powers with the center.
        """
        parts, inner = self.parts, own.worker.inner
        shared = self.rule.outer is self.inner
        if shared:
            outer = with_powers(parts.of_each(center.outer, part), inner)
            center = Center(center.value, parts.with_each(center.outer, part, outer))
        drops = self.drop_nonfinite or self.rule.weigh is not None
        counts, alone = counts if drops else None, {"num_workers": self.at.num_workers}
        center, around = self.absorb(part, center, total, counts, **alone)
        if shared:
            inner = with_powers(inner, parts.of_each(center.outer, part))
        return own._replace(worker=own.worker._replace(inner=inner)), center, around

    def absorb(
        self, part: int, center: Center, total: Tree, counts: Any, **extra: Any
    ) -> tuple[Center, Around]:
        """(the center, its part before and with a contribution, if this counts).

        `counts` is `None` where all do.
        """
        parts, (value, outer) = self.parts, center
        before = Center(parts.pick(value, part), parts.of_each(outer, part))
        after = absorb(self.rule, before, total, **extra)
        if counts is not None:
            after = where(counts, after, before)
        value = parts.put(value, part, after.value)
        outer = parts.with_each(outer, part, after.outer)
        return Center(value, outer), (before.value, after.value)

    def take(
        self, part: int, own: Any, around: Around, at: Round, then: Tree = ()
    ) -> Any:
        """A worker takes a part of the center, which moved from one to the other."""
        parts, worker = self.parts, own.worker
        cut = work.take(self.rule, of_part(parts, worker, part), *around, at, then)
        worker = worker._replace(
            params=parts.put(worker.params, part, cut.params),
            taken=parts.put(worker.taken, part, cut.taken),
        )
        return own._replace(worker=worker)


def with_powers(state: optax.OptState, source: optax.OptState) -> optax.OptState:
    """A state with the running powers of another state of the same optimizer.

    The powers are replaced at any depth of chains and masks; all else stays.
    """

    def is_rule_state(x):
        return isinstance(x, RuleState)

    return jax.tree.map(
        lambda own, other: (
            own._replace(powers=other.powers) if is_rule_state(own) else own
        ),
        state,
        source,
        is_leaf=is_rule_state,
    )
