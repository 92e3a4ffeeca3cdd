"""How the processes of a worker find one another, with threads for processes."""

import multiprocessing
import queue
import socket
import threading
from multiprocessing import connection as sockets

import pytest

from optx_sync.runtime import group


@pytest.fixture(name="door")
def begun(monkeypatch):
    """Process 0 of two, which waits for the other: where, the key, and its lines."""
    told: queue.Queue[str] = queue.Queue()
    lines: queue.Queue[list] = queue.Queue()
    monkeypatch.setattr(group.jax, "process_index", lambda: 0)
    monkeypatch.setattr(group.jax, "process_count", lambda: 2)
    monkeypatch.setattr(group, "_from_the_first", told.put)
    # Long for one who has the key, on any machine.
    monkeypatch.setattr(group, "GREETING_SECONDS", 3.0)

    def waits():
        lines.put(group._connected("127.0.0.1"))

    threading.Thread(target=waits, daemon=True).start()
    at, port, key = told.get(timeout=60).split()
    return (at, int(port)), key.encode(), lines


def meet(at, key, lines):
    """The line of process 0, and that of the other, which comes with the key."""
    found: queue.Queue = queue.Queue()

    def comes():
        found.put(sockets.Client(at, authkey=key))

    threading.Thread(target=comes, daemon=True).start()
    (line,), member = lines.get(timeout=60), found.get(timeout=60)
    return line, member


def hangs_up(stranger):
    stranger.close()


def sends_garbage(stranger):
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 100)


def has_another_key(stranger):
    with (
        sockets.Connection(stranger.dup().detach()) as line,
        pytest.raises(multiprocessing.AuthenticationError),
    ):
        sockets.answer_challenge(line, b"another")


def says_nothing(stranger):
    pass


@pytest.mark.parametrize(
    "greet", [hangs_up, sends_garbage, has_another_key, says_nothing]
)
def test_a_stranger_at_the_door_is_forgotten(greet, door):
    at, *_ = door
    with socket.create_connection(at) as stranger:
        greet(stranger)
        line, member = meet(*door)
    with line, member:
        line.send_bytes(b"told")
        assert member.recv_bytes() == b"told"
        if greet is says_nothing:  # The time limit is that of the greeting alone.
            assert not line.poll(1.1 * group.GREETING_SECONDS)
        member.send_bytes(b"heard")
        assert line.recv_bytes() == b"heard"


def test_the_door_is_at_the_address_of_the_group_alone(door):
    (_, port), *_ = door
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), 5):
        pass
    for line in meet(*door):
        line.close()


def test_where_only_others_know_the_address_all_are_listened_at():
    """As behind a NAT: an address of TEST-NET, which no machine has."""
    with group._door("192.0.2.1") as door:
        assert door.getsockname()[0] == "0.0.0.0"
