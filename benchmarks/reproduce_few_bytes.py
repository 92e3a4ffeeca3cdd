"""Reproduction: DiLoCo whose contributions travel in few bytes, with error feedback.

python benchmarks/reproduce_few_bytes.py           # 6 minutes alone on two cores
python benchmarks/reproduce_few_bytes.py --quick   # seconds, shows that it runs
"""

import functools

import characters
import numpy as np
import optax
from characters import percent
from pictures import Line
from report import each, of_seeds, processes

import optx_sync as oxs

PERIOD, OFTEN = 50, ", H=5"  # what ends in the latter has that period
OUTER = optax.sgd(1.0, 0.5, nesterov=True)  # the milder one of reproduce_diloco
fed, quantized = oxs.exchange.error_feedback, oxs.exchange.quantized
FEW = oxs.exchange.top_k(82, 4096)  # 2 %
BITS = oxs.exchange.top_k(82, 4096, bits=2)
EXACT = "exact"
EXCHANGES = {
    EXACT: oxs.exchange.all_reduce(),
    "8 bit": fed(quantized(bits=8)),
    "4 bit": fed(quantized(bits=4)),
    "4 bit, no feedback": quantized(bits=4),
    "top 2 %": fed(FEW),
    "top 2 %, no feedback": FEW,
    "top 2 %, 2 bit": fed(BITS),
    "top 2 %, 2 bit, no feedback": BITS,
    EXACT + OFTEN: oxs.exchange.all_reduce(),
    "top 2 %" + OFTEN: fed(FEW),
}
FULL = {"steps": 5000, "evaluations": 50, "seeds": 4, "exchanges": tuple(EXCHANGES)}
SHORT = {"steps": 50, "evaluations": 1, "seeds": 1, "exchanges": (EXACT, "4 bit")}


def method_of(name):
    """DiLoCo with one of the exchanges."""
    period = int(OFTEN[-1]) if name.endswith(OFTEN) else PERIOD
    return characters.meeting(period, outer=OUTER, exchange=EXCHANGES[name])


def study_of(name, steps, evaluations, seeds, exchanges):
    """All seeds of one exchange: rounds, the curve, and test losses."""
    train = characters.make_training(method_of(name), steps, evaluations)
    return characters.all_seeds(train, seeds)


def exact_of(name):
    """The name of the exact exchange with the same period."""
    return EXACT + OFTEN * name.endswith(OFTEN)


def look_of(name):
    """How its line is drawn."""
    if name.endswith(OFTEN):
        return "--"
    return ":" if "no " in name else "-"


def study(page, settings):
    """Train everything, a core a program, and write down what was found."""
    of_name = functools.partial(study_of, **settings)
    studies = each("Training", of_name, settings["exchanges"], processes(page.quick))
    sent, rows, points = {}, [], []
    for name, found in studies.items():
        collectives = characters.sent_by(method_of(name))
        sent[name] = round(sum(row.sent for row in collectives))
        losses, exact = found["test"], studies[exact_of(name)]["test"]
        over = "" if name == exact_of(name) else percent(losses, exact)[1]
        part = f"{sent[name] / sent[EXACT]:.3f}"
        rows.append((name, of_seeds(losses, ".3f"), over, sent[name], part))
        look = {"--": "D", ":": "x", "-": "o"}[look_of(name)]
        bytes_sent = [found["rounds"] * sent[name]]
        points.append(Line(name, bytes_sent, np.reshape(losses, (-1, 1)), look))
    page.table("losses", rows)
    for name in [name for name in studies if f"{name}, no feedback" in studies]:
        losses = (studies[f"{name}{way}"]["test"] for way in (", no feedback", ""))
        page.text("feedback", name=name, worse=percent(*losses)[1])
    page.data(settings=settings, studies=studies, bytes=sent)
    page.picture([characters.against_bytes(points)])


if __name__ == "__main__":
    characters.reproduce("reproduce_few_bytes", __doc__, study, FULL, SHORT)
