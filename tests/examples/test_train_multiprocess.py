"""Two processes, run as a user runs them, for fewer steps; and one that fails."""

import re
from pathlib import Path

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_multiprocess.py"


def test_processes_learn_the_digits():
    printed = scripts.run(EXAMPLE, "--steps", 120)
    lines = re.findall(
        r"^step +(\d+)   8 workers in 2 processes   (\d+) rounds   "
        r"test accuracy ([\d.]+)%$",
        printed,
        re.MULTILINE,
    )
    # Each line once: one process reports for all.
    assert [(steps, rounds) for steps, rounds, _ in lines] == [
        ("100", "5"),
        ("120", "6"),
    ]
    assert float(lines[-1][2]) >= 92  # 10 by chance


def test_a_process_that_fails_ends_the_other(tmp_path):
    # Process 1 is gone where it would train; process 0 waits for it in a collective.
    text, here = EXAMPLE.read_text(), "        train(options.steps)\n"
    assert text.count(here) == 1
    failing = (
        '        if options.process:\n            __import__("os")._exit(3)\n' + here
    )
    script = tmp_path / EXAMPLE.name
    script.write_text(text.replace(here, failing))
    said = scripts.run(script, exit_code=1)
    assert re.search(r"Exit codes \[.*, 3\]", said)
