"""The examples that train, each run as a user runs it, for fewer steps."""

import json
import pydoc_data.topics
import re
import shutil

import numpy as np
import optax
from matplotlib import rcParamsDefault
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import optx_sync as oxs
from tests import scripts
from tests.examples.running import EXAMPLES, cells, run

STEPS = 200
# Kernels and biases of 64-64-10, in float32: what one exchange sends.
EXCHANGE = 4 * (64 * 64 + 64 + 64 * 10 + 10)
ROUNDS = {
    "one device": 0,
    "cross_shard": STEPS,
    "elastic_average": STEPS // 10,
    "agn": STEPS // 10,
    "local_sgd": STEPS // 10,
    "diloco": STEPS // 20,
    "streaming diloco": STEPS // 5,
    "gossip": STEPS // 10,
}
DEMO = EXAMPLES.parent / "docs" / "images" / "demo.json"


def test_digits_every_strategy_learns_and_only_rounds_are_paid_for(tmp_path):
    picture = tmp_path / "picture.png"
    printed = run("train_digits", "--steps", STEPS, "--out", picture)
    _, told = printed.split(f"\nwrote {picture}\n")
    assert max(map(len, told.splitlines())) <= 80
    named = re.findall(r"\S+\.(?:md|py)", told)
    assert len(named) == 3 and all((EXAMPLES.parent / one).exists() for one in named)
    # What it tells to add is a strategy.
    entry = re.search(r'^    (".*),$', told, re.MULTILINE)
    names = {"oxs": oxs, "INNER": optax.adam(3e-2), "CODES": oxs.exchange.quantized(4)}
    ((tx, *turns),) = eval(f"{{{entry and entry[1]}}}", names).values()
    assert turns == [10, 1] and tx.init({"w": np.ones(3, np.float32)})
    rows = cells(printed)
    assert [name for name, *_ in rows] == list(ROUNDS)
    means = {}
    for name, accuracy, steps, rounds, sent, _ in rows:
        # Chance is 10 %. AGN's center makes one step per round and comes last.
        means[name] = float(accuracy.split("% ± ")[0])
        assert means[name] >= (88 if name == "agn" else 93), name
        assert (int(steps), int(rounds)) == (STEPS, ROUNDS[name])
        share = int(sent.replace(",", "")) / max(EXCHANGE * ROUNDS[name], 1)
        if name == "streaming diloco":  # a fourth, in 4 bits: there and back
            assert 0.2 < 4 * share < 0.25
        else:  # a ring of eight, and one partner
            assert share == {"one device": 0, "gossip": 1}.get(name, 2 * 7 / 8), name
    # What the README shows is of this program: of other runs it is the same.
    wrote = json.loads(picture.with_suffix(".json").read_text())
    assert wrote == [row[:-1] for row in rows]
    for (*_, sent), (_, _, steps, _, whole) in zip(
        wrote, json.loads(DEMO.read_text()), strict=True
    ):
        sent, steps, whole = (int(x.replace(",", "")) for x in (sent, steps, whole))
        assert abs(sent * steps / STEPS - whole) <= steps / STEPS
    # Same batches, other order of summation: at most two of 360 images differ.
    assert abs(means["one device"] - means["cross_shard"]) < 0.7
    image = imread(picture)[..., :3]
    # A line for each strategy that sends: in a label a colour has few pixels.
    colours = rcParamsDefault["axes.prop_cycle"].by_key()["color"]
    for colour in colours[: len(ROUNDS) - 1]:
        assert np.isclose(image, to_rgb(colour), atol=0.02).all(-1).sum() > 700


# A loop in one process and without Ray: called again, it goes on.
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
print(example["now"](lines[:3], [])[0], example["now"](lines[:1], [])[1])
happened = [(began + 1, event) for event in example["EVENTS"]]
example["draw"](rounds, happened, began, folder / "elastic.png")
"""


def test_elastic_the_loop_goes_on_where_it_was_saved(tmp_path):
    printed = scripts.run(TWICE, EXAMPLES / "train_elastic.py", tmp_path)
    began, rounds, accuracy, told = printed.splitlines()
    assert began == f"[0, {5 * 20 * 16 * 2}]"
    assert rounds == f"{list(range(1, 21))} 2"
    first, last = map(float, re.findall(r"[\d.]+", accuracy))
    assert last > 0.9 > first
    assert told == "2 workers 1 of 1 processes have started, 0 have the state"
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")


def test_flax_replicas_learn_the_digits():
    printed = run("train_flax", "--steps", 120)
    found = re.findall(r"^step +120 .* test accuracy ([\d.]+)%$", printed, re.MULTILINE)
    assert float(*found) >= 95


def test_hierarchy_on_a_mesh_and_simulated_ends_alike():
    *sent, loss = run("train_hierarchy", "--steps", 60).splitlines()
    assert sorted(line.rstrip() for line in sent) == [
        "over chips: 18,944 bytes",
        "over pods: 18,944 bytes in a round",
    ]
    simulated = run("train_hierarchy", "--steps", 60, "--simulate")
    values = [float(line.split()[-1]) for line in (loss, simulated)]
    # Untrained it is 2.3; between the two programs lies rounding.
    assert abs(values[0] - values[1]) < 1e-4 and values[0] < 0.3


def test_islands_learn_and_meet_in_a_conditional_only(tmp_path):
    picture = tmp_path / "picture.png"
    printed = run("train_islands", "--steps", 20, "--out", picture)
    # All characters alike would be log(103) = 4.6.
    loss = re.search(r"^step 20: .* of the center (.*)$", printed, re.M)
    assert loss is not None and float(loss[1]) < 3.4
    rows = cells(printed)
    sent = {(over, kind): (size, when) for over, kind, size, when in rows}
    assert {over for over, _ in sent} == {"workers", "fsdp"}
    # The parameters once, each device its half (and what cannot be halved).
    # The text comes with Python, and so does the size of its alphabet.
    size, when = sent["workers", "all-reduce"]
    # A character has two rows of 64, halved, and a bias, halved where they are even.
    alphabet = len(set("\n".join(pydoc_data.topics.topics.values())))
    biases = alphabet if alphabet % 2 else alphabet // 2
    assert size == f"{208_384 + 4 * (64 * alphabet + biases):,}"
    assert when == "in a conditional"
    assert [key for key in sent if key[0] == "workers"] == [("workers", "all-reduce")]
    assert {when for _, when in sent.values()} == {"in a conditional", "every step"}
    assert imread(picture).shape[:2] == (400, 700)


def test_a_language_model_resumes_and_tells_what_it_sends(tmp_path):
    folder = tmp_path / "out"

    def trained(*only):
        printed = run(
            *("train_language_model", "--steps", "2", "--only", *only),
            # Fewer unseen characters, of which every evaluation asks all devices.
            *("--every", 1, "--unseen", 20, "--out", folder),
            # What one run has compiled, the next one reads.
            JAX_ENABLE_COMPILATION_CACHE=True,
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.0,
            COLUMNS=130,
        )
        return printed, {name: rest for name, *rest in cells(printed)}

    _, whole = trained("data parallel", "DiLoCo")
    shutil.rmtree(folder / "DiLoCo 0" / "2")
    printed, resumed = trained("DiLoCo")
    assert printed.count("DiLoCo 0, from step 1") == 1
    assert list(whole) == ["data parallel", "DiLoCo"]
    assert resumed == {"DiLoCo": whole["DiLoCo"]}
    for loss, *_ in whole.values():
        # All characters alike would be log(103) = 4.6.
        assert 4 < float(loss.removesuffix(" ± 0.000")) < 6
    sent = {
        name: [int(cell.replace(",", "")) for cell in row[1:4]]
        for name, row in whole.items()
    }
    inside, far, peak = sent["data parallel"]
    assert inside > 0 and far == peak
    # The same parameters, once in 20 steps; beside it nothing leaves the pod.
    assert sent["DiLoCo"][2] == peak
    assert abs(sent["DiLoCo"][1] - far / 20) <= 1
    assert imread(folder / "loss.png").shape == (546, 910, 4)


def test_processes_learn_the_digits():
    printed = run("train_multiprocess", "--steps", 120)
    line = r"^step +(\d+)   8 workers in 2 processes   (\d+) rounds   .* ([\d.]+)%$"
    # Each line once: one process reports for all.
    first, last = re.findall(line, printed, re.MULTILINE)
    assert (first[:2], last[:2]) == (("100", "5"), ("120", "6"))
    assert float(last[2]) >= 92  # 10 by chance


def test_a_process_that_fails_ends_the_other(tmp_path):
    # Process 1 is gone where it would train; process 0 waits for it in a collective.
    text = (EXAMPLES / "train_multiprocess.py").read_text()
    here = "        train(options.steps)\n"
    assert text.count(here) == 1
    failing = (
        '        if options.process:\n            __import__("os")._exit(3)\n' + here
    )
    script = tmp_path / "train_multiprocess.py"
    script.write_text(text.replace(here, failing))
    said = scripts.run(script, exit_code=1)
    assert re.search(r"Exit codes \[.*, 3\]", said)


def test_stragglers_cost_updates_but_no_accuracy_and_every_outcome_is_drawn(tmp_path):
    picture, steps = tmp_path / "picture.png", 60
    printed = run("train_with_stragglers", "--steps", steps, "--out", picture)
    lines = re.findall(r"^(.*): (.*)% after (\d+) updates$", printed, re.M)
    runs = {name: (float(a), int(updates)) for name, a, updates in lines}
    accuracy, updates = runs["sync_replicas, no faults"]
    assert updates == steps
    with_faults, fewer = runs["sync_replicas, faults"]
    assert steps // 2 < fewer < steps
    assert with_faults > 90 and abs(with_faults - accuracy) < 4
    # The plain mean is lost: chance is 10 %.
    assert runs["cross_shard, faults"][0] < 20
    image = imread(picture)[..., :3]
    # used, stale, nonfinite, not_contributed; in the legend alone about 500 pixels.
    for colour in ("#a8d5ba", "#f2b134", "#c8323c", "#4a4e69"):
        assert np.isclose(image, to_rgb(colour), atol=0.01).all(-1).sum() > 2000
