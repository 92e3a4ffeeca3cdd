"""Time per exchange of asynchronous workers with the center, by size of the variables.

    python benchmarks/bench_async.py                   # three minutes
    python benchmarks/bench_async.py --quick           # half a minute

Two worker processes on a local Ray push and take the center back, both at once, as fast
as they can, so an exchange takes as long as a round of both. In the same run, in turns:
a naive Ray actor, as one writes it first (JAX arrays, push, then pull), the same with
NumPy arrays, Ray's own part of an exchange (an actor that takes the arrays and answers
with others, and does nothing with them), and a plain NumPy copy of the bytes that a
round moves, there and back for each worker.
"""

import functools
import os
import statistics
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Ray's processes would otherwise yield to whatever else the machine does.
os.environ["RAY_worker_niceness"] = "0"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import ray
import report
from rich.progress import track

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.runtime import Push

WORKERS, VARIABLES = 2, 8
SIZES = (1_000, 1_000_000, 10_000_000)
# Times faster than the naive actor, by size.
TARGETS = {1_000: 1.2, 1_000_000: 3.0, 10_000_000: 3.0}
COPY_TARGET = 4.0  # times the copy, at most, at the largest size
# Measured once with TensorFlow 1.15's parameter server on a machine like this one, 2
# workers and 1 server, milliseconds per round: stands beside it, nothing more.
TENSORFLOW = {1_000: 1.5, 1_000_000: 14.6, 10_000_000: 178.0}
RULES = {
    "local_sgd": oxs.local_sgd_rule(),
    "elastic": oxs.elastic_rule(moving_rate=0.1, rho=0.0),
    "diloco": oxs.diloco_rule(),
}
RAY_ALONE = "Ray alone"
COLORS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE"]


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
        self.index, self.rounds = index, {}
        self.arrays = make(size)
        self.there, self.back = make(size), make(size)

    def naive(self, actor):
        ray.get(actor.push.remote(self.arrays))
        ray.get(actor.pull.remote())

    def naive_jax(self, actor):
        # A worker's parameters are JAX arrays, and Ray can send them.
        ray.get(actor.push.remote({k: jnp.asarray(v) for k, v in self.arrays.items()}))
        jax.block_until_ready(ray.get(actor.pull.remote()))

    def swap(self, actor):
        ray.get(actor.swap.remote(self.arrays))

    def copy(self, _):
        for name, array in self.arrays.items():
            for _ in range(WORKERS):
                np.copyto(self.there[name], array)
                np.copyto(self.back[name], array)

    def exchange(self, connection, what, name):
        number = self.rounds[name] = self.rounds.get(name, 0) + 1
        arrays = {f"['{key}']": array for key, array in self.arrays.items()}
        connection.push(Push(self.index, number, {what: arrays}))

    def measure(self, name, target, seconds):
        what = "params" if name.startswith("elastic") else "contribution"
        others = {
            "naive actor": self.naive_jax,
            "naive actor, NumPy": self.naive,
            RAY_ALONE: self.swap,
            "copy": self.copy,
        }
        exchange = functools.partial(self.exchange, what=what, name=name)
        call = others.get(name, exchange)

        call(target)
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            call(target)
            times.append(1e3 * (time.perf_counter() - start))
        return times


def make(size):
    """Variables of equal size; written to, so that their memory is there."""
    parts = np.array_split(np.full(size, 1e-3, np.float32), VARIABLES)
    return {str(i): np.array(part) for i, part in enumerate(parts)}


def bench(size, names, servers, blocks, seconds):
    """Milliseconds of each exchange, by name."""
    params = make(size)
    naive = ray.remote(_Naive).options(num_cpus=0)
    as_jax = jax.tree.map(jnp.asarray, params)
    targets: dict[str, Any] = {
        "naive actor": naive.remote(as_jax),
        "naive actor, NumPy": naive.remote(params),
        RAY_ALONE: naive.remote(params),
    }
    actors = list(targets.values())
    for name in names:
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


def judge(found, size, medians):
    """Compare with the targets; say what limits it where one is missed."""
    alone = medians[RAY_ALONE]
    for name in (name for name in RULES if name in medians):
        times = medians["naive actor"] / medians[name]
        because = (
            f"Ray alone, moving the same arrays without arithmetic, takes {alone:.1f} "
            f"ms of the {medians[name]:.1f} ms, which is "
            f"{medians['naive actor'] / alone:.2f} times faster than the naive actor"
        )
        if size in TARGETS:
            found.criterion(
                f"{name}, {size:,} floats: at least {TARGETS[size]} times faster than "
                "the naive actor",
                times >= TARGETS[size],
                f"{times:.2f} times",
                because,
            )
        if size == SIZES[-1]:
            copies = medians[name] / medians["copy"]
            found.criterion(
                f"{name}, {size:,} floats: within {COPY_TARGET:.0f} times the copy",
                copies <= COPY_TARGET,
                f"{copies:.2f} times",
                f"Ray alone takes {alone / medians['copy']:.2f} times the copy",
            )


def draw(medians):
    """Milliseconds against the size, both logarithmic."""
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    names = ["naive actor", *RULES, RAY_ALONE, "copy"]
    sizes = list(medians)
    for name, color in zip(names, COLORS, strict=True):
        if name in medians[sizes[0]]:
            line = [medians[size][name] for size in sizes]
            axis.loglog(sizes, line, "o-", color=color, label=name)
    known = [size for size in sizes if size in TENSORFLOW]
    line = [TENSORFLOW[size] for size in known]
    axis.loglog(known, line, "kx:", label="TensorFlow 1.15, measured elsewhere")
    axis.set(xlabel="floats in the variables", ylabel="ms per exchange, median")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return figure


def main():
    """Measure all sizes and write the page."""
    options = report.arguments(__doc__).parse_args()
    sizes, servers, blocks, seconds = SIZES, (1, 2), 5, 1.0
    if options.quick:
        sizes, servers, blocks, seconds = SIZES[:1], (1,), 1, 0.3
    found = report.Report(
        "bench_async",
        "An exchange with the center on Ray",
        f"Milliseconds per exchange of {WORKERS} worker processes that push and take "
        f"the center back as fast as they can, {VARIABLES} variables of equal size. "
        "Ray alone is an actor that takes the arrays, answers with others and does "
        "nothing with them; the copy is of the bytes that both workers move. "
        "TensorFlow 1.15's parameter server was measured on a similar machine, not in "
        "this run.",
        options,
    )
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * 1024**3,
    )
    medians = {}
    for size in track(sizes, description="measuring"):
        times = bench(size, list(RULES), servers, blocks, seconds)
        medians[size] = middle = {n: statistics.median(t) for n, t in times.items()}
        rows = [
            [
                name,
                report.spread(of_name),
                middle["naive actor"] / middle[name],
                middle[name] / middle["copy"],
                middle[name] / middle[RAY_ALONE],
            ]
            for name, of_name in times.items()
        ]
        if size in TENSORFLOW:
            rows.append(["TensorFlow 1.15, a round", str(TENSORFLOW[size]), "", "", ""])
        found.table(
            f"{size:,} floats",
            ["exchange", "ms", "naive / this", "this / copy", "this / Ray alone"],
            rows,
        )
        judge(found, size, middle)
    ray.shutdown()
    found.picture(draw(medians), "Time of an exchange against the size.")
    found.save()


if __name__ == "__main__":
    main()
