"""The same with two workers, pods of four replicas each."""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optx_sync as oxs
from optx_sync.flax import SyncOptimizer

STEPS, BATCH, CONTEXT, WIDTH = 200, 32, 32, 64
jax.config.update("jax_num_cpu_devices", 8)  # CPU devices stand for accelerators

text = "\n".join(pydoc_data.topics.topics.values())[:50_000]
alphabet, codes = np.unique(list(text), return_inverse=True)
held_out = codes[-20 * (CONTEXT + 1) :].reshape(20, CONTEXT + 1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.norm_mlp = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(len(alphabet), WIDTH, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, len(alphabet), rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(model, text):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(model(text[:, :-1]), text[:, 1:]).mean()


mesh = jax.make_mesh((2, 4), ("pods", "data"), axis_types=(AxisType.Auto,) * 2)
tx = optax.adamw(3e-3)
tx = oxs.diloco(oxs.cross_shard(tx, "data"), "pods", communication_period=20)
model = Transformer(nnx.Rngs(0))
optimizer = SyncOptimizer(model, tx, wrt=nnx.Param)
place = NamedSharding(mesh, PartitionSpec(("pods", "data")))
model, optimizer = jax.device_put(oxs.replicate((model, optimizer), 8), place)


def train_step(model, optimizer, text):
    loss, grads = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, grads)
    return model, optimizer, loss


mapped = oxs.map_workers(train_step, ("pods", "data"), mesh=mesh)
train_step = jax.jit(mapped, donate_argnums=(0, 1))
for step in range(STEPS):
    rng = np.random.default_rng(step)
    starts = rng.integers(len(codes) - 1000, size=(8, BATCH // 8, 1))
    batch = codes[starts + np.arange(CONTEXT + 1)]
    model, optimizer, loss = train_step(model, optimizer, batch)

model = oxs.swap_center(model, optimizer)
print(f"step {STEPS}: held-out loss {loss_of(model, held_out):.3f}")
