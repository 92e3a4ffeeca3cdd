"""Scripts in processes of their own, forked from an interpreter that has read JAX.

To read JAX, Flax and matplotlib takes longer than many a script. One interpreter reads
them once for all tests of a process, and starts nothing: each script has devices, flags
and modules of this library of its own, as one that a user starts.

    {"script": ..., "arguments": [...], "environment": {...}, "folder": ...}

is a line of its input, and `[exit code, stdout, stderr]` one of its output.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
SECONDS = 500  # for one of them
# All that scripts import and that is not ours.
LIBRARIES = (
    *("optax", "flax.linen", "flax.nnx", "numpy", "rich.progress"),
    *("rich.table", "matplotlib.figure", "matplotlib.pyplot", "sklearn.datasets"),
    *("sklearn.metrics", "jax.experimental.topologies"),
)


@functools.cache
def _interpreter() -> tuple[Any, threading.Lock]:
    # No threads at import, of which a fork would not know.
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.scripts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "120"},
    )
    atexit.register(child.kill)
    return child, threading.Lock()


def run(
    script: Any,
    *arguments: Any,
    folder: Any = None,
    exit_code: int = 0,
    **environment: Any,
) -> str:
    """What a script, or the text of one, prints; warnings are errors.

    JAX has read its environment already: `JAX_...` sets its configuration.
    """
    child, lock = _interpreter()
    asked = {
        "script": str(script),
        "arguments": [str(one) for one in arguments],
        "environment": environment,
        "folder": str(folder or ROOT),
    }
    with lock:
        child.stdin.write(json.dumps(asked) + "\n")
        child.stdin.flush()
        code, stdout, stderr = json.loads(child.stdout.readline())
    # What others log by the clock, as Orbax's "checkpointing less frequently", is no
    # error: it is in stderr, and shown here where something else was one.
    late = f"It took longer than {SECONDS} seconds.\n" * (code == -signal.SIGALRM)
    assert code == exit_code, late + stdout + stderr
    return stdout if not code else stderr


def launch(module: str, folder: Path, processes: int, arguments: Any) -> list[Any]:
    """Processes that run a module, each with its `arguments(number, port)`.

    What they print is in FOLDER/PROCESSES_NUMBER.log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for number in range(processes):
        command = [sys.executable, "-m", module, *map(str, arguments(number, port))]
        with (folder / f"{processes}_{number}.log").open("w") as output:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )
        children.append(child)
    return children


def _answer(asked: dict[str, Any]) -> tuple[int, str, str]:
    outputs = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        for number, output in enumerate(outputs, 1):
            os.dup2(output.fileno(), number)
        code = 1
        try:
            _run(**asked)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read().decode("utf-8", "replace"))
        output.close()
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _run(
    script: str, arguments: list[str], environment: dict[str, Any], folder: str
) -> None:
    for name, value in environment.items():
        os.environ[name] = str(value)
        if name.startswith("JAX_"):
            jax.config.update(name.lower(), value)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    if "\n" in script:
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        return
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # what all scripts share: nobody looks through it again
    gc.set_threshold(20_000, 20, 20)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
