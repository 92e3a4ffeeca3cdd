import re
import runpy
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_clicks_ftrl.py"


def test_ftrl_trades_weights_for_loss(tmp_path):
    picture = tmp_path / "clicks.png"
    printed = scripts.run(EXAMPLE, "--lines", 4000, "--out", picture)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    ftrl = [row for row in cells if row[0] == "ftrl"]
    (adagrad,) = [row for row in cells if row[0] == "adagrad"]
    losses = [float(row[3].rstrip("%")) for row in ftrl]
    sizes = [int(row[4].replace(",", "")) for row in ftrl]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 50
    # Far from guessing, and without a penalty FTRL is Adagrad.
    assert max(losses) < 35
    assert losses[0] == pytest.approx(float(adagrad[3].rstrip("%")), abs=0.1)
    assert adagrad[4] == ftrl[0][4]
    last = printed.splitlines()[-1]
    expected = rf"ftrl, l1 = 1: {ftrl[3][4]} of adagrad's {adagrad[4]} weights"
    assert re.search(re.escape(expected), last)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_interpreter_without_tests_is_asked_for_packages(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inside.py").write_text("a = b + c\n" * 3)
    (tmp_path / "top.py").write_text("x = y\n\nx\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("p = q\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    load = runpy.run_path(str(EXAMPLE))["load"]
    ids, labels = load(10)
    # Three equal lines from the package, one with three tokens from the top.
    assert sorted(labels) == [0, 1, 1, 1]
    sizes = (ids < 2**18).sum(1)
    np.testing.assert_array_equal(sizes, np.where(labels == 1, 9, 5))
