"""What hides the exchange on TPUs, in the scheduled program of two slices.

`make tpu` installs the compiler, which needs no chip; elsewhere these are skipped.
"""

import importlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from optx_sync import audit, hlo

pytest.importorskip("libtpu", reason="make tpu installs libtpu's compiler")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STREAMING, WHOLE = "diloco in 4 parts, a step later", "diloco"


@pytest.fixture(scope="module")
def compiled():
    """The steps of a small model on two slices of 8 chips, by the name of the case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        tpu = importlib.import_module("compile_for_tpu")
        mesh = tpu.mesh_of("two slices of 8")
        cases = tpu.cases()
        yield {
            name: tpu.compile_step(cases[name](mesh.size), mesh, jnp.bfloat16)
            for name in (STREAMING, WHOLE)
        }


def places(compiled):
    """Where matrix products, and the given opcodes, stand in the scheduled program."""
    program = hlo.read(compiled.as_text())
    (entry,) = program.entries

    def multiplies(instruction):
        bodies = [
            program.computations[name] for name in hlo.called(instruction, program)
        ]
        return instruction.opcode in ("convolution", "dot") or any(
            multiplies(inner) for body in bodies for inner in body
        )

    body = program.computations[entry]
    products = [i for i, instruction in enumerate(body) if multiplies(instruction)]
    return [instruction.opcode for instruction in body], body, products


def test_a_part_that_lands_a_step_later_travels_while_the_step_computes(compiled):
    opcodes, body, products = places(compiled[STREAMING])
    assert len(products) >= 10  # 4 forwards, 3 backwards, 4 of the weights; some fused
    sent, received = opcodes.index("send"), opcodes.index("recv-done")
    assert sent < products[0]
    # The first hop, between the slices: most of the step stands in between.
    assert sum(sent < at < received for at in products) >= len(products) / 2
    # The second hop, inside of a slice, ends after the last product.
    ends = [i for i, one in enumerate(body) if "async-collective-done" in one.name]
    assert ends and max(ends) > products[-1]
    rows = audit.collectives(compiled[STREAMING])
    assert not any(row.conditional for row in rows)
    assert [row.overlapped for row in rows if row.kind == "send"] == [True]


def test_a_round_in_a_conditional_is_waited_for(compiled):
    opcodes, _, products = places(compiled[WHOLE])
    assert not {"send", "recv", "all-reduce", "reduce-scatter"} & set(opcodes)
    # All of it stands in a conditional behind the last product.
    last = max(i for i, opcode in enumerate(opcodes) if opcode == "conditional")
    assert last > products[-1]
    assert all(row.conditional for row in audit.collectives(compiled[WHOLE]))
