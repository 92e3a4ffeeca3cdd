# SPDX-License-Identifier: Apache-2.0
"""The machine of TensorFlow's `SyncReplicasOptimizer`: a queue of tokens, and a chief.

Lockstep, the simulation and the runtime's server call these pure functions, and add
what is their own: collectives, the order of events, messages. What counts tokens takes
numbers and arrays of Python, NumPy or JAX, in `jax.jit` or not.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from optx_sync.core.checks import explains_inner, fill_missing, integer
from optx_sync.core.trees import Tree, add_updates, cast_like, is_placeholder
from optx_sync.replicas import accumulator
from optx_sync.replicas.accumulator import Accumulator
from optx_sync.replicas.averages import (
    Decay,
    advance_averages,
    check_averages,
    start_averages,
)


class Tokens(NamedTuple):
    """The queue: how many tokens there are of the step before, and of the current one.

    No others are there: no gradient of a step is accumulated before all tokens of
    earlier steps have been taken.
    """

    old: Any  # int32[]; they are taken first
    new: Any  # int32[]


def tokens_at_start(num_tokens: int, replicas: int, required: int) -> int:
    """The tokens before the first update, -1 for `required`; too few are refused."""
    tokens = required if num_tokens == -1 else num_tokens
    if tokens < required - replicas:
        raise ValueError(
            f"Too few tokens to finish the first update: got num_tokens={num_tokens}, "
            f"and {required - replicas} are needed. It takes {required} gradients, of "
            f"which {replicas} workers have one each without a token. Pass as many or "
            "more, or -1 for replicas_to_aggregate."
        )
    return tokens


@dataclasses.dataclass(frozen=True)
class SyncReplicas:
    """Synchronous replicas with backup workers, as an agreement of `oxs.runtime.run`.

    Every worker pushes every gradient; the server drops what is stale, applies `inner`
    to the mean of the first `replicas_to_aggregate` of them, and hands out
    max(N, R) tokens of the new step. A worker waits for a token after each push.

    The original is TensorFlow's `SyncReplicasOptimizer`, whose event by event replay is
    `oxs.simulate.sync_replicas`. In `run`, with N >= R, a worker whose gradient was
    accepted waits for the update that it is part of. The original lets it go on as soon
    as any token is left over: it then computes a gradient that is stale on arrival,
    which costs a third of the updates when one of four workers lags behind.

    Attributes:
        replicas_to_aggregate: R, the gradients that an update needs.
        total_num_replicas: N, checked against the number of workers; `None`: any.
        num_tokens: The tokens at the start; -1: R of them.
        variable_averages: The decay of a moving average of the parameters, or a
            schedule of the new global step. `None`: no average.

    Example:
        >>> from optx_sync.runtime import SyncReplicas
        >>> SyncReplicas(3, total_num_replicas=4).num_tokens
        -1

    References:
        Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous
        SGD", 2016, arXiv 1604.00981.
    """

    replicas_to_aggregate: int
    total_num_replicas: int | None = None
    num_tokens: int = -1
    variable_averages: float | optax.Schedule | None = None

    def __post_init__(self) -> None:
        check_replicas(self.replicas_to_aggregate, self.total_num_replicas)
        check_averages(self.variable_averages)
        check_num_tokens(self.num_tokens)


def tokens_with(agreement: SyncReplicas, num_workers: int) -> int:
    """The tokens at the start with so many workers; refuse another number of them."""
    total = agreement.total_num_replicas
    if total not in (None, num_workers):
        raise ValueError(
            f"total_num_replicas={total}, but there are {num_workers} workers. "
            "Leave it out, or make them equal."
        )
    required = agreement.replicas_to_aggregate
    return tokens_at_start(agreement.num_tokens, num_workers, required)


def tokens_of_update(replicas: int, required: int) -> int:
    """The tokens that an update makes: the next one can have so many gradients."""
    return max(replicas, required)


def hand_out(tokens: Tokens, waits: Any, place: Any) -> tuple[Any, Any, Tokens]:
    """Hand out tokens until there is none or nobody waits.

    Args:
        tokens: The queue.
        waits: bool[N], who waits for a token.
        place: int32[N], the place of each in the line of those that wait, 1 for the
            first; or a number, the place of all.

    Returns:
        `(served, late, tokens)`: who gets a token, who of these an old one, and what is
        left in the queue.
    """
    served = waits & (place <= tokens.old + tokens.new)
    late = waits & (place <= tokens.old)
    taken, old = served.sum(dtype="int32"), late.sum(dtype="int32")
    return served, late, Tokens(tokens.old - old, tokens.new - (taken - old))


class Held(NamedTuple):
    """What an update changes."""

    params: Tree
    inner: optax.OptState
    averages: Tree  # like the parameters, or ()
    accumulator: Accumulator


class Chief(NamedTuple):
    """Who makes an update of `required` gradients."""

    inner: optax.GradientTransformationExtraArgs
    required: int
    decay: Decay | None

    def start(self, params: Tree) -> Held:
        """What is held before the first gradient."""
        averages = start_averages(params, self.decay)
        empty = accumulator.start_accumulator(params)
        return Held(params, self.inner.init(params), averages, empty)

    def update(self, held: Held, grads: Tree, count: Any, global_step: Any) -> Held:
        """What is held after the mean of all that was accumulated went through `inner`.

        Args:
            held: What is held, with all gradients accumulated.
            grads: One of them, which says their form.
            count: How many they are.
            global_step: The number of this update, from 1.
        """
        sums = accumulator.sums_of(held.accumulator, grads)
        mean = accumulator.mean_of(*sums, grads, count, self.required)
        return self.take(held, mean, grads, count, global_step, {})[1]

    def take(
        self,
        held: Held,
        mean: Tree,
        grads: Tree,
        count: Any,
        global_step: Any,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Held]:
        """(updates, what is held) after a mean went through `inner`; as `update`."""
        before = held.params
        with explains_inner(grads):
            updates, inner = self.inner.update(mean, held.inner, before, **extra_args)
        updates = fill_missing(updates, before)
        params = None if before is None else add_updates(before, updates)
        return updates, Held(
            params,
            cast_like(inner, held.inner),
            advance_averages(held.averages, params, self.decay, global_step),
            accumulator.clear(held.accumulator, mean, count),
        )


def check_replicas(
    replicas_to_aggregate: object, total_num_replicas: object
) -> tuple[int, int | None]:
    """Both numbers as ints; refuse anything but integers of 1 or more."""
    required = integer(
        "replicas_to_aggregate",
        replicas_to_aggregate,
        "Pass the number of gradients that an update needs.",
    )
    total = total_num_replicas
    if total is not None:
        mend = "Pass the number of replicas."
        total = integer("total_num_replicas", total, mend)
    return required, total


def check_variables(tree: Tree) -> None:
    """Refuse a tree of parameters or gradients without leaves."""
    if not jax.tree.leaves(tree) and not is_placeholder(tree):
        raise ValueError(
            f"sync_replicas needs at least one variable; got the empty tree {tree!r}. "
            "Pass the parameters, and gradients like them."
        )


def check_num_tokens(num_tokens: object) -> int:
    """`num_tokens=` as an int; refuse anything but integers of -1 or more."""
    mend = "Pass -1 for replicas_to_aggregate."
    return integer("num_tokens", num_tokens, mend, least=-1)
