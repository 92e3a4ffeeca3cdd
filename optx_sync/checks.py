# SPDX-License-Identifier: Apache-2.0
"""What every wrapper asks of its input: an inner transformation, matching gradients."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax

from optx_sync.rows.slices import IndexedSlices, check_rows
from optx_sync.trees import is_gradient_leaf, leaves_with_names, values_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def shows_call(
    call: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make arguments that do not fit a function a TypeError that shows `call`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{function.__name__}: {error}. Write for example {call}."
                ) from None
            return function(*args, **kwargs)

        return checked

    return decorate


def check_inner(inner: Any, call: str) -> optax.GradientTransformationExtraArgs:
    """The wrapped transformation; a TypeError that shows `call` for anything else."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner must be an Optax gradient transformation; got {inner!r} of type "
            f"{type(inner).__name__}. Write for example {call}."
        )
    return optax.with_extra_args_support(inner)


def check_grads(grads: Any, params: Any | None) -> None:
    """Refuse gradients that are not floating, or do not match the parameters.

    A leaf is an array, an `IndexedSlices` or `None`. A mismatch names its path.
    """
    found = dict(leaves_with_names(grads))
    for path, grad in found.items():
        if grad is None:
            continue
        dtype = jnp.result_type(values_of(grad))
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"The gradient at {path} has dtype {dtype}; gradients must be "
                "floating. Leave integer parameters out (optax.masked), or pass None."
            )
    if params is None:
        return
    expected = dict(leaves_with_names(params))
    for path in [*expected, *found]:
        if (path in expected) != (path in found):
            where = "gradients" if path in expected else "parameters"
            raise ValueError(
                f"The gradients do not have the structure of the parameters: {path} "
                f"is missing in the {where}. Got gradients "
                f"{jax.tree.structure(grads)} for parameters "
                f"{jax.tree.structure(params)}."
            )
        grad, param = found[path], expected[path]
        if grad is None or param is None:
            continue
        if isinstance(grad, IndexedSlices):
            check_rows(grad, param, path)
        elif jnp.shape(grad) != jnp.shape(param):
            raise ValueError(
                f"The gradient at {path} has shape {jnp.shape(grad)}, which does not "
                f"match its parameter's shape {jnp.shape(param)}."
            )


def fill_missing(updates: Any, params: Any | None) -> Any:
    """Zeros for the updates that are `None`, so that `optax.apply_updates` works."""
    if params is None:
        return updates
    return jax.tree.map(
        lambda update, param: (
            jnp.zeros_like(param) if update is None and param is not None else update
        ),
        updates,
        params,
        is_leaf=is_gradient_leaf,
    )
