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
def test_few_lines_change(style):
    counts = {step: changed(*(lines(style, name) for name in step)) for step in STEPS}
    assert all(0 < counts[step] <= most for step, most in STEPS.items()), counts


def test_two_lines_change_under_pmap():
    before, after = (lines("pmap", name) for name in ("plain", "two_lines"))
    assert "import optx_sync as oxs" in after
    after.remove("import optx_sync as oxs")
    assert changed(before, after) == 2


@pytest.mark.parametrize("style", STYLES)
def test_the_page_shows_these_changes(style):
    page = (ADOPT.parents[1] / "docs" / f"in-{style}.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    steps = [*([("plain", "two_lines")] if style == "pmap" else []), *STEPS]
    for block, step in zip(shown, steps, strict=True):
        before, after = (lines(style, name) for name in step)
        diff = list(difflib.unified_diff(before, after, n=0))[2:]
        said = [x for x in diff if x[0] in "+-"]
        assert sorted(x for x in block.splitlines() if x[0] in "+-") == sorted(said)


def trained(style, name, folder, steps):
    """What a program prints: its losses by step, and what it measures at the end."""
    printed = scripts.run(
        ADOPT / style / f"{name}.py",
        *(folder, steps),
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES=8,
        NPROC=16,
    )
    losses = re.findall(r"step (\d+): loss (\d\.\d{3})", printed)
    end, is_good = ENDS.get(style, OTHERS)
    (found,) = re.findall(end, printed)
    assert is_good(float(found)), printed
    return {int(step): float(loss) for step, loss in losses}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_they_train(style, tmp_path):
    """Also from a checkpoint: the same program, and with six workers in its place."""
    alone = trained(style, "plain", tmp_path / "plain", 20)
    replicas = trained(style, "replicas", tmp_path / "replicas", 20)
    assert alone.keys() == replicas.keys() == {0, 10}
    # Replicas make the update of one device, with other dropout masks.
    assert replicas[10] == pytest.approx(alone[10], rel=0.05)
    assert trained(style, "diloco", tmp_path / "diloco", 20).keys() == {0, 10}
    assert trained(style, "six_workers", tmp_path / "diloco", 31).keys() == {20, 30}
    trained(style, "pods", tmp_path / "pods", 20)


def test_two_lines_train(tmp_path):
    two, plain = (
        trained("pmap", name, tmp_path / name, 11) for name in ("two_lines", "plain")
    )
    assert two == pytest.approx(plain, rel=1e-2)
