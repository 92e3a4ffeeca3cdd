"""Reproduction: DiLoCo and local SGD against synchronous data parallel training.

python benchmarks/reproduce_diloco.py           # 7 minutes alone on two cores
python benchmarks/reproduce_diloco.py --quick   # seconds, shows that it runs
"""

import functools
from typing import Any

import characters
import numpy as np
import optax
from characters import AXIS, COMMON_RATE, Method, percent
from pictures import Line
from report import each, of_seeds, processes

import optx_sync as oxs

SYNC, ONE = "data parallel", "1 worker"
MILDER = "DiLoCo 1.0/0.5"  # with another outer optimizer
FULL = {"steps": 5000, "evaluations": 50, "periods": (10, 50, 100), "seeds": 4}
FULL["sweep"] = True  # whether learning rates are chosen
SHORT = {"steps": 20, "evaluations": 2, "periods": (10,), "seeds": 1, "sweep": False}


def methods(periods):
    """All methods by name, those that take longest first."""
    families = {
        "DiLoCo": {},
        MILDER: {"outer": optax.sgd(1.0, 0.5, nesterov=True)},
        "averaging": {"wrap": oxs.local_sgd},
    }
    found = {
        f"{name}, H={period}": characters.meeting(period, **more)
        for name, more in families.items()
        for period in periods
    }
    found[SYNC] = Method(functools.partial(oxs.cross_shard, axis_name=AXIS))
    return found | {ONE: Method(lambda inner: inner, workers=1)}


def try_rates(loss_at, others=True):
    """{rate: loss}: the common rate is doubled, or halved, while the loss falls."""
    losses = {COMMON_RATE: loss_at(COMMON_RATE)}
    for factor in (2.0, 0.5) if others else ():
        rate = COMMON_RATE
        while losses[rate] == min(losses.values()):
            rate *= factor
            losses[rate] = loss_at(rate)
    return losses


def study_of(name, steps, evaluations, periods, seeds, sweep):
    """All runs of one method: a sweep, then each seed at its best and a common rate."""
    train = characters.make_training(methods(periods)[name], steps, evaluations)

    def loss_at(rate):
        return float(train(rate, 0, True)["validation"])

    tried = try_rates(loss_at, sweep)
    best = min(tried, key=lambda rate: tried[rate])
    kinds: dict[str, Any] = {"iid": (best,), "common": (COMMON_RATE,)}
    if name.startswith("DiLoCo,"):
        kinds["non-iid"] = best, False
    runs = {k: characters.all_seeds(train, seeds, *of) for k, of in kinds.items()}
    tests = {kind: of["test"] for kind, of in runs.items()}
    known = {"rate": best, "sweep": tried, "rounds": runs["iid"]["rounds"]}
    return {**known, "curve": runs["iid"]["curve"], **tests}


def panels_of(studies, sent, settings):
    """The final loss against bytes, and the loss of a few against steps."""
    ends = []
    for family, kind, look in (
        (SYNC, "iid", "*"),
        ("DiLoCo,", "iid", "o-"),
        ("DiLoCo,", "non-iid", "D:"),
        (MILDER, "iid", "^-."),
        ("averaging", "iid", "s--"),
    ):
        names = [name for name in studies if name.startswith(family)]
        losses = np.transpose([studies[n][kind] for n in names])
        label = f"{family.strip(',')}{', non-iid' * (kind == 'non-iid')}"
        ends.append(Line(label, [sent[n] for n in names], losses, look))
    low, high = np.min(studies[SYNC]["curve"]) - 0.1, np.mean(studies[ONE]["iid"]) + 0.6
    families = SYNC, "DiLoCo", "averaging", ONE
    longest = f", H={max(settings['periods'])}"
    shown = {name: of for name, of in studies.items()
             if name.removesuffix(longest) in families}  # fmt: skip
    curves = characters.curves_of(settings, shown, (low, high))
    return [characters.against_bytes(ends)], [curves]


def study(page, settings):
    """Train everything, a core a program, and write down what was found."""
    steps, periods = settings["steps"], settings["periods"]
    every, of_name = methods(periods), functools.partial(study_of, **settings)
    studies = each("Training", of_name, every, processes(page.quick))
    sent_by, bytes_when = characters.sent_by, characters.bytes_when
    bytes_of = {name: bytes_when(sent_by(method)) for name, method in every.items()}

    sent, losses, sweeps = {}, [], []
    rates = sorted({rate for found in studies.values() for rate in found["sweep"]})
    for name, found in studies.items():
        tried = found["sweep"]
        sent[name] = int(np.dot(bytes_of[name], (steps, found["rounds"])))
        for kind in ("iid", "non-iid")[: 1 + ("non-iid" in found)]:
            over = "" if name == SYNC else percent(found[kind], studies[SYNC]["iid"])[1]
            label = name if kind == "iid" else f"{name}, {kind}"
            of_kind = of_seeds(found[kind], ".3f")
            losses.append((label, of_kind, over, f"{found['rate']:g}", sent[name]))
        of_rate = (f"{tried[r]:.3f}" if r in tried else "" for r in rates)
        sweeps.append((name, *of_rate, of_seeds(found["common"], ".3f")))
    page.table("losses", losses)
    for period in periods:
        of = {n: studies[f"{n}, H={period}"] for n in ("DiLoCo", MILDER, "averaging")}
        own, (milder, mean) = of["DiLoCo"], (of[n] for n in (MILDER, "averaging"))
        pairs = {
            "averaging": (own["iid"], mean["iid"]),
            "milder": (milder["iid"], mean["iid"]),
        }
        pairs |= {
            "common": (own["common"], mean["common"]),
            "parts": (own["non-iid"], own["iid"]),
        }
        over = {what: percent(*pair)[1] for what, pair in pairs.items()}
        page.text("beside", period=period, rate=COMMON_RATE, **over)
    page.table("rates", sweeps, rates=" | ".join(f"{r:g}" for r in rates))
    page.data(**characters.about(), settings=settings, studies=studies, bytes=bytes_of)
    ends, curves = panels_of(studies, sent, settings)
    page.picture(ends)
    page.picture(curves, "curves", longest=max(periods))


if __name__ == "__main__":
    characters.reproduce("reproduce_diloco", __doc__, study, FULL, SHORT)
