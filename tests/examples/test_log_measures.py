"""The example that logs measures, with and without a writer of TensorBoard files."""

import os
from pathlib import Path

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "log_measures.py"
WRITER = """
class SummaryWriter:
    def __init__(self, folder):
        self.file = open(folder, "w")

    def add_scalar(self, name, value, step):
        print(name, value, step, file=self.file)

    def close(self):
        self.file.close()
"""


def run(*options, **environment):
    return scripts.run(
        EXAMPLE, "--steps", 20, *options, JAX_PLATFORMS="cpu", **environment
    )


def test_it_shows_and_writes_what_is_measured(tmp_path):
    (tmp_path / "tensorboardX.py").write_text(WRITER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.getenv("PYTHONPATH")])])
    shown = run("--logs", str(tmp_path / "log"), PYTHONPATH=path)
    assert "noise_scale" in shown and "wrote TensorBoard files" in shown
    lines = (tmp_path / "log").read_text().splitlines()
    found = {tuple(line.split()[::2]): float(line.split()[1]) for line in lines}
    assert len(found) == 2 * 6
    assert found["contributors", "20"] == 8
    assert 10 < found["noise_scale", "20"] < 500
    assert found["loss", "20"] < found["loss", "10"] < 2.3
