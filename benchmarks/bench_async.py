"""Time per exchange of asynchronous workers with the center, by size of the variables.

    python benchmarks/bench_async.py                   # about two minutes
    python benchmarks/bench_async.py --sizes 1000 --out short_bench_async.json

Two worker processes on a local Ray push and take the center back, both at once, as fast
as they can, so an exchange takes as long as a round of both. In the same run, in turns:
a naive Ray actor, as one writes it first (JAX arrays, push, then pull), the same with
NumPy arrays, and a plain NumPy copy of the bytes that a round moves, there and back for
each worker. Milliseconds, the median of all exchanges and the smallest.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import ray
from rich.console import Console
from rich.table import Table

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.runtime import Push

WORKERS, VARIABLES, BLOCKS, BLOCK_SECONDS = 2, 8, 5, 1.0
SIZES = (1_000, 1_000_000, 10_000_000)
# Measured once with TensorFlow 1.15's parameter server on a machine like this one, 2
# workers and 1 server, milliseconds per round: stands beside it, nothing more.
TENSORFLOW = {1_000: 1.5, 1_000_000: 14.6, 10_000_000: 178.0}
RULES = {
    "local_sgd": oxs.local_sgd_rule(),
    "elastic": oxs.elastic_rule(moving_rate=0.1, rho=0.0),
    "diloco": oxs.diloco_rule(),
}


class _Naive:
    """A center as one writes it first."""

    def __init__(self, center):
        self.center = center

    def push(self, moved):
        self.center = {name: self.center[name] + moved[name] for name in moved}

    def pull(self):
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
            "copy": self.copy,
        }
        exchange = functools.partial(self.exchange, what=what, name=name)
        call = others.get(name, exchange)

        call(target)
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            call(target)
            times.append(time.perf_counter() - start)
        return times


def make(size):
    """Variables of equal size; written to, so that their memory is there."""
    parts = np.array_split(np.full(size, 1e-3, np.float32), VARIABLES)
    return {str(i): np.array(part) for i, part in enumerate(parts)}


def bench(size, names, servers):
    """Milliseconds of each exchange, by name."""
    params = make(size)
    naive = ray.remote(_Naive).options(num_cpus=0)
    as_jax = jax.tree.map(jnp.asarray, params)
    targets: dict[str, Any] = {
        "naive actor": naive.remote(as_jax),
        "naive actor, NumPy": naive.remote(params),
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
    for block in range(BLOCKS + 1):
        for name, of_name in times.items():
            seconds = options.seconds if block else 0.1
            # One process copies what both move, as one server does.
            those = workers if name in targets else workers[:1]
            target = targets.get(name)
            found = ray.get([w.measure.remote(name, target, seconds) for w in those])
            if block:  # The first one warms up.
                of_name.extend(1e3 * t for of_worker in found for t in of_worker)
    for actor in (*workers, *actors):
        ray.kill(actor)
    return times


parser = argparse.ArgumentParser(description="Time per asynchronous exchange.")
parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
parser.add_argument("--servers", type=int, nargs="+", default=(1, 2))
parser.add_argument("--seconds", type=float, default=BLOCK_SECONDS)
parser.add_argument("--out", default="bench_async.json")
options = parser.parse_args()
ray.init(
    num_cpus=4,
    include_dashboard=False,
    log_to_driver=False,
    object_store_memory=4 * 1024**3,
)
results = {size: bench(size, options.rules, options.servers) for size in options.sizes}
ray.shutdown()

table = Table(title=f"ms per exchange, {WORKERS} workers: median (smallest)")
for title in ("floats", "exchange", "ms", "naive / this", "this / copy"):
    left = title == "exchange"
    table.add_column(title, justify="left" if left else "right", no_wrap=left)
rows = []
for size, times in results.items():
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in times.items():
        ratios = (
            medians["naive actor"] / medians[name],
            medians[name] / medians["copy"],
        )
        shown = f"{medians[name]:.2f} ({min(found):.2f})"
        table.add_row(f"{size:,}", name, shown, *(f"{ratio:.2f}" for ratio in ratios))
        rows.append(
            {
                "floats": size,
                "exchange": name,
                "median_ms": medians[name],
                "min_ms": min(found),
                "count": len(found),
            }
        )
    if size in TENSORFLOW:
        table.add_row(f"{size:,}", "TensorFlow 1.15, a round", str(TENSORFLOW[size]))
    table.add_section()
Console().print(table)
about = {
    "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
    "load": os.getloadavg(),
    "versions": {
        "jax": jax.__version__,
        "numpy": np.__version__,
        "ray": ray.__version__,
    },
    "tensorflow_1_15_ms_per_round": TENSORFLOW,
    "rows": rows,
}
Path(options.out).write_text(json.dumps(about, indent=1))
print(f"wrote {options.out}")
