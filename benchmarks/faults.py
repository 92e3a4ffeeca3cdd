"""Workers and servers that are killed, on a local Ray: what is lost, twice or torn.

    python benchmarks/faults.py                  # a table that covers all: 40 minutes
    python benchmarks/faults.py --quick          # a few cells, seconds each
    python benchmarks/faults.py --only diloco --seconds 20
    python benchmarks/faults.py --resume         # goes on with a table that was ended
    python benchmarks/faults.py --all            # the whole product: four hours

Every push marks a place of its own in the center, on every server, and the worker
writes down which of its steps have returned. *Lost*: a step has returned, and the
center lacks it. *Beyond*: lost, and no server that went back to its last checkpoint
explains it. *Untold*: lost before the eyes of a worker that went on and was not told.
*Twice*: a place holds more than one push. *Torn*: the two variables of a part differ.
A step pushes a part to each server, and each counts. Then what workers learn meanwhile,
runs without faults for their memory, and every order of the protocol's events.
"""

import bisect
import collections
import functools
import itertools
import os
import pathlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import on_ray
import optax
import ray
import report
from digits import IMAGES, LABELS, TEST
from explorer import Explorer
from on_ray import PATIENCE_SECONDS

import optx_sync as oxs
from optx_sync import runtime

on_ray.take_one_thread()
WORKERS, CPUS = 4, 2
EVERY = 20  # pushes between checkpoints
# A place is a digit to the base 4 of a number, so many digits in each: exact in float32
# whatever a push is divided by, and a parameter of 1 kB has places for a minute.
DIGITS, NUMBERS = 8, 512
# Floats of a server's part.
SIZES = {"1 kB": 250, "150 kB": 37_500, "1.2 MB": 300_000, "100 MB": 25_000_000}
# Seconds between deaths of workers and of servers, 0: none.
FAULTS = {"workers": (3, 0), "servers": (0, 6), "both": (10, 10)}
FAULTS |= {"none": (0, 0), "workers and servers": (5, 7)}
RULES: dict[str, Any] = {
    "local_sgd": oxs.rules.local_sgd(),
    "diloco": oxs.rules.diloco(optax.sgd(1.0)),
    "agn": oxs.rules.agn(optax.sgd(1.0)),
    "elastic": oxs.rules.elastic(moving_rate=0.25, rho=0.0),
    "3 of 4": runtime.SyncReplicas(3),
    "6 of 4": runtime.SyncReplicas(6),
    "quorum 3 of 4": oxs.rules.diloco(optax.sgd(1.0)),
}
MEETS = {"quorum 3 of 4": runtime.quorum(3, grace=1.0)}
# A push has a number alone where the center's share of it is not known beforehand: the
# pull of elastic averaging is not linear, a meeting divides by those that have come.
ALONE = ("elastic", "quorum 3 of 4")


class Cell(NamedTuple):
    """One run under fire."""

    rule: str
    faults: str
    size: str
    servers: int
    fragments: int = 0  # parts that meet one after the other; 0: a part each server

    @property
    def parts(self) -> int:
        """The parts that a step pushes."""
        return self.fragments or self.servers


# Every fault with every agreement, every fault with every size, every size with one
# and with two servers; then three servers, and parts.
CELLS = [
    Cell("local_sgd", "workers", "1 kB", 2),
    Cell("local_sgd", "servers", "150 kB", 2),
    Cell("local_sgd", "both", "100 MB", 1),
    Cell("diloco", "workers", "150 kB", 2),
    Cell("diloco", "servers", "1.2 MB", 1),
    Cell("diloco", "both", "1 kB", 2),
    Cell("agn", "workers", "1.2 MB", 1),
    Cell("agn", "servers", "100 MB", 2),
    Cell("agn", "both", "150 kB", 1),
    Cell("elastic", "workers", "100 MB", 1),
    Cell("elastic", "servers", "150 kB", 2),
    Cell("elastic", "both", "1.2 MB", 2),
    Cell("3 of 4", "workers", "150 kB", 1),
    Cell("3 of 4", "servers", "1 kB", 1),
    Cell("3 of 4", "both", "1.2 MB", 1),
    Cell("6 of 4", "workers", "1 kB", 1),
    Cell("6 of 4", "servers", "1.2 MB", 1),
    Cell("6 of 4", "both", "150 kB", 1),
    Cell("local_sgd", "workers", "1.2 MB", 3),
    Cell("diloco", "servers", "150 kB", 3),
    Cell("elastic", "both", "150 kB", 3),
    Cell("local_sgd", "workers", "150 kB", 1, 3),
    Cell("diloco", "servers", "1.2 MB", 2, 3),
    Cell("agn", "both", "150 kB", 2, 3),
    Cell("local_sgd", "servers", "1 kB", 3, 4),
    Cell("quorum 3 of 4", "both", "1.2 MB", 1),
    Cell("quorum 3 of 4", "servers", "1.2 MB", 1),
    Cell("quorum 3 of 4", "both", "150 kB", 1),
]
SHORT = [CELLS[3], CELLS[1], CELLS[13], CELLS[-1]]


def every_cell() -> list[Cell]:
    """The whole product, less what is refused."""
    faults = ("workers", "servers", "both")
    product = itertools.product(RULES, faults, SIZES, (1, 2))
    return [Cell(*cell) for cell in product if "of 4" not in cell[0] or cell[3] == 1]


def required(rule: str) -> int:
    """The gradients that an update needs."""
    return {"3 of 4": 3, "6 of 4": 6}.get(rule, 1)


class Ledger:
    """Where in a part which push of which worker leaves its mark."""

    def __init__(self, cell: Cell):
        self.digits: int = 1 if cell.rule in ALONE else DIGITS
        self.numbers: int = min(NUMBERS, SIZES[cell.size] // 2 // WORKERS)
        self.places: int = self.numbers * self.digits

    def mark(self, worker: int, place: int) -> tuple[int, float]:
        """Where, and the gradient there."""
        number, digit = divmod(place, self.digits)
        return worker * self.numbers + number, -WORKERS * 4.0**digit

    def read(self, part: Any, cell: Cell) -> Any:
        """How many pushes lie in the places, [worker, place]."""
        book = np.asarray(part[: WORKERS * self.numbers], np.float64)
        book = book.reshape(WORKERS, self.numbers, 1)
        if cell.rule in MEETS:  # A push is one of k, a whole number, or there are two.
            among = WORKERS / np.where(book, book, WORKERS)[:, :, 0]
            return np.where(abs(among - np.rint(among)) < 1e-3, 1, 2) * (
                book[:, :, 0] != 0
            )
        if cell.rule == "elastic":
            return (book[:, :, 0] != 0).astype(int)
        one = 1.0 if cell.rule in ("local_sgd", "diloco") else WORKERS
        whole = np.rint(book * required(cell.rule) / one).astype(int)
        return (whole // 4 ** np.arange(self.digits) % 4).reshape(WORKERS, -1)


def start_of(cell: Cell) -> dict[str, Any]:
    """Two variables for each part, which go to servers in their order."""
    names = [f"{half}_{k}" for half in "ab" for k in range(cell.parts)]
    return {name: np.zeros(SIZES[cell.size] // 2, np.float32) for name in names}


def program(folder: pathlib.Path, seconds: float, cell: Cell):
    """A worker that makes marks until the time is over; the first one begins it."""
    ledger = Ledger(cell)

    def train(worker):
        log = folder / f"worker_{worker.index}.log"
        if not (folder / "begin").exists():
            (folder / "begin").touch()
        until = (folder / "begin").stat().st_ctime + seconds
        lines = log.read_text().splitlines() if log.exists() else []
        place = sum(line.startswith("try") for line in lines)
        grads = {name: np.zeros_like(value) for name, value in start_of(cell).items()}
        told = 0
        with log.open("a", buffering=1) as out:
            while time.time() < until and place < ledger.places:
                where, mark = ledger.mark(worker.index, place)
                for grad in grads.values():
                    grad[where] = mark
                out.write(f"try {place}\n")
                begin = time.time()
                worker.step(grads)
                if cell.fragments:
                    worker.flush()  # All parts meet.
                now = f"{worker.incarnation} {time.time()}"
                kind = "ack" if worker.used else "late"
                out.write(f"{kind} {place} {now} {worker.global_step} {begin}\n")
                if worker.lost > told:
                    out.write(f"told {worker.lost - told} {now}\n")
                    told = worker.lost
                for grad in grads.values():
                    grad[where] = 0.0
                place += 1
                time.sleep(max(0.02, seconds / ledger.places))

    return train


def shoot(
    folder: pathlib.Path, faults: str, seconds: float, stop: threading.Event
) -> dict[str, int]:
    """Kill as the schedule says; how many of which."""
    rng, shots = random.Random(0), {"workers": 0, "servers": 0}
    due = dict(zip(shots, FAULTS[faults], strict=True))
    while not (folder / "begin").exists():
        if stop.wait(0.1):
            return shots
    begin, next_ = time.time(), dict(due)
    while not stop.wait(0.1) and time.time() < begin + seconds:
        for kind, every in due.items():
            if not every or time.time() - begin < next_[kind]:
                continue
            next_[kind] += every
            if pids := on_ray.processes(kind):
                shots[kind] += on_ray.tell(rng.choice(pids))
    return shots


class Ack(NamedTuple):
    """A step that has returned."""

    place: int
    incarnation: int
    time: float
    step: int  # the server's, as the worker heard it
    begin: float  # until it returned it may have been applied, and lost already


def judge(cell: Cell, folder: pathlib.Path, center: Any, history: Any) -> list[int]:
    """Acked, lost, beyond, untold, twice and torn."""
    ledger = Ledger(cell)
    halves = [
        [ledger.read(center[f"{half}_{k}"], cell) for k in range(cell.parts)]
        for half in "ab"
    ]
    parts = halves[0]
    back = [e for e in history.events if e.kind == "restored"]
    waits = cell.rule in ("3 of 4", "6 of 4")
    acked, lost, beyond, untold, twice = 0, 0, 0, 0, 0
    logs = [folder / f"worker_{index}.log" for index in range(WORKERS)]
    times = sorted(
        float(line.split()[3])
        for log in logs
        for line in (log.read_text().splitlines() if log.exists() else [])
        if line.startswith("ack") and len(line.split()) == 6
    )

    def explains(event: Any, ack: Ack) -> bool:
        """Whether a server that came back had no checkpoint of it."""
        if event.time <= (ack.time if cell.parts == 1 else ack.begin):
            return False
        if cell.parts > 1:  # Each is at a step of its own: by the acks between.
            between = bisect.bisect(times, event.time) - bisect.bisect(times, ack.time)
            return between <= EVERY + 2 * WORKERS
        first = event.global_step - waits
        return first < ack.step <= event.global_step + EVERY + 2 * WORKERS

    for index, log in enumerate(logs):
        acks: dict[int, list[Ack]] = collections.defaultdict(list)
        told: collections.Counter[int] = collections.Counter()
        for line in log.read_text().splitlines() if log.exists() else []:
            kind, *rest = line.split()
            if kind == "ack" and len(rest) == 5:
                place, mine, step = (int(rest[k]) for k in (0, 1, 3))
                ack = Ack(place, mine, float(rest[2]), step, float(rest[4]))
                acks[ack.incarnation].append(ack)
            elif kind == "late" and len(rest) == 5 and cell.rule in MEETS:
                # It was dropped, and told so: it must not be there.
                twice += sum(int(part[index, int(rest[0])] != 0) for part in parts)
            elif kind == "told" and len(rest) == 3:
                told[int(rest[1])] += int(rest[0])
        for incarnation, own in acks.items():
            acked += len(own) * len(parts)
            should = 0
            for ack, part in itertools.product(own, parts):
                if part[index, ack.place]:
                    continue
                lost += 1
                # A gradient of SyncReplicas may be of the update after this step.
                why = [e.time for e in back if explains(e, ack)]
                beyond += not why
                # A step that began after that has spoken with each server.
                last = own[-1].time if cell.parts == 1 else own[-1].begin
                should += any(last > when for when in why[:1])
            untold += max(should - told[incarnation], 0)
    # At the end so many gradients wait for an update that does not come.
    waiting = min(beyond, required(cell.rule) - 1)
    twice += sum(int((part > 1).sum()) for part in parts)
    torn = sum(int((a != b).sum()) for a, b in zip(*halves, strict=True))
    return [acked, lost - waiting, beyond - waiting, untold, twice, torn]


class Outcome(NamedTuple):
    """How a run under fire ended."""

    center: Any
    history: Any
    ended: str  # "yes", or the error
    shots: dict[str, int]  # how many workers and servers were killed


def under(
    faults: str,
    seconds: float,
    folder: pathlib.Path,
    train: Callable[[Any], None],
    params: Any,
    rate: float,
    rule: str,
    **more: Any,
) -> Outcome:
    """Train it, and kill what belongs to it until the seconds are over."""
    stop, shots, late = threading.Event(), {}, threading.Event()
    killer = threading.Thread(
        target=lambda: shots.update(shoot(folder, faults, seconds, stop)), daemon=True
    )
    center, history, ended = None, runtime.History([], None), "yes"

    def look(*_):
        if (folder / "begin").exists():
            last_fault = (folder / "begin").stat().st_ctime + seconds
            if time.time() > last_fault + PATIENCE_SECONDS:
                late.set()
                raise TimeoutError  # Ray makes another error of it.

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 10, 10)
    killer.start()
    try:
        center, history = runtime.run(
            train, params, optax.sgd(rate), RULES[rule], num_workers=WORKERS,
            meet=MEETS.get(rule), checkpoint_dir=folder / "saved",
            checkpoint_every=EVERY, **more,
        )  # fmt: skip
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"[:60]
        if late.is_set():
            ended = f"not {PATIENCE_SECONDS} s after the last fault"
        center = getattr(error, "center", None)
        history = getattr(error, "history", history)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop.set()
        killer.join()
    return Outcome(center, history, ended, shots)


def run_cell(cell: Cell, seconds: float) -> list[list[Any]]:
    """A row of the table."""
    begin, params, found = time.time(), start_of(cell), [""] * 6
    with on_ray.folder_for("faults") as folder:
        train = program(folder, seconds, cell)
        more: Any = {"num_servers": cell.servers}
        more |= {"communication_period": cell.fragments or 1}
        if cell.fragments:
            more["fragments"] = lambda path, leaf: int(str(path[0].key)[2:])
        outcome = under(
            cell.faults, seconds, folder, train, params, 1.0, cell.rule, **more
        )
        if outcome.center is not None:
            found = judge(cell, folder, outcome.center, outcome.history)
    said = cell.rule, cell.faults, cell.size, cell.servers, cell.fragments or ""
    ended = outcome.ended, round(time.time() - begin)
    return [[*said, *outcome.shots.values(), *found, *ended]]


def learned(rule: str, faults: str, steps: int) -> list[Any]:
    """What workers learn of the digits meanwhile, who was killed, how it ended."""
    images, labels, test = IMAGES, LABELS, slice(0, TEST)

    def train(folder, worker):
        rng = np.random.default_rng([worker.index, worker.restarts])
        (folder / "begin").touch()

        @jax.jit
        def gradient(params, x, y):
            def loss(params):
                logits = x @ params["w"] + params["b"]
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

            return jax.grad(loss)(params)

        while worker.local_step < steps:
            rows = rng.integers(test.stop, len(images), 32)
            worker.step(gradient(worker.params, images[rows], labels[rows]))
            time.sleep(0.02)

    params = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    period = 1 if required(rule) > 1 else 5
    with on_ray.folder_for("learn") as folder:
        given = functools.partial(train, folder), params, 0.2, rule
        seconds = 0.02 * steps
        outcome = under(faults, seconds, folder, *given, communication_period=period)
    percent: Any = ""
    if outcome.center is not None:
        logits = images[test] @ outcome.center["w"] + outcome.center["b"]
        percent = round(100 * float(np.mean(logits.argmax(1) == labels[test])), 1)
    return [percent, *outcome.shots.values(), outcome.ended]


def learned_by(rule: str, steps: int) -> list[list[Any]]:
    """A row of the table: without faults, and with workers and servers killed."""
    quiet, *_ = learned(rule, "none", steps)
    return [[rule, quiet, *learned(rule, "workers and servers", steps)]]


BAD = ("beyond", "untold", "twice", "torn")  # columns that say what went wrong


def under_fire(
    page: Any, known: report.Known, cells: list[Cell], seconds: float
) -> None:
    """Run the cells."""
    rows = known.all("faults", cells, run_cell, seconds)
    page.table("faults", rows)
    titles = page.words["tables"]["faults"][1].split(" | ")
    found = [dict(zip(titles, row, strict=True)) for row in rows]
    bad = [
        *(sum(one[key] != 0 for one in found) for key in BAD),
        sum(not one["acked"] for one in found),
        sum(one["ended"] != "yes" for one in found),
    ]
    words = page.words["texts"]["looked_for"].strip().splitlines()
    rows = [[*said, len(found)] for said in zip(words, bad, strict=True)]
    page.table("looked_for", rows)


def learning(page: Any, known: report.Known, rules: list[str], steps: int) -> None:
    """How well workers learn without faults, and with workers and servers killed."""
    rows = known.all("learning", rules, learned_by, steps)
    page.table("learning", rows, steps=steps)


class Quiet(NamedTuple):
    """A run without faults, for its memory."""

    rule: str
    servers: int
    saves: bool  # checkpoints


SEEN = 10, 2, 1  # after a tenth of the pushes, after half of them, at the end
QUIET = [Quiet("local_sgd", 1, False), Quiet("diloco", 2, True)]
QUIET += [Quiet("3 of 4", 1, True)]


def resident(pid: int) -> float:
    """Megabytes of memory that a process has."""
    found = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return int(found.stdout) / 1024


def residents(quiet: Quiet, pushes: int) -> list[list[Any]]:
    """What servers and a worker hold after a part of so many pushes, and all."""
    marks = [pushes // part for part in SEEN]
    params = {f"part_{k}": np.zeros(250, np.float32) for k in range(quiet.servers)}

    def train(folder, worker):
        grads = {name: np.full(250, 1e-3, np.float32) for name in params}
        servers = [s.pid.remote() for s in worker.connection.servers]
        pids = [*ray.get(servers), os.getpid()]
        while worker.local_step < pushes // WORKERS:
            worker.step(grads)
            if worker.index == 0 and worker.local_step * WORKERS in marks:
                line = " ".join(str(resident(pid)) for pid in pids)
                with (folder / "resident").open("a") as out:
                    out.write(f"{line}\n")

    with on_ray.folder_for("pushes") as folder:
        saves: Any = {"checkpoint_dir": folder / "saved"} if quiet.saves else {}
        _, history = runtime.run(
            functools.partial(train, folder), params, optax.sgd(1.0),
            RULES[quiet.rule], num_workers=WORKERS, num_servers=quiet.servers,
            communication_period=1, **saves,
        )  # fmt: skip
        lines = (folder / "resident").read_text().splitlines()
    name = f"{quiet.rule}, {quiet.servers} server{'s' * (quiet.servers > 1)}"
    name += ", checkpoints" * quiet.saves
    print(f"{name}: {history.count('push'):,} pushes", flush=True)
    who = [*(f"server {k}" for k in range(quiet.servers)), "worker 0"]
    found = np.array([line.split() for line in lines], float)
    return [[name, *row] for row in zip(who, *found.tolist(), strict=True)]


def many_pushes(page: Any, known: report.Known, pushes: int) -> None:
    """How much memory servers and a worker have after so many pushes."""
    marks = [pushes // part for part in SEEN]
    rows = known.all("pushes", QUIET, residents, pushes)
    page.table("pushes", rows, first=marks[0], second=marks[1], third=marks[2])


def explored(order: tuple[Any, ...]) -> list[list[Any]]:
    """Go through every order of events."""
    workers, owners, rounds, deaths, losses = order
    begin = time.time()
    worlds, ends = Explorer(*order).explore()
    seconds = round(time.time() - begin, 1)
    sides = [workers, len(owners), max(owners) + 1, rounds, deaths, losses]
    return [[*sides, worlds, ends, seconds]]


def every_order(page: Any, known: report.Known, quick: bool) -> None:
    """How many worlds the protocol can come to: it raises at a bad one."""
    rows = known.all("orders", ORDERS[: 2 if quick else None], explored)
    page.table("orders", rows)


# Workers, the server of each part, rounds, deaths, lost messages.
ORDERS: list[tuple[Any, ...]] = [
    (1, (0, 1), 3, 1, 1), (2, (0,), 3, 1, 1), (2, (0, 0), 3, 1, 1), (2, (0, 1), 3, 1, 1)
]  # fmt: skip


def main():
    """Run the cells and write the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell")
    parser.add_argument("--only", default="", help="cells whose text contains this")
    parser.add_argument("--resume", action="store_true", help="go on with a table")
    parser.add_argument("--all", action="store_true", help="the whole product")
    parser.add_argument("--pushes", type=int, default=10_000, help="for the memory")
    options = parser.parse_args()
    cells, seconds, pushes, steps = CELLS, options.seconds, options.pushes, 1500
    if options.all:
        cells = every_cell()
    if options.quick:
        cells, seconds, pushes, steps = SHORT, 15.0, 400, 300
    cells = [cell for cell in cells if options.only in str(cell)]
    values = {"workers": WORKERS, "cpus": CPUS, "every": EVERY, "seconds": seconds}
    page = report.Report("faults", options, **values)
    some = {"some": len(cells), "all": len(CELLS)}
    page.text("chosen" if len(cells) >= len(CELLS) else "some", **some)
    known = report.Known(page.folder / "faults.rows", options.resume)
    with on_ray.cluster(WORKERS, object_store_memory=4 * 1024**3):
        under_fire(page, known, cells, seconds)
        learning(page, known, list(RULES)[: 1 if options.quick else None], steps)
        many_pushes(page, known, pushes)
    every_order(page, known, options.quick)
    page.save()
    known.path.unlink()


if __name__ == "__main__":
    main()
