"""The catalogue's steps, dense and row-sparse, beside Optax, TensorFlow and torch.

    python benchmarks/bench_steps.py            # ten minutes, 4 GB
    python benchmarks/bench_steps.py --quick    # a quarter of a minute

Writes two pages, bench_dense and bench_sparse. A step is what a user compiles:
`tx.update`, then `optax.apply_updates`, under `jax.jit` with parameters and state
donated. On a GPU the peers, which run on processors, are left out.
"""

import dataclasses
import gc
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import report
from by_hand import update
from pictures import Line, Panel
from report import Report, each, ratio, spread

import optx_sync as oxs
from optx_sync.audit import hlo

WIDTH, ORDERS = 16, ("any order", "sorted", "repeated")
SIDES = ("ours", "Optax", "TensorFlow", "torch")
TOUCHED_ONLY = (
    *("gradient_descent", "momentum", "normalized_sgd", "adagrad", "adagrad_da"),
    *("adadelta", "rmsprop", "ftrl", "proximal_gradient_descent", "proximal_adagrad"),
    "custom_adam",
)
SMALL = ("gradient_descent", "momentum", "adagrad", "adam")
# In the picture, which has room for twelve names; the table has all.
DRAWN = (*SMALL, "rmsprop", "ftrl", "amsgrad", "nadam")
TABLES = ("gradient_descent", "momentum", "adagrad", "rmsprop", "ftrl", "custom_adam")


@dataclasses.dataclass
class Found:
    """What was measured of one optimizer, by "ours", "Optax" and the other peers."""

    times: Mapping[str, list[float]]  # milliseconds of a step
    builds: Mapping[str, list[tuple[float, float]]]  # seconds: trace, compilation
    bytes: Mapping[str, float]  # of a step, for each parameter
    loops: Mapping[str, float]  # compiled loops over a leaf, for each leaf
    apart: Mapping[str, float]  # how far from ours, for each unit of the way gone
    floor: int  # of bytes
    parameters: int

    def ratio(self, peer: str) -> float:
        """Our time over a peer's, in the same turns."""
        return ratio(self.times["ours"], self.times[peer])

    def rate(self) -> float:
        """Gigabytes per second of the triad."""
        return 12 * self.parameters / statistics.median(self.times["triad"]) / 1e6

    def share(self) -> float:
        """Our rate, were the floor all that is moved, for each unit of the triad's."""
        return self.floor / 12 / self.ratio("triad")

    def noise(self) -> float:
        """How far from 1 Optax's median ratio to itself may be: 95 %, resampled."""
        ratios = np.divide(self.times["Optax again"], self.times["Optax"])
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        medians = np.median(draws, axis=1)
        return float(np.abs(np.quantile(medians, [0.025, 0.975]) - 1).max())

    def build_ratios(self) -> list[float]:
        """Our time to trace and compile over Optax's, in each turn."""
        return np.divide(*(np.sum(self.builds[s], 1) for s in SIDES[:2])).tolist()


def step_of(tx: Any) -> Any:
    """The step of an optimizer, jitted."""
    return jax.jit(
        lambda params, state, grads: update(tx, grads, state, params),
        donate_argnums=(0, 1),
    )


def build(tx: Any, params: Any) -> tuple[Any, float, float]:
    """The compiled step, and how long its trace and its compilation took."""
    gc.collect()
    arguments = params, jax.eval_shape(tx.init, params), params
    seconds, compiled = report.build(step_of(tx), arguments)
    return compiled, seconds["trace"] + seconds["lower"], seconds["compile"]


class Held:
    """Parameters and state that a compiled step moves; call it to make a step."""

    def __init__(self, step: Callable, tx: Any, params: Any, *grads: Any) -> None:
        self.step, self.grads = step, grads
        params = jax.tree.map(jnp.array, params)
        self.held = (params, jax.jit(tx.init)(params))

    def __call__(self, *grads: Any) -> Any:
        self.held = self.step(*self.held, *(grads or self.grads))
        return self.held


# x + 2 y, written over x: as fast as memory is read and written.
TRIAD: Any = jax.jit(
    lambda x, state, y: (jax.tree.map(lambda a, b: a + 2.0 * b, x, y), state),
    donate_argnums=0,
)


def loops_of(compiled: Any, size: int, leaves: int) -> float:
    """Compiled loops over whole leaves, for each leaf."""
    loops = [i for i in by_hand.written(hlo.program(compiled)) if i.opcode == "fusion"]
    return sum(loop.arrays[0].shape == (size,) for loop in loops) / leaves


def measure(name: str, leaves: int, size: int, repeats: int, builds: int) -> Found:
    """Build and time one optimizer and its peers, in turns."""
    generator = np.random.default_rng(0)
    start = [generator.standard_normal(size, np.float32)] * leaves
    grads = [generator.standard_normal(size, np.float32) for _ in range(leaves)]
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32)] * leaves
    makes = {"ours": peers.OURS[name]}
    if name in peers.OPTAX:
        makes["Optax"] = peers.OPTAX[name]
    seconds, programs = {side: [] for side in makes}, {}
    for turn in range(builds):
        for side in list(makes)[:: -1 if turn % 2 else 1]:
            programs[side], *taken = build(makes[side](), shapes)
            seconds[side].append(tuple(taken))

    device_grads = jax.device_put(grads)

    def held(side):
        return Held(programs[side], makes[side](), start, device_grads)

    calls: dict[str, Any] = {side: held(side) for side in programs}
    calls["triad"] = Held(TRIAD, optax.identity(), start, device_grads)
    if "Optax" in programs:
        # What a program takes against itself, on other buffers, is noise.
        calls["Optax again"] = held("Optax")
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and name in peers.KERNELS and peers.tensorflow():
        constants = [peers.tensorflow().constant(grad) for grad in grads]
        calls["TensorFlow"] = peers.TensorFlowStep(name, start, constants)
    if on_cpu and name in peers.TORCH and peers.torch():
        calls["torch"] = peers.torch_step(name, start, grads)
    times = report.in_turns(calls, repeats)

    ends = {side: np.asarray(calls[side]()[0][0]) for side in programs}
    if kernel := calls.get("TensorFlow"):
        kernel()
        ends["TensorFlow"] = kernel.params[0].numpy()
    way = np.abs(ends["ours"] - start[0]).mean()
    slots = jax.tree.leaves(jax.eval_shape(makes["ours"]().init, shapes[0]))
    floor = 12 + 8 * sum(slot.shape == (size,) for slot in slots)
    # A norm must be known before the first element moves: the gradient twice.
    floor += 4 * (name == "normalized_sgd")
    every = leaves * size
    costs = {side: program.cost_analysis() for side, program in programs.items()}
    moved = {side: of["bytes accessed"] / every for side, of in costs.items()}
    loops = {side: loops_of(of, size, leaves) for side, of in programs.items()}
    apart = {s: float(np.abs(x - ends["ours"]).mean() / way) for s, x in ends.items()}
    return Found(times, seconds, moved, loops, apart, floor, every)


def same_ends(page: Report, apart: Sequence[float | None]) -> None:
    """Whether TensorFlow's kernels, where there are any, took the same way."""
    if known := [far for far in apart if far is not None]:
        page.text("ends", apart=max(known))


def dense_tables(page: Report, results: Mapping[str, Found], where: str) -> None:
    """What was measured of leaves of one kind."""
    rate = statistics.median(found.rate() for found in results.values())
    page.text("triad", rate=rate, where=where)
    steps, builds = [], []
    for name, found in results.items():
        over = {p: f"{found.ratio(p):.3f}" for p in SIDES if p in found.times}
        noise = f"{found.noise():.3f}" if "Optax" in over else "-"
        form = peers.TORCH[name]["form"] if "torch" in over else "-"
        row = [name, spread(found.times["ours"]), f"{found.share():.0%}"]
        row += [over.get("Optax", "-"), noise]
        steps.append([*row, *(over.get(p, "-") for p in SIDES[2:]), form])
        if "Optax" in found.builds:
            parts = np.median([found.builds[side] for side in SIDES[:2]], 1).T.ravel()
            builds.append([name, *map(float, parts), spread(found.build_ratios())])
    page.table("steps", steps, where=where)
    contents = [
        (n, f.floor, *(of.get(s, "-") for of in (f.bytes, f.loops) for s in SIDES[:2]))
        for n, f in results.items()
    ]
    page.table("bytes", contents, where=where)
    page.table("builds", builds, where=where)


def dense_panel(times: Mapping[str, Any], where: str) -> Panel:
    """Median times of a step of a few, by side."""
    names, lines = [name for name in DRAWN if name in times], []
    for side in SIDES:
        of = [times[name].get(side) for name in names]
        at = [(np.median(ms), n) for n, ms in enumerate(of) if ms]
        if at:
            middles, rows = np.transpose(at)
            lines.append(Line(side, middles, rows, "o"))
    return Panel(f"milliseconds of a step, {where}", "", lines, names=names)


def dense(options: Any, quick: bool) -> None:
    """All of the catalogue, on large and on small leaves."""
    page = Report("bench_dense", options)
    page.text("missing", peers=peers.missing() or "none")
    few = ("normalized_sgd", "adam")
    plans = {  # names, leaves, floats in each, repeats, builds
        "large": (few, 4, 65_536, 5, 1) if quick else (peers.OURS, 8, 4_194_304, 21, 5),
        "small": (SMALL[3:], 32, 64, 5, 1) if quick else (SMALL, 2_048, 1_024, 21, 3),
    }
    for kind, (names, *plan) in plans.items():
        where = f"{plan[0]:,} leaves of {plan[1]:,}"
        found = each(where, lambda name, plan=plan: measure(name, *plan), names)
        dense_tables(page, found, where)
        same_ends(page, [of.apart.get("TensorFlow") for of in found.values()])
        times = {name: of.times for name, of in found.items()}
        page.picture([dense_panel(times, where)], kind)
        page.data(**{kind: {n: dataclasses.asdict(f) for n, f in found.items()}})
    page.save()


def gradients(rows: int, touched: int, order: str, number: int) -> list[Any]:
    """Indices and values, several of them; the same for everyone."""
    generator = np.random.default_rng(touched)
    pairs = []
    for _ in range(number):
        if order == "repeated":
            # Zipf's law, as words or items have it: the frequent ones many times.
            indices = generator.zipf(1.1, touched) % rows
        else:
            indices = generator.choice(rows, touched, replace=False)
        indices = np.sort(indices) if order == "sorted" else indices
        values = generator.standard_normal((touched, WIDTH), np.float32)
        pairs.append((indices.astype(np.int32), values))
    return pairs


def table_of(name: str, rows: int) -> Held:
    """A table of ones and its optimizer; call it with a gradient to make a step."""
    tx = peers.OURS[name]()
    return Held(step_of(tx), tx, jnp.ones((rows, WIDTH)))


def next_of(step: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """A call with the next arguments, in a circle."""
    circle = itertools.cycle(arguments)
    return lambda: step(*next(circle))


def slices(pairs: Sequence[Any]) -> list[tuple[oxs.IndexedSlices]]:
    """Gradients as ours takes them, on the device."""
    return [(oxs.IndexedSlices(jnp.asarray(i), jnp.asarray(v)),) for i, v in pairs]


def by_size(name: str, sizes: Sequence[int], touched: int, repeats: int) -> Any:
    """Milliseconds of a step, and its temporary bytes, for each length of the table."""
    calls, temporary = {}, {}
    for rows in sizes:
        table, grads = table_of(name, rows), slices(gradients(rows, touched, "", 8))
        calls[f"{rows:,}"] = next_of(table, grads)
        needs = by_hand.memory(table.step, *table.held, *grads[0])
        temporary[f"{rows:,}"] = needs.temporary
    times = report.in_turns(calls, repeats)
    gc.collect()
    return times, temporary


def by_touched(name: str, rows: int, counts: Any, touched: int, repeats: int) -> Any:
    """Milliseconds of a step by rows touched, of all; how far TensorFlow ended from us.

    The distance is in the mean, for each unit of the mean way gone.
    """
    table, dense = table_of(name, rows), table_of(name, rows)
    generator = np.random.default_rng(0)
    dense_grads = jnp.asarray(generator.standard_normal((rows, WIDTH), np.float32))
    start = np.ones((rows, WIDTH), np.float32)
    tf, torch = peers.tensorflow(), peers.torch()
    on_cpu = jax.default_backend() == "cpu"
    kernel = on_cpu and tf and name in peers.KERNELS
    kernel = peers.TensorFlowStep(name, [start], None) if kernel else None
    on_rows = on_cpu and torch and name in peers.TORCH_ROWS
    on_rows = peers.torch_on_rows(name, start) if on_rows else None
    plan = {f"{count:,}": (count, ORDERS[0]) for count in counts}
    plan |= {order: (touched, order) for order in ORDERS[1:]}
    times = {}
    for label, (count, order) in plan.items():
        number, turns, warm_up = (2, 5, 1) if count > 16_384 else (8, repeats, 3)
        pairs = gradients(rows, count, order, number)
        calls = {"ours": next_of(table, slices(pairs))}
        calls["dense"] = lambda: dense(dense_grads)
        if kernel:
            summed = order == "repeated"
            constants = [(tf.constant(i), tf.constant(v), summed) for i, v in pairs]
            calls["TensorFlow"] = next_of(kernel.on_rows, constants)
        if on_rows:
            long = [(i.astype(np.int64), v) for i, v in pairs]
            tensors = [tuple(map(torch.from_numpy, pair)) for pair in long]
            calls["torch"] = next_of(on_rows, tensors)
        times[label] = report.in_turns(calls, turns, warm_up)
    if not kernel:
        return times, None
    end = np.asarray(table.held[0])
    apart = np.abs(kernel.params[0].numpy() - end).mean() / np.abs(end - 1).mean()
    return times, apart


def break_even(counts: Sequence[int], times: Mapping[str, Any]) -> float | None:
    """Rows touched at which a row-sparse step takes as long as a dense one."""
    over = [np.log(ratio(t["ours"], t["dense"])) for t in times.values()]
    over = np.array(over[: len(counts)])
    if over.max() < 0:
        return None
    after = int(np.argmax(over > 0))
    near = slice(max(after - 1, 0), after + 1)
    return float(np.exp(np.interp(0.0, over[near], np.log(counts)[near])))


def sizes_page(page: Report, sizes: Any, touched: int, found: Mapping) -> None:
    """What the length of the table costs: nothing, if all is well."""
    small, large = f"{min(sizes):,}", f"{max(sizes):,}"
    ratios = {name: ratio(t[large], t[small]) for name, (t, _) in found.items()}
    rows = []
    for name, (times, needs) in found.items():
        memory = f"{needs[small] / 1024:.0f} to {needs[large] / 1024:.0f}"
        rows.append((name, *map(spread, times.values()), f"{ratios[name]:.2f}", memory))
    lengths = " | ".join(f"{rows:,}" for rows in sizes)
    page.table("lengths", rows, touched=touched, lengths=lengths)


def touched_page(
    page: Report, counts: Any, rows: int, touched: int, found: Any
) -> None:
    """What the rows touched cost, beside the dense step and the peers."""
    label, by_count, table = f"{touched:,}", [], []
    for name, (times, _) in found.items():
        even = break_even(counts, times)
        ours = (f"{np.median(times[f'{n:,}']['ours']):.3g}" for n in counts)
        dense = spread(times[label]["dense"])
        by_count.append((name, *ours, dense, f"{even / rows:.0%}" if even else "never"))
        for order in ORDERS:
            of = times[label if order == ORDERS[0] else order]
            over = {p: round(ratio(of["ours"], of[p]), 3) for p in of}
            gain = round(ratio(of["dense"], of["ours"]), 3)
            others = (over.get(peer, "-") for peer in SIDES[2:])
            table.append((name, order, spread(of["ours"]), gain, *others))
    named = " | ".join(f"{n:,}" for n in counts)
    page.table("by touched", by_count, length=rows, counts=named)
    page.table("touched", table, length=rows, touched=touched)
    same_ends(page, [far for _, far in found.values()])


def row_sparse(options: Any, quick: bool) -> None:
    """Against the table's length, the rows touched, TensorFlow and torch."""
    page = Report("bench_sparse", options)
    page.text("missing", peers=peers.missing() or "none")
    touched, rows = (64, 2**14) if quick else (4_096, 2**20)
    sizes = [10**n for n in ((3, 4, 5) if quick else (4, 5, 6, 7))]
    counts = [rows // 4**n for n in ((4, 2, 0) if quick else range(7, -1, -1))]
    names = ("adagrad",) if quick else TABLES
    all_names, repeats = names if quick else TOUCHED_ONLY, 5 if quick else 40

    def length(name):
        return by_size(name, sizes, touched, repeats)

    def number(name):
        return by_touched(name, rows, counts, touched, repeats)

    lengths = each("by length", length, all_names)
    sizes_page(page, sizes, touched, lengths)
    found = each("by rows touched", number, names)
    touched_page(page, counts, rows, touched, found)
    left, right = [], []
    for name, (times, _) in found.items():
        of_length = [np.median(lengths[name][0][f"{n:,}"]) for n in sizes]
        of_number = [np.median(times[f"{n:,}"]["ours"]) for n in counts]
        left.append(Line(name, sizes, of_length))
        right.append(Line(name, counts, of_number))
    unit = "milliseconds of a step"
    pairs = (("rows of the table", left), ("rows touched", right))
    page.picture([Panel(x, unit, lines, log="xy") for x, lines in pairs])
    page.data(by_length=lengths, by_touched=found)
    page.save()


if __name__ == "__main__":
    options = report.arguments(__doc__).parse_args()
    dense(options, options.quick)
    row_sparse(options, options.quick)
