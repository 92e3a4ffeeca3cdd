"""Reproduction: workers that average with partners, against a center or an all-reduce.

python benchmarks/reproduce_peers.py            # minutes on two cores
python benchmarks/reproduce_peers.py --quick
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from report import Line, Panel, each, of_seeds, reproduce

import optx_sync as oxs

WORKERS, TEST, BATCH = 8, 360, 16
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", WORKERS)

# Images are arrays from here on, and the number of devices must be known before.
from digits import LABELS, accuracy_of, initial, loss_of  # noqa: E402 # starts JAX

AXIS, POINTS = "workers", 32
FULL = {"steps": 640, "seeds": 3}
SHORT = {"steps": 64, "seeds": 2}


class Method(NamedTuple):
    make: Callable[[], optax.GradientTransformationExtraArgs]
    every: int  # steps between rounds
    graph: oxs.graphs.Graph | None = None


def gossip(graph: oxs.graphs.Graph) -> Method:
    return Method(lambda: oxs.gossip(optax.sgd(1.0), AXIS, graph=graph), 1, graph)


# All meet in every step, at rate 1, or every 20 steps, at 1 too.
PAIRS = oxs.graphs.random_pairs()
METHODS = {
    "all-reduce": Method(lambda: oxs.cross_shard(optax.sgd(1.0), AXIS), 1),
    "ring": gossip(oxs.graphs.ring()),
    "exponential": gossip(oxs.graphs.exponential()),
    "random_pairs": gossip(PAIRS),
    "nobody": gossip(oxs.graphs.Graph(lambda n: (oxs.graphs.GraphRound(),))),
    "diloco": Method(
        lambda: oxs.diloco(
            optax.sgd(1.0), AXIS, communication_period=20, outer=optax.sgd(0.7, 0.5)
        ),
        20,
    ),
    "noloco": Method(
        lambda: oxs.noloco(optax.sgd(1.0), AXIS, communication_period=20), 20, PAIRS
    ),
}
GRAPHS = ("ring", "exponential", "random_pairs")


def split(seed: int, by_label: bool, steps: int):
    """Images to test, and those of each step and worker, [steps, workers, batch]."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(LABELS))
    test, rest = order[:TEST], order[TEST:]
    if by_label:
        rest = rest[np.argsort(np.asarray(LABELS)[rest], kind="stable")]
    shards = rest[: len(rest) // WORKERS * WORKERS].reshape(WORKERS, -1)
    drawn = rng.integers(shards.shape[1], size=(steps, WORKERS, BATCH))
    return test, shards[np.arange(WORKERS)[:, None], drawn]


@functools.cache
def train(method: Method, steps: int):
    """(test images, batches, start) -> accuracies and disagreement, [POINTS, 3]."""
    tx, points = method.make(), min(POINTS, steps // 4)

    def step(params: Any, state: Any, rows: Any) -> Any:
        return oxs.apply_gradients(tx, jax.grad(loss_of)(params, rows), state, params)

    def run(test, rows, params):
        axes = oxs.state_axes(tx, params)
        mapped: Any = jax.vmap(step, (0, axes, 0), (0, axes), axis_name=AXIS)
        carry = oxs.stack(params, WORKERS), oxs.stack(tx.init(params), WORKERS, axes)

        def some(carry, rows):
            carry, _ = jax.lax.scan(lambda c, r: (mapped(*c, r), None), carry, rows)
            params, mean = carry[0], oxs.mean_params(carry[0])
            apart = jax.tree.map(lambda x, m: jnp.sum((x - m[None]) ** 2), params, mean)
            size = sum(m.size for m in jax.tree.leaves(mean)) * WORKERS
            each_one = jax.vmap(accuracy_of, (0, None))(params, test)
            return carry, (
                accuracy_of(mean, test),
                each_one.mean(),
                jnp.sqrt(sum(jax.tree.leaves(apart)) / size),
            )

        rows = rows[: steps // points * points]
        rows = rows.reshape(points, -1, *rows.shape[1:])
        return jnp.stack(jax.lax.scan(some, carry, rows)[1], axis=-1)

    return jax.jit(jax.vmap(run))


def bytes_of_round(method: Method) -> float:
    """What a worker sends in one round, read from the compiled step."""
    tx, params = method.make(), initial(0)
    mesh = jax.make_mesh((WORKERS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    axes = oxs.state_axes(tx, params)
    specs = oxs.state_specs(tx, params, jax.tree.map(lambda _: P(), params), AXIS)

    def local(params, state, rows):
        params, rows = oxs.unstack((params, rows))
        grads = jax.grad(loss_of)(params, rows)
        params, state = oxs.apply_gradients(tx, grads, oxs.unstack(state, axes), params)
        return oxs.stack(params, 1), oxs.stack(state, 1, axes)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(AXIS), specs, P(AXIS)),
        out_specs=(P(AXIS), specs),
    )
    found = oxs.audit.collectives(
        mapped,
        oxs.stack(params, WORKERS),
        oxs.stack(tx.init(params), WORKERS, axes),
        jnp.zeros((WORKERS, BATCH), jnp.int32),
    )
    parts = {"all-reduce": 2 * (WORKERS - 1) / WORKERS, "collective-permute": 1}
    total = sum(parts[row.kind] * row.bytes for row in found)
    # The program holds a branch for each round of the graph.
    return total / (len(method.graph.rounds(WORKERS)) if method.graph else 1)


def percent(values) -> str:
    return of_seeds(100 * np.asarray(values), ".1f")


def study(page, settings):
    steps, seeds = settings["steps"], range(settings["seeds"])
    page.text("seeds", **settings)
    starts = jax.tree.map(lambda *x: jnp.stack(x), *map(initial, seeds))

    def one(cell):
        name, by_label = cell
        drawn = [split(seed, by_label, steps) for seed in seeds]
        test, rows = (jnp.asarray(np.stack(x)) for x in zip(*drawn, strict=True))
        return np.asarray(train(METHODS[name], steps)(test, rows, starts))

    cells = [(name, by_label) for by_label in (False, True) for name in METHODS]
    found = each("training", one, cells)
    sent = {name: bytes_of_round(method) for name, method in METHODS.items()}
    size = sum(x.nbytes for x in jax.tree.leaves(initial(0)))
    rows = []
    for by_label, title in ((False, "shuffled"), (True, "sorted by label")):
        for name, method in METHODS.items():
            mean, single, apart = found[name, by_label][:, -1].T
            rows.append(
                [
                    f"{name}, {title}",
                    method.every,
                    percent(mean),
                    percent(single),
                    of_seeds(apart, ".3f"),
                    f"{sent[name] / method.every / size:.3f}",
                ]
            )
    page.table("accuracy", rows)

    def last(name, by_label=False):
        return found[name, by_label][:, -1].T

    behind = {n: 100 * (last("all-reduce")[0] - last(n)[0]).mean() for n in GRAPHS}
    said = ", ".join(f"{n} {b:+.2f} points" for n, b in behind.items())
    page.criterion("as good", max(behind.values()) <= 0.6, said)
    apart = {n: last(n, True)[2].mean() for n in GRAPHS}
    said = ", ".join(f"{n} {a:.3f}" for n, a in apart.items())
    page.criterion("apart", apart["exponential"] < apart["ring"], said)
    parts = {n: sent[n] / size for n in (*GRAPHS, "noloco", "all-reduce")}
    exact = parts["exponential"] == parts["noloco"] == parts["random_pairs"] == 1
    said = ", ".join(f"{n} {part:.3f}" for n, part in parts.items())
    page.criterion("bytes", exact and parts["ring"] == 2, said)
    close = 100 * (last("diloco")[0] - last("noloco")[0]).mean()
    page.criterion("noloco", abs(close) <= 1, f"{close:.2f} points behind DiLoCo")
    lost = 100 * (last("noloco", True)[0] - last("noloco", True)[1]).mean()
    behind_center = 100 * (last("diloco", True)[0] - last("noloco", True)[0]).mean()
    said = f"by {lost:.1f} points, and by {behind_center:.1f}"
    page.criterion("single", min(lost, behind_center) > 0, said)
    panels = []
    for by_label, title in ((False, "shuffled"), (True, "sorted by label")):
        names = [n for n in METHODS if n != "nobody"]
        points = found["ring", by_label].shape[1]
        x = np.arange(1, points + 1) * (steps // points)
        for place, what in ((1, "accuracy of one worker"), (2, "disagreement")):
            lines = [Line(n, x, found[n, by_label][..., place], "-") for n in names]
            panels.append(Panel("steps", what, lines, title=title))
    page.picture(panels, columns=2)
    page.data(found={f"{n}, {b}": found[n, b] for n, b in found}, bytes=sent)


if __name__ == "__main__":
    reproduce("reproduce_peers", __doc__, study, FULL, SHORT)
