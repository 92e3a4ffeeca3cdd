"""The methods of `table.py`, with their published settings, and the model they train.

The transformer of the gallery with half its layers, in float32, and the text that comes
with Python.
"""

import functools
import hashlib
import os
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# A program takes one core, and as many run at a time as there are cores: faster than
# threads inside of small matrix products. XLA reads the size of its pool from NPROC.
os.environ["NPROC"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

AXIS, WORKERS, BATCH, CONTEXT = "workers", 8, 2, 32
WIDTH, LAYERS, HEADS = 64, 2, 4
STEPS, RATE, PERIOD = 1000, 4e-3, 20  # the rate of AdamW; steps between rounds
# Python's source: other words, other line lengths, the same characters.
SECOND_TASK = "argparse", "inspect", "typing", "tarfile", "datetime", "pickle", "ast"
Tree = Any


# The text, the model.


@functools.cache
def texts() -> dict[str, Any]:
    """Numbers of characters: to train on, held out twice, and a second task's."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    kept = "\n\n".join(dict.fromkeys(whole.split("\n\n")))
    alphabet, codes = np.unique(list(kept), return_inverse=True)
    blocks = np.array_split(codes.astype(np.int32), 100)
    train = [block for number, block in enumerate(blocks) if number % 10 != 9]
    folder = Path(os.__file__).parent
    source = "".join((folder / f"{name}.py").read_text() for name in SECOND_TASK)
    known = set(alphabet)
    source = [character for character in source if character in known]
    second = np.searchsorted(alphabet, source).astype(np.int32)
    last = len(second) - len(second) // 10
    return {
        "train": np.concatenate(train),
        "validation": cut(np.concatenate(blocks[9::20]))[::4],
        "test": cut(np.concatenate(blocks[19::20])),
        "second": second[:last],
        "second test": cut(second[last:]),
        "facts": {
            "alphabet": len(alphabet),
            "characters": len(codes),
            "sha256": hashlib.sha256(kept.encode()).hexdigest(),
            "second sha256": hashlib.sha256("".join(source).encode()).hexdigest(),
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


# The methods: a line each, with the settings that were published and where.


class Method(NamedTuple):
    """How workers agree."""

    kind: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    settings: str  # those published, and what is otherwise here
    source: str
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
seldom: Any = {"axis_name": AXIS, "communication_period": PERIOD}


def diloco(**options) -> Callable:
    return lambda inner: oxs.diloco(inner, **seldom | options)


def replicas(exchange=None) -> Callable:
    return lambda inner: oxs.cross_shard(inner, AXIS, exchange=exchange)


def gossip(graph) -> Callable:
    return lambda inner: oxs.gossip(inner, AXIS, graph=graph)


def muloco(inner) -> optax.GradientTransformation:
    return oxs.diloco(
        oxs.cross_shard(inner, "chips", shard_state="leaves"),
        "pods",
        outer=optax.sgd(0.7, 0.6, nesterov=True),
        communication_period=30,
    )


def lion(inner) -> optax.GradientTransformation:
    own = optax.scale_by_lion(b1=0.9, b2=0.99)
    return optax.chain(own, oxs.all_reduce_grads(AXIS, exchange=ex.quantized(1)), inner)


def quorum(merge=None) -> Any:
    return oxs.runtime.quorum(5, grace=1.0, merge=merge)


def post_local(steps: int) -> optax.Schedule:
    return lambda step: jnp.where(jnp.asarray(step) < steps // 2, 1, 16)


def qsr(steps: int) -> optax.Schedule:
    return oxs.outer.qsr(
        rate_of(steps), 2 * RATE, 4, warmup=steps // 25, total_steps=steps
    )


DILOCO = "Douillard et al. 2023, arXiv 2311.08105"
STREAMING = "Douillard et al. 2025, arXiv 2501.18512"
ROBUST = "one of eight may lie; published for gradients"
SPARSE = fed(ex.top_k(64, 4096, bits=2), decay=0.95)
BITS4 = ex.quantized(bits=4)
RADIAL = ex.radial(direct=lambda path: "table" in path)
DECOUPLED: Any = {"kind": "asynchronous", "hidden": 1.0, "arrives": "quorum"}
DECOUPLED |= {"wrap": diloco(fragments=PARTS)}
DECOUPLED |= {"source": "Decoupled DiLoCo 2026, arXiv 2604.21428"}
METHODS = {
    "data parallel": Method(
        "gradients", replicas(), "the mean in every step: one device, too", "-"
    ),
    "data parallel, Muon": Method(
        "gradients",
        replicas(),
        "Muon 0.02 for matrices, AdamW for the rest",
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon",
        inner="muon",
    ),
    "backup workers": Method(
        "gradients",
        lambda inner: oxs.sync_replicas(inner, AXIS, 7, total_num_replicas=WORKERS),
        "7 of 8 gradients make an update; published 96 of 100",
        "Chen et al. 2016, arXiv 1604.00981",
        arrives="replicas",
    ),
    "PowerSGD": Method(
        "gradients",
        replicas(fed(ex.power_sgd(2))),
        "rank 2 with feedback; published inside of SGD with momentum",
        "Vogels et al. 2019, arXiv 1905.13727",
    ),
    "DeMo": Method(
        "gradients",
        replicas(fed(ex.rotated(ex.top_k(32, 4096), "dct", 64), decay=0.999)),
        "32 of 4096 after a DCT of 64, feedback 0.999, signs, rate 0.001, weight decay "
        "0.1",
        "Peng et al. 2024, arXiv 2411.19870",
        inner="signs",
    ),
    "Distributed Lion": Method(
        "gradients",
        lion,
        "Lion 0.9 / 0.99 of each worker, a majority of 1 bit, rate 0.001, weight decay "
        "0.1",
        "Liu et al. 2024, arXiv 2404.00438",
        inner="signs",
    ),
    "EASGD": Method(
        "center",
        lambda inner: oxs.elastic_average(
            inner, AXIS, moving_rate=0.9 / WORKERS, rho=0.0, communication_period=10
        ),
        "tau 10, beta 0.9; published with SGD, AdamW here",
        "Zhang et al. 2015, arXiv 1412.6651",
    ),
    "EAMSGD": Method(
        "center",
        lambda inner: oxs.elastic_average(
            inner, AXIS, moving_rate=0.9 / WORKERS, rho=0.0, communication_period=10
        ),
        "tau 10, beta 0.9, Nesterov momentum 0.9; published 0.99",
        "Zhang et al. 2015, arXiv 1412.6651",
        inner="momentum",
    ),
    "AGN": Method(
        "center",
        lambda inner: oxs.agn(inner, AXIS, communication_period=10),
        "a window of 10, Adam at the workers and at the center",
        "Hermans & Spanakis 2018, arXiv 1710.02368",
    ),
    "local SGD": Method(
        "center",
        lambda inner: oxs.local_sgd(inner, AXIS, communication_period=10),
        "H = 10; published with SGD, AdamW here",
        "Stich 2018, arXiv 1805.09767",
    ),
    "post-local SGD": Method(
        "center",
        lambda inner: oxs.local_sgd(
            inner, AXIS, communication_period=post_local(STEPS)
        ),
        "H = 1, from half of the steps on 16",
        "Lin et al. 2018, arXiv 1808.07217",
        period=post_local,
    ),
    "QSR": Method(
        "center",
        lambda inner: oxs.local_sgd(inner, AXIS, communication_period=qsr(STEPS)),
        "H = max(4, (alpha / rate)^2), alpha twice the largest rate",
        "Gu et al. 2023, arXiv 2310.14423",
        period=qsr,
    ),
    "DiLoCo": Method(
        "center",
        diloco(),
        f"outer Nesterov 0.7 / 0.9; H = {PERIOD}, published 500",
        DILOCO,
    ),
    "DiLoCo, outer 1.0 / 0.5": Method(
        "center",
        diloco(outer=optax.sgd(1.0, 0.5, nesterov=True)),
        f"a milder outer Nesterov, found on another small model; H = {PERIOD}",
        "benchmarks/results/reproduce_diloco.md",
    ),
    "DES-LOC": Method(
        "center",
        lambda inner: oxs.local_sgd(
            inner,
            AXIS,
            inner_state={"mu": 3, "nu": 6},
            communication_period=PERIOD,
        ),
        f"no outer step; Adam's moments meet in every 3rd and 6th round; H = {PERIOD}",
        "Iacob et al. 2025, arXiv 2505.22549",
        share=(1 + 1 / 3 + 1 / 6) / 3,
    ),
    "DiLoCo, radial": Method(
        "merge",
        diloco(exchange=RADIAL),
        f"0.7 / 0.9, H = {PERIOD}; of the embeddings the plain mean",
        "Decoupled DiLoCo 2026, arXiv 2604.21428",
    ),
    "DiLoCo, penalised": Method(
        "merge",
        diloco(exchange=ex.penalized(warmup=10)),
        f"0.7 / 0.9, H = {PERIOD}; 10 rounds of warm-up, published 120",
        "EDiT 2024, arXiv 2412.07210",
    ),
    "DiLoCo, 8 bits": Method(
        "codes",
        diloco(exchange=ex.quantized(bits=8)),
        "int8 without feedback",
        "Jaghouar et al. 2024, arXiv 2412.01152",
    ),
    "DiLoCo, 4 bits": Method(
        "codes",
        diloco(exchange=BITS4),
        "linear int4 without feedback; published FP4",
        STREAMING,
    ),
    "DiLoCo, 4 bits, feedback": Method(
        "codes",
        diloco(exchange=fed(BITS4)),
        "the same with error feedback",
        "Karimireddy et al. 2019, arXiv 1901.09847",
    ),
    "DiLoCo, 3 bits, feedback": Method(
        "codes",
        diloco(exchange=fed(ex.quantized(bits=3))),
        "Lloyd's levels of a normal distribution, error feedback",
        "Lloyd 1982",
    ),
    "DiLoCo, 2 bits, feedback": Method(
        "codes",
        diloco(exchange=fed(ex.quantized(bits=2))),
        "the same in 2 bits",
        "Lloyd 1982",
    ),
    "DiLoCo, 2 bits, rotated": Method(
        "codes",
        diloco(exchange=ex.rotated(ex.quantized(bits=2))),
        "in a rotated basis, without feedback",
        "-",
    ),
    "DiLoCo, 1 bit, rotated": Method(
        "codes", diloco(exchange=ex.rotated(ex.quantized(bits=1))), "the same", "-"
    ),
    "DiLoCo, in parts": Method(
        "codes",
        diloco(exchange=fed(BITS4), fragments=PARTS, overlap=True),
        f"{PARTS} parts behind the next step, 4 bits with feedback; published 0.5 kept",
        STREAMING,
        hidden=PARTS / PERIOD,
    ),
    "DiLoCo, a part a step": Method(
        "codes",
        diloco(exchange=fed(BITS4), fragments=PERIOD, overlap=True),
        f"{PERIOD} parts, one in each step, in conditionals; 4 bits with feedback",
        STREAMING,
    ),
    "SparseLoCo": Method(
        "codes",
        diloco(exchange=SPARSE, outer=optax.sgd(1.0)),
        f"64 of 4096 in 2 bits, decay 0.95, outer SGD 1.0; H = {PERIOD}, published 30",
        "Sarfi et al. 2025, arXiv 2508.15706",
    ),
    "Covenant": Method(
        "codes",
        diloco(exchange=ex.clipped("median", SPARSE), outer=optax.sgd(1.0)),
        "the same, contributions clipped to their median norm",
        "Lidin et al. 2026, arXiv 2603.08163",
    ),
    "MuLoCo": Method(
        "center",
        muloco,
        "Muon 0.02, outer Nesterov 0.7 / 0.6, H = 30; 4 pods of 2 chips, each matrix "
        "whole on its owner",
        "Therien et al. 2025, arXiv 2505.23725",
        inner="muon",
        axes={"pods": 4, "chips": 2},
    ),
    "delayed Nesterov": Method(
        "asynchronous",
        lambda inner: oxs.diloco(inner, **seldom),
        f"0.7 / 0.9, H = {PERIOD}; workers meet the center one by one",
        "Liu et al. 2024, arXiv 2401.09135",
        arrives="center",
        by=oxs.rules.diloco(outer=oxs.outer.delayed_nesterov(0.7, momentum=0.9)),
    ),
    "HeLoCo": Method(
        "asynchronous",
        lambda inner: oxs.diloco(inner, **seldom),
        f"the defaults of oxs.outer.heloco(0.7), H = {PERIOD}; none were published",
        "HeLoCo 2026, arXiv 2606.00271",
        arrives="center",
        by=oxs.rules.diloco(outer=oxs.outer.heloco(0.7)),
    ),
    "Decoupled DiLoCo": Method(
        settings=f"0.7 / 0.9, H = {PERIOD}, {PARTS} parts, {LATER} steps late; 5 of "
        f"{WORKERS} meet, a grace of 1, weights tokens^2 / steps, plain mean; "
        "published H = P = 24 and a radial mean, whose outer rates are not",
        by=quorum(),
        **DECOUPLED,
    ),
    "Decoupled DiLoCo, radial": Method(
        settings="the same with the radial mean, of the embeddings the plain one",
        by=quorum(RADIAL),
        **DECOUPLED,
    ),
    "NoLoCo": Method(
        "partners",
        lambda inner: oxs.noloco(inner, **seldom),
        f"outer 0.5 / 0.7; H = {PERIOD}, published 50",
        "Kolehmainen et al. 2025, arXiv 2506.10911",
    ),
    "gossip, ring": Method(
        "partners",
        gossip(oxs.graphs.ring()),
        "two neighbours in every step; published with SGD",
        "Lian et al. 2017, arXiv 1705.09056",
    ),
    "gossip, exponential": Method(
        "partners",
        gossip(oxs.graphs.exponential()),
        "one partner in every step, at 1, 2, 4 in turn; published with SGD",
        "Ying et al. 2021, arXiv 2110.13363",
    ),
    "gossip, random pairs": Method(
        "partners",
        gossip(oxs.graphs.random_pairs()),
        "one partner in every step, drawn",
        "Boyd et al. 2006",
    ),
    "median": Method(
        "robust", replicas(ex.median()), ROBUST, "Yin et al. 2018, arXiv 1803.01498"
    ),
    "trimmed mean": Method(
        "robust",
        replicas(ex.trimmed_mean(1)),
        ROBUST,
        "Yin et al. 2018, arXiv 1803.01498",
    ),
    "Krum": Method(
        "robust", replicas(ex.krum(1)), ROBUST, "Blanchard et al. 2017, NeurIPS"
    ),
    "geometric median": Method(
        "robust",
        replicas(ex.geometric_median()),
        "8 steps of Weiszfeld; " + ROBUST,
        "Pillutla et al. 2019, arXiv 1912.13445",
    ),
    "clipped to the median": Method(
        "robust",
        replicas(ex.clipped("median")),
        "norms clipped to the replicas' median norm",
        "Karimireddy et al. 2020, arXiv 2012.10333",
    ),
    "DiLoCo, clipped": Method(
        "robust",
        diloco(exchange=ex.clipped("median")),
        "contributions clipped to their median norm",
        "Lidin et al. 2026, arXiv 2603.08163",
    ),
    "DiLoCo, median": Method(
        "robust", diloco(exchange=ex.median()), "of contributions, by coordinate", "-"
    ),
}
SWEEP = 1, 5, 10, 25, 50, 100, 200, 500  # and PERIOD, which stands above
METHODS |= {
    f"DiLoCo, H = {period}": Method(
        "period",
        diloco(communication_period=period),
        f"outer Nesterov 0.7 / 0.9, H = {period}",
        DILOCO,
    )
    for period in SWEEP
}
