"""What a wrapper costs beside the same step written by hand, and beside its peers.

    python benchmarks/bench_wrappers.py            # 15 minutes on two cores, 5 GB
    python benchmarks/bench_wrappers.py --quick    # small parameters, half a minute

The steps are those of `by_hand.py`, the peers' those of `by_peers.py`. The step written
by hand runs twice in each turn: what its second copy takes beside the first is the
noise. Gradients are given, as arguments (an optimizer's step alone, the strictest), or
those of a perceptron, computed in the step. Because forced CPU devices on few cores
jitter much, what the compiled programs contain is counted too.
"""

import importlib.util
import itertools
import math
from typing import Any

import by_hand
import by_peers
import jax
import jax.numpy as jnp
import numpy as np
import report
from by_hand import AXIS, PERIOD, contents
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pictures import Line, Panel
from report import Report, ratio, spread
from training import loss_of

import optx_sync as oxs
from optx_sync.audit import hlo

report.on_cpu(8)

BATCH = 32
MORE = ("quiet fusion", "quiet copy", "round fusion", "round copy", "temporary")
HAND, AGAIN, LIBRARY, VMAP = "by hand", "by hand again", "library", "library, vmap"
DIRECT = "apply_gradients"
ARMS = (LIBRARY, DIRECT, AGAIN)
MULTI_STEPS, DRJAX, SUMS = "optax.MultiSteps", "DrJAX", "sync_replicas, accumulating"
options = report.arguments(__doc__).parse_args()
WIDTH, LAYERS = (128, 2) if options.quick else (576, 12)
HAS_DRJAX = importlib.util.find_spec("drjax") is not None
# (gradients, devices): turns, each of as many steps as the period
CASES = by_hand.CASES
SETTINGS = {("given", 2): 10, ("perceptron", 2): 6, ("given", 8): 4}
if options.quick:
    SETTINGS = {("perceptron", 2): 2}
    CASES = {n: CASES[n] for n in ("cross_shard", SUMS, "local_sgd")}


GRADIENTS = {"given": lambda params, batch: batch, "perceptron": jax.grad(loss_of)}
params = [
    {"w": WIDTH**-0.5 * jax.random.normal(key, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}
    for key in jax.random.split(jax.random.key(0), LAYERS)
]
SIZE = sum(x.nbytes for x in jax.tree.leaves(params))


def batch_of(gradients: str, workers: int) -> Any:
    """What the workers' steps get, each on its device."""
    if gradients == "given":
        batch = oxs.by_hand.replicate(
            jax.tree.map(lambda x: 0.01 * x + 0.001, params), workers
        )
    else:
        shape = (workers, BATCH, WIDTH)
        batch = jax.random.normal(jax.random.key(1), shape)
    return jax.device_put(batch, NamedSharding(by_hand.mesh_of(workers), P(AXIS)))


def steps_of(name: str, gradients: str, workers: int) -> dict[str, by_hand.Step]:
    """The step of a case by hand, with the library, and with its peers."""
    case, given = CASES[name], (params, workers, GRADIENTS[gradients])
    steps = {
        HAND: by_hand.by_hand(case, *given),
        LIBRARY: by_hand.with_library(case, *given),
        DIRECT: by_hand.direct(case, *given),
    }
    if not case.replicated and gradients != "given":
        steps[VMAP] = by_hand.under_vmap(case.tx(workers), *given)
    if name == SUMS:
        steps[MULTI_STEPS] = by_peers.multi_steps(*given)
    if name in by_peers.OUTERS and HAS_DRJAX:
        steps[DRJAX] = by_peers.drjax_step(name, *given)
    return steps


def rounds_of(name: str, gradients: str, workers: int) -> dict[str, by_hand.Step]:
    """A whole round in one program, by hand and by `apply_gradients` with `meet=`."""
    given = (CASES[name], params, workers, GRADIENTS[gradients], True)
    return {HAND: by_hand.by_hand(*given), DIRECT: by_hand.direct(*given)}


def time_all(steps: Any, batch: Any, turns: int, period: int = PERIOD) -> Any:
    """Compiled programs, and milliseconds of each step, [turns, period]."""
    programs = {n: s.program.lower(s.carry, batch).compile() for n, s in steps.items()}
    arms = {**{arm: arm for arm in steps}, AGAIN: HAND}
    carries = {arm: steps[of].start(params) for arm, of in arms.items()}

    def call(arm):
        def run():
            carries[arm] = programs[arms[arm]](carries[arm], batch)
            return carries[arm]

        return run

    calls = {arm: call(arm) for arm in arms}
    times = report.in_turns(calls, turns * period, warm_up=period)
    return programs, {n: np.reshape(t, (turns, period)) for n, t in times.items()}


def ratios(times: dict[str, Any], over: str, under: str, period: int) -> list[float]:
    """Of a quiet step (NaN without any), of a round, and of a whole period."""
    a, b = times[over], times[under]
    if period == 1:
        return [float("nan"), ratio(a, b), ratio(a, b)]
    pairs = (a[:, :-1], b[:, :-1]), (a[:, -1], b[:, -1]), (a.sum(1), b.sum(1))
    return [ratio(*pair) for pair in pairs]


def sizes(compiled: jax.stages.Compiled, period: int) -> dict[str, float]:
    """What a program sends, in bytes, and holds and writes, in sizes of all weights."""
    has, program = contents(compiled), hlo.program(compiled)
    found = {k: has[k] / SIZE for k in ("arguments", "aliased", "temporary")}
    # A quiet step takes the first branch of every conditional, a round the second. The
    # conditional is there with a period of 1 as well.
    for branch, when in enumerate(("quiet", "round")):
        for made in by_hand.written(program, branch):
            large = sum(math.prod(x.shape) >= WIDTH**2 for x in made.arrays)
            kind = f"{when} {made.opcode}"
            found[kind] = found.get(kind, 0) + large / LAYERS
    mean = has["every step"] + has["round"] / period
    return {**dict.fromkeys(MORE, 0.0), **has, "mean": mean, **found}


def in_words(setting: tuple[str, int]) -> str:
    """A setting as tables name it."""
    return f"{setting[0]}, {setting[1]} devices"


def three(values: list[float]) -> str:
    """Ratios of a quiet step, a round and a period."""
    return " / ".join("-" if np.isnan(x) else f"{x:.2f}" for x in values)


def show_times(page: Report, title: str, measured: dict[str, Any]) -> None:
    """Ratios of each case beside the step by hand."""
    rows = []
    for name, times in measured.items():
        period = CASES[name].period
        quiet = spread(times[HAND][:, : PERIOD - (period > 1)].ravel())
        last = spread(times[HAND][:, -1]) if period > 1 else "-"
        beside = (three(ratios(times, x, HAND, period)) for x in ARMS)
        rows.append([name, quiet, last, *beside])
    page.table("times", rows, setting=title)


def show_rounds(page: Report, measured: dict[Any, Any]) -> None:
    """Whole rounds in one program over those by hand, and the noise."""
    rows = []
    for name in dict.fromkeys(name for _, name in measured):
        rows.append([name])
        for setting in SETTINGS:
            times = measured[setting, name]
            ours, noise = (ratios(times, x, HAND, 1)[2] for x in (DIRECT, AGAIN))
            rows[-1].append(f"{ours:.2f} (noise {noise:.2f})")
    page.table("rounds", rows, settings=" | ".join(map(in_words, SETTINGS)))


def show_contents(page: Report, counted: Any, setting: tuple[str, int]) -> None:
    """What the programs of one setting contain."""
    rows, whens = [], ("quiet", "round")
    for (where, name), arms in counted.items():
        for arm, has in arms.items() if where == setting else ():
            sent = f"{has['every step']:,} / {has['every step'] + has['round']:,}"
            kinds = [("arguments", "aliased", "temporary")]
            kinds += [[f"{when} {of}" for when in whens] for of in ("fusion", "copy")]
            shown = (" / ".join(f"{has[k]:.1f}" for k in of) for of in kinds)
            rows.append([name, arm, sent, *shown])
    page.table("programs", rows, setting=in_words(setting))


def show_peers(page: Report, measured: Any, counted: Any) -> None:
    """The library beside `optax.MultiSteps` and DrJAX, where these do the same."""
    rows, ours = [], {MULTI_STEPS: LIBRARY, DRJAX: DIRECT, VMAP: LIBRARY}
    for (setting, name), times in measured.items():
        for peer in (peer for peer in ours if peer in times):
            found = ratios(times, ours[peer], peer, CASES[name].period)
            arms = counted[setting, name]
            sent = [round(arms[arm]["mean"]) for arm in (ours[peer], peer)]
            rows.append(
                [f"{name}, {in_words(setting)}", ours[peer], peer, three(found), *sent]
            )
    page.table("peers", rows)
    page.text("peers", drjax="is" if HAS_DRJAX else "is not")


def picture(page: Report, measured: Any) -> None:
    """The ratios of all cases, with the noise beside them."""
    lines, looks = [], {LIBRARY: "o", AGAIN: "|"}
    for setting, arm in itertools.product(SETTINGS, looks):
        times = {name: measured[setting, name] for name in CASES}
        of = [ratios(t, arm, HAND, CASES[name].period)[2] for name, t in times.items()]
        label = "_noise" if arm == AGAIN else in_words(setting)
        lines.append(Line(label, of, range(len(CASES)), looks[arm]))
    page.picture([Panel("time of a period / by hand", "", lines, names=list(CASES))])


def main() -> None:
    """Run everything and write it down."""
    floats = SIZE // 4
    page = Report("bench_wrappers", options, layers=LAYERS, width=WIDTH, floats=floats)
    measured, counted, rounds = {}, {}, {}
    for setting, turns in SETTINGS.items():
        batch = batch_of(*setting)

        def one(name, setting=setting, turns=turns, batch=batch):
            cell, period = (setting, name), CASES[name].period
            programs, measured[cell] = time_all(steps_of(name, *setting), batch, turns)
            counted[cell] = {arm: sizes(of, period) for arm, of in programs.items()}
            if name != "cross_shard":  # It meets in every step.
                whole = rounds_of(name, *setting)
                rounds[cell] = time_all(whole, batch, turns, 1)[1]

        report.each(in_words(setting), one, CASES)
    for setting in SETTINGS:
        of_setting = {name: measured[setting, name] for name in CASES}
        show_times(page, in_words(setting), of_setting)
    show_rounds(page, rounds)
    show_peers(page, measured, counted)
    for setting in SETTINGS:
        show_contents(page, counted, setting)
    for (setting, name), times in measured.items():
        kept = {arm: np.round(of_arm, 3) for arm, of_arm in times.items()}
        page.data(**{f"{name}, {in_words(setting)}": kept})
    picture(page, measured)
    page.save()


if __name__ == "__main__":
    main()
