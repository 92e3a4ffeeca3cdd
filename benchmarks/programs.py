"""What a compiled program sends, holds and writes, for the benchmarks."""

import math

import jax

import optx_sync as oxs
from optx_sync import hlo

KINDS = ("fusion", "copy")


def contents(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that one device hands to collectives, and bytes that it holds.

    "every step" is sent whatever happens, "round" in a branch of a conditional.
    """
    rows = oxs.audit.collectives(compiled)
    memory = hlo.memory(compiled)
    return {
        "every step": sum(row.bytes for row in rows if not row.conditional),
        "round": sum(row.bytes for row in rows if row.conditional),
        "arguments": memory.arguments,
        "aliased": memory.aliased,
        "temporary": memory.temporary,
    }


def written(program: hlo.Program, floats: int) -> dict[str, int]:
    """How many arrays of so many elements or more its fusions and copies write.

    A "quiet" step takes the first branch of every conditional (where it does not
    apply), a "round" the second.
    """
    return {
        f"{when} {kind}": sum(
            math.prod(array.shape) >= floats
            for instruction in hlo.written(program, branch)
            if instruction.opcode == kind
            for array in instruction.arrays
        )
        for branch, when in enumerate(("quiet", "round"))
        for kind in KINDS
    }
