"""A small GPT in Flax Linen, with a TrainState, on one device."""

import pydoc_data.topics
import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])  # of the checkpoints, and up to which one
BATCH, CONTEXT, WIDTH = 48, 16, 32

text = "\n".join(pydoc_data.topics.topics.values())[:20_000]
alphabet, codes = np.unique(list(text), return_inverse=True)
held_out = codes[-20 * (CONTEXT + 1) :].reshape(20, CONTEXT + 1)


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens, train=False):
        places = self.param("places", nn.initializers.normal(0.1), (CONTEXT, WIDTH))
        x = nn.Embed(len(alphabet), WIDTH)(tokens) + places
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        up = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(WIDTH)(up))
        return nn.Dense(len(alphabet))(x)


class State(TrainState):
    key: jax.Array


def loss_of(logits, text):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(logits, text[:, 1:]).mean()


schedule = optax.cosine_decay_schedule(1e-2, 100)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
network, key = GPT(), jax.random.key(0)
params = jax.jit(network.init)(key, held_out[:, :-1])
state: Any = State.create(apply_fn=network.apply, params=params, tx=tx, key=key)


@jax.jit
def train_step(state, text):
    def loss_in(params):
        rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
        logits = state.apply_fn(params, text[:, :-1], train=True, rngs=rngs)
        return loss_of(logits, text)

    loss, grads = jax.value_and_grad(loss_in)(state.params)
    return state.apply_gradients(grads=grads), loss


manager = ocp.CheckpointManager(FOLDER)
begin = manager.latest_step() or 0
if begin:
    state = manager.restore(begin, args=ocp.args.StandardRestore(state))
for step in range(begin, STEPS):
    starts = np.random.default_rng(step).integers(len(codes) - 1000, size=(BATCH, 1))
    state, loss = train_step(state, codes[starts + np.arange(CONTEXT + 1)])
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}")
manager.save(STEPS, args=ocp.args.StandardSave(state))
manager.close()

logits = jax.jit(state.apply_fn)(state.params, held_out[:, :-1])
print(f"held-out loss {loss_of(logits, held_out):.3f}")
