# SPDX-License-Identifier: Apache-2.0
"""What a worker holds of its own under a rule: steps, what it sends, what it takes."""

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center import worker as work
from optx_sync.center.contract import CenterRule, Period, Round, keeps_before
from optx_sync.center.fragments import steps_between
from optx_sync.core.trees import Tree, is_nothing
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings import alone
from optx_sync.meetings.coded import compile_plus_decoded, encoded, start_codes
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime.agreements import contract
from optx_sync.runtime.agreements.arrays import arrays_of, beside, copied
from optx_sync.runtime.agreements.memory import Received, Sharing
from optx_sync.runtime.messages import Arrays, Reply
from optx_sync.runtime.parts import PartsLayout, tree_of


class Traffic(NamedTuple):
    """The arrays that travel under a rule: only those that its formulas read."""

    sends: tuple[str, ...]  # "contribution", or fields of `Own`
    replies: tuple[str, ...]  # "before" or "after", the center around the round


class Terms(NamedTuple):
    """The settings of a center that server and workers share."""

    rule: CenterRule
    at: Round
    exchange: Exchange | None  # of pushes
    pulls: Exchange | None  # of answers
    period: Period
    delay: int  # the workers' steps from a push until they take the answer
    meet: Quorum


def traffic(rule: CenterRule) -> Traffic:
    """The arrays that a worker and the server send each other under a rule."""
    sends: tuple[str, ...] = ("contribution",)
    if "center" in rule.reads:
        held = ("params", "taken") + ("accumulated",) * (rule.accumulate is not None)
        sends = tuple(name for name in held if name in rule.reads)
    if rule.take is None:
        return Traffic(sends, ("after",))
    names = {
        "before": "before" in rule.reads or keeps_before(rule),
        "after": "after" in rule.reads,
    }
    return Traffic(sends, tuple(name for name, wanted in names.items() if wanted))


class OfCenter:
    """A worker's arrays under a rule.

    A step is one program, and so is what a worker takes from an answer. `params` are
    never donated once a user may have them; what no user sees is computed into the
    memory of the arrays before it.
    """

    def __init__(
        self,
        shapes: Tree,
        inner: optax.GradientTransformationExtraArgs,
        layout: PartsLayout,
        terms: Terms,
    ):
        self.like: Tree = shapes
        self.inner: optax.GradientTransformationExtraArgs = inner
        self.layout: PartsLayout = layout
        self.terms: Terms = terms
        # Steps between the pushes of two parts.
        self.between: Period = steps_between(
            terms.period, len(layout.turns), terms.delay
        )
        self.traffic: Traffic = traffic(terms.rule)
        # Whether the parameters that a push is made of are replaced in the same step.
        self.hides: bool = terms.delay == 0
        # Whether a late answer leaves what was made since the push, as `take` does.
        self.adds: bool = terms.meet.shared and terms.rule.take is None
        # The center that a worker keeps; with codes the one that they change.
        self.keeps: str = "after" if terms.rule.take is None else ""
        if keeps_before(terms.rule):
            self.keeps = "before"
        self._plus = None
        if terms.pulls is not None:
            (self.keeps,) = self.traffic.replies
            self._plus = compile_plus_decoded(terms.pulls)
        self._go = Sharing(self._run_go)
        self._take = Sharing(self._run_take)

    def start(self, parts: dict[int, Arrays], place: contract.Place) -> None:
        """Begin with the center."""
        self.taken: Tree = place(self.layout.join(parts, self.like))
        self.params: Tree = work.round_like(self.taken, self.like)
        self._start_own()

    def _start_own(self) -> None:
        self.accumulated: Tree = work.start_accumulated(self.terms.rule, self.taken)
        # Some states hold the parameters that they were made for.
        self.inner_state: Tree = copied(self.inner.init(self.params))
        parts = range(len(self.layout.owners))
        self.steps: int = 0
        self.ages: list[int] = [0 for _ in parts]
        # The memory of each part's code; advanced once a push is applied.
        self.codes: list[Tree] = [()] * len(parts)
        if self.terms.exchange is not None:
            picked = (self.layout.pick(self.taken, part) for part in parts)
            self.codes = [start_codes(self.terms.exchange, part) for part in picked]
        held = self.accumulated, self.inner_state, self.codes
        self.accumulated, self.inner_state, self.codes = beside(held, self.params)
        self.sent: dict[int, contract.Sent] = {}  # by part
        self.received: list[Received] = [Received() for _ in parts]
        # Arrays that no user has seen and that nobody needs any more: of each part what
        # was summed up and contributed; and parameters that were replaced at once.
        self.spare: dict[int, tuple[Tree, Tree]] = {}
        self.unseen: Tree = None

    def place(self, place: contract.Place) -> None:
        """Shard all arrays over devices."""
        self.params, self.taken = place(self.params), place(self.taken)
        self.hides = False  # Laying them out again may share their memory.
        self._start_own()

    def is_due(self, step: int) -> bool:
        """Whether a part is due with the next step, which has this number (0-based)."""
        return bool(work.is_due(self.between, self.steps + 1, jnp.int32(step)))

    def step(self, grads: Tree, parts: tuple[int, ...]) -> None:
        """Make a step, and prepare the pushes of these parts."""
        self.steps += 1
        self.ages = [age + 1 for age in self.ages]
        self._advance(parts, True, grads)

    def outgoing(self, parts: tuple[int, ...]) -> dict[int, contract.Sent]:
        """The pushes of these parts."""
        if not self.sent.keys() >= {*parts}:
            self._advance(parts, False, ())
        return {part: self.sent[part] for part in parts}

    def _advance(self, parts: tuple[int, ...], walks: bool, grads: Tree) -> None:
        ages = {part: self.ages[part] for part in parts}
        codes = {part: self.codes[part] for part in parts}
        spare = {part: self.spare.pop(part, None) or self._empty(part) for part in ages}
        # Answers replace all parameters of a push, unless it was refused or dropped.
        if any(map(operator.is_, *map(jax.tree.leaves, (self.params, self.unseen)))):
            self.unseen = None
        unseen, hides = (), self.hides and walks and len(parts) == len(self.ages)
        if hides:
            unseen = self.unseen
            if unseen is None:
                unseen = jax.tree.map(jnp.zeros_like, self.params)
        held, sent = self._go(
            (walks, parts),
            (self.params, self.taken),
            (grads, codes, np.int32(self.steps), jax.tree.map(np.int32, ages)),
            (self.inner_state, self.accumulated, spare, unseen),
        )
        self.inner_state, self.accumulated, kept, params = held
        self.params = params if walks else self.params
        self.unseen = params if hides else self.unseen
        for part, (fields, codes_after) in sent.items():
            arrays = {name: arrays_of(tree) for name, tree in fields.items()}
            then = self.params if self.adds else ()
            now = contract.Sent(arrays, ages[part], kept[part], codes_after, then)
            self.sent[part] = now
            self.ages[part] = self.steps = 0

    def _empty(self, part: int) -> tuple[Tree, Tree]:
        """Memory for what a part sums up and contributes."""
        plain = self.traffic.sends == ("contribution",) and self.terms.exchange is None
        trees = self.accumulated, self.taken if plain else ()
        summed, contributed = (self.layout.pick(tree, part) for tree in trees)
        return jax.tree.map(jnp.zeros_like, (summed, contributed))

    def _run_go(self, fixed, passing, read, donated):
        (walks, parts), (params, taken) = fixed, passing
        (grads, codes, steps, ages), (inner_state, accumulated, *_) = read, donated
        if walks:
            worker = work.Worker(params, inner_state, taken, accumulated)
            at = self.terms.at._replace(steps=steps)
            worker = work.walk(self.inner, self.terms.rule, worker, taken, grads, at)
            params, inner_state, _, accumulated = worker
        kept, sent = {}, {}
        for part in parts:
            accumulated, kept[part], sent[part] = self._bring(
                part, params, taken, accumulated, codes[part], ages[part]
            )
        return (inner_state, accumulated, kept, params if walks else ()), sent

    def _bring(self, part, params, taken, accumulated, codes, steps):
        whole, pick = accumulated, lambda tree: self.layout.pick(tree, part)
        params, taken, accumulated = map(pick, (params, taken, accumulated))
        x = work.as_center(params, taken)
        at = self.terms.at._replace(steps=steps)
        worker = work.Worker(params, (), taken, accumulated)
        # A formula that reads the center runs at the server; here any array will do.
        worker, total = work.bring(self.terms.rule, worker, x, at)
        contributed = ()
        if self.traffic.sends == ("contribution",):
            contributed = alone.share_of_one(self.terms.rule, total, at)
            sent = {"contribution": contributed}
            if self.terms.exchange is not None:
                message, codes = encoded(self.terms.exchange, contributed, codes)
                contributed, sent = (), {"contribution": message}
        else:
            fields = {"params": x, "taken": taken, "accumulated": accumulated}
            sent = {name: fields[name] for name in self.traffic.sends}
        whole = self.layout.whole.put(whole, part, worker.accumulated)
        return whole, (accumulated, contributed), (sent, codes)

    def give_back(self, part: int) -> None:
        """Take back the last push of a part, which was refused."""
        sent = self.sent.pop(part)
        self.spare[part] = sent.kept
        self.ages[part] += sent.steps
        self.steps = max(self.steps, self.ages[part])  # The part is due again.
        since, (before, _) = self.layout.pick(self.accumulated, part), sent.kept
        both = jax.tree.map(jnp.add, since, before)
        self.accumulated = self.layout.whole.put(self.accumulated, part, both)

    def land(self, part: int, reply: Reply, place: contract.Place) -> None:
        """Take the reply. What a code owes changes with a push that was used.

        What was made since the push is overwritten, but not by an answer that is late.
        """
        shapes = self.layout.pick(self.like, part)
        sent = self.sent.pop(part)
        if reply.used:
            self.codes[part] = sent.codes
        self.spare[part] = sent.kept
        kept, read = {}, {}
        for name, arrays in reply.arrays.items():
            if name == "change" and self._plus is not None:
                known = self.layout.pick(self.taken, part)
                kept[self.keeps] = self._plus(tree_of(arrays, shapes), known)
            elif name == self.keeps:
                center = self.received[part].tree(arrays, shapes)
                kept[name] = beside(center, self.params)
            else:
                read[name] = tree_of(arrays, shapes)
        passing = self.params, self.taken, kept, sent.then if self.is_late(part) else ()
        _, (params, taken) = self._take(part, passing, (read, np.int32(sent.steps)))
        self.params, self.taken = place(params), place(taken)
        if read:  # Views, which the next answer overwrites.
            jax.block_until_ready(params)

    def is_late(self, part: int) -> bool:
        """Whether more steps than `delay` followed the last push of a part."""
        return self.ages[part] > self.terms.delay

    def _run_take(self, part, passing, read, donated):
        (params, taken, kept, then), (others, steps) = passing, read
        centers, pick, put = {**kept, **others}, self.layout.pick, self.layout.whole.put
        worker, known = work.Worker(pick(params, part), (), (), ()), pick(taken, part)
        # A formula does not read what is not sent.
        x = work.as_center(worker.params, known)
        before, after = centers.get("before", x), centers.get("after", x)
        at = self.terms.at._replace(steps=steps)
        then = () if is_nothing(then) else pick(then, part)
        worker = work.take(self.terms.rule, worker, before, after, at, then)
        if self.keeps in centers:
            taken = put(taken, part, centers[self.keeps])
        return (), (put(params, part, worker.params), taken)
