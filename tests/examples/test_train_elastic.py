"""The example's loop, in one process and without Ray: called again, it goes on."""

import re
from pathlib import Path

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_elastic.py"
TWICE = """
import json, runpy, sys, time
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)
example, folder = runpy.run_path(sys.argv[1]), Path(sys.argv[2])
log = folder / "log"
config = {"folder": str(folder / "run"), "log": str(log)}
began = time.time()
for rounds in (5, 20):
    examples = rounds * example["PERIOD"] * example["BATCH"] * 2
    example["loop"]({**config, "examples": examples})
with log.open("a") as file:
    file.write('{"time": 1, "process": 0, "lo')  # one is writing now
lines = example["said"](log)
rounds = [line for line in lines if "loss" in line]
print([line["position"] for line in lines if "position" in line and "loss" not in line])
print([line["rounds"] for line in rounds], rounds[-1]["workers"])
print(rounds[0]["accuracy"], rounds[-1]["accuracy"])
told = [example["now"](lines[:k], []) for k in (0, 1, 2, 3, 9)]
lost = [(time.time() + 1, "a node lost")]
print([what for what, _ in told], told[1][1], example["now"](lines[:3], lost)[0])
happened = [(began + 1, event) for event in example["EVENTS"]]
example["draw"](rounds, happened, began, folder / "elastic.png")
"""


def test_the_loop_goes_on_where_it_was_saved(tmp_path):
    printed = scripts.run(TWICE, EXAMPLE, tmp_path)
    began, rounds, accuracy, told = printed.splitlines()
    assert began == f"[0, {5 * 20 * 16 * 2}]"
    assert rounds == f"{list(range(1, 21))} 2"
    first, last = map(float, re.findall(r"[\d.]+", accuracy))
    assert last > 0.9 > first
    starts, trains = "'a new group starts'", "'2 workers'"
    assert told == (
        f"['Ray starts processes', {starts}, {starts}, {trains}, {starts}] 1 of 1 "
        "processes have started, 0 have the state "
        "nobody trains: Ray starts a new group"
    )
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")
