"""Loss against time where one worker is slow and workers die: quorum, one by one, all.

python benchmarks/reproduce_decoupled.py            # two minutes on two cores
python benchmarks/reproduce_decoupled.py --quick
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import accuracy_of, drawing, initial, loss_of, split
from pictures import Line, Panel
from report import grid, of_seeds, percent, reproduce

import optx_sync as oxs
from optx_sync.runtime import one, quorum
from optx_sync.simulate import Kind

SECONDS = (0.1, 0.1, 0.1, 0.4)  # of a step of each worker
EVERY, AWAY = 10.0, 3.0  # seconds from death to death, and until one is back
PERIOD, PARTS, DELAY, BATCH = 20, 2, 2, 32
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
QUORUM, ONE, LOCKSTEP = "quorum 3 of 4, grace 1", "one by one, delayed", "lockstep"
WAYS: dict[str, Any] = {
    QUORUM: {
        "meet": quorum(3, grace=1.0),
        "delay": DELAY,
        "rule": oxs.rules.diloco(NESTEROV),
        "weigh": lambda at: at.tokens**2 / at.steps,
    },
    ONE: {
        "meet": one(),
        "delay": DELAY,
        "rule": oxs.rules.diloco(oxs.outer.delayed_nesterov(0.7, 0.9)),
    },
    LOCKSTEP: {"meet": quorum(4), "rule": oxs.rules.diloco(NESTEROV)},
}
FULL = {"until": 200.0, "seeds": 3, "rates": (0.1, 0.3), "target": 0.1}
SHORT = {"until": 12.0, "seeds": 1, "rates": (0.3,), "target": 2.0}
POINTS = 100  # of a curve


def deaths(seed, until):
    """One of the workers dies every so often, and is back soon."""
    rng = np.random.default_rng(seed)
    times = np.arange(EVERY, until, EVERY)
    dying = rng.integers(len(SECONDS), size=len(times))
    return [(int(w), t, t + AWAY) for w, t in zip(dying, times, strict=True)]


def train(way, seed, rates, until):
    """Of each rate the center's losses and accuracy; what the clock says of all."""
    options, clocks = dict(WAYS[way]), []
    rule, start = options.pop("rule"), initial(seed)
    test, rows = map(jnp.asarray, split(seed))

    @jax.jit
    @jax.vmap
    def of_rate(rate):
        run = oxs.simulate.decoupled(
            optax.sgd(rate),
            rule,
            start,
            drawing(seed, rows, BATCH),
            SECONDS,
            until=until,
            communication_period=PERIOD,
            fragments=PARTS,
            failures=deaths(seed, until),
            record=10,
            **options,
        )
        clocks.append(run.timeline)
        # The last one that was kept until each second.
        at = np.searchsorted(run.seconds, until * np.arange(1, POINTS + 1) / POINTS) - 1
        centers = jax.tree.map(lambda x: x[np.maximum(at, 0)], run.center)
        return {
            "curve": jax.lax.map(lambda center: loss_of(center, rows), centers),
            "loss": loss_of(run.final.center, rows),
            "accuracy": accuracy_of(run.final.center, test),
        }

    found = jax.device_get(of_rate(np.float32(rates)))
    line = clocks[0]
    late, joined = len(line.of(Kind.LATE)), len(line.of(Kind.JOIN))
    return found | {
        "steps": len(line.workers),
        "meetings": len(line.of(Kind.CLOSE)),
        "participation": line.participation,
        "late": late / max(late + joined, 1),
        "kept": line.goodput,
    }


def study(page, settings):
    """Train everything, and write down what was found."""
    until, rates = settings["until"], settings["rates"]

    def of_way(way, seed):
        return train(way, seed, rates, until)

    found = grid("Training", of_way, (WAYS, range(settings["seeds"])))
    times = until * np.arange(1, POINTS + 1) / POINTS
    rows, clocks = [], []
    for i, way in enumerate(WAYS):
        for j, rate in enumerate(rates):
            curves, ends = found["curve"][i, :, j], found["loss"][i, :, j]
            below = [times[curve <= settings["target"]][:1] for curve in curves]
            reached = all(len(x) for x in below)
            then = of_seeds(np.concatenate(below), ".0f") if reached else "not reached"
            quarter, half = curves[:, POINTS // 4 - 1], curves[:, POINTS // 2 - 1]
            losses = [of_seeds(x, ".2g") for x in (quarter, half, ends)]
            accuracy = percent(found["accuracy"][i, :, j])
            rows.append([way, f"{rate:g}", *losses, then, accuracy])
        counts = [of_seeds(found[name][i], ".0f") for name in ("steps", "meetings")]
        names = "kept", "participation", "late"
        clocks.append([way, *counts, *(percent(found[name][i]) for name in names)])
    page.table("losses", rows, quarter=until / 4, half=until / 2, until=until,
               target=settings["target"])  # fmt: skip
    page.table("clocks", clocks)
    panels = [
        Panel(
            "virtual seconds",
            "training loss",
            [
                Line(way, times, found["curve"][i, :, j], "-")
                for i, way in enumerate(WAYS)
            ],
            f"inner rate {rate:g}",
            "y",
        )
        for j, rate in enumerate(rates)
    ]
    page.picture(panels)
    page.data(settings=settings, ways=list(WAYS), found=found)


if __name__ == "__main__":
    values = {"seconds": SECONDS, "every": EVERY, "away": AWAY, "delay": DELAY}
    values |= {"period": PERIOD, "parts": PARTS, "batch": BATCH}
    reproduce("reproduce_decoupled", __doc__, study, FULL, SHORT, **values)
