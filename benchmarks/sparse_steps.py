"""How `bench_sparse.py` times row-sparse steps, ours and its peers', in turns."""

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import report

import optx_sync as oxs
from optx_sync import hlo

WIDTH = 16
ORDERS = ("any order", "sorted", "repeated")
Times = Mapping[str, Sequence[float]]


def gradients(rows: int, touched: int, order: str, number: int) -> list[Any]:
    """Indices and values, several of them; the same for everyone."""
    generator = np.random.default_rng(touched)
    pairs = []
    for _ in range(number):
        if order == "repeated":
            # Zipf's law, as words or items have it: the frequent ones many times.
            indices = generator.zipf(1.1, touched) % rows
        else:
            indices = generator.choice(rows, touched, replace=False)
        indices = np.sort(indices) if order == "sorted" else indices
        values = generator.standard_normal((touched, WIDTH), np.float32)
        pairs.append((indices.astype(np.int32), values))
    return pairs


class Table:
    """A table and its optimizer; call it with a gradient to make a step."""

    def __init__(self, name: str, rows: int) -> None:
        tx = peers.OURS[name]()

        def step(table, state, grads):
            updates, state = tx.update(grads, state, table)
            return optax.apply_updates(table, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1))
        table = jnp.ones((rows, WIDTH))
        self.held = (table, jax.jit(tx.init)(table))

    def __call__(self, grads: Any) -> Any:
        self.held = self.step(*self.held, grads)
        return self.held

    def temporary(self, grads: Any) -> int:
        """Bytes that the compiled step needs beside what it is given."""
        return hlo.memory(self.step, *self.held, grads).temporary


def next_of(step: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """A call with the next arguments, in a circle."""
    circle = itertools.cycle(arguments)
    return lambda: step(*next(circle))


def slices(pairs: Sequence[Any]) -> list[tuple[oxs.IndexedSlices]]:
    """Gradients as ours takes them, on the device."""
    return [(oxs.IndexedSlices(jnp.asarray(i), jnp.asarray(v)),) for i, v in pairs]


def by_size(
    name: str, sizes: Sequence[int], touched: int, repeats: int
) -> tuple[Times, dict[str, int]]:
    """Milliseconds of a step, and its temporary bytes, for each length of the table."""
    tables = {f"{rows:,}": (Table(name, rows), rows) for rows in sizes}
    calls, temporary = {}, {}
    for label, (table, rows) in tables.items():
        grads = slices(gradients(rows, touched, "any order", 8))
        calls[label] = next_of(table, grads)
        temporary[label] = table.temporary(*grads[0])
    times = report.in_turns(calls, repeats)
    gc.collect()
    return times, temporary


def by_touched(
    name: str, rows: int, counts: Sequence[int], touched: int, repeats: int
) -> tuple[dict[str, Times], float | None]:
    """Milliseconds of a step by rows touched, of all; how far TensorFlow ended from us.

    The distance is in the mean, for each unit of the mean way gone.
    """
    table, dense = Table(name, rows), Table(name, rows)
    generator = np.random.default_rng(0)
    dense_grads = jnp.asarray(generator.standard_normal((rows, WIDTH), np.float32))
    start = np.ones((rows, WIDTH), np.float32)
    tf, torch = peers.tensorflow(), peers.torch()
    on_cpu = jax.default_backend() == "cpu"
    kernel = on_cpu and tf and name in peers.KERNELS
    kernel = peers.TensorFlowStep(name, [start], None) if kernel else None
    on_rows = on_cpu and torch and name in peers.TORCH_ROWS
    on_rows = peers.torch_on_rows(name, start) if on_rows else None
    plan = {f"{count:,}": (count, ORDERS[0]) for count in counts}
    plan |= {order: (touched, order) for order in ORDERS[1:]}
    times = {}
    for label, (count, order) in plan.items():
        number, turns, warm_up = (2, 5, 1) if count > 16_384 else (8, repeats, 3)
        pairs = gradients(rows, count, order, number)
        calls = {
            "ours": next_of(table, slices(pairs)),
            "dense": lambda: dense(dense_grads),
        }
        if kernel:
            summed = order == "repeated"
            constants = [(tf.constant(i), tf.constant(v), summed) for i, v in pairs]
            calls["TensorFlow"] = next_of(kernel.on_rows, constants)
        if on_rows:
            long = [(i.astype(np.int64), v) for i, v in pairs]
            tensors = [tuple(map(torch.from_numpy, pair)) for pair in long]
            calls["torch"] = next_of(on_rows, tensors)
        times[label] = report.in_turns(calls, turns, warm_up)
    apart = None
    if kernel:
        end = np.asarray(table.held[0])
        apart = np.abs(kernel.params[0].numpy() - end).mean() / np.abs(end - 1).mean()
    return times, apart


def break_even(counts: Sequence[int], times: Mapping[str, Times]) -> float | None:
    """Rows touched at which a row-sparse step takes as long as a dense one."""
    over = [np.log(report.ratio(t["ours"], t["dense"])) for t in times.values()]
    over = np.array(over[: len(counts)])
    if over.max() < 0:
        return None
    after = int(np.argmax(over > 0))
    near = slice(max(after - 1, 0), after + 1)
    return float(np.exp(np.interp(0.0, over[near], np.log(counts)[near])))
