"""What a compiled program sends, holds and writes, for the benchmarks."""

import re
from math import prod
from typing import Any

import jax

import optx_sync as oxs

KINDS = ("fusion", "copy")


def contents(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that one device hands to collectives, and bytes that it holds.

    "every step" is sent whatever happens, "round" in a branch of a conditional.
    """
    rows = oxs.audit.collectives(compiled)
    memory: Any = compiled.memory_analysis()
    return {
        "every step": sum(row.bytes for row in rows if not row.conditional),
        "round": sum(row.bytes for row in rows if row.conditional),
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def written(compiled: jax.stages.Compiled, floats: int) -> dict[str, int]:
    """How many arrays of so many elements or more its fusions and copies write.

    What stands outside of branches, or in the first branch of a conditional (where it
    does not apply), is written in a "quiet" step; what stands outside or in the second
    one, in a "round".
    """
    text = compiled.as_text() or ""
    branches = re.findall(r"branch_computations=\{%?([\w.-]+), %?([\w.-]+)\}", text)
    quiet, rounds = ({pair[i] for pair in branches} for i in (0, 1))
    found = {f"{when} {kind}": 0 for when in ("quiet", "round") for kind in KINDS}
    within: tuple[str, ...] = ()
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            always = bool(header[1])
            within = ("quiet",) * (always or header[2] in quiet)
            within += ("round",) * (always or header[2] in rounds)
        made = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if made and made[2] in KINDS:
            shapes = re.findall(r"\[([\d,]+)\]", made[1])
            sizes = [prod(map(int, shape.split(","))) for shape in shapes]
            for when in within:
                found[f"{when} {made[2]}"] += sum(size >= floats for size in sizes)
    return found
