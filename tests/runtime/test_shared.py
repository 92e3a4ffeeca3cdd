"""Messages through memory that a worker and a server on one machine both see."""

import os
import threading

import numpy as np
import pytest

import optx_sync as oxs
from optx_sync.runtime import Push, protocol, shared
from optx_sync.runtime.ray_actors import ServerActor
from optx_sync.runtime.shared import SHORT_BYTES, SharedLine, Unseen

LARGE = np.arange(SHORT_BYTES, dtype=np.float32)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory without a name"
)


def test_large_arrays_lie_in_memory_and_short_messages_do_not():
    worker, server, found, answer = SharedLine(begins=True), SharedLine(), {}, ()
    for number in range(1, 4):
        arrays = {"a": LARGE * number, "b": LARGE[:3], "none": LARGE[:0]}
        message = worker.packed(("push", arrays))
        assert len(message) < 1000
        _, found = server.unpacked(message)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].ctypes.data % 64 == 0
        answer = worker.unpacked(server.packed(("reply", found["a"] + 1)))
        np.testing.assert_array_equal(answer[1], LARGE * number + 1)
    del found, answer
    files = len(os.listdir("/proc/self/fd"))
    short = worker.packed(("push", LARGE[:3]))
    np.testing.assert_array_equal(server.unpacked(short)[1], LARGE[:3])
    assert server.near and len(short) < 1000
    # A longer message has memory of its own, and the old one goes with who reads it.
    for number in range(2, 5):
        server.unpacked(worker.packed(np.tile(LARGE, number)))
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_cannot_be_made_shorter_than_its_reader_believes():
    memory = shared.Memory(2**16)
    with open(f"/proc/{os.getpid()}/fd/{memory.address[1]}", "r+b") as file:
        with pytest.raises(PermissionError):
            file.truncate(0)
    assert len(shared.seen(memory.address)) == 2**16


def test_who_does_not_see_the_memory_is_spoken_to_through_ray(monkeypatch):
    """Another machine has another process of that number, or none."""
    actor = ServerActor(
        {"w": LARGE}, oxs.rules.local_sgd(), {"num_workers": 1, "copy_replies": False}
    )
    line = SharedLine(begins=True)
    seen = shared.seen
    elsewhere = [(2**30, 0), (os.getpid(), 1)]
    for place in elsewhere:
        monkeypatch.setattr(shared, "seen", lambda a, place=place: seen((*place, a[2])))
        line = SharedLine(begins=True)
        enter = line.packed((protocol.Request("enter", 0, 0), None))
        assert isinstance(line.unpacked(actor.handle(0, enter)), Unseen)
        assert not line.near
    answer, joined = line.unpacked(
        actor.handle(0, line.packed((protocol.Request("enter", 0, 0), None)))
    )
    assert not line.is_open
    assert joined.restarts == 0  # What was not seen has done nothing.
    mine = joined.incarnation
    push = Push(0, 1, {"contribution": {"['w']": LARGE}}, incarnation=mine)
    send = protocol.Request("send", 0, mine, answer.epoch, round=1, counted=1)
    message = line.packed((send, push))
    assert len(message) > LARGE.nbytes  # It lies nowhere else.
    answer, reply = SharedLine().unpacked(actor.handle(0, message))
    assert isinstance(answer, protocol.Standing) and reply.global_step == 1


def test_both_speak_through_pipes_once_the_server_has_opened_them():
    """Where one of them is gone the other one is told, and speaks through Ray."""
    before = {*threading.enumerate()}
    settings = {"num_workers": 2, "copy_replies": False}
    actor = ServerActor({"w": LARGE}, oxs.rules.local_sgd(), settings)

    def enter(worker):
        line = SharedLine(begins=True)
        message = line.packed((protocol.Request("enter", worker, 0), None))
        assert not line.is_open  # Nobody has taken what is offered.
        answer, joined = line.unpacked(actor.handle(worker, message))
        assert line.is_open
        return line, answer.epoch, joined.incarnation

    def ask(line, epoch, worker, mine, number, array):
        arrays = {"contribution": {"['w']": array}}
        push = Push(worker, number, arrays, incarnation=mine)
        send = protocol.Request(
            "send", worker, mine, epoch, round=number, counted=number
        )
        line.say(line.packed((send, push)))

    lines = [enter(worker) for worker in (0, 1)]
    for number in (1, 2):  # Both at once; an answer is whole when it is read.
        for worker, (line, epoch, mine) in enumerate(lines):
            ask(line, epoch, worker, mine, number, LARGE)
        for line, *_ in lines:
            _, reply = line.unpacked(line.hear())
            after = reply.arrays["after"]["['w']"]
            np.testing.assert_array_equal(after, LARGE * (1 + reply.global_step))
    (one, epoch, mine), (two, *_) = lines
    ask(one, epoch, 0, mine, 3, np.ones(3, np.float32))  # A short one, and wrong.
    answer, _ = one.unpacked(one.hear())
    assert "must have shape" in answer.message
    # One that replaces it has pipes of its own; the predecessor's end with it.
    again, epoch, new = enter(0)
    ask(again, epoch, 0, new, 3, LARGE)
    ask(one, epoch, 0, mine, 3, LARGE)
    assert isinstance(one.unpacked(one.hear())[0], protocol.Superseded)
    assert again.unpacked(again.hear())[1].global_step == 5
    listening = [x for x in {*threading.enumerate()} - before if "_listen" in x.name]
    assert len(listening) == 3
    for line in (one, two, again):
        line.hang_up()
        with pytest.raises(EOFError):
            line.hear()
    for thread in listening:
        thread.join(10)
        assert not thread.is_alive()
    # A server that dies is heard of at once.
    mine, theirs = SharedLine(begins=True), SharedLine()
    theirs.unpacked(mine.packed("hello"))
    mine.unpacked(theirs.packed("hello"))
    theirs.hang_up()
    with pytest.raises(EOFError):
        mine.hear()
    with pytest.raises(OSError, match="Broken pipe"):
        mine.say(b"to nobody")
