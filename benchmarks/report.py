"""What the benchmarks and reproductions share: how to time, and what to write down.

    python benchmarks/report.py      # the summary of all results, benchmarks/results

A script makes a `Report`, adds tables, criteria and pictures to it, which are printed
as they come, and saves it: NAME.json with everything, NAME.md and NAME.png to look at.
What its page says in words, and what is to be thought of a target that is not met,
stands in `pages.toml`. Nothing here decides whether a test passes.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
RESULTS, SHORT_RESULTS = HERE / "results", HERE / "results-quick"
PAGES = tomllib.loads((HERE / "pages.toml").read_text())
PACKAGES = "jax jaxlib optax numpy tensorflow-cpu torch drjax ray".split()
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes; `parse_args()` it, add to it before."""
    title = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    help = "a short form, that shows only that it runs"
    parser.add_argument("--quick", action="store_true", help=help)
    parser.add_argument("--out", type=Path, help="the folder that results go to")
    return parser


def folder_of(options: argparse.Namespace) -> Path:
    """Where results go: a short run leaves those of a full one alone."""
    return options.out or (SHORT_RESULTS if options.quick else RESULTS)


def machine() -> dict[str, Any]:
    """What the figures were measured on, with which versions."""
    installed = {
        (each.metadata["Name"] or "").lower(): each.version
        for each in importlib.metadata.distributions()
    }
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    device, processor = jax.devices()[0], platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = path.read_text().splitlines()
        names = [line.partition(":")[2] for line in lines if "model name" in line]
        processor = names[0].strip() if names else processor
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": processor,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **versions},
    }


def in_turns(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each call, each run once in a turn, so that a drift meets all.

    A call returns what must be ready before the clock is stopped. The order is turned
    round every other time: what ran before leaves its data in the caches.
    """
    times = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
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


def of_seeds(values: Any, form: str = ".2f", unit: str = "", middle=np.mean) -> str:
    """The mean over the seeds (the lowest to the highest)."""
    low, high = np.min(values), np.max(values)
    return f"{middle(values):{form}}{unit} ({low:{form}} to {high:{form}})"


def listed(names: Iterable[Any], values: Iterable[Any], form: str = "{} {:.2f}") -> str:
    """Names and what was found for each, in a line."""
    return ", ".join(form.format(*pair) for pair in zip(names, values, strict=True))


def each(what: str, function: Callable, items: Iterable[Any], threads: int = 1) -> list:
    """The results in order, with a bar; several at a time where threads are given."""
    items = list(items)
    with ThreadPoolExecutor(threads) as pool:
        return list(track(pool.map(function, items), what, total=len(items)))


class Line(NamedTuple):
    """A line of a panel: numbers, or rows of them, of which mean and range are seen."""

    label: str
    x: Any
    y: Any
    look: str = "o-"
    colour: str = ""  # the next one, if none


class Panel(NamedTuple):
    """A part of a picture, with the labels of its axes."""

    x: str
    y: str
    lines: Sequence[Line]
    title: str = ""
    log: str = ""  # the axes that are logarithmic: "x", "y" or "xy"
    ylim: tuple[Any, Any] | None = None
    names: Sequence[str] = ()  # of the places 0, 1, ... on the other axis


def figure_of(panels: Sequence[Panel], columns: int = 0) -> Figure:
    """A picture of panels side by side, with a legend where labels are new."""
    columns = columns or len(panels)
    rows, known = -(-len(panels) // columns), set()
    tall = max(3.6, *(0.3 * len(panel.names) for panel in panels))
    size = min(15, 1 + 4.8 * columns), 0.6 + tall * rows
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(places, panels, strict=True):
        for number, line in enumerate(panel.lines):
            rows_of = np.atleast_2d(np.asarray(line.y, float))
            style: Any = {"color": line.colour or COLOURS[number % len(COLOURS)]}
            axes.plot(
                line.x, rows_of.mean(0), line.look, ms=4, label=line.label, **style
            )
            if len(rows_of) > 1:
                low, high = rows_of.min(0), rows_of.max(0)
                axes.fill_between(line.x, low, high, alpha=0.2, lw=0, **style)
        axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
        axes.set(**{f"{axis}scale": "log" for axis in panel.log}, ylim=panel.ylim)
        if panel.names:
            axes.set_yticks(range(len(panel.names)), panel.names)
            axes.invert_yaxis()
        axes.grid(alpha=0.3)
        if new := {line.label for line in panel.lines if line.label} - known:
            axes.legend(frameon=False, fontsize="small")
            known |= new
    return figure


class Report:
    """What one script found out; its words are those of its part of `pages.toml`.

    Args:
        name: Of the files, such as "bench_dense", and in `pages.toml`.
        options: The parsed `arguments`.
        values: For the places in the page's introduction that wait for them.
    """

    def __init__(self, name: str, options: argparse.Namespace, **values: Any) -> None:
        self.words, self.folder = PAGES[name], folder_of(options)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name, self._start = name, time.perf_counter()
        self._console = Console()
        if not self._console.is_terminal:
            self._console.width = 120
        title = self.words["title"]
        self._found: dict[str, Any] = {"name": name, "title": title}
        self._found |= {"quick": options.quick, "machine": machine()}
        self._found |= {"tables": [], "criteria": [], "data": {}}
        self._page = [f"# {title}", self.words["about"].format(**values).strip()]
        self._console.rule(title)

    def text(self, key: str, **values: Any) -> None:
        """Add a paragraph."""
        paragraph = self.words["texts"][key].format(**values)
        self._console.print(paragraph, markup=False)
        self._page.append(paragraph.strip())

    def table(self, key: str, rows: Iterable[Sequence[Any]], **values: Any) -> None:
        """Add a table, its cells as they shall show."""
        title, columns = (x.format(**values) for x in self.words["tables"][key])
        rows, columns = [list(row) for row in rows], columns.split(" | ")
        shown = Table(title=title)
        for number, column in enumerate(columns):
            shown.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            shown.add_row(*map(_cell, row))
        self._console.print(shown)
        kept = {"title": title, "columns": columns, "rows": rows}
        self._found["tables"].append(kept)
        aligned = ["---", *["---:"] * (len(columns) - 1)]
        lines = [columns, aligned, *([_cell(c) for c in row] for row in rows)]
        self._page += [f"## {title}", "\n".join(map(_row, lines))]

    def criterion(
        self, key: str, met: bool, found: str, why_not: str = "", **values: Any
    ) -> None:
        """Print one criterion as met or not, with what was found, and why it is not."""
        what = self.words["criteria"][key].format(**values)
        one = {"criterion": what, "met": bool(met), "found": found}
        self._found["criteria"].append({**one, "why_not": "" if met else why_not})
        word = "met:" if met else f"NOT met ({why_not}):"
        self._console.print(word, f"{what}: {found}", markup=False)

    def nowhere(
        self, key: str, found: Sequence[str], else_: str, **values: Any
    ) -> None:
        """A criterion that is met where nothing was found against it."""
        self.criterion(key, not found, ", ".join(found) or else_, **values)

    def data(self, **named: Any) -> None:
        """Keep more numbers in the JSON file, without showing them."""
        self._found["data"].update(named)

    def picture(self, panels: Any, key: str = "", columns: int = 0, **values) -> None:
        """Write a picture beside the page, and show it there."""
        file = f"{self._name}{'_' if key else ''}{key}.png"
        caption = self.words["pictures"][key or "picture"].format(**values)
        figure_of(panels, columns).savefig(self.folder / file, dpi=110)
        self._page.append(f"![{caption}]({file})\n\n*{caption}*")

    def save(self) -> None:
        """Write the files, and say where."""
        found, page = self._found, list(self._page)
        found["seconds"] = round(time.perf_counter() - self._start, 1)
        page[2:2] = ["## Criteria", _criteria(self._name, found["criteria"])]
        where = found["machine"]
        versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
        short = " A short run, which shows only that it runs." * found["quick"]
        page += [
            "## Where it was measured",
            f"{where['device']}; {where['processor']}, {where['cores']} cores; "
            f"{versions}. {found['seconds']:.0f} seconds in all.{short}",
        ]
        (self.folder / f"{self._name}.md").write_text("\n\n".join(page) + "\n")
        lines = [
            f"{json.dumps(k)}: {json.dumps(_rounded(v))}" for k, v in found.items()
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (self.folder / f"{self._name}.json").write_text(text)
        print(f"{found['seconds']:.0f} s; wrote {self._name}.* into {self.folder}")


def reproduce(
    name: str, doc: str | None, study: Any, full: Any, short: Any, **values
) -> None:
    """Run `study(page, settings)`, and write down what it adds to the page.

    `values` of a function take the settings, and go into the page's introduction.
    """
    options = arguments(doc).parse_args()
    settings = short if options.quick else full
    values = {name: value(settings) for name, value in values.items()}
    page = Report(name, options, **values)
    study(page, settings)
    page.save()


def _cell(value: Any) -> str:
    """What a table shows of it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _rounded(value: Any) -> Any:
    """What a JSON file keeps of it: six digits of a number, arrays as lists."""
    if isinstance(value, Mapping):
        return {key: _rounded(of) for key, of in value.items()}
    if isinstance(value, list | tuple) or np.ndim(value):
        return [_rounded(of) for of in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return float(f"{float(value):.6g}")


def _row(cells: Sequence[str]) -> str:
    """A row of a table, in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _judged(name: str, criterion: str) -> tuple[str, str]:
    """What is to be thought of a target that is not met: a word, and why."""
    for one in PAGES[name].get("judged", ()):
        if any(part in criterion for part in one["of"]):
            return one["verdict"], one["why"]
    return "not judged yet", ""


def _criteria(name: str, criteria: Iterable[Mapping[str, Any]]) -> str:
    """A table of them, in Markdown."""
    lines = ["| criterion | | found |", "|---|---|---|"]
    for one in criteria:
        word, found = "met", one["found"]
        if not one["met"]:
            verdict, why = _judged(name, one["criterion"])
            word = f"**not met**: {verdict}"
            parts = (one["found"], one["why_not"], why)
            found = " ".join(f"{part.rstrip('.')}." for part in parts if part)
        lines.append(_row([one["criterion"], word, found]))
    return "\n".join(lines)


def _looked_up(found: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """A number that matters: what a criterion found, or cells of a table."""
    if "criterion" in one:
        named = (
            c for c in found["criteria"] if c["criterion"].startswith(one["criterion"])
        )
        return next(named)["found"]
    (table,) = (t for t in found["tables"] if t["title"].startswith(one["table"]))
    (row,) = (
        row for row in table["rows"] if list(row[: len(one["row"])]) == one["row"]
    )
    return ", ".join(
        f"{c}: {_cell(row[table['columns'].index(c)])}" for c in one["columns"]
    )


def summarise(folder: Path) -> str:
    """A page in Markdown: the numbers that matter, what is met, and what is not."""
    pages = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    pages = {name: pages[name] for name in sorted(pages)}
    every = [(name, one) for name, found in pages.items() for one in found["criteria"]]
    met = sum(one["met"] for _, one in every)
    numbers = ["| what | found | page |", "|---|---|---|"]
    for one in PAGES["numbers"]:
        if one["page"] in pages:
            link = f"[{pages[one['page']]['title']}]({one['page']}.md)"
            numbers.append(
                _row([one["what"], _looked_up(pages[one["page"]], one), link])
            )
    text = [
        "# Measured",
        PAGES["summary"].strip(),
        "## Ten numbers",
        "\n".join(numbers),
    ]
    for title, wanted in (
        (f"Met: {met} of {len(every)} criteria", True),
        (f"Not met: {len(every) - met}, each with what is to be thought of it", False),
    ):
        text.append(f"## {title}")
        for name, found in pages.items():
            some = [one for one in found["criteria"] if one["met"] == wanted]
            if some:
                text.append(f"### [{found['title']}]({name}.md)")
                text.append(_criteria(name, some))
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":
    folder = folder_of(arguments(__doc__).parse_args())
    text = summarise(folder)
    (folder / "README.md").write_text(text)
    print(text)
