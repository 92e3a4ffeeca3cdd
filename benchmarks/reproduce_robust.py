"""Reproduction: replicas that lie, and what each robust rule makes of them.

python benchmarks/reproduce_robust.py            # minutes on two cores
python benchmarks/reproduce_robust.py --quick
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import begun, update
from digits import PARTS, WORKERS, accuracy_of, loss_of, train_all
from pictures import Line, Panel
from report import percent, reproduce
from training import AXIS, workers_step

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


def grad_of(params, batch):
    """The gradient of these images as a replica tells it."""
    rows, lie = batch
    return jax.tree.map(lambda g: g * lie, jax.grad(loss_of)(params, rows))


@functools.cache
def train(name):
    """Accuracy [seed, lie], and how often who was an outlier [seed, lie, replica]."""
    exchange, rate = RULES[name], 0.003 if name == "sign_majority()" else 0.3
    tx = oxs.cross_shard(optax.sgd(rate), AXIS, exchange=exchange)

    def run(test, rows, params, lies):
        step = workers_step(tx, params, grad_of, update)
        carry = begun(tx, params, WORKERS)
        (params, state), _ = jax.lax.scan(
            lambda carry, rows: (step(*carry, (rows, lies)), None), carry, rows
        )
        counted = jnp.zeros(WORKERS)
        if exchange.outlier is not None:
            counted = oxs.metrics(state).outliers / len(rows)
        return accuracy_of(oxs.by_hand.first(params), test), counted

    lies = np.ones((len(LIES), WORKERS), np.float32)
    for place, (many, times) in enumerate(LIES):
        lies[place, :many] = times
    every_lie = jax.vmap(run, (None, None, None, 0))
    every_seed = jax.jit(jax.vmap(every_lie, (0, 0, 0, None)))
    return lambda *drawn: every_seed(*drawn, lies)


def study(page, settings):
    page.text("seeds", **settings)
    rules = settings["rules"]
    every = train_all(rules, train, settings["steps"], settings["seeds"])
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
    panels, many = [], "replicas of 8 that send -10 times their gradient"
    for by_label, title in PARTS.items():
        lines = [Line(n, (0, 1, 2), found[n, by_label][:, :3]) for n in rules[:6]]
        panels.append(Panel(many, "accuracy", lines, title, ylim=(0, 1)))
    page.picture(panels)
    page.data(accuracy=found, outliers={n: counted[n] for n in counts})


if __name__ == "__main__":
    reproduce("reproduce_robust", __doc__, study, FULL, SHORT)
