"""The methods of `table.py`, with their published settings, and the model they train.

The transformer of the gallery with half its layers, in float32, and the text that comes
with Python.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import AXIS
from characters import digest, help_texts

import optx_sync as oxs

WORKERS, BATCH, CONTEXT = 8, 2, 32
WIDTH, LAYERS, HEADS = 64, 2, 4
STEPS, RATE, PERIOD = 1000, 4e-3, 20  # the rate of AdamW; steps between rounds
# Python's source: other words, other line lengths, the same characters.
SECOND_TASK = "argparse", "inspect", "typing", "tarfile", "datetime", "pickle", "ast"
Tree = Any


# The text, the model.


@functools.cache
def texts() -> dict[str, Any]:
    """Numbers of characters: to train on, held out twice, and a second task's."""
    _, kept, alphabet, train, validation, test = help_texts()
    folder = Path(os.__file__).parent
    source = "".join((folder / f"{name}.py").read_text() for name in SECOND_TASK)
    known = set(alphabet)
    source = [character for character in source if character in known]
    second = np.searchsorted(alphabet, source).astype(np.int32)
    last = len(second) - len(second) // 10
    return {
        "train": train,
        "validation": cut(np.concatenate(validation))[::4],
        "test": cut(np.concatenate(test)),
        "second": second[:last],
        "second test": cut(second[last:]),
        "facts": {
            "alphabet": len(alphabet),
            "characters": len(kept),
            "sha256": digest(kept),
            "second sha256": digest("".join(source)),
        },
    }


def cut(codes: np.ndarray) -> np.ndarray:
    """Windows of text that do not overlap: [windows, CONTEXT + 1]."""
    return codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)


def initial(seed: int, width: int = WIDTH) -> Tree:
    """Parameters of the model: matrices, so that Muon has something to do."""
    normal = np.random.default_rng(seed).standard_normal

    def matrix(n, m):
        return jnp.asarray(normal((n, m)) * n**-0.5, jnp.float32)

    def layer():
        return {
            "attention": {"in": matrix(width, 3 * width), "out": matrix(width, width)},
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
            "norms": jnp.ones((2, width)),
        }

    table = jnp.asarray(normal((texts()["facts"]["alphabet"], width)) / width**0.5)
    layers = [layer() for _ in range(LAYERS)]
    return {"table": table.astype("float32"), "layers": layers, "norm": jnp.ones(width)}


def normed(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(x, of):
    """A layer of the transformer; no positions: the mask tells them."""
    heads = [*x.shape[:2], HEADS, WIDTH // HEADS]
    parts = jnp.split(normed(x, of["norms"][0]) @ of["attention"]["in"], 3, -1)
    query, key, value = (part.reshape(heads) for part in parts)
    seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + seen.reshape(x.shape) @ of["attention"]["out"]
    return x + jax.nn.gelu(normed(x, of["norms"][1]) @ of["up"]) @ of["down"]


def loss_of(params, windows):
    """Nats per character."""
    x = WIDTH**0.5 * params["table"][windows[:, :-1]]
    for layer in params["layers"]:
        x = block(x, layer)
    logits = normed(x, params["norm"]) @ params["table"].T
    entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return entropy(logits, windows[:, 1:]).mean()


def windows_of(text: str, seed: int, step: int) -> np.ndarray:
    """What workers see in a step: [WORKERS, BATCH, CONTEXT + 1]."""
    codes = texts()[text]
    rng = np.random.default_rng((seed, step))
    first = rng.integers(0, len(codes) - CONTEXT, (WORKERS, BATCH, 1))
    return codes[first + np.arange(CONTEXT + 1)]


# The methods, with the settings that were published.


class Method(NamedTuple):
    """How workers agree. What its settings are in words stands in `pages.toml`."""

    kind: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    inner: str = "adamw"
    axes: dict[str, int] = {AXIS: WORKERS}  # noqa: RUF012 (never changed)
    period: Any = None  # a schedule of steps between rounds, if it is no number
    hidden: float = 0.0  # the share of steps behind which what is sent travels
    arrives: str = ""  # a simulator, if workers do not march in step
    share: float = 1.0  # of a round's bytes, that leave in the mean of all rounds
    by: Any = None  # its rule of the center, or when a meeting of it is full


def rate_of(steps: int) -> optax.Schedule:
    """The learning rate of all: it warms up, then falls to a tenth."""
    return optax.warmup_cosine_decay_schedule(
        0.0, RATE, max(1, steps // 25), steps, RATE / 10
    )


def scaled(rate: optax.Schedule, peak: float) -> optax.Schedule:
    """The same schedule with another largest rate."""
    return lambda step: peak / RATE * rate(step)


INNER = {
    "adamw": lambda rate: optax.adamw(rate),
    "momentum": lambda rate: optax.sgd(scaled(rate, 0.05), 0.9, nesterov=True),
    "muon": lambda rate: optax.contrib.muon(
        scaled(rate, 0.02),
        muon_weight_dimension_numbers=_matrices,
        adam_learning_rate=rate,
    ),
    "signs": lambda rate: optax.chain(
        optax.scale_by_sign(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(scaled(rate, 1e-3)),
    ),
}


def _matrices(params):
    """Muon's: all matrices but the embeddings."""
    muon = optax.contrib.MuonDimensionNumbers()
    matrices = jax.tree.map(lambda x: muon if x.ndim == 2 else None, params)
    layers = [layer | {"norms": None} for layer in matrices["layers"]]
    return matrices | {"table": None, "layers": layers}


PARTS, LATER = 4, 2
ex, fed = oxs.exchange, oxs.exchange.error_feedback


def meeting(wrap: Callable, period: Any = PERIOD, **options: Any) -> Callable:
    """A wrapper whose workers meet every so many steps."""
    return lambda inner: wrap(inner, AXIS, communication_period=period, **options)


def diloco(exchange: Any = None, **options: Any) -> Callable:
    """DiLoCo, with what else than the mean is exchanged."""
    return meeting(oxs.diloco, exchange=exchange, **options)


def replicas(exchange: Any = None) -> Callable:
    """Gradients that are reduced in every step."""
    return lambda inner: oxs.cross_shard(inner, AXIS, exchange=exchange)


def gossip(graph: oxs.graphs.Graph) -> Method:
    """Workers that average with partners."""
    return Method("partners", lambda inner: oxs.gossip(inner, AXIS, graph=graph))


def backup_workers(inner: optax.GradientTransformation) -> Any:
    """Seven of eight gradients make an update."""
    return oxs.sync_replicas(inner, AXIS, 7, total_num_replicas=WORKERS)


def muloco(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Four pods of two chips, on which each matrix has an owner."""
    return oxs.diloco(
        oxs.cross_shard(inner, "chips", shard_state="leaves"),
        "pods",
        outer=optax.sgd(0.7, 0.6, nesterov=True),
        communication_period=30,
    )


def lion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A majority of the signs of each worker's own Lion."""
    own = optax.scale_by_lion(b1=0.9, b2=0.99)
    return optax.chain(own, oxs.all_reduce_grads(AXIS, exchange=ex.quantized(1)), inner)


def one_by_one(outer: optax.GradientTransformation) -> Method:
    """Workers that meet the center as they come."""
    rule = oxs.rules.diloco(outer=outer)
    return Method("asynchronous", diloco(), arrives="center", by=rule)


def decoupled(merge: Any = None) -> Method:
    """Parts that five of the workers have to bring, hidden behind all steps."""
    by, wrap = oxs.runtime.quorum(5, grace=1.0, merge=merge), diloco(fragments=PARTS)
    return Method("asynchronous", wrap, hidden=1.0, arrives="quorum", by=by)


def post_local(steps: int) -> optax.Schedule:
    """A period of 1 in the first half of the steps, then of 16."""
    return lambda step: jnp.where(jnp.asarray(step) < steps // 2, 1, 16)


def qsr(steps: int) -> optax.Schedule:
    """A period that grows as the rate falls."""
    return oxs.outer.qsr(
        rate_of(steps), 2 * RATE, 4, warmup=steps // 25, total_steps=steps
    )


SPARSE = fed(ex.top_k(64, 4096, bits=2), decay=0.95)
BITS4 = ex.quantized(bits=4)
RADIAL = ex.radial(direct=lambda path: "table" in path)
CHUNKS = ex.rotated(ex.top_k(32, 4096), "dct", 64)
elastic = meeting(oxs.elastic_average, 10, moving_rate=0.9 / WORKERS, rho=0.0)
moments = meeting(oxs.local_sgd, inner_state={"mu": 3, "nu": 6})
milder, plain = optax.sgd(1.0, 0.5, nesterov=True), optax.sgd(1.0)
METHODS = {
    "data parallel": Method("gradients", replicas()),
    "data parallel, Muon": Method("gradients", replicas(), inner="muon"),
    "backup workers": Method("gradients", backup_workers, arrives="replicas"),
    "PowerSGD": Method("gradients", replicas(fed(ex.power_sgd(2)))),
    "DeMo": Method("gradients", replicas(fed(CHUNKS, decay=0.999)), inner="signs"),
    "Distributed Lion": Method("gradients", lion, inner="signs"),
    "EASGD": Method("center", elastic),
    "EAMSGD": Method("center", elastic, inner="momentum"),
    "AGN": Method("center", meeting(oxs.agn, 10)),
    "local SGD": Method("center", meeting(oxs.local_sgd, 10)),
    "post-local SGD": Method(
        "center", meeting(oxs.local_sgd, post_local(STEPS)), period=post_local
    ),
    "QSR": Method("center", meeting(oxs.local_sgd, qsr(STEPS)), period=qsr),
    "DiLoCo": Method("center", diloco()),
    "DiLoCo, outer 1.0 / 0.5": Method("center", diloco(outer=milder)),
    "DES-LOC": Method("center", moments, share=(1 + 1 / 3 + 1 / 6) / 3),
    "DiLoCo, radial": Method("merge", diloco(RADIAL)),
    "DiLoCo, penalised": Method("merge", diloco(ex.penalized(warmup=10))),
    "DiLoCo, 8 bits": Method("codes", diloco(ex.quantized(bits=8))),
    "DiLoCo, 4 bits": Method("codes", diloco(BITS4)),
    "DiLoCo, 4 bits, feedback": Method("codes", diloco(fed(BITS4))),
    "DiLoCo, 3 bits, feedback": Method("codes", diloco(fed(ex.quantized(bits=3)))),
    "DiLoCo, 2 bits, feedback": Method("codes", diloco(fed(ex.quantized(bits=2)))),
    "DiLoCo, 2 bits, rotated": Method(
        "codes", diloco(ex.rotated(ex.quantized(bits=2)))
    ),
    "DiLoCo, 1 bit, rotated": Method("codes", diloco(ex.rotated(ex.quantized(bits=1)))),
    "DiLoCo, in parts": Method(
        "codes",
        diloco(fed(BITS4), fragments=PARTS, overlap=True),
        hidden=PARTS / PERIOD,
    ),
    "DiLoCo, a part a step": Method(
        "codes", diloco(fed(BITS4), fragments=PERIOD, overlap=True)
    ),
    "SparseLoCo": Method("codes", diloco(SPARSE, outer=plain)),
    "Covenant": Method("codes", diloco(ex.clipped("median", SPARSE), outer=plain)),
    "MuLoCo": Method("center", muloco, inner="muon", axes={"pods": 4, "chips": 2}),
    "delayed Nesterov": one_by_one(oxs.outer.delayed_nesterov(0.7, momentum=0.9)),
    "HeLoCo": one_by_one(oxs.outer.heloco(0.7)),
    "Decoupled DiLoCo": decoupled(),
    "Decoupled DiLoCo, radial": decoupled(RADIAL),
    "NoLoCo": Method("partners", meeting(oxs.noloco)),
    "gossip, ring": gossip(oxs.graphs.ring()),
    "gossip, exponential": gossip(oxs.graphs.exponential()),
    "gossip, random pairs": gossip(oxs.graphs.random_pairs()),
    "median": Method("robust", replicas(ex.median())),
    "trimmed mean": Method("robust", replicas(ex.trimmed_mean(1))),
    "Krum": Method("robust", replicas(ex.krum(1))),
    "geometric median": Method("robust", replicas(ex.geometric_median())),
    "clipped to the median": Method("robust", replicas(ex.clipped("median"))),
    "DiLoCo, clipped": Method("robust", diloco(ex.clipped("median"))),
    "DiLoCo, median": Method("robust", diloco(ex.median())),
}
SWEEP = 1, 5, 10, 25, 50, 100, 200, 500  # and PERIOD, which stands above
METHODS |= {
    f"DiLoCo, H = {period}": Method("period", meeting(oxs.diloco, period))
    for period in SWEEP
}
