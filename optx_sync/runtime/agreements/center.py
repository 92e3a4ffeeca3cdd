# SPDX-License-Identifier: Apache-2.0
"""The center under a rule, as its server holds it."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.center import worker as work
from optx_sync.center.contract import Round
from optx_sync.core.trees import Tree, is_finite, where
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings import alone, coded
from optx_sync.runtime.agreements import saved
from optx_sync.runtime.agreements.arrays import copied, own_buffers
from optx_sync.runtime.agreements.contract import AtOnce
from optx_sync.runtime.agreements.own import Terms, Traffic, traffic
from optx_sync.runtime.agreements.pushes import Expected, ExpectedCodes, bound
from optx_sync.runtime.agreements.saved import Notes
from optx_sync.runtime.messages import OVERFLOW, Arrays, Push, PushRefused, Reply
from optx_sync.runtime.parts import Variables, shapes_of
from optx_sync.runtime.system import here


class CodedAnswers:
    """Coded answers: each worker's copy of the center, and its next difference.

    What a code loses in one answer is part of the next difference, so no error grows.
    Each push names the answer that the worker took last; if it is another one than the
    server expects, as after a death or a lost answer, the answer is whole arrays.
    """

    def __init__(self, exchange: Exchange, variables: Variables):
        self.exchange = exchange
        self.variables = variables
        self.known: dict[int, tuple[int, Tree]] = {}  # by worker: (answer, center)
        # Answers of all servers of a run have different numbers.
        self._numbers = itertools.count(here().stamp())
        self._encode: Any = jax.jit(self._run_encode)
        self._plus = coded.compile_plus_decoded(exchange)

    def answer(self, worker: int, took: int, name: str, center: Arrays) -> Reply:
        """The answer to a worker: whole arrays under this name, or their difference."""
        number, known = self.known.pop(worker, (0, ()))
        if took and took == number:
            messages = self._encode(self.variables.tree(center), known)
            known = self._plus(messages, known)
            name, center = "change", self.variables.arrays(messages)
            # The center may be overwritten after the answer.
            jax.block_until_ready(known)
        else:
            known = copied(self.variables.tree(center))
        self.known[worker] = next(self._numbers), known
        arrays = {path: np.array(x) for path, x in center.items()}
        return Reply({name: arrays}, 0, 0, number=self.known[worker][0])

    def _run_encode(self, center, known):
        lacking = jax.tree.map(jnp.subtract, center, known)
        nothing = coded.start_codes(self.exchange, lacking)
        messages, _ = coded.encoded(self.exchange, lacking, nothing)
        return messages


class Center(AtOnce):
    """The center under a rule, as its server holds it.

    Contributions that are only added are added in place. Otherwise the next center is
    computed beside this one, in buffers that are no longer needed, so that a result
    that is not finite can be discarded.
    """

    def __init__(self, params: Tree, terms: Terms, copy_replies: bool):
        rule, at = terms.rule, terms.at
        center = work.start_center(params)
        self.variables: Variables = Variables(center)
        self.rule = rule
        self.at = at
        self.copy_replies = copy_replies
        self.traffic: Traffic = traffic(rule)
        self.expected: Expected = Expected(self.traffic.sends, center)
        if terms.exchange is not None:
            sends, shapes = self.traffic.sends, shapes_of(center)
            self.expected = ExpectedCodes(sends, shapes, terms.exchange)
        self.answers: CodedAnswers | None = None
        if terms.pulls is not None:
            # Refuses arrays that it cannot code.
            coded.message_shapes(terms.pulls, center)
            self.answers = CodedAnswers(terms.pulls, self.variables)
        self.global_step: int = 0
        # The center before each worker's last push, for a retry of that push.
        self.kept: dict[int, Arrays] = {}
        # Rounds that were not dropped: in all, and when each worker took the center.
        self.applied: int = 0
        self.seen: list[int] = [0] * at.num_workers
        # A contribution made at the server is not divided yet.
        self.at_server: bool = self.traffic.sends != ("contribution",)
        # Workers whose last contribution was dropped.
        self.dropped: set[int] = set()
        self.keeps_before: bool = "before" in self.traffic.replies
        self.outer: Tree = () if rule.outer is None else copied(rule.outer.init(center))
        self._begin(self.variables.arrays(center))
        self._step: Any = jax.jit(self._next, donate_argnums=(2, 3), keep_unused=True)

    @property
    def adds(self) -> bool:
        """Whether a push is only added, in place."""
        rule = self.rule
        return rule.outer is None and rule.weigh is None and not self.at_server

    def _begin(self, center: Arrays) -> None:
        """Hold this center; the one before it is no longer needed."""
        self.spare: list[Arrays] = []  # buffers that may be overwritten
        self.spare_outer: Tree = jax.tree.map(jnp.empty_like, self.outer)
        own = functools.partial(np.array, order="C") if self.adds else jnp.array
        self.center: Arrays = jax.tree.map(own, center)
        self.bounds: dict[str, float] = {}
        if self.adds:
            self.bounds = jax.tree.map(bound, self.center)

    def _next(self, center, outer, spare, spare_outer, sent, known):
        given = (center, outer, sent)
        center = self.variables.tree(center)
        before = work.Center(center, outer)
        at = self.at._replace(**known)
        total = self.contribution(sent, center, at)
        if self.at_server:
            total = alone.share_of_one(self.rule, total, at)
        total, counts = alone.weigh_alone(self.rule, total, at)
        after = alone.absorb(self.rule, before, total, num_workers=at.num_workers)
        if self.rule.weigh is not None:
            after = where(counts, after, before)
        center, outer = after
        # A sum of squares is finite only if its terms are, and is faster than a test of
        # each.
        squares = sum(jnp.vdot(x, x).real for x in jax.tree.leaves(center))
        held = own_buffers((self.variables.arrays(center), outer), given)
        return *held, squares, counts

    def contribution(self, sent: dict[str, Arrays], center: Tree, at: Round) -> Tree:
        """What a push contributes: as it came, or made of the worker's arrays here."""
        trees = {name: self.variables.tree(arrays) for name, arrays in sent.items()}
        if not self.at_server:
            return trees["contribution"]
        # The center stands in for arrays that the formula does not read.
        params, taken, accumulated = (
            trees.get(name, center) for name in ("params", "taken", "accumulated")
        )
        return work.contribute(self.rule, params, taken, accumulated, center, at)

    def absorb(self, worker: int, push: Push, sizes: dict[str, float]) -> Reply:
        """Compute the next center, and the reply to the worker.

        `sizes` are bounds of the arrays' elements, from `Expected.read`.

        Raises:
            PushRefused: The center would overflow; nothing is changed.
        """
        before, sent = self.center, push.arrays
        if self.adds and not self._has_room(sent["contribution"], sizes):
            raise PushRefused(OVERFLOW)
        spare, counts = self.spare.pop() if self.spare else self._buffers(), True
        if not self.adds:
            known = said(push) | {"staleness": np.int32(self.staleness(worker))}
            center, outer, squares, counts = self._step(
                before, self.outer, spare, self.spare_outer, sent, known
            )
            self.spare_outer = outer
            # Squares of finite terms may overflow.
            if not np.isfinite(squares) and not is_finite(center):
                self.spare.append(center)
                raise PushRefused(OVERFLOW)
            self.spare_outer, self.outer = self.outer, outer
            self.center = center
        else:
            self.center = spare
            for path, added in sent["contribution"].items():
                np.add(before[path], added, out=self.center[path])
        free = before
        if self.keeps_before:
            free, self.kept[worker] = self.kept.get(worker), before
        if free is not None and (free is not self.center):
            self.spare.append(free)
        self.global_step += 1
        self.applied += int(counts)
        self.seen[worker] = self.applied
        if not counts:
            return self._answer_dropped(worker, push, before)
        self.dropped.discard(worker)
        self.tell(worker, push.leases, "absorbed")
        return self._reply(worker, before, push.confirms)

    def drop(self, worker: int, push: Push) -> Reply:
        """Answer a push that is not to be absorbed, with the center as it is."""
        self.kept.pop(worker, None)
        self.seen[worker] = self.applied
        return self._answer_dropped(worker, push, self.center)

    def _note_dropped(self, worker: int, push: Push) -> None:
        self.dropped.add(worker)
        self.tell(worker, push.leases, "dropped")

    def _answer_dropped(self, worker: int, push: Push, before: Arrays) -> Reply:
        self._note_dropped(worker, push)
        return self._reply(worker, before, push.confirms)._replace(used=False)

    def _has_room(self, added: Arrays, sizes: dict[str, float]) -> bool:
        """Whether no sum can overflow."""
        new = {path: self.bounds[path] + sizes[path] for path in added}
        for path, size in new.items():
            center = self.center[path]
            if size < float(np.finfo(center.dtype).max):
                continue
            with np.errstate(over="ignore"):
                new[path] = float(np.abs(center + added[path]).max(initial=0))
            if not np.isfinite(new[path]):
                return False
        self.bounds.update(new)
        return True

    def _buffers(self) -> Arrays:
        if self.adds and not self.keeps_before:
            return self.center  # Added in place.
        return jax.tree.map(np.empty_like if self.adds else jnp.empty_like, self.center)

    def _reply(self, worker: int, before: Arrays, took: int = 0) -> Reply:
        centers = {"before": before, "after": self.center}
        if self.answers is not None:
            (name,) = self.traffic.replies
            reply = self.answers.answer(worker, took, name, centers[name])
            return reply._replace(global_step=self.global_step)
        arrays = {name: self._out(centers[name]) for name in self.traffic.replies}
        return Reply(arrays, self.global_step, 0)

    def _out(self, arrays: Arrays) -> Arrays:
        return jax.tree.map(np.array if self.copy_replies else np.asarray, arrays)

    def reply_again(self, worker: int) -> Reply:
        """The reply to a push that is sent again."""
        # After a restart none is kept, and the current center serves as well.
        reply = self._reply(worker, self.kept.get(worker, self.center))
        return reply._replace(used=worker not in self.dropped)

    def join(self, worker: int) -> None:
        """Note that a worker starts and takes the center."""
        self.seen[worker] = self.applied

    def staleness(self, worker: int) -> int:
        """The rounds since a worker last took the center that were not dropped."""
        return self.applied - self.seen[worker]

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker must wait for a token: never."""
        return False

    def release(self, left: set[int]) -> None:
        """Forget workers that have left."""
        if self.answers is not None:
            for worker in left:
                self.answers.known.pop(worker, None)

    def current(self) -> Arrays:
        """The arrays for a worker that starts."""
        return self._out(self.center)

    def averages_tree(self) -> Tree:
        """No moving averages."""
        return None

    def describe(self) -> str:
        """The names of the rule's formulas, and the outer state."""
        rule = self.rule
        formulas = [rule.contribute, rule.take, rule.mean_over, rule.accumulate]
        formulas += [] if rule.weigh is None else [rule.weigh]
        return saved.described("center", formulas, self.outer)

    def save(self) -> tuple[dict[str, Arrays], Notes]:
        """The arrays and notes for a checkpoint."""
        center = jax.tree.map(np.asarray, self.center)
        arrays = {"center": center, "outer": saved.numbered(self.outer)}
        dropped = sorted(self.dropped)
        return arrays, {"global_step": self.global_step, "dropped": dropped}

    def load(self, arrays: dict[str, Arrays], notes: Notes) -> None:
        """Restore from a checkpoint."""
        saved.check_saved(self.center, arrays["center"])
        self.outer = saved.like(self.outer, arrays.get("outer", {}))
        self._begin(arrays["center"])
        self.kept = {}
        self.dropped = set(notes.get("dropped", ()))
        self.global_step = int(notes["global_step"])
        self.seen = [self.applied] * self.at.num_workers


def said(push: Push) -> dict[str, np.generic]:
    """What a push says of its `Round`."""
    steps, number = np.int32(push.steps), np.int32(push.round)
    return {"steps": steps, "tokens": np.float32(push.tokens), "num_pushed": number}
