"""Reproduction: DiLoCo in parts, and exchanged behind the next step.

python benchmarks/reproduce_streaming.py           # 3 minutes alone on two cores
python benchmarks/reproduce_streaming.py --quick   # seconds, shows that it runs
"""

import functools
from typing import Any, NamedTuple

import characters
import numpy as np
from pictures import Line, Panel
from report import each, of_seeds, processes

PARTS = 5
KINDS = "parts", "overlap", "both", "often", "a part in every step"
# "often" is the shorter period, and the number of parts of which one meets every step.
FULL: Any = {"steps": 2500, "evaluations": 50, "often": 10, "rare": 50, "seeds": 4}
SHORT: Any = {"steps": 20, "evaluations": 2, "often": 5, "rare": 10, "seeds": 1}
FULL["kinds"], SHORT["kinds"] = KINDS, ("both", "a part in every step")


class Variant(NamedTuple):
    """Keywords of `oxs.diloco`, what it is compared with, and its kind."""

    period: int
    keywords: dict[str, Any]
    other: str
    kind: str = ""


def variants(often, rare, kinds):
    """By name those of some kinds, with what they are compared with."""
    parts, overlap = {"fragments": PARTS}, {"overlap": True}
    every_step = {"fragments": often}
    whole, soon = f"at once, H={rare}", f"at once, H={often}"
    every = {
        whole: Variant(rare, {}, whole),
        f"in {PARTS} parts, H={rare}": Variant(rare, parts, whole, "parts"),
        f"overlap, H={rare}": Variant(rare, overlap, whole, "overlap"),
        f"in {PARTS} parts, overlap, H={rare}": Variant(
            rare, parts | overlap, whole, "both"
        ),
        soon: Variant(often, {}, soon),
        f"overlap, H={often}": Variant(often, overlap, soon, "often"),
        f"in {often} parts, overlap, H={often}": Variant(
            often, every_step | overlap, soon, "a part in every step"
        ),
    }
    others = {of.other for of in every.values() if of.kind in kinds}
    return {n: of for n, of in every.items() if of.kind in kinds or n in others}


def study_of(name, steps, evaluations, seeds, **which):
    """All seeds of one variant: rounds, the curve, and test losses."""
    period, keywords, *_ = variants(**which)[name]
    method = characters.meeting(period, **keywords)
    train = characters.make_training(method, steps, evaluations)
    return characters.all_seeds(train, seeds)


def sent_by(period, keywords, *_):
    """(bytes of a worker per step in the mean, bytes at a time)."""
    collectives = characters.sent_by(characters.meeting(period, **keywords))
    _, in_rounds = characters.bytes_when(collectives)
    # Each part has a conditional of its own, which is taken once in a period.
    return in_rounds / period, round(max(row.sent for row in collectives))


def panels_of(loss, sent):
    """The loss at the end against the bytes that a worker sends at a time."""
    lines = [
        Line(
            name,
            [sent[name][1]],
            np.reshape(of, (-1, 1)),
            "D" if "overlap" in name else "o",
        )
        for name, of in loss.items()
    ]
    most = "bytes that a worker sends at a time"
    return [Panel(most, "test loss, nats a character", lines, log="x", at_points=True)]


def study(page, settings):
    """Train all variants, a core a program, and read what they send."""
    every = variants(*(settings[key] for key in ("often", "rare", "kinds")))
    of_name = functools.partial(study_of, **settings)
    studies = each("Training", of_name, every, processes(page.quick))
    loss = {name: of["test"] for name, of in studies.items()}
    sent = {name: sent_by(*variant) for name, variant in every.items()}
    rows = []
    for name, (_, _, other, key) in every.items():
        mean, most = sent[name]
        text = characters.percent(loss[name], loss[other])[1]
        found, rounds = of_seeds(loss[name], ".3f"), studies[name]["rounds"]
        beside = text if key else ""
        rows.append((name, found, beside, rounds, round(mean), most))
    page.table("losses", rows)
    page.picture(panels_of(loss, sent))
    page.data(losses=loss, sent=sent, settings=settings)


if __name__ == "__main__":
    characters.reproduce("reproduce_streaming", __doc__, study, FULL, SHORT)
