"""Ranges of samples: each counts once, whoever dies, leaves or comes late."""

import copy
from typing import Any

import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import Lease, Preempted, Samples, Server, Worker, quorum
from optx_sync.runtime.samples import Ledger

WORKERS = 3


@pytest.mark.parametrize("seed", range(20))
def test_each_range_is_absorbed_once_in_any_order_of_events(seed):
    """Workers die, answers are lost, the server goes back to an earlier state."""
    rng = np.random.default_rng(seed)
    samples = Samples(total=47, batch=3, epochs=2)
    ledger, counts = Ledger(samples), np.zeros(2 * samples.ranges, int)
    holds: list[list[int]] = [[] for _ in range(WORKERS)]
    saved = copy.deepcopy(ledger.saved()), counts.copy()
    faults = 40
    while True:
        worker = int(rng.integers(WORKERS))
        what = rng.choice(["lease", "push", "late", "die", "lost", "save", "restore"])
        fault = what in ("late", "die", "lost", "restore")
        if fault:
            faults -= 1
            if faults < 0:
                continue
        if what == "lease":
            found = ledger.lease(worker, holds[worker], 2)
            if found == [] and not any(holds):
                break
            holds[worker] += [lease.number for lease in found or ()]
        elif what == "lost":  # The answer to a lease.
            ledger.lease(worker, holds[worker], 2)
        elif what == "push":
            ledger.absorbed(tuple(holds[worker]))
            counts[holds[worker]] += 1
            holds[worker] = []
        elif what == "late":
            ledger.dropped(tuple(holds[worker]))
            holds[worker] = []
        elif what == "die":
            ledger.gone(worker)
            holds[worker] = []
        elif what == "save":
            saved = copy.deepcopy(ledger.saved()), counts.copy()
        else:
            ledger, counts = Ledger(samples), saved[1].copy()
            ledger.restore(copy.deepcopy(saved[0]), set(range(WORKERS)))
    assert (counts == 1).all()


TOTAL = 60
RULE = oxs.rules.local_sgd()
PARAMS = {"seen": np.zeros(TOTAL, np.float32)}


def party(tmp_path=None, meet=None, workers=2, period=1, **options) -> Any:
    settings: dict[str, Any] = {"num_workers": workers, "communication_period": period}
    settings |= {"meet": meet, "delay": 1 if meet else None}
    server = Server(
        PARAMS, RULE, samples=Samples(TOTAL, 2), checkpoint_dir=tmp_path, **settings
    )

    def start(index):
        inner = optax.sgd(1.0)
        return Worker(server, PARAMS, inner, RULE, index=index, **settings)

    return server, start


def marked(worker, lease: Lease):
    grads = np.zeros(TOTAL, np.float32)
    grads[lease.start : lease.stop] = -1
    worker.step({"seen": grads})


def seen(server, of=1.0):
    return np.rint(server.center()["seen"] * of)


def test_what_a_dead_worker_has_not_pushed_goes_to_another():
    server, start = party(period=3)
    first, second = start(0), start(1)
    batches = first.samples()
    for _ in range(4):  # Three of them are pushed.
        marked(first, next(batches))
    assert seen(server, 2.0).sum() == 6
    for lease in second.samples():
        marked(second, lease)
    second.flush()
    assert seen(server, 2.0).sum() == TOTAL - 2 * 5  # The first one has leased 8.
    again = start(0)
    for lease in again.samples():
        marked(again, lease)
    again.flush()
    np.testing.assert_array_equal(seen(server, 2.0), 1)


def test_samples_that_came_late_are_others():
    server, start = party(meet=quorum(2), workers=3)
    slow = start(2)
    late = next(slow.samples())
    quick = [start(0), start(1)]
    batches = [worker.samples() for worker in quick]
    for _ in range(2):
        for worker, mine in zip(quick, batches, strict=True):
            marked(worker, next(mine))
    marked(slow, late)
    assert slow._sent.answers[0].is_there()
    assert server._ledger.lease(0, quick[0]._holds(), 1) == [late]


def test_what_came_late_at_the_end_is_done_by_its_worker():
    server, start = party(meet=quorum(2), workers=3, period=100)
    first, second, slow = (start(index) for index in range(3))
    mine = slow.samples()
    for _ in range(8):
        marked(slow, next(mine))
    for worker in (first, second):
        marked(worker, next(worker.samples()))
        worker._leases.clear()  # it takes one at a time here
    for lease in first.samples():
        marked(first, lease)
    assert next(mine, None) is None
    for worker in (first, second):
        worker.flush()
    for worker in (first, second):
        server.leave(worker.index)
        worker.land()
        assert worker.used and not worker.resumes()
    slow.flush()
    server.leave(slow.index)
    slow.land()
    assert not slow.used and slow.resumes()
    for lease in slow.samples():
        marked(slow, lease)
    slow.flush()
    server.leave(slow.index)
    slow.land()
    assert not slow.resumes() and (seen(server, 2.0) > 0).all()


def test_a_notice_hands_in_all_that_a_worker_has():
    server, start = party(period=10)
    first = start(0)
    for lease in first.samples():
        first.preempted = lease.number == 6
        if first.preempted:
            with pytest.raises(Preempted):
                marked(first, lease)
            break
        marked(first, lease)
    server.leave(0)
    assert seen(server, 2.0).sum() == 14
    second = start(1)
    for lease in second.samples():
        marked(second, lease)
    second.flush()
    np.testing.assert_array_equal(seen(server, 2.0), 1)


def test_a_later_run_goes_on_with_what_is_not_done(tmp_path):
    server, start = party(tmp_path)
    first = start(0)
    batches = first.samples()
    for _ in range(5):
        marked(first, next(batches))
    server.checkpoint()
    del server, first
    again, start = party(tmp_path)
    worker = start(1)
    for lease in worker.samples():
        marked(worker, lease)
    np.testing.assert_array_equal(seen(again, 2.0), 1)


def test_no_samples_and_wrong_ones_are_refused():
    server = Server(PARAMS, RULE, num_workers=1)
    worker = Worker(server, PARAMS, optax.sgd(1.0), RULE, index=0, num_workers=1)
    with pytest.raises(ValueError, match="no samples to lease"):
        next(worker.samples())
    for wrong in ({"total": 0, "batch": 1}, {"total": 1, "batch": 0}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            Samples(**wrong)
