"""Workers and a server that share a folder: the same numbers, and no push twice."""

import os
import runpy
import signal
import subprocess
import sys
import threading

import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import runtime
from tests import scripts
from tests.examples.running import EXAMPLES

PATH = EXAMPLES / "folder_connection.py"
FOUND = runpy.run_path(str(PATH))
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.ones(2)}
PARAMS["b"] = PARAMS["b"].astype(np.float32)


@pytest.fixture
def served(tmp_path):
    """Serves a folder in a thread, as `serve(server)`; gives a worker's connection."""
    threads = []

    def serve(server):
        thread = threading.Thread(target=FOUND["serve"], args=(server, tmp_path))
        thread.start()
        threads.append((thread, server.num_workers))
        return FOUND["FolderConnection"](tmp_path)

    yield serve
    for thread, workers in threads:
        for worker in range(workers):
            FOUND["FolderConnection"](tmp_path).leave(worker)
        thread.join(60)
        assert not thread.is_alive()
    assert not [*tmp_path.glob("*.asked")]


def walked(connection, rule, **settings):
    """What two workers hold that step in turns, and what they know."""
    inner = oxs.optimizers.adam(0.1)
    workers = [
        runtime.Worker(connection, PARAMS, inner, rule, index=index, **settings)
        for index in range(2)
    ]
    together = "meet" in settings
    for step in range(8):
        # One by one the second one is half as fast.
        for worker in workers[: 2 if together else 1 + step % 2]:
            grads = {name: np.sin(x + step) for name, x in worker.params.items()}
            worker.step(grads, loss=1.0)
        for worker in workers if together else ():
            worker.land()
    told = [(w.rounds, w.global_step, w.staleness, w.used, w.lost) for w in workers]
    return [dict(worker.params) for worker in workers], told


SETTINGS = {
    "one by one": {"communication_period": 2},
    "in parts": {"communication_period": 2, "fragments": 2},
    "together": {"communication_period": 2, "meet": runtime.quorum(2), "delay": 1},
}


@pytest.mark.parametrize("which", SETTINGS)
def test_the_numbers_are_those_of_a_server_in_the_same_process(served, which):
    settings = {"num_workers": 2, **SETTINGS[which]}
    rule = oxs.rules.diloco()
    servers = [runtime.Server(PARAMS, rule, **settings) for _ in range(2)]
    expected, told = walked(servers[0], rule, **settings)
    found, told_here = walked(served(servers[1]), rule, **settings)
    assert told_here == told and sum(rounds for rounds, *_ in told) >= 4
    for one, other in zip(
        [*expected, servers[0].center()], [*found, servers[1].center()], strict=True
    ):
        for name in PARAMS:
            np.testing.assert_array_equal(one[name], other[name])


def test_a_push_whose_worker_has_died_is_applied_once_and_a_refused_one_is_told(served):
    rule, settings = oxs.rules.local_sgd(), {"num_workers": 1}
    settings["communication_period"] = 1
    server = runtime.Server(PARAMS, rule, **settings)
    connection = served(server)

    def worker(connection):
        return runtime.Worker(
            connection, PARAMS, optax.sgd(1.0), rule, index=0, **settings
        )

    down = {name: -np.ones_like(x) for name, x in PARAMS.items()}
    first = worker(connection)
    first.step(down)
    # It dies as its second push is in the folder, and nobody hears the answer.
    dying, connection.hear = connection.hear, lambda path: 1 / 0
    with pytest.raises(ZeroDivisionError):
        first.step(down)
    connection.hear = dying
    again = worker(connection)
    assert (again.local_step, again.restarts, server.global_step) == (2, 1, 2)
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] + 2)
    # What of it is still on its way comes too late, and is not absorbed.
    late = runtime.Push(0, 3, {"contribution": down}, incarnation=first.incarnation)
    with pytest.raises(runtime.PushRefused, match="has joined again"):
        connection.send(late)()
    with pytest.raises(runtime.PushRefused, match="holds a NaN"):
        again.step({name: np.full_like(x, np.nan) for name, x in PARAMS.items()})
    again.pull()
    again.step(down)
    assert server.global_step == 3
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] + 3)


def test_a_request_waits_for_a_server_that_is_started_again(tmp_path):
    """Which finds a push that was applied before it died, and has its checkpoint."""
    rule, settings = oxs.rules.local_sgd(), {"num_workers": 1}
    settings |= {"communication_period": 1, "checkpoint_every": 1}
    settings["checkpoint_dir"] = tmp_path / "center"
    folder = tmp_path / "wire"
    folder.mkdir()
    server = runtime.Server(PARAMS, rule, **settings)
    joined = server.join(0)
    down = {name: np.ones_like(x) for name, x in PARAMS.items()}
    change = {f"['{name}']": x for name, x in down.items()}
    assert change.keys() == joined.parts[0].arrays.keys()
    push = runtime.Push(
        0, 1, {"contribution": change}, local_step=1, incarnation=joined.incarnation
    )
    connection = FOUND["FolderConnection"](folder)
    answer = connection.send(push)
    server.push(push)  # It dies before it writes the answer.
    assert not answer.is_there()
    server = runtime.Server(PARAMS, rule, **settings)
    thread = threading.Thread(target=FOUND["serve"], args=(server, folder))
    thread.start()
    assert answer().round == 1 and server.global_step == 1
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] + 1)
    connection.leave(0)
    thread.join(60)
    assert not thread.is_alive()


def test_processes_of_which_one_is_killed_in_the_middle_of_a_push(tmp_path):
    """It is killed as its fourth push lies in the folder, and started again."""
    killed = f"""
import os, pathlib, runpy, signal
found = runpy.run_path({str(PATH)!r})
connection, sent = found["FolderConnection"](pathlib.Path({str(tmp_path)!r})), []
def send(push):
    sent.append(found["FolderConnection"].send(connection, push))
    if len(sent) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return sent[-1]
connection.send = send
found["work"](connection, 1)
"""
    environment = {**os.environ, "PYTHONPATH": str(scripts.ROOT)}

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    of_one = start(PATH, tmp_path, "0"), start(PATH, tmp_path, "serve")
    with start("-c", killed) as dies:
        assert dies.wait(500) == -signal.SIGKILL
    again = start(PATH, tmp_path, "1")
    try:
        printed = [child.communicate(timeout=500)[0] for child in (*of_one, again)]
        assert [child.returncode for child in (*of_one, again)] == [0, 0, 0]
    finally:
        for child in (*of_one, again):
            child.kill()
            child.wait()
    # 100 steps of each, 10 for a round: none is missing, none counts twice.
    assert "after 20 rounds the center is [1." in printed[1]
    # The answer to the dead is all that is left.
    assert {path.suffix for path in tmp_path.iterdir()} <= {".answer"}
