"""The supervisor, and the connection to servers, with Ray's calls in this process."""

import functools
import os
import pathlib
import signal
import stat
import tempfile
import threading
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import Event, Push, PushRefused, ray_actors, server, system
from optx_sync.runtime import ray as on_ray
from optx_sync.runtime.ray_actors import RayConnection, ServerActor
from optx_sync.runtime.shared import SharedLine
from optx_sync.runtime.system import System, using

PARAMS = {"b": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
COUNT = oxs.CenterRule(
    lambda own, center, at: own.params - own.taken, reads=("params", "taken")
)


class Ref:
    """An answer that may not be there yet."""

    done: bool = False
    value: Any = None


class Handle:
    """An actor's handle; while it is frozen, calls wait in the order they came in."""

    def __init__(self, actor):
        self.actor, self.frozen, self.waiting = actor, False, []

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *given: self.ask(name, *given))

    def ask(self, name, *given):
        ref = Ref()
        self.waiting.append((ref, name, given))
        if not self.frozen:
            self.answer()
        return ref

    def answer(self):
        while self.waiting:
            ref, name, given = self.waiting.pop(0)
            ref.value, ref.done = getattr(self.actor, name)(*given), True


class RayHere:
    """What of Ray a supervisor and a connection call."""

    exceptions = types.SimpleNamespace(
        RayTaskError=ConnectionRefusedError, RayError=ConnectionError,
        RayActorError=ConnectionError, ActorDiedError=ConnectionAbortedError,
        UnserializableException=ConnectionRefusedError,
    )  # fmt: skip

    def __init__(self):
        self.killed = []
        self.kill = self.killed.append

    def put(self, value):
        return value

    def get(self, ref):
        if isinstance(ref.value, ConnectionError):
            raise ref.value
        return ref.value

    def cluster_resources(self):
        return {"CPU": 2.0}

    def available_resources(self):
        return {"CPU": 0.5}

    def wait(self, refs, num_returns=1, timeout=0.0):
        return [ref for ref in refs if ref.done], [ref for ref in refs if not ref.done]


class SystemHere(System):
    """Ray's stand-in, and a clock that a test may set."""

    def __init__(self):
        self.stands: RayHere = RayHere()
        self.seconds: float | None = None

    def ray(self):
        return self.stands

    def now(self):
        return super().now() if self.seconds is None else self.seconds


@pytest.fixture(name="ray")
def here(monkeypatch):
    told = types.SimpleNamespace(add=lambda *_: None, rate=lambda *_: None)
    monkeypatch.setattr(on_ray, "Metrics", lambda: told)
    with using(SystemHere()):
        yield system.here().ray()


def servers_of(number, workers=1, **settings):
    """A connection to as many servers."""
    settings |= {"num_workers": workers, "num_servers": number, "copy_replies": False}
    actors = [
        ServerActor(PARAMS, COUNT, {**settings, "number": k}) for k in range(number)
    ]
    return RayConnection([Handle(a) for a in actors], PARAMS, 1, "runs/1")


def start_of(connection):
    """worker_fn, connection, parameters, inner, agreement, options."""
    return None, connection, None, None, None, {}


def supervisor_of(ray, connection, workers=1, **limits):
    display: Any = types.SimpleNamespace(show=lambda *_: None)
    limits = on_ray._Limits(
        **{"max_failures": 0, "worker_timeout": None, "needs": {}} | limits,
        num_workers=workers, total_steps=None,
    )  # fmt: skip
    supervisor = on_ray._Supervisor(start_of(connection), limits, display)
    supervisor.actors = {worker: [f"actor {worker}"] for worker in range(workers)}
    supervisor._launch = lambda index: supervisor.actors.update(
        {index: [f"actor {index}"]}
    )
    return supervisor, supervisor.events


def supervised(connection, limits):
    with on_ray._Interrupts() as interrupts:
        return on_ray._supervised(start_of(connection), PARAMS, limits, interrupts)


def push(number, joined, part, value=1.0):
    name = "['b']" if part == 0 else "['w']"
    arrays = {"contribution": {name: np.full(2, value, np.float32)}}
    return Push(0, number, arrays, part=part, incarnation=joined.incarnation)


@pytest.mark.parametrize("whole", [False, True])
def test_a_round_counts_where_all_its_parts_were_taken(ray, whole):
    """Of several servers one applies its part, and the other refuses it."""
    connection = servers_of(2)
    supervisor, events = supervisor_of(ray, connection)
    joined = connection.join(0)
    died = Ref()
    died.value = ConnectionError("it is gone")
    for life in range(1, on_ray.DEATHS_WITHOUT_A_ROUND + 1):
        connection.push(push(life, joined, 0))
        if whole:
            connection.push(push(life, joined, 1))
        else:
            with pytest.raises(PushRefused, match="holds a NaN"):
                connection.push(push(1, joined, 1, np.nan))
        events.collect()
        if life < on_ray.DEATHS_WITHOUT_A_ROUND or whole:
            supervisor._over(0, died)
            assert supervisor.deaths[0] == (1 if whole else life)
    if not whole:
        with pytest.raises(RuntimeError, match="died 5 times without a round"):
            supervisor._over(0, died)


def test_a_group_is_lost_as_a_whole_and_for_what_happened_first(ray):
    """A process that computes with one that died raises, and Ray hears that first."""
    supervisor, events = supervisor_of(ray, servers_of(1, 2), workers=2)
    supervisor.actors[0] = ["process 0", "process 1"]
    raised, died, other = Ref(), Ref(), Ref()
    raised.value, raised.done = ConnectionRefusedError("closed by its peer"), True
    died.value, died.done = ConnectionError("it is gone"), True
    supervisor.running = {died: 0, other: 1}
    supervisor.connection.join(0)
    events.collect()
    supervisor._over(0, raised)
    assert ray.killed == ["process 1", "process 0"] and not supervisor.failures
    assert supervisor.deaths == {0: 1} and supervisor.running == {other: 1}
    # One that has returned waits for the rest of its group.
    returned = Ref()
    supervisor.running = {died: 0}
    returned.value = 0
    supervisor._over(0, returned)
    assert not supervisor.returned and len(ray.killed) == 2


def test_a_call_that_was_lost_before_a_program_began_is_no_failure_of_it(
    ray, monkeypatch
):
    """Ray raises it as an error of `run`, whose argument the call was to bring."""
    monkeypatch.setattr(on_ray, "START_AGAIN_SECONDS", 0.0)
    connection = servers_of(1)
    supervisor, events = supervisor_of(ray, connection)
    raised: Any = ConnectionRefusedError("an argument could not be computed")
    raised.cause = ConnectionError("the actor is unavailable")
    lost = Ref()
    lost.value = raised
    supervisor._over(0, lost)
    assert not supervisor.failures and not supervisor.deaths[0]
    assert ray.killed == ["actor 0"] and events.seen.counts["lost", 0] == 1
    connection.join(0)  # Once it has begun, the error is the program's own.
    events.collect()
    with pytest.raises(ConnectionError, match="is unavailable"):
        supervisor._over(0, lost)


def test_time_in_which_a_server_owes_an_answer_is_no_silence(ray):
    """A server that was frozen answers the supervisor before it hears its workers."""
    clock: Any = system.here()
    clock.seconds = 0.0
    connection = servers_of(1)
    (server,) = connection.servers
    supervisor, events = supervisor_of(ray, connection, worker_timeout=3.0)
    supervisor.running = {"reference": 0}
    events.launched(0)

    def passes(seconds, step=0.25):
        for _ in range(round(seconds / step)):
            clock.seconds += step
            events.collect()
            supervisor._kill_who_hangs()

    joined = connection.join(0)
    passes(1.0)
    server.frozen = True
    passes(60.0)
    news = server.waiting
    line = ray_actors.SharedLine()
    enter = line.packed(
        (ray_actors.protocol.Request("enter", 0, joined.incarnation), None)
    )
    server.waiting = [*news, (Ref(), "handle", (0, enter))]
    server.frozen = False
    # News are answered first, and the worker's message a little later.
    (message,) = server.waiting[1:]
    server.waiting = server.waiting[:1]
    server.answer()
    passes(0.25)
    server.waiting = [message]
    server.answer()
    passes(2.75)
    assert not ray.killed
    passes(1.0)
    assert ray.killed == ["actor 0"]


def test_a_run_that_is_ended_saves_all_that_its_workers_were_told_of(ray, monkeypatch):
    """They are stopped first; one that still pushes then is refused."""
    connection = servers_of(2)
    joined = connection.join(0)

    def supervise(supervisor):
        supervisor.actors[0] = ["actor 0"]
        for part in (0, 1):
            connection.push(push(1, joined, part))
        raise KeyboardInterrupt

    def checkpoint():
        assert ray.killed == ["actor 0"]
        with pytest.raises(PushRefused, match="the run has ended"):
            connection.push(push(2, joined, 0))

    monkeypatch.setattr(on_ray._Supervisor, "supervise", supervise)
    monkeypatch.setattr(connection, "checkpoint", checkpoint)
    limits = on_ray._Limits(1, 0, None, None)
    with pytest.raises(KeyboardInterrupt) as caught:
        supervised(connection, limits)
    error: Any = caught.value
    np.testing.assert_array_equal(error.center["b"], 1.0)
    assert error.history.count("push") == 1 and not error.history.count("refused")
    (said,) = error.__notes__
    assert said == (
        "The center as it was is this exception's attribute `center`. No file has it: "
        "a run with checkpoint_dir=... can go on."
    )


def test_who_interrupts_the_end_of_a_run_too_sees_one_error_and_what_is_kept(
    ray, monkeypatch
):
    first: Any = KeyboardInterrupt()

    def supervise(supervisor):
        saved = Event("saved", -1, 0, 0, 7, 0, 0.0, {})
        supervisor.events.seen.add([saved])
        raise first

    def saved(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(on_ray._Supervisor, "supervise", supervise)
    monkeypatch.setattr(on_ray._Supervisor, "saved", saved)
    limits = on_ray._Limits(1, 0, None, None)
    with pytest.raises(KeyboardInterrupt) as caught:
        supervised(servers_of(1), limits)
    assert caught.value is first and first.__context__ is None
    assert first.center is None and first.history.count("saved") == 1
    assert first.__notes__ == [
        "Interrupted again: the center is not here. Saved at step 7 in runs/1: the "
        "same call, resume=True, goes on."
    ]
    # It must not be lost in an error that a program may catch, to try again.
    first = KeyError()
    with pytest.raises(KeyboardInterrupt):
        supervised(servers_of(1), limits)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ends_early", [True, False])
def test_a_ctrl_c_while_a_run_is_cleared_away_waits_until_that_is_done(
    ray, monkeypatch, number, ends_early
):
    """Else actors live on, the terminal has no cursor, and the center is lost."""
    first, killed = KeyboardInterrupt(), []

    def supervise(supervisor):
        supervisor.actors = {0: ["actor 0"], 1: ["actor 1"]}
        if ends_early:
            raise first

    def kill(actor):
        signal.raise_signal(number)
        killed.append(actor)

    ray.kill = kill
    monkeypatch.setattr(on_ray._Supervisor, "supervise", supervise)
    monkeypatch.setattr(on_ray._Supervisor, "carry", lambda *_: None)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        supervised(servers_of(1), on_ray._Limits(2, 0, None, None))
    assert killed == ["actor 0", "actor 1"] and signal.getsignal(number) is before
    assert (caught.value is first) == ends_early


def test_ray_may_restart_workers_and_calls_their_program_once(ray, monkeypatch):
    """Where memory is short it kills first what it may restart, as servers are."""
    asked: dict[str, Any] = {}

    def options(**given):
        asked.update(given)
        return types.SimpleNamespace(remote=lambda: Handle(None))

    ray.remote = lambda actor: types.SimpleNamespace(options=options)
    connection = servers_of(1)
    supervisor, _ = supervisor_of(ray, connection)
    del supervisor._launch
    monkeypatch.setattr(Handle, "ask", lambda *_: Ref())
    supervisor._launch(0)
    assert asked["max_restarts"] and asked["max_task_retries"] == 0


def test_who_has_no_place_is_told_and_is_not_taken_for_one_that_hangs(
    ray, monkeypatch, caplog
):
    monkeypatch.setattr(on_ray, "SILENCE_SECONDS", -1.0)
    needs = {"CPU": 1.0, "GPU": 0.5}
    limits = {"needs": needs, "worker_timeout": -1.0}
    supervisor, events = supervisor_of(ray, servers_of(1), **limits)
    supervisor.running = {"reference": 0}
    supervisor.placing = {0: [Ref()]}
    events.launched(0)
    supervisor._see_who_has_a_place()
    supervisor._kill_who_hangs()
    assert caplog.messages == [
        "The run waits for a place for worker 0, or for its processes to start: "
        "each needs 1 CPU (0.5 of 2 are free), 0.5 GPU (0 of 0 are free)."
    ]
    assert not ray.killed
    supervisor.placing[0][0].done = True
    supervisor._see_who_has_a_place()
    supervisor._kill_who_hangs()
    assert len(caplog.messages) == 1 and ray.killed == ["actor 0"]


def test_who_starts_where_enough_is_free_waits_for_no_place(ray, monkeypatch, caplog):
    monkeypatch.setattr(on_ray, "SILENCE_SECONDS", -1.0)
    ray.available_resources = lambda: {"CPU": 2.0}
    supervisor, _ = supervisor_of(ray, servers_of(1), needs={"CPU": 1.0, "GPU": 0})
    supervisor.placing = {0: [Ref()], 1: [Ref()]}
    supervisor._see_who_has_a_place()
    (said,) = caplog.messages
    assert said.startswith(
        "The run waits for the processes of workers 0, 1 to start: each needs 1 CPU (2 "
        "of 2 are free), 0 GPU (0 of 0 are free)."
    )
    # A group of three processes has no place among two.
    supervisor.limits = supervisor.limits._replace(processes=3)
    supervisor._see_who_has_a_place()
    assert "for a place" in caplog.messages[1] and "3 CPU (2 of" in caplog.messages[1]


def test_workers_that_start_are_told_of_together(ray, caplog):
    """Eight who have no place yet fill no terminal."""
    supervisor, events = supervisor_of(ray, servers_of(1, 12), workers=12)
    supervisor.running = {f"reference {worker}": worker for worker in range(12)}
    events.seen.add([Event("join", 3, 0, 0, 0, 0, 0.0, {})])
    events.seen.add([Event("push", 4, 1, 5, 1, 0, 0.0, {})])
    supervisor._say_what_for()
    (said,) = caplog.messages
    assert said.startswith(
        "The run waits for workers 0, 1, 2, 5, 6, 7, 8, 9 and 2 more (starting, no "
        "push yet); worker 3 (joined, no push yet); worker 4, whose last push was "
    )


def test_what_ray_says_of_errors_is_filed_for_this_user_alone(tmp_path, monkeypatch):
    """Where others may write: at a name that they cannot know, nor lay a link at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(on_ray, "_file", functools.cache(on_ray._file.__wrapped__))
    others = tmp_path / "others"
    (tmp_path / f"optx_sync_{os.getpid()}.log").symlink_to(others)
    path = on_ray._filed(ValueError("the first \udc80"))
    assert on_ray._filed(ValueError("the second")) == path
    assert not others.exists() and stat.S_IMODE(os.stat(path).st_mode) == 0o600
    filed = pathlib.Path(path).read_text()
    assert "ValueError: the first \\udc80" in filed and "the second" in filed


def test_a_full_disk_keeps_no_run_from_telling_of_a_death(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(on_ray, "_file", functools.cache(on_ray._file.__wrapped__))
    assert "no file" in on_ray._filed(ValueError("lost"))


def test_a_worker_joins_servers_whose_clocks_differ(ray):
    """The first server hands out incarnations, and came back with a clock behind."""
    connection = servers_of(2)
    before = connection.join(0)
    behind: Any = SystemHere()
    behind.stamp = lambda: 10
    with using(behind):
        connection.servers[0].actor = servers_of(2).servers[0].actor
    joined = connection.join(0)
    assert joined.incarnation > before.incarnation
    for part in (0, 1):
        connection.push(push(1, joined, part))
    with pytest.raises(PushRefused, match="has joined again"):
        connection.push(push(2, before, 1))
    assert connection.join(0).restarts == 1


def test_of_two_who_join_at_once_the_later_one_stays(ray, monkeypatch):
    """The earlier one finds a newer incarnation at the second server, and gives way."""
    connection = servers_of(2)
    late, others = RayConnection(connection.servers, PARAMS, 1, "runs/1"), []
    converse = late._converse

    def overtaken(number, client):
        if number == 1 and not others:
            others.append(connection.join(0))
        return converse(number, client)

    monkeypatch.setattr(late, "_converse", overtaken)
    with pytest.raises(ValueError, match="has joined again"):
        late.join(0)
    for part in (0, 1):
        connection.push(push(1, others[0], part))


def test_parts_that_wait_at_a_server_that_comes_back_are_sent_again(
    ray, monkeypatch, tmp_path
):
    monkeypatch.setattr(ray_actors, "SharedLine", lambda begins=False: SharedLine())
    monkeypatch.setattr(server, "TOKEN_SECONDS", 0.0)
    settings: dict[str, Any] = {
        "num_workers": 2,
        "communication_period": 4,
        "fragments": 2,
        "delay": 1,
        "meet": oxs.runtime.quorum(2),
    }
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 1000}

    def start(params):
        return ServerActor(params, COUNT, {**settings, **saved})

    handle = Handle(start(PARAMS))
    workers = [
        oxs.runtime.Worker(
            RayConnection([handle], PARAMS, 2, "runs/1"),
            PARAMS,
            optax.sgd(1.0),
            COUNT,
            index=index,
            **settings,
        )
        for index in range(2)
    ]
    down = {name: -np.ones_like(value) for name, value in PARAMS.items()}
    workers[0].step(down)
    workers[0].flush()  # Both parts wait for the other worker.
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in PARAMS.items()}
    handle.actor = start(shapes)
    workers[1].step(down)
    workers[1].flush()
    for worker in workers:
        worker.land()
        assert worker.used and not worker.lost
    center: Any = handle.actor.call("center")
    for name in PARAMS:
        np.testing.assert_array_equal(center[name], 2.0)


def test_a_worker_hears_of_each_server_that_it_is_asked(ray):
    """One call of each part waits at its server, however often it is looked at."""
    connection = servers_of(2, workers=2, meet=oxs.runtime.quorum(2), delay=1)
    first, second = connection.servers
    for handle in (first, second):
        handle.frozen = True  # as a call that waits there
    for _ in range(5):
        assert not any([connection.asked(1, part, 0) for part in (0, 1)])
    assert [len(handle.waiting) for handle in (first, second)] == [1, 1]
    for handle, told in ((second, True), (first, False)):
        handle.actor = types.SimpleNamespace(call=lambda *_, told=told: told)
        handle.answer()
    assert [connection.asked(1, part, 0) for part in (0, 1)] == [False, True]
    assert not connection.asked(1, 0, 1)  # after another meeting it asks anew
    assert len(first.waiting) == 1


def test_what_cannot_be_sent_is_named_and_not_shown():
    lock = threading.Lock()
    things = {"inner": ray_actors.optax.sgd(1.0), "worker_fn": lambda worker: lock}
    with pytest.raises(
        TypeError, match=r"^worker_fn cannot .*: cannot pickle '_thread"
    ):
        with ray_actors.naming_what_cannot_be_sent(**things):
            raise TypeError("it holds " + "numbers, " * 9999)
