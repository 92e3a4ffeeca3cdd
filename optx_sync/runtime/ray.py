# SPDX-License-Identifier: Apache-2.0
"""Servers and workers as Ray actors: Ray schedules and restarts them, moves the arrays.

Arrays travel through Ray's object store: whoever receives them sees the same memory.
Ray is imported when something here is called, not before.
"""

import os
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.rule import Period, check_period
from optx_sync.checks import check_inner
from optx_sync.runtime.protocol import (
    Agreement,
    Event,
    Expected,
    Joined,
    Push,
    PushRefused,
    Reply,
    SyncReplicas,
    check_agreement,
    expected,
    join_parts,
    partition,
    path_of,
    round_of,
)
from optx_sync.runtime.server import Server
from optx_sync.runtime.worker import Worker

# A worker that dies so often without one round between is not replaced again.
DEATHS_WITHOUT_A_ROUND = 5
# How long a worker waits for a server that is being restarted.
SERVER_PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.25


class History(NamedTuple):
    """What happened in a run."""

    events: list[Event]  # in the order of the servers' clocks
    averages: Any  # of `SyncReplicas(variable_averages=)`, or None

    def count(self, kind: str, worker: int | None = None) -> int:
        """How many events of a kind there were, of one worker or of all."""
        return sum(
            event.kind == kind and worker in (None, event.worker)
            for event in self.events
        )


def run(
    worker_fn: Callable[[Worker], Any],
    params: Any,
    inner: optax.GradientTransformation,
    agreement: Agreement,
    *,
    num_workers: int,
    num_servers: int = 1,
    communication_period: Period = 10,
    checkpoint_dir: str | pathlib.Path | None = None,
    synchronous: bool = False,
    address: str | None = None,
    checkpoint_every: int = 100,
) -> tuple[Any, History]:
    """Train with workers that do not wait for each other, on this machine or a cluster.

    `worker_fn(worker)` runs in a process of its own for each worker, and is any JAX
    program: it computes a gradient at `worker.params` and calls `worker.step(grads,
    loss=loss)`, once per batch. The run ends when all of them have returned.

    A worker whose process dies, or whose push was refused and who did not catch
    `PushRefused`, is replaced: `worker_fn` starts again, with the center for
    parameters, a fresh optimizer state, and `worker.local_step` as of its last round;
    so write `while worker.local_step < steps:`. The others go on meanwhile. Any other
    exception in `worker_fn` ends the run. A server that dies comes back from its last
    checkpoint, if there is a `checkpoint_dir`; workers try again until then.

    Where Rich is installed and there is a terminal, a table shows the workers. Ray is
    started on this machine unless the program has started it, or `address` is given;
    what is started here is stopped at the end. Each worker gets an equal part of the
    CPUs, at most one, and of the GPUs, in whole numbers.

    Args:
        worker_fn: The worker's program; it must be picklable by cloudpickle.
        params: The parameters to start from.
        inner: The workers' optimizer; with `SyncReplicas`, the server's.
        agreement: A center rule (`oxs.elastic_rule(...)`, `oxs.agn_rule(...)`,
            `oxs.local_sgd_rule()`, `oxs.diloco_rule()`), or `SyncReplicas(...)`.
        num_workers: How many workers.
        num_servers: The variables are split by size among so many processes.
            `SyncReplicas` needs one: a gradient is accepted or dropped as a whole.
        communication_period: Steps between a worker's rounds, an int or a schedule of
            its step (0-based). `SyncReplicas` has no use for it.
        checkpoint_dir: Where servers save the center, and find it when they start.
        synchronous: All workers wait at the start until the last one is there.
        address: An existing cluster, as `ray.init` takes it.
        checkpoint_every: Save after so many pushes, and at the end.

    Returns:
        The center in the structure and dtypes of `params`, and the `History`.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: A worker dies again and again; a server died and there is no
            checkpoint.
        TypeError: An argument of a wrong type.
        ValueError: Numbers out of range; several servers for `SyncReplicas`.
    """
    check_agreement(agreement, num_workers, communication_period)
    check_period(communication_period)
    check_inner(inner, "oxs.runtime.run(worker_fn, params, optax.sgd(0.1), ...)")
    if not callable(worker_fn):
        raise TypeError(f"worker_fn must be a function of a worker; got {worker_fn!r}.")
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        with warnings.catch_warnings():
            # JAX warns of a fork; Ray runs another program in it at once.
            warnings.filterwarnings(
                "ignore", r"os\.fork\(\) was called", RuntimeWarning
            )
            if address is not None:
                ray.init(address=address)
            else:
                cpus = max(os.cpu_count() or 1, num_workers)
                ray.init(num_cpus=cpus, include_dashboard=False)
    actors: list[Any] = []
    try:
        connection = start_servers(
            params,
            agreement,
            num_workers=num_workers,
            num_servers=num_servers,
            inner=inner,
            communication_period=communication_period,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        actors.extend(connection.servers)
        start = (
            worker_fn, connection, _shapes(params), inner, agreement, num_workers,
            communication_period, synchronous,
        )  # fmt: skip
        with _Display(num_workers) as display:
            events = _Events(connection.servers)
            try:
                _supervise(ray, start, num_workers, connection, events, display, actors)
            finally:
                connection.checkpoint()
            events.collect(display)
        center = connection.center(params)
        return center, History(events.seen, connection.averages())
    finally:
        for actor in actors:
            ray.kill(actor)
        if started:
            ray.shutdown()


def start_servers(
    params: Any,
    agreement: Agreement,
    *,
    num_workers: int,
    num_servers: int = 1,
    inner: optax.GradientTransformation | None = None,
    communication_period: Period = 10,
    checkpoint_dir: str | pathlib.Path | None = None,
    checkpoint_every: int = 100,
) -> "RayConnection":
    """Start the servers as Ray actors, for those who start workers themselves.

    Args:
        params: The parameters to start from.
        agreement: See `run`.
        num_workers: See `run`.
        num_servers: See `run`.
        inner: The optimizer that `SyncReplicas` applies.
        communication_period: See `run`.
        checkpoint_dir: See `run`.
        checkpoint_every: See `run`.

    Returns:
        The connection to them. Send it to any Ray task or actor, and make
        `Worker(connection, ...)` there. `ray.kill` each of `connection.servers` at the
        end.

    Raises:
        ValueError: See `run`.
    """
    ray = _ray()
    check_agreement(agreement, num_workers, communication_period)
    if isinstance(agreement, SyncReplicas) and num_servers != 1:
        raise ValueError(
            "SyncReplicas accepts or drops a gradient as a whole, and so needs one "
            f"server; got num_servers={num_servers}. Pass num_servers=1."
        )
    parts = partition(jax.tree.map(np.asarray, params), num_servers)
    waits = isinstance(agreement, SyncReplicas)
    options = {
        "num_cpus": 0,
        "max_restarts": 0 if checkpoint_dir is None else -1,
        # A worker that waits for a token must not keep others from pushing. An
        # exchange does not wait, and answers with views: one at a time.
        "max_concurrency": num_workers + 8 if waits else 1,
    }
    servers = []
    for number, part in enumerate(parts):
        settings = {
            "num_workers": num_workers,
            "inner": inner if waits else None,
            "communication_period": communication_period,
            "checkpoint_every": checkpoint_every,
            "copy_replies": waits,
        }
        if checkpoint_dir is not None:
            path = pathlib.Path(checkpoint_dir).absolute() / f"server_{number}"
            settings["checkpoint_dir"] = path
        actor = ray.remote(_ServerActor).options(**options)
        servers.append(actor.remote(part, agreement, settings))
    owners = {
        path_of(path): number
        for number, part in enumerate(parts)
        for path, _ in jax.tree_util.tree_leaves_with_path(part)
    }
    # Raises here what the servers' construction raises.
    for server in servers:
        _unwrap(ray, server.pid.remote())
    at = round_of(num_workers, communication_period, 1)
    shape = expected(agreement, params, at)
    return RayConnection(servers, owners, shape, checkpoint_dir is not None)


class RayConnection:
    """The way from a worker to the servers; it can be sent to any Ray process.

    A push that meets a dead server is sent again until the server is back. With
    several servers a push is looked at as a whole before any of them takes its part.
    """

    def __init__(
        self,
        servers: list[Any],
        owners: dict[str, int],
        expected: Expected,
        comes_back: bool,
    ):
        self.servers = servers
        self._owners = owners
        self._expected = expected
        self._comes_back = comes_back

    def join(self, worker: int) -> Joined:
        """See `Server.join`."""
        parts = self._ask(lambda server, _: server.join.remote(worker))
        arrays = {path: a for part in parts for path, a in part.arrays.items()}
        # After a restart a server may be some rounds behind the others.
        last = max(part.round for part in parts)
        return parts[0]._replace(arrays=arrays, round=last)

    def everyone_joined(self) -> bool:
        """See `Server.everyone_joined`."""
        return all(self._ask(lambda server, _: server.everyone_joined.remote()))

    def push(self, push: Push) -> Reply:
        """See `Server.push`."""
        if len(self.servers) == 1:
            return self._ask(lambda server, _: server.push.remote(push))[0]
        parts = self._split(push)
        problem = self._expected.problem(push.arrays)
        if problem:  # The servers count it, and refuse their part of it.
            self._ask(lambda server, number: server.check.remote(parts[number]))
            raise PushRefused(problem)
        replies = self._ask(lambda server, number: server.push.remote(parts[number]))
        arrays: dict[str, dict[str, Any]] = {}
        for reply in replies:
            for name, part in reply.arrays.items():
                arrays.setdefault(name, {}).update(part)
        return replies[0]._replace(arrays=arrays)

    def leave(self, worker: int) -> None:
        """See `Server.leave`; sent, not waited for."""
        for server in self.servers:
            server.leave.remote(worker)

    def wait(self, worker: int) -> Reply:
        """See `Server.wait`."""
        return self._ask(lambda server, _: server.wait.remote(worker))[0]

    def center(self, params: Any) -> Any:
        """The center in the structure and dtypes of `params`."""
        return join_parts(self._ask(lambda server, _: server.center.remote()), params)

    def averages(self) -> Any:
        """See `Server.averages`."""
        return self._ask(lambda server, _: server.averages.remote())[0]

    def checkpoint(self) -> None:
        """All servers save their part."""
        self._ask(lambda server, _: server.checkpoint.remote())

    def _split(self, push: Push) -> list[Push]:
        count = len(self.servers)
        if not isinstance(push.arrays, dict):
            return [push] * count  # All will refuse it.
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, arrays in push.arrays.items():
            for part in parts:
                part[name] = {}
            for path, array in arrays.items():
                # The first one refuses what belongs to none.
                parts[self._owners.get(path, 0)][name][path] = array
        return [push._replace(arrays=part) for part in parts]

    def _ask(self, call: Callable[[Any, int], Any]) -> list[Any]:
        """What all servers answer, each asked again if it died."""
        ray = _ray()
        deadline = time.monotonic() + SERVER_PATIENCE_SECONDS
        answers: dict[int, Any] = {}
        while True:
            asked = {
                number: call(server, number)
                for number, server in enumerate(self.servers)
                if number not in answers
            }
            lost = None
            for number, reference in asked.items():
                try:
                    answers[number] = _unwrap(ray, reference)
                except ray.exceptions.RayActorError as error:
                    lost = error
            if lost is None:
                return [answers[number] for number in range(len(self.servers))]
            if not self._comes_back:
                raise RuntimeError(
                    "A server died, and the center with it. Pass checkpoint_dir, so "
                    "that it can come back."
                ) from lost
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "A server died and did not come back within "
                    f"{SERVER_PATIENCE_SECONDS:.0f} seconds."
                ) from lost
            time.sleep(0.1)


class _ServerActor:
    """A `Server` in a process of its own, on the CPU."""

    def __init__(self, params: Any, agreement: Agreement, settings: dict[str, Any]):
        jax.config.update("jax_platforms", "cpu")
        self._server, self._error = None, None
        try:
            self._server = Server(params, agreement, **settings)
        except Exception as error:
            # Raised by the first call: Ray would restart an actor that dies here.
            self._error = error

    def pid(self) -> Any:
        """The number of the process, or what went wrong at its start."""
        return self._error or os.getpid()

    # Errors are returned: raised ones would come wrapped in Ray's.

    def _call(self, name: str, *args: Any) -> Any:
        if self._error is not None:
            return self._error
        try:
            return getattr(self._server, name)(*args)
        except ValueError as error:
            return error

    def join(self, worker: int) -> Any:
        return self._call("join", worker)

    def everyone_joined(self) -> Any:
        return self._call("everyone_joined")

    def leave(self, worker: int) -> Any:
        return self._call("leave", worker)

    def check(self, push: Push) -> Any:
        return self._call("check", push)

    def push(self, push: Push) -> Any:
        return self._call("push", push)

    def wait(self, worker: int) -> Any:
        # Not for long: the worker may be dead by then.
        return self._call("wait", worker, 2.0)

    def center(self) -> Any:
        return self._call("center")

    def averages(self) -> Any:
        return self._call("averages")

    def events(self, boot: str, since: int) -> Any:
        return self._call("events", boot, since)

    def checkpoint(self) -> Any:
        return self._call("checkpoint")


class _WorkerActor:
    """The process in which `worker_fn` runs."""

    def run(self, index: int, start: tuple) -> PushRefused | None:
        worker_fn, connection, params, inner, agreement, *settings = start
        num_workers, communication_period, synchronous = settings
        worker = Worker(
            connection,
            params,
            inner,
            agreement,
            index=index,
            num_workers=num_workers,
            communication_period=communication_period,
            synchronous=synchronous,
        )
        try:
            worker_fn(worker)
        except PushRefused as error:
            return error
        return None


def _supervise(ray, start, num_workers, connection, events, display, actors) -> None:
    """Start the workers, and replace those that die, until all have returned."""
    cpus = ray.cluster_resources().get("CPU", 0.0)
    gpus = ray.cluster_resources().get("GPU", 0.0)
    # Ray takes fractions in steps of 1/10000.
    share = min(1.0, int(1e4 * cpus / num_workers) / 1e4)
    options = {"num_cpus": share, "num_gpus": int(gpus // num_workers)}
    running: dict[Any, int] = {}
    returned: list[int] = []
    deaths = [0] * num_workers
    rounds_at_death = [-1] * num_workers
    start = ray.put(start)

    def launch(index: int) -> None:
        actor = ray.remote(_WorkerActor).options(**options).remote()
        actors.append(actor)
        running[actor.run.remote(index, start)] = index

    for index in range(num_workers):
        launch(index)
    while running:
        done, _ = ray.wait(list(running), timeout=POLL_SECONDS)
        events.collect(display)
        for index in returned:  # Each time: a server may have been restarted.
            connection.leave(index)
        for reference in done:
            index = running.pop(reference)
            try:
                refused = ray.get(reference)
                if refused is None:
                    returned.append(index)
                    continue
                reason = str(refused)
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None
            except ray.exceptions.RayActorError as error:
                reason = str(error)
            rounds = events.rounds(index)
            if rounds == rounds_at_death[index]:
                deaths[index] += 1
            else:
                deaths[index], rounds_at_death[index] = 1, rounds
            if deaths[index] >= DEATHS_WITHOUT_A_ROUND:
                raise RuntimeError(
                    f"Worker {index} died {deaths[index]} times without a round "
                    f"between; the last time because: {reason}"
                )
            events.lost(index, reason)
            launch(index)


class _Events:
    """The servers' events, collected while they run.

    A server that dies takes those along that have not been collected.
    """

    def __init__(self, servers: list[Any]):
        self._servers = servers
        self._places = [("", 0) for _ in servers]
        self.seen: list[Event] = []
        self._last: dict[int, Event] = {}

    def collect(self, display: "_Display") -> None:
        ray = _ray()
        asked = [
            server.events.remote(*place)
            for server, place in zip(self._servers, self._places, strict=True)
        ]
        new: list[Event] = []
        for number, reference in enumerate(asked):
            try:
                boot, events = _unwrap(ray, reference)
            except ray.exceptions.RayActorError:
                continue  # It is being restarted; the workers notice if it is not.
            name, since = self._places[number]
            self._places[number] = (boot, len(events) + (since if boot == name else 0))
            # All servers see each push; the first one tells of it.
            new += [e for e in events if number == 0 or e.kind in _OF_EACH_SERVER]
        for event in sorted(new, key=lambda event: event.time):
            self._add(event)
        display.show(self._last, self.seen)

    def lost(self, worker: int, reason: str) -> None:
        last = self._last.get(worker)
        lost = Event("lost", worker, 0, 0, 0, 0, time.time(), {}, reason)
        if last is not None:
            lost = lost._replace(
                round=last.round,
                local_step=last.local_step,
                global_step=last.global_step,
            )
        self.seen.append(lost)

    def rounds(self, worker: int) -> int:
        return self._last[worker].round if worker in self._last else 0

    def _add(self, event: Event) -> None:
        self.seen.append(event)
        if event.worker >= 0 and event.kind in ("push", "dropped"):
            self._last[event.worker] = event


_OF_EACH_SERVER = ("started", "restored", "refused")


class _Display:
    """A table of the workers, where there is a terminal and Rich."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._live = None
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return
        console = Console()
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "_Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, last: dict[int, Event], seen: list[Event]) -> None:
        if self._live is not None:
            self._live.update(table(self._num_workers, last, seen), refresh=True)


def table(num_workers: int, last: dict[int, Event], seen: list[Event]) -> Any:
    """What the display shows, a Rich table."""
    from rich.table import Table

    names = sorted({name for event in last.values() for name in event.shown})
    step = seen[-1].global_step if seen else 0
    shown = Table(title=f"center: step {step}")
    for name in ("worker", "steps", "rounds", "staleness", "lost", *names):
        shown.add_column(name, justify="right")
    for worker in range(num_workers):
        lost = sum(e.kind == "lost" and e.worker == worker for e in seen)
        event = last.get(worker)
        if event is None:
            shown.add_row(str(worker), "starting")
            continue
        numbers = (worker, event.local_step, event.round, event.staleness, lost)
        values = [f"{event.shown[n]:.4g}" if n in event.shown else "" for n in names]
        shown.add_row(*map(str, numbers), *values)
    return shown


def _unwrap(ray: Any, reference: Any) -> Any:
    answer = ray.get(reference)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _shapes(params: Any) -> Any:
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(jnp.shape(p), np.dtype(p.dtype)), params
    )


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "oxs.runtime.run needs Ray: pip install 'optx-sync[ray]'."
        ) from error
    return ray
