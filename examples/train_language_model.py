"""A language model across pods: what a way to agree costs, in bytes and in loss.

    NPROC=16 python examples/train_language_model.py --steps 160 --seeds 0 1 2

A small transformer (NNX, scanned layers, bfloat16 parameters) learns the documentation
that comes with Python on 2 pods x 2 data x 2 shards, eight forced CPU devices. Over
"shards" XLA gathers parameters, over "data" gradients meet in every step, and how the
"pods" agree is one line of STRATEGIES. Started again, it goes on from its checkpoints.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich
from flax import nnx
from jax import P
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # stand for accelerators, 4 in a pod
PERIOD, BATCH, CONTEXT, WIDTH, LAYERS = 20, 8, 64, 64, 4
HALF: Any = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16}
adam = optax.adamw(optax.warmup_constant_schedule(0.0, 4e-3, 20), mu_dtype=jnp.float32)
inner = oxs.cross_shard(adam, "data")
seldom: Any = {"communication_period": PERIOD}
bits4 = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))
stream: Any = {"fragments": oxs.rules.strided(LAYERS), "overlap": True}
STRATEGIES = {
    "data parallel": oxs.cross_shard(oxs.cross_shard(adam, "pods"), "data"),
    "DiLoCo": oxs.diloco(inner, "pods", **seldom),
    "streaming": oxs.diloco(inner, "pods", exchange=bits4, **stream, **seldom),
    "sharded state": oxs.diloco(inner, "pods", shard_state=True, **seldom),
    "NoLoCo": oxs.noloco(inner, "pods", **seldom),
}
alphabet, codes = np.unique(list("\n".join(topics.values())), return_inverse=True)
NAMES = ("pods", "data", "shards")
mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
jax.set_mesh(mesh)


class _Block(nnx.Module):
    def __init__(self, rngs):
        bare: Any = {"use_bias": False, "rngs": rngs, **HALF}
        self.attention = nnx.MultiHeadAttention(4, WIDTH, **bare)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **bare)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **bare)
        self.one, self.two = (nnx.RMSNorm(WIDTH, **HALF, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.one(x), mask=mask, decode=False)
        return x + self.down(nnx.gelu(self.up(self.two(x))))


class _Transformer(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(len(alphabet), WIDTH, **HALF, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(_Block))(rngs)
        self.norm = nnx.RMSNorm(WIDTH, **HALF, rngs=rngs)

    def __call__(self, tokens):  # no positions: the mask tells them
        layers = nnx.scan(lambda x, layer: (layer(x), None))
        return self.table.attend(self.norm(layers(self.table(tokens), self.layers)[0]))


def run(name, seed, options):
    """Train under one strategy: losses, and bytes near, far and at once."""
    graph, start = nnx.split(_Transformer(nnx.Rngs(seed)))
    tx, place = STRATEGIES[name], jax.lax.with_sharding_constraint
    start = nnx.as_pure(start)
    spec = jax.tree.map(lambda x: P(*[None] * x.shape.index(WIDTH), "shards"), start)
    workers = oxs.Workers((2, 2), ("pods", "data"), mesh=mesh, specs=spec)
    unseen = codes[: options.unseen * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)

    def loss_of(params, text):  # XLA gathers parameters and cuts the batch
        params, text = place(params, P()), place(text, P("shards"))
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(nnx.merge(graph, params)(text[:, :-1]), text[:, 1:]).mean()

    @workers.step(state=2)
    def step(params, state, text):
        grads = jax.grad(loss_of)(params, text)
        return oxs.apply_gradients(tx, grads, state, params)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        at = rng.integers(unseen.size, len(codes) - CONTEXT, (4 * BATCH, 1))
        return jax.device_put(codes[at + np.arange(CONTEXT + 1)], P(NAMES))

    now, sent = workers.start((start, tx.init(start))), [[0.0, 0.0], [0.0, 0.0]]
    for row in oxs.audit.collectives(step, *now, batch(0)):
        far = any(len({chip // 4 for chip in group}) > 1 for group in row.groups)
        sent[far][row.conditional] += 4 * row.sent
    folder = Path(options.out).resolve() / f"{name} {seed}"
    with ocp.CheckpointManager(folder) as manager:
        done, losses = manager.latest_step() or 0, []
        if done:
            like = ocp.args.StandardRestore((now, [0.0] * (done // options.every)))
            now, losses = manager.restore(done, args=like)
        title = f"{name} {seed}, from step {done}"
        for number in track(range(done + 1, options.steps + 1), title):
            now = jax.block_until_ready(step(*now, batch(number)))
            if number % options.every == 0:
                mean = oxs.by_hand.mean_params(
                    oxs.by_hand.mean_params(now[0])
                )  # of pods, of equals
                losses.append(float(jax.jit(loss_of)(mean, unseen)))
                manager.save(number, args=ocp.args.StandardSave((now, losses)))
    near, far = (always + seldom / PERIOD for always, seldom in sent)
    parts = LAYERS if name == "streaming" else 1  # one of them meets at a time
    return losses, (near, far, sent[1][0] + sent[1][1] / parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How pods agree, and what it costs.")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="evaluate and save")
    parser.add_argument("--unseen", type=int, default=300, help="sequences held out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--out", default="language_model", help="a folder")
    options, figure = parser.parse_args(), Figure((7, 4.2), layout="constrained")
    titles = ("loss", "in a pod", "between pods", "at once", "1 Gbit/s", "100 Gbit/s")
    table = Table("pods agree by", *titles, caption="of a pod and step; ± half range")
    plot = figure.subplots(subplot_kw={"xscale": "log"})
    plot.set(xlabel="bytes that a pod sent to the other", ylabel="held-out loss")
    rows = []
    for name in options.only:
        runs = [run(name, seed, options) for seed in options.seeds]
        losses, sizes = np.array([losses for losses, _ in runs]), runs[0][1]
        loss = f"{losses[:, -1].mean():.3f} ± {np.ptp(losses[:, -1]) / 2:.3f}"
        rows.append((name, losses[:, -1].mean(), np.ptp(losses[:, -1]) / 2, sizes[1]))
        times = (f"{8e3 * sizes[1] / speed:.3g} ms" for speed in (1e9, 1e11))
        table.add_row(name, loss, *(f"{x:,.0f}" for x in sizes), *times)
        x = sizes[1] * options.every * np.arange(1, losses.shape[1] + 1)
        plot.plot(x, losses.mean(0), marker=".", label=name)
        plot.fill_between(x, losses.min(0), losses.max(0), alpha=0.2)
    plot.legend(frameon=False)
    figure.savefig(f"{options.out}/loss.png", dpi=130)
    Path(f"{options.out}/loss.json").write_text(json.dumps(rows, indent=1))
    rich.print(table)
