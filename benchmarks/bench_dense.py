"""The catalogue's dense step beside Optax, TensorFlow's kernels and torch.

    python benchmarks/bench_dense.py            # six minutes, 4 GB
    python benchmarks/bench_dense.py --quick    # half a minute

A step is what a user compiles: `tx.update`, then `optax.apply_updates`, under `jax.jit`
with parameters and state donated. It is timed on 33.5 million float32 parameters in
8 leaves, and on 2,048 leaves of 1,024. Trace and compilation are timed of new closures
with emptied caches, ours and Optax's in turns. Bytes are counted in the compiled
program; the floor is to read parameter, gradient and slots once, and to write parameter
and slots. On a GPU the peers, which run on processors, are left out.
"""

import dataclasses
import statistics
from collections.abc import Mapping

import numpy as np
import peers
import report
from dense_steps import Found, measure
from matplotlib.figure import Figure
from rich.progress import track

LARGE, SMALL = (8, 4_194_304), (2_048, 1_024)  # leaves, and floats in each
SMALL_OPTIMIZERS = ("gradient_descent", "momentum", "adagrad", "adam")
QUICK_OPTIMIZERS = ("gradient_descent", "rmsprop", "normalized_sgd", "adam")
COLOURS = {
    "ours": "#4477AA",
    "Optax": "#EE6677",
    "TensorFlow": "#228833",
    "torch": "#CCBB44",
}


def beside_optax(page: report.Report, results: Mapping[str, Found], where: str) -> None:
    """What is held against Optax, for leaves of one kind."""
    compared = {name: found for name, found in results.items() if name in peers.OPTAX}
    slower = {
        name: f"{name} {found.ratio('Optax'):.3f} (noise {found.noise():.3f})"
        for name, found in compared.items()
        if found.slower()
    }
    more = [name for name, found in compared.items() if found.more_bytes()]
    page.criterion(
        f"a step takes no longer than Optax's, noise aside, {where}",
        not slower,
        f"slower: {', '.join(slower.values())}"
        if slower
        else f"at most {max(found.ratio('Optax') for found in compared.values()):.3f}",
        f"Of these, more bytes: {', '.join(more)}." if {*more} & {*slower} else "",
    )
    page.criterion(
        f"a step moves no more bytes than Optax's, {where}",
        not more,
        f"more: {', '.join(more)}" if more else f"{len(compared)} optimizers",
    )
    ratios = {n: statistics.median(f.build_ratios()) for n, f in compared.items()}
    over = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1.1]
    page.criterion(
        f"trace and compilation take at most 1.1 of Optax's, {where}",
        not over,
        f"over: {', '.join(over)}" if over else f"at most {max(ratios.values()):.2f}",
    )


def beside_others(page: report.Report, large: Mapping[str, Found]) -> None:
    """What is held against the floor, the triad's rate, TensorFlow and torch."""
    above = {name: f for name, f in large.items() if f.bytes["ours"] > 1.01 * f.floor}
    page.criterion(
        "a step moves no more bytes than the floor, large leaves",
        not above,
        f"more: {', '.join(above)}" if above else f"{len(large)} optimizers",
        "The compiler makes a loop over the leaf for each slot and for the parameter "
        "(see the table), and each reads the gradient or the new slots again."
        if all(found.loops["ours"] > 1 for found in above.values())
        else "",
    )
    adam = large["adam"]
    bytes_moved = f"It moves {adam.bytes['ours']:.0f} bytes a parameter, not 28."
    page.criterion(
        "Adam moves its floor of bytes at 60 % or more of a donated triad's rate",
        adam.share() >= 0.6,
        f"{adam.share():.0%} of {adam.rate('triad'):.0f} GB/s",
        bytes_moved,
    )
    for peer, what in {"TensorFlow": "kernel", "torch": "fused Adam"}.items():
        ratios = {n: f.ratio(peer) for n, f in large.items() if peer in f.times}
        over = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1.25]
        if "adam" in ratios:
            page.criterion(
                f"Adam takes at most 1.25 of {peer}'s {what}, large leaves",
                ratios["adam"] <= 1.25,
                f"{ratios['adam']:.2f}",
                bytes_moved,
            )
            page.text(f"Over 1.25 of {peer}: {', '.join(over) or 'none'}.")
    apart = {name: found.apart.get("TensorFlow", 0.0) for name, found in large.items()}
    if any(apart.values()):
        page.criterion(
            "TensorFlow's kernels end where ours do, after all these steps",
            max(apart.values()) < 1e-4,
            f"at most {max(apart.values()):.1e} of the mean way apart, in the mean",
        )


def tables(page: report.Report, results: Mapping[str, Found], where: str) -> None:
    """What was measured of leaves of one kind."""

    def ratio(found: Found, peer: str) -> str:
        return f"{found.ratio(peer):.3f}" if peer in found.times else "-"

    rate = statistics.median(found.rate("triad") for found in results.values())
    page.text(f"A donated triad, x + 2 y over x, moves {rate:.0f} GB/s ({where}).")
    page.table(
        f"A step, {where}: milliseconds, and ours over the others' in the same turns",
        [
            "optimizer",
            "ms",
            "of triad",
            "/ Optax",
            "noise",
            "/ TensorFlow",
            "/ torch",
            "torch is",
        ],
        [
            (
                name,
                report.spread(found.times["ours"]),
                f"{found.share():.0%}",
                ratio(found, "Optax"),
                f"{found.noise():.3f}" if "Optax" in found.times else "-",
                ratio(found, "TensorFlow"),
                ratio(found, "torch"),
                peers.TORCH[name].form if "torch" in found.times else "-",
            )
            for name, found in results.items()
        ],
    )
    page.table(
        f"Bytes for each parameter, and compiled loops over each leaf, {where}",
        ["optimizer", "floor", "bytes", "Optax's", "loops", "Optax's"],
        [
            (
                name,
                found.floor,
                *(found.bytes.get(side, "-") for side in ("ours", "Optax")),
                *(found.loops.get(side, "-") for side in ("ours", "Optax")),
            )
            for name, found in results.items()
        ],
    )
    page.table(
        f"Seconds of trace and of compilation, {where}",
        ["optimizer", "trace", "Optax's", "compilation", "Optax's", "both / Optax's"],
        [
            (
                name,
                *(
                    statistics.median(taken[part] for taken in found.builds[side])
                    for part in (0, 1)
                    for side in ("ours", "Optax")
                ),
                report.spread(found.build_ratios()),
            )
            for name, found in results.items()
            if "Optax" in found.builds
        ],
    )


def picture(
    page: report.Report, results: Mapping[str, Found], where: str, kind: str
) -> None:
    """Bars of the times of a step."""
    figure = Figure(figsize=(8, 0.5 * len(results) + 1), layout="constrained")
    axes = figure.subplots()
    for side, (at, colour) in zip(COLOURS, enumerate(COLOURS.values()), strict=True):
        shown = [place for place, f in enumerate(results.values()) if side in f.times]
        times = [f.times[side] for f in results.values() if side in f.times]
        if not times:
            continue
        low, middle, high = np.quantile(times, [0.25, 0.5, 0.75], axis=1)
        axes.barh(
            np.add(shown, 0.2 * (at - 1.5)),
            middle,
            0.19,
            color=colour,
            xerr=[middle - low, high - middle],
            error_kw={"linewidth": 0.8},
            label=side,
        )
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set(xlabel=f"milliseconds of a step, {where}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    page.picture(figure, "Median time of a step; the lines are quartiles.", kind)


def main() -> None:
    """Measure all."""
    options = report.arguments(__doc__).parse_args()
    quick = options.quick
    about = (__doc__ or "").rpartition("\n\n")[2]
    page = report.Report("bench_dense", "Dense optimizer steps", about, options)
    if peers.missing():
        page.text(peers.missing())
    names = QUICK_OPTIMIZERS if quick else tuple(peers.OURS)
    plans = {
        "large": (names, (4, 65_536) if quick else LARGE, 5 if quick else 21, 5),
        "small": (SMALL_OPTIMIZERS, (32, 64) if quick else SMALL, 21, 3),
    }
    for kind, (chosen, (leaves, size), repeats, builds) in plans.items():
        where = f"{leaves:,} leaves of {size:,}"
        results = {
            name: measure(name, leaves, size, repeats, 1 if quick else builds)
            for name in track(chosen, description=where)
        }
        tables(page, results, where)
        beside_optax(page, results, where)
        if kind == "large":
            beside_others(page, results)
        picture(page, results, where, kind)
        page.data(**{kind: {n: dataclasses.asdict(f) for n, f in results.items()}})
    page.save()


if __name__ == "__main__":
    main()
