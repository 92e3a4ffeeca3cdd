"""Each script of `benchmarks/` in its short form, run as a user runs it."""

import json

import pytest

from tests import scripts
from tests.benchmarks.reading import BENCHMARKS

# What each script writes, where it is not a page of its own name.
PAGES = {
    "bench_steps": ("bench_dense", "bench_sparse"),
    "table": ("table", "which_numbers"),
}
SCRIPTS = sorted(
    path.stem
    for kind in ("bench_*", "reproduce_*", "resumed", "table")
    for path in BENCHMARKS.glob(f"{kind}.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_writes_its_pages(script, tmp_path, module):
    path = BENCHMARKS / f"{script}.py"
    scripts.run(path, "--quick", "--out", tmp_path, JAX_PLATFORMS="cpu")
    words = module("report").PAGES
    names = PAGES.get(script, (script,))
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names)
    for name in names:
        page = (tmp_path / f"{name}.md").read_text("utf-8")
        assert "A short run" in page
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["quick"] is True
        # All tables and pictures that the page has words for, and no empty cell row.
        titles = [table["title"].partition(",")[0] for table in found["tables"]]
        assert len(titles) >= len(words[name]["tables"])
        for table in found["tables"]:
            assert table["rows"], table["title"]
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for key in words[name].get("pictures", ()):
            file = f"{name}_{key}.png".replace("_picture", "")
            assert f"({file})" in page
            content = (tmp_path / file).read_bytes()
            assert content.startswith(b"\x89PNG")
            assert len(content) > 5_500  # Axes without a line have some 5 kB.
            assert found["drawn"][file]["panels"]


def test_the_pages_are_those_of_the_results(module):
    report, folder = module("report"), BENCHMARKS / "results"
    paths = sorted(folder.glob("*.json"))
    assert {path.stem for path in paths} == set(report.PAGES)
    in_groups = [name for names in report.GROUPS.values() for name in names]
    assert sorted(in_groups) == sorted(report.PAGES)
    for words in report.PAGES.values():
        answer = words["answer"].strip()
        assert answer.endswith(".") and ". " not in answer  # one sentence
        assert len(answer.split()) < 45
    for path in paths:
        found = json.loads(path.read_text())
        assert path.with_suffix(".md").read_text() == report.page_of(found)
        assert all((folder / file).exists() for file, _ in found["pictures"])
    assert (folder / "README.md").read_text() == report.summarise(folder)
