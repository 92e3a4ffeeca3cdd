"""Reproduction: DiLoCo in parts that land a step later, and a round that comes late.

python benchmarks/reproduce_streaming.py           # minutes on two cores
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


FULL = Settings(5000, 50, 10, 50, 4)
SHORT = Settings(20, 2, 5, 10, 1)


def variants(settings):
    """name: (period, keywords of `oxs.diloco`)."""
    rare, often = settings.rare, settings.often
    half_way = {"delay": 1, "keep_local": 0.5}
    return {
        f"at once, H={rare}": (rare, {}),
        f"in {PARTS} parts, H={rare}": (rare, {"fragments": PARTS}),
        f"streaming, H={rare}": (rare, {"fragments": PARTS, **half_way}),
        f"a round late, H={rare}": (rare, {"delay": rare}),
        f"at once, H={often}": (often, {}),
        f"streaming, H=P={often}": (often, {"fragments": often, **half_way}),
    }


def method_of(period, keywords):
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
    period, keywords = variants(settings)[name]
    tx = method_of(period, keywords).wrap(diloco.INNER)
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
    at_once, parts, streaming, late, often, in_line = names

    def over(name, other):
        return diloco.percent(loss[name], loss[other])

    rows = []
    for name in names:
        other = often if name in (often, in_line) else at_once
        mean, most, _ = sent[name]
        rows.append(
            (
                name,
                of_seeds(loss[name], ".3f"),
                "" if name == other else over(name, other)[1],
                int(runs[name][0]["rounds"]),
                round(mean),
                most,
            )
        )
    page.table("losses", rows)
    for key, name, other, allowed in (
        ("streaming", streaming, at_once, 0.5),
        ("in line", in_line, often, 0.5),
        ("parts", parts, at_once, 0.5),
    ):
        worse, text = over(name, other)
        page.criterion(key, worse <= allowed, text, period=variants(settings)[name][0])
    worse, text = over(late, at_once)
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
        Line(name, steps, np.mean([run["curve"] for run in runs[name]], axis=0))
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
