# SPDX-License-Identifier: Apache-2.0
"""What becomes of the state of `inner` in a round: kept, reset, or averaged in part."""

from collections.abc import Mapping

import jax
import optax

from optx_sync.center.contract import InnerState, InnerStates
from optx_sync.center.worker import Worker
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import mean_or
from optx_sync.comm.varying import vary_like
from optx_sync.core.checks import integer, one_of
from optx_sync.core.trees import Tree, is_inexact, names_of


def check_inner_state(asked: InnerState) -> InnerState:
    """`inner_state=` of a center rule; else a TypeError or ValueError."""
    if not isinstance(asked, Mapping):
        one_of("inner_state", asked, InnerStates)
        return asked
    mend = "It counts rounds: write for example inner_state={'mu': 3, 'nu': 6}."
    return {
        name: integer(f"inner_state[{name!r}]", rounds, mend)
        for name, rounds in asked.items()
    }


def check_fields(asked: InnerState, state: optax.OptState, params: Tree) -> None:
    """Refuse the name of a field that no floating array of the state lies in."""
    if not isinstance(asked, Mapping):
        return
    leaves = jax.tree.leaves(state)
    both = zip(_names_in(state, params), leaves, strict=True)
    known = {name for names, x in both if is_inexact(x.dtype) for name in names}
    unknown = sorted(set(asked) - known)
    if unknown:
        raise ValueError(
            f"inner_state names {unknown[0]!r}, but no floating array of the state of "
            f"`inner` lies in a field or under a key of that name; these are "
            f"{sorted(known)}."
        )


def after_round(
    asked: InnerState,
    inner: optax.GradientTransformation,
    worker: Worker,
    rounds: jax.Array,
    axis_name: AxisName,
    weight: jax.Array | None,
) -> optax.OptState:
    """The state of `inner` after a round; before it there were so many others."""
    if asked == "keep":
        return worker.inner
    if asked == "reset":
        return inner.init(worker.params)
    leaves, treedef = jax.tree.flatten(worker.inner)
    names = _names_in(worker.inner, worker.params)

    def averaged(given):
        # Where nobody counts, each state stays as it is.
        return vary_like(mean_or(given, given, axis_name, weight=weight), given)

    places: dict[int, list[int]] = {}  # of arrays, by the rounds from mean to mean
    for place, (own, x) in enumerate(zip(names, leaves, strict=True)):
        every = _period(asked, own)
        if every is not None and is_inexact(x.dtype):
            places.setdefault(every, []).append(place)
    for every, some in places.items():
        given = [leaves[i] for i in some]
        if every == 1:
            means = averaged(given)
        else:
            due = (rounds + 1) % every == 0
            means = jax.lax.cond(due, averaged, lambda same: same, given)
        for i, mean in zip(some, means, strict=True):
            leaves[i] = mean
    return treedef.unflatten(leaves)


def _names_in(state: optax.OptState, params: Tree) -> list[tuple[str, ...]]:
    """The names of the fields and keys around each leaf, without a parameter's own.

    Those of the path from the state's root to where a tree like the parameters begins:
    the second moment of a parameter called `mu` lies in `nu` alone.
    """
    own = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    found = []
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        ends = (end for end in range(len(path)) if path[end:] in own)
        found.append(names_of(path[: next(ends, len(path))]))
    return found


def _period(asked: InnerState, names: tuple[str, ...]) -> int | None:
    """Rounds from mean to mean of what lies there; `None` if it is never averaged."""
    if not isinstance(asked, Mapping):
        return 1
    # Of several names the innermost.
    return next((asked[name] for name in reversed(names) if name in asked), None)
