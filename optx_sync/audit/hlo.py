# SPDX-License-Identifier: Apache-2.0
"""Read the text of XLA programs: computations, instructions, groups of devices."""

import itertools
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

_NAME = r"%?([\w.\-]+)"
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"')
_HEADER = re.compile(rf"^(ENTRY\s+)?{_NAME}\s*(?:\(.*\)\s*->.*)?\{{$")
_INSTRUCTION = re.compile(rf"^(ROOT\s+)?{_NAME}\s+=\s+(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_ATTRIBUTE = re.compile(r"([\w\-]+)=(\{[^{}]*\}|%?[\w.\-]+)")
_IOTA = re.compile(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA_ARRAY = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_NESTED = re.compile(r"\{(?:\s*\{[\d,\s]*\}\s*,?)*\}")
# What `psum_start` of JAX 0.12 and its like write: a custom call of this target, whose
# groups are in a configuration. Compilers make instructions of it.
_STARTED = re.compile(r"(?:all|reduce|collective)-[a-z\-]+-(?:start|done)")
_CONFIGURED = re.compile(r"async_collective_config=\{.*?(\[\[[\d,\s\[\]]*\]\])")
# Instructions that run other computations; others call them for each element.
# A call, as JAX gives it to XLA, from whole arrays to a device's shards, one by one.
_SHARDS = "xla.sdy.GlobalToLocalShape"
_INDEX = re.compile(r"index=(\d+)")
# A number in a configuration, {"known_trip_count":{"n":"4"}}, of which each quote is
# the number of what was put aside.
_SAID = re.compile(r'"(\d+)":\{"\d+":"(\d+)"\}')
_FLOW = ("call", "while", "async-start")

Branches = int | Literal["every", "none"]
Way: TypeAlias = tuple[tuple[str, int], ...]  # (a conditional, which of its branches)


class Array(NamedTuple):
    """An array in the shape of an instruction's result.

    Attributes:
        dtype: The element type as XLA writes it: "f32", "bf16", "pred".
        shape: The extents of its dimensions.
        bytes: Its size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Instruction(NamedTuple):
    """One line of a computation, `NAME = SHAPE OPCODE(OPERANDS), ATTRIBUTES`.

    Attributes:
        name: Its name, without the leading "%".
        shape: The shape of its result as written, which may be a tuple.
        opcode: What it does: "add", "fusion", "all-reduce-start" and so on.
        operands: As written: "%x", or with its shape, "f32[3] %x".
        attributes: As written, without quoted text.
        quoted: The quoted text, by the name before it.
        is_root: Whether its result is that of the computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    quoted: dict[str, str]
    is_root: bool = False

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result, however its tuples are nested."""
        return arrays(self.shape)

    @property
    def given(self) -> list[str]:
        """The names of the operands."""
        return [x.rpartition(" ")[2].removeprefix("%") for x in self.operands]


class Program(NamedTuple):
    """A module as `read` found it: its computations in the order of the text.

    Attributes:
        computations: The instructions of each computation, by the computation's name.
        entries: The names of the computations with which a run begins.
        devices: Replicas times partitions; 0 if the text does not say.
    """

    computations: dict[str, list[Instruction]]
    entries: list[str]
    devices: int


def program(fn: Any, *args: Any, **kwargs: Any) -> Program:
    """Compile `fn` as `audit.collectives` does, and read the program's text.

    Example:
        >>> import jax.numpy as jnp
        >>> from optx_sync.audit import hlo
        >>> found = hlo.program(lambda x: 2 * x, jnp.ones(3))
        >>> [array.shape for array in found.computations[found.entries[0]][0].arrays]
        [(3,)]
    """
    return read(compiled(fn, *args, **kwargs).as_text())


def compiled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile `fn` for these arguments, as `audit.collectives` reads it."""
    if not hasattr(fn, "lower") and not hasattr(fn, "as_text"):
        fn = jax.jit(fn)
    if hasattr(fn, "lower"):
        fn = fn.lower(*args, **kwargs)
    elif args or kwargs:
        raise TypeError(
            f"got arguments for a {type(fn).__name__}, which is compiled already or "
            "lowered. Pass it alone, or the function with the arguments."
        )
    return fn.compile() if hasattr(fn, "compile") else fn


def read(text: str) -> Program:
    """Split a module's text into computations and their instructions.

    Args:
        text: One HLO module, compiled (`compiled.as_text()`, a dump) or as JAX gave it
            to XLA (`lowered.as_text("hlo")`, where half precision is not widened yet).
    """
    # Quotes (names of operations, configurations) and comments hold anything.
    quotes: list[str] = []

    def put_aside(quote: re.Match[str]) -> str:
        quotes.append(quote[1])
        return f'"{len(quotes) - 1}"'

    text = re.sub(r"/\*.*?\*/", "", _STRING.sub(put_aside, text))
    computations: dict[str, list[Instruction]] = {}
    entries: list[str] = []
    devices = 0
    body: list[Instruction] | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("HloModule"):
            counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", line)
            devices = prod(map(int, counts)) if counts else 0
        elif line.startswith("}"):
            body = None
        elif body is not None and (match := _INSTRUCTION.match(line)):
            one = _instruction(match[2], match[3], quotes)
            body.append(one._replace(is_root=bool(match[1])))
        elif body is None and (match := _HEADER.match(line)):
            body = computations.setdefault(match[2], [])
            if match[1]:
                entries.append(match[2])
    if not entries:
        raise ValueError("The text has no ENTRY; pass the whole of compiled.as_text().")
    return Program(computations, entries, devices)


def called(instruction: Instruction, program: Program) -> list[str]:
    """Name the computations that an instruction calls, by any attribute.

    A conditional's are in the order of its branches, false before true.
    """
    found = [
        (attribute, name)
        for attribute, value in _ATTRIBUTE.findall(instruction.attributes)
        # Names instructions, and instructions may be named like computations.
        if attribute != "control-predecessors"
        for name in re.findall(r"[\w.\-]+", value)
        if name in program.computations
    ]
    found.sort(key=lambda pair: pair[0] == "true_computation")
    return [name for _, name in found]


def inside(instruction: Instruction, program: Program) -> list[Instruction]:
    """The instructions of the computations that an instruction calls."""
    names = called(instruction, program)
    return [other for name in names for other in program.computations[name]]


def reached(
    program: Program, branches: Branches = "every", fused: bool = True
) -> set[str]:
    """Name the computations that a run of the program may reach.

    Args:
        program: What `read` returned.
        branches: Which branches of the conditionals it takes: "every", "none", or the
            one of this number (0 is the false one; conditionals with fewer take their
            last).
        fused: Also computations inside of fusions, reductions and the like, which
            write nothing to memory themselves.
    """
    return set(_ways(program, branches, fused))


def branches(program: Program) -> dict[str, Way]:
    """In which branches of conditionals the computations of a program stand.

    Returns:
        For each computation that a run may reach, (name of the conditional, number of
        its branch) from the outermost on; of one that is called in several places, the
        way with the fewest.
    """
    return _ways(program, "every", fused=True)


def _ways(program: Program, branches: Branches, fused: bool) -> dict[str, Way]:
    """The computations that a run may reach, as `reached` says, and the ways there."""
    ways: dict[str, Way] = dict.fromkeys(program.entries, ())
    waiting = list(program.entries)
    while waiting:
        name = waiting.pop(0)
        for instruction in program.computations[name]:
            found = called(instruction, program)
            conditional = instruction.opcode == "conditional"
            if conditional and branches == "none":
                found = []
            elif conditional and isinstance(branches, int):
                found = found[min(branches, len(found) - 1) :][:1]
            elif not (conditional or fused or instruction.opcode in _FLOW):
                found = []
            for number, other in enumerate(found):
                way = ways[name]
                if conditional:
                    way = (*way, (instruction.name, number))
                if other not in ways or len(way) < len(ways[other]):
                    ways[other] = way
                    waiting.append(other)
    return ways


def runs(program: Program) -> dict[str, int | None]:
    """How often one run of a program runs each computation that it may reach.

    What is in a branch counts from there: in how many rounds of a loop a branch is
    taken the text does not say. None: in a loop of which `trips` knows no number.
    """
    found: dict[str, int | None] = dict.fromkeys(program.entries, 1)
    waiting = list(program.entries)
    for name in waiting:
        for instruction in program.computations[name]:
            for other in called(instruction, program):
                if other not in found:
                    found[other] = often(found[name], instruction, name, program)
                    waiting.append(other)
    return found


def often(
    around: int | None, instruction: Instruction, name: str, program: Program
) -> int | None:
    """How often what an instruction calls runs, of a computation that runs `around`."""
    if instruction.opcode == "conditional":
        return 1
    if around is None or instruction.opcode != "while":
        return around
    rounds = trips(instruction, program.computations[name], program)
    return None if rounds is None else around * rounds


def trips(loop: Instruction, around: list[Instruction], program: Program) -> int | None:
    """How often a "while" runs its body; None where the text does not say.

    Compilers write the number down. As JAX gives it to XLA, a scan counts one by one
    from 0 until it is no longer less than a constant.

    Args:
        loop: The instruction.
        around: The computation in which it stands.
        program: What `read` returned.
    """
    if said := loop.quoted.get("known_trip_count"):
        return int(said)
    names = dict(_ATTRIBUTE.findall(loop.attributes))
    condition, body = (
        program.computations.get(names.get(key, "").removeprefix("%"), [])
        for key in ("condition", "body")
    )
    ends, goes = _root(condition, "compare"), _root(body, "tuple")
    begins = [x for x in around if [x.name] == loop.given and x.opcode == "tuple"]
    if not (ends and goes and begins and "direction=LT" in ends.attributes):
        return None
    place = _place(ends.given[0], condition)
    if place is None:
        return None
    (step,) = (x for x in body if x.name == goes.given[place])
    counts = step.opcode == "add" and _place(step.given[0], body) == place
    by_one = counts and _constant(step.given[1], body) == 1
    from_0 = _constant(begins[0].given[place], around) == 0
    return _constant(ends.given[1], condition) if by_one and from_0 else None


def _root(body: list[Instruction], opcode: str) -> Instruction | None:
    """The result of a computation, where it is one of this kind."""
    return next((x for x in body if x.is_root and x.opcode == opcode), None)


def _place(name: str, body: list[Instruction]) -> int | None:
    """Which part of a tuple an instruction is; None for another one."""
    for one in body:
        if one.name == name and one.opcode == "get-tuple-element":
            return int(_INDEX.findall(one.attributes)[0])
    return None


def _constant(name: str, body: list[Instruction]) -> int | None:
    """The number that an instruction is; None for another one."""
    for one in body:
        if one.name == name and one.opcode == "constant" and one.operands[0].isdigit():
            return int(one.operands[0])
    return None


def waiting_for(
    program: Program, given: Callable[[Instruction], bool]
) -> set[tuple[str, str]]:
    """(computation, name) of the instructions that wait for some of the parameters.

    Args:
        program: What `read` returned.
        given: Whether a parameter of the program is one of these.
    """
    found: set[tuple[str, str]] = set()

    def walk(name: str, waits: Callable[[Instruction], bool]) -> list[bool]:
        """Which parts of a computation's result wait; `waits` is of its parameters."""
        each: dict[str, list[bool]] = {}
        root = [False]
        for one in program.computations[name]:
            before = [each.get(x, [False]) for x in one.given]
            inside = called(one, program)
            if one.opcode == "parameter":
                mine = [waits(one)]
            elif one.opcode == "tuple" or _SHARDS in one.quoted.values():
                mine = list(map(any, before))
            elif one.opcode == "get-tuple-element" and len(before[0]) > 1:
                mine = [before[0][int(_INDEX.findall(one.attributes)[0])]]
            elif one.opcode == "call":
                of = list(map(any, before))
                mine = walk(inside[0], lambda x, of=of: of[int(x.operands[0])])
            else:
                mine = [any(map(any, before))]
                for other in inside:
                    walk(other, lambda _, all=mine[0]: all)
            each[one.name] = mine
            root = mine if one.is_root else root
            if any(mine):
                found.add((name, one.name))
        return root

    for name in program.entries:
        walk(name, given)
    return found


def arrays(shape: str) -> list[Array]:
    """Read the arrays of a shape, which may be a tuple; tokens are none.

    Example:
        >>> from optx_sync.audit import hlo
        >>> hlo.arrays("(bf16[2,3]{1,0}, token[])")
        [Array(dtype='bf16', shape=(2, 3), bytes=12)]
    """
    found = []
    for dtype, dimensions in _ARRAY.findall(shape):
        if dtype in ("token", "opaque"):
            continue
        # bf16, s4, f8e4m3fn, c64 carry their bits; a pred takes a byte.
        bits = re.match(r"(?:bf|[sufc])(\d+)", dtype)
        if bits is None and dtype != "pred":
            raise ValueError(f"unknown element type {dtype!r} in the shape {shape!r}.")
        extents = _integers(dimensions)
        size = (prod(extents) * (int(bits[1]) if bits else 8) + 7) // 8
        found.append(Array(dtype, extents, size))
    return found


def operands(instruction: Instruction, body: list[Instruction]) -> list[Array]:
    """The arrays that an instruction of this computation is given.

    Raises:
        ValueError: If the computation does not define one of them.
    """
    shapes = {other.name: other.shape for other in body}
    found = []
    for operand, name in zip(instruction.operands, instruction.given, strict=True):
        # A shape is printed before the name, or where the operand was defined.
        shape = operand.rpartition(" ")[0] or shapes.get(name)
        if shape is None:
            raise ValueError(
                f"the program's text does not define operand {name!r} of "
                f"{instruction.name!r}; pass the whole text of the module."
            )
        found += arrays(shape)
    return found


def done(start: int, body: list[Instruction]) -> int | None:
    """Find the `-done` that waits for an asynchronous `-start`.

    Args:
        start: Which instruction of the computation; also a "send" or a "recv".
        body: The computation.

    Returns:
        Which instruction of the computation. None if it is in another one, as when
        a loop hands a start to its next round.
    """
    current = body[start].name
    for position, instruction in enumerate(body):
        if current in instruction.given:
            if instruction.opcode.endswith("-done"):
                return position
            if instruction.opcode.endswith("-update"):
                current = instruction.name
    return None


def groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Read the groups of devices of a collective, in any form that XLA writes.

    A permutation's, and a "send"'s, are its (source, target) pairs.

    Raises:
        ValueError: If they are written in a form that is not known.
    """
    if instruction.opcode == "send":
        pairs = instruction.quoted.get("_xla_send_recv_source_target_pairs", "")
        return tuple(map(_integers, re.findall(r"\{([\d,\s]+)\}", pairs)))
    permute = instruction.opcode.startswith("collective-permute")
    key = "source_target_pairs=" if permute else "replica_groups="
    _, found, value = instruction.attributes.partition(key)
    everyone = (tuple(range(devices)),) if devices and not permute else ()
    if not found:
        match = _CONFIGURED.search(instruction.attributes)
        written = re.findall(r"\[([\d,\s]+)\]", match[1]) if match else ()
        rows = map(_integers, written)
    elif match := _MESH.match(value):
        rows = _mesh_groups(*match.groups("")).tolist()
    elif match := _IOTA.match(value):
        rows = _numbers(match[2]).reshape(-1, prod(_integers(match[1])[1:])).tolist()
    elif match := _NESTED.match(value):
        rows = filter(None, map(_integers, re.findall(r"\{([\d,\s]*)\}", match[0])))
    else:
        raise ValueError(
            f"cannot read the device groups of {instruction.name!r}: got {key}"
            f"{value[:80]!r}. They should be like {{{{0,1}},{{2,3}}}}, "
            "[2,2]<=[4] or mesh['a'=2,'b'=2] {{'b'}}."
        )
    return tuple(map(tuple, rows)) or everyone


def _instruction(name: str, rest: str, quotes: list[str]) -> Instruction:
    """Read `SHAPE opcode(OPERANDS), ATTRIBUTES`, with parentheses in all of them."""
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].strip()
    opening = rest.find("(")
    end = _closing(rest, opening)
    operands = _split(rest[opening + 1 : end - 1])
    attributes = rest[end:]
    quoted = {
        key: quotes[int(number)]
        for key, number in re.findall(r'([\w\-]+)="(\d+)"', attributes)
    }
    for key, number in _SAID.findall(attributes):
        quoted[quotes[int(key)]] = quotes[int(number)]
    attributes = re.sub(r'"\d*"', '""', attributes)
    opcode, target = rest[:opening], quoted.get("custom_call_target", "")
    if opcode == "custom-call" and _STARTED.fullmatch(target):
        opcode = target
    return Instruction(name, shape, opcode, operands, attributes, quoted)


def _depths(text: str) -> Iterator[int]:
    """How many brackets are open after each character."""
    return itertools.accumulate((c in "([{") - (c in ")]}") for c in text)


def _closing(text: str, opening: int) -> int:
    """Return the position after the bracket that closes the one at `opening`."""
    for position, depth in enumerate(_depths(text[opening:]), opening):
        if depth == 0:
            return position + 1
    return len(text)


def _split(text: str) -> tuple[str, ...]:
    """Split at the commas that stand outside of all brackets."""
    signs = zip(text, _depths(text), strict=True)
    commas = [place for place, sign in enumerate(signs) if sign == (",", 0)]
    between = itertools.pairwise([-1, *commas, len(text)])
    parts = (text[before + 1 : after].strip() for before, after in between)
    return tuple(filter(None, parts))


def _mesh_groups(mesh: str, order: str, grouped: str) -> np.ndarray:
    """The groups of `mesh['a'=4,'b'=2], device_ids=(...) {'a','b':(1)2}`, as rows."""
    axes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    named = [
        # An axis may be grouped in part: `(2)3` of 12 are the 3 after the first 2.
        (name, int(before or 1), int(size or axes[name]))
        for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", grouped)
    ]
    shape, parts = [], []
    for name, extent in axes.items():
        done = 1
        for part in sorted(part for part in named if part[0] == name):
            shape += [part[1] // done, part[2]]
            parts += [None, part]
            done = part[1] * part[2]
        shape.append(extent // done)
        parts.append(None)
    within = [parts.index(part) for part in named]
    rest = [place for place, part in enumerate(parts) if part is None]
    numbers = _numbers(order) if order else np.arange(prod(axes.values()))
    size = prod(shape[place] for place in within)
    return numbers.reshape(shape).transpose(rest + within).reshape(-1, size)


def _numbers(text: str) -> np.ndarray:
    """The devices of `[4,2]T(1,0)`, a transposed iota, or of `0,3,1,2`."""
    if not (match := _IOTA_ARRAY.match(text)):
        return np.array(_integers(text))
    extents, order = _integers(match[1]), _integers(match[2] or "")
    return np.arange(prod(extents)).reshape(extents).transpose(order or None).ravel()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
