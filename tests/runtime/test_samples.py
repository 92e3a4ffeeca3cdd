"""Ranges of samples: each counts once, whoever dies, leaves or comes late."""

import contextlib
import copy
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import Lease, Preempted, Samples, Server, Worker, quorum
from optx_sync.runtime.samples import MEETING, SILENCE_SECONDS, Ledger, Outcome

WORKERS = 3


@pytest.mark.parametrize("seed", range(30))
def test_each_range_is_absorbed_once_in_any_order_of_events(seed):
    """Workers die, freeze, wait in meetings; the server goes back to an earlier state.

    The server absorbs a push only if the ledger says that it may.
    """
    rng, seconds = np.random.default_rng(seed), [0.0]
    samples = Samples(total=47, batch=3, epochs=2)

    def begin():
        ledger = Ledger(samples)
        ledger.clock = lambda: seconds[0]
        return ledger

    ledger, counts = begin(), np.zeros(2 * samples.ranges, int)
    holds: list[list[int]] = [[] for _ in range(WORKERS)]
    came: list[tuple[int, ...]] = []  # ranges in the meeting that is open
    frozen: set[int] = set()
    saved = copy.deepcopy((ledger.saved(), counts, came))
    faults = 60
    faulty = ["late", "die", "lost", "restore", "freeze", "overflow"]
    while True:
        seconds[0] += 1
        worker = int(rng.integers(WORKERS))
        what = rng.choice(["lease", "push", "wait", "close", "save", "thaw", *faulty])
        if what in faulty:
            faults -= 1
            if faults < 0:
                frozen = set()
                continue
        if worker in frozen and what in ("lease", "push", "wait", "late", "lost"):
            continue
        mine = tuple(holds[worker])
        if what == "lease":
            found = ledger.lease(worker, holds[worker], 2)
            if found == [] and not any(holds) and not came:
                break
            holds[worker] += [lease.number for lease in found or ()]
        elif what == "lost":  # The answer to a lease.
            ledger.lease(worker, holds[worker], 2)
        elif what in ("push", "wait") and ledger.may_count(worker, mine):
            waits = what == "wait"
            ledger.note(Outcome(worker, mine, "waits" if waits else "absorbed"))
            if waits:
                came.append(mine)
            else:
                counts[holds[worker]] += 1
            holds[worker] = []
        elif what in ("push", "wait", "late"):
            ledger.note(Outcome(worker, mine, "dropped"))
            holds[worker] = []
        elif what in ("close", "overflow"):
            for ranges in came:
                done = what == "close"
                ledger.note(Outcome(MEETING, ranges, "absorbed" if done else "dropped"))
                counts[list(ranges)] += done
            came = []
        elif what == "die":
            ledger.gone(worker)
            holds[worker] = []
            frozen.discard(worker)
        elif what in ("freeze", "thaw"):
            (frozen.add if what == "freeze" else frozen.discard)(worker)
        elif what == "save":
            saved = copy.deepcopy((ledger.saved(), counts, came))
        else:
            state, counts, came = copy.deepcopy(saved)
            ledger = begin()
            waits = {number for ranges in came for number in ranges}
            ledger.restore(json.loads(json.dumps(state)), set(range(WORKERS)), waits)
    assert (counts == 1).all()


TOTAL = 60
RULE = oxs.rules.local_sgd()
SUMS = RULE._replace(mean_over=None)
PARAMS = {"seen": np.zeros(TOTAL, np.float32)}


def party(tmp_path=None, meet=None, workers=2, period=1, **options) -> Any:
    settings: dict[str, Any] = {"num_workers": workers, "communication_period": period}
    settings |= {"meet": meet, "delay": 1 if meet else None}
    rule, samples = options.pop("rule", RULE), options.pop("samples", Samples(TOTAL, 2))
    params = jax.eval_shape(lambda: PARAMS) if options.pop("back", False) else PARAMS
    server = Server(params, rule, samples=samples, checkpoint_dir=tmp_path, **settings)

    def start(index):
        inner = optax.sgd(1.0)
        return Worker(server, PARAMS, inner, rule, index=index, **settings)

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
    assert slow._life.sent.answers[0].is_there()
    assert server._ledger.lease(0, quick[0]._holds(), 1) == [late]


def test_what_came_late_at_the_end_is_done_by_its_worker():
    server, start = party(meet=quorum(2), workers=3, period=100)
    first, second, slow = (start(index) for index in range(3))
    mine = slow.samples()
    for _ in range(8):
        marked(slow, next(mine))
    for worker in (first, second):
        marked(worker, next(worker.samples()))
        worker._life.leases.clear()  # it takes one at a time here
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


def test_samples_of_steps_made_while_a_meeting_waits_count_and_are_in_the_center():
    server, start = party(meet=quorum(2), period=4, rule=SUMS)
    first, second = start(0), start(1)
    mine, others = first.samples(), second.samples()
    for _ in range(12):
        marked(first, next(mine))
    marked(second, next(others))  # It is asked, and what the first one sent meets it.
    assert seen(server).sum() == 2 * 5
    for _ in range(2):  # The first one takes the answer, and contributes all.
        marked(first, next(mine))
    for _ in range(2):  # One step of the `delay`, and another one.
        marked(second, next(others))
    assert seen(server).sum() == 2 * (14 + 2) and seen(server).max() == 1


def leased(server, worker, holds, count):
    return server.lease(worker, 2**62, holds, count)


def test_what_waits_in_a_meeting_is_done_once_the_meeting_absorbs_it(tmp_path):
    """Not when it arrives: the server may die, or the meeting drop it."""
    options = {"meet": quorum(2), "workers": 3, "rule": SUMS}
    server, start = party(tmp_path, **options)
    first, second = start(0), start(1)
    mine = next(first.samples())
    marked(first, mine)
    assert first._life.sent.answers and not first._life.sent.answers[0].is_there()
    server.checkpoint()
    marked(second, next(second.samples()))  # which closes the meeting, and is lost
    assert seen(server).sum() == 4
    server, start = party(tmp_path, back=True, **options)
    assert seen(server).sum() == 0
    server._ledger.clock = lambda: 0.0  # however slow the machine is
    # Who handed it in has got an answer, and holds it no more.
    assert leased(server, 0, [], 1) is None
    server.leave(2)
    workers = [start(0), start(1)]
    while batches := [
        (worker, lease)
        for worker in workers
        for lease in [next(worker.samples(), None)]
        if lease is not None
    ]:
        for worker in workers if len(batches) < 2 else ():
            if worker is not batches[0][0]:  # whose program has come to its end
                server.leave(worker.index)
        for worker, lease in batches:
            assert lease != mine
            marked(worker, lease)
        for worker, _ in batches:  # A step made meanwhile would be overwritten.
            worker.land()
    for worker in workers:
        worker.flush()
    for worker in workers:
        server.leave(worker.index)
    np.testing.assert_array_equal(seen(server), 1)


def dropped_by(server, worker, lease):
    """Whether a worker was told that a range is dropped, and others get it."""
    others = leased(server, 1 - worker.index, [], TOTAL)
    return not worker.used and lease in (others or ())


def test_what_a_rule_or_a_meeting_drops_is_made_again():
    never = RULE._replace(weigh=lambda at: jnp.where(at.num_pushed == 1, 0.0, 1.0))
    server, start = party(rule=never)
    worker = start(0)
    mine = next(worker.samples())
    marked(worker, mine)
    assert dropped_by(server, worker, mine) and not seen(server).any()
    for merge, error in (("raises", ZeroDivisionError), ("overflows", None)):

        def meet(tree, state, axis_name, *, weight=None, also=None, merge=merge):
            if merge == "raises":
                raise ZeroDivisionError
            return oxs.exchange.Met(jax.tree.map(lambda x: x * jnp.inf, tree), 2)

        bad = oxs.exchange.Exchange(lambda tree: (), meet, remembers=False)
        server, start = party(meet=quorum(2, merge=bad))
        first, second = start(0), start(1)
        mine = next(first.samples())
        marked(first, mine)
        with contextlib.suppress(*[error] if error else []):
            marked(second, next(second.samples()))
        first.land()
        assert dropped_by(server, first, mine) and not seen(server).any(), merge


def test_who_is_silent_after_a_death_is_waited_for_a_while(tmp_path):
    server, start = party(tmp_path, workers=4, period=10)
    server.checkpoint()  # before anybody has joined
    early, late = start(0), start(1)
    mine = [next(early.samples()), next(late.samples())]
    server.leave(3)
    server.checkpoint()
    server, start = party(tmp_path, workers=4, period=10, back=True)
    server._ledger.clock = lambda: seconds
    seconds = server._ledger._until - SILENCE_SECONDS
    assert server._left == {3}  # He has left, and is not waited for.
    assert leased(server, 0, [mine[0].number], 1) is None
    assert leased(server, 2, [], 1) is None  # Worker 1 may hold more.
    seconds = server._ledger._until
    got = leased(server, 2, [], TOTAL)
    assert mine[0] not in got and mine[1] not in got
    # A range that another has is not counted, whoever speaks late.
    taken = got[0].number
    assert not server._ledger.may_count(1, (mine[1].number, taken))
    late.connection = server
    late._life.walked = [mine[1].number, taken]
    late._life.lease = None
    late._own.step({"seen": np.ones(TOTAL, np.float32)}, ())
    late.flush()
    assert not late.used and not seen(server).any()
    told = server.events()[1][-1]
    assert told.kind == "dropped" and told.message.startswith("It has samples")


def test_a_claim_counts_in_either_order():
    """A range that a restored server gave to one, who denies it, is the other's."""
    for order in ((0, 1), (1, 0)):
        ledger = Ledger(Samples(10, 1))
        ledger.restore([3, [], [[2, 0]], [10, 1]], {0, 1}, set())
        for worker in order:
            ledger.lease(worker, [2] if worker else [], 1)
        assert ledger.may_count(1, (2,)) and not ledger.may_count(0, (2,)), order


def test_a_program_that_does_not_flush_hands_in_and_one_that_ends_early_is_told():
    for steps, left in ((TOTAL, 0), (6, TOTAL // 2 - 6)):
        server, start = party(period=100)
        worker = start(0)
        for _, lease in zip(range(steps), worker.samples(), strict=False):
            marked(worker, lease)
        worker.hand_in_samples()
        server.leave(0)
        assert not worker.resumes() and seen(server, 2.0).sum() == TOTAL - 2 * left
        server.end()
        server.end()
        said = [x.message for x in server.events()[1] if x.kind == "uncounted"]
        assert [one.split()[0] for one in said] == [str(left)] * (left > 0)


def test_a_later_run_of_other_samples_is_refused(tmp_path):
    server, start = party(tmp_path)
    marked(start(0), next(start(1).samples()))
    server.checkpoint()
    for other in (Samples(TOTAL, 3), Samples(TOTAL + 1, 2)):
        with pytest.raises(ValueError, match=r"counts ranges of Samples\(60, 2\)"):
            party(tmp_path, samples=other)
    party(tmp_path, samples=Samples(TOTAL, 2, epochs=3))


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
    # One in between takes none, and saves: what was counted is not forgotten.
    between, start = party(tmp_path, samples=None)
    start(0).step({"seen": np.zeros(TOTAL, np.float32)})
    between.checkpoint()
    del between, start
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
    meet = quorum(3, merge=oxs.exchange.trimmed_mean(1))
    with pytest.raises(ValueError, match=r"merge= needs 3 contributions: .*median"):
        party(meet=meet)


def test_what_a_restored_ledger_has_not_handed_out_may_count():
    """It was handed out after the checkpoint, so its worker alone has it."""
    ledger = Ledger(Samples(total=4, batch=1))
    assert ledger.may_count(0, (3,))
    ledger.note(Outcome(0, (3,), "absorbed"))
    assert not ledger.may_count(0, (3,)) and ledger.uncounted == 3
