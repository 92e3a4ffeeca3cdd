"""One table of all methods: loss, bytes, and what a slow, lost or lying worker does.

python benchmarks/table.py           # an hour on two cores; goes on where it was ended
python benchmarks/table.py --again   # from the beginning
python benchmarks/table.py --quick

The rows of `table.csv` are runs, each with its seed, and its loss on the way.
"""

import csv
import json
import time
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import table_page
from methods import (
    BATCH,
    CONTEXT,
    INNER,
    LATER,
    METHODS,
    PARTS,
    PERIOD,
    STEPS,
    WORKERS,
    Method,
    Tree,
    initial,
    loss_of,
    rate_of,
    texts,
    windows_of,
)
from report import arguments, folder_of, processes
from rich.progress import track

import optx_sync as oxs
from optx_sync.state.direct import cycle_of

EVERY = 50  # steps between evaluations
EVENTS = 100  # of a virtual clock, between two that it keeps
FULL = {"steps": STEPS, "seeds": 3, "names": tuple(METHODS)}
SHORT = {"steps": 20, "seeds": 1, "names": ("data parallel", "DiLoCo, H = 5")}
WELL, SLOW, LOST = "all well", "one slow", "one lost"
LIES = {"one poisoned": -10.0, "one exploding": 1e3}
APART = ("EASGD", "local SGD", "DiLoCo", "delayed Nesterov", "NoLoCo")
TROUBLED = ("data parallel", "backup workers", *APART, "gossip, exponential")
MERGED = "DiLoCo, radial", "DiLoCo, penalised"
TROUBLED += ("Decoupled DiLoCo", "Decoupled DiLoCo, radial", "HeLoCo", *MERGED)
RULES = ("median", "trimmed mean", "Krum", "geometric median", "clipped to the median")
LIED_TO = ("data parallel", *RULES, "EASGD", "DiLoCo", "DiLoCo, clipped")
LIED_TO += "DiLoCo, median", "NoLoCo", "gossip, exponential"
LIED_TO += MERGED
STUDIED = dict.fromkeys((SLOW, LOST), TROUBLED) | dict.fromkeys(LIES, LIED_TO)
SLOWNESS = 3  # a slow worker's step takes so many of the others'
SECOND = "second task"  # after a whole run, a quarter of its steps of data parallel
AFTER = ("data parallel", "DiLoCo", "DiLoCo, H = 100")
AFTER += "data parallel, Muon", "MuLoCo"


class Job(NamedTuple):
    """Runs of one program."""

    method: str
    condition: str
    steps: int
    seeds: int


# Running them.

held_out_loss = jax.jit(loss_of)


def lying(factor: float, axes: dict[str, int]) -> optax.GradientTransformation:
    """Multiplies what the first worker passes on; the others are honest."""

    def update(updates, state, params=None):
        (axis,) = axes
        mine = jnp.where(jax.lax.axis_index(axis) == 0, factor, 1.0)
        return jax.tree.map(lambda x: mine * x, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def optimizer(job: Job) -> optax.GradientTransformation:
    """The method around its inner optimizer, in which a liar lies."""
    method = METHODS[job.method]
    inner = INNER[method.inner](rate_of(job.steps))
    if job.condition not in LIES:
        return method.wrap(inner)
    lies = lying(LIES[job.condition], method.axes)
    if cycle_of(method.wrap(inner)) is not None:  # workers step alone between rounds
        return method.wrap(optax.chain(inner, lies))
    return optax.chain(lies, method.wrap(inner))  # its gradients are


def in_step(job: Job, seed: int) -> tuple[list[float], Tree]:
    """Workers that march in step: losses on the way, and the model at the end."""
    method, tx, start = METHODS[job.method], optimizer(job), initial(seed)
    names, sizes = tuple(method.axes), tuple(method.axes.values())
    workers = oxs.Workers(sizes, names)
    # A weight is asked for only where one may be 0: not all methods take one.
    weighs = job.condition == LOST

    @workers.step(state=2, split=False)
    def step(params, state, windows, alive):
        grads = jax.grad(loss_of)(params, windows)
        extra = {"weight": alive} if weighs else {}
        return oxs.apply_gradients(tx, grads, state, params, **extra)

    now, losses, model = workers.start((start, tx.init(start))), [], start
    for number in range(1, job.steps + 1):
        windows = windows_of("train", seed, number).reshape(*sizes, BATCH, CONTEXT + 1)
        alive = np.ones(sizes, np.float32)
        alive.flat[-1] = not is_away(number, job)
        now = step(*now, windows, alive)
        if number % EVERY == 0 or number == job.steps:
            model = jax.device_get(model_of(workers, method, now, start))
            losses.append(float(held_out_loss(model, texts()["validation"])))
    return losses, model


def model_of(workers: oxs.Workers, method: Method, now: Tree, start: Tree) -> Tree:
    """What is evaluated: the center, or the mean of the workers."""
    if method.kind == "partners":
        return oxs.by_hand.mean_params(now[0])
    if optax.tree.get(now[1], "center") is None:
        return workers.first(now[0])
    return oxs.center_params(workers.first(now[1]), start)


def is_away(step: int, job: Job) -> bool:
    """Whether the worker that is lost and comes back is away: a third of the run."""
    return job.condition == LOST and 1 / 3 < step / job.steps <= 2 / 3


def step_seconds(job: Job, seed: int) -> np.ndarray:
    """float[N, steps], of each worker's steps, which differ by a tenth or so."""
    rng = np.random.default_rng((seed, 2))
    seconds = rng.lognormal(0, 0.1, (WORKERS, job.steps))
    seconds[-1] *= SLOWNESS if job.condition == SLOW else 1
    return seconds


def arrivals(job: Job, seed: int) -> np.ndarray:
    """Which worker ends a step, event by event."""
    ends = step_seconds(job, seed).cumsum(1)
    worker = np.broadcast_to(np.arange(WORKERS)[:, None], ends.shape)
    counts = ends <= job.steps  # as long as the others need in the mean
    if job.condition == LOST:
        counts[-1] &= (ends[-1] < job.steps / 3) | (ends[-1] > job.steps * 2 / 3)
    if job.condition == WELL:
        counts[:] = True  # equal tokens
    order = np.argsort(ends[counts], kind="stable")
    return worker[counts][order].astype(np.int32)


def as_they_arrive(job: Job, seed: int) -> tuple[list[float], Tree]:
    """Workers that do not wait for each other."""
    method, start = METHODS[job.method], initial(seed)
    order = arrivals(job, seed)
    codes = jnp.asarray(texts()["train"])
    validation = jnp.asarray(texts()["validation"])
    inner = INNER[method.inner](rate_of(job.steps))
    every = max(1, len(order) * min(EVERY, job.steps) // job.steps)
    seconds, points = step_seconds(job, seed), max(1, job.steps // EVERY)
    lost = (WORKERS - 1, job.steps / 3, job.steps * 2 / 3)
    away = [lost] if job.condition == LOST else []

    def grad_fn(worker, params, event):
        key = jax.random.fold_in(jax.random.key(seed), event)
        first = jax.random.randint(key, (BATCH, 1), 0, len(codes) - CONTEXT)
        return jax.grad(loss_of)(params, codes[first + jnp.arange(CONTEXT + 1)])

    @jax.jit
    def run(start):
        if method.arrives == "replicas":
            found = oxs.simulate.sync_replicas(
                inner,
                start,
                grad_fn,
                order,
                replicas_to_aggregate=7,
                total_num_replicas=WORKERS,
                num_tokens=0,
                record=every,
            )
            return jax.lax.map(lambda p: loss_of(p, validation), found.params), (
                jax.tree.map(lambda x: x[-1], found.params)
            )
        if method.arrives == "quorum":
            found = oxs.simulate.decoupled(
                inner,
                oxs.rules.diloco(),
                start,
                grad_fn,
                lambda worker, step: seconds[worker, step % job.steps],
                until=job.steps,
                num_workers=WORKERS,
                meet=method.by,
                communication_period=PERIOD,
                fragments=PARTS,
                delay=LATER,
                failures=away,
                weigh=lambda at: at.tokens**2 / at.steps,
                record=EVENTS,
            )
            picked = np.linspace(0, len(found.seconds) - 1, points).round().astype(int)
            centers = jax.tree.map(lambda x: x[picked], found.center)
            curve = jax.lax.map(lambda c: loss_of(c, validation), centers)
            return curve, found.final.center
        found = oxs.simulate.asynchronous(
            inner,
            method.by,
            start,
            grad_fn,
            order,
            num_workers=WORKERS,
            communication_period=PERIOD,
            record=every,
        )
        curve = jax.lax.map(lambda c: loss_of(c, validation), found.center)
        return curve, found.final.center

    curve, model = jax.device_get(run(start))
    return [float(loss) for loss in curve], model


def second_task(model: Tree, steps: int, seed: int) -> float:
    """The test loss on other text, after steps of data parallel on it."""
    tx = optax.adamw(rate_of(steps))

    @jax.jit
    def step(params, state, windows):
        grads = jax.grad(loss_of)(params, windows.reshape(-1, CONTEXT + 1))
        return oxs.apply_gradients(tx, grads, state, params)

    now = jax.tree.map(jnp.asarray, model), tx.init(model)
    for number in range(1, steps + 1):
        now = step(*now, windows_of("second", seed + 100, number))
    return float(held_out_loss(now[0], texts()["second test"]))


def run(job: Job) -> list[dict[str, Any]]:
    """All seeds of a program: rows of the CSV file."""
    rows = []
    arrives = METHODS[job.method].arrives
    train = as_they_arrive if arrives else in_step
    for seed in range(job.seeds):
        curve, model = train(job, seed)
        row: dict[str, Any] = {"method": job.method, "condition": job.condition}
        loss = float(held_out_loss(model, texts()["test"]))
        row |= {"seed": seed, "steps": job.steps, "test loss": loss, SECOND: ""}
        if job.condition == WELL and job.method in AFTER:
            row[SECOND] = second_task(model, job.steps // 4, seed)
        rows.append(row | {"validation losses": " ".join(map(str, curve))})
    return rows


# The table.

COLUMNS = ("method", "condition", "seed", "steps", "test loss", SECOND)
CURVE = "validation losses"


def jobs(steps: int, seeds: int, names: Container[str]) -> list[Job]:
    """All programs, those of the table first."""
    well = [Job(name, WELL, steps, seeds) for name in METHODS if name in names]
    troubled = []
    for condition, studied in STUDIED.items():
        for name in filter(names.__contains__, studied):
            # Who waits for a slow worker makes fewer steps in the same time.
            waits = condition == SLOW and not METHODS[name].arrives
            made = steps // SLOWNESS if waits else steps
            troubled.append(Job(name, condition, made, seeds))
    return well + troubled


def read(path: Path) -> list[dict[str, str]]:
    """The runs of a file, none if it is not there; of methods that there are."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["method"] in METHODS]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Runs in the order of the table, so that two makings can be compared."""
    order = {name: number for number, name in enumerate(METHODS)}
    conditions = [WELL, *STUDIED]
    rows = sorted(
        rows,
        key=lambda row: (
            conditions.index(row["condition"]),
            order[row["method"]],
            int(row["seed"]),
        ),
    )
    with path.open("w", newline="") as file:
        columns: list[str] = [*COLUMNS, CURVE]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def make(path: Path, todo: list[Job], quick: bool) -> None:
    """Run what the file has not yet; it is written anew after every program."""
    known = read(path)
    have = {(row["method"], row["condition"]) for row in known}
    todo = [job for job in todo if (job.method, job.condition) not in have]
    with processes(quick) or ThreadPoolExecutor(1) as pool:
        found = pool.map(run, todo)
        for rows in track(found, "Training", total=len(todo)):
            write(path, known := known + rows)


def hours_of(path: Path) -> float:
    """What earlier runs took, if a page was written of them."""
    return json.loads(path.read_text())["data"]["hours"] if path.exists() else 0.0


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)  # to compile for, not to run on
    parser = arguments(__doc__)
    parser.add_argument("--again", action="store_true", help="forget earlier runs")
    options = parser.parse_args()
    folder, settings = folder_of(options), SHORT if options.quick else FULL
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.csv"
    if options.again:
        path.unlink(missing_ok=True)
    before = hours_of(folder / "table.json") if path.exists() else 0.0
    start = time.perf_counter()
    make(path, jobs(**settings), options.quick)
    hours = before + (time.perf_counter() - start) / 3600
    table_page.pages(options, read(path), settings["steps"], hours)
