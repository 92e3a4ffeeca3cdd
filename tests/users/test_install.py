"""What a user installs: a wheel, in an empty environment."""

import os
import re
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = """
import jax, jax.numpy as jnp, numpy as np, optax, optx_sync as oxs, sys

assert optx_sync_is_installed(oxs.__file__), oxs.__file__
tx = oxs.elastic_average(
    optax.sgd(0.1), "workers", communication_period=2, moving_rate=0.2, rho=0.0
)
params = {"w": jnp.ones(3)}
axes = oxs.state_axes(tx, params)
state, params = oxs.stack(tx.init(params), 4, axes), oxs.stack(params, 4)


def step(params, state, noise):
    grads = jax.tree.map(lambda w: w + noise, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


step = jax.vmap(
    step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="workers"
)
for _ in range(4):
    params, state = step(params, state, np.linspace(-1.0, 1.0, 4, dtype=np.float32))
assert int(oxs.metrics(state).rounds) == 2
center = oxs.center_params(state, params)["w"]
assert center.shape == (3,) and 0.5 < float(center[0]) < 1.0, center
print(oxs.optimizers.ftrl(0.1).init(center).slots._fields, "ok")
"""
# The clock starts when Optax, and with it JAX, is there: what is left is this package.
TIME = """
import time
import optax
start = time.process_time()
import optx_sync
print(time.process_time() - start)
"""


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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Not isolated: nothing is downloaded, the backend is in the extra `test`.
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    run(sys.executable, *build, cwd=folder)
    (wheel,) = folder.glob("*.whl")
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
    site = (
        "optx_sync_is_installed = lambda path: path.startswith("
        f"{str(python.parents[1])!r})"
    )
    printed = run(python, "-W", "error", "-c", site + SMOKE, cwd=tmp_path, env=bare())
    assert printed == "('accum', 'linear') ok\n"


def test_wheel_holds_the_package_and_its_licence(wheel):
    names = run(sys.executable, "-m", "zipfile", "--list", wheel)
    for name in ("optx_sync/py.typed", "optx_sync/runtime/ray.py", "LICENSE"):
        assert name in names, name
    folders = set(re.findall(r"^([\w.-]+)/", names, re.MULTILINE))
    assert folders == {"optx_sync", f"{wheel.stem.rsplit('-', 3)[0]}.dist-info"}


def test_import_takes_a_tenth_of_a_second_more_than_optax(python, tmp_path):
    # The wheel's installation has compiled it. CPU seconds: tests run side by side.
    times = [float(run(python, "-c", TIME, cwd=tmp_path, env=bare())) for _ in range(3)]
    assert statistics.median(times) <= 0.1, times
