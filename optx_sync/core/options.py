# SPDX-License-Identifier: Apache-2.0
"""What the options of a wrapper cannot stand beside, as a table of conditions."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

Options = TypeVar("Options")
# Rows of a condition on the options, and what is wrong where it is so and how to mend
# it: a template for `str.format` in which `{0}` stands for the options.
Refused: TypeAlias = tuple[tuple[Callable[[Options], object], str], ...]


def refuse(options: Options, table: Refused[Options]) -> None:
    """Raise a ValueError with the sentence of the first row whose condition is so."""
    for condition, sentence in table:
        if condition(options):
            raise ValueError(sentence.format(options))
