"""The README's program trains, and its links lead somewhere."""

import pathlib
import re

import pytest

from tests import scripts

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    # In order, in one process of its own: it sets the number of devices.
    printed = scripts.run("\n".join(blocks))
    loss, center, *audited = printed.splitlines()
    assert float(loss) < 1e-3
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", center)]
    assert numbers == pytest.approx([1.0, -2.0, 3.0], abs=0.05)
    # The parameters in a round, and nothing in other steps.
    assert audited == ["all-reduce 12 True"]


def test_the_first_page_has_the_same_program_and_table():
    page = (ROOT / "docs" / "index.md").read_text()
    program = re.findall(r"```python\n.*?```", TEXT, re.DOTALL)
    assert re.findall(r"```python\n.*?```", page, re.DOTALL) == program
    table = re.findall(r"\| you want \|.*?\n\n", TEXT, re.DOTALL)
    two_lines = re.findall(r"```diff\n.*?```", TEXT, re.DOTALL)
    assert len(program) == len(table) == len(two_lines) == 1
    assert all(part in page for part in (*table, *two_lines))


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
