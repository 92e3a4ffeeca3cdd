# SPDX-License-Identifier: Apache-2.0
"""Replay events in a given order under `jax.lax.scan`, and record their history."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optx_sync.core.checks import integer
from optx_sync.core.trees import Tree

GradFn: TypeAlias = Callable[[jax.Array, Tree, jax.Array], Tree]
Record: TypeAlias = Literal["all"] | int | Callable[[Tree, Tree], Tree] | None

Event: TypeAlias = tuple[Any, jax.Array]  # (what it is, its index)
State = TypeVar("State")

# What `record=None` may keep, in bytes: 256 MB.
KEPT_BYTES = 256 * 2**20


class Replayed(NamedTuple, Generic[State]):
    """What came of all events."""

    state: State  # after the last event
    values: tuple[jax.Array, ...]  # of every event
    views: tuple[Tree, ...]  # of the events that are kept
    recorded: Tree  # the results of the function `record` for them, or None
    events: np.ndarray  # their numbers


def replay(
    advance: Callable[[State, Event], tuple[State, tuple[jax.Array, ...]]],
    view: Callable[[State], tuple[Tree, ...]],
    state: State,
    events: Tree,
    record: Record,
) -> Replayed[State]:
    """Advance by each event, and keep the views of those that `record` asks for.

    Args:
        advance: `(state, (event, number)) -> (state, small values)`; `number` is the
            index of `event` in `events`.
        view: Returns the trees of a state that may be kept. A function `record` gets
            the first two, and only its results are kept.
        state: The state before the first event.
        events: [T, ...], arrays that describe each event, for example its worker.
        record: As the user gave it.

    """
    number = len(jax.tree.leaves(events)[0])
    every = 1 if callable(record) or record == "all" else record

    def kept(state):
        views = view(state)
        if callable(record):
            return (None,) * len(views), record(*views[:2])
        return views, None

    if every is None:
        shapes = jax.tree.leaves(jax.eval_shape(kept, state))
        size = sum(x.size * x.dtype.itemsize for x in shapes)
        room = KEPT_BYTES // max(size, 1)
        # The smallest period for which all views fit.
        every = number // (room + 1) + 1
    every = integer(
        "record",
        every,
        "Pass None, 'all', every how many events to keep, or a function of parameters "
        "and averages (or center).",
    )
    events = events, jnp.arange(number, dtype=jnp.int32)
    chunks = number // every
    viewed = every - 1 + every * np.arange(chunks, dtype=np.int32)

    def advance_chunk(state, of_chunk):
        state, values = jax.lax.scan(advance, state, of_chunk)
        return state, (values, kept(state))

    first = jax.tree.map(
        lambda x: x[: chunks * every].reshape(chunks, every, *x.shape[1:]), events
    )
    state, (values, (views, recorded)) = jax.lax.scan(advance_chunk, state, first)
    values = jax.tree.map(lambda x: x.reshape(chunks * every, *x.shape[2:]), values)
    if chunks * every < number:  # events after the last view
        rest = jax.tree.map(lambda x: x[chunks * every :], events)
        state, of_rest = jax.lax.scan(advance, state, rest)
        values = jax.tree.map(lambda *x: jnp.concatenate(x), values, of_rest)
    return Replayed(state, values, views, recorded, viewed)


def check_workers(workers: ArrayLike | Sequence[int], num_workers: int) -> jax.Array:
    """The worker of each event as int32[T], checked: each number must name a worker."""
    known = None
    if not isinstance(workers, jax.core.Tracer):
        workers = known = np.asarray(workers)
    if not jnp.issubdtype(workers.dtype, jnp.integer) or np.ndim(workers) != 1:
        raise ValueError(
            "workers must be integers along one axis, the worker of each event; got "
            f"{workers.dtype}{list(np.shape(workers))}."
        )
    if known is not None and known.size:
        worst = known.max() if known.max() >= num_workers else known.min()
        if not 0 <= worst < num_workers:
            raise ValueError(
                f"workers names worker {worst}, but there are {num_workers}, numbered "
                "from 0. Pass numbers in this range, or their number."
            )
    return jnp.asarray(workers).astype(jnp.int32)
