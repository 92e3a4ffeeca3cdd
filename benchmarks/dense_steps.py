"""How `bench_dense.py` builds and times a dense step, ours and its peers', in turns."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import report

from optx_sync import hlo


@dataclasses.dataclass
class Found:
    """What was measured of one optimizer, by "ours", "Optax" and the other peers."""

    times: Mapping[str, list[float]]  # milliseconds of a step
    builds: Mapping[str, list[tuple[float, float]]]  # seconds: trace, compilation
    bytes: Mapping[str, float]  # of a step, for each parameter
    loops: Mapping[str, float]  # compiled loops over a leaf, for each leaf
    apart: Mapping[str, float]  # how far from ours, for each unit of the way gone
    floor: int  # of bytes
    parameters: int

    def rate(self, side: str) -> float:
        """Gigabytes per second, were the floor of bytes all that is moved."""
        floor = 12 if side == "triad" else self.floor
        return floor * self.parameters / statistics.median(self.times[side]) / 1e6

    def share(self) -> float:
        """Our rate, for each unit of the triad's in the same turns."""
        return self.floor / 12 / self.ratio("triad")

    def ratio(self, peer: str) -> float:
        """Our time over a peer's, in the same turns."""
        return report.ratio(self.times["ours"], self.times[peer])

    def noise(self) -> float:
        """How far from 1 Optax's median ratio to itself may be: 95 %, resampled."""
        pairs = zip(self.times["Optax again"], self.times["Optax"], strict=True)
        ratios = np.array([again / first for again, first in pairs])
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        medians = np.median(draws, axis=1)
        return float(np.abs(np.quantile(medians, [0.025, 0.975]) - 1).max())

    def slower(self) -> bool:
        """Whether our step takes longer than Optax's, beyond noise, of 5 % at most."""
        return self.ratio("Optax") > 1 + min(self.noise(), 0.05)

    def build_ratios(self) -> list[float]:
        """Our time to trace and compile over Optax's, in each turn."""
        ours, theirs = (map(sum, self.builds[side]) for side in ("ours", "Optax"))
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    def more_bytes(self) -> bool:
        """Whether our program moves more than Optax's."""
        return self.bytes["ours"] > 1.001 * self.bytes["Optax"]


def build(tx: optax.GradientTransformation, params: Any) -> tuple[Any, float, float]:
    """The compiled step, and how long its trace and its compilation took."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jax.clear_caches()
    gc.collect()
    state = jax.eval_shape(tx.init, params)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, params).lower()
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, traced - start, time.perf_counter() - traced


def stepper(compiled: Any, tx: Any, start: Any, grads: Any) -> Callable[[], Any]:
    """A call that makes a step, and returns parameters and state."""
    params = [jnp.array(leaf) for leaf in start]
    held = [params, jax.jit(tx.init)(params)]

    def call():
        held[:] = compiled(*held, grads)
        return held

    return call


def triad(start: Any, grads: Any) -> Callable[[], Any]:
    """A call of x + 2 y, written over x: as fast as memory is read and written."""

    def add(x, y):
        return [a + 2.0 * b for a, b in zip(x, y, strict=True)]

    compiled = jax.jit(add, donate_argnums=0)
    held = [jnp.array(leaf) for leaf in start]

    def call():
        held[:] = compiled(held, grads)
        return held

    return call


def loops_of(compiled: Any, size: int, leaves: int) -> float:
    """Compiled loops over whole leaves, for each leaf."""
    loops = [i for i in hlo.written(hlo.program(compiled)) if i.opcode == "fusion"]
    return sum(loop.arrays[0].shape == (size,) for loop in loops) / leaves


def measure(name: str, leaves: int, size: int, repeats: int, builds: int) -> Found:
    """Build and time one optimizer and its peers, in turns."""
    generator = np.random.default_rng(0)
    start = [generator.standard_normal(size, np.float32)] * leaves
    grads = [generator.standard_normal(size, np.float32) for _ in range(leaves)]
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32)] * leaves
    makes = {"ours": peers.OURS[name]}
    if name in peers.OPTAX:
        makes["Optax"] = peers.OPTAX[name]
    seconds, programs = {side: [] for side in makes}, {}
    for turn in range(builds):
        for side in list(makes)[:: -1 if turn % 2 else 1]:
            programs[side], *taken = build(makes[side](), shapes)
            seconds[side].append(tuple(taken))

    device_grads = jax.device_put(grads)
    calls: dict[str, Callable[[], Any]] = {
        side: stepper(program, makes[side](), start, device_grads)
        for side, program in programs.items()
    }
    calls["triad"] = triad(start, device_grads)
    if "Optax" in programs:
        # What a program takes against itself, on other buffers, is noise.
        again = stepper(programs["Optax"], makes["Optax"](), start, device_grads)
        calls["Optax again"] = again
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and name in peers.KERNELS and peers.tensorflow():
        constants = [peers.tensorflow().constant(grad) for grad in grads]
        calls["TensorFlow"] = peers.TensorFlowStep(name, start, constants)
    if on_cpu and name in peers.TORCH and peers.torch():
        calls["torch"] = peers.torch_step(name, start, grads)
    times = report.in_turns(calls, repeats)

    ends = {side: np.asarray(calls[side]()[0][0]) for side in programs}
    kernel = calls.get("TensorFlow")
    if isinstance(kernel, peers.TensorFlowStep):
        kernel()
        ends["TensorFlow"] = kernel.params[0].numpy()
    way = np.abs(ends["ours"] - start[0]).mean()
    slots = jax.tree.leaves(jax.eval_shape(makes["ours"]().init, shapes[0]))
    floor = 12 + 8 * sum(slot.shape == (size,) for slot in slots)
    return Found(
        times,
        seconds,
        {s: report.bytes_accessed(p) / leaves / size for s, p in programs.items()},
        {s: loops_of(p, size, leaves) for s, p in programs.items()},
        {s: float(np.abs(end - ends["ours"]).mean() / way) for s, end in ends.items()},
        # A norm must be known before the first element moves: the gradient twice.
        floor + 4 if name == "normalized_sgd" else floor,
        leaves * size,
    )
