"""Every code block of the README runs, and the README names what there is."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def test_code_blocks_run():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    # In order, in one process of its own: it sets the number of devices.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    loss, center, audited = done.stdout.splitlines()[:3]
    assert float(loss) < 1e-3
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", center)]
    assert all(
        abs(a - b) < 0.05 for a, b in zip(numbers, [1.0, -2.0, 3.0], strict=True)
    ), center
    assert audited == "all-reduce 400 ((0, 1, 2, 3, 4, 5, 6, 7),) False"


def test_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
