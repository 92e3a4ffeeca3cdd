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
FLOORS = {
    "hlo": 1,
    "trees": 1,
    "forms": 2,
    "rows": 2,
    "shapes": 0,
    "audit": 2,
    "checks": 3,
    "elementwise": 3,
    "comm": 3,
    "placement": 4,
    "outer": 4,
    "step": 5,
    "exchange": 5,
    "optimizers": 5,
    "fingerprints": 5,
    "gradients": 5,
    "metrics": 5,
    "by_hand": 7,
    "replicas": 6,
    "center": 6,
    "peers": 6,
    "rules": 7,
    "simulate": 7,
    "runtime": 7,
    "flax": 8,
    "testing": 8,
    "front": 8,
    "elastic": 9,
    "__init__": 10,
}
# What files of the same room may stand on: its contract or mechanism.
GROUND = {
    "audit": {"audit/programs"},
    "rows": {"rows/slices"},
    "comm": {
        "comm/collectives",
        "comm/varying",
        "comm/buffers",
        "comm/shards",
    },
    "placement": {
        "placement/fields",
        "placement/axes",
        "placement/leaves",
        "placement/memory",
        "placement/held",
        "placement/resize",
        "placement/workers",
    },
    "exchange": {
        "exchange/contract",
        "exchange/all_reduce",
        "exchange/pieces",
        "exchange/measures",
        "exchange/landing",
        "exchange/robust/norms",
        "exchange/robust/transposed",
    },
    "optimizers": {"optimizers/rule"},
    "center": {
        "center/rounds/meeting",
        "center/rounds/at_once",
        "center/rounds/later",
        "center/rounds/in_line",
        "center/rounds/in_pieces",
        "center/coded",
        "center/contract",
        "center/worker",
        "center/fragments",
        "center/buffers",
        "center/landing",
        "center/rounds/turns",
        "center/state",
        "center/checks",
        "center/lockstep",
        "center/options",
    },
    "peers": {
        "peers/graphs",
        "peers/stability",
        "peers/mixing",
        "center/landing",
        "center/checks",
        "center/contract",
        "center/worker",
        "center/fragments",
        "center/state",
        "center/lockstep",
        "center/rounds/meeting",
        "center/rounds/at_once",
        "center/rounds/turns",
        "center/rules/local_sgd",
        "center/rules/diloco",
    },
    "replicas": {
        "replicas/accumulator",
        "replicas/averages",
        "replicas/owners",
        "replicas/landing",
        "replicas/tokens",
    },
    "front": {"front/checkpoints", "front/step", "front/comparison"},
    "simulate": {"simulate/replay"},
    "runtime": {
        f"runtime/{file}"
        for file in (
            "messages",
            "protocol",
            "parts",
            "checkpoints",
            "agreements/__init__",
            "agreements/contract",
            "agreements/center",
            "agreements/sync_replicas",
            "server",
            "worker",
            "display",
            "metrics",
            "shared",
            "ray_actors",
        )
    },
}
# Libraries that one file or room is for, and nothing else imports.
GUESTS = {
    "flax": {"flax"},
    "keras": {"optimizers/keras"},
    "ray": {"runtime/ray", "runtime/ray_actors", "runtime/metrics"},
    "orbax": {"runtime", "front", "elastic"},
    "matplotlib": set(),
    "rich": {"runtime/display"},
    "sklearn": set(),
    "tensorflow": set(),
    "torch": set(),
}
COLLECTIVES = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_all_to_all",
}


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


def test_every_file_has_a_floor():
    assert {room(name) for name in FILES} == set(FLOORS)


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
        if room(other) == "runtime" and room(name) not in ("runtime", "__init__"):
            wrong.append(f"line {line}: runtime is optional, nothing imports it")
        if other == "flax" and name != "__init__":
            wrong.append(f"line {line}: flax is optional, nothing imports it")
    assert wrong == []


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


def test_no_assert_and_no_environment_variable_but_that_of_xlas_threads():
    wrong, allowed = [], []
    for name, tree in trees().items():
        for node in ast.walk(tree):  # what is read before what it is read from
            if isinstance(node, ast.Subscript) and name == "placement/workers":
                allowed += [node.value] * (ast.unparse(node) == "os.environ['NPROC']")
            if isinstance(node, ast.Assert):
                wrong.append(f"{name}, line {node.lineno}: assert")
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                if node not in allowed:
                    wrong.append(f"{name}, line {node.lineno}: {node.attr}")
    assert wrong == [] and len(allowed) == 1


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
