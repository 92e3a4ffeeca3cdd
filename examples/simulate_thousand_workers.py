"""A thousand asynchronous workers, simulated on one device: what staleness does.

    python examples/simulate_thousand_workers.py              # a minute on two cores
    python examples/simulate_thousand_workers.py --workers 50 --events 4000

The workers are simulated. None of them runs anywhere: their steps, in the order in
which machines of log-normal speed would take them, are replayed one after the other
on this device, and time is the simulation's, not the clock's. Parameters, gradients and
exchanges are real. Staleness is how many pushes of others the center has taken since
the worker pulled it; the table has its median. The output ends with

    wrote simulate_thousand_workers.png
"""

import argparse
import heapq
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import print
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

WORKERS, EVENTS, BATCH, EVALUATIONS, SEED = 1000, 100_000, 16, 50, 0
SPEED, JITTER = 0.5, 0.25  # log-normal: of a worker's step times, and around them
parser = argparse.ArgumentParser(description="Simulate asynchronous workers.")
parser.add_argument("--workers", type=int, default=WORKERS)
parser.add_argument("--events", type=int, default=EVENTS, help="steps of all workers")
parser.add_argument("--out", default="simulate_thousand_workers.png")
options = parser.parse_args()

# A gradient that arrives is about as many updates old as there are workers. The center
# oscillates if it moves by more than about 1 / workers of a gradient; workers of their
# own may take larger steps. The rates are the best of a few, on the validation images.
PUSH = 1.0 / options.workers
# name: (inner, rule, communication period)
METHODS = {
    "asynchronous SGD": (optax.sgd(PUSH), oxs.rules.agn(optax.sgd(PUSH)), 1),
    "AGN": (optax.sgd(0.1), oxs.rules.agn(optax.sgd(PUSH)), 10),
    "EASGD": (optax.sgd(0.5), oxs.rules.elastic(moving_rate=0.02, rho=0.0), 10),
}

images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
order = np.random.default_rng(SEED).permutation(len(labels))
test, validation, train = map(jnp.asarray, np.split(order, [360, 725]))
network: Any = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
initial = network.init(jax.random.key(SEED), images[:1])


def loss_of(params, rows):
    logits = network.apply(params, images[rows])
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels[rows]).mean()


@jax.jit
def accuracy_of(params, rows):
    return (network.apply(params, images[rows]).argmax(-1) == labels[rows]).mean()


def event_queue(workers, events):
    """Who steps at each event, and when: the worker whose step ends first is next."""
    rng = np.random.default_rng(SEED)
    duration = rng.lognormal(0, SPEED, workers)  # the median worker's step takes 1
    jitter = rng.lognormal(0, JITTER, workers + events)
    queue = [(duration[w] * jitter[w], w) for w in range(workers)]
    heapq.heapify(queue)
    schedule, times = np.empty(events, np.int32), np.empty(events)
    for event in range(events):
        times[event], worker = queue[0]
        schedule[event] = worker
        ends = times[event] + duration[worker] * jitter[workers + event]
        heapq.heapreplace(queue, (ends, worker))
    return schedule, times


def staleness_of(schedule, global_step):
    """Of each push: those of others since its worker took the center."""
    pulled, stale = np.zeros(options.workers, int), []
    for event in np.flatnonzero(np.diff(global_step, prepend=0)):
        worker, now = schedule[event], global_step[event]
        stale.append(now - 1 - pulled[worker])
        pulled[worker] = now
    return np.array(stale)


def run(name, inner, rule, period, progress):
    task = progress.add_task(f"{name:16}", total=options.events)

    def show(event):
        jax.debug.callback(lambda e: progress.update(task, completed=int(e)), event)

    def grad_fn(worker, params, event):
        jax.lax.cond((event + 1) % every == 0, show, lambda event: None, event + 1)
        # Batches are the same for all methods: they depend on the event alone.
        key = jax.random.fold_in(jax.random.key(SEED), event)
        return jax.grad(loss_of)(params, jax.random.choice(key, train, (BATCH,)))

    return oxs.simulate.asynchronous(
        inner,
        rule,
        initial,
        grad_fn,
        schedule,
        num_workers=options.workers,
        communication_period=period,
        record=every,
    )


schedule, times = event_queue(options.workers, options.events)
every, bins = options.events // EVALUATIONS, np.linspace(0, 3 * options.workers, 61)
numbers = ("period", "pushes", "staleness", "test accuracy", "seconds")
table = Table("method", *(Column(title, justify="right") for title in numbers))
figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=(3, 2))
with Progress() as progress:
    for name, (inner, rule, period) in METHODS.items():
        start = time.perf_counter()
        record = run(name, inner, rule, period, progress)
        reached = jax.vmap(accuracy_of, (0, None))(record.center, validation)
        stale = staleness_of(schedule, np.asarray(record.global_step))
        row = [f"{period}", f"{stale.size:,}", f"{np.median(stale):,.0f}"]
        row += [f"{float(accuracy_of(record.final.center, test)):.1%}"]
        table.add_row(name, *row, f"{time.perf_counter() - start:.1f}")
        left.plot(times[every - 1 :: every], reached, label=f"{name}, period {period}")
        dashes = "--" if name == "EASGD" else "-"  # AGN pushes at the same events
        right.hist(stale, bins, density=True, histtype="step", linestyle=dashes)
left.set(xlabel="simulated time (a step of the median worker = 1)")
left.set(ylabel="validation accuracy of the center", ylim=(0, 1))
left.set_title(f"{options.workers:,} simulated workers, {options.events:,} steps")
left.grid(alpha=0.3)
left.legend(frameon=False, loc="lower right")
right.set(xlabel="pushes of others since the worker pulled", yticks=[])
right.set(ylabel="share of pushes", title="staleness (AGN and EASGD alike)")
figure.savefig(options.out, dpi=150)
print(table)
print(f"wrote {options.out}")
