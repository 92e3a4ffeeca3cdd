"""Pictures that one can read: drawn from JSON, transparent, few labels, captions."""

import json
import re

import pytest
from matplotlib.image import imread

from tests.benchmarks.reading import BENCHMARKS

RESULTS, IMAGES = BENCHMARKS / "results", BENCHMARKS.parent / "docs" / "images"
DOCS = BENCHMARKS.parent / "docs"


def test_all_have_few_labels_and_are_kept(module):
    pictures, files = module("pictures"), set()
    for path in RESULTS.glob("*.json"):
        drawn = json.loads(path.read_text()).get("drawn", {})
        files |= set(drawn)
        for file, of in drawn.items():
            labels = pictures.shown(of["panels"])
            assert 0 < len(labels) <= pictures.MOST, (file, labels)
    # None lies there that cannot be drawn anew.
    assert files == {path.name for path in RESULTS.glob("*.png")}


def test_the_labels_that_were_counted_are_those_in_the_picture(module):
    pictures = module("pictures")
    for name in ("reproduce_diloco", "bench_wrappers"):
        drawn = json.loads((RESULTS / f"{name}.json").read_text())["drawn"]
        of = drawn[f"{name}.png"]
        found = pictures.labels_of(pictures.figure_of(of["panels"], of["columns"]))
        assert sorted(found) == sorted(pictures.shown(of["panels"]))


def test_more_than_twelve_labels_are_refused(module, tmp_path):
    pictures = module("pictures")
    lines = [pictures.Line(f"line {n}", [1, 2], [n, n]) for n in range(13)]
    path = tmp_path / "many.png"
    with pytest.raises(ValueError, match=r"at most 12 labels, many\.png has 13"):
        pictures.save(pictures.figure_of([pictures.Panel("x", "y", lines)]), path)
    assert not path.exists()
    few = [lines[0]._replace(label=f"_{n}") for n in range(13)]
    pictures.save(pictures.figure_of([pictures.Panel("x", "y", few)]), path)
    assert path.exists()


def test_what_is_kept_is_the_mean_and_the_range(module):
    pictures = module("pictures")
    line = pictures.Line("a", [1, 2], [[1.0, 5.0], [2.0, 7.0], [6.0, 6.0]])
    [panel] = pictures.kept([pictures.Panel("x", "y", [line])])
    [found] = panel["lines"]
    assert [row.tolist() for row in found["y"]] == [[3, 6], [1, 5], [6, 7]]


def test_all_are_transparent_and_drawn_for_a_small_screen(module):
    wide = module("pictures").WIDTH * 200
    for path in [*RESULTS.glob("*.png"), *IMAGES.glob("*.png")]:
        image = imread(path)
        assert image.shape[1] == wide and image.shape[2] == 4, path
        assert image[0, 0, 3] == 0, path


@pytest.mark.parametrize("background", ["#ffffff", "#1e2129"])
def test_colours_can_be_seen_on_both_backgrounds(module, background):
    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
        ]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    pictures = module("pictures")
    for colour in (pictures.GREY, *pictures.COLOURS):
        low, high = sorted([light(colour), light(background)])
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_captions_name_the_data_and_the_seeds(module):
    """Of measured pages in pages.toml, of guides as the alternative text."""
    captions = [text for of in module("report").PAGES.values()
                for text in of.get("pictures", {}).values()]  # fmt: skip
    for page in DOCS.glob("*.md"):
        captions += re.findall(r"!\[([^]]+)\]\(images/", page.read_text())
    assert len(captions) > 30
    said = re.compile("seed|[Mm]edian|one run|no data|no model|least of the turns|law")
    assert [text for text in captions if not said.search(text)] == []
