"""Goes through every order of events, with the code that runs: real servers, clients.

A world is frozen into tuples, and a `Server` is thawed from them for each event. What
lies on the disk is held in memory, and so is the clock.
"""

import array
import copy
import functools
import json
import struct
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import optx_sync as oxs
from optx_sync.runtime import Push, Server, protocol
from optx_sync.runtime import server as server_module
from optx_sync.runtime.agreements.pushes import bound
from optx_sync.runtime.checkpoints import Damaged
from optx_sync.runtime.protocol import Book, Client
from optx_sync.runtime.system import System, using

EVERY = 2  # pushes between checkpoints
# Epochs of servers that start are far apart, as their clocks make them.
BOOT = 1000


class Machine(NamedTuple):
    """A server, frozen."""

    book: Book
    centers: tuple[bytes, ...]  # of each part: how often each place is marked
    disk: tuple[tuple[int, tuple, str], ...] = ()  # (number, arrays of parts, notes)
    held: tuple = ()


class Program(NamedTuple):
    """A worker: its parts of the protocol, and what `step` has told it."""

    worker: int
    clients: tuple[Client, ...]  # for each server
    made: tuple[int, ...]  # of each part, the places that it has marked so far
    ahead: tuple[int, ...]  # of each part, by how much places are ahead of rounds
    acked: tuple[
        tuple[int, int], ...
    ] = ()  # (part, place) of which `step` has returned
    lost: int = 0  # how many of them it was told are gone
    busy: int = -1  # the server with which it speaks
    now: tuple[int, ...] = ()  # (part, place) that it pushes; () while it joins
    # Where workers share meetings: of each part how many it has taken, and that number
    # as it stands in the push under way; the places that came late, as it was told.
    met: tuple[int, ...] = ()
    sent_met: int = -1
    late: tuple[tuple[int, int], ...] = ()


class World(NamedTuple):
    """All there is, in numbers of `Table`: those are quick to compare."""

    servers: tuple[int, ...]
    programs: tuple[int, ...]
    late: int  # what a worker sent that has died since
    deaths: int  # that may still come
    losses: int  # of an answer


def packed(world):
    """A world, short."""
    servers, programs, *rest = world
    things = (*servers, *programs, *rest)
    return struct.pack(f"{len(things)}i", *things)


class Table:
    """Things, numbered as they come."""

    def __init__(self):
        self.things, self.numbers = [], {}

    def number(self, thing):
        number = self.numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


def put(items, k, item):
    return (*items[:k], item, *items[k + 1 :])


class Disk:
    """A folder of checkpoints, in memory."""

    folder = "memory"

    def __init__(self, frozen=(), unreadable=()):
        self.held = {number: (kept, notes) for number, kept, notes in frozen}
        self.unreadable = set(unreadable)

    def frozen(self):
        return tuple((number, *self.held[number]) for number in sorted(self.held))

    def numbers(self):
        return tuple(sorted(self.held))

    def damaged(self):
        return ()

    def check_writable(self):
        pass

    def save(self, number, arrays, notes):
        kept = tuple(
            tuple((name, _kept(x["['x']"])) for name, x in part.items() if x)
            for part in arrays.values()
        )
        self.held[number] = kept, json.dumps([list(arrays), notes])

    def load(self, number):
        if number in self.unreadable:
            raise Damaged(f"{number} cannot be read")
        kept, notes = self.held[number]
        names, notes = json.loads(notes)

        def array(x):
            shape, numbers = x
            return {"['x']": np.frombuffer(numbers, np.float32).reshape(shape).copy()}

        parts = ({name: array(x) for name, x in part} for part in kept)
        return dict(zip(names, parts, strict=True)), notes

    def delete(self, number):
        del self.held[number]

    def put_aside(self, number):
        del self.held[number]


def _kept(array):
    return array.shape, array.tobytes()


class InMemory:
    """Stands for `Checkpoints`: whatever the folder, it is this disk."""

    path_of = staticmethod(lambda folder: folder)
    disk: Any = None

    def __new__(cls, folder):
        return cls.disk


RULE = oxs.CenterRule(
    lambda own, center, at: own.params - own.taken, reads=("params", "taken")
)


class Explorer:
    """Goes from a world to all that may come next, and remembers every step."""

    meeting: Any = {}  # noqa: RUF012 # only read: more settings of a server

    def __init__(self, workers, owners, rounds=3, deaths=1, losses=1):
        self.workers, self.owners = workers, owners
        self.rounds, self.deaths, self.losses = rounds, deaths, losses
        self.places = 3 * rounds + 2
        self.parts = [
            [p for p, owner in enumerate(owners) if owner == k]
            for k in range(max(owners) + 1)
        ]
        self.machines, self.programs, self.lates = Table(), Table(), Table()
        self.wants = functools.cache(self._wants)
        self.deliver = functools.cache(self._deliver)
        self.hear = functools.cache(self._hear)
        self.dies = functools.cache(self._dies)
        self.restarts = functools.cache(self._restarts)

    # Servers.

    def boot(self, number, server, disk):
        """A real server that starts."""
        clock: Any = System()
        clock.stamp = lambda: BOOT * number
        count, several = len(self.owners), len(self.owners) > 1
        params = {"x": np.zeros((count, self.workers * self.places), np.float32)}
        if not several:
            params = {"x": params["x"].reshape(-1)}
        fragments: Any = (lambda path, leaf: np.arange(count)) if several else None
        with (
            using(clock),
            mock.patch.object(server_module, "Checkpoints", InMemory),
            mock.patch.object(InMemory, "disk", disk),
            mock.patch.object(
                server_module, "lay_out", functools.partial(self._laid_out)
            ),
        ):
            return Server(
                params, RULE, num_workers=self.workers, communication_period=count,
                fragments=fragments, checkpoint_dir="memory", checkpoint_every=EVERY,
                number=server, num_servers=len(self.parts), **self.meeting,
            )  # fmt: skip

    def _laid_out(self, shapes, fragments, servers):
        return _laid_out(shapes, fragments, servers)._replace(owners=self.owners)

    def frozen(self, server):
        centers = tuple(held.center["['x']"].tobytes() for held in server._held)
        held = self.held(server)
        # What is only counted tells no two machines apart.
        counted = (x._replace(heard=0, refused=0) for x in server._book.entries)
        book = server._book._replace(entries=tuple(counted))
        return self.machines.number(
            Machine(book, centers, server._checkpoints.frozen(), held)
        )

    def held(self, server) -> tuple:
        """What else a server holds, as tuples."""
        return ()

    def thawed(self, number, server):
        """The server that was frozen, as a new object."""
        machine = self.machines.things[number]
        thawed: Any = copy.copy(self.models[server])
        thawed._book, thawed._events = machine.book, []
        thawed._checkpoints, thawed._held = Disk(machine.disk), []
        for model, center in zip(
            self.models[server]._held, machine.centers, strict=True
        ):
            held: Any = copy.copy(model)
            shape = model.center["['x']"].shape
            values = np.frombuffer(center, np.float32).reshape(shape).copy()
            held.center, held.kept, held.spare = {"['x']": values}, {}, []
            held.bounds = {"['x']": bound(values)}
            held.seen = list(model.seen)
            thawed._held.append(held)
        return thawed

    def _deliver(self, machine, server, request, place, met):
        thawed, push = self.thawed(machine, server), None
        if request.kind == "send":
            shape = thawed._held[request.part].center["['x']"].shape
            mark = np.zeros(shape, np.float32)
            mark.reshape(-1)[request.worker * self.places + place] = 1
            push = Push(
                request.worker, request.round, {"contribution": {"['x']": mark}},
                incarnation=request.incarnation, part=self.parts[server][request.part],
                met=met,
            )  # fmt: skip
        answer, came = thawed.handle(request, push)
        assert not isinstance(answer, protocol.Refused), answer
        return self.frozen(thawed), answer, self.told(came)

    def told(self, came) -> Any:
        """What else an answer says to a program."""

    def _restarts(self, machine, server, damaged):
        disk = Disk(self.machines.things[machine].disk)
        if damaged:
            if len(disk.numbers()) < 2:
                return -1
            disk.unreadable = {disk.numbers()[-1]}
        again = self.boot(3, server, disk)
        disk.unreadable = set()
        return self.frozen(again)

    # Workers.

    def go_on(self, program):
        """The worker's own part: it notes what it was told, and pushes again."""
        if program.busy >= 0:
            client = program.clients[program.busy]
            if protocol.wants(client) is not None:
                return program
            assert client.phase == "idle", client
            program = self.returned(program, client)
        clients = program.clients
        unjoined = [k for k, client in enumerate(clients) if not client.lines]
        if unjoined:
            server = unjoined[0]
            client = clients[server]._replace(incarnation=clients[0].incarnation)
            client = protocol.begin(client, "enter")
        elif left := [
            p for p in enumerate(self.owners) if self.rounds_left(clients, *p)
        ]:
            part, server = self.next_part(program, clients, left)
            position, made = self.parts[server].index(part), program.made
            number = clients[server].lines[position].round + 1
            client = protocol.begin(clients[server], "send", position, number)
            program = program._replace(
                made=put(made, part, made[part] + 1),
                now=(part, made[part]),
                sent_met=program.met[part] if program.met else -1,
            )
        else:
            return program
        program = program._replace(clients=put(clients, server, client), busy=server)
        return program if protocol.wants(client) is not None else self.go_on(program)

    def next_part(self, program, clients, left):
        """The part that has met least, and its server."""
        return max(left, key=lambda p: self.rounds_left(clients, *p))

    def rounds_left(self, clients, part, server):
        line = clients[server].lines[self.parts[server].index(part)]
        return max(self.rounds - line.place.counted, 0)

    def returned(self, program, client):
        """What a call has told the worker."""
        own, ahead, acked = self.parts[program.busy], program.ahead, program.acked
        if not program.now:
            for part, line in zip(own, client.lines, strict=True):
                ahead = put(ahead, part, program.made[part] - line.round - 1)
        elif program.now not in program.late:
            acked = (*acked, program.now)
        lost = program.lost + client.lost
        return program._replace(busy=-1, ahead=ahead, acked=acked, lost=lost)

    def _wants(self, program):
        program = self.programs.things[program]
        if program.busy < 0:
            return None
        request = protocol.wants(program.clients[program.busy])
        if request is None:
            return None
        place = 0
        if request.kind == "send":
            part = self.parts[program.busy][request.part]
            place = request.round + program.ahead[part]
        return program.busy, request, place, program.sent_met

    def _hear(self, program, answer, _, told):
        program = self.heard(self.programs.things[program], told)
        client = protocol.hears(program.clients[program.busy], answer)
        clients = put(program.clients, program.busy, client)
        program = self.go_on(program._replace(clients=clients))
        return self.programs.number(program)

    def heard(self, program, told):
        """The program after what else an answer said."""
        return program

    def _dies(self, program):
        """The worker that replaces it, and knows nothing of it."""
        old = self.programs.things[program]
        clients = tuple(Client(old.worker) for _ in self.parts)
        new = Program(old.worker, clients, old.made, old.made, old.acked, old.lost)
        return self.programs.number(self.go_on(new))

    # Worlds.

    def start(self):
        self.models = [self.boot(1, k, Disk()) for k in range(len(self.parts))]
        servers = tuple(map(self.frozen, self.models))
        programs, none = [], (0,) * len(self.owners)
        for w in range(self.workers):
            clients = tuple(Client(w) for _ in self.parts)
            program = self.go_on(Program(w, clients, none, none))
            number = self.programs.number(program)
            while (wanted := self.wants(number)) and wanted[1].kind == "enter":
                server, *request = wanted
                machine, answer, told = self.deliver(servers[server], server, *request)
                servers = put(servers, server, machine)
                number = self.hear(number, answer, type(answer), told)
            programs.append(number)
        none_late = self.lates.number(())
        return World(servers, tuple(programs), none_late, self.deaths, self.losses)

    def following(self, world):
        """Every world that may come next."""
        servers, programs, late, deaths, losses = world
        for w, program in enumerate(programs):
            if (wanted := self.wants(program)) is None:
                continue
            k, *request = wanted
            machine, answer, told = self.deliver(servers[k], k, *request)
            there = servers if machine == servers[k] else put(servers, k, machine)
            # The answer is lost. (A request that is lost changes nothing.)
            if losses:
                yield World(there, programs, late, deaths, 0)
            heard = self.hear(program, answer, type(answer), told)
            yield World(there, put(programs, w, heard), late, deaths, losses)
        sent = self.lates.things[late]
        for n, (k, *request) in enumerate(sent):
            machine, *_ = self.deliver(servers[k], k, *request)
            rest = self.lates.number((*sent[:n], *sent[n + 1 :]))
            yield World(put(servers, k, machine), programs, rest, deaths, losses)
        if not deaths:
            return
        for w, program in enumerate(programs):
            if sent := self.wants(program):
                new = put(programs, w, self.dies(program))
                yield World(servers, new, self.lates.number((sent,)), 0, losses)
        for k, machine in enumerate(servers):
            for damaged in (False, True):
                again = self.restarts(machine, k, damaged)
                if again >= 0:
                    yield World(put(servers, k, again), programs, late, 0, losses)

    def check(self, world):
        """What holds at the end; whether this is one."""
        if any(map(self.wants, world.programs)):
            return False
        machines = [self.machines.things[number] for number in world.servers]
        for number in world.programs:
            program = self.programs.things[number]
            gone, known = 0, True
            for part, owner in enumerate(self.owners):
                machine = machines[owner]
                center = machine.centers[self.parts[owner].index(part)]
                marks = np.frombuffer(center, np.float32)
                own = marks[program.worker * self.places :][: self.places]
                assert own.max() <= 1, "twice"
                gone += sum(own[place] == 0 for p, place in program.acked if p == part)
                # Whose program ended before the server went back cannot be told.
                known &= program.clients[owner].epoch == machine.book.epoch
            assert not known or gone == program.lost, "lost without a word"
        return True

    def is_calm(self, world):
        """No fault can come any more, and all are of one epoch.

        What follows then differs only in when servers save themselves, and nobody goes
        back: a single order stands for all.
        """
        if world.deaths or world.losses or self.lates.things[world.late]:
            return False
        epochs = [self.machines.things[number].book.epoch for number in world.servers]
        return all(
            [client.epoch for client in self.programs.things[number].clients] == epochs
            for number in world.programs
        )

    def to_the_end(self, world):
        """One order of events, to the end."""
        while not self.check(world):
            world = next(self.following(world))

    def explore(self):
        """Go through all worlds: how many there are, and how many ends.

        Of each it is seen that there is a way to an end: no order of events hangs.
        """
        # A world is kept as bytes: there are many. The newest comes first, so that
        # what is wrong at an end is soon found, and few wait.
        first = self.start()
        numbers, worlds = {packed(first): 0}, {0: first}
        ends, edges = [], array.array("i")
        while worlds:
            number, here = worlds.popitem()
            if self.check(here):
                ends.append(number)
            elif self.is_calm(here):
                self.to_the_end(here)
                ends.append(number)
                continue
            for there in self.following(here):
                new = len(numbers)
                next_ = numbers.setdefault(packed(there), new)
                if next_ == new:
                    worlds[new] = there
                edges.extend((next_, number))
        reached = np.zeros(len(numbers), bool)
        reached[ends] = True
        to, from_ = np.frombuffer(edges, np.int32).reshape(-1, 2).T
        count = 0
        while count != (count := int(reached.sum())):
            reached[from_[reached[to]]] = True
        assert reached.all(), "hangs"
        return len(numbers), len(ends)


_laid_out = server_module.lay_out
