"""The one style of all pictures of this project, and how they are drawn and saved.

A picture is panels of lines, which a JSON file keeps: it is drawn anew from there. It
is transparent, and its colours can be seen on a white and on a dark page: each has a
contrast of three to one with both. It is drawn 4.2 inches wide, so that letters
are still ten pixels high on a page of 420. More than twelve labels nobody reads:
`save` refuses such a picture.
"""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox
from PIL import Image

WIDTH, MOST = 4.2, 12  # inches of a picture, and labels in it
GREY = "#7f7f7f"  # of text and axes: as far from white as from the dark page
COLOURS = "#4A82BD #E5566A #2E9440 #B08D1A #8F6BD6 #1F9CB8 #C0509A".split()
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.dpi": 200,
    "figure.dpi": 100,
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), GREY),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GREY),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.06,
    "axes.ymargin": 0.08,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLOURS),
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.color": GREY,
}
mpl.rcParams.update(STYLE)


class Line(NamedTuple):
    """A line of a panel: numbers, or rows of them, of which mean and range are seen.

    A label that begins with "_" is not shown, and such a line is grey. One point alone
    has its range as a bar.
    """

    label: str
    x: Any
    y: Any
    look: str = "o-"
    colour: str = ""  # by default that of its label


class Panel(NamedTuple):
    """A part of a picture, with the labels of its axes."""

    x: str
    y: str
    lines: Sequence[Line]
    title: str = ""
    log: str = ""  # the axes that are logarithmic: "x", "y" or "xy"
    ylim: tuple[Any, Any] | None = None
    names: Sequence[str] = ()  # of the places 0, 1, ... on the vertical axis
    at_points: bool = False  # labels stand beside what they name, not in a legend
    shaded: Sequence[float] = ()  # from here to there on the horizontal axis
    xlim: tuple[Any, Any] | None = None


def kept(panels: Iterable[Panel]) -> list[dict[str, Any]]:
    """What a JSON file keeps: of rows of numbers their mean, lowest and highest."""
    found = []
    for panel in panels:
        of: dict[str, Any] = {k: v for k, v in panel._asdict().items() if v}
        of["lines"] = []
        for line in panel.lines:
            y = np.atleast_2d(np.asarray(line.y, float))
            rows = [y.mean(0), y.min(0), y.max(0)] if len(y) > 1 else [y[0]]
            one = {
                **line._asdict(),
                "x": np.atleast_1d(line.x).astype(float),
                "y": rows,
            }
            of["lines"].append({k: v for k, v in one.items() if len(v)})
        found.append(of)
    return found


def shown(panels: Iterable[Mapping[str, Any]]) -> list[str]:
    """The labels that a picture of these will have, each once."""
    labels = [line["label"] for of in panels for line in of["lines"]]
    names = [name for of in panels for name in of.get("names", ())]
    return [x for x in dict.fromkeys([*labels, *names]) if x and x[0] != "_"]


def figure_of(panels: Any, columns: int = 1) -> Figure:
    """A picture of panels, as they are or as they were kept, with one legend below."""
    panels = list(panels)
    if isinstance(panels[0], Panel):
        panels = kept(panels)
    rows = -(-len(panels) // columns)
    low = (2.6, 2.1, 1.75)[min(rows, 3) - 1] if columns == 1 else 2.0
    tall = max(low, *(0.5 + 0.19 * len(of.get("names", ())) for of in panels))
    if panels[0].get("at_points"):
        tall = max(tall, 3.2 / rows)
    labels = [
        x for x in shown(panels) if not any(x in p.get("names", ()) for p in panels)
    ]
    colours = {label: COLOURS[n % len(COLOURS)] for n, label in enumerate(labels)}
    legend = not panels[0].get("at_points") and len(labels) > 1
    figure = Figure(layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for place, axes in enumerate(places.flat):
        if place >= len(panels):
            axes.set_axis_off()
            continue
        of = panels[place]
        for line in of["lines"]:
            _draw(axes, line, _colour(line, colours), handles)
        if at := of.get("shaded"):
            axes.axvspan(*at, color=GREY, alpha=0.2, lw=0)
        for axis in of.get("log", ""):
            axes.set(**{f"{axis}scale": "log"})
        axes.set(
            xlabel=of.get("x", ""), ylabel=of.get("y", ""), title=of.get("title", "")
        )
        axes.set(ylim=of.get("ylim"), xlim=of.get("xlim"))
        # What the panel before, or the one below, says as well stands there only.
        if place % columns and panels[place - 1].get("y") == of.get("y"):
            axes.set_ylabel("")
        if any(
            below.get("x") == of.get("x") for below in panels[place + columns :][:1]
        ):
            axes.set_xlabel("")
        if names := of.get("names"):
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
        _ticks(axes, of)
    lines = 0
    if legend:
        wide = max(map(len, labels))
        ncols = next(n for n in (4, 3, 2, 1) if n == 1 or n * (wide + 5) <= 66)
        ncols, lines = min(ncols, len(labels)), -(-len(labels) // ncols)
        given = [handles[x] for x in labels], labels
        figure.legend(*given, loc="outside lower center", ncols=ncols)
    figure.set_size_inches(WIDTH, 0.15 + tall * rows + 0.17 * lines)
    for of, axes in zip(panels, places.flat, strict=False):
        if of.get("at_points"):
            ends = [
                (line["x"][-1], line["y"][0][-1], line["label"], _colour(line, colours))
                for line in of["lines"]
                if line["label"] in colours
            ]
            label(axes, ends)
    return figure


def _ticks(axes: Any, of: Mapping[str, Any]) -> None:
    """Whole numbers where all are, and on a short logarithmic axis plain ones."""
    for name in "xy":
        axis = getattr(axes, f"{name}axis")
        low, high = sorted(axis.get_view_interval())
        if name not in of.get("log", ""):
            numbers = np.concatenate([np.ravel(line[name]) for line in of["lines"]])
            if not of.get("names") and (numbers % 1 == 0).all():
                axis.get_major_locator().set_params(integer=True)
            continue
        axis.set_minor_formatter(NullFormatter())
        if (decades := np.log10(high / low)) < 2:
            steps = (1, 2, 5) if decades > 0.8 else (1, 1.5, 2, 3, 4, 6, 8)
            axis.set_major_locator(LogLocator(subs=steps))
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _colour(line: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Its own, or that of its label; grey without a label."""
    return line.get("colour") or colours.get(line["label"], GREY)


def _draw(axes: Any, line: Mapping[str, Any], colour: str, handles: dict) -> None:
    """One line, with its range."""
    x, (y, *ends) = line["x"], line["y"]
    hidden = line["label"][:1] in ("", "_")
    look: Any = {"color": colour, "alpha": 0.6 if hidden else 1.0}
    look["zorder"] = 1.9 if hidden else 2.2
    if len(np.unique(x)) == 1 and ends:
        axes.vlines(x, *ends, lw=0.9, **look)
    elif ends:
        axes.fill_between(x, *ends, alpha=0.2, lw=0, color=colour)
    [handle] = axes.plot(x, y, line.get("look", "o-"), **look)
    handles.setdefault(line["label"], handle)


def label(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name beside its point (x, y, name, colour), over nothing else.

    Where it cannot stand next to the point, a line leads there.
    """
    figure = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # What stands inside of axes moves nothing.
    to_pixels, inside = axes.transData.transform, axes.get_window_extent()
    dots = [np.zeros((0, 2))]
    bars = [of for of in axes.collections if isinstance(of, LineCollection)]
    paths = [np.asarray(part) for of in bars for part in of.get_segments()]
    for line in axes.get_lines():
        path = np.column_stack(line.get_data()).astype(float)
        paths += [path] if line.get_linestyle() != "None" else []
        dots.append(to_pixels(path))
    for path in paths:
        for start, end in itertools.pairwise(to_pixels(path)):
            if np.isfinite([start, end]).all():
                steps = max(2, int(np.hypot(*(end - start)) // 4))
                dots.append(start + (end - start) * np.linspace(0, 1, steps)[:, None])
    taken, dots = [], np.concatenate(dots)
    own = to_pixels([(x, y) for x, y, *_ in points])
    crowd = [np.sum(np.hypot(*(dots - at).T) < 40) for at in own]
    renderer = FigureCanvasAgg(figure).get_renderer()
    angles = [0, 180, 90, 270, 45, 135, 225, 315, 22, 158, 202, 338, 67, 113, 247, 293]
    for place in np.argsort(crowd)[::-1]:
        (x, y, name, colour), at = points[place], own[place]
        text = axes.annotate(
            name, (x, y), xytext=(0, 0), textcoords="offset points", color=colour,
            va="center", ha="center", zorder=3,
        )  # fmt: skip
        size = text.get_window_extent(renderer)
        half, best = np.array([size.width, size.height]) / 2, None
        for gap in (9, 12, 15, 20, 26, 33, 41, 50, 60, 71, 83):
            if best and best[0] <= gap:
                break  # Nothing farther costs less.
            for angle in angles:
                way = np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
                toward = np.where(abs(way) < 0.3, 0, np.sign(way))
                middle = at + gap * way + toward * half
                box = Bbox([middle - half - 1, middle + half + 1])
                near = (dots > middle - half - 3).all(1)
                near &= (dots < middle + half + 3).all(1)
                start = middle - toward * half
                leader = at + (start - at) * np.linspace(0.15, 1, 12)[:, None]
                crossed = sum(
                    ((leader > t.min) & (leader < t.max)).all(1).any() for t in taken
                )
                out = not (
                    inside.x0 <= box.x0
                    and box.x1 <= inside.x1 + 4
                    and inside.y0 <= box.y0
                    and box.y1 <= inside.y1
                )
                over = sum(t.overlaps(box) for t in taken)
                cost = gap + 15 * near.sum() + 200 * over + 60 * crossed + 500 * out
                if best is None or cost < best[0]:
                    best = cost, gap, middle, start, box
        assert best is not None
        _, gap, middle, start, box = best
        taken.append(box)
        points_of = 72 / figure.dpi
        text.set_position(tuple((middle - at) * points_of))
        if gap > 12:
            axes.annotate(
                "", (x, y), xytext=tuple((start - at) * points_of),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7,
                            "alpha": 0.7, "shrinkA": 0, "shrinkB": 2},
            )  # fmt: skip


def labels_of(figure: Figure) -> list[str]:
    """What a reader has to read to tell things apart: legends, names, named ticks."""
    texts = [*figure.texts]
    boxes = [*figure.legends]
    for axes in figure.axes:
        texts += axes.texts
        if box := axes.get_legend():
            boxes.append(box)
        texts += [t for t in axes.get_yticklabels() if t.get_text()[:1].isalpha()]
        texts += [t for t in axes.get_xticklabels() if t.get_text()[:1].isalpha()]
    texts += [text for box in boxes for text in box.get_texts()]
    return [text.get_text() for text in texts if text.get_text()]


def save(figure: Figure, path: Path) -> None:
    """Write the picture, transparent; more than twelve labels are refused."""
    labels = labels_of(figure)
    if len(labels) > MOST:
        raise ValueError(
            f"A picture has at most {MOST} labels, {path.name} has {len(labels)}: "
            f"{', '.join(labels)}. Leave lines without a label (one that begins with "
            "'_'), and say in the caption where the rest stands."
        )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    # A palette of 256 colours, transparent ones among them: a third of the bytes.
    image = Image.open(drawn).quantize(256, method=Image.Quantize.FASTOCTREE)
    image.save(path, optimize=True)
