"""DiLoCo over islands: four workers, each of them sharded over two devices (FSDP).

    python examples/train_islands.py
    python examples/train_islands.py --steps 40 --out short_islands.png

A small transformer learns the documentation that comes with Python, character by
character, on eight forced CPU devices. Inside of a worker XLA gathers parameters and
reduces gradients in every step, over the axis "fsdp"; the workers meet over the axis
"workers" once in PERIOD steps, as between data centres. The table at the end is read
from the compiled program. The last lines are like

    step 400: held-out loss of the center 2.43
    wrote islands.png
"""

import argparse
import os
import pydoc_data.topics
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table

import optx_sync as oxs

# Eight CPU devices stand for four islands of two accelerators; set before JAX starts.
os.environ.setdefault("NPROC", "16")  # threads for them, and as many to spare
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

WORKERS, SHARDS, PERIOD = 4, 2, 20
STEPS, BATCH, CONTEXT, SEED = 400, 16, 64, 0  # BATCH sequences per worker and step
WIDTH, HEADS, LAYERS = 64, 4, 2


class Transformer(nn.Module):
    """Decoder-only, pre-norm, learned positions."""

    characters: int

    @nn.compact
    def __call__(self, tokens):
        """Logits of the next character at each place."""
        x = nn.Embed(self.characters, WIDTH)(tokens)
        x = x + nn.Embed(CONTEXT, WIDTH)(jnp.arange(tokens.shape[-1]))
        for _ in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(HEADS)
            x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dense(WIDTH)(hidden)
        return nn.Dense(self.characters)(nn.LayerNorm()(x))


def fsdp_spec(parameter):
    """The first axis that the devices can share; the only layout written by hand."""
    even = [size % SHARDS == 0 for size in parameter.shape]
    return P(*[None] * even.index(True), "fsdp") if any(even) else P()


def main(steps, out):
    """Train, print what was sent and how well the center does, draw the losses."""
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet, codes = np.unique(list(text), return_inverse=True)
    window = CONTEXT + 1
    held_out, codes = codes[: 300 * window].reshape(300, window), codes[300 * window :]
    model = Transformer(len(alphabet))
    params = model.init(jax.random.key(SEED), jnp.zeros((1, CONTEXT), jnp.int32))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 6e-3, steps // 10, steps)
    tx = oxs.diloco(optax.adamw(schedule), "workers", communication_period=PERIOD)

    def loss_of(params, text):
        logits: Any = model.apply(params, text[:, :-1])
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probabilities, text[:, 1:, None], -1).mean()

    automatic = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((WORKERS, SHARDS), ("workers", "fsdp"), axis_types=automatic)

    workers = oxs.Workers(WORKERS, "workers", mesh=mesh)

    @workers.step(state=2, average=False)
    def step(params, state, text):
        """One worker's own step; of the others it knows the name of an axis."""

        def gathered_loss(params):
            # FSDP: gather, use, forget; the worker's devices share its batch.
            params = jax.lax.with_sharding_constraint(params, P())
            return loss_of(params, jax.lax.with_sharding_constraint(text, P("fsdp")))

        loss, grads = jax.value_and_grad(gathered_loss)(params)
        params, state = oxs.apply_gradients(tx, grads, state, params)
        return params, state, loss

    def fsdp(parameter):
        return jax.device_put(parameter, NamedSharding(mesh, fsdp_spec(parameter)))

    # One worker's layout is all there is to say: the state takes it over.
    params = jax.tree.map(fsdp, params)
    params, state = workers.start((params, tx.init(params)))
    layout = NamedSharding(mesh, P(("workers", "fsdp")))  # of a batch

    places = (steps, WORKERS * BATCH, 1)
    places = np.random.default_rng(SEED).integers(len(codes) - CONTEXT, size=places)
    batches = codes[places + np.arange(window)]
    losses = []
    for batch in track(batches, "Training"):
        batch = jax.device_put(batch, layout)
        params, state, loss = step(params, state, batch)
        losses.append(np.asarray(loss))

    table, rows = Table("over", "what", "bytes of a device", "when"), Counter()
    first = jax.device_put(batches[0], layout)
    for row in oxs.audit.collectives(step, params, state, first):
        over = {WORKERS: "workers", SHARDS: "fsdp"}.get(len(row.groups[0]), "both")
        rows[over, row.kind, row.conditional] += row.bytes
    for (over, kind, conditional), size in sorted(rows.items()):
        when = "in a conditional" if conditional else "every step"
        table.add_row(over, kind, f"{size:,}", when)
    rich.print(table)

    final = float(jax.jit(loss_of)(workers.center((params, state)), held_out))
    figure = Figure(figsize=(7, 4), layout="tight")
    plot = figure.subplots()
    plot.plot(losses, linewidth=0.8)
    plot.set(xlabel="step; a line is a round", ylabel="loss of the four workers")
    for meeting in range(PERIOD, steps + 1, PERIOD):
        plot.axvline(meeting - 0.5, color="0.85", zorder=0)
    figure.savefig(out)
    print(f"step {steps}: held-out loss of the center {final:.2f}\nwrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DiLoCo over sharded workers.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", default="islands.png", help="where the picture goes")
    main(**vars(parser.parse_args()))
