"""What a user installs: a wheel, in an empty environment."""

import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import optx_sync as oxs

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PYTHONS = re.findall(r":: Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
# The CPU seconds of this package when Optax, and with it JAX, is there, as a share of
# theirs: about the same on every machine, and beside other tests.
SHARE = """
import time
start = time.process_time()
import optax
between = time.process_time()
import optx_sync
print((time.process_time() - between) / (between - start))
"""


def asked_for(extras):
    """The project's requirements with these extras, and with those that they name."""
    left = [*PROJECT["dependencies"], f"optx-sync[{','.join(extras)}]"]
    for text in left:  # grows
        one = Requirement(text)
        if one.name != "optx-sync":
            yield one
        for extra in one.extras if one.name == "optx-sync" else ():
            left += PROJECT["optional-dependencies"][extra]


def test_the_version_is_one():
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest and cited
    assert oxs.__version__ == PROJECT["version"] == newest[1] == cited[1]


def test_groups_are_what_make_installs():
    """A group names extras, whose requirements are written once."""
    groups = dict(SETTINGS["dependency-groups"])
    assert groups.pop("dev") == [{"include-group": of} for of in ("test", "docs")]
    made = (ROOT / "Makefile").read_text()
    for name, (one,) in groups.items():
        (extras,) = re.findall(rf"/{name}-installed: EXTRAS := (\S+)", made)
        assert one == f"optx-sync[{extras}]"
        assert list(asked_for(extras.split(",")))


def test_the_weekly_run_watches_what_the_tests_are_made_with():
    (watched,) = re.findall(r"^WATCHED := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    asked = {one.name for one in asked_for(["test"])}
    assert {*watched.split()} - {"jaxlib"} <= asked  # which jax asks for
    assert {"jax", "flax", "optax", "orbax-checkpoint", "ray"} <= {*watched.split()}


@pytest.mark.parametrize("version", PYTHONS)
def test_versions_that_were_tried_are_of_all_that_make_installs(version):
    """One version of each, which the project takes, and no place to get it from."""
    path = ROOT / "constraints" / f"python{version}.txt"
    comment, *lines = path.read_text().splitlines()
    assert comment.startswith("# ")
    tried = {canonicalize_name(n): v for n, v in (x.split("==") for x in lines)}
    assert len(tried) == len(lines)
    asked = list(asked_for(["test", "docs"]))
    assert {"jax", "ray", "pyright", "mkdocs-material"} <= {one.name for one in asked}
    for one in asked:
        assert one.specifier.contains(tried[canonicalize_name(one.name)]), one


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist; the wheel that is built from it lies beside it."""
    folder = tmp_path_factory.mktemp("dist")
    # Not isolated: nothing is downloaded, the backend is in the extra `test`.
    build = ("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(sys.executable, *build, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist):
    (wheel,) = sdist.parent.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an empty environment into which the wheel has gone."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (python,) = folder.glob("bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", wheel)
    # JAX and Optax come from here instead of the network; as a path only, so that
    # the editable installation's own `.pth` is not read.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "elsewhere.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def bare():
    """Without what would lead back to the working tree."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_wheel_works_in_an_empty_environment(python, tmp_path):
    smoke = (Path(__file__).with_name("smoke.py"), "diloco", "ftrl")
    printed = run(python, "-W", "error", *smoke, cwd=tmp_path, env=bare()).split("\n")
    assert printed[0].startswith(str(python.parents[1]))
    assert printed[1:3] == ["diloco ok", "ftrl ok"]


def test_wheel_holds_the_package_and_its_licence(wheel):
    names = run(sys.executable, "-m", "zipfile", "--list", wheel)
    for name in ("optx_sync/py.typed", "optx_sync/runtime/ray.py", "LICENSE"):
        assert name in names, name
    folders = set(re.findall(r"^([\w.-]+)/", names, re.MULTILINE))
    assert folders == {"optx_sync", f"{wheel.stem.rsplit('-', 3)[0]}.dist-info"}


def test_sdist_holds_all_that_tests_read(sdist):
    """Its own tests pass in it, where nothing else of the repository is."""
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    here = {str(path.relative_to(ROOT)) for path in of_the_repository()}
    assert len(here) > 500 and not here - held, sorted(here - held)[:10]


def of_the_repository():
    """All files but those that are made, and those for a host of repositories."""
    for folder in "benchmarks constraints docs examples optx_sync tests".split():
        for path in (ROOT / folder).rglob("*.*"):
            made = {"__pycache__", "results-quick"} & set(path.parts)
            if path.is_file() and not made:
                yield path
    for pattern in ("*.md", "*.toml", "*.yml", "*.cff", "Makefile", "LICENSE"):
        yield from ROOT.glob(pattern)


def test_import_takes_a_small_part_of_what_optax_takes(python, tmp_path):
    # The wheel's installation has compiled it.
    each = [float(run(python, "-c", SHARE, cwd=tmp_path, env=bare())) for _ in range(3)]
    assert statistics.median(each) <= 0.3, each
