# SPDX-License-Identifier: Apache-2.0
"""What workers that join have of the state that is no optimizer's.

Of a replay buffer or an environment no mean of others is one: who resizes gives it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.comm.shards import Names
from optx_sync.core import forms
from optx_sync.core.forms import Form
from optx_sync.core.trees import Tree, names_of, path_name
from optx_sync.state import held
from optx_sync.state.leaves import is_key, leaves_of

# Where no worker joins, `None`; else one worker's state, or a function of a worker's
# number that returns one.
Given: TypeAlias = Literal["mean", "first"] | Tree | Callable[[int], Tree] | None


def fill(form: Form, before: Sequence[Tree], after: list[Tree], joiners: Given) -> None:
    """Put what joiners have in place, in arrays of all workers that were resized."""
    parts = _beside(form)
    parts = {place: part for place, part in parts.items() if not is_key(before[place])}
    changed = {part for place, part in parts.items() if _differs(before[place])}
    asked = [place for place, part in parts.items() if part in changed]
    if not asked or isinstance(joiners, str):  # which `Resize` has done
        return
    paths, given = form.paths(), _function(joiners)
    if joiners is None:
        raise ValueError(
            f"The state {path_name(paths[asked[0]])} is no optimizer's and differs "
            "between workers: of one that joins, only you know it. Pass joiners=state, "
            "one worker's as for workers.start; joiners=lambda worker: state, one of "
            "each; joiners='first' or 'mean', that of others."
        )
    joined: list[list[Tree]] = []
    for worker in range(*(len(x[asked[0]]) for x in (before, after))):
        own, arrays = forms.split(forms.with_arrays(given(worker)))
        if own != form:
            raise ValueError(
                "joiners gives a state of another form than that of the workers: "
                f"{forms.difference(form, own)}. Give what workers.start was given."
            )
        joined.append(arrays)
    for place in asked:
        x = after[place]
        old, inside = x[: len(before[place])], x.shape[1:]
        news = [arrays[place] for arrays in joined]
        shapes = {jnp.shape(new) for new in news}
        if any(inside[len(inside) - len(shape) :] != shape for shape in shapes):
            raise ValueError(
                f"joiners gives {path_name(paths[place])} the shape {shapes.pop()}; "
                f"a worker's has the shape {inside}."
            )
        rows = [jnp.broadcast_to(new, inside).astype(x.dtype) for new in news]
        after[place] = jnp.concatenate([old, jnp.stack(rows)])


def _function(joiners: Any) -> Callable[[int], Tree]:
    return joiners if forms.is_function(joiners) else lambda _: joiners


def _beside(form: Form) -> dict[int, Names]:
    """The arrays that are no optimizer's and no parameters, with the part of each.

    A part is as much of the state as holds none of these: a replay buffer with its
    arrays and its counters.
    """
    numbers = range(len(form.paths()))
    state = form.bare(numbers)
    centers = held.held(form)
    if centers:
        params = {place for one in centers for place in one.places}
    else:
        params = {leaf.x for leaf in held.params(state, leaves_of(state)).values()}
    outside = held.outside(state)
    kinds = form.variables()
    found = {
        name: place
        for name, place in outside.items()
        if not forms.is_statistic(kinds[place])
        and (place not in params or not forms.is_trained(kinds[place]))
    }
    names = (names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))
    others = {name[:k] for name in names if name not in found for k in range(len(name))}
    return {
        place: next(
            (name[:k] for k in range(len(name)) if name[:k] not in others), name
        )
        for name, place in found.items()
    }


def _differs(x: Tree) -> bool:
    """Whether an array of all workers differs between them."""
    x = np.asarray(jax.device_get(x))
    return any(
        not np.array_equal(x[0], one, equal_nan=x.dtype.kind in "fc") for one in x
    )
