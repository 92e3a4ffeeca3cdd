# SPDX-License-Identifier: Apache-2.0
"""What a compiled program really communicates, read from XLA's own text."""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import jax

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_NAME = r"%?([\w.\-]+)"
_HEADER = re.compile(rf"^(ENTRY\s+)?{_NAME}\s*(?:\(.*\)\s*->.*)?\{{$")
_INSTRUCTION = re.compile(rf"^(?:ROOT\s+)?{_NAME}\s+=\s+(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_ATTRIBUTE = re.compile(r"([\w\-]+)=(\{[^{}]*\}|%?[\w.\-]+)")
_IOTA = re.compile(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA_ARRAY = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_NESTED = re.compile(r"\{(?:\s*\{[\d,\s]*\}\s*,?)*\}")


class Collective(NamedTuple):
    """One collective of a compiled program.

    `groups` holds the sets of devices that exchange with each other, or for a
    "collective-permute" its (source, target) pairs.
    """

    kind: str  # "all-reduce", "all-gather", ...; asynchronous pairs count once
    bytes: int  # of the operands, on one device
    operands: int  # arrays that travel together
    groups: tuple[tuple[int, ...], ...]  # of devices, as the mesh counts them
    conditional: bool  # stands in a branch of a conditional, at whatever depth


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class _Program(NamedTuple):
    computations: dict[str, list[_Instruction]]
    entries: list[str]
    devices: int


def collectives(fn: Any, *args: Any, **kwargs: Any) -> list[Collective]:
    """Compile `fn` for these arguments and list the collectives of the program.

    A row is one collective instruction in XLA's optimised program, after its
    combiner has joined what can travel together. It counts once if it stands in a
    loop. `conditional` says that it runs only when a branch of a `lax.cond` is
    taken; a function called both inside and outside of branches does not count as
    conditional.

    The rows describe the program of the platform that compiled it. XLA:CPU widens
    half precision reductions to float32, and keeps collectives over one device.

    Args:
        fn: A function, or what `jax.jit` or `jax.pmap` made of one, or the result of
            `.trace(...)`, `.lower(...)` or `.compile()`, which take no arguments here.
        *args: Arrays or `jax.ShapeDtypeStruct` (with a sharding, where it matters).
        **kwargs: The same by name.

    Returns:
        The rows in the order of the program's text (a called computation stands
        before its caller).

    Raises:
        TypeError: If `fn` is none of these, or is compiled already and got arguments.

    Example:
        >>> import jax, jax.numpy as jnp, optx_sync as oxs
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> n = jax.device_count()
        >>> mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
        >>> mean = jax.shard_map(
        ...     lambda x: oxs.reduce(x, "data"), mesh=mesh, in_specs=P("data"),
        ...     out_specs=P(),
        ... )
        >>> rows = oxs.audit.collectives(mean, jnp.ones((n, 3)))
        >>> rows[0].kind, rows[0].bytes, rows[0].conditional
        ('all-reduce', 12, False)
    """
    return parse(_text(fn, args, kwargs))


def instructions(fn: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Compile `fn` as in `collectives` and count its instructions by opcode.

    All computations of the program count, also those inside fusions.

    Returns:
        A dictionary from XLA's opcode ("fusion", "all-reduce", "while") to a count.

    Example:
        >>> import jax.numpy as jnp, optx_sync as oxs
        >>> oxs.audit.instructions(lambda x: x, jnp.ones(3))["parameter"]
        1
    """
    computations = _read(_text(fn, args, kwargs)).computations
    counts = Counter(
        instruction.opcode for body in computations.values() for instruction in body
    )
    return dict(sorted(counts.items()))


def parse(text: str) -> list[Collective]:
    """List the collectives in the text of a compiled program (`as_text()`, a dump).

    Args:
        text: One HLO module as XLA prints it, from whatever platform.

    Returns:
        The rows of `collectives`.

    Raises:
        ValueError: If a collective's shapes or device groups cannot be read.

    Example:
        >>> import optx_sync as oxs
        >>> rows = oxs.audit.parse('''
        ... HloModule step, num_partitions=8
        ... ENTRY %main (p: bf16[1024]) -> bf16[1024] {
        ...   %p = bf16[1024]{0} parameter(0)
        ...   ROOT %r = bf16[1024]{0} all-reduce(%p), replica_groups=[2,4]<=[8]
        ... }''')
        >>> rows[0].kind, rows[0].bytes, rows[0].groups
        ('all-reduce', 2048, ((0, 1, 2, 3), (4, 5, 6, 7)))
    """
    program = _read(text)
    always, reached = _reach(program)
    rows = []
    for name, body in program.computations.items():
        if name not in reached:
            continue
        shapes = {instruction.name: instruction.shape for instruction in body}
        for instruction in body:
            kind = _kind(instruction, program)
            if kind is None:
                continue
            arrays = [
                size
                for operand in instruction.operands
                for size in _sizes(_operand_shape(operand, shapes))
            ]
            rows.append(
                Collective(
                    kind=kind,
                    bytes=sum(arrays),
                    operands=len(arrays),
                    groups=_groups(instruction, kind, program.devices),
                    conditional=name not in always,
                )
            )
    return rows


def table(rows: Iterable[Collective]) -> str:
    """Write the rows of `collectives` as a table in plain text, with the sums.

    Example:
        >>> import optx_sync as oxs
        >>> pairs = ((0, 1), (1, 0))
        >>> print(oxs.audit.table([
        ...     oxs.audit.Collective("all-reduce", 4096, 3, ((0, 1),), True),
        ...     oxs.audit.Collective("collective-permute", 512, 1, pairs, False),
        ... ]))
        kind                bytes  operands  groups   conditional
        all-reduce           4096         3  1 x 2    yes
        collective-permute    512         1  2 pairs  no
        total                4608         4           4096 bytes in conditionals
    """
    rows = list(rows)
    quiet = sum(row.bytes for row in rows if row.conditional)
    total = sum(row.bytes for row in rows)
    arrays = sum(row.operands for row in rows)
    lines = [("kind", "bytes", "operands", "groups", "conditional")]
    for row in rows:
        groups = f"{len(row.groups)} x {len(row.groups[0]) if row.groups else 0}"
        if row.kind == "collective-permute":
            groups = f"{len(row.groups)} pairs"
        conditional = "yes" if row.conditional else "no"
        lines.append((row.kind, str(row.bytes), str(row.operands), groups, conditional))
    lines.append(
        ("total", str(total), str(arrays), "", f"{quiet} bytes in conditionals")
    )
    kind, size, count, group, _ = (
        max(len(line[column]) for line in lines) for column in range(5)
    )
    return "\n".join(
        f"{a:<{kind}}  {b:>{size}}  {c:>{count}}  {d:<{group}}  {e}"
        for a, b, c, d, e in lines
    )


def _text(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if not hasattr(fn, "lower") and not hasattr(fn, "as_text"):
        if not callable(fn):
            raise TypeError(
                f"audit needs a function or a compiled program; got "
                f"{type(fn).__name__}. Pass the step function and its arguments."
            )
        fn = jax.jit(fn)
    if hasattr(fn, "lower"):
        fn = fn.lower(*args, **kwargs)
    elif args or kwargs:
        raise TypeError(
            f"got arguments for a {type(fn).__name__}, which is lowered or compiled "
            "already. Pass it alone, or pass the function with the arguments."
        )
    if hasattr(fn, "compile"):
        fn = fn.compile()
    text = fn.as_text()
    if text is None:
        raise TypeError(
            "this backend does not give the text of its compiled programs. "
            "Compile for CPU, GPU or TPU."
        )
    return text


def _read(text: str) -> _Program:
    """Split a module's text into computations and their instructions."""
    # Strings (names of operations, configurations) and comments hold anything.
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    text = re.sub(r"/\*.*?\*/", "", text)
    computations: dict[str, list[_Instruction]] = {}
    entries: list[str] = []
    devices = 0
    body: list[_Instruction] | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("HloModule"):
            counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", line)
            devices = prod(map(int, counts)) if counts else 0
        elif line.startswith("}"):
            body = None
        elif body is not None and (match := _INSTRUCTION.match(line)):
            body.append(_instruction(match[1], match[2]))
        elif body is None and (match := _HEADER.match(line)):
            body = computations.setdefault(match[2], [])
            if match[1]:
                entries.append(match[2])
    return _Program(computations, entries, devices)


def _instruction(name: str, rest: str) -> _Instruction:
    """Read `SHAPE opcode(OPERANDS), ATTRIBUTES`, with parentheses in all of them."""
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].strip()
    opening = rest.find("(")
    end = _closing(rest, opening)
    operands = _split(rest[opening + 1 : end - 1])
    return _Instruction(name, shape, rest[:opening], operands, rest[end:])


def _closing(text: str, opening: int) -> int:
    """Return the position after the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position + 1
    return len(text)


def _split(text: str) -> tuple[str, ...]:
    """Split at the commas that stand outside of all brackets."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _called(instruction: _Instruction, program: _Program) -> list[str]:
    """Name the computations that an instruction calls, by whatever attribute."""
    return [
        name
        for attribute, value in _ATTRIBUTE.findall(instruction.attributes)
        # Names instructions, and instructions may be named like computations.
        if attribute != "control-predecessors"
        for name in re.findall(r"[\w.\-]+", value)
        if name in program.computations
    ]


def _reach(program: _Program) -> tuple[set[str], set[str]]:
    """Return the computations that always may run, and all that ever may."""
    called = {
        name: [
            (target, instruction.opcode == "conditional")
            for instruction in body
            for target in _called(instruction, program)
        ]
        for name, body in program.computations.items()
    }
    targets = {target for edges in called.values() for target, _ in edges}
    roots = program.entries or [name for name in called if name not in targets]

    def walk(with_branches: bool) -> set[str]:
        seen: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += [
                    target
                    for target, branch in called[name]
                    if with_branches or not branch
                ]
        return seen

    return walk(False), walk(True)


def _kind(instruction: _Instruction, program: _Program) -> str | None:
    """Return the kind of collective, or None; an asynchronous pair counts once."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS:
        return None
    inner = [
        wrapped.opcode
        for name in _called(instruction, program)
        for wrapped in program.computations[name]
    ]
    # The wrapped computation is printed too, and holds the row.
    return None if kind in inner else kind


def _operand_shape(operand: str, shapes: dict[str, str]) -> str:
    """Return an operand's shape, printed before its name or where it was defined."""
    shape, _, name = operand.rpartition(" ")
    if shape:
        return shape
    name = name.removeprefix("%")
    if name not in shapes:
        raise ValueError(
            f"the program's text does not define operand {name!r} of a collective; "
            "pass the whole text of the module."
        )
    return shapes[name]


def _sizes(shape: str) -> list[int]:
    """Return the bytes of each array in a shape, which may be a tuple."""
    sizes = []
    for dtype, dimensions in _ARRAY.findall(shape):
        if dtype in ("token", "opaque"):
            continue
        # bf16, s4, f8e4m3fn, c64 carry their bits; a pred takes a byte.
        bits = re.match(r"(?:bf|[sufc])(\d+)", dtype)
        if bits is None and dtype != "pred":
            raise ValueError(f"unknown element type {dtype!r} in the shape {shape!r}.")
        extents = [int(size) for size in re.findall(r"\d+", dimensions)]
        sizes.append((prod(extents) * (int(bits[1]) if bits else 8) + 7) // 8)
    return sizes


def _groups(
    instruction: _Instruction, kind: str, devices: int
) -> tuple[tuple[int, ...], ...]:
    """Return explicit groups of devices from whichever form XLA wrote."""
    permute = kind == "collective-permute"
    key = "source_target_pairs=" if permute else "replica_groups="
    _, found, value = instruction.attributes.partition(key)
    everyone = (tuple(range(devices)),) if devices and not permute else ()
    if not found:
        return everyone
    if match := _MESH.match(value):
        return _mesh_groups(*match.groups(""))
    if match := _IOTA.match(value):
        numbers, size = _numbers(match[2]), prod(_integers(match[1])[1:])
        return tuple(
            numbers[start : start + size] for start in range(0, len(numbers), size)
        )
    if match := _NESTED.match(value):
        groups = re.findall(r"\{([\d,\s]*)\}", match[0])
        return tuple(filter(None, map(_integers, groups))) or everyone
    raise ValueError(
        f"cannot read the device groups of {instruction.name!r}: got {key}"
        f"{value[:80]!r}. They should be like {{{{0,1}},{{2,3}}}}, "
        "[2,2]<=[4] or mesh['a'=2,'b'=2] {{'b'}}."
    )


def _mesh_groups(mesh: str, order: str, grouped: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of `mesh['a'=4,'b'=2], device_ids=(...) {'a','b':(1)2}`."""
    axes = [(name, int(size)) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)]
    named = [
        # An axis may be grouped in part: `(2)3` of 12 are the 3 after the first 2.
        (name, int(before or 1), int(size or dict(axes)[name]))
        for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", grouped)
    ]
    strides = {}
    rest = []
    stride = prod(size for _, size in axes)
    for name, extent in axes:
        done = 1
        for _, before, size in sorted(part for part in named if part[0] == name):
            rest.append((stride // before, before // done))
            done = before * size
            strides[name, before] = stride // done
        stride //= extent
        rest.append((stride, extent // done))
    within = _offsets([(strides[name, before], size) for name, before, size in named])
    numbers = _numbers(order) if order else tuple(range(prod(n for _, n in axes)))
    return tuple(
        tuple(numbers[first + offset] for offset in within) for first in _offsets(rest)
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the devices of `[4,2]T(1,0)`, a transposed iota, or of `0,3,1,2`."""
    if not (match := _IOTA_ARRAY.match(text)):
        return _integers(text)
    extents, order = _integers(match[1]), _integers(match[2] or "")
    return tuple(
        _offsets(
            [
                (prod(extents[axis + 1 :]), extents[axis])
                for axis in order or range(len(extents))
            ]
        )
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _offsets(axes: list[tuple[int, int]]) -> list[int]:
    """Walk axes given as (stride, extent), the last one fastest."""
    offsets = [0]
    for stride, extent in axes:
        offsets = [
            offset + stride * step for offset in offsets for step in range(extent)
        ]
    return offsets
