"""One process in the place of a cluster: a virtual clock, actors as greenlets, a disk.

A seed is a schedule. Nothing here has threads or sleeps: what waits goes back to the
loop of events, which takes the next one. `World` has what of Ray the runtime calls;
`System` its clock; `Disk` the checkpoints. Each may be broken: a process dies or
freezes, a message is lost, late or comes twice, a save fails or is damaged.
"""

import copy
import dataclasses
import heapq
import json
import random
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import greenlet
import jax
import numpy as np

from optx_sync.runtime import system
from optx_sync.runtime.checkpoints import Checkpoints, Damaged
from optx_sync.runtime.ray_actors import RayConnection


class ActorError(ConnectionError):
    """An actor is gone, or was not reached."""


class ActorDied(ActorError):
    """An actor that does not come back."""


class TaskError(Exception):
    """What a method of an actor has raised."""

    def __init__(self, cause: Exception):
        super().__init__(repr(cause))
        self.cause = cause


@dataclasses.dataclass
class Process:
    """A process: alive, dead or frozen, with a clock that may be off."""

    name: str
    skew: float = 0.0
    alive: bool = True
    frozen: bool = False
    late: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    notice: Callable[[], None] | None = None


class Ref:
    """An answer that may not be there yet."""

    def __init__(self, world: "World"):
        self.world, self.done = world, False
        self.value: Any = None
        self.error: Exception | None = None
        self.waits: list[Callable[[], None]] = []

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            waits, self.waits = self.waits, []
            for wake in waits:
                wake()


class Condition:
    """A lock that is always free, since others run only while somebody waits."""

    def __init__(self, world: "World"):
        self.world, self.waits = world, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, seconds):
        self.world.wait(self.waits.append, seconds)

    def notify_all(self):
        waits, self.waits = self.waits, []
        for wake in waits:
            wake()


@dataclasses.dataclass
class Faults:
    """How often what goes wrong, as shares of the messages or saves concerned."""

    lost: float = 0.0  # a message or its answer
    twice: float = 0.0
    slow: float = 0.0  # takes seconds, and so comes after later ones
    unsaved: float = 0.0  # the disk is full
    damaged: float = 0.0
    half: float = 0.0  # the process dies while it saves


class World(system.System):
    """What of Ray and of a machine the runtime asks for, on a virtual clock."""

    shares_memory = False
    exceptions = types.SimpleNamespace(
        RayTaskError=TaskError, RayError=Exception, RayActorError=ActorError,
        ActorDiedError=ActorDied, UnserializableException=TaskError,
    )  # fmt: skip

    def __init__(self, seed: int, limit: int = 60_000):
        self.random = random.Random(seed)
        self.limit, self.count = limit, 0
        self.seconds = 0.0
        self.queue: list[Any] = []
        self.loop: Any = greenlet.getcurrent()
        self.process = Process("driver")
        self.actors: list[Actor] = []
        self.faults = Faults()
        self.disk: dict[str, dict[int, Any]] = defaultdict(dict)
        self.marks: Counter[str] = Counter()
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.skews: tuple[float, ...] = (0.0,)
        self.healed = False
        self.start_seconds: Callable[[Actor], float] = lambda actor: 0.1
        self.dead: list[Any] = []

    # The system.

    def now(self):
        return 1e5 + self.seconds + self.process.skew

    def stamp(self):
        return int((1e6 + self.seconds + self.process.skew) * 1e9)

    def sleep(self, seconds):
        self.wait(lambda wake: None, max(seconds, 0.0))

    def condition(self):
        return Condition(self)

    def on_notice(self, hear):
        self.process.notice = hear

    def ray(self):
        return Ray(self)

    # Events.

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Let this happen so many seconds from now; equal times in a drawn order."""
        self.count += 1
        order = (self.seconds + seconds, self.random.random(), self.count)
        heapq.heappush(self.queue, (*order, what))

    def wait(self, register: Callable[[Any], None], seconds: float | None) -> None:
        """Give the loop a turn until `wake`, which `register` gets, or the time."""
        task, process, woken = greenlet.getcurrent(), self.process, []

        def wake():
            if not woken:
                woken.append(True)
                self.at(0.0, go_on)

        def go_on():
            if not process.alive:
                self.dead.append(task)  # Its `finally` blocks must not run now.
            elif process.frozen:
                process.late.append(go_on)
            else:
                self.process = process
                task.switch()

        if seconds is not None:
            self.at(seconds, wake)
        register(wake)
        self.loop.switch()

    def start(self, process: Process, function: Callable[[], Any]) -> None:
        """Run this in a process until it waits."""

        def begin():
            if process.frozen:
                process.late.append(begin)
            elif process.alive:
                self.process = process
                greenlet.greenlet(function, self.loop).switch()

        self.at(0.0, begin)

    def run(self, main: Callable[[], Any]) -> Any:
        """Take events until `main` has returned or raised, which this does then."""
        ended: list[Any] = []

        def whole():
            try:
                ended.append((main(), None))
            except Exception as error:
                ended.append((None, error))

        self.start(self.process, whole)
        taken = 0
        while self.queue and not ended:
            taken += 1
            if taken > self.limit:
                raise AssertionError(f"it has not ended after {taken} events")
            self.seconds, _, _, what = heapq.heappop(self.queue)
            what()
        if not ended:
            raise AssertionError("everybody waits, and for nothing that will come")
        ((value, error),) = ended
        if error is not None:
            raise error
        return value

    def die_now(self) -> None:
        """The process that runs dies at this place."""
        (actor,) = (x for x in self.actors if x.process is self.process)
        self.at(0.0, actor.die)
        self.process.alive = False
        self.dead.append(greenlet.getcurrent())
        self.loop.switch()

    def freeze(self, process: Process, seconds: float | None) -> None:
        process.frozen = True
        if seconds is not None:
            self.at(seconds, lambda: self.thaw(process))

    def thaw(self, process: Process) -> None:
        process.frozen, late = False, process.late
        process.late = []
        for what in late:
            self.at(0.0, what)

    # Ray.

    def is_initialized(self):
        return True

    def put(self, value):
        ref = Ref(self)
        ref.end(value)
        return ref

    def get(self, ref):
        if not ref.done:
            self.wait(ref.waits.append, None)
        if ref.error is not None:
            raise ref.error
        if isinstance(ref.value, tuple):  # Another process gets a copy of each.
            return tuple(
                copy.copy(x) if isinstance(x, RayConnection) else x for x in ref.value
            )
        return ref.value

    def wait_for(self, refs, number, timeout):
        def enough():
            return sum(ref.done for ref in refs) >= number

        end = None if timeout is None else self.seconds + timeout
        while not enough() and (end is None or self.seconds < end):

            def register(wake):
                for ref in refs:
                    if not ref.done:
                        ref.waits.append(wake)

            self.wait(register, None if end is None else end - self.seconds)

    def kill(self, actor):
        actor.actor_.die(for_good=True)

    def cluster_resources(self):
        return {"CPU": 99.0}

    available_resources = cluster_resources

    def remote(self, kind):
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(
                remote=lambda *given: Handle(Actor(self, kind, given, options))
            )
        )


# Ray's `wait` is a function of the module, and `World.wait` that of the loop.
class Ray:
    """The module `ray`: as `World`, with Ray's `wait`."""

    def __init__(self, world: World):
        self._world = world

    def __getattr__(self, name):
        return getattr(self._world, name)

    def wait(self, refs, num_returns=1, timeout=None):
        refs = list(refs)
        self._world.wait_for(refs, num_returns, timeout)
        done = [ref for ref in refs if ref.done]
        return done, [ref for ref in refs if not ref.done]


class Actor:
    """An actor: its process, and the calls that it has not answered."""

    def __init__(self, world: World, kind: Any, given: tuple, options: dict[str, Any]):
        self.world, self.kind, self.given, self.options = world, kind, given, options
        self.is_server = kind.__name__ == "ServerActor"
        self.restarts = options.get("max_restarts", 0) if self.is_server else 0
        self.over: bool = False
        self.actor: Any = None
        self.process: Any = None
        self.last: Any = None  # what it was when it died
        self.calls: dict[Ref, None] = {}
        self.turn: list[Any] = []  # calls that wait for the one that runs
        self.busy = False
        self.running = 0  # calls in its threads
        self.early: list[Any] = []  # calls before it had started
        self.index: int | None = None  # of a worker, by its call of `run`
        world.actors.append(self)
        self.begin()

    def begin(self) -> None:
        world = self.world
        seconds = world.start_seconds(self)
        process = Process(
            f"{self.kind.__name__} {len(world.actors)}",
            world.random.choice(world.skews),
        )

        def make():
            actor = self.kind(*self.given)
            if process.alive:
                self.actor, early = actor, self.early
                self.early = []
                for call in early:
                    self.take(*call)

        def start():
            if not self.over:
                self.process = process
                world.start(process, make)

        world.at(seconds, start)

    def ask(self, name: str, given: tuple) -> Ref:
        world, ref = self.world, Ref(self.world)
        if name == "run":
            self.index = given[0]
        rng, faults = world.random, world.faults
        message = self.is_server and name in ("handle", "call")
        lost = message and rng.random() < faults.lost
        seconds = 0.001 + 0.004 * rng.random()
        if message and rng.random() < faults.slow:
            world.marks["a slow message"] += 1
            seconds = 4.0 * rng.random()
        self.calls[ref] = None
        if lost and rng.random() < 0.5:
            world.marks["a request is lost"] += 1
            world.at(seconds, lambda: self.fail(ref))
            return ref
        answer_is_lost = lost
        if answer_is_lost:
            world.marks["an answer is lost"] += 1
        world.at(seconds, lambda: self.come(ref, name, given, answer_is_lost))
        if message and name == "handle" and rng.random() < faults.twice:
            world.marks["a request comes twice"] += 1
            again = Ref(world)
            self.calls[again] = None
            world.at(
                seconds + 2 * rng.random(), lambda: self.come(again, name, given, False)
            )
        return ref

    def fail(self, ref: Ref) -> None:
        self.calls.pop(ref, None)
        ref.end(error=(ActorDied if self.over else ActorError)("it was not reached"))

    def come(self, ref: Ref, name: str, given: tuple, lost: bool) -> None:
        """A call arrives; references among its arguments are values by then."""
        missing = [x for x in given if isinstance(x, Ref) and not x.done]
        if missing:
            missing[0].waits.append(lambda: self.come(ref, name, given, lost))
            return
        if ref.done:
            return
        if self.over:
            self.fail(ref)
        elif self.actor is None:
            if self.process is not None and self.is_server and self.restarted:
                self.fail(ref)  # It is being restarted.
            else:
                self.early.append((ref, name, given, lost))
        else:
            self.take(ref, name, given, lost)

    restarted = False
    most = 0  # calls in its threads

    def take(self, ref: Ref, name: str, given: tuple, lost: bool) -> None:
        if self.options.get("max_concurrency", 1) == 1:
            self.turn.append((ref, name, given, lost))
            self.next()
        else:
            self.world.start(self.process, lambda: self.thread(ref, name, given, lost))

    def thread(self, *call: Any) -> None:
        """Answer in a thread of one's own, of which there are so many and no more."""
        process = self.process
        self.running += 1
        self.most = max(self.most, self.running)
        self.answer(*call)
        if process.alive:
            self.running -= 1

    def next(self) -> None:
        if self.turn and not self.busy:
            self.busy = True
            call = self.turn.pop(0)

            def one():
                self.answer(*call)
                self.busy = False
                self.next()

            self.world.start(self.process, one)

    def answer(self, ref: Ref, name: str, given: tuple, lost: bool) -> None:
        world, process = self.world, self.process
        given = tuple(x.value if isinstance(x, Ref) else x for x in given)
        value, error = None, None
        try:
            value = getattr(self.actor, name)(*given)
        except Exception as raised:
            error = TaskError(raised)
        if not process.alive:
            return
        self.calls.pop(ref, None)
        seconds = 0.001 + 0.004 * world.random.random()
        if lost:
            late = ActorError("its answer was lost")
            world.at(seconds, lambda: ref.end(error=late))
        else:
            world.at(seconds, lambda: ref.end(value, error))

    def die(self, for_good: bool = False) -> None:
        """The process is gone; a server with restarts left comes back."""
        world = self.world
        if self.process is not None:
            self.process.alive = False
        self.last, self.actor = self.actor or self.last, None
        self.busy, self.turn, self.running = False, [], 0
        for_good = for_good or not self.restarts
        self.over = self.over or for_good
        self.early = []
        for ref in [*self.calls]:
            self.calls.pop(ref)
            kind = ActorDied if self.over else ActorError
            world.at(
                0.05 + 0.2 * world.random.random(),
                lambda r=ref, k=kind: r.end(error=k("it died")),
            )
        if not self.over:
            self.restarts -= 1
            self.restarted = True
            self.process = Process("nobody", alive=False)
            self.begin()


class Handle:
    """What others hold of an actor."""

    def __init__(self, actor: Actor):
        self.actor_ = actor

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        ask = self.actor_.ask
        return types.SimpleNamespace(remote=lambda *given: ask(name, given))


class Disk(Checkpoints):
    """Checkpoints in memory, as bytes of JSON and arrays."""

    world: Any = None  # of the schedule that runs

    def __init__(self, folder):
        self.folder = self.path_of(folder)
        self.there = self.world.disk[str(self.folder)]

    def check_writable(self):
        pass

    def numbers(self):
        return tuple(sorted(n for n, (ok, *_) in self.there.items() if ok != "aside"))

    def damaged(self):
        return tuple(sorted(n for n, (ok, *_) in self.there.items() if ok == "aside"))

    def save(self, number, arrays, notes):
        world = self.world
        rng, faults = world.random, world.faults
        newest = max(self.there, default=0)
        # A run without any save that can be read ends, and says so.
        if not newest or self.there[newest][0] != "whole":
            faults = Faults()
        if rng.random() < faults.unsaved:
            world.marks["the disk is full"] += 1
            raise OSError("no space left on device")
        half = rng.random() < faults.half
        if half and rng.random() < 0.5:
            world.marks["a save is not finished"] += 1
            world.die_now()
        state = "damaged" if rng.random() < faults.damaged else "whole"
        if state == "damaged":
            world.marks["a save is damaged"] += 1
        kept = copied(arrays)
        self.there[number] = state, kept, json.dumps(notes)
        if half:
            world.marks["it dies right after a save"] += 1
            world.die_now()
        return self.folder / str(number)

    def load(self, number):
        state, arrays, notes = self.there[number]
        if state == "damaged":
            raise Damaged(f"{self.folder}/{number} is damaged")
        return copied(arrays), json.loads(notes)

    def delete(self, number):
        self.there.pop(number, None)

    def put_aside(self, number):
        self.there[number] = "aside", *self.there[number][1:]


def copied(arrays):
    return jax.tree.map(np.array, arrays)
