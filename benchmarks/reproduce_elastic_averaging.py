"""Elastic averaging SGD on digits: the error against the period.

python benchmarks/reproduce_elastic_averaging.py           # five to ten minutes
python benchmarks/reproduce_elastic_averaging.py --quick   # short
"""

import functools
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import DOWNPOUR, LABELS, TEST, accuracy_of, loss_of
from pictures import Line, Panel
from report import grid, reproduce, threads

import optx_sync as oxs

HIDDEN, BATCH, MOMENTUM, BETA = 64, 32, 0.9, 0.9
LOOKS = 16  # at the center, evenly spread over a run
METHODS = ("DOWNPOUR", "EASGD", "EAMSGD", "AGN", "local SGD")
EXCHANGE = 2 * 4 * (64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10)  # bytes, both ways
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
FULL = {"numbers": (4, 8, 16), "periods": (1, 4, 16, 64), "steps": 640, "seeds": 5}
SHORT = {"numbers": (4,), "periods": (1, 4), "steps": 16, "seeds": 2}
FULL, SHORT = FULL | {"rates": RATES}, SHORT | {"rates": RATES[6:10:2]}
# Test images, those to choose the rate, and training images.
PARTS = np.split(np.random.default_rng(0).permutation(len(LABELS)), [TEST, 2 * TEST])


class Found(NamedTuple):
    """What was found of each number of workers, method and period, [p, method, tau]."""

    rates: Any  # the best ones, as numbers on the grid
    errors: Any  # test errors of the center in percent, at the best rate [..., seed]
    curves: Any  # means of these at the looks [..., look]
    stable: Any  # the largest stable rate; 0 where none is
    sent: Any  # megabytes that a worker has exchanged, on average [p, tau, look]
    kept: Any  # all errors at the end [..., seed, rate]: validation and test


def method_of(name, workers, rate):
    """The workers' own optimizer, and how they meet."""
    elastic = oxs.rules.elastic(moving_rate=BETA / workers, rho=0.0)
    rule = {
        "DOWNPOUR": DOWNPOUR,
        "AGN": oxs.rules.agn(None, accumulate="updates"),
        "local SGD": oxs.rules.local_sgd(),
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


def turns(workers, period, steps):
    """Who steps at each event: round-robin, with starts spread over a period."""
    late = np.arange(workers) * period // workers
    turn = np.arange(steps + period)[:, None]
    steps_now = (late <= turn) & (turn < late + steps)
    return np.nonzero(steps_now)[1].astype(np.int32)


def simulate(workers, name, periods, steps, seeds, rates):
    """A method with all periods, [tau, seed, rate, look]: one program for them.

    Parameters, rates and data are mapped over seeds and rates, counters and the
    schedule not: otherwise the conditional around an exchange would become a select.
    """
    events, (test, validation, train_rows) = steps * workers, map(jnp.asarray, PARTS)
    keys = jax.random.split(jax.random.key(workers), seeds)
    draw = functools.partial(jax.random.randint, minval=0, maxval=len(train_rows))
    rows = train_rows[jax.vmap(lambda key: draw(key, (events, BATCH)))(keys)]
    every = events // LOOKS

    def run(schedule, period, rate, params, rows):
        history = oxs.simulate.asynchronous(
            *method_of(name, workers, rate),
            params,
            lambda worker, params, event: jax.grad(loss_of)(params, rows[event]),
            schedule,
            num_workers=workers,
            communication_period=lambda step: period,  # traced: one program for all
            record=every,
        )
        right = jax.vmap(accuracy_of, (0, None))
        errors = (100 * (1 - right(history.center, of)) for of in (validation, test))
        loss = loss_of(history.final.center, train_rows)
        return *errors, loss, history.global_step[every - 1 :: every]

    # An axis of the counters would be refused: theirs is None.
    axes = 0, 0, 0, None
    by_rate = jax.vmap(run, (None, None, 0, None, None), axes)
    train = jax.jit(jax.vmap(by_rate, (None, None, None, 0, 0), axes))
    initial, found = jax.vmap(start)(jnp.arange(seeds)), []
    for period in periods:
        schedule = jnp.asarray(turns(workers, period, steps))
        of = train(schedule, jnp.int32(period), jnp.asarray(rates), initial, rows)
        found.append(jax.device_get(of))
    return tuple(map(np.stack, zip(*found, strict=True)))


def find(numbers, periods, steps, seeds, rates):
    """Simulate everything, and choose the rates."""

    def one(workers, name):
        return simulate(workers, name, periods, steps, seeds, rates)

    # The longest ones first; a run keeps one core busy.
    found = grid("simulating", one, (numbers[::-1], METHODS), threads())
    validation, test, loss, rounds = (of[::-1] for of in found)
    # The rate with the smallest validation error, the smaller one of equals.
    best = validation[..., -1].mean(-2).argmin(-1)
    at_best = np.take_along_axis(test, best[..., None, None, None], -2)[..., 0, :]
    stable = (np.isfinite(loss) & (validation[..., -1] < 50)).all(-2)
    return Found(
        best,
        at_best[..., -1],
        at_best.mean(-2),
        np.where(stable, rates, 0.0).max(-1),
        rounds[:, 0] / np.reshape(numbers, (-1, 1, 1)) * EXCHANGE / 1e6,
        (validation[..., -1], test[..., -1]),
    )


def tables(page, found, numbers, periods, rates):
    """Test errors, largest stable rates, and what was sent."""
    errors, stable = [], []
    for (i, p), (j, tau) in product(enumerate(numbers), enumerate(periods)):
        shown = [
            f"{of.mean():.2f} ± {of.std(ddof=1):.2f} ({rates[rate]:g})"
            for of, rate in zip(
                found.errors[i, :, j], found.rates[i, :, j], strict=True
            )
        ]
        title = f"p = {p}, tau = {tau}"
        errors.append([title, *shown, f"{found.sent[i, j, -1]:.3f}"])
        largest = [f"{rate:g}" if rate else "none" for rate in found.stable[i, :, j]]
        stable.append([title, *largest])
    page.table("errors", errors)
    page.table("stable", stable)
    cells = {
        f"{METHODS[m]}, {numbers[i]}, {periods[j]}": (i, m, j)
        for i, m, j in np.ndindex(found.rates.shape)
    }
    validation, test = ({n: of[c] for n, c in cells.items()} for of in found.kept)
    page.data(rates=rates, test=test, validation=validation)


def panels_of(errors, sent, numbers, periods):
    """Test errors [number, method, period, seed] against tau, and against MB sent."""
    unit, panels = "test error, %", []
    for p, of in zip(numbers, errors, strict=True):
        lines = [Line(m, periods, y.T) for m, y in zip(METHODS, of, strict=True)]
        title = f"{p} simulated workers"
        panels.append(Panel("steps between exchanges, tau", unit, lines, title, "xy"))
    lines = [Line(m, sent, y.T) for m, y in zip(METHODS, errors[-1], strict=True)]
    return panels, [Panel("MB that a worker exchanged", unit, lines, log="xy")]


def study(page, settings):
    """Train, print, draw."""
    numbers, periods, rates = (settings[k] for k in ("numbers", "periods", "rates"))
    shown = ", ".join(f"{rate:g}" for rate in rates)
    page.text("settings", **{**settings, "rates": shown})
    found = find(**settings)
    tables(page, found, numbers, periods, rates)
    tau, sent = panels_of(found.errors, found.sent[-1, :, -1], numbers, periods)
    page.picture(tau, "tau")
    page.picture(sent, "bytes", workers=numbers[-1])


if __name__ == "__main__":
    reproduce("reproduce_elastic_averaging", __doc__, study, FULL, SHORT)
