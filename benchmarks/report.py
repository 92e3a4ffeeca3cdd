"""What the benchmarks and reproductions share: how to time, and what to write down.

    python benchmarks/report.py             # all pages anew from their JSON files
    python benchmarks/report.py --pictures  # and all pictures

A script makes a `Report`, adds tables and pictures to it, which are printed as they
come, and saves it: NAME.json with everything, NAME.md and NAME.png to look at. What its
page says in words, what follows and what others published, stands in `pages.toml`, and
the order of the pages in `groups.toml`.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pictures import Panel, figure_of, kept, save
from rich.progress import track

HERE = Path(__file__).parent
PAGES = tomllib.loads((HERE / "pages.toml").read_text())
GROUPS = tomllib.loads((HERE / "groups.toml").read_text())
PACKAGES = """jax jaxlib libtpu jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
optax numpy tensorflow-cpu torch drjax ray""".split()
SUMMARY = """What was measured, a page each: what was done, beside what, and on what
machine. `make bench` and `make reproduce` make them anew. What is exact, and can be
checked anywhere, is no page but a test. Why the numbers are what they are:
[what limits them](what-limits.md)."""
STAGES = ("trace", "lower", "compile")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes; `parse_args()` it, add to it before."""
    title = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    short = "a short form, that shows only that it runs"
    parser.add_argument("--quick", action="store_true", help=short)
    parser.add_argument("--out", type=Path, help="the folder that results go to")
    return parser


def folder_of(options: argparse.Namespace) -> Path:
    """Where results go: a short run leaves those of a full one alone."""
    return options.out or HERE / ("results-quick" if options.quick else "results")


def on_cpu(devices: int = 0, threads: int = 0) -> None:
    """Let JAX have CPU devices alone, so many of them, before it makes an array.

    XLA reads the size of its pool from NPROC. Without threads to spare for the devices
    a collective may wait for ever: see Makefile. Where a program takes one core, and
    as many run at a time as there are cores, one is faster than threads inside of
    small matrix products.
    """
    os.environ["NPROC"] = str(threads or os.environ.get("NPROC", 16))
    jax.config.update("jax_platforms", "cpu")
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)


def machine() -> dict[str, Any]:
    """What the figures were measured on, with which versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device, processor = jax.devices()[0], platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = path.read_text().splitlines()
        names = [line.partition(": ")[2] for line in lines if "model name" in line]
        processor = [*names, processor][0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": processor,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 3,
    host: bool = False,
) -> dict[str, list[Any]]:
    """Milliseconds of each call, each run once in a turn, so that a drift meets all.

    A call returns what must be ready before the clock is stopped. The order is turned
    round every other time: what ran before leaves its data in the caches. With `host`
    each is a pair with the processor's milliseconds of the host's thread, until the
    call returns: others that want it, and what devices do meanwhile, do not count.
    """
    times = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            start, own = time.perf_counter(), time.thread_time()
            found = calls[name]()
            own = time.thread_time() - own
            jax.block_until_ready(found)
            taken = 1e3 * (time.perf_counter() - start)
            if turn >= warm_up:
                times[name].append((taken, 1e3 * own) if host else taken)
    return times


def build(program: Any, arguments: Any, compiles: bool = True) -> tuple[Any, Any]:
    """Seconds of each stage, None of what is left out, and the compiled program."""
    jax.clear_caches()
    seconds, made = dict.fromkeys(STAGES), program
    for stage in STAGES[: 2 + compiles]:
        start = time.perf_counter()
        made = getattr(made, stage)(*(arguments if stage == "trace" else ()))
        seconds[stage] = time.perf_counter() - start
    return seconds, made


def ratio(over: Any, under: Any) -> float:
    """The median of the ratios of times that were taken in the same turn."""
    return float(np.median(np.divide(over, under)))


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """The median (lower quartile to upper), as tables show it."""
    low, middle, high = np.quantile(numbers, [0.25, 0.5, 0.75])
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def of_seeds(values: Any, form: str = ".2f", unit: str = "", middle=np.mean) -> str:
    """The mean over the seeds (the lowest to the highest)."""
    low, high = np.min(values), np.max(values)
    return f"{middle(values):{form}}{unit} ({low:{form}} to {high:{form}})"


def percent(parts: Any, digits: int = 1) -> str:
    """Parts of a whole, such as accuracies, in percent: as `of_seeds` shows them."""
    return of_seeds(100 * np.asarray(parts), f".{digits}f")


def listed(names: Iterable[Any], values: Iterable[Any], form: str = "{} {:.2f}") -> str:
    """Names and what was found for each, in a line."""
    return ", ".join(form.format(*pair) for pair in zip(names, values, strict=True))


def threads() -> ThreadPoolExecutor:
    """A thread for each core."""
    return ThreadPoolExecutor(os.cpu_count() or 1)


def processes(quick: bool) -> ProcessPoolExecutor | None:
    """A process for each core; none in a short run, which is over before they start."""
    spawn = multiprocessing.get_context("spawn")
    return None if quick else ProcessPoolExecutor(os.cpu_count(), spawn)


def each(what: str, function: Callable, items: Iterable[Any], pool: Any = None) -> dict:
    """{item: result}, with a bar; in order, or several at a time in a pool."""
    items = list(items)
    with pool or ThreadPoolExecutor(1) as pool:
        found = track(pool.map(function, items), what, total=len(items))
        return dict(zip(items, found, strict=True))


def grid(what: str, function: Callable, axes: Sequence[Any], pool: Any = None) -> Any:
    """What `function(*point)` finds for each point of the axes, an array for each."""
    points = itertools.product(*axes)
    found = each(what, lambda point: function(*point), points, pool).values()
    size = [*map(len, axes)]
    return jax.tree.map(lambda *of: np.reshape(of, (*size, *np.shape(of[0]))), *found)


class Report:
    """What one script found out: printed as it comes, then a JSON file and its page.

    Args:
        name: Of the files, such as "bench_dense", and in `pages.toml`.
        options: The parsed `arguments`.
        values: For the places in the page's `about`, and under its pictures, that wait
            for them.
    """

    def __init__(self, name: str, options: argparse.Namespace, **values: Any) -> None:
        self.words, self.folder = PAGES[name], folder_of(options)
        self.quick: bool = options.quick
        self._values = values
        self.folder.mkdir(parents=True, exist_ok=True)
        self._start = time.perf_counter()
        about = self.words["about"].format(**values).strip()
        known = {"name": name, "title": self.words["title"], "quick": self.quick}
        empty = {key: [] for key in ("texts", "tables", "pictures")}
        known |= {"machine": machine(), "about": about}
        self._found: dict[str, Any] = {**known, **empty, "drawn": {}, "data": {}}
        print(f"# {self.words['title']}")

    def text(self, key: str, **values: Any) -> None:
        """Add a paragraph."""
        paragraph = self.words["texts"][key].format(**values)
        print(paragraph)
        self._found["texts"].append(paragraph)

    def table(self, key: str, rows: Iterable[Sequence[Any]], **values: Any) -> None:
        """Add a table, its cells as they shall show."""
        title, columns = (x.format(**values) for x in self.words["tables"][key])
        rows, columns = [list(row) for row in rows], columns.split(" | ")
        kept = {"title": title, "columns": columns, "rows": rows}
        self._found["tables"].append(kept)
        print(f"\n{title}\n\n{_table(**kept)}\n")

    def data(self, **named: Any) -> None:
        """Keep more numbers in the JSON file, without showing them."""
        self._found["data"].update(named)

    def picture(
        self, panels: Sequence[Panel], key: str = "", columns: int = 1, **values: Any
    ) -> None:
        """Draw panels beside the page, show them there, and keep them in the JSON."""
        file = f"{self._found['name']}{'_' if key else ''}{key}.png"
        caption = self.words["pictures"][key or "picture"]
        caption = caption.format(**{**self._values, **values})
        drawn = {"columns": columns, "panels": kept(panels)}
        save(figure_of(panels, columns), self.folder / file)
        self._found["pictures"].append([file, caption])
        self._found["drawn"][file] = drawn

    def save(self) -> None:
        """Write the files, and say where."""
        found, name = self._found, self._found["name"]
        found["seconds"] = round(time.perf_counter() - self._start, 1)
        lines = [
            f"{json.dumps(k)}: {json.dumps(_rounded(v))}" for k, v in found.items()
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (self.folder / f"{name}.json").write_text(text)
        (self.folder / f"{name}.md").write_text(page_of(json.loads(text)))
        print(f"{found['seconds']:.0f} s; wrote {name}.* into {self.folder}")


class Known:
    """Rows that have been measured, in a file: a run goes on where one was ended."""

    def __init__(self, path: Path, resume: bool):
        self.path = path
        if not resume:
            path.write_text("")
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {json.dumps(key): rows for key, rows in map(json.loads, lines)}

    def get(self, key: list[Any], measure: Any) -> list[list[Any]]:
        """The rows under this name; measured now if there are none."""
        name = json.dumps(key)
        if name not in self.rows:
            self.rows[name] = measure()
            with self.path.open("a") as out:
                out.write(f"{json.dumps([key, self.rows[name]])}\n")
        return self.rows[name]

    def all(
        self, what: str, items: Sequence[Any], measure: Callable, *more: Any
    ) -> list[list[Any]]:
        """The rows `measure(item, *more)` of all items, each shown as it comes."""
        rows = []
        for number, item in enumerate(items, 1):
            key = [what, *(item if isinstance(item, tuple) else (item,)), *more]
            rows += self.get(key, functools.partial(measure, item, *more))
            print(f"{what}, {number} of {len(items)}: {rows[-1]}", flush=True)
        return rows


def page_of(found: Mapping[str, Any]) -> str:
    """The page of a JSON file, in Markdown: the answer, picture and table first."""
    words, where = PAGES[found["name"]], found["machine"]
    page = [f"# {words['title']}", f"**{words['answer'].strip()}**"]
    if found["quick"]:
        page += [
            "A short run, which shows only that it runs; the words are the full run's."
        ]
    page += [words["did"].strip(), *filter(None, [words.get("follows", "").strip()])]
    pictures = [
        f"[![{says}]({at})]({at})\n\n*{says}*" for at, says in found["pictures"]
    ]
    tables = [f"## {of['title']}\n\n{_table(**of)}" for of in found["tables"]]
    page += [*pictures[:1], *tables[:1]]
    if "claims" in words:
        claims = _table(["published", "here"], words["claims"])
        page += ["## What others published", claims]
    page += [*tables[1:], *pictures[1:]]
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    page += [
        "## How it was done",
        found["about"],
        *found["texts"],
        f"Measured on {where['device']}; {where['processor']}, {where['cores']} cores; "
        f"{versions}. {found['seconds']:.0f} seconds in all.",
    ]
    return "\n\n".join(page) + "\n"


def reproduce(
    name: str, doc: str | None, study: Any, full: Any, short: Any, **values: Any
) -> None:
    """Run `study(page, settings)`, and write down what it adds to the page.

    Named settings are values for the page's introduction, and `values` are more.
    """
    options = arguments(doc).parse_args()
    settings = short if options.quick else full
    named = settings if isinstance(settings, Mapping) else {}
    page = Report(name, options, **named, **values)
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
        return {_name(key): _rounded(of) for key, of in value.items()}
    if isinstance(value, list | tuple) or np.ndim(value):
        return [_rounded(of) for of in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return float(f"{float(value):.6g}")


def _name(key: Any) -> str:
    """What is measured in the words of a JSON file, such as "QSR, True"."""
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _row(cells: Iterable[str]) -> str:
    """A row of a table, in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = ""
) -> str:
    """A table in Markdown; its title is for the page."""
    aligned = ["---", *["---:"] * (len(columns) - 1)]
    if columns[1] in ("", "here", "parameters", "in mid-period"):  # no numbers
        aligned = ["---"] * len(columns)
    return "\n".join(map(_row, [columns, aligned, *(map(_cell, row) for row in rows)]))


def summarise(folder: Path) -> str:
    """A page in Markdown: the answer of each page, in the groups of `groups.toml`."""
    page = ["# Measured", SUMMARY]
    for group, names in GROUPS.items():
        rows = [
            (
                f"[{PAGES[name]['title']}]({name}.md)",
                " ".join(PAGES[name]["answer"].split()),
            )
            for name in names
            if (folder / f"{name}.json").exists()
        ]
        if rows:
            page += [f"## {group}", _table(["page", "here"], rows)]
    return "\n\n".join(page) + "\n"


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the pictures of a JSON file, from what it keeps of them."""
    for file, drawn in found.get("drawn", {}).items():
        save(figure_of(drawn["panels"], drawn["columns"]), folder / file)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--pictures", action="store_true", help="draw them, too")
    options = parser.parse_args()
    folder = folder_of(options)
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        path.with_suffix(".md").write_text(page_of(found))
        if options.pictures:
            draw(found, folder)
    (folder / "README.md").write_text(summarise(folder))
    print(f"wrote the pages in {folder}")
