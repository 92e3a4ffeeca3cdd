# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training on Ray: start servers and workers, replace those that die."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optax

from optx_sync.center import contract
from optx_sync.center.fragments import Fragments, steps_between
from optx_sync.core.checks import check_inner, integer, interval
from optx_sync.core.trees import Tree, brief
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings import alone
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime.agreements import Agreement, way_of
from optx_sync.runtime.agreements.contract import Settings
from optx_sync.runtime.display import Display, History, Seen, is_told, log, numbered
from optx_sync.runtime.group import Apart
from optx_sync.runtime.messages import Event, PushRefused
from optx_sync.runtime.metrics import Metrics
from optx_sync.runtime.paces import Paces
from optx_sync.runtime.parts import lay_out, shapes_of
from optx_sync.runtime.ray_actors import (
    RayConnection,
    WorkerActor,
    naming_what_cannot_be_sent,
    start_servers,
)
from optx_sync.runtime.samples import Samples
from optx_sync.runtime.system import here
from optx_sync.runtime.worker import Worker

# A worker that dies this often without a round in between is not replaced again.
DEATHS_WITHOUT_A_ROUND = 5
# Seconds until a process that did not start is started again.
START_AGAIN_SECONDS = 1.0
POLL_SECONDS = 0.25
# Seconds in which Ray should know that a process is dead, where another one has raised.
DEATH_SECONDS = 3.0
# Where memory is short, Ray first kills the newest of the actors that it may restart: a
# worker, and not the older server beside it, which it may. The program is not started
# again with the process: a call is not repeated, and a worker that died is killed.
RESTARTABLE = {"max_restarts": 1, "max_task_retries": 0}
# Seconds without events after which the log says what the run waits for.
SILENCE_SECONDS = 10.0


def run(
    worker_fn: Callable[[Worker], object],
    params: Tree,
    inner: optax.GradientTransformation,
    agreement: Agreement,
    *,
    num_workers: int,
    num_servers: int = 1,
    communication_period: contract.Period = 10,
    exchange: Exchange | None = None,
    pull_exchange: Exchange | None = None,
    checkpoint_dir: str | pathlib.Path | None = None,
    synchronous: bool = False,
    address: str | None = None,
    checkpoint_every: int = 100,
    weigh: contract.Weigh | None = None,
    fragments: Fragments | None = None,
    delay: int | None = None,
    meet: Quorum | None = None,
    samples: Samples | None = None,
    resume: bool = True,
    max_failures: int = 0,
    worker_timeout: float | None = None,
    total_steps: int | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    processes_per_worker: int = 1,
) -> tuple[Tree, History]:
    """Asynchronous training with fault tolerance, on Ray: workers that wait for nobody.

    `worker_fn(worker)`, any JAX program, runs in a process of its own for each worker.
    It computes a gradient at `worker.params` and calls `worker.step(grads, loss=loss)`,
    once per batch. The run ends when all have returned.

    A worker that dies, or does not catch a `PushRefused`, is replaced: `worker_fn`
    starts again, with the center for parameters and `worker.local_step` as of its last
    round; so write `while worker.local_step < steps:`. A server that dies comes back
    from its last checkpoint. Pushes since are lost; `worker.lost` counts a worker's.

    Args:
        worker_fn: The worker's program.
        params: The parameters to start from.
        inner: The workers' optimizer; with `SyncReplicas`, the server's.
        agreement: A center rule (`oxs.rules.local_sgd()`), or `SyncReplicas(...)` with
            one server.
        num_workers: How many workers.
        num_servers: The processes that hold the center, each some parts of it.
        communication_period: Steps between a worker's rounds, an int or a schedule of
            its step. What is left when a worker ends, `worker.flush()` pushes.
        exchange: Compresses pushes, array by array. `None`: whole arrays.
        pull_exchange: Compresses answers, as the difference from what the worker has.
        checkpoint_dir: Where servers save the center: a folder that all machines see,
            or an address like `gs://bucket/run`.
        synchronous: All wait at the start until the last one has joined.
        address: An existing cluster, as `ray.init` takes it.
        checkpoint_every: Save at the start, after so many pushes, and at the end.
        weigh: `(at: Round) -> factor`, traced: how much of a push the center absorbs; 0
            drops it.
        fragments: Parts of the parameters that meet in turn, as in `center_variable`.
        delay: A worker's steps from a push until it takes the answer.
        meet: When the center absorbs: `one()`, each push when it comes (the default);
            `quorum(3)`, the mean of 3 workers or more; later pushes are dropped.
        samples: `Samples(total, batch)` that `worker.samples()` leases, each counted
            once in an epoch whoever dies.
        resume: Continue from `checkpoint_dir`. `False`: start afresh, and put aside
            what is there.
        max_failures: After so many exceptions of `worker_fn`, over all workers, the
            next one ends the run.
        worker_timeout: A worker that no server has heard from for so many seconds is
            killed and replaced. `None`: no limit.
        total_steps: The steps of each worker, for the display.
        resources_per_worker: What each process takes of the cluster, as Ray names it:
            `{"CPU": 4, "GPU": 1}`; by default one CPU. A worker without a place joins
            later.
        processes_per_worker: More than 1: each worker is so many processes of a
            `jax.distributed` of its own; `worker_fn` runs in all, and
            `worker.shard` is over all their devices. If one dies, all are replaced.

    Returns:
        The center, like `params`, and the `History`. An
        exception has them as attributes, `center` (or `None`) and `history`.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: A worker dies again and again; a server died without a checkpoint.
        TypeError: An argument of a wrong type.
        ValueError: Numbers out of range; options that exclude each other; checkpoints
            of another run, or one that saves to the same folder.
    """
    if weigh is not None:
        contract.check_rule(agreement, "run(..., oxs.rules.diloco(), ..., weigh=weigh)")
        agreement = alone.weighed(agreement, weigh)  # pyright: ignore[reportArgumentType] # checked above
    settings = Settings(
        num_workers, communication_period, exchange, fragments, delay, pull_exchange,
        meet, num_servers,
    )  # fmt: skip
    way = way_of(agreement, settings)
    contract.check_period(communication_period)
    limits = _Limits(
        num_workers, max_failures, worker_timeout, total_steps, resources_per_worker,
        processes_per_worker,
    ).checked()  # fmt: skip
    check_inner(inner, "oxs.runtime.run(worker_fn, params, optax.sgd(0.1), ...)")
    shapes = shapes_of(params)
    turns = lay_out(shapes, way.fragments, num_servers).turns
    steps_between(communication_period, len(turns), way.delay)
    if not callable(worker_fn):
        raise TypeError(
            f"worker_fn must be a function of a worker; got {brief(worker_fn)}."
        )
    with contextlib.ExitStack() as ends:
        interrupts = ends.enter_context(_Interrupts())
        cpus = math.ceil(num_workers * processes_per_worker * limits.needs["CPU"])
        ray = ends.enter_context(_running_ray(address, cpus))
        connection = start_servers(
            params,
            agreement,
            inner=inner,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            resume=resume,
            samples=samples,
            **settings._asdict(),
        )
        for actor in connection.servers:
            ends.callback(ray.kill, actor)
        ends.callback(interrupts.hold)
        options = {**settings._asdict(), "synchronous": synchronous}
        start = worker_fn, connection, shapes, inner, agreement, options
        return _supervised(start, params, limits, interrupts)


class _Limits(NamedTuple):
    """What a run tolerates, how long it is, and what each worker takes."""

    num_workers: int
    max_failures: int
    worker_timeout: float | None
    total_steps: int | None
    needs: Any = None  # of each resource, how much a worker's process takes
    processes: int = 1  # of each worker

    def checked(self) -> "_Limits":
        integer("max_failures", self.max_failures, "Pass how many, or 0.", 0)
        integer("processes_per_worker", self.processes, "Pass how many, or 1.")
        if self.total_steps is not None:
            integer("total_steps", self.total_steps, "Pass each worker's, or None.")
        if self.worker_timeout is not None:
            mend = "Pass seconds, or None."
            interval("[0.001, inf]", mend, worker_timeout=self.worker_timeout)
        if not isinstance(self.needs, Mapping | None):
            raise TypeError(
                "resources_per_worker must be a dict such as {'CPU': 1, 'GPU': 1}; got "
                f"{brief(self.needs)}."
            )
        needs = {"CPU": 1.0, **(self.needs or {})}
        named = {f"resources_per_worker[{name!r}]": needs[name] for name in needs}
        interval("[0, inf)", "Pass how much of it each worker takes.", **named)
        return self._replace(needs=needs)


def _supervised(
    start: tuple, params: Tree, limits: _Limits, interrupts: "_Interrupts"
) -> tuple[Tree, History]:
    """Run the workers until all have returned, and show events."""
    display, begin = Display(limits.num_workers, limits.total_steps), here().now()
    interrupts.listen()
    with display:
        supervisor, ended = _Supervisor(start, limits, display), "has ended"
        events, saved_in = supervisor.events, supervisor.connection.saved_in
        try:
            supervisor.supervise()
            return supervisor.saved(params)
        except BaseException as error:
            ended = f"was ended by {type(error).__name__}"
            supervisor.carry(error, params)
            raise
        finally:
            interrupts.hold()
            supervisor.stop()
            said = events.seen.closing(here().now() - begin, saved_in)
            log.info("The run %s: %s", ended, said)


class _Interrupts:
    """SIGTERM is as Ctrl-C, so that a job that is asked to end saves the center.

    Once held back, neither raises until the end: processes are being stopped, and the
    terminal gets its cursor back.
    """

    def __init__(self):
        self._held: bool = False
        self._came: bool = False  # while they were held back
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take the place of the handlers, those included that Ray sets as it starts.

        Where a program ignores Ctrl-C, or handles it, that holds.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals only in the main thread.
        own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for one in (signal.SIGTERM, signal.SIGINT) if own else (signal.SIGTERM,):
            self._before[one] = signal.signal(one, self._hear)

    def hold(self) -> None:
        """Hold them back from now on."""
        self._held = True

    def _hear(self, *_: Any) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._came = True

    def __enter__(self) -> "_Interrupts":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for one, before in self._before.items():
            signal.signal(one, before or signal.SIG_DFL)
        if self._came and not (kind and issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt


@contextlib.contextmanager
def _running_ray(address: str | None, cpus: int) -> Iterator[Any]:
    """Ray, which is stopped again if it was started here."""
    ray = here().ray()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(
                f"Ray runs in this program already, so address={address!r} would have "
                "no effect. Leave it out, or call ray.shutdown() first."
            )
        yield ray
        return
    given = {"num_cpus": max(os.cpu_count() or 1, cpus), "include_dashboard": False}
    with warnings.catch_warnings():
        # JAX warns of a fork; Ray runs another program in it at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            ray.init(**(given if address is None else {"address": address}))
        except ValueError as error:
            # The environment names a cluster, as that of a submitted job does.
            if "existing cluster" not in str(error):
                raise
            ray.init()
    try:
        yield ray
    finally:
        ray.shutdown()


class _Supervisor:
    """Starts the workers, and replaces those that die, until all have returned."""

    def __init__(self, start: tuple, limits: _Limits, display: Display):
        self.ray = here().ray()
        worker_fn, self.connection, _, inner, agreement, options = start
        with naming_what_cannot_be_sent(
            worker_fn=worker_fn, inner=inner, agreement=agreement, **options
        ):
            self.start = self.ray.put(start)
        self.limits = limits
        stands = not options.get("delay")  # while its push is on its way
        self.events = _Events(self.connection, display, stands)
        errors = self.ray.exceptions
        self._raised = errors.RayTaskError, errors.UnserializableException
        self.failures = 0  # exceptions of `worker_fn`
        self.hung: dict[int, str] = {}  # the message for a worker that was killed
        self.actors: dict[int, list[Any]] = {}  # one, or those of a group
        self.together: dict[int, Any] = {}  # where a group is placed
        self.running: dict[object, int] = {}
        self.placing: dict[int, list[Any]] = {}  # workers without a process yet
        self.placing_said = here().now()
        self.returned: set[int] = set()
        self.reported: set[tuple[str, int]] = set()  # (server, who left)
        self.deaths: Counter[int] = Counter()  # since the last round, by worker
        # Of each worker, its pushes of each part when it died last.
        self.met_at_death: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.joins: Counter[int] = Counter()  # joins before it was started

    def supervise(self) -> None:
        gpus = self.ray.cluster_resources().get("GPU")
        if gpus and "GPU" not in self.limits.needs:
            log.warning(
                "The cluster has %g GPUs, and the workers train on CPUs. Pass "
                "resources_per_worker={'GPU': 1}, or 0 to have it so.", gpus,
            )  # fmt: skip
        for index in range(self.limits.num_workers):
            self._launch(index)
        while self.running:
            done, _ = self.ray.wait(list(self.running), timeout=POLL_SECONDS)
            self.events.collect()
            self._tell_who_left()
            for reference in done:
                if reference in self.running:  # Its group may be over.
                    self._over(self.running.pop(reference), reference)
            self._see_who_has_a_place()
            self._kill_who_hangs()
            if self.events.silence() > SILENCE_SECONDS:
                self._say_what_for()
        self._tell_who_left()
        self.events.collect(wait=True)

    def stop(self) -> None:
        for index in list(self.actors):
            self._kill(index)

    def saved(self, params: Tree) -> tuple[Tree, History]:
        """Save the center, and return what `run` returns."""
        connection = self.connection
        connection.call("end")  # Who was killed may not be dead yet.
        connection.checkpoint()
        connection.call("end")  # Of a server that died as it saved: what it lacks now.
        center, averages = connection.center(params), connection.averages()
        # All events: a request from before may lack the last ones.
        self.events.collect(wait=True)
        self.events.collect(wait=True)
        return center, self.events.seen.history(averages)

    def carry(self, error: Any, params: Tree) -> None:
        """Save what has been trained so far, and attach it to the exception."""
        error.center, error.history = None, self.events.seen.history(None)
        try:
            self.stop()  # Then all pushes that workers were answered are saved.
            error.center, error.history = self.saved(params)
        except KeyboardInterrupt:
            if not isinstance(error, KeyboardInterrupt):
                raise
            # One error tells of both: two would fill the terminal.
            error.add_note(f"Interrupted again: the center is not here. {self.kept()}")
            return
        except Exception as other:
            log.warning("The center or its history cannot be had any more: %s", other)
            return
        what = "The center as it was is this exception's attribute `center`."
        error.add_note(f"{what} {self.kept()}")

    def kept(self) -> str:
        """What files have of a run that has ended too early, and how to go on."""
        step, folder = self.events.seen.saved, self.connection.saved_in
        if step is None:
            return "No file has it: a run with checkpoint_dir=... can go on."
        return f"Saved at step {step} in {folder}: the same call, resume=True, goes on."

    def _kill(self, index: int) -> None:
        """Kill a worker's processes: some may be alive, and they hold their CPUs."""
        # Process 0 last: the others complain when it goes.
        for actor in reversed(self.actors.pop(index)):
            self.ray.kill(actor)
        if (together := self.together.pop(index, None)) is not None:
            self.ray.util.remove_placement_group(together)

    def _see_who_has_a_place(self) -> None:
        """A worker's silence counts from when it has one; say who waits for it."""
        for index, starts in list(self.placing.items()):
            if not self.ray.wait(starts, num_returns=len(starts), timeout=0)[1]:
                del self.placing[index]
                self.events.launched(index)
        if not self.placing:
            self.placing_said = here().now()
        elif here().now() - self.placing_said > SILENCE_SECONDS:
            self.placing_said = here().now()
            self._say_who_has_none()

    def _say_who_has_none(self) -> None:
        has, free = self.ray.cluster_resources(), self.ray.available_resources()
        count, needs = self.limits.processes, self.limits.needs
        # Where there is room for one more, Ray has placed all; or no one machine has so
        # much of it.
        room = all(free.get(name, 0) >= count * needs[name] for name in needs)
        who = numbered(sorted(self.placing))
        whose = "their" if len(self.placing) > 1 else "its"
        what = f"a place for {who}, or for {whose} processes to start"
        each = (
            f"{count * needs[name]:g} {name} ({free.get(name, 0):g} of "
            f"{has.get(name, 0):g} are free)"
            for name in needs
        )
        log.warning(
            "The run waits for %s: each needs %s.%s",
            f"the processes of {who} to start" if room else what,
            ", ".join(each),
            " If they do not start, no single machine has so much." if room else "",
        )

    def _launch(self, index: int) -> None:
        needs, count = {**self.limits.needs}, self.limits.processes
        takes = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0)}
        if count > 1 and any(self.limits.needs.values()):
            # All have a place or none: two halves would wait for each other's rest.
            util = self.ray.util
            self.together[index] = util.placement_group([self.limits.needs] * count)
            among = util.scheduling_strategies.PlacementGroupSchedulingStrategy
            takes["scheduling_strategy"] = among(self.together[index])
        actor = self.ray.remote(WorkerActor).options(
            **RESTARTABLE, **takes, resources=needs
        )
        self.actors[index] = actors = [actor.remote() for _ in range(count)]
        starts = [actor.is_here.remote() for actor in actors]
        self.placing[index] = starts
        self.joins[index] = self.events.seen.counts["join", index]
        self.events.launched(index)
        for process, actor in enumerate(actors):
            given = index, [self.start], process, count, starts[0]
            self.running[actor.run.remote(*given)] = index

    def _over(self, index: int, reference: object) -> None:
        """Handle a worker that has returned, has died or cannot be reached."""
        others = [other for other, of in self.running.items() if of == index]
        try:
            unpushed = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            error = self._cause(error, others)
            for other in others:
                del self.running[other]
            self._kill(index)
            self._lost(index, error)
            self._launch(index)
            return
        if others:  # of the same group, which are about to end.
            return
        self._kill(index)
        if unpushed is None:
            log.warning(
                "Worker %d has left, as its machine goes, and handed in what it had. "
                "It starts again where there is a place.", index,
            )  # fmt: skip
            self._launch(index)
        else:
            self.returned.add(index)
        if unpushed:
            log.warning(
                "Worker %d has ended, and its last %d steps are not in the center: "
                "communication_period has not passed. Call worker.flush() at the end "
                "of worker_fn.", index, unpushed,
            )  # fmt: skip

    def _cause(self, error: Exception, others: list[Any]) -> Exception:
        """Of a group's errors the one that has brought about the others.

        Where a process dies, those that compute with it raise, maybe before Ray knows.
        """
        end, raised = here().now() + DEATH_SECONDS, self._raised
        while others and isinstance(error, raised) and here().now() < end:
            done, others = self.ray.wait(others, timeout=POLL_SECONDS)
            for reference in done:
                try:
                    self.ray.get(reference)
                except self.ray.exceptions.RayError as other:
                    apart = isinstance(getattr(error, "cause", None), Apart)
                    if apart or not isinstance(other, raised):
                        error = other
        return error

    def _lost(self, index: int, error: Exception) -> None:
        """Tell of a worker that is lost; raise if the run does not bear it."""
        raised = self._raised
        cause: Any = getattr(error, "cause", error)  # what `worker_fn` has raised
        joins = self.events.seen.counts["join", index]
        lost = cause is not error and isinstance(
            cause, self.ray.exceptions.RayActorError
        )
        if lost and joins == self.joins[index]:
            error = cause  # of a call before: its program has not begun
        if not isinstance(error, raised):
            # Raised for dead actors, those killed for memory, and those out of reach.
            why = _WHY.get(type(error).__name__, "its process is gone")
            why = self.hung.pop(index, why)
        elif isinstance(cause, PushRefused):
            why = str(cause)
        else:
            self.failures += 1
            if self.failures > self.limits.max_failures:
                cause.add_note(f"In a worker:\n{error}")
                raise cause from None
            why = f"{type(cause).__name__}: {cause} (failure {self.failures} of "
            why += f"{self.limits.max_failures} that the run bears)"
        why += f"; more in {_filed(error)}"
        self.events.lost(index, why)
        if joins == self.joins[index] and not isinstance(error, raised):
            # Its program has not begun: the machine is full, or a node is gone.
            said = "Worker %d did not start; again in %.0f s."
            log.warning(said, index, START_AGAIN_SECONDS)
            here().sleep(START_AGAIN_SECONDS)
            return
        met, before = self.events.met[index].copy(), self.met_at_death[index]
        # A round of several parts is one where none of them was refused.
        turns = self.connection.layout.turns
        whole = any(all(met[part] > before[part] for part in turn) for turn in turns)
        self.deaths[index] = 1 if whole else self.deaths[index] + 1
        self.met_at_death[index] = met
        if self.deaths[index] >= DEATHS_WITHOUT_A_ROUND:
            raise RuntimeError(
                f"Worker {index} died {self.deaths[index]} times without a round "
                f"between; the last time because: {why}"
            ) from (cause if isinstance(error, raised) else None)

    def _kill_who_hangs(self) -> None:
        limit = self.limits.worker_timeout or math.inf
        for index in {*self.running.values()} - {*self.placing, *self.hung}:
            if self.events.silence_of(index) > limit:
                why = f"It was killed: no server heard of it for {limit:g} s."
                self.hung[index] = why
                for actor in self.actors[index]:
                    self.ray.kill(actor)

    def _tell_who_left(self) -> None:
        """Report to all servers, also to restarted ones, who has left."""
        for server in self.events.servers:
            for index in self.returned:
                told = server.name, index
                if server.name and told not in self.reported:
                    self.reported.add(told)
                    server.actor.call.remote("leave", index)

    def _say_what_for(self) -> None:
        waiting = self.events.how(sorted({*self.running.values()}))
        waiting += self.events.silent_servers()
        log.warning("The run waits for %s.", "; ".join(waiting))
        self.events.heard = here().now()


# What Ray's errors mean; others are those of processes that are gone.
_WHY = {
    "OutOfMemoryError": "Ray killed it, since memory was short",
    "ActorUnschedulableError": "there is no place for it",
}


@functools.cache
def _file() -> tuple[int, str]:
    """Where this process files errors: open, at a name that nobody can know before."""
    return tempfile.mkstemp(prefix="optx_sync_", suffix=".log")


def _filed(error: BaseException) -> str:
    """Put an error, at length as Ray tells it, into a file, whose name is returned."""
    text = f"{time.ctime()}\n{''.join(traceback.format_exception(error))}\n"
    try:
        file, path = _file()
        os.write(file, text.encode(errors="backslashreplace"))
    except OSError as full:
        return f"no file, as none could be written: {full}"
    return path


@dataclasses.dataclass
class _Server:
    """What has been heard of a server."""

    actor: Any
    name: str = ""  # of its process
    taken: int = 0  # the number of events from that
    is_down: bool = False  # it is being restarted
    step: int = 0
    # The call that it has not answered yet, when it was made, and the answer before.
    news: Any = None
    asked: float = 0.0
    answered: float = dataclasses.field(default_factory=lambda: here().now())
    # The seconds in which it listened: those in which it owed an answer are left out,
    # since a worker may have spoken to it.
    listened: float = 0.0
    # By worker: its requests so far, and what had been listened by the last one.
    requests: list[int] = dataclasses.field(default_factory=list)
    spoke: dict[int, float] = dataclasses.field(default_factory=dict)


class _Events:
    """Collects the servers' events while they run.

    Events that have not been collected are lost when a server dies.
    """

    def __init__(
        self, connection: RayConnection, display: Display, stands: bool = True
    ):
        self.servers = [*map(_Server, connection.servers)]
        self._tell_of = {turn[0] for turn in connection.layout.turns}
        self._display = display
        self.met: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._metrics, self._paces = Metrics(), Paces(stands)
        self.seen = Seen()
        self.heard = here().now()

    def collect(self, wait: bool = False) -> None:
        """Take the events that servers have ready; with `wait`, all events."""
        for server in self.servers:
            if server.news is None:
                ask = server.actor.call.remote
                server.news = ask("news", server.name, server.taken)
                server.asked = here().now()
        calls = [server.news for server in self.servers]
        seconds = SILENCE_SECONDS if wait else 0.02
        ready, _ = here().ray().wait(calls, num_returns=len(calls), timeout=seconds)
        new: list[Event] = []
        for number, server in enumerate(self.servers):
            if server.news in ready:
                new += self._answer_of(number, server)
        self._tell(sorted(new, key=lambda event: event.time))

    def _answer_of(self, number: int, server: _Server) -> list[Event]:
        """Take the answer of a server: its events that are told."""
        ray, news = here().ray(), server.news
        idle = server.asked - server.answered
        server.news, server.answered = None, here().now()
        try:
            found = ray.get(news)
        except ray.exceptions.ActorDiedError as error:
            raise RuntimeError(
                "A server died, and does not come back. Pass checkpoint_dir, so "
                f"that it can. More in {_filed(error)}"
            ) from None
        except ray.exceptions.RayError as error:
            if not server.is_down:
                server.is_down = True
                # Ray raises the same where a call of a living one was lost.
                said = "server %d has died, or cannot be reached; more in %s"
                log.warning(said, number, _filed(error))
            return []
        server.is_down = False
        if isinstance(found, Exception):
            raise found
        name, events, requests = found
        server.listened += idle
        if name != server.name:  # It counts anew.
            server.name, server.taken, server.requests = name, 0, [-1] * len(requests)
        for worker, before in enumerate(server.requests):
            if before != requests[worker]:
                server.spoke[worker] = server.listened
        server.requests, server.taken = requests, server.taken + len(events)
        for event in events:
            if event.kind in ("push", "dropped"):
                self.met[event.worker][event.part] += 1
        self._metrics.add(number, events)
        if len(self._tell_of) > 1:  # Each server counts the rounds of its parts.
            events = [self._of_all(server, event) for event in events]
        return [x for x in events if is_told(x, number == 0, self._tell_of)]

    def _of_all(self, server: _Server, event: Event) -> Event:
        server.step = event.global_step
        return event._replace(global_step=sum(one.step for one in self.servers))

    def _tell(self, new: list[Event]) -> None:
        self.seen.add(new)
        self._metrics.rate(self._paces.add(new))
        if new:
            self.heard = here().now()
        self._display.show(self.seen, new)

    def lost(self, worker: int, reason: str) -> None:
        """Add the event of a worker that died."""
        last = self.seen.last.get(worker)
        at = (last.round, last.local_step, last.global_step) if last else (0, 0, 0)
        lost = Event("lost", worker, *at, 0, here().stamp() / 1e9, {}, reason)
        self._metrics.add(0, [lost])
        self._tell([lost])

    def launched(self, worker: int) -> None:
        """Note that a worker's process is being started."""
        for server in self.servers:
            server.spoke[worker] = server.listened

    def silence_of(self, worker: int) -> float:
        """Seconds that servers have listened since a worker spoke, or was started."""
        return min(one.listened - one.spoke[worker] for one in self.servers)

    def silence(self) -> float:
        """Seconds since the last event."""
        return here().now() - self.heard

    def how(self, workers: list[int]) -> list[str]:
        """How workers stand, for the log: those without a push by their state."""
        without, said = defaultdict(list), []
        for worker in workers:
            if worker not in self.seen.last:
                without[self.seen.state(worker)].append(worker)
        for state, those in without.items():
            said.append(f"{numbered(those)} ({state}, no push yet)")
        now = here().stamp() / 1e9
        for worker in workers:
            if (last := self.seen.last.get(worker)) is not None:
                said.append(
                    f"worker {worker}, whose last push was {now - last.time:.0f} s ago "
                    f"at its step {last.local_step}"
                )
        return said

    def silent_servers(self) -> list[str]:
        """The servers that have not answered for a long time."""
        return [
            f"server {number}, which has not answered for {seconds:.0f} s"
            for number, server in enumerate(self.servers)
            if server.news is not None
            and (seconds := here().now() - server.asked) > SILENCE_SECONDS / 2
        ]
