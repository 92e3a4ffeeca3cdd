"""Decoupled workers on a virtual clock: laws, and a restatement second by second."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import Server, Worker, one, quorum
from optx_sync.simulate import Kind, asynchronous, clock, decoupled
from tests.reference import decoupled as restated
from tests.refusals import all_refused

ROWS = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
NOISE = np.random.default_rng(0).normal(size=(4000, 4, 4)).astype(np.float32)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)
EVEN = [1.0, 1.0, 1.0]
DILOCO = oxs.rules.diloco(OUTER)


def pulled(worker, params, step):
    """The gradient of a quadratic, with the noise of the step."""
    return jnp.asarray(NOISE)[step] + 0.3 * params


def run(seconds=EVEN, grad_fn=pulled, inner=None, rule=DILOCO, **given):
    inner = optax.sgd(0.1) if inner is None else inner
    settings: Any = {"until": 60, "communication_period": 8} | given
    return decoupled(inner, rule, ROWS, grad_fn, seconds, **settings)


def assert_close(actual, expected, tolerance=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def in_lockstep(inner, tx, steps):
    """(center, parameters of all) of three workers in lockstep."""
    axes = oxs.by_hand.state_axes(tx, ROWS)

    def of_one(number, worker, params, state):
        grads = pulled(worker, params, 3 * number + worker)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    of_all = jax.vmap(of_one, (None, 0, 0, axes), (0, axes), axis_name="workers")
    state = oxs.by_hand.replicate(tx.init(jnp.asarray(ROWS)), 3, axes)
    begun = oxs.by_hand.replicate(jnp.asarray(ROWS), 3), state
    (params, state), _ = jax.lax.scan(
        lambda carry, number: (of_all(number, jnp.arange(3), *carry), None),
        begun,
        jnp.arange(steps),
    )
    return oxs.center_params(state, params), params


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_all_of_equal_workers_are_diloco_in_lockstep(parts):
    # At the end nothing is on its way: the center would have absorbed that already.
    inner, steps, seen = optax.sgd(0.1, 0.9), 50, []
    for delay in (0, 1):
        options: Any = {"communication_period": 12, "fragments": parts}
        tx = oxs.diloco(inner, "workers", outer=OUTER, overlap=delay > 0, **options)
        found = run(inner=inner, until=steps, meet=quorum(3), delay=delay, **options)
        workers = found.final.learners.worker
        seen.append(found.final.center)
        assert_close((seen[-1], workers.params), in_lockstep(inner, tx, steps))
        assert found.timeline.participation == found.timeline.uptime == 1
    assert not np.allclose(seen[0], seen[1])


AGN, ADAM = optax.sgd(0.05, 0.9), oxs.optimizers.adam(0.1, b1=0.5)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (oxs.rules.local_sgd(), {"fragments": 2}),
        (oxs.rules.elastic(moving_rate=0.1, rho=0.3), {}),
        (oxs.rules.agn(AGN), {"weigh": lambda at: (1 + at.staleness) ** -0.5}),
        (oxs.rules.agn(ADAM), {"inner": ADAM}),  # whose powers all share
        (DILOCO, {"weigh": lambda at: at.num_pushed % 3 > 0}),
        (DILOCO, {"exchange": oxs.exchange.error_feedback(oxs.exchange.top_k(5))}),
        (DILOCO, {"exchange": oxs.exchange.quantized(16)}),
    ],
)
def test_meetings_of_one_are_asynchronous(rule, options):
    options = {"inner": optax.sgd(0.1), "record": "all"} | options
    found = run([1.0, 1.7, 2.9], rule=rule, meet=quorum(1), **options)
    order, inner = found.timeline.workers, options.pop("inner")
    expected = asynchronous(
        inner, rule, ROWS, pulled, order, num_workers=3, communication_period=8,
        **options,
    )  # fmt: skip
    final = expected.final
    learners = found.final.learners
    assert_close(found.final.center, final.center)
    assert_close(learners.worker, final.workers.worker)
    # After each step with all that follows at once, and so the centers on the way.
    kinds = [event.kind for event in found.timeline.events]
    ends = [i - 1 for i, kind in enumerate(kinds) if i and kind == Kind.STEP]
    seconds = [event.second for event in found.timeline.events]
    ends = [i for i in ends if seconds[i + 1] > seconds[i]]
    steps = np.cumsum([kind == Kind.STEP for kind in kinds])[ends] - 1
    assert len(ends) > 60
    assert_close(found.center[np.array(ends)], expected.center[steps])


def test_a_quorum_of_one_is_one():
    assert quorum(1) == one()
    assert not one().shared and quorum(1, grace=0.1).shared and quorum(2).shared


TOKENS = [3.0, 1.0, 2.0]
LIVES = [(1, 101, 163), (0, 205, 240), (2, 400, math.inf)]


@pytest.mark.parametrize("latency", [0, 2])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(("k", "grace"), [(2, 0.0), (2, 1.0), (3, 0.0)])
def test_second_by_second(latency, delay, k, grace):
    found = run(
        [7.0, 10.0, 23.0], until=700, meet=quorum(k, grace), fragments=2, delay=delay,
        link=lambda worker, size, second: latency, failures=LIVES, tokens=TOKENS,
        weigh=lambda at: at.tokens**2 / at.steps,
    )  # fmt: skip
    center, meetings, lates = restated.decoupled(
        ROWS.reshape(2, 2, 4),
        lambda worker, x, step: NOISE[step].reshape(x.shape) + 0.3 * x,
        [7, 10, 23],
        until=700, k=k, grace=grace, between=4, delay=delay, latency=latency,
        failures=LIVES, tokens=TOKENS,
    )  # fmt: skip
    line = found.timeline
    closed = [(math.floor(e.second), e.part, e.come) for e in line.of(Kind.CLOSE)]
    assert closed == meetings and len(closed) > 10
    assert [(e.second, e.worker) for e in line.of(Kind.LATE)] == lates
    assert bool(lates) == (k == 2)
    assert_close(found.final.center, center.reshape(4, 4), 2e-6)


@pytest.mark.parametrize(("k", "delay"), [(1, 2), (2, 1), (2, 4), (3, 2)])
def test_it_is_what_servers_and_workers_do(k, delay):
    """Real ones in this process, which step in the order of the virtual clock.

    No two steps end at the same second: of such the clock asks nobody before the end.
    """
    rule = DILOCO._replace(weigh=lambda at: at.tokens**2 / at.steps)
    options: Any = {"communication_period": 8, "fragments": 2, "delay": delay}
    found = run([1.0, 1.37, 2.7183], rule=rule, until=200, meet=quorum(k), **options)
    options |= {"num_workers": 3, "meet": quorum(k)}
    server = Server(ROWS, rule, **options)
    workers = [
        Worker(server, ROWS, optax.sgd(0.1), rule, index=index, **options)
        for index in range(3)
    ]
    for number, who in enumerate(found.timeline.workers):
        workers[who].step(pulled(who, workers[who].params, number))
    assert server.global_step == len(found.timeline.of(Kind.CLOSE)) >= 36
    assert_close(server.center(), found.final.center)
    if k == 2:
        assert found.timeline.of(Kind.LATE)


@pytest.mark.parametrize(("seconds", "gone"), [(0.0, 1), (3.0, 0)])
def test_what_is_made_before_a_late_answer_is_in_the_center(seconds, gone):
    """An answer in time overwrites one step, and a late one none."""
    found = run(
        [1.0, 1.0], lambda worker, params, step: -jnp.ones_like(params),
        inner=optax.sgd(1.0), rule=oxs.rules.local_sgd(), meet=quorum(2), delay=1,
        link=lambda worker, size, second: seconds, until=50,
    )  # fmt: skip
    line = found.timeline
    meetings, steps = len(line.of(Kind.CLOSE)), line.of(Kind.JOIN)
    in_center = sum(event.steps for event in steps) / 2 - gone * (meetings - 1)
    assert_close(found.final.center, ROWS + in_center)
    np.testing.assert_array_equal(line.kept_seconds, in_center)
    assert {event.number for event in line.of(Kind.TAKE)} == {1 if gone else 7}


@pytest.mark.parametrize("absent", [[1, 1, 1e9], [1, 1, 1]])
def test_a_worker_that_never_answers_changes_nothing(absent):
    gone = [(2, 0.0, math.inf)] if absent == [1, 1, 1] else []
    # The steps of all are numbered: the noise is of the worker and its step.
    found = run(absent, meet=quorum(2), failures=gone)
    expected = run([1, 1], meet=quorum(2))
    assert_close(found.final.center, expected.final.center, 0)
    assert found.timeline.participation == pytest.approx(2 / 3)


def test_a_late_contribution_leaves_no_trace():
    seconds = [1.0, 1.0, 4.5]

    def of_slow_one(noise):
        def grad_fn(worker, params, step):
            return jnp.where(worker == 2, noise, pulled(worker, params, step))

        return run(seconds, grad_fn, meet=quorum(2), record="all")

    found, worse = of_slow_one(1.0), of_slow_one(jnp.nan)
    assert len(found.timeline.of(Kind.LATE)) > 3
    assert_close(worse.center, found.center, 0)
    # It is told, and goes on from the center.
    told = [e for e in found.timeline.of(Kind.TAKE) if e.worker == 2]
    assert len(told) == len(found.timeline.of(Kind.LATE))


def came(grace, cap=math.inf):
    line = clock(
        [1.0, 1.0, 1.6], until=400, communication_period=8, part_bytes=[0.0, 0.0],
        meet=quorum(2, grace, cap), delay=2,
    )  # fmt: skip
    return np.bincount([w for e in line.of(Kind.CLOSE) for w in e.come], minlength=3)


def test_grace_lets_the_slow_one_in():
    without, capped, whole = came(0.0), came(1.0, cap=0.5), came(1.0)
    # Its next step ends in the two seconds that the others step on.
    assert whole[2] == whole[0] > 90
    assert without[2] < capped[2] < whole[2]


def test_deaths_on_the_clock():
    settings: Any = {"until": 40, "communication_period": 4, "part_bytes": [8.0]}
    link = lambda worker, size, second: 1.5 if size else 0.0  # noqa: E731

    def line(k, *failures):
        return clock(EVEN, meet=quorum(k), failures=failures, link=link, **settings)

    # What is on the way of a worker that dies is lost; a step is, too.
    died = line(3, (0, 5.0, 20.0))
    assert [(e.second, e.worker) for e in died.of(Kind.JOIN)][:2] == [
        (5.5, 1),
        (5.5, 2),
    ]
    # All others wait for it: it is back at 20, has the center at 21.5, and steps.
    (first, *_), (back,) = died.of(Kind.CLOSE), died.of(Kind.BACK)
    assert back.second == 20 and first.second == 20 + 1.5 + 1 + 1.5
    assert first.come == (0, 1, 2)
    steps = [e for e in died.of(Kind.STEP) if e.second <= 20]
    assert [e.worker for e in steps].count(0) == 4
    # One that has left is waited for by nobody, also where it leaves in a meeting.
    left = line(3, (0, 5.0, math.inf))
    assert left.of(Kind.CLOSE)[0].second == 5.5
    later = line(3, (0, 5.0, 30.0), (0, 31.0, math.inf))
    assert later.of(Kind.CLOSE)[0].second == 31.0
    # Two of three go on without it.
    assert len(line(2, (0, 5.0, 20.0)).of(Kind.CLOSE)) > len(died.of(Kind.CLOSE))


def test_the_totals_of_a_clock():
    line = clock(
        [1.0, 2.0], until=12, communication_period=2, meet=quorum(2),
        part_bytes=[6.0, 10.0], failures=[(1, 7.5, 9.0)],
        tokens=lambda worker, step: step + 1,
    )  # fmt: skip
    # Worker 0 pushes after each of its steps and waits for worker 1, which at 9 gets
    # all parts, 16 bytes, and ends its next step at 11; the last push is of 12.
    assert [e.second for e in line.of(Kind.CLOSE)] == [2, 4, 6, 11]
    assert [e.part for e in line.of(Kind.CLOSE)] == [0, 1, 0, 1]
    np.testing.assert_array_equal(line.bytes_up, [38, 32])
    np.testing.assert_array_equal(line.bytes_down, [32, 48])
    np.testing.assert_array_equal(line.step_seconds, [5, 8])
    assert line.uptime == 13 / 24 and line.participation == 1
    tokens = [e.tokens for e in line.of(Kind.STEP) if e.worker == 0]
    assert tokens == [1, 2, 3, 4, 5]


ELASTIC = oxs.rules.elastic(moving_rate=0.1, rho=0.0)


@pytest.mark.parametrize("rule", [DILOCO, ELASTIC])
def test_meetings_merge_by_any_exchange(rule):
    """A median of three, of whom one is wild; a rule that sums gets three of them."""

    def grad_fn(worker, params, step):
        return jnp.where(worker == 1, 1e3, worker.astype(jnp.float32)) + 0 * params

    meet = quorum(3, merge=oxs.exchange.median())
    found = run(grad_fn=grad_fn, rule=rule, meet=meet, until=8)
    if rule is DILOCO:  # the gradients are 0, 1000 and 2, of eight steps
        moved = 0.1 * 8 * 2
        expected = ROWS - 0.7 * 1.9 * moved
        radial = quorum(3, merge=oxs.exchange.radial())
        along = run(grad_fn=grad_fn, rule=rule, meet=radial, until=8).final.center
        assert_close(along, ROWS - 0.7 * 1.9 * 0.8 * 1002 / 3, 1e-5)
    else:
        expected = ROWS + 3 * 0.1 * -1.6
    assert_close(found.final.center, expected, 1e-5)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_rule_of_sums_adds_up_what_each_contribution_weighs(factor):
    """As a server adds up those of workers that come one by one."""

    def grad_fn(worker, params, step):
        return worker.astype(jnp.float32) + 0 * params

    weigh = lambda at: jnp.float32(factor)  # noqa: E731
    settings: Any = {"grad_fn": grad_fn, "rule": ELASTIC, "until": 8, "weigh": weigh}
    found = run(meet=quorum(3), **settings).final.center
    assert_close(found, ROWS - factor * 0.1 * 0.1 * 8 * (0 + 1 + 2), 1e-5)


def changed(**changes):
    given: Any = {"seconds": [1.0, 1.0], "until": 3, "communication_period": 2}
    given |= changes
    rule = given.pop("rule", DILOCO)
    decoupled(optax.sgd(0.1), rule, ROWS, pulled, **given)


MEDIAN = oxs.exchange.median()
FEEDBACK = oxs.exchange.error_feedback(oxs.exchange.quantized())
RADIAL = oxs.exchange.radial(oxs.exchange.trimmed_mean(1))
test_bad_input_is_refused = all_refused(globals())(r"""
quorum(0)  # ValueError: k must be 1 or more
quorum(2.5)  # TypeError: k must be an integer
quorum(2, grace=-1.0)  # ValueError: grace must be
quorum(2, cap=math.nan)  # ValueError: cap must be
quorum(2, merge=0.5)  # TypeError: exchange must be
quorum(1, merge=MEDIAN)  # ValueError: there is one
quorum(3, merge=oxs.exchange.krum(1))  # ValueError: needs 5 .* k=3\. Pass quorum\(5
quorum(2, merge=RADIAL)  # ValueError: needs 3 contributions or more
changed(seconds=[0.0, 1.0])  # ValueError: Of worker 0 in step 0
changed(seconds=[1.0], num_workers=2)  # ValueError: each of the 2
changed(seconds=lambda worker, step: 1.0)  # TypeError: pass it where seconds is
changed(until=0)  # ValueError: until must be
changed(meet=oxs.runtime.SyncReplicas(2))  # TypeError: meet must be oxs.runtime.one
changed(meet=2)  # TypeError: meet must be oxs.runtime.one
changed(tokens=[1.0])  # ValueError: tokens must be a number for each
changed(link=3.0)  # TypeError: link must be a function
changed(failures=[(2, 0.0, 1.0)])  # ValueError: one of 2
changed(failures=[(0, 2.0, 1.0)])  # ValueError: is back at
changed(fragments=4)  # ValueError: not a multiple of the 4
changed(delay=3)  # ValueError: delay=3 is longer
changed(rule=DILOCO._replace(num_workers=3))  # ValueError: num_workers=3
changed(rule=ELASTIC, delay=1)  # ValueError: reads the center
quorum(2, merge=FEEDBACK)  # ValueError: remembers nothing
changed(meet=quorum(2, merge=MEDIAN), weigh=abs)  # ValueError: takes no weights
""")
