"""A small GPT in Equinox on one device."""

import pydoc_data.topics
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])  # of the checkpoints, and up to which one
BATCH, CONTEXT, WIDTH = 48, 16, 32

text = "\n".join(pydoc_data.topics.topics.values())[:20_000]
alphabet, codes = np.unique(list(text), return_inverse=True)
held_out = codes[-20 * (CONTEXT + 1) :].reshape(20, CONTEXT + 1)


class GPT(eqx.Module):
    tokens: eqx.nn.Embedding
    places: jax.Array
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(len(alphabet), WIDTH, key=keys[0])
        self.places = jnp.zeros((CONTEXT, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(WIDTH, len(alphabet), key=keys[3])

    def __call__(self, tokens, key=None):
        x = jax.vmap(self.tokens)(tokens) + self.places
        seen, mask = jax.vmap(self.norms[0])(x), jnp.tri(CONTEXT, dtype=bool)
        x = x + self.attention(seen, seen, seen, mask)
        up = jax.vmap(lambda x: self.mlp(self.norms[1](x)))(x)
        x = x + self.dropout(up, key=key, inference=key is None)
        return jax.vmap(self.out)(x)


def loss_of(model, text, keys=None):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(jax.vmap(model)(text[:, :-1], keys), text[:, 1:]).mean()


schedule = optax.cosine_decay_schedule(1e-2, 100)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
model = GPT(jax.random.key(0))
state = model, tx.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1)


@eqx.filter_jit
def train_step(state, text):
    model, opt_state, key = state
    key, *keys = jax.random.split(key, 1 + len(text))
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, text, jnp.stack(keys))
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (eqx.apply_updates(model, updates), opt_state, key), loss


manager = ocp.CheckpointManager(FOLDER)
begin = manager.latest_step() or 0
if begin:
    arrays, rest = eqx.partition(state, eqx.is_array)
    arrays = manager.restore(begin, args=ocp.args.StandardRestore(arrays))
    state = eqx.combine(arrays, rest)
for step in range(begin, STEPS):
    starts = np.random.default_rng(step).integers(len(codes) - 1000, size=(BATCH, 1))
    state, loss = train_step(state, codes[starts + np.arange(CONTEXT + 1)])
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}")
manager.save(STEPS, args=ocp.args.StandardSave(eqx.filter(state, eqx.is_array)))
manager.close()

model = state[0]
print(f"held-out loss {eqx.filter_jit(loss_of)(model, held_out):.3f}")
