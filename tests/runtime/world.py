"""A cluster on which any message may be lost, late or doubled, and a disk with faults.

`optx_sync.virtual` has the clock, the actors and what of Ray the runtime calls.
"""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optx_sync.runtime.checkpoints import Checkpoints, Damaged
from optx_sync.virtual import Actor, VirtualCluster


@dataclasses.dataclass
class Faults:
    """How often what goes wrong, as shares of the messages or saves concerned."""

    lost: float = 0.0  # a message or its answer
    twice: float = 0.0
    slow: float = 0.0  # takes seconds, and so comes after later ones
    unsaved: float = 0.0  # the disk is full
    damaged: float = 0.0
    half: float = 0.0  # the process dies while it saves
    bytes_a_second: float = math.inf  # of each message to a server, and its answer
    far: frozenset[int] | None = None  # the workers on that link; `None`: all


class World(VirtualCluster):
    """A cluster with faults of all kinds, each as often as is set."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.faults = Faults()
        self.disk: dict[str, dict[int, Any]] = defaultdict(dict)
        self.marks: Counter[str] = Counter()
        self.skews: tuple[float, ...] = (0.0,)
        self.healed = False
        self.start_seconds: Callable[[Actor], float] = lambda actor: 0.1

    def run(self, main):
        """What `main` returns; it begins in its turn, as a process of its own does."""
        self.wait(lambda wake: wake(), None)
        return main()

    def skew(self):
        return self.random.choice(self.skews)

    def on_link(self, actor, given, sent):
        """The seconds that bytes are on the link."""
        size = sum(len(x) for x in sent if isinstance(x, bytes))
        far = self.faults.far
        if not size or not actor.is_server or (far is not None and given[0] not in far):
            return 0.0
        return size / self.faults.bytes_a_second

    def way_back(self, actor, given, answer):
        seconds = super().way_back(actor, given, answer)
        return seconds + self.on_link(actor, given, [answer])

    def fate(self, actor, name, given):
        rng, faults = self.random, self.faults
        message = actor.is_server and name in ("handle", "call")
        is_lost = message and rng.random() < faults.lost
        seconds = 0.001 + 0.004 * rng.random()
        if message and rng.random() < faults.slow:
            self.marks["a slow message"] += 1
            seconds = 4.0 * rng.random()
        seconds += self.on_link(actor, given, given)
        lost = ("request" if rng.random() < 0.5 else "answer") if is_lost else ""
        if lost:
            article = "an" if lost == "answer" else "a"
            self.marks[f"{article} {lost} is lost"] += 1
        if lost == "request" or not message or name != "handle":
            return seconds, lost, None
        if rng.random() >= faults.twice:
            return seconds, lost, None
        self.marks["a request comes twice"] += 1
        return seconds, lost, 2 * rng.random()


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
