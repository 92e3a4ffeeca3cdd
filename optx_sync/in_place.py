# SPDX-License-Identifier: Apache-2.0
"""Functions that change Flax NNX objects in place must return them where mapped."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from optx_sync.trees import check_arrays, path_name


def returns_changes(fun: Callable[..., Any], mapper: str) -> Callable[..., Any]:
    """Refuse a function that changes NNX variables in place and does not return them.

    Results that are no arrays are refused, too.

    A mapped function gets copies of the caller's objects. A change to a copy that is
    not returned is lost: a step would train nothing, without an error.
    """

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        variables, places = _variables((args, kwargs)), []
        leaves, treedef = jax.tree.flatten((args, kwargs))
        if variables:
            # Numbers in the leaves' places say which leaves are those of the variables.
            numbered = _variables(treedef.unflatten(range(len(leaves))))
            places = [jax.tree.leaves(variable) for _, variable in numbered]
        results = fun(*args, **kwargs)
        check_arrays(results, f"The result of {mapper}")
        kept = {id(x) for x in jax.tree.leaves(results)}
        lost = [
            (name, place)
            for (name, variable), numbers in zip(variables, places, strict=True)
            for place, x in zip(numbers, jax.tree.leaves(variable), strict=False)
            if x is not leaves[place] and id(x) not in kept
        ]
        if lost:
            same = _unchanged(fun, leaves, treedef, places)
            lost = [name for name, place in lost if place not in same]
        if lost:
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(
                f"The function given to {mapper} changes its argument {lost[0]}{others}"
                " in place and does not return what it changed. Outside nothing would "
                "change, as the function works on copies. Return the objects and take "
                "them from the call, `model, optimizer, loss = step(model, optimizer, "
                "batch)`; change nnx.clone(model) where the change is to be forgotten."
            )
        return results

    return checked


def _variables(tree: Any) -> list[tuple[str, Any]]:
    """(path, variable) of each NNX variable, without importing Flax for it."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    variable: type = nnx.Variable
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, variable)
    )
    # The first key tells positional arguments from keywords.
    return [(path_name(path[1:]), x) for path, x in found if isinstance(x, variable)]


def _unchanged(
    fun: Callable[..., Any], leaves: list[Any], treedef: Any, places: list[Any]
) -> set[int]:
    """The indices of variables that `fun` sets to their old values.

    `nnx.remat` and `nnx.jit` do so with all their arguments. Only the program shows it,
    so `fun` is traced once more.
    """

    def variables_after(leaves):
        args, kwargs = treedef.unflatten(leaves)
        fun(*args, **kwargs)
        return [jax.tree.leaves(x) for _, x in _variables((args, kwargs))]

    jaxpr = jax.make_jaxpr(variables_after)(leaves).jaxpr
    after = zip(jax.tree.leaves(places), jaxpr.outvars, strict=False)
    return {place for place, out in after if _input_of(jaxpr, out) == place}


def _input_of(jaxpr: Any, out: Any) -> int | None:
    """The index of the input that a program returns as this variable, if any."""
    makers = {id(x): (eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.outvars)}
    while id(out) in makers:
        eqn, place = makers[id(out)]
        inner = eqn.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if inner is None or len(inner.invars) != len(eqn.invars):
            return None
        number = _input_of(inner, inner.outvars[place])
        if number is None:
            return None
        out = eqn.invars[number]
    inputs = {id(x): i for i, x in enumerate(jaxpr.invars)}
    return inputs.get(id(out))
