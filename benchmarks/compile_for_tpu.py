"""What every wrapper, center rule and exchange becomes on TPUs, read from its program.

    make tpu                                       # ten minutes on two cores
    python benchmarks/compile_for_tpu.py --quick   # two slices and bfloat16 alone

libtpu's compiler needs no chip: a step of a small model is compiled ahead of time for
one slice of 8 chips, for two of them, and for a slice of 256, and the scheduled program
is read. A schedule is an order of instructions, no time.
"""

import functools
import os

# What libtpu asks the host about chips, answered: there are none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report import Report, each

import optx_sync as oxs
from optx_sync import hlo

AXIS, PERIOD = "workers", 4
LAYERS, WIDTH, EXAMPLES = 4, 512, 256
# Of libtpu's topologies, how many slices of which.
MACHINES = {
    "one slice of 8": ("v5e:2x4", 1),
    "two slices of 8": ("v5e:2x4", 2),
    "256 chips": ("v5e:16x16", 1),
}
Tree = Any
Make = Callable[[int], optax.GradientTransformation]


def cases() -> dict[str, Make]:
    """What is compiled, for a number of workers."""
    inner, rule, exchange = optax.adamw(1e-3), oxs.local_sgd, oxs.exchange
    period: dict[str, Any] = {"communication_period": PERIOD}
    parts = {"fragments": PERIOD, "delay": 1, "keep_local": 0.5}
    every: dict[str, Make] = {
        "cross_shard": lambda n: oxs.cross_shard(inner, AXIS),
        "sync_replicas": lambda n: oxs.sync_replicas(inner, AXIS, n),
        "sync_replicas, accumulating": lambda n: oxs.sync_replicas(inner, AXIS, 2 * n),
        "local_sgd": lambda n: rule(inner, AXIS, **period),
        "diloco": lambda n: oxs.diloco(inner, AXIS, **period),
        "diloco in 4 parts, a step later": lambda n: oxs.diloco(
            inner, AXIS, **period, **parts
        ),
        "agn": lambda n: oxs.agn(optax.sgd(0.1), AXIS, **period),
        "elastic_average": lambda n: oxs.elastic_average(
            inner, AXIS, rho=0.0, **period
        ),
        "cross_shard, state in pieces": lambda n: oxs.cross_shard(
            inner, AXIS, shard_state=True
        ),
        "diloco, center in pieces": lambda n: oxs.diloco(
            inner, AXIS, shard_center=True, **period
        ),
        "gossip on a ring": lambda n: oxs.gossip(inner, AXIS, **period),
        "noloco": lambda n: oxs.noloco(inner, AXIS, **period),
    }
    exchanges = {
        "bfloat16 sums": exchange.all_reduce(jnp.bfloat16),
        "8 bits": exchange.quantized(bits=8),
        "4 bits with feedback": exchange.error_feedback(exchange.quantized(bits=4)),
        "top-k": exchange.top_k(),
        "PowerSGD": exchange.power_sgd(rank=2),
        "median": exchange.median(),
    }

    def diloco(n: int, exchange: Any) -> optax.GradientTransformation:
        return oxs.diloco(inner, AXIS, exchange=exchange, **period)

    for name, one in exchanges.items():
        every[f"diloco, {name}"] = functools.partial(diloco, exchange=one)
    return every


def mesh_of(machine: str) -> Mesh:
    """All chips of a machine along the worker axis, slice by slice."""
    shape, slices = MACHINES[machine]
    chips = topologies.get_topology_desc(shape, "tpu", num_slices=slices).devices
    return Mesh(np.array(chips), (AXIS,), axis_types=(AxisType.Auto,))


def loss(params: Tree, batch: jax.Array) -> jax.Array:
    """Of a chain of matrix products."""
    for layer in params.values():
        batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch.astype(jnp.float32) ** 2)


def compile_step(
    tx: optax.GradientTransformation, mesh: Mesh, dtype: Any
) -> jax.stages.Compiled:
    """One training step of every worker, gradient included, for the mesh's chips."""
    params = {
        f"layer {i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype) for i in range(LAYERS)
    }
    axes = oxs.state_axes(tx, params)
    shardings = oxs.state_shardings(tx, params, mesh=mesh, axis_name=AXIS)

    def start(params):
        one = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        state = oxs.stack(tx.init(one), mesh.size, axes)
        return oxs.stack(one, mesh.size), state

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        # Optax adds wide updates to half precision by promotion.
        with jax.numpy_dtype_promotion("standard"):
            return oxs.apply_gradients(tx, grads, state, params)

    def place(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    carry = jax.tree.map(place, jax.eval_shape(lambda: start(params)), shardings)
    batch = jax.ShapeDtypeStruct((mesh.size, EXAMPLES, WIDTH), dtype)
    batch = place(batch, NamedSharding(mesh, P(AXIS)))
    mapped = oxs.map_workers(
        step, AXIS, mesh=mesh, in_axes=(0, axes, 0), out_axes=(0, axes)
    )
    program = jax.jit(mapped, donate_argnums=(0, 1), out_shardings=shardings)
    return program.lower(*carry, batch).compile()


def link_of(row: oxs.audit.Collective, chips: int) -> str:
    """Over which links a collective goes, as far as the program says."""
    if row.kind == "send":
        return "between slices"
    sizes = {len(group) for group in row.groups}
    if row.kind == "collective-permute" or not sizes:
        return "inside a slice"
    return "inside a slice" if max(sizes) <= chips else "between slices"


def read(compiled: jax.stages.Compiled, machine: str) -> dict[str, Any]:
    """What a program sends over which links, and what it holds."""
    chips = int(np.prod([int(n) for n in MACHINES[machine][0][4:].split("x")]))
    rows = oxs.audit.collectives(compiled)
    links = {"inside a slice": 0, "between slices": 0}
    for row in rows:
        links[link_of(row, chips)] += row.bytes
    hidden = sum(row.bytes for row in rows if row.overlapped)
    memory = hlo.memory(compiled)
    return {
        "collectives": ", ".join(sorted({row.kind for row in rows})),
        "inside": links["inside a slice"],
        "between": links["between slices"],
        "conditional": sum(row.bytes for row in rows if row.conditional),
        "hidden": hidden,
        "memory": memory.arguments + memory.temporary,
    }


def study(page: Report, dtypes: Mapping[str, Any], machines: list[str]) -> None:
    """A table of each machine and dtype."""
    every, sizes = cases(), LAYERS * WIDTH * WIDTH
    failed: list[str] = []
    for machine in machines:
        mesh = mesh_of(machine)
        for name, dtype in dtypes.items():

            def found(case: str, mesh=mesh, dtype=dtype, machine=machine):
                compiled = compile_step(every[case](mesh.size), mesh, dtype)
                return read(compiled, machine)

            what = f"{machine}, {name}"
            rows = each(what, found, every)
            page.table(
                "programs",
                ([case, *of.values()] for case, of in rows.items()),
                machine=machine,
                dtype=name,
            )
            exact = rows["local_sgd"]
            moved = exact["inside"] + exact["between"]
            if not moved >= sizes * jnp.dtype(dtype).itemsize:
                failed.append(f"{what}: {moved:,} bytes")
    page.nowhere("whole", failed, f"{len(machines) * len(dtypes)} programs")


def main() -> None:
    """Compile and write the page."""
    options = report.arguments(__doc__).parse_args()
    page = Report("compile_for_tpu", options, layers=LAYERS, width=WIDTH, period=PERIOD)
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    if options.quick:
        study(page, {"bfloat16": jnp.bfloat16}, ["two slices of 8"])
    else:
        study(page, dtypes, list(MACHINES))
    page.save()


if __name__ == "__main__":
    main()
