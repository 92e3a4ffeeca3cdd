"""What a wrapper costs beside the same step written by hand, and beside its peers.

    python benchmarks/bench_wrappers.py            # five minutes on two cores, 5 GB
    python benchmarks/bench_wrappers.py --quick    # small parameters, half a minute

The steps are those of `by_hand.py`, the peers' those of `by_peers.py`: Optax's
`MultiSteps`, and DrJAX, on which MaxText's DiLoCo stands (left out where it is not
installed). The step written by hand runs twice in each turn: what its second copy takes
beside the first is the noise. Quiet steps, without an exchange, and rounds are timed
apart. Gradients are given, as arguments (an optimizer's step alone, the strictest), or
those of a perceptron, computed in the step. Because forced CPU devices on few cores
jitter much, what the compiled programs contain is counted too.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

# Threads to spare for the devices, or a collective may wait for ever: see Makefile.
os.environ.setdefault("NPROC", "16")

import by_hand
import by_peers
import jax
import jax.numpy as jnp
import numpy as np
import programs
import report
from by_hand import AXIS, CASES, PERIOD, Step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.progress import Progress

import optx_sync as oxs
from optx_sync import hlo

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

LIMIT, BATCH = 1.02, 32
MORE = ("quiet fusion", "quiet copy", "round fusion", "round copy", "temporary")
HAND, AGAIN, LIBRARY, VMAP = "by hand", "by hand again", "library", "library, vmap"
MULTI_STEPS, DRJAX, SUMS = "optax.MultiSteps", "DrJAX", "sync_replicas, accumulating"
parser = report.arguments(__doc__)
parser.add_argument("--kept", action="store_true", help="used by itself")
options = parser.parse_args()
WIDTH, LAYERS = (128, 2) if options.quick else (576, 12)
HAS_DRJAX = importlib.util.find_spec("drjax") is not None
# (gradients, devices): turns, each of as many steps as the period
SETTINGS = {("given", 2): 10, ("perceptron", 2): 6, ("given", 8): 4}
if options.quick:
    SETTINGS = {("perceptron", 2): 2}


def loss(params: Any, inputs: jax.Array) -> jax.Array:
    """Of a perceptron that is to give back its input."""
    x = inputs
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - inputs) ** 2)


def layers() -> list[dict[str, jax.Array]]:
    """Its parameters."""
    keys, scale = jax.random.split(jax.random.key(0), LAYERS), WIDTH**-0.5
    weights = [scale * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return [{"w": w, "b": jnp.zeros(WIDTH)} for w in weights]


GRADIENTS = {"given": lambda params, batch: batch, "perceptron": jax.grad(loss)}
params = layers()
SIZE = sum(x.nbytes for x in jax.tree.leaves(params))


def batch_of(gradients: str, workers: int, *steps: int) -> Any:
    """What the workers' steps get, each on its device."""
    if gradients == "given":
        batch = oxs.stack(jax.tree.map(lambda x: 0.01 * x + 0.001, params), workers)
    else:
        shape = (workers, *steps, BATCH, WIDTH)
        batch = jax.random.normal(jax.random.key(1), shape)
    return jax.device_put(batch, NamedSharding(by_hand.mesh_of(workers), P(AXIS)))


def steps_of(name: str, gradients: str, workers: int) -> dict[str, Step]:
    """The step of a case by hand, with the library, and with its peers."""
    case, gradient = CASES[name], GRADIENTS[gradients]
    steps = {
        HAND: by_hand.by_hand(case, params, workers, gradient),
        LIBRARY: by_hand.with_library(case, params, workers, gradient),
    }
    if not case.replicated and gradients != "given":
        steps[VMAP] = by_hand.under_vmap(case, params, workers, gradient)
    if name == SUMS:
        steps[MULTI_STEPS] = by_peers.multi_steps(params, workers, gradient)
    if name in by_peers.OUTERS and HAS_DRJAX:
        steps[DRJAX] = by_peers.drjax_step(name, params, workers, gradient)
    return steps


def compile_all(steps: dict[str, Step], batch: Any) -> dict[str, Any]:
    """Each step's compiled program."""
    return {n: s.program.lower(s.carry, batch).compile() for n, s in steps.items()}


def time_all(steps: dict[str, Step], compiled: Any, batch: Any, turns: int) -> Any:
    """Milliseconds of each step, [turns, PERIOD]."""
    steps = {**steps, AGAIN: steps[HAND]}
    compiled = {**compiled, AGAIN: compiled[HAND]}
    carries = {name: step.start(params) for name, step in steps.items()}

    def call(name):
        def run():
            carries[name] = compiled[name](carries[name], batch)
            return carries[name]

        return run

    calls = {name: call(name) for name in steps}
    times = report.in_turns(calls, turns * PERIOD, warm_up=PERIOD)
    return {n: np.reshape(t, (turns, PERIOD)) for n, t in times.items()}


def apart(steps: dict[str, Step], compiled: Any, batch: Any) -> float:
    """Between parameters of library and hand-written step, after two periods."""
    ends = []
    for arm in (LIBRARY, HAND):
        carry = steps[arm].start(params)
        for _ in range(2 * PERIOD):
            carry = jax.block_until_ready(compiled[arm](carry, batch))
        ends.append(jax.tree.leaves(carry[0]))
    pairs = zip(*ends, strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def ratios(times: dict[str, Any], over: str, under: str, period: int) -> list[float]:
    """Of a quiet step (NaN without any), of a round, and of a whole period."""
    a, b = times[over], times[under]
    if period == 1:
        every = report.ratio(a.ravel().tolist(), b.ravel().tolist())
        return [float("nan"), every, every]
    pairs = [(a[:, :-1], b[:, :-1]), (a[:, -1], b[:, -1]), (a.sum(1), b.sum(1))]
    return [report.ratio(x.ravel().tolist(), y.ravel().tolist()) for x, y in pairs]


def sizes(compiled: jax.stages.Compiled, period: int) -> dict[str, float]:
    """What a program sends, in bytes, and holds and writes, in sizes of all weights."""
    has = programs.contents(compiled)
    held = {k: has[k] / SIZE for k in ("arguments", "aliased", "temporary")}
    counts = programs.written(hlo.program(compiled), WIDTH**2)
    per_weight = {k: count / LAYERS for k, count in counts.items()}
    # The conditional is there with a period of 1 as well.
    mean = has["every step"] + has["round"] / period
    return {**has, "mean": mean, **held, **per_weight}


def memory_kept() -> dict[str, Any]:
    """Times in a process that keeps freed memory, as accelerators' allocators do."""
    # Of glibc: nothing is mapped, nothing is given back, one heap of whatever size.
    keeps = {
        "MALLOC_MMAP_THRESHOLD_": "4000000000",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "100000000",
        "MALLOC_ARENA_MAX": "1",
    }
    out = subprocess.run(
        [sys.executable, __file__, "--kept"],
        env={**os.environ, **keeps},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    found = json.loads(out.splitlines()[-1])
    return {n: {arm: np.array(t) for arm, t in of.items()} for n, of in found.items()}


def time_kept() -> dict[str, Any]:
    """What that process finds."""
    batch, found = batch_of("given", 2), {}
    for name in CASES:
        steps = steps_of(name, "given", 2)
        steps = {arm: steps[arm] for arm in (HAND, LIBRARY)}
        found[name] = to_lists(time_all(steps, compile_all(steps, batch), batch, 6))
    return found


def whole_rounds() -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a program that makes all steps of a round."""
    found = {}
    batch = batch_of("perceptron", 2, PERIOD)
    for name in by_peers.OUTERS:
        arguments = (name, params, 2, GRADIENTS["perceptron"])
        steps = {
            HAND: by_peers.hand_round(*arguments),
            LIBRARY: by_peers.library_round(*arguments),
        }
        if HAS_DRJAX:
            steps[DRJAX] = by_peers.drjax_round(*arguments)
        compiled = compile_all(steps, batch)
        times = time_all(steps, compiled, batch, 2 if options.quick else 3)
        found[name] = {arm: time.ravel().tolist() for arm, time in times.items()}
    return found


def to_lists(times: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Milliseconds as JSON can hold them, [turns, PERIOD]."""
    return {arm: np.round(of_arm, 3).tolist() for arm, of_arm in times.items()}


def in_words(setting: tuple[str, int]) -> str:
    """A setting as tables name it."""
    return f"{setting[0]}, {setting[1]} devices"


def three(values: list[float]) -> str:
    """Ratios of a quiet step, a round and a period."""
    return " / ".join("-" if np.isnan(x) else f"{x:.2f}" for x in values)


def show_times(page: report.Report, title: str, measured: dict[str, Any]) -> None:
    """Ratios of each case beside the step by hand."""
    rows = []
    for name, times in measured.items():
        period = CASES[name].period
        quiet = report.spread(times[HAND][:, : PERIOD - (period > 1)].ravel())
        last = report.spread(times[HAND][:, -1]) if period > 1 else "-"
        rows.append([name, quiet, last])
        rows[-1] += [three(ratios(times, x, HAND, period)) for x in (LIBRARY, AGAIN)]
    columns = ["quiet / round / period", "quiet by hand, ms", "round by hand, ms"]
    page.table(title, [*columns, "library / by hand", "noise"], rows)


def judge_times(page: report.Report, measured: Any, counted: Any) -> None:
    """One criterion for each case: the library beside the step by hand."""
    for name, case in CASES.items():
        found, met, why = [], True, []
        for setting in SETTINGS:
            times = measured[setting, name]
            ours = ratios(times, LIBRARY, HAND, case.period)
            noise = ratios(times, AGAIN, HAND, case.period)
            met = met and not any(x > LIMIT for x in ours)
            found.append(f"{in_words(setting)} {three(ours)} (noise {three(noise)})")
            has, hand = (counted[setting, name][arm] for arm in (LIBRARY, HAND))
            more = [f"{has[k] - hand[k]:+.1f} {k}" for k in MORE if has[k] != hand[k]]
            why.append(", ".join(more) or "nothing, so this is noise")
        page.criterion(
            f"{name}: at most {LIMIT} of the step by hand (quiet / round / period)",
            met,
            "; ".join(found),
            f"More of the parameters' size: {'; or '.join(dict.fromkeys(why))}.",
        )


def judge_contents(page: report.Report, counted: Any) -> None:
    """What the compiled programs send, write and hold beside the steps by hand."""
    sent, parts, more = [], [], {what: {} for what in MORE}
    for (setting, name), arms in counted.items():
        ours, hand = arms[LIBRARY], arms[HAND]
        where = f"{name} ({in_words(setting)})"
        flags = 4 * setting[1] if name.startswith("sync_replicas") else 0
        if ours["mean"] - flags != hand["mean"]:
            sent.append(f"{where} {ours['mean'] - flags - hand['mean']:+,.0f}")
        full = counted[setting, "cross_shard"][LIBRARY]["mean"]
        parts.append((ours["mean"] - flags) * CASES[name].period == full)
        for what, cases in more.items():
            if ours[what] - hand[what] > 0.05:
                cases.setdefault(name, []).append(f"{ours[what] - hand[what]:+.1f}")
    page.criterion(
        "as many bytes per step as by hand (sync_replicas: and a flag per replica)",
        not sent,
        ", ".join(sent) or f"equal in {len(counted)} programs",
    )
    page.criterion(
        "bytes per step exactly 1 / period of those of cross_shard (but for the flags)",
        all(parts),
        f"in {sum(parts)} of {len(parts)} programs",
    )
    for what, cases in more.items():
        found = [
            f"{name} {' or '.join(dict.fromkeys(of))}" for name, of in cases.items()
        ]
        title = f"arrays of the parameters' size, {what}: no more than by hand"
        page.criterion(title, not found, "; ".join(found) or "none")


def show_contents(page: report.Report, counted: Any, setting: tuple[str, int]) -> None:
    """What the programs of one setting contain."""
    rows = []
    for (where, name), arms in counted.items():
        for arm, has in arms.items() if where == setting else ():
            memory = [has[k] for k in ("arguments", "aliased", "temporary")]
            fusions = [has[f"{when} fusion"] for when in ("quiet", "round")]
            copies = [has[f"{when} copy"] for when in ("quiet", "round")]
            sent = [f"{has['every step']:,}", f"{has['every step'] + has['round']:,}"]
            shown = [
                " / ".join(f"{x:.1f}" for x in n) for n in (memory, fusions, copies)
            ]
            rows.append([name, arm, " / ".join(sent), *shown])
    columns = [
        "case",
        "step",
        "bytes, quiet / round",
        "arguments / aliased / temporary",
    ]
    columns += ["fusions, quiet / round", "copies, quiet / round"]
    page.table(f"Compiled programs, {in_words(setting)}", columns, rows)


def judge_peers(page: report.Report, measured: Any, counted: Any) -> None:
    """The library beside `optax.MultiSteps` and DrJAX, where these do the same."""
    rows, quiet, periods = [], [], []
    for (setting, name), times in measured.items():
        for peer in (MULTI_STEPS, DRJAX, VMAP):
            if peer not in times:
                continue
            found = ratios(times, LIBRARY, peer, CASES[name].period)
            arms = counted[setting, name]
            sent = [round(arms[arm]["mean"]) for arm in (LIBRARY, peer)]
            rows.append([f"{name}, {in_words(setting)}", peer, three(found), *sent])
            if peer == MULTI_STEPS:
                quiet.append(found[0])
            if peer == DRJAX:
                periods.append(found[2])
    columns = ["case", "peer", "library / peer", "bytes per step", "the peer's"]
    page.table("Beside peers (quiet / round / period)", columns, rows)
    page.criterion(
        "accumulating steps of sync_replicas cheaper than those of optax.MultiSteps",
        max(quiet) < 1,
        ", ".join(f"{x:.2f}" for x in quiet) + " of its time",
    )
    if not HAS_DRJAX:
        page.text("DrJAX is not installed, and left out.")
    if periods:
        page.criterion(
            "a period of local_sgd or diloco no longer than with DrJAX",
            max(periods) <= 1,
            ", ".join(f"{x:.2f}" for x in periods) + " of its time",
        )


def judge_rounds(page: report.Report, rounds: Any) -> None:
    """Whole rounds in one program, which needs no conditional by hand or with DrJAX."""
    rows, found = [], []
    for name, times in rounds.items():
        for arm, of_arm in times.items():
            beside = report.ratio(of_arm, times[HAND])
            rows.append([name, arm, report.spread(of_arm), beside])
        found.append(report.ratio(times[LIBRARY], times[HAND]))
    title = f"{PERIOD} steps and an exchange in one program, perceptron, 2 devices"
    page.table(title, ["rule", "written", "ms", "/ by hand"], rows)
    page.criterion(
        f"a whole round in one program at most {LIMIT} of one by hand",
        max(found) <= LIMIT,
        ", ".join(f"{x:.2f}" for x in found),
    )


def judge_results(page: report.Report, differences: dict[Any, float]) -> None:
    """Whether library and hand-written step compute the same."""
    found = []
    for setting in SETTINGS:
        name = max(CASES, key=lambda name: differences[setting, name])
        found.append(f"{in_words(setting)} {differences[setting, name]:.1e} ({name})")
    page.criterion(
        "parameters of library and hand-written step apart by 1e-6 at most",
        max(differences.values()) <= 1e-6,
        f"after two periods, at most: {'; '.join(found)}",
        "Adam divides a gradient by its size: where those of the batch nearly cancel, "
        "what is left is rounding, and the two programs do not round alike.",
    )


def picture(measured: Any) -> Figure:
    """The ratios of all cases, with the noise beside them."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    colours = ("#4477AA", "#EE6677", "#228833")
    for number, (setting, colour) in enumerate(zip(SETTINGS, colours, strict=False)):
        for place, (name, case) in enumerate(CASES.items()):
            times = measured[setting, name]
            y = -place - 0.22 * (number - 1)
            noise = ratios(times, AGAIN, HAND, case.period)[2]
            quiet, last, _ = ratios(times, LIBRARY, HAND, case.period)
            label = in_words(setting) if place == 0 else None
            axes.plot([1, noise], [y, y], color="#BBBBBB", lw=5, zorder=0)
            axes.plot(quiet, y, "o", color=colour, label=label)
            axes.plot(last, y, "o", color=colour, fillstyle="none")
    axes.axvline(LIMIT, color="black", lw=0.8, ls="--")
    axes.set_yticks(-np.arange(len(CASES)), CASES)
    axes.set_xlabel("time of the library's step / time of the step by hand")
    axes.legend(title="quiet steps filled, rounds open")
    return figure


ABOUT = f"""
`{LAYERS}` layers of `{WIDTH}` units are the parameters, {SIZE / 4:,.0f} floats; Adam is
the inner optimizer everywhere; a period is {PERIOD} steps. Ratios are medians over
turns. **Noise** is a second copy of the hand-written step beside the first, in the same
turns. Memory and what is written are counted in sizes of all parameters, per device.

What a wrapper has more than the step by hand follows from Optax's contract. `update`
returns updates that the caller adds, so they leave the conditional, are written to
memory and read once more; by hand the new parameters pass through it. (Tried on a copy
of the library: with updates that carry the new parameters, the programs of the center
rules write and hold exactly as much as those by hand.) `sync_replicas` keeps
sums and asks every replica for a flag besides, as not all may contribute. Where more
than 32 MB are temporary, the C library fetches them anew from the system in every step,
which one table leaves out.
"""


def main() -> None:
    """Run everything and write it down."""
    page = report.Report(
        "bench_wrappers", "Wrappers beside steps by hand", ABOUT, options
    )
    measured, counted, differences = {}, {}, {}
    with Progress() as progress:
        task = progress.add_task("steps", total=len(CASES) * len(SETTINGS) + 1)
        for setting, turns in SETTINGS.items():
            batch = batch_of(*setting)
            for name, case in CASES.items():
                steps = steps_of(name, *setting)
                compiled = compile_all(steps, batch)
                counted[setting, name] = {
                    arm: sizes(program, case.period)
                    for arm, program in compiled.items()
                }
                measured[setting, name] = time_all(steps, compiled, batch, turns)
                differences[setting, name] = apart(steps, compiled, batch)
                progress.advance(task)
        rounds = whole_rounds()
        kept = {} if options.quick else memory_kept()
        progress.advance(task)

    judge_times(page, measured, counted)
    judge_contents(page, counted)
    for setting in SETTINGS:
        of_setting = {name: measured[setting, name] for name in CASES}
        show_times(page, in_words(setting), of_setting)
    if kept:
        show_times(page, "given, 2 devices, memory kept by the process", kept)
    judge_peers(page, measured, counted)
    judge_rounds(page, rounds)
    for setting in SETTINGS:
        show_contents(page, counted, setting)
    for (setting, name), times in measured.items():
        page.data(**{f"{name}, {in_words(setting)}": to_lists(times)})
    page.data(**{f"{name}, memory kept": to_lists(t) for name, t in kept.items()})
    judge_results(page, differences)
    page.picture(picture(measured), "Time of the library's steps beside those by hand")
    page.save()


if __name__ == "__main__":
    if options.kept:
        print(json.dumps(time_kept()))
    else:
        main()
