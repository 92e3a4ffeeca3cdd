"""The simulation, run as a user runs it, with fewer workers and events."""

import re
import struct
from pathlib import Path

import pytest

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate_thousand_workers.py"
WORKERS, EVENTS = 20, 2500


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    """What it printed, and where it put the picture."""
    picture = tmp_path_factory.mktemp("simulation") / "picture.png"
    arguments = ["--workers", str(WORKERS), "--events", str(EVENTS), "--out", picture]
    printed = scripts.run(EXAMPLE, *arguments, folder=picture.parent)
    return printed, picture


def test_every_method_learns_from_stale_pushes(simulation):
    lines = [line.strip("│┃ ") for line in simulation[0].splitlines()]
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


def test_draws_a_picture(simulation):
    printed, picture = simulation
    assert printed.replace("\n", "").endswith(f"wrote {picture}")
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1350, 600)
    # Empty frames of this size have some 15 kB.
    assert picture.stat().st_size > 40_000
