"""Train without waiting: workers are slow, killed and replaced, and training goes on.

    python examples/train_async_ray.py                      # every rule
    python examples/train_async_ray.py --rule agn diloco --out short_timeline.png

Four worker processes on a local Ray train on the digits that come with scikit-learn;
worker 3 is ten times slower, and worker 1 is killed halfway. It prints a table, draws
who stepped and when, and ends with

    wrote timeline.png
"""

import argparse
import os
import signal
import time

# Small arrays: one thread per process is enough. Workers inherit it.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Column, Table
from sklearn.datasets import load_digits

import optx_sync as oxs
from optx_sync import runtime

WORKERS, PERIOD, BATCH, SEED = 4, 10, 32, 0
STEP_SECONDS, SLOW, KILLED = 0.004, 3, 1  # as if a step were that long; which workers
INNER = optax.adam(3e-3)
# The agreement, and the rounds of the center (the updates of sync_replicas) to train.
AGREEMENTS = {
    "elastic": (oxs.rules.elastic(moving_rate=0.9 / WORKERS, rho=0.0), 240),
    "agn": (oxs.rules.agn(optax.adam(1e-2)), 240),
    "local_sgd": (oxs.rules.local_sgd(), 240),
    # Stale pushes and much momentum do not agree: less of it than in lockstep.
    "diloco": (oxs.rules.diloco(optax.sgd(0.7, momentum=0.5, nesterov=True)), 240),
    "sync_replicas": (runtime.SyncReplicas(3), 400),
}
parser = argparse.ArgumentParser(description="Asynchronous workers, one is killed.")
parser.add_argument("--rule", nargs="+", choices=AGREEMENTS, default=list(AGREEMENTS))
parser.add_argument("--out", default="timeline.png", help="where the picture goes")
options = parser.parse_args()
# `runtime.run` would start Ray too, once for each rule.
ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)

images, labels = load_digits(return_X_y=True)
images, labels = np.asarray(images / 16, np.float32), labels.astype(np.int32)
order = np.random.default_rng(SEED).permutation(len(labels))
test, train = np.split(order, [360])
parts = np.array_split(train, WORKERS)  # Each worker sees its own images only.
first, second = jax.random.split(jax.random.key(SEED))
initial = {
    "hidden": jax.random.normal(first, (64, 64)) / 8,
    "hidden_bias": jnp.zeros(64),
    "out": jax.random.normal(second, (64, 10)) / 8,
    "out_bias": jnp.zeros(10),
}


def logits_of(params, images):
    hidden = jax.nn.relu(images @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["out"] + params["out_bias"]


def make_worker(rounds):
    """The program of a worker: it knows of no rule, and not of the other workers."""

    def loss_of(params, images, labels):
        logits = logits_of(params, images)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def program(worker):
        step = jax.jit(jax.value_and_grad(loss_of))
        # Another incarnation of a worker sees other batches.
        rng = np.random.default_rng([worker.index, worker.restarts])
        while worker.global_step < rounds:
            rows = rng.choice(parts[worker.index], BATCH)
            loss, grads = step(worker.params, images[rows], labels[rows])
            time.sleep(STEP_SECONDS * (10 if worker.index == SLOW else 1))
            worker.step(grads, loss=loss)
            halfway = worker.global_step >= rounds // 2
            if worker.index == KILLED and halfway and not worker.restarts:
                os.kill(os.getpid(), signal.SIGKILL)

    return program


def draw(axis, name, events):
    """One row for each worker, one mark for each push; 0 is the first of them."""
    begin = next(event.time for event in events if event.kind == "push")
    axis.hlines(
        range(WORKERS), 0, events[-1].time - begin, color="0.85", lw=1, zorder=0
    )
    for i, event in enumerate(events):
        if event.kind in MARKS and event.time >= begin:
            axis.plot(event.time - begin, event.worker, ls="", **MARKS[event.kind])
        if event.kind == "lost":  # Nobody steps until the successor is there.
            later = (e.time for e in events[i:] if e.kind == "join")
            gap, row = [event.time - begin, next(later) - begin], [event.worker] * 2
            axis.plot(gap, row, color="white", linewidth=3, zorder=1)
            axis.plot(gap, row, ":", color="tab:red", zorder=1)
    axis.set(yticks=range(WORKERS), ylim=(WORKERS - 0.4, -0.6))
    axis.set_title(name, loc="left", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


MARKS = {
    "push": dict(marker="|", color="tab:blue", ms=9, mew=0.7, label="push"),
    "dropped": dict(marker="x", color="tab:orange", ms=5, label="dropped as stale"),
    "lost": dict(marker="X", color="tab:red", ms=10, label="killed"),
    "join": dict(marker=">", color="tab:green", ms=7, label="joined at the center"),
}
numbers = ("accuracy", "pushes", "dropped", "killed", "staleness", "seconds")
columns = (Column(title, justify="right") for title in numbers)
table = Table(Column("rule", no_wrap=True), *columns)
rows = len(options.rule)
figure = Figure(figsize=(9, 1.0 + 1.35 * rows), layout="constrained")
axes = figure.subplots(rows, squeeze=False)[:, 0]
for axis, name in zip(axes, options.rule, strict=True):
    agreement, rounds = AGREEMENTS[name]
    start = time.perf_counter()
    center, history = runtime.run(
        make_worker(rounds), initial, INNER, agreement,
        num_workers=WORKERS, communication_period=PERIOD, synchronous=True,
    )  # fmt: skip
    seconds = f"{time.perf_counter() - start:.0f}"
    accuracy = (logits_of(center, images[test]).argmax(-1) == labels[test]).mean()
    counts = (str(history.count(kind)) for kind in ("push", "dropped", "lost"))
    worst = str(max(event.staleness for event in history.events))
    table.add_row(name, f"{accuracy:.1%}", *counts, worst, seconds)
    draw(axis, name, history.events)
axes[-1].set_xlabel("seconds since the first push")
figure.supylabel("worker", fontsize=10)
legend = [Line2D([], [], ls="", **mark) for mark in MARKS.values()]
figure.legend(handles=legend, loc="outside upper center", ncols=4, frameon=False)
figure.savefig(options.out, dpi=150)
ray.shutdown()
Console().print(table)
print(f"wrote {options.out}")
