"""The protocol, in every order of events: what is explored here is what runs."""

import json

import pytest

from benchmarks.explorer import Explorer
from optx_sync.runtime import protocol
from optx_sync.runtime.agreements.meeting import Meetings
from tests.runtime.quorum_explorer import QuorumExplorer


@pytest.mark.parametrize(
    ("workers", "owners", "rounds", "least"),
    [
        (1, (0,), 3, 100),
        (2, (0,), 3, 5_000),
        (1, (0, 1, 0), 2, 400),
        (2, (0, 1), 3, 50_000),
    ],
    ids=str,
)
def test_every_order_of_events_with_one_death_and_one_lost_message(
    workers, owners, rounds, least
):
    """Over real servers; which one each part lives at stands in `owners`.

    `make faults` goes through two parts at one server, too.
    """
    worlds, ends = Explorer(workers, owners, rounds).explore()
    assert worlds > least and ends > least / 4


@pytest.mark.parametrize(
    ("owners", "rounds", "least"), [((0,), 2, 20_000), ((0, 1), 1, 25_000)], ids=str
)
def test_every_order_of_events_of_two_workers_that_share_meetings(
    owners, rounds, least
):
    """The same, with meetings that may close early."""
    worlds, ends = QuorumExplorer(2, owners, rounds=rounds).explore()
    assert worlds > least and ends > least / 4


def test_a_join_that_comes_again_is_the_one_that_came():
    """Its answer was lost, or it came twice; a checkpoint knows of it, too."""
    book = protocol.new_book(workers=1, parts=1, epoch=10, every=0)
    first = protocol.Request("enter", 0, 0, asked=1)
    above = protocol.Request("enter", 0, 11, above=90, asked=2)
    book, answer, _ = protocol.decide(book, first)
    assert protocol.decide(book, first).answer == answer
    book, answer, _ = protocol.decide(book, above)
    notes = json.loads(json.dumps(protocol.notes_of(book.entries)))
    entries = protocol.noted(notes, book.entries)
    for known in book, book._replace(entries=entries, handed=10):
        assert protocol.decide(known, above).answer == answer
        late = protocol.decide(known, first)
        assert isinstance(late.answer, protocol.Superseded) and late.book == known


def test_exploration_finds_contributions_that_a_checkpoint_lacks(monkeypatch):
    save = Meetings.save

    def forgetful(held):
        arrays, notes = save(held)
        return arrays, {**notes, "came": [], "incarnations": []}

    monkeypatch.setattr(Meetings, "save", forgetful)
    with pytest.raises(AssertionError, match="lost without a word"):
        QuorumExplorer(2, (0,), rounds=2).explore()


def test_exploration_finds_a_push_that_is_applied_twice(monkeypatch):
    send = protocol._send

    def forgetful(book, entry, request):
        place = entry.places[request.part]
        if place.last == (request.incarnation, request.round):
            request = request._replace(counted=place.counted + 1)
            entry = entry._replace(places=(place._replace(last=()),))
        return send(book, entry, request)

    monkeypatch.setattr(protocol, "_send", forgetful)
    with pytest.raises(AssertionError, match="twice"):
        Explorer(1, (0,)).explore()


def test_exploration_finds_a_server_that_does_not_say_that_it_was_dead(monkeypatch):
    decide = protocol.decide

    def trusting(book, request):
        return decide(book, request._replace(epoch=book.epoch))

    monkeypatch.setattr(protocol, "decide", trusting)
    with pytest.raises(AssertionError, match=r"too early|lost without a word"):
        Explorer(1, (0, 1), rounds=2).explore()


def test_exploration_finds_a_loss_that_is_not_told(monkeypatch):
    resumed = protocol._resumed
    monkeypatch.setattr(
        protocol, "_resumed", lambda *given: resumed(*given)._replace(lost=0)
    )
    with pytest.raises(AssertionError, match="lost without a word"):
        Explorer(1, (0,)).explore()


def test_a_loss_before_a_worker_joins_again_is_told():
    """It pulls, or its program runs again; two of three pushes went with the server."""
    client = protocol.begin(protocol.Client(0), "enter")
    client = protocol.hears(client, of(1))
    for number in (1, 2, 3):
        client = protocol.begin(client, "send", 0, number)
        client = protocol.hears(client, of(1, number, (5, number), number))
    client = protocol.begin(client, "enter")
    client = protocol.hears(client, of(2, 1, (5, 1), 1))
    assert client.phase == "idle" and client.lost == 2


def of(epoch, *place):
    """What a server answers: its epoch, and the state of the pushes of one part."""
    places = (protocol.Place(*place),)
    return protocol.Standing(epoch, places, 5, 1)


def test_a_push_that_is_sent_again_is_not_told_as_lost():
    """It was applied and saved before one death, and the next one took that too."""
    client = protocol.begin(protocol.Client(0), "enter")
    client = protocol.begin(protocol.hears(client, of(1)), "send", 0, 1)
    for place in ((1, (5, 1), 1), ()):
        client = protocol.hears(client, protocol.Turned(*of(2, *place)[:2]))
        assert client.phase == "send"
    client = protocol.hears(client, of(3, 1, (5, 1), 1))
    assert client.phase == "idle" and client.lost == 0


def test_a_loss_is_told_though_the_next_push_was_refused():
    """What a server's going back took is told with the first push that is answered."""
    client = protocol.begin(protocol.Client(0), "enter")
    client = protocol.hears(client, of(1))
    for number, answers in [
        (1, [of(1, 1, (5, 1), 1)]),
        (2, [protocol.Turned(*of(2)[:2]), protocol.Refused("it holds a NaN.")]),
        (2, [of(2, 1, (5, 2), 1)]),
    ]:
        client = protocol.begin(client, "send", 0, number)
        for answer in answers:
            client = protocol.hears(client, answer)
    assert client.phase == "idle" and client.lost == 1
    client = protocol.begin(client, "send", 0, 3)
    assert protocol.hears(client, of(2, 2, (5, 3), 2)).lost == 0
