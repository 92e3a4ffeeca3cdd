"""Row-sparse steps: against the table's size, the rows touched, TensorFlow and torch.

    python benchmarks/bench_sparse.py            # four minutes, 4 GB
    python benchmarks/bench_sparse.py --quick    # small tables, twenty seconds

A donated, jitted step of an optimizer that sees touched rows only, on random rows of a
table 16 wide. First 4,096 rows of tables of several lengths: the time should not grow.
Then 64 rows and more of one table of 2^20, beside the dense step of the same optimizer,
TensorFlow's sparse kernels and torch's sparse gradients; at 4,096 rows also for sorted
rows, as `oxs.value_and_grad` gives them, and for rows that occur more than once, which
ours sums always, TensorFlow's optimizers before they call the kernel, torch's before
the update. Programs take turns; every call has the next of several gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import peers
import report
from matplotlib.figure import Figure
from rich.progress import track
from sparse_steps import ORDERS, Times, break_even, by_size, by_touched

TOUCHED = 4_096
TOUCHED_ONLY = (
    "gradient_descent",
    "momentum",
    "normalized_sgd",
    "adagrad",
    "adagrad_da",
    "adadelta",
    "rmsprop",
    "ftrl",
    "proximal_gradient_descent",
    "proximal_adagrad",
    "custom_adam",
)
COLOURS = {
    "gradient_descent": "#4477AA",
    "momentum": "#EE6677",
    "adagrad": "#228833",
    "rmsprop": "#CCBB44",
    "ftrl": "#AA3377",
    "custom_adam": "#66CCEE",
}


def sizes_page(
    page: report.Report, sizes: Sequence[int], touched: int, found: Mapping[str, Any]
) -> None:
    """What the length of the table costs: nothing, if all is well."""
    small, large = f"{min(sizes):,}", f"{max(sizes):,}"
    ratios = {
        name: report.ratio(times[large], times[small])
        for name, (times, _) in found.items()
    }
    page.table(
        f"{touched:,} rows of tables of several lengths: milliseconds of a step",
        ["optimizer", *(f"{rows:,}" for rows in sizes), "ratio", "temporary KiB"],
        [
            (
                name,
                *(report.spread(times[f"{rows:,}"]) for rows in sizes),
                f"{ratios[name]:.2f}",
                f"{temporary[small] / 1024:.0f} to {temporary[large] / 1024:.0f}",
            )
            for name, (times, temporary) in found.items()
        ],
    )
    over = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1.5]
    page.criterion(
        f"a step on {large} rows takes at most 1.5 of one on {small}",
        not over,
        f"over: {', '.join(over)}" if over else f"at most {max(ratios.values()):.2f}",
    )
    grown = [n for n, (_, memory) in found.items() if len({*memory.values()}) > 1]
    page.criterion(
        "the compiled step needs as many temporary bytes whatever the table's length",
        not grown,
        f"not so: {', '.join(grown)}" if grown else "equal for all lengths",
    )


def touched_page(
    page: report.Report, counts: Sequence[int], rows: int, touched: int, found: Any
) -> None:
    """What the rows touched cost, beside the dense step and the peers."""
    even = {name: break_even(counts, times) for name, (times, _) in found.items()}
    page.table(
        f"A table of {rows:,} rows: milliseconds of a step by rows touched",
        ["optimizer", *(f"{n:,}" for n in counts), "dense", "as dense at"],
        [
            (
                name,
                *(f"{np.median(times[f'{n:,}']['ours']):.3g}" for n in counts),
                report.spread(times[f"{touched:,}"]["dense"]),
                f"{at / rows:.0%}" if (at := even[name]) else "never",
            )
            for name, (times, _) in found.items()
        ],
    )

    def ratio(times: Times, over: str, under: str) -> float | str:
        known = over in times and under in times
        return round(report.ratio(times[over], times[under]), 3) if known else "-"

    labels = {order: order for order in ORDERS} | {ORDERS[0]: f"{touched:,}"}
    rows_of_table, behind = [], {order: [] for order in ORDERS}
    for name, (times, _) in found.items():
        for order, label in labels.items():
            over = ratio(times[label], "ours", "TensorFlow")
            if isinstance(over, float) and over > 1:
                behind[order].append(f"{name} {over:.2f}")
            rows_of_table.append(
                (
                    name,
                    order,
                    report.spread(times[label]["ours"]),
                    ratio(times[label], "dense", "ours"),
                    over,
                    ratio(times[label], "ours", "torch"),
                )
            )
    columns = ["optimizer", "rows", "ms", "dense / ours", "/ TensorFlow", "/ torch"]
    page.table(f"{touched:,} of {rows:,} rows, in turns", columns, rows_of_table)
    if any("TensorFlow" in times[labels["sorted"]] for times, _ in found.values()):
        for order, slower in behind.items():
            page.criterion(
                f"at least TensorFlow's speed at {touched:,} rows, {order}",
                not slower,
                f"time over TensorFlow's: {', '.join(slower) or 'nowhere above 1'}",
            )
        apart = [far for _, far in found.values() if far is not None]
        page.criterion(
            "TensorFlow's kernels end where ours do, after all these steps",
            max(apart) < 1e-4,
            f"at most {max(apart):.1e} of the mean way apart, in the mean",
        )
    for order in ORDERS[:2]:
        gains = {
            n: ratio(t[labels[order]], "dense", "ours") for n, (t, _) in found.items()
        }
        page.criterion(
            f"20 times faster than the dense step at {touched / rows:.1%}, {order}",
            all(float(gain) >= 20 for gain in gains.values()),
            ", ".join(f"{name} {gain:.1f}" for name, gain in gains.items()),
        )


def picture(
    page: report.Report, sizes: Any, counts: Any, lengths: Any, found: Any
) -> None:
    """Time against the table's length, and against the rows touched."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for name, colour in COLOURS.items():
        if name not in found:
            continue
        times, _ = lengths[name]
        left.plot(
            sizes, [np.median(times[f"{n:,}"]) for n in sizes], "o-", color=colour
        )
        times, _ = found[name]
        ours = [np.median(times[f"{n:,}"]["ours"]) for n in counts]
        right.plot(counts, ours, "o-", ms=3, color=colour, label=name)
        dense = np.median(times[f"{counts[0]:,}"]["dense"])
        right.axhline(dense, color=colour, linestyle=":", linewidth=1)
        if even := break_even(counts, times):
            right.plot(even, dense, "*", color=colour, ms=13, mec="black", mew=0.6)
    left.set(xscale="log", yscale="log", xlabel="rows of the table")
    left.set(ylabel="milliseconds of a step", title="by the table's length")
    right.set(xscale="log", yscale="log", xlabel="rows touched")
    right.set(title="by rows touched (dotted: dense, star: break-even)")
    right.legend(frameon=False)
    low, high = right.get_ylim()
    left.set_ylim(low, high)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    page.picture(figure, "Median milliseconds of a row-sparse step.")


def main() -> None:
    """Measure all."""
    options = report.arguments(__doc__).parse_args()
    quick = options.quick
    about = (__doc__ or "").rpartition("\n\n")[2]
    page = report.Report("bench_sparse", "Row-sparse optimizer steps", about, options)
    if peers.missing():
        page.text(peers.missing())
    touched, rows = (64, 2**14) if quick else (TOUCHED, 2**20)
    sizes = [10**n for n in ((3, 4, 5) if quick else (4, 5, 6, 7))]
    counts = [rows // 4**n for n in ((5, 4, 2, 0) if quick else range(7, -1, -1))]
    names = ("gradient_descent", "adagrad", "custom_adam") if quick else tuple(COLOURS)
    repeats = 5 if quick else 40
    lengths = {
        name: by_size(name, sizes, touched, repeats)
        for name in track(names if quick else TOUCHED_ONLY, "lengths of the table")
    }
    sizes_page(page, sizes, touched, lengths)
    found = {
        name: by_touched(name, rows, counts, touched, repeats)
        for name in track(names, "rows touched")
    }
    touched_page(page, counts, rows, touched, found)
    picture(page, sizes, counts, lengths, found)
    page.data(by_length=lengths, by_touched=found)
    page.save()


if __name__ == "__main__":
    main()
