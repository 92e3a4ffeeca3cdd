# SPDX-License-Identifier: Apache-2.0
"""The push protocol between workers and servers, as a pure model.

Plain Python on tuples: no arrays, no processes, no clock. `decide` makes the decisions
of a server; `Client` with `wants` and `hears` makes those of a worker. A server and a
connection carry them out, and `tests/runtime/test_protocol.py` explores every order of
events with this code.

**A push is of one part, and a part lives on one server.** So a push is one call: it has
been applied, or it has not. Servers know nothing of each other.

**A push has a name**, (incarnation, round): its round is its number among the worker's
pushes of the part, `Push.round`. Each join hands out a new incarnation, and a server
answers only a worker's newest one. The server keeps the name of the last push that it
applied to each part, and so recognises one that is sent again. It counts the pushes,
too, and applies none out of order. Where some of them went with a server the count goes
back and the rounds do not: else a lost push and a later one would have one name.

**A server has checkpoints of its own.** One that dies is restored from its last one, in
a new epoch. It turns away messages of another epoch, and says which push of each part
survived. So the worker knows what is lost, and reports it.
"""

from typing import Any, NamedTuple, TypeAlias

# (incarnation, round); () stands for no push.
Name: TypeAlias = tuple[int, ...]

JOINS_KNOWN = 8  # of each worker; a message that is older than so many does not come


class Place(NamedTuple):
    """What a server has applied of one worker's pushes of one part."""

    counted: int = 0  # the number of pushes
    last: Name = ()  # the last one
    used: int = 0  # the number of those not dropped as stale


class Entry(NamedTuple):
    """What a server knows of one worker."""

    places: tuple[Place, ...]  # of each part that lives here
    incarnation: int = 0  # the one that may push; 0: no join is needed
    joins: int = 0
    step: int = 0  # its steps at its last push
    notes: str = ""  # of its program, for its successor
    left: bool = False  # whether its program has ended
    heard: int = 0  # its requests, since this server has started
    refused: int = 0  # its pushes that were refused, since then
    asked: tuple[int, ...] = ()  # the names of its last joins


class Book(NamedTuple):
    """The state of a server, without its arrays."""

    entries: tuple[Entry, ...]
    epoch: int  # differs for each start of the server
    every: int = 0  # pushes between checkpoints; 0: no checkpoints
    handed: int = 0  # the last incarnation that was handed out
    number: int = 0  # of the last checkpoint attempt
    saved: tuple[int, ...] = ()  # the checkpoints that can be read
    since: int = 0  # pushes since the last attempt

    def with_entry(self, worker: int, **changes: Any) -> "Book":
        """The book after these fields of a worker's entry have changed."""
        entry = self.entries[worker]._replace(**changes)
        return self._replace(entries=_put(self.entries, worker, entry))

    def with_place(self, worker: int, part: int, place: Place) -> "Book":
        """The book after a worker's place of a part has changed."""
        places = _put(self.entries[worker].places, part, place)
        return self.with_entry(worker, places=places)


def new_book(workers: int, parts: int, epoch: int, every: int) -> Book:
    """The book of a server that starts."""
    entries = (Entry((Place(),) * parts),) * workers
    return Book(entries, epoch, every, handed=epoch)


def notes_of(entries: tuple[Entry, ...]) -> dict[str, Any]:
    """What a checkpoint keeps of the workers, as JSON."""
    return {
        "entries": [entry[:3] for entry in entries],
        "local_steps_of_workers": [entry.step for entry in entries],
        "places_of_workers": [entry.notes for entry in entries],
        "left": [worker for worker, entry in enumerate(entries) if entry.left],
        "asked": [entry.asked for entry in entries],
    }


def noted(notes: dict[str, Any], entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries of new workers after `notes_of` earlier ones, maybe of others."""
    found = []
    names = "entries", "local_steps_of_workers", "places_of_workers"
    of_workers = zip(*(notes[name] for name in names), strict=True)
    for (places, incarnation, joins), step, said in of_workers:
        of_parts = (Place(count, tuple(last), used) for count, last, used in places)
        left = len(found) in notes.get("left", ())
        found.append(Entry(tuple(of_parts), incarnation, joins, step, said, left))
    for worker, asked in enumerate(notes.get("asked", ())):
        found[worker] = found[worker]._replace(asked=tuple(asked))
    return (*found[: len(entries)], *entries[len(found) :])


# Requests to a server.


class Request(NamedTuple):
    """What a worker asks of a server.

    "enter": it joins, and from now on nobody else may push under its number. "send": a
    push. It waits for a "token", or at the "start" for the others.
    """

    kind: str
    worker: int
    incarnation: int  # 0 where it joins: hand one out
    epoch: int = 0
    joins: int = 0
    part: int = 0  # of the push, its index on this server
    round: int = 0  # of a push that is sent
    counted: int = 0  # what the server will have counted with it
    # Where it joins: another server has given out this one, by a clock that is ahead.
    # Hand out one above it, if `incarnation` is still the newest here.
    above: int = 0
    # The name of a join, by which it is known if it comes again; 0: it has none.
    asked: int = 0


# Answers of a server.


class Standing(NamedTuple):
    """Done now or before: the state of this worker's pushes."""

    epoch: int
    places: tuple[Place, ...]
    incarnation: int
    joins: int
    busy: bool = False  # not done yet: ask again


class Turned(NamedTuple):
    """The server has been restarted since; these pushes survived."""

    epoch: int
    places: tuple[Place, ...]


class Superseded(NamedTuple):
    """There is a newer incarnation of this worker."""

    message: str
    newest: int = 0


class Refused(NamedTuple):
    """Not done, and nothing was changed."""

    message: str


Answer: TypeAlias = Standing | Turned | Superseded | Refused


class Decision(NamedTuple):
    """What a server does about a request, and its book after it has done so."""

    book: Book
    answer: Answer
    applies: bool = False  # whether it applies a push


def decide(book: Book, request: Request) -> Decision:
    """Decide what a server does about a request."""
    worker = request.worker
    entry = book.entries[worker]
    if request.kind == "enter":
        if request.asked in entry.asked:  # It comes late, or its answer was lost.
            if request.asked == entry.asked[-1]:
                return Decision(book, standing(book, worker))
            return Decision(book, _superseded(request, entry))
        handed = max(book.handed, entry.incarnation, request.above) + 1
        incarnation = request.incarnation or handed
        if incarnation < entry.incarnation:
            return Decision(book, _superseded(request, entry))
        joins = entry.joins + (incarnation > entry.incarnation)
        incarnation = handed if request.above else incarnation
        book = book._replace(handed=max(book.handed, incarnation))
        book = book.with_entry(worker, incarnation=incarnation, joins=joins)
        if request.asked:
            asked = (*entry.asked, request.asked)[-JOINS_KNOWN:]
            book = book.with_entry(worker, asked=asked)
        return Decision(book, standing(book, worker))
    if request.epoch != book.epoch:
        return Decision(book, Turned(book.epoch, entry.places))
    if request.incarnation < entry.incarnation:
        return Decision(book, _superseded(request, entry))
    if request.incarnation > entry.incarnation:  # It joined after the checkpoint.
        joins = max(entry.joins, request.joins)
        book = book._replace(handed=max(book.handed, request.incarnation))
        book = book.with_entry(worker, incarnation=request.incarnation, joins=joins)
    if request.kind == "send":
        return _send(book, entry, request)
    return Decision(book, standing(book, worker))


def _superseded(request: Request, entry: Entry) -> Superseded:
    return Superseded(
        f"worker {request.worker} has joined again: incarnation {request.incarnation} "
        f"is not the newest one, {entry.incarnation}. Only the newest may push; call "
        "join().",
        entry.incarnation,
    )


def _send(book: Book, entry: Entry, request: Request) -> Decision:
    worker, place = request.worker, entry.places[request.part]
    name = request.incarnation, request.round
    if place.last == name:
        return Decision(book, standing(book, worker))
    if request.counted != place.counted + 1:
        over = request.counted <= place.counted
        why = (
            f"is over: round {place.counted} has been applied. Number the rounds 1, 2, "
            "3, ..., and after a restart go on from what join() says."
            if over
            else f"comes too early: the next one is {place.counted + 1}."
        )
        message = f"round {request.counted} of worker {worker} {why}"
        return Decision(book, Refused(message))
    place = Place(request.counted, name, place.used + 1)
    book = book.with_place(worker, request.part, place)._replace(since=book.since + 1)
    return Decision(book, standing(book, worker), applies=True)


def dropped(book: Book, worker: int, part: int) -> Book:
    """Count the last push as stale: it was dropped."""
    place = book.entries[worker].places[part]
    return book.with_place(worker, part, place._replace(used=place.used - 1))


def is_due(book: Book) -> bool:
    """Whether a checkpoint is due."""
    return 0 < book.every <= book.since


def saved(book: Book, number: int) -> Book:
    """The book after a checkpoint; the newest two are kept."""
    return book._replace(saved=(*book.saved[-1:], number))


def standing(book: Book, worker: int, busy: bool = False) -> Standing:
    """The state of a worker's pushes."""
    places, incarnation, joins, *_ = book.entries[worker]
    return Standing(book.epoch, places, incarnation, joins, busy)


def _put(items: tuple, number: int, item) -> tuple:
    return (*items[:number], item, *items[number + 1 :])


class Line(NamedTuple):
    """What a worker knows of its pushes of one part."""

    round: int = 0  # of the last one applied; does not go back when pushes are lost
    place: Place = Place()  # what the server said of them last
    base: int = 0  # how many of those not dropped its predecessors made


class Client(NamedTuple):
    """A worker's side of the protocol with one server."""

    worker: int
    incarnation: int = 0
    above: int = 0  # the newest of another server, which is above it
    asked: int = 0  # the name of its last join
    joins: int = 0
    epoch: int = 0  # of the server; 0: it has not answered yet
    lines: tuple[Line, ...] = ()  # of each part that lives there
    # The request under way: "enter", "send", "token", "start"; or how the last one
    # ended: "idle", "waiting", "superseded", "refused".
    phase: str = "idle"
    sending: tuple[int, ...] = ()  # (part, round) of a push; () where none is sent
    lost: int = 0  # pushes lost with the server that its worker has not been told of
    message: str = ""


def begin(client: Client, phase: str, part: int = 0, number: int = 0) -> Client:
    """Begin an operation: "enter", "send" the push of a round, or "start"."""
    # With a push that is refused nothing is told: what was lost by then still is.
    lost = client.lost if client.phase == "refused" else 0
    sending = (part, number) if phase == "send" else ()
    return client._replace(phase=phase, sending=sending, lost=lost, message="")


def wants(client: Client) -> Request | None:
    """The next request; `None` when the operation has ended."""
    c, (part, number) = client, client.sending or (0, 0)
    asked = Request(c.phase, c.worker, c.incarnation, c.epoch, c.joins, part)
    match c.phase:
        case "enter":
            return asked._replace(epoch=0, joins=0, above=c.above, asked=c.asked)
        case "send":
            line = c.lines[part] if c.lines else Line()
            # If it is neither the next nor the last one again, the server refuses it.
            count = line.place.counted + (number - line.round or 1)
            return asked._replace(round=number, counted=count)
        case "token" | "start":
            return asked
    return None


def hears(client: Client, answer: Answer) -> Client:
    """The client after the server's answer to its request."""
    match answer:
        case Superseded(message, newest):
            return client._replace(phase="superseded", message=message, above=newest)
        case Refused(message):
            return client._replace(phase="refused", sending=(), message=message)
        case Turned():
            return _resumed(client, answer)
    client = client._replace(epoch=answer.epoch)
    if answer.busy:  # Others have to come: ask again.
        return client._replace(phase="token" if client.sending else "waiting")
    if client.phase == "enter":
        # It may have joined before: what a server has lost since is told now.
        known = client.lines or tuple(Line(base=place.used) for place in answer.places)
        pairs = [*zip(known, answer.places, strict=True)]
        client = client._replace(
            lines=tuple(
                Line(p.counted, p, min(line.base, p.used))
                for line, p in pairs
            ),
            lost=client.lost + sum(_gone(line, place) for line, place in pairs),
            incarnation=answer.incarnation, above=0, joins=answer.joins,
        )  # fmt: skip
    elif client.sending:
        part, number = client.sending
        line = client.lines[part]
        line = line._replace(round=max(line.round, number), place=answer.places[part])
        client = client._replace(lines=_put(client.lines, part, line))
    return client._replace(phase="idle", sending=())


def _gone(line: Line, place: Place) -> int:
    """The worker's pushes of a part that the server has lost."""
    return max(line.place.used - max(place.used, line.base), 0)


def _resumed(client: Client, answer: Turned) -> Client:
    """The client after the server was restored: which of its pushes survived."""
    lines: list[Line] = []
    lost = client.lost
    for part, place in enumerate(answer.places):
        mine = place.last[:1] == (client.incarnation,)
        applied = place.last[1] if mine else 0
        # Without lines it has sent this server no request yet.
        new = Line(applied or place.counted, place, place.used)
        line = client.lines[part] if client.lines else new
        # Whether the push that is sent again had been applied.
        had = (
            client.sending[:1] == (part,) and applied < client.sending[1] <= line.round
        )
        lost += max(_gone(line, place) - had, 0)
        base, number = min(line.base, place.used), max(line.round, applied)
        lines.append(Line(number, place, base))
    phase = "send" if client.sending else client.phase
    client = client._replace(epoch=answer.epoch, lines=tuple(lines), lost=lost)
    return client._replace(phase=phase)
