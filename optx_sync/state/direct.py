# SPDX-License-Identifier: Apache-2.0
"""What a wrapper can do beside Optax's `init` and `update`: return parameters."""

import contextlib
import contextvars
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax

from optx_sync.core import trees
from optx_sync.core.checks import (
    explains_state,
    require_state,
)
from optx_sync.core.trees import Tree
from optx_sync.state import fields

Period = int | optax.Schedule


class Direct(NamedTuple):
    """What a wrapper can do beside Optax's `init` and `update`.

    Attributes:
        apply: `(grads, state, params, **extra_args) -> (params, state)`.
        communication_period: For `due`.
        moved: `(state, before, after) -> state`, the state after another wrapper has
            moved the parameters; `None` if the state does not depend on them.
        parts: How many parts meet in turns, each so many steps after the one before.
        update: The one that carries this.
    """

    apply: Callable[..., tuple[Tree, Any]]
    communication_period: Period | None = None
    moved: Callable[[Any, Tree, Tree], Any] | None = None
    parts: int = 1
    update: Callable[..., Any] | None = None


def direct_transformation(
    init: Callable[..., Any], direct: Direct, update: Callable[..., Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that can also return the new parameters.

    Wrappers that compute new parameters would have to write them to memory as updates,
    for the caller to add. `direct.apply` returns them instead, and compiles to the
    program that one would write by hand. Without `update` as in Optax it lands on them.

    Its `update` carries that. A transformation is a tree of its two functions for JAX,
    Flax and Orbax, which make another one of them: a class of ours would not survive.
    """
    made: set[Any] = set()  # the kinds of states that are this transformation's

    @functools.wraps(init)
    def start(params: Tree) -> Any:
        state = init(params)
        made.add(trees.kinds_of(state))
        return state

    step: Any = _explained(init, update or landing_update(direct.apply), made)
    apply = _explained(init, direct.apply, made)
    step.direct = direct._replace(apply=apply, update=step)
    return optax.GradientTransformationExtraArgs(start, step)


def direct_of(tx: Any) -> Direct | None:
    """What a wrapper can do, `None` if this is another transformation."""
    update = getattr(tx, "update", None)
    found = getattr(update, "direct", None)
    # `functools.wraps` copies it to a function that does something else.
    return found if isinstance(found, Direct) and found.update is update else None


def cycle_of(tx: Any) -> Period | None:
    """The steps in which all parts of a center rule meet once; `None` of others."""
    found = direct_of(tx)
    period = found and found.communication_period
    return period * found.parts if found and isinstance(period, int) else period


def moved_by(tx: Any) -> Callable[[Any, Tree, Tree], Any] | None:
    """How a center rule hears that its workers have been moved."""
    found = direct_of(tx)
    return found and found.moved


# Extra arguments of this library's wrappers, and one that others have for them.
_NAMES = ("weight", "contributes", "gradient_step", "meet", "batch_size", "mask")


class _Used(Exception):
    """An argument was used."""


class _Unused(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an extra argument; any use of it raises."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Used

    def __getattr__(self, attribute: str) -> NoReturn:
        raise _Used


def refuse_unread(
    who: str,
    reads: Sequence[str],
    given: dict[str, Any],
    inner: optax.GradientTransformationExtraArgs,
    grads: Tree,
    params: Tree | None,
) -> None:
    """Refuse extra arguments that are called like a wrapper's, and that nobody reads.

    Args:
        who: The wrapper.
        reads: The names that it reads itself.
        given: The other extra arguments, which it hands to `inner`.
        inner: The transformation inside.
        grads: For a step of it.
        params: The parameters, if there are any.
    """
    start = grads if params is None else params
    for name in given:
        near = difflib.get_close_matches(name, _NAMES, 1, 0.75)
        if not near:
            continue
        asked = {**given, name: _Unused()}

        def step(asked=asked):
            return inner.update(grads, inner.init(start), params, **asked)

        try:
            # In a context of its own, where no host counts this step.
            contextvars.Context().run(jax.eval_shape, step)
        except Exception:  # It was used, or the step itself will say what is wrong.
            continue
        meant = near[0] if near[0] in reads else "weight"
        raise ValueError(
            f"{who} was given {name}=, which neither it nor the optimizer inside of it "
            f"reads: it would count for nothing. Did you mean {meant}=? {who} reads "
            f"{', '.join(reads)}."
        )


# The list to which the wrapper that takes the `weight` of a step adds itself.
_takers: contextvars.ContextVar[list[None]] = contextvars.ContextVar("takers")


def take_weight(weight: Any) -> None:
    """Say that the calling wrapper uses this step's `weight`, if there is one.

    It is said while the step is traced, and not by the transformation, because chains
    and masks around a wrapper hide what it is.
    """
    takers = _takers.get(None)
    if weight is not None and takers is not None:
        takers.append(None)


@contextlib.contextmanager
def weight_takers() -> Iterator[list[None]]:
    """A list that is empty unless a wrapper called meanwhile takes the weight."""
    takers: list[None] = []
    before = _takers.set(takers)
    try:
        yield takers
    finally:
        _takers.reset(before)


def landing(params: Tree, target: Tree) -> Tree:
    """Updates that bring the parameters exactly onto a target, rounded to their dtype.

    The target is rounded first, and the difference is taken in a wide dtype:
    `optax.apply_updates` adds wide and casts back, so half precision parameters land on
    the same bits wherever they came from.
    """

    def difference(param, target):
        wide = trees.at_least_float32(param.dtype)
        rounded = trees.round_to(target.astype(wide), param.dtype)
        return rounded - param.astype(wide)

    return jax.tree.map(difference, params, target)


def landing_update(apply: Callable[..., tuple[Tree, Tree]]) -> Callable[..., Any]:
    """Optax's `update`, for a wrapper whose `apply` returns new parameters."""

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "Workers exchange parameters; got params=None. Call update(grads, "
                "state, params)."
            )
        new_params, state = apply(updates, state, params, **extra_args)
        return landing(params, new_params), state

    return update


def _explained(
    init: Callable[..., Any], step: Callable[..., Any], made: set[Any]
) -> Callable:
    """A step that refuses a state of another transformation, and explains its errors.

    Of the states that `init` has made the kinds are known. Of others they are compared
    once with those that it would make.
    """

    @functools.wraps(step)
    def explained(
        updates: Tree, state: Tree, params: Tree = None, **extra_args: Any
    ) -> Any:
        kinds = trees.kinds_of(state)
        if kinds not in made and params is not None:
            refuse_swapped(state, params)
            require_state(init, state, params)
            made.add(kinds)
        with explains_state(init, state, params):
            return step(updates, state, params, **extra_args)

    return explained


def refuse_swapped(state: Tree, params: Tree) -> None:
    """Refuse parameters and an optimizer's state that have changed places."""
    states = fields.nodes_of(params, fields.is_of_optimizer)
    if states and not fields.nodes_of(state, fields.is_of_optimizer):
        raise TypeError(
            f"The parameters are an optimizer's state, {type(states[0]).__name__}, and "
            "the state is none: the two have changed places. A step takes, starts "
            "with and returns both in one order: step(params, state, batch), "
            "workers.start((params, state)), apply_gradients(tx, grads, state, params)."
        )


@functools.lru_cache(maxsize=64)
def _compiled(period: optax.Schedule) -> optax.Schedule:
    """The schedule as a compiled step reads it, whose numbers a host would not find."""
    return jax.jit(lambda step: period(step))


def period_length(period: optax.Schedule, begin: int) -> int:
    """The length of the period that begins in this step, in float32 as in `is_due`."""
    # A method is known by its object's identity, also where that has no hash.
    return _period_length(period.__call__, begin)


@functools.lru_cache(maxsize=1024)
def _period_length(period: optax.Schedule, begin: int) -> int:
    try:
        given = _compiled(period)(np.int32(begin))
    except (TypeError, ValueError):  # It is for the host; no step can read it.
        given = period(begin)
    given = np.asarray(jax.device_get(given))
    length = math.nan
    if not given.shape and given.dtype != object:
        length = float(given.astype(np.float32))
    if not length > 0:
        raise ValueError(
            "communication_period must be a schedule of scalars, numbers of steps above"
            f" 0; it gave {given} for the period that begins in step {begin}. Write for"
            " example lambda step: jnp.maximum(1, schedule(step))."
        )
    return int(min(np.ceil(length), 2**31))
