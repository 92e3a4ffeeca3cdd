"""A Ray of this machine alone, and what befalls the processes of a run on it.

Import it before `ray`, which reads its environment.
"""

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray's processes would otherwise yield to whatever else the machine does.
os.environ["RAY_worker_niceness"] = "0"

import jax
import ray

jax.config.update("jax_platforms", "cpu")

ACTORS = {"workers": "ray::WorkerActor", "servers": "ray::ServerActor"}
PATIENCE_SECONDS = 180  # what a run may take to end after the last fault


def take_one_thread() -> None:
    """Let each of many processes compute with one thread, as XLA reads its flags."""
    one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", one)


@contextlib.contextmanager
def cluster(cpus: int, **more: Any) -> Iterator[Any]:
    """A new cluster: never another one that happens to run here."""
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    yield ray.init("local", num_cpus=cpus, **quiet | more)
    ray.shutdown()


@contextlib.contextmanager
def folder_for(what: str) -> Iterator[Path]:
    """A folder that the processes of a run share, and that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix=what))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def processes(kind: str) -> list[int]:
    """This run's workers or servers, and nobody else's."""
    table = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    children, names = collections.defaultdict(list), {}
    for line in table.stdout.splitlines():
        pid, parent, *words = line.split()
        children[int(parent)].append(int(pid))
        names[int(pid)] = words[0] if words else ""
    ours = [os.getpid()]
    for pid in ours:
        ours += children[pid]
    return [pid for pid in ours if names.get(pid, "").startswith(ACTORS[kind])]


def tell(pid: int, what: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a process, 0 for none; whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, what)
        return bool(pid)
    return False


def until(there: Callable[[], Any], what: str) -> Any:
    """Wait for this to find something, and return it."""
    last = time.time() + 300
    while time.time() < last:
        if found := there():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"The workers do not {what}.")
