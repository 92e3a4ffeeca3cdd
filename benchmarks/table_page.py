"""The pages of `table.py`: its table and pictures, and "which one, with numbers"."""

import argparse
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import methods
import numpy as np
from methods import AXIS, INNER, METHODS, PERIOD, SWEEP, WORKERS, initial, rate_of
from pictures import Line, Panel
from report import Report, of_seeds

import optx_sync as oxs

BASE, WELL, SECOND = "data parallel", "all well", "second task"
# Losses over one device at as many tokens, per cent: two workers, 51M parameters.
FT_DILOCO = {25: 2.8, 50: 4.7, 100: 6.3, 200: 7.4, 500: 9.4}
TROUBLES = ("one slow", "one lost"), ("one poisoned", "one exploding")
CURVES = (BASE, "EASGD", "local SGD", "DiLoCo", "DiLoCo, a part a step", "SparseLoCo")
# In the picture, which has room for twelve names; the table has all.
NAMED = (
    BASE,
    "data parallel, Muon",
    "backup workers",
    "PowerSGD",
    "local SGD",
    "DiLoCo",
)
NAMED += "DiLoCo, 4 bits", "DiLoCo, 1 bit, rotated", "MuLoCo", "Decoupled DiLoCo"
NAMED += ("gossip, exponential",)
LINKS = {0.1: 0.02, 1: 0.02, 10: 1e-4, 100: 1e-4}  # Gbit/s: seconds of a message
# Parameters, and the seconds of a step: 2^18, 2^19 and 2^20 tokens a worker, which is
# 1, 8 and 32 GPUs that make 4e14 useful operations a second each.
SIZES = {
    "0.1B": (0.1e9, 6 * 0.1e9 * 2**18 / 4e14),
    "1B": (1e9, 6 * 1e9 * 2**19 / (8 * 4e14)),
    "7B": (7e9, 6 * 7e9 * 2**20 / (32 * 4e14)),
}
GOAL = 0.8
Losses = Mapping[tuple[str, str], np.ndarray]


class Traffic(NamedTuple):
    """What a worker sends in a step, in the mean."""

    bytes: float  # for each parameter of four bytes, on a ring
    messages: float  # one after another
    hidden: float  # behind the computation of this share of the steps

    def share(self, gbits: float, latency: float, parameters: float, step: float):
        """The share of time in which a worker computes, as `audit.time` counts."""
        size, link = round(self.bytes * parameters), ((0, 1),)
        row = oxs.audit.Collective("send", size, 1, link, False, self.hidden > 0)
        return oxs.audit.time(
            [row],
            gbits=gbits,
            step_seconds=step,
            latency=latency * self.messages,
            overlap=self.hidden,
        ).utilisation


def traffic(name: str, steps: int) -> Traffic:
    """Read from the compiled program of the method's optimizer."""
    method = METHODS[name]
    if method.arrives in ("center", "quorum"):  # a contribution up, the center down
        parts = methods.PARTS if method.arrives == "quorum" else 1
        return Traffic(8 / PERIOD, 2 * parts / PERIOD, method.hidden)
    sizes, names = tuple(method.axes.values()), tuple(method.axes)
    workers = oxs.Workers(sizes, names, mesh=True)
    inner, rounds = INNER[method.inner](rate_of(steps)), 1.0
    if method.period is None:
        tx = method.wrap(inner)
    else:
        due = jax.jit(method.period(steps))
        rounds = sum(oxs.by_hand.due(due, step) for step in range(steps)) / steps
        tx = oxs.local_sgd(inner, AXIS, communication_period=1)
    # The same model, wider: small matrices fill blocks and chunks up with zeros.
    large = jax.eval_shape(lambda: initial(0, 16 * methods.WIDTH))
    with warnings.catch_warnings():
        # Of threads, which are for programs that run.
        warnings.filterwarnings("ignore", r"\d+ CPU devices share", UserWarning)
        found = oxs.audit.strategy(tx, large, workers)
    near = WORKERS // sizes[0]  # chips of a pod
    ways: Any = {"gbits": 8e-9}, {"gbits": 1e30, "latency": 1.0}
    sent, messages = (
        oxs.audit.time(found, step_seconds=1.0, near=near, **way).sent / found.period
        for way in ways
    )
    parameters = sum(x.size for x in jax.tree.leaves(large))
    rounds *= method.share
    return Traffic(rounds * sent / parameters, rounds * messages, method.hidden)


def pages(
    options: argparse.Namespace, rows: list[dict[str, str]], steps: int, hours: float
) -> None:
    """Write both."""
    losses: dict[tuple[str, str], Any] = {}
    for row in rows:
        key = row["method"], row["condition"]
        losses.setdefault(key, []).append(float(row["test loss"]))
    losses = {key: np.array(found) for key, found in losses.items()}
    sent = {name: traffic(name, steps) for name in METHODS if (name, WELL) in losses}
    parameters = sum(x.size for x in jax.tree.leaves(initial(0)))
    facts = methods.texts()["facts"]
    page = Report("table", options, parameters=parameters, steps=steps, **facts)
    _table(page, losses, sent)
    _picture(page, losses, sent)
    _periods(page, losses)
    for number, conditions in enumerate(TROUBLES):
        _troubles(page, ("troubles", "lies")[number], losses, conditions)
    _second(page, rows, losses)
    counts = {"period": PERIOD, "parts": methods.PARTS}
    counts |= {"later": methods.LATER, "workers": WORKERS}
    words = page.words["settings"]
    settings = [
        (name, *(text.format(**counts) for text in words[name]))
        for name in sent
        if METHODS[name].kind != "period"
    ]
    page.table("sources", settings)
    _curves(page, rows, sent, steps)
    page.text("hours", hours=hours)
    page.data(hours=hours, traffic={name: of._asdict() for name, of in sent.items()})
    page.save()
    page = Report("which_numbers", options, small=f"{parameters:,}")
    _which(page, losses, sent)
    page.save()


def over(losses: Losses, name: str, condition: str = WELL) -> np.ndarray:
    """Per cent by which the loss is larger than data parallel's, seed by seed."""
    return 100 * (losses[name, condition] / losses[BASE, WELL] - 1)


def _table(page: Report, losses: Losses, sent: Mapping[str, Traffic]) -> None:
    """The table that the page sorts and filters."""
    rows = []
    for name, of in sent.items():
        method, loss = METHODS[name], losses[name, WELL]
        more = of_seeds(over(losses, name), "+.1f", " %") if name != BASE else "-"
        hidden = f"{of.hidden:g}" if of.hidden else ""
        numbers = f"{of.bytes:.3g}", f"{of.messages:.3g}", hidden
        rows.append((name, method.kind, of_seeds(loss, ".3f"), more, *numbers))
    page.table("methods", rows)


def _periods(page: Report, losses: Losses) -> None:
    """Of DiLoCo with every period that was tried."""
    names = {
        p: "DiLoCo" if p == PERIOD else f"DiLoCo, H = {p}" for p in {*SWEEP, PERIOD}
    }
    rows = []
    for period, name in sorted(names.items()):
        if (name, WELL) in losses:
            loss, more = losses[name, WELL], over(losses, name)
            published = f"+{FT_DILOCO[period]}" if period in FT_DILOCO else ""
            cells = of_seeds(loss, ".3f"), of_seeds(more, "+.1f")
            rows.append((str(period), *cells, published))
    page.table("periods", rows)


def _troubles(page: Report, key: str, losses: Losses, conditions: tuple) -> None:
    rows = []
    names = [name for name in METHODS if (name, conditions[0]) in losses]
    for name in names:
        found = [losses[name, condition] for condition in (WELL, *conditions)]
        rows.append((name, *(of_seeds(loss, ".4g") for loss in found)))
    page.table(key, rows)


def _second(page: Report, rows: list[dict[str, str]], losses: Losses) -> None:
    after: dict[str, list[float]] = {}
    for row in rows:
        if row[SECOND]:
            after.setdefault(row["method"], []).append(float(row[SECOND]))
    base = np.array(after[BASE])
    found = []
    for name, loss in after.items():
        more = of_seeds(100 * (np.array(loss) / base - 1), "+.2f", " %")
        first = of_seeds(over(losses, name), "+.2f", " %")
        same = name == BASE
        found.append(
            (name, *("-" if same else x for x in (first, more)), of_seeds(loss, ".3f"))
        )
    page.table("second", found)


def _curves(page: Report, rows: list[dict], sent: Mapping, steps: int) -> None:
    """The loss on the way, against tokens and against bytes."""
    curves: dict[str, list] = {}
    for row in rows:
        if row["condition"] == WELL and row["method"] in CURVES:
            found = [float(loss) for loss in row["validation losses"].split()]
            curves.setdefault(row["method"], []).append(found)
    panels = []
    for label, log in (("tokens of all workers", ""), ("bytes a parameter sent", "x")):
        lines = []
        for name, found in curves.items():
            made = steps * (1 + np.arange(len(found[0]))) / len(found[0])
            each = (
                sent[name].bytes if log else WORKERS * methods.BATCH * methods.CONTEXT
            )
            lines.append(Line(name, each * made, found, "-"))
        panels.append(Panel(label, "validation loss", lines, log=log, ylim=(2.2, 3.2)))
    page.picture(panels, "curves")


def _picture(page: Report, losses: Losses, sent: Mapping[str, Traffic]) -> None:
    """Each method a point, a few with their names: what it loses, and what it sends."""
    lines = []
    for name, of in sent.items():
        found = np.reshape(over(losses, name), (-1, 1))
        if name in NAMED:
            lines.append(Line(name, [of.bytes], found, "o"))
        else:
            lines.append(Line(f"_{name}", [of.bytes], found.mean(0), "o"))
    axes = (
        "bytes a worker sends in a step, a parameter",
        "test loss over data parallel, %",
    )
    page.picture([Panel(*axes, lines, log="x", at_points=True)])


def _which(page: Report, losses: Losses, sent: Mapping[str, Traffic]) -> None:
    """The best method for each link and size, and how much of the time all compute."""
    mean = {name: float(np.mean(over(losses, name))) for name in sent}
    best = []
    for gbits, latency in LINKS.items():
        cells = []
        for parameters, seconds in SIZES.values():
            able = {
                name: mean[name] if name != BASE else 0.0
                for name, of in sent.items()
                if of.share(gbits, latency, parameters, seconds) >= GOAL
                and not METHODS[name].arrives
                and METHODS[name].kind != "robust"
                and np.isfinite(mean[name])
            }
            name = min(able, key=able.__getitem__) if able else None
            cells.append(f"{name} ({able[name]:+.1f} %)" if name else "none does")
        best.append((f"{gbits:g} Gbit/s, {1e3 * latency:g} ms", *cells))
    page.table("best", best, goal=GOAL)
    for size, (parameters, seconds) in SIZES.items():
        rows = []
        for name, of in sent.items():
            shares = (
                of.share(gbits, latency, parameters, seconds)
                for gbits, latency in LINKS.items()
            )
            more = "-" if name == BASE else f"{mean[name]:+.1f} %"
            rows.append((name, more, *(f"{share:.1%}" for share in shares)))
        page.table("shares", rows, size=size, seconds=seconds)
