"""A worker stopped, one that joins, two that leave: who makes rounds, and when.

    python benchmarks/timeline.py            # four minutes
    python benchmarks/timeline.py --quick

Five workers on a local Ray, of which each meeting waits for three. Four have a place;
one of them is stopped with SIGSTOP and goes on with SIGCONT; a node is added, on which
the fifth starts; two are told with SIGTERM that their machines go. What they train
counts samples, so that one that is lost or there twice shows in the center.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import on_ray
import optax
import ray
from pictures import COLOURS, Line, Panel
from report import reproduce, spread

import optx_sync as oxs
from optx_sync import runtime

WORKERS, QUORUM, PLACES = 5, 3, 4  # places on the first node
STOPPED, JOINING, LEAVING = 3, 4, (0, 1)
STEP, PERIOD, DELAY, BATCH = 0.1, 10, 2, 2  # seconds; steps; steps; samples
FULL = {"steps": 5000, "before": 30.0, "stopped": 30.0, "after": 15.0}
SHORT = {"steps": 1500, "before": 8.0, "stopped": 8.0, "after": 4.0}
# The sum of all samples that a worker has seen: those of a mean times its steps.
RULE = oxs.rules.agn(optax.sgd(1.0), reduction="sum")


class Said(NamedTuple):
    """The seconds since the epoch at which something was done."""

    begin: float
    stop: float
    go_on: float
    node: float
    notice: float


def program(folder: pathlib.Path, samples: int):
    """A worker that counts what it sees, and writes down its process and rounds."""

    def train(worker):
        mark = folder / f"worker_{worker.index}"
        for lease in worker.samples():
            grads = np.zeros(samples, np.float32)
            grads[lease.start : lease.stop] = -1
            time.sleep(STEP)
            worker.step({"seen": grads})
            mark.with_suffix(".new").write_text(f"{os.getpid()} {worker.rounds}")
            mark.with_suffix(".new").rename(mark)
        worker.flush()

    return train


def wait_for(folder: pathlib.Path, workers: Any, rounds: int) -> list[int]:
    """The processes of these workers, once each has made so many rounds."""
    marks = [folder / f"worker_{worker}" for worker in workers]

    def there():
        read = [mark.read_text().split() for mark in marks if mark.exists()]
        pids = [int(pid) for pid, made in read if int(made) >= rounds]
        return pids if len(pids) == len(marks) else None

    return on_ray.until(there, "make rounds")


def another_node() -> subprocess.Popen:
    """A node of one CPU, as a machine that is started later joins the cluster."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    options = ["--address", address, "--num-cpus", "1", "--disable-usage-stats"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)


def happen(folder, nodes, settings, said: list[Said]) -> None:
    """All that happens to the workers, from a thread beside the run."""
    wait_for(folder, range(PLACES), 2)
    begin = time.time()
    time.sleep(settings["before"])
    (pid,) = wait_for(folder, [STOPPED], 2)
    on_ray.tell(pid, signal.SIGSTOP)
    stop = time.time()
    time.sleep(settings["stopped"])
    on_ray.tell(pid, signal.SIGCONT)
    go_on = time.time()
    time.sleep(settings["after"])
    nodes.append(another_node())
    node = time.time()
    wait_for(folder, [JOINING], 1)
    time.sleep(settings["after"])
    for pid in wait_for(folder, LEAVING, 2):
        on_ray.tell(pid, signal.SIGTERM)
    said.append(Said(begin, stop, go_on, node, time.time()))


def trained(settings) -> tuple[np.ndarray, Any, Said]:
    """How often the center has each sample, the history, and what was done when."""
    samples, said = settings["steps"] * BATCH, []
    nodes: list[subprocess.Popen] = []
    params = {"seen": np.zeros(samples, np.float32)}
    # The node that joins writes the cluster's address where others look for theirs.
    with (
        on_ray.folder_for("timeline") as folder,
        on_ray.cluster(PLACES, _temp_dir=str(folder)),
    ):
        thread = threading.Thread(target=happen, args=(folder, nodes, settings, said))
        thread.start()
        center, history = runtime.run(
            program(folder, samples), params, optax.sgd(1.0), RULE,
            num_workers=WORKERS, communication_period=PERIOD, delay=DELAY,
            meet=runtime.quorum(QUORUM, grace=1.0), weigh=lambda at: at.steps,
            samples=runtime.Samples(samples, BATCH), resources_per_worker={"CPU": 1},
        )  # fmt: skip
        thread.join()
        for node in nodes:
            node.terminate()
            node.wait()
    return np.rint(center["seen"]), history, said[0]


def pace(times: Any, begin: float, end: float) -> float:
    """Rounds a second between these times, from the first round to the last."""
    found = [at for at in times if begin <= at <= end]
    return (len(found) - 1) / (found[-1] - found[0])


def study(page, settings):
    """Run it once, and write down what was found."""
    seen, history, said = trained(settings)
    of = {
        kind: [
            [e for e in history.events if (e.kind, e.worker) == (kind, worker)]
            for worker in range(WORKERS)
        ]
        for kind in ("join", "push", "dropped", "left")
    }
    times = [[e.time for e in pushes] for pushes in of["push"]]
    others = [w for w in range(PLACES) if w != STOPPED]
    before = [pace(times[w], said.begin, said.stop) for w in others]
    while_ = [pace(times[w], said.stop, said.go_on) for w in others]
    rows = [[f"worker {w}", f"{b:.3f}", f"{d:.3f}", f"{d / b:.3f}"]
            for w, b, d in zip(others, before, while_, strict=True)]  # fmt: skip
    page.table("pace", rows, stopped=STOPPED)

    late = [e for e in of["dropped"][STOPPED] if e.time > said.go_on]
    back = next(at for at in times[STOPPED] if at > said.go_on) - said.go_on
    join, first = of["join"][JOINING][0], of["push"][JOINING][0]
    left = [next(e for e in of["left"][w] if e.time > said.notice) for w in LEAVING]
    again = [[e for e in of["join"][w] if e.time > gone.time]
             for w, gone in zip(LEAVING, left, strict=True)]  # fmt: skip
    counted, most = int((seen == 1).sum()), int(seen.max())
    page.table("happened", [
        [f"worker {STOPPED}: late contributions after its stop, dropped", len(late)],
        [f"worker {STOPPED}: seconds from SIGCONT to its next round", f"{back:.1f}"],
        [f"worker {JOINING}: rounds of each of the others from its joining until its "
         "first one", max(sum(join.time < at < first.time for at in times[w])
                          for w in range(PLACES))],
        [f"worker {JOINING}: late contributions before it, while its first step was "
         "compiled", sum(e.time < first.time for e in of["dropped"][JOINING])],
        [f"worker {JOINING}: seconds from joining to that round",
         f"{first.time - join.time:.1f}"],
        [f"workers {LEAVING[0]}, {LEAVING[1]}: seconds from SIGTERM until they had "
         "left", " and ".join(f"{e.time - said.notice:.1f}" for e in left)],
        [f"workers {LEAVING[0]}, {LEAVING[1]}: seconds until they were back",
         " and ".join(f"{e[0].time - said.notice:.1f}" if e else "-" for e in again)],
        ["samples, and how many of them the center has exactly once",
         f"{len(seen)}, {counted}"],
        ["the most often that it has one", most],
    ])  # fmt: skip
    steps = [b.seconds for pushes in of["push"] for b in pushes]
    page.text("load", load=round(os.getloadavg()[0], 1), cores=os.cpu_count(),
              exchange=spread(steps, 3))  # fmt: skip
    since = {name: at - said.begin for name, at in said._asdict().items()}
    events = [
        [e.kind, e.worker, round(e.time - said.begin, 2), e.global_step, e.local_step]
        for e in history.events
    ]
    page.picture(drawn(events, since))
    page.data(settings=settings, said=since, events=events)


def drawn(events: Sequence[Sequence[Any]], said: Mapping[str, float]) -> list[Panel]:
    """A row for each worker, a tick for each round; seconds after the beginning."""
    lines = []
    for kind, (name, look, colour) in MARKS.items():
        at = [(time, worker) for what, worker, time, *_ in events if what == kind]
        times, workers = np.transpose(at)
        lines.append(Line(name, times, workers, look, colour))
    names, span = [f"worker {n}" for n in range(WORKERS)], (said["stop"], said["go_on"])
    return [Panel("seconds", "", lines, names=names, shaded=span)]


MARKS = {
    "push": ("a round that was used", "|", COLOURS[0]),
    "dropped": ("late, dropped", "x", COLOURS[1]),
    "join": ("joined", ">", COLOURS[2]),
    "left": ("left", "s", COLOURS[4]),
}


if __name__ == "__main__":
    values = {"step": STEP, "period": PERIOD, "delay": DELAY, "quorum": QUORUM}
    values |= {"workers": WORKERS, "places": PLACES, "batch": BATCH}
    reproduce("timeline", __doc__, study, FULL, SHORT, **values)
