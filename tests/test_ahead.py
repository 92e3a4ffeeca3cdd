"""What hides the exchange on TPUs and GPUs, in programs compiled without either.

`make tpu` and `make gpu` install the compilers; elsewhere these are skipped.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from optx_sync import audit
from optx_sync.audit import hlo

TPU, GPU = map(importlib.util.find_spec, ("libtpu", "jax_cuda12_plugin"))
pytestmark = pytest.mark.skipif(
    not TPU and not GPU, reason="make tpu and make gpu install the compilers"
)
on_gpus = pytest.mark.skipif(bool(TPU) or not GPU, reason="make gpu tries it")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STREAMING, WHOLE, QUIET = (
    "diloco in 4 parts, where one lands",
    "diloco",
    "diloco, one that does not",
)
PARAMETERS = 4 * 512 * 512  # numbers of the model, which are of two bytes
ONE, TWO = "one host of 8", "two hosts of 8"


class Expected(NamedTuple):
    """Of a program for GPUs: the collectives, their bytes, and what hides them."""

    machine: str
    case: str
    kinds: tuple[str, ...]
    bytes: int
    behind: int | None = None  # kernels behind each collective, at least
    temporary: int | None = None  # bytes, at most; then the model is of real size


# A mean travels in float32, a code with a float32 scale for every 256 numbers: once
# whole to the owners of the pieces, once a piece of each owner.
EXPECTED = [
    *(
        Expected(machine, STREAMING, ("all-reduce",), PARAMETERS + 4, 10)
        for machine in (ONE, TWO)
    ),
    Expected(ONE, WHOLE, ("all-reduce",), 4 * PARAMETERS),
    Expected(TWO, "cross_shard", ("all-reduce",), 4 * PARAMETERS, 1),
    Expected(
        TWO,
        "diloco, 8 bits",
        ("all-gather", "all-to-all"),
        (PARAMETERS + PARAMETERS // 256 * 4) * 17 // 16,
    ),
    Expected(
        TWO,
        "diloco, 4 bits with feedback",
        ("all-gather", "all-to-all"),
        (PARAMETERS // 2 + PARAMETERS // 256 * 4) * 17 // 16,
    ),
    *(Expected(machine, QUIET, (), 0) for machine in (ONE, TWO)),
]


# Twelve matrices, above what XLA joins by itself: what is joined is joined in buckets,
# and each travels behind something. In one buffer the first held 1.21 GB.
LARGE = 12 * 4096 * 4096
PIECES = ("all-gather",) * 12 + ("reduce-scatter",) * 4
EXPECTED += [
    Expected(
        ONE,
        "cross_shard, state in pieces",
        PIECES,
        4 * LARGE + 2 * LARGE // 8,
        1,
        850_000_000,
    ),
    Expected(
        ONE,
        "diloco, 8 bits, a program that meets",
        ("all-gather",) * 12 + ("all-to-all",) * 12,
        (LARGE + LARGE // 256 * 4) * 9 // 8,
        1,
        900_000_000,
    ),
]


@pytest.fixture(scope="module")
def compiled():
    """`(machine, case) -> program` of a small model; machines differ by platform."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        ahead = importlib.import_module("compile_ahead")

        def compile_case(machine, case, large=False, **size):
            key = machine, case, large, *size.values()
            if key not in found:
                mesh = ahead.PLATFORM.mesh_of(machine)
                size = ahead.LARGE if large else size
                found[key] = ahead.compile_case(case, mesh, jnp.bfloat16, **size)
            return found[key]

        yield compile_case


@pytest.fixture(scope="module")
def in_pods():
    """`case -> (program, what is read of it)`, of two pods of half the chips each."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        ahead = importlib.import_module("compile_ahead")
        machine = ahead.PLATFORM.short
        near = ahead.PLATFORM.machines[machine].near

        def compile_case(case):
            if case not in found:
                mesh = ahead.PLATFORM.mesh_of(machine)
                step = ahead.compile_in_pods(case, mesh, jnp.bfloat16)
                found[case] = step, ahead.read(step, near)
            return found[case]

        yield compile_case


def test_sharded_pods_send_the_codes_of_shards_and_nothing_more_inside(in_pods):
    _, quiet = in_pods("sharded pods, diloco, quiet")
    _, coded = in_pods("sharded pods, 4 bits with feedback, meets")
    shard = 8 * 512 * 512 // 8
    message = shard // 2 + shard // 256 * 4
    # Whole to the owners of its two halves, and half of it to the other pod.
    assert 1.0 <= coded["between"] / (message * 3 / 2) < 1.02
    assert quiet["between"] == 0 and coded["inside"] == quiet["inside"]


@pytest.mark.skipif(not TPU, reason="XLA counts no operations of GPUs' programs")
def test_owners_share_muons_products(in_pods):
    """Chips of a pod: eight; the gradient's own products stay."""
    (alone, _), (owned, rows) = map(
        in_pods,
        (
            "pods of replicas, muon on each, quiet",
            "pods of replicas, muon on owners, quiet",
        ),
    )
    assert owned.cost_analysis()["flops"] < alone.cost_analysis()["flops"] / 4
    assert rows["between"] == 0
    assert not any(one.conditional for one in audit.collectives(owned))


def places(compiled):
    """Where matrix products, and the given opcodes, stand in the scheduled program."""
    program = hlo.read(compiled.as_text())
    (entry,) = program.entries

    def multiplies(instruction):
        bodies = [
            program.computations[name] for name in hlo.called(instruction, program)
        ]
        product = instruction.opcode in ("convolution", "dot")
        # What a GPU's library computes is called by the library's name.
        product |= "gemm" in instruction.quoted.get("custom_call_target", "")
        return product or any(multiplies(inner) for body in bodies for inner in body)

    body = program.computations[entry]
    products = [i for i, instruction in enumerate(body) if multiplies(instruction)]
    return [instruction.opcode for instruction in body], body, products


@pytest.mark.skipif(not TPU, reason="make tpu tries it")
def test_codes_with_feedback_need_little_memory(compiled):
    """2 1/2 times the parameters at most: bucket by bucket, each array once."""
    size = {"layers": 8, "width": 2048, "examples": 1024}
    step = compiled("two slices of 8", "diloco, 4 bits with feedback", **size)
    held = step.memory_analysis().temp_size_in_bytes
    assert held <= 2.5 * 4 * 8 * 2048 * 2048


@pytest.mark.skipif(not TPU, reason="make tpu tries it")
def test_a_part_travels_while_the_step_computes_in_which_it_lands(compiled):
    step = compiled("two slices of 8", STREAMING)
    opcodes, _, products = places(step)
    assert len(products) >= 10  # 4 forwards, 3 backwards, 4 of the weights; some fused
    sent, received = opcodes.index("send"), opcodes.index("recv-done")
    assert sent < products[0]
    # The first hop, between the slices: all of the step stands in between.
    assert received > products[-1]
    # The second hop, inside of a slice, comes after it.
    assert opcodes.index("all-gather") > received
    rows = audit.collectives(step)
    assert not any(row.conditional for row in rows)
    sends = [row.overlapped for row in rows if row.kind == "send"]
    assert sends == [True, True]  # that of the worker's weight is the second


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param("two slices of 8", marks=pytest.mark.skipif(not TPU, reason="")),
        pytest.param(ONE, marks=on_gpus),
        pytest.param(TWO, marks=on_gpus),
    ],
)
def test_a_round_in_a_conditional_is_waited_for(machine, compiled):
    step = compiled(machine, WHOLE)
    opcodes, _, products = places(step)
    sends = {"send", "recv", "all-reduce", "all-reduce-start", "reduce-scatter"}
    assert not sends & set(opcodes)
    # All of it stands in a conditional behind the last product.
    last = max(i for i, opcode in enumerate(opcodes) if opcode == "conditional")
    assert last > products[-1]
    assert all(row.conditional for row in audit.collectives(step))


@on_gpus
@pytest.mark.parametrize("expected", EXPECTED, ids=lambda one: f"{one[1]}, {one[0]}")
def test_what_a_step_on_gpus_sends_and_what_hides_it(expected, compiled):
    large = expected.temporary is not None
    step = compiled(expected.machine, expected.case, large)
    rows = audit.collectives(step)
    assert tuple(sorted(row.kind for row in rows)) == expected.kinds
    assert sum(row.bytes for row in rows) <= expected.bytes
    if expected.behind is not None:
        assert all((row.behind or 0) >= expected.behind for row in rows)
        assert not any(row.conditional for row in rows)
    if expected.temporary is not None:
        assert step.memory_analysis().temp_size_in_bytes <= expected.temporary


@on_gpus
def test_matrix_products_stand_behind_a_part_that_lands(compiled):
    for machine in (ONE, TWO):
        opcodes, _, products = places(compiled(machine, STREAMING))
        start, end = (opcodes.index(f"all-reduce-{at}") for at in ("start", "done"))
        assert len(products) >= 10
        assert sum(start < at < end for at in products) >= 4, machine
