"""What is refused, as tables have it: "ValueError: words of the message"."""

import builtins
from typing import Any

import pytest


def refused(said: str) -> Any:
    """A context in which this is raised; behind the error's name a pattern."""
    kind, _, pattern = said.partition(": ")
    return pytest.raises(getattr(builtins, kind), match=pattern)
