# SPDX-License-Identifier: Apache-2.0
"""The phases of a round: bring, agree, land, settle. `Meeting` is that of lockstep.

A round calls each phase once, for the part of the parameters that meets. The kind of
round (`at_once`, `later`, `in_line`) says which phases stand together, and in which
conditional; where the center lies and how a worker sees it, its landing.
"""

from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optx_sync.center import worker as work
from optx_sync.center.buffers import Outgoing, Pending
from optx_sync.center.contract import CenterRule, InnerState, Round
from optx_sync.center.fragments import Whole
from optx_sync.center.landing import Landing
from optx_sync.center.rounds.turns import Now
from optx_sync.center.state import norm_of
from optx_sync.center.worker import Center
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import reduce
from optx_sync.comm.varying import everywhere, localize, vary_like
from optx_sync.exchange.agree import agree
from optx_sync.exchange.contract import Exchange
from optx_sync.placement import memory
from optx_sync.shapes import Array, Int32
from optx_sync.trees import Tree, is_finite, is_floating, is_inexact, where

OnItsWay: TypeAlias = Pending | Outgoing | tuple[()]


class Step(NamedTuple):
    """What is known of the current step."""

    num_workers: int
    period: int | None  # in steps; None for a schedule
    due: bool | jax.Array  # bool or bool[], whether workers meet in this step
    steps: (
        jax.Array
    )  # int32[], the workers' steps since their last round, this one included
    ages: Any  # int32[P], steps since each part met; () where there is one part
    rounds: Int32[Array, ""]  # rounds before this step
    quiet: Int32[Array, ""]  # steps between the last round and this step
    parts: Whole
    params: Tree  # as given to the step; their types say how a worker is sharded
    alike: bool  # whether all weights are 0 or 1
    extra_args: dict[str, Any]
    # What a rule may know of a worker that comes alone, by its name in a `Round`:
    # [P] each, one entry for each part.
    alone: dict[str, jax.Array]

    def at(self, part: int) -> Round:
        """What a rule may know of the meeting of a part."""
        if self.parts.number == 1:
            return Round(self.num_workers, self.period, self.steps, **self.alone)
        of_part = {name: x[part] for name, x in self.alone.items()}
        return Round(self.num_workers, self.period, self.ages[part], **of_part)

    def part(self, ago: int = 0) -> int | jax.Array:
        """The part that meets in the next exchange, or did so many exchanges before."""
        number = self.parts.number
        return (self.rounds - ago) % number if number > 1 else 0

    def met(self) -> jax.Array:
        """Which parts have met in this step: bool[P], or bool[] for a single part."""
        due = jnp.asarray(self.due)
        if self.parts.number == 1:
            return due
        return due & (jnp.arange(self.parts.number, dtype=jnp.int32) == self.part())


class Phases(Protocol):
    """What a worker does in a round, once for each part that meets."""

    @property
    def drop_nonfinite(self) -> bool:
        """Whether a worker that is not finite is left out."""
        ...

    def remember(self, part: Tree) -> Tree:
        """What the exchange of a part remembers before the first round."""
        ...

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, what this worker contributes)."""
        ...

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """(now, the sum or mean for the center, the sum of weights or ())."""
        ...

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The center absorbs the contributions, and this worker takes from it."""
        ...

    def settle(self, now: Now, walked: Tree, center: Tree) -> Now:
        """The other effects of a round on a worker that held `walked` before it."""
        ...


class Rounds(Protocol):
    """When the phases of a round happen."""

    def start(self, parts: Whole, center: Tree, held: Tree) -> tuple[OnItsWay, Tree]:
        """(what is pending, what the exchange remembers) before the first round.

        Args:
            parts: The parts of the parameters.
            center: The whole center.
            held: The center as a worker holds it: whole, or its pieces.
        """
        ...

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        ...


class Meeting(NamedTuple):
    """The phases of a round in lockstep, by the arguments of `center_variable`."""

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    axis_name: AxisName
    exchange: Exchange
    inner_state: InnerState
    drop_nonfinite: bool
    measure: bool
    landing: Landing

    def remember(self, part: Tree) -> Tree:
        """What the exchange of a part remembers before the first round."""
        return self.exchange.init(part)

    def bring(self, now: Now, step: Step, part: int) -> tuple[Now, Tree]:
        """(now, what this worker contributes)."""
        seen = self.landing.seen(now)
        worker, contribution = self.landing.bring(now, seen, step.at(part))
        contribution = localize(contribution, self.axis_name)
        info = now.info
        if self.measure:
            x = work.as_center(now.worker.params, seen)
            apart = jax.tree.map(jnp.subtract, x, seen)
            info = info._replace(distance=norm_of(apart, like=info.distance))
        now = now._replace(worker=worker, info=info)
        return self.leave_out(now, step, contribution), contribution

    def leave_out(self, now: Now, step: Step, contribution: Tree) -> Now:
        """Weight 0 for a worker that is not finite, with `drop_nonfinite`."""
        if not self.drop_nonfinite:
            return now
        finite = everywhere(is_finite(contribution), step.params, self.axis_name)
        well = localize(now.well & finite, self.axis_name)
        weight = jnp.where(well, now.weight, jnp.zeros_like(now.weight))
        return now._replace(well=well, weight=weight)

    def agree(self, now: Now, step: Step, contribution: Tree) -> tuple[Now, Tree, Any]:
        """(now, the sum or mean for the center, the sum of weights or ())."""
        agreed = agree(
            self.exchange,
            self.landing.of(now, step.at(0)),
            contribution,
            now.exchange,
            now.info,
            weight=now.weight,
            alike=step.alike,
            summed=self.rule.mean_over is None,
        )
        now = now._replace(exchange=agreed.memory, info=agreed.info)
        return now, agreed.mean, agreed.weight if self.drop_nonfinite else ()

    def land(self, now: Now, step: Step, total: Tree, pushed: Any, at: Round) -> Now:
        """The center absorbs the contributions, and this worker takes from it."""
        landing, held = self.landing, now.center
        before, (total, _) = landing.open(held), landing.open(Center(total, ()))
        extra = self.extra_args(step, now.weight)
        after = work.absorb(self.rule, before, vary_like(total, before.value), **extra)
        if self.drop_nonfinite:
            after = where(pushed > 0, after, before)
        info = now.info
        if self.measure:
            change = jax.tree.map(jnp.subtract, after.value, before.value)
            norm = landing.norm(change, info.measured.update_norm)
            info = info._replace(measured=info.measured._replace(update_norm=norm))
        now = now._replace(center=landing.close(after, held), info=info)
        worker = work.take(self.rule, now.worker, *landing.taken(now, before), at)
        return now._replace(worker=worker)

    def settle(self, now: Now, walked: Tree, center: Tree) -> Now:
        """The other effects of a round on a worker; a broken one starts again.

        Args:
            now: After the other phases, of all parts.
            walked: The worker's parameters before them.
            center: What a broken worker takes.
        """
        worker = now.worker
        moved = getattr(self.inner, "moved", None)
        if moved is not None:
            worker = worker._replace(inner=moved(worker.inner, walked, worker.params))
        if self.inner_state == "average":
            inner = _average(worker.inner, self.axis_name, now.weight)
            worker = worker._replace(inner=inner)
        elif self.inner_state == "reset":
            worker = worker._replace(inner=self.inner.init(worker.params))
        info = now.info
        if self.drop_nonfinite:
            center = self.landing.for_broken(now, memory.on_device(center))
            worker = work.mend(self.inner, worker, center, now.well)
            dropped = info.dropped + (~now.well).astype(jnp.int32)
            info = info._replace(dropped=dropped)
        return now._replace(worker=worker, info=info)

    def extra_args(self, step: Step, weight: jax.Array | None) -> dict[str, Any]:
        """The extra arguments of the step that `inner` makes at the center."""
        if self.rule.outer is not self.inner:
            return {}

        def mean(name, value):
            if isinstance(value, bool | int | float):
                return value
            scalar = getattr(value, "ndim", None) == 0
            if not scalar or not is_floating(value.dtype):
                raise ValueError(
                    f"The center makes a step of `inner`, which gets the mean of the "
                    f"workers' extra arguments. Of {name!r} there is none: it is no "
                    f"floating scalar but {value!r}. Pass an optimizer of its own for "
                    "the center, outer=, which gets no extra arguments."
                )
            own = localize(jnp.asarray(value), self.axis_name)
            return reduce(own, self.axis_name, weight=weight)

        # `batch_size` is for a `cross_shard(measure=True)` inside.
        given = {k: v for k, v in step.extra_args.items() if k != "batch_size"}
        return {name: mean(name, value) for name, value in given.items()}


def _average(
    state: optax.OptState, axis_name: AxisName, weight: jax.Array | None
) -> optax.OptState:
    """The mean of the floating leaves of the workers' inner states."""
    leaves, treedef = jax.tree.flatten(state)
    floating = [i for i, x in enumerate(leaves) if is_inexact(x.dtype)]
    means = reduce([leaves[i] for i in floating], axis_name, weight=weight)
    for i, mean in zip(floating, means, strict=True):
        leaves[i] = mean
    return treedef.unflatten(leaves)
