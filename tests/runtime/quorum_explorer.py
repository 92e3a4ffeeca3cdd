"""Goes through every order of events of workers that share meetings."""

import functools
from unittest import mock

import numpy as np

import optx_sync as oxs
from benchmarks.explorer import Explorer, put
from optx_sync.runtime import Push
from optx_sync.runtime import server as server_module


class QuorumExplorer(Explorer):
    """Workers that share meetings: all of them are needed, but for those that left.

    A program that has ended leaves, as `run` tells the servers. Patience ends a meeting
    at any time, or, which are fewer worlds, where nobody else goes on: after a server
    has gone back, two may wait in different meetings.
    """

    def __init__(self, *given, patient=False, **named):
        self.patient = patient
        self.meeting = {"meet": oxs.runtime.quorum(given[0])}
        super().__init__(*given, **named)
        self.leaves = functools.cache(self._leaves)
        self.closes = functools.cache(self._closes)

    def held(self, server):
        return tuple(
            (
                one.global_step,
                tuple((c.worker, c.round) for c in one.came),
                tuple(sorted(one.dropped)),
                (tuple(sorted(one.strangers)), one.restored * bool(one.strangers)),
                one.rows["['x']"].tobytes() if one.came else b"",
            )
            for one in server._held
        )

    def thawed(self, number, server):
        thawed = super().thawed(number, server)
        helds = self.machines.things[number].held
        for held, state in zip(thawed._held, helds, strict=True):
            step, came, dropped, (strangers, restored), total = state
            held.strangers, held.restored = set(strangers), restored
            held.center = {k: np.asarray(x) for k, x in held.center.items()}
            held.before, held.global_step, held.took = held.center, step, {}
            held.came = [Push(worker, count, {}) for worker, count in came]
            held.weights = [np.ones((), bool) for _ in came]
            held.rows = {"['x']": np.zeros_like(held.rows["['x']"])}
            if came:
                held.rows["['x']"].flat = np.frombuffer(total, np.float32)
            held.dropped, held.left, held.closes = set(dropped), thawed._left, None
        return thawed

    def _leaves(self, machine, server, worker):
        thawed = self.thawed(machine, server)
        thawed.leave(worker)
        return self.frozen(thawed)

    def _closes(self, machine, server, position):
        thawed = self.thawed(machine, server)
        thawed._held[position]._close(0.0)
        return self.frozen(thawed)

    def told(self, came):
        """(the meetings of the part, or of all; whether it was used), or nothing."""
        if isinstance(came, oxs.runtime.Joined):
            parts = came.parts.items()
            return (None, *((p, x.global_step) for p, x in parts)), True
        if isinstance(came, oxs.runtime.Reply) and not came.waiting:
            return (came.global_step,), came.used
        return None

    def heard(self, program, told):
        if told is None:
            return program
        (own, *pairs), used = told
        if own is not None:
            pairs = [(program.now[0], own), *pairs]
        known = program.met or (0,) * len(self.owners)
        for part, number in pairs:
            known = put(known, part, number)
        late = program.late if used else (*program.late, program.now)
        return program._replace(met=known, late=late)

    def next_part(self, program, clients, left):
        return min(left, key=lambda p: program.met[p[0]])

    def _dies(self, program):
        old = self.programs.things[program]
        new = self.programs.things[super()._dies(program)]
        return self.programs.number(new._replace(late=old.late))

    def following(self, world):
        for w, program in enumerate(world.programs):
            if self.wants(program) is not None:
                continue
            for k, machine in enumerate(world.servers):
                gone = self.leaves(machine, k, w)
                if gone != machine:
                    yield world._replace(servers=put(world.servers, k, gone))
        waits = self.patient and self.goes_on(world)
        for k, machine in enumerate(() if waits else world.servers):
            for at, (_, came, *_) in enumerate(self.machines.things[machine].held):
                if came:
                    short = put(world.servers, k, self.closes(machine, k, at))
                    yield world._replace(servers=short)
        for there in super().following(world):
            if there != world:  # One that waits asks again, and nothing has changed.
                yield there

    def goes_on(self, world):
        """Whether anything happens by itself, but for the end of patience."""
        calm = world._replace(deaths=0, losses=0)
        if any(there != calm for there in super().following(calm)):
            return True
        ended = [w for w, p in enumerate(world.programs) if self.wants(p) is None]
        return any(
            self.leaves(machine, k, w) != machine
            for k, machine in enumerate(world.servers)
            for w in ended
        )

    def explore(self):
        with mock.patch.object(server_module, "TOKEN_SECONDS", 0.0):
            return super().explore()

    def check(self, world):
        machines = [self.machines.things[number] for number in world.servers]
        if not all(x.left for machine in machines for x in machine.book.entries):
            return False
        if not super().check(world):
            return False
        for number in world.programs:
            program = self.programs.things[number]
            for part, place in program.late:
                owner = self.owners[part]
                at = self.parts[owner].index(part)
                marks = np.frombuffer(machines[owner].centers[at], np.float32)
                assert not marks[program.worker * self.places + place], "late, not gone"
        return True
