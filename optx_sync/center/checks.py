# SPDX-License-Identifier: Apache-2.0
"""The options of a center rule in lockstep, and what is refused of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax.typing import DTypeLike

from optx_sync.center.contract import CenterRule, InnerState, Period
from optx_sync.center.fragments import Fragments
from optx_sync.comm.collectives import ALONE, AxisName
from optx_sync.comm.varying import require_local, require_varying
from optx_sync.core.checks import Refused, check_grads, check_one_worker
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange
from optx_sync.state.direct import moved_by
from optx_sync.state.fields import holds_center


class Options(NamedTuple):
    """The checked options of `center_variable`; `gossip` has some of them."""

    inner: optax.GradientTransformationExtraArgs
    rule: CenterRule
    axis_name: AxisName
    period: Period
    exchange: Exchange
    dtype: DTypeLike | None = None
    inner_state: InnerState = "keep"
    drop_nonfinite: bool = False
    measure: bool = False
    shard_state: bool = False
    fragments: Fragments = 1
    overlap: bool = False

    @property
    def moved(self) -> Callable[[Any, Tree, Tree], Any] | None:
        """How a center rule in `inner` hears that its workers have been moved."""
        return moved_by(self.inner)

    @property
    def settles(self) -> bool:
        """Whether a round has effects on a worker beside what it takes."""
        keeps = self.inner_state == "keep" and self.moved is None
        return self.drop_nonfinite or not keeps

    @property
    def streams(self) -> bool:
        """Whether parts meet in turn, or a step later than they are due."""
        return self.fragments != 1 or self.overlap


_RESTARTS = (
    " would start the center rule inside anew, whose center its workers share. Pass it "
    "to the innermost rule instead."
)
# What cannot be asked for together.
TOGETHER: Refused[Options] = (
    (
        lambda o: o.rule.weigh is not None,
        "weigh is for workers that come one by one, in oxs.simulate.asynchronous and "
        "oxs.runtime.run; in lockstep nobody is late. Leave it out of the rule.",
    ),
    (
        lambda o: moved_by(o.rule.outer) is not None,
        "The rule's outer optimizer is a center rule itself, which cannot step on a "
        "center. Pass an optimizer as outer=, for example optax.sgd(0.1).",
    ),
    (lambda o: o.moved and o.drop_nonfinite, "drop_nonfinite=True" + _RESTARTS),
    (
        lambda o: o.moved and o.inner_state == "reset",
        "inner_state='reset'" + _RESTARTS,
    ),
    (
        lambda o: o.streams and o.inner_state != "keep",
        "inner_state={0.inner_state!r} is for rounds of all parameters at once; with "
        "fragments or overlap the state of `inner` is kept. Leave inner_state out, or "
        "leave out fragments and overlap.",
    ),
    (
        lambda o: o.streams and o.moved,
        "fragments and overlap cannot go around another center rule: its center would "
        "have to move with each part. Pass them to the innermost rule, or let replicas "
        "stand inside, oxs.diloco(oxs.cross_shard(inner, 'data'), 'pods', "
        "fragments=4).",
    ),
    (
        lambda o: o.overlap and o.period == 1,
        "overlap=True overwrites the step made while a part's sum is on its way: of "
        "communication_period=1 steps none is left, and workers would never learn. "
        "Pass communication_period=2 or more, or leave overlap=True out.",
    ),
    (
        lambda o: o.shard_state and o.axis_name is ALONE,
        "shard_state=True shares the outer optimizer's state out among workers, and "
        "with axis_name=None there is one. Leave shard_state=True out.",
    ),
    (
        lambda o: o.axis_name is ALONE and not o.exchange.exact,
        "exchange= says how the contributions of several workers become one, and with "
        "axis_name=None there is one, which sends nothing: codes would only lose some "
        "of it. Leave exchange= out.",
    ),
    (
        lambda o: o.shard_state and not o.exchange.scatter,
        "shard_state=True needs an exchange that can stop half way, where each worker "
        "has the sum of its piece; this one cannot. Use oxs.exchange.all_reduce(), "
        "quantized() or error_feedback(quantized()), or leave shard_state=True out.",
    ),
)


class Asked(NamedTuple):
    """What a step is asked for, and finds."""

    options: Options
    num_workers: int
    extra_args: list[str]  # the names of those for `inner`

    @property
    def found(self) -> str:
        """How many workers there are."""
        if self.options.axis_name is ALONE:
            return "axis_name=None stands for one worker"
        return f"the axis {self.options.axis_name!r} has {self.num_workers} workers"


# What cannot be asked for in a step.
IN_A_STEP: Refused[Asked] = (
    (
        lambda o: o.options.rule.num_workers not in (None, o.num_workers),
        "num_workers={0.options.rule.num_workers}, but {0.found}. Leave num_workers "
        "out, or make them equal.",
    ),
    (
        lambda o: (
            o.options.rule.outer is o.options.inner
            and o.options.overlap
            and o.extra_args
        ),
        "With overlap=True the center makes a step of `inner` in the step after the "
        "contribution, when the extra arguments {0.extra_args} are others. Pass an "
        "optimizer of its own for the center, outer=, or leave overlap=True out.",
    ),
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


def check_step(grads: Tree, state: Any, params: Tree, axis_name: AxisName) -> None:
    """Refuse arguments that do not fit a worker's step.

    `state` has the fields `local_step` and `center`.
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
    check_one_worker(state.local_step, state.center, params)
