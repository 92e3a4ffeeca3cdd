"""Time of a row-sparse step against the size of the table: it should not matter.

    python benchmarks/bench_sparse.py                   # under a minute, 3 GB
    python benchmarks/bench_sparse.py --rows 10000 100000 --out short_bench_sparse.json

A donated, jitted step of every optimizer that sees touched rows only, on 4,096 random
rows of tables of several lengths, 16 wide. The tables take turns, so a drift of the
machine's speed meets all of them. Milliseconds, the median; then the ratio of the
largest table to the smallest.
"""

import argparse
import functools
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import optx_sync as oxs

TOUCHED, WIDTH, REPEATS, BATCHES = 4_096, 16, 60, 8
OPTIMIZERS = {
    "gradient_descent": oxs.gradient_descent(0.1),
    "momentum": oxs.momentum(0.1, 0.9),
    "normalized_sgd": oxs.normalized_sgd(0.1),
    "adagrad": oxs.adagrad(0.1),
    "adagrad_da": oxs.adagrad_da(0.1),
    "adadelta": oxs.adadelta(0.1),
    "rmsprop": oxs.rmsprop(0.1),
    "ftrl": oxs.ftrl(0.1, l1=0.01),
    "proximal_gradient_descent": oxs.proximal_gradient_descent(0.1, l1=0.01),
    "proximal_adagrad": oxs.proximal_adagrad(0.1, l1=0.01),
    "custom_adam": oxs.custom_adam(0.1),
}
parser = argparse.ArgumentParser(description="Sparse steps by size of the table.")
parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 10_000_000])
parser.add_argument("--out", default="bench_sparse.json")
options = parser.parse_args()


def measure(tx):
    """Median milliseconds of a step for each length of the table."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, grads):
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    runs = {}
    for rows in options.rows:
        keys = jax.random.split(jax.random.key(rows), BATCHES)
        values = jnp.ones((TOUCHED, WIDTH))
        batches = [
            oxs.IndexedSlices(jax.random.randint(key, (TOUCHED,), 0, rows), values)
            for key in keys
        ]
        table = jnp.ones((rows, WIDTH))
        runs[rows] = (table, jax.jit(tx.init)(table), batches, [])
    for repeat in range(REPEATS):
        for rows, (table, state, batches, times) in runs.items():
            start = time.perf_counter()
            table, state = step(table, state, batches[repeat % BATCHES])
            jax.block_until_ready((table, state))
            times.append(1e3 * (time.perf_counter() - start))
            runs[rows] = (table, state, batches, times)
    # The first rounds compile, and touch new pages.
    return {rows: statistics.median(run[3][5:]) for rows, run in runs.items()}


results = {
    name: measure(tx) for name, tx in track(OPTIMIZERS.items(), description="measuring")
}
small, large = min(options.rows), max(options.rows)
table = Table("optimizer", *(f"{rows:,} rows, ms" for rows in options.rows), "ratio")
for name, medians in results.items():
    cells = (f"{medians[rows]:.2f}" for rows in options.rows)
    table.add_row(name, *cells, f"{medians[large] / medians[small]:.2f}")
Console().print(table)
machine = {
    "device": str(jax.devices()[0]),
    "machine": platform.machine(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "optax": optax.__version__,
}
Path(options.out).write_text(
    json.dumps({"machine": machine, "milliseconds": results}, indent=2)
)
print(f"wrote {options.out}")
