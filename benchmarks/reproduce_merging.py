"""Reproduction: other merges than the mean, codes of 1 to 4 bits, and bad workers.

python benchmarks/reproduce_merging.py           # half an hour alone on two cores
python benchmarks/reproduce_merging.py --quick   # seconds, shows that it runs
"""

import functools
import itertools
from typing import Any

import characters
import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import AXIS
from characters import WORKERS, Method, percent
from report import Line, Panel, each, of_seeds, processes
from training import on_a_ring

import optx_sync as oxs

PERIOD, BLOCK = 50, 256
ex, fed = oxs.exchange, oxs.exchange.error_feedback
# An embedding has rows that a worker hardly moves: published with a plain mean.
DIRECT = {"direct": lambda path: "embedding" in path or "output" in path}
MERGES: dict[str, Any] = {
    "mean": ex.all_reduce,
    "radial": lambda: ex.radial(**DIRECT),
    "penalised": lambda: ex.penalized(warmup=5),
    "elected": ex.elected,
    "clipped to the median": lambda: ex.clipped("median"),
}
OUT = "mean", "radial", "penalised"  # those whose outer rates are sought
LIES = {"none": 1.0, "poisoned": -10.0, "exploding": 1e3}
WAYS: dict[str, Any] = {
    "plain": lambda code: code,
    "feedback": fed,
    "rotated": lambda code: ex.rotated(code, block=BLOCK),
    "rotated, feedback": lambda code: fed(ex.rotated(code, block=BLOCK)),
}
FULL: Any = {"steps": 1000, "seeds": 3, "rates": (0.2, 0.4, 0.7, 1.0)}
FULL |= {"workers": (1, 2, 4), "merges": OUT, "bits": (1, 2, 3, 4)}
FULL |= {"ways": tuple(WAYS), "bad": tuple(LIES), "under": tuple(MERGES)}
SHORT: Any = {"steps": 100, "seeds": 1, "rates": (0.7,), "workers": (2,)}
SHORT |= {"merges": ("radial",), "bits": (2,), "ways": ("plain",)}
SHORT |= {"bad": ("poisoned",), "under": ("penalised",)}


def outer(rate):
    """The published optimizer of the center."""
    return optax.sgd(rate, 0.9, nesterov=True)


def losses_of(method, steps, seeds):
    """The test losses of all seeds."""
    train = characters.make_training(method, steps, 1)
    return characters.all_seeds(train, seeds)["test"]


def at_rate(merge, workers, rate, steps, seeds):
    """With a merge, so many workers and an outer rate."""
    found = characters.meeting(PERIOD, outer=outer(rate), exchange=MERGES[merge]())
    return losses_of(found._replace(workers=workers), steps, seeds)


def coded(bits, way, rate=0.4):
    """The method whose contributions travel in so many bits."""
    exchange = WAYS[way](ex.quantized(bits=bits, block=BLOCK, code="lloyd"))
    return characters.meeting(PERIOD, outer=outer(rate), exchange=exchange)


def in_bits(bits, way, steps, seeds):
    """With codes of so many bits."""
    return losses_of(coded(bits, way), steps, seeds)


def lying(factor):
    """Multiplies what the first worker moves."""

    def update(updates, state, params=None):
        times = jnp.where(jax.lax.axis_index(AXIS) == 0, factor, 1.0)
        return jax.tree.map(lambda x: times.astype(x.dtype) * x, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def with_a_bad_one(merge, what, steps, seeds):
    """Where one of the workers is not like the others."""
    given = {"axis_name": AXIS, "communication_period": PERIOD}
    given |= {"outer": outer(0.4), "exchange": MERGES[merge]()}

    def wrap(inner):
        return oxs.diloco(optax.chain(inner, lying(LIES[what])), **given)

    return losses_of(Method(wrap, PERIOD), steps, seeds)


def at_point(function, plan, point):
    """The test losses at one point of a grid."""
    return function(*point, **plan)


def everywhere(page, function, plan, *axes):
    """{point: test losses} of a grid, a core a program."""
    at = functools.partial(at_point, function, plan)
    what = function.__name__.replace("_", " ")
    return each(what, at, itertools.product(*axes), processes(page.quick))


def study(page, settings):
    """Train everything, and write down what was found."""
    plan = {key: settings[key] for key in ("steps", "seeds")}
    merges, numbers, rates = (settings[key] for key in ("merges", "workers", "rates"))
    found = everywhere(page, at_rate, plan, merges, numbers, rates)
    rows, panels = [], []
    for number in numbers:
        lines, cells = [], []
        for merge in merges:
            losses = np.array([found[merge, number, rate] for rate in rates])
            means = losses.mean(1)
            best = int(means.argmin())
            cells += [rates[best], of_seeds(losses[best], ".3f")]
            lines.append(Line(merge, rates, losses.T))
        rows.append((number, *cells))
        panels.append(Panel("outer rate", f"{number} workers, test loss", lines))
    page.table("rates", rows, merges=" | ".join(f"{m} | loss" for m in merges))
    page.picture(panels, columns=3)
    exact = losses_of(
        characters.meeting(PERIOD, outer=outer(0.4), exchange=ex.all_reduce()), **plan
    )
    whole = on_a_ring(characters.sent_by(characters.meeting(PERIOD)), WORKERS)
    rows = []
    losses = everywhere(page, in_bits, plan, settings["bits"], settings["ways"])
    for bits in settings["bits"]:
        sent = on_a_ring(characters.sent_by(coded(bits, "plain")), WORKERS)
        over = [percent(losses[bits, way], exact)[1] for way in settings["ways"]]
        rows.append((bits, f"{sent / whole:.3f}", *over))
    page.table("bits", rows, ways=" | ".join(settings["ways"]))
    losses = everywhere(page, with_a_bad_one, plan, settings["under"], settings["bad"])
    rows = [
        (merge, *(of_seeds(losses[merge, bad], ".3f") for bad in settings["bad"]))
        for merge in settings["under"]
    ]
    page.table("bad", rows, bad=" | ".join(settings["bad"]))
    page.data(settings=settings)


if __name__ == "__main__":
    characters.reproduce("reproduce_merging", __doc__, study, FULL, SHORT)
