# SPDX-License-Identifier: Apache-2.0
"""List the collectives of a compiled program, from XLA's own text."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from optx_sync.audit import hlo
from optx_sync.workers.step import Step

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# A compiler makes one of several that are alike, where none waits for another.
_JOINED = ("all-reduce", "all-gather", "reduce-scatter")
PAIRS = ("collective-permute", "send")  # Their groups are (source, target) pairs.
# Messages that one of n devices sends along a ring, one after the other, and which part
# of its operand each is.
_ON_A_RING: dict[str, Callable[[int], tuple[int, float]]] = {
    "all-reduce": lambda n: (2 * (n - 1), 1 / n),
    "reduce-scatter": lambda n: (n - 1, 1 / n),
    "all-to-all": lambda n: (n - 1, 1 / n),
    "ragged-all-to-all": lambda n: (n - 1, 1 / n),
    "all-gather": lambda n: (n - 1, 1),
    "collective-broadcast": lambda n: (1, 1),
    "collective-permute": lambda n: (1, 1),
    "send": lambda n: (1, 1),
}
# Custom calls that only move a pointer, or mark a collective's begin and end.
_IDLE = (
    "AllocateBuffer",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
)


# Instructions for whose arguments a program waits; `None` where that is not asked.
Delayed: TypeAlias = set[tuple[str, str]] | None


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: "all-reduce", "all-gather", "send" and so on; a start and its end are one.
        bytes: Those of its operands, what one device hands over. What it sends of them
            depends on the kind: of an all-gather N - 1 times as much, of an all-reduce
            on a ring 2 (N - 1) / N times: `sent`, and `time` counts that.
        operands: The number of arrays that travel together.
        groups: The sets of devices that exchange with each other, or for a
            "collective-permute" and a "send" the (source, target) pairs; devices have
            the numbers by which the mesh counts them. Empty where the program does not
            say, as for transfers between TPU slices.
        conditional: Whether it stands in a branch of a conditional, at any depth.
        overlapped: Whether an asynchronous collective has any computation between its
            start and the instruction that waits for it, in the program's order. `None`
            for a synchronous one, and for one that a later round of a loop waits for.
        behind: The number of instructions that compute in between: on a GPU, its
            kernels. `None` where no instruction is known that waits for it.
        branch: In which branches it stands: (name of the conditional, number of the
            branch), the outermost first. Branches of one conditional exclude each
            other, as the pairings of `gossip` and `noloco` do: `time` and `table` count
            their mean. So do the programs of the parts of a center rule, in which they
            meet in turn.
        times: How often the loops around it run it in one run of the program, as a
            scan over microbatches does, or of its branch; `None` where the program does
            not say. `sent`, `time` and `table` count it so often, and `None` once.
    """

    kind: str
    bytes: int
    operands: int
    groups: tuple[tuple[int, ...], ...]
    conditional: bool
    overlapped: bool | None = None
    behind: int | None = None
    branch: tuple[tuple[str, int], ...] = ()
    times: int | None = 1

    @property
    def repeated(self) -> int:
        """How often it counts: `times`, and once where that is not known."""
        return 1 if self.times is None else self.times

    @property
    def on_a_ring(self) -> tuple[int, float]:
        """(messages that a device sends one after the other, bytes of each)."""
        if not self.groups and self.kind not in PAIRS:
            raise ValueError(
                f"this {self.kind} of {self.bytes} bytes does not say between which "
                "devices it is. Pass rows of a whole program, or give it groups: "
                "row._replace(groups=((0, 1, 2, 3),))."
            )
        devices = max(map(len, self.groups), default=1)
        messages, part = _ON_A_RING[self.kind](devices)
        return messages, part * self.bytes

    @property
    def sent(self) -> float:
        """Bytes that a device sends to others, along a ring, in all runs of loops.

        Example:
            >>> import optx_sync as oxs
            >>> oxs.audit.Collective("all-reduce", 4096, 1, ((0, 1, 2, 3),), False).sent
            6144.0
        """
        return self.repeated * math.prod(self.on_a_ring)


def collectives(fn: Any, *args: Any, **kwargs: Any) -> list[Collective]:
    """Compile `fn` for these arguments and list the collectives of the program.

    A row is one collective instruction in XLA's optimised program, after XLA has
    combined those that can travel together. One in a loop is one row, and
    `Collective.times` says how often it runs; a start and its end are one, and a "send"
    stands for itself and the "recv" of the other side.
    `conditional` says that it runs only when a branch of a `lax.cond` is taken; a
    function called both inside and outside of branches is not conditional.

    The rows describe the program that this platform's compiler made. XLA:CPU widens
    half precision reductions to float32, and keeps collectives over one device. Of a
    step whose workers are simulated on one device there are none: pass that of
    `Workers(..., mesh=True)`, for which CPU devices will do. The step of `Workers` on a
    `jax.sharding.AbstractMesh` is not compiled, and needs no device of the mesh: its
    rows are those that JAX gives to XLA, of which those of one kind, type and group are
    joined where none waits for another. A compiler may join fewer, and leave out what
    nothing needs; half precision is not widened.

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
    if isinstance(fn, Step) and fn.layout().is_abstract:
        return _rows_to_be(hlo.read(fn.lower(*args, **kwargs).as_text("hlo")))
    return _rows(hlo.program(fn, *args, **kwargs))


def of_kind(lowered: jax.stages.Lowered, step: Step) -> list[Collective]:
    """The rows of a step's program, of which those overlap that no batch delays.

    What waits for none of the step's batches, gradients say, is there when the step
    begins: it may travel while the step computes, whatever else the program does.
    """
    if step.layout().is_abstract:
        program, rows_of = hlo.read(lowered.as_text("hlo")), _rows_to_be
    else:
        program, rows_of = hlo.program(lowered), _rows

    def is_batch(x: hlo.Instruction) -> bool:
        return x.quoted.get("op_name", x.name).startswith("batches")

    delayed = hlo.waiting_for(program, is_batch)
    return rows_of(program, delayed)


def parse(text: str) -> list[Collective]:
    """List the collectives in the text of a compiled program (`as_text()`, a dump).

    Args:
        text: One HLO module as XLA prints it, from whatever platform, or as JAX gave it
            to XLA, `lowered.as_text("hlo")`: there a collective that the program starts
            itself (`psum_start`, JAX 0.12) is a custom call, and is a row all the same.

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
    return _rows(hlo.read(text))


def shares(rows: Sequence[Collective]) -> list[float]:
    """How often each row counts where branches that exclude each other count once.

    Of a conditional of which k branches hold rows each counts 1 / k, as if they were
    taken in turn; a branch without rows is the step that sends nothing. Conditionals
    inside of one another multiply.
    """
    numbers: dict[Any, set[int]] = {}
    for row in rows:
        for depth, (name, number) in enumerate(row.branch):
            numbers.setdefault((*row.branch[:depth], name), set()).add(number)
    return [
        math.prod(
            1 / len(numbers[(*row.branch[:depth], name)])
            for depth, (name, _) in enumerate(row.branch)
        )
        for row in rows
    ]


def table(rows: Iterable[Collective]) -> str:
    """Write the rows of `collectives` as a table in plain text, with the sums.

    In the sums branches that exclude each other count by their mean: a row that is
    "yes, 1 in 7" stands in one of seven, and a seventh of its bytes counts. A row in a
    loop, whose "times" then have a column, counts so often.

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
    names = "kind", "bytes", "operands", "times", "groups", "conditional", "overlapped"
    lines: list[Sequence[str]] = [names]
    said = {None: "", True: "yes", False: "no"}
    counted = shares(rows)
    for row, share in zip(rows, counted, strict=True):
        groups = f"{len(row.groups)} x {len(row.groups[0]) if row.groups else 0}"
        if row.kind in PAIRS:
            groups = f"{len(row.groups)} pairs" if row.groups else "not said"
        conditional = said[row.conditional] + f", 1 in {1 / share:g}" * (share < 1)
        numbers = str(row.bytes), str(row.operands)
        times = "not said" if row.times is None else str(row.times)
        last = times, groups, conditional, said[row.overlapped]
        lines.append((row.kind, *numbers, *last))

    def total(numbers: Iterable[int]) -> str:
        each = zip(counted, rows, numbers, strict=True)
        return f"{sum(share * row.repeated * x for share, row, x in each):.0f}"

    quiet = total(row.bytes * row.conditional for row in rows)
    hidden = total(row.bytes * bool(row.overlapped) for row in rows)
    whole = total(row.bytes for row in rows), total(row.operands for row in rows)
    sums = f"{quiet} bytes in conditionals", f"{hidden} bytes overlapped"
    lines.append(("total", *whole, "", "", *sums))
    sides = "<>>><<<"
    if all(row.overlapped is None for row in rows):
        sides = sides[:-1]
        lines = [line[:-1] for line in lines]
    if all(row.times == 1 for row in rows):  # no loop
        sides = sides[:3] + sides[4:]
        lines = [(*line[:3], *line[4:]) for line in lines]
    return in_columns(lines, sides)


def in_columns(lines: Sequence[Sequence[str]], sides: str) -> str:
    """Lines of cells as text; the side of each column to which its cells go."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = [
        f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=False)
    ]
    return "\n".join("  ".join(columns).format(*line).rstrip() for line in lines)


def _rows(program: hlo.Program, delayed: Delayed = None) -> list[Collective]:
    """The rows; all that are not `delayed` overlap, where that is known."""
    branches, callers, found = hlo.branches(program), {}, []
    runs = hlo.runs(program)
    for name, body in program.computations.items():
        for position, instruction in enumerate(body):
            if instruction.opcode == "fusion" or instruction.opcode.endswith("-start"):
                others = hlo.called(instruction, program)
                callers |= dict.fromkeys(others, (name, position))
            if name in branches and (kind := _kind(instruction, program)):
                found.append((name, position, instruction, kind))
    # A TPU's collective may be in pieces, each fused with other computation. Every
    # piece is written as if it were the whole.
    chains: dict[tuple[str, str], list[int]] = {}
    for name, _, instruction, _ in found:
        chain = instruction.quoted.get("chain_id")
        if chain and name in callers:
            outside, at = callers[name]
            chains.setdefault((outside, chain), []).append(at)
    rows = []
    for name, position, instruction, kind in found:
        body = program.computations[name]
        outside, at = callers.get(name, (name, position))
        pieces = chains.get((outside, instruction.quoted.get("chain_id", "")), [at])
        if at != min(pieces):
            continue
        arrays = hlo.operands(instruction, body)
        if instruction.opcode == kind == "send":
            start, end = _send(position, body)
        elif len(pieces) > 1:
            start, end = at, max(pieces)
        else:
            # The instruction itself, or the one that starts the computation around it.
            if instruction.opcode != kind:
                outside, at = name, position
            start, end = at, hlo.done(at, program.computations[outside])
        meanwhile = program.computations[outside][start:end][1:]
        computing = sum(_computes(other, program) for other in meanwhile)
        computed = None if end is None else computing > 0
        rows.append(
            Collective(
                kind=kind,
                bytes=sum(array.bytes for array in arrays),
                operands=len(arrays),
                groups=hlo.groups(instruction, program.devices),
                conditional=bool(branches[name]),
                overlapped=_overlaps((name, instruction.name), delayed, computed),
                behind=None if end is None else computing,
                branch=branches[name],
                times=runs[name],
            )
        )
    return rows


def _overlaps(
    place: tuple[str, str], delayed: Delayed, computed: bool | None = None
) -> bool | None:
    return computed if delayed is None else (place not in delayed) or None


def _rows_to_be(program: hlo.Program, delayed: Delayed = None) -> list[Collective]:
    """The rows of a program before XLA: calls put in line, and collectives joined."""
    found: dict[Any, Collective] = {}

    def walk(name: str, rank: int, place: str, scope: Any, runs: int | None) -> int:
        """Collect a computation's rows; its operands wait for `rank` others in turn.

        Returns for how many its results wait. `place` is where it runs, of each call
        another; `scope`, the branches and loops around it; `runs`, how often it runs.
        """
        branch = tuple(each for each in scope if each[1] is not None)
        body, ranks = program.computations[name], dict[str, int]()
        for instruction in body:
            after = max([rank, *(ranks.get(x, rank) for x in instruction.given)])
            here, opcode = f"{place}/{instruction.name}", instruction.opcode
            others = hlo.called(instruction, program)
            ends = [after]
            if opcode in ("call", "while", "conditional"):
                for number, other in enumerate(others):
                    inside = (here, number if opcode == "conditional" else None)
                    around = scope if opcode == "call" else (*scope, inside)
                    each = hlo.often(runs, instruction, name, program)
                    ends.append(walk(other, after, here, around, each))
            elif kind := _kind(instruction, program):
                groups = hlo.groups(instruction, program.devices)
                overlaps = _overlaps((name, instruction.name), delayed)
                said = {"branch": branch, "times": runs}
                row = Collective(kind, 0, 0, groups, bool(branch), overlaps, **said)
                arrays = hlo.operands(instruction, body)
                key: Any = here
                if kind in _JOINED:
                    inner = [x.opcode for x in hlo.inside(instruction, program)]
                    key = row, scope, after, arrays[0].dtype, *inner
                row = found.get(key, row)
                found[key] = row._replace(
                    bytes=row.bytes + sum(array.bytes for array in arrays),
                    operands=row.operands + len(arrays),
                )
                ends.append(after + 1)
            ranks[instruction.name] = max(ends)
        return max(ranks.values())

    for name in program.entries:
        walk(name, 0, "", (), 1)
    return list(found.values())


def _kind(instruction: hlo.Instruction, program: hlo.Program) -> str | None:
    """Return the kind of collective, or None; an asynchronous pair counts once."""
    if instruction.opcode == "send":
        # What goes to the host goes to no other device; but between TPU slices it is
        # the hosts that take it on.
        to_host = "is_host_transfer=true" in instruction.attributes
        on = any(key.startswith("_xla_megascale") for key in instruction.quoted)
        return "send" if on or not to_host else None
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS:
        return None
    # The wrapped computation is printed too, and holds the row.
    inner = [wrapped.opcode for wrapped in hlo.inside(instruction, program)]
    return None if kind in inner else kind


def _send(position: int, body: list[hlo.Instruction]) -> tuple[int, int | None]:
    """Return from where to where in its computation a send and its recv take.

    The program waits for the array that it receives.
    """

    def meeting(instruction: hlo.Instruction) -> str | None:
        # Between slices the channels of a send and its recv are not the same.
        rendezvous = instruction.quoted.get("_xla_host_transfer_rendezvous")
        channel = re.search(r"channel_id=\d+", instruction.attributes)
        return rendezvous or (channel and channel[0])

    for other, instruction in enumerate(body):
        if instruction.opcode == "recv" and meeting(instruction) == meeting(
            body[position]
        ):
            return max(position, other), hlo.done(other, body)
    return position, hlo.done(position, body)


def _computes(instruction: hlo.Instruction, program: hlo.Program) -> bool:
    """Whether an instruction does work that a collective can hide behind."""
    if instruction.opcode in ("dot", "convolution", "while"):
        return True
    if instruction.opcode == "custom-call":
        return instruction.quoted.get("custom_call_target") not in _IDLE
    if instruction.opcode not in ("fusion", "call", "conditional", "async-start"):
        return False
    inner = hlo.inside(instruction, program)
    if instruction.opcode == "fusion" and not any(_kind(i, program) for i in inner):
        return True
    return any(_computes(other, program) for other in inner)
