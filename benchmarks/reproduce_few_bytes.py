"""Reproduction: DiLoCo whose contributions travel in few bytes, with error feedback.

python benchmarks/reproduce_few_bytes.py           # 6 minutes alone on two cores
python benchmarks/reproduce_few_bytes.py --quick   # 20 seconds, shows that it runs
"""

import functools
import multiprocessing
import operator
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import report
import reproduce_diloco as characters
from jax.sharding import PartitionSpec as P
from report import Line, Panel, of_seeds
from reproduce_diloco import COMMON_RATE, WORKERS, Method, percent
from rich.progress import track

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

PERIOD, OFTEN = 50, ", H=5"  # what ends in the latter has that period
OUTER = optax.sgd(1.0, 0.5, nesterov=True)  # the milder one of reproduce_diloco
fed, quantized = oxs.exchange.error_feedback, oxs.exchange.quantized
FEW = oxs.exchange.top_k(82, 4096)  # 2 %
BITS = oxs.exchange.top_k(82, 4096, bits=2)
EXACT = "exact"
EXCHANGES = {
    EXACT: oxs.exchange.all_reduce(),
    "8 bit": fed(quantized(bits=8)),
    "4 bit": fed(quantized(bits=4)),
    "4 bit, no feedback": quantized(bits=4),
    "top 2 %": fed(FEW),
    "top 2 %, no feedback": FEW,
    "top 2 %, 2 bit": fed(BITS),
    "top 2 %, 2 bit, no feedback": BITS,
    EXACT + OFTEN: oxs.exchange.all_reduce(),
    "top 2 %" + OFTEN: fed(FEW),
}
# What a ring sends for each byte that a worker hands to a collective.
RING = {
    "all-reduce": 2 * (WORKERS - 1) / WORKERS,
    "all-to-all": (WORKERS - 1) / WORKERS,
    "all-gather": WORKERS - 1,
}


class Settings(NamedTuple):
    steps: int
    evaluations: int
    seeds: int
    exchanges: tuple[str, ...]


FULL = Settings(5000, 50, 4, tuple(EXCHANGES))
SHORT = Settings(50, 1, 1, (EXACT, "4 bit"))


def method_of(name):
    """DiLoCo with one of the exchanges."""
    period = int(OFTEN[-1]) if name.endswith(OFTEN) else PERIOD
    wrap = functools.partial(
        oxs.diloco,
        axis_name="workers",
        communication_period=period,
        outer=OUTER,
        exchange=EXCHANGES[name],
    )
    return Method(wrap, period)


def study_of(name, settings):
    """All seeds of one exchange: the curve, and test losses."""
    train = characters.make_training(
        method_of(name), settings.steps, settings.evaluations
    )
    runs = [train(COMMON_RATE, seed) for seed in range(settings.seeds)]
    return {
        "rounds": int(runs[0]["rounds"]),
        "curve": np.mean([run["curve"] for run in runs], axis=0),
        "test": np.array([run["test"] for run in runs]),
    }


def bytes_of_a_round(name):
    """What a worker sends in a round, read from the compiled exchange."""
    exchange, params = EXCHANGES[name], characters.initial(0)
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def meet(tree):
        tree = oxs.unstack(tree)
        return exchange.meet(
            tree, oxs.localize(exchange.init(tree), "workers"), "workers"
        )[0]

    program = jax.jit(
        jax.shard_map(meet, mesh=mesh, in_specs=P("workers"), out_specs=P())
    )
    rows = oxs.audit.collectives(program, oxs.stack(params, WORKERS))
    return round(sum(RING[row.kind] * row.bytes for row in rows))


def exact_of(name):
    """The name of the exact exchange with the same period."""
    return EXACT + OFTEN * name.endswith(OFTEN)


def look_of(name):
    """How its line and its point are drawn."""
    if name.endswith(OFTEN):
        return "--", "D"
    return (":", "x") if "no " in name else ("-", "o")


def judge(page, studies):
    """Print each criterion as met or not."""

    def over(name, than):
        return percent(studies[name]["test"], studies[than]["test"])

    allowances = {"8 bit": 0.3, "4 bit": 0.3, "top 2 %": 1.0, "top 2 %" + OFTEN: 1.0}
    for name, allowed in allowances.items():
        if name not in studies:
            continue
        worse, found = over(name, exact_of(name))
        page.criterion("near", worse <= allowed, found, name=name, allowed=allowed)
    for name in ("top 2 %", "top 2 %, 2 bit"):
        if name not in studies:
            continue
        worse, found = over(f"{name}, no feedback", name)
        least = 1.0 if "2 bit" in name else 0.0
        page.criterion("feedback", worse > least, found, name=name, least=least)


def study(page, settings):
    """Train everything, a core a program, and write down what was found."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        names = settings.exchanges
        runs = pool.map(functools.partial(study_of, settings=settings), names)
        runs = track(runs, "Training", total=len(names))
        studies: dict[str, Any] = dict(zip(names, runs, strict=True))
    sent = {name: bytes_of_a_round(name) for name in names}
    rows = [
        (
            name,
            of_seeds(found["test"], ".3f"),
            ""
            if name == exact_of(name)
            else percent(found["test"], studies[exact_of(name)]["test"])[1],
            sent[name],
            f"{sent[name] / sent[EXACT]:.3f}",
        )
        for name, found in studies.items()
    ]
    page.table("losses", rows)
    judge(page, studies)
    page.data(settings=settings._asdict(), studies=studies, bytes=sent)
    every = settings.steps // settings.evaluations
    steps = np.arange(every, settings.steps + 1, every)
    curves = [
        Line(name, steps, found["curve"], look_of(name)[0])
        for name, found in studies.items()
    ]
    ends = [
        Line(
            name,
            [found["rounds"] * sent[name]],
            np.reshape(found["test"], (-1, 1)),
            look_of(name)[1],
        )
        for name, found in studies.items()
    ]
    loss = "loss, nats per character"
    page.picture(
        [
            Panel("steps", f"validation {loss}", curves),
            Panel(f"bytes that each of {WORKERS} sent", f"test {loss}", ends, log="x"),
        ]
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    values = {"text": lambda settings: characters.read_text()[0]}
    values |= {"parameters": characters.parameters}
    values |= {name: operator.attrgetter(name) for name in ("steps", "seeds")}
    report.reproduce("reproduce_few_bytes", __doc__, study, FULL, SHORT, **values)
