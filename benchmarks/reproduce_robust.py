"""Reproduction: replicas that lie, and what each robust rule makes of them.

python benchmarks/reproduce_robust.py            # minutes on two cores
python benchmarks/reproduce_robust.py --quick
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Line, Panel, each, listed, reproduce
from reproduce_peers import WORKERS, accuracy_of, initial, loss_of, percent, split

import optx_sync as oxs

RULES = {
    "mean": oxs.exchange.all_reduce(),
    'clipped("median")': oxs.exchange.clipped("median"),
    "geometric_median()": oxs.exchange.geometric_median(),
    "krum(2)": oxs.exchange.krum(2),
    "trimmed_mean(2)": oxs.exchange.trimmed_mean(2),
    "median()": oxs.exchange.median(),
    "sign_majority()": oxs.exchange.sign_majority(),
}
FULL = {"steps": 640, "seeds": 3, "rules": tuple(RULES)}
SHORT = {"steps": 24, "seeds": 2, "rules": ("mean", 'clipped("median")', "median()")}
LIES = ((0, 1.0), (1, -10.0), (2, -10.0), (1, 1e6))  # how many, times their gradient
NONE, ONE, TWO, SPIKE = range(len(LIES))


@functools.cache
def train(name: str):
    """(test images, batches, start, lies) -> (accuracy, how often outliers)."""
    exchange, rate = RULES[name], 0.003 if name == "sign_majority()" else 0.3
    tx = oxs.cross_shard(optax.sgd(rate), "data", exchange=exchange)

    def step(params, state, rows, lie):
        grads = jax.grad(loss_of)(params, rows)
        grads = jax.tree.map(lambda g: g * lie, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(test, rows, params, lies):
        mapped: Any = jax.vmap(step, axis_name="data")
        carry = oxs.stack((params, tx.init(params)), WORKERS)
        (params, state), _ = jax.lax.scan(
            lambda carry, rows: (mapped(*carry, rows, lies), None), carry, rows
        )
        counted = jnp.zeros(WORKERS)
        if exchange.outlier is not None:
            counted = oxs.metrics(state).outliers / len(rows)
        return accuracy_of(oxs.unstack(params), test), counted

    every_lie = jax.vmap(run, (None, None, None, 0))
    return jax.jit(jax.vmap(every_lie, (0, 0, 0, None)))


def study(page, settings):
    steps, seeds = settings["steps"], range(settings["seeds"])
    rules = settings["rules"]
    page.text("seeds", **settings)
    starts = jax.tree.map(lambda *x: jnp.stack(x), *map(initial, seeds))
    lies = np.ones((len(LIES), WORKERS), np.float32)
    for place, (many, times) in enumerate(LIES):
        lies[place, :many] = times

    def one(cell):
        name, by_label = cell
        drawn = [split(seed, by_label, steps) for seed in seeds]
        test, rows = (jnp.asarray(np.stack(x)) for x in zip(*drawn, strict=True))
        return tuple(map(np.asarray, train(name)(test, rows, starts, lies)))

    cells = [(name, by_label) for by_label in (False, True) for name in rules]
    every = each("training", one, cells)
    found = {cell: accuracy for cell, (accuracy, _) in every.items()}  # [seed, lie]
    for by_label, key in ((False, "shuffled"), (True, "sorted")):
        rows = [[name, *map(percent, found[name, by_label].T)] for name in rules]
        page.table(key, rows)
    counted = {name: every[name, False][1] for name in rules}  # [seed, lie, replica]
    counts = [name for name in rules if RULES[name].outlier is not None]
    rows = []
    for name in counts:
        of = counted[name]
        kinds = of[:, NONE].max(1), of[:, ONE, 0], of[:, ONE, 1:].max(1)
        rows.append([name, *map(percent, (*kinds, of[:, SPIKE, 0]))])
    page.table("outliers", rows)
    robust = [name for name in rules if name != "mean"]
    points: Any = {cell: 100 * accuracy.mean(0) for cell, accuracy in found.items()}

    def said(values):
        return listed(robust, values, "{} {:.1f}")

    of_mean = points["mean", False]
    one, spike = of_mean[[ONE, SPIKE]]
    page.criterion("mean", max(one, spike) < 25, f"{one:.1f} and {spike:.1f} %")
    worst = [min(points[name, False][[ONE, SPIKE]]) for name in robust]
    lost = [points[n, False][NONE] - w for n, w in zip(robust, worst, strict=True)]
    page.criterion("stands", max(lost) <= 2, f"points lost: {said(lost)}")
    cost = [of_mean[NONE] - points[n, False][NONE] for n in robust]
    page.criterion("free", max(cost) <= 1, f"points lost: {said(cost)}")
    price = [points["mean", True][NONE] - points[n, True][NONE] for n in robust]
    priced = dict(zip(robust, price, strict=True))
    page.criterion("norm", priced['clipped("median")'] <= 1.5, f"lost: {said(price)}")
    page.criterion("coordinate", priced["median()"] >= 10, f"lost: {said(price)}")
    named = [name for name in counts if name != "sign_majority()"]
    spikes = [100 * counted[name][:, SPIKE, 0].min() for name in named]
    page.criterion("found", min(spikes) == 100, f"in {min(spikes):.1f} % at least")
    panels, many = [], "replicas of 8 that send -10 g"
    for by_label, title in ((False, "shuffled"), (True, "sorted by label")):
        lines = [Line(n, (0, 1, 2), found[n, by_label][:, :3]) for n in rules[:6]]
        panels.append(Panel(many, "accuracy", lines, title, ylim=(0, 1)))
    page.picture(panels)
    kept = {f"{n}, {b}": accuracy for (n, b), accuracy in found.items()}
    page.data(accuracy=kept, outliers={n: counted[n] for n in counts})


if __name__ == "__main__":
    reproduce("reproduce_robust", __doc__, study, FULL, SHORT)
