"""Real processes on a local Ray: workers and servers that are killed, slow or wrong."""

import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.runtime import Push, PushRefused, SyncReplicas
from optx_sync.runtime import ray as on_ray
from optx_sync.simulate import asynchronous

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = [
    # JAX warns of a fork; Ray runs another program in it at once.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]
PARAMS = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
# The center counts: with `DOWN` for a gradient and a rate of 1 each step adds one.
COUNT = oxs.CenterRule(
    lambda own, center, at: own.params - own.taken, reads=("params", "taken")
)
ONE = optax.sgd(1.0)
DOWN = {name: -np.ones_like(value) for name, value in PARAMS.items()}
ENVIRONMENT = {
    # Two cores for all: one thread per process. Compiled as all other tests.
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_cpu_multi_thread_eigen=false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "disabled",
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # Not pytest's directory: Ray's sockets need a short path.
    directory = tempfile.mkdtemp(prefix="oxs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            ray.init(
                num_cpus=3,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=200 * 1024**2,
                _temp_dir=directory,
                _node_ip_address="127.0.0.1",
            )
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


def written(directory: pathlib.Path) -> dict[str, Any]:
    """What workers left in files, by name."""
    return {path.name: json.loads(path.read_text()) for path in directory.glob("*.*")}


def one_worker_is_the_replay(rule, servers, code):
    params = {
        key: np.linspace(0.5, 2, p.size, dtype=np.float32).reshape(p.shape)
        for key, p in PARAMS.items()
    }
    steps, inner = 12, optax.sgd(0.1, momentum=0.9)

    def gradient(params, event):
        return jax.tree.map(lambda p: jnp.sin(jnp.float32(event)) + p, params)

    def train(worker):
        while worker.local_step < steps:
            worker.step(gradient(worker.params, worker.local_step))

    center, history = runtime.run(
        train, params, inner, rule, num_workers=1, num_servers=servers,
        communication_period=3, exchange=code,
    )  # fmt: skip
    run = asynchronous(
        inner, rule, params, lambda worker, params, event: gradient(params, event),
        np.zeros(steps, np.int32), num_workers=1, communication_period=3,
        exchange=code,
    )  # fmt: skip
    expected = run.final.center
    assert isinstance(expected, dict)
    assert history.count("push") == 4 and history.averages is None
    sizes = {event.bytes for event in history.events if event.kind == "push"}
    assert sizes == {run.push_bytes} == {2 * (8 + 4)}
    for key in center:
        np.testing.assert_allclose(
            center[key], np.asarray(expected[key]), rtol=2e-6, atol=2e-6
        )


def test_killed_worker_is_replaced_and_the_others_go_on(tmp_path):
    def train(worker):
        if worker.restarts:
            (tmp_path / f"joined.{worker.index}").write_text(
                json.dumps([worker.local_step, float(worker.params["b"][0])])
            )
        while worker.local_step < 40 or not (tmp_path / "joined.2").exists():
            if (worker.index, worker.local_step, worker.restarts) == (2, 13, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            worker.step(DOWN)
            time.sleep(0.01)
        (tmp_path / f"rounds.{worker.index}").write_text(json.dumps(worker.rounds))

    # Nobody is killed before all are there.
    center, history = runtime.run(
        train, PARAMS, ONE, COUNT, num_workers=3, communication_period=4,
        synchronous=True,
    )  # fmt: skip
    left = written(tmp_path)
    events = history.events
    lost = next(i for i, e in enumerate(events) if e.kind == "lost")
    again = next(
        i
        for i, e in enumerate(events)
        if e.kind == "join" and e.worker == 2 and i > lost
    )
    # The others pushed while there was none, and it joined where they were by then.
    between = {e.worker for e in events[lost:again] if e.kind == "push"}
    assert history.count("lost") == 1 and events[lost].worker == 2
    assert between == {0, 1}
    step, seen = left["joined.2"]
    assert step == 12 and seen >= 4 * (3 + 1)
    # Every push that a worker counts has been applied once, and no other.
    for index in range(3):
        assert left[f"rounds.{index}"] == history.count("push", index)
    total = 4 * history.count("push")
    assert np.all(center["w"] == total) and np.all(center["b"] == total)
    assert history.count("left") == 3


def test_a_worker_may_be_several_processes(tmp_path):
    """One of a group is killed, one of another told to leave; meetings go on."""

    def train(worker):
        me = worker.index, worker.restarts, jax.process_index()
        over = jax.sharding.Mesh(np.reshape(jax.devices(), (2, -1)), ("of", "in"))
        worker.shard(NamedSharding(over, PartitionSpec("of")))
        assert not worker.params["w"].is_fully_addressable
        down = jax.jit(lambda params: jax.tree.map(lambda x: 0.0 * x - 1.0, params))
        while worker.global_step < 8:
            if me == (1, 0, 1) and worker.global_step >= 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if me == (0, 0, 1) and worker.global_step >= 4:
                os.kill(os.getpid(), signal.SIGTERM)
            worker.step(down(worker.params))
            time.sleep(0.01)
        center = multihost_utils.process_allgather(worker.params, tiled=True)
        (tmp_path / ".".join(map(str, me))).write_text(json.dumps(center["b"].tolist()))

    center, history = runtime.run(
        train, PARAMS, ONE, COUNT, num_workers=2, communication_period=4,
        meet=runtime.quorum(2), synchronous=True, processes_per_worker=2,
        resources_per_worker={"CPU": 0.5},
    )  # fmt: skip
    ended = written(tmp_path)
    # All have begun twice: process 1 of worker 0 told its whole group to leave.
    assert sorted(ended) == ["0.1.0", "0.1.1", "1.1.0", "1.1.1"]
    assert history.count("lost", 1) == history.count("lost") == 1
    assert [history.count("left", index) for index in (0, 1)] == [2, 1]
    assert ended["0.1.0"] == ended["0.1.1"] and ended["1.1.0"] == ended["1.1.1"]
    # Each step that a contribution is made of has added one, and no other.
    counted, at = 0, [0, 0]
    for event in history.events:
        if event.kind == "push":
            counted += event.local_step - at[event.worker]
        if event.kind in ("push", "dropped", "join"):
            at[event.worker] = event.local_step
    assert history.events[-1].global_step >= 8 and counted >= 32
    for x in center.values():
        np.testing.assert_array_equal(x, np.float32(counted))


def test_workers_out_of_reach_are_killed_before_others_take_their_place(
    tmp_path, monkeypatch, caplog
):
    """Ray says of living workers that they are gone; and one process does not start."""
    errors = ray.exceptions
    reasons = [
        errors.ActorUnavailableError("connection reset", None),
        errors.OutOfMemoryError("killed for memory"),
    ]
    wait, get, gone = ray.wait, ray.get, {}

    def waits(references, **options):
        all_push = len(list(tmp_path.glob("process.*"))) == 2
        if all_push and len(references) == 2 and not gone:
            gone.update(zip(references, reasons, strict=True))
            return references, []
        return wait(references, **options)

    def gets(reference, **options):
        if isinstance(reference, ray.ObjectRef) and reference in gone:
            raise gone[reference]
        return get(reference, **options)

    class Program:
        """The first process that reads it dies of that."""

        def __reduce__(self):
            def read(path):
                if not path.exists():
                    path.touch()
                    os._exit(1)

            return read, (tmp_path / "read",)

    first = Program()

    def train(worker):
        process = tmp_path / f"process.{worker.index}"
        if worker.restarts and first is None:
            alive = pathlib.Path(f"/proc/{process.read_text()}/exe").exists()
            (tmp_path / f"joined.{worker.index}").write_text(json.dumps(alive))
        elif worker.local_step == 0:
            worker.step(DOWN)
            worker.step(DOWN)
            process.write_text(str(os.getpid()))
        while len(list(tmp_path.glob("joined.*"))) < 2:
            worker.step(DOWN)
            time.sleep(0.01)
        if worker.unpushed == 0:
            worker.step(DOWN)

    for name, patched in (("wait", waits), ("get", gets)):
        monkeypatch.setattr(ray, name, patched)
    # It says what it waits for whenever it looks, so also when it has just started the
    # process anew: how long that takes does not matter.
    monkeypatch.setattr(on_ray._Events, "silence", lambda events: math.inf)
    caplog.set_level("INFO", "optx_sync.runtime")
    center, history = runtime.run(
        train, PARAMS, ONE, COUNT, num_workers=2, communication_period=2
    )
    assert [written(tmp_path)[f"joined.{index}"] for index in (0, 1)] == [False, False]
    lost = {e.worker: e.message for e in history.events if e.kind == "lost"}
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "did not start; again in 1 s" in said
    assert "(starting, no push yet)" in said.partition("The run waits for ")[2]
    # A line of ours, and the rest in a file.
    why = ["Ray killed it, since memory was short", "its process is gone"]
    said_of = sorted(lost.values())
    for message, reason, error in zip(said_of, why, reasons[::-1], strict=True):
        start, _, file = message.partition("; more in ")
        assert start == reason
        assert str(error) in pathlib.Path(file).read_text()
    for index in (0, 1):
        assert f"Worker {index} has ended, and its last 1 steps are not in" in said
    # What all of them have pushed is there, once; the last ones to leave are seen.
    assert np.all(center["w"] == 2 * history.count("push"))
    assert history.count("left") == 2


def test_killed_servers_come_back_from_their_checkpoints(tmp_path):
    """Two parts on two servers, each of which goes back to its own last checkpoint."""
    every, directory = 4, tmp_path / "checkpoints"

    def train(worker):
        servers = worker.connection.servers
        while worker.local_step < 30:
            worker.step(DOWN)
            # Worker 0 kills server 0, and worker 1 later server 1; in the first run.
            killed = tmp_path / f"killed_{worker.index}"
            if worker.local_step == 9 + 10 * worker.index and not killed.exists():
                os.kill(ray.get(servers[worker.index].pid.remote()), signal.SIGKILL)
                killed.touch()
            # Who has ended cannot be told.
            while worker.local_step == 25 and not (tmp_path / "killed_1").exists():
                time.sleep(0.02)
            time.sleep(0.02)
        left = json.dumps([worker.rounds, worker.lost])
        (tmp_path / f"rounds.{worker.index}").write_text(left)

    def start(**changed):
        settings: Any = {"num_workers": 2, "num_servers": 2, "communication_period": 1}
        settings |= {"checkpoint_dir": directory, "checkpoint_every": every}
        return runtime.run(train, PARAMS, ONE, COUNT, **settings | changed)

    center, history = start()
    (rounds, lost), (others, more) = written(tmp_path).values()
    assert rounds == others == 30
    # Each death is that of one server alone.
    assert history.count("started") == 2 and history.count("restored") == 2
    # What was applied and what its worker was told is lost: nothing else.
    assert lost + more <= 2 * (every + 2)
    missing = 0
    for part in center.values():
        assert np.all(part == part.flat[0])
        missing += 60 - part.flat[0]
    assert missing == lost + more
    # The same run again goes on where it ended.
    again, history = start()
    assert history.count("restored") == 2 and history.count("push") == 0
    for name, value in center.items():
        np.testing.assert_array_equal(again[name], value)
    # Another number of servers cannot, and says what is there.
    with pytest.raises(ValueError, match=r"of server_0, server_1 alone; got num_serv"):
        start(num_servers=1)
    shutil.rmtree(directory / "server_1")
    with pytest.raises(ValueError, match="holds checkpoints of server_0 alone"):
        start()


@pytest.mark.parametrize("required", [2, 3])
def test_backup_worker_lets_the_others_go_on_and_without_it_they_wait(
    required, tmp_path, monkeypatch
):
    """Worker 2 makes its first step when the others have made theirs.

    Without a backup they wait for its gradient. Then the server dies: what it had from
    them comes again.
    """

    tell = on_ray._Events._tell

    def tells(events, new):
        """Leave a file for each worker of which the run has heard a push.

        A server forgets what the run has heard, so a worker cannot ask it.
        """
        tell(events, new)
        for event in new:
            if event.kind == "push":
                (tmp_path / f"pushed_{event.worker}").touch()

    monkeypatch.setattr(on_ray._Events, "_tell", tells)

    def train(worker):
        mine = tmp_path / f"others.{worker.index}"
        if worker.index == 2:
            waits_for = "pushed_*" if required == 3 else "others.*"
            while len(list(tmp_path.glob(waits_for))) < 2:
                time.sleep(0.05)
            if required == 3:
                server = worker.connection.servers[0]
                os.kill(ray.get(server.pid.remote()), signal.SIGKILL)
            worker.step(DOWN)
            (tmp_path / "late.2").write_text(json.dumps([worker.used]))
        while worker.global_step < 6:
            if required == 3:  # They cannot end a step without it.
                mine.write_text("0")
            worker.step(DOWN)
        if required == 3 and worker.index < 2:
            worker.step(DOWN)  # Worker 2 has ended, and nobody waits for it.
        mine.write_text(json.dumps(worker.lost))

    center, history = runtime.run(
        train, PARAMS, ONE, SyncReplicas(required, total_num_replicas=3),
        num_workers=3, synchronous=True,
        checkpoint_dir=tmp_path / "saved" if required == 3 else None,
    )  # fmt: skip
    # With a backup its first gradient is six updates old; without, part of the first.
    left = written(tmp_path)
    assert left.pop("late.2") == [required == 3]
    assert set(left.values()) == {0} and len(left) == 3
    assert history.count("dropped") >= (required == 2)
    assert history.count("restored") == (required == 3)
    updates = history.events[-1].global_step
    assert updates >= 6 and np.all(center["w"] == updates)
    assert history.count("push") >= required * updates


def test_bad_pushes_are_refused_and_leave_the_center_alone(tmp_path):
    """Each kind of them is tried in test_server.py; here they come through Ray."""

    def push(number, incarnation, name="w", amount=1.0):
        array = np.full_like(PARAMS[name], amount)
        return Push(
            0, number, {"contribution": {f"['{name}']": array}},
            incarnation=incarnation, part=0 if name == "w" else 1,
        )  # fmt: skip

    def train(worker):
        if worker.index == 1:
            if worker.restarts == 0:  # It does not catch what it gets.
                worker.step(jax.tree.map(lambda x: x * np.nan, DOWN))
            while not (tmp_path / "messages.0").exists():
                time.sleep(0.05)
            return
        connection, mine, messages = worker.connection, worker.incarnation, []
        connection.push(push(1, mine))
        before = connection.center(PARAMS)
        second = push(2, mine)
        for bad in (
            push(2, mine, amount=np.nan), push(2, mine - 1), second._replace(part=2),
        ):  # fmt: skip
            try:
                connection.push(bad)
            except PushRefused as error:
                messages.append(str(error))
            jax.tree.map(
                np.testing.assert_array_equal, connection.center(PARAMS), before
            )
        connection.push(push(1, mine))  # A retry is answered, and not applied again.
        connection.push(second)
        for number in (1, 2):
            connection.push(push(number, mine, "b"))
        (tmp_path / "messages.0").write_text(json.dumps(messages))

    center, history = runtime.run(
        train, PARAMS, ONE, COUNT, num_workers=2, num_servers=2, communication_period=1
    )
    expected = (
        "['w'] holds a NaN", "is not the newest one", "part 2 does not live here",
    )  # fmt: skip
    messages = written(tmp_path)["messages.0"]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
    assert all(np.all(part == 2) for part in center.values())
    assert history.count("retry") == 1
    assert history.count("refused", 0) == 3
    # Who does not catch it is replaced.
    assert history.count("refused", 1) == 2 and history.count("lost", 1) == 1


def test_a_server_dies_with_parts_of_realistic_sizes(tmp_path):
    """A server's part is above what Ray sends along with a call, and above 1 MB."""
    params = {"a": np.zeros(300_000, np.float32), "b": np.zeros(40_000, np.float32)}
    down = {name: -np.ones_like(value) for name, value in params.items()}

    def train(worker):
        servers = worker.connection.servers
        while worker.local_step < 16:
            worker.step(down)
            if (worker.index, worker.local_step) == (0, 7):
                os.kill(ray.get(servers[1].pid.remote()), signal.SIGKILL)
                worker.step(down)
                (tmp_path / "back").touch()
            while worker.index == 1 and not (tmp_path / "back").exists():
                time.sleep(0.02)
                if worker.local_step < 11:
                    break
        (tmp_path / f"rounds.{worker.index}").write_text(
            json.dumps([worker.rounds, worker.lost])
        )

    center, history = runtime.run(
        train, params, ONE, COUNT, num_workers=2, num_servers=2,
        communication_period=1, checkpoint_dir=tmp_path / "saved", checkpoint_every=5,
        exchange=oxs.exchange.all_reduce(jnp.bfloat16),
    )  # fmt: skip
    left = written(tmp_path)
    assert history.count("lost") == 0 and history.count("restored") == 1
    (rounds, lost), (others, others_lost) = left["rounds.0"], left["rounds.1"]
    assert rounds == others == 16
    # What was lost with the server was told: nothing twice, nothing torn.
    assert np.all(center["a"] == 32)
    assert np.all(center["b"] == 32 - lost - others_lost)


class TwoArguments(Exception):
    """An exception that can be pickled, and not read again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_error_in_a_worker_ends_the_run_and_carries_the_center(tmp_path):
    def train(worker):
        worker.step(DOWN)
        if worker.index == 0:
            (tmp_path / "done.0").write_text("0")
            sys.exit(0)  # A way to return.
        while not (tmp_path / "done.0").exists():
            time.sleep(0.05)
        raise KeyError("no such data")

    settings: dict[str, Any] = {"num_workers": 2, "communication_period": 1}
    with pytest.raises(KeyError, match="no such data") as caught:
        runtime.run(train, PARAMS, ONE, COUNT, **settings)
    error: Any = caught.value
    assert np.all(error.center["w"] == 2) and error.history.count("push") == 2
    assert error.history.count("lost") == 0


def test_failures_and_workers_that_hang_are_borne(tmp_path, monkeypatch):
    """Worker 1 is heard of no more; worker 0 raises in each of its lives."""
    silence = on_ray._Events.silence_of

    def silence_of(events, worker):
        """Nobody waits: it has been silent for long where it says that it hangs."""
        hangs = worker == 1 and (tmp_path / "hangs").exists()
        return math.inf if hangs else min(silence(events, worker), 50.0)

    def train(worker):
        worker.step(DOWN)
        if worker.index == 1 and not worker.restarts:
            (tmp_path / "hangs").touch()
            time.sleep(1000)
        if worker.index == 1:
            (tmp_path / "replaced").touch()
            return
        while worker.restarts and not (tmp_path / "replaced").exists():
            time.sleep(0.02)
        if worker.restarts:
            raise KeyError(f"life {worker.restarts}")
        raise TwoArguments(1, 2)

    def kills(supervisor):
        kill(supervisor)
        if 1 in supervisor.hung:  # It has been told; its successor does not hang.
            (tmp_path / "hangs").unlink(missing_ok=True)

    kill = on_ray._Supervisor._kill_who_hangs
    monkeypatch.setattr(on_ray._Events, "silence_of", silence_of)
    monkeypatch.setattr(on_ray._Supervisor, "_kill_who_hangs", kills)
    with pytest.raises(KeyError, match="life 1") as caught:
        runtime.run(
            train, PARAMS, ONE, COUNT, num_workers=2, communication_period=1,
            max_failures=1, worker_timeout=100.0,
        )  # fmt: skip
    error: Any = caught.value
    lost = {e.worker: e.message for e in error.history.events if e.kind == "lost"}
    for index, why, more in (
        (0, "(failure 1 of 1 that the run bears)", "TwoArguments: 1 and 2"),
        (1, "It was killed: no server heard of it for 100 s.", "ActorDiedError"),
    ):
        start, _, file = lost[index].partition("; more in ")
        assert start.endswith(why)
        assert more in pathlib.Path(file).read_text()
    assert np.all(error.center["w"] == 4)


def test_a_run_that_is_told_to_end_saves_the_center(tmp_path, caplog):
    """SIGTERM, as a scheduler sends it, is what Control-C is; the run can go on."""
    driver = os.getpid()

    def train(worker):
        while worker.local_step < 5:
            worker.step(DOWN)
        if worker.restarts == 0:
            os.kill(driver, signal.SIGTERM)
            time.sleep(100)

    caplog.set_level("INFO", "optx_sync.runtime")
    before = signal.getsignal(signal.SIGTERM)
    settings: dict[str, Any] = {
        "num_workers": 1,
        "communication_period": 1,
        "checkpoint_dir": tmp_path,
    }
    with pytest.raises(KeyboardInterrupt) as caught:
        runtime.run(train, PARAMS, ONE, COUNT, **settings)
    error: Any = caught.value
    assert np.all(error.center["w"] == 5) and error.history.count("push") == 5
    assert signal.getsignal(signal.SIGTERM) is before
    center, _ = runtime.run(train, PARAMS, ONE, COUNT, **settings)
    assert np.all(center["w"] == 5)
    said = [record.getMessage() for record in caplog.records]
    ends = [line for line in said if line.startswith("The run ") and "pushes" in line]
    assert ends[0].startswith("The run was ended by KeyboardInterrupt: 5 pushes in")
    assert "a second, the center at step 5" in ends[0]
    assert ends[1].startswith("The run has ended: 0 pushes in")
    saved = f"the center at step 5, saved at step 5 in {tmp_path}, 1 times that a"
    assert saved in ends[1]
    (back,) = [line for line in said if line.startswith("a server is back, at step 5")]
    assert f"from {tmp_path / 'server_0'}" in back
    assert "saved at step 5" in ends[0]


def test_run_joins_the_cluster_that_its_environment_names(tmp_path):
    """As a submitted job does; who finds no place comes when another has ended."""
    script = """
import numpy as np, optax, optx_sync as oxs
from optx_sync import runtime

rule = oxs.CenterRule(
    lambda own, center, at: own.params - own.taken, reads=("params", "taken")
)
params = {"w": np.zeros(2, np.float32)}

def train(worker):
    worker.step({"w": -np.ones(2, np.float32)})

center, _ = runtime.run(
    train, params, optax.sgd(1.0), rule, num_workers=3, communication_period=1,
    resources_per_worker={"CPU": 1.5},
)
print("center", center["w"].tolist())
"""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "center [3.0, 3.0]" in done.stdout, done.stderr
    assert "has joined" in done.stderr  # There is no terminal: the log says it.


@pytest.mark.parametrize("saves", [False, True])
def test_server_without_checkpoints_takes_the_center_along(tmp_path, saves):
    """Also one whose checkpoints are gone: it does not begin from the parameters."""

    def train(worker):
        if saves:
            shutil.rmtree(tmp_path / "server_0")
        os.kill(ray.get(worker.connection.servers[0].pid.remote()), signal.SIGKILL)
        worker.step(DOWN)

    message = "holds no checkpoint any more" if saves else "Pass checkpoint_dir"
    with pytest.raises(RuntimeError, match=message):
        runtime.run(
            train, PARAMS, ONE, COUNT, num_workers=1, communication_period=1,
            checkpoint_dir=tmp_path if saves else None,
        )  # fmt: skip


def test_bad_settings_are_refused_before_a_process_starts(tmp_path):
    def train(worker):
        pass

    def refuses(message, rule: Any = COUNT, error: Any = ValueError, **changes: Any):
        worker_fn = changes.pop("worker_fn", train)
        with pytest.raises(error, match=message):
            runtime.run(worker_fn, PARAMS, ONE, rule, **{"num_workers": 1, **changes})

    replicas = SyncReplicas(1)
    refuses("needs one server; got num_servers=2", replicas, num_servers=2)
    refuses("2 variables cannot be split among 3", num_servers=3)
    refuses("worker_fn must be a function", error=TypeError, worker_fn=None)
    for name in ("max_failures", "worker_timeout", "total_steps"):
        refuses(f"{name} must ", **{name: -1})
    refuses(r"resources_per_worker\['GPU'\] must", resources_per_worker={"GPU": -1})
    refuses("must be a dict such", error=TypeError, resources_per_worker=2)
    refuses("num_workers must be 1 or more", num_workers=0)
    refuses(r"address='10.0.0.1:6379' would have no", address="10.0.0.1:6379")
    refuses("2 fragments cannot be split among 3", num_servers=3, fragments=2)
    refuses("not a multiple of the 3 fragments", fragments=3)
    for name, value in (("fragments", 2), ("delay", 1)):
        refuses(f"Leave {name} out", replicas, **{name: value})


def test_run_starts_ray_where_there_is_none_and_stops_it():
    """The last one: it takes the module's Ray away."""
    ray.shutdown()
    code = oxs.exchange.error_feedback(oxs.exchange.quantized())
    one_worker_is_the_replay(oxs.rules.diloco(), 2, code)
    assert not ray.is_initialized()


def test_each_sample_counts_once_though_workers_die_and_leave(tmp_path):
    total = 60
    samples = runtime.Samples(total, 2)

    def train(worker):
        for lease in worker.samples():
            grads = np.zeros(total, np.float32)
            grads[lease.start : lease.stop] = -1
            if lease.number in (9, 14):  # What it leased ahead is another's.
                told = tmp_path / f"{lease.number}"
                if not told.exists():
                    told.touch()
                    how = signal.SIGKILL if lease.number == 9 else signal.SIGTERM
                    os.kill(os.getpid(), how)
            worker.step({"seen": grads})
            time.sleep(0.02)
        worker.flush()

    rule, params = oxs.rules.local_sgd(), {"seen": np.zeros(total, np.float32)}
    center, history = runtime.run(
        train, params, ONE, rule, num_workers=2, communication_period=3,
        samples=samples,
    )  # fmt: skip
    np.testing.assert_allclose(center["seen"], 0.5)
    assert history.count("lost") == 1 and history.count("left") >= 3
