"""Reproduction: a period that grows as the learning rate falls (QSR), on digits.

python benchmarks/reproduce_qsr.py            # a minute or two on two cores
python benchmarks/reproduce_qsr.py --quick
"""

import jax
import optax
from digits import PARTS, curves, panels_of, train_all
from report import of_seeds, percent, reproduce
from training import AXIS

import optx_sync as oxs

RATE, BASE = 1.0, 4
ALPHA = RATE * BASE**0.5  # H is the base at the largest rate, and grows from there
FULL = {"steps": 640, "seeds": 16}
SHORT = {"steps": 32, "seeds": 2}


def methods(steps):
    """Optimizers, and how many rounds: QSR, its base, and as many rounds as QSR."""
    rate = optax.cosine_decay_schedule(RATE, steps)
    grows = jax.jit(oxs.outer.qsr(rate, ALPHA, BASE, total_steps=steps))
    rounds = sum(oxs.by_hand.due(grows, step) for step in range(steps))

    def meeting(period):
        return oxs.local_sgd(optax.sgd(rate), AXIS, communication_period=period)

    # Shorter where the steps cannot be divided: more rounds than QSR, never fewer.
    same = steps // rounds
    return {
        f"H = {BASE}": (meeting(BASE), steps // BASE),
        "QSR": (meeting(grows), rounds),
        f"H = {same}": (meeting(same), steps // same),
    }


def study(page, settings):
    page.text("settings", rate=RATE, alpha=ALPHA, **settings)
    steps = settings["steps"]
    tried = methods(steps)
    often, grows, same = tried
    found = train_all(tried, lambda n: curves(tried[n][0], steps), **settings)
    accuracy = {cell: of[..., 0] for cell, of in found.items()}

    def over(name, other, by_label):
        apart = accuracy[name, by_label] - accuracy[other, by_label]
        return 100 * apart[:, -1]

    rows = []
    for (name, by_label), curve in accuracy.items():
        ahead = "" if name == often else of_seeds(over(name, often, by_label), "+.2f")
        cells = tried[name][1], percent(curve[:, -1]), ahead
        rows.append([f"{name}, {PARTS[by_label]}", *cells])
    page.table("accuracy", rows, base=BASE)
    for other, by_label in ((often, False), (same, False), (same, True)):
        points = over(grows, other, by_label)
        error = points.std(ddof=1) / len(points) ** 0.5
        beside = {"other": other, "mean": points.mean(), "error": error}
        page.text("beside", parts=PARTS[by_label], **beside)
    page.picture(panels_of(found, steps, 0, "accuracy of the mean", tried))
    page.data(accuracy=accuracy)


if __name__ == "__main__":
    reproduce("reproduce_qsr", __doc__, study, FULL, SHORT)
