"""The judge of a storm sees what goes wrong, each thing under its name."""

import json
import math
import types
from typing import Any

import numpy as np
import pytest

# Two servers with two parts each; the first one has gone back once, to meeting 1.
ACKS = [
    {"what": what, "part": part, "place": 2048 * worker + at, "server": part % 2,
     "step": step, "epoch": epoch, "lost": lost, "steps": 14, "time": time,
     "began": time}
    for worker in range(3)
    for what, part, at, step, epoch, lost, time in [
        ("ack", 0, 0, 1, 10, 0, 1.0),
        ("ack", 1, 0, 1, 11, 0, 2.0),
        ("ack", 0, 1, 2, 10, 0, 3.0),  # gone
        ("late", 0, 2, 1, 30, 1, 5.0),
        ("ack", 0, 3, 2, 30, 0, 6.0),
    ]
]  # fmt: skip
WRONG = {
    "nothing": (lambda logs, center: None, {}),
    "beyond": (lambda logs, center: center["1"].__setitem__(0, 0), {"beyond": 1}),
    "untold": (lambda logs, center: logs[0][3].update(lost=0), {"untold": 1}),
    "in two meetings": (
        lambda logs, center: center["0"].__setitem__(0, -7), {"twice": 1},
    ),
    "twice in one": (lambda logs, center: center["0"].__setitem__(0, -8), {"twice": 1}),
    "late, and there": (
        lambda logs, center: center["0"].__setitem__(2, -4), {"twice": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_went_wrong_is_found_under_its_name(what, module, tmp_path):
    storms = module("storms")
    logs = [json.loads(json.dumps(ACKS[5 * w : 5 * w + 5])) for w in range(3)]
    center = {str(part): np.zeros(storms.FLOATS) for part in range(storms.PARTS)}
    for line in ACKS:
        if line["what"] == "ack" and (line["epoch"], line["step"]) != (10, 2):
            center[str(line["part"])][line["place"]] = -storms.MARK / 3
    change, found = WRONG[what]
    change(logs, center)
    halves: Any = {f"{half}_{part}": x for half in "ab" for part, x in center.items()}
    for worker, lines in enumerate(logs):
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"worker_{worker}_1.jsonl").write_text(text)
    np.savez(tmp_path / "center.npz", **halves)
    storm = types.SimpleNamespace(
        folder=tmp_path, faults=[], party=storms.FOUR, ended="yes"
    )
    said = storms.judge(storm, 10.0)._asdict()
    wanted = dict.fromkeys(("beyond", "untold", "twice", "torn"), 0) | found
    assert {key: said[key] for key in wanted} == wanted
    # Each worker's second push of part 0 is gone, and one more where that is wrong.
    assert said["lost"] == 3 + found.get("beyond", 0) and said["late"] == 3
    if what == "nothing":
        assert said["participation"] == 3.0 and math.isclose(said["commits"], 9 / 15)
        halves["a_2"][7] = 1.0
        halves["b_2"] = np.zeros(storms.FLOATS)
        np.savez(tmp_path / "center.npz", **halves)
        assert storms.judge(storm, 10.0).torn == 1
