"""Meetings that close when enough workers have come, on real servers in this process.

The laws: K = M at equal speeds is lockstep; `quorum(1)` is `one()` to the bit; a worker
that never answers leaves no trace; what is late is dropped, and told.
"""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optx_sync as oxs
from optx_sync.runtime import Preempted, Server, Worker, one, quorum
from optx_sync.runtime.messages import Pending
from tests.meshes import mesh_of

WORKERS, STEPS = 4, 24
RNG = np.random.default_rng(0)
PARAMS = {
    name: RNG.normal(size=(8, 2)).astype(np.float32) for name in ("a", "b", "c", "d")
}
TARGETS = RNG.normal(size=(WORKERS, STEPS + 40, 8, 2)).astype(np.float32)
INNER = optax.sgd(0.1, momentum=0.5)
RADIAL = oxs.exchange.radial(direct=lambda path: path == "['b']")
DILOCO = oxs.rules.diloco(optax.sgd(0.7, momentum=0.9, nesterov=True))


def grads_of(worker: Any, step: Any, params: Any) -> Any:
    targets = jnp.asarray(TARGETS)
    return jax.tree.map(lambda x: x - targets[worker, step], params)


def party(rule, meet, period=8, workers=WORKERS, **options):
    """A server and its workers; `delay`, `fragments` and codes by name."""
    settings: dict[str, Any] = {
        "num_workers": workers,
        "communication_period": period,
        "meet": meet,
    }
    kept = {k: options.pop(k) for k in ("checkpoint_dir", "clock") if k in options}
    clock, inner = kept.pop("clock", None), options.pop("inner", INNER)
    server = Server(PARAMS, rule, **settings, **options, **kept)
    if clock is not None:
        for held in server._held:
            cast(Any, held).clock = clock
    return server, [
        Worker(server, PARAMS, inner, rule, index=w, **settings, **options)
        for w in range(workers)
    ]


def stepped(*workers):
    """One step of each, in this order."""
    for worker in workers:
        grads = grads_of(worker.index, worker.local_step, worker.params)
        worker.step(grads)


def lockstep(rule, period=8, delay=0, **options):
    """The workers' parameters after each step, and the center."""
    options["overlap"] = delay == 1
    tx = oxs.center_variable(
        INNER, rule, "workers", communication_period=period, **options
    )

    def run(worker):
        def step(carry, number):
            params, state = carry
            grads = grads_of(worker, number, params)
            params, state = oxs.apply_gradients(tx, grads, state, params)
            return (params, state), (params, state.center)

        params = jax.tree.map(jnp.asarray, PARAMS)
        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(STEPS))[1]

    params, centers = jax.vmap(run, axis_name="workers")(jnp.arange(WORKERS))
    return params, jax.tree.map(lambda x: x[0], centers)


def close(got, wanted):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), got, wanted
    )


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


LAWS = {
    "whole": (DILOCO, {}),
    "delayed": (DILOCO, {"delay": 1}),
    "parts": (DILOCO, {"fragments": 4}),
    "parts, delayed": (DILOCO, {"fragments": 4, "delay": 1}),
    "sharded": (DILOCO, {"fragments": 4, "delay": 1, "over": {"data": 4}}),
    "local SGD": (oxs.rules.local_sgd(), {"fragments": 2, "delay": 1}),
    "AGN": (oxs.rules.agn(optax.sgd(0.3)), {"delay": 1}),
    "radial": (DILOCO, {"fragments": 4, "delay": 1, "exchange": RADIAL}),
}


@pytest.mark.parametrize("name", LAWS)
def test_all_of_equal_speed_are_lockstep(name):
    rule, options = LAWS[name]
    over = options.get("over")  # a mesh of each worker's own devices
    options = {key: options[key] for key in options if key != "over"}
    # With `delay=0` a worker waits for the others, who come in threads of their own
    # on real machines: here the last step of a round is the one that is not waited for.
    wanted, centers = lockstep(rule, **options)
    merge = options.pop("exchange", None)  # which workers do not see
    server, workers = party(rule, quorum(WORKERS, merge=merge), **options)
    if over is not None:
        for worker in workers:
            worker.shard(NamedSharding(mesh_of(over), PartitionSpec("data")))
    if not options.get("delay"):
        for worker in workers:
            worker._delay = 1
    for t in range(STEPS):
        stepped(*workers)
        if not options.get("delay"):  # They take the center before their next step.
            for worker in workers:
                if worker._life.sent.answers:
                    worker._land()
        for w, worker in enumerate(workers):
            close(worker.params, jax.tree.map(lambda x, w=w, t=t: x[w, t], wanted))
    assert server.global_step == STEPS // 8 * (options.get("fragments") or 1)
    if not options.get("delay"):
        close(server.center(), jax.tree.map(lambda x: x[-1], centers))


@pytest.mark.parametrize("fragments", (None, 2))
def test_a_quorum_of_one_is_one_to_the_bit(fragments):
    order = RNG.integers(0, 3, 60)
    found = []
    for meet in (one(), quorum(1), None):
        server, workers = party(DILOCO, meet, 4, 3, fragments=fragments, delay=1)
        for w in order:
            stepped(workers[w])
        found.append((server.center(), [worker.params for worker in workers]))
    same(found[0], found[1])
    same(found[0], found[2])


def test_one_that_never_answers_changes_nothing():
    """Three of four: the numbers are those of three workers alone."""
    options: dict[str, Any] = {"fragments": 2, "delay": 1}
    server, workers = party(DILOCO, quorum(3), **options)
    alone, three = party(DILOCO, quorum(3), workers=3, **options)
    for _ in range(STEPS):
        stepped(*workers[:3])
        stepped(*three)
    assert server.global_step == alone.global_step == STEPS // 4
    same(server.center(), alone.center())


def test_what_is_late_is_dropped_and_told_and_its_worker_goes_on_from_the_center():
    server, workers = party(DILOCO, quorum(2), 4, 3, fragments=2, delay=1)
    quick, slow = workers[:2], workers[2]
    for _ in range(9):
        stepped(*quick)
    assert server.global_step == 4 and slow.rounds == 0
    before = server.center()
    stepped(slow)  # It is asked, and comes too late for part 0.
    stepped(slow)  # It takes that part, and is asked for the next one.
    assert not slow.used and slow.staleness == 2
    same(server.center(), before)
    kinds = [event.kind for event in server.events()[1] if event.worker == 2]
    assert kinds == ["join", "dropped", "dropped"]
    stepped(slow)
    own: Any = slow._own
    same(own.taken, before)
    # From now on it is in step with the others; without grace the last one is late.
    for _ in range(4):
        stepped(slow, *quick)
    assert slow.used and server.global_step > 4


def test_grace_lets_a_slow_one_in():
    now = [0.0]
    meet = quorum(2, grace=1.0)
    server, workers = party(DILOCO, meet, 4, 3, delay=2, clock=lambda: now[0])
    held: Any = server._held[0]
    for _ in range(4):
        stepped(*workers[:2])
    # Both took a second a step: two steps are left until the answer is needed.
    held.closes, now[0] = 2.0, 1.0
    stepped(workers[2])  # It is asked, with a single step of its own.
    assert server.global_step == 1 and workers[2].used
    # Without it the meeting closes by the clock.
    for _ in range(6):
        stepped(*workers[:2])
    assert server.global_step == 1
    held.closes = 3.0
    sent: Any = workers[0]._life.sent
    assert not sent.answers[0].is_there()
    now[0] = 3.0
    assert sent.answers[0].is_there() and server.global_step == 2


def test_seconds_of_grace_are_those_of_the_formula():
    now = [10.0]
    server, _ = party(DILOCO, quorum(2, grace=0.5), delay=3, clock=lambda: now[0])
    held: Any = server._held[0]
    zeros = {path: np.zeros_like(x) for path, x in held.center.items()}
    push = oxs.runtime.Push(0, 1, {"contribution": zeros}, met=0, step_seconds=4.0)
    server.push(push._replace(incarnation=server._book.entries[0].incarnation))
    now[0] = 11.0
    again = push._replace(worker=1, step_seconds=2.0)
    server.push(again._replace(incarnation=server._book.entries[1].incarnation))
    assert held.closes == 11.0 + 0.5 * (3 * 2.0 - 1.0)


def weighed(total, tokens, steps):
    weights = np.array([t**2 / s for t, s in zip(tokens, steps, strict=True)])
    return (weights[:, None, None] * total).sum(0) / weights.sum()


def test_contributions_count_by_their_weights():
    """tokens^2 / steps, restated in NumPy."""
    rule = oxs.rules.diloco(optax.sgd(1.0))
    rule = rule._replace(weigh=lambda at: at.tokens**2 / at.steps)
    server, workers = party(rule, quorum(3), 4, 3, delay=1)
    tokens = {0: [5, 5, 5, 5], 1: [1, 2, 3, 4], 2: [9]}
    for t in range(4):
        for w in (0, 1):
            grads = grads_of(w, t, workers[w].params)
            workers[w].step(grads, tokens=tokens[w][t])
    # All but the last of them have contributed; the third is asked after one step.
    moved = [w._own.params for w in workers[:2]]
    third = workers[2]
    before = PARAMS["a"]
    third.step(grads_of(2, 0, third.params), tokens=9)
    deltas = [before - np.asarray(m["a"]) for m in moved]
    step = before - 0.1 * (before - TARGETS[2, 0])
    deltas.append(before - step)
    wanted = before - weighed(np.stack(deltas), [20, 10, 9], [4, 4, 1])
    np.testing.assert_allclose(server.center()["a"], wanted, rtol=1e-5, atol=1e-6)


def test_a_merge_is_any_exchange_over_those_that_came():
    rule = oxs.rules.diloco(optax.sgd(1.0))
    median = oxs.exchange.median()
    server, workers = party(rule, quorum(3, merge=median), 1, 3, delay=1)
    wanted = np.median(
        [PARAMS["a"] - 0.1 * (PARAMS["a"] - TARGETS[w, 0]) for w in range(3)], axis=0
    )
    stepped(*workers)
    np.testing.assert_allclose(server.center()["a"], wanted, rtol=1e-5, atol=1e-6)


def test_contributions_of_weight_0_are_dropped_and_leave_no_trace():
    rule = oxs.rules.local_sgd()._replace(weigh=lambda at: at.tokens)
    held: Any = party(rule, quorum(2), 1, 2, delay=1)[0]._held[0]
    before = held.center
    sent = {path: np.ones((8, 2), np.float32) for path in before}
    for number, tokens in enumerate(((0.0, 0.0), (3.0, 0.0)), 1):
        for w in range(2):
            push = oxs.runtime.Push(w, number, {"contribution": sent}, tokens=tokens[w])
            held.absorb(w, push, {})
        assert held.dropped == {w for w in range(2) if not tokens[w]}
        wanted = {path: x + (number == 2) for path, x in before.items()}
        same(held.center, wanted)


MERGES = {
    "mean": (oxs.rules.local_sgd(), None, 0),
    "outer": (DILOCO, None, 1),
    "median": (DILOCO, oxs.exchange.median(), 1),
}


@pytest.mark.parametrize("name", MERGES)
def test_meetings_of_any_number_are_one_program(name):
    """Of a plain mean there is none, and what came before leaves nothing behind."""
    rule, merge, programs = MERGES[name]
    held: Any = party(rule, quorum(2, merge=merge), 1, delay=1)[0]._held[0]
    for number, count in enumerate((4, 2, 3), 1):
        meet = quorum(count, merge=merge)
        fresh: Any = party(rule, meet, 1, delay=1)[0]._held[0]
        fresh.center, fresh.outer = before, _ = held.center, held.outer
        held.quorum = meet
        for w in range(count):
            sent = {path: TARGETS[w, number] for path in held.center}
            for meetings in (held, fresh):
                meetings.absorb(w, oxs.runtime.Push(w, 1, {"contribution": sent}), {})
        assert held.global_step == number and fresh.global_step == 1
        same(held.center, fresh.center)
        if name == "mean":
            wanted = before["['a']"] + TARGETS[:count, number].mean(0)
            np.testing.assert_allclose(held.center["['a']"], wanted, rtol=1e-6)
    assert held._meet._cache_size() == programs


def test_one_that_comes_back_may_come_twice_to_a_merge():
    """There are then more contributions than workers."""
    median = oxs.exchange.median()
    held: Any = party(DILOCO, quorum(2, merge=median), 1, 2, delay=1)[0]._held[0]
    before = held.center["['a']"]
    for worker, value in ((0, 1.0), (0, 2.0), (1, 6.0)):
        sent = {path: np.full((8, 2), value, np.float32) for path in held.center}
        held.absorb(worker, oxs.runtime.Push(worker, 1, {"contribution": sent}), {})
    assert held.global_step == 1
    close(held.center["['a']"], before - 0.7 * 1.9 * 2.0)


def test_a_merge_that_needs_more_than_have_come_merges_nothing_and_says_so():
    """Where workers have left, two are enough for a meeting and not for the merge."""
    trimmed = oxs.exchange.trimmed_mean(1)
    server, workers = party(DILOCO, quorum(3, merge=trimmed), 1, 3, delay=1)
    server.leave(2)
    stepped(*workers[:2])
    for worker in workers[:2]:
        worker.land()
        assert not worker.used
    close(server.center(), PARAMS)
    short = "A meeting of part 0 is short: nothing was merged of "
    said = short + "2, for merge= needs 3: all are dropped."
    assert shortages(server) == [said]
    # Three have come, and one of them weighs nothing.
    rule = DILOCO._replace(weigh=lambda at: at.tokens)
    server, workers = party(rule, quorum(3, merge=trimmed), 1, 3)
    held: Any = server._held[0]
    sent = {path: np.ones((8, 2), np.float32) for path in held.center}
    for w, tokens in enumerate((1.0, 0.0, 1.0)):
        push = oxs.runtime.Push(w, 1, {"contribution": sent}, tokens=tokens)
        held.absorb(w, push, {})
    assert shortages(server) == [said] and held.dropped == {0, 1, 2}


def test_a_meeting_that_would_overflow_is_dropped_and_says_so():
    server, _ = party(COUNT, quorum(2), 1, 2)
    held: Any = server._held[0]
    sent = {path: np.full((8, 2), 3e38, np.float32) for path in held.center}
    for w in range(2):
        held.absorb(w, oxs.runtime.Push(w, 1, {"contribution": sent}), {})
    assert shortages(server) == [
        "A meeting of part 0 is short: nothing was merged of 2, for the center would "
        "hold a NaN or infinity: all are dropped."
    ]
    close(server.center(), PARAMS)


def shortages(server):
    return [event.message for event in server.events()[1] if event.kind == "short"]


@pytest.mark.parametrize(("tokens", "dropped"), [((0, 1, 1), set()), ((1, 0, 1), {0})])
def test_of_two_contributions_of_a_worker_the_last_one_is_answered(tokens, dropped):
    """It died or pulled meanwhile; one of the two weighs nothing."""
    rule = oxs.rules.local_sgd()._replace(weigh=lambda at: at.tokens)
    held: Any = party(rule, quorum(2), 1, 2, delay=1)[0]._held[0]
    sent = {path: np.ones((8, 2), np.float32) for path in held.center}
    for worker, of in zip((0, 0, 1), tokens, strict=True):
        push = oxs.runtime.Push(worker, 1, {"contribution": sent}, tokens=float(of))
        held.absorb(worker, push, {})
    assert held.global_step == 1 and held.dropped == dropped


def test_elastic_workers_meet_the_center_as_it_was():
    rule = oxs.rules.elastic(moving_rate=0.1, rho=0.0)
    wanted, _ = lockstep(rule, 4, delay=1)
    _, workers = party(rule, quorum(WORKERS), 4, delay=1)
    for t in range(STEPS):
        stepped(*workers)
        for w, worker in enumerate(workers):
            close(worker.params, jax.tree.map(lambda x, w=w, t=t: x[w, t], wanted))


def counted(worker, steps=1):
    """Steps that move all by 1."""
    for _ in range(steps):
        worker.step(jax.tree.map(lambda x: -np.ones_like(x), PARAMS))


COUNT = oxs.rules.local_sgd()._replace(mean_over=None)


@pytest.mark.parametrize("delay", (0, 1, 2))
def test_what_is_made_while_a_meeting_waits_is_in_the_center(delay):
    """All 40 steps of the first worker; with `delay=0` it makes no step meanwhile."""
    server, (first, second) = party(
        COUNT, quorum(2), 4, 2, delay=delay, inner=optax.sgd(1.0)
    )

    def program():
        counted(first, 40)
        first.flush()

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    held: Any = server._held[0]
    while not held.came or first.local_step < (40 if delay else 4):
        thread.join(0.01)
    assert thread.is_alive() and first.local_step == (40 if delay else 4)
    counted(second, 1 + delay)  # It is asked, and takes its answer in time.
    server.leave(1)
    thread.join(60)
    assert not thread.is_alive() and not first.unpushed
    close(server.center(), jax.tree.map(lambda x: x + 40 + 1, PARAMS))


def test_one_that_leaves_on_notice_does_not_wait_and_says_what_it_has_not_pushed():
    server, (first, _) = party(COUNT, quorum(2), 4, 2, delay=1, inner=optax.sgd(1.0))
    counted(first, 39)
    first.preempted = True
    with pytest.raises(Preempted):
        counted(first)
    assert first.unpushed == 36
    server.leave(0)
    server.leave(1)
    first.flush()
    assert first.unpushed == 0
    close(server.center(), jax.tree.map(lambda x: x + 40, PARAMS))


def test_half_precision_keeps_what_it_moved_since():
    rule, params = oxs.rules.local_sgd(), {"w": jnp.full(3, 3.0, jnp.bfloat16)}
    settings: dict[str, Any] = {"num_workers": 2, "communication_period": 2}
    settings |= {"meet": quorum(2), "delay": 1}
    server = Server(params, rule, **settings)
    first, second = (
        Worker(server, params, optax.sgd(0.5), rule, index=index, **settings)
        for index in range(2)
    )
    down = {"w": -jnp.ones(3, jnp.bfloat16)}
    for worker in (first, first, first, first, second, first):
        worker.step(down)
    # The center is at 3.75; since it contributed it has made three steps.
    assert first.params["w"].tolist() == [5.25] * 3
    assert first.params["w"].dtype == jnp.bfloat16


def test_nobody_waits_for_those_that_have_left():
    server, workers = party(DILOCO, quorum(3), 2, 3, delay=1)
    for _ in range(2):
        stepped(*workers[:2])
    assert server.global_step == 0
    server.leave(2)
    assert server.global_step == 1
    for _ in range(4):
        stepped(*workers[:2])
    assert server.global_step == 3


@pytest.mark.parametrize("merge", (None, oxs.exchange.median()), ids=("mean", "median"))
def test_contributions_that_wait_are_in_a_checkpoint(merge, tmp_path):
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "delay": 1}
    meet = quorum(3, merge=merge)
    server, workers = party(DILOCO, meet, 2, 3, **options)
    other, alike = party(DILOCO, meet, 2, 3, delay=1)
    for _ in range(2):
        stepped(*workers[:2])
        stepped(*alike[:2])
    server.checkpoint()
    settings: dict[str, Any] = {
        "num_workers": 3,
        "communication_period": 2,
        "meet": meet,
    }
    back = Server(PARAMS, DILOCO, delay=1, checkpoint_dir=tmp_path, **settings)
    third = Worker(back, PARAMS, INNER, DILOCO, index=2, delay=1, **settings)
    stepped(third)
    stepped(alike[2])
    assert back.global_step == other.global_step == 1
    same(back.center(), other.center())


def test_what_waits_for_another_merge_is_dropped_and_told(tmp_path):
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "delay": 1}
    server, workers = party(DILOCO, quorum(3), 1, 3, **settings)
    stepped(workers[0])
    server.checkpoint()
    median = quorum(3, merge=oxs.exchange.median())
    back, _ = party(DILOCO, median, 1, 3, **settings)
    reply = back.wait(0, timeout=0.0)
    assert not reply.waiting and not reply.used


def test_what_was_dropped_is_still_dropped_for_a_server_that_comes_back(tmp_path):
    """Its answer went with the server: sent again, the push is told as it was."""
    settings: dict[str, Any] = {
        "num_workers": 3,
        "communication_period": 1,
        "meet": quorum(2),
        "delay": 1,
        "checkpoint_dir": tmp_path,
    }
    server = Server(PARAMS, DILOCO, **settings)
    zeros = {path: np.zeros_like(x) for path, x in server._held[0].current().items()}
    sent = [oxs.runtime.Push(w, 1, {"contribution": zeros}, met=0) for w in range(3)]
    used = [server.push(push).used for push in sent]
    server.checkpoint()
    back = Server(PARAMS, DILOCO, **settings)
    assert [back.push(push).used for push in sent] == used == [True, True, False]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_what_a_checkpoint_has_and_what_comes_to_nothing_then_is_told(late, tmp_path):
    """Its worker was told that it counts, and has pushed again since."""
    settings: dict[str, Any] = {
        "num_workers": 2,
        "communication_period": 1,
        "meet": quorum(2),
        "delay": 1,
        "checkpoint_dir": tmp_path,
    }
    rule = oxs.rules.diloco(optax.sgd(4.0))
    server = Server(PARAMS, rule, **settings)
    ones = {path: np.ones_like(x) for path, x in server._held[0].current().items()}
    huge = {path: np.full_like(x, 3e38) for path, x in ones.items()}

    def push(worker, round_, met, arrays=ones):
        return oxs.runtime.Push(worker, round_, {"contribution": arrays}, met=met)

    server.push(push(0, 1, 0))
    server.checkpoint()
    assert server.push(push(1, 1, 0)).used and server.wait(0).used
    back = Server(PARAMS, rule, **settings)
    again = push(0, 2, met=1)  # late: of a meeting that this server knows nothing of
    if late:
        assert back.push(again).waiting
    back.push(push(1, 1, 0, huge))
    reply = back.wait(0) if late else back.push(again)
    assert reply.lost == 1
    # Once: its next one tells of nothing.
    assert back.push(push(0, 3, met=1)).lost == 0


@pytest.mark.parametrize("dropped", range(2))
def test_a_round_of_which_one_server_drops_its_part_says_so(dropped):
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 1}
    servers = [
        Server(PARAMS, DILOCO, number=n, num_servers=2, **settings) for n in range(2)
    ]

    class Both:
        leaves = servers[0].leaves

        def join(self, worker):
            found = [server.join(worker) for server in servers]
            return found[0]._replace(parts=found[0].parts | found[1].parts)

        def send(self, push):
            incarnation = servers[push.part]._book.entries[0].incarnation
            reply = servers[push.part].push(push._replace(incarnation=incarnation))
            used = push.part != dropped or push.round > 1
            return Pending(lambda: reply._replace(used=used))

    both: Any = Both()
    worker = Worker(both, PARAMS, INNER, DILOCO, index=0, num_servers=2, **settings)
    stepped(worker)
    assert not worker.used
    stepped(worker)
    assert worker.used


def test_what_started_from_a_center_that_is_gone_is_late(tmp_path):
    """Also where the server that went back has made as many meetings again since."""
    settings: dict[str, Any] = {
        "num_workers": 3,
        "communication_period": 1,
        "meet": quorum(2),
        "delay": 1,
        "checkpoint_dir": tmp_path,
    }
    server = Server(PARAMS, DILOCO, **settings)
    zeros = {path: np.zeros_like(x) for path, x in server._held[0].current().items()}
    push = oxs.runtime.Push(0, 1, {"contribution": zeros}, met=0)

    def meet(server, *workers, number=1, met=0):
        pushes = [push._replace(worker=w, round=number, met=met) for w in workers]
        return [server.push(push).used for push in pushes]

    assert meet(server, 0, 1) == [True, True]
    server.checkpoint()
    assert meet(server, 0, 1, number=2, met=1) == [True, True]
    back = Server(PARAMS, DILOCO, **settings)
    # Worker 2 has taken the center of the meeting that is gone; worker 1 as it was.
    assert meet(back, 0, 1, number=2, met=1) == [True, True]
    assert meet(back, 2, met=2) == [False]
    assert meet(back, 2, number=2, met=2) == [True]


def test_a_meeting_that_would_overflow_is_dropped_whole_and_told():
    rule = oxs.rules.diloco(optax.sgd(20.0))
    server, workers = party(rule, quorum(2), 1, 2, delay=1)
    for worker in workers:
        worker.step(jax.tree.map(lambda x: np.full_like(x, 3e38), PARAMS))
    same(server.center(), PARAMS)
    for worker in workers:
        worker.flush()
        assert not worker.used
    assert server.global_step == 0


def test_a_late_code_owes_what_it_owed():
    """What error feedback owes changes with a push that is absorbed, and only then."""
    code = oxs.exchange.error_feedback(oxs.exchange.quantized(4, block=16))
    _, workers = party(DILOCO, quorum(2), 2, 3, delay=1, exchange=code)
    for _ in range(5):
        stepped(*workers[:2])
    slow: Any = workers[2]
    before = list(slow._own.codes)
    stepped(slow)
    stepped(slow)
    assert not slow.used
    same(slow._own.codes, before)


def test_what_is_no_meeting_is_refused():
    with pytest.raises(TypeError, match=r"meet must be oxs\.runtime\.one\(\)"):
        party(DILOCO, 3)
    agreement: Any = oxs.runtime.SyncReplicas(2)
    with pytest.raises(ValueError, match="meet= is for workers that meet a center"):
        party(agreement, quorum(2), workers=2)
