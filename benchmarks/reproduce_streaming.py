"""Reproduction: DiLoCo in parts that land a step later, and a round that comes late.

python benchmarks/reproduce_streaming.py           # 5 minutes alone on two cores
python benchmarks/reproduce_streaming.py --quick   # half a minute, shows that it runs
"""

import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

os.environ["NPROC"] = "1"  # A program takes one core, as in `reproduce_diloco`.

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reproduce_diloco as diloco
from report import Line, Panel, of_seeds, reproduce
from rich.progress import track

import optx_sync as oxs

PARTS = 5


class Settings(NamedTuple):
    steps: int
    evaluations: int
    often: int  # the shorter period, and the number of parts in the line without rests
    rare: int
    seeds: int


FULL = Settings(2500, 50, 10, 50, 4)
SHORT = Settings(20, 2, 5, 10, 1)


def variants(settings):
    """name: (period, keywords of `oxs.diloco`, the name it is compared with)."""
    rare, often = settings.rare, settings.often
    half_way, mean = {"delay": 1, "keep_local": 0.5}, {"outer": optax.sgd(1.0)}
    parts, all_parts = {"fragments": PARTS}, {"fragments": often}
    whole, soon = f"at once, H={rare}", f"at once, H={often}"
    means, mean_soon = f"mean at once, H={rare}", f"mean at once, H={often}"
    return {
        whole: (rare, {}, whole),
        f"in {PARTS} parts, H={rare}": (rare, parts, whole),
        f"streaming, H={rare}": (rare, {**parts, **half_way}, whole),
        f"nothing kept, H={rare}": (rare, {**parts, "delay": 1}, whole),
        f"a round late, H={rare}": (rare, {"delay": rare}, whole),
        soon: (often, {}, soon),
        f"streaming, H=P={often}": (often, {**all_parts, **half_way}, soon),
        means: (rare, mean, means),
        f"mean streaming, H={rare}": (rare, {**parts, **half_way, **mean}, means),
        mean_soon: (often, mean, mean_soon),
        f"mean streaming, H=P={often}": (
            often,
            {**all_parts, **half_way, **mean},
            mean_soon,
        ),
    }


def method_of(period, keywords, _):
    """As `reproduce_diloco` describes one."""
    wrap = functools.partial(
        oxs.diloco, axis_name="workers", communication_period=period, **keywords
    )
    return diloco.Method(wrap, period)


def runs_of(name, settings):
    """The runs of one variant, each seed at the common learning rate."""
    method = method_of(*variants(settings)[name])
    train = diloco.make_training(method, settings.steps, settings.evaluations)
    return [train(diloco.COMMON_RATE, seed) for seed in range(settings.seeds)]


def audited(name, settings):
    """(bytes of a worker per step in the mean, bytes at a time, whether in line)."""
    period, keywords, other = variants(settings)[name]
    tx = method_of(period, keywords, other).wrap(diloco.INNER)
    mesh, start = by_hand.mesh_of(diloco.WORKERS), diloco.initial(0)
    params, state, axes = oxs.start_workers(
        tx, start, diloco.WORKERS, mesh=mesh, axis_name="workers"
    )

    def step(params, state, windows):
        grads = jax.grad(diloco.loss_of)(params, windows)
        return oxs.apply_gradients(tx, grads, state, params)

    program: Any = oxs.map_workers(
        step, "workers", mesh=mesh, in_axes=(0, axes, 0), out_axes=(0, axes)
    )
    shape = diloco.WORKERS, diloco.BATCH, diloco.CONTEXT + 1
    rows = oxs.audit.collectives(program, params, state, jnp.zeros(shape, jnp.int32))
    in_line = sum(row.bytes for row in rows if not row.conditional)
    # Each part has a conditional of its own, which is taken once in a period.
    in_rounds = sum(row.bytes for row in rows if row.conditional)
    most = max(row.bytes for row in rows)
    return in_line + in_rounds / period, most, in_rounds == 0


def study(page, settings):
    """Train all variants, a core a program, and read what they send."""
    names = list(variants(settings))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        found = pool.map(functools.partial(runs_of, settings=settings), names)
        runs = dict(zip(names, track(found, "Training", total=len(names)), strict=True))
    loss = {name: np.array([run["test"] for run in runs[name]]) for name in names}
    sent = {name: audited(name, settings) for name in names}
    at_once, parts, streaming, kept_none, late, _, in_line, *of_mean = names

    def over(name):
        return diloco.percent(loss[name], loss[variants(settings)[name][2]])

    rows = []
    for name in names:
        mean, most, _ = sent[name]
        rows.append(
            (
                name,
                of_seeds(loss[name], ".3f"),
                "" if name == variants(settings)[name][2] else over(name)[1],
                int(runs[name][0]["rounds"]),
                round(mean),
                most,
            )
        )
    page.table("losses", rows)
    for key, name in (
        ("streaming", streaming),
        ("in line", in_line),
        ("mean", of_mean[1]),
        ("mean in line", of_mean[3]),
        ("nothing kept", kept_none),
        ("parts", parts),
    ):
        worse, text = over(name)
        page.criterion(key, worse <= 0.5, text, period=variants(settings)[name][0])
    worse, text = over(late)
    beyond = not np.isfinite(worse) or worse >= 2
    page.criterion("late", beyond, text)
    whole = 4 * diloco.parameters()
    mean, most, _ = sent[streaming]
    row = 4 * max(leaf.shape[-1] for leaf in jax.tree.leaves(diloco.initial(0)))
    exact = mean * settings.rare == whole and most <= whole / PARTS + row
    text = f"{mean:,.0f} of {sent[at_once][0]:,.0f} in the mean, {most:,} at most"
    page.criterion("bytes", exact, text, parts=PARTS)
    mean, most, alone = sent[in_line]
    exact = alone and most <= whole / settings.often + row
    page.criterion("no conditional", exact, f"{most:,} bytes in each step")
    every = settings.steps // settings.evaluations
    steps = np.arange(every, settings.steps + 1, every)
    curves = [
        Line(
            name,
            steps,
            np.mean([run["curve"] for run in runs[name]], axis=0),
            "--" if name.startswith("mean") else "-",
        )
        for name in names
    ]
    low = min(min(line.y) for line in curves)
    page.picture(
        [
            Panel(
                "steps",
                "validation loss, nats per character",
                curves,
                ylim=(low - 0.1, low + 1.5),
            )
        ]
    )
    page.data(losses=loss, sent=sent, settings=settings._asdict())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", diloco.WORKERS)
    reproduce(
        "reproduce_streaming",
        __doc__,
        study,
        FULL,
        SHORT,
        parameters=diloco.parameters,
        steps=lambda settings: settings.steps,
        seeds=lambda settings: settings.seeds,
    )
