"""The same script with eight workers of their own, pulled to a center."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import optx_sync as oxs

STEPS, BATCH = 300, 128

images, labels = load_digits(return_X_y=True)
images = np.asarray(images / 16, np.float32)
rng = np.random.default_rng(0)
test, train = np.split(rng.permutation(len(labels)), [360])

network = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
params = network.init(jax.random.key(0), images[:1])
tx = oxs.elastic_average(optax.adam(1e-2), "data", moving_rate=0.9 / 8, rho=0.0)
state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
state = oxs.replicate(state, 8)


def train_step(state, images, labels):
    def loss_of(params):
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


step, losses = jax.jit(oxs.map_workers(train_step, "data")), []
for _ in range(STEPS):
    rows = rng.choice(train, (8, BATCH // 8))
    state, loss = step(state, images[rows], labels[rows])
    losses.append(np.mean(loss))

state = oxs.swap_center(state)
logits = state.apply_fn(state.params, images[test])
accuracy = (logits.argmax(-1) == labels[test]).mean()
print(f"loss {np.mean(losses[-20:]):.3f}, test accuracy {accuracy:.1%}")
