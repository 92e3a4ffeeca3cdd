# SPDX-License-Identifier: Apache-2.0
"""Who may push what when, and what is done after a death: the protocol, as a model.

Plain Python on tuples: no arrays, no processes, no clock. `decide` is what a server
decides, `Client` with `wants` and `hears` is what a worker (or whoever else asks)
decides. A server and a connection carry out what is decided here, and
`tests/runtime/test_protocol.py` goes through every order of events with this code.

**A push has a name**, (incarnation, serial). An incarnation is handed out by a join, no
two joins get the same, and a server answers a worker's newest one only. What has been
applied last is kept by name, so that a push sent again is known.

**All servers or none.** With several servers a push is first laid down on every one of
them (prepare) and applied when all have it (commit). So when one server has applied a
push the others have it or have applied it. A join asks all servers: what one has
applied the others apply, what none has applied is dropped.

**A cut is a checkpoint over all servers.** Cuts are numbered. The first server begins
one, and every message carries the highest number that its sender has heard of; a server
that hears of a higher one saves itself before it looks at the message. So a push that
was prepared after a cut anywhere is applied after it everywhere. What lies prepared is
saved too, and after a restore it is decided as at a join.

**Epochs.** When a server starts afresh all servers go back to the newest cut that all
of them have, and a new epoch begins. A message of another epoch is turned away, and its
sender resumes: it says which incarnation it is and hears which push of its was the last
that survived. What came after is lost, and it knows, or it sends it again if it has
kept it (`replay`).
"""

from typing import Any, NamedTuple, TypeAlias

# A number that grows, and who proposed it: no two are equal.
Epoch: TypeAlias = tuple[int, int]
# (incarnation, serial); () is no push.
Name: TypeAlias = tuple[int, ...]


class Entry(NamedTuple):
    """What a server knows of one worker."""

    incarnation: int = 0  # who may push; 0: whoever has not joined
    round: int = 0  # pushes applied
    last: Name = ()  # the last of them
    staged: Name = ()  # the one that lies prepared
    joins: int = 0


class Book(NamedTuple):
    """What a server knows, besides arrays."""

    entries: tuple[Entry, ...]
    epoch: Epoch
    every: int = 0  # pushes between cuts; 0: this server begins none
    ready: bool = False
    handed: int = 0  # the last incarnation that was handed out
    cut: int = 0  # the newest cut that this server has passed
    cuts: tuple[int, ...] = ()  # those that it has saved
    covered: tuple[Name, ...] = ()  # `last` of each worker in the newest of them
    low: int = 0  # a cut that all servers have passed
    whole: int = 0  # the newest one that all are known to have saved
    since: int = 0  # pushes since the last cut


# What is asked of a server.


class Ask(NamedTuple):
    """How do you stand?"""


class Restore(NamedTuple):
    """Go back to a cut, 0 for the parameters to start from."""

    epoch: Epoch
    cut: int
    newest: int  # number the next cuts from here on
    seen: Epoch  # how this server stood when that was decided; if it has moved on,
    was_ready: bool  # somebody else has restored it, and it may be at work again


class Settle(NamedTuple):
    """Apply what is prepared up to these rounds, drop the rest, and begin."""

    epoch: Epoch
    rounds: tuple[int, ...]


class Enter(NamedTuple):
    """A worker starts: nobody else may push under its number from now on."""

    epoch: Epoch
    worker: int
    incarnation: int  # 0: hand one out


class Finish(NamedTuple):
    """The join ends: apply what is prepared up to this round, and give the center."""

    epoch: Epoch
    worker: int
    incarnation: int
    round: int
    cut: int


class Resume(NamedTuple):
    """A worker goes on after a restore."""

    epoch: Epoch
    worker: int
    incarnation: int
    joins: int


class Send(NamedTuple):
    """A push: "prepare", "commit", or "push" for both in one."""

    kind: str
    epoch: Epoch
    worker: int
    incarnation: int
    round: int
    serial: int
    cut: int
    low: int
    whole: int


class Stay(NamedTuple):
    """A worker waits: for a token ("wait"), for the others ("start")."""

    kind: str
    epoch: Epoch
    worker: int
    incarnation: int


class Save(NamedTuple):
    """Save yourself, as this cut."""

    epoch: Epoch
    worker: int
    cut: int


Request: TypeAlias = (
    Ask | Restore | Settle | Enter | Finish | Resume | Send | Stay | Save
)


# What a server answers.


class Status(NamedTuple):
    """To `Ask`."""

    epoch: Epoch
    ready: bool
    cut: int
    cuts: tuple[int, ...]
    handed: int


class Standing(NamedTuple):
    """To everything that was done."""

    entries: tuple[Entry, ...]  # of all workers, or of the one that asks
    cut: int
    saved: int
    covered: Name = ()  # the worker's last push in the newest cut that is saved
    busy: bool = False  # not done yet: ask again


class Turned(NamedTuple):
    """Another epoch, or the server has just started: ask all of them."""


class Superseded(NamedTuple):
    """There is a newer incarnation of this worker."""

    newest: int


class Refused(NamedTuple):
    """Not done, and nothing was changed."""

    message: str


Answer: TypeAlias = Status | Standing | Turned | Superseded | Refused


class Decision(NamedTuple):
    """What a server does: first the actions, in order, then it is as `book` says.

    ("save", n, book): save everything as cut n, with that book.
    ("load", n): become what cut n holds, see `restored`.
    ("stage", w): lay the push of worker w down. ("apply", w): apply what lies there.
    ("drop", w): throw it away. ("again", w): answer what was answered before.
    """

    book: Book
    answer: Answer
    actions: tuple[tuple[Any, ...], ...] = ()


def decide(book: Book, request: Request) -> Decision:
    """What a server does about a request."""
    match request:
        case Ask():
            status = Status(book.epoch, book.ready, book.cut, book.cuts, book.handed)
            return Decision(book, status)
        case Restore():
            return _restore(book, request)
        case Settle():
            return _settle(book, request)
    if request.epoch != book.epoch or not book.ready:
        return Decision(book, Turned())
    if isinstance(request, Save):
        book, actions = _follow(book, request.cut)
        return Decision(book, _standing(book, request.worker), actions)
    entry = book.entries[request.worker]
    if isinstance(request, Enter):
        return _enter(book, entry, request)
    if isinstance(request, Resume):
        if request.incarnation < entry.incarnation:
            return Decision(book, Superseded(entry.incarnation))
        entry = entry._replace(
            incarnation=request.incarnation, joins=max(entry.joins, request.joins)
        )
        handed = max(book.handed, request.incarnation)
        book = _with(book, request.worker, entry)._replace(handed=handed)
        return Decision(book, _standing(book, request.worker))
    if request.incarnation != entry.incarnation:
        return Decision(book, Superseded(entry.incarnation))
    if isinstance(request, Stay):
        # Whether it is busy is not the book's business.
        return Decision(book, _standing(book, request.worker))
    if isinstance(request, Finish):
        book, actions = _follow(book, request.cut)
        book, more = _bring(book, request.worker, request.round)
        return Decision(book, _standing(book, request.worker), actions + more)
    return _send(book, entry, request)


def _restore(book: Book, request: Restore) -> Decision:
    if request.epoch == book.epoch and not book.ready:
        return Decision(book, _standing(book))
    if (request.seen, request.was_ready) != (book.epoch, book.ready):
        return Decision(book, Turned())
    # `restored` makes the book from what was saved.
    return Decision(book, _standing(book), (("load", request.cut),))


def restored(book: Book, saved: tuple[Entry, ...] | None, request: Restore) -> Book:
    """The book of a server that has gone back; `None`: to where it started from."""
    entries = (Entry(),) * len(book.entries) if saved is None else saved
    return book._replace(
        entries=entries,
        epoch=request.epoch,
        ready=False,
        # No incarnation of an earlier epoch is as high.
        handed=request.epoch[0],
        cut=request.newest,
        cuts=tuple(n for n in book.cuts if n <= request.cut),
        covered=tuple(entry.last for entry in entries) if request.cut else (),
        low=request.newest,
        whole=request.cut,
        since=0,
    )


def _settle(book: Book, request: Settle) -> Decision:
    if request.epoch != book.epoch:
        return Decision(book, Turned())
    if book.ready:
        return Decision(book, _standing(book))
    actions: tuple[tuple[Any, ...], ...] = ()
    for worker, number in enumerate(request.rounds):
        book, more = _bring(book, worker, number)
        actions += more
    book = book._replace(ready=True)
    if not book.cuts:  # Whoever dies now has something to come back from.
        book, more = _cut(book, book.cut + 1)
        actions += more
    return Decision(book, _standing(book), actions)


def _enter(book: Book, entry: Entry, request: Enter) -> Decision:
    incarnation = request.incarnation or max(book.handed, entry.incarnation) + 1
    if incarnation < entry.incarnation:
        return Decision(book, Superseded(entry.incarnation))
    joins = entry.joins + (incarnation > entry.incarnation)
    entry = entry._replace(incarnation=incarnation, joins=joins)
    book = _with(book, request.worker, entry)
    book = book._replace(handed=max(book.handed, incarnation))
    return Decision(book, _standing(book, request.worker))


def _send(book: Book, entry: Entry, request: Send) -> Decision:
    worker, name = request.worker, (request.incarnation, request.serial)
    if entry.last == name:
        again = () if request.kind == "prepare" else (("again", worker),)
        return Decision(book, _standing(book, worker), again)
    if request.round <= entry.round or request.round < 1:
        return Decision(
            book,
            Refused(
                f"round {request.round} of worker {worker} is over: round "
                f"{entry.round} has been applied. Number the rounds 1, 2, 3, ..., and "
                "after a restart go on from what join() says."
            ),
        )
    if request.round > entry.round + 1:
        return Decision(
            book,
            Refused(
                f"round {request.round} of worker {worker} comes too early: the next "
                f"one is {entry.round + 1}."
            ),
        )
    if request.kind == "commit" and entry.staged != name:
        return Decision(book, Refused(f"round {request.round} was not prepared."))
    if request.kind == "prepare" and entry.staged > name:
        return Decision(book, Refused(f"round {request.round} was given up."))
    low, whole = max(book.low, request.low), max(book.whole, request.whole)
    if request.kind == "push":  # This server is the only one.
        low, whole = book.cut, max(book.cuts, default=0)
    book = book._replace(low=low, whole=whole)
    book, actions = _follow(book, request.cut)
    if request.kind != "commit":
        book = _with(book, worker, entry._replace(staged=name))
        actions += (("stage", worker),)
    if request.kind != "prepare":
        book, more = _bring(book, worker, request.round)
        actions += more
        # The next cut waits until everybody has passed this one: there is always one
        # that all have.
        if book.every and book.since >= book.every and book.low >= book.cut:
            book, more = _cut(book, book.cut + 1)
            actions += more
    return Decision(book, _standing(book, worker), actions)


def _follow(book: Book, cut: int) -> tuple[Book, tuple[tuple[Any, ...], ...]]:
    return _cut(book, cut) if cut > book.cut else (book, ())


def _cut(book: Book, number: int) -> tuple[Book, tuple[tuple[Any, ...], ...]]:
    book = book._replace(cut=number, since=0)
    return book, (("save", number, book),)


def saved(book: Book, number: int, of_cut: Book) -> Book:
    """The book of a server that has saved a cut, with the book that it saved."""
    covered = tuple(entry.last for entry in of_cut.entries)
    return book._replace(cuts=(*book.cuts, number), covered=covered)


def unneeded(book: Book) -> tuple[int, ...]:
    """The cuts that can be deleted.

    Kept are the newest that all have, one before it for the case that it is damaged,
    and those that all may come to have.
    """
    below = [number for number in book.cuts if number < book.whole]
    keep = {book.whole, *below[-1:]}
    return tuple(n for n in book.cuts if n not in keep and n < max(book.low, 1))


def _bring(book: Book, worker: int, number: int):
    """Apply what lies prepared if it is this round, drop it otherwise."""
    entry = book.entries[worker]
    if not entry.staged:
        return book, ()
    if number != entry.round + 1:
        return _with(book, worker, entry._replace(staged=())), (("drop", worker),)
    entry = entry._replace(round=number, last=entry.staged, staged=())
    book = _with(book, worker, entry)._replace(since=book.since + 1)
    return book, (("apply", worker),)


def _with(book: Book, worker: int, entry: Entry) -> Book:
    entries = book.entries
    return book._replace(entries=(*entries[:worker], entry, *entries[worker + 1 :]))


def _standing(book: Book, worker: int | None = None) -> Standing:
    entries = book.entries if worker is None else (book.entries[worker],)
    covered = book.covered[worker] if worker is not None and book.covered else ()
    return Standing(entries, book.cut, book.cuts[-1] if book.cuts else 0, covered)


class Client(NamedTuple):
    """Someone who asks all servers: a worker, or whoever looks at the center."""

    number: int  # no two clients have the same: it tells their epochs apart
    servers: int
    worker: int = -1  # -1: it looks, and pushes nothing
    replay: int = 0  # how many pushes it keeps at most
    # How often it asks again while another one restores the servers; -1: always.
    patience: int = -1
    # What it does now, and what it will do when all servers are of one epoch.
    phase: str = "idle"
    goal: str = "idle"
    heard: tuple[Any, ...] = ()  # by server, None where there is no answer yet
    epoch: Epoch = (-1, 0)
    plan: Any = None  # what was decided in the last phase, for the next
    incarnation: int = 0
    joins: int = 0
    round: int = 0  # of its last push that was applied
    base: int = 0  # the round at which its own pushes begin
    serial: int = 0
    done: int = 0  # the last serial that was applied
    sending: tuple[int, ...] = ()  # serials to be applied yet, the last one is new
    kept: tuple[int, ...] = ()  # serials applied, of which no cut is known
    lost: int = 0  # pushes that went with a server, since `step` was asked last
    cut: int = 0
    low: int = 0
    whole: int = 0
    waited: int = 0
    message: str = ""


ENDS = ("idle", "waiting", "superseded", "refused")


def begin(client: Client, goal: str) -> Client:
    """Start something.

    "join"; "hello" of one that pushes and has not joined; "push" a new push, or the
    last one "again"; "wait" for a token; "start" with the others; "leave"; "look", for
    which all servers must be there.
    """
    client = client._replace(goal=goal, lost=0, waited=0, message="")
    if goal == "push":
        serial = client.serial + 1
        client = client._replace(serial=serial, sending=(serial,))
    elif goal == "again":
        client = client._replace(sending=(client.done,))
    if client.epoch[0] < 0 or goal in ("join", "look"):
        return _phase(client, "ask")
    return _phase(client, "token") if goal == "wait" else _go_on(client)


def wants(client: Client) -> dict[int, Request]:
    """What to ask of which server now; {} when it has come to an end."""
    if client.phase in ENDS:
        return {}
    missing = [k for k, answer in enumerate(client.heard) if answer is None]
    if client.phase in ("token", "start"):  # The first server knows.
        missing = missing[:1] if 0 in missing else []
    elif client.phase in ("enter", "restore") and 0 in missing:
        missing = [0]
    return {server: _request(client, server) for server in missing}


def hears(client: Client, server: int, answer: Answer) -> Client:
    """What a client does about an answer to what it wants."""
    match answer:
        case Turned():
            return _phase(client, "ask")
        case Superseded():
            return client._replace(
                phase="superseded",
                message=f"worker {client.worker} has been replaced: its incarnation "
                f"{client.incarnation} is older than {answer.newest}.",
            )
        case Refused():
            return _refused(client, answer.message)
        case Standing():
            client = client._replace(cut=max(client.cut, answer.cut))
    if client.phase == "enter" and server == 0:
        entry = answer.entries[0]  # pyright: ignore[reportAttributeAccessIssue] # a Standing
        client = client._replace(incarnation=entry.incarnation, joins=entry.joins)
    heard = client.heard
    client = client._replace(heard=(*heard[:server], answer, *heard[server + 1 :]))
    return client if wants(client) else _advance(client)


def _request(client: Client, server: int) -> Request:
    c = client
    match c.phase:
        case "ask":
            return Ask()
        case "restore":
            return c.plan[server]
        case "settle":
            return c.plan
        case "enter":
            return Enter(c.epoch, c.worker, c.incarnation if server else 0)
        case "finish":
            return Finish(c.epoch, c.worker, c.incarnation, c.round, c.cut)
        case "resume":
            return Resume(c.epoch, c.worker, c.incarnation, c.joins)
        case "save":
            return Save(c.epoch, c.worker, c.plan)
        case "token" | "start":
            return Stay(c.phase, c.epoch, c.worker, c.incarnation)
    kind = "push" if c.servers == 1 else c.phase
    serial = c.sending[0]
    return Send(
        kind, c.epoch, c.worker, c.incarnation, c.round + 1, serial, c.cut, c.low,
        c.whole,
    )  # fmt: skip


def _advance(client: Client) -> Client:
    """All that were asked have answered."""
    answers = client.heard
    match client.phase:
        case "ask":
            return _ready(client, answers)
        case "restore":
            rounds = agreed([answer.entries for answer in answers])
            settle = Settle(client.plan[0].epoch, rounds)
            return _phase(client._replace(plan=settle), "settle")
        case "settle":
            return _in_epoch(client, client.plan.epoch)
        case "enter":
            entries = [answer.entries for answer in answers]
            client = client._replace(round=agreed(entries)[0])
            return _phase(client, "finish")
        case "finish":
            return client._replace(
                phase="idle", base=client.round, serial=0, done=0, sending=(), kept=()
            )
        case "resume":
            return _resumed(client, max(a.entries[0] for a in answers))
        case "prepare" if client.servers > 1:
            return _phase(_noted(client, answers), "commit")
        case "prepare" | "commit":
            client = _noted(client, answers)
            if any(answer.busy for answer in answers):
                return client._replace(phase="waiting")
            return _applied(client, answers)
        case "save":
            client = _covered(_noted(client, answers), answers)
            if client.kept and client.waited < 3:
                return _go_on(client._replace(waited=client.waited + 1))
            return client._replace(phase="idle")
    if answers[0].busy:
        return client._replace(phase="waiting")
    return _applied(client, answers) if client.sending else _end(client)


def _ready(client: Client, answers: tuple[Status, ...]) -> Client:
    """All servers have said how they stand."""
    epochs = {answer.epoch for answer in answers}
    if all(answer.ready for answer in answers) and len(epochs) == 1:
        return _in_epoch(client, answers[0].epoch)
    # Somebody is at it, or was when they answered: ask again, unless it takes so long
    # that whoever it is must be dead. (Plans begin at the first server, so that of two
    # who have made one only one goes on.)
    begun = {a.epoch[1] for a in answers if not a.ready} - {0, client.number}
    newest = max((a.epoch for a in answers if a.ready), default=(-1, 0))
    dead = [a for a in answers if not a.ready and a.epoch > newest]
    if begun or not dead:
        if client.patience < 0:
            return _phase(client, "ask")
        if client.waited < client.patience:
            return _phase(client._replace(waited=client.waited + 1), "ask")
    common = set(answers[0].cuts).intersection(*(a.cuts for a in answers))
    known = [n for a in answers for n in (a.epoch[0], a.handed)]
    number = 1 + max(client.epoch[0], client.incarnation, *known)
    newest = max(n for a in answers for n in (a.cut, *a.cuts))
    plan = tuple(
        Restore(
            (number, client.number), max(common, default=0), newest, a.epoch, a.ready
        )
        for a in answers
    )
    return _phase(client._replace(plan=plan, waited=0), "restore")


def _in_epoch(client: Client, epoch: Epoch) -> Client:
    """All servers are ready, in this epoch."""
    known, client = client.epoch == epoch, client._replace(epoch=epoch)
    if client.goal == "join":
        return _phase(client, "enter")
    if client.goal == "look":
        return client._replace(phase="idle")
    return _go_on(client) if known else _phase(client, "resume")


def agreed(entries: list[tuple[Entry, ...]]) -> tuple[int, ...]:
    """The round of each worker that all servers go to: what one has, all get.

    Raises:
        RuntimeError: A server has neither applied nor prepared what another has
            applied, which no order of events leads to.
    """
    rounds = []
    for of_worker in zip(*entries, strict=True):
        first = max(of_worker, key=lambda entry: entry.round)
        for entry in of_worker:
            there = (entry.round, entry.last) == (first.round, first.last)
            coming = (entry.round + 1, entry.staged) == (first.round, first.last)
            if not there and not coming:
                raise RuntimeError(
                    f"The servers do not hold the same pushes: {first} and {entry}. "
                    "Their checkpoints are not of one run; pass another checkpoint_dir."
                )
        rounds.append(first.round)
    return tuple(rounds)


def _resumed(client: Client, entry: Entry) -> Client:
    """The servers have gone back to a cut; what of this worker's survived?"""
    mine = entry.last[:1] == (client.incarnation,)
    applied = entry.last[1] if mine else 0
    gone = client.round - (entry.round if mine else client.base)
    resend = tuple(serial for serial in client.kept if serial > applied)
    of_before, new = client.sending[:-1], client.sending[-1:]
    return _go_on(
        client._replace(
            round=entry.round,
            serial=max(client.serial, applied),
            base=client.base if mine else entry.round,
            lost=client.lost + max(gone, 0) - len(resend),
            sending=(*resend, *(s for s in of_before if s > applied), *new),
            kept=tuple(s for s in (*client.kept, *of_before) if s <= applied),
            low=0,
            whole=0,
        )
    )


def _applied(client: Client, answers: tuple[Standing, ...]) -> Client:
    """The push that is sent has been applied everywhere."""
    number = max(answer.entries[0].round for answer in answers)
    client = client._replace(round=number)
    serial, *rest = client.sending
    kept = (*(s for s in client.kept if s != serial), serial) if client.replay else ()
    client = client._replace(
        sending=tuple(rest), done=serial, kept=kept[-client.replay :]
    )
    return _go_on(_covered(client, answers))


def _covered(client: Client, answers: tuple[Standing, ...]) -> Client:
    """Forget what a cut of all servers holds."""
    if not client.kept:
        return client
    ours = [a.covered[1] for a in answers if a.covered[:1] == (client.incarnation,)]
    done = min(ours) if len(ours) == client.servers else 0
    return client._replace(kept=tuple(s for s in client.kept if s > done))


def _noted(client: Client, answers: tuple[Standing, ...]) -> Client:
    """What the answers tell about cuts."""
    saved_ = {answer.saved for answer in answers}
    whole = max(saved_) if len(saved_) == 1 else 0
    return client._replace(
        low=max(client.low, min(answer.cut for answer in answers)),
        whole=max(client.whole, whole),
    )


def _refused(client: Client, message: str) -> Client:
    if len(client.sending) > 1:  # One that is sent again: the others come all the same.
        client = client._replace(sending=client.sending[1:], lost=client.lost + 1)
        return _go_on(client)
    return client._replace(phase="refused", sending=(), message=message)


def _go_on(client: Client) -> Client:
    if client.sending:
        return _phase(client, "prepare")
    if client.goal == "start":
        return _phase(client, "start")
    if client.goal == "leave" and client.kept:
        return _phase(client._replace(plan=client.cut + 1), "save")
    return client._replace(phase="idle")


def _end(client: Client) -> Client:
    return client._replace(phase="idle")


def _phase(client: Client, phase: str) -> Client:
    return client._replace(phase=phase, heard=(None,) * client.servers)
