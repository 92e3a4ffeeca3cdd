"""What wrappers, rules and exchanges become on TPUs and GPUs, read from their programs.

    make tpu    # ten minutes on two cores or more, with libtpu's compiler
    make gpu    # the same with that of NVIDIA's GPUs
    python benchmarks/compile_ahead.py --quick   # one machine and bfloat16 alone

Neither compiler needs a device. A step of a small model is compiled ahead of time, by
the one that is installed, for one TPU slice or GPU host of 8, for two of them, and for
many; for GPUs, so is a step of a model of real size. The scheduled program is read.
A schedule is an order of instructions, no time.
"""

import functools
import importlib.util
import itertools
import os
import time

# What libtpu asks the host about chips, answered: there are none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import AXIS
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report import each, reproduce
from training import compiled_step

import optx_sync as oxs
from optx_sync.audit import hlo
from optx_sync.core import forms

PERIOD = 4
LAYERS, WIDTH, EXAMPLES = 4, 512, 256
# What a loop on the host says of a step, for a program of its own.
MEETS = {
    "diloco, a program that meets": ("diloco", True),
    "diloco, one that does not": ("diloco", False),
    "diloco, 8 bits, a program that meets": ("diloco, 8 bits", True),
    "diloco, 4 bits with feedback, a program that meets": (
        "diloco, 4 bits with feedback",
        True,
    ),
}
# The program of one kind of step, by `Workers.step`: the first part lands.
LANDS = "diloco in 4 parts, where one lands"
# The programs of `Workers.step` of two pods, by their exchange, and their model.
KINDS: dict[str, Any] = {
    "means": None,
    "radial": oxs.exchange.radial(),
    "4 bits with feedback": oxs.exchange.error_feedback(oxs.exchange.quantized(4)),
}
KINDS_SIZE = {"layers": 8, "width": 2048, "examples": 256}
KINDS_PERIOD = 48
# Two pods whose workers are sharded, or share a step's work:
# the inner axis, what is made of it, and what a loop on the host says of the step.
POD_AXIS, POD_PERIOD = "chips", 100
# Of the model of real size: above what XLA joins into one all-reduce by itself.
LARGE = {"layers": 12, "width": 4096, "examples": 4096}
LARGE_CASES = (
    "cross_shard",
    "cross_shard, state in pieces",
    "local_sgd",
    "diloco",
    "diloco, outer state in pieces",
    LANDS,
    "diloco, 8 bits",
    "diloco, 4 bits with feedback",
    "diloco, top-k",
    *MEETS,
)
# The public figures of an H200, as XLA writes down what it compiles for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 141000000000
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


class Machine(NamedTuple):
    """Devices that a program is compiled for.

    Attributes:
        topology: As the compiler names it.
        slices: How many TPU slices; the topology of GPUs says so itself.
        near: How many devices, one behind the other, share fast links.
    """

    topology: str
    slices: int
    near: int


class Platform(NamedTuple):
    """A compiler, and what its page shows."""

    page: str
    machines: dict[str, Machine]
    short: str  # the machine of a short run, and of the tests
    pods: Machine  # two slices or hosts of four

    def mesh_of(self, machine: str | Machine) -> Mesh:
        """All devices of a machine along the worker axis, near ones together."""
        if isinstance(machine, str):
            machine = self.machines[machine]
        topology, slices, _ = machine
        if self is TPU:
            found = topologies.get_topology_desc(topology, "tpu", num_slices=slices)
        else:
            more = {"target_config": H200, "topology": topology}
            found = topologies.get_topology_desc("h200", "cuda", **more)
        return Mesh(np.array(found.devices), (AXIS,), axis_types=(AxisType.Auto,))


TPU = Platform(
    "compile_for_tpu",
    {
        "one slice of 8": Machine("v5e:2x4", 1, 8),
        "two slices of 8": Machine("v5e:2x4", 2, 8),
        "256 chips": Machine("v5e:16x16", 1, 256),
    },
    "two slices of 8",
    Machine("v5e:2x2", 2, 4),
)
# Slices x hosts x GPUs of a host; what one switch joins is a slice.
GPU = Platform(
    "compile_for_gpu",
    {
        "one host of 8": Machine("1x1x8", 1, 8),
        "two hosts of 8": Machine("2x1x8", 2, 8),
        "64 GPUs": Machine("8x1x8", 8, 8),
    },
    "two hosts of 8",
    Machine("2x1x4", 1, 4),
)
# Each has an environment of its own: JAX looks for chips wherever it finds libtpu.
PLATFORM = TPU if importlib.util.find_spec("libtpu") else GPU
FULL = {"machines": tuple(PLATFORM.machines), "dtypes": ("float32", "bfloat16")}
SHORT = {"machines": (PLATFORM.short,), "dtypes": ("bfloat16",)}


def cases() -> dict[str, Callable[[int], Any]]:
    """What is compiled, for a number of workers."""
    exchange, inner = oxs.exchange, optax.adamw(1e-3)

    def meeting(wrap: Callable, inner: Any = inner, **more: Any) -> Callable:
        return lambda n: wrap(inner, AXIS, communication_period=PERIOD, **more)

    def reducing(**more: Any) -> Callable:
        return lambda n: oxs.cross_shard(inner, AXIS, **more)

    streaming = {"fragments": PERIOD, "overlap": True}
    every: dict[str, Callable[[int], Any]] = {
        "cross_shard": reducing(),
        "sync_replicas": lambda n: oxs.sync_replicas(inner, AXIS, n),
        "sync_replicas, accumulating": lambda n: oxs.sync_replicas(inner, AXIS, 2 * n),
        "local_sgd": meeting(oxs.local_sgd),
        "diloco": meeting(oxs.diloco),
        LANDS: meeting(oxs.diloco, **streaming),
        "agn": meeting(oxs.agn, optax.sgd(0.1)),
        "elastic_average": meeting(oxs.elastic_average, rho=0.0),
        "cross_shard, state in pieces": reducing(shard_state=True),
        "diloco, outer state in pieces": meeting(oxs.diloco, shard_state=True),
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
    return every | {name: every[of] for name, (of, _) in MEETS.items()}


def in_pods() -> dict[str, tuple[Any, bool, dict[str, Any]]]:
    """(optimizer, whether every chip of a pod is a replica, what a step is told)."""
    exchange, adamw = oxs.exchange, optax.adamw(1e-3)
    coded = {"exchange": exchange.error_feedback(exchange.quantized(bits=4))}
    muon = optax.contrib.muon(0.02)
    owned = oxs.cross_shard(muon, POD_AXIS, shard_state="leaves")
    equal = oxs.cross_shard(muon, POD_AXIS)

    def diloco(inner: Any, **more: Any) -> Any:
        return oxs.diloco(inner, AXIS, communication_period=POD_PERIOD, **more)

    meets, quiet = {"meet": True}, {"meet": False}
    return {
        "sharded pods, adamw alone": (adamw, False, {}),
        "sharded pods, diloco, quiet": (diloco(adamw), False, quiet),
        "sharded pods, diloco, meets": (diloco(adamw), False, meets),
        "sharded pods, 4 bits with feedback, meets": (
            diloco(adamw, **coded),
            False,
            meets,
        ),
        "pods of replicas, muon on each, quiet": (diloco(equal), True, quiet),
        "pods of replicas, muon on owners, quiet": (diloco(owned), True, quiet),
        "pods of replicas, muon on owners, meets": (diloco(owned), True, meets),
    }


def compile_in_pods(case: str, mesh: Mesh, dtype: Any) -> jax.stages.Compiled:
    """The step of a case of `in_pods`, for two pods of half of the mesh each."""
    tx, replicas, told = in_pods()[case]
    devices = mesh.devices.reshape(2, -1)
    mesh = Mesh(devices, (AXIS, POD_AXIS), axis_types=(AxisType.Auto,) * 2)
    if replicas:
        workers = oxs.Workers(devices.shape, (AXIS, POD_AXIS), mesh=mesh)
    else:
        specs = dict.fromkeys(params_of(2 * LAYERS, WIDTH, dtype), P(POD_AXIS))
        workers = oxs.Workers(2, AXIS, mesh=mesh, specs=specs)
    with jax.numpy_dtype_promotion("standard"):
        step, given = step_of(tx, workers, dtype, layers=2 * LAYERS, **told)
        return step.lower(*given).compile()


def params_of(layers: int, width: int, dtype: Any) -> dict[str, Any]:
    """The shapes of a chain of matrices."""
    layer = jax.ShapeDtypeStruct((width, width), dtype)
    return {f"layer {i}": layer for i in range(layers)}


def step_of(
    tx: Any,
    workers: oxs.Workers,
    dtype: Any,
    layers: int = LAYERS,
    width: int = WIDTH,
    examples: int = EXAMPLES,
    **told: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """A `Workers.step`, and the shapes and places of all that it is called with."""

    @functools.partial(workers.step, state=2)
    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        return oxs.apply_gradients(tx, grads, state, params, **told)

    mesh: Any = workers.mesh
    split = NamedSharding(mesh, P(mesh.axis_names))
    batch = jax.ShapeDtypeStruct((mesh.size * examples, width), dtype, sharding=split)
    params = params_of(layers, width, dtype)
    # What `workers.start` makes of shapes.
    form, arrays = forms.split((params, jax.eval_shape(tx.init, params)))
    state = form.merge(workers._layout.shapes(form, arrays))
    return step, (*state, batch)


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Of a chain of matrix products."""
    for layer in params.values():
        batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch.astype(jnp.float32) ** 2)


def compile_case(case: str, mesh: Mesh, dtype: Any, **size: int) -> jax.stages.Compiled:
    """The step of a case."""
    if case == LANDS:
        return compile_landing(cases()[case](mesh.size), mesh, dtype, **size)
    more = {"meet": MEETS[case][1]} if case in MEETS else {}
    apply = functools.partial(oxs.apply_gradients, **more)
    return compile_step(cases()[case](mesh.size), mesh, dtype, apply, **size)


def compile_landing(tx: Any, mesh: Mesh, dtype: Any, **size: int) -> Any:
    """The program of `Workers.step` for the steps in which the first part lands."""
    workers = oxs.Workers(mesh.size, AXIS, mesh=mesh)
    return lower_kinds(tx, workers, dtype, **size)[(0,)].compile()


def lower_kinds(
    tx: Any, workers: oxs.Workers, dtype: Any, **size: int
) -> dict[Any, jax.stages.Lowered]:
    """The programs of `Workers.step` by the part that lands, and as one, `"one"`."""
    with jax.numpy_dtype_promotion("standard"):
        step, given = step_of(tx, workers, dtype, **size)
        return {**step.lower_kinds(*given), "one": step.lower(*given)}


def kinds_in_pods(case: str, parts: int) -> dict[Any, jax.stages.Lowered]:
    """The programs of two pods of four, whose devices share a worker's batch."""
    devices = PLATFORM.mesh_of(PLATFORM.pods).devices.reshape(2, -1)
    mesh = Mesh(devices, (AXIS, POD_AXIS), axis_types=(AxisType.Auto,) * 2)
    layers, width = KINDS_SIZE["layers"], KINDS_SIZE["width"]
    specs = dict.fromkeys(params_of(layers, width, jnp.bfloat16), P())
    workers = oxs.Workers(2, AXIS, mesh=mesh, specs=specs)
    more = {"fragments": parts, "overlap": True, "exchange": KINDS[case]}
    tx = oxs.diloco(optax.adamw(1e-3), AXIS, communication_period=KINDS_PERIOD, **more)
    return lower_kinds(tx, workers, jnp.bfloat16, **KINDS_SIZE)


def study_kinds(page: Any, parts: tuple[int, ...] = (1, 4)) -> None:
    """A table of the programs between which `Workers.step` chooses."""
    near = PLATFORM.pods.near

    def found(case: tuple[str, int]) -> list[list[Any]]:
        rows, seconds = [], {}
        for kind, lowered in kinds_in_pods(*case).items():
            begin = time.perf_counter()
            step = lowered.compile()
            seconds[kind] = time.perf_counter() - begin
            far = [row for row in oxs.audit.collectives(step) if leaves(row, near)]
            behind = [row.behind for row in far if row.overlapped and row.behind]
            conditionals = (step.as_text() or "").count(" conditional(")
            held = by_hand.memory(step).temporary
            shown = f"{min(behind)} to {max(behind)}" if behind else "-"
            row = [len(far), len(behind), shown, conditionals, held]
            if kind in ("one", (-1,), (0,)):
                name = {"one": "one program", (-1,): "quiet", (0,): "lands"}[kind]
                rows.append([*case, name, *row, f"{seconds[kind]:.1f}"])
        several = sum(value for kind, value in seconds.items() if kind != "one")
        rows.append([*case, "all kinds", "", "", "", "", "", f"{several:.1f}"])
        return rows

    programs = list(itertools.product(KINDS, parts))
    rows = each("kinds of step", found, programs)
    several = 2 * KINDS_SIZE["layers"] * KINDS_SIZE["width"] ** 2
    page.table("kinds", itertools.chain(*rows.values()), parameters=several)


def compile_step(
    tx: Any,
    mesh: Mesh,
    dtype: Any,
    apply: Callable = oxs.apply_gradients,
    layers: int = LAYERS,
    width: int = WIDTH,
    examples: int = EXAMPLES,
) -> jax.stages.Compiled:
    """One training step of every worker, gradient included, for the mesh's devices."""
    params = params_of(layers, width, dtype)
    batch = jax.ShapeDtypeStruct((mesh.size, examples, width), dtype)
    # Optax adds wide updates to half precision by promotion.
    with jax.numpy_dtype_promotion("standard"):
        return compiled_step(tx, params, jax.grad(loss), batch, mesh, apply)


def leaves(row: oxs.audit.Collective, near: int) -> bool:
    """Whether a collective leaves a slice or host, as far as the program says."""
    if row.kind == "send":
        return True
    far = any(len({device // near for device in group}) > 1 for group in row.groups)
    # Between TPU slices what is permuted is sent.
    return far and (PLATFORM is GPU or row.kind != "collective-permute")


def kernels(program: hlo.Program) -> dict[str, int]:
    """How many kernels a program has that only move or order many numbers, by kind.

    A fusion is of a kind if what is computed last in it is. Copies of counters and the
    like, of less than 64 KiB, cost nothing.
    """
    found: dict[str, int] = dict.fromkeys(("sort", "transpose", "copy"), 0)
    for name in hlo.reached(program, fused=False):
        for one in program.computations[name]:
            inner = [program.computations[of][-1] for of in hlo.called(one, program)]
            last = inner[0].opcode if one.opcode == "fusion" else one.opcode
            if last in found and sum(x.bytes for x in one.arrays) >= 2**16:
                found[last] += 1
    return found


def read(compiled: jax.stages.Compiled, near: int) -> dict[str, Any]:
    """What a program sends over which links, and what it holds."""
    rows, memory = oxs.audit.collectives(compiled), by_hand.memory(compiled)
    sent = sum(row.bytes for row in rows)
    between = sum(row.bytes for row in rows if leaves(row, near))
    behind = [str(row.behind) for row in rows if row.behind is not None]
    found = {
        "collectives": kinds(rows),
        "sent": sent,
        "inside": sent - between,
        "between": between,
        "conditional": sum(row.bytes for row in rows if row.conditional),
        "hidden": sum(row.bytes for row in rows if row.overlapped),
        "behind": ", ".join(behind),
        "arguments": memory.arguments,
        "temporary": memory.temporary,
        "memory": memory.arguments + memory.temporary,
    }
    if PLATFORM is GPU:
        moves = kernels(hlo.program(compiled)).values()
        return found | {"moves": " / ".join(map(str, moves))}
    cost: Any = compiled.cost_analysis()
    return found | {"flops": int(cost["flops"])}


def kinds(rows: list[oxs.audit.Collective]) -> str:
    """The kinds of collectives, and how many there are of each."""
    every = [row.kind for row in rows]
    return ", ".join(f"{every.count(kind)} {kind}" for kind in sorted(set(every)))


def study(page: Any, settings: Any) -> None:
    """A table of each machine and dtype."""
    shown = "collectives inside between conditional hidden memory"
    for machine, dtype in itertools.product(*settings.values()):
        make = functools.partial(compile_case, dtype=jnp.dtype(dtype))
        more = " behind moves" * (PLATFORM is GPU)
        show(page, "programs", machine, cases(), make, shown + more, dtype=dtype)
    if page.quick:
        return
    # Of pods, whose chips share a worker or an optimizer's work, XLA tells GPUs less.
    shown = "collectives inside between memory" + " flops" * (PLATFORM is TPU)
    make = functools.partial(compile_in_pods, dtype=jnp.bfloat16)
    show(page, "pods", PLATFORM.short, in_pods(), make, shown)
    study_kinds(page)
    if PLATFORM is GPU:
        shown = "collectives sent hidden behind arguments temporary"
        make = functools.partial(compile_case, dtype=jnp.bfloat16, **LARGE)
        given = page, "large", "one host of 8", LARGE_CASES, make, shown
        show(*given, parameters=2 * LARGE["layers"] * LARGE["width"] ** 2)


def show(
    page: Any,
    table: str,
    machine: str,
    cases: Iterable[str],
    make: Callable,
    shown: str,
    dtype: str = "bfloat16",
    **values: Any,
) -> None:
    """A table of what is read of the programs `make(case, mesh)` of a machine."""
    mesh, near = PLATFORM.mesh_of(machine), PLATFORM.machines[machine].near

    def found(case: str) -> list[Any]:
        row = read(make(case, mesh), near)
        return [case, *(row[name] for name in shown.split())]

    rows = each(f"{machine}, {table}, {dtype}", found, cases).values()
    page.table(table, rows, machine=machine, dtype=dtype, **values)


if __name__ == "__main__":
    values = {"layers": LAYERS, "width": WIDTH, "period": PERIOD}
    values |= {f"large_{name}": value for name, value in LARGE.items()}
    reproduce(PLATFORM.page, __doc__, study, FULL, SHORT, **values)
