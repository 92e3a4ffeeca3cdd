"""Goes through every order of the protocol's events, with the code that runs."""

import array
import functools
import struct
from typing import Any, NamedTuple

import numpy as np

from optx_sync.runtime import protocol
from optx_sync.runtime.protocol import Book, Client, Entry, Name

EVERY = 2  # pushes between cuts
# Epochs of servers that start are far apart, as their clocks make them.
BOOT = 1000


class Machine(NamedTuple):
    """A server: what it knows, holds and has saved."""

    book: Book
    applied: tuple[tuple[Name, ...], ...]  # by worker, in order
    disk: tuple[tuple[int, Any, Any], ...] = ()  # (cut, entries, applied)


class Program(NamedTuple):
    """A worker: its part of the protocol, and what `step` has told it."""

    client: Client
    acked: tuple[Name, ...] = ()  # pushes of which `step` has returned
    lost: int = 0  # how many of them it was told are gone


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


def boot(number, workers, disk, leads):
    return Machine(
        Book(
            (Entry(),) * workers, (BOOT * number, 0), every=EVERY * leads,
            cuts=tuple(sorted(cut for cut, _, _ in disk)),
        ), ((),) * workers, disk,
    )  # fmt: skip


def handle(machine, request):
    """What a server does: the decision, carried out."""
    before, (book, answer, actions) = (
        machine.book,
        protocol.decide(machine.book, request),
    )
    applied, disk = machine.applied, machine.disk
    for action, *rest in actions:
        if action == "apply":
            (w,) = rest
            applied = put(applied, w, (*applied[w], book.entries[w].last))
        elif action == "save":
            number, of_cut = rest
            disk = (*disk, (number, of_cut.entries, applied))
            book = protocol.saved(book, number, of_cut)
            gone = protocol.unneeded(book)
            book = book._replace(cuts=tuple(n for n in book.cuts if n not in gone))
            disk = tuple(one for one in disk if one[0] not in gone)
        elif action == "load":
            found = {cut: (e, a) for cut, e, a in disk}.get(rest[0])
            entries, applied = found or (None, ((),) * len(applied))
            book = protocol.restored(before, entries, request)
            disk = tuple(one for one in disk if one[0] in book.cuts)
            answer = protocol.decide(book, request).answer
    return Machine(book, applied, disk), answer


def put(items, k, item):
    return (*items[:k], item, *items[k + 1 :])


def go_on(program, rounds):
    """The worker's own part: it notes what it was told, pushes again, and leaves."""
    client = program.client
    if protocol.wants(client):
        return program
    assert client.phase == "idle", client
    if client.goal == "push":
        name = (client.incarnation, client.serial)
        program = program._replace(
            acked=(*program.acked, name), lost=program.lost + client.lost
        )
    if client.round < rounds:
        return program._replace(client=protocol.begin(client, "push"))
    if client.replay and client.goal != "leave":
        program = program._replace(client=protocol.begin(client, "leave"))
        return go_on(program, rounds)
    return program


def undisturbed(machines, client):
    """One client alone does what it has begun."""
    while wanted := protocol.wants(client):
        for k, request in wanted.items():
            machine, answer = handle(machines[k], request)
            machines = put(machines, k, machine)
            client = protocol.hears(client, k, answer)
    return machines, client


class Explorer:
    """Goes from a world to all that may come next, and remembers every step."""

    def __init__(self, workers, servers, replay, rounds=3, deaths=1, losses=1):
        self.replay, self.rounds = replay, rounds
        self.machines, self.programs, self.lates = Table(), Table(), Table()
        machines = tuple(boot(0, workers, (), k == 0) for k in range(servers))
        programs = []
        for w in range(workers):
            client = protocol.begin(Client(w + 1, servers, w, replay), "join")
            machines, client = undisturbed(machines, client)
            programs.append(go_on(Program(client), rounds))
        self.first = World(
            tuple(map(self.machines.number, machines)),
            tuple(map(self.programs.number, programs)),
            self.lates.number(()),
            deaths,
            losses,
        )
        self.wants = functools.cache(self._wants)
        self.deliver = functools.cache(self._deliver)
        self.hear = functools.cache(self._hear)
        self.dies = functools.cache(self._dies)
        self.restarts = functools.cache(self._restarts)

    def _wants(self, program):
        wanted = protocol.wants(self.programs.things[program].client)
        # Their types too: named tuples of other names may be equal.
        return tuple((k, request, type(request)) for k, request in wanted.items())

    def _deliver(self, machine, request, _):
        machine, answer = handle(self.machines.things[machine], request)
        return self.machines.number(machine), answer

    def _hear(self, program, k, answer):
        program = self.programs.things[program]
        client = protocol.hears(program.client, k, answer)
        program = go_on(program._replace(client=client), self.rounds)
        return self.programs.number(program)

    def _dies(self, program):
        """The worker that replaces it, and knows nothing of it."""
        old = self.programs.things[program]
        new = Client(9, old.client.servers, old.client.worker, self.replay)
        new = Program(protocol.begin(new, "join"), old.acked, old.lost)
        return self.programs.number(new)

    def _restarts(self, machine, leads):
        old = self.machines.things[machine]
        return self.machines.number(boot(3, len(old.applied), old.disk, leads))

    def following(self, world):
        """Every world that may come next."""
        servers, programs, late, deaths, losses = world
        for w, program in enumerate(programs):
            for k, *request in self.wants(program):
                machine, answer = self.deliver(servers[k], *request)
                there = servers
                if machine != servers[k]:
                    there = put(servers, k, machine)
                    # The answer is lost. (A request that is lost changes nothing.)
                    if losses:
                        yield World(there, programs, late, deaths, 0)
                heard = self.hear(program, k, answer)
                yield World(there, put(programs, w, heard), late, deaths, losses)
        sent = self.lates.things[late]
        for n, (k, *request) in enumerate(sent):
            machine, _ = self.deliver(servers[k], *request)
            rest = self.lates.number((*sent[:n], *sent[n + 1 :]))
            yield World(put(servers, k, machine), programs, rest, deaths, losses)
        if not deaths:
            return
        for w, program in enumerate(programs):
            if sent := self.wants(program):
                new = put(programs, w, self.dies(program))
                yield World(servers, new, self.lates.number(sent), 0, losses)
        for k, machine in enumerate(servers):
            new = put(servers, k, self.restarts(machine, k == 0))
            yield World(new, programs, late, 0, losses)

    def check(self, world):
        """What holds at the end; whether this is one."""
        if any(map(self.wants, world.programs)):
            return False
        programs = [self.programs.things[number] for number in world.programs]
        machines = tuple(self.machines.things[number] for number in world.servers)
        # The one who takes the center looks first whether all servers are there.
        look = protocol.begin(Client(99, len(machines)), "look")
        machines, look = undisturbed(machines, look)
        applied = machines[0].applied
        assert all(machine.applied == applied for machine in machines), "torn"
        for program, names in zip(programs, applied, strict=True):
            assert len(set(names)) == len(names), "twice"
            gone = set(program.acked) - set(names)
            assert not program.client.replay or not gone, "lost in spite of replay"
            # Whose program ended before the servers went back is not there to be told.
            if program.client.epoch == look.epoch:
                assert len(gone) == program.lost, "lost without a word"
        return True

    def is_calm(self, world):
        """No fault can come any more, and all are of one epoch.

        What follows then differs only in when cuts are made, and nobody goes back to
        one: a single order stands for all.
        """
        if world.deaths or world.losses or self.lates.things[world.late]:
            return False
        books = [self.machines.things[number].book for number in world.servers]
        clients = [self.programs.things[number].client for number in world.programs]
        epochs = {one.epoch for one in (*books, *clients)}
        return len(epochs) == 1 and all(book.ready for book in books)

    def to_the_end(self, world):
        """One order of events, to the end."""
        while True:
            world = next(self.following(world), None) or world
            if self.check(world):
                return

    def explore(self):
        """Go through all worlds: how many there are, and how many ends.

        Of each it is seen that there is a way to an end: no order of events hangs.
        """
        # A world is kept as bytes: there are millions. The newest comes first, so that
        # what is wrong at an end is soon found, and few wait.
        numbers, worlds = {packed(self.first): 0}, {0: self.first}
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
