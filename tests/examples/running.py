"""Runs an example, and reads the table that it prints."""

import re
from pathlib import Path

from tests import scripts

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, **environment):
    """What an example prints that is run as a user runs it."""
    return scripts.run(EXAMPLES / f"{name}.py", *arguments, **environment)


def cells(printed):
    """The rows of a printed table, without its titles."""
    lines = (line.strip("│ ") for line in printed.splitlines() if line.startswith("│"))
    return [re.split(r"\s*│\s*", line) for line in lines]
