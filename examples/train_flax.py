"""Replicas with Flax's `TrainState`, one on each device.

    python examples/train_flax.py
    python examples/train_flax.py --steps 60

The transformation does what differs from training on one device: clip each replica's
own gradient, average over the replicas, then Adam. The last line is like

    step  300   loss 0.016   train accuracy 100.0%   test accuracy 98.3%
"""

import argparse
import os
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import optx_sync as oxs
from optx_sync.flax import SyncTrainState

# Eight CPU devices stand for accelerators; set before JAX starts. (Several processes:
# train_multiprocess.py.)
os.environ.setdefault("NPROC", "16")  # threads for them, and as many to spare
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

BATCH = 16  # images per replica and step
STEPS = 300
REPORT_EVERY = 50
CLIP = 1.0  # the largest norm of one replica's gradient
SEED = 0


network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])

# Links of a chain run in order: before cross_shard each replica's own gradient is
# seen, after it the mean. One replica with a bad batch is tamed before the others
# hear of it; the norm of the mean would show it too late.
transformation = optax.chain(
    optax.clip_by_global_norm(CLIP),
    oxs.all_reduce_grads("data"),
    optax.adam(1e-2),
)


def train_step(state, images, labels):
    """One step on each replica; the metrics come back averaged over all of them."""

    def loss_of(params):
        logits = state.apply_fn(params, images)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    metrics = {"loss": loss, "accuracy": (logits.argmax(-1) == labels).mean()}
    return state.apply_gradients(grads=grads), metrics


def main():
    parser = argparse.ArgumentParser(description="Train with TrainState.")
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps

    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32)
    order = np.random.default_rng(SEED).permutation(len(labels))
    test, train = order[:360], order[360:]
    rng = np.random.default_rng(SEED)

    params = network.init(jax.random.key(SEED), images[:1])
    state = SyncTrainState.create(
        apply_fn=network.apply, params=params, tx=transformation
    )
    replicas = jax.device_count()
    workers = oxs.Workers(replicas, "data", mesh=True)  # None: simulated on one device
    state, step = workers.start(state), workers.step(train_step)

    for done in range(1, steps + 1):
        rows = rng.choice(train, replicas * BATCH)
        # One step at a time: forced CPU devices share a few threads. Accelerators run
        # ahead; leave the waiting out there.
        state, metrics = jax.block_until_ready(step(state, images[rows], labels[rows]))
        if done % REPORT_EVERY == 0 or done == steps:
            # All replicas are equal, so any of them will do.
            params = jax.device_get(workers.first(state.params))
            logits = network.apply(params, images[test])
            reached = (logits.argmax(-1) == labels[test]).mean()
            print(
                f"step {done:4}   loss {metrics['loss']:.3f}   train accuracy "
                f"{metrics['accuracy']:.1%}   test accuracy {reached:.1%}"
            )


if __name__ == "__main__":
    main()
