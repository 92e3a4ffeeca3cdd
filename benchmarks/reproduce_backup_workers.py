"""Reproduction: backup workers, of which the slowest are not waited for (simulated).

    python benchmarks/reproduce_backup_workers.py            # minutes on two cores
    python benchmarks/reproduce_backup_workers.py --quick

Chen, Pan, Monga, Bengio and Jozefowicz (2016) update as soon as N of N + b gradients
are in, and drop the b that come late. A step then takes the N-th smallest of N + b step
times instead of the largest. Here the step times are drawn from three laws, for 100
machines of which b are spare; then a network is trained with real gradients in the
order in which they would come in. Seconds are the simulation's, never a clock's.
"""

import functools
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

MACHINES, TEST, RATES = 100, 360, (0.2, 0.4, 0.8, 1.2, 1.6)
SPARES = (0, 4, 10, 20, 30, 40, 60, 80, 90)
# Ten gradients (b = 90) do not take every seed to 95 % in so many updates.
FULL = {"draws": 4000, "seeds": 8, "spares": SPARES, "updates": 300, "target": 0.93}
SHORT = {"draws": 200, "seeds": 2, "spares": (0, 20, 80), "updates": 40, "target": 0.8}
LAWS = {  # seconds of a machine's step
    "log-normal, stragglers": lambda rng, size: (
        rng.lognormal(0, 0.3, size) * np.where(rng.random(size) < 0.02, 10, 1)
    ),
    "1 + exponential": lambda rng, size: 1 + rng.exponential(0.3, size),
    "Pareto": lambda rng, size: 1 + rng.pareto(2.5, size),
}
SHOWN = (0, 1, 4, 10, 20)  # values of b in tables
COLOURS = ("#4477AA", "#EE6677", "#228833")
ABOUT = f"""
Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.

**Simulated**: {MACHINES} machines, of which b are spare, so that an update takes the
first N = {MACHINES} - b gradients. Times are drawn anew for every machine and step, and
a step lasts until the N-th gradient is in, an order statistic. All machines then start
the next step together: a late one gives up its batch. The last column of the first
table says what is left of the gain if a late machine ends its batch first, and is
missing meanwhile.

Laws: log-normal(0, 0.3), and 2 % of the steps ten times slower; 1 + exponential of mean
0.3; Pareto(2.5), at least 1.

Training has real gradients: digits, a network of 64-64-10, one image for every machine
and step, plain SGD. The events (who hands in when) go through
`oxs.simulate.sync_replicas`, TensorFlow's machine of tokens and accumulators, which
drops what comes after the update. The learning rate is the best of {RATES} for each law
and b, by the time in which accuracy on validation images ({TEST}) reaches the target;
shown is the time on test images ({TEST}). Seeds differ in split, initial parameters,
images and times, and are the same for all b. Means over seeds, with the lowest and the
highest. No wall clock anywhere.
"""

images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])


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
    if not np.all(np.isfinite(values)):
        return "not reached"
    low, mean, high = (f(values) for f in (np.min, np.mean, np.max))
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def step_times(report, draws, seeds):
    """The part about times alone; returns mean seconds [law, seed, b] of both kinds."""
    means = np.empty((len(LAWS), seeds, 21))
    carried = np.empty((len(LAWS), seeds, len(SHOWN)))
    longer = total = 0
    cells = list(np.ndindex(len(LAWS), seeds))
    for i, seed in track(cells, "drawing times"):
        times = times_of(seed, list(LAWS)[i], draws)
        for b in range(21):
            step = giving_up(times, b)
            # As many machines without spare ones: the first N of the same.
            without = times[:, : MACHINES - b].max(axis=1)
            longer, total = longer + int((step > without).sum()), total + draws
            means[i, seed, b] = step.mean()
        carried[i, seed] = [carrying_on(times, b).mean() for b in SHOWN]
    report.criterion(
        "a step with b spare machines never takes longer than without them",
        longer == 0,
        f"longer in {longer} of {total:,} draws, b = 0 to 20",
    )
    gains = means[:, :, 0] / means[:, :, 4]
    kept_on = means[:, :, 0] / carried[:, :, SHOWN.index(4)]
    found = (
        f"{law} {shown(gain)}, or {shown(other)} if late machines end their batch"
        for law, gain, other in zip(LAWS, gains, kept_on, strict=True)
    )
    report.criterion(
        f"4 spare machines of {MACHINES} make steps 1.25 times as fast, by every law",
        bool((gains.mean(1) >= 1.25).all()),
        "; ".join(found),
    )
    rows = []
    for i, law in enumerate(LAWS):
        for k, b in enumerate(SHOWN):
            numbers = means[i, :, b], means[i, :, 0] / means[i, :, b]
            used = f"{np.mean((MACHINES - b) / means[i, :, b]):.1f}"
            rows.append([law, b, *map(shown, numbers), used, shown(carried[i, :, k])])
    titles = ["law", "b", "seconds", "b = 0 / this", "gradients used per second"]
    report.table(
        f"Simulated seconds of a step, {MACHINES} machines, b of them spare",
        [*titles, "seconds if late machines end their batch"],
        rows,
    )
    return means, carried


def loss_of(params, rows):
    logits = network.apply(params, images[rows])
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels[rows]).mean()


def accuracy_of(params, rows):
    return (network.apply(params, images[rows]).argmax(-1) == labels[rows]).mean()


def replay(inner, params, grad_fn, schedule, spare):
    """All events: each machine hands in once a step, in this order."""
    return oxs.simulate.sync_replicas(
        inner,
        params,
        grad_fn,
        schedule,
        replicas_to_aggregate=MACHINES - spare,
        total_num_replicas=MACHINES,
        num_tokens=0,  # no stale start: the queue is empty until the first update
        record=MACHINES,
    )


@functools.partial(jax.jit, static_argnames="spare")
def train(spare, initial, schedule, rows, validation, test):
    """Accuracies [rate, update], and which gradients were accepted [event]."""

    def at_rate(rate):
        def grad_fn(machine, params, event):
            return jax.grad(loss_of)(params, rows[event // MACHINES, machine])

        found = replay(optax.sgd(rate), initial, grad_fn, schedule, spare)
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
    test, validation, rest = np.split(rng.permutation(len(labels)), [TEST, 2 * TEST])
    rows = rng.choice(rest, (updates, MACHINES, 1))
    initial = network.init(jax.random.key(seed), images[:1])
    schedule = np.argsort(times, axis=1).astype(np.int32).flatten()
    return times, (initial, schedule, rows, validation, test)


def first_time(accuracies, seconds, target):
    """When each curve [..., update] reaches the target, and at which update."""
    reached = accuracies >= target
    at = np.where(reached.any(-1), reached.argmax(-1), -1)
    return np.where(at < 0, np.inf, seconds[at]), np.where(at < 0, np.inf, at + 1.0)


def training(report, seeds, spares, updates, target):
    """Seconds and updates to the target, [law, b, seed], at the best rates."""
    # [validation or test, law, b, seed, rate]
    times, counts = np.empty((2, 2, len(LAWS), len(spares), seeds, len(RATES)))
    runs, wrong = list(np.ndindex(len(spares), len(LAWS), seeds)), 0
    for k, i, seed in track(runs, "training"):
        drawn, needed = make(seed, list(LAWS)[i], updates)
        *both, accepted = map(np.asarray, train(spares[k], *needed))
        seconds = np.cumsum(giving_up(drawn, spares[k]))
        for which, accuracies in enumerate(both):
            found = first_time(accuracies, seconds, target)
            times[which, i, k, seed], counts[which, i, k, seed] = found
        in_time = np.arange(MACHINES) < MACHINES - spares[k]
        wrong += int((accepted.reshape(updates, MACHINES) != in_time).sum())
    report.criterion(
        "every update of every run took the first N gradients and dropped the others",
        wrong == 0,
        f"{wrong} of {len(runs) * updates * MACHINES:,} gradients otherwise",
    )
    best = times[0].mean(2).argmin(-1)  # by validation, one rate for all seeds
    index = best[:, :, None, None]
    on_test = [np.take_along_axis(x[1], index, -1)[..., 0] for x in (times, counts)]
    return *on_test, np.asarray(RATES)[best]


@functools.partial(jax.jit, static_argnames="spare")
def mean_taken(spare, params, grads, order):
    """What the optimizer got of gradients [machine, ...] that come in an order."""

    def grad_fn(machine, params, event):
        return jax.tree.map(lambda grad: grad[machine], grads)

    # A trace that forgets all holds the gradient itself.
    found = replay(optax.trace(0.0), params, grad_fn, order, spare)
    return optax.tree.get(found.final.inner, "trace")


def exact_mean(report, spares=(4, 36), updates=3):
    """Whether the gradient applied is the mean over the first N, to the last bit."""
    divided, multiplied, rate = [], [], 0.4
    for law in LAWS:
        for spare in spares:
            times, (params, _, rows, *_) = make(0, law, updates)
            for of_step, images_of_step in zip(times, rows, strict=True):
                grads = jax.vmap(jax.grad(loss_of), (None, 0))(params, images_of_step)
                order = np.argsort(of_step)
                got = mean_taken(spare, params, grads, order.astype(np.int32))
                needed = np.float32(MACHINES - spare)
                leaves = map(jax.tree.leaves, (grads, got))
                for of_leaf, mean in zip(*leaves, strict=True):
                    total = np.zeros(mean.shape, np.float32)
                    for gradient in np.asarray(of_leaf)[order[: int(needed)]]:
                        total += gradient
                    divided.append(np.array_equal(total / needed, mean))
                    multiplied.append(np.array_equal(total * (1 / needed), mean))
                params = jax.tree.map(lambda p, g: p - rate * g, params, got)
    report.criterion(
        "the gradient applied is the mean over the first N, as NumPy adds them up in "
        "order of arrival, bit for bit",
        all(divided) or all(multiplied),
        f"of {len(divided)} arrays {sum(multiplied)} as sum * (1 / N), which is what "
        f"XLA makes of a division, {sum(divided)} as sum / N; b in {spares}, all laws",
    )


def judge_training(report, spares, target, times, counts, rates):
    """The optimum in b, and the table."""
    middle = times.mean(-1)
    best = middle.argmin(1)
    found = []
    for i, law in enumerate(LAWS):
        least = times[i, best[i]]
        ends = [f"{middle[i, k]:.0f} at b = {spares[k]}" for k in (0, -1)]
        won = int((least < np.minimum(times[i, 0], times[i, -1])).sum())
        ends.append(f"less than at both ends in {won} of {least.size} seeds")
        found.append(
            f"{law} {shown(least, 0)} at b = {spares[best[i]]}, {', '.join(ends)}"
        )
    report.criterion(
        f"the time to {target:.0%} is least between the ends of b, by every law",
        bool(((best > 0) & (best < len(spares) - 1)).all()),
        f"simulated seconds: {'; '.join(found)}",
    )
    rows = []
    for i, law in enumerate(LAWS):
        for k, b in enumerate(spares):
            row = [law, b, str(rates[i, k]), shown(counts[i, k], 0)]
            with np.errstate(invalid="ignore"):  # where neither is reached
                gain = times[i, 0] / times[i, k]
            rows.append([*row, shown(times[i, k], 0), shown(gain)])
    titles = [
        "law",
        "b",
        "learning rate",
        "updates",
        "simulated seconds",
        "b = 0 / this",
    ]
    report.table(f"To {target:.0%} of the test images", titles, rows)


def band(panel, x, values, colour, label, style="-"):
    """A line of means over the seeds, the first axis, and their range."""
    low, mean, high = (f(values, axis=0) for f in (np.min, np.mean, np.max))
    panel.plot(x, mean, style, ms=4, color=colour, label=label)
    panel.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def draw_times(means, carried):
    """Seconds of a step and gradients per second, against b."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    spares = np.arange(means.shape[-1])
    for i, (law, colour) in enumerate(zip(LAWS, COLOURS, strict=True)):
        band(left, spares, means[i], colour, law)
        band(left, SHOWN, carried[i], colour, None, "o:")
        band(right, spares, (MACHINES - spares) / means[i], colour, law)
    label = "if late machines end their batch"
    left.plot([], [], "o:", ms=4, color="grey", label=label)
    left.set(ylabel="mean seconds of a step (simulated)", yscale="log")
    left.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    left.minorticks_off()
    left.legend(frameon=False)
    right.set(ylabel="gradients used per simulated second", ylim=(0, None))
    right.text(4.2, 2, "the paper's choice, 4 of 100", color="grey")
    for panel in (left, right):
        panel.set(xlabel=f"b, spare ones of {MACHINES} simulated machines")
        panel.set_xticks(range(0, 21, 4))
        panel.axvline(4, color="grey", lw=1, ls=":")
        panel.grid(alpha=0.3)
    return figure


def draw_training(spares, target, times, counts):
    """Simulated time, and updates, to the target against b."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (law, colour) in enumerate(zip(LAWS, COLOURS, strict=True)):
        band(left, spares, times[i].T, colour, law, "o-")
        band(right, spares, counts[i].T, colour, law, "o-")
        best = times[i].mean(-1).argmin()
        left.plot(spares[best], times[i, best].mean(), "*", ms=17, color=colour)
    left.set(ylabel=f"simulated seconds to {target:.0%} (test)", yscale="log")
    left.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    left.minorticks_off()
    left.legend(frameon=False)
    right.set(ylabel=f"updates to {target:.0%} (test)", ylim=(0, None))
    for panel in (left, right):
        panel.set(xlabel=f"b, spare ones of {MACHINES} simulated machines")
        panel.grid(alpha=0.3)
    return figure


def main():
    options = arguments(__doc__).parse_args()
    sizes: Any = SHORT if options.quick else FULL
    seeds, spares, target = sizes["seeds"], sizes["spares"], sizes["target"]
    title = "Backup workers: time per step and time to accuracy (simulated)"
    report = Report("reproduce_backup_workers", title, ABOUT, options)
    report.text(f"{seeds} seeds; {sizes['draws']:,} steps each for the times alone.")
    means, carried = step_times(report, sizes["draws"], seeds)
    exact_mean(report)
    times, counts, rates = training(report, seeds, spares, sizes["updates"], target)
    judge_training(report, spares, target, times, counts, rates)
    caption = "Mean time of a step by the order statistic, and what is made of it."
    report.picture(draw_times(means, carried), caption, "steps")
    caption = f"To {target:.0%} of the test images: means, range of seeds; star: least."
    report.picture(draw_training(spares, target, times, counts), caption)
    report.data(step_seconds=means.tolist(), seconds=times.tolist())
    report.data(updates=counts.tolist())
    report.save()


if __name__ == "__main__":
    main()
