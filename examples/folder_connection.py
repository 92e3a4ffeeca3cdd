# SPDX-License-Identifier: Apache-2.0
"""A `Connection` of your own: workers and a server share a folder, and nothing else.

What a worker asks is a file, and so is the answer. A request stays until a server has
answered it, also one that is started again (give it a `checkpoint_dir=`): it knows each
push by its name and applies it once. Files are pickles: who may write may run code.

    python examples/folder_connection.py FOLDER 0 &    # and 1, on any machine; again
    python examples/folder_connection.py FOLDER serve  # where it has died
"""

import os
import pathlib
import pickle
import sys
import time
import uuid
from typing import Any

import jax.numpy as jnp
import optax

import optx_sync as oxs
from optx_sync import runtime

START, INNER, RULE = jnp.zeros(3), optax.sgd(0.1), oxs.rules.local_sgd()
SETTINGS: Any = {"num_workers": 2, "communication_period": 10}


def write(path, value):
    aside = path.with_suffix(f".{uuid.uuid4().hex}")
    aside.write_bytes(pickle.dumps(value))
    aside.replace(path)  # so that nobody reads half of a file


class FolderConnection:
    """A worker's end: a call is a file, and waits for the file that answers it."""

    leaves = staticmethod(lambda told: told)

    def __init__(self, folder):
        self.folder = folder

    def __getattr__(self, name):  # `join`, `everyone_joined`, `asked`, `lease`, `leave`
        return lambda *given: self.hear(self.ask(name, *given))

    def send(self, push):
        path = self.ask("push", push)
        return runtime.Pending(lambda: self.hear(path), path.exists)

    def ask(self, *call):
        path = self.folder / f"{uuid.uuid4().hex}.asked"
        write(path, call)
        return path.with_suffix(".answer")

    def hear(self, path):
        while not path.exists():
            time.sleep(0.005)
        answer = pickle.loads(path.read_bytes())
        path.unlink()
        if isinstance(answer, Exception):  # such as `runtime.PushRefused`
            raise answer
        return answer


def serve(server, folder):
    """Answer requests in the order of their writing, until all workers have left."""
    waits, left = {}, set()
    while len(left) < server.num_workers:
        time.sleep(0.005)
        for path in sorted(folder.glob("*.asked"), key=os.path.getmtime):
            name, *given = waits.get(path) or pickle.loads(path.read_bytes())
            try:
                answer = getattr(server, name)(*given)
            except Exception as error:
                answer = error
            if getattr(answer, "waiting", False):  # for others (`meet=`): look again
                if name == "push":
                    waits[path] = "wait", given[0].worker, 0.0, given[0].part
                continue
            left.update(given if name == "leave" else ())
            write(path.with_suffix(".answer"), answer)
            path.unlink()
    print(f"after {server.global_step} rounds the center is {server.center()}")


def work(connection, index):
    """The program of a worker, whose loss is least at its number + 1."""
    worker = runtime.Worker(connection, START, INNER, RULE, index=index, **SETTINGS)
    while worker.local_step < 100:
        worker.step(worker.params - (index + 1))
    connection.leave(index)


if __name__ == "__main__":
    folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    if what == "serve":
        serve(runtime.Server(START, RULE, **SETTINGS), folder)
    else:
        work(FolderConnection(folder), int(what))
