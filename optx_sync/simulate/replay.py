# SPDX-License-Identifier: Apache-2.0
"""Replay events in a given order under `jax.lax.scan`, and record what is asked for."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

GradFn: TypeAlias = Callable[[jax.Array, Any, jax.Array], Any]
Record: TypeAlias = Literal["all"] | int | Callable[[Any, Any], Any]


def replay(
    advance: Callable,
    view: Callable,
    state: Any,
    workers: jax.Array,
    record: Record,
) -> tuple[Any, Any, Any]:
    """(last state, what `advance` returns of each event, `view` of those to record).

    `advance(state, (worker, event))` returns the next state and small values.
    """
    every = check_record(record)
    events = workers, jnp.arange(len(workers), dtype=jnp.int32)
    chunks = len(workers) // every

    def advance_chunk(state, of_chunk):
        state, values = jax.lax.scan(advance, state, of_chunk)
        return state, (values, view(state))

    first = jax.tree.map(lambda x: x[: chunks * every].reshape(chunks, every), events)
    state, (values, views) = jax.lax.scan(advance_chunk, state, first)
    values = jax.tree.map(lambda x: x.reshape(chunks * every, *x.shape[2:]), values)
    if chunks * every < len(workers):  # events after the last view
        rest = jax.tree.map(lambda x: x[chunks * every :], events)
        state, of_rest = jax.lax.scan(advance, state, rest)
        values = jax.tree.map(lambda *x: jnp.concatenate(x), values, of_rest)
    return state, values, views


def check_workers(workers: Any, num_workers: int) -> jax.Array:
    """The worker of each event as int32[T]; an error for what names no worker."""
    known = None if isinstance(workers, jax.core.Tracer) else np.asarray(workers)
    dtype = workers.dtype if known is None else known.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"workers must hold integers, the worker of each event; got {dtype}."
        )
    if np.ndim(workers) != 1:
        raise ValueError(
            "workers must have one axis, the worker of each event; got shape "
            f"{np.shape(workers)}."
        )
    if known is not None and known.size:
        worst = known.max() if known.max() >= num_workers else known.min()
        if not 0 <= worst < num_workers:
            raise ValueError(
                f"workers names worker {worst}, but there are {num_workers}, numbered "
                "from 0. Pass numbers in this range, or their number."
            )
    return jnp.asarray(workers).astype(jnp.int32)


def check_count(name: str, number: Any) -> None:
    """Refuse what is no int of 1 or more."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(
            f"{name} must be an int; got {number!r} of type {type(number).__name__}. "
            "It is static: pass for example 8."
        )
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {number}.")


def check_record(record: Any) -> int:
    """Every how many events to look at the state."""
    if callable(record) or (isinstance(record, str) and record == "all"):
        return 1
    if isinstance(record, bool) or not isinstance(record, int):
        raise TypeError(
            "record must be 'all', an integer (every how many events), or a function "
            f"of parameters and averages (or center); got {record!r}."
        )
    if record < 1:
        raise ValueError(f"record must be 1 or more events; got {record}.")
    return record
