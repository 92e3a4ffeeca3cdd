# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the parameters: `variable_averages=` of `sync_replicas`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optx_sync.core import trees
from optx_sync.core.trees import Tree

Decay: TypeAlias = float | optax.Schedule


def check_averages(variable_averages: Any) -> None:
    """Refuse a decay outside of [0, 1]; traced values and schedules pass."""
    traced = isinstance(variable_averages, jax.core.Tracer)
    if variable_averages is None or callable(variable_averages) or traced:
        return
    number = isinstance(variable_averages, int | float | np.number | jax.Array)
    scalar = number and jnp.shape(variable_averages) == ()
    if not scalar or not 0 <= variable_averages <= 1:
        raise ValueError(
            "variable_averages must be a decay in [0, 1], or a schedule of the global "
            f"step that returns one; got {variable_averages!r}. Pass for example 0.999."
        )


def _for_another_type(mask: Tree, params: Tree) -> str:
    """What a message says of a mapping of another class than the parameters'."""
    kind = type(params)
    if not isinstance(mask, Mapping) or type(mask) is kind:
        return ""
    return f" for parameters of type {kind.__name__}: make it one, {kind.__name__}(...)"


def start_averages(
    params: Tree,
    decay: Decay | None,
    mask: Tree | Callable[[Tree], Tree] = None,
    dtype: DTypeLike | None = None,
) -> Tree:
    """Copies of the parameters that the mask selects; they share no buffer with them.

    Without a decay, `()`.
    """
    if decay is None:
        return ()
    if trees.is_placeholder(params):
        return params
    mask = mask(params) if callable(mask) else mask
    mask = True if mask is None else mask
    fits = not any(isinstance(x, str) for x in jax.tree.leaves(mask))
    try:
        mask = jax.tree.broadcast(mask, params)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "variables_to_average is a tree of bools like the parameters, or like its "
            "first levels, or a function of them that returns one; got "
            f"{trees.brief(mask)}{_for_another_type(mask, params)}. Write for example "
            "{'out': True, 'hidden': False}."
        )

    def start(selected, param):
        if not selected or not trees.is_inexact(param.dtype):
            return optax.MaskedNode()
        wide = trees.accumulator_dtype(param.dtype, dtype)
        if isinstance(param, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(param.shape, wide)
        return jnp.array(param, dtype=wide, copy=True)

    return jax.tree.map(start, mask, params)


def advance_averages(
    averages: Tree, params: Tree, decay: Decay | None, global_step: jax.Array
) -> Tree:
    """The averages after an update, from the new parameters and the new step."""
    if decay is None:
        return averages
    now = decay(global_step) if callable(decay) else decay
    if isinstance(now, jax.Array):
        rate = 1 - now.astype(jnp.float32)
    else:  # In double precision: in float32 a fifth of 1 - 0.9999999 would be rounding.
        rate = np.asarray(1 - np.asarray(now, np.float64))

    def advance(average, param):
        if trees.is_masked(average):
            return average
        distance = average - param.astype(average.dtype)
        return average - rate.astype(average.dtype) * distance

    return jax.tree.map(advance, averages, params, is_leaf=trees.is_masked)
