"""Microbatches added up in the step, beside `optax.MultiSteps` and a step by hand.

    python benchmarks/bench_accumulation.py            # minutes on two cores
    python benchmarks/bench_accumulation.py --quick    # few turns, a few seconds

An update is k microbatches on each of four replicas: a `lax.scan` in one program, or a
call for each. All of them make the same update, which is asserted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from by_hand import mesh_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from report import Report, ratio, spread
from training import loss_of

import optx_sync as oxs

report.on_cpu(4)

AXIS, REPLICAS, BATCH = "workers", 4, 32
options = report.arguments(__doc__).parse_args()
WIDTH, LAYERS, TURNS = (32, 2, 3) if options.quick else (256, 6, 30)
COUNTS = (2,) if options.quick else (1, 2, 4, 8)
ADAM = optax.adam(1e-3)
MESH = mesh_of(REPLICAS)
WORKERS = oxs.Workers(REPLICAS, AXIS, mesh=MESH)
PARAMS = [
    {"w": WIDTH**-0.5 * np.asarray(jax.random.normal(key, (WIDTH, WIDTH))), "b": zeros}
    for key in jax.random.split(jax.random.key(0), LAYERS)
    for zeros in [np.zeros(WIDTH, np.float32)]
]
HAND, AGAIN, OURS = "by hand, a scan", "by hand again", "`cross_shard`, a scan"
ZERO = "`cross_shard`, a scan, ZeRO"
SYNC = "`sync_replicas`, a call each"
IN_SCAN = "`optax.MultiSteps`, a scan"
CALLS = "`optax.MultiSteps`, a call each"
Tree = Any


class Arm(NamedTuple):
    """A way to make an update of k microbatches.

    Attributes:
        programs: One for each call of an update.
        start: Makes the parameters and the state.
        batches: What each call gets.
        params_of: One replica's parameters, of what the last call returned.
    """

    programs: Sequence[Any]
    start: Callable[[], Tree]
    batches: Sequence[jax.Array]
    params_of: Callable[[Tree], Tree]


class Update:
    """An update that goes on with what the last one returned."""

    def __init__(self, arm: Arm):
        """An arm of its own state."""
        self.arm, self.held = arm, arm.start()

    def __call__(self) -> Tree:
        """All calls of an update, one after the other."""
        for program, batch in zip(self.arm.programs, self.arm.batches, strict=True):
            self.held = program(*self.held, batch)
        return self.held


def added_up(params: Tree, batch: jax.Array, k: int) -> Tree:
    """The mean gradient of k microbatches."""

    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, x)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(add, zeros, batch.reshape(k, BATCH, WIDTH))
    return jax.tree.map(lambda x: x / k, total)


def batches_of(k: int) -> tuple[jax.Array, list[jax.Array]]:
    """All replicas' batches of an update, and the k of them one by one."""
    place = NamedSharding(MESH, P(AXIS))
    shape = REPLICAS, k, BATCH, WIDTH
    every = jax.random.normal(jax.random.key(1), shape)
    each = [every[:, i].reshape(-1, WIDTH) for i in range(k)]
    return jax.device_put((every.reshape(-1, WIDTH), each), place)


def by_optax(tx: Any, step: Callable[..., Any]) -> tuple[Any, Callable[[], Tree]]:
    """A step on replicated parameters, as users of `jax.shard_map` write it."""
    specs = {"in_specs": (P(), P(), P(AXIS)), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(step, mesh=MESH, **specs)
    equal = NamedSharding(MESH, P())
    program = jax.jit(mapped, donate_argnums=(0, 1))
    return program, lambda: jax.device_put((PARAMS, tx.init(PARAMS)), equal)


def descend(tx: Any, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """A step with Optax alone."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def by_workers(tx: Any, step: Callable[..., Any]) -> tuple[Any, Callable[[], Tree]]:
    """A step of `oxs.Workers`."""
    program = WORKERS.step(step, state=2)
    return program, lambda: WORKERS.start((PARAMS, tx.init(PARAMS)))


def arms_of(k: int) -> dict[str, Arm]:
    """All ways to make an update of k microbatches."""
    whole, each = batches_of(k)
    multi = optax.MultiSteps(ADAM, k)
    found: dict[str, Arm] = {}

    def hand(params, state, batch):
        grads = lax.pmean(added_up(params, batch, k), AXIS)
        return descend(ADAM, grads, state, params)

    def microbatch(params, state, batch):
        grads = lax.pmean(jax.grad(loss_of)(params, batch), AXIS)
        return descend(multi, grads, state, params)

    def in_scan(params, state, batch):
        def one(now, x):
            return microbatch(now[0], now[1], x), None

        return lax.scan(one, (params, state), batch.reshape(k, BATCH, WIDTH))[0]

    ways: list[Any] = [
        (HAND, ADAM, hand, [whole]),
        (IN_SCAN, multi, in_scan, [whole]),
        (CALLS, multi, microbatch, each),
    ]
    for name, tx, step, batches in ways:
        program, start = by_optax(tx, step)
        found[name] = Arm([program] * len(batches), start, batches, lambda now: now[0])
    sync = oxs.sync_replicas(ADAM, AXIS, k * REPLICAS)
    for name, tx in (
        (OURS, oxs.cross_shard(ADAM, AXIS)),
        (ZERO, oxs.cross_shard(ADAM, AXIS, shard_state=True)),
        (SYNC, sync),
    ):

        def ours(params, state, batch, tx=tx):
            grads = added_up(params, batch, k)
            return oxs.apply_gradients(tx, grads, state, params)

        program, start = by_workers(tx, ours)
        found[name] = Arm([program], start, [whole], WORKERS.center)

    def adds(meet):
        def step(params, state, batch):
            grads = jax.grad(loss_of)(params, batch)
            return oxs.apply_gradients(sync, grads, state, params, meet=meet)

        return by_workers(sync, step)[0]

    quiet, due = adds(False), adds(True)
    programs = [*[quiet] * (k - 1), due]
    found[SYNC] = found[SYNC]._replace(programs=programs, batches=each)
    return found


def sent(arm: Arm) -> tuple[int, int]:
    """(collectives, their bytes) of an update, from the compiled programs."""
    start, number, size = arm.start(), 0, 0
    kinds = {id(program): program for program in arm.programs}
    for key, program in kinds.items():
        calls = [id(one) for one in arm.programs].count(key)
        for row in oxs.audit.collectives(program, *start, arm.batches[0]):
            number += calls * row.repeated
            size += calls * row.repeated * row.bytes
    return number, size


def measure(k: int) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    """Milliseconds of an update of each way, and what it sends."""
    arms = arms_of(k)
    calls = {name: Update(arm) for name, arm in arms.items()}
    calls[AGAIN] = Update(arms[HAND])
    times = report.in_turns(calls, TURNS, warm_up=3)
    ends = {name: arm.params_of(calls[name].held) for name, arm in arms.items()}
    for end in map(jax.tree.leaves, ends.values()):
        for x, y in zip(end, jax.tree.leaves(ends[HAND]), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4)
    return times, {name: sent(arm) for name, arm in arms.items()}


def main() -> None:
    """Measure everything and write it down."""
    floats = sum(x.size for x in jax.tree.leaves(PARAMS))
    page = Report(
        "bench_accumulation",
        options,
        layers=LAYERS,
        width=WIDTH,
        floats=floats,
        batch=BATCH,
        replicas=REPLICAS,
        turns=TURNS,
    )
    with jax.numpy_dtype_promotion("standard"):
        found = report.each("k", measure, COUNTS)
    names = OURS, ZERO, SYNC, IN_SCAN, CALLS, AGAIN
    rows = [
        [
            "milliseconds by hand, a scan",
            *(spread(found[k][0][HAND], 1) for k in COUNTS),
        ]
    ]
    for name in names:
        over = [f"{ratio(found[k][0][name], found[k][0][HAND]):.2f}" for k in COUNTS]
        rows.append([f"{name} / by hand", *over])
    columns = " | ".join(f"k = {k}" for k in COUNTS)
    page.table("times", rows, counts=columns)
    rows = []
    for name in (HAND, *names[:-1]):
        each = [found[k][1][name] for k in COUNTS]
        rows.append([name, *(f"{number:,}: {size:,}" for number, size in each)])
    page.table("sent", rows, counts=columns)
    page.text("load", load=report.machine()["load"])
    page.data(**{f"k = {k}": {"times": t, "sent": s} for k, (t, s) in found.items()})
    page.save()


if __name__ == "__main__":
    main()
