"""Reproduction: DiLoCo and local SGD against synchronous data parallel training.

    python benchmarks/reproduce_diloco.py           # 7 minutes alone on two cores
    python benchmarks/reproduce_diloco.py --quick   # 20 seconds, shows that it runs

A character language model learns the documentation that comes with Python: 1 worker,
4 workers whose gradients are averaged in every step, and 4 workers that meet every H
steps, under DiLoCo or plain averaging of parameters. Measured are the loss on text that
was held out, and what a worker hands to collectives, read from the compiled programs.
The workers are simulated on one device with `jax.vmap`, so no time is measured.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

# A program takes one core, and as many run at a time as there are cores: faster than
# threads inside of small matrix products. XLA reads the size of its pool from NPROC.
os.environ["NPROC"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from character_model import CONTEXT, initial, loss_of, read_text
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.progress import track

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

WORKERS, BATCH = 4, 32  # windows of text per worker and step
ENOUGH_ROUNDS = 50  # fewer are over before an outer momentum of 0.9 pays
SYNC, ONE = "data parallel", "1 worker"
MILDER, PLAIN = "DiLoCo 1.0/0.5", "DiLoCo by SGD(1)"  # other outer optimizers
COMMON_RATE = 2e-3
COLORS = ("#4477AA", "#EE6677", "#228833")
ABOUT = """
A character language model (12 characters, embedded; one hidden layer; the next
character: {parameters:,} parameters) learns the text of `pydoc_data.topics` of Python's
standard library: {length:,} characters, sha256 `{sha256}`.
The text repeats whole pages. A paragraph that stood before is left out, so that nothing
held out is trained on: {kept:,} characters remain, of an alphabet of {alphabet}. Of 100
blocks of it 5 are for validation and 5 for the test.

4 workers, simulated on one device with `jax.vmap(axis_name=...)`, each with 32 windows
of text per step, {steps:,} steps; AdamW with a cosine schedule. The outer optimizer of
DiLoCo is Nesterov SGD of rate 0.7 and momentum 0.9, as published. Workers draw from the
whole text (iid), or each from its own contiguous quarter (non-iid, at the rate of iid).
Each method has the learning rate with the least validation loss of the first seed:
0.002 is doubled, or halved, for as long as that falls. The criteria are for the
published outer optimizer. Beside it stands a milder one, Nesterov SGD of rate 1.0 and
momentum 0.5, the best of four that were tried for H=50 on the validation text with one
seed (0.7/0.5, 1.0/0.5, 0.4/0.9, 0.3/0.8).

Losses are in nats per character of the test text: means over {seeds} seeds (least to
largest). Percentages are of losses, each seed against itself: the same seed gives every
method the same initial parameters and windows.
"""


class Settings(NamedTuple):
    """How large the study is."""

    steps: int
    evaluations: int
    periods: tuple[int, ...]
    checked: tuple[int, ...]  # periods at which two programs are compared bit by bit
    seeds: int
    sweep: bool  # whether learning rates are chosen


class Method(NamedTuple):
    """How workers agree: `wrap` takes each worker's own optimizer."""

    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    period: int = 0  # steps between rounds; 0: there is no center
    workers: int = WORKERS


FULL = Settings(5000, 50, (10, 50, 100), (10, 50, 100), 4, True)
SHORT = Settings(200, 4, (10, 50), (10,), 2, False)


def methods(periods):
    """All methods by name, those that take longest first."""
    found, milder = {}, optax.sgd(1.0, 0.5, nesterov=True)
    for name, wrapper in (
        ("DiLoCo", oxs.diloco),
        (MILDER, functools.partial(oxs.diloco, outer=milder)),
        ("averaging", oxs.local_sgd),
        (PLAIN, functools.partial(oxs.diloco, outer=optax.sgd(1.0))),
    ):
        for period in periods:
            keywords = {"axis_name": "workers", "communication_period": period}
            wrap = functools.partial(wrapper, **keywords)
            found[f"{name}, H={period}"] = Method(wrap, period)
    found[SYNC] = Method(functools.partial(oxs.cross_shard, axis_name="workers"))
    return found | {ONE: Method(lambda inner: inner, workers=1)}


def draw_places(steps, seed, iid):
    """Where windows start: [steps, WORKERS, BATCH], the same for every method."""
    edges = np.linspace(0, len(read_text()[1]), WORKERS + 1).astype(int)[:, None]
    low, high = (0, edges[-1]) if iid else (edges[:-1], edges[1:])
    shape = steps, WORKERS, BATCH
    return np.random.default_rng([seed, 1]).integers(low, high - CONTEXT, shape)


def make_step(tx):
    """One worker's own step; of the others it knows the name of an axis."""

    def step(params, state, windows):
        grads = jax.grad(loss_of)(params, windows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def make_training(method, steps, evaluations):
    """`(rate, seed, iid) -> dict` of losses and parameters; it is compiled once."""
    _, *texts = read_text()

    def train(rate, start, places, text, validation, test):
        tx = method.wrap(optax.adamw(optax.cosine_decay_schedule(rate, steps)))
        # Counters have no worker axis: the conditional around a round stays one.
        axes = oxs.state_axes(tx, start)
        step: Any = jax.vmap(
            make_step(tx), (0, axes, 0), (0, axes), axis_name="workers"
        )

        def advance(carry, first):
            windows = text[first[..., None] + jnp.arange(CONTEXT + 1)]
            return step(*carry, windows), None

        def evaluated(params, state):
            return oxs.center_params(state, start) if method.period else params

        def until_evaluation(carry, places):
            params, state = jax.lax.scan(advance, carry, places)[0]
            center = evaluated(oxs.unstack(params), state)
            return (params, state), loss_of(center, validation[::4])

        state = oxs.stack(tx.init(start), method.workers, axes)
        carry = oxs.stack(start, method.workers), state
        places = places.reshape(evaluations, -1, *places.shape[1:])
        (params, state), curve = jax.lax.scan(until_evaluation, carry, places)
        center = evaluated(oxs.unstack(params), state)
        return {
            "curve": curve,
            "validation": loss_of(center, validation),
            "test": loss_of(center, test),
            "rounds": oxs.metrics(state).rounds if method.period else 0,
            "params": (params, center),
        }

    compiled = jax.jit(train)

    def run(rate, seed, iid=True):
        places = draw_places(steps, seed, iid)[:, : method.workers].astype(np.int32)
        return jax.device_get(compiled(rate, initial(seed), places, *texts))

    return run


def try_rates(loss_at):
    """{rate: loss}: the common rate is doubled, or halved, while the loss falls."""
    losses = {COMMON_RATE: loss_at(COMMON_RATE)}
    for factor in (2.0, 0.5):
        rate = COMMON_RATE
        while losses[rate] == min(losses.values()):
            rate *= factor
            losses[rate] = loss_at(rate)
    return losses


def study(name, settings):
    """All runs of one method: a sweep, then each seed at its best and a common rate."""
    method, seeds = methods(settings.periods)[name], range(settings.seeds)
    train = make_training(method, settings.steps, settings.evaluations)
    train = functools.cache(train)

    def validation_loss(rate):
        return float(train(rate, 0)["validation"])

    sweep = {COMMON_RATE: validation_loss(COMMON_RATE)}
    if settings.sweep:
        sweep = try_rates(validation_loss)
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


def count_differences(period):
    """Numbers in which DiLoCo by SGD(1) and averaging differ in any bit.

    Of the workers' parameters and of the center, after ten rounds.
    """
    found, bits = methods([period]), []
    for name in ("averaging", PLAIN):
        train = make_training(found[f"{name}, H={period}"], 10 * period, 1)
        leaves = jax.tree.leaves(train(COMMON_RATE, 0)["params"])
        bits.append(np.concatenate([leaf.view(np.int32).ravel() for leaf in leaves]))
    return int(np.sum(bits[0] != bits[1]))


def count_bytes(periods, names):
    """{method: (bytes in every step, bytes in a round)} of a worker's collectives.

    They are read from the same steps under `jax.shard_map`, each worker on a device.
    """
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = jax.make_mesh((WORKERS,), ("workers",), axis_types=(AxisType.Auto,))
    start, own, found = initial(0), P("workers"), {}
    windows = jax.ShapeDtypeStruct((WORKERS, BATCH, CONTEXT + 1), jnp.int32)
    for name in names:
        tx = methods(periods)[name].wrap(optax.adamw(COMMON_RATE))
        axes = oxs.state_axes(tx, start)
        specs = (own, oxs.state_specs(tx, start, P(), "workers"))

        def on_device(params, state, windows, tx=tx, axes=axes):
            params, state = oxs.unstack(params), oxs.unstack(state, axes)
            params, state = make_step(tx)(params, state, windows[0])
            return oxs.stack(params, 1), oxs.stack(state, 1, axes)

        def all_start(tx=tx, axes=axes):
            state = oxs.stack(tx.init(start), WORKERS, axes)
            return oxs.stack(start, WORKERS), state

        step = jax.shard_map(
            on_device, mesh=mesh, in_specs=(*specs, own), out_specs=specs
        )
        rows = oxs.audit.collectives(step, *jax.eval_shape(all_start), windows)
        always = sum(row.bytes for row in rows if not row.conditional)
        found[name] = always, sum(row.bytes for row in rows) - always
    return found


def shown(numbers, form="+.2f", unit=" %"):
    """The mean (least to largest)."""
    low, high = min(numbers), max(numbers)
    return f"{np.mean(numbers):{form}}{unit} ({low:{form}} to {high:{form}})"


def percent(losses, than):
    """How much larger they are."""
    return 100 * (losses / than - 1)


def draw(studies, sent, settings):
    """Left the loss against steps, right the final loss against bytes."""
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    every = settings.steps // settings.evaluations
    steps = np.arange(every, settings.steps + 1, every)
    for name, found in studies.items():
        family, _, period = name.partition(", H=")
        if family == MILDER:
            continue
        color = {SYNC: "black", ONE: "0.5"}.get(name)
        color = color or COLORS[settings.periods.index(int(period))]
        look = {"averaging": "--", ONE: ":"}.get(family, "-")
        left.plot(steps, found["curve"], look, color=color, label=name)
    one = studies[ONE]["iid"].mean()
    right.axhline(one, color="0.5", linestyle=":", label=f"{ONE}, sends nothing")
    for family, kind, look, color in (
        (SYNC, "iid", "*", "black"),
        ("DiLoCo,", "iid", "o-", "#AA3377"),
        ("DiLoCo,", "non-iid", "D:", "#66CCEE"),
        (MILDER, "iid", "^-.", "#228833"),
        ("averaging", "iid", "s--", "#CCBB44"),
    ):
        names = [name for name in studies if name.startswith(family)]
        x, losses = [sent[n] for n in names], [studies[n][kind] for n in names]
        label = f"{family} {kind}" if family == "DiLoCo," else family
        right.plot(x, np.mean(losses, axis=1), look, color=color, label=label)
        right.vlines(x, np.min(losses, 1), np.max(losses, 1), color=color)
    left.set(xlabel="steps", ylabel="validation loss (nats per character)")
    left.set_ylim(studies[SYNC]["curve"].min() - 0.1, one + 0.6)
    right.set(xscale="log", xlabel=f"bytes that each of {WORKERS} workers sent")
    right.set(ylabel="final test loss (nats per character)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    return figure


def judge(page, settings, studies, bytes_of, differences):
    """Print each criterion as met or not."""

    def compare(what, period, other, allowed):
        """DiLoCo with another method; if it is no better, what else was tried."""
        diloco, milder = (studies[f"{n}, H={period}"] for n in ("DiLoCo", MILDER))
        worse = percent(diloco["iid"], studies[other]["iid"])
        mild = shown(percent(milder["iid"], studies[other]["iid"]))
        common = shown(percent(diloco["common"], studies[other]["common"]))
        page.criterion(
            f"DiLoCo, H={period}: {what}",
            worse.mean() < allowed,
            shown(worse),
            f"With the milder outer optimizer it is {mild}. With the learning rate "
            f"{COMMON_RATE} for both it is {common}; {diloco['rate']:g} and "
            f"{studies[other]['rate']:g} were chosen.",
        )

    for period, allowed in ((10, 1), (50, 3)):
        what = f"at most {allowed} % over data parallel"
        compare(what, period, SYNC, allowed)
    for period in settings.periods:
        diloco = studies[f"DiLoCo, H={period}"]
        if diloco["rounds"] >= ENOUGH_ROUNDS:
            what = f"less than averaging, in {diloco['rounds']} rounds"
            compare(what, period, f"averaging, H={period}", 0)
        worse = percent(diloco["non-iid"], diloco["iid"])
        what = f"DiLoCo, H={period}: non-iid costs at most 2 %"
        page.criterion(what, worse.mean() <= 2, shown(worse))
    in_step, in_round = bytes_of[SYNC]
    exact = in_round == 0
    for name, method in methods(settings.periods).items():
        if method.period and name in studies:
            quiet, meeting = bytes_of[name]
            total = quiet * settings.steps + meeting * studies[name]["rounds"]
            exact &= method.period * total == in_step * settings.steps
    page.criterion(
        "bytes per step are exactly 1/H of data parallel's, DiLoCo's and averaging's",
        exact,
        f"{in_step:,} in every step, as many in a round inside of a conditional",
    )
    page.criterion(
        "DiLoCo by SGD(1) without momentum is averaging, bit by bit",
        not any(differences.values()),
        ", ".join(f"H={h}: {n:,} numbers differ" for h, n in differences.items()),
    )


def main():
    """Train everything, a core a program, and write down what was found."""
    options = report.arguments(__doc__).parse_args()
    settings = SHORT if options.quick else FULL
    facts, parameters = read_text()[0], sum(map(jnp.size, initial(0).values()))
    values = {**facts, **settings._asdict(), "parameters": parameters}
    about, title = ABOUT.format_map(values), "DiLoCo and local SGD, reproduced"
    page = report.Report("reproduce_diloco", title, about, options)
    print(about)

    spawn = multiprocessing.get_context("spawn")
    names = [name for name in methods(settings.periods) if PLAIN not in name]
    with ProcessPoolExecutor(1, spawn) as one:  # it has devices of its own
        bytes_of = one.submit(count_bytes, settings.periods, names)
        with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
            runs = pool.map(functools.partial(study, settings=settings), names)
            differ = pool.map(count_differences, settings.checked)
            studies = track(runs, "Training", total=len(names))
            studies = dict(zip(names, studies, strict=True))
            differences = dict(zip(settings.checked, differ, strict=True))
        bytes_of = bytes_of.result()

    sent, rows = {}, []
    for name, found in studies.items():
        in_step, in_round = bytes_of[name]
        sent[name] = in_step * settings.steps + in_round * found["rounds"]
        for kind in ("iid", "non-iid")[: 1 + ("non-iid" in found)]:
            over = shown(percent(found[kind], studies[SYNC]["iid"]))
            label = name if kind == "iid" else f"{name}, {kind}"
            losses = shown(found[kind], ".3f", "")
            over = "" if name == SYNC else over
            rows.append((label, losses, over, f"{found['rate']:g}", sent[name]))
    columns = ("method", "test loss", "over data parallel", "rate", "bytes sent")
    page.table("Held-out loss, and bytes that a worker sent", columns, rows)
    judge(page, settings, studies, bytes_of, differences)
    rates = sorted({rate for found in studies.values() for rate in found["sweep"]})
    rows = []
    for name, found in studies.items():
        sweep = [
            f"{found['sweep'][r]:.3f}" if r in found["sweep"] else "" for r in rates
        ]
        rows.append((name, *sweep, shown(found["common"], ".3f", "")))
    columns = (
        "method",
        *(f"{r:g}" for r in rates),
        f"test loss, {COMMON_RATE}, all seeds",
    )
    page.table("Validation loss of the first seed by learning rate", columns, rows)
    often, rare = settings.periods[0], settings.periods[-1]
    ends = (studies[f"DiLoCo, H={period}"]["iid"] for period in (rare, often))
    cost = 100 * np.expm1(np.subtract(*ends))
    page.text(
        "Published, not measured here: from H=50 to H=1000, 20 times less sent, "
        "perplexity rises by 2.9 % (Douillard et al., DiLoCo: Distributed Low-"
        "Communication Training of Language Models, 2023; transformers on C4, 88,000 "
        f"steps). Here, from H={often} to H={rare}, {rare // often} times less, it "
        f"changes by {shown(cost)}."
    )
    page.data(facts=facts, parameters=parameters, settings=settings._asdict())
    page.data(
        studies=jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), studies),
        bytes=bytes_of,
        differences=differences,
    )
    page.picture(
        draw(studies, sent, settings),
        "Means over seeds. Vertical lines: from the least to the largest.",
    )
    page.save()


if __name__ == "__main__":
    main()
