"""Nobody waits for all: fast, slow, dying and late workers, each sample counted once.

    python examples/train_decoupled.py
    python examples/train_decoupled.py --epochs 10 --picture short.png

Five worker processes on a local Ray of four places train on the digits that come with
scikit-learn; a meeting of a part of the parameters closes when three have come. Workers
0 and 1 are told that their machines go (SIGTERM), hand in what they have and leave;
worker 4 takes a place that is free then; worker 2 is killed; worker 3 is four times
slower. It prints a table, with `--picture` draws who met when, and ends with

    96.4% of the test images are right, after 30 epochs
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
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import optx_sync as oxs
from optx_sync import runtime

PLACES, PERIOD, PARTS, DELAY, BATCH, SEED = 4, 8, 2, 1, 32, 0
STEP_SECONDS, SLOWER = 0.02, 4  # as if a step were that long
WORKERS = ("leaves on notice", "leaves on notice", "is killed", "is slow", "is late")
# After so many steps, in its first life.
SIGNALS = {0: (40, signal.SIGTERM), 1: (60, signal.SIGTERM), 2: (25, signal.SIGKILL)}
parser = argparse.ArgumentParser(description="Workers of which a quorum meets.")
parser.add_argument("--epochs", type=int, default=30, help="how often a sample counts")
parser.add_argument("--picture", default="", help="where a picture goes")
options = parser.parse_args()
here = {"address": "local", "include_dashboard": False, "log_to_driver": False}
ray.init(num_cpus=PLACES, **here)

images, labels = load_digits(return_X_y=True)
images, labels = np.asarray(images / 16, np.float32), labels.astype(np.int32)
test, train = np.split(np.random.default_rng(SEED).permutation(len(labels)), [357])
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


def loss_of(params, images, labels):
    logits = logits_of(params, images)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def program(worker):
    """A worker's: it takes the samples that it gets, and knows of nobody else."""
    step = jax.jit(jax.value_and_grad(loss_of))
    for lease in worker.samples():
        order = np.random.default_rng([SEED, lease.epoch]).permutation(train)
        rows = order[lease.start : lease.stop]
        loss, grads = step(worker.params, images[rows], labels[rows])
        time.sleep(STEP_SECONDS * (SLOWER if worker.index == 3 else 1))
        worker.step(grads, tokens=len(rows), loss=loss)
        when, what = SIGNALS.get(worker.index, (0, 0))
        if worker.local_step == when and not worker.restarts:
            os.kill(os.getpid(), what)
    worker.flush()


center, history = runtime.run(
    program,
    initial,
    optax.adam(3e-3),
    oxs.rules.diloco(optax.sgd(0.7, 0.5, nesterov=True)),
    num_workers=len(WORKERS),
    communication_period=PERIOD,
    fragments=PARTS,
    delay=DELAY,
    meet=runtime.quorum(3, grace=1.0),
    weigh=lambda at: at.tokens**2 / at.steps,
    samples=runtime.Samples(len(train), BATCH, options.epochs),
)
ray.shutdown()
begin = next(event.time for event in history.events if event.kind == "push")


def seconds_of(kind, worker):
    found = [e for e in history.events if (e.kind, e.worker) == (kind, worker)]
    return np.array([event.time - begin for event in found])


table = Table("worker", "", "rounds", "late", "died", "joined at", "left at")
for worker, what in enumerate(WORKERS):
    kinds = ("push", "dropped", "lost")
    counts = [str(history.count(kind, worker)) for kind in kinds]
    times = [seconds_of(kind, worker) for kind in ("join", "left")]
    both = [", ".join(f"{at:.1f} s" for at in of_kind) for of_kind in times]
    table.add_row(str(worker), what, *counts, *both)
Console().print(table)

MARKS = {
    "push": dict(marker="|", color="tab:blue", ms=9, mew=0.7, label="round"),
    "dropped": dict(marker="x", color="tab:orange", ms=5, label="late, dropped"),
    "lost": dict(marker="X", color="tab:red", ms=9, label="killed"),
    "join": dict(marker=">", color="tab:green", ms=7, label="joined"),
    "left": dict(marker="s", color="tab:purple", ms=6, label="left"),
}
if options.picture:
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    for kind, look in MARKS.items():
        found = [seconds_of(kind, worker) for worker in range(len(WORKERS))]
        rows = np.repeat(np.arange(len(WORKERS)), [len(of) for of in found])
        axes.plot(np.concatenate(found), rows, ls="", **look)
    names = [f"{number} {what}" for number, what in enumerate(WORKERS)]
    axes.set(yticks=range(len(WORKERS)), yticklabels=names, ylim=(4.6, -0.6))
    axes.set_xlabel("seconds since the first round")
    figure.legend(loc="outside upper center", ncols=len(MARKS), frameon=False)
    figure.savefig(options.picture, dpi=150)
    print(f"wrote {options.picture}")

right = (logits_of(center, images[test]).argmax(-1) == labels[test]).mean()
print(f"{right:.1%} of the test images are right, after {options.epochs} epochs")
