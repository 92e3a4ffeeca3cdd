"""Train one network on real data under every strategy, and compare what they send.

    python examples/train_digits.py                            # as `make demo` does
    python examples/train_digits.py --steps 60 --out short_demo.png

Eight workers on eight forced CPU devices train on the digits that come with
scikit-learn, ten seeds side by side; nothing is downloaded. It prints a table (the mean
over the seeds, and twice its standard error), writes it to demo.json, draws a picture,

    wrote demo.png

and ends with what to read and to try next.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits

import optx_sync as oxs

# Eight CPU devices stand for a mesh of accelerators; set before JAX starts.
os.environ.setdefault("NPROC", "16")  # threads for them, and as many to spare
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

WORKERS, BATCH = 8, 16  # images per worker and step
STEPS, EVALUATE_EVERY, SEEDS = 1200, 20, 10
# One entry is one row of the table and one line of the picture. The inner optimizer is
# the same everywhere: of Adam and Nesterov SGD at three rates each, the one that was
# best for the strategy that it suits least, on the validation images.
INNER = optax.adam(3e-2)
CODES = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))
STRATEGIES = {  # the steps from one meeting to the next, and whose turn it can be
    "one device": (INNER, 1, 1),
    "cross_shard": (oxs.cross_shard(INNER, "workers"), 1, 1),
    # The moving rate of the paper; TensorFlow's default is ten times smaller here.
    "elastic_average": (
        oxs.elastic_average(INNER, "workers", moving_rate=0.9 / WORKERS, rho=0.0),
        10,
        1,
    ),
    "agn": (oxs.agn(INNER, "workers"), 10, 1),
    "local_sgd": (oxs.local_sgd(INNER, "workers"), 10, 1),
    "diloco": (oxs.diloco(INNER, "workers", communication_period=20), 20, 1),
    # A fourth of the parameters every five steps, in 4 bits, behind the next step.
    "streaming diloco": (
        oxs.diloco(
            INNER,
            "workers",
            communication_period=20,
            fragments=4,
            overlap=True,
            exchange=CODES,
        ),
        5,
        1,
    ),
    # The neighbour 1, 2 and 4 places before, in turn.
    "gossip": (
        oxs.gossip(
            INNER, "workers", graph=oxs.graphs.exponential(), communication_period=10
        ),
        10,
        3,
    ),
}
NEXT = """
Read next:  docs/quick-start.md  ten minutes, to a run that dies and goes on
            docs/which.md        which method for which links
Another method is one more line in STRATEGIES of examples/train_digits.py,
    "4 bits": (oxs.local_sgd(INNER, "workers", exchange=CODES), 10, 1),
say, and `make demo` again."""
parser = argparse.ArgumentParser(description="Compare strategies on real data.")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--out", default="demo.png", help="where the picture goes")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = np.asarray(images / 16, np.float32)
order = np.random.default_rng(0).permutation(len(labels))
held_out, train = order[:725], order[725:]
test, validation = (  # test: at the end only
    (images[rows], labels[rows]) for rows in np.split(held_out, [360])
)
parts = train.reshape(WORKERS, -1)  # no worker sees another's part

network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
# The networks of all seeds are one tree, with the seed as the first axis of each leaf:
# Adam and the ways to meet act on each number alone, and dispatch is paid once.
keys = jax.random.split(jax.random.key(0), SEEDS)
initial = jax.vmap(network.init, (0, None))(keys, images[:1])


def loss_of(params, images, labels):  # of networks that have nothing in common
    logits = jax.vmap(network.apply)(params, images)
    entropy = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return entropy.mean(axis=1).sum()


@jax.jit
def accuracy_of(params, images, labels):
    logits = jax.vmap(network.apply, (0, None))(params, images)
    return (logits.argmax(-1) == labels).mean(axis=1)


def run(name, progress):
    (tx, period, turns), rng = STRATEGIES[name], np.random.default_rng(0)
    workers = 1 if name == "one device" else WORKERS
    group = oxs.Workers(workers, "workers", mesh=True)
    params, state = group.start((initial, tx.init(initial)))

    def batch():
        rows = rng.permuted(np.stack([parts] * SEEDS), axis=2)[:, :, :BATCH]
        # One device takes what all workers take.
        rows = rows.reshape(SEEDS, workers, -1).swapaxes(0, 1)
        return images[rows], labels[rows]

    @group.step(state=2, split=False)
    def step(params, state, images, labels):
        """One worker's step; it knows of no strategy in particular."""
        grads = jax.grad(loss_of)(params, images, labels)
        return oxs.apply_gradients(tx, grads, state, params)

    # A program for each kind of step: nobody meets, or a part of the parameters does.
    # The compiled ones show what a worker sends, along a ring.
    kinds = step.lower_kinds(params, state, *batch()).values()
    sends = [sum(row.sent for row in oxs.audit.collectives(x.compile())) for x in kinds]
    # A branch for each turn; one of them is taken.
    of_round = np.mean([x for x in sends if x] or [0]) / turns / SEEDS

    curve, rounds, sent, center, start = [], 0, 0, initial, time.perf_counter()
    for done in progress.track(range(1, options.steps + 1), description=f"{name:16}"):
        meets = of_round > 0 and oxs.by_hand.due(period, done - 1)
        rounds, sent = rounds + meets, sent + meets * of_round
        # One program at a time: forced CPU devices share a few threads.
        params, state = jax.block_until_ready(step(params, state, *batch()))
        if done % EVALUATE_EVERY == 0 or done == options.steps:
            center = jax.device_get(group.center((params, state)))
            curve.append((sent, accuracy_of(center, *validation)))
    seconds = f"{time.perf_counter() - start:.1f}"
    counts = (f"{count:,}" for count in (options.steps, rounds, round(sent)))
    reached = accuracy_of(center, *test)
    error = 200 * np.std(reached, ddof=1) / SEEDS**0.5
    return curve, (name, f"{reached.mean():.1%} ± {error:.1f}", *counts, seconds)


numbers = ("test accuracy", "steps", "rounds", "bytes sent", "seconds")
table = Table("strategy", *(Column(title, justify="right") for title in numbers))
rows, ends, figure = [], [], Figure(figsize=(8, 4.5), layout="constrained")
axis = figure.subplots()
with Progress() as progress:
    for number, name in enumerate(STRATEGIES):
        curve, row = run(name, progress)
        table.add_row(*row)
        rows.append(row[:-1])  # without the seconds of this machine
        sent, reached = (np.array(part) for part in zip(*curve, strict=True))
        # Moving averages of five: one evaluation is of 365 images.
        smooth = [reached[max(0, n - 4) : n + 1].mean(0) for n in range(len(reached))]
        middle, color = np.mean(smooth, 1), f"C{(number - 1) % 10}"
        if sent[-1]:
            axis.plot(sent, middle, color=color)
            axis.plot(sent[-1], middle[-1], "o", color=color)
            low, high = np.min(smooth, 1), np.max(smooth, 1)
            axis.fill_between(sent, low, high, color=color, alpha=0.2, linewidth=0)
        else:  # nothing has no place on a logarithmic axis
            color = "grey"
            axis.axhline(middle[-1], color=color, linestyle="--")
        ends.append((middle[-1], sent[-1], name, color))
ticks = [0.8, 0.9, 0.95, 0.97, 0.98]
axis.set(xscale="log", xlabel=f"bytes that each of {WORKERS} workers sent")
axis.set(yscale="logit", ylabel="validation accuracy", ylim=(0.75, 0.985))
axis.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
axis.grid(alpha=0.3)
# Names stand right of the axes, one above the other in the order of the ends.
ends.sort()
tops = [axis.transData.transform((1, reached)) for reached, *_ in ends]
center = np.mean(axis.transAxes.inverted().transform(tops), 0)[1]
for number, (reached, sent, name, color) in enumerate(ends):
    axis.annotate(
        name,
        xy=(sent or axis.get_xlim()[1], reached),
        xytext=(1.05, center + 0.07 * (number - (len(ends) - 1) / 2)),
        textcoords="axes fraction",
        color=color,
        va="center",
        arrowprops={
            "arrowstyle": "-",
            "color": color,
            "alpha": 0.4,
            "relpos": (0, 0.5),
        },
    )
figure.savefig(options.out, dpi=150)
Path(options.out).with_suffix(".json").write_text(json.dumps(rows, indent=1))
Console().print(table)
print(f"wrote {options.out}")
print(NEXT)
