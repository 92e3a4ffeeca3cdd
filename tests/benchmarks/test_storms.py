"""The judge of a storm sees what goes wrong, each thing under its name."""

import collections
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
    "twice in one of four": (
        lambda logs, center: center["0"].__setitem__(0, -6), {"twice": 1},
    ),
    "late, and there": (
        lambda logs, center: center["0"].__setitem__(2, -4), {"twice": 1},
    ),
}  # fmt: skip


def stormy(storms, tmp_path, change):
    """A storm of the pushes above, after a change, and the center."""
    logs = [json.loads(json.dumps(ACKS[5 * w : 5 * w + 5])) for w in range(3)]
    center = {str(part): np.zeros(storms.FLOATS) for part in range(storms.PARTS)}
    for line in ACKS:
        if line["what"] == "ack" and (line["epoch"], line["step"]) != (10, 2):
            center[str(line["part"])][line["place"]] = -storms.MARK / 3
    change(logs, center)
    halves: Any = {f"{half}_{part}": x for half in "ab" for part, x in center.items()}
    for worker, lines in enumerate(logs):
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"worker_{worker}_1.jsonl").write_text(text)
    np.savez(tmp_path / "center.npz", **halves)
    storm = types.SimpleNamespace(
        folder=tmp_path, faults=[], party=storms.FOUR, ended="yes", deaths=[],
        starts=collections.Counter(driver=1),
    )  # fmt: skip
    return storm, halves


@pytest.mark.parametrize("what", WRONG)
def test_what_went_wrong_is_found_under_its_name(what, module, tmp_path):
    storms = module("storms")
    change, found = WRONG[what]
    storm, halves = stormy(storms, tmp_path, change)
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


@pytest.mark.parametrize(
    ("saved", "unanswered"), [(0, False), (1, False), (2, False), (0, True)]
)
def test_a_meeting_that_was_saved_while_it_waited_is_held_again(
    saved, unanswered, module, tmp_path
):
    """By those that had come by then; the answers of the others are lost with it."""
    storms = module("storms")

    def change(logs, center):
        for lines in logs:  # After the death the second meeting was over.
            lines[3]["step"], lines[4]["step"] = 2, 3
        for worker in range(saved):
            center["0"][2048 * worker + 1] = -storms.MARK / saved
        if unanswered:  # The one that had come died before it heard.
            center["0"][2048 * 3 + 1] = -storms.MARK

    storm, _ = stormy(storms, tmp_path, change)
    said = storms.judge(storm, 10.0)
    known = saved or unanswered
    assert (said.lost, said.beyond) == (3 - saved, 0 if known else 3)


@pytest.mark.parametrize(
    "back", ["", "1970-01-02 00:00:00,5 a server is back, at step 1"]
)
def test_a_server_that_came_back_as_the_run_ended_answered_nobody(
    back, module, tmp_path
):
    storms = module("storms")

    def change(logs, center):
        for lines in logs:  # No answer of after the death.
            del lines[3:]

    storm, _ = stormy(storms, tmp_path, change)
    (tmp_path / "driver.log").write_text(f"{back}: from /saved/server_0/7\n")
    said = storms.judge(storm, 10.0)
    assert (said.lost, said.beyond) == (3, 0 if back else 3)


def test_each_step_is_in_the_center_or_wasted_for_a_reason(module, tmp_path):
    storms = module("storms")
    each = storms.PARTS

    def pushed(place, what, steps, **more):
        line = {"part": 0, "place": place, "steps": steps, "over": 0, **more}
        return [{**line, "what": "sent"}] + [{**line, "what": what}] * (what != "sent")

    ended = [
        *pushed(0, "ack", 16),
        *pushed(1, "ack", 16, over=2),
        *pushed(2, "refused", 4, over=2),
        *pushed(3, "late", 20, over=2),  # what was refused, once more
        *pushed(4, "ack", 16),  # gone
        {"what": "end"},
        *pushed(5, "ack", 8),
    ]
    died = [
        *pushed(6, "ack", 16),
        *pushed(7, "sent", 16),  # in the center, and it did not hear of it
        *pushed(8, "sent", 16),
    ]
    logs = {"0_1": ended, "1_2": died}
    # Two steps after the last push, and three; of the other parts all is wasted.
    for name, steps in (("0_1", 16 + 16 + 20 + 16 + 8 + 2), ("1_2", 16 * 3 + 3)):
        (tmp_path / f"steps_{name}").write_bytes(b"." * steps)
    gone = {4, 8}

    def there(line):
        return line["place"] not in gone and line["what"] != "late"

    found = storms.Wasted(*storms.wasted(tmp_path, logs, there))
    others = each - 1
    assert found == storms.Wasted(
        made=78 + 51,
        center=(16 + 14 + 8 + 16 + 16) / each,
        overwritten=(2 + 2 + 2 + others * 78) / each,
        late=18 / each,
        died=(16 + 3 + others * 51) / each,
        server=16 / each,
    )
    assert math.isclose(found.made, sum(found[1:]))


def test_what_a_storm_has_seen_is_counted(module, tmp_path):
    storms = module("storms")

    def heard(what, time, epoch=1, step=0, **more):
        line = {"what": what, "time": time, "began": time - 0.5, "epoch": epoch}
        return {**line, "step": step, "part": 0, "server": 0, "age": 2, **more}

    logs = [
        [heard("ack", 1.0), heard("ack", 9.0, step=1, age=3), heard("late", 12.0, 2)],
        [heard("ack", 1.1), heard("ack", 50.0, 2, step=2, began=10.0)],
        [heard("late", 60.0, 2, step=2)],
    ]
    (tmp_path / "driver.log").write_text(
        "worker 0 died: It was killed: no server heard of it for 30 s.\n"
        "a server waits no longer: a meeting\n" * 2
    )
    storm = types.SimpleNamespace(
        folder=tmp_path, party=storms.TWO, starts=collections.Counter(driver=3),
        deaths=[2.0, 3.0, 70.0],
    )  # fmt: skip
    found = dict(zip(storms.SEEN, storms.seen(storm, logs), strict=True))
    assert {mark: often for mark, often in found.items() if often} == {
        "a worker again": 1,
        "a server again": 1,
        "the driver again": 2,
        "two deaths in one meeting": 1,
        "a late contribution after a restart": 1,
        "an answer later than delay": 1,
        "an answer after the timeout": 1,
        "a meeting of too few": 2,
        "a silent worker killed": 2,
    }
