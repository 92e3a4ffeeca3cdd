"""Reproduction: accumulated gradient normalization against elastic averaging, DOWNPOUR.

python benchmarks/reproduce_agn.py            # some minutes on two cores
python benchmarks/reproduce_agn.py --quick
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import DOWNPOUR as DOWNPOUR_RULE
from digits import LABELS, TEST, accuracy_of, initial, loss_of
from pictures import Line, Panel
from report import grid, listed, of_seeds, percent, reproduce, threads

import optx_sync as oxs

BATCH, LEARNING_RATE, MOVING_RATE, POINTS = 32, 1e-3, 0.05, 100
FULL = {"workers": (10, 20, 40), "periods": (10, 20, 40), "batches": 16_000, "seeds": 5}
SHORT = {"workers": (10,), "periods": (5,), "batches": 100, "seeds": 1}
RULES = {
    # The paper's form: the commit is the mean of the worker's own updates.
    "AGN": oxs.rules.agn(None, accumulate="updates"),
    "AEASGD": oxs.rules.elastic(moving_rate=MOVING_RATE, rho=0.0),
    "DOWNPOUR": DOWNPOUR_RULE,
}
AGN, AEASGD, DOWNPOUR = range(3)
ORDERS = {
    # Each commit's worker is drawn; its steps can stand together: nobody sees them.
    "commits": lambda rng, workers, period, events: np.repeat(
        rng.integers(0, workers, events // period), period
    ),
    # Each step's worker is drawn.
    "steps": lambda rng, workers, period, events: rng.integers(0, workers, events),
}


def staleness_of(schedule, period):
    """Of each commit: how many there were since its worker took the center."""
    steps, taken, found = {}, {}, []
    for worker in schedule.tolist():
        steps[worker] = steps.get(worker, 0) + 1
        if steps[worker] % period == 0:
            found.append(len(found) - taken.get(worker, 0))
            taken[worker] = len(found)
    return np.array(found)


@functools.partial(jax.jit, static_argnames=("method", "workers", "every"))
def run(method, workers, every, period, initial, schedule, batches, train, test):
    """Commits and accuracies [points + 1] of the center."""
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
    accuracies = (
        jax.vmap(accuracy_of, (0, None))(centers, rows) for rows in (train, test)
    )
    commits = jnp.append(0, record.global_step[every - 1 :: every])
    return commits, *accuracies


def make(seed, order, workers, period, events):
    """What the methods share: the arguments of `run` that a seed decides."""
    rng = np.random.default_rng(seed)
    test, train = np.split(rng.permutation(len(LABELS)), [TEST])
    batches = rng.choice(train, (events, BATCH))
    schedule = ORDERS[order](rng, workers, period, events).astype(np.int32)
    return initial(seed), schedule, batches, train, test


def simulate(workers, periods, batches, seeds):
    """Commits, train, test accuracy: each [order, n, period, method, seed, point]."""

    def one(order, n, period, method, seed):
        shared = make(seed, order, n, period, batches)
        # Workers that a schedule does not name do nothing: one program for all n.
        found = run(method, max(workers), batches // POINTS, period, *shared)
        return jax.device_get(found)

    axes = ORDERS, workers, periods, RULES, range(seeds)
    # A run keeps one core busy.
    return grid("simulating", one, axes, threads())


def areas_of(curves):
    """Areas under curves [..., point], whose points are equally far apart, by width."""
    return np.trapezoid(curves, axis=-1) / (curves.shape[-1] - 1)


def against_commits(commits, curves):
    """The curves against as many commits as the longest period makes: [..., point]."""
    over = np.linspace(0, commits[..., -1].min(), curves.shape[-1])
    flat = zip(*(x.reshape(-1, over.size) for x in (commits, curves)), strict=True)
    return np.stack([np.interp(over, *pair) for pair in flat]).reshape(curves.shape)


def tabulate_accuracies(page, workers, periods, batches, both):
    """Accuracies at the end: [order, n, period, train or test, method, seed, point]."""
    last = both[..., -1]
    gaps = last[..., 1, AGN, :] - last[..., 1, AEASGD, :]
    for o, order in enumerate(ORDERS):
        rows = []
        for (w, n), (p, period) in product(enumerate(workers), enumerate(periods)):
            schedule = make(0, order, n, period, batches)[1]
            stale = np.quantile(staleness_of(schedule, period), [0.5, 0.05, 0.95])
            cells = map(percent, np.concatenate(last[o, w, p]))
            age = "{:.0f} ({:.0f} to {:.0f})".format(*stale)
            rows.append([f"{n}, {period}", *cells, percent(gaps[o, w, p], 2), age])
        page.table("accuracies", rows, order=order)
    of_periods = (percent(of_period, 2) for of_period in gaps[1, -1])
    shown = listed(periods, of_periods, "{1} at lambda = {0}")
    page.text("steps", many=workers[-1], gaps=shown)
    rows = []
    for w, n in enumerate(workers):
        means = 100 * last[0, w, :, :, :2].mean((0, 3)).flatten()
        published = page.words["published"][str(n)]
        for whose, values in (("the paper's", published), ("here", means)):
            rows.append([f"{n}, {whose}", *(f"{value:.2f}" for value in values)])
    page.table("published", rows)


def tabulate_efficiencies(page, workers, periods, commits, train, test):
    """Ratios of areas; the arrays are those of commits in random order."""
    on_train, on_test = areas_of(train), areas_of(test)  # [n, period, method, seed]
    by_commits = areas_of(against_commits(commits, test))
    pairs = (on_train, AGN, AEASGD), (on_test, AGN, AEASGD), (on_test, DOWNPOUR, AGN)
    pairs = (*pairs, (by_commits, AGN, AEASGD))
    rows = []
    for cell in np.ndindex(len(workers), len(periods)):
        ratios = (of_seeds(x[cell][a] / x[cell][b], ".3f") for x, a, b in pairs)
        areas = (f"{area:.3f}" for area in by_commits[cell].mean(-1))
        rows.append([f"{workers[cell[0]]}, {periods[cell[1]]}", *ratios, *areas])
    page.table("areas", rows, commits=commits[..., -1].min())
    won = on_train[..., AGN, :].mean(-1) >= on_train[..., AEASGD, :].mean(-1)
    page.text("areas", won=won.sum(), cells=won.size)


def panels_of(test, workers, periods, batches):
    """The accuracy at the end, and on the way with the most workers."""
    unit, ends, curves = "test accuracy, %", [], []
    for p, o in np.ndindex(len(periods), len(ORDERS)):
        values = np.moveaxis(100 * test[o, :, p, ..., -1], 0, 2)  # [method, seed, n]
        lines = [Line(m, workers, y) for m, y in zip(RULES, values, strict=True)]
        title = f"{list(ORDERS)[o]} at random, lambda = {periods[p]}"
        ends.append(Panel("n, simulated workers", unit, lines, title))
    seen = np.linspace(0, batches * BATCH, POINTS + 1) / 1000
    x = "images seen by all, thousands"
    for p, period in enumerate(periods):
        values = zip(RULES, 100 * test[0, -1, p], strict=True)
        lines = [Line(method, seen, y, "-") for method, y in values]
        title = f"n = {workers[-1]}, lambda = {period}"
        curves.append(Panel(x, unit, lines, title, ylim=(50, 100)))
    return ends, curves


def study(page, sizes):
    workers, periods, batches = sizes["workers"], sizes["periods"], sizes["batches"]
    commits, train, test = simulate(**sizes)
    page.text("sizes", **sizes)
    ends, curves = panels_of(test, workers, periods, batches)
    page.picture(ends, columns=len(ORDERS))
    tabulate_accuracies(page, workers, periods, batches, np.stack([train, test], 3))
    tabulate_efficiencies(page, workers, periods, commits[0], train[0], test[0])
    page.picture(curves, "curves", n=workers[-1])
    page.data(commits=commits, train=train, test=test)


if __name__ == "__main__":
    reproduce("reproduce_agn", __doc__, study, FULL, SHORT)
