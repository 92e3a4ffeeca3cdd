"""What checks the annotations of shapes: `check`, for jaxtyping's import hook."""

import typing

import beartype
import jaxtyping

# An int is a float to Python's type checkers too.
_checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function):
    """The function, checked where its annotations name shapes, else as it is."""
    hints = getattr(function, "__annotations__", {})
    return _checked(function) if any(map(_names_shapes, hints.values())) else function


def _names_shapes(hint):
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_shapes, typing.get_args(hint)))
