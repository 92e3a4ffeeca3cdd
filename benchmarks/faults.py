"""Workers and servers that are killed, on a local Ray: what is lost, twice or torn.

    python benchmarks/faults.py                  # every cell for a minute: an hour
    python benchmarks/faults.py --quick          # a few cells, seconds each
    python benchmarks/faults.py --seconds 20 --only diloco

Every push marks a slot of its own in the center, on every server, and the worker writes
down which of its steps have returned. *Lost*: a step has returned, and the center lacks
it. *Told*: how many pushes workers were told are lost. *Twice*: a slot holds more than
one push. *Torn*: servers differ. *Ended*: the run returned by itself.
"""

import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import threading
import time
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
)
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import jax
import numpy as np
import optax
import ray
import report
from rich.progress import track

import optx_sync as oxs
from optx_sync import runtime

WORKERS, CPUS, SLOTS = 4, 2, 8192
EVERY = 20  # pushes between checkpoints
SIZES = {"1 kB": 250, "150 kB": 37_500, "1.2 MB": 300_000, "100 MB": 25_000_000}


class Cell(NamedTuple):
    """One run under fire."""

    rule: str
    servers: int
    size: str
    workers_every: float  # seconds between deaths, 0: none
    servers_every: float
    replay: bool = False


def rule_of(name: str) -> Any:
    """An agreement under which a gradient of -1 marks a slot."""
    return {
        "local_sgd": lambda: oxs.local_sgd_rule(),
        "diloco": lambda: oxs.diloco_rule(optax.sgd(1.0)),
        "agn": lambda: oxs.agn_rule(optax.sgd(1.0)),
        "elastic": lambda: oxs.elastic_rule(moving_rate=0.25, rho=0.0),
        "3 of 4": lambda: runtime.SyncReplicas(3),
        "6 of 4": lambda: runtime.SyncReplicas(6),
    }[name]()


# A covering set: each rule, number of servers, size and schedule, and the pairs that
# failed before.
CELLS = [
    Cell("local_sgd", 1, "1 kB", 3, 0),
    Cell("local_sgd", 2, "150 kB", 3, 0),
    Cell("local_sgd", 2, "1.2 MB", 0, 6),
    Cell("local_sgd", 2, "150 kB", 0, 6, True),
    Cell("local_sgd", 1, "100 MB", 0, 10),
    Cell("local_sgd", 2, "100 MB", 10, 10),
    Cell("diloco", 1, "150 kB", 0, 6),
    Cell("diloco", 2, "1.2 MB", 10, 10),
    Cell("diloco", 2, "150 kB", 0, 6, True),
    Cell("agn", 1, "1.2 MB", 10, 10),
    Cell("agn", 2, "1 kB", 0, 6, True),
    Cell("elastic", 1, "150 kB", 3, 0),
    Cell("elastic", 2, "1.2 MB", 0, 6),
    Cell("3 of 4", 1, "150 kB", 3, 0),
    Cell("3 of 4", 1, "1.2 MB", 10, 10),
    Cell("6 of 4", 1, "1 kB", 0, 6),
    Cell("6 of 4", 1, "150 kB", 10, 10),
]


def program(folder: pathlib.Path, seconds: float, sizes: dict[str, int]):
    """A worker that marks slots until the time is over; the first one begins it."""

    def train(worker):
        own = folder / f"worker_{worker.index}"
        log = own.with_suffix(".log")
        own.with_suffix(".pid").write_text(str(os.getpid()))
        try:
            with (folder / "begin").open("x") as file:
                file.write(str(time.time()))
            begin = time.time()
        except FileExistsError:
            begin = (folder / "begin").stat().st_mtime
        until = begin + seconds
        lines = log.read_text().splitlines() if log.exists() else []
        slot = sum(line.startswith("try") for line in lines)
        zeros = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        told = looked = 0.0
        with log.open("a", buffering=1) as out:
            while time.time() < until and slot < SLOTS:
                grads = dict(zeros)
                for name in sizes:
                    if name.startswith("ledger"):
                        mark = np.zeros((WORKERS, SLOTS), np.float32)
                        mark[worker.index, slot] = -WORKERS
                        grads[name] = mark.reshape(-1)
                out.write(f"try {slot}\n")
                worker.step(grads)
                if worker.used:
                    out.write(f"ack {slot} {worker.incarnation}\n")
                if worker.lost > told:
                    out.write(f"told {int(worker.lost - told)}\n")
                    told = worker.lost
                slot += 1
                if time.time() > looked + 2 and worker.index == 0:
                    pids = [s.pid.remote() for s in worker.connection.servers]
                    found, _ = ray.wait(pids, num_returns=len(pids), timeout=1)
                    if len(found) == len(pids):
                        names = json.dumps(ray.get(pids))
                        (folder / "servers.pids").write_text(names)
                    looked = time.time()
                time.sleep(0.02)

    return train


def shoot(
    folder: pathlib.Path, cell: Cell, seconds: float, stop: threading.Event
) -> dict[str, int]:
    """Kill as the schedule says; how many of which."""
    rng, shots = random.Random(0), {"workers": 0, "servers": 0}
    due = {"workers": cell.workers_every, "servers": cell.servers_every}
    while not (folder / "begin").exists():
        if stop.wait(0.1):
            return shots
    begin, next_ = time.time(), dict(due)
    while not stop.wait(0.1) and time.time() < begin + seconds:
        for kind, every in due.items():
            if not every or time.time() - begin < next_[kind]:
                continue
            next_[kind] += every
            if kind == "workers":
                files = sorted(folder.glob("*.pid"))
                pids = [int(f.read_text() or 0) for f in files]
            else:
                file = folder / "servers.pids"
                pids = json.loads(file.read_text()) if file.exists() else []
            if pids and (pid := rng.choice(pids)):
                try:
                    os.kill(pid, signal.SIGKILL)
                    shots[kind] += 1
                except ProcessLookupError:
                    pass
    return shots


def run_cell(cell: Cell, seconds: float) -> list[Any]:
    """A row of the table."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="faults"))
    ballast = SIZES[cell.size] // cell.servers
    sizes = {}
    for number in range(cell.servers):
        sizes[f"ballast_{number}"] = ballast
        sizes[f"ledger_{number}"] = WORKERS * SLOTS
    params = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    stop, shots = threading.Event(), {}
    killer = threading.Thread(
        target=lambda: shots.update(shoot(folder, cell, seconds, stop)), daemon=True
    )
    begin, ended, said = time.time(), "yes", ""
    killer.start()
    center: Any = None
    try:
        center, _ = runtime.run(
            program(folder, seconds, sizes), params, optax.sgd(1.0), rule_of(cell.rule),
            num_workers=WORKERS, num_servers=cell.servers, communication_period=1,
            checkpoint_dir=folder / "saved", checkpoint_every=EVERY,
            replay=cell.replay,
        )  # fmt: skip
    except Exception as error:
        ended, said = "raised", f"{type(error).__name__}: {error}"[:60]
        center = getattr(error, "center", None)
    finally:
        stop.set()
        killer.join()
    acked, gone, twice, torn, told = 0, 0, 0, 0, 0
    if center is not None:
        books = [
            center[f"ledger_{n}"].reshape(WORKERS, SLOTS) for n in range(cell.servers)
        ]
        for index in range(WORKERS):
            log = folder / f"worker_{index}.log"
            for line in log.read_text().splitlines() if log.exists() else []:
                kind, number, *_ = line.split()
                told += int(number) if kind == "told" else 0
                if kind == "ack":
                    acked += 1
                    gone += books[0][index, int(number)] == 0
        whole = max(float(np.abs(book).max()) for book in books)
        if cell.rule != "elastic":  # Its pull marks a slot little by little.
            twice = int(sum((book > 1.5 * _one(cell)).sum() for book in books[:1]))
        torn = int(
            sum(((a != 0) != (b != 0)).sum() for a, b in itertools.pairwise(books))
        )
        said = said or ("" if np.isfinite(whole) else "not finite")
    shutil.rmtree(folder, ignore_errors=True)
    return [
        cell.rule, cell.servers, cell.size, "yes" if cell.replay else "",
        shots.get("workers", 0), shots.get("servers", 0), acked, int(gone), told,
        twice, torn, f"{ended} {said}".strip(), round(time.time() - begin),
    ]  # fmt: skip


def _one(cell: Cell) -> float:
    """What a push leaves in its slot."""
    if cell.rule in ("local_sgd", "diloco"):
        return 1.0
    required = {"3 of 4": 3, "6 of 4": 6}.get(cell.rule, 1)
    return WORKERS / required


def main():
    """Run the cells and write the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell")
    parser.add_argument("--only", default="", help="cells whose text contains this")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if options.only in str(cell)]
    seconds = options.seconds
    if options.quick:
        cells, seconds = [CELLS[1], CELLS[3], CELLS[13]], 15.0
    values = {"workers": WORKERS, "cpus": CPUS, "every": EVERY, "seconds": seconds}
    page = report.Report("faults", options, **values)
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * 1024**3,
    )
    rows, titles = [], page.words["tables"]["faults"][1].split(" | ")
    for cell in track(cells, description="under fire"):
        rows.append(run_cell(cell, seconds))
        print(dict(zip(titles, rows[-1], strict=True)), flush=True)
    ray.shutdown()
    page.table("faults", rows)
    met = all(row[9] == 0 and row[10] == 0 and row[11] == "yes" for row in rows)
    page.criterion("faults", met, f"{len(rows)} runs", "see the table")
    page.save()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
