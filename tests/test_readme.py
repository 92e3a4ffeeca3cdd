"""The README's programs compute what it says; it and the first page lead on."""

import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import optx_sync as oxs
from tests import scripts

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
FIRST = (ROOT / "docs" / "index.md").read_text()


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


def test_the_table_is_what_the_demo_wrote():
    wrote = json.loads((ROOT / "docs" / "images" / "demo.json").read_text())
    expected = {
        name: [accuracy.replace("%", "") + " %", *rest]
        for name, accuracy, *rest in wrote
    }
    shown = {"one device, the same global batch": "one device"}
    shown |= {"`diloco`, streaming in 4 bits": "streaming diloco"}
    lines = re.findall(r"^\| (.+ %) \| (.+) \|$", TEXT, re.MULTILINE)
    table = {}
    for first, rest in lines:
        name, accuracy = first.split(" | ")
        table[shown.get(name, name.strip("`"))] = [accuracy, *rest.split(" | ")]
    assert table == expected


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


def _under_shard_map(step):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    mapped = jax.shard_map(lambda s, x: step(s, x[0]), mesh=mesh, **specs)
    return jax.jit(mapped)


def test_the_lines_that_change_compute_what_they_replace():
    two_lines, localized = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    ends = []
    for block, mapped in (two_lines, _under_pmap), (localized, _under_shard_map):
        for sign in "-+":
            lines = [x[1:] for x in block.splitlines() if x[0] in " " + sign]
            ends.append(_trained(lines, mapped))
    assert jnp.abs(ends[0]).min() > 0
    for end in ends:
        assert jnp.allclose(end, ends[0], atol=1e-6)


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
