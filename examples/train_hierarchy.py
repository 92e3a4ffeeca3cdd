"""Two pods of four chips: data parallel inside of a pod, DiLoCo between the pods.

NPROC=16 python examples/train_hierarchy.py    # a mesh of eight forced CPU devices
python examples/train_hierarchy.py --simulate  # the same program on one device
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
parser = argparse.ArgumentParser(description="Data parallel pods that meet seldom.")
parser.add_argument("--simulate", action="store_true", help="on one device")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

PODS, CHIPS, BATCH, PERIOD = 2, 4, 16, 20
images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
mesh = not options.simulate
workers = oxs.Workers((PODS, CHIPS), ("pods", "chips"), mesh=mesh)
# Chips reduce gradients in every step; pods meet at a center once in PERIOD steps.
inner = oxs.cross_shard(optax.adam(1e-2), "chips")
tx = oxs.diloco(inner, "pods", communication_period=PERIOD)


def loss_of(params, rows):
    logits = jnp.tanh(images[rows] @ params["hidden"]) @ params["output"]
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels[rows]).mean()


@workers.step(state=2)
def step(params, state, rows):
    """One chip's step: its own gradient at the parameters of its pod."""
    grads = jax.grad(loss_of)(params, rows)
    return oxs.apply_gradients(tx, grads, state, params)


draw, normal = np.random.default_rng(0), jax.nn.initializers.normal(0.1)
start = {"hidden": normal(jax.random.key(0), (64, 64))}
start["output"] = normal(jax.random.key(1), (64, 10))
params, state = workers.start((start, tx.init(start)))
batches = draw.integers(len(labels), size=(options.steps, PODS * CHIPS * BATCH))
for rows in batches:
    params, state = step(params, state, rows)
for row in oxs.audit.collectives(step, params, state, batches[0]):
    over = "chips" if len(row.groups[0]) == CHIPS else "pods"
    print(f"over {over}: {row.bytes:,} bytes", "in a round" * row.conditional)
loss = loss_of(workers.center((params, state)), np.arange(len(labels)))
print(f"loss of the center {loss:.5f}")
