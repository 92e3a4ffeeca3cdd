"""Reproduction: an outer momentum for workers that reach the center one by one.

python benchmarks/reproduce_delayed_nesterov.py           # a minute on two cores
python benchmarks/reproduce_delayed_nesterov.py --quick
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import accuracy_of, drawing, initial, loss_of, split
from pictures import Line, Panel
from report import each, of_seeds, percent, reproduce

import optx_sync as oxs

SECONDS = (0.58, 0.75, 1.51, 3.33)  # of a step of each worker, as published
PERIOD, BATCH = 20, 32
PUBLISHED = (0.7, 0.9)  # rate and momentum of the synchronous run
WORKERS = len(SECONDS)
# Rates of the workers' own SGD, without momentum.
FULL = {"rounds": 318, "seeds": 4, "rates": (0.3, 1.0)}
SHORT = {"rounds": 6, "seeds": 1, "rates": (0.3,)}
NESTEROV, SMALL = "Nesterov 0.7/0.9", "Nesterov 0.07/0.9"
PLAIN, DELAYED, LATE = "SGD 1.0", "delayed 0.7/0.9", "by staleness, SGD 1.0"
OUTERS: dict[str, Any] = {
    NESTEROV: optax.sgd(*PUBLISHED, nesterov=True),
    SMALL: optax.sgd(0.07, PUBLISHED[1], nesterov=True),
    PLAIN: optax.sgd(1.0),
    LATE: optax.sgd(1.0),
    DELAYED: oxs.outer.delayed_nesterov(*PUBLISHED),
}


def order_of(rounds):
    """The worker of each event, until so many rounds are done."""
    steps = range(1, rounds * PERIOD + 1)
    ends = sorted((s * k, w) for w, s in enumerate(SECONDS) for k in steps)
    order = np.array([worker for _, worker in ends], np.int32)
    pushes = [
        (np.cumsum(order == w) % PERIOD == 0) & (order == w) for w in range(WORKERS)
    ]
    return order[: int(np.searchsorted(np.sum(pushes, 0).cumsum(), rounds)) + 1]


@functools.partial(jax.jit, static_argnames=("outer", "events"))
def train(outer, events, rate, seed, start, test, rows):
    """Losses and accuracies of the center, at some events and at the end."""
    order = jnp.asarray(order_of(events))
    run = oxs.simulate.asynchronous(
        optax.sgd(rate),
        oxs.rules.diloco(OUTERS[outer]),
        start,
        drawing(seed, rows, BATCH),
        order,
        num_workers=WORKERS,
        communication_period=PERIOD,
        weigh=(lambda at: (1 + at.staleness) ** -0.5) if outer == LATE else None,
        record=max(len(order) // 40, 1),
    )
    return {
        "curve": jax.lax.map(lambda center: loss_of(center, rows), run.center),
        "rounds": run.global_step[run.events],
        "loss": loss_of(run.final.center, rows),
        "accuracy": accuracy_of(run.final.center, test),
    }


def study(page, settings):
    """Train everything, and write down what was found."""
    rounds, rates = settings["rounds"], settings["rates"]

    def all_seeds(cell):
        runs = [
            train(cell[0], rounds, cell[1], seed, initial(seed), *split(seed))
            for seed in range(settings["seeds"])
        ]
        return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(runs))

    found = each("Training", all_seeds, itertools.product(OUTERS, rates))
    rows = []
    for (name, rate), runs in found.items():
        accuracy = percent(runs["accuracy"])
        rows.append((name, f"{rate:g}", of_seeds(runs["loss"], ".2g"), accuracy))
    page.table("outcomes", rows)
    panels = []
    for rate in rates:
        of = {name: found[name, rate] for name in OUTERS}
        loss = {name: runs["loss"] for name, runs in of.items()}
        # What diverges may end as a NaN, which is no small loss.
        times = np.nan_to_num(loss[NESTEROV], nan=np.inf) / loss[DELAYED]
        part = np.max(loss[DELAYED] / loss[PLAIN])
        page.text("beside", rate=rate, times=np.min(times), part=part)
        lines = [
            Line(name, runs["rounds"][0], np.maximum(runs["curve"], 1e-6), "-")
            for name, runs in of.items()
        ]
        axes = "rounds of all workers", "training loss", lines
        panels.append(Panel(*axes, f"inner rate {rate:g}", "y", (1e-5, 1e2)))
    page.picture(panels)
    kept = {n: {rate: found[n, rate] for rate in rates} for n in OUTERS}
    page.data(settings=settings, found=kept)


if __name__ == "__main__":
    reproduce("reproduce_delayed_nesterov", __doc__, study, FULL, SHORT)
