"""Reproduction: DiLoCo and local SGD against synchronous data parallel training.

python benchmarks/reproduce_diloco.py           # 7 minutes alone on two cores
python benchmarks/reproduce_diloco.py --quick   # 20 seconds, shows that it runs
"""

import functools
import hashlib
import operator
import os
import pydoc_data.topics
from typing import Any, NamedTuple

# A program takes one core, and as many run at a time as there are cores: faster than
# threads inside of small matrix products. XLA reads the size of its pool from NPROC.
os.environ["NPROC"] = "1"

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from report import Line, Panel, of_seeds

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

CONTEXT, EMBEDDING, HIDDEN = 12, 16, 272  # characters seen, and the layers' widths
WORKERS, BATCH = 4, 32  # windows of text per worker and step
ENOUGH_ROUNDS = 50  # fewer are over before an outer momentum of 0.9 pays
SYNC, ONE = "data parallel", "1 worker"
MILDER = "DiLoCo 1.0/0.5"  # with another outer optimizer
COMMON_RATE = 2e-3
INNER = optax.adamw(COMMON_RATE)


class Settings(NamedTuple):
    steps: int
    evaluations: int
    periods: tuple[int, ...]
    seeds: int
    sweep: bool  # whether learning rates are chosen


class Method(NamedTuple):
    """How workers agree: `wrap` takes each worker's own optimizer."""

    wrap: Any
    period: int = 0  # steps between rounds; 0: there is no center
    workers: int = WORKERS


FULL = Settings(5000, 50, (10, 50, 100), 4, True)
SHORT = Settings(60, 2, (10,), 2, False)


@functools.cache
def read_text():
    """(facts, training characters, validation windows, test windows), as numbers."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    text = "\n\n".join(dict.fromkeys(whole.split("\n\n")))
    alphabet, codes = np.unique(list(text), return_inverse=True)
    blocks = np.array_split(codes.astype(np.int32), 100)
    views = functools.partial(
        np.lib.stride_tricks.sliding_window_view, window_shape=CONTEXT + 1
    )
    held_out = [np.concatenate(list(map(views, blocks[n::20]))) for n in (9, 19)]
    train = [block for number, block in enumerate(blocks) if number % 10 != 9]
    sha256 = hashlib.sha256(whole.encode()).hexdigest()
    facts = {"length": len(whole), "sha256": sha256, "kept": len(text)}
    return facts | {"alphabet": len(alphabet)}, np.concatenate(train), *held_out


def initial(seed):
    """Parameters of the model."""
    normal = np.random.default_rng(seed).standard_normal
    alphabet, width = read_text()[0]["alphabet"], CONTEXT * EMBEDDING
    params = {
        "embedding": normal((alphabet, EMBEDDING)),
        "hidden": normal((width, HIDDEN)) / width**0.5,
        "hidden_bias": np.zeros(HIDDEN),
        "output": normal((HIDDEN, alphabet)) / HIDDEN**0.5,
        "output_bias": np.zeros(alphabet),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def loss_of(params, windows):
    """Nats per character: the last of each window, given those before it."""
    before, after = windows[:, :-1], windows[:, -1]
    inputs = params["embedding"][before].reshape(len(windows), -1)
    hidden = jnp.tanh(inputs @ params["hidden"] + params["hidden_bias"])
    logits = hidden @ params["output"] + params["output_bias"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, after).mean()


def methods(periods):
    """All methods by name, those that take longest first."""
    milder = optax.sgd(1.0, 0.5, nesterov=True)
    found = {
        f"{name}, H={period}": Method(
            functools.partial(wrap, axis_name="workers", communication_period=period),
            period,
        )
        for name, wrap in {
            "DiLoCo": oxs.diloco,
            MILDER: functools.partial(oxs.diloco, outer=milder),
            "averaging": oxs.local_sgd,
        }.items()
        for period in periods
    }
    found[SYNC] = Method(functools.partial(oxs.cross_shard, axis_name="workers"))
    return found | {ONE: Method(lambda inner: inner, workers=1)}


def draw_places(steps, seed, iid):
    """Where windows start: [steps, WORKERS, BATCH], the same for every method."""
    edges = np.linspace(0, len(read_text()[1]), WORKERS + 1).astype(int)[:, None]
    low, high = (0, edges[-1]) if iid else (edges[:-1], edges[1:])
    shape = steps, WORKERS, BATCH
    return np.random.default_rng([seed, 1]).integers(low, high - CONTEXT, shape)


def make_training(method, steps, evaluations):
    """`(rate, seed, iid) -> dict` of losses and parameters; it is compiled once."""
    _, text, *held_out = read_text()
    # A short run, which shows only that it runs, looks at few windows.
    texts = text, *(windows[:: max(1, 1000 // steps)] for windows in held_out)

    @jax.jit
    def train(rate, start, places, text, validation, test):
        tx = method.wrap(optax.adamw(optax.cosine_decay_schedule(rate, steps)))
        # Counters have no worker axis: the conditional around a round stays one.
        axes = oxs.state_axes(tx, start)

        def one(params, state, windows):
            grads = jax.grad(loss_of)(params, windows)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step: Any = jax.vmap(one, (0, axes, 0), (0, axes), axis_name="workers")

        def advance(carry, first):
            windows = text[first[..., None] + jnp.arange(CONTEXT + 1)]
            return step(*carry, windows), None

        def evaluated(params, state):
            params = oxs.unstack(params)
            return oxs.center_params(state, start) if method.period else params

        def until_evaluation(carry, places):
            carry = jax.lax.scan(advance, carry, places)[0]
            return carry, loss_of(evaluated(*carry), validation[::4])

        state = oxs.stack(tx.init(start), method.workers, axes)
        carry = oxs.stack(start, method.workers), state
        places = places.reshape(evaluations, -1, *places.shape[1:])
        (params, state), curve = jax.lax.scan(until_evaluation, carry, places)
        center = evaluated(params, state)
        return {
            "curve": curve,
            "validation": loss_of(center, validation),
            "test": loss_of(center, test),
            "rounds": oxs.metrics(state).rounds if method.period else 0,
        }

    def run(rate, seed, iid=True):
        places = draw_places(steps, seed, iid)[:, : method.workers].astype(np.int32)
        return jax.device_get(train(rate, initial(seed), places, *texts))

    return functools.cache(run)


def try_rates(loss_at, others=True):
    """{rate: loss}: the common rate is doubled, or halved, while the loss falls."""
    losses = {COMMON_RATE: loss_at(COMMON_RATE)}
    for factor in (2.0, 0.5) if others else ():
        rate = COMMON_RATE
        while losses[rate] == min(losses.values()):
            rate *= factor
            losses[rate] = loss_at(rate)
    return losses


def study_of(name, settings):
    """All runs of one method: a sweep, then each seed at its best and a common rate."""
    method, seeds = methods(settings.periods)[name], range(settings.seeds)
    train = make_training(method, settings.steps, settings.evaluations)

    def loss_at(rate):
        return float(train(rate, 0)["validation"])

    sweep = try_rates(loss_at, settings.sweep)
    best = min(sweep, key=lambda rate: sweep[rate])
    runs = {"iid": [train(best, seed) for seed in seeds]}
    runs["common"] = [train(COMMON_RATE, seed) for seed in seeds]
    if name.startswith("DiLoCo,"):
        runs["non-iid"] = [train(best, seed, iid=False) for seed in seeds]
    (rounds,) = {int(run["rounds"]) for kind in runs.values() for run in kind}
    return {
        "rate": best,
        "rounds": rounds,
        "sweep": sweep,
        "curve": np.mean([run["curve"] for run in runs["iid"]], axis=0),
        **{kind: np.array([run["test"] for run in runs[kind]]) for kind in runs},
    }


def count_bytes(method):
    """(Bytes in every step, bytes in a round) of a worker's collectives.

    They are read from the same step compiled for a device for each worker.
    """
    tx, start = method.wrap(INNER), initial(0)
    made = by_hand.under_vmap(tx, start, WORKERS, jax.grad(loss_of))
    place = NamedSharding(by_hand.mesh_of(WORKERS), P("workers"))
    shape = WORKERS, BATCH, CONTEXT + 1
    windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    found = by_hand.contents(made.program.lower(made.carry, windows).compile())
    return found["every step"], found["round"]


def percent(losses, than):
    """How much larger they are, in percent: the mean, and all seeds' range."""
    worse = 100 * (losses / than - 1)
    return worse.mean(), of_seeds(worse, "+.2f", " %")


def pictures(studies, sent, settings):
    """The loss against steps, and the final loss against bytes."""
    every = settings.steps // settings.evaluations
    steps = np.arange(every, settings.steps + 1, every)
    looks = {"averaging": "--", ONE: ":"}
    curves = [
        Line(name, steps, one["curve"], looks.get(name.partition(", H=")[0], "-"))
        for name, one in studies.items()
        if MILDER not in name
    ]
    ends = []
    for family, kind, look in (
        (SYNC, "iid", "*"),
        ("DiLoCo,", "iid", "o-"),
        ("DiLoCo,", "non-iid", "D:"),
        (MILDER, "iid", "^-."),
        ("averaging", "iid", "s--"),
    ):
        names = [name for name in studies if name.startswith(family)]
        losses = np.transpose([studies[n][kind] for n in names])
        ends.append(Line(f"{family} {kind}", [sent[n] for n in names], losses, look))
    loss = "loss, nats per character"
    low, high = studies[SYNC]["curve"].min() - 0.1, studies[ONE]["iid"].mean() + 0.6
    return [
        Panel("steps", f"validation {loss}", curves, ylim=(low, high)),
        Panel(f"bytes that each of {WORKERS} sent", f"test {loss}", ends, log="x"),
    ]


def judge(page, settings, studies, bytes_of):
    """Print each criterion as met or not."""

    def compare(key, period, other, allowed, rounds=0):
        """DiLoCo with another method; if it is no better, what else was tried."""
        diloco, milder = (studies[f"{n}, H={period}"] for n in ("DiLoCo", MILDER))
        worse, found = percent(diloco["iid"], studies[other]["iid"])
        because = (
            "With the milder outer optimizer it is "
            f"{percent(milder['iid'], studies[other]['iid'])[1]}. With the learning "
            f"rate {COMMON_RATE} for both it is "
            f"{percent(diloco['common'], studies[other]['common'])[1]}; "
            f"{diloco['rate']:g} and {studies[other]['rate']:g} were chosen."
        )
        where = {"period": period, "allowed": allowed, "rounds": rounds}
        page.criterion(key, worse < allowed, found, because, **where)

    for period in sorted({10, 50} & set(settings.periods)):
        allowed = {10: 1, 50: 3}[period]
        compare("data parallel", period, SYNC, allowed)
    for period in settings.periods:
        diloco = studies[f"DiLoCo, H={period}"]
        if diloco["rounds"] >= ENOUGH_ROUNDS:
            other = f"averaging, H={period}"
            compare("averaging", period, other, 0, diloco["rounds"])
        worse, found = percent(diloco["non-iid"], diloco["iid"])
        page.criterion("non-iid", worse <= 2, found, period=period)
    steps, (in_step, in_round) = settings.steps, bytes_of[SYNC]
    exact = in_round == 0
    for name, (_, period, _) in methods(settings.periods).items():
        if period and name in studies:
            total = np.dot(bytes_of[name], (steps, studies[name]["rounds"]))
            exact &= bool(period * total == in_step * steps)
    found = f"{in_step:,} in every step, as many in a round inside of a conditional"
    page.criterion("bytes", exact, found)


def study(page, settings):
    """Train everything, a core a program, and write down what was found."""
    names = list(methods(settings.periods))
    of_name = functools.partial(study_of, settings=settings)
    studies = report.each("Training", of_name, names, report.processes(settings.sweep))
    bytes_of = {n: count_bytes(of) for n, of in methods(settings.periods).items()}

    sent, losses, sweeps = {}, [], []
    rates = sorted({rate for found in studies.values() for rate in found["sweep"]})
    for name, found in studies.items():
        rounds, tried = found["rounds"], found["sweep"]
        sent[name] = int(np.dot(bytes_of[name], (settings.steps, rounds)))
        for kind in ("iid", "non-iid")[: 1 + ("non-iid" in found)]:
            over = "" if name == SYNC else percent(found[kind], studies[SYNC]["iid"])[1]
            label = name if kind == "iid" else f"{name}, {kind}"
            of_kind = of_seeds(found[kind], ".3f")
            losses.append((label, of_kind, over, f"{found['rate']:g}", sent[name]))
        sweep = (f"{tried[r]:.3f}" if r in tried else "" for r in rates)
        sweeps.append((name, *sweep, of_seeds(found["common"], ".3f")))
    page.table("losses", losses)
    judge(page, settings, studies, bytes_of)
    page.table("rates", sweeps, rates=" | ".join(f"{r:g}" for r in rates))
    often, rare = settings.periods[0], settings.periods[-1]
    ends = (studies[f"DiLoCo, H={period}"]["iid"] for period in (rare, often))
    cost = of_seeds(100 * np.expm1(np.subtract(*ends)), "+.2f", " %")
    page.text("published", often=often, rare=rare, times=rare // often, cost=cost)
    facts, kept = read_text()[0], settings._asdict()
    page.data(facts=facts, parameters=parameters(), settings=kept)
    page.data(studies=studies, bytes=bytes_of)
    page.picture(pictures(studies, sent, settings))


def parameters(_=None):
    """How many numbers the model has."""
    return sum(map(jnp.size, initial(0).values()))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    values = {"text": lambda settings: read_text()[0], "parameters": parameters}
    values |= {name: operator.attrgetter(name) for name in ("steps", "seeds")}
    report.reproduce("reproduce_diloco", __doc__, study, FULL, SHORT, **values)
