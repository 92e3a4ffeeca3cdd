"""Four programs as people write them, and the lines that change to many workers."""

import difflib
import re
from pathlib import Path

import pytest

from tests import scripts

ADOPT = Path(__file__).parents[2] / "examples" / "adopt"
STYLES = "nnx", "linen", "equinox", "pmap"
# Lines that change from one program to the next, at most.
STEPS = {
    ("plain", "replicas"): 8,
    ("replicas", "diloco"): 8,
    ("diloco", "pods"): 10,
    ("diloco", "six_workers"): 6,
}
# Under pmap at first the import, and two lines.
TWO_LINES = {("plain", "two_lines"): 3}
# A style's own name for what is measured at the end, and what it must be.
ENDS = {"pmap": (r"test accuracy (\d+\.\d)%", lambda x: x > 60)}
OTHERS = r"held-out loss (\d\.\d{3})", lambda x: x < 3.3


def lines(style, name):
    """A program's, without its docstring and blank ones."""
    text = (ADOPT / style / f"{name}.py").read_text()
    return [x for x in text.splitlines() if x.strip() and '"""' not in x]


def changed(before, after):
    """How many lines are added, replaced or removed; a replaced one counts once."""
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(j - i, n - m) for tag, i, j, m, n in codes if tag != "equal")


@pytest.mark.parametrize("style", STYLES)
def test_few_lines_change_and_the_page_shows_them(style):
    page = (ADOPT.parents[1] / "docs" / f"in-{style}.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    steps = (TWO_LINES if style == "pmap" else {}) | STEPS
    for block, (step, most) in zip(shown, steps.items(), strict=True):
        before, after = (lines(style, name) for name in step)
        assert 0 < changed(before, after) <= most, step
        diff = list(difflib.unified_diff(before, after, n=0))[2:]
        said = [x for x in diff if x[0] in "+-"]
        assert sorted(x for x in block.splitlines() if x[0] in "+-") == sorted(said)


# How each is called: its name, the folder of its checkpoints, and up to which step.
RUNS = [(name, name, 20) for name in ("plain", "replicas", "diloco", "pods")]
RUNS += [("six_workers", "diloco", 31)]
# One after another in one process, whose small programs compile once.
ALL = """
import runpy, sys
for script, *sys.argv[1:] in {}:
    print("====", flush=True)
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What programs print: losses by step, and what they measure at the end."""
    folder = tmp_path_factory.mktemp("adopt")
    runs = [(style, *run) for style in STYLES for run in RUNS]
    runs.append(("pmap", "two_lines", "two_lines", 20))
    asked = [
        [str(ADOPT / style / f"{name}.py"), str(folder / style / place), str(steps)]
        for style, name, place, steps in runs
    ]
    printed = scripts.run(
        ALL.format(asked), JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=8, NPROC=16
    )
    found = {}
    for (style, name, *_), said in zip(runs, printed.split("====\n")[1:], strict=True):
        losses = re.findall(r"step (\d+): loss (\d\.\d{3})", said)
        end, is_good = ENDS.get(style, OTHERS)
        (measured,) = re.findall(end, said)
        assert is_good(float(measured)), said
        found[style, name] = {int(step): float(loss) for step, loss in losses}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_they_train(style, trained):
    """Also from a checkpoint: the same program, and with six workers in its place."""
    alone, replicas = trained[style, "plain"], trained[style, "replicas"]
    assert alone.keys() == replicas.keys() == {0, 10}
    # Replicas make the update of one device, with other dropout masks.
    assert replicas[10] == pytest.approx(alone[10], rel=0.05)
    assert trained[style, "diloco"].keys() == trained[style, "pods"].keys() == {0, 10}
    assert trained[style, "six_workers"].keys() == {20, 30}
    if style == "pmap":
        assert trained[style, "two_lines"] == pytest.approx(alone, rel=1e-2)
