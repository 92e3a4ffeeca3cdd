# SPDX-License-Identifier: Apache-2.0
"""A worker of asynchronous training: local steps, and an exchange when one is due."""

import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import field
from typing import Any, Protocol, SupportsFloat

import jax
import optax

from optx_sync.center.contract import Period, check_period
from optx_sync.center.fragments import Fragments
from optx_sync.core.checks import check_grads, check_inner, interval
from optx_sync.core.trees import Tree
from optx_sync.exchange.contract import Exchange
from optx_sync.meetings.coded import bytes_of
from optx_sync.meetings.quorum import Quorum
from optx_sync.runtime.agreements import Agreement, Own, way_of
from optx_sync.runtime.agreements.contract import Settings
from optx_sync.runtime.messages import (
    Joined,
    JoinedPart,
    Pending,
    Push,
    PushRefused,
    Reply,
)
from optx_sync.runtime.parts import PartsLayout, lay_out, shapes_of
from optx_sync.runtime.samples import Lease
from optx_sync.runtime.system import here

log: logging.Logger = logging.getLogger("optx_sync.runtime")
# How many ranges of samples a worker leases at once.
LEASES_AHEAD = 8


class Connection(Protocol):
    """The interface between a worker and its server or servers."""

    def join(self, worker: int) -> Joined:
        """Get the center, for a worker that starts or starts again."""
        ...

    def everyone_joined(self) -> bool:
        """Whether all workers have joined."""
        ...

    def send(self, push: Push) -> Pending:
        """Send a push of a part.

        A call of the answer waits for it, sends the push again if need be, and raises
        `PushRefused` if it was refused.
        """
        ...

    def lease(
        self, worker: int, incarnation: int, holds: list[int], count: int
    ) -> list[Lease] | None:
        """Get ranges of samples (see `Server.lease`)."""
        ...

    def asked(self, worker: int, part: int, met: int) -> bool:
        """Whether to push a part now (see `Server.asked`), without waiting."""
        ...

    def leaves(self, told: bool) -> bool:
        """Whether a worker leaves after this step (see `Server.leaves`)."""
        ...


class Preempted(SystemExit):
    """The worker was told that its machine goes: it has handed in all that it has."""


@dataclasses.dataclass
class _Sent:
    """Pushes that are on their way, if there are answers."""

    answers: dict[int, Pending] = field(default_factory=dict)  # by part
    # The weight of what was sent of each part.
    tokens: dict[int, float] = field(default_factory=dict)
    # The ranges of samples that it is made of.
    leases: list[int] = field(default_factory=list)
    begin: float = 0.0


class _Life:
    """What a worker has since it joined, and loses when it does so again."""

    def __init__(self, parts: dict[int, JoinedPart], step: int):
        # Whether it is in the middle of what must not be left there.
        self.torn: bool = True
        # When it pushed last: the step, and the time.
        self.paced: tuple[int, float] = step, here().now()
        self.sent: _Sent = _Sent()
        # Ranges of samples: of the next step, of later ones, and of those made since
        # the last push to the first server.
        self.lease: Lease | None = None
        self.leases: deque[Lease] = deque()
        self.exhausted: bool = False  # whether `samples` has come to its end
        self.walked: list[int] = []
        # Of each part the last answer, without its arrays.
        self.heard: dict[int, Reply] = {
            part: Reply({}, x.global_step, 0, round=x.round)
            for part, x in parts.items()
        }
        self.tokens: dict[int, float] = dict.fromkeys(parts, 0.0)


class Worker:
    """A worker with parameters of its own, which exchanges with a center.

    `step` makes one step with `inner`, compiled, and exchanges with the center when
    `communication_period` steps have passed since the last time. With `SyncReplicas`
    each step sends the gradient, waits for a token and takes the parameters.

    Args:
        connection: To the server: a `Server`, or any object like `Connection`.
        params: A tree like the parameters, of arrays or `jax.ShapeDtypeStruct`; the
            values come from the server.
        inner: The worker's own optimizer. With `SyncReplicas` the server applies it.
        agreement: As the server's.
        index: The worker's number.
        num_workers: As the server's.
        communication_period: Steps between rounds, an int or a schedule of the worker's
            step (0-based). `SyncReplicas` does not use it.
        exchange: As the server's; what its code remembers is lost with this worker.
        pull_exchange: As the server's.
        fragments: As the server's.
        delay: Steps between a push and its landing; see `run`.
        meet: As the server's.
        num_servers: As for the run.
        synchronous: Wait at the start until all workers have joined.

    Attributes:
        index: The worker's number, from 0 on.
        params: The current parameters: compute the next gradient at these. Those of an
            earlier step, and gradients, stay readable for whoever keeps them.
        local_step: Steps so far. A worker that replaces one that died continues from
            the step of the last round.
        rounds: Pushes that were absorbed, including its predecessors'; `lost` of them
            were lost later.
        global_step: The server's step at the last exchange.
        staleness: The other workers' rounds between this worker's last two, those that
            the center absorbed.
        used: `False` if what it pushed last, or a part of it, was dropped: a stale
            gradient (`SyncReplicas`), or what came after its meeting (`quorum`).
        restarts: The number of earlier workers with this index.
        incarnation: A number that distinguishes it from them.
        place: Notes of the program for its successor, such as its position in the data:
            anything that JSON holds. They are sent with each push; a worker that
            replaces this one finds here what was sent with the last one.
        preempted: Set it once a notice has come that the machine goes, as `run` does at
            a SIGTERM: the next step hands in what it has and raises `Preempted`.
        lost: Pushes of this worker that were lost with a server: applied after its last
            checkpoint.
        connection: As given.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from optx_sync.runtime import Server, Worker
        >>> rule, params = oxs.rules.local_sgd(), {"w": jnp.zeros(2)}
        >>> server = Server(params, rule, num_workers=2, communication_period=1)
        >>> settings = dict(num_workers=2, communication_period=1)
        >>> one = Worker(server, params, optax.sgd(1.0), rule, index=0, **settings)
        >>> two = Worker(server, params, optax.sgd(1.0), rule, index=1, **settings)
        >>> one.step({"w": jnp.array([-2.0, 0.0])})
        >>> two.step({"w": jnp.array([0.0, -4.0])})
        >>> one.params["w"].tolist(), two.params["w"].tolist()
        ([1.0, 0.0], [1.0, 2.0])
    """

    def __init__(
        self,
        connection: Connection,
        params: Tree,
        inner: optax.GradientTransformation,
        agreement: Agreement,
        *,
        index: int,
        num_workers: int,
        communication_period: Period = 10,
        exchange: Exchange | None = None,
        pull_exchange: Exchange | None = None,
        fragments: Fragments | None = None,
        delay: int | None = None,
        meet: Quorum | None = None,
        num_servers: int = 1,
        synchronous: bool = False,
    ):
        check_period(communication_period)
        settings = Settings(
            num_workers, communication_period, exchange, fragments, delay,
            pull_exchange, meet, num_servers,
        )  # fmt: skip
        way = way_of(agreement, settings)
        inner = check_inner(inner, "Worker(connection, params, optax.sgd(0.1), rule)")
        self.connection = connection
        self.index = index
        self._like: Tree = shapes_of(params)
        self.layout: PartsLayout = lay_out(self._like, way.fragments, num_servers)
        self._own: Own = way.work(self._like, inner, self.layout)
        self._delay: int = way.delay
        # Whether workers meet the center together.
        self._shared: bool = way.of_center and way.waits
        self._decodes: bool = pull_exchange is not None
        self._sharding: Any = None
        self.used: bool = True
        self.preempted: bool = False
        self.staleness: int = 0
        self.lost: int = 0
        self._flushed: int = 0  # the step at which it was flushed last
        self._seconds: float = 0.0
        self._untold: int = 0
        self.local_step: int = 0
        self.incarnation: int = 0
        self.place: Any = None
        self._life: _Life = _Life({}, 0)
        self.restarts: int = self.pull().restarts
        while synchronous and not connection.everyone_joined():
            here().sleep(0.02)

    @property
    def params(self) -> Tree:
        """The current parameters: compute the next gradient at these."""
        return self._own.params

    def step(
        self, grads: Tree, *, tokens: float | None = None, **what_to_show: SupportsFloat
    ) -> None:
        """Make a step with a gradient at `params`, and exchange if that is due.

        Args:
            grads: The gradient: like `params`; leaves may be `IndexedSlices` or `None`.
            tokens: The tokens or examples behind the gradient, for `weigh` of a run
                (`Round.tokens`). `None`: each step counts 1.
            **what_to_show: Numbers for the display and the history, such as `loss=`.
                They are read only at an exchange.

        Raises:
            PushRefused: The server refused the push, for example because of a NaN. The
                worker keeps its own step, and the next step tries again; `pull`
                starts anew from the center.
            RuntimeError: Something other than `PushRefused` interrupted the last step:
                whether its push was applied is not known. `pull` first.
            ValueError: Gradients that do not match the parameters.
            Preempted: The worker is `preempted`.
        """
        check_grads(grads, self._like)
        tokens = 1.0 if tokens is None else float(tokens)
        interval("[0, 1e30]", "Pass how many are behind it.", tokens=tokens)
        # Both are the program's own: an error in them changes nothing.
        due = self._own.is_due(self.local_step) or self._is_asked()
        life = self._life
        may = due or (self._shared and life.sent.answers)
        said = self._said(what_to_show) if may else None
        with self._whole():
            self.local_step += 1
            life.tokens = {part: old + tokens for part, old in life.tokens.items()}
            if life.lease is not None:
                life.walked.append(life.lease.number)
                life.lease = None
            waits = [*life.sent.answers]
            self._own.step(grads, self._turn if due and not waits else ())
            if self._own.steps >= self._delay or (due and not self._shared):
                self._land(wait=not self._shared)
            # A part that was taken just now has no step of its own yet.
            fresh = self._shared and not {*waits}.isdisjoint(self._turn)
            if waits and not fresh:
                due = due or self._is_asked()
            if said is not None and due and not fresh and not life.sent.answers:
                self._set_out(self._turn, *said)
                if not self._delay:
                    self._land()
        self.preempted = self.connection.leaves(self.preempted)
        if self.preempted:
            self.flush()
            raise Preempted

    def samples(self) -> Iterator[Lease]:
        """The samples of each step, leased from the servers until all are counted.

        A step with them is to follow each. At the end comes `flush`: a range is done
        once the push that its step is part of has been absorbed, and what this worker
        has not pushed goes to another one.

        Raises:
            ValueError: The run has no `samples=`.
        """
        while True:
            life = self._life
            if not life.leases:
                life.leases.extend(self._leased(self._holds(), LEASES_AHEAD))
            if not life.leases:
                life.exhausted = True
                return
            life.lease = life.leases.popleft()
            yield life.lease

    def hand_in_samples(self) -> None:
        """At the end of a program: `flush`, if it has samples that it did not push."""
        if self._life.walked:
            self.flush()

    def resumes(self) -> bool:
        """Whether the program, which has ended, is to run again: samples are left.

        What it handed in last came late, and others, who had none left, have ended. If
        so, the worker starts anew from the center.
        """
        found = self._leased([], 1) if self._life.exhausted else []
        if found:
            self.pull()
        return bool(found)

    def _leased(self, holds: list[int], count: int) -> list[Lease]:
        """Lease ranges, once all others have said what they hold."""
        lease = self.connection.lease
        while (found := lease(self.index, self.incarnation, holds, count)) is None:
            here().sleep(0.1)
        return found

    def _holds(self) -> list[int]:
        """The numbers of the ranges that are not known to be absorbed."""
        life = self._life
        ahead = [x.number for x in (life.lease, *life.leases) if x is not None]
        return [*ahead, *life.walked, *life.sent.leases]

    def flush(self) -> None:
        """Exchange now, if there were steps since the last round.

        For the end of a program: steps since the last round are not in the center yet.
        Pushes that are on their way land first, then each part is exchanged. Where
        workers share meetings, the parts are handed in, and the answers not waited for:
        `land` does. Waited for are late ones, of pushes that more steps than `delay`
        have followed, so that these are handed in, too; not by a worker that leaves.
        """
        # All processes of a group ask the same, in the same order.
        while late := self._late():
            self.preempted = self.connection.leaves(self.preempted)
            answers = self._life.sent.answers
            if self.preempted or all([answers[part].is_there() for part in late]):
                break
            here().sleep(0.005)
        with self._whole():
            self._land(wait=not self._shared)
        self._flushed = self.local_step
        for turn in self.layout.turns:
            parts = tuple(p for p in turn if p not in self._life.sent.answers)
            if any(self._own.ages[part] for part in parts):
                with self._whole():
                    self._set_out(parts, *self._said({}))
                    self._land(wait=not self._shared)
        for answer in self._life.sent.answers.values():
            answer.hand_in()

    def land(self) -> None:
        """Wait for the answers to all pushes that are on their way, and take them."""
        with self._whole():
            self._land()

    @property
    def unpushed(self) -> int:
        """The steps since the last round of the part that has waited longest."""
        if self._flushed != self.local_step:
            return max(self._own.ages)
        # The `delay` steps between a push and its answer are gone in every round.
        return max((self._own.ages[part] for part in self._late()), default=0)

    def _late(self) -> list[int]:
        """The parts whose answer more steps than `delay` have waited for."""
        answers = self._life.sent.answers if self._shared else ()
        return [part for part in answers if self._own.ages[part] > self._delay]

    @property
    def rounds(self) -> int:
        """Rounds that were absorbed, including those of the worker's predecessors."""
        turns = self.layout.turns
        return sum(max(self._life.heard[part].round for part in turn) for turn in turns)

    @property
    def global_step(self) -> int:
        """The rounds of all workers, as of the last answer."""
        return sum(max(map(self._met, turn)) for turn in self.layout.turns)

    def _met(self, part: int) -> int:
        """The meetings of a part, as of its last answer."""
        return self._life.heard[part].global_step

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What must not be left in the middle: if it was, only `pull` goes on.

        The next push would bear the name of the one that was interrupted, and the
        server would take it for a repetition.
        """
        life = self._life
        if life.torn:
            raise RuntimeError(
                f"The last step of worker {self.index} was interrupted, and whether "
                "the center has its push is not known. Call worker.pull() to go on "
                "from the center as it is."
            )
        life.torn = True
        try:
            yield
        except PushRefused:
            life.torn = False
            raise
        life.torn = False

    @property
    def _turn(self) -> tuple[int, ...]:
        """The parts that are exchanged next."""
        turns = self.layout.turns
        if not self._shared:
            return turns[self.rounds % len(turns)]
        # Where one has missed meetings, the parts that others meet next.
        return min(turns, key=lambda turn: min(map(self._met, turn)))

    def _is_asked(self) -> bool:
        """Whether others have opened a meeting of the next parts, or met without it."""
        if self._life.sent.answers or not self._shared:
            return False
        ask = self.connection.asked
        return any(ask(self.index, part, self._met(part)) for part in self._turn)

    def _said(self, shown: dict[str, SupportsFloat]) -> tuple[dict[str, float], str]:
        return {k: float(value) for k, value in shown.items()}, json.dumps(self.place)

    def _set_out(
        self, parts: tuple[int, ...], numbers: dict[str, float], place: str
    ) -> None:
        begin = here().now()
        life, (step, second) = self._life, self._life.paced
        pace = (begin - second) / max(self.local_step - step, 1)
        life.paced = self.local_step, begin
        outgoing = self._own.outgoing(parts)
        size = sum(bytes_of(one.arrays) for one in outgoing.values())
        first = [part for part in parts if not self.layout.owners[part]][:1]
        leases = tuple(life.walked) if first else ()
        for part, one in outgoing.items():
            heard = life.heard[part]
            push = Push(
                worker=self.index,
                round=heard.round + 1,
                arrays=one.arrays,
                steps=one.steps,
                local_step=self.local_step,
                shown=numbers,
                incarnation=self.incarnation,
                seconds=self._seconds,
                lost=self._untold,
                bytes=size,
                tokens=life.tokens[part],
                part=part,
                place=place,
                confirms=heard.number if self._decodes else 0,
                met=heard.global_step,
                leases=leases if [part] == first else (),
                step_seconds=pace,
            )
            life.sent.answers[part] = self.connection.send(push)
            life.sent.tokens[part] = push.tokens
            life.tokens[part], self._untold = 0.0, 0
        if first:
            life.walked = []
        life.sent.leases += leases
        life.sent.begin = begin

    def _land(self, wait: bool = True) -> None:
        """Take the answers; without `wait` those that are there."""
        life, sent, refused = self._life, self._life.sent, None
        answers, first = sent.answers, len(sent.answers) == len(sent.tokens)
        for part, answer in list(answers.items()):
            if not (wait or answer.is_there()):
                continue
            del answers[part]
            try:
                reply = answer()
            except PushRefused as error:
                self._own.give_back(part)
                life.tokens[part] += sent.tokens[part]
                if not self.layout.owners[part]:
                    life.walked += sent.leases
                refused = error
                continue
            life.heard[part] = reply._replace(arrays={})
            self._lose(reply.lost)
            # A round is dropped if one of its parts is.
            self.used, first = reply.used and (first or self.used), False
            self.staleness = reply.staleness
            self._own.land(part, reply, self._place)
        if sent.tokens and not answers:
            life.sent, self._seconds = _Sent(), here().now() - sent.begin
        if refused is not None:
            raise refused

    def _lose(self, pushes: int) -> None:
        """Count pushes that went with a server, and tell of them."""
        self.lost, self._untold = self.lost + pushes, self._untold + pushes
        if pushes:
            log.warning(
                "%d pushes of worker %d are lost: a server died, and its last "
                "checkpoint is older.", pushes, self.index,
            )  # fmt: skip

    def pull(self) -> Joined:
        """Discard the worker's parameters and state, and start anew from the center."""
        self._life.torn = True
        joined = self.connection.join(self.index)
        self._lose(joined.lost)
        self._life = _Life(joined.parts, joined.local_step)
        self.local_step, self.incarnation = joined.local_step, joined.incarnation
        arrays = {part: x.arrays for part, x in joined.parts.items()}
        self._own.start(arrays, self._place)
        self.place = json.loads(joined.place or "null")
        self._life.torn = False
        return joined

    def shard(self, sharding: Any) -> None:
        """Shard the parameters and the optimizer's state over devices of the worker.

        Args:
            sharding: A `NamedSharding`, or a tree of them like the parameters. Where
                `fragments` or servers split an array, its mesh has `Auto` axes.
        """
        self._sharding = sharding
        self._own.place(self._place)

    def _place(self, tree: Tree) -> Tree:
        return tree if self._sharding is None else jax.device_put(tree, self._sharding)
