"""The simulation, run as a user runs it, with fewer workers and events."""

import re
from pathlib import Path

from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate_thousand_workers.py"
WORKERS, EVENTS = 20, 2500


def test_every_method_learns_from_stale_pushes_and_is_drawn(tmp_path):
    picture = tmp_path / "picture.png"
    arguments = "--workers", WORKERS, "--events", EVENTS, "--out", picture
    printed = scripts.run(EXAMPLE, *arguments, folder=tmp_path)
    lines = [line.strip("│┃ ") for line in printed.splitlines()]
    rows = [re.split(r"\s*[│┃]\s*", line) for line in lines if re.search("[│┃]", line)]
    titles = ["method", "period", "pushes", "staleness", "test accuracy", "seconds"]
    assert rows[0] == titles
    table = {name: cells for name, *cells in rows[1:]}
    assert list(table) == ["asynchronous SGD", "AGN", "EASGD"]
    for name, (period, pushes, staleness, accuracy, _) in table.items():
        every = 1 if name == "asynchronous SGD" else 10
        assert int(period) == every
        # Each worker may still be on its way to its next push.
        missing = EVENTS / every - int(pushes.replace(",", ""))
        assert 0 <= missing <= (WORKERS if every > 1 else 0)
        # The others push about once in between.
        assert 0.5 * WORKERS < int(staleness) < 1.5 * WORKERS
        # Chance is 10 %.
        assert float(accuracy.removesuffix("%")) > 70
    assert printed.replace("\n", "").endswith(f"wrote {picture}")
    assert imread(picture).shape[:2] == (600, 1350)
    assert picture.stat().st_size > 40_000  # an empty frame has some 15 kB
