"""A script of one's own before and after: each runs, and few lines differ."""

import difflib
import re
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).parents[2]
ADOPT = ROOT / "examples" / "adopt"
# Lines that were removed and added, besides the docstring and blank ones.
CHANGED = {
    ("before", "after_sync"): (3, 6),
    ("after_sync", "after_elastic"): (2, 2),
}


def _lines(name):
    return (ADOPT / f"{name}.py").read_text().splitlines()


def _changed(before, after):
    """The lines of a diff that say something, without the docstring's."""
    diff = list(difflib.unified_diff(_lines(before), _lines(after), n=0))[2:]
    return [
        line
        for line in diff
        if line[0] in "+-" and line[1:].strip() and '"""' not in line
    ]


@pytest.mark.parametrize("name", ["before", "after_sync", "after_elastic"])
def test_it_trains(name):
    source = (ADOPT / f"{name}.py").read_text()
    short = source.replace("STEPS, BATCH = 300, 128", "STEPS, BATCH = 60, 128")
    assert short != source
    printed = scripts.run(short, JAX_PLATFORMS="cpu")
    numbers = re.fullmatch(
        r"loss (\d\.\d{3}), test accuracy (\d+\.\d)%", printed.strip()
    )
    assert numbers, printed
    assert float(numbers[1]) < 0.5 and float(numbers[2]) > 90


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_few_lines_change(before, after):
    assert len(_lines("before")) == 40
    changed = _changed(before, after)
    removed = [line for line in changed if line[0] == "-"]
    assert (len(removed), len(changed) - len(removed)) == CHANGED[before, after]


def test_the_page_shows_these_changes():
    page = (ROOT / "docs" / "index.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for block, (before, after) in zip(shown, CHANGED, strict=True):
        lines = [line for line in block.splitlines() if line[0] in "+-"]
        assert lines == _changed(before, after)
