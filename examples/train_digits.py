"""Train one network on real data under every strategy, and compare what they send.

    python examples/train_digits.py                            # as `make demo` does
    python examples/train_digits.py --steps 60 --out short_demo.png

Eight workers on eight forced CPU devices train on the digits that come with
scikit-learn; nothing is downloaded. It prints a table and ends with

    wrote demo.png
"""

import argparse
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits

import optx_sync as oxs

# Eight CPU devices stand for a mesh of accelerators; set before JAX starts.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

WORKERS, BATCH = 8, 16  # images per worker and step
STEPS, EVALUATE_EVERY, SEED = 1200, 20, 0
# One entry is one row of the table and one line of the picture. The inner optimizer is
# the same everywhere: of Adam and Nesterov SGD at three rates each, the one that was
# best for the strategy that it suits least, on the validation images.
INNER = optax.adam(3e-2)
STRATEGIES = {
    "one device": INNER,
    "cross_shard": oxs.cross_shard(INNER, "workers"),
    # The moving rate of the paper; TensorFlow's default is ten times smaller here.
    "elastic_average": oxs.elastic_average(
        INNER, "workers", moving_rate=0.9 / WORKERS, rho=0.0, communication_period=10
    ),
    "agn": oxs.agn(INNER, "workers", communication_period=10),
    "local_sgd": oxs.local_sgd(INNER, "workers", communication_period=10),
    "diloco": oxs.diloco(INNER, "workers", communication_period=20),
}
parser = argparse.ArgumentParser(description="Compare strategies on real data.")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--out", default="demo.png", help="where the picture goes")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = np.asarray(images / 16, np.float32)
order = np.random.default_rng(SEED).permutation(len(labels))
test, validation, train = np.split(order, [360, 725])  # test: at the end only
parts = train.reshape(WORKERS, -1)  # no worker sees another's part

network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
initial = network.init(jax.random.key(SEED), images[:1])


def loss_of(params, images, labels):
    logits = network.apply(params, images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy_of(params, rows):
    return (network.apply(params, images[rows]).argmax(-1) == labels[rows]).mean()


def make_step(tx, workers):
    """One step of all workers; it knows of no strategy in particular."""
    mesh = jax.make_mesh((workers,), ("workers",), axis_types=(AxisType.Auto,))
    axes, own = oxs.state_axes(tx, initial), PartitionSpec("workers")
    specs = (own, oxs.state_specs(tx, initial, PartitionSpec(), "workers"))

    def step(params, state, images, labels):
        # Each worker sees its own slice, with a worker axis of size 1 in front.
        params, state = oxs.unstack(params), oxs.unstack(state, axes)
        # These parameters vary over "workers", as their spec says, so the gradients are
        # each worker's own. Under PartitionSpec() they would need oxs.localize first.
        grads = jax.grad(loss_of)(params, images[0], labels[0])
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return oxs.stack(params, 1), oxs.stack(state, 1, axes)

    step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, own, own), out_specs=specs)
    return jax.jit(step, donate_argnums=(0, 1))


def run(name, tx, progress):
    workers, rng = 1 if name == "one device" else WORKERS, np.random.default_rng(SEED)

    def batch():
        rows = rng.permuted(parts, axis=1)[:, :BATCH]
        rows = rows.reshape(workers, -1)  # one device takes what all workers take
        return images[rows], labels[rows]

    params = oxs.stack(initial, workers)
    state = oxs.stack(tx.init(initial), workers, oxs.state_axes(tx, initial))
    step = make_step(tx, workers).lower(params, state, *batch()).compile()
    # The compiled program tells what a worker hands to collectives, and what of it
    # stands in a conditional: that travels in a round only.
    rows = oxs.audit.collectives(step)
    per_step = sum(row.bytes for row in rows if not row.conditional)
    per_round = sum(row.bytes for row in rows if row.conditional)

    curve, rounds, sent, center, start = [], 0, 0, initial, time.perf_counter()
    for done in progress.track(range(1, options.steps + 1), description=f"{name:15}"):
        # One program at a time: forced CPU devices share a few threads.
        params, state = jax.block_until_ready(step(params, state, *batch()))
        if done % EVALUATE_EVERY == 0 or done == options.steps:
            all_params, all_state = jax.device_get((params, state))
            rounds = optax.tree_utils.tree_get(all_state, "global_step")
            if rounds is None:  # replicas are equal, and meet in every step
                rounds, center = done if per_step else 0, oxs.unstack(all_params)
            else:
                center = oxs.center_params(all_state, all_params)
            sent = done * per_step + int(rounds) * per_round
            curve.append((sent, float(accuracy_of(center, validation))))
    seconds = f"{time.perf_counter() - start:.1f}"
    counts = (f"{count:,}" for count in (options.steps, int(rounds), sent))
    return curve, (name, f"{accuracy_of(center, test):.1%}", *counts, seconds)


numbers = ("test accuracy", "steps", "rounds", "bytes sent", "seconds")
table = Table("strategy", *(Column(title, justify="right") for title in numbers))
figure = Figure(figsize=(8, 4.5), layout="constrained")
axis = figure.subplots()
with Progress() as progress:
    for name, tx in STRATEGIES.items():
        curve, row = run(name, tx, progress)
        table.add_row(*row)
        sent, reached = zip(*curve, strict=True)
        if sent[-1]:
            axis.plot(sent, reached, label=name, marker="o", markevery=[-1])
        else:  # nothing has no place on a logarithmic axis
            axis.axhline(reached[-1], label=name, color="grey", linestyle="--")
ticks = [0.5, 0.7, 0.8, 0.9, 0.95, 0.98]
axis.set(xscale="log", xlabel=f"bytes that each of {WORKERS} workers sent")
axis.set(yscale="logit", ylabel="validation accuracy", ylim=(ticks[0], ticks[-1]))
axis.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
axis.grid(alpha=0.3)
axis.legend(frameon=False)
figure.savefig(options.out, dpi=150)
Console().print(table)
print(f"wrote {options.out}")
