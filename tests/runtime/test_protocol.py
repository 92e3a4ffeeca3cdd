"""The protocol, in every order of events: what is explored here is what runs."""

import sys

import pytest

from optx_sync.runtime import protocol
from tests.runtime.explorer import Explorer


@pytest.mark.parametrize(
    ("workers", "servers", "replay"), [(1, 2, 0), (2, 1, 0), (1, 2, 8)]
)
def test_every_order_of_events_with_one_death_and_one_lost_message(
    workers, servers, replay
):
    worlds, ends = Explorer(workers, servers, replay).explore()
    assert worlds > 5000 and ends > 1000


def test_two_workers_and_two_servers_with_a_death_or_a_lost_message():
    """Two rounds each; `make faults` goes through both faults at once."""
    for deaths, losses in ((1, 0), (0, 1)):
        explorer = Explorer(2, 2, 0, rounds=2, deaths=deaths, losses=losses)
        assert explorer.explore()[0] > 4000


def never_applied(book, worker, number):
    """What is prepared is dropped at a join or restore, whatever others have done."""
    entry = book.entries[worker]
    return protocol._with(book, worker, entry._replace(staged=())), (("drop", worker),)


def test_exploration_finds_the_torn_push_where_a_join_does_not_ask_all(monkeypatch):
    bring = protocol._bring

    def only_by_commit(book, worker, number):
        caller = sys._getframe(1).f_code.co_name
        return (bring if caller == "_send" else never_applied)(book, worker, number)

    monkeypatch.setattr(protocol, "_bring", only_by_commit)
    with pytest.raises(
        (AssertionError, RuntimeError), match=r"torn|not hold the same|too early"
    ):
        Explorer(1, 2, 0).explore()


def test_exploration_finds_the_late_restore_of_servers_that_are_at_work(monkeypatch):
    decide = protocol.decide

    def trusting(book, request):
        if isinstance(request, protocol.Restore) and request.epoch > book.epoch:
            request = request._replace(seen=book.epoch, was_ready=book.ready)
        return decide(book, request)

    monkeypatch.setattr(protocol, "decide", trusting)
    with pytest.raises(AssertionError, match=r"lost"):
        Explorer(2, 1, 8).explore()
