"""A language model of characters, and four workers that train it together.

What `reproduce_diloco`, `reproduce_few_bytes` and `reproduce_streaming` share. The text
comes with Python: the help on its topics.
"""

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from by_hand import AXIS, begun, update
from pictures import Line, Panel
from report import of_seeds
from training import collectives_of, workers_step

import optx_sync as oxs

report.on_cpu(threads=1)

CONTEXT, EMBEDDING, HIDDEN = 12, 16, 272  # characters seen, and the layers' widths
WORKERS, BATCH = 4, 32  # windows of text per worker and step
COMMON_RATE = 2e-3


class Method(NamedTuple):
    """How workers agree: `wrap` takes each worker's own optimizer."""

    wrap: Callable
    period: int = 0  # steps between rounds; 0: there is no center
    workers: int = WORKERS


def meeting(period, wrap=oxs.diloco, **more):
    """The method that has a center, which workers reach every `period` steps."""
    given = {"axis_name": AXIS, "communication_period": period, **more}
    return Method(functools.partial(wrap, **given), period)


class Text(NamedTuple):
    """The help texts: a tenth of their blocks is held out, for two purposes in turn."""

    whole: str
    kept: str  # without paragraphs that come again
    alphabet: Any
    train: Any  # characters as numbers, in one array
    validation: Any  # the same in blocks
    test: Any


@functools.cache
def help_texts() -> Text:
    """What comes with Python."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    kept = "\n\n".join(dict.fromkeys(whole.split("\n\n")))
    alphabet, codes = np.unique(list(kept), return_inverse=True)
    blocks = np.array_split(codes.astype(np.int32), 100)
    train = [block for number, block in enumerate(blocks) if number % 10 != 9]
    held_out = blocks[9::20], blocks[19::20]
    return Text(whole, kept, alphabet, np.concatenate(train), *held_out)


def digest(text: str) -> str:
    """What tells one text from another."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def read_text():
    """(facts, training characters, validation windows, test windows), as numbers."""
    whole, kept, alphabet, train, *held_out = help_texts()
    views = functools.partial(
        np.lib.stride_tricks.sliding_window_view, window_shape=CONTEXT + 1
    )
    windows = [np.concatenate(list(map(views, blocks))) for blocks in held_out]
    facts = {"length": len(whole), "sha256": digest(whole), "kept": len(kept)}
    return facts | {"alphabet": len(alphabet)}, train, *windows


def initial(seed):
    """Parameters of the model."""
    normal = np.random.default_rng(seed).standard_normal
    alphabet, width = read_text()[0]["alphabet"], CONTEXT * EMBEDDING
    params = {
        "embedding": normal((alphabet, EMBEDDING)),
        "hidden": normal((width, HIDDEN)) / width**0.5,
        "hidden_bias": np.zeros(HIDDEN),
        "output": normal((HIDDEN, alphabet)) / HIDDEN**0.5,
        "output_bias": np.zeros(alphabet),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def loss_of(params, windows):
    """Nats per character: the last of each window, given those before it."""
    before, after = windows[:, :-1], windows[:, -1]
    inputs = params["embedding"][before].reshape(len(windows), -1)
    hidden = jnp.tanh(inputs @ params["hidden"] + params["hidden_bias"])
    logits = hidden @ params["output"] + params["output_bias"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, after).mean()


def draw_places(steps, seed, iid, workers=WORKERS):
    """Where windows start: [steps, workers, BATCH], the same for every method."""
    workers = max(workers, WORKERS)
    edges = np.linspace(0, len(read_text()[1]), workers + 1).astype(int)[:, None]
    low, high = (0, edges[-1]) if iid else (edges[:-1], edges[1:])
    shape = steps, workers, BATCH
    return np.random.default_rng([seed, 1]).integers(low, high - CONTEXT, shape)


def make_training(method, steps, evaluations):
    """`(rate, seed, iid) -> dict` of losses and rounds; it is compiled once."""
    _, text, *held_out = read_text()
    # A short run, which shows only that it runs, looks at few windows.
    texts = text, *(windows[:: max(1, 1000 // steps)] for windows in held_out)

    @jax.jit
    def train(rate, start, places, text, validation, test):
        tx = method.wrap(optax.adamw(optax.cosine_decay_schedule(rate, steps)))
        step = workers_step(tx, start, jax.grad(loss_of), update)
        carry = begun(tx, start, method.workers)

        def advance(carry, first):
            windows = text[first[..., None] + jnp.arange(CONTEXT + 1)]
            return step(*carry, windows), None

        def evaluated(params, state):
            params = oxs.by_hand.first(params)
            return oxs.center_params(state, start) if method.period else params

        def until_evaluation(carry, places):
            carry = jax.lax.scan(advance, carry, places)[0]
            return carry, loss_of(evaluated(*carry), validation[::4])

        places = places.reshape(evaluations, -1, *places.shape[1:])
        carry, curve = jax.lax.scan(until_evaluation, carry, places)
        center = evaluated(*carry)
        return {
            "curve": curve,
            "validation": loss_of(center, validation),
            "test": loss_of(center, test),
            "rounds": oxs.metrics(carry[1]).rounds if method.period else 0,
        }

    def run(rate, seed, iid):
        number = method.workers
        places = draw_places(steps, seed, iid, number)[:, :number].astype(np.int32)
        return jax.device_get(train(rate, initial(seed), places, *texts))

    return functools.cache(run)


def all_seeds(train, seeds, rate=COMMON_RATE, iid=True):
    """What all seeds leave: the rounds, the mean curve, and the test losses."""
    runs = [train(rate, seed, iid) for seed in range(seeds)]
    (rounds,) = {int(run["rounds"]) for run in runs}
    curve = np.mean([run["curve"] for run in runs], axis=0)
    return {
        "rounds": rounds,
        "curve": curve,
        "test": np.array([run["test"] for run in runs]),
    }


def sent_by(method):
    """The collectives of a worker's step."""
    windows = jax.ShapeDtypeStruct((WORKERS, BATCH, CONTEXT + 1), jnp.int32)
    tx = method.wrap(optax.adamw(COMMON_RATE))
    return collectives_of(tx, initial(0), jax.grad(loss_of), windows)


def bytes_when(rows):
    """(Bytes sent in every step, bytes sent in a round) by these collectives."""
    in_round = sum(row.sent for row in rows if row.conditional)
    return sum(row.sent for row in rows) - in_round, in_round


def percent(losses, than):
    """How much larger they are, in percent: the mean, and all seeds' range."""
    worse = 100 * (losses / than - 1)
    return worse.mean(), of_seeds(worse, "+.2f", " %")


def curves_of(settings, studies, ylim):
    """A panel of the loss against steps."""
    every = settings["steps"] // settings["evaluations"]
    steps = np.arange(every, settings["steps"] + 1, every)
    curves = [Line(n, steps, of["curve"], "-") for n, of in studies.items()]
    return Panel("steps", "validation loss, nats", curves, ylim=ylim)


def against_bytes(lines):
    """A panel of the loss at the end against what was sent, names at the points."""
    sent = f"bytes that each of {WORKERS} workers sent"
    return Panel(sent, "test loss, nats a character", lines, log="x", at_points=True)


def about():
    """What is known of the text, and how many numbers the model has."""
    parameters = sum(map(jnp.size, initial(0).values()))
    return {"facts": read_text()[0], "parameters": parameters}


def reproduce(name, doc, study, full, short):
    """`report.reproduce` with a device for each worker, of a page about the text."""
    jax.config.update("jax_num_cpu_devices", WORKERS)
    report.reproduce(name, doc, study, full, short, **about())
