# SPDX-License-Identifier: Apache-2.0
"""What a worker holds of its own under a rule: steps, what it sends, what it takes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.coded import encoded, plus_decoded, start_codes
from optx_sync.center.contract import CenterRule, Period, Round, keeps_before
from optx_sync.exchange.contract import Exchange
from optx_sync.runtime.agreements import contract
from optx_sync.runtime.agreements.arrays import arrays_of, tree_of
from optx_sync.runtime.agreements.saved import like, numbered
from optx_sync.runtime.messages import Arrays, Reply
from optx_sync.runtime.parts import Layout
from optx_sync.trees import Tree


class Traffic(NamedTuple):
    """The arrays that travel under a rule: only those that its formulas read."""

    sends: tuple[str, ...]  # "contribution", or fields of `Own`
    replies: tuple[str, ...]  # "before" or "after", the center around the round


class Terms(NamedTuple):
    """The settings of a center that server and workers share."""

    rule: CenterRule
    at: Round
    exchange: Exchange | None = None  # of pushes
    pulls: Exchange | None = None  # of answers


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
    """A worker's arrays under a rule."""

    params: Tree
    taken: Tree
    accumulated: Tree
    inner_state: Tree

    def __init__(
        self,
        shapes: Tree,
        inner: optax.GradientTransformationExtraArgs,
        layout: Layout,
        terms: Terms,
        rule: CenterRule,
        between: Period,
    ):
        self.like: Tree = shapes
        self.inner: optax.GradientTransformationExtraArgs = inner
        self.layout: Layout = layout
        self.rule: CenterRule = rule  # that of the server, and `keep_local`
        self.at: Round = terms.at
        self.exchange: Exchange | None = terms.exchange
        self.pulls: Exchange | None = terms.pulls
        self.between: Period = between  # steps between the pushes of two parts
        self.traffic: Traffic = traffic(terms.rule)
        self._walk = jax.jit(self._run_walk)
        self._bring = jax.jit(self._run_bring, static_argnums=0)
        self._take = jax.jit(self._run_take, static_argnums=0)

    def start(self, parts: dict[int, Arrays], place: contract.Place) -> None:
        """Begin with the center."""
        self.taken = place(self.layout.join(parts, self.like))
        self.params = jax.tree.map(
            lambda c, p: c.astype(p.dtype), self.taken, self.like
        )
        self._start_own()

    def _start_own(self) -> None:
        self.accumulated = work.start_accumulated(self.rule, self.taken)
        self.inner_state = self.inner.init(self.params)
        parts = range(len(self.layout.owners))
        self.steps: int = 0
        self.ages: list[int] = [0 for _ in parts]
        # The memory of each part's code; advanced once a push is applied.
        self.codes: list[Tree] = [()] * len(parts)
        if self.exchange is not None:
            picked = (self.layout.pick(self.taken, part) for part in parts)
            self.codes = [start_codes(self.exchange, part) for part in picked]
        # The push under way of each part: its steps, its sums, and the memory of its
        # code after it.
        self.sent: dict[int, tuple[int, Tree, Tree]] = {}

    def place(self, place: contract.Place) -> None:
        """Shard all arrays over devices."""
        self.params, self.taken = place(self.params), place(self.taken)
        self._start_own()

    def state(self) -> Arrays:
        """The leaves of the inner state, for a successor."""
        return numbered(self.inner_state)

    def go_on(self, state: Arrays) -> None:
        """Continue with a predecessor's inner state."""
        self.inner_state = jax.tree.map(
            lambda x, fresh: jax.device_put(x, fresh.sharding),
            like(self.inner_state, state),
            self.inner_state,
        )

    def step(self, grads: Tree, step: int) -> bool:
        """Make a step; return whether a part is due."""
        self.steps += 1
        self.ages = [age + 1 for age in self.ages]
        self.params, self.inner_state, self.accumulated = self._walk(
            self.params, self.inner_state, self.taken, self.accumulated, grads,
            jnp.int32(self.steps),
        )  # fmt: skip
        if isinstance(self.between, int):
            return self.steps >= self.between
        return bool(work.is_due(self.between, self.steps, jnp.int32(step)))

    def _run_walk(self, params, inner_state, taken, accumulated, grads, steps):
        at = self.at._replace(steps=steps)
        worker = work.Worker(params, inner_state, taken, accumulated)
        worker = work.walk(self.inner, self.rule, worker, taken, grads, at)
        return worker.params, worker.inner, worker.accumulated

    def outgoing(self, part: int) -> tuple[dict[str, Arrays], int]:
        """(the arrays to push of a part, the steps since its last push)."""
        age, summed = self.ages[part], self.accumulated
        sent, codes, self.accumulated = self._bring(
            part, self.params, self.taken, summed, self.codes[part], jnp.int32(age)
        )
        self.sent[part] = age, summed, codes
        self.ages[part] = self.steps = 0
        return {name: arrays_of(tree) for name, tree in sent.items()}, age

    def _run_bring(self, part, params, taken, accumulated, codes, steps):
        whole, pick = accumulated, lambda tree: self.layout.pick(tree, part)
        params, taken, accumulated = map(pick, (params, taken, accumulated))
        x = work.as_center(params, taken)
        at = self.at._replace(steps=steps)
        worker = work.Worker(params, (), taken, accumulated)
        # A formula that reads the center runs at the server; here any array will do.
        worker, total = work.bring(self.rule, worker, x, at)
        if self.traffic.sends == ("contribution",):
            total = work.share_of_one(self.rule, total, at)
            if self.exchange is not None:
                total, codes = encoded(self.exchange, total, codes)
            sent = {"contribution": total}
        else:
            fields = {"params": x, "taken": taken, "accumulated": accumulated}
            sent = {name: fields[name] for name in self.traffic.sends}
        return sent, codes, self.layout.whole.put(whole, part, worker.accumulated)

    def give_back(self, part: int) -> None:
        """Take back the last push of a part, which was refused."""
        age, summed, _ = self.sent.pop(part)
        self.ages[part] += age
        self.steps = max(self.steps, self.ages[part])  # The part is due again.
        pick, put = self.layout.pick, self.layout.whole.put
        both = jax.tree.map(jnp.add, pick(self.accumulated, part), pick(summed, part))
        self.accumulated = put(self.accumulated, part, both)

    def land(self, part: int, reply: Reply, place: contract.Place) -> None:
        """Take the reply. What a code owes changes with a push that was used."""
        like = self.layout.pick(self.like, part)
        age, _, codes = self.sent.pop(part)
        if reply.used:
            self.codes[part] = codes
        params, taken = self._take(
            part,
            self.params,
            self.taken,
            {name: tree_of(arrays, like) for name, arrays in reply.arrays.items()},
            jnp.int32(age),
        )
        self.params, self.taken = place(params), place(taken)

    def _run_take(self, part, params, taken, centers, steps):
        pick, put = self.layout.pick, self.layout.whole.put
        x = work.as_center(pick(params, part), pick(taken, part))
        if "change" in centers and self.pulls is not None:
            (name,) = self.traffic.replies
            known = pick(taken, part)
            centers = {name: plus_decoded(self.pulls, centers["change"], known)}
        # A formula does not read what is not sent.
        before, after = centers.get("before", x), centers.get("after", x)
        worker = work.Worker(pick(params, part), (), (), ())
        at = self.at._replace(steps=steps)
        worker = work.take(self.rule, worker, before, after, at)
        took = centers.get("after" if work.takes_center(self.rule) else "before")
        if took is not None:
            taken = put(taken, part, took)
        return put(params, part, worker.params), taken
