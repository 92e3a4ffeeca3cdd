# SPDX-License-Identifier: Apache-2.0
"""What happens to the arrays of a worker and of the center, whoever says when.

`asynchronous` calls it in a given order of workers, `decoupled` in that of a clock.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from optx_sync.center import coded, contract
from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Round
from optx_sync.center.fragments import Partition
from optx_sync.center.worker import Center, Worker
from optx_sync.checks import check_grads
from optx_sync.exchange.contract import Exchange
from optx_sync.simulate.replay import GradFn
from optx_sync.trees import Tree, is_nothing, where


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
        keeps_taken = work.takes_center(rule) or contract.keeps_before(rule)
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

    def bytes_of_parts(self, center: Tree) -> list[float]:
        """The bytes of a contribution to each part."""
        messages = functools.partial(coded.message_shapes, self.exchange)
        parts = self.parts.split(center)
        return [float(coded.bytes_of(messages(part))) for part in parts]

    def of_part(self, handler: Callable, part: jax.Array, *operands: Any) -> Any:
        """Call `handler(part, *operands)` with the part as a number of Python."""
        numbers = range(self.parts.number)
        branches = [functools.partial(handler, number) for number in numbers]
        return jax.lax.switch(part, branches, *operands)

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
        messages, kept = coded.encoded(self.exchange, brought, self.of(codes, part))
        brought = coded.decoded(self.exchange, messages, brought)
        return brought, self.with_(codes, part, kept)

    def seen(self, part: int, center: Center) -> Center:
        """A part of the center."""
        value, outer = center
        return Center(self.parts.pick(value, part), self.of(outer, part))

    def absorbed(
        self, before: Center, total: Tree, counts: Any, **extra: Any
    ) -> Center:
        """A part of the center with a contribution, if it counts; `None`: it does."""
        after = work.absorb(self.rule, before, total, **extra)
        return after if counts is None else where(counts, after, before)

    def moved(self, part: int, center: Center, after: Center) -> Center:
        """The center with a new part."""
        value = self.parts.put(center.value, part, after.value)
        return Center(value, self.with_(center.outer, part, after.outer))

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

    def of(self, states: Tree, part: int) -> Tree:
        """The state of a part, as `Partition.each` made them; () of ()."""
        whole = self.parts.number == 1 or is_nothing(states)
        return states if whole else states[part]

    def with_(self, states: Tree, part: int, state: Tree) -> Tree:
        """The states with a new one for a part."""
        if self.parts.number == 1 or is_nothing(states):
            return state
        return (*states[:part], state, *states[part + 1 :])
