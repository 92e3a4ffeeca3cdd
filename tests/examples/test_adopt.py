"""Four programs as people write them, and the lines that change to many workers."""

import difflib
import re
import textwrap
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).parents[2]
# The styles, and the tab of the page that each has in every section.
TABS = {
    "nnx": "Flax NNX",
    "linen": "Flax Linen",
    "equinox": "Equinox",
    "pmap": "pmap",
}
TAB = r'^=== "(.*)"\n((?:\n| {4}.*\n)*)'
# What the page changes, block by block: in which program, and how many lines at most.
STEPS = {
    "replicas": ("plain", 8),
    "diloco": ("replicas", 8),
    "pods": ("diloco", 10),
    "six_workers": ("diloco", 6),
}
# Under pmap at first the import, and two lines.
TWO_LINES = {"two_lines": ("plain", 3)}
# Workers that are sharded: a block of another page.
SHARDED = {"fsdp": ("diloco", 12)}
# A style's own name for what is measured at the end, and what it must be.
ENDS = {"pmap": (r"test accuracy (\d+\.\d)%", lambda x: x > 60)}
OTHERS = r"held-out loss (\d\.\d{3})", lambda x: x < 3.3


def changed(before, after):
    """How many lines are added, replaced or removed; a replaced one counts once."""
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(j - i, n - m) for tag, i, j, m, n in codes if tag != "equal")


def applied(lines, block):
    """A program after what a block changes in it; " ..." is between two places."""
    for hunk in re.split(r"^ \.\.\.\n", block, flags=re.MULTILINE):
        old, new = (
            [x[1:] for x in hunk.splitlines() if x[0] in " " + sign] for sign in "-+"
        )
        (at,) = (i for i in range(len(lines)) if lines[i : i + len(old)] == old)
        lines = [*lines[:at], *new, *lines[at + len(old) :]]
    return lines


def diffs(page):
    return re.findall(r"```diff\n(.*?)```", page, re.DOTALL)


def programs(style):
    """The plain one, and what the pages make of it; their lines, without blank ones."""
    plain = (ROOT / "examples" / "adopt" / f"plain_{style}.py").read_text()
    page = (ROOT / "docs" / "your-program.md").read_text()
    tabs = re.findall(TAB, page, re.MULTILINE)
    assert {name for name, _ in tabs} == set(TABS.values())
    # What stands outside of all tabs is for all styles.
    page = re.sub(
        TAB,
        lambda tab: textwrap.dedent(tab[2]) if tab[1] == TABS[style] else "",
        page,
        flags=re.MULTILINE,
    )
    steps, blocks = (TWO_LINES if style == "pmap" else {}) | STEPS, diffs(page)
    if style == STYLE:
        steps = steps | SHARDED
        blocks += diffs((ROOT / "docs" / "large-models.md").read_text())
    made = {"plain": [x for x in plain.splitlines() if x.strip()]}
    for (name, (before, _)), block in zip(steps.items(), blocks, strict=True):
        made[name] = applied(made[before], block)
    return made


@pytest.mark.parametrize("style", TABS)
def test_few_lines_change(style):
    made = programs(style)
    for name, (before, most) in (STEPS | TWO_LINES | SHARDED).items():
        if name in made:
            assert 0 < changed(made[before], made[name]) <= most, name


# In which styles alone some are run: replicas and pods are the same lines in each, and
# the plain program is in what becomes of it.
STYLE = "nnx"
RUN = {"replicas": (STYLE,), "pods": (STYLE,), "plain": (STYLE, "pmap")}
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
    asked, runs = [], []
    for style in TABS:
        for name, lines in programs(style).items():
            if style not in RUN.get(name, TABS):
                continue
            script = folder / f"{style}_{name}.py"
            script.write_text("\n".join(lines))
            # Six workers go on where eight have saved, and for ten steps more.
            place, steps = ("diloco", 31) if name == "six_workers" else (name, 20)
            asked.append([str(script), str(folder / style / place), str(steps)])
            runs.append((style, name))
    printed = scripts.run(
        ALL.format(asked), JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=8, NPROC=16
    )
    found = {}
    for (style, name), said in zip(runs, printed.split("====\n")[1:], strict=True):
        losses = re.findall(r"step (\d+): loss (\d\.\d{3})", said)
        end, is_good = ENDS.get(style, OTHERS)
        (measured,) = re.findall(end, said)
        assert is_good(float(measured)), said
        found[style, name] = {int(step): float(loss) for step, loss in losses}
    return found


@pytest.mark.parametrize("style", TABS)
def test_they_train(style, trained):
    """Also from a checkpoint: the same program, and with six workers in its place."""
    assert trained[style, "diloco"].keys() == {0, 10}
    alone = trained.get((style, "plain"), {})
    if style == STYLE:
        # Replicas make the update of one device, with other dropout masks.
        assert trained[style, "replicas"][10] == pytest.approx(alone[10], rel=0.05)
        assert trained[style, "pods"].keys() == {0, 10}
        assert trained[style, "fsdp"][0] == pytest.approx(alone[0], rel=0.05)
    assert trained[style, "six_workers"].keys() == {20, 30}
    if style == "pmap":
        assert trained[style, "two_lines"] == pytest.approx(alone, rel=1e-2)
