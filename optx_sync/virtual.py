# SPDX-License-Identifier: Apache-2.0
"""One process in the place of a cluster: a virtual clock, and actors as greenlets.

A seed is a schedule. Nothing here has threads or sleeps: what waits goes back to the
loop of events, which takes the next one. `VirtualCluster` has what of Ray the runtime
calls, and is its `System`. `oxs.testing` is the way in.
"""

import contextlib
import copy
import dataclasses
import functools
import heapq
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optx_sync.runtime import system
from optx_sync.runtime.ray_actors import RayConnection
from optx_sync.runtime.worker import Worker


class RayError(Exception):
    """What Ray raises for a call; named as Ray names it."""


class ActorError(RayError):
    """An actor is gone, or was not reached."""


class ActorDied(ActorError):
    """An actor that does not come back."""


class TaskError(RayError):
    """What a method of an actor has raised."""

    def __init__(self, cause: Exception):
        super().__init__(repr(cause))
        self.cause: Exception = cause


@dataclasses.dataclass(frozen=True, eq=False)
class Fault:
    """What goes wrong with a worker once it has made so many steps."""

    kind: str
    worker: int
    step: int
    seconds: float

    def __str__(self) -> str:
        return f"fault(..., {self.kind!r}, worker={self.worker}, step={self.step})"


@dataclasses.dataclass
class Process:
    """A process: alive, dead or frozen, with a clock that may be off."""

    name: str
    skew: float = 0.0
    alive: bool = True
    frozen: bool = False
    late: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    notice: Callable[[], None] | None = None
    # Of what it asks next, the answers are lost.
    losing: list[Fault] = dataclasses.field(default_factory=list)


class Ref:
    """An answer that may not be there yet."""

    def __init__(self):
        self.done: bool = False
        self.value: Any = None
        self.error: Exception | None = None
        self.waits: list[Callable[[], None]] = []

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        """It is there, or will never be."""
        if not self.done:
            self.done, self.value, self.error = True, value, error
            waits, self.waits = self.waits, []
            for wake in waits:
                wake()


class Condition:
    """A lock that is always free, since others run only while somebody waits."""

    def __init__(self, cluster: "VirtualCluster"):
        self._cluster = cluster
        self._waits: list[Callable[[], None]] = []

    def __enter__(self) -> "Condition":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, seconds: float | None) -> None:
        """Wait until others have changed something, or so long."""
        self._cluster.wait(self._waits.append, seconds)

    def notify_all(self) -> None:
        """Wake all that wait."""
        waits, self._waits = self._waits, []
        for wake in waits:
            wake()


class NoMetric:
    """A counter, gauge or histogram that nobody reads."""

    def __init__(self, *_: object, **__: object):
        pass

    def inc(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def set(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def observe(self, *_: object, **__: object) -> None:
        """Do nothing."""


def no_groups(*_: object) -> None:
    """Refuse a worker of several processes."""
    raise ValueError(
        "A virtual cluster is one process, so it has no workers of several. Leave "
        "processes_per_worker out, or run this on a cluster of Ray's."
    )


class VirtualCluster(system.System):
    """What of Ray and of a machine the runtime asks for, on a virtual clock.

    Attributes:
        seconds: The virtual time that has passed.
    """

    shares_memory: bool = False
    exceptions: Any = types.SimpleNamespace(
        RayTaskError=TaskError, RayError=RayError, RayActorError=ActorError,
        ActorDiedError=ActorDied, UnserializableException=TaskError,
    )  # fmt: skip
    util: Any = types.SimpleNamespace(
        get_node_ip_address=lambda: "127.0.0.1",
        placement_group=no_groups,
        metrics=types.SimpleNamespace(
            Counter=NoMetric, Gauge=NoMetric, Histogram=NoMetric
        ),
    )

    def __init__(self, seed: int, max_seconds: float = 10_000.0):
        try:
            import greenlet
        except ImportError as error:
            raise ImportError(
                "oxs.testing.virtual_cluster needs greenlet: pip install "
                "'optx-sync[testing]'."
            ) from error
        self._greenlet: Any = greenlet
        self._loop: Any = greenlet.getcurrent()
        self._tasks: set[Any] = set()
        self._closed: bool = False
        self._count: int = 0
        self._queue: list[Any] = []
        self.random: random.Random = random.Random(seed)
        self.max_seconds = max_seconds
        self.seconds: float = 0.0
        self.process: Process = Process("driver")
        self.actors: list[Actor] = []
        self.states: dict[Fault, str] = {}  # "waits", "begun" or "struck"
        self.made: dict[int, int] = {}  # the most steps of each worker with faults

    # The system.

    def now(self) -> float:
        """See `System.now`."""
        return 1e5 + self.seconds + self.process.skew

    def stamp(self) -> int:
        """See `System.stamp`."""
        return int((1e6 + self.seconds + self.process.skew) * 1e9)

    def sleep(self, seconds: float) -> None:
        """Wait so long by the virtual clock, while others go on."""
        self.wait(lambda wake: None, max(seconds, 0.0))

    def condition(self) -> Condition:
        """See `System.condition`."""
        return Condition(self)

    def on_notice(self, hear: Callable[[], None]) -> None:
        """See `System.on_notice`."""
        self.process.notice = hear

    def ray(self) -> Any:
        """See `System.ray`."""
        return Ray(self)

    # Events.

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Let this happen so many seconds from now; equal times in a drawn order."""
        self._count += 1
        order = (self.seconds + seconds, self.random.random(), self._count)
        heapq.heappush(self._queue, (*order, what))

    def wait(self, register: Callable[[Any], None], seconds: float | None) -> None:
        """Let others go on until `wake`, which `register` gets, or the time."""
        if self._closed:
            raise self._greenlet.GreenletExit
        task, process = self._greenlet.getcurrent(), self.process
        woken: list[bool] = []
        back: list[bool] = []

        def wake() -> None:
            if not woken:
                woken.append(True)
                self.at(0.0, go_on)

        def go_on() -> None:
            if process.frozen:
                process.late.append(go_on)
            elif process.alive:  # Of a dead one nothing runs, its `finally` neither.
                self.process = process
                back.append(True)
                if task is not self._loop:
                    task.switch()

        if seconds is not None:
            self.at(seconds, wake)
        register(wake)
        if task is not self._loop:
            self._loop.switch()
            return
        try:
            while not back:
                self._take()
        finally:
            self.process = process  # Also where another one has raised.

    def _take(self) -> None:
        """Take the next event."""
        if not self._queue:
            raise RuntimeError("Everybody waits, and for nothing that will come.")
        self.seconds, _, _, what = heapq.heappop(self._queue)
        if self.seconds > self.max_seconds:
            raise RuntimeError(
                f"After {self.max_seconds:g} seconds of the virtual clock the run has "
                "not ended. The log says what it waits for; or pass more as "
                "oxs.testing.virtual_cluster(max_seconds=)."
            )
        what()

    def start(self, process: Process, function: Callable[[], Any]) -> None:
        """Run this in a process until it waits."""

        def whole() -> None:
            try:
                function()
            finally:
                self._tasks.discard(self._greenlet.getcurrent())

        def begin() -> None:
            if process.frozen:
                process.late.append(begin)
            elif process.alive:
                self.process = process
                task = self._greenlet.greenlet(whole, self._loop)
                self._tasks.add(task)
                task.switch()

        self.at(0.0, begin)

    def close(self) -> None:
        """End what still waits; only now the `finally` blocks of the dead run."""
        self._closed = True
        for task in [*self._tasks]:
            with contextlib.suppress(Exception):
                task.throw()
        self._queue.clear()

    def die_now(self) -> None:
        """The process that runs dies at this place."""
        (actor,) = (x for x in self.actors if x.process is self.process)
        self.at(0.0, actor.die)
        self.process.alive = False
        self._loop.switch()

    def freeze(self, process: Process, seconds: float | None) -> None:
        """Stop a process, for so long or until `thaw`."""
        process.frozen = True
        if seconds is not None:
            self.at(seconds, lambda: self.thaw(process))

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on."""
        process.frozen, late = False, process.late
        process.late = []
        for what in late:
            self.at(0.0, what)

    def way_back(self, actor: "Actor", given: tuple[Any, ...], answer: Any) -> float:
        """The seconds until an actor's answer to a call is there."""
        del actor, given, answer
        return 0.001 + 0.004 * self.random.random()

    def fate(
        self, actor: "Actor", name: str, given: tuple[Any, ...]
    ) -> tuple[float, str, float | None]:
        """What becomes of a call of an actor.

        Returns:
            Its seconds on the way; "request" or "answer", if that is lost; and by how
            many seconds it comes once more, or `None`.
        """
        del given
        seconds, losing = 0.001 + 0.004 * self.random.random(), self.process.losing
        if not (losing and actor.is_server and name == "handle"):
            return seconds, "", None
        self.states[losing.pop(0)] = "struck"
        return seconds, "answer", None

    # Faults of a worker.

    def watch(self, worker: Worker, fault: Fault) -> None:
        """Let a fault strike a worker, if it is its own, at its step."""
        self.states.setdefault(fault, "waits")
        step = worker.step

        def watched(*given: Any, **named: Any) -> None:
            step(*given, **named)
            made = max(worker.local_step, self.made.get(worker.index, 0))
            self.made[worker.index] = made
            mine = worker.index == fault.worker and worker.local_step >= fault.step
            if mine and self.states[fault] == "waits":
                self._strike(fault)

        vars(worker)["step"] = watched

    def _strike(self, fault: Fault) -> None:
        process = self.process
        if fault.kind == "loses an answer":
            self.states[fault] = "begun"
            process.losing.append(fault)
            return
        self.states[fault] = "struck"
        if fault.kind == "dies":
            self.die_now()
        elif fault.kind == "freezes":
            self.freeze(process, fault.seconds)
            self.sleep(0.0)
        elif process.notice is not None:
            process.notice()

    def check_faults(self) -> None:
        """Raise if a fault has not struck.

        Raises:
            RuntimeError: It names the fault.
        """
        for fault, state in self.states.items():
            if state == "struck":
                continue
            made = self.made.get(fault.worker)
            why = f"worker {fault.worker} made {made} steps"
            if state == "begun":
                why = f"worker {fault.worker} pushed nothing after it"
            elif made is None:
                why = f"no worker {fault.worker} made a step"
            raise RuntimeError(
                f"{fault} never struck: {why}. The test has shown nothing; choose a "
                "worker and a step that the run has."
            )

    # Ray.

    def is_initialized(self) -> bool:
        """It runs."""
        return True

    def put(self, value: Any) -> Ref:
        """Like `ray.put`."""
        ref = Ref()
        ref.end(value)
        return ref

    def get(self, ref: Ref) -> Any:
        """Like `ray.get`."""
        if not ref.done:
            self.wait(ref.waits.append, None)
        if ref.error is not None:
            raise ref.error
        if isinstance(ref.value, tuple):  # Another process gets a copy of each.
            return tuple(
                copy.copy(x) if isinstance(x, RayConnection) else x for x in ref.value
            )
        return ref.value

    def wait_for(self, refs: list[Ref], number: int, timeout: float | None) -> None:
        """Wait until so many answers are there, or so long."""

        def enough() -> bool:
            return sum(ref.done for ref in refs) >= number

        def register(wake: Callable[[], None]) -> None:
            for ref in refs:
                if not ref.done:
                    ref.waits.append(wake)

        end = None if timeout is None else self.seconds + timeout
        while not enough() and (end is None or self.seconds < end):
            self.wait(register, None if end is None else end - self.seconds)

    def kill(self, actor: "Handle") -> None:
        """Like `ray.kill`."""
        actor.actor_.die(for_good=True)

    def cluster_resources(self) -> dict[str, float]:
        """Room for everybody."""
        return {"CPU": 1e6}

    available_resources = cluster_resources

    def remote(self, kind: Any) -> Any:
        """Like `ray.remote`, of a class."""
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(
                remote=lambda *given: Handle(Actor(self, kind, given, options))
            )
        )

    def start_seconds(self, actor: "Actor") -> float:
        """How long the process of an actor takes to start."""
        del actor
        return 0.1

    def skew(self) -> float:
        """By how much the clock of a new process is off."""
        return 0.0


# Ray's `wait` is a function of the module, and the cluster's that of the loop.
class Ray:
    """The module `ray`: as `VirtualCluster`, with Ray's `wait`."""

    def __init__(self, cluster: VirtualCluster):
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def wait(
        self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        """Like `ray.wait`."""
        refs = list(refs)
        self._cluster.wait_for(refs, num_returns, timeout)
        done = [ref for ref in refs if ref.done]
        return done, [ref for ref in refs if not ref.done]


class Actor:
    """An actor: its process, and the calls that it has not answered."""

    def __init__(
        self,
        cluster: VirtualCluster,
        kind: Any,
        given: tuple[Any, ...],
        options: dict[str, Any],
    ):
        self.kind: Any = kind
        self.given: tuple[Any, ...] = given
        self.options: dict[str, Any] = options
        self._cluster = cluster
        self.is_server: bool = kind.__name__ == "ServerActor"
        self.restarts: int = options.get("max_restarts", 0) if self.is_server else 0
        self.restarted: bool = False
        self.over: bool = False
        self.actor: Any = None
        self.process: Any = None
        self.last: Any = None  # what it was when it died
        self.index: int | None = None  # of a worker, by its call of `run`
        self.running: int = 0  # calls in its threads
        self.most: int = 0  # of them, at one time
        self._calls: dict[Ref, None] = {}
        self._turn: list[Any] = []  # calls that wait for the one that runs
        self._busy: bool = False
        self._early: list[Any] = []  # calls before it had started
        cluster.actors.append(self)
        self._begin()

    def _begin(self) -> None:
        cluster = self._cluster
        seconds = cluster.start_seconds(self)
        name = f"{self.kind.__name__} {len(cluster.actors)}"
        process = Process(name, cluster.skew())

        def make() -> None:
            actor = self.kind(*self.given)
            if process.alive:
                self.actor, early = actor, self._early
                self._early = []
                for call in early:
                    self._take(*call)

        def start() -> None:
            if not self.over:
                self.process = process
                cluster.start(process, make)

        cluster.at(seconds, start)

    def ask(self, name: str, given: tuple[Any, ...]) -> Ref:
        """Call a method."""
        if name == "run":
            self.index, _, _, processes, _ = given
            if processes > 1:
                no_groups()
        cluster, ref = self._cluster, Ref()
        seconds, lost, again = cluster.fate(self, name, given)
        self._calls[ref] = None
        if lost == "request":
            cluster.at(seconds, lambda: self._fail(ref))
            return ref
        cluster.at(seconds, lambda: self._come(ref, name, given, lost == "answer"))
        if again is not None:
            second = Ref()
            self._calls[second] = None
            more = seconds + again
            cluster.at(more, lambda: self._come(second, name, given, False))
        return ref

    def _fail(self, ref: Ref) -> None:
        self._calls.pop(ref, None)
        ref.end(error=(ActorDied if self.over else ActorError)("it was not reached"))

    def _come(self, ref: Ref, name: str, given: tuple[Any, ...], lost: bool) -> None:
        """A call arrives; references among its arguments are values by then."""
        missing = [x for x in given if isinstance(x, Ref) and not x.done]
        if missing:
            missing[0].waits.append(lambda: self._come(ref, name, given, lost))
            return
        if ref.done:
            return
        if self.over:
            self._fail(ref)
        elif self.actor is None:
            if self.process is not None and self.is_server and self.restarted:
                self._fail(ref)  # It is being restarted.
            else:
                self._early.append((ref, name, given, lost))
        else:
            self._take(ref, name, given, lost)

    def _take(self, ref: Ref, name: str, given: tuple[Any, ...], lost: bool) -> None:
        if self.options.get("max_concurrency", 1) == 1:
            self._turn.append((ref, name, given, lost))
            self._next()
        else:
            self._cluster.start(
                self.process, lambda: self._thread(ref, name, given, lost)
            )

    def _thread(self, *call: Any) -> None:
        """Answer in a thread of one's own, of which there are so many and no more."""
        process = self.process
        self.running += 1
        self.most = max(self.most, self.running)
        self._answer(*call)
        if process.alive:
            self.running -= 1

    def _next(self) -> None:
        if self._turn and not self._busy:
            self._busy = True
            call = self._turn.pop(0)

            def one() -> None:
                self._answer(*call)
                self._busy = False
                self._next()

            self._cluster.start(self.process, one)

    def _answer(self, ref: Ref, name: str, given: tuple[Any, ...], lost: bool) -> None:
        cluster, process = self._cluster, self.process
        given = tuple(x.value if isinstance(x, Ref) else x for x in given)
        value, error = None, None
        try:
            value = getattr(self.actor, name)(*given)
        except Exception as raised:
            error = TaskError(raised)
        if not process.alive:
            return
        self._calls.pop(ref, None)
        seconds = cluster.way_back(self, given, value)
        if lost:
            late = ActorError("its answer was lost")
            cluster.at(seconds, lambda: ref.end(error=late))
        else:
            cluster.at(seconds, lambda: ref.end(value, error))

    def die(self, for_good: bool = False) -> None:
        """The process is gone; a server with restarts left comes back."""
        cluster = self._cluster
        if self.process is not None:
            self.process.alive = False
        self.last, self.actor = self.actor or self.last, None
        self._busy, self._turn, self.running = False, [], 0
        for_good = for_good or not self.restarts
        self.over = self.over or for_good
        self._early = []
        for ref in [*self._calls]:
            self._calls.pop(ref)
            kind = ActorDied if self.over else ActorError
            cluster.at(
                0.05 + 0.2 * cluster.random.random(),
                lambda r=ref, k=kind: r.end(error=k("it died")),
            )
        if not self.over:
            self.restarts -= 1
            self.restarted = True
            self.process = Process("nobody", alive=False)
            self._begin()


class Handle:
    """What others hold of an actor."""

    def __init__(self, actor: Actor):
        self.actor_: Actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        ask = self.actor_.ask
        return types.SimpleNamespace(remote=lambda *given: ask(name, given))


def with_fault(worker_fn: Callable[[Worker], object], fault: Fault) -> Any:
    """The program with a fault."""

    @functools.wraps(worker_fn)
    def faulty(worker: Worker) -> object:
        cluster = system.here()
        if not isinstance(cluster, VirtualCluster):
            raise RuntimeError(
                f"{fault} strikes in a virtual cluster alone. Write `with "
                "oxs.testing.virtual_cluster():` around oxs.runtime.run."
            )
        cluster.watch(worker, fault)
        return worker_fn(worker)

    return faulty


@contextlib.contextmanager
def entered(cluster: VirtualCluster) -> Iterator[VirtualCluster]:
    """Put a cluster in the place of Ray and of this machine's clock."""
    # Servers ask for the CPU alone, as they may in a process of their own.
    jax.devices()
    platforms = jax.config.values["jax_platforms"]
    try:
        with system.using(cluster):
            yield cluster
        cluster.check_faults()
    finally:
        cluster.close()
        jax.config.update("jax_platforms", platforms)
