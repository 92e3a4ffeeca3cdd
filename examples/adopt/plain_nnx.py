"""A small GPT in Flax NNX on one device."""

import pydoc_data.topics
import sys

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])  # of the checkpoints, and up to which one
BATCH, CONTEXT, WIDTH = 48, 16, 32

text = "\n".join(pydoc_data.topics.topics.values())[:20_000]
alphabet, codes = np.unique(list(text), return_inverse=True)
held_out = codes[-20 * (CONTEXT + 1) :].reshape(20, CONTEXT + 1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.norm_mlp = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_mlp(x)))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(len(alphabet), WIDTH, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.out = nnx.Linear(WIDTH, len(alphabet), rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(CONTEXT))
        return self.out(self.block(x))


def loss_of(model, text):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(model(text[:, :-1]), text[:, 1:]).mean()


schedule = optax.cosine_decay_schedule(1e-2, 100)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
model = GPT(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, text):
    loss, grads = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, grads)
    return loss


manager = ocp.CheckpointManager(FOLDER)
begin = manager.latest_step() or 0
if begin:
    template = ocp.args.StandardRestore(nnx.state((model, optimizer)))
    nnx.update((model, optimizer), manager.restore(begin, args=template))
for step in range(begin, STEPS):
    starts = np.random.default_rng(step).integers(len(codes) - 1000, size=(BATCH, 1))
    loss = train_step(model, optimizer, codes[starts + np.arange(CONTEXT + 1)])
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}")
state = ocp.args.StandardSave(nnx.state((model, optimizer)))
manager.save(STEPS, args=state)
manager.close()

model.eval()
print(f"held-out loss {nnx.jit(loss_of)(model, held_out):.3f}")
