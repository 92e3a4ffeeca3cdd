# SPDX-License-Identifier: Apache-2.0
"""Signatures as `help` shows them: types by the names that a program has for them."""

import functools
import inspect
import re
from types import FunctionType
from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

# Python shows the members of these one by one, 221 letters for a schedule.
_ALIASES = {
    "ArrayLike": ArrayLike,
    "ArrayTree": optax.Params,
    "DTypeLike": DTypeLike,
    "optax.Schedule": optax.Schedule,
    "optax.ScalarOrSchedule": optax.ScalarOrSchedule,
}
_WHERE = {
    r"jax\.jaxlib\._jax\.|jaxlib\._jax\.": "jax.",
    r"jax\._src\.mesh\.": "jax.sharding.",
    r"jax\._src\.(\w+\.)*": "jax.",
    r"optax\._src\.(\w+\.)*": "optax.",
    r"optx_sync\.(\w+\.)*": "",
    r"collections\.abc\.|typing\.": "",
    r"pathlib\._local\.": "pathlib.",  # Python 3.13
    r"ForwardRef\('([^']*)'\)": r"\1",
    r"~(?=\w)": "",
    r"\bNoneType\b": "None",
}


class _Shown(str):
    """An annotation that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def readable(names: dict[str, Any]) -> None:
    """Give all of this package among a module's names a signature that can be read.

    What a type checker and `typing.get_type_hints` see stays as it is written.
    """
    for thing in names.values():
        if not str(getattr(thing, "__module__", "")).startswith("optx_sync"):
            continue
        for function in vars(thing).values() if isinstance(thing, type) else [thing]:
            function = getattr(function, "__func__", function)
            if isinstance(function, FunctionType):
                function.__signature__ = _shown(inspect.signature(function))  # pyright: ignore[reportFunctionMemberAccess] # what inspect reads


def _shown(signature: inspect.Signature) -> inspect.Signature:
    of = [
        parameter.replace(annotation=_text(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    returns = _text(signature.return_annotation)
    return signature.replace(parameters=of, return_annotation=returns)


def _text(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty or isinstance(annotation, _Shown):
        return annotation
    text = inspect.formatannotation(annotation)
    for long, short in _long_names():
        text = text.replace(long, short)
    for pattern, public in _WHERE.items():
        text = re.sub(pattern, public, text)
    return _Shown(text)


@functools.cache
def _long_names() -> list[tuple[str, str]]:
    """How Python shows each alias, alone and in a union of more, the longest first."""
    found = {}
    for name, of in _ALIASES.items():
        text = inspect.formatannotation(of)
        found[text] = name
        found[inspect.formatannotation(of | None)] = f"{name} | None"
        found[text.removeprefix("Union[").removesuffix("]" * ("Union[" in text))] = name
    return sorted(found.items(), key=lambda pair: -len(pair[0]))
