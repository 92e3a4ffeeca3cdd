"""Time per exchange of asynchronous workers with the center, by size of the variables.

    python benchmarks/bench_async.py                   # three minutes
    python benchmarks/bench_async.py --quick           # short

Two worker processes on a local Ray push and take the center back, both at once, as fast
as they can, so an exchange takes as long as a round of both. Timed is `send` and its
answer, of arrays that lie ready, and not `Worker.step`. In the same run, in turns: a
naive Ray actor, as one writes it first (JAX arrays, push, then pull), the same with
NumPy arrays, Ray's own part of an exchange, and a plain NumPy copy of the bytes that a
round moves, there and back for each worker.
"""

import os
import statistics
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Ray's processes would otherwise yield to whatever else the machine does.
os.environ["RAY_worker_niceness"] = "0"

import jax
import jax.numpy as jnp
import numpy as np
import ray
import report
from report import Line, Panel
from rich.progress import track

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.runtime import Push
from optx_sync.runtime.agreements.arrays import arrays_of

WORKERS, VARIABLES = 2, 8
# Measured once with TensorFlow 1.15's parameter server on a machine like this one, 2
# workers and 1 server, milliseconds per round: stands beside it, nothing more.
TENSORFLOW = {1_000: 1.5, 1_000_000: 14.6, 10_000_000: 178.0}
RULES = {
    "local_sgd": oxs.rules.local_sgd(),
    "elastic": oxs.rules.elastic(moving_rate=0.1, rho=0.0),
    "diloco": oxs.rules.diloco(),
}
NAIVE, NUMPY, RAY_ALONE = "naive actor", "naive actor, NumPy", "Ray alone"
# Floats, rules, numbers of servers, blocks of measurements and seconds of each.
FULL = (tuple(TENSORFLOW), tuple(RULES), (1, 2), 5, 1.0)
SHORT = ((1_000,), ("local_sgd",), (1,), 1, 0.1)


class _Naive:
    """A center as one writes it first."""

    def __init__(self, center):
        self.center = center

    def push(self, moved):
        self.center = {name: self.center[name] + moved[name] for name in moved}

    def pull(self):
        return self.center

    def swap(self, moved):
        return self.center


class _Worker:
    """A process that exchanges again and again."""

    def __init__(self, index, size):
        self.index, self.rounds, self.kept = index, {}, {}
        self.arrays, self.there, self.back = make(size), make(size), make(size)

    def call(self, name, target):
        """One exchange of this kind."""
        if name in (NAIVE, NUMPY):
            # A worker's parameters are JAX arrays, and Ray can send them.
            kind = jnp.asarray if name == NAIVE else np.asarray
            moved = {key: kind(array) for key, array in self.arrays.items()}
            ray.get(target.push.remote(moved))
            jax.block_until_ready(ray.get(target.pull.remote()))
        elif name == RAY_ALONE:
            ray.get(target.swap.remote(self.arrays))
        elif name == "copy":
            for key, array in self.arrays.items():
                for _ in range(WORKERS):
                    np.copyto(self.there[key], array)
                    np.copyto(self.back[key], array)
        else:
            what = "params" if name.startswith("elastic") else "contribution"
            number = self.rounds[name] = self.rounds.get(name, 0) + 1
            if number == 1:  # As `Worker` does, whose compiled step cuts.
                parts = range(len(target.layout.owners))
                cut = [arrays_of(target.layout.pick(self.arrays, p)) for p in parts]
                self.kept[name] = target, target.join(self.index).incarnation, cut
            target, mine, cut = self.kept[name]
            pushes = [
                Push(self.index, number, {what: arrays}, incarnation=mine, part=part)
                for part, arrays in enumerate(cut)
            ]
            answers = [target.send(push) for push in pushes]
            for answer in answers:
                answer()

    def measure(self, name, target, seconds):
        self.call(name, target)
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            self.call(name, target)
            times.append(1e3 * (time.perf_counter() - start))
        return times


def make(size):
    """Variables of equal size; written to, so that their memory is there."""
    parts = np.array_split(np.full(size, 1e-3, np.float32), VARIABLES)
    return {str(i): np.array(part) for i, part in enumerate(parts)}


def bench(size, rules, servers, blocks, seconds):
    """Milliseconds of each exchange, by name."""
    params, naive = make(size), ray.remote(_Naive).options(num_cpus=0)
    as_jax = jax.tree.map(jnp.asarray, params)
    actors: list[Any] = [naive.remote(center) for center in (as_jax, params)]
    targets: dict[str, Any] = dict(
        zip((NAIVE, NUMPY, RAY_ALONE), (*actors, actors[1]), strict=True)
    )
    for name in rules:
        for count in servers:
            key = name if count == 1 else f"{name}, {count} servers"
            targets[key] = runtime.start_servers(
                params, RULES[name], num_workers=WORKERS, num_servers=count
            )
            actors += targets[key].servers
    worker: Any = ray.remote(_Worker).options(num_cpus=0)
    workers = [worker.remote(index, size) for index in range(WORKERS)]
    times = {name: [] for name in (*targets, "copy")}
    for block in range(blocks + 1):
        for name, of_name in times.items():
            # One process copies what both move, as one server does.
            those = workers if name in targets else workers[:1]
            arguments = name, targets.get(name), seconds if block else 0.1
            found = ray.get([w.measure.remote(*arguments) for w in those])
            if block:  # The first one warms up.
                of_name.extend(t for of_worker in found for t in of_worker)
    for actor in (*workers, *actors):
        ray.kill(actor)
    return times


def study(page, settings):
    """Measure all sizes and write the page."""
    sizes, rules, *plan = settings
    memory = 4 * 1024**3 if len(sizes) > 1 else 10**8
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=memory,
    )
    medians = {}
    for size in track(sizes, description="measuring"):
        times = bench(size, rules, *plan)
        medians[size] = middle = {n: statistics.median(t) for n, t in times.items()}
        rows = []
        for name, of_name in times.items():
            pairs = (NAIVE, name), (name, "copy"), (name, RAY_ALONE)
            beside = (middle[a] / middle[b] for a, b in pairs)
            rows.append([name, report.spread(of_name), *beside])
        rows.append(["TensorFlow 1.15, a round", str(TENSORFLOW[size]), "", "", ""])
        page.table("exchanges", rows, size=size)
    ray.shutdown()
    names = [NAIVE, *rules, RAY_ALONE, "copy"]
    lines = [Line(name, sizes, [medians[n][name] for n in sizes]) for name in names]
    known = [TENSORFLOW[size] for size in sizes]
    lines.append(Line("TensorFlow 1.15, elsewhere", sizes, known, "x:"))
    unit = "ms per exchange, median"
    page.picture([Panel("floats in the variables", unit, lines, log="xy")])


if __name__ == "__main__":
    report.reproduce("bench_async", __doc__, study, FULL, SHORT)
