"""What the benchmarks and reproductions share: how to time, and what to write down.

    python benchmarks/report.py      # the summary of all results, benchmarks/results

A script makes a `Report`, adds tables, criteria and pictures to it, which are printed
as they come, and saves it: NAME.json with everything, NAME.md and NAME.png to look at.
Nothing here decides whether a test passes.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
SHORT_RESULTS = Path(__file__).parent / "results-quick"
PACKAGES = (
    "jax",
    "jaxlib",
    "optax",
    "numpy",
    "tensorflow-cpu",
    "torch",
    "drjax",
    "ray",
)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes; `parse_args()` it, add to it before."""
    title = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short form, that shows only that it runs",
    )
    parser.add_argument("--out", type=Path, help="the folder that results go to")
    return parser


def folder_of(options: argparse.Namespace) -> Path:
    """Where results go: a short run leaves those of a full one alone."""
    return options.out or (SHORT_RESULTS if options.quick else RESULTS)


def machine() -> dict[str, Any]:
    """What the figures were measured on, with which versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def _processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def in_turns(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each call, each run once in a turn, so that a drift meets all.

    A call returns what must be ready before the clock is stopped. The order is turned
    round every other time: what ran before leaves its data in the caches.
    """
    times = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        order = list(calls) if turn % 2 else list(calls)[::-1]
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            taken = 1e3 * (time.perf_counter() - start)
            if turn >= warm_up:
                times[name].append(taken)
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of times that were taken in the same turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """The median (lower quartile to upper), as tables show it."""
    low, middle, high = np.quantile(numbers, [0.25, 0.5, 0.75])
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def bytes_accessed(compiled: jax.stages.Compiled) -> int:
    """Bytes that the compiled program's operations read and write."""
    analysis: Any = compiled.cost_analysis()
    return int(analysis["bytes accessed"])


class Report:
    """What one script found out. `options` are its parsed arguments.

    Args:
        name: Of the files, such as "bench_dense".
        title: Of the page, one line.
        about: What was measured and how, in Markdown: it opens the page.
        options: The parsed `arguments`.
    """

    def __init__(
        self, name: str, title: str, about: str, options: argparse.Namespace
    ) -> None:
        self.folder = folder_of(options)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name, self._start = name, time.perf_counter()
        self._console = Console()
        if not self._console.is_terminal:
            self._console.width = 120
        self._found: dict[str, Any] = {
            "name": name,
            "title": title,
            "quick": options.quick,
            "machine": machine(),
            "tables": [],
            "criteria": [],
            "data": {},
        }
        self._page = [f"# {title}", about.strip()]
        self._console.rule(title)

    def text(self, paragraph: str) -> None:
        """Add a paragraph, in Markdown."""
        self._console.print(paragraph, markup=False)
        self._page.append(paragraph.strip())

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Add a table; numbers are written as they are given, strings as well."""
        shown = Table(title=title)
        for number, column in enumerate(columns):
            shown.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            shown.add_row(*map(_cell, row))
        self._console.print(shown)
        self._found["tables"].append(
            {"title": title, "columns": list(columns), "rows": [list(r) for r in rows]}
        )
        aligned = ["---", *["---:"] * (len(columns) - 1)]
        lines = [columns, aligned, *([_cell(c) for c in row] for row in rows)]
        table = "\n".join(_row(line) for line in lines)
        self._page += [f"## {title}", table]

    def criterion(self, what: str, met: bool, found: str, why_not: str = "") -> None:
        """Print one criterion as met or not, with what was found.

        `why_not` says what limits it, where that is known; shown where it is not met.
        """
        because = f" {why_not}" if why_not and not met else ""
        self._found["criteria"].append(
            {
                "criterion": what,
                "met": bool(met),
                "found": found,
                "why_not": because[1:],
            }
        )
        word = "met" if met else "NOT met"
        self._console.print(f"{word}: {what}: {found}.{because}", markup=False)

    def data(self, **named: Any) -> None:
        """Keep more numbers in the JSON file, without showing them."""
        self._found["data"].update(named)

    def picture(self, figure: Any, caption: str, name: str = "") -> None:
        """Write a figure of Matplotlib beside the page, and show it there."""
        file = f"{self._name}{'_' if name else ''}{name}.png"
        figure.savefig(self.folder / file, dpi=110)
        self._page.append(f"![{caption}]({file})\n\n*{caption}*")

    def save(self) -> None:
        """Write the files, and say where."""
        self._found["seconds"] = round(time.perf_counter() - self._start, 1)
        page = list(self._page)
        if self._found["criteria"]:
            page[2:2] = ["## Criteria", _criteria(self._found["criteria"])]
        page += ["## Where it was measured", _about(self._found)]
        text = "\n\n".join(page) + "\n"
        (self.folder / f"{self._name}.md").write_text(text)
        lines = [
            f"{json.dumps(key)}: {json.dumps(_rounded(value))}"
            for key, value in self._found.items()
        ]
        (self.folder / f"{self._name}.json").write_text(
            "{\n" + ",\n".join(lines) + "\n}\n"
        )
        self._console.print(
            f"{self._found['seconds']:.0f} s; wrote {self._name}.json, .md and "
            f"pictures into {self.folder}",
            markup=False,
        )


def _cell(value: Any) -> str:
    """What a table shows of it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _rounded(value: Any) -> Any:
    """What a JSON file keeps of it: six digits of a number."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return float(f"{float(value):.6g}")


def _row(cells: Sequence[str]) -> str:
    """A row of a table, in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _criteria(criteria: Sequence[Mapping[str, Any]]) -> str:
    """A table of them, in Markdown."""
    lines = ["| criterion | | found |", "|---|---|---|"]
    for one in criteria:
        word = "met" if one["met"] else "**not met**"
        found = f"{one['found']}. {one['why_not']}" if one["why_not"] else one["found"]
        lines.append(_row([one["criterion"], word, found]))
    return "\n".join(lines)


def _about(found: Mapping[str, Any]) -> str:
    """The machine, the versions and how long it took, in Markdown."""
    where = found["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    short = " A short run, which shows only that it runs." if found["quick"] else ""
    return (
        f"{where['device']}; {where['processor']}, {where['cores']} cores; "
        f"{versions}. {found['seconds']:.0f} seconds in all.{short}"
    )


def summarise(folder: Path) -> str:
    """A page in Markdown with the criteria of all results in a folder."""
    page = [
        "# Measured",
        "Every criterion, as the last run left it. `make bench` and `make reproduce` "
        "write these pages.",
    ]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        page.append(f"## [{found['title']}]({path.stem}.md)")
        page.append(
            _criteria(found["criteria"]) if found["criteria"] else "No criteria."
        )
    return "\n\n".join(page) + "\n"


if __name__ == "__main__":
    folder = folder_of(arguments(__doc__).parse_args())
    text = summarise(folder)
    (folder / "README.md").write_text(text)
    print(text)
