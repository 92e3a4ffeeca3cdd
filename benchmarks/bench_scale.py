"""What grows with the number of workers, and with the parameters.

    python benchmarks/bench_scale.py            # six minutes on two cores
    python benchmarks/bench_scale.py --quick    # few devices and leaves, short

Each beside the step written by hand (`by_hand.py`) and beside Optax alone. Programs for
many devices are compiled, not run: the devices are forced, in a process of its own for
each number. Simulated workers, `jax.vmap` on one device, are run.
"""

import itertools
import json
import subprocess
import sys
import time
from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import report
from by_hand import AXIS, CASES, INNER, PERIOD, begun, contents, update
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pictures import Line, Panel
from report import STAGES, Report, build, each
from training import workers_step

import optx_sync as oxs

FLOATS, LEAVES = 1_000_000, 8
HAND, AGAIN, LIBRARY, OPTAX = "by hand", "by hand again", "library", "Optax alone"
parser = report.arguments(__doc__)
parser.add_argument("--devices", type=int, default=0, help="used by itself")
options = parser.parse_args()
quick = options.quick
DEVICES = (2, 4) if quick else (8, 32, 128, 512)
WORKERS = (8, 16) if quick else (8, 16, 32, 64, 128, 256, 512)
# Of so many leaves, how often; there is no time to compile programs of the most.
COUNTS = {2: 1, 4: 1} if quick else {10: 5, 100: 2, 300: 1, 1_000: 1, 10_000: 0}
NAMES = ("cross_shard", "local_sgd", "diloco", "agn", "elastic_average")
NAMES = NAMES[:2] if quick else ("sync_replicas, accumulating", *NAMES)


def given(params: Any, batch: Any) -> Any:
    """The batch is the gradient."""
    return batch


def shapes_of(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of as many leaves, always of the same size in all."""
    shape = jax.ShapeDtypeStruct((FLOATS // leaves,), jnp.float32)
    return {f"{number:05}": shape for number in range(leaves)}


def on_devices(name: str, arm: str, params: Any, devices: int) -> tuple[Any, Any]:
    """A step of a case, jitted for as many devices, and its arguments' shapes."""
    if arm == OPTAX:
        carry = (params, jax.eval_shape(INNER.init, params))

        def alone(carry, grads):
            return by_hand.descend(carry[0], carry[1], grads)

        return jax.jit(alone, donate_argnums=0), (carry, params)
    make = by_hand.with_library if arm == LIBRARY else by_hand.by_hand
    step = make(CASES[name], params, devices, given)
    place = NamedSharding(by_hand.mesh_of(devices), P(AXIS))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((devices, *x.shape), x.dtype, sharding=place),
        params,
    )
    return step.program, (step.carry, batch)


def of_devices() -> None:
    """Every case on this process's devices, a line of JSON for each."""
    params = shapes_of(LEAVES)
    build(*on_devices("", OPTAX, params, 1))  # warms up
    for name in NAMES:
        for arm in (LIBRARY, HAND):
            program = on_devices(name, arm, params, options.devices)
            seconds, compiled = build(*program)
            found = {"name": name, "arm": arm, **seconds, **contents(compiled)}
            print(json.dumps(found), flush=True)


def ask(number: int) -> list[dict[str, Any]]:
    """What a process with as many devices found."""
    command = [sys.executable, __file__, "--devices", str(number)]
    command += ["--quick"] * quick
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return [json.loads(line) for line in lines.splitlines() if line.startswith(b"{")]


def of_leaves(leaves: int) -> list[dict[str, Any]]:
    """Two cases of a number of leaves on 8 devices, and Optax alone."""
    arms, repeats = [("", OPTAX)], COUNTS[leaves]
    of_case = (HAND, LIBRARY) if leaves >= 300 else (HAND, LIBRARY, AGAIN)
    names = ("cross_shard", "local_sgd")[int(quick or leaves >= 300) :]
    arms += itertools.product(names, of_case)
    build(*on_devices("", OPTAX, shapes_of(LEAVES), 1))
    rows = []
    for _ in range(max(repeats, 1)):
        for name, arm in arms:
            program = on_devices(name, arm, shapes_of(leaves), 8)
            seconds, _ = build(*program, compiles=repeats > 0)
            rows.append({"name": name, "arm": arm, **seconds})
    return rows


def simulate(workers: int) -> dict[str, float]:
    """Compiling and running workers of `local_sgd` under `vmap` on one device."""
    tx = CASES["local_sgd"].tx(workers)
    one = jax.tree.map(lambda x: jnp.ones(x.shape[0] // 50), shapes_of(LEAVES))
    program = jax.jit(workers_step(tx, one, given, update), donate_argnums=(0, 1))
    carry, grads = begun(tx, one, workers), oxs.by_hand.replicate(one, workers)
    seconds, compiled = build(program, (*carry, grads))
    times = []
    for _ in range(4 * PERIOD):
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(*carry, grads))
        times.append(1e6 * (time.perf_counter() - start))
    has = contents(compiled)
    return {
        "to compile": total(seconds),
        "held": (has["arguments"] + has["temporary"]) / workers,
        "step": float(np.median(times[PERIOD:])) / workers,
    }


def exponent(sizes: Any, values: list[float]) -> float:
    """The slope of a value over a size, both in logarithms."""
    return float(np.polyfit(np.log(list(sizes)), np.log(values), 1)[0])


def total(row: dict[str, Any]) -> float:
    """Seconds of all stages, as far as they were gone through."""
    return sum(row[stage] or 0.0 for stage in STAGES)


def show_devices(page: Report, found: dict[Any, Any]) -> None:
    """Bytes, memory and compilation of one worker by the number of devices."""
    table, grows = [], []
    for rows in zip(*found.values(), strict=True):
        quiet, rounds = ([r[k] for r in rows] for k in ("every step", "round"))
        held = [(r["arguments"] + r["temporary"]) / 4 / FLOATS for r in rows]
        seconds = [total(r) for r in rows]
        shown = [f"{of[0]:,} / {of[-1]:,}" for of in (quiet, rounds)]
        shown.append(f"{held[0]:.3f} / {held[-1]:.3f}")
        shown.append(f"{seconds[0]:.2f} / {seconds[-1]:.2f}")
        table.append([rows[0]["name"], rows[0]["arm"], *shown])
        if rows[0]["arm"] == LIBRARY:
            grows.append(exponent(found, seconds))
    ends = f"{DEVICES[0]} and {DEVICES[-1]} devices"
    page.table("devices", table, ends=ends)
    page.text("devices", grows=np.median(grows))


def show_workers(page: Report) -> None:
    """Simulated workers: memory and time of one, by their number."""
    simulate(WORKERS[0])  # warms up
    found = each("simulated workers", simulate, WORKERS)
    page.table("workers", ([f"{n:,}", *of.values()] for n, of in found.items()))
    compiling = [of["to compile"] for of in found.values()]
    page.text("workers", grows=exponent(WORKERS, compiling))


def medians(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Median seconds of each stage, None of what was left out, by case and step."""
    found = {}
    for cell in dict.fromkeys((row["name"], row["arm"]) for row in rows):
        of = [row for row in rows if (row["name"], row["arm"]) == cell]
        taken = {stage: [row[stage] for row in of] for stage in STAGES}
        found[cell] = {s: t[0] and float(np.median(t)) for s, t in taken.items()}
    return found


def show_leaves(page: Report, found: dict[Any, Any]) -> None:
    """Time to trace and compile by the number of leaves."""
    table = []
    middle = {leaves: medians(rows) for leaves, rows in found.items()}
    for leaves, cells in middle.items():
        for (name, arm), taken in cells.items():
            over = total(taken) / total(cells.get((name, HAND), taken))
            shown = f"{over:.2f}{'' if taken['compile'] else ', not compiled'}"
            seconds = [f"{s:.2f}" if s else "not compiled" for s in taken.values()]
            beside = shown if arm in (LIBRARY, AGAIN) else "-"
            table.append([f"{leaves:,}", name, arm, *seconds, beside])
    page.table("leaves", table)
    grow, panels = [], []
    for stage in ("trace", "compile"):
        drawn = []
        for cell in (("", OPTAX), ("local_sgd", HAND), ("local_sgd", LIBRARY)):
            taken = {leaves: of[cell][stage] for leaves, of in middle.items()}
            points = [(leaves, s) for leaves, s in taken.items() if s is not None]
            (near, first), (far, last) = points[-2:]
            slope, label = exponent((near, far), [first, last]), " ".join(cell).strip()
            between = f"leaves^{slope:.2f} from {near:,} to {far:,}"
            grow.append(f"{stage} of {label} as {between}")
            drawn.append(Line(label, *np.transpose(points)))
        panels.append(Panel("leaves", f"seconds to {stage}", drawn, log="xy"))
    page.text("leaves", grow="; ".join(grow))
    page.picture(panels, "leaves")


def main() -> None:
    """Run all parts and write them down."""
    page = Report("bench_scale", options)
    devices = each("devices", ask, DEVICES)
    leaves = each("leaves", of_leaves, COUNTS)
    page.data(devices=devices, leaves=leaves)
    show_devices(page, devices)
    show_workers(page)
    show_leaves(page, leaves)
    page.save()


if __name__ == "__main__":
    report.on_cpu(options.devices or 8)
    (of_devices if options.devices else main)()
