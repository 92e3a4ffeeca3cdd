"""Time per exchange of asynchronous workers with the center, by size of the variables.

    python benchmarks/bench_async.py                   # ten minutes
    python benchmarks/bench_async.py --quick           # short

Worker processes on a local Ray step and exchange in every step, all at once, as fast as
they can, so an exchange takes as long as a round of all. Timed is `Worker.step` with a
gradient that lies ready, until its parameters are there. In the same run, in turns: an
actor as one writes it first (NumPy arrays, push, then pull), with and without a jitted
step of SGD; the same with JAX arrays; a meeting of all workers (`quorum`); what travels
alone (`send` and its answer); Ray's own part of an exchange; and a plain NumPy copy of
the bytes that a round moves, there and back for each worker.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import on_ray
import optax
import ray
import report
from pictures import GREY, Line, Panel

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.runtime import Push, Worker
from optx_sync.runtime.agreements.arrays import arrays_of

VARIABLES, RATE = 8, 0.1
# Measured once with TensorFlow 1.15's parameter server on a machine like this one, 2
# workers and 1 server, milliseconds per round: stands beside it, nothing more.
TENSORFLOW = {1_000: 1.5, 1_000_000: 14.6, 10_000_000: 178.0}
RULES = {
    "local_sgd": oxs.rules.local_sgd(),
    "elastic": oxs.rules.elastic(moving_rate=0.1, rho=0.0),
    "diloco": oxs.rules.diloco(),
}
NAIVE, NUMPY, STEPPING = "actor, JAX arrays", "actor, NumPy", "actor, NumPy, and a step"
RAY_ALONE, SEND, QUORUM = "Ray alone", "send alone", ", quorum of all"
# Floats, rules, numbers of servers and of workers, blocks of measurements and seconds.
FULL = (tuple(TENSORFLOW), tuple(RULES), (1, 2), (2, 8), 3, 0.5)
SHORT = ((1_000,), ("local_sgd",), (1,), (2,), 1, 0.1)


class _Naive:
    """A center as one writes it first."""

    def __init__(self, center):
        self.center = center

    def push(self, moved):
        self.center = {name: self.center[name] + moved[name] for name in moved}

    def pull(self):
        return self.center

    def swap(self, moved):
        return self.center


@jax.jit
def _sgd(params, grads):
    moved = jax.tree.map(lambda g: -RATE * g, grads)
    return jax.tree.map(jnp.add, params, moved), moved


class _Worker:
    """A process that exchanges again and again."""

    def __init__(self, index, size, workers):
        self.index, self.workers, self.kept, self.rounds = index, workers, {}, {}
        self.arrays, self.there, self.back = make(size), make(size), make(size)
        self.params = self.grads = jax.tree.map(jnp.array, self.arrays)

    def call(self, name, target):
        """One exchange of this kind."""
        if name in (NAIVE, NUMPY, STEPPING):
            moved = self.grads
            if name == STEPPING:
                self.params, moved = _sgd(self.params, self.grads)
            if name != NAIVE:  # A worker's parameters are JAX arrays all the same.
                moved = {key: np.asarray(array) for key, array in moved.items()}
            ray.get(target.push.remote(moved))
            pulled = ray.get(target.pull.remote())
            self.params = jax.block_until_ready(jax.tree.map(jnp.asarray, pulled))
        elif name == RAY_ALONE:
            ray.get(target.swap.remote(self.arrays))
        elif name == "copy":
            for key, array in self.arrays.items():
                for _ in range(self.workers):
                    np.copyto(self.there[key], array)
                    np.copyto(self.back[key], array)
        elif name.startswith(SEND):
            self._send(name, target)
        else:
            if name not in self.kept:
                self.kept[name] = Worker(
                    target,
                    self.params,
                    optax.sgd(RATE),
                    RULES[name.partition(",")[0]],
                    index=self.index,
                    num_workers=self.workers,
                    communication_period=1,
                    num_servers=len(target.servers),
                    meet=meets(name, self.workers),
                )
            self.kept[name].step(self.grads)
            jax.block_until_ready(self.kept[name].params)

    def _send(self, name, target):
        number = self.rounds[name] = self.rounds.get(name, 0) + 1
        if number == 1:  # As `Worker` does, whose compiled step cuts.
            parts = range(len(target.layout.owners))
            cut = [arrays_of(target.layout.pick(self.arrays, p)) for p in parts]
            self.kept[name] = target, target.join(self.index).incarnation, cut
        target, mine, cut = self.kept[name]
        pushes = [
            Push(self.index, number, {"contribution": x}, incarnation=mine, part=part)
            for part, x in enumerate(cut)
        ]
        answers = [target.send(push) for push in pushes]
        for answer in answers:
            answer()

    def measure(self, name, target, seconds):
        self.call(name, target)
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            self.call(name, target)
            times.append(1e3 * (time.perf_counter() - start))
        return times


def meets(name, workers):
    """When the center absorbs: a push when it comes, or those of all workers."""
    # Who is done with measuring is waited for no longer.
    return runtime.quorum(workers, patience=0.5) if name.endswith(QUORUM) else None


def make(size):
    """Variables of equal size; written to, so that their memory is there."""
    parts = np.array_split(np.full(size, 1e-3, np.float32), VARIABLES)
    return {str(i): np.array(part) for i, part in enumerate(parts)}


def bench(size, workers, rules, servers, blocks, seconds):
    """Milliseconds of each exchange, by name."""
    params, naive = make(size), ray.remote(_Naive).options(num_cpus=0)
    as_jax = jax.tree.map(jnp.asarray, params)
    actors: list[Any] = [naive.remote(center) for center in (as_jax, params, params)]
    targets: dict[str, Any] = dict(
        zip((NAIVE, NUMPY, STEPPING, RAY_ALONE), (*actors, actors[1]), strict=True)
    )
    kinds = [(name, count) for name in (*rules, SEND) for count in servers]
    for name, count in (*kinds, *((f"{rule}{QUORUM}", 1) for rule in rules)):
        key = name if count == 1 else f"{name}, {count} servers"
        targets[key] = runtime.start_servers(
            params,
            RULES.get(name.partition(",")[0], oxs.rules.local_sgd()),
            num_workers=workers,
            num_servers=count,
            communication_period=1,
            meet=meets(name, workers),
        )
        actors += targets[key].servers
    worker: Any = ray.remote(_Worker).options(num_cpus=0)
    workers = [worker.remote(index, size, workers) for index in range(workers)]
    times = {name: [] for name in (*targets, "copy")}
    for block in range(blocks + 1):
        for name, of_name in times.items():
            # One process copies what both move, as one server does.
            those = workers if name in targets else workers[:1]
            arguments = name, targets.get(name), seconds if block else 0.1
            found = ray.get([w.measure.remote(*arguments) for w in those])
            if block:  # The first one warms up.
                of_name.extend(t for of_worker in found for t in of_worker)
    for actor in (*workers, *actors):
        ray.kill(actor)
    return times


def study(page, settings):
    """Measure all sizes and write the page."""
    sizes, rules, servers, counts, *plan = settings
    memory = 6 * 1024**3 if len(sizes) > 1 else 10**8
    cases = [(size, count) for size in sizes for count in counts]

    def measured(case):
        # A worker of each rule at once: for eight of them 24 GiB are too few.
        size, count = case
        some = rules[:1] if size * count > 2e7 else rules
        return bench(size, count, some, servers, *plan)

    with on_ray.cluster(4, object_store_memory=memory):
        found = report.each("measuring", measured, cases)
    medians = {}
    for (size, count), times in found.items():
        middle = {n: statistics.median(t) for n, t in times.items()}
        medians[size, count], rows = middle, []
        for name, of_name in times.items():
            pairs = (NUMPY, name), (STEPPING, name), (name, "copy"), (name, RAY_ALONE)
            beside = (middle[a] / middle[b] for a, b in pairs)
            rows.append([name, report.spread(of_name), *beside])
        if count == 2:
            known = str(TENSORFLOW[size])
            rows.append(["TensorFlow 1.15, a round", known, "", "", "", ""])
        page.table("exchanges", rows, size=size, workers=count)
    # Those with a colour of their own: the tables have all.
    alone = [rule for rule in rules if rule in ("local_sgd", "diloco")]
    names = [NUMPY, STEPPING, *alone, SEND, RAY_ALONE, "copy"]
    panels = []
    for count in counts:
        lines = []
        for name in names:
            there = [size for size in sizes if name in medians[size, count]]
            lines.append(Line(name, there, [medians[x, count][name] for x in there]))
        if count == 2:
            known = [TENSORFLOW[size] for size in sizes]
            lines.append(Line("TensorFlow 1.15, elsewhere", sizes, known, "x:", GREY))
        title = f"{count} workers, ms per exchange"
        panels.append(Panel("floats in the variables", title, lines, log="xy"))
    page.picture(panels)


if __name__ == "__main__":
    report.reproduce("bench_async", __doc__, study, FULL, SHORT)
