"""Reproduction: other merges than the mean, codes of 1 to 4 bits, and bad workers.

python benchmarks/reproduce_merging.py           # twenty minutes alone on two cores
python benchmarks/reproduce_merging.py --quick   # seconds, shows that it runs
"""

import functools
import itertools
from typing import Any

import characters
import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
from by_hand import AXIS, begun, update
from characters import COMMON_RATE, Method, percent
from pictures import Line, Panel
from report import each, of_seeds, processes
from training import workers_step

import optx_sync as oxs

PERIOD, BLOCK = 50, 256
ex, fed = oxs.exchange, oxs.exchange.error_feedback
# An embedding has rows that a worker hardly moves: published with a plain mean. The
# transformer has one table for what comes in and what goes out.
TABLES = "embedding", "output", "table"
DIRECT = {"direct": lambda path: any(name in path for name in TABLES)}
MERGES: dict[str, Any] = {
    "mean": ex.all_reduce,
    "radial": lambda: ex.radial(**DIRECT),
    "penalised": lambda: ex.penalized(warmup=5),
    "clipped to the median": lambda: ex.clipped("median"),
}
OUT = "mean", "radial", "penalised"  # those whose outer rates are sought
# What the first worker multiplies its updates by, and from which part of the run on.
LIES = {"none": (1.0, 0.0), "poisoned": (-10.0, 0.0), "exploding": (1e3, 0.0)}
LIES |= {"poisoned, later": (-10.0, 0.5), "exploding, later": (1e3, 0.5)}
SLOWNESS = 3  # steps of the others for one of the slow worker's
WAYS: dict[str, Any] = {
    "plain": lambda code: code,
    "feedback": fed,
    "feedback, 0.9 kept": lambda code: fed(code, decay=0.9),
    "rotated": lambda code: ex.rotated(code, block=BLOCK),
    "rotated, feedback": lambda code: fed(ex.rotated(code, block=BLOCK)),
}
FULL: Any = {"steps": 1000, "seeds": 3, "rates": (0.2, 0.4, 0.7, 1.0, 1.3)}
FULL |= {"workers": (1, 2, 4, 8, 16), "merges": OUT, "bits": (1, 2, 3, 4)}
FULL |= {"large": ((1, 4, 16), (0.1, 0.2, 0.4, 0.7, 1.0))}  # of the transformer
FULL |= {"ways": tuple(WAYS), "bad": tuple(LIES), "under": tuple(MERGES)}
SHORT: Any = {"steps": 100, "seeds": 1, "rates": (0.7,), "workers": (2,)}
SHORT |= {"merges": ("radial",), "bits": (2,), "ways": ("plain",)}
SHORT |= {"large": ((2,), (0.7,)), "speeds": ("slow, by its steps",)}
SHORT |= {"bad": ("poisoned",), "under": ("penalised",)}


def outer(rate):
    """The published optimizer of the center."""
    return optax.sgd(rate, 0.9, nesterov=True)


def losses_of(method, steps, seeds):
    """The test losses of all seeds."""
    train = characters.make_training(method, steps, 1)
    return characters.all_seeds(train, seeds)["test"]


def merged(merge, period=PERIOD, rate=0.4):
    """DiLoCo with a merge and an outer rate."""
    return characters.meeting(period, outer=outer(rate), exchange=MERGES[merge]())


def at_rate(merge, workers, rate, steps, seeds):
    """With a merge, so many workers and an outer rate."""
    return losses_of(merged(merge, rate=rate)._replace(workers=workers), steps, seeds)


def coded(bits, way, rate=0.4):
    """The method whose contributions travel in so many bits."""
    exchange = WAYS[way](ex.quantized(bits=bits, block=BLOCK, code="lloyd"))
    return characters.meeting(PERIOD, outer=outer(rate), exchange=exchange)


def in_bits(bits, way, steps, seeds):
    """With codes of so many bits."""
    return losses_of(coded(bits, way), steps, seeds)


def of_transformer(merge, workers, rate, steps, seeds):
    """The same of the transformer of the table of all methods, with its AdamW."""
    inner = optax.adamw(methods.rate_of(steps))
    given = {"axis_name": AXIS, "communication_period": PERIOD}
    tx = oxs.diloco(inner, outer=outer(rate), exchange=MERGES[merge](), **given)
    text, test = (jnp.asarray(methods.texts()[name]) for name in ("train", "test"))
    window = jnp.arange(methods.CONTEXT + 1)
    shape = steps, workers, methods.BATCH, 1

    @jax.jit
    def train(start, places):
        step = workers_step(tx, start, jax.grad(methods.loss_of), update)

        def advance(carry, places):
            return step(*carry, text[places + window]), None

        carry = jax.lax.scan(advance, begun(tx, start, workers), places)[0]
        return methods.loss_of(oxs.center_params(carry[1], start), test)

    losses = []
    for seed in range(seeds):
        rng = np.random.default_rng((seed, 1))
        places = rng.integers(0, len(text) - methods.CONTEXT, shape)
        losses.append(float(train(methods.initial(seed), places)))
    return np.array(losses)


def lying(factor, since):
    """Multiplies what the first worker moves, from a step on."""

    def times(step):
        lies = (jax.lax.axis_index(AXIS) == 0) & (step >= since)
        return jnp.where(lies, factor, 1.0)

    return optax.scale_by_schedule(times)


def with_a_bad_one(merge, what, steps, seeds):
    """Where one of the workers is not like the others."""
    factor, since = LIES[what]
    liar = lying(factor, round(since * steps))

    def wrap(inner):
        return merged(merge).wrap(optax.chain(inner, liar))

    return losses_of(Method(wrap, PERIOD), steps, seeds)


def at_its_pace(steps):
    """AdamW, with fewer steps of the first worker, at the rate of the others."""

    def there(step, **_):
        return (jax.lax.axis_index(AXIS) > 0) | (step % SLOWNESS == SLOWNESS - 1)

    slow = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-4))
    rate = optax.cosine_decay_schedule(COMMON_RATE, steps)
    return optax.chain(
        optax.conditionally_mask(slow, there), optax.scale_by_learning_rate(rate)
    )


def one_slow(merge, steps, seeds, weight=1 / SLOWNESS):
    """The first worker makes a third of the steps, and counts as much as `weight`."""

    def wrap(inner):
        tx = merged(merge).wrap(at_its_pace(steps))

        def update(updates, state, params=None):
            own = jnp.where(jax.lax.axis_index(AXIS) == 0, weight, 1.0)
            return tx.update(updates, state, params, weight=own)

        return optax.GradientTransformation(tx.init, update)

    return losses_of(Method(wrap, PERIOD), steps, seeds)


def all_wait(merge, steps, seeds):
    """Of all a third of the steps, and as many meetings."""
    return losses_of(merged(merge, PERIOD // SLOWNESS), steps // SLOWNESS, seeds)


SPEEDS = {
    "at full speed": lambda merge, **plan: losses_of(merged(merge), **plan),
    "slow, by its steps": one_slow,
    "slow, alike": functools.partial(one_slow, weight=1.0),
    "awaited": all_wait,
}
FULL |= {"speeds": tuple(SPEEDS)}


def at_speeds(merge, speed, steps, seeds):
    """Where one of the workers is slow, after the same time."""
    return SPEEDS[speed](merge, steps=steps, seeds=seeds)


def at_point(function, plan, point):
    """The test losses at one point of a grid."""
    return function(*point, **plan)


def everywhere(page, function, plan, *axes):
    """{point: test losses} of a grid, a core a program."""
    at = functools.partial(at_point, function, plan)
    what = function.__name__.replace("_", " ")
    return each(what, at, itertools.product(*axes), processes(page.quick))


def rates_of(page, name, title, found, merges, numbers, rates):
    """A table of the best outer rates, and a panel of the losses at them."""
    rows, best_of = [], {merge: [] for merge in merges}
    for number in numbers:
        cells = []
        for merge in merges:
            losses = np.array([found[merge, number, rate] for rate in rates])
            best = int(losses.mean(1).argmin())
            cells += [rates[best], of_seeds(losses[best], ".3f")]
            best_of[merge].append(losses[best])
        rows.append((number, *cells))
    page.table(name, rows, merges=" | ".join(f"{m} | loss" for m in merges))
    lines = [Line(m, numbers, np.transpose(of)) for m, of in best_of.items()]
    return [Panel("workers", "test loss, best outer rate", lines, title, "x")]


def over_merges(page, name, function, plan, merges, conditions):
    """A table of the losses under each merge, in each condition."""
    losses = everywhere(page, function, plan, merges, conditions)
    rows = [
        (merge, *(of_seeds(losses[merge, at], ".3f") for at in conditions))
        for merge in merges
    ]
    page.table(name, rows, conditions=" | ".join(conditions))


def study(page, settings):
    """Train everything, and write down what was found."""
    plan = {key: settings[key] for key in ("steps", "seeds")}
    merges, numbers, rates = (settings[key] for key in ("merges", "workers", "rates"))
    small = everywhere(page, at_rate, plan, merges, numbers, rates)
    some, of_some = settings["large"]
    large = everywhere(page, of_transformer, plan, merges, some, of_some)
    title = "character model"
    panels = rates_of(page, "rates", title, small, merges, numbers, rates)
    title = "transformer"
    panels += rates_of(page, title, title, large, merges, some, of_some)
    page.picture(panels)
    exact = losses_of(merged("mean"), **plan)
    whole = sum(row.sent for row in characters.sent_by(characters.meeting(PERIOD)))
    rows = []
    losses = everywhere(page, in_bits, plan, settings["bits"], settings["ways"])
    for bits in settings["bits"]:
        sent = sum(row.sent for row in characters.sent_by(coded(bits, "plain")))
        over = [percent(losses[bits, way], exact)[1] for way in settings["ways"]]
        rows.append((bits, f"{sent / whole:.3f}", *over))
    page.table("bits", rows, ways=" | ".join(settings["ways"]))
    under = settings["under"]
    over_merges(page, "bad", with_a_bad_one, plan, under, settings["bad"])
    over_merges(page, "speeds", at_speeds, plan, under, settings["speeds"])
    page.data(settings=settings)


if __name__ == "__main__":
    characters.reproduce("reproduce_merging", __doc__, study, FULL, SHORT)
