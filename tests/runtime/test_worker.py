"""The loop of a worker, against a server in the same process."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optx_sync as oxs
from optx_sync.runtime import PushRefused, Server, SyncReplicas, Worker
from tests.meshes import mesh_of

PARAMS = {"w": jnp.zeros((4, 2)), "b": jnp.ones(2)}
# Pushes what the worker moved, undivided: the center counts steps.
COUNT = oxs.CenterRule(
    lambda own, center, at: own.params - own.taken, reads=("params", "taken")
)
DOWN = jax.tree.map(lambda p: -jnp.ones_like(p), PARAMS)


def party(rule, workers=1, period: Any = 2, params: Any = None, inner: Any = None):
    params = PARAMS if params is None else params
    inner = optax.sgd(1.0) if inner is None else inner
    settings: dict[str, Any] = {"num_workers": workers, "communication_period": period}
    server = Server(params, rule, inner=inner, **settings)
    return server, [
        Worker(server, params, inner, rule, index=i, **settings) for i in range(workers)
    ]


def test_exchanges_when_due_and_only_then():
    server, (worker,) = party(COUNT, period=3)
    rounds = []
    for _ in range(7):
        worker.step(DOWN, loss=1.5, accuracy=jnp.float32(0.25))
        rounds.append(server.global_step)
    assert rounds == [0, 0, 1, 1, 1, 2, 2]
    assert (worker.local_step, worker.rounds, worker.global_step) == (7, 2, 2)
    np.testing.assert_array_equal(server.center()["w"], 6.0)
    np.testing.assert_array_equal(worker.params["w"], 7.0)
    last = server.events()[1][-1]
    assert last.local_step == 6 and last.shown == {"loss": 1.5, "accuracy": 0.25}
    for _ in range(2):  # The second time there is nothing to push.
        worker.flush()
        assert server.global_step == 3 and worker.unpushed == 0
    np.testing.assert_array_equal(server.center()["w"], 7.0)


def test_period_may_be_a_schedule_of_the_step():
    server, (worker,) = party(COUNT, period=lambda step: jnp.where(step < 2, 1, 3))
    rounds = []
    for _ in range(8):
        worker.step(DOWN)
        rounds.append(server.global_step)
    assert rounds == [1, 2, 2, 2, 3, 3, 3, 4]


def test_staleness_counts_the_rounds_of_others():
    _, (one, two) = party(COUNT, workers=2, period=1)
    for worker, staleness in [(one, 0), (two, 1), (two, 0), (one, 2), (two, 1)]:
        worker.step(DOWN)
        assert worker.staleness == staleness


def test_refused_worker_keeps_its_own_and_may_start_anew():
    server, (worker,) = party(COUNT, period=1)
    worker.step(DOWN)
    bad = {**DOWN, "b": jnp.array([0.0, jnp.nan])}
    for refused in (1, 2):  # The NaN stays in its parameters.
        with pytest.raises(PushRefused, match=r"\['b'\] holds a NaN"):
            worker.step(bad if refused == 1 else DOWN)
        assert server.refused == [refused] and server.global_step == 1
    assert worker.rounds == 1
    joined = worker.pull()
    assert joined.restarts == 1 and worker.local_step == 1
    worker.step(DOWN)
    np.testing.assert_array_equal(server.center()["b"], 3.0)


class Interrupted:
    """A connection that breaks while it waits for an answer, or before it sends."""

    def __init__(self, server, before):
        self.server, self.before, self.breaks = server, before, False
        self.join, self.leaves = server.join, server.leaves

    def send(self, push):
        if self.breaks and self.before:
            raise OSError("no route")
        answer = self.server.send(push)

        def heard():
            if self.breaks:
                raise KeyboardInterrupt
            return answer()

        return heard


@pytest.mark.parametrize("before", [False, True])
def test_after_an_interrupted_exchange_a_worker_pulls_before_it_goes_on(before):
    """Whether its push was applied is not known: its next one would bear its name."""
    server, _ = party(COUNT, period=1)
    connection = Interrupted(server, before)
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 1}
    worker = Worker(connection, PARAMS, optax.sgd(1.0), COUNT, index=0, **settings)
    worker.step(DOWN)
    connection.breaks = True
    with pytest.raises((KeyboardInterrupt, OSError)):
        worker.step(DOWN)
    connection.breaks = False
    for go_on in (lambda: worker.step(DOWN), worker.flush):
        with pytest.raises(RuntimeError, match=r"was interrupted.*worker\.pull\(\)"):
            go_on()
    assert server.global_step == 2 - before
    worker.pull()
    for _ in range(4):
        worker.step(DOWN)
    assert server.global_step == worker.local_step == worker.rounds == 6 - before
    np.testing.assert_array_equal(server.center()["w"], 6.0 - before)


def test_a_push_that_a_launcher_sends_twice_is_answered_with_its_round():
    server, _ = party(COUNT, period=1)
    send = server.send
    server.send = lambda push: (send(push), send(push))[1]
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 1}
    worker = Worker(server, PARAMS, optax.sgd(1.0), COUNT, index=0, **settings)
    for _ in range(3):
        worker.step(DOWN)
    assert worker.rounds == server.global_step == 3


def test_replacement_goes_on_from_the_last_round():
    server, (worker,) = party(COUNT, period=2, inner=optax.sgd(1.0, momentum=0.5))
    for _ in range(3):
        worker.step(DOWN)
    center = server.center()
    new = Worker(
        server, PARAMS, optax.sgd(1.0, momentum=0.5), COUNT, index=0, num_workers=1,
        communication_period=2,
    )  # fmt: skip
    assert (new.local_step, new.rounds, new.restarts) == (2, 1, 1)
    np.testing.assert_array_equal(new.params["w"], center["w"])
    new.step(DOWN)  # Its momentum starts anew.
    np.testing.assert_array_equal(new.params["w"], center["w"] + 1)


def test_successor_goes_on_with_the_place_in_the_data(tmp_path):
    """Of the last round; also after the server has died."""
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 1}

    def server():
        return Server(PARAMS, COUNT, checkpoint_dir=tmp_path, **settings)

    def start(server):
        return Worker(server, PARAMS, optax.sgd(1.0), COUNT, index=0, **settings)

    alive = server()
    worker = start(alive)
    assert worker.place is None
    for step in range(3):
        worker.place = {"epoch": 1, "batch": step}
        worker.step(DOWN)
    alive.checkpoint()
    for one in (alive, server()):
        worker = start(one)
        assert worker.place == {"epoch": 1, "batch": 2} and worker.local_step == 3
    worker.place = {1, 2}
    with pytest.raises(TypeError, match="not JSON serializable"):
        worker.step(DOWN)


def test_half_precision_lands_on_the_rounded_center():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    server, workers = party(oxs.rules.local_sgd(), 2, 1, params, optax.sgd(1e-3))
    grads = jax.tree.map(jnp.ones_like, params)
    for worker in [*workers, *workers]:
        worker.step(grads)
        assert worker.params["b"].dtype == jnp.bfloat16
        landed = server.center()["b"].astype(jnp.bfloat16)
        np.testing.assert_array_equal(worker.params["b"], landed)
    assert server.center()["b"].dtype == np.float32


def test_row_sparse_and_missing_gradients():
    inner = oxs.optimizers.gradient_descent(1.0)
    server, (worker,) = party(COUNT, period=1, inner=inner)
    rows = oxs.IndexedSlices(jnp.array([3, 1, 3]), -jnp.ones((3, 2)))
    worker.step({"w": rows, "b": None})
    expected = np.array([[0.0] * 2, [1] * 2, [0] * 2, [2] * 2])
    np.testing.assert_array_equal(server.center()["w"], expected)
    np.testing.assert_array_equal(server.center()["b"], PARAMS["b"])

    server, (worker,) = party(SyncReplicas(1), inner=inner)
    worker.step({"w": rows, "b": None})
    np.testing.assert_array_equal(worker.params["w"], expected)


def test_worker_may_be_a_mesh_of_its_own():
    mesh = mesh_of({"fsdp": 2})
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    counts = optax.scale_by_schedule(lambda count: 1.0)
    inner = optax.chain(optax.sgd(1.0, momentum=0.5), counts)
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 2}
    server = Server(PARAMS, COUNT, **settings)
    worker = Worker(server, PARAMS, inner, COUNT, index=0, **settings)
    worker.shard(sharding)
    for step in range(4):
        if step == 2:
            worker.pull()  # It goes on with a fresh momentum and count.
        grads = jax.jit(lambda p: jax.tree.map(lambda x: -jnp.ones_like(x), p))(
            worker.params
        )
        worker.step(grads)
        assert worker.params["w"].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(server.center()["w"], 2 * (1 + 1.5))


def test_synchronous_replicas_in_threads():
    """Three of four gradients per update; every worker ends with the same numbers."""
    server, workers = party(SyncReplicas(3), workers=4, inner=optax.sgd(0.25))
    used = [0] * 4

    def work(index):
        worker = workers[index]
        while worker.global_step < 20:
            worker.step(DOWN)
            used[index] += worker.used

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    updates = server.global_step
    # The last ones waited for update 20, and nobody goes on after it.
    assert updates == 20 and 60 <= sum(used) <= 63
    np.testing.assert_array_equal(server.center()["w"], 0.25 * updates)
    kinds = [event.kind for event in server.events()[1]]
    assert kinds.count("push") == sum(used)


def test_start_together():
    rule = COUNT
    server = Server(PARAMS, rule, num_workers=2, communication_period=1)
    started = []

    def start(index):
        worker = Worker(
            server, PARAMS, optax.sgd(1.0), rule, index=index, num_workers=2,
            communication_period=1, synchronous=True,
        )  # fmt: skip
        started.append(worker.index)

    first = threading.Thread(target=start, args=(1,))
    first.start()
    first.join(timeout=0.3)
    assert first.is_alive() and not server.everyone_joined()
    start(0)
    first.join()
    assert sorted(started) == [0, 1]


def test_what_does_not_fit_is_refused_before_anything_moves():
    server, (worker,) = party(COUNT, period=1)
    with pytest.raises(ValueError, match=r"\['b'\] is missing in the gradients"):
        worker.step({"w": DOWN["w"]})
    with pytest.raises(ValueError, match="no worker 1"):
        Worker(server, PARAMS, optax.sgd(1.0), COUNT, index=1, num_workers=1)
    with pytest.raises(ValueError, match="communication_period must be 1 or more"):
        party(COUNT, period=0)
    for tokens in (-1, float("nan")):
        with pytest.raises(ValueError, match=r"tokens must be a number in \[0, 1e30\]"):
            worker.step(DOWN, tokens=tokens)
    assert worker.local_step == 0 and server.global_step == 0


def test_what_became_of_a_gradient_that_went_with_a_server_while_it_waited(monkeypatch):
    """It is sent again to the one that comes back, and may be stale there."""
    server, (worker, _) = party(SyncReplicas(2, num_tokens=0), workers=2)
    held: Any = server._held[0]

    def wait(number, part):
        arrays = {"params": held.current()}
        return held.reply_again(number)._replace(
            arrays=arrays, used=False, waiting=False
        )

    monkeypatch.setattr(server, "wait", wait)
    worker.step(DOWN)
    assert held.was_used[0] and not worker.used


def test_refused_parts_are_still_the_workers():
    """A part that was refused comes again with all its steps; the other one has met."""
    settings: dict[str, Any] = {
        "num_workers": 1,
        "communication_period": 2,
        "fragments": lambda path, leaf: int("w" in str(path[0])),
    }
    rule = oxs.rules.agn(optax.sgd(1.0), accumulate="gradients")
    server = Server(PARAMS, rule, **settings)
    inner = optax.sgd(0.0)
    worker = Worker(server, PARAMS, inner, rule, index=0, delay=1, **settings)
    bad = {**DOWN, "b": jnp.full(2, jnp.inf)}
    worker.step(bad)  # b sets out
    with pytest.raises(PushRefused, match=r"\['b'\] holds a NaN"):
        worker.step(DOWN)
    assert worker.rounds == 0 and worker._own.ages == [2, 2]
    worker._own.accumulated = jax.tree.map(jnp.ones_like, worker._own.accumulated)
    worker.flush()
    assert worker.rounds == 2 and worker.unpushed == 0
    pushes = [event for event in server.events()[1] if event.kind == "push"]
    assert [event.part for event in pushes] == [0, 1]


def test_delayed_push_travels_while_the_worker_steps():
    """What it does until the answer lands is not in the push, and is not forgotten."""
    rule = oxs.rules.local_sgd()
    settings: dict[str, Any] = {"num_workers": 1, "communication_period": 2}
    server = Server(PARAMS, rule, **settings)
    inner = optax.sgd(1.0)
    worker = Worker(server, PARAMS, inner, rule, index=0, delay=1, **settings)
    seen = []
    for _ in range(5):
        worker.step(DOWN)
        seen.append((float(server.center()["b"][0]), float(worker.params["b"][0])))
    # The third and fifth step land on what the push had: the step is gone, as lockstep
    # has it.
    assert seen == [(1, 2), (3, 3), (3, 3), (4, 4), (4, 4)]
    worker.flush()
    assert worker.unpushed == 0
