"""A network with BatchNorm in Flax Linen under pmap."""

import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])  # of the checkpoints, and up to which one
BATCH = 48

images, labels = load_digits(return_X_y=True)
images = np.asarray(images / 16, np.float32).reshape(-1, 8, 8, 1)
test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(16, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


class State(TrainState):
    batch_stats: Any


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
network = Network()
variables = network.init(jax.random.key(0), images[:1])
state = State.create(apply_fn=network.apply, tx=tx, **variables)
state = jax.tree.map(lambda x: np.stack([x] * 8), state)


def train_step(state, images, labels):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, True, mutable=["batch_stats"])
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return entropy.mean(), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, "data")
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


train_step = jax.pmap(train_step, "data", donate_argnums=0)

manager = ocp.CheckpointManager(FOLDER)
begin = manager.latest_step() or 0
if begin:
    state = manager.restore(begin, args=ocp.args.StandardRestore(state))
for step in range(begin, STEPS):
    rows = np.random.default_rng(step).choice(train, BATCH).reshape(8, -1)
    state, loss = train_step(state, images[rows], labels[rows])
    if step % 10 == 0:
        print(f"step {step}: loss {loss.mean():.3f}")
manager.save(STEPS, args=ocp.args.StandardSave(state))
manager.close()

state = jax.tree.map(lambda x: x.mean(0), state)
variables = {"params": state.params, "batch_stats": state.batch_stats}
right = state.apply_fn(variables, images[test]).argmax(-1) == labels[test]
print(f"test accuracy {right.mean():.1%}")
