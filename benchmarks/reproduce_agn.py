"""Reproduction: accumulated gradient normalization against elastic averaging, DOWNPOUR.

    python benchmarks/reproduce_agn.py            # some minutes on two cores
    python benchmarks/reproduce_agn.py --quick

Hermans, Spanakis and Moeckel (2017) train with n asynchronous workers that meet a
center every lambda steps, on a grid of n and lambda, with a fixed amount of data for
all workers together. Here the grid is smaller, the data are scikit-learn's digits, and
the workers are simulated: accuracies stand against samples and commits, never against a
clock. The criteria are what the paper's story predicts: AGN bears more workers than
elastic averaging does, and plain DOWNPOUR bears few.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from report import Report, arguments
from rich.progress import track
from sklearn.datasets import load_digits

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

BATCH, LEARNING_RATE, MOVING_RATE, TEST, POINTS = 32, 1e-3, 0.05, 360, 100
FULL = {"workers": (10, 20, 40), "periods": (10, 20, 40), "batches": 16_000, "seeds": 5}
SHORT = {"workers": (10, 40), "periods": (10, 40), "batches": 1600, "seeds": 2}
RULES = {
    # The paper's form: the commit is the mean of the worker's own updates.
    "AGN": oxs.agn_rule(None, accumulate="updates"),
    "AEASGD": oxs.elastic_rule(moving_rate=MOVING_RATE, rho=0.0),
    # Dean et al., 2012: the commit is their sum.
    "DOWNPOUR": oxs.CenterRule(
        contribute=lambda own, center, at: own.accumulated, accumulate="updates"
    ),
}
AGN, AEASGD, DOWNPOUR = range(3)
COLOURS = ("#4477AA", "#EE6677", "#228833")
# Of n workers: AGN's and AEASGD's training accuracy, and then validation accuracy, in
# percent: means over lambda = 10, 15 ... 40 from the tables of Hermans' thesis (MNIST).
PUBLISHED = {
    10: (99.15, 98.89, 98.49, 98.65),
    20: (99.24, 98.04, 98.43, 98.38),
    40: (97.65, 96.60, 97.79, 97.73),
}
ABOUT = f"""
Hermans, Spanakis, Moeckel, Accumulated Gradient Normalization, 2017.

Asynchronous workers that are **simulated**: `oxs.simulate.asynchronous` replays their
steps one by one on one device, with real parameters and gradients. There is no clock:
curves stand against the images that all workers have seen together, or against commits.

Digits (1,437 images to train on, {TEST} to test on, another split for every seed), a
network of 64-64-10, batches of {BATCH} drawn from all training images, as many batches
in all whatever the number of workers. Every worker's optimizer is Adam at
{LEARNING_RATE}, elastic averaging moves by {MOVING_RATE}: both are the paper's fixed
settings, **nothing was tuned here**. AGN is the paper's form, whose commit is the mean
of the worker's updates; DOWNPOUR's is their sum. The accuracy is that of the center.

Two orders of events. **Commits in random order**, to which the criteria belong: who
commits next is drawn afresh, so a commit may be very fresh or very stale. **Steps in
random order**: who steps next is drawn, so all workers commit about equally often and
most commits are about n - 1 commits of others old, which is the first order's mean too.

For comparison, from the thesis (MNIST, a cluster): DOWNPOUR converges with 10 workers
and diverges with 20; AGN is at its worst, below AEASGD, with n = 40 and lambda = 10.

Seeds differ in split, initial parameters, batches and order; the methods share these.
Means over seeds, with the lowest and the highest; staleness is the median of one seed's
commits, with 5 and 95 %. One test image is {100 / TEST:.2f} points.
"""

images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])


def commits_in_random_order(rng, workers, period, events):
    """Each commit's worker is drawn; its steps can stand together: nobody sees them."""
    return np.repeat(rng.integers(0, workers, events // period), period)


def steps_in_random_order(rng, workers, period, events):
    """Each step's worker is drawn."""
    return rng.integers(0, workers, events)


ORDERS = {"commits": commits_in_random_order, "steps": steps_in_random_order}


def staleness_of(schedule, period):
    """Of each commit: how many there were since its worker took the center."""
    steps, taken, found = {}, {}, []
    for worker in schedule.tolist():
        steps[worker] = steps.get(worker, 0) + 1
        if steps[worker] % period == 0:
            found.append(len(found) - taken.get(worker, 0))
            taken[worker] = len(found)
    return np.array(found)


def loss_of(params, rows):
    logits = network.apply(params, images[rows])
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels[rows]).mean()


def accuracy_of(params, rows):
    return (network.apply(params, images[rows]).argmax(-1) == labels[rows]).mean()


@functools.partial(jax.jit, static_argnames=("method", "workers", "every"))
def run(method, workers, every, period, initial, schedule, batches, train, test):
    """Commits and accuracies [points + 1] of the center, and its last parameters."""
    record = oxs.simulate.asynchronous(
        optax.adam(LEARNING_RATE),
        RULES[method],
        initial,
        lambda worker, params, event: jax.grad(loss_of)(params, batches[event]),
        schedule,
        num_workers=workers,
        communication_period=lambda step: period,  # traced: one program for all
        record=every,
    )
    first = jax.tree.map(lambda x: x[None], initial)
    centers = jax.tree.map(lambda *x: jnp.concatenate(x), first, record.center)
    of_train, of_test = (
        jax.vmap(accuracy_of, (0, None))(centers, rows) for rows in (train, test)
    )
    commits = jnp.append(0, record.global_step[every - 1 :: every])
    return commits, of_train, of_test, record.final.center


def make(seed, order, workers, period, events):
    """What the methods share: the arguments of `run` that a seed decides."""
    rng = np.random.default_rng(seed)
    test, train = np.split(rng.permutation(len(labels)), [TEST])
    batches = rng.choice(train, (events, BATCH))
    initial = network.init(jax.random.key(seed), images[:1])
    schedule = ORDERS[order](rng, workers, period, events).astype(np.int32)
    return initial, schedule, batches, train, test


def simulate(workers, periods, batches, seeds):
    """Commits, train and test accuracy: [order, n, period, method, seed, point]."""
    size = len(ORDERS), len(workers), len(periods), len(RULES), seeds
    commits, train, test = (np.empty((*size, POINTS + 1)) for _ in range(3))

    def one(cell):
        order, w, p, m, seed = cell
        shared = make(seed, list(ORDERS)[order], workers[w], periods[p], batches)
        # Workers that a schedule does not name do nothing: one program for all n.
        setting = list(RULES)[m], max(workers), batches // POINTS, periods[p]
        commits[cell], train[cell], test[cell] = run(*setting, *shared)[:3]

    cells = list(np.ndindex(*size))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a run keeps one core busy
        for _ in track(pool.map(one, cells), "simulating", total=len(cells)):
            pass
    return commits, train, test


def areas_of(curves):
    """Areas under curves [..., point], whose points are equally far apart, by width."""
    return np.trapezoid(curves, axis=-1) / (curves.shape[-1] - 1)


def against_commits(commits, curves):
    """The curves against as many commits as the longest period makes: [..., point]."""
    over = np.linspace(0, commits[..., -1].min(), curves.shape[-1])
    flat = zip(
        commits.reshape(-1, over.size), curves.reshape(-1, over.size), strict=True
    )
    return np.stack([np.interp(over, *pair) for pair in flat]).reshape(curves.shape)


def shown(values, digits=1, scale=100):
    """The mean over the seeds (the lowest to the highest)."""
    low, mean, high = (scale * f(values) for f in (np.min, np.mean, np.max))
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def equal_at_period_one(workers, batches):
    """Whether AGN and DOWNPOUR end at the same bits if they commit in every step."""
    shared = make(0, "steps", workers, 1, batches)
    ends = [
        run(method, workers, batches // POINTS, 1, *shared)[-1]
        for method in ("AGN", "DOWNPOUR")
    ]
    return all(map(np.array_equal, *map(jax.tree.leaves, ends)))


def judge(report, workers, periods, batches, train, test):
    """The criteria; the arrays are those of commits in random order."""
    few, many = workers[0], workers[-1]
    gaps = test[:, :, AGN, :, -1] - test[:, :, AEASGD, :, -1]
    for p, period in enumerate(periods):
        if period > 20:  # Short runs undertrain with AGN, whose commits are / lambda.
            continue
        means = gaps[:, p].mean(-1)
        found = (
            f"{shown(g, 2)} at n = {n}"
            for n, g in zip(workers, gaps[:, p], strict=True)
        )
        report.criterion(
            f"lambda = {period}: AGN's test accuracy is 1 point or more above "
            f"AEASGD's at n = {many}, and the gap grows with n",
            means[-1] >= 0.01 and all(np.diff(means) > 0),
            f"points: {', '.join(found)}",
        )
    falls = train[0, 0, :, :, -1] - train[-1, 0, :, :, -1]
    report.criterion(
        f"lambda = {periods[0]}: from n = {few} to {many} AEASGD's training accuracy "
        "falls by 2 points or more, AGN's by less than 1",
        falls[AEASGD].mean() >= 0.02 and falls[AGN].mean() < 0.01,
        f"points: AEASGD {shown(falls[AEASGD], 2)}, AGN {shown(falls[AGN], 2)}",
    )
    of_train, of_test = (
        areas_of(curves[-1, -1, DOWNPOUR]) / areas_of(curves[-1, -1, AGN])
        for curves in (train, test)
    )
    report.criterion(
        f"n = {many}, lambda = {periods[-1]}: the area under DOWNPOUR's accuracy, "
        "train and test, is less than 0.9 of AGN's",
        max(of_train.mean(), of_test.mean()) < 0.9,
        f"train {shown(of_train, 3, 1)}, test {shown(of_test, 3, 1)}",
    )
    report.criterion(
        "with lambda = 1 AGN and DOWNPOUR are the same, bit for bit",
        equal_at_period_one(many, batches),
        f"the centers of {many} workers, compared after {batches:,} batches",
    )


def tabulate_accuracies(report, workers, periods, batches, both):
    """Accuracies at the end: [order, n, period, train or test, method, seed, point]."""
    last = both[..., -1]
    columns = [f"{method}, {what}" for what in ("train", "test") for method in RULES]
    gaps = last[..., 1, AGN, :] - last[..., 1, AEASGD, :]
    for o, order in enumerate(ORDERS):
        rows = []
        for w, p in np.ndindex(len(workers), len(periods)):
            schedule = make(0, order, workers[w], periods[p], batches)[1]
            stale = np.quantile(staleness_of(schedule, periods[p]), [0.5, 0.05, 0.95])
            row = [
                f"{workers[w]}, {periods[p]}",
                *map(shown, np.concatenate(last[o, w, p])),
            ]
            age = "{:.0f} ({:.0f} to {:.0f})".format(*stale)
            rows.append([*row, shown(gaps[o, w, p], 2), age])
        titles = ["n, lambda", *columns, "AGN - AEASGD, test", "staleness"]
        report.table(
            f"Accuracy of the center in percent, {order} in random order", titles, rows
        )
    named = zip(periods, gaps[1, -1], strict=True)
    report.text(
        "The criteria do not speak of steps in random order. There, with "
        f"n = {workers[-1]}, AGN's test accuracy less AEASGD's is, in points, "
        + ", ".join(f"{shown(gap, 2)} at lambda = {period}" for period, gap in named)
        + "."
    )
    rows = []
    for w, n in enumerate(workers):
        means = last[0, w, :, :, :2].mean((0, 3)).flatten()
        rows.append([f"{n}, the paper's", *(f"{value:.2f}" for value in PUBLISHED[n])])
        rows.append([f"{n}, here", *(f"{100 * value:.2f}" for value in means)])
    report.table(
        "Means over lambda in percent: MNIST, train and validation, and digits here",
        ["n", *(columns[i] for i in (0, 1, 3, 4))],
        rows,
    )


def tabulate_efficiencies(report, workers, periods, commits, train, test):
    """Ratios of areas; the arrays are those of commits in random order."""
    on_train, on_test = areas_of(train), areas_of(test)  # [n, period, method, seed]
    by_commits = areas_of(against_commits(commits, test))
    rows = []
    for cell in np.ndindex(len(workers), len(periods)):
        ratios = [
            on_train[cell][AGN] / on_train[cell][AEASGD],
            on_test[cell][AGN] / on_test[cell][AEASGD],
            on_test[cell][DOWNPOUR] / on_test[cell][AGN],
            by_commits[cell][AGN] / by_commits[cell][AEASGD],
        ]
        areas = (f"{area:.3f}" for area in by_commits[cell].mean(-1))
        name = f"{workers[cell[0]]}, {periods[cell[1]]}"
        rows.append([name, *(shown(ratio, 3, 1) for ratio in ratios), *areas])
    report.table(
        "Temporal efficiency, ratios of areas under accuracy; commits in random order",
        [
            "n, lambda",
            "AGN / AEASGD by samples, train",
            "the same, test",
            "DOWNPOUR / AGN by samples, test",
            f"AGN / AEASGD over the first {commits[..., -1].min():.0f} commits, test",
            *(f"area of {method} over these" for method in RULES),
        ],
        rows,
    )
    won = on_train[..., AGN, :].mean(-1) >= on_train[..., AEASGD, :].mean(-1)
    report.text(
        f"AGN has the larger area under training accuracy in {won.sum()} of {won.size} "
        "cells here, and in 34 of the 49 of the thesis, where time was the clock's."
    )


def heat(workers, periods, test):
    """Test accuracies of all cells, and by how much AGN is ahead."""
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    panels = figure.subplots(len(ORDERS), 4)
    for (o, m), panel in np.ndenumerate(panels):
        last = 100 * test[o, ..., -1].mean(-1)
        ahead = m == len(RULES)
        values = last[..., AGN] - last[..., AEASGD] if ahead else last[..., m]
        limits = {"vmin": -8, "vmax": 8} if ahead else {"vmin": 75, "vmax": 110}
        # Cut off where the numbers would not be legible.
        seen = np.clip(values, -5, 5) if ahead else values
        panel.imshow(seen, "RdBu" if ahead else "YlGn", aspect="auto", **limits)
        for (row, column), value in np.ndenumerate(values):
            words = f"{value:+.1f}" if ahead else f"{value:.1f}"
            panel.text(column, row, words, ha="center", va="center", size=14)
        panel.set(title="AGN less AEASGD, points" if ahead else f"{list(RULES)[m]}, %")
        panel.set(xlabel="lambda, steps between commits")
        panel.set_xticks(range(len(periods)), periods)
        panel.set_yticks(range(len(workers)), workers)
    for panel, order in zip(panels[:, 0], ORDERS, strict=True):
        panel.set_ylabel(f"{order} in random order\n\nn, simulated workers")
    return figure


def curves(workers, periods, batches, test):
    """Test accuracy against what all workers have seen, cell by cell."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(len(workers), len(periods), sharex=True, sharey=True)
    images_seen = np.linspace(0, batches * BATCH, POINTS + 1) / 1000
    for w, p in np.ndindex(panels.shape):
        for m, method in enumerate(RULES):
            of_seeds = 100 * test[w, p, m]
            style: Any = {"color": COLOURS[m]}
            panels[w, p].plot(images_seen, of_seeds.mean(0), label=method, **style)
            low, high = of_seeds.min(0), of_seeds.max(0)
            panels[w, p].fill_between(images_seen, low, high, alpha=0.2, lw=0, **style)
        panels[w, p].set_title(f"n = {workers[w]}, lambda = {periods[p]}", size=11)
        panels[w, p].set_ylim(50, 100)
        panels[w, p].grid(alpha=0.3)
    panels[0, 0].legend(frameon=False, loc="lower right")
    figure.supxlabel("images seen by all simulated workers together, thousands")
    figure.supylabel("test accuracy of the center, %")
    return figure


def main():
    options = arguments(__doc__).parse_args()
    sizes: Any = SHORT if options.quick else FULL
    workers, periods, batches = sizes["workers"], sizes["periods"], sizes["batches"]
    title = "AGN, AEASGD and DOWNPOUR by workers and period (simulated)"
    report = Report("reproduce_agn", title, ABOUT, options)
    commits, train, test = simulate(**sizes)
    report.text(f"{batches:,} batches in all, {sizes['seeds']} seeds.")
    report.picture(
        heat(workers, periods, test), "Test accuracy of the center, percent."
    )
    judge(report, workers, periods, batches, train[0], test[0])
    both = np.stack([train, test], 3)
    tabulate_accuracies(report, workers, periods, batches, both)
    tabulate_efficiencies(report, workers, periods, commits[0], train[0], test[0])
    caption = "commits in random order; means, and the range of the seeds."
    found = curves(workers, periods, batches, test[0])
    report.picture(found, f"Accuracy against samples, {caption}", "curves")
    report.data(commits=commits.tolist(), train=train.tolist(), test=test.tolist())
    report.save()


if __name__ == "__main__":
    main()
