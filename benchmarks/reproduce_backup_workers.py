"""Reproduction: backup workers, of which the slowest are not waited for (simulated).

python benchmarks/reproduce_backup_workers.py            # minutes on two cores
python benchmarks/reproduce_backup_workers.py --quick
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import LABELS, accuracy_of, initial, loss_of
from report import Line, Panel, each, listed, of_seeds, reproduce

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

MACHINES, TEST, RATES = 100, 360, (0.2, 0.4, 0.8, 1.2, 1.6)
SPARES = (0, 4, 10, 20, 30, 40, 60, 80, 90)
# Ten gradients (b = 90) do not take every seed to 95 % in so many updates.
FULL = {"draws": 4000, "seeds": 8, "spares": SPARES, "updates": 300, "target": 0.93}
SHORT = {"draws": 200, "seeds": 2, "spares": (0, 20, 80), "updates": 12, "target": 0.5}
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

    def one(cell):
        times = times_of(cell[1], list(LAWS)[cell[0]], draws)
        of_b = np.array([giving_up(times, b) for b in range(ALL)])
        # As many machines without spare ones: the first N of the same.
        without = [times[:, : MACHINES - b].max(axis=1) for b in range(ALL)]
        carried = [carrying_on(times, b).mean() for b in SHOWN]
        return [*of_b.mean(1), *carried, (of_b > without).sum()]

    size = len(LAWS), seeds
    found = each("drawing times", one, np.ndindex(size))
    found = np.reshape([*found.values()], (*size, -1))
    means, carried, longer = np.split(found, [ALL, found.shape[-1] - 1], axis=-1)
    of = f"{longer.sum():.0f} of {longer.size * ALL * draws:,} draws, b = 0 to 20"
    page.criterion("longer", not longer.any(), f"longer in {of}")
    gains = means[:, :, 0] / means[:, :, 4]
    kept_on = means[:, :, 0] / carried[:, :, SHOWN.index(4)]
    pairs = zip(map(shown, gains), map(shown, kept_on), strict=True)
    both = [f"{a}, or {b} if late machines end their batch" for a, b in pairs]
    found = listed(LAWS, both, "{} {}")
    page.criterion("faster", bool((gains.mean(1) >= 1.25).all()), found)
    rows = []
    for i, law in enumerate(LAWS):
        for k, b in enumerate(SHOWN):
            numbers = means[i, :, b], means[i, :, 0] / means[i, :, b]
            used = f"{np.mean((MACHINES - b) / means[i, :, b]):.1f}"
            rows.append([law, b, *map(shown, numbers), used, shown(carried[i, :, k])])
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

    def one(cell):
        k, i, seed = cell
        drawn, needed = make(seed, list(LAWS)[i], updates)
        *both, accepted = map(np.asarray, train(spares[k], *needed))
        seconds = np.cumsum(giving_up(drawn, spares[k]))
        in_time = np.arange(MACHINES) < MACHINES - spares[k]
        wrong = (accepted.reshape(updates, MACHINES) != in_time).sum()
        found = [first_time(accuracies, seconds, target) for accuracies in both]
        return [*np.ravel(found), wrong]

    size = len(spares), len(LAWS), seeds
    found = np.array([*each("training", one, np.ndindex(size)).values()])
    of = f"{found[:, -1].sum():.0f} of {len(found) * updates * MACHINES:,} gradients"
    page.criterion("first", not found[:, -1].any(), f"{of} otherwise")
    # [validation or test, time or count, law, b, seed, rate]
    found = np.reshape(found[:, :-1], (*size, 2, 2, len(RATES)))
    found = np.transpose(found, (3, 4, 1, 0, 2, 5))
    best = found[0, 0].mean(2).argmin(-1)  # by validation, one rate for all seeds
    on_test = np.take_along_axis(found[1], best[None, :, :, None, None], -1)[..., 0]
    return *on_test, np.asarray(RATES)[best]


def judge_training(page, spares, target, times, counts, rates):
    """The optimum in b, and the table."""
    middle = times.mean(-1)
    best = middle.argmin(1)
    found, rows = [], []
    for i, law in enumerate(LAWS):
        least = times[i, best[i]]
        ends = [f"{middle[i, k]:.0f} at b = {spares[k]}" for k in (0, -1)]
        won = int((least < np.minimum(times[i, 0], times[i, -1])).sum())
        ends.append(f"less than at both ends in {won} of {least.size} seeds")
        at = f"{law} {shown(least, 0)} at b = {spares[best[i]]}"
        found.append(f"{at}, {', '.join(ends)}")
        for k, b in enumerate(spares):
            with np.errstate(invalid="ignore"):  # where neither is reached
                gain = times[i, 0] / times[i, k]
            of = shown(counts[i, k], 0), shown(times[i, k], 0), shown(gain)
            rows.append([law, b, str(rates[i, k]), *of])
    between = bool(((best > 0) & (best < len(spares) - 1)).all())
    found = f"simulated seconds: {'; '.join(found)}"
    page.criterion("between", between, found, target=target)
    page.table("training", rows, target=target)


def study(page, sizes):
    seeds, spares, target = sizes["seeds"], sizes["spares"], sizes["target"]
    page.text("seeds", **sizes)
    means, carried = step_times(page, sizes["draws"], seeds)
    times, counts, rates = training(page, seeds, spares, sizes["updates"], target)
    judge_training(page, spares, target, times, counts, rates)
    b, label = f"b, spare ones of {MACHINES} simulated machines", "{}, late ones end"
    x, used = range(ALL), (MACHINES - np.arange(ALL)) / means
    pairs: Any = list(zip(LAWS, means, used, carried, strict=True))
    left = [Line(law, x, y, "-") for law, y, _, _ in pairs]
    left += [Line(label.format(law), SHOWN, y, "o:") for law, _, _, y in pairs]
    right = [Line(law, x, y, "-") for law, _, y, _ in pairs]
    panels = [Panel(b, "mean seconds of a step (simulated)", left, log="y")]
    panels += [Panel(b, "gradients used per simulated second", right)]
    page.picture(panels, "steps")
    panels = []
    for what, values, log in (("seconds", times, "y"), ("updates", counts, "")):
        lines = [Line(law, spares, y.T) for law, y in zip(LAWS, values, strict=True)]
        panels.append(Panel(b, f"{what} to {target:.0%} (test)", lines, log=log))
    page.picture(panels, target=target)
    page.data(step_seconds=means, seconds=times, updates=counts)


if __name__ == "__main__":
    reproduce("reproduce_backup_workers", __doc__, study, FULL, SHORT)
