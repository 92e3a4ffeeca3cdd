"""Train on digits while replicas come late, break down and return.

    python examples/train_with_stragglers.py
    python examples/train_with_stragglers.py --steps 60 --out short_stragglers.png

Eight replicas on eight forced CPU devices; an update needs six gradients. It draws what
became of every gradient and what that did to the accuracy. The last lines are like

    sync_replicas, faults: 98.3% after 209 updates
    wrote stragglers.png
"""

import argparse
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.progress import Progress
from sklearn.datasets import load_digits

import optx_sync as oxs

# Eight CPU devices stand for a mesh of accelerators; set before JAX starts.
os.environ.setdefault("NPROC", "16")  # threads for them, and as many to spare
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

REPLICAS, REQUIRED, BATCH = 8, 6, 16  # images per replica and step
STEPS, EVALUATE_EVERY, SEED = 240, 4, 0
ROBUST = oxs.sync_replicas(optax.adam(1e-2), "data", REQUIRED, drop_nonfinite=True)
PLAIN = oxs.cross_shard(optax.adam(1e-2), "data")  # the mean of all, whatever it holds
RUNS = {  # and whether replicas fail
    "sync_replicas, no faults": (ROBUST, False),
    "sync_replicas, faults": (ROBUST, True),
    "cross_shard, faults": (PLAIN, True),
}
OUTCOMES = ("used", "stale", "nonfinite", "not_contributed", "no_token")
COLOURS = ("#a8d5ba", "#f2b134", "#c8323c", "#4a4e69", "#5aa9d6")
parser = argparse.ArgumentParser(description="Train with late and broken replicas.")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--out", default="stragglers.png", help="where the picture goes")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = np.asarray(images / 16, np.float32)
order = np.random.default_rng(SEED).permutation(len(labels))
test, train = order[:360], order[360:]
network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
initial = network.init(jax.random.key(SEED), images[:1])
replicas = oxs.Workers(REPLICAS, "data", mesh=True)


def faults():
    """Whether each replica is late, broken, out of reach: three times bool[T, 8]."""
    rng, replica = np.random.default_rng(SEED), np.arange(REPLICAS)
    time = np.arange(options.steps)[:, None] / options.steps
    slow = (replica == 6) & (0.15 < time) & (time < 0.45)  # and any one now and then
    late = rng.random((options.steps, REPLICAS)) < np.where(slow, 0.7, 0.04)
    broken = (replica == 2) & (0.3 < time) & (time < 0.8)
    # Half of them lose their network: the others alone are too few for one step.
    away = (replica >= 4) & (0.55 < time) & (time < 0.7)
    return late, broken, away


def loss_of(params, images, labels):
    logits = network.apply(params, images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def accuracy_of(params):
    return (network.apply(params, images[test]).argmax(-1) == labels[test]).mean()


def make_step(tx):
    """One step of all replicas, and what they start from."""

    @replicas.step(state=2, split=False)
    def step(params, state, images, labels, late, broken, away):
        grads = jax.grad(loss_of)(params, images, labels)
        grads = jax.tree.map(lambda g: jnp.where(broken, jnp.nan, g), grads)
        extra, now = {}, optax.tree.get(state, "global_step")
        if now is not None:  # cross_shard has none, and no use for these
            # A late gradient was computed before the last update.
            extra = {"gradient_step": now - late.astype(int), "contributes": ~away}
        return oxs.apply_gradients(tx, grads, state, params, **extra)

    return step, *replicas.start((initial, tx.init(initial)))


def run(name, progress):
    """Accuracies over time, what became of each gradient, whether a step updated."""
    tx, faulty = RUNS[name]
    step, params, state = make_step(tx)
    rng = np.random.default_rng(SEED)
    flags = np.stack(faults()) & faulty
    curve, outcomes, updates = [], [], []
    for t in progress.track(range(options.steps), description=f"{name:24}"):
        rows = rng.choice(train, (REPLICAS, BATCH), replace=False)
        params, state = step(params, state, images[rows], labels[rows], *flags[:, t])
        updates.append(int(optax.tree.get(state, "global_step", t + 1)))
        if t % EVALUATE_EVERY == 0 or t == options.steps - 1:
            equal = jax.device_get(replicas.first(params))  # on all of them
            curve.append((t + 1, float(accuracy_of(equal))))
        if tx is ROBUST:
            last = [getattr(oxs.metrics(state), outcome) for outcome in OUTCOMES]
            outcomes.append(np.argmax(last, axis=0))
    return curve, np.array(outcomes), np.diff(updates, prepend=0) > 0


with Progress() as progress:
    results = {name: run(name, progress) for name in RUNS}
figure = Figure(figsize=(9, 6.5), layout="constrained")
what, when, accuracy = figure.subplots(3, 1, sharex=True, height_ratios=[8, 0.5, 9])
_, outcomes, updated = results["sync_replicas, faults"]
extent = (0, options.steps, REPLICAS - 0.5, -0.5)
colours = {"cmap": ListedColormap(COLOURS), "vmin": 0, "vmax": len(COLOURS) - 1}
what.imshow(outcomes.T, extent=extent, interpolation="none", **colours)
what.set(ylabel="replica", yticks=range(REPLICAS), aspect="auto")
what.set_title("What became of each replica's gradient", loc="left", pad=26)
shares = [f"{name} {np.mean(outcomes == i):.0%}" for i, name in enumerate(OUTCOMES)]
patches = [Patch(color=colour) for colour in COLOURS]
what.legend(patches, shares, ncols=5, loc=(0, 1.01), frameon=False)
when.imshow(updated[None], extent=(0, options.steps, 0, 1), cmap="Greys")
when.set(yticks=[0.5], yticklabels=["update"], aspect="auto")
for name, colour in zip(RUNS, ("grey", "#2a7f62", "#c8323c"), strict=True):
    curve, _, updated = results[name]
    label = f"{name}: {curve[-1][1]:.1%} after {updated.sum()} updates"
    print(label)
    accuracy.plot(*zip(*curve, strict=True), label=label, color=colour)
ticks = [0.1, 0.5, 0.8, 0.9, 0.95, 0.98]
accuracy.set(xlabel="step", yscale="logit", ylabel="test accuracy", ylim=(0.05, 0.99))
accuracy.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
accuracy.minorticks_off()
accuracy.grid(alpha=0.3)
accuracy.legend(loc="center right", frameon=False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")
