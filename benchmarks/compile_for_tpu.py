"""What every wrapper, center rule and exchange becomes on TPUs, read from its program.

    make tpu                                       # ten minutes on two cores
    python benchmarks/compile_for_tpu.py --quick   # two slices and bfloat16 alone

libtpu's compiler needs no chip: a step of a small model is compiled ahead of time for
one slice of 8 chips, for two of them, and for a slice of 256, and the scheduled program
is read. A schedule is an order of instructions, no time.
"""

import itertools
import os

# What libtpu asks the host about chips, answered: there are none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable
from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import AXIS
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from report import each, reproduce
from training import compiled_step

import optx_sync as oxs

PERIOD = 4
LAYERS, WIDTH, EXAMPLES = 4, 512, 256
# Of libtpu's topologies, how many slices of which.
MACHINES = {
    "one slice of 8": ("v5e:2x4", 1),
    "two slices of 8": ("v5e:2x4", 2),
    "256 chips": ("v5e:16x16", 1),
}
FULL = {"machines": tuple(MACHINES), "dtypes": ("float32", "bfloat16")}
SHORT = {"machines": ("two slices of 8",), "dtypes": ("bfloat16",)}


def cases() -> dict[str, Callable[[int], Any]]:
    """What is compiled, for a number of workers."""
    exchange, inner = oxs.exchange, optax.adamw(1e-3)

    def meeting(wrap: Callable, inner: Any = inner, **more: Any) -> Callable:
        return lambda n: wrap(inner, AXIS, communication_period=PERIOD, **more)

    def reducing(**more: Any) -> Callable:
        return lambda n: oxs.cross_shard(inner, AXIS, **more)

    streaming = {"fragments": PERIOD, "delay": 1, "keep_local": 0.5}
    every = {
        "cross_shard": reducing(),
        "sync_replicas": lambda n: oxs.sync_replicas(inner, AXIS, n),
        "sync_replicas, accumulating": lambda n: oxs.sync_replicas(inner, AXIS, 2 * n),
        "local_sgd": meeting(oxs.local_sgd),
        "diloco": meeting(oxs.diloco),
        "diloco in 4 parts, a step later": meeting(oxs.diloco, **streaming),
        "agn": meeting(oxs.agn, optax.sgd(0.1)),
        "elastic_average": meeting(oxs.elastic_average, rho=0.0),
        "cross_shard, state in pieces": reducing(shard_state=True),
        "diloco, center in pieces": meeting(oxs.diloco, shard_center=True),
        "gossip on a ring": meeting(oxs.gossip),
        "noloco": meeting(oxs.noloco),
    }
    exchanges = {
        "bfloat16 sums": exchange.all_reduce(jnp.bfloat16),
        "8 bits": exchange.quantized(bits=8),
        "4 bits with feedback": exchange.error_feedback(exchange.quantized(bits=4)),
        "top-k": exchange.top_k(),
        "PowerSGD": exchange.power_sgd(rank=2),
        "median": exchange.median(),
    }
    for name, one in exchanges.items():
        every[f"diloco, {name}"] = meeting(oxs.diloco, exchange=one)
    return every


def mesh_of(machine: str) -> Mesh:
    """All chips of a machine along the worker axis, slice by slice."""
    shape, slices = MACHINES[machine]
    chips = topologies.get_topology_desc(shape, "tpu", num_slices=slices).devices
    return Mesh(np.array(chips), (AXIS,), axis_types=(AxisType.Auto,))


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Of a chain of matrix products."""
    for layer in params.values():
        batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch.astype(jnp.float32) ** 2)


def compile_step(tx: Any, mesh: Mesh, dtype: Any) -> jax.stages.Compiled:
    """One training step of every worker, gradient included, for the mesh's chips."""
    layer = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    params = {f"layer {i}": layer for i in range(LAYERS)}
    batch = jax.ShapeDtypeStruct((mesh.size, EXAMPLES, WIDTH), dtype)
    # Optax adds wide updates to half precision by promotion.
    with jax.numpy_dtype_promotion("standard"):
        return compiled_step(tx, params, jax.grad(loss), batch, mesh)


def between_slices(row: oxs.audit.Collective, chips: int) -> bool:
    """Whether a collective leaves a slice, as far as the program says."""
    most = max((len(group) for group in row.groups), default=0)
    return row.kind == "send" or (row.kind != "collective-permute" and most > chips)


def read(compiled: jax.stages.Compiled, machine: str) -> dict[str, Any]:
    """What a program sends over which links, and what it holds."""
    chips = int(np.prod([int(n) for n in MACHINES[machine][0][4:].split("x")]))
    rows, memory = oxs.audit.collectives(compiled), by_hand.memory(compiled)
    between = sum(row.bytes for row in rows if between_slices(row, chips))
    return {
        "collectives": ", ".join(sorted({row.kind for row in rows})),
        "inside": sum(row.bytes for row in rows) - between,
        "between": between,
        "conditional": sum(row.bytes for row in rows if row.conditional),
        "hidden": sum(row.bytes for row in rows if row.overlapped),
        "memory": memory.arguments + memory.temporary,
    }


def study(page: Any, settings: Any) -> None:
    """A table of each machine and dtype."""
    every, programs = cases(), list(itertools.product(*settings.values()))
    failed: list[str] = []
    for machine, dtype in programs:
        mesh = mesh_of(machine)

        def found(case: str, mesh=mesh, dtype=dtype, machine=machine):
            step = compile_step(every[case](mesh.size), mesh, jnp.dtype(dtype))
            return read(step, machine)

        what = f"{machine}, {dtype}"
        rows = each(what, found, every)
        shown = ([case, *of.values()] for case, of in rows.items())
        page.table("programs", shown, machine=machine, dtype=dtype)
        moved = rows["local_sgd"]["inside"] + rows["local_sgd"]["between"]
        if moved < LAYERS * WIDTH * WIDTH * jnp.dtype(dtype).itemsize:
            failed.append(f"{what}: {moved:,} bytes")
    page.nowhere("whole", failed, f"{len(programs)} programs")


if __name__ == "__main__":
    values = {"layers": LAYERS, "width": WIDTH, "period": PERIOD}
    reproduce("compile_for_tpu", __doc__, study, FULL, SHORT, **values)
