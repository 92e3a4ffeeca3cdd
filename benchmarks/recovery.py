"""Seconds from a death to the next useful step, per agreement, on a local Ray.

    python benchmarks/recovery.py                # some minutes
    python benchmarks/recovery.py --quick        # one death of each kind

Three workers push as fast as they can, a push a step. A worker, and later the server,
is killed with SIGKILL; a useful step is a push that the center absorbs after that.
*The others*: the next push of a worker that lives. *Its successor*: the first push of
the worker that stands in for the dead one: a process is started, JAX imported, the
center taken, a step compiled.
"""

import os
import pathlib
import random
import threading
import time
from typing import Any

import numpy as np
import on_ray
import optax
import report
from faults import RULES
from pictures import COLOURS, Line, Panel

from optx_sync import runtime

WORKERS, SIZE = 3, 250_000
AGREEMENTS = ("local_sgd", "diloco", "elastic", "3 of 4")
# What others publish, from a death to the next step.
PUBLISHED = [
    ["torchft, issue 329", 948],
    ["Pathways, MaxText issue 4043", 40],
    ["a warm restart, marin issue 8031", 14],
]
FULL, SHORT = (AGREEMENTS, 5), (AGREEMENTS[:1], 1)
STEADY = 3  # rounds of each worker before the next death
IN_FLIGHT = 0.5  # seconds in which a step ends that was answered before a death


def program(folder: pathlib.Path):
    """A worker that counts its rounds in a file until it is told to end."""
    grads = {"w": np.full(SIZE, 1e-3, np.float32)}

    def train(worker):
        mark, rounds = folder / f"worker_{worker.index}", 0
        while not (folder / "end").exists():
            worker.step(grads)
            rounds += 1
            mark.write_text(str(rounds))
            time.sleep(0.02)

    return train


def wait_for_all(folder: pathlib.Path, since: float) -> None:
    """Until each worker has made some rounds, one of them well after this time."""

    def steady():
        late = since + IN_FLIGHT
        new = [m for m in folder.glob("worker_*") if m.stat().st_mtime > late]
        return sum(int(mark.read_text() or 0) >= STEADY for mark in new) == WORKERS

    on_ray.until(steady, "go on")


def deaths(folder: pathlib.Path, number: int, found: list[Any]) -> None:
    """Kill workers and servers in turns: (who, its pid, when)."""
    rng, since = random.Random(0), 0.0
    try:
        for kind in ("workers", "servers") * number:
            wait_for_all(folder, since)
            since = time.time()
            on_ray.tell(rng.choice(on_ray.processes(kind)))
            found.append((kind, since))
        wait_for_all(folder, since)
    finally:
        (folder / "end").touch()


def measured(rule: str, number: int) -> dict[str, list[float]]:
    """Seconds to the next push, by who died and who pushed."""
    params, killed = {"w": np.zeros(SIZE, np.float32)}, []
    agreement = RULES[rule] if "of" not in rule else runtime.SyncReplicas(2)
    with on_ray.folder_for("recovery") as folder:
        thread = threading.Thread(target=deaths, args=(folder, number, killed))
        thread.start()
        _, history = runtime.run(
            program(folder), params, optax.sgd(1e-3), agreement, num_workers=WORKERS,
            communication_period=1, checkpoint_dir=folder / "saved",
            checkpoint_every=20,
        )  # fmt: skip
        thread.join()
    pushes = [e for e in history.events if e.kind in ("push", "dropped")]
    lost = [e for e in history.events if e.kind == "lost"]
    seconds: dict[str, list[float]] = {"others": [], "successor": [], "server": []}
    for kind, when in killed:
        later = [e for e in pushes if e.time > when]
        if kind == "servers":
            seconds["server"].append(later[0].time - when)
            continue
        dead = next(e for e in lost if e.time > when)
        others = [e for e in later if e.worker != dead.worker]
        own = [e for e in later if e.worker == dead.worker and e.time > dead.time]
        seconds["others"].append(others[0].time - when)
        seconds["successor"].append(own[0].time - when)
    return seconds


def study(page, settings):
    """Measure all agreements and write the page."""
    agreements, number = settings
    with on_ray.cluster(WORKERS):
        found = {rule: measured(rule, number) for rule in agreements}
    kinds = ("others", "successor", "server")
    rows = [
        [name_of(rule), *(report.spread(of[kind], 1) for kind in kinds)]
        for rule, of in found.items()
    ]
    page.table("seconds", rows)
    page.table("published", PUBLISHED)
    lines, names = [], [name_of(rule) for rule in found]
    for shift, kind in zip((-0.2, 0.0, 0.2), kinds, strict=True):
        for place, of in enumerate(found.values()):
            ends = np.quantile(of[kind], [0.25, 0.5, 0.75])
            said = page.words["texts"][kind]
            label, colour = f"{'_' * (place > 0)}{said}", COLOURS[kinds.index(kind)]
            lines.append(Line(label, ends, [place + shift] * 3, "|-", colour))
    page.picture([Panel("seconds to the next push", "", lines, names=names)])
    page.text("load", load=round(os.getloadavg()[0], 1), cores=os.cpu_count())


def name_of(rule: str) -> str:
    """As the table has it: backup workers are one here."""
    return "2 of 3" if rule == "3 of 4" else rule


if __name__ == "__main__":
    report.reproduce("recovery", __doc__, study, FULL, SHORT)
