"""Elastic averaging SGD on digits: the error against the period.

python benchmarks/reproduce_elastic_averaging.py           # five to ten minutes
python benchmarks/reproduce_elastic_averaging.py --quick   # short
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import DOWNPOUR, LABELS, accuracy_of, loss_of
from report import Line, Panel, each, listed, reproduce, threads

import optx_sync as oxs

HIDDEN, BATCH, MOMENTUM, BETA = 64, 32, 0.9, 0.9
LOOKS = 16  # at the center, evenly spread over a run
METHODS = ("DOWNPOUR", "EASGD", "EAMSGD", "AGN", "local SGD")
EXCHANGE = 2 * 4 * (64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10)  # bytes, both ways
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
# Numbers of workers, periods, steps, seeds and rates.
FULL = ((4, 8, 16), (1, 4, 16, 64), 640, 5, RATES)
SHORT = ((4,), (1, 2, 4, 8), 16, 2, RATES[6:10:2])
# Test images, those to choose the rate, and training images.
PARTS = np.split(np.random.default_rng(0).permutation(len(LABELS)), [360, 720])


class Cell(NamedTuple):
    """What one method left with one p and tau: S seeds, R rates, K looks."""

    validation: np.ndarray  # error in percent [S, R, K]
    test: np.ndarray  # error in percent [S, R, K]
    loss: np.ndarray  # on the training images, at the end [S, R]
    rounds: np.ndarray  # of all workers together, up to a look [K]

    @property
    def best(self) -> int:
        """The rate with the smallest validation error, the smaller one of equals."""
        return int(self.validation[:, :, -1].mean(0).argmin())

    @property
    def errors(self) -> np.ndarray:
        """The seeds' test errors with the best rate, in percent."""
        return self.test[:, self.best, -1]

    def largest_stable(self, rates) -> float:
        """The largest stable rate; 0 where none is."""
        stable = np.isfinite(self.loss) & (self.validation[:, :, -1] < 50)
        return float(np.array(rates)[stable.all(0)].max(initial=0.0))

    def sent(self, workers) -> np.ndarray:
        """Megabytes that a worker has exchanged, on average, up to each look."""
        return self.rounds / workers * EXCHANGE / 1e6


def method_of(name, workers, rate):
    """The workers' own optimizer, and how they meet."""
    elastic = oxs.elastic_rule(moving_rate=BETA / workers, rho=0.0)
    rule = {
        "DOWNPOUR": DOWNPOUR,
        "AGN": oxs.agn_rule(None, accumulate="updates"),
        "local SGD": oxs.local_sgd_rule(),
    }.get(name, elastic)
    if name == "EAMSGD":
        return optax.sgd(rate, MOMENTUM, nesterov=True), rule
    return optax.sgd(rate), rule


def start(seed):
    """The network's parameters."""
    draw = jax.nn.initializers.he_normal()
    shapes = {"layers_0": (64, HIDDEN), "layers_2": (HIDDEN, 10)}
    keys = jax.random.split(jax.random.key(seed))
    layers = {
        name: {"kernel": draw(key, shape), "bias": jnp.zeros(shape[1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {"params": layers}


@jax.jit
def evaluate(centers):
    """Errors of all centers [S, R, K], and the loss of the last ones."""
    test, validation, train = map(jnp.asarray, PARTS)

    def error_of(params, rows):
        return 100 * (1 - accuracy_of(params, rows))

    def mapped(measure, times):
        for _ in range(times):
            measure = jax.vmap(measure, (0, None))
        return measure

    last = jax.tree.map(lambda x: x[:, :, -1], centers)
    errors = [mapped(error_of, 3)(centers, rows) for rows in (validation, test)]
    return *errors, mapped(loss_of, 2)(last, train)


def turns(workers, period, steps):
    """Who steps at each event: round-robin, with starts spread over a period."""
    late = np.arange(workers) * period // workers
    turn = np.arange(steps + period)[:, None]
    steps_now = (late <= turn) & (turn < late + steps)
    return np.nonzero(steps_now)[1].astype(np.int32)


def cells_of(which, periods, steps, seeds, rates):
    """One method with all periods: one program, mapped over seeds and rates.

    Parameters, rates and data have these axes, counters and the schedule have not:
    otherwise the conditional around an exchange would become a select.
    """
    workers, name = which
    events, train_rows = steps * workers, jnp.asarray(PARTS[2])
    keys = jax.random.split(jax.random.key(workers), seeds)
    draw = functools.partial(jax.random.randint, minval=0, maxval=len(train_rows))
    rows = train_rows[jax.vmap(lambda key: draw(key, (events, BATCH)))(keys)]

    def run(schedule, period, rate, params, rows):
        history = oxs.simulate.asynchronous(
            *method_of(name, workers, rate),
            params,
            lambda worker, params, event: jax.grad(loss_of)(params, rows[event]),
            schedule,
            num_workers=workers,
            communication_period=lambda step: period,  # traced: one program for all
            record=events // LOOKS,
        )
        return history.center, history.global_step

    # An axis of the counters would be refused: theirs is None.
    by_rate = jax.vmap(run, (None, None, 0, None, None), (0, None))
    train = jax.jit(jax.vmap(by_rate, (None, None, None, 0, 0), (0, None)))
    initial, found = jax.vmap(start)(jnp.arange(seeds)), {}
    for period in periods:
        schedule = jnp.asarray(turns(workers, period, steps))
        centers, rounds = train(
            schedule, jnp.int32(period), jnp.asarray(rates), initial, rows
        )
        rounds = np.asarray(rounds)[events // LOOKS - 1 :: events // LOOKS]
        validation, test, loss = map(np.asarray, evaluate(centers))
        found[name, workers, period] = Cell(validation, test, loss, rounds)
    return found


def tables(page, cells, rates):
    """Test errors, largest stable rates, and what was sent."""
    errors, stable = [], []
    for workers, period in sorted({key[1:] for key in cells}):
        row = [cells[name, workers, period] for name in METHODS]
        title, sent = f"p = {workers}, tau = {period}", row[0].sent(workers)[-1]
        shown = [
            f"{c.errors.mean():.2f} ± {c.errors.std(ddof=1):.2f} ({rates[c.best]:g})"
            for c in row
        ]
        errors.append([title, *shown, f"{sent:.3f}"])
        largest = [cell.largest_stable(rates) for cell in row]
        stable.append([title, *(f"{rate:g}" if rate else "none" for rate in largest)])
    page.table("errors", errors)
    page.table("stable", stable)
    kept = {f"{name}, {p}, {tau}": cell for (name, p, tau), cell in cells.items()}
    page.data(
        rates=rates,
        test={key: cell.test[:, :, -1] for key, cell in kept.items()},
        validation={key: cell.validation[:, :, -1] for key, cell in kept.items()},
    )


def criteria(page, cells, rates, numbers, periods):
    """What the paper found, as conditions on the numbers."""

    def error(name, workers, period):
        return float(cells[name, workers, period].errors.mean())

    def shown(values, unit):
        return listed(numbers, values, f"p = {{}}: {{:.2f}} {unit}")

    for period, factor in zip(periods[-2:], (2, 5), strict=True):
        grown = [
            error("DOWNPOUR", p, period) / error("DOWNPOUR", p, 1) for p in numbers
        ]
        where = {"period": period, "factor": factor}
        page.criterion("longer", min(grown) >= factor, shown(grown, "times"), **where)
    if {4, 16} <= set(numbers):
        for name, least, most in (("DOWNPOUR", 30, np.inf), ("EASGD", 0, 3)):
            keys = (4, 1), (16, 16)
            far, near = (cells[name, *key].largest_stable(rates) for key in keys)
            fall = far / near if near else np.inf
            bound = f"at least {least}" if least else f"at most {most}"
            met = least * 0.999 <= fall <= most * 1.001  # the grid's rates are float32
            found = f"from {far:g} to {near:g}, {fall:.3g} times"
            page.criterion("fall", met, found, name=name, bound=bound)
    # Rounded, as errors are multiples of one image and may lie on a bound.
    long = periods[-1]
    grown = [error("EAMSGD", p, long) - error("EAMSGD", p, 1) for p in numbers]
    grown = [round(points, 4) for points in grown]
    page.criterion("EAMSGD", max(grown) <= 0.5, shown(grown, "points"), long=long)
    behind = {}
    for key in itertools.product(numbers, periods):
        least = min(error(name, *key) for name in METHODS)
        behind[key] = round(error("EAMSGD", *key) - least, 4)
    far = [f"p = {p}, tau = {t}: {x:.2f}" for (p, t), x in behind.items() if x > 0.5]
    found = f"at most {max(behind.values()):.2f} points behind"
    found += f" ({'; '.join(far)})" if far else ""
    page.criterion("best", not far, found, cells=len(behind))
    of_tau = [[error("EASGD", p, tau) for tau in periods] for p in numbers]
    spreads = [round(max(row) - min(row), 4) for row in of_tau]
    page.criterion("EASGD", max(spreads) <= 0.6, shown(spreads, "points"))
    edges = [
        f"{name}, p = {p}, tau = {tau}: {rates[cell.best]:g}"
        for (name, p, tau), cell in sorted(cells.items())
        if name != "EAMSGD" and cell.best in (0, len(rates) - 1)
    ]
    page.nowhere("edges", edges, f"all within {rates[0]:g} ... {rates[-1]:g}")


def study(page, settings):
    """Train, print, draw."""
    numbers, periods, steps, seeds, rates = settings
    grid = ", ".join(f"{rate:g}" for rate in rates)
    page.text("settings", steps=steps, seeds=seeds, rates=grid)
    more = {"periods": periods, "steps": steps, "seeds": seeds, "rates": rates}
    one = functools.partial(cells_of, **more)
    # The longest ones first; a run keeps one core busy.
    plan = list(itertools.product(sorted(numbers)[::-1], METHODS))
    found = each("simulating", one, plan, threads()).values()
    cells = {key: cell for of_method in found for key, cell in of_method.items()}
    tables(page, cells, rates)
    criteria(page, cells, rates, numbers, periods)
    unit, most = "test error of the center, %", max(numbers)
    panels = []
    for p in numbers:
        lines = [
            Line(m, periods, np.transpose([cells[m, p, t].errors for t in periods]))
            for m in METHODS
        ]
        title = f"{p} simulated workers"
        panels.append(Panel("steps between exchanges, tau", unit, lines, title, "xy"))
    page.picture(panels, "tau")
    panels = []
    for name in METHODS:
        of_tau = {tau: cells[name, most, tau] for tau in periods}
        lines = [
            Line(f"tau = {t}", c.sent(most)[-8:], c.test[:, c.best, -8:].mean(0), "-")
            for t, c in of_tau.items()
        ]
        panels.append(Panel("MB exchanged per worker", unit, lines, name, "xy"))
    page.picture(panels, "bytes", workers=most)


if __name__ == "__main__":
    reproduce("reproduce_elastic_averaging", __doc__, study, FULL, SHORT)
