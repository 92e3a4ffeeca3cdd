# SPDX-License-Identifier: Apache-2.0
"""What happens to the arrays of a worker and of the center, whoever says when.

`asynchronous` calls it in a given order of workers, `decoupled` in that of a clock.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import coded, contract
from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.fragments import Fragments, Partition, check_fragments
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_function, check_grads, check_inner
from optx_sync.exchange.contract import Exchange
from optx_sync.optimizers.rule import RuleState
from optx_sync.simulate.replay import GradFn
from optx_sync.trees import Tree, where


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
) -> tuple["Engine", Tree]:
    """(the engine of checked arguments, the parameters as arrays of JAX)."""
    inner = check_inner(inner, call)
    check_function("grad_fn", grad_fn, "It takes (worker, params, number).")
    contract.check_rule(rule, call)
    rule = contract.weighed(rule, weigh)
    period = contract.check_period(communication_period)
    contract.check_suits(rule, num_workers, period)
    exchange = coded.check_code(exchange, rule)
    params = jax.tree.map(jnp.asarray, params)
    parts = Partition(check_fragments(fragments), work.start_center(params))
    at = Round(num_workers, contract.static_period(period), 1)
    return Engine(inner, rule, exchange, parts, at, grad_fn), params


class Engine(NamedTuple):
    """The phases of a round: those of `center.worker`, for one part of P."""

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    exchange: Exchange | None  # the code of the workers' pushes
    parts: Partition
    at: Round  # N and the period, and nothing of a round
    grad_fn: GradFn

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

    def walk(
        self, worker: Worker, center: Tree, who: Any, number: Any, steps: Any
    ) -> Worker:
        """A worker makes a step of its own, the `steps`-th since it contributed."""
        grads = self.grad_fn(who, worker.params, number)
        check_grads(grads, worker.params)
        at = self.at._replace(steps=steps)
        return work.walk(self.inner, self.rule, worker, center, grads, at)

    def bring(
        self, part: int, worker: Worker, center: Tree, at: Round
    ) -> tuple[Worker, Tree]:
        """(the worker with its sums of a part reset, its contribution to it)."""
        pick = self.parts.pick
        cut = Worker(*(pick(x, part) for x in worker._replace(inner=())))
        cut, brought = work.bring(self.rule, cut, pick(center, part), at)
        sums = self.parts.put(worker.accumulated, part, cut.accumulated)
        return worker._replace(accumulated=sums), brought

    def sent(self, part: int, brought: Tree, codes: Tree) -> tuple[Tree, Tree]:
        """(a contribution as the center gets it, what the worker's code remembers)."""
        if self.exchange is None:
            return brought, codes
        messages, kept = coded.encoded(
            self.exchange, brought, self.parts.of_each(codes, part)
        )
        brought = coded.decoded(self.exchange, messages, brought)
        return brought, self.parts.with_each(codes, part, kept)

    def absorb(
        self,
        part: int,
        center: Center,
        total: Tree,
        counts: Any,
        powers: Tree = None,
        **extra: Any,
    ) -> tuple[Center, Center, Center]:
        """(the center, its part before, and with a contribution, if this counts).

        `counts` is `None` where all do; `powers` is a state of the outer optimizer
        whose running powers it takes over.
        """
        parts = self.parts
        value, outer = center
        before = Center(parts.pick(value, part), parts.of_each(outer, part))
        if powers is not None:
            before = before._replace(outer=with_powers(before.outer, powers))
        after = work.absorb(self.rule, before, total, **extra)
        if counts is not None:
            after = where(counts, after, before)
        value = parts.put(value, part, after.value)
        outer = parts.with_each(outer, part, after.outer)
        return Center(value, outer), before, after

    def take(
        self, part: int, worker: Worker, before: Tree, after: Tree, at: Round
    ) -> Worker:
        """A worker takes a part of the center, moved from `before` to `after`."""
        parts = self.parts
        params, taken = (parts.pick(x, part) for x in (worker.params, worker.taken))
        cut = work.take(self.rule, Worker(params, (), taken, ()), before, after, at)
        return worker._replace(
            params=parts.put(worker.params, part, cut.params),
            taken=parts.put(worker.taken, part, cut.taken),
        )


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
