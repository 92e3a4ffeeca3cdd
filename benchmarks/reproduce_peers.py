"""Reproduction: workers that average with partners, against a center or an all-reduce.

python benchmarks/reproduce_peers.py            # minutes on two cores
python benchmarks/reproduce_peers.py --quick
"""

from typing import Any, NamedTuple

import jax
import optax
from digits import BATCH, PARTS, WORKERS, curves, initial, loss_of, panels_of, train_all
from report import of_seeds, percent, reproduce
from training import AXIS, collectives_of

import optx_sync as oxs

jax.config.update("jax_num_cpu_devices", WORKERS)

FULL = {"steps": 640, "seeds": 3}
SHORT = {"steps": 24, "seeds": 1}


class Method(NamedTuple):
    tx: Any
    every: int = 1  # steps between rounds
    graph: oxs.graphs.Graph | None = None


def gossip(graph: oxs.graphs.Graph) -> Method:
    return Method(oxs.gossip(SGD, AXIS, graph=graph), graph=graph)


# All meet in every step, at rate 1, or every 20 steps, at 1 too.
SGD, EVERY, PAIRS = optax.sgd(1.0), 20, oxs.graphs.random_pairs()
OUTER = optax.sgd(0.7, 0.5)
METHODS = {
    "all-reduce": Method(oxs.cross_shard(SGD, AXIS)),
    "ring": gossip(oxs.graphs.ring()),
    "exponential": gossip(oxs.graphs.exponential()),
    "random_pairs": gossip(PAIRS),
    "nobody": gossip(oxs.graphs.Graph(lambda n: (oxs.graphs.GraphRound(),))),
    "diloco": Method(
        oxs.diloco(SGD, AXIS, communication_period=EVERY, outer=OUTER), EVERY
    ),
    "noloco": Method(oxs.noloco(SGD, AXIS, communication_period=EVERY), EVERY, PAIRS),
}


def bytes_of_round(method: Method) -> float:
    """What a worker sends in one round, read from the compiled step."""
    rows = jax.ShapeDtypeStruct((WORKERS, BATCH), "int32")
    found = collectives_of(method.tx, initial(0), jax.grad(loss_of), rows)
    # The program holds a branch for each round of the graph.
    rounds = len(method.graph.rounds(WORKERS)) if method.graph else 1
    return sum(row.sent for row in found) / rounds


def study(page, settings):
    page.text("seeds", **settings)
    steps = settings["steps"]
    found = train_all(METHODS, lambda n: curves(METHODS[n].tx, steps), **settings)
    sent = {name: bytes_of_round(method) for name, method in METHODS.items()}
    size = sum(x.nbytes for x in jax.tree.leaves(initial(0)))
    rows = []
    for (name, by_label), curve in found.items():
        mean, single, apart = curve[:, -1].T
        every = METHODS[name].every
        cells = percent(mean), percent(single), of_seeds(apart, ".3f")
        part = f"{sent[name] / every / size:.3f}"
        rows.append([f"{name}, {PARTS[by_label]}", every, *cells, part])
    page.table("accuracy", rows)

    names = [name for name in METHODS if name != "nobody"]
    single, apart = (
        panels_of(found, steps, place, what, names)
        for place, what in ((1, "accuracy of one"), (2, "disagreement"))
    )
    page.picture([single[0], apart[0], single[1], apart[1]], columns=2)
    page.data(found=found, bytes=sent)


if __name__ == "__main__":
    reproduce("reproduce_peers", __doc__, study, FULL, SHORT)
