"""The README's lines compute what it says; its figures are those of their pages."""

import json
import operator
import pathlib
import re
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import optx_sync as oxs

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
FIRST = (ROOT / "docs" / "index.md").read_text()


def test_what_a_step_costs_is_what_was_measured():
    """Of data parallel and the center rules: a period over the one by hand."""
    low, high = re.search(r"take (\S+) to (\S+) times", TEXT).groups()
    pages = ROOT / "benchmarks" / "results"
    tables = json.loads((pages / "bench_wrappers.json").read_text())["tables"]
    ratios = [
        float(row[-2].split(" / ")[-1])
        for table in tables
        if table["columns"][-2] == "apply_gradients / by hand"
        for row in table["rows"]
        if not row[0].startswith("sync_replicas")
    ]
    assert len(ratios) == 3 * 6
    assert (float(low), float(high)) == (min(ratios), max(ratios))
    # As many bytes by hand as through the library.
    programs = [t for t in tables if t["title"].startswith("Compiled programs")]
    sent = defaultdict(set)
    for table in programs:
        for case, step, of_step, *_ in table["rows"]:
            ours = step in ("by hand", "library", "apply_gradients")
            if ours and not case.startswith("sync_replicas"):
                sent[table["title"], case].add(of_step)
    assert len(sent) == 3 * 6 and all(len(found) == 1 for found in sent.values())


def test_the_demo_has_as_many_methods_as_it_says():
    wrote = json.loads((ROOT / "docs" / "images" / "demo.json").read_text())
    names = "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"
    assert f"{names[len(wrote) - 1]} methods on real data" in TEXT


def test_the_line_of_python_is_that_of_the_package():
    needs = re.search(r"requires-python = .>=(.*?).$", PROJECT, re.MULTILINE)[1]
    assert f"with Python {needs} or newer" in TEXT


def test_it_has_two_screens_and_seven_methods():
    """A screen has some 45 lines of 140 characters."""
    lines = [line for line in TEXT.splitlines() if line]
    assert sum(1 + len(line) // 140 for line in lines) <= 90
    rows = TEXT.partition("| you want |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) == 7
    named = re.findall(r"oxs((?:\.\w+)+)", "".join(rows))
    assert len(named) >= 7
    for name in named:
        operator.attrgetter(name[1:])(oxs)


def _trained(lines, mapped):
    """The parameters after two steps; the indented lines are those of a step."""
    outside = [line for line in lines if line[0] != " "]
    inside = [line for line in lines if line[0] == " "]
    names = {
        **{"jax": jax, "optax": optax, "oxs": oxs, "TrainState": TrainState},
        **{"network": types.SimpleNamespace(apply=None), "params": {"w": jnp.zeros(3)}},
        "loss_of": lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2),
    }
    source = [*outside, "def train_step(state, batch):", *inside]
    exec("\n".join(source), names)
    step, state = mapped(names["train_step"]), names["state"]
    batch = jax.random.normal(jax.random.key(0), (8, 4, 3))
    if mapped is _under_pmap:
        state = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 8), state)
    # Optax's own transformations promote, as in a user's program.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            state = step(state, batch)
    return state.params["w"].reshape(-1, 3)[0]


def _under_pmap(step):
    return jax.pmap(step, "data")


def _written(block, sign):
    """The lines of a diff before, "-", or after, "+"."""
    return [line[1:] for line in block.splitlines() if line[0] in " " + sign]


def test_the_lines_that_change_compute_what_they_replace():
    block = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)[1]
    before, after = (_trained(_written(block, sign), _under_pmap) for sign in "-+")
    assert jnp.abs(before).min() > 0
    assert jnp.allclose(before, after, atol=1e-6)


def test_workers_with_the_same_data_are_the_step_that_they_replace():
    """Before their first round; then each is what the one step is."""
    block = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)[0]
    changed = [line for line in block.splitlines() if line[0] == "+"]
    assert len(changed) == 4
    batch, found = jax.random.normal(jax.random.key(0), (4, 3)), {}
    for sign, copies in ("-", 1), ("+", 8):
        names = {"jax": jax, "optax": optax, "oxs": oxs, "params": {"w": jnp.zeros(3)}}
        names["loss_of"] = lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2)
        exec("\n".join(_written(block, sign)), names)
        state = names["params"], names["state"]
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(2):
                *state, _ = names["step"](*state, jnp.tile(batch, (copies, 1)))
        found[sign] = state[0]["w"]
    assert found["+"].shape == (8, 3) and jnp.abs(found["-"]).min() > 0
    assert jnp.allclose(found["+"], found["-"][None], atol=1e-6)


def test_the_first_page_leads_to_every_guide_and_repeats_nothing():
    menu = (ROOT / "mkdocs.yml").read_text().partition("- API:")[0]
    pages = set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE))
    linked = {link.partition("#")[0] for link in re.findall(r"\]\((\S+?)\)", FIRST)}
    assert pages - {"index.md"} <= linked  # that they exist is in tests/test_docs.py
    assert "```python" not in FIRST
    assert not set(re.findall(r"^\| .*", TEXT, re.MULTILINE)) & set(FIRST.split("\n"))


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
