# SPDX-License-Identifier: Apache-2.0
"""`apply_gradients`: one optimizer step that returns parameters; `due`."""

import bisect
import functools
import numbers
from typing import Any

import jax
import numpy as np
import optax

from optx_sync.core import trees
from optx_sync.core.checks import (
    check_inner,
    explains_inner,
    explains_state,
    integer,
)
from optx_sync.core.trees import Tree
from optx_sync.state import fields
from optx_sync.state.direct import Period, direct_of, period_length, refuse_swapped


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Tree,
    state: optax.OptState,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, Any]:
    """One optimizer step that returns parameters: `(params, state)`.

    For any Optax transformation this is `tx.update` and `optax.apply_updates`. The
    center rules and `sync_replicas` return the new parameters directly, without an
    array of updates in between: fewer temporaries, and a float32 worker that takes the
    center gets it to the bit. Inside `optax.chain` a wrapper only gives updates; put
    the chain inside the wrapper instead, `oxs.diloco(optax.chain(clip, adamw),
    "workers")`.

    Args:
        tx: Any Optax transformation.
        grads: Gradients like `params`; leaves may be `IndexedSlices` or `None`.
        state: The state of `tx`.
        params: The parameters.
        **extra_args: Extra arguments of `tx.update`.

    Returns:
        The parameters and the state after the step.

    Raises:
        ValueError: No `params`; a chain in which a link follows a center rule, or
            `sync_replicas` with averages; for the reasons of `tx` itself.
        TypeError: Row-sparse gradients where `tx` takes arrays only; a note to JAX's
            own error, which may be a ValueError too, says what to do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = optax.sgd(0.5)
        >>> params = jnp.ones(2)
        >>> state = tx.init(params)
        >>> oxs.apply_gradients(tx, jnp.array([1.0, 2.0]), state, params)[0]
        Array([0.5, 0. ], dtype=float32)
    """
    # `None` is an empty tree, which has no gradients.
    if params is None and jax.tree.structure(grads) != jax.tree.structure(params):
        raise ValueError(
            "A step returns parameters and so needs them; got params=None. Call "
            "apply_gradients(tx, grads, state, params)."
        )
    if found := direct_of(tx):
        return found.apply(grads, state, params, **extra_args)
    tx = check_inner(tx, "apply_gradients(tx, grads, state, params)", "tx")
    _refuse_what_follows(state)
    if not isinstance(state, tuple):  # as those of Optax are
        refuse_swapped(state, params)
    with explains_state(tx.init, state, params), explains_inner(grads):
        updates, state = tx.update(grads, state, params, **extra_args)
    return trees.add_updates(params, updates), state


def _refuse_what_follows(state: Tree) -> None:
    """Refuse a chain in which a link follows one that must stand last."""
    # The state of `optax.chain` is a plain tuple, one state for each link.
    links = state if type(state) is tuple else ()
    for place, link in enumerate(links[:-1]):
        if fields.has_copy(link):
            raise ValueError(
                f"Link {place} of this chain of {len(links)} has a "
                f"{type(link).__name__}: it turns new parameters into updates, so what "
                "follows would change where the parameters arrive. Let it stand last, "
                "or put the other links inside: oxs.diloco(optax.chain(clip, adamw), "
                "'workers')."
            )


def due(tx: optax.GradientTransformation | Period, step: int) -> bool:
    """Whether the workers meet in this step, for a training loop on the host.

    A loop that counts its steps can pass the answer to `update` or `apply_gradients` as
    `meet=`, a static argument: of the two compiled programs, one holds no collective
    and the other no conditional.

    Args:
        tx: A center rule's transformation (not inside a chain), or its
            `communication_period`.
        step: The step, 0 for the first, in a run that always meets when it is due.

    Returns:
        Whether this is the last step of a period.

    Raises:
        TypeError: `tx` is neither, or `step` is no number.
        ValueError: A period below 1; a schedule that gives anything but a number above
            0, of which 2.5 steps are 3. A compiled step cannot raise: there workers
            meet in every step.

    Example:
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=3)
        >>> [oxs.by_hand.due(tx, step) for step in range(6)]
        [False, False, True, False, False, True]
    """
    if not isinstance(step, numbers.Real | np.ndarray | jax.Array):
        swapped = " Have tx and step changed places?" if hasattr(step, "update") else ""
        raise TypeError(
            f"step must be a number; got one of type {type(step).__name__}.{swapped} "
            "Write for example oxs.by_hand.due(tx, step)."
        )
    found = direct_of(tx)
    period = found.communication_period if found else tx
    if not callable(period):
        mend = (
            "due needs the transformation of a center rule, or 1 or more steps; inside "
            "optax.chain pass the period itself."
        )
        return (step + 1) % integer("the period", period, mend) == 0
    begins = _begins(period.__call__)
    while (after := begins[-1] + period_length(period, begins[-1])) <= step:
        begins.append(after)
    begin = begins[bisect.bisect(begins, step) - 1]
    return begin + period_length(period, begin) <= step + 1


@functools.lru_cache(maxsize=64)
def _begins(period: optax.Schedule) -> list[int]:
    """The steps in which the periods begin, as far as asked for until now."""
    return [0]
