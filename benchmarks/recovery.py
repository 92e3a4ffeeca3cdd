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
import shutil
import signal
import tempfile
import threading
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
# Ray's processes would otherwise yield to whatever else the machine does.
os.environ["RAY_worker_niceness"] = "0"

import numpy as np
import optax
import ray
import report
from faults import RULES, processes
from report import Line, Panel

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
PATIENCE_SECONDS = 300.0
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
    until, since = time.time() + PATIENCE_SECONDS, since + IN_FLIGHT
    while time.time() < until:
        new = [m for m in folder.glob("worker_*") if m.stat().st_mtime > since]
        if sum(int(mark.read_text() or 0) >= STEADY for mark in new) == WORKERS:
            return
        time.sleep(0.05)
    raise TimeoutError("The run does not go on.")


def deaths(folder: pathlib.Path, number: int, found: list[Any]) -> None:
    """Kill workers and servers in turns: (who, its pid, when)."""
    rng, since = random.Random(0), 0.0
    try:
        for kind in ("workers", "servers") * number:
            wait_for_all(folder, since)
            since = time.time()
            os.kill(rng.choice(processes(kind)), signal.SIGKILL)
            found.append((kind, since))
        wait_for_all(folder, since)
    finally:
        (folder / "end").touch()


def measured(rule: str, number: int) -> dict[str, list[float]]:
    """Seconds to the next push, by who died and who pushed."""
    folder, killed = pathlib.Path(tempfile.mkdtemp(prefix="recovery")), []
    thread = threading.Thread(target=deaths, args=(folder, number, killed))
    thread.start()
    agreement = RULES[rule] if "of" not in rule else runtime.SyncReplicas(2)
    _, history = runtime.run(
        program(folder), {"w": np.zeros(SIZE, np.float32)}, optax.sgd(1e-3), agreement,
        num_workers=WORKERS, communication_period=1, checkpoint_dir=folder / "saved",
        checkpoint_every=20,
    )  # fmt: skip
    thread.join()
    shutil.rmtree(folder, ignore_errors=True)
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
    ray.init(
        address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False
    )
    found = {rule: measured(rule, number) for rule in agreements}
    ray.shutdown()
    kinds = ("others", "successor", "server")
    rows = [
        [name_of(rule), *(report.spread(of[kind], 1) for kind in kinds)]
        for rule, of in found.items()
    ]
    page.table("seconds", rows)
    page.table("published", PUBLISHED)
    ranks = np.arange(1, number + 1)
    panels = [
        Panel(
            "death, from the quickest recovery on",
            "seconds to the next push",
            [Line(name_of(r), ranks, sorted(of[kind])) for r, of in found.items()],
            title=page.words["texts"][kind],
            log="y",
        )
        for kind in kinds
    ]
    page.picture(panels)
    page.text("load", load=round(os.getloadavg()[0], 1), cores=os.cpu_count())


def name_of(rule: str) -> str:
    """As the table has it: backup workers are one here."""
    return "2 of 3" if rule == "3 of 4" else rule


if __name__ == "__main__":
    report.reproduce("recovery", __doc__, study, FULL, SHORT)
