"""The language model across pods, run as a user runs it, stopped and resumed."""

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_language_model.py"


def run(folder, options):
    """What the example prints: lines, and the cells of the table by strategy."""
    printed = scripts.run(
        EXAMPLE,
        *options,
        # Fewer unseen characters, of which every evaluation asks all devices.
        *("--every", 1, "--unseen", 20, "--out", folder),
        # What one run has compiled, the next one reads.
        JAX_ENABLE_COMPILATION_CACHE=True,
        JAX_COMPILATION_CACHE_DIR=str(folder.parent / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.0,
        COLUMNS=130,
    )
    rows = re.findall("^│ (.*) │$", printed, re.M)
    cells = [re.split(r"\s*│\s*", row) for row in rows]
    return printed, {name: rest for name, *rest in cells}


@pytest.mark.slow
def test_it_resumes_and_tells_what_it_sends(tmp_path):
    options = ["--steps", "2", "--only", "data parallel", "DiLoCo"]
    _, whole = run(tmp_path / "out", options)
    shutil.rmtree(tmp_path / "out" / "DiLoCo 0" / "2")
    printed, resumed = run(tmp_path / "out", [*options[:3], "DiLoCo"])
    assert printed.count("DiLoCo 0, from step 1") == 1
    assert list(whole) == ["data parallel", "DiLoCo"]
    assert resumed == {"DiLoCo": whole["DiLoCo"]}
    for loss, *_ in whole.values():
        # All characters alike would be log(103) = 4.6.
        assert 4 < float(loss.removesuffix(" ± 0.000")) < 6
    sent = {
        name: [int(cell.replace(",", "")) for cell in cells[1:4]]
        for name, cells in whole.items()
    }
    inside, far, peak = sent["data parallel"]
    assert inside > 0 and far == peak
    # The same parameters, once in 20 steps; beside it nothing leaves the pod.
    assert sent["DiLoCo"][2] == peak
    assert abs(sent["DiLoCo"][1] - far / 20) <= 1
    assert imread(tmp_path / "out" / "loss.png").shape == (546, 910, 4)
