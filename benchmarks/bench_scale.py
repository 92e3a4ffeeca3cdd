"""What grows with the number of workers, with the period, and with the parameters.

    python benchmarks/bench_scale.py            # five minutes on two cores
    python benchmarks/bench_scale.py --quick    # few devices and leaves, half a minute

Bytes that a worker hands to collectives, memory of a worker, and the time that it takes
to trace, lower and compile a step, each beside the step written by hand (`by_hand.py`)
and beside Optax alone. Programs for many devices are compiled, not run: the devices
are forced, in a process of its own for each number. Simulated workers, `jax.vmap` on
one device, are run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

# Threads to spare for the devices, or a collective may wait for ever: see Makefile.
os.environ.setdefault("NPROC", "16")

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from by_hand import AXIS, CASES, INNER, RULES
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from programs import contents
from rich.progress import track

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

LIMIT, FLOATS, LEAVES = 1.1, 1_000_000, 8
HAND, AGAIN, LIBRARY, OPTAX = "by hand", "by hand again", "library", "Optax alone"
parser = report.arguments(__doc__)
parser.add_argument("--part", choices=("devices", "leaves"), help="used by itself")
parser.add_argument("--number", type=int, default=8, help="used by itself")
options = parser.parse_args()
DEVICES = (2, 8) if options.quick else (8, 32, 128, 512)
WORKERS = (8, 32) if options.quick else (8, 16, 32, 64, 128, 256, 512)
COUNTS = (10, 30) if options.quick else (10, 100, 300, 1_000, 10_000)
PERIODS = (1, 10) if options.quick else (1, 2, 5, 10, 20, 50, 100, 200, 500)
# Of so many leaves and more there are fewer programs, in the time that there is for
# them; those of the most leaves are not compiled.
MANY, SECONDS = 300, {1_000: 150, 10_000: 90}
NAMES = ("cross_shard", "sync_replicas, accumulating", "local_sgd", "diloco")
NAMES += ("agn", "elastic_average") * (not options.quick)
DEEP = ("cross_shard", "local_sgd")
SENDERS = ("elastic_average", "agn", "local_sgd", "diloco")


def given(params: Any, batch: Any) -> Any:
    """The batch is the gradient."""
    return batch


def shapes_of(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of as many leaves, always of the same size in all."""
    shape = jax.ShapeDtypeStruct((FLOATS // leaves,), jnp.float32)
    return {f"{number:05}": shape for number in range(leaves)}


def alone(params: Any) -> tuple[Any, Any]:
    """Optax without replicas: a jitted step on one device, and its arguments."""

    def step(carry, grads):
        params, state = carry
        return by_hand.descend(params, state, grads)

    carry = (params, jax.eval_shape(INNER.init, params))
    return jax.jit(step, donate_argnums=0), (carry, params)


def stages(program: Any, arguments: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Seconds to trace and to lower; then to compile too, and the compiled program."""
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = program.trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    trace, lower = np.diff(times)
    yield {"trace": trace, "lower": lower, "compile": None}, None
    start = time.perf_counter()
    compiled = lowered.compile()
    taken = time.perf_counter() - start
    yield {"trace": trace, "lower": lower, "compile": taken}, compiled


def compiled_in(program: Any, arguments: Any) -> tuple[dict[str, float], Any]:
    """Seconds for each stage, and the compiled program."""
    *_, last = stages(program, arguments)
    return last


def on_devices(name: str, arm: str, params: Any, devices: int) -> tuple[Any, Any]:
    """A step of a case, jitted for as many devices, and its arguments' shapes."""
    make = by_hand.with_library if arm == LIBRARY else by_hand.by_hand
    step = make(CASES[name], params, devices, given)
    place = NamedSharding(by_hand.mesh_of(devices), P(AXIS))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((devices, *x.shape), x.dtype, sharding=place),
        params,
    )
    return step.program, (step.carry, batch)


def part_devices(devices: int) -> Iterator[dict[str, Any]]:
    """Every case on a number of devices."""
    params = shapes_of(LEAVES)
    compiled_in(*alone(params))  # warms up
    for name in NAMES:
        for arm in (LIBRARY, HAND):
            seconds, compiled = compiled_in(*on_devices(name, arm, params, devices))
            yield {"name": name, "arm": arm, **seconds, **contents(compiled)}


def part_leaves(leaves: int) -> Iterator[dict[str, Any]]:
    """Two cases of a number of leaves on 8 devices, and Optax alone."""
    params, many = shapes_of(leaves), leaves >= MANY
    arms = [(name, arm) for name in DEEP for arm in (HAND, LIBRARY, AGAIN)]
    arms = [("", OPTAX), *(arms[-3:-1] if many else arms)]
    compiled_in(*alone(shapes_of(LEAVES)))
    for _ in range(1 if many or options.quick else 5 if leaves < 100 else 2):
        # The last ones may not fit.
        for name, arm in arms if leaves < max(COUNTS) else arms[::-1]:
            program, arguments = (
                alone(params) if arm == OPTAX else on_devices(name, arm, params, 8)
            )
            for seconds, compiled in stages(program, arguments):
                if many or compiled:
                    yield {"name": name, "arm": arm, **seconds}
                if many and leaves == max(COUNTS):
                    break


def ask(part: str, number: int) -> list[dict[str, Any]]:
    """What a process with as many devices, or leaves, found in the time it had."""
    command = [sys.executable, __file__, "--part", part, "--number", str(number)]
    command += ["--quick"] * options.quick
    limit = SECONDS.get(number) if part == "leaves" else None
    try:
        lines = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, timeout=limit
        ).stdout
    except subprocess.TimeoutExpired as stopped:
        lines = stopped.stdout or b""
    return [json.loads(line) for line in lines.splitlines() if line.startswith(b"{")]


def simulate(workers: int) -> dict[str, float]:
    """Compiling and running workers of `local_sgd` under `vmap` on one device."""
    tx = RULES["local_sgd"](communication_period=by_hand.PERIOD)
    one = jax.tree.map(lambda x: jnp.ones(x.shape[0] // 50), shapes_of(LEAVES))
    axes = oxs.state_axes(tx, one)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(
        jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS),
        donate_argnums=(0, 1),
    )
    carry = (oxs.stack(one, workers), oxs.stack(tx.init(one), workers, axes))
    grads = oxs.stack(one, workers)
    seconds, compiled = compiled_in(program, (*carry, grads))
    times = []
    for _ in range(4 * by_hand.PERIOD):
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(*carry, grads))
        times.append(1e6 * (time.perf_counter() - start))
    has = contents(compiled)
    return {
        "to compile": sum(seconds.values()),
        "held": (has["arguments"] + has["temporary"]) / workers,
        "step": float(np.median(times[by_hand.PERIOD :])) / workers,
    }


def sent(name: str, period: int, steps: int) -> float:
    """Bytes per step and worker, from the rounds that really took place."""
    tx = RULES[name](communication_period=period)
    case = CASES["local_sgd"]._replace(tx=lambda workers: tx)
    shapes = {"w": jax.ShapeDtypeStruct((100,), jnp.float32)}
    step = by_hand.with_library(case, shapes, 2, given)
    place = NamedSharding(by_hand.mesh_of(2), P(AXIS))
    batch = {"w": jax.device_put(jnp.ones((2, 100)), place)}
    compiled = step.program.lower(step.carry, batch).compile()
    carry = step.start({"w": jnp.ones(100)})
    for _ in range(steps):
        carry = jax.block_until_ready(compiled(carry, batch))
    has, rounds = contents(compiled), int(oxs.metrics(carry[1]).rounds)
    return has["every step"] + has["round"] * rounds / steps


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of a value over a size, both in logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def total(row: dict[str, Any]) -> float:
    """Seconds to trace and to lower, and to compile where that was done."""
    return row["trace"] + row["lower"] + (row["compile"] or 0)


def show_devices(page: report.Report, found: dict[int, list[dict[str, Any]]]) -> None:
    """Bytes, memory and compilation of one worker by the number of devices."""
    by_step: dict[Any, list[dict[str, Any]]] = {}
    for rows in found.values():
        for row in rows:
            by_step.setdefault((row["name"], row["arm"]), []).append(row)
    numbers, table, grows, sends, holds = list(found), [], [], [], []
    for (name, arm), rows in by_step.items():
        quiet, rounds = ([r[k] for r in rows] for k in ("every step", "round"))
        held = [(r["arguments"] + r["temporary"]) / 4 / FLOATS for r in rows]
        seconds = [total(r) for r in rows]
        shown = [f"{of[0]:,} / {of[-1]:,}" for of in (quiet, rounds)]
        shown.append(f"{held[0]:.3f} / {held[-1]:.3f}")
        table.append([name, arm, *shown, f"{seconds[0]:.2f} / {seconds[-1]:.2f}"])
        if arm == LIBRARY:
            grows.append(exponent(numbers, seconds))
            sends.append(len(set(rounds if any(rounds) else quiet)) == 1)
            holds.append(max(held) <= 1.001 * min(held))
    columns = ["case", "step", "bytes in every step", "bytes more in a round"]
    columns += ["held, in sizes of the parameters", "seconds to compile"]
    ends = f"{numbers[0]} and {numbers[-1]} devices"
    page.table(f"One worker of {ends}", columns, table)
    page.text(
        f"Time to trace and compile grows as devices^{np.median(grows):.2f} (median of "
        "the cases); the flags of `sync_replicas`, sent in every step, are an int32 "
        "for each replica."
    )
    for what, of in (
        ("bytes per round of a worker, flags aside, do", sends),
        ("memory of a worker, to a thousandth, does", holds),
    ):
        page.criterion(
            f"{what} not depend on the number of devices",
            all(of),
            f"in {sum(of)} of {len(of)} cases, between {ends}",
        )


def show_workers(page: report.Report) -> None:
    """Simulated workers: memory and time of one, by their number."""
    simulate(WORKERS[0])  # warms up
    found = {number: simulate(number) for number in track(WORKERS, "simulated workers")}
    rows = [[f"{number:,}", *of.values()] for number, of in found.items()]
    columns = ["workers", "seconds to compile", "bytes held each", "microseconds each"]
    page.table("local_sgd of simulated workers, on one device", columns, rows)
    held = [of["held"] for of in found.values()]
    grows = exponent(list(found), [of["to compile"] for of in found.values()])
    page.text(
        f"Time to trace and compile grows as workers^{grows:.2f}; the center is held "
        "once for all workers, so one holds the less the more they are."
    )
    page.criterion(
        "memory of a simulated worker does not grow with their number",
        max(held) <= held[0],
        f"{held[0]:,.0f} to {held[-1]:,.0f} bytes",
    )


def medians(rows: list[dict[str, Any]], compiles: bool) -> dict[Any, dict[str, Any]]:
    """By case and arm: seconds, the median of what was measured."""
    grouped: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["compile"] is not None) == compiles:
            grouped.setdefault((row["name"], row["arm"]), []).append(row)
    steps = ("trace", "lower", *(("compile",) * compiles))
    return {
        key: {what: float(np.median([r[what] for r in of])) for what in steps}
        for key, of in grouped.items()
    }


def show_leaves(page: report.Report, found: dict[int, list[dict[str, Any]]]) -> Figure:
    """Time to trace and compile by the number of leaves."""
    shown = {n: medians(rows, True) for n, rows in found.items()}
    traced = {n: medians(rows, n < MANY) for n, rows in found.items()}
    rows, ratios, noise, no = [], [], [], "did not fit"
    every = list(dict.fromkeys(key for of in traced.values() for key in of))
    for leaves, of in traced.items():
        fits = every if leaves < MANY else [("", OPTAX), *every[-3:-1]]
        for name, arm in fits:
            seconds, whole = of.get((name, arm)), shown[leaves].get((name, arm))
            row = [f"{leaves:,}", name, arm]
            row += [f"{seconds[w]:.2f}" if seconds else no for w in ("trace", "lower")]
            row.append(f"{whole['compile']:.2f}" if whole else no)
            hand = (shown if whole else traced)[leaves].get((name, HAND))
            mine = whole or seconds
            ratio = sum(mine.values()) / sum(hand.values()) if mine and hand else None
            also = "" if whole else ", not compiled"
            row.append(f"{ratio:.2f}{also}" if ratio and arm != HAND else "-")
            rows.append(row)
            if ratio and whole and arm == LIBRARY:
                ratios.append((ratio, leaves, name))
            if ratio and whole and arm == AGAIN:
                noise.append(ratio)
    columns = ["leaves", "case", "step"]
    columns += ["trace, s", "lower, s", "compile, s", "/ by hand"]
    page.table("Seconds to trace, lower and compile, 8 devices", columns, rows)
    page.criterion(
        f"time to trace and compile at most {LIMIT} of the step by hand, all leaves",
        max(ratios)[0] <= LIMIT,
        ", ".join(f"{r:.2f} ({name}, {leaves:,} leaves)" for r, leaves, name in ratios)
        + f"; noise {report.spread(noise)}",
    )
    grow = []
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, what, table in zip(
        figure.subplots(1, 2, sharey=True),
        ("trace", "compile"),
        (traced, shown),
        strict=True,
    ):
        for (name, arm), colour in (
            (("", OPTAX), "#CCBB44"),
            (("local_sgd", HAND), "#EE6677"),
            (("local_sgd", LIBRARY), "#4477AA"),
        ):
            points = [
                (n, of[name, arm][what]) for n, of in table.items() if (name, arm) in of
            ]
            label = f"{name} {arm}".strip()
            axes.loglog(*zip(*points, strict=True), "o-", color=colour, label=label)
            ends = points[-2:]
            slope = exponent(*map(list, zip(*ends, strict=True)))
            between = f"from {ends[0][0]:,} to {ends[-1][0]:,}"
            grow.append(f"{what} of {label} as leaves^{slope:.2f} {between}")
        axes.set_xlabel("leaves")
        axes.set_title(f"time to {what}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend()
    page.text(f"How time grows: {'; '.join(grow)}.")
    return figure


def show_periods(page: report.Report) -> Figure:
    """Bytes per step by the period."""
    full, rows, exact = 400, [], True
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    colours = ("#4477AA", "#EE6677", "#228833", "#AA3377")
    markers = "os^v"
    found = {
        name: [sent(name, period, 2 * period) for period in PERIODS]
        for name in track(SENDERS, "periods")
    }
    for (name, of), colour, marker in zip(found.items(), colours, markers, strict=True):
        exact = exact and all(x * p == full for x, p in zip(of, PERIODS, strict=True))
        rows.append([name, *of])
        parts = np.divide(of, full)
        axes.loglog(PERIODS, parts, marker, color=colour, label=name, fillstyle="none")
    axes.loglog(PERIODS, 1 / np.array(PERIODS), color="#BBBBBB", label="1 / period")
    axes.set_xlabel("communication period, steps")
    axes.set_ylabel("bytes per step / bytes of the parameters")
    axes.legend()
    columns = ["rule", *(f"period {period}" for period in PERIODS)]
    page.table("Bytes per step and worker, 100 float32 parameters", columns, rows)
    page.text("Bytes per step are those of the parameters divided by the period.")
    page.criterion(
        "bytes per step exactly 1 / period of the parameters' bytes",
        exact,
        f"{len(SENDERS)} rules, {len(PERIODS)} periods, rounds counted while running",
    )
    return figure


ABOUT = f"""
Bytes are those that a worker hands to collectives, read from the compiled program with
`oxs.audit` (a ring sends twice as many over its wires, but for 1 / workers of them).
Adam is the inner optimizer; {FLOATS:,} parameters, in {LEAVES} leaves where it does not
say otherwise. Caches are emptied before each trace.
"""


def main() -> None:
    """Run all parts and write them down."""
    page = report.Report("bench_scale", "What grows with what", ABOUT, options)
    devices = {n: ask("devices", n) for n in track(DEVICES, "numbers of devices")}
    leaves = {n: ask("leaves", n) for n in track(COUNTS, "numbers of leaves")}
    page.data(devices=devices, leaves=leaves)
    show_devices(page, devices)
    show_workers(page)
    by_leaves = show_leaves(page, leaves)
    by_period = show_periods(page)
    page.picture(by_leaves, "Time to trace and to compile a step by leaves", "leaves")
    page.picture(by_period, "Bytes per step by the period", "periods")
    page.save()


if __name__ == "__main__":
    parts = {"devices": part_devices, "leaves": part_leaves}
    forced = options.number if options.part == "devices" else 8
    jax.config.update("jax_num_cpu_devices", forced)
    if options.part:
        for one in parts[options.part](options.number):
            print(json.dumps(one), flush=True)
    else:
        main()
