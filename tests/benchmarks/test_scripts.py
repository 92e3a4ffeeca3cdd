"""Each script of `benchmarks/` in its short form, run as a user runs it."""

import json

import pytest

from tests import scripts
from tests.benchmarks.reading import BENCHMARKS

# What each script writes, and what must be met however short the run.
PAGES = {
    "bench_async": {"bench_async": ()},
    "bench_exchange": {"bench_exchange": ()},
    "bench_scale": {"bench_scale": ("bytes per round", "memory of a worker")},
    "bench_steps": {
        "bench_dense": (),
        "bench_sparse": ("the compiled step needs as many temporary bytes",),
    },
    "bench_wrappers": {
        "bench_wrappers": ("as many bytes per step", "bytes per step exactly")
    },
    "reproduce_agn": {"reproduce_agn": ()},
    "reproduce_backup_workers": {
        "reproduce_backup_workers": (
            "a step with b spare machines",
            "every update of every run",
        )
    },
    "reproduce_delayed_nesterov": {"reproduce_delayed_nesterov": ()},
    "reproduce_diloco": {"reproduce_diloco": ("bytes per step are exactly",)},
    "reproduce_elastic_averaging": {"reproduce_elastic_averaging": ()},
    "reproduce_few_bytes": {"reproduce_few_bytes": ()},
    "reproduce_ftrl": {"reproduce_ftrl": ()},
    "reproduce_peers": {"reproduce_peers": ("a round sends the parameters once",)},
    "reproduce_qsr": {"reproduce_qsr": ()},
    "reproduce_streaming": {
        "reproduce_streaming": ("streaming sends as many bytes", "with H=P one part")
    },
    "reproduce_robust": {
        "reproduce_robust": (
            "shuffled: with one replica of 8 that sends -10 g or 1e6 g the mean",
        )
    },
}


def test_no_script_is_forgotten():
    paths = (*BENCHMARKS.glob("bench_*.py"), *BENCHMARKS.glob("reproduce_*.py"))
    assert {path.stem for path in paths} == set(PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("script", PAGES)
def test_it_writes_its_pages(script, tmp_path, module):
    path = BENCHMARKS / f"{script}.py"
    scripts.run(path, "--quick", "--out", tmp_path, JAX_PLATFORMS="cpu")
    words = module("report").PAGES
    assert {path.stem for path in tmp_path.glob("*.json")} == set(PAGES[script])
    for name, must in PAGES[script].items():
        page = (tmp_path / f"{name}.md").read_text("utf-8")
        assert "A short run" in page
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["quick"] is True and found["title"] == words[name]["title"]
        # All tables and pictures that the page has words for, and no empty cell row.
        titles = [table["title"].partition(",")[0] for table in found["tables"]]
        assert len(titles) >= len(words[name]["tables"])
        for table in found["tables"]:
            assert table["rows"], table["title"]
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for key in words[name]["pictures"]:
            file = f"{name}_{key}.png".replace("_picture", "")
            assert f"({file})" in page
            content = (tmp_path / file).read_bytes()
            assert content.startswith(b"\x89PNG") and len(content) > 10_000
        for start in must:
            criteria = found["criteria"]
            (one,) = (c for c in criteria if c["criterion"].startswith(start))
            assert one["met"], one


def test_the_summary_is_that_of_the_results_and_judges_what_is_not_met(module):
    report = module("report")
    folder = BENCHMARKS / "results"
    page = (folder / "README.md").read_text()
    assert page == report.summarise(folder)
    assert "not judged" not in page
    numbers = page.partition("\n## ")[0]
    assert numbers.count("\n| ") == 2 + len(report.PAGES["numbers"]) == 12
    # What is met comes first.
    assert 0 < page.index("met of") < page.index("not met of")
