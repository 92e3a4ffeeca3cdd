# SPDX-License-Identifier: Apache-2.0
"""The options of a center rule in lockstep, and what is refused of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax.typing import ArrayLike, DTypeLike

from optx_sync.center.contract import CenterMemory, CenterRule, InnerState, Period
from optx_sync.center.fragments import Fragments
from optx_sync.center.worker import takes_center
from optx_sync.checks import check_grads, check_one_worker, integer
from optx_sync.comm.collectives import ALONE, AxisName
from optx_sync.comm.varying import axes_of, require_local, require_varying
from optx_sync.exchange.contract import Exchange
from optx_sync.options import Refused
from optx_sync.placement.fields import holds_center, lies_in_pieces
from optx_sync.step import moved_by
from optx_sync.trees import Tree


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
    shard_center: bool = False
    fragments: Fragments = 1
    delay: int = 0
    center_memory: CenterMemory = "device"

    @property
    def moved(self) -> Callable[[Any, Tree, Tree], Any] | None:
        """How a center rule in `inner` hears that its workers have been moved."""
        return moved_by(self.inner)

    @property
    def streams(self) -> bool:
        """Whether parts meet in turn, or later than they are due."""
        return self.fragments != 1 or self.delay > 0

    @property
    def on_host(self) -> bool:
        """Whether center and outer state live in host memory."""
        return self.center_memory == "pinned_host"

    @property
    def coded(self) -> bool:
        """Whether pieces of a center come back coded, and workers keep the decoded."""
        return self.shard_center and self.exchange.halves is not None

    @property
    def alone(self) -> bool:
        """Whether `contribute` reads neither `taken` nor the center."""
        return not {"taken", "center"} & {*self.rule.reads}

    @property
    def blind(self) -> bool:
        """Whether workers contribute without seeing the center."""
        return self.shard_center and not (self.coded or self.measure)

    @property
    def reads_center(self) -> str:
        """The formula that reads the center between rounds, or ""."""
        takes = "" if takes_center(self.rule) else "take"
        return takes if self.rule.penalty is None else "penalty"


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
        "fragments or delay the state of `inner` is kept. Leave inner_state out, or "
        "leave out fragments and delay.",
    ),
    (
        lambda o: o.streams and o.moved,
        "fragments and delay cannot go around another center rule: its center would "
        "have to move with each part. Pass them to the innermost rule, or let replicas "
        "stand inside, oxs.diloco(oxs.cross_shard(inner, 'data'), 'pods', "
        "fragments=4).",
    ),
    (
        lambda o: o.on_host and o.rule.penalty is not None,
        "center_memory='pinned_host' keeps the center away from the device between "
        "rounds, but this rule's `penalty` reads it in every step, as that of "
        "elastic_average with rho does. Leave one of them out (rho=0.0).",
    ),
    (
        lambda o: o.on_host and o.delay,
        "center_memory='pinned_host' moves the center to the device where workers "
        "meet, but with delay={0.delay} it absorbs their sum in a later step. Leave "
        "one of them out.",
    ),
    (
        lambda o: o.shard_center and o.axis_name is ALONE,
        "shard_center=True shares a center out among workers, and with axis_name=None "
        "there is one. Leave shard_center=True out.",
    ),
    (
        lambda o: o.axis_name is ALONE and not o.exchange.exact,
        "exchange= says how the contributions of several workers become one, and with "
        "axis_name=None there is one, which sends nothing: codes would only lose some "
        "of it. Leave exchange= out.",
    ),
    (
        lambda o: o.shard_center and o.reads_center,
        "shard_center=True: between rounds nobody holds the whole center, which this "
        "rule's `{0.reads_center}` reads, as that of elastic_average does. Leave "
        "shard_center=True out, or choose a rule whose workers take the center: "
        "local_sgd, diloco, agn.",
    ),
    (
        lambda o: o.shard_center and not (o.exchange.scatter or o.exchange.halves),
        "shard_center=True needs an exchange that can stop half way, where each worker "
        "has the sum of its piece; this one cannot. Use oxs.exchange.all_reduce(), "
        "quantized() or error_feedback(quantized()), or leave shard_center=True out.",
    ),
    (
        lambda o: o.blind and not (o.alone or o.rule.affine),
        "shard_center=True evaluates `contribute` on the mean of the workers' arrays, "
        "which is the mean of the contributions only where the formula is affine in "
        "them, and this rule does not declare that it is. Declare affine=True "
        "(oxs.testing.check_rule holds the rule to it), or leave shard_center=True "
        "out.",
    ),
)


class Asked(NamedTuple):
    """What a step is asked for, and finds."""

    options: Options
    num_workers: int
    in_line: bool
    meet: Any
    weight: ArrayLike | None
    extra_args: list[str]  # the names of those for `inner`
    missing: list[str]  # mesh axes over which a pending sum does not vary

    @property
    def found(self) -> str:
        """How many workers there are."""
        if self.options.axis_name is ALONE:
            return "axis_name=None stands for one worker"
        return f"the axis {self.options.axis_name!r} has {self.num_workers} workers"

    @property
    def got(self) -> str:
        """What `meet` was."""
        return "no meet=" if self.meet is None else f"meet={self.meet!r}"


# What cannot be asked for in a step.
IN_A_STEP: Refused[Asked] = (
    (
        lambda o: o.options.rule.num_workers not in (None, o.num_workers),
        "num_workers={0.options.rule.num_workers}, but {0.found}. Leave num_workers "
        "out, or make them equal.",
    ),
    (
        lambda o: (
            o.options.rule.outer is o.options.inner and o.options.delay and o.extra_args
        ),
        "The center makes a step of `inner` {0.options.delay} step(s) after the sum, "
        "when the extra arguments {0.extra_args} are others. Pass an optimizer of its "
        "own for the center, outer=, or delay=0.",
    ),
    (
        lambda o: o.missing,
        "The parameters vary over the mesh axes {0.missing}, where a worker is cut in "
        "shards by hand; the pending sum, with delay, is stored as equal over them, "
        "but would vary. Leave these axes to the compiler, oxs.by_hand.map_workers, or "
        "pass delay=0.",
    ),
    (
        lambda o: o.in_line and o.meet is not None,
        "With delay=1 and communication_period equal to the number of fragments a part "
        "meets in every step, outside of conditionals: meet has no say in that; got "
        "meet={0.meet!r}. Leave it out, or pass a longer communication_period.",
    ),
    (
        lambda o: o.options.on_host and not isinstance(o.meet, bool),
        "center_memory='pinned_host' needs two programs, one that moves the center to "
        "the device and one that does not: a conditional inside of one would hold room "
        "for it in every step. Got {0.got}. Pass a Python bool as a static "
        "argument of the step, meet=oxs.by_hand.due(tx, number). (A rule inside of "
        "another one is not told: give center_memory to the outer one.)",
    ),
    (
        lambda o: o.in_line and o.weight is not None and not o.options.drop_nonfinite,
        "With delay=1 and communication_period equal to the number of fragments what a "
        "worker contributes is summed a step later, and its weight has to travel in "
        "the state: pass drop_nonfinite=True, with which the state has a place for it, "
        "or a longer communication_period.",
    ),
)


def check_delay(delay: int | None) -> int:
    """`delay=` of a center rule, 0 for `None`; else a TypeError or ValueError."""
    mend = "It is static, in steps: pass 1, say."
    return 0 if delay is None else integer("delay", delay, mend, least=0)


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


def axes_missing(state: Any) -> list[str]:
    """The mesh axes over which the center varies, and what is on its way does not.

    This happens to shards cut by hand, in `jax.shard_map(check_vma=True)`: the pending
    sum is stored as equal over them.
    """
    missing = axes_of(state.center) - axes_of(state.pending)
    return [] if state.pending == () else sorted(missing)


def check_step(grads: Tree, state: Any, params: Tree, axis_name: AxisName) -> None:
    """Refuse arguments that do not fit a worker's step.

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
