"""The page of `links.py`: measured seconds beside `audit.time`, before and after."""

import csv
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from by_hand import AXIS, mesh_of
from links import ALONE, COUNTS, begin, methods
from pictures import Line, Panel
from report import Report

import optx_sync as oxs
from optx_sync.audit import Collective, Strategy
from optx_sync.audit.programs import shares

READ_AT = 100, 10_000  # Mbit/s of the bare sums among two that terms are read off
PUBLISHED = Path(__file__).with_name("links_published.csv")
# Of that run: float32 of its parameters, in so many arrays, each a sum of its own.
NUMBERS, ARRAYS, NODES = 30_846_720, 57, ((0, 1, 2, 3),)
# Its own curve without a limit: Gbit/s along the ring with 1 MiB, and with 64 MiB.
CURVE = 2**20, 8.509, 14.88
Point = Mapping[str, Any]


class Terms(NamedTuple):
    """What is read off sums of bare arrays, and off steps that send nothing."""

    latency: float  # seconds of a message
    carried: float  # the share of a link's bits that are those of arrays
    step: Mapping[int, float]  # seconds of a step of so many processes
    round: Mapping[str, float]  # seconds that a round computes, of two processes


class Compared(NamedTuple):
    """Seconds of a step, by the clock and by `audit.time`, before and after."""

    processes: int
    mbits: int
    name: str
    found: float
    before: float
    after: float

    @property
    def off(self) -> tuple[float, float]:
        """How far off `audit.time` is."""
        return self.before / self.found - 1, self.after / self.found - 1


def by_link(kept: Sequence[Compared]) -> dict[tuple[int, int], list[Compared]]:
    """Those of each number of processes and rate."""
    links: dict[tuple[int, int], list[Compared]] = {}
    for one in sorted(kept, key=lambda one: one[:2]):
        links.setdefault(one[:2], []).append(one)
    return links


def strategies(count: int) -> dict[str, Strategy]:
    """What each method sends, as `audit` finds it in its compiled program."""
    workers = oxs.Workers(count, AXIS, mesh=mesh_of(count))
    return {  # on CPUs nothing travels while a step computes
        name: oxs.audit.strategy(method.tx, begin, workers)._replace(overlap=0.0)
        for name, method in methods().items()
        if method.tx is not methods()["no exchange"].tx
    }


def read_off(points: Sequence[Point]) -> Terms:
    """The terms: no step that sends anything has a part in them."""
    each = {(x["processes"], x["mbits"], x["name"]): x["seconds"] for x in points}
    latency = float(np.mean([each[2, rate, "one number"] for rate in READ_AT])) / 2
    # Of the slower one. The faster takes no longer: copies need no term of their own.
    slow = READ_AT[0]
    carried = 8e-6 * 4e6 / (each[2, slow, "4 MB"] - 2 * latency) / slow
    quiet = [(x[0], seconds) for x, seconds in each.items() if x[2] == "no exchange"]
    steps = {
        count: float(np.median([seconds for n, seconds in quiet if n == count]))
        for count, _ in quiet
    }
    alone = {
        x["name"].removesuffix(ALONE): x["steps"] * (x["seconds"] - x["quiet"])
        for x in points
        if x["name"].endswith(ALONE)
    }
    rounds = {
        name: alone.get(name, alone["diloco, H = 10"] if name != "cross_shard" else 0.0)
        for name in methods()
    }
    return Terms(latency, carried, steps, rounds)


def said(one: Strategy, mbits: float, name: str, count: int, terms: Terms) -> Any:
    """Seconds of a step by `audit.time`: of the link alone, and with the terms."""
    step = terms.step[count]
    # As it was: a period was that between two parts.
    direct = getattr(methods()[name].tx.update, "direct", None)
    between: Any = (direct and direct.communication_period) or 1
    alone = oxs.audit.time(one, gbits=mbits / 1e3, step_seconds=step, period=between)
    # What a step takes longer where processes share cores, a round does.
    shared = step / terms.step[2]
    whole = oxs.audit.time(
        one._replace(round_seconds=max(0.0, shared * terms.round[name])),
        gbits=terms.carried * mbits / 1e3,
        latency=terms.latency,
        step_seconds=step,
    )
    return step / alone.utilisation, step / whole.utilisation


def compare(page: Report, points: Sequence[Point]) -> None:
    """Each point that no term was read off, before and after."""
    terms, kept = read_off(points), []
    for count in COUNTS:
        programs = strategies(count) if count in terms.step else {}
        for point in points:
            name, mbits = point["name"], point["mbits"]
            if point["processes"] == count and name in programs:
                times = said(programs[name], mbits, name, count, terms)
                kept.append(Compared(count, mbits, name, point["seconds"], *times))
    errors(page, kept)
    rows: dict[int, list[Any]] = {}
    for one in kept:
        found, before, after = (f"{1e3 * x:.1f}" for x in one[3:])
        was, now = (f"{off:+.0%}" for off in one.off)
        cells = [one.name, f"{one.mbits:,}", found, before, was, after, now]
        rows.setdefault(one.processes, []).append(cells)
    for count, those in rows.items():
        page.table("points", those, count=count)
    on_the_wire(page, points)
    page.data(terms=terms._asdict())  # the points lie beside, in links.jsonl
    page.text(
        "terms",
        latency=1e3 * terms.latency,
        carried=terms.carried,
        steps=", ".join(f"{1e3 * x:.1f} ms of {n}" for n, x in terms.step.items()),
        rounds=", ".join(
            f"{1e3 * terms.round[name]:.1f} ms of `{name}`"
            for name in terms.round
            if "= 10" in name
        ),
    )
    ranked(page, kept)
    scatter(page, kept)


def errors(page: Report, kept: Sequence[Compared]) -> None:
    """How far off, by processes and rate."""
    rows = []
    for (count, mbits), those in by_link(kept).items():
        off = np.array([one.off for one in those])
        middle, worst = np.median(abs(off), 0), off[abs(off).argmax(0), [0, 1]]
        shown = []
        for usual, most in zip(middle, worst, strict=True):
            shown += [f"{usual:.1%}", f"{most:+.0%}"]
        within = f"{(abs(off[:, 1]) <= 0.15).sum()} of {len(off)}"
        rows.append([f"{count}, {mbits:,}", *shown, within])
    page.table("errors", rows)
    off = abs(np.array([one.off for one in kept]))
    was, now = (off <= 0.15).sum(0)
    before, after = np.median(off, 0)
    counts = {"points": len(off), "was": was, "now": now}
    page.text("held", before=before, after=after, **counts)


def ranked(page: Report, kept: Sequence[Compared]) -> None:
    """Pairs of methods whose order the measurement reverses by more than 10 %."""
    turned, pairs = {"before": [], "after": []}, 0
    for (count, mbits), those in by_link(kept).items():
        for one, other in itertools.permutations(those, 2):
            pairs += one.name < other.name
            by = one.found / other.found - 1
            for when, found in turned.items():
                if getattr(one, when) < getattr(other, when) and by > 0.1:
                    names = f"`{one.name}` before `{other.name}`"
                    found.append(f"{names} ({count} at {mbits:,} Mbit/s, {by:.0%})")
    counts = {"was": len(turned["before"]), "now": len(turned["after"])}
    shown = {when: "; ".join(found) or "none" for when, found in turned.items()}
    page.text("ranked", pairs=pairs, **shown, **counts)


def on_the_wire(page: Report, points: Sequence[Point]) -> None:
    """What leaves a process in a period, beside what the program sends."""
    rows = []
    for count in COUNTS:
        there = [x for x in points if x["processes"] == count]
        programs = strategies(count) if there else {}
        for name, one in programs.items():
            found = {x["mbits"]: x["bytes"] for x in there if x["name"] == name}
            if not found:
                continue
            # At a byte a second, seconds are bytes.
            cost = oxs.audit.time(one, gbits=8e-9, step_seconds=1.0)
            counted = zip(shares(one.rows), one.rows, strict=True)
            each = sum(share * row.bytes for share, row in counted)
            program = round(one.meetings * each)
            slow, fast = found[min(found)], found[max(found)]
            cells = [program, round(cost.sent), round(slow), round(fast)]
            ratios = [f"{x / cost.sent:.3f}" for x in (slow, fast)]
            rows.append([f"{count}, `{name}`", *cells, *ratios])
    page.table("bytes", rows)


def scatter(page: Report, kept: Sequence[Compared]) -> None:
    """Measured against `audit.time`, before and after."""
    panels = []
    for when, title in (("before", "of the link alone"), ("after", "with the terms")):
        lines = []
        for count, look in zip(COUNTS, "os", strict=True):
            if those := [one for one in kept if one.processes == count]:
                found = [1e3 * one.found for one in those]
                times = [1e3 * getattr(one, when) for one in those]
                lines.append(Line(f"{count} processes", found, times, look))
        ends = [1e3 * end(one.found for one in kept) for end in (min, max)]
        lines.append(Line("_equal", ends, ends, "-"))
        panels.append(
            Panel("measured, ms a step", "audit.time, ms", lines, title, "xy")
        )
    page.picture(panels, columns=2)


def published(page: Report) -> None:
    """The measured grid of others: no term is fitted to it."""
    size, small, large = CURVE
    # A sum among four is 6 messages of a fourth; what 1 MiB takes longer is theirs.
    latency = 8e-9 * 1.5 * size * (1 / small - 1 / large) / 6
    page.text("published", latency=1e3 * latency, arrays=ARRAYS)
    each = Collective("all-reduce", 4 * NUMBERS // ARRAYS, 1, NODES, True)
    rows, off = [], {}
    for of in csv.DictReader(PUBLISHED.open()):
        # Its window is not of whole periods: the steps and rounds that are in it.
        one = Strategy([each] * ARRAYS * int(of["rounds"]), period=int(of["steps"]))
        asked: dict[str, Any] = {"gbits": float(of["mbits"]) / 1e3}
        asked["step_seconds"] = float(of["step_ms"]) / 1e3
        before = oxs.audit.time(one, **asked).utilisation
        after = oxs.audit.time(one, **asked, latency=latency).utilisation
        found, theirs = float(of["measured"]), float(of["analytic"])
        ratios = np.array([theirs, before, after]) / found
        off.setdefault(of["method"], []).append(ratios)
        shares = [f"{x:.2%}" for x in (found, theirs, before, after)]
        name = f"{of['method']}, H = {of['H']}"
        times = [f"{x:.2f}" for x in ratios]
        rows.append([f"{name}, {float(of['mbits']):,.0f}", *shares, *times])
    page.table("published", rows)
    ranges = [
        [name, len(of), *(f"{x.min():.2f} to {x.max():.2f}" for x in np.transpose(of))]
        for name, of in off.items()
    ]
    page.table("ranges", ranges)


def write(page: Report, points: Sequence[Point]) -> None:
    """All of it."""
    times, loads = ([x[key] for x in points] for key in ("taken", "load"))
    minutes = (max(times) - min(times)) / 60
    page.text("taken", points=len(points), minutes=minutes, load=max(loads))
    compare(page, points)
    published(page)
    page.save()
