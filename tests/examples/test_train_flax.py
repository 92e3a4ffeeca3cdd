"""`TrainState`, run as a user runs it, for fewer steps."""

import re
from pathlib import Path

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_flax.py"


def test_replicas_learn_the_digits():
    printed = scripts.run(EXAMPLE, "--steps", 120)
    number = r"([\d.]+)"
    lines = re.findall(
        rf"^step +{number}   loss {number}   "
        rf"train accuracy {number}%   test accuracy {number}%$",
        printed,
        re.MULTILINE,
    )
    steps, losses, train, test = zip(*lines, strict=True)
    assert steps == ("50", "100", "120")
    assert float(losses[-1]) < 0.3  # 2.3 by chance
    assert float(train[-1]) >= 95
    assert float(test[-1]) >= 95
