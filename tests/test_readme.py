"""The README's program trains, and its links lead somewhere."""

import pathlib
import re

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
    assert all(
        abs(a - b) < 0.05 for a, b in zip(numbers, [1.0, -2.0, 3.0], strict=True)
    ), center
    # The parameters in a round, and nothing in other steps.
    assert audited == ["all-reduce 12 True"]


def test_it_is_short_and_promises_no_package_index():
    assert len(TEXT.splitlines()) <= 130
    assert "pip install optx" not in TEXT


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
