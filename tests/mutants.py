"""Deliberate breaks of the library, each of which some test must notice.

    python tests/mutants.py                      # as `make mutants` does
    python tests/mutants.py --room center state  # `make mutants ROOM="center state"`
    python tests/mutants.py --of ../other        # the same breaks in another checkout

Each is applied to a temporary copy of the package, never to the working tree, and the
tests of its room run there until one of them fails. Prints a line for each and who
survived. A test that never ends (a broken collective) is a test that fails.

`tests/breaks.txt` is the table: a function, what stands in it (`-`) and what comes in
its place (`+`), as code, however it is laid out in the function; behind the function
the tests of its room to begin with. Code that moves to another module or function
needs no edit there, as long as it stands once in the package: `tests/test_mutants.py`
says where that is not so.
"""

import argparse
import ast
import functools
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 400  # for the tests of one of them


class Mutant(NamedTuple):
    """A function in which `old` stands once, as an expression or statements.

    `name=value` is also an argument of a call; `pass` in its place leaves it out.
    """

    where: str  # "module:function" below optx_sync; "module:" is what is in none
    old: str
    new: str
    tests: tuple[str, ...] = ()  # of its room, those to begin with


class Place(NamedTuple):
    """Nodes of a tree: those from `start` to `end` of a field, or all it holds."""

    file: Path
    tree: ast.Module
    owner: ast.AST
    field: str
    start: int | None = None
    end: int | None = None


# Tests of each room, the quickest first; below tests/.
CENTER = (
    "center/test_arguments.py",
    "center/test_landing.py",
    "center/test_composition.py",
    "center/test_laws.py",
    "center/test_lockstep.py",
    "center/test_communication.py",
)
SHARD, SYNC = "replicas/test_cross_shard.py", "replicas/test_sync_replicas.py"
ARGUMENTS = "optimizers/test_arguments.py"
ALL, LAWS = "test_laws.py", "optimizers/test_laws.py"
TESTS: dict[str, tuple[str, ...]] = {
    "trees": ("test_rows.py", "test_state.py", *CENTER, SYNC, ALL),
    "checks": (
        f"{SHARD}::test_refused_at_construction",
        f"{SHARD}::test_refused_at_the_call",
        f"{SHARD}::test_no_gradient",
        ARGUMENTS,
        SHARD,
        ALL,
    ),
    "rows": ("test_rows.py", LAWS),
    "comm": ("test_collectives.py", SHARD),
    "exchange": (
        "exchange/test_laws.py",
        "exchange/test_few_bytes.py",
        SHARD,
        *CENTER,
        ALL,
    ),
    "robust": ("exchange/test_robust.py",),
    "pieces": (
        "replicas/test_shard_state.py",
        "center/test_shard_state.py",
        "runtime/test_coded.py",
    ),
    "optimizers": (ARGUMENTS, LAWS, "optimizers/test_golden.py"),
    "replicas": (SHARD, SYNC, ALL),
    "center": (*CENTER, ALL),
    "peers": ("peers/test_gossip.py", ALL),
    "step": ("test_step.py", *CENTER),
    "state": ("test_state.py", "test_slots.py"),
    "placement": ("test_sharding.py", "test_state.py", *CENTER, SYNC, ALL),
    "simulate": (
        "test_simulate_sync_replicas.py",
        "test_simulate_asynchronous.py",
        "test_simulate_decoupled.py",
        "center/test_four_drivers.py",
    ),
    "runtime": (
        "runtime/test_protocol.py",
        "runtime/test_server.py",
        "runtime/test_worker.py",
    ),
    "schedules": ("runtime/test_schedules.py",),
    "audit": ("test_hlo.py", "test_audit.py"),
    "front": ("test_mistakes.py", "test_front_door.py"),
    "elastic": ("test_elastic.py",),
}


def table(text: str) -> dict[str, list[Mutant]]:
    """The breaks of each room, as `tests/breaks.txt` has them."""
    found: dict[str, list[Mutant]] = {}
    for room, breaks in re.findall(r"^== (\w+)\n(.*?)(?=^== |\Z)", text, re.M | re.S):
        found[room] = []
        for one in breaks.strip().split("\n\n"):
            head, *lines = one.splitlines()
            where, *tests = head.split()
            old, new = (
                "\n".join(line[2:] for line in lines if line.startswith(sign))
                for sign in "-+"
            )
            found[room].append(Mutant(where, old, new, tuple(tests)))
    return found


MUTANTS = table((ROOT / "tests" / "breaks.txt").read_text())


def parsed(code: str) -> list[ast.AST]:
    """An expression, or statements."""
    body = ast.parse(code).body
    return [one.value if isinstance(one, ast.Expr) else one for one in body]


def same(one: object, other: object) -> bool:
    """Whether two trees are the same code."""
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, ast.Assign) and isinstance(other, ast.keyword):
        names = [ast.Name(other.arg)] if other.arg else []
        return same(one.targets, names) and same(one.value, other.value)
    if not isinstance(one, ast.AST):
        return one == other
    if type(one) is not type(other):
        return False
    fields = [name for name in one._fields if name != "ctx"]
    return all(same(getattr(one, n, None), getattr(other, n, None)) for n in fields)


@functools.cache
def functions(file: Path) -> tuple[ast.Module, dict[str, ast.AST]]:
    """A module, and its functions and classes by qualified name, itself as ""."""
    module = ast.parse(file.read_text())
    found: dict[str, ast.AST] = {"": module}
    todo: list[tuple[str, ast.AST]] = [("", module)]
    for prefix, node in todo:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else prefix
            if named:
                found[name] = child
            todo.append((f"{name}." if named else name, child))
    return module, found


def standing(tree: ast.AST, old: list[ast.AST]) -> list[tuple[Any, ...]]:
    """Where below a node these nodes stand: owner, field, start and end."""
    found: list[tuple[Any, ...]] = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if not isinstance(value, list):
                if len(old) == 1 and same(old[0], value):
                    found.append((node, field))
                continue
            for start in range(len(value) - len(old) + 1):
                end = start + len(old)
                if same(old, value[start:end]):
                    found.append((node, field, start, end))
    return found


def target(package: Path, mutant: Mutant) -> Place:
    """The one place of a break: in its function, one of that name, or anywhere."""
    module, _, function = mutant.where.partition(":")
    files = sorted(package.rglob("*.py"))
    own = package.joinpath(*module.split(".")).with_suffix(".py")
    levels = [
        [(own, function)] if own in files else [],
        [(file, function) for file in files if function],
        [(file, "") for file in files],
    ]
    old, found = parsed(mutant.old), []
    for level in levels:
        for file, name in level:
            tree, named = functions(file)
            if name in named:
                found += [Place(file, tree, *x) for x in standing(named[name], old)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    files = sorted({str(place.file.relative_to(package)) for place in found})
    raise LookupError(
        f"{mutant.where} must hold this code once; found {len(found)} times, in "
        f"{files}. Name the function that holds it, or more of it:\n{mutant.old}"
    )


def broken(place: Place, new: str) -> str:
    """The text of a module with other code in a place."""
    nodes = parsed(new)
    value = getattr(place.owner, place.field)
    if place.start is None:
        (changed,) = nodes
    else:
        if isinstance(value[place.start], ast.keyword):
            nodes = [
                ast.keyword(one.targets[0].id, one.value)  # type: ignore[attr-defined]
                for one in nodes
                if isinstance(one, ast.Assign)
            ]
        changed = [*value[: place.start], *nodes, *value[place.end :]]
    setattr(place.owner, place.field, changed)
    try:
        return ast.unparse(ast.fix_missing_locations(place.tree))
    finally:
        setattr(place.owner, place.field, value)


def run_tests(tests: str, folder: Path, log: Path) -> str:
    """What became of a file of tests in a copy: "survived", or what failed first."""
    sys.stdout.flush()
    child = os.fork()  # JAX is imported already
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        # Not the folder of this script, whose `benchmarks` is a package of tests.
        ours = ("", str(ROOT), str(ROOT / "tests"))
        sys.path[:] = [str(folder), *(p for p in sys.path if p not in ours)]
        import pytest

        code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", tests])
        os._exit(int(code))
    end = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed: it never ended"
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGABRT, -signal.SIGSEGV):  # XLA gives up
        return "killed: it was aborted"
    if code == 0:
        return "survived"
    said = log.read_text()
    if code not in (1, 2):  # 2: the package cannot even be imported
        raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return f"killed: {failed[1] if failed else 'not importable'}"


def main() -> None:
    """Apply all of them, or those of some rooms, and say who survived."""
    parser = argparse.ArgumentParser(description="Breaks that the tests must notice.")
    parser.add_argument("--room", nargs="*", choices=MUTANTS, default=[])
    parser.add_argument("--of", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--only", nargs="*", type=int, help="numbers in the table")
    parser.add_argument("--list", action="store_true", help="apply none, find places")
    options = parser.parse_args()
    every = [(room, mutant) for room, found in MUTANTS.items() for mutant in found]
    chosen = [
        (number, room, mutant)
        for number, (room, mutant) in enumerate(every)
        if (not options.room or room in options.room)
        and (not options.only or number in options.only)
    ]
    survivors, unknown = [], []
    sys.dont_write_bytecode = True  # which might be taken for that of the next one
    for name in ("numpy", "jax.numpy", "optax", "flax.nnx", "chex", "pytest"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "copy")
        kept = shutil.ignore_patterns(".*", "__pycache__", "site", "results*")
        shutil.copytree(options.of, folder, ignore=kept)
        for position, (number, room, mutant) in enumerate(chosen, 1):
            start = time.monotonic()
            label = f"[{position}/{len(chosen)}] #{number} {room}: " + " ".join(
                mutant.old.split()
            )
            try:
                place = target(folder / "optx_sync", mutant)
            except LookupError as error:
                unknown.append(label)
                print(f"#{number}: {error}", flush=True)
                continue
            if options.list:
                continue
            text = place.file.read_text()
            place.file.write_text(broken(place, mutant.new))
            tests = [f"tests/{t}" for t in (*mutant.tests, *TESTS[room])]
            tests = [
                t for t in dict.fromkeys(tests) if (folder / t.split("::")[0]).exists()
            ]
            result = "survived"
            for some in tests:
                if result == "survived":
                    result = run_tests(some, folder, Path(temporary, "log"))
            place.file.write_text(text)
            seconds = time.monotonic() - start
            print(f"{label[:100]}: {result} ({seconds:.0f} s)", flush=True)
            if result == "survived":
                survivors.append(label)
    print(f"\n{len(chosen) - len(unknown)} mutants, {len(survivors)} survived")
    print("\n".join(survivors))
    if unknown:
        print(f"{len(unknown)} of the table are not in the package: mend the table")
    sys.exit(bool(survivors or unknown))


if __name__ == "__main__":
    main()
