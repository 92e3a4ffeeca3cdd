"""Pushes in few bytes: what travels, what is owed, and that a run is its simulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.center.worker import start_center
from optx_sync.meetings.coded import (
    bytes_of,
    decoded,
    encoded,
    message_shapes,
    start_codes,
)
from optx_sync.runtime import Push, PushRefused, Server, SyncReplicas, Worker
from optx_sync.simulate import asynchronous
from tests.refusals import all_refused, refused

exchange = oxs.exchange
PARAMS = {
    "matrix": jnp.linspace(-1, 1, 70 * 30).reshape(70, 30),
    "vector": jnp.linspace(0, 2, 300),
    "scalar": jnp.float32(0.5),
    "empty": jnp.zeros((0, 3)),
    "half": jnp.ones(5, jnp.bfloat16),
}
WHOLE = 4 * (2100 + 300 + 1 + 5)
# (exchange, the bytes of a push: blocks of 256 numbers and fewer, chunks of 4096.)
CODES = {
    "whole": (exchange.all_reduce(), WHOLE),
    "bfloat16": (exchange.all_reduce(jnp.bfloat16), WHOLE // 2),
    "16 bit": (exchange.quantized(16), 2 * (9 * 240 + 2 * 152 + 8 * 2)),
    "8 bit": (
        exchange.quantized(),
        (9 * 240 + 9 * 4) + (2 * 152 + 2 * 4) + (8 + 4) * 2,
    ),
    "4 bit": (
        exchange.quantized(bits=4),
        (9 * 120 + 9 * 4) + (2 * 76 + 2 * 4) + (4 + 4) * 2,
    ),
    # A scalar is a block of 8, five numbers are one of 8, 300 numbers three blocks.
    "1 bit": (
        exchange.quantized(bits=1),
        (9 * 30 + 9 * 4) + (2 * 19 + 2 * 4) + (1 + 4) * 2,
    ),
    "rotated": (
        exchange.rotated(exchange.quantized(bits=2)),
        (9 * 64 + 9 * 4) + (2 * 64 + 2 * 4) + (2 + 4) * 2,
    ),
    "top-k": (
        exchange.top_k(8, 512),
        (2 + 4) * 8 * 5 + (2 + 4) * 8 + (1 + 4) * 1 + (1 + 4) * 5,
    ),
    "2 bit": (
        exchange.top_k(32, 512, bits=2),
        (32 * 2 + 8 + 16) * 5 + (32 * 2 + 8 + 16) + (1 + 1 + 16) + (5 + 2 + 16),
    ),
    "power": (exchange.power_sgd(rank=2), 4 * (2 * 100 + 300 + 1 + 5)),
}


def gradient(params, event):
    def at(p):
        wave = jnp.sin(jnp.arange(p.size, dtype=jnp.float32) + event)
        return p + wave.reshape(p.shape).astype(p.dtype)

    return jax.tree.map(at, params)


def test_what_is_lost_is_known_and_fed_back():
    center = start_center(PARAMS)
    fed = {name: exchange.error_feedback(code) for name, (code, _) in CODES.items()}

    def push_twice(tree):
        found = {}
        for name, code in fed.items():
            states = start_codes(code, tree)
            arrived = jax.tree.map(jnp.zeros_like, tree)
            messages = ()
            for _ in range(2):
                messages, states = encoded(code, tree, states)
                part = decoded(code, messages, tree)
                arrived = jax.tree.map(jnp.add, arrived, part)
            found[name] = arrived, states, messages
        return found

    program = jax.jit(push_twice)
    for name, (arrived, states, messages) in program(center).items():
        assert (
            bytes_of(messages)
            == CODES[name][1]
            == bytes_of(message_shapes(CODES[name][0], center))
        )
        owed = jax.tree.leaves([state.error for state in states])
        for x, total, error in zip(
            *map(jax.tree.leaves, (center, arrived)), owed, strict=True
        ):
            np.testing.assert_allclose(total + error, 2 * x, rtol=1e-5, atol=1e-5)
        assert any(error.any() for error in owed) == (name != "whole")


def test_a_run_is_its_simulation():
    """Two workers, one of them twice as fast."""
    code = exchange.error_feedback(exchange.quantized())
    rule, inner, order = oxs.rules.diloco(), optax.sgd(0.05), [0, 0, 1] * 8
    params = {name: PARAMS[name] for name in ("matrix", "scalar")}
    settings: Any = {"num_workers": 2, "communication_period": 2, "exchange": code}
    server = Server(params, rule, **settings)
    workers = [Worker(server, params, inner, rule, index=i, **settings) for i in (0, 1)]
    for event, i in enumerate(order):
        workers[i].step(gradient(workers[i].params, jnp.float32(event)))
    run = asynchronous(
        inner,
        rule,
        params,
        lambda worker, params, event: gradient(params, event.astype(jnp.float32)),
        jnp.array(order),
        record=len(order),
        **settings,
    )
    for name, expected in run.final.center.items():
        np.testing.assert_allclose(
            server.center()[name], expected, rtol=1e-4, atol=1e-5
        )
    pushes = [event for event in server.events()[1] if event.kind == "push"]
    assert len(pushes) == 12
    assert {event.bytes for event in pushes} == {run.push_bytes}
    assert run.push_bytes < 0.27 * 4 * 2101


def test_all_that_was_sent_in_has_arrived_or_is_owed(monkeypatch):
    """The center adds up what it decodes; a refused push changes no error."""
    count = oxs.CenterRule(
        lambda own, center, at: own.params - own.taken, reads=("params", "taken")
    )
    params = {"w": jnp.zeros(40)}
    code = exchange.error_feedback(exchange.quantized(bits=4))
    settings: Any = {"num_workers": 1, "communication_period": 1, "exchange": code}
    server = Server(params, count, **settings)
    worker = Worker(server, params, optax.sgd(1.0), count, index=0, **settings)
    rng = np.random.default_rng(0)
    sent, owed = np.zeros(40), np.zeros(40)

    def refuse(push):
        raise PushRefused("full")

    def error() -> Any:
        own: Any = worker._own
        return own.codes[0][0].error

    for step in range(30):
        before = np.asarray(worker.params["w"])
        grad = rng.normal(size=40).astype(np.float32)
        if step == 11:
            owed = error()
            with pytest.raises(PushRefused, match=r"\['w'\] holds a NaN"):
                worker.step({"w": jnp.full(40, jnp.nan)})
            assert np.array_equal(owed, error())
            worker.pull()
            # A worker that starts anew owes nothing: what was owed is lost.
            assert not error().any()
            sent -= owed
            before = np.asarray(worker.params["w"])
        if step == 17:  # A push that could be absorbed is refused, and comes again.
            with monkeypatch.context() as patch:
                patch.setattr(server, "send", refuse)
                with pytest.raises(PushRefused):
                    worker.step({"w": jnp.asarray(grad)})
            assert np.array_equal(owed, error())
            sent -= grad
        worker.step({"w": jnp.asarray(grad)})
        sent += (before - grad) - before
        owed = error()
        np.testing.assert_allclose(
            server.center()["w"] + owed, sent, atol=1e-4, rtol=1e-5
        )
    assert np.abs(owed).max() > 0.01


def told_to(worker, server):
    """(what a server takes a worker to know, what the worker knows), all parts."""
    held = [one.answers.known[worker.index][1] for one in server._held]
    picked = [worker.layout.pick(worker._own.taken, part) for part in server.parts]
    return jax.tree.leaves(held), jax.tree.leaves(picked)


def lacking(worker: Any, server):
    """How far what a worker knows is from the center."""
    far = jax.tree.map(jnp.subtract, worker._own.taken, server.center())
    return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(far))


@pytest.mark.parametrize(
    "name",
    ["8 bit", "2 bit", "top-k", "rotated"],
)
def test_what_a_worker_is_told_is_what_it_knows_and_is_made_up_for(name):
    """Two workers, one of them twice as fast, in parts that travel for a step."""
    pulls, inner = CODES[name][0], optax.sgd(0.05)
    halfway = oxs.CenterRule(  # It takes the center after its push, not before.
        lambda own, center, at: 0.3 * (own.params - center),
        take=lambda x, before, after, at: 0.5 * x + 0.5 * after,
        reads=("params", "center", "after"),
    )
    elastic = oxs.rules.elastic(moving_rate=0.3, rho=0.0)
    for rule in (oxs.rules.diloco(), elastic, halfway):
        settings: Any = {"num_workers": 2, "communication_period": 2, "fragments": 2}
        settings["pull_exchange"] = pulls
        params = {name: PARAMS[name] for name in ("matrix", "vector")}
        server = Server(params, rule, **settings)
        workers = [
            Worker(server, params, inner, rule, index=i, delay=1, **settings)
            for i in (0, 1)
        ]
        for event, i in enumerate([0, 0, 1] * 8):
            workers[i].step(gradient(workers[i].params, jnp.float32(event)))
        for worker in workers:
            worker.flush()
            for theirs, own in zip(*told_to(worker, server), strict=True):
                assert np.array_equal(theirs, own)
        pushes = [event for event in server.events()[1] if event.kind == "push"]
        sizes = [event.pulled for event in pushes]
        # The first answer of each part is whole, to each worker.
        whole = 4 * (35 * 30 + 150)
        assert sizes[:2] == [whole] * 2 and sizes.count(whole) == 4
        assert max(sizes[-8:]) < 0.3 * whole
        # Who moves no more comes to know the center, whatever the code loses.
        zeros = jax.tree.map(jnp.zeros_like, params)
        worker, rounds = workers[0], 40 if name == "8 bit" else 200
        if rule.take is not None:  # It moves the center by its own push.
            continue
        before = lacking(worker, server)
        for _ in range(rounds):
            worker.step(zeros)
        worker.flush()
        assert before > 1e-4 and lacking(worker, server) < 0.1 * before


def test_who_did_not_hear_an_answer_is_told_whole_arrays(tmp_path):
    rule, size = oxs.rules.local_sgd(), 4 * 40
    settings: Any = {"num_workers": 1, "pull_exchange": exchange.quantized()}
    params = {"w": jnp.linspace(0, 1, 40)}

    def start():
        return Server(params, rule, checkpoint_dir=tmp_path, **settings)

    server, arrays = start(), {"['w']": np.linspace(-1, 2, 40, dtype=np.float32)}

    def push(number, confirms):
        reply = server.push(
            Push(0, number, {"contribution": arrays}, confirms=confirms)
        )
        assert set(reply.arrays) in ({"after"}, {"change"})
        return reply, "change" in reply.arrays

    first, coded = push(1, 0)
    assert not coded
    second, coded = push(2, first.number)
    assert coded and bytes_of(second.arrays) < 0.4 * size
    again, coded = push(2, first.number)  # The answer was lost.
    assert not coded and bytes_of(again.arrays) == size
    for heard in (second.number, 7, 0):  # an old one, none that is, no codes
        reply, coded = push(server.global_step + 1, heard)
        assert not coded
    reply, coded = push(server.global_step + 1, reply.number)
    assert coded
    server.checkpoint()
    server = start()
    reply, coded = push(server.global_step + 1, reply.number)
    assert not coded
    reply, coded = push(server.global_step + 1, reply.number)
    assert coded
    server.leave(0)
    held: Any = server._held[0]
    assert held.answers.known == {}


LOCAL, CODE = oxs.rules.local_sgd(), exchange.quantized()
ELASTIC, COMPLEX = oxs.rules.elastic(moving_rate=0.1, rho=0.0), jnp.zeros(2, "c8")
BOTH = oxs.CenterRule(
    contribute=lambda own, center, at: own.params - own.taken,
    take=lambda x, before, after, at: x + after - before,
)
REPLICAS = SyncReplicas(1)
FED, POWER = exchange.error_feedback(CODE), exchange.power_sgd()


def pushing(agreement, code, params: Any = PARAMS):
    Server(params, agreement, num_workers=1, exchange=code)


def pulling(agreement, code, params: Any = PARAMS):
    Server(params, agreement, num_workers=1, pull_exchange=code)


test_codes_that_a_run_cannot_have_are_refused = all_refused(globals())(r"""
pushing(ELASTIC, CODE)  # ValueError: reads the center
pushing(LOCAL, exchange.median())  # ValueError: one by one
pushing(REPLICAS, CODE)  # ValueError: SyncReplicas may drop
pulling(LOCAL, FED)  # ValueError: without error_feedback
pulling(LOCAL, POWER)  # ValueError: and no memory
pulling(LOCAL, exchange.median())  # ValueError: such as
pulling(BOTH, CODE)  # ValueError: before and after
pulling(REPLICAS, CODE)  # ValueError: Leave pull_exchange out
pushing(LOCAL, CODE, COMPLEX)
pulling(LOCAL, CODE, COMPLEX)  # TypeError: real floating
pushing(LOCAL, 0.5)
pulling(LOCAL, 0.5)  # TypeError: oxs.exchange
""")


def test_messages_that_are_no_codes_are_refused():
    server = Server({"w": jnp.zeros(40)}, LOCAL, num_workers=1, exchange=CODE)
    for array in (np.zeros(3, np.uint8), np.zeros(40, np.float32)):
        with pytest.raises(PushRefused, match=r"\['w'\] must have"):
            server.push(Push(0, 1, {"contribution": {"['w']": array}}))
    with refused("ValueError: reads the center"):
        asynchronous(
            optax.sgd(0.1), ELASTIC, PARAMS, lambda *_: PARAMS, [0], num_workers=1,
            exchange=CODE,
        )  # fmt: skip
