"""The house stands as it is drawn: who imports whom, and what no file may name."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "optx_sync"
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# The rooms of each floor.
ROOMS = {
    0: "core",
    1: "comm",
    2: "outer rows state",
    3: "exchange optimizers",
    4: "center peers replicas",
    5: "meetings rules workers",
    6: "runtime simulate",
    7: "by_hand elastic flax virtual",
    8: "audit testing",
    9: "__init__",
}
FLOORS = {room: floor for floor, rooms in ROOMS.items() for room in rooms.split()}


def files(text):
    """The files of a room: "room/: one two/three other/: four"."""
    folder, found = "", set()
    for name in text.split():
        if name.endswith(":"):
            folder = name[:-1]
        else:
            found.add(f"{folder}{name}")
    return found


# What files of the same room may stand on: its contract or mechanism.
GROUND = {
    "core": files("core/: checks forms shapes slices trees"),
    "comm": files("comm/: collectives varying buffers shards reduce"),
    "rows": files("rows/: lookup"),
    "state": files("state/: fields direct leaves held"),
    "workers": files(
        "workers/: mapped fingerprints resize joiners layout processes checkpoints "
        "kinds announced comparison step workers"
    ),
    "audit": files("audit/: hlo programs"),
    "exchange": files(
        "exchange/: contract all_reduce agree codes pieces measures landing "
        "robust/norms robust/transposed"
    ),
    "optimizers": files("optimizers/: rule"),
    "center": files(
        "center/: contract worker fragments state checks inner_state lockstep round "
        "turns"
    ),
    "peers": files(
        "peers/: graphs stability "
        "center/: checks contract worker fragments state lockstep round turns "
        "rules/local_sgd rules/diloco"
    ),
    "replicas": files("replicas/: accumulator averages owners landing tokens"),
    "meetings": files("meetings/: alone coded quorum together"),
    "simulate": files("simulate/: clock engine replay"),
    "runtime": files(
        "runtime/: system messages protocol parts samples checkpoints server worker "
        "display paces metrics shared group ray_actors "
        "runtime/agreements/: __init__ contract arrays memory saved pushes own "
        "center meeting sync_replicas"
    ),
}
# Libraries that one file or room is for, and nothing else imports.
GUESTS = {
    "flax": {"flax"},
    "ray": {"runtime/system"},
    "greenlet": {"virtual"},
    "orbax": {"runtime", "workers"},
    "matplotlib": set(),
    "rich": {"runtime/display"},
    "sklearn": set(),
    "tensorflow": set(),
    "torch": set(),
}
COLLECTIVES = set(
    "all_gather all_to_all axis_index axis_size pcast pmax pmean pmin ppermute "
    "pshuffle psum psum_scatter pvary ragged_all_to_all".split()
)


def trees():
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(tree):
    """(line, dotted name) of all that a file imports, at the top or anywhere else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (
                (node.lineno, f"{node.module}.{alias.name}") for alias in node.names
            )


def own_file(dotted):
    """The file of this package that `optx_sync.a.b` or `optx_sync.a.b.name` means."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), 0, -1):
        found = "/".join(parts[:end])
        if found in FILES:
            return found
        if f"{found}/__init__" in FILES:
            return f"{found}/__init__"
    return "__init__"


def room(name):
    return name.split("/")[0]


def test_every_file_has_a_floor_and_no_name_is_of_before():
    assert {room(name) for name in FILES} == set(FLOORS)
    assert set().union(*GROUND.values()) <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_lead_down(name):
    wrong = []
    for line, dotted in imported(ast.parse(FILES[name].read_text())):
        if dotted.split(".")[0] != "optx_sync":
            continue
        other = own_file(dotted)
        lower = FLOORS[room(other)] < FLOORS[room(name)]
        ground = other in GROUND.get(room(name), ()) and other != name
        front_door = name == f"{room(name)}/__init__" and room(other) == room(name)
        if not (lower or ground or front_door):
            wrong.append(f"line {line}: {name} imports {other}")
        wraps = room(name) in ("replicas", "center", "peers")
        if wraps and room(other) == "optimizers":
            wrong.append(f"line {line}: the wrappers take any Optax transformation")
        if room(other) == "runtime" and room(name) not in (
            "runtime",
            "virtual",
            "__init__",
        ):
            wrong.append(f"line {line}: runtime is optional, nothing imports it")
        if other == "flax" and name != "__init__":
            wrong.append(f"line {line}: flax is optional, nothing imports it")
    assert wrong == []


# The files that an algorithm runs, by way of what they import; it may lose some.
ALGORITHMS = {
    "center/rules/local_sgd": 31,
    "center/rules/diloco": 31,
    "center/rules/agn": 31,
    "center/rules/elastic_average": 31,
    "replicas/cross_shard": 23,
    "replicas/sync_replicas": 23,
    "peers/gossip": 36,
}
# Who starts, resizes and restores workers, and who runs them otherwise.
NO_STEP_NEEDS = files("simulate/: engine clock runtime/: worker server") | {
    name for name in FILES if room(name) in ("workers", "by_hand", "elastic")
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_imports_what_its_step_runs(algorithm):
    waiting, found = [algorithm], set()
    while waiting:
        name = waiting.pop()
        found.add(name)
        body = ast.Module(ast.parse(FILES[name].read_text()).body, [])
        body.body = [x for x in body.body if isinstance(x, ast.Import | ast.ImportFrom)]
        ours = (dotted for _, dotted in imported(body) if dotted[:10] == "optx_sync.")
        waiting += {own_file(dotted) for dotted in ours} - found
    assert NO_STEP_NEEDS <= set(FILES) and not NO_STEP_NEEDS & found
    assert len(found) <= ALGORITHMS[algorithm], sorted(found)


def test_optional_libraries_are_imported_by_the_files_that_are_for_them():
    wrong = []
    for name, tree in trees().items():
        for line, dotted in imported(tree):
            library = dotted.split(".")[0]
            if library in GUESTS and not GUESTS[library] & {name, room(name)}:
                wrong.append(f"{name}, line {line}: {dotted}")
    assert wrong == []


def collectives_in(tree):
    """(line, name) of what a file takes from `jax.lax` to communicate."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = node.value
            if isinstance(owner, ast.Attribute):
                yield from [(node.lineno, node.attr)] * (owner.attr == "lax")
            elif isinstance(owner, ast.Name) and owner.id in ("lax", "jax"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and str(node.module)[:7] == "jax.lax":
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_collectives_are_named_in_one_file():
    named = {name: list(collectives_in(tree)) for name, tree in trees().items()}
    here = {collective for _, collective in named.pop("comm/collectives")}
    assert {"psum", "all_gather", "axis_index", "pcast"} <= here  # The test sees them.
    assert {name: found for name, found in named.items() if found} == {}


def test_no_assert_and_no_environment_variable_but_xlas_threads_and_rays_walls():
    wrong, allowed = [], []
    for name, tree in trees().items():
        for node in ast.walk(tree):  # what is read before what it is read from
            if isinstance(node, ast.Subscript) and name == "workers/mapped":
                allowed += [node.value] * (ast.unparse(node) == "os.environ['NPROC']")
            if isinstance(node, ast.Call) and name == "runtime/system":
                ours = "os.environ.setdefault('RAY_DEDUP_LOGS_SKIP_REGEX'"
                if isinstance(node.func, ast.Attribute):
                    allowed += [node.func.value] * ast.unparse(node).startswith(ours)
            if isinstance(node, ast.Assert):
                wrong.append(f"{name}, line {node.lineno}: assert")
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                if node not in allowed:
                    wrong.append(f"{name}, line {node.lineno}: {node.attr}")
    assert wrong == [] and len(allowed) == 2


def test_every_file_says_its_licence_and_what_it_is():
    for name, path in FILES.items():
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), name
        assert ast.get_docstring(ast.parse(text)), name


def test_the_front_door_loads_nothing_optional_and_starts_no_backend():
    program = f"""
import sys, optx_sync, jax
loaded = set({sorted(GUESTS)}) & set(sys.modules)
loaded |= {{name for name in sys.modules if name.startswith("optx_sync.runtime")}}
if loaded:
    sys.exit(f"import optx_sync loads {{sorted(loaded)}}")
# Refused once a backend has started, and so is jax.distributed.initialize.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
if jax.device_count() != 3:
    sys.exit("import optx_sync starts a backend")
"""
    child = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
