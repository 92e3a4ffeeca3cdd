"""Reproduction: backup workers, of which the slowest are not waited for (simulated).

python benchmarks/reproduce_backup_workers.py            # minutes on two cores
python benchmarks/reproduce_backup_workers.py --quick
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import LABELS, TEST, accuracy_of, initial, loss_of
from pictures import Line, Panel
from report import grid, of_seeds, reproduce

import optx_sync as oxs

MACHINES, RATES = 100, (0.2, 0.4, 0.8, 1.2, 1.6)
SPARES = (0, 4, 10, 20, 30, 40, 60, 80, 90)
# Ten gradients (b = 90) do not take every seed to 95 % in so many updates.
FULL = {"draws": 4000, "seeds": 8, "spares": SPARES, "updates": 300, "target": 0.93}
SHORT = {"draws": 200, "seeds": 1, "spares": (0, 80), "updates": 6, "target": 0.15}
LAWS = {  # seconds of a machine's step
    "log-normal, stragglers": lambda rng, size: (
        rng.lognormal(0, 0.3, size) * np.where(rng.random(size) < 0.02, 10, 1)
    ),
    "1 + exponential": lambda rng, size: 1 + rng.exponential(0.3, size),
    "Pareto": lambda rng, size: 1 + rng.pareto(2.5, size),
}
SHOWN, ALL = (0, 1, 4, 10, 20), 21  # values of b in tables, and how many are tried


def times_of(seed, law, steps):
    """Seconds of every machine's step, [steps, machines]."""
    # With equal seeds, laws that invert one uniform number would order machines alike.
    rng = np.random.default_rng([seed, list(LAWS).index(law)])
    return LAWS[law](rng, (steps, MACHINES))


def giving_up(times, spare):
    """Seconds of each step if late machines give up: the order statistic."""
    return np.sort(times, axis=1)[:, times.shape[1] - spare - 1]


def carrying_on(times, spare):
    """The same if a late machine ends its batch before it starts the next step."""
    free, now, ends = np.zeros(times.shape[1]), 0.0, []
    for of_step in times:
        arrives = np.maximum(free, now) + of_step
        now = np.sort(arrives)[len(arrives) - spare - 1]
        # Who is still at an older batch has not begun this one.
        busy_until = np.where(free < now, arrives, free)
        free = np.where(arrives <= now, now, busy_until)
        ends.append(now)
    return np.diff(ends, prepend=0)


def shown(values, digits=2):
    """The mean over the seeds (the lowest to the highest)."""
    finite = np.all(np.isfinite(values))
    return of_seeds(values, f".{digits}f") if finite else "not reached"


def step_times(page, draws, seeds):
    """The part about times alone; returns mean seconds [law, seed, b] of both kinds."""

    def one(law, seed):
        times = times_of(seed, law, draws)
        of_b = np.array([giving_up(times, b) for b in range(ALL)])
        # As many machines without spare ones: the first N of the same.
        without = [times[:, : MACHINES - b].max(axis=1) for b in range(ALL)]
        carried = np.array([carrying_on(times, b).mean() for b in SHOWN])
        return of_b.mean(1), carried, (of_b > without).sum()

    means, carried, longer = grid("drawing times", one, (LAWS, range(seeds)))
    page.text("longer", longer=f"{longer.sum():.0f}", of=longer.size * ALL * draws)
    rows = []
    for (i, law), (k, b) in product(enumerate(LAWS), enumerate(SHOWN)):
        seconds = means[i, :, b]
        used = f"{np.mean((MACHINES - b) / seconds):.1f}"
        cells = shown(seconds), shown(means[i, :, 0] / seconds), used
        rows.append([law, b, *cells, shown(carried[i, :, k])])
    page.table("steps", rows)
    return means, carried


@functools.partial(jax.jit, static_argnames="spare")
def train(spare, initial, schedule, rows, validation, test):
    """Accuracies [rate, update], and which gradients were accepted [event]."""

    def at_rate(rate):
        found = oxs.simulate.sync_replicas(
            optax.sgd(rate),
            initial,
            lambda machine, params, event: jax.grad(loss_of)(
                params, rows[event // MACHINES, machine]
            ),
            schedule,
            replicas_to_aggregate=MACHINES - spare,
            total_num_replicas=MACHINES,
            num_tokens=0,  # no stale start: the queue is empty until the first update
            record=MACHINES,
        )
        accuracies = (
            jax.vmap(accuracy_of, (0, None))(found.params, which)
            for which in (validation, test)
        )
        return *accuracies, found.accepted

    # Counters do not depend on the rate, so what is conditional stays so.
    return jax.vmap(at_rate, out_axes=(0, 0, None))(jnp.asarray(RATES))


def make(seed, law, updates):
    """Seconds of all steps, and what `train` needs of a seed."""
    times = times_of(seed, law, updates)
    rng = np.random.default_rng(seed)
    test, validation, rest = np.split(rng.permutation(len(LABELS)), [TEST, 2 * TEST])
    rows = rng.choice(rest, (updates, MACHINES, 1))
    schedule = np.argsort(times, axis=1).astype(np.int32).flatten()
    return times, (initial(seed), schedule, rows, validation, test)


def first_time(accuracies, seconds, target):
    """When each curve [..., update] reaches the target, and at which update."""
    reached = accuracies >= target
    at = np.where(reached.any(-1), reached.argmax(-1), -1)
    return np.where(at < 0, np.inf, seconds[at]), np.where(at < 0, np.inf, at + 1.0)


def training(page, seeds, spares, updates, target):
    """Seconds and updates to the target, [law, b, seed], at the best rates."""

    def one(law, spare, seed):
        drawn, needed = make(seed, law, updates)
        *both, accepted = map(np.asarray, train(spare, *needed))
        seconds = np.cumsum(giving_up(drawn, spare))
        in_time = np.arange(MACHINES) < MACHINES - spare
        wrong = (accepted.reshape(updates, MACHINES) != in_time).sum()
        return np.array([first_time(of, seconds, target) for of in both]), wrong

    # [law, b, seed, validation or test, time or count, rate]
    found, wrong = grid("training", one, (LAWS, spares, range(seeds)))
    page.text("first", wrong=wrong.sum(), of=wrong.size * updates * MACHINES)
    validation, test = np.moveaxis(found, (3, 4), (0, 1))
    best = validation[0].mean(2).argmin(-1)  # one rate for all seeds
    on_test = np.take_along_axis(test, best[None, :, :, None, None], -1)[..., 0]
    return *on_test, np.asarray(RATES)[best]


def show_training(page, spares, target, times, counts, rates):
    """The table of times to the target."""
    rows = []
    for i, law in enumerate(LAWS):
        for k, b in enumerate(spares):
            with np.errstate(invalid="ignore"):  # where neither is reached
                gain = times[i, 0] / times[i, k]
            of = shown(counts[i, k], 0), shown(times[i, k], 0), shown(gain)
            rows.append([law, b, str(rates[i, k]), *of])
    page.table("training", rows, target=target)


def of_laws(x, values, look="o-", label="{}"):
    """A line for each law."""
    lines = zip(LAWS, values, strict=True)
    return [Line(label.format(law), x, y, look) for law, y in lines]


def study(page, sizes):
    seeds, spares, target = sizes["seeds"], sizes["spares"], sizes["target"]
    page.text("seeds", **sizes)
    means, carried = step_times(page, sizes["draws"], seeds)
    times, counts, rates = training(page, seeds, spares, sizes["updates"], target)
    show_training(page, spares, target, times, counts, rates)
    b, x = f"spare ones of {MACHINES} simulated machines", np.arange(ALL)
    seconds = of_laws(x, means, "-")
    seconds += of_laws(SHOWN, carried, "o:", "{}, late ones end")
    used = of_laws(x, (MACHINES - x) / means, "-")
    panels = [Panel(b, "mean seconds of a step", seconds, log="y")]
    panels += [Panel(b, "gradients used a second", used)]
    page.picture(panels, "steps")
    panels = []
    for what, values, log in (("seconds", times, "y"), ("updates", counts, "")):
        lines = of_laws(spares, values.swapaxes(1, 2))
        panels.append(Panel(b, f"{what} to {target:.0%} (test)", lines, log=log))
    page.picture(panels, target=target)
    page.data(step_seconds=means, seconds=times, updates=counts)


if __name__ == "__main__":
    reproduce("reproduce_backup_workers", __doc__, study, FULL, SHORT)
