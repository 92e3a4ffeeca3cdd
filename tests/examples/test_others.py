"""The examples of a rule and an optimizer of one's own, of measures and simulation."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess

import jax
import pytest
from matplotlib.image import imread

from tests.examples.running import EXAMPLES, cells, run


def test_a_center_is_better_than_the_workers_that_meet_at_it(capsys):
    main = runpy.run_path(str(EXAMPLES / "custom_center_rule.py"))["main"]
    center, near = main(rounds=10)
    # The noise of the data is 0.3 ** 2; nobody can be much better.
    assert 0.08 < center < 0.12
    assert near > 1.05 * center
    assert "after 10 rounds: loss of the center 0." in capsys.readouterr().out
    _, far = main(rounds=10, pull=0.05)
    assert far > 1.1 * near


def test_a_custom_optimizer_learns_and_moves_only_the_rows_it_looks_up(capsys):
    main = runpy.run_path(str(EXAMPLES / "custom_optimizer.py"))["main"]
    loss, moved = main(steps=100)
    assert loss < 1e-3
    assert moved == 3
    assert "rows of the table that moved: 3 of 1000" in capsys.readouterr().out


def code_of(name):
    """The cells of a notebook that hold code; they were run in their order."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    return code


def printed_by(cell, names):
    """What a cell prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("".join(cell["source"]), "a cell", "exec"), names)
    return printed.getvalue()


def stored_in(cell):
    """What it printed when the notebook was made."""
    streams = [x for x in cell["outputs"] if x["output_type"] == "stream"]
    assert {stream["name"] for stream in streams} <= {"stdout"}
    return "".join(part for stream in streams for part in stream["text"])


def has_picture(cell):
    return any("image/png" in x.get("data", ()) for x in cell["outputs"])


def test_cells_of_the_notebook_run_in_order_and_print_what_is_stored():
    code, names = code_of("first_steps"), {}
    for cell in code:
        assert printed_by(cell, names) == stored_in(cell)
    assert has_picture(code[-1])


def numbers(table):
    """{method: (loss, accuracy in %, bytes sent)} of the table that is printed."""
    rows = re.findall(r"^(.*\S) +(\S+) +(\S+)% +(\S+)$", table, re.MULTILINE)
    return {
        name: (float(loss), float(accuracy), int(sent.replace(",", "")))
        for name, loss, accuracy, sent in rows
    }


def test_the_notebook_of_diloco_pays_for_rounds_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no wheel is
    monkeypatch.setenv("STEPS", str(steps := 120))
    code, names = code_of("diloco"), {}
    # As users have it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tables = [numbers(printed_by(cell, names)) for cell in code]
    stored = [numbers(stored_in(cell)) for cell in code]
    assert [list(table) for table in tables] == [list(table) for table in stored]
    for found, loss, many in ((tables[-1], 3.2, steps), (stored[-1], 2.3, 600)):
        parallel, diloco, in_bits = found.values()
        # On a ring of four, of all parameters in float32.
        size = names["size"] if found is tables[-1] else parallel[2] / many / 6
        assert parallel[2] == 2 * 3 / 4 * 4 * size * many
        assert diloco[2] == pytest.approx(parallel[2] / 20, abs=1)
        assert 7 < diloco[2] / in_bits[2] < 8  # the ends of codes, and their scales
        assert max(row[0] for row in found.values()) < loss
    parallel, diloco, _ = stored[-1].values()
    assert 1 < diloco[0] / parallel[0] < 1.03  # "some 2 % above"
    assert has_picture(code[-1]) and has_picture(code[-2])


def test_the_notebook_of_diloco_takes_the_wheel_beside_it(tmp_path, monkeypatch):
    install = code_of("diloco")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"wheel .* `make dist`, or `pip"):
        printed_by(install, {})
    (tmp_path / "optx_sync-0.2.0-py3-none-any.whl").touch()
    given = []

    def run(command, **how):
        given.append(command)
        return subprocess.CompletedProcess(command, len(given) - 1, "", "no space")

    monkeypatch.setattr(subprocess, "run", run)
    printed_by(install, {})
    assert given[0][1:4] == ["-m", "pip", "install"]
    assert given[0][4:] == ["optx_sync-0.2.0-py3-none-any.whl[plot]"]
    with pytest.raises(RuntimeError, match=r"pip could not install .*: no space"):
        printed_by(install, {})


WRITER = """
class SummaryWriter:
    def __init__(self, folder):
        self.file = open(folder, "w")

    def add_scalar(self, name, value, step):
        print(name, value, step, file=self.file)

    def close(self):
        self.file.close()
"""


def test_what_is_measured_is_shown_and_written(tmp_path):
    (tmp_path / "tensorboardX.py").write_text(WRITER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.getenv("PYTHONPATH")])])
    options, environment = ("--steps", 20), {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    shown = run("log_measures", *options, "--logs", tmp_path / "log", **environment)
    assert "noise_scale" in shown and "wrote TensorBoard files" in shown
    lines = (tmp_path / "log").read_text().splitlines()
    found = {tuple(line.split()[::2]): float(line.split()[1]) for line in lines}
    assert len(found) == 2 * 6
    assert found["contributors", "20"] == 8
    assert 10 < found["noise_scale", "20"] < 500
    assert found["loss", "20"] < found["loss", "10"] < 2.3


def test_every_simulated_method_learns_from_stale_pushes_and_is_drawn(tmp_path):
    picture, workers, events = tmp_path / "picture.png", 20, 2500
    arguments = "--workers", workers, "--events", events, "--out", picture
    rows = cells(run("simulate_thousand_workers", *arguments))
    assert [name for name, *_ in rows] == ["asynchronous SGD", "AGN", "EASGD"]
    for name, period, pushes, staleness, accuracy, _ in rows:
        every = 1 if name == "asynchronous SGD" else 10
        assert int(period) == every
        # Each worker may still be on its way to its next push.
        missing = events / every - int(pushes.replace(",", ""))
        assert 0 <= missing <= (workers if every > 1 else 0)
        # The others push about once in between.
        assert 0.5 * workers < int(staleness) < 1.5 * workers
        # Chance is 10 %.
        assert float(accuracy.removesuffix("%")) > 70
    assert imread(picture).shape[:2] == (600, 1350)
    assert picture.stat().st_size > 40_000  # an empty frame has some 15 kB


def test_ftrl_trades_weights_for_loss(tmp_path):
    picture = tmp_path / "clicks.png"
    printed = run("train_clicks_ftrl", "--lines", 4000, "--out", picture)
    rows = [row for row in cells(printed) if row[0] in ("ftrl", "adagrad")]
    ftrl = [row for row in rows if row[0] == "ftrl"]
    (adagrad,) = [row for row in rows if row[0] == "adagrad"]
    losses = [float(row[3].rstrip("%")) for row in ftrl]
    sizes = [int(row[4].replace(",", "")) for row in ftrl]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 50
    # Far from guessing, and without a penalty FTRL is Adagrad.
    assert max(losses) < 35
    assert losses[0] == pytest.approx(float(adagrad[3].rstrip("%")), abs=0.1)
    assert adagrad[4] == ftrl[0][4]
    expected = f"ftrl, l1 = 1: {ftrl[3][4]} of adagrad's {adagrad[4]} weights"
    assert expected in printed.splitlines()[-1]
    assert picture.read_bytes().startswith(b"\x89PNG")
