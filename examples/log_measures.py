"""Log what an exchange shows about the replicas: noise scale, agreement, norms.

    python examples/log_measures.py
    python examples/log_measures.py --steps 40 --logs runs/short

Eight simulated replicas train on the digits that come with scikit-learn. A table shows
what `oxs.metrics` reads; TensorBoard files are written where there is a writer for
them, of tensorboardX or PyTorch.
"""

import argparse
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.live import Live
from rich.table import Table
from sklearn.datasets import load_digits

import optx_sync as oxs

REPLICAS, BATCH = 8, 16  # images of a replica in a step
workers = oxs.Workers(REPLICAS, "data")  # `mesh=True`: on eight devices
tx = oxs.cross_shard(optax.adam(1e-2), "data", measure=True)
images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)


def loss_of(params, rows):
    logits = jnp.tanh(images[rows] @ params["hidden"]) @ params["output"]
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels[rows]).mean()


@workers.step(state=2)
def step(params, state, rows):
    """One replica's step; `batch_size` makes the noise scale a number of images."""
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    params, state = oxs.apply_gradients(tx, grads, state, params, batch_size=BATCH)
    return params, state, loss


def numbers_of(state):
    """What has been measured by name, in the order of the table; by all replicas."""
    found = oxs.metrics(workers.first(state))._asdict()
    return {name: value for name, value in found.items() if value is not None}


def find_writer(folder) -> Any:
    """A writer of TensorBoard files, or None."""
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(name).SummaryWriter(folder)
        except ImportError:
            continue
    return None


def main(steps, logs):
    """Train, and log every tenth step."""
    normal = jax.nn.initializers.normal(0.1)
    params = {"hidden": normal(jax.random.key(0), (64, 64))}
    params["output"] = normal(jax.random.key(1), (64, 10))
    params, state = workers.start((params, tx.init(params)))
    writer = find_writer(logs)
    table = Table("step", "loss", *numbers_of(state))
    batches = np.random.default_rng(0).integers(
        len(labels), size=(steps, REPLICAS * BATCH)
    )
    with Live(table):
        for number, rows in enumerate(batches, 1):
            params, state, loss = step(params, state, rows)
            if number % 10:
                continue
            found = {"loss": loss, **numbers_of(state)}
            table.add_row(str(number), *(f"{value:.3g}" for value in found.values()))
            if writer is not None:
                for name, value in found.items():
                    writer.add_scalar(name, float(value), number)
    if writer is None:
        print("no TensorBoard files: install tensorboardX for them")
    else:
        writer.close()
        print(f"wrote TensorBoard files into {logs}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Log what an exchange shows.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logs", default="runs", help="where TensorBoard files go")
    main(**vars(parser.parse_args()))
