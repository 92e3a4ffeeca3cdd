"""Reproduction: an outer momentum for workers that reach the center one by one.

python benchmarks/reproduce_delayed_nesterov.py           # a minute on two cores
python benchmarks/reproduce_delayed_nesterov.py --quick
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import LABELS, accuracy_of, initial, loss_of
from report import Line, Panel, each, of_seeds, reproduce

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

SECONDS = (0.58, 0.75, 1.51, 3.33)  # of a step of each worker, as published
PERIOD, BATCH, TEST = 20, 32, 360
PUBLISHED = (0.7, 0.9)  # rate and momentum of the synchronous run
WORKERS = len(SECONDS)
# Rates of the workers' own SGD, without momentum.
FULL = {"rounds": 318, "seeds": 4, "rates": (0.3, 1.0)}
SHORT = {"rounds": 12, "seeds": 2, "rates": (0.3,)}
NESTEROV, SMALL = "Nesterov 0.7/0.9", "Nesterov 0.07/0.9"
PLAIN, DELAYED, LATE = "SGD 1.0", "delayed 0.7/0.9", "by staleness, SGD 1.0"
OUTERS: dict[str, Any] = {
    NESTEROV: optax.sgd(*PUBLISHED, nesterov=True),
    SMALL: optax.sgd(0.07, PUBLISHED[1], nesterov=True),
    PLAIN: optax.sgd(1.0),
    LATE: optax.sgd(1.0),
    DELAYED: oxs.delayed_nesterov(*PUBLISHED),
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


def split(seed):
    """Images to train on, and to test on."""
    rows = np.random.default_rng(seed).permutation(len(LABELS)).astype(np.int32)
    return rows[TEST:], rows[:TEST]


@functools.partial(jax.jit, static_argnames=("outer", "events"))
def train(outer, events, rate, seed, start, rows, test):
    """Losses and accuracies of the center, at some events and at the end."""
    order = jnp.asarray(order_of(events))

    def grad_fn(worker, params, event):
        key = jax.random.fold_in(jax.random.key(seed), event)
        drawn = jax.random.choice(key, rows, (BATCH,))
        return jax.grad(loss_of)(params, drawn)

    run = oxs.simulate.asynchronous(
        optax.sgd(rate),
        oxs.diloco_rule(OUTERS[outer]),
        start,
        grad_fn,
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


def runs_of(outer, settings):
    """{rate: the runs of all seeds} of one outer optimizer."""
    rounds, seeds, found = settings["rounds"], range(settings["seeds"]), {}
    for rate in settings["rates"]:
        runs = [train(outer, rounds, rate, s, initial(s), *split(s)) for s in seeds]
        found[rate] = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(runs))
    return found


def study(page, settings):
    """Train everything, and write down what was found."""
    found = each("Training", functools.partial(runs_of, settings=settings), OUTERS)
    rows = []
    for name, of_rates in found.items():
        for rate, runs in of_rates.items():
            loss, accuracy = runs["loss"], 100 * runs["accuracy"]
            ends = of_seeds(loss, ".2g"), of_seeds(accuracy, ".1f")
            rows.append((name, f"{rate:g}", *ends))
    page.table("outcomes", rows)
    for rate in settings["rates"]:
        bad, good, small = (found[name][rate] for name in (NESTEROV, DELAYED, SMALL))
        # What diverges may end as a NaN, which is no small loss.
        broken = np.nan_to_num(bad["loss"], nan=np.inf)
        times = broken / good["loss"]
        least, plain = np.min(times), found[PLAIN][rate]
        page.criterion("breaks", bool(least > 100), f"{least:.3g}", rate=rate)
        worst = float(np.max(good["loss"] / plain["loss"]))
        page.criterion("delayed", worst < 1, f"{worst:.2g} of it at most", rate=rate)
        points = 100 * np.min(good["accuracy"] - small["accuracy"])
        said = f"{points:+.1f} points at least"
        page.criterion("accuracy", points > -1, said, rate=rate)
    kept = {n: {str(rate): r for rate, r in of.items()} for n, of in found.items()}
    page.data(settings=settings, found=kept)
    panels = []
    for rate in settings["rates"]:
        lines = []
        for name, runs in found.items():
            curve = np.maximum(runs[rate]["curve"], 1e-6)
            lines.append(Line(name, runs[rate]["rounds"][0], curve, "-"))
        axes = "rounds of all workers", "training loss of the center", lines
        panels.append(Panel(*axes, f"inner rate {rate:g}", "y", (1e-5, 1e2)))
    page.picture(panels)


if __name__ == "__main__":
    values = {
        key: lambda settings, key=key: settings[key] for key in ("seeds", "rounds")
    }
    reproduce("reproduce_delayed_nesterov", __doc__, study, FULL, SHORT, **values)
