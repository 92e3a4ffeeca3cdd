# SPDX-License-Identifier: Apache-2.0
"""The keywords that every center rule takes, and how a rule shows them."""

import inspect
from collections.abc import Callable
from typing import TypedDict, TypeVar

import jax
from jax.typing import DTypeLike

from optx_sync.center.contract import CenterMemory, InnerState
from optx_sync.center.fragments import Fragments
from optx_sync.center.lockstep import center_variable
from optx_sync.exchange.contract import Exchange


class CenterOptions(TypedDict, total=False):
    """Keywords of `center_variable` that every center rule passes on to it."""

    inner_state: InnerState
    drop_nonfinite: bool
    accumulator_dtype: DTypeLike | None
    exchange: Exchange | None
    measure: bool
    shard_center: bool
    fragments: Fragments | None
    delay: int | None
    keep_local: float | jax.Array | None
    center_memory: CenterMemory


Function = TypeVar("Function", bound=Callable)


def spells_out_options(function: Function) -> Function:
    """Show the keywords of `CenterOptions` one by one in a signature, with defaults.

    For `help`, and for `optax.inject_hyperparams`, which cannot read `**options`.
    """
    signature = inspect.signature(function)
    all_options = inspect.signature(center_variable).parameters
    spelled = [
        all_options[name]
        for name in CenterOptions.__annotations__
        if name in all_options
    ]
    own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *spelled])  # pyright: ignore[reportFunctionMemberAccess] # what inspect reads
    return function
