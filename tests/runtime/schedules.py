"""Drawn schedules of a run: what goes wrong when is drawn from a seed, and judged.

    python -m tests.runtime.schedules --seconds 3600 --seed 0

Each step of a worker has a ticket, and its gradient adds to the element of that number
alone. So the center shows of each step whether it is in it, once, and in all parts.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import random
import time
from collections import Counter, defaultdict
from typing import Any

import jax
import numpy as np
import optax

import optx_sync as oxs
from optx_sync.runtime import parts, ray_actors, system
from optx_sync.runtime import ray as on_ray
from optx_sync.runtime import server as at_server
from optx_sync.runtime import worker as at_worker
from optx_sync.runtime.messages import Pending, PushRefused
from optx_sync.virtual import Process
from tests.runtime.world import Disk, Faults, World

TICKETS = 1024
BOMB = 2.5e38  # two of them overflow
RULE = oxs.rules.local_sgd()
INNER = optax.sgd(1.0)
CODE = oxs.exchange.quantized(8)
MERGES = oxs.exchange.median(), oxs.exchange.trimmed_mean(1)
KINDS = (
    "worker dies", "server dies", "worker freezes", "server freezes", "notice",
    "no place", "lost", "twice", "slow", "disk full", "damaged", "half", "skew",
)  # fmt: skip
HEALS = 8.0  # the second from which on nothing new goes wrong
# What a hundred schedules are to have seen.
MARKS = (
    "a worker died", "a server died", "a worker froze", "a server froze", "a notice",
    "no place", "a request is lost", "an answer is lost", "a request comes twice",
    "a slow message", "the disk is full", "a save is damaged", "a save is not finished",
    "it dies right after a save", "dropped", "lost", "short", "retry", "restored",
    "a late contribution after a restart", "two deaths of a server", "samples",
    "a refused merge", "resumed", "a pull", "a bomb",
)  # fmt: skip


def by_name(path: Any, _: Any) -> int:
    """A part for each array."""
    return "ab".index(path[0].key)


@dataclasses.dataclass
class Drawn:
    """The settings of a run and what goes wrong, as a seed has them."""

    seed: int
    workers: int
    servers: int
    parts: bool
    delay: int
    period: int
    meet: Any
    code: bool
    samples: int  # ranges, or 0
    steps: int
    every: int
    timeout: float | None
    kinds: tuple[str, ...]
    faults: list[tuple[float, str, int, float]]  # (when, kind, who, how long)
    core: set[int]
    weighs: bool  # by tokens: a contribution of none is dropped
    bombs: bool  # whether a meeting may overflow
    pulls: bool  # whether workers start anew from the center now and then
    flushes: bool
    resumes: bool  # whether a second run goes on with other numbers


def draw(seed: int, settings: int | None = None) -> Drawn:
    """The schedule of a seed; half of the kinds of fault are off.

    Args:
        seed: Of what goes wrong, and of the settings if `settings` is `None`.
        settings: Of the settings for which programs are compiled.
    """
    rng = random.Random(seed if settings is None else settings)
    workers = rng.choice([1, 2, 2, 3, 3, 4, 5])
    servers = rng.choice([1, 1, 2])
    parts = rng.random() < 0.4
    meet = None
    if workers > 1 and rng.random() < 0.6:
        k, grace = rng.randint(2, workers), rng.choice([0.0, 0.0, 0.5])
        merges = MERGES[: 1 if k < 3 else 2]
        merge = rng.choice(merges) if rng.random() < 0.2 else None
        meet = oxs.runtime.quorum(k, grace, merge=merge, patience=5.0)
    takes = rng.random() < 0.5
    if takes and meet is not None and meet.merge is MERGES[1]:
        meet = dataclasses.replace(meet, merge=None)  # The last could not be merged.
    delay = 0 if takes else rng.choice([0, 0, 1])
    period = rng.choice([2, 4]) if parts else rng.choice([1, 2, 3])
    code = rng.random() < 0.2
    weighs = rng.random() < 0.3
    rng = random.Random(seed)
    samples = rng.choice([20, 40]) if takes else 0
    kinds = tuple(kind for kind in KINDS if rng.random() < 0.5)
    faults = []
    for kind in KINDS[:6]:
        for _ in range(rng.choice([1, 1, 2]) if kind in kinds else 0):
            who = rng.randrange(servers if "server" in kind else workers)
            long = rng.choice([0.5, 3.0, 1e9])
            when = rng.choice([1.0, 3.0, HEALS]) * rng.random()
            faults.append((when, kind, who, long))
    return Drawn(
        seed, workers, servers, parts, delay, period, meet,
        code=code, samples=samples, steps=rng.randint(4, 12),
        every=rng.choice([1, 3, 10]), timeout=rng.choice([None, 4.0]), kinds=kinds,
        faults=faults, core={w for w in range(workers) if rng.random() < 0.6} or {0},
        weighs=weighs, flushes=rng.random() < 0.7, resumes=rng.random() < 0.3,
        pulls=rng.random() < 0.3,
        bombs=meet is not None and not code and rng.random() < 0.3,
    )  # fmt: skip


@dataclasses.dataclass
class Sent:
    """A push as its worker has sent it, and what it was told of it."""

    worker: int
    life: int
    part: int
    server: int
    number: int
    tickets: list[int]
    ranges: tuple[int, ...]  # of samples, that came with it
    told: str = "nothing"  # "used", "dropped", "refused"
    epoch: int = 0  # of the server that answered


class Told:
    """The ledger outside: what was sent, and what its sender was told."""

    def __init__(self, drawn: Drawn):
        self.sent: list[Sent] = []
        self.lost: Counter[int] = Counter()  # by life
        self.lives = 0
        self.tickets = 1  # those before are a bomb's
        self.heard: dict[tuple[int, int], int] = {}  # (life, server) -> its epoch
        self.returned: set[int] = set()
        self.marks: Counter[str] = Counter()

    def ticket(self) -> int:
        self.tickets += 1
        assert self.tickets <= TICKETS, "more steps than tickets"
        return self.tickets - 1


class Recorder:
    """A worker's connection, which notes what goes through it."""

    def __init__(self, worker: Any, told: Told, drawn: Drawn):
        self._connection, self._told = worker.connection, told
        self._index = worker.index
        self._meets, self._delay = drawn.meet is not None, drawn.delay
        self._life = told.lives
        told.lives += 1
        self.since: dict[int, list[int]] = defaultdict(list)
        self.bombs = True
        self.epochs: set[int] = set()  # of the servers that have answered

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def made(self, ticket: int) -> None:
        for part in range(len(self.layout.owners)):
            self.since[part].append(ticket)

    def _hear(self, server: int) -> int:
        epoch = self._connection._clients[self._index, server].epoch
        self._told.heard[self._life, server] = epoch
        return epoch

    def anew(self, worker: Any) -> None:
        """The worker has pulled the center, and was told what was lost by then."""
        for server in range(len(self.servers)):
            self._hear(server)
        self._told.lost[self._life] = worker.lost
        self._told.marks["a pull"] += 1
        self.since.clear()

    def send(self, push):
        told, tickets = self._told, self.since.pop(push.part, [])
        one = Sent(
            self._index, self._life, push.part, self.layout.owners[push.part],
            push.round, tickets, push.leases,
        )  # fmt: skip
        told.sent.append(one)
        pending = self._connection.send(push)

        def answer():
            try:
                reply = pending()
            except PushRefused:
                one.told = "refused"
                self.since[push.part] = tickets + self.since[push.part]
                raise
            one.told = "used" if reply.used else "dropped"
            one.epoch = self._hear(one.server)
            told.lost[self._life] += reply.lost
            if self.epochs and one.told == "dropped" and one.epoch not in self.epochs:
                told.marks["a late contribution after a restart"] += 1
            self.epochs.add(one.epoch)
            # The steps made meanwhile are overwritten, but not by a late answer.
            if not self._meets or len(self.since[push.part]) <= self._delay:
                self.since.pop(push.part, None)
            return reply

        return Pending(answer, pending.is_there, pending.hand_in)


def gradient(ticket: int, bomb: bool = False) -> Any:
    one = np.zeros(TICKETS, np.float32)
    one[ticket], one[0] = -1.0, -BOMB * bomb
    return {"a": one, "b": one}


PARAMS = {"a": np.zeros(TICKETS, np.float32), "b": np.zeros(TICKETS, np.float32)}


def program(drawn: Drawn, told: Told, rng: random.Random):
    """The worker's program of a schedule."""
    pace = [rng.choice([0.05, 0.1, 0.4]) for _ in range(drawn.workers)]

    def worker_fn(worker):
        # A program that runs again does so with its worker.
        again = isinstance(worker.connection, Recorder)
        recorder = worker.connection if again else Recorder(worker, told, drawn)
        worker.connection = recorder
        if again:
            recorder.anew(worker)

        def step():
            recorder.made(ticket := told.ticket())
            system.here().sleep(pace[worker.index])
            # Two bombs in a meeting overflow, and one worker has one at most.
            bomb = drawn.bombs and recorder.bombs and rng.random() < 0.3
            far = max(abs(float(x[0])) for x in worker.params.values()) if bomb else 0
            bomb = bomb and far < BOMB / 8
            recorder.bombs = recorder.bombs and not bomb
            tokens = float(rng.random() > 0.1) if drawn.weighs else None
            worker.step(gradient(ticket, bomb), tokens=tokens)
            if drawn.pulls and rng.random() < 0.1:
                worker.pull()
                recorder.anew(worker)

        if drawn.samples:
            for _ in worker.samples():
                step()
        else:
            while worker.local_step < drawn.steps:
                step()
        if drawn.flushes:
            worker.flush()
        told.returned.add(worker.index)

    return worker_fn


# Programs are compiled once for all schedules of equal settings, not once a worker.
_first: dict[Any, Any] = {}


def shared(key: Any, made: Any) -> Any:
    """The first object of a kind lends its compiled functions to all later ones."""
    first = _first.setdefault(key, made)
    for name, value in vars(first).items():
        kind = type(value).__name__
        if kind in ("PjitFunction", "Sharing", "ExpectedCodes"):
            setattr(made, name, value)
    return made


def way_of(agreement: Any, settings: Any, real: Any = at_server.way_of) -> Any:
    way, key = real(agreement, settings), (agreement, settings)

    def serve(part, inner, copy_replies):
        shapes = repr(jax.tree_util.tree_leaves_with_path(parts.shapes_of(part)))
        return shared((key, shapes), way.serve(part, inner, copy_replies))

    def work(shapes, inner, layout):
        return shared((key, "work"), way.work(shapes, inner, layout))

    return way._replace(serve=serve, work=work)


@functools.cache
def _lay_out(fragments: Any, num_servers: int) -> Any:
    return parts.lay_out(PARAMS, fragments, num_servers)


def lay_out(_: Any, fragments: Any, num_servers: int = 1) -> Any:
    """Parameters are the same in all schedules."""
    return _lay_out(fragments, num_servers)


@contextlib.contextmanager
def patched(world: World):
    """Put the schedule's disk, and what is compiled already, in their places."""
    places: list[Any] = [(at_server, "Checkpoints", Disk)]
    places += [(module, "way_of", way_of) for module in (at_server, at_worker)]
    modules = at_server, at_worker, on_ray, ray_actors
    places += [(module, "lay_out", lay_out) for module in modules]
    before = [getattr(module, name) for module, name, _ in places]
    Disk.world = world
    for module, name, value in places:
        setattr(module, name, value)
    log = logging.getLogger("optx_sync.runtime")
    handler, level = logging.NullHandler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.CRITICAL)
    try:
        with system.using(world):
            yield
    finally:
        world.close()
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)
        log.removeHandler(handler)
        log.setLevel(level)


def strike(world: World, kind: str, who: int, long: float) -> None:
    """One thing goes wrong."""
    servers = [x for x in world.actors if x.is_server]
    workers = [
        x for x in world.actors
        if not x.is_server and not x.over and x.process and x.process.alive
        and x.index == who
    ]  # fmt: skip
    actor = servers[who] if "server" in kind else (workers or [None])[0]
    if actor is None or actor.process is None or not actor.process.alive:
        return
    if kind == "worker dies":
        world.marks["a worker died"] += 1
        actor.die()
    elif kind == "server dies":
        world.marks["a server died"] += 1
        if actor.restarted:
            world.marks["two deaths of a server"] += 1
        actor.die()
    elif kind.endswith("freezes"):
        world.marks[f"a {kind.split()[0]} froze"] += 1
        world.freeze(actor.process, None if long > 1e6 else long)
    elif kind == "notice" and actor.process.notice is not None:
        world.marks["a notice"] += 1
        actor.process.notice()


def with_tokens(at: Any) -> Any:
    """A contribution without tokens is dropped; the others count alike."""
    return jax.numpy.where(at.tokens > 0, 1.0, 0.0)


def run(drawn: Drawn, marks: Counter[str] | None = None) -> None:
    """Run a schedule and judge it; raises where something is not as it should be."""
    seed = drawn.seed
    world, told = World(seed), Told(drawn)
    rng = world.random
    has = drawn.kinds.__contains__
    if has("skew"):
        world.skews = (0.0, -3e4, 50.0)

    def heal():
        world.faults = Faults()
        for actor in world.actors:
            if actor.process is None or not actor.process.frozen:
                continue
            if actor.is_server or actor.index in drawn.core:
                world.thaw(actor.process)
        world.healed = True

    def share(kind, x):
        return x if has(kind) else 0.0

    def begin_faults():
        world.faults = Faults(
            share("lost", 0.05), share("twice", 0.05), share("slow", 0.03),
            share("disk full", 0.2), share("damaged", 0.2), share("half", 0.08),
        )  # fmt: skip
        for when, kind, who, long in drawn.faults:
            world.at(when, functools.partial(strike, world, kind, who, long))
        world.at(HEALS, heal)

    def start_seconds(actor):
        if actor.is_server:
            return 0.1 if not actor.restarted else 0.3 + rng.random()
        if has("no place") and not world.healed and rng.random() < 0.3:
            world.marks["no place"] += 1
            return HEALS + rng.choice([0.0, 30.0])
        return 0.05 + 0.2 * rng.random()

    world.start_seconds = start_seconds

    def ends_of_core():
        """Once the core has ended, the rest is thawed, so that the run can end."""
        if drawn.core <= told.returned:
            for actor in world.actors:
                if actor.process is not None and actor.process.frozen:
                    world.thaw(actor.process)
        world.at(0.5, ends_of_core)

    def main():
        begin_faults()
        world.at(0.5, ends_of_core)
        return go(drawn)

    def go(drawn):
        options = {}
        if drawn.samples:
            options["samples"] = oxs.runtime.Samples(drawn.samples, 1)
        if drawn.code:
            options["exchange"] = CODE
        if drawn.weighs:
            options["weigh"] = with_tokens
        return oxs.runtime.run(
            program(drawn, told, rng), PARAMS, INNER, RULE,
            num_workers=drawn.workers, num_servers=drawn.servers,
            communication_period=drawn.period, delay=drawn.delay, meet=drawn.meet,
            fragments=by_name if drawn.parts else None,
            checkpoint_dir="/nowhere/run", checkpoint_every=drawn.every,
            worker_timeout=drawn.timeout, **options,
        )  # fmt: skip

    with patched(world):
        center, history = world.run(main)
        judge(world, drawn, told, center, history)
        world.marks.update(kind for kind, _ in history.counts)
        if drawn.resumes:
            again(world, drawn, told, go)
    world.marks["samples"] += bool(drawn.samples)
    for why, mark in ("merge= needs", "a refused merge"), ("infinity", "a bomb"):
        if any(why in e.message for e in history.events if e.kind == "short"):
            world.marks[mark] += 1
    if marks is not None:
        marks.update(world.marks + told.marks)


def smaller(drawn: Drawn) -> Drawn:
    """The schedule with all taken out without which it fails as well."""

    def fails(one: Drawn) -> bool:
        try:
            run(one)
        except Exception:
            return True
        return False

    for name in ("kinds", "faults"):
        for what in list(getattr(drawn, name)):
            rest = type(getattr(drawn, name))(
                x for x in getattr(drawn, name) if x != what
            )
            less = dataclasses.replace(drawn, **{name: rest})
            drawn = less if fails(less) else drawn
    for simple in ({"servers": 1}, {"code": False}, {"resumes": False}, {"steps": 4}):
        less = dataclasses.replace(drawn, **simple)
        drawn = less if fails(less) else drawn
    return drawn


def as_program(drawn: Drawn, settings: int | None) -> str:
    """A program of a few lines that runs this schedule."""
    whole = draw(drawn.seed, settings)
    changed = {
        field.name: value
        for field in dataclasses.fields(drawn)
        if (value := getattr(drawn, field.name)) != getattr(whole, field.name)
    }
    return (
        "import dataclasses\nfrom tests.runtime.schedules import draw, run\n"
        f"run(dataclasses.replace(draw({drawn.seed}, {settings}), **{changed!r}))"
    )


def again(world: World, drawn: Drawn, told: Told, go: Any) -> None:
    """Go on with other numbers of what may change; refused where samples would be."""
    world.process, world.actors, world.faults = Process("driver"), [], Faults()
    world.marks["resumed"] += 1
    told.returned.clear()
    if drawn.samples:
        other = dataclasses.replace(drawn, samples=drawn.samples + 7)
        try:
            world.run(lambda: go(other))
        except ValueError as error:
            assert "counts ranges of Samples" in str(error), error
            return
        raise AssertionError("it went on with other samples")
    workers = drawn.workers + (drawn.meet is not None)
    more = dataclasses.replace(drawn, steps=drawn.steps + 5, workers=workers)
    center, history = world.run(lambda: go(more))
    judge(world, more, told, center, history)


def held_of(world: World) -> dict[int, Any]:
    """What servers hold of each part at the end."""
    servers = [actor.last._server for actor in world.actors if actor.is_server]
    return {
        part: held
        for server in servers
        for part, held in zip(server.parts, server._held, strict=True)
    }


def judge(world: World, drawn: Drawn, told: Told, center: Any, history: Any) -> None:
    """Raise where the center and what was told are not of one another."""
    of_part = [np.asarray(center[name]) for name in "ab"]
    several = drawn.parts or drawn.servers > 1
    epochs = [x.last._server._book.epoch for x in world.actors if x.is_server]

    def meets_again(one):
        """Its meeting may be held again, as a save has it, whatever came of it."""
        return drawn.meet is not None and one.epoch != epochs[one.server]

    for actor in world.actors:
        threads = actor.options.get("max_concurrency", 1)
        assert actor.most <= threads, f"{actor.most} calls in {threads} threads"
    if drawn.meet is not None and drawn.meet.merge is not None:
        needs = drawn.meet.merge.needs
        may = sum(
            one.told in ("used", "nothing") or meets_again(one) for one in told.sent
        )
        steps = sum(held.global_step for held in held_of(world).values())
        assert may >= needs * steps, f"{steps} of {may} merged"
        return
    shares: dict[int, list[float]] = defaultdict(list)
    counted: Counter[int] = Counter()
    missing: Counter[int] = Counter()
    whole = 1 / drawn.workers if drawn.meet is None else None
    for one in told.sent:
        if not one.tickets:
            continue
        of = of_part if not several else [of_part[one.part]]
        found = np.stack([leaf[one.tickets] for leaf in of]).ravel()
        assert np.ptp(found) < 1e-3, f"torn: {one} {found}"
        share = float(found[0])
        assert share > -1e-3, f"below nothing: {one} {found}"
        if whole is not None:
            ok = abs(share) < 1e-3 or abs(share - whole) < 1e-3
            assert ok, f"not once: {one} {found}"
        # What was refused comes again.
        if one.told == "dropped" and not meets_again(one):
            assert abs(share) < 1e-3, f"absorbed all the same: {one} {found}"
        shares[one.part].append(share)
        counted.update(one.ranges if share > 1e-3 else ())
        gone = one.told == "used" and abs(share) < 1e-3
        if gone and one.epoch != told.heard[one.life, one.server]:
            missing[one.life] += 1
    for life, number in missing.items():
        assert number <= told.lost[life], (
            f"untold: of life {life} {number} pushes are gone, and it was told of "
            f"{told.lost[life]}"
        )
    if drawn.samples:
        twice = [number for number, times in counted.items() if times > 1]
        assert not twice, f"counted twice: {twice}"
        missed = {*range(drawn.samples)} - counted.keys()
        # Where a server dies after all programs have ended, the run's end says so.
        said = [e.message for e in history.events if e.kind == "uncounted"]
        known = sum(int(message.split()[0]) for message in said)
        assert known >= len(missed), f"not counted: {missed}; told of {known}"
    if drawn.meet is None:
        return
    for part, those in shares.items():
        # What has no tickets of its own leaves no trace.
        empty = sum(1 for s in told.sent if s.part == part and not s.tickets)
        steps, total = held_of(world)[part].global_step, sum(those)
        assert steps - empty - 1e-2 <= total <= steps + 1e-2, (
            f"part {part}: {steps} meetings hold {total} of their means"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=10**9)
    parser.add_argument("--settings", type=int, nargs="*", help="of runs; in turns")
    options = parser.parse_args()
    begin, seed, marks, failed = time.monotonic(), options.seed, Counter(), []
    end = options.seed + options.number
    while time.monotonic() - begin < options.seconds and seed < end:
        of = options.settings
        settings = of[seed % len(of)] if of else None
        drawn = draw(seed, settings)
        try:
            run(drawn, marks)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            print(as_program(smaller(drawn), settings), flush=True)
        seed += 1
    seconds = time.monotonic() - begin
    print(f"{seed - options.seed} schedules in {seconds:.0f} s, failed: {failed}")
    for mark, number in sorted(marks.items()):
        print(f"  {number:6d} {mark}")
    print("never seen:", [mark for mark in MARKS if not marks[mark]])
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
