"""The holder of the center, without processes: numbers, refusals, retries, restarts."""

import copy
import gc
import random
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import (
    Push,
    PushRefused,
    Server,
    SyncReplicas,
    Worker,
    checkpoints,
    protocol,
)
from optx_sync.runtime.agreements.arrays import arrays_of
from optx_sync.runtime.agreements.own import traffic
from optx_sync.runtime.agreements.sync_replicas import Updates
from optx_sync.runtime.checkpoints import Checkpoints, Damaged
from optx_sync.runtime.parts import lay_out
from optx_sync.runtime.protocol import Client
from optx_sync.simulate import asynchronous
from tests.recorded import arrays_of as recorded_arrays
from tests.recorded import recorded
from tests.refusals import all_refused

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.array(0.5)}
INNER = optax.sgd(0.1, momentum=0.9)
# Reads all there is to read: own parameters, what was taken, what was summed up, and
# the center before and after.
GREEDY = oxs.CenterRule(
    contribute=lambda own, center, at: (
        0.2 * (own.params - center)
        + 0.1 * (own.params - own.taken)
        - 0.01 * own.accumulated / at.steps.astype(own.accumulated.dtype)
    ),
    take=lambda x, before, after, at: x - 0.3 * (x - before) + 0.1 * (after - before),
    mean_over="workers",
    accumulate="gradients",
)
RULES = {
    "elastic": oxs.rules.elastic(learning_rate=0.1),
    "elastic without penalty": oxs.rules.elastic(moving_rate=0.3, rho=0.0),
    "agn": oxs.rules.agn(oxs.optimizers.adam(0.1)),
    "agn of updates": oxs.rules.agn(None, accumulate="updates"),
    "local_sgd": oxs.rules.local_sgd(),
    "diloco": oxs.rules.diloco(),
    "all of it": GREEDY,
    "what was taken": oxs.CenterRule(
        contribute=lambda own, center, at: 0.5 * (own.params - own.taken),
        take=lambda x, before, after, at: x - 0.25 * (x - after),
        reads=("params", "taken", "after"),
    ),
    "a penalty that does": oxs.CenterRule(
        contribute=lambda own, center, at: 0.5 * (own.params - center),
        take=lambda x, before, after, at: x - 0.25 * (x - after),
        penalty=lambda own, at: 0.3 * (own.params - own.taken),
        reads=("params", "center", "after"),
    ),
}


def gradient(worker, params, event):
    """Another direction for each worker and event, and a pull towards zero."""
    angle = 1.3 * jnp.float32(worker) + 0.7 * jnp.float32(event)
    return jax.tree.map(lambda p: jnp.sin(angle) + 0.5 * p, params)


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6),
        actual,
        expected,
    )


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", RULES)
def test_server_and_workers_in_order_are_the_replay(name):
    rule, workers, period = RULES[name], 2, 3
    schedule = np.array(
        [0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0], np.int32
    )
    expected = asynchronous(
        INNER, rule, PARAMS, gradient, schedule,
        num_workers=workers, communication_period=period,
    )  # fmt: skip
    settings: dict[str, Any] = {"num_workers": workers, "communication_period": period}
    server = Server(PARAMS, rule, **settings)
    party = [
        Worker(server, PARAMS, INNER, rule, index=i, **settings) for i in range(workers)
    ]
    for event, w in enumerate(schedule):
        worker = party[w]
        worker.step(gradient(w, worker.params, event))
        close(worker.params, jax.tree.map(lambda x, t=event: x[t], expected.params))
        close(server.center(), jax.tree.map(lambda x, t=event: x[t], expected.center))
        assert worker.local_step == expected.local_step[event]
        assert server.global_step == expected.global_step[event]


def test_only_what_the_formulas_read_travels():
    found = {name: traffic(rule) for name, rule in RULES.items()}
    assert found == {
        "elastic": (("params",), ("before",)),
        "elastic without penalty": (("params",), ("before",)),
        "agn": (("contribution",), ("after",)),
        "agn of updates": (("contribution",), ("after",)),
        "local_sgd": (("contribution",), ("after",)),
        "diloco": (("contribution",), ("after",)),
        "all of it": (("params", "taken", "accumulated"), ("before", "after")),
        "what was taken": (("contribution",), ("before", "after")),
        "a penalty that does": (("params",), ("before", "after")),
    }


def center_server(**settings):
    return Server(
        PARAMS, oxs.rules.local_sgd(), num_workers=2, communication_period=1, **settings
    )


def moves(amount=1.0, changed: Any = None):
    """A push of a hard-pull rule; `changed` replaces some of the arrays."""
    arrays = {
        "['b']": np.float32(amount),
        "['w']": np.full((2, 3), amount, np.float32),
    }
    return {"contribution": {**arrays, **(changed or {})}}


def in_w(array):
    return {"arrays": moves(changed={"['w']": array})}


NOT_ALL = {"contribution": {"['b']": np.float32(0)}}
BAD: list[tuple[dict[str, Any], str]] = [
    (in_w(np.array([[0, 0, 0], [0, 0, np.nan]], np.float32)), "['w'] holds a NaN"),
    ({"arrays": moves(np.inf)}, "holds a NaN or infinity"),
    (in_w(np.zeros((3, 2), np.float32)), "['w'] must have shape (2, 3); got (3, 2)"),
    (in_w(np.zeros((2, 3))), "['w'] must have dtype float32; got float64"),
    (in_w([[0.0] * 3] * 2), "must be an array"),
    ({"arrays": moves(changed={"v": np.zeros(2)})}, "unknown ['v'], missing []"),
    ({"arrays": NOT_ALL}, "missing [\"['w']\"]"),
    ({"arrays": {"params": {}}}, "holds ['contribution']; got ['params']"),
    ({"arrays": 3}, "holds ['contribution']"),
    ({"worker": 2}, "no worker 2. Workers have the numbers 0 to 1"),
    ({"worker": -1}, "no worker -1"),
    ({"worker": "0"}, "no worker '0'"),
    ({"round": 1}, "round 1 of worker 0 is over: round 2"),
    ({"round": 0}, "round 0 of worker 0 is over"),
    ({"round": 4}, "too early: the next one is 3"),
    ({"round": 3.0}, "round must be an integer; got 3.0"),
    # Each of these had been applied before it was looked at.
    ({"local_step": "abc"}, "local_step must be an integer; got 'abc'"),
    ({"steps": 0}, "steps must be 1 or more; got 0"),
    ({"shown": None}, "shown must be a dict of numbers; got None"),
    ({"shown": {"loss": "x"}}, "loss must be a number; got 'x'"),
    ({"seconds": None}, "seconds must be a number; got None"),
    ({"tokens": -1.0}, "tokens must be 0 or more, and finite; got -1.0"),
    ({"tokens": float("nan")}, "tokens must be 0 or more, and finite"),
    ({"incarnation": None}, "incarnation must be an integer"),
    ({"lost": True}, "lost must be an integer; got True"),
    ({"part": 1}, "part 1 does not live here, but (0,)"),
]


def test_bad_push_is_refused_and_changes_nothing():
    server, good = center_server(), Push(0, 3, moves())
    for number in (1, 2):
        server.push(good._replace(round=number))
    before, known = bits(server.center()), 0
    for changed, message in BAD:
        with pytest.raises(PushRefused) as error:
            server.push(good._replace(**changed))
        assert message in str(error.value)
        assert bits(server.center()) == before and server.global_step == 2, message
        known += changed.get("worker", 0) == 0
        assert server.refused == [known, 0], message
        last = server.events()[1][-1]
        assert last.kind == "refused" and message in last.message
    server.push(good)  # The same worker goes on.
    assert server.global_step == 3


@pytest.mark.parametrize("name", ["local_sgd", "elastic", "diloco"])
def test_retry_is_answered_and_applied_once(name):
    rule = RULES[name]
    server = Server(PARAMS, rule, num_workers=2, communication_period=1)
    sends = "params" if name == "elastic" else "contribution"
    push = Push(0, 1, {sends: moves()["contribution"]})
    first = server.push(push)
    answered = bits(first.arrays)
    server.push(push._replace(worker=1))
    assert bits(first.arrays) == answered  # It is a copy.
    before = bits(server.center())
    again = server.push(push)
    assert bits(server.center()) == before
    assert server.global_step == 2
    assert [event.kind for event in server.events()[1]][-1] == "retry"
    if name == "elastic":  # It takes from the center before its own push.
        assert bits(again.arrays) == bits(first.arrays)
    else:  # It takes the center, as it is now.
        assert bits(again.arrays["after"]) == bits(
            {path: server.center()[path[2]] for path in again.arrays["after"]}
        )


@pytest.mark.parametrize("rule", ["elastic", "diloco"])
def test_views_hold_until_the_next_push(rule):
    """With `copy_replies=False` the numbers are the same when sent off at once."""
    servers = [
        Server(PARAMS, RULES[rule], num_workers=2, copy_replies=copy)
        for copy in (True, False)
    ]
    sends = "params" if rule == "elastic" else "contribution"
    for number in range(1, 5):
        for worker in (0, 1):
            arrays = {sends: moves(0.3 * number + worker)["contribution"]}
            replies = [
                bits(server.push(Push(worker, number, arrays)).arrays)
                for server in servers
            ]
            assert replies[0] == replies[1]
    assert bits(servers[0].center()) == bits(servers[1].center())


def test_pushes_from_many_threads_all_count():
    params = {"w": jnp.zeros(3000)}
    rule = oxs.rules.agn(None, accumulate="updates")
    server = Server(params, rule, num_workers=4)
    one = {"contribution": {"['w']": np.ones(3000, np.float32)}}
    torn = []

    def work(worker):
        for number in range(1, 101):
            seen = server.push(Push(worker, number, one)).arrays["after"]["['w']"]
            torn.append(seen.min() != seen.max())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.all(server.center()["w"] == 400)
    assert len(torn) == 400 and not any(torn)


@pytest.mark.parametrize("name", ["local_sgd", "elastic", "diloco"])
def test_restarted_server_goes_on_from_the_last_checkpoint(name, tmp_path):
    rule = RULES[name]

    def start():
        return Server(
            PARAMS, rule, num_workers=2, checkpoint_dir=tmp_path, checkpoint_every=2
        )

    sends = "params" if name == "elastic" else "contribution"
    pushes = [
        Push(w, r, {sends: moves(0.1 * r + w)["contribution"]}, local_step=10 * r)
        for r in (1, 2, 3, 4)
        for w in (0, 1)
    ]
    server, expected = start(), start()
    for push in pushes[:5]:
        server.push(push)  # Saved after the second and the fourth; the fifth is lost.
    for push in pushes[:4]:
        expected.push(push)
    again = start()
    assert [event.kind for event in again.events()[1]] == ["restored"]
    assert again.global_step == 4
    # Bit-equal, and so it is after the next pushes: the outer state came back too.
    assert bits(again.center()) == bits(expected.center())
    # A push of before the checkpoint is not applied again; the lost one may come again,
    # and none comes before it.
    again.push(pushes[3])
    assert again.global_step == 4
    with pytest.raises(PushRefused, match="too early: the next one is 3"):
        again.push(pushes[6])
    for push in pushes[4:]:
        again.push(push)
        expected.push(push)
    assert bits(again.center()) == bits(expected.center())
    assert again.join(0).round == 4 and again.join(0).local_step == 40
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["4", "5", "lock"]


def test_checkpoint_is_what_orbax_reads(tmp_path):
    import orbax.checkpoint

    server = center_server(checkpoint_dir=tmp_path)
    server.push(Push(0, 1, moves()))
    path = server.checkpoint()
    assert path is not None
    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    restored = orbax.checkpoint.Checkpointer(handler).restore(path)
    part = restored["part_0"]
    np.testing.assert_array_equal(part["center"]["['w']"], server.center()["w"])
    # An unfinished one, as a crash leaves it, is not looked at.
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    assert center_server(checkpoint_dir=tmp_path).global_step == 1


def test_checkpoint_of_something_else_is_refused(tmp_path):
    def start(params=PARAMS, outer: Any = None):
        rule = oxs.rules.diloco(outer or oxs.optimizers.momentum(0.1, 0.9))
        return Server(params, rule, num_workers=1, checkpoint_dir=tmp_path / "center")

    def waits(workers):
        return sync_server(1, workers, checkpoint_dir=tmp_path / "waits")

    # The rule is a NamedTuple without state: all calls may have the same one.
    def part(name, rule=oxs.rules.local_sgd(), num_servers=2, **settings):  # noqa: B008
        settings |= {"checkpoint_dir": tmp_path / name, "num_servers": num_servers}
        return Server(PARAMS, rule, num_workers=1, **settings)

    def parts(params):
        rule = oxs.rules.diloco(oxs.optimizers.momentum(0.1, 0.9))
        folder = tmp_path / "parts"
        return Server(params, rule, num_workers=1, checkpoint_dir=folder, fragments=2)

    start()
    part("part")
    parts(PARAMS)
    waits(2).checkpoint()
    reshaped = {**PARAMS, "w": jnp.zeros((3, 2))}
    renamed = {"v": PARAMS["w"], "b": PARAMS["b"]}
    lacks = r"it has \[\"\['w'\]\"\].* lacks \[\"\['v'\]\"\]"
    for call, message in (
        (lambda: waits(3), r"of 2 workers, who wait .* num_workers=3"),
        (lambda: start(reshaped), r"\['w'\] with shape \(2, 3\)"),
        (lambda: start(renamed), rf"(?s){lacks}"),
        (
            lambda: start(outer=oxs.optimizers.adagrad(0.1)),
            r"made by a state of .*Momentum.* server has .*Adagrad",
        ),
        (
            lambda: part("center", rule=oxs.rules.agn(optax.sgd(1.0)), num_servers=1),
            r"made by \['[\w.]*\.diloco_rule'.* this server has \['[\w.]*\.agn_rule'",
        ),
        (lambda: part("part", fragments=2), r"part of the .*: it lacks .*before\."),
        # A variable that another part than the first has.
        (lambda: parts(renamed), rf"{lacks}"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "PyTreeDef" not in str(caught.value)


def test_a_run_goes_on_with_another_number_of_workers(tmp_path):
    """Those who stay go on where they were; a new one begins; nothing is twice."""
    server = center_server(checkpoint_dir=tmp_path)
    for worker, rounds in ((0, 2), (1, 1)):
        joined = server.join(worker)
        for number in range(1, rounds + 1):
            mine = joined.incarnation
            server.push(Push(worker, number, moves(), incarnation=mine, local_step=9))
    center = bits(server.center())
    server.checkpoint()
    rule = oxs.rules.local_sgd()
    more = Server(PARAMS, rule, num_workers=3, checkpoint_dir=tmp_path)
    assert bits(more.center()) == center and more.global_step == 3
    found = [more.join(worker) for worker in range(3)]
    assert [(j.round, j.local_step, j.restarts) for j in found] == [
        (2, 9, 1), (1, 9, 1), (0, 0, 0),
    ]  # fmt: skip
    more.push(Push(2, 1, moves(), incarnation=found[2].incarnation))
    more.checkpoint()
    less = Server(PARAMS, rule, num_workers=1, checkpoint_dir=tmp_path)
    assert less.global_step == 4 and less.join(0).round == 2
    with pytest.raises(ValueError, match="no worker 1"):
        less.join(1)


def test_the_requests_of_each_worker_are_counted():
    server = center_server()
    server.join(1)
    assert server.news("", 0)[2] == [0, 1]


def test_parts_are_of_about_equal_size_and_none_is_empty():
    params = {
        str(i): np.full(size, i, np.float32) for i, size in enumerate([8, 0, 5, 4])
    }
    layout = lay_out(params, 1, 3)
    parts = [layout.pick(params, part) for part in range(3)]
    sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in parts]
    assert sizes == [8, 5, 4] and layout.turns == ((0, 1, 2),)
    joined = layout.join({k: arrays_of(part) for k, part in enumerate(parts)}, params)
    assert bits(joined) == bits(params)
    empty = {"a": np.zeros(4), "b": np.zeros(0), "c": np.zeros(0)}
    layout = lay_out(empty, 1, 3)
    assert all(jax.tree.leaves(layout.pick(empty, part)) for part in range(3))
    with pytest.raises(ValueError, match="cannot be split among"):
        lay_out(params, 1, 5)


# Synchronous replicas with backup workers.


def sync_server(agreement, workers, inner: Any = None, **settings):
    if isinstance(agreement, int):
        agreement = SyncReplicas(agreement)
    inner = inner or oxs.optimizers.gradient_descent(1.0)
    return Server(PARAMS, agreement, num_workers=workers, inner=inner, **settings)


def grads(amount):
    return {"grads": moves(amount)["contribution"]}


@pytest.mark.parametrize(
    "name", ["sync_n2_r4_sgd_multi_batch", "sync_n1_r3_sgd_multi_batch_mintokens"]
)
def test_several_batches_per_update_are_the_original(name):
    case = recorded("sync_replicas")[name]
    data, _ = recorded_arrays(case)
    given = case["hyperparameters"]
    names = [key[3:] for key in data if key.startswith("p0_")]
    agreement = SyncReplicas(
        given["replicas_to_aggregate"],
        given["total_num_replicas"],
        num_tokens=given["hook_num_tokens"],
    )
    workers = given["total_num_replicas"]
    server = Server(
        {key: data[f"p0_{key}"] for key in names},
        agreement,
        num_workers=workers,
        inner=optax.sgd(given["inner"]["learning_rate"]),
    )
    rounds = [0] * workers
    for t, w in enumerate(data["worker"]):
        rounds[w] += 1
        arrays = {f"['{key}']": data[f"g_{key}"][t] for key in names}
        reply = server.push(Push(int(w), rounds[w], {"grads": arrays}))
        assert reply.used == data["accepted"][t]
        assert reply.waiting == data["blocked"][t][w]
        assert server.global_step == data["global_step"][t]
        for key in names:
            np.testing.assert_allclose(
                server.center()[key], data[f"p_{key}"][t], rtol=1e-6, atol=1e-6
            )


def test_first_gradients_win_and_the_late_one_leaves_no_trace():
    server = sync_server(2, 3)
    first = server.push(Push(0, 1, grads(1.0)))
    assert first.used and first.waiting
    second = server.push(Push(1, 1, grads(3.0)))
    assert second.used and not second.waiting and second.global_step == 1
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 2)
    late = server.push(Push(2, 1, grads(100.0)))
    assert not late.used and late.staleness == 1 and not late.waiting
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 2)
    # The first one waited for the update it is part of; now it may go on.
    assert not server.wait(0, timeout=0.0).waiting
    kinds = [event.kind for event in server.events()[1]]
    assert kinds == ["started", "push", "push", "dropped"]


def test_straggler_costs_nothing_with_a_backup():
    """Where the original's leftover tokens would cost every fourth gradient."""
    server = sync_server(3, 4)
    for number in range(1, 41):
        for worker in (0, 1, 2):
            assert server.push(Push(worker, number, grads(0.0))).used
        if number % 10 == 0:
            assert not server.push(Push(3, number // 10, grads(0.0))).used
    assert server.global_step == 40


def test_waiting_worker_is_woken_by_the_update():
    server = sync_server(2, 2)
    assert server.push(Push(0, 1, grads(1.0))).waiting
    assert server.wait(0, timeout=0.01).waiting
    found = []
    thread = threading.Thread(target=lambda: found.append(server.wait(0, timeout=60)))
    thread.start()
    server.push(Push(1, 1, grads(3.0)))
    thread.join()
    assert not found[0].waiting and found[0].global_step == 1
    np.testing.assert_array_equal(found[0].arrays["params"]["['w']"], PARAMS["w"] - 2)


def test_nobody_waits_for_workers_that_have_left():
    server = sync_server(3, 3)
    joined = [server.join(worker) for worker in range(3)]

    def push_of(worker, number, amount):
        incarnation = joined[worker].incarnation
        return Push(worker, number, grads(amount), incarnation=incarnation)

    assert server.push(push_of(0, 1, 1.0)).waiting
    found = []
    thread = threading.Thread(target=lambda: found.append(server.wait(0, timeout=60)))
    thread.start()
    server.leave(1)
    assert server.wait(0, timeout=0.01).waiting  # Worker 2 may still push.
    server.leave(2)
    server.leave(2)
    thread.join()
    assert not found[0].waiting and found[0].global_step == 0
    # Alone it may go on; what it has accumulated counts.
    server.push(push_of(0, 2, 1.0))
    assert not server.wait(0, timeout=0.0).waiting
    assert server.push(push_of(0, 3, 4.0)).global_step == 1
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 2)
    assert [event.kind for event in server.events()[1]].count("left") == 2
    # One that comes back is waited for again.
    server.join(2)
    assert server.push(push_of(0, 4, 1.0)).waiting
    with pytest.raises(ValueError, match="no worker 3"):
        server.leave(3)


def test_one_that_waited_and_has_left_does_not_wait():
    """Two of three have pushed, one of them has left: the third may still push."""
    server = sync_server(3, 3)
    for worker in (0, 1):
        assert server.push(Push(worker, 1, grads(1.0))).waiting
    server.leave(0)
    assert server.wait(1, timeout=0.01).waiting
    assert server.push(Push(2, 1, grads(1.0))).global_step == 1
    assert not server.wait(1, timeout=0.0).waiting


def test_replaced_worker_may_push_at_once():
    server = sync_server(3, 3)
    assert server.push(Push(0, 1, grads(1.0))).waiting
    joined = server.join(0)
    assert joined.round == 1
    again = Push(0, 2, grads(1.0), incarnation=joined.incarnation)
    assert server.push(again).used
    assert server.push(Push(1, 1, grads(1.0))).global_step == 1


def test_gradients_are_checked_too():
    """Rows that the table has not were dropped, and the worker told that they count."""
    server, values = sync_server(1, 2), np.ones((2, 3), np.float32)

    def rows(*indices):
        return {"grads": {"['w']": (np.array(indices), values), "['b']": None}}

    bad = [
        (grads(np.nan), "NaN"),
        (moves(), r"holds \['grads'\]"),
        (rows(0.0, 1.0), "integer indices"),
        *((rows(0, row), f"has row {row}, and the table") for row in (-1, 2, 2**20)),
    ]
    for arrays, message in bad:
        with pytest.raises(PushRefused, match=message):
            server.push(Push(0, 1, arrays))
    assert bits(server.center()) == bits(PARAMS) and server.refused == [len(bad), 0]


def test_rows_and_missing_gradients_are_averaged_row_by_row():
    server = sync_server(2, 2)
    values = np.ones((2, 3), np.float32)
    one = {"['w']": (np.array([1, 1]), values), "['b']": None}
    two = {"['w']": (np.array([0, 2**31 - 1]), values), "['b']": None}  # one is none
    server.push(Push(0, 1, {"grads": one}))
    server.push(Push(1, 1, {"grads": two}))
    expected = PARAMS["w"] - jnp.array([[1.0] * 3, [2.0] * 3])
    np.testing.assert_array_equal(server.center()["w"], expected)
    np.testing.assert_array_equal(server.center()["b"], PARAMS["b"])


def test_moving_average_follows_the_updates():
    server = sync_server(SyncReplicas(1, variable_averages=0.75), 1)
    server.push(Push(0, 1, grads(4.0)))
    np.testing.assert_array_equal(server.averages()["w"], PARAMS["w"] - 1)
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 4)
    assert center_server().averages() is None


def test_restarted_sync_server_keeps_inner_state_and_averages(tmp_path):
    agreement = SyncReplicas(1, variable_averages=0.5)

    def start():
        inner = oxs.optimizers.adam(0.1)
        saves: Any = {"checkpoint_dir": tmp_path, "checkpoint_every": 3}
        return sync_server(agreement, 1, inner, **saves)

    server = start()
    for number in range(1, 4):
        server.push(Push(0, number, grads(float(number))))
    again = start()
    assert again.global_step == 3
    for one in (server, again):
        one.push(Push(0, 4, grads(-1.0)))
    assert bits(again.center()) == bits(server.center())
    assert bits(again.averages()) == bits(server.averages())


def end_of(required, workers, seed):
    """A run of replicas in random order, their server restored three times: its end.

    Only who waits for whom: no arrays move. Returns the updates, and who waits though
    nobody is left to push.
    """
    draw = random.Random(seed)

    def start():
        agreement = SyncReplicas(required)
        updates = Updates(PARAMS, agreement, optax.sgd(1.0), workers)
        updates._add = lambda accumulator, grads: accumulator
        updates._update = lambda held, *now: (held, True)
        return updates

    updates = start()
    cut = copy.deepcopy(updates.save())
    at_work, restores = set(range(workers)), 3
    for _ in range(120):
        at_work |= {w for w in range(workers) if not updates.is_waiting(w)}
        if not at_work:
            return updates.global_step, updates.waiting
        what = draw.random()
        if what < 0.1:
            cut = copy.deepcopy(updates.save())
        elif what < 0.15 and restores:
            restores -= 1
            updates = start()
            updates.load(*copy.deepcopy(cut))
        else:
            worker = draw.choice(sorted(at_work))
            at_work.remove(worker)
            updates.absorb(worker, Push(worker, 1, grads(0.0)), {})
    return updates.global_step, []


def test_nobody_waits_for_ever_after_a_restore():
    # Who waited at the checkpoint has gone on since, and pushes: it took two tokens.
    for required, workers in ((2, 2), (4, 4), (6, 4), (3, 4), (1, 2)):
        ends = [end_of(required, workers, seed) for seed in range(20)]
        assert [waiting for _, waiting in ends] == [[]] * 20, (required, workers)
        assert min(updates for updates, _ in ends) >= 3


LOCAL = oxs.rules.local_sgd()
OF_THREE = LOCAL._replace(num_workers=3)
BIG: Any = {str(number): np.ones((9, 9)) for number in range(9)}
test_settings_that_make_no_sense_are_refused = all_refused(globals())(r"""
SyncReplicas(0)  # ValueError: replicas_to_aggregate must be 1 or more
SyncReplicas(1, num_tokens=-2)  # ValueError: num_tokens must be -1 or more
SyncReplicas(1, variable_averages=2.0)  # ValueError: decay in
sync_server(SyncReplicas(2, 4), 3)  # ValueError: there are 3 workers
sync_server(SyncReplicas(4, num_tokens=1), 2)  # ValueError: and 2 are needed
sync_server(1, 2, inner=BIG)  # TypeError: inner must be an Optax .* one of type dict
Server(PARAMS, LOCAL, num_workers=0)  # ValueError: num_workers must be 1
center_server(checkpoint_every=0)  # ValueError: checkpoint_every must be
Server(PARAMS, OF_THREE, num_workers=2)  # ValueError: num_workers=3, but there are 2
Server(PARAMS, BIG, num_workers=2)  # TypeError: a center rule.* of type dict\.$
Server({"w": 1.5}, LOCAL, num_workers=1)  # TypeError: for example jnp.asarray\(1.5\)
""")


# What a hostile cluster found.


def test_only_the_newest_incarnation_of_a_worker_may_push():
    server = center_server()
    first, other = server.join(0), server.join(1)
    second = server.join(0)
    assert second.restarts == 1
    for incarnation in (0, first.incarnation, other.incarnation):
        with pytest.raises(PushRefused, match="is not the newest one"):
            server.push(Push(0, 1, moves(), incarnation=incarnation))
    server.push(Push(0, 1, moves(), incarnation=second.incarnation))
    assert server.global_step == 1 and server.refused == [3, 0]


@pytest.mark.parametrize("name", ["local_sgd", "elastic", "diloco"])
def test_push_that_overflows_the_center_is_refused(name):
    huge = {"w": np.full(3, 3e38, np.float32)}
    rule = oxs.CenterRule(  # The center has a part in it.
        contribute=lambda own, center, at: 4.0 * (own.params - center),
        take=lambda x, before, after, at: before,
        reads=("params", "center", "before"),
    )
    server = Server(huge, rule if name == "elastic" else RULES[name], num_workers=1)
    sends = "params" if name == "elastic" else "contribution"
    amount = 3e38 if name == "local_sgd" else -3e38
    bad = {sends: {"['w']": np.full(3, amount, np.float32)}}
    for _ in range(2):
        before = bits(server.center())
        with pytest.raises(PushRefused, match="the center would overflow"):
            server.push(Push(0, 1, bad))
        assert bits(server.center()) == before and server.global_step == 0
    harmless = 3e38 if name == "elastic" else 1.0
    small = {sends: {"['w']": np.full(3, harmless, np.float32)}}
    server.push(Push(0, 1, small))
    assert server.global_step == 1


def test_update_that_overflows_is_refused_and_the_gradients_before_it_stay():
    inner = optax.sgd(4.0)
    server = sync_server(2, 2, inner)
    server.push(Push(0, 1, grads(1.0)))
    with pytest.raises(PushRefused, match="overflow"):
        server.push(Push(1, 1, grads(3.4e38)))
    server.push(Push(1, 1, grads(3.0)))
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 8)


def damage(folder, number):
    for path in (folder / str(number)).rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    server = center_server(checkpoint_dir=tmp_path, checkpoint_every=1)
    for number in (1, 2, 3):
        server.push(Push(0, number, moves()))
    damage(tmp_path, max(Checkpoints(tmp_path).numbers()))
    again = center_server(checkpoint_dir=tmp_path)
    assert [event.kind for event in again.events()[1]] == ["damaged", "restored"]
    assert again.global_step == 2


def test_two_workers_who_ask_after_a_damaged_checkpoint_go_on(tmp_path):
    """The second one was told that there is no checkpoint, and the run ended."""
    server = center_server(checkpoint_dir=tmp_path, checkpoint_every=2)
    clients = [converse(server, Client(worker), "enter") for worker in (0, 1)]
    for number in (1, 2):
        clients = [converse(server, client, "send", number) for client in clients]
    damage(tmp_path, max(Checkpoints(tmp_path).numbers()))
    again = center_server(checkpoint_dir=tmp_path, checkpoint_every=2)
    clients = [converse(again, client, "send", 3) for client in clients]
    assert [client.phase for client in clients] == ["idle"] * 2
    assert [client.lost for client in clients] == [1, 1]
    # The first round of both was saved: that and the third are there, once.
    np.testing.assert_array_equal(again.center()["w"], PARAMS["w"] + 4)


def test_a_checkpoint_of_another_array_or_note_than_was_saved_is_damaged(tmp_path):
    """One bit of one number, where Orbax reads all as it stands."""
    arrays = {"part_0": {"w": np.arange(5, dtype=np.float32), "b": np.ones(3)}}
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, arrays, {"steps": 2})
    found, notes = checkpoints.load(1)
    np.testing.assert_array_equal(found["part_0"]["w"], arrays["part_0"]["w"])
    assert notes == {"steps": 2}
    tree = checkpoints._checkpointer.restore(path)
    bits = np.asarray(tree["part_0"]["w"]).view(np.uint32).copy()
    bits[3] ^= np.uint32(1)
    tree["part_0"]["w"] = bits.view(np.float32)
    checkpoints._checkpointer.save(path, tree, force=True)
    with pytest.raises(Damaged, match=r"holds another part_0\.w than was saved"):
        checkpoints.load(1)
    tree["part_0"]["w"] = arrays["part_0"]["w"]
    tree["notes"] = np.frombuffer(
        bytes(tree["notes"]).replace(b'"steps": 2', b'"steps": 3'), np.uint8
    )
    checkpoints._checkpointer.save(path, tree, force=True)
    with pytest.raises(Damaged, match="holds other notes than were saved"):
        checkpoints.load(1)


def test_a_checkpoint_that_lacks_a_name_says_what_is_wrong(tmp_path):
    """Orbax raises a KeyError of it, whose text is the bare name."""
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"w": {"a": np.ones(3)}}, {})
    metadata = path / "_METADATA"
    metadata.write_text(metadata.read_text().replace("key_type", "kez_type"))
    with pytest.raises(
        Damaged, match=r"/1 cannot be read: it lacks 'key_type': .* another version"
    ):
        checkpoints.load(1)


def test_a_checkpoint_holds_what_has_no_elements_and_numpys_integers(tmp_path):
    params = {"w": PARAMS["w"], "none": np.zeros((0, 2), np.float32)}

    def start():
        saves: Any = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        return Server(params, oxs.rules.local_sgd(), num_workers=1, **saves)

    moved = {"['w']": np.ones((2, 3), np.float32), "['none']": params["none"]}
    server = start()
    server.push(Push(0, np.int64(1), {"contribution": moved}))  # pyright: ignore
    again = start()
    assert again.global_step == 1
    assert bits(again.center()) == bits(server.center())


def test_nothing_is_begun_afresh_without_a_word(tmp_path):
    server = center_server(checkpoint_dir=tmp_path / "run", checkpoint_every=1)
    server.push(Push(0, 1, moves()))
    for number in Checkpoints(tmp_path / "run").numbers():
        damage(tmp_path / "run", number)
    for _ in range(2):  # What cannot be read stays as it is.
        with pytest.raises(
            ValueError, match=r"No checkpoint in .* can be read: .*2 can"
        ):
            center_server(checkpoint_dir=tmp_path / "run")
    afresh = center_server(checkpoint_dir=tmp_path / "run", resume=False)
    assert afresh.global_step == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.before_1"]
    with pytest.raises(ValueError, match=r"holds \['part_0'\], .* other fragments"):
        center_server(checkpoint_dir=tmp_path / "run", fragments=2)
    other = tmp_path / "other"

    def in_parts(one):
        rows = lambda path, leaf: [one, 1 - one] if leaf.shape else 0  # noqa: E731
        return center_server(checkpoint_dir=other, fragments=rows)

    in_parts(0)
    with pytest.raises(ValueError, match="or the parts are others"):
        in_parts(1)


def test_a_server_that_comes_back_never_begins_from_the_first_parameters(tmp_path):
    server = center_server(checkpoint_dir=tmp_path, checkpoint_every=1)
    server.push(Push(0, 1, moves()))
    shapes: Any = jax.eval_shape(lambda: PARAMS)

    def comes_back():
        rule = oxs.rules.local_sgd()
        return Server(shapes, rule, num_workers=2, checkpoint_dir=tmp_path)

    again = comes_back()
    np.testing.assert_array_equal(again.center()["w"], PARAMS["w"] + 1)
    for number in Checkpoints(tmp_path).numbers():
        Checkpoints(tmp_path).delete(number)
    with pytest.raises(RuntimeError, match="holds no checkpoint any more"):
        comes_back()


def test_two_runs_do_not_save_to_one_folder(tmp_path, monkeypatch):
    """The lock is that of a process, and goes with it."""
    folder = tmp_path / "run"
    monkeypatch.setattr(checkpoints, "LOCK_SECONDS", 0.0)
    program = (
        "import sys, time\nfrom optx_sync.runtime.checkpoints import locked, pathlib\n"
        f"lock = locked(pathlib.Path({str(folder)!r}))\nprint('held', flush=True)\n"
        "time.sleep(100)"
    )
    folder.mkdir()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        held = f"process {other.pid} on .* overwrite"
        for resume in (True, False):
            with pytest.raises(ValueError, match=held):
                center_server(checkpoint_dir=folder, resume=resume)
        other.kill()
    assert center_server(checkpoint_dir=folder).global_step == 0


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(ValueError, match="lock is a symbolic link"):
        center_server(checkpoint_dir=tmp_path)
    assert (tmp_path / "other").read_text() == "mine"


def test_a_server_whose_disk_can_only_be_read_goes_on_and_no_run_begins_there(
    tmp_path, monkeypatch
):
    rule, shapes = oxs.rules.local_sgd(), jax.eval_shape(lambda: PARAMS)
    settings: Any = {"num_workers": 1, "checkpoint_every": 1}
    settings["checkpoint_dir"] = tmp_path
    Server(PARAMS, rule, **settings).push(Push(0, 1, moves()))
    with monkeypatch.context() as patch:

        def locked(folder):
            raise OSError(30, "Read-only file system", str(folder))

        patch.setattr(checkpoints, "locked", locked)
        again = Server(shapes, rule, **settings)
        again.push(Push(0, 2, moves()))
        assert [e.kind for e in again.events()[1]] == ["restored", "push", "unsaved"]
        with pytest.raises(ValueError, match="cannot be written: "):
            again.check_writable()
        with pytest.raises(ValueError, match="cannot be written: "):
            Server(PARAMS, rule, **settings)
        with pytest.raises(ValueError, match="cannot be put aside: "):
            Server(PARAMS, rule, **settings, resume=False)
    again.push(Push(0, 3, moves()))  # The disk can be written again.
    assert Server(PARAMS, rule, **settings).global_step == 3


def test_stale_gradients_are_not_told_as_lost(tmp_path):
    """With `SyncReplicas` one that was dropped has left nothing that could be lost."""

    def start():
        saves: Any = {"checkpoint_dir": tmp_path, "checkpoint_every": 100}
        return sync_server(1, 2, **saves)

    def send(server, client, number):
        return converse(server, client, "send", number, grads(0.0))

    server = start()
    one, two = (converse(server, Client(worker), "enter") for worker in (0, 1))
    for number in (1, 2, 3):
        one = send(server, one, number)
    two = send(server, two, 1)  # Of the first step: it is dropped.
    assert [event.kind for event in server.events()[1]][-1] == "dropped"
    two = send(server, two, 2)
    again = start()
    assert send(again, two, 3).lost == 1 and send(again, one, 4).lost == 3


def test_full_disk_is_noted_and_training_goes_on(tmp_path, monkeypatch):
    server = center_server(checkpoint_dir=tmp_path, checkpoint_every=1)
    with monkeypatch.context() as patch:

        def full(path, _):
            (tmp_path / f"{path.name}.orbax-checkpoint-tmp").mkdir()
            raise OSError(28, "No space left on device")

        to: Any = server._checkpoints
        patch.setattr(to._checkpointer, "save", full)
        for number in (1, 2):
            server.push(Push(0, number, moves()))
    assert [e.kind for e in server.events()[1]][-4:] == ["push", "unsaved"] * 2
    assert not [*tmp_path.glob("*tmp*")]
    assert center_server(checkpoint_dir=tmp_path).global_step == 0
    server.push(Push(0, 3, moves()))
    assert center_server(checkpoint_dir=tmp_path).global_step == 3


def test_checkpoints_elsewhere_are_handed_to_orbax():
    assert str(Checkpoints.path_of("gs://bucket/run")) == "gs://bucket/run"
    assert Checkpoints.path_of("run").is_absolute()


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.prodigy(1.0),
        optax.contrib.mechanize(optax.sgd(0.1)),
    ],
    ids=["prodigy", "mechanize"],
)
@jax.numpy_dtype_promotion("standard")  # They count in integers and floats.
def test_optimizers_whose_state_holds_the_parameters(optimizer):
    params = {"w": jnp.arange(1.0, 7.0)}
    expected, state = params, optimizer.init(params)
    center = Server(params, oxs.rules.diloco(optimizer), num_workers=1)
    sync = Server(params, SyncReplicas(1), num_workers=1, inner=optimizer)
    step = jax.jit(optimizer.update)
    for number in range(1, 5):
        sent = {"['w']": np.sin(np.arange(6, dtype=np.float32) + number)}
        center.push(Push(0, number, {"contribution": sent}))
        sync.push(Push(0, number, {"grads": sent}))
        updates, state = step({"w": sent["['w']"]}, state, expected)
        expected = optax.apply_updates(expected, updates)
    close(center.center(), expected)
    close(sync.center(), expected)


def test_numbers_of_rows_share_their_programs():
    server = sync_server(1, 1)
    values = np.ones((4, 3), np.float32)
    for rows in range(1, 5):
        grad = {"['w']": (np.arange(rows) % 2, values[:rows]), "['b']": None}
        server.push(Push(0, rows, {"grads": grad}))
    held: Any = server._held[0]
    assert held._update._cache_size() == 3  # 1, 2 and 4 rows.
    # Each update takes the mean of a row's gradients, which were added up: the rows of
    # table row 0 and of table row 1.
    pairs = [[(rows + 1) // 2, rows // 2] for rows in range(1, 5)]
    times = np.sum(np.array(pairs), axis=0)
    np.testing.assert_array_equal(
        server.center()["w"], PARAMS["w"] - times[:, None].astype(np.float32)
    )


def test_messages_stay_short_and_checks_quick_with_many_leaves():
    params = {f"layer {i}": np.zeros(1, np.float32) for i in range(2000)}
    server = Server(params, oxs.rules.local_sgd(), num_workers=1)
    other = {f"block {i}": np.zeros(1, np.float32) for i in range(2000)}
    with pytest.raises(PushRefused) as error:
        server.push(Push(0, 1, {"contribution": other}))
    assert "and 1,995 more" in str(error.value) and len(str(error.value)) < 1000


def test_what_waits_at_a_server_outlives_it(tmp_path):
    """Several gradients per update: a worker has gone on, its gradient must count."""

    def start():
        saves: Any = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
        return sync_server(3, 1, **saves)

    server = start()
    for number, amount in ((1, 1.0), (2, 2.0)):
        assert not server.push(Push(0, number, grads(amount))).waiting
    again = start()
    again.push(Push(0, 3, grads(6.0)))
    assert again.global_step == 1
    close(again.center()["w"], PARAMS["w"] - 3)


def test_a_thousand_pushes_leave_nothing_behind():
    rule = oxs.rules.agn(None, accumulate="updates")
    server = Server(PARAMS, rule, num_workers=2, copy_replies=False)
    place, sizes = ("", 0), []
    tracemalloc.start()
    for number in range(1, 501):
        for worker in (0, 1):
            server.push(Push(worker, number, moves(1e-3)))
        if number % 100 == 0:  # As the driver of a run does.
            name, events = server.events(*place)
            place = name, len(events) + (place[1] if name == place[0] else 0)
        if number in (100, 500):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert server.global_step == 1_000
    # 800 events would be 200,000 bytes.
    assert sizes[1] - sizes[0] < 50_000, sizes


def test_small_push_that_a_rule_amplifies_into_an_overflow_is_refused():
    server = Server(PARAMS, oxs.rules.diloco(optax.sgd(1e38)), num_workers=1)
    server.push(Push(0, 1, moves(0.0)))
    before = server.center()
    with pytest.raises(PushRefused, match="the center would overflow"):
        server.push(Push(0, 2, moves(100.0)))
    jax.tree.map(np.testing.assert_array_equal, server.center(), before)
    server.push(Push(0, 2, moves(0.0)))


def converse(server, client, goal, number=0, arrays: Any = None):
    """A worker does one thing with a server."""
    client = protocol.begin(client, goal, 0, number)
    while (request := protocol.wants(client)) is not None:
        push = None
        if request.kind == "send":
            incarnation, arrays = client.incarnation, arrays or moves()
            push = Push(client.worker, number, arrays, incarnation=incarnation)
        client = protocol.hears(client, server.handle(request, push)[0])
    return client


def test_server_that_starts_afresh_learns_who_had_joined(tmp_path):
    """It saves itself before anybody joins; nobody then waits at the start for ever."""
    server = center_server(checkpoint_dir=tmp_path)
    assert Checkpoints(tmp_path).numbers() == (1,)
    clients = [converse(server, Client(worker), "enter") for worker in (0, 1)]
    again = center_server(checkpoint_dir=tmp_path)
    assert not again.everyone_joined()
    phases = [
        converse(again, client, "start").phase for client in (*clients, clients[0])
    ]
    assert phases == ["waiting", "idle", "idle"]


def test_worker_and_server_of_sync_replicas_die_together(tmp_path):
    """What waits for a token when the server saves itself has died by then."""

    def start():
        saves: Any = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        return sync_server(2, 2, **saves)

    assert start().push(Push(0, 1, grads(1.0))).waiting
    server = start()
    joined = server.join(0)
    again = Push(0, joined.round + 1, grads(3.0), incarnation=joined.incarnation)
    # The gradient that waited counts, and so the update needs one more.
    assert joined.round == 1 and server.push(again).global_step == 1
    np.testing.assert_array_equal(server.center()["w"], PARAMS["w"] - 2)
    assert not server.push(Push(1, 1, grads(1.0))).used
