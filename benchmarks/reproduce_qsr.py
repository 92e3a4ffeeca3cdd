"""Reproduction: a period that grows as the learning rate falls (QSR), on digits.

python benchmarks/reproduce_qsr.py            # a minute or two on two cores
python benchmarks/reproduce_qsr.py --quick
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Line, Panel, each, of_seeds, reproduce
from reproduce_peers import AXIS, Method, initial, percent, split, train

import optx_sync as oxs

RATE, BASE = 1.0, 4
ALPHA = RATE * BASE**0.5  # H is the base at the largest rate, and grows from there
FULL = {"steps": 640, "seeds": 16}
SHORT = {"steps": 32, "seeds": 2}


def methods(steps: int) -> dict[str, tuple[Method, int]]:
    """How workers meet, and how often: QSR, its base, and as many rounds as QSR."""
    rate = optax.cosine_decay_schedule(RATE, steps)
    grows = jax.jit(oxs.qsr(rate, ALPHA, BASE, total_steps=steps))
    rounds = sum(oxs.due(grows, step) for step in range(steps))

    def meeting(period):
        tx = oxs.local_sgd(optax.sgd(rate), AXIS, communication_period=period)
        return Method(lambda: tx, period)

    # Shorter where the steps cannot be divided: more rounds than QSR, never fewer.
    same = steps // rounds
    return {
        f"H = {BASE}": (meeting(BASE), steps // BASE),
        "QSR": (meeting(grows), rounds),
        f"H = {same}": (meeting(same), steps // same),
    }


def study(page, settings):
    steps, seeds = settings["steps"], range(settings["seeds"])
    page.text("settings", rate=RATE, alpha=ALPHA, **settings)
    starts = jax.tree.map(lambda *x: jnp.stack(x), *map(initial, seeds))
    tried = methods(steps)
    often, grows, same = tried

    def one(cell):
        name, by_label = cell
        drawn = [split(seed, by_label, steps) for seed in seeds]
        test, rows = (jnp.asarray(np.stack(x)) for x in zip(*drawn, strict=True))
        return np.asarray(train(tried[name][0], steps)(test, rows, starts))

    cells = [(name, by_label) for by_label in (False, True) for name in tried]
    found = each("training", one, cells)
    last = {cell: curve[:, -1, 0] for cell, curve in found.items()}

    def over(name, other, by_label):
        return 100 * (last[name, by_label] - last[other, by_label])

    rows, panels = [], []
    for by_label, title in ((False, "shuffled"), (True, "sorted by label")):
        for name, (_, rounds) in tried.items():
            ahead = of_seeds(over(name, often, by_label), "+.2f")
            accuracy = percent(last[name, by_label])
            cells = [accuracy, "" if name == often else ahead]
            rows.append([f"{name}, {title}", rounds, *cells])
        points = found[often, by_label].shape[1]
        x = np.arange(1, points + 1) * (steps // points)
        lines = [Line(n, x, found[n, by_label][..., 0], "-") for n in tried]
        panels.append(Panel("steps", "accuracy of the mean", lines, title=title))
    page.table("accuracy", rows, base=BASE)
    fewer = f"{tried[grows][1]} instead of {tried[often][1]} rounds"
    for key, other, by_label in (
        ("often", often, False),
        ("same", same, False),
        ("sorted", same, True),
    ):
        points = over(grows, other, by_label)
        error = points.std(ddof=1) / len(points) ** 0.5
        said = f"{points.mean():+.2f} points in the mean, standard error {error:.2f}"
        said = f"{fewer}, {said}" if key == "often" else said
        met = points.mean() >= 0 and tried[grows][1] < tried[often][1]
        page.criterion(key, met, said, other=other)
    page.picture(panels)
    page.data(accuracy={f"{n}, {b}": found[n, b][..., 0] for n, b in found})


if __name__ == "__main__":
    reproduce("reproduce_qsr", __doc__, study, FULL, SHORT)
