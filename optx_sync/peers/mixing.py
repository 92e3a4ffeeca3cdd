# SPDX-License-Identifier: Apache-2.0
"""A gossip round: the mean of some partners stands for that of all workers."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optx_sync.center import worker as work
from optx_sync.center.fragments import Whole
from optx_sync.center.rounds.at_once import AtOnce
from optx_sync.center.rounds.meeting import Meeting, Step
from optx_sync.center.rounds.turns import Now, either
from optx_sync.comm.buffers import Joint, alike, joinable
from optx_sync.comm.collectives import AxisName, axis_index, permute
from optx_sync.comm.reduce import reduce, weigh, weight_divisor
from optx_sync.comm.varying import vary_like
from optx_sync.peers.graphs import Graph, GraphRound, Weight
from optx_sync.peers.stability import check_cycle, check_pairs
from optx_sync.trees import Tree, where


class Mixing(NamedTuple):
    """A round without delay, for a worker and its partners in a graph."""

    meeting: Meeting
    graph: Graph
    seed: int

    def start(self, parts: Whole, center: Tree, held: Tree) -> tuple[Any, Any]:
        """(what is pending, what the exchange remembers) before the first round."""
        if self.graph.choose == "draw":
            check_pairs(self.meeting.rule.outer)
        return (), ()

    def step(self, now: Now, step: Step) -> Now:
        """One step of the round."""
        rounds = self.graph.rounds(step.num_workers)
        if self.graph.choose == "cycle":
            check_cycle(self.meeting.rule.outer, self.graph, step.num_workers)
        if all(r.groups is not None and len(r.groups) == 1 for r in rounds):
            # All centers are equal, so the workers can send what they moved.
            return AtOnce(self.meeting).step(now, step)
        return either(step.due, lambda now: self._round(now, step, rounds), now)

    def _round(self, now: Now, step: Step, rounds: Sequence[GraphRound]) -> Now:
        meeting, walked, center = self.meeting, now.worker.params, now.center.value
        x = work.as_center(walked, center)
        now = meeting.leave_out(now, step, x)
        branches = [functools.partial(_mixed, r, meeting.axis_name) for r in rounds]
        mean, mass = _mean_of_partners(
            x, now.weight, branches, self._chosen(len(rounds), step.rounds)
        )
        if now.weight is not None:
            mean = where(mass > 0, mean, center)  # without partners, no contribution
        at = step.at(0)
        moved = work.contribute(meeting.rule, mean, center, (), center, at)
        now = meeting.land(now, step, moved, mass, at)
        return meeting.settle(now, walked, now.center.value)

    def _chosen(self, rounds: int, global_step: jax.Array) -> Any:
        """This round's place in the graph: equal on all workers, and after a resume."""
        if rounds == 1:
            return 0
        if self.graph.choose == "cycle":
            return global_step % rounds
        # A fixed generator: JAX's default may differ in a resumed run.
        key = jax.random.key(self.seed, impl="threefry2x32")
        return jax.random.randint(jax.random.fold_in(key, global_step), (), 0, rounds)


def _mean_of_partners(
    x: Tree, weight: jax.Array | None, branches: Sequence[Any], chosen: int | jax.Array
) -> tuple[Tree, Any]:
    """(the mean of a worker and its partners, the sum of their weights or ())."""
    sent, treedef = jax.tree.flatten(x)
    if weight is not None:
        # The 1 comes back as the sum of the graph's weights, rounded like the others.
        sent = [*(weigh(x, weight) for x in sent), weight, jnp.ones_like(weight)]
    # Joined, or a program with many partners would hold many permutes.
    kind = joinable()
    # Arrays that are not joined keep their shapes.
    flat = [x.reshape(-1) if kind is alike or not x.ndim else x for x in sent]
    joint = Joint(flat, kind)
    joined = joint.join(flat)
    if len(branches) == 1:
        joined = branches[0](joined)
    else:
        joined = jax.lax.switch(chosen, branches, joined)
    got = list(map(jnp.reshape, joint.cut(joined), [x.shape for x in sent]))
    if weight is None:
        return treedef.unflatten(got), ()
    *sums, mass, one = got
    share = one / weight_divisor(mass)
    return treedef.unflatten(x * share.astype(x.dtype) for x in sums), mass


def _mixed(
    round_: GraphRound, axis_name: AxisName, arrays: list[jax.Array]
) -> list[jax.Array]:
    """One round for a list of arrays: this worker's row of the mixing matrix."""
    if round_.groups is not None:
        groups = [list(group) for group in round_.groups]
        means = reduce(
            arrays, axis_name, group_assignment=groups if len(groups) > 1 else None
        )
        return vary_like(means, arrays)

    def mixed(x):
        total = x * _own_weight(round_.own, x.dtype, axis_name)
        for take in round_.takes:
            theirs = permute(x, axis_name, take.source)
            total = total + theirs * _own_weight(take.weight, x.dtype, axis_name)
        return total

    return [mixed(x) for x in arrays]


def _own_weight(weight: Weight, dtype: DTypeLike | None, axis_name: AxisName) -> Any:
    if isinstance(weight, tuple):
        return jnp.asarray(weight, dtype)[axis_index(axis_name)]
    return jnp.asarray(weight, dtype)
