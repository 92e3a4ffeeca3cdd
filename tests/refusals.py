"""What is refused, as tables have it: a call, and "ValueError: words of the message".

A line of a table is a call; one that is indented goes on with it. What stands behind
`# ` is said to it, and to the calls above it of which nothing is said yet.
"""

import builtins
from typing import Any

import pytest


def refused(said: str) -> Any:
    """A context in which this is raised; behind the error's name a pattern."""
    kind, _, pattern = said.partition(": ")
    return pytest.raises(getattr(builtins, kind), match=pattern)


def table(text: str) -> Any:
    """Runs a test with (call, said) for each call of a table."""
    rows: list[tuple[str, str]] = []
    calls: list[str] = []
    for line in text.strip().splitlines():
        call, _, said = line.partition("# ")
        if call.startswith(" "):
            calls[-1] += call.strip()
        elif call:
            calls.append(call.strip())
        if said:
            rows += [(one, said) for one in calls]
            calls = []
    assert not calls, calls
    return pytest.mark.parametrize("call, said", rows, ids=[call for call, _ in rows])


def all_refused(names: dict[str, Any]) -> Any:
    """`all_refused(globals())(text)` is the test of a table; calls find the names."""

    def test_of(text):
        @table(text)
        def test(call, said):
            with refused(said):
                eval(call, names)

        return test

    return test_of
