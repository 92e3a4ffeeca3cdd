# SPDX-License-Identifier: Apache-2.0
"""Gradients that come late by a fixed number of steps, to study staleness."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.checks import check_count, check_inner
from optx_sync.rows.slices import IndexedSlices
from optx_sync.trees import is_slices


class DelayedState(NamedTuple):
    """State of `delayed`."""

    step: jax.Array  # int32[]
    late: Any  # [steps, ...] of each gradient, those that have not been used
    inner: optax.OptState


def delayed(
    inner: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Stale gradients: each one reaches `inner` a fixed number of steps late.

    In step t `inner` gets the gradient of step t - `steps`, with the parameters and
    extra arguments of step t, as in a pipeline or with workers that all run so many
    steps behind. In the first `steps` steps nothing moves, and `inner` is not asked.

    Args:
        inner: The optimizer that gets late gradients.
        steps: How many steps late, 0 or more.

    Returns:
        The transformation; its state holds `steps` gradients, dense ones.

    Raises:
        TypeError: An `inner` that is no transformation, `steps` that are no integer;
            at the call, row-sparse gradients.
        ValueError: `steps` below 0.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.simulate.delayed(optax.sgd(1.0), 2)
        >>> state = tx.init(jnp.zeros(()))
        >>> for gradient in (1.0, 2.0, 4.0, 8.0):
        ...     updates, state = tx.update(jnp.float32(gradient), state)
        ...     print(updates)
        0.0
        0.0
        -1.0
        -2.0
    """
    inner = check_inner(inner, "oxs.simulate.delayed(optax.sgd(0.1), 4)")
    steps = check_count("steps", steps, "Pass for example 4.", least=0)

    def init(params):
        late = jax.tree.map(lambda p: jnp.zeros((steps, *p.shape), p.dtype), params)
        return DelayedState(jnp.zeros((), jnp.int32), late, inner.init(params))

    def update(updates, state, params=None, **extra_args):
        for leaf in jax.tree.leaves(updates, is_leaf=is_slices):
            if isinstance(leaf, IndexedSlices):
                raise TypeError(
                    "delayed keeps gradients as arrays; got a row-sparse one. Pass its "
                    "to_dense(rows)."
                )
        if steps == 0:
            updates, within = inner.update(updates, state.inner, params, **extra_args)
            return updates, state._replace(step=state.step + 1, inner=within)
        place = state.step % steps
        due = jax.tree.map(lambda x: x[place], state.late)
        late = jax.tree.map(
            lambda x, g: x.at[place].set(g.astype(x.dtype)), state.late, updates
        )

        def arrive(within):
            now, new = inner.update(due, within, params, **extra_args)
            return jax.tree.map(lambda u, g: u.astype(g.dtype), now, due), new

        def wait(within):
            return jax.tree.map(jnp.zeros_like, due), within

        now, within = jax.lax.cond(state.step >= steps, arrive, wait, state.inner)
        return now, DelayedState(state.step + 1, late, within)

    return optax.GradientTransformationExtraArgs(init, update)
