# SPDX-License-Identifier: Apache-2.0
"""Checks of a center rule in lockstep, each with a message that says how to mend it."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optx_sync.center.contract import (
    CenterMemory,
    CenterRule,
    InnerState,
    check_rule,
)
from optx_sync.checks import (
    check_grads,
    check_one_worker,
    integer,
    one_of,
)
from optx_sync.comm.collectives import ALONE, AxisName, axis_size, varying_axes
from optx_sync.comm.varying import require_local, require_varying
from optx_sync.placement.fields import holds_center, lies_in_pieces
from optx_sync.trees import Tree


def check_lockstep_rule(rule: CenterRule, call: str) -> None:
    """Refuse anything but a rule, and a rule that cannot work in lockstep."""
    check_rule(rule, call)
    if rule.weigh is not None:
        raise ValueError(
            "weigh is for workers that come one by one, in oxs.simulate.asynchronous "
            "and oxs.runtime.run; in lockstep nobody is late. Leave it out of the rule."
        )
    if getattr(rule.outer, "moved", None) is not None:
        raise ValueError(
            "The rule's outer optimizer is a center rule itself, which cannot step on "
            "a center. Pass an optimizer as outer=, for example optax.sgd(0.1)."
        )


def check_inner_state(inner_state: object) -> None:
    """Refuse a name that is none of `InnerState`."""
    one_of("inner_state", inner_state, InnerState)


def check_delay(delay: int | None) -> int:
    """`delay=` of a center rule, 0 for `None`; else a TypeError or ValueError."""
    if delay is None:
        return 0
    return integer("delay", delay, "It is static, in steps: pass 1, say.", least=0)


def check_memory(center_memory: object, rule: CenterRule, delay: int) -> bool:
    """`center_memory=` of a center rule: whether the center lives on the host."""
    one_of("center_memory", center_memory, CenterMemory)
    if center_memory == "device":
        return False
    if rule.penalty is not None:
        raise ValueError(
            "center_memory='pinned_host' keeps the center away from the device between "
            "rounds, but this rule's `penalty` reads it in every step, as that of "
            "elastic_average with rho does. Leave one of them out (rho=0.0)."
        )
    if delay:
        raise ValueError(
            "center_memory='pinned_host' moves the center to the device where workers "
            f"meet, but with delay={delay} it absorbs their sum in a later step. Leave "
            "one of them out."
        )
    return True


def check_meet(meet: object) -> None:
    """Refuse a `meet` that is not static: see the message."""
    if not isinstance(meet, bool):
        got = "no meet=" if meet is None else f"meet={meet!r}"
        raise ValueError(
            "center_memory='pinned_host' needs two programs, one that moves the center"
            " to the device and one that does not: a conditional inside of one would"
            f" hold room for it in every step. Got {got}. Pass a Python bool as a"
            " static argument of the step, meet=oxs.by_hand.due(tx, number). (A rule"
            " inside of another one is not told: give center_memory to the outer one.)"
        )


def check_nested(
    inner_moved: Callable | None, drop_nonfinite: bool, inner_state: str
) -> None:
    """Refuse options that would restart a center rule inside of this one."""
    if inner_moved is not None and (drop_nonfinite or inner_state == "reset"):
        got = "drop_nonfinite=True" if drop_nonfinite else "inner_state='reset'"
        raise ValueError(
            f"{got} would start the center rule inside anew, whose center its workers "
            "share. Pass it to the innermost rule instead."
        )


def check_streams(
    streams: bool, inner_state: str, inner_moved: Callable | None
) -> None:
    """Refuse options that fragments and delay do not support."""
    if not streams:
        return
    if inner_state != "keep":
        raise ValueError(
            f"inner_state={inner_state!r} is for rounds of all parameters at once; "
            "with fragments or delay the state of `inner` is kept. Leave inner_state "
            "out, or leave out fragments and delay."
        )
    if inner_moved is not None:
        raise ValueError(
            "fragments and delay cannot go around another center rule: its center "
            "would have to move with each part. Pass them to the innermost rule, or "
            "let replicas stand inside, oxs.diloco(oxs.cross_shard(inner, 'data'), "
            "'pods', fragments=4)."
        )


def check_streaming_step(
    state: Any, meet: bool | jax.Array | None, in_line: bool
) -> None:
    """Refuse a pending sum of shards, and `meet` where it has no effect."""
    if state.pending != ():
        _require_within(state.center, state.pending)
    if in_line and meet is not None:
        raise ValueError(
            "With delay=1 and communication_period equal to the number of fragments "
            "a part meets in every step, outside of conditionals: meet has no say in "
            f"that; got meet={meet!r}. Leave it out, or pass a longer "
            "communication_period."
        )


def check_delayed_inner(delay: int, extra_args: dict[str, Any]) -> None:
    """Refuse extra arguments where `inner` steps at the center after a delay."""
    if delay and extra_args:
        raise ValueError(
            f"The center makes a step of `inner` {delay} step(s) after the sum,"
            f" when the extra arguments {sorted(extra_args)} are others. Pass "
            "an optimizer of its own for the center, outer=, or delay=0."
        )


def refuse_hidden_center(state: optax.OptState) -> None:
    """Refuse a center rule hidden in `inner`, which would not hear of a round."""
    if holds_center(state):
        raise ValueError(
            "There is another center rule in `inner` whose center would not move when "
            "workers meet. Nest center rules directly, with what stands between them "
            "inside of the innermost, oxs.diloco(oxs.local_sgd(optax.chain(clip, adam),"
            " 'data'), 'pods'); in gossip, which nests none, oxs.graphs.grid(m) meets "
            "in groups and between them."
        )


def _require_within(tree: Tree, pending: Tree) -> None:
    """Refuse a pending sum that varies over mesh axes along which the state is equal.

    This happens to shards cut by hand, in `jax.shard_map(check_vma=True)`.
    """

    def axes(tree):
        return frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    missing = axes(tree) - axes(pending)
    if missing:
        raise ValueError(
            f"The parameters vary over the mesh axes {sorted(missing)}, where a worker "
            "is cut in shards by hand; the pending sum, with delay, is stored as equal "
            "over them, but would vary. Leave these axes to the compiler, "
            "oxs.by_hand.map_workers, or pass delay=0."
        )


def check_step(
    grads: Tree,
    state: Any,
    params: Tree,
    axis_name: AxisName,
    rule: CenterRule,
) -> int:
    """Refuse arguments that do not fit a worker's step; returns the number of workers.

    `state` has the fields `local_step` and `center`, which may lie in pieces.
    """
    check_grads(grads, params)
    require_local(
        grads,
        axis_name,
        "gradient",
        "A worker has parameters of its own: lay them along the worker axis,"
        f" `oxs.by_hand.replicate(params, n)` with in_specs=P({axis_name!r}), or start"
        " with oxs.Workers(n, axis_name).start(state).",
    )
    require_varying(state.center, params, axis_name, "center")
    center = () if lies_in_pieces(state.center) else state.center
    check_one_worker(state.local_step, center, params)
    workers = axis_size(axis_name)
    if rule.num_workers not in (None, workers):
        found = f"the axis {axis_name!r} has {workers} workers"
        if axis_name is ALONE:
            found = "axis_name=None stands for one worker"
        raise ValueError(
            f"num_workers={rule.num_workers}, but {found}. Leave num_workers out, or "
            "make them equal."
        )
    if rule.check_lockstep is not None:
        rule.check_lockstep(workers)
    return workers
