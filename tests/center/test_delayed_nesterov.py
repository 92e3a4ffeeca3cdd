"""Delayed Nesterov, weights by staleness: workers one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs
from optx_sync.runtime import Server, Worker
from tests.refusals import all_refused

GRADS = np.random.default_rng(0).normal(size=(14, 3)).astype(np.float32)


def steps(tx, grads=GRADS, **extra) -> Any:
    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = jnp.ones(3)
    return jax.lax.scan(step, (start, tx.init(start)), grads)[1]


def test_every_arrival_is_nesterov():
    rate = optax.linear_schedule(0.7, 0.1, 10)
    nesterov = steps(optax.sgd(rate, 0.9, nesterov=True))
    for every in (1, None):
        np.testing.assert_allclose(
            steps(oxs.outer.delayed_nesterov(rate, 0.9, every)),
            nesterov,
            rtol=0,
            atol=1e-6,
        )


def test_the_momentum_waits():
    """The published update, with sums and divisions as it has them."""
    for c in (0.0, 0.1):
        number, rate, factor = 4, 0.7, 0.9
        x, m, d = np.ones(3), np.zeros(3), np.zeros(3)
        found = steps(oxs.outer.delayed_nesterov(rate, factor, c=c), num_workers=number)
        for t, mean_part in enumerate(GRADS.astype(np.float64)):
            g = number * mean_part  # as it comes from the worker, not yet divided
            d = d + g
            if (t + 1) % number == 0:
                m, d = factor * m + d / number, np.zeros(3)
                x = x - rate * ((1 - c * number + c) * factor * m + g / number)
            else:
                x = x - rate * (c * factor * m + g / number)
            np.testing.assert_allclose(found[t], x, rtol=0, atol=2e-5)


def weigh(at):
    return (1.0 + at.staleness) ** -0.5 * at.tokens / 8 / at.num_pushed


def check_both(rule, weigh, order, target, expected, period, tokens=None):
    """The centers by the simulation, and the last one by a server and its workers."""
    number = len(target)
    settings: dict[str, Any] = {"num_workers": number, "communication_period": period}
    run = oxs.simulate.asynchronous(
        optax.sgd(0.5),
        rule,
        jnp.zeros(()),
        lambda worker, params, event: params - jnp.asarray(target)[worker],
        jnp.asarray(order),
        weigh=weigh,
        tokens=tokens,
        record="all",
        **settings,
    )
    np.testing.assert_allclose(run.center, expected, rtol=1e-5)
    params = {"x": jnp.zeros(())}
    server = Server(params, rule._replace(weigh=weigh), **settings)
    workers = [
        Worker(server, params, optax.sgd(0.5), rule, index=w, **settings)
        for w in range(number)
    ]
    for event, w in enumerate(order):
        grads = jax.tree.map(lambda p, w=w: p - target[w], workers[w].params)
        given = {} if tokens is None else {"tokens": float(tokens[event])}
        workers[w].step(grads, **given)
    np.testing.assert_allclose(server.center()["x"], expected[-1], rtol=1e-5)
    assert server.global_step == run.global_step[-1]
    return run


def test_weights_of_contributions():
    """Two workers, in the simulation and at a server; tokens of each event."""
    order = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0]
    tokens = np.arange(1.0, 1 + len(order), dtype=np.float32)
    target = np.array([1.0, 3.0], np.float32)
    x, taken, seen = np.zeros(2), np.zeros(2), [0, 0]
    count, behind, pushed = [0, 0], np.zeros(2), [0, 0]
    center, m, d, rounds, centers = 0.0, 0.0, 0.0, 0, []
    for w, of_event in zip(order, tokens, strict=True):
        x[w] -= 0.5 * (x[w] - target[w])
        count[w], behind[w] = count[w] + 1, behind[w] + of_event
        if count[w] == 2:
            pushed[w] += 1
            factor = (1 + rounds - seen[w]) ** -0.5 * behind[w] / 8 / pushed[w]
            g = factor * (taken[w] - x[w]) / 2
            d += g
            rounds += 1
            if rounds % 2 == 0:
                m, d = 0.9 * m + d, 0.0
                center -= 0.5 * (0.9 * m + g)
            else:
                center -= 0.5 * g
            x[w] = taken[w] = center
            count[w], behind[w], seen[w] = 0, 0.0, rounds
        centers.append(center)
    rule = oxs.rules.diloco(oxs.outer.delayed_nesterov(0.5, 0.9))
    check_both(rule, weigh, order, target, centers, 2, tokens)


def test_what_is_dropped_as_stale_leaves_no_trace():
    """TensorFlow's `DropStaleGradientOptimizer`: only applied rounds make others stale.

    It drops a gradient if more than `staleness` others were applied since its worker
    read the variables, and then neither the optimizer nor the global step moves.
    """
    order, target = np.array([0, 1, 2] * 6), np.array([1.0, 3.0, 8.0], np.float32)
    x, seen, center, trace, applied, centers = np.zeros(3), [0] * 3, 0.0, 0.0, 0, []
    for w in order:
        gradient = 0.5 * (x[w] - target[w]) / 3  # a third of its way, from the center
        if applied - seen[w] <= 1:
            trace = 0.9 * trace + gradient
            center -= 0.5 * trace
            applied += 1
        x[w], seen[w] = center, applied
        centers.append(center)
    assert applied == 12  # of each three in turn, the third is too late
    rule = oxs.rules.diloco(optax.sgd(0.5, momentum=0.9))
    run = check_both(rule, lambda at: at.staleness <= 1, order, target, centers, 1)
    assert run.global_step[-1] == len(order)


nesterov, SGD = oxs.outer.delayed_nesterov, optax.sgd(1.0)


def simulated(**options):
    return oxs.simulate.asynchronous(
        SGD,
        oxs.rules.local_sgd(),
        jnp.zeros(()),
        lambda worker, params, event: params,
        [0, 1],
        num_workers=2,
        communication_period=1,
        **options,
    )


test_refused = all_refused(globals())(r"""
nesterov(0.7, every=0)  # ValueError: every must be 1
nesterov(0.7, 1.5)  # ValueError: momentum must lie in
nesterov(0.7, c=-1)  # ValueError: c must lie in
nesterov("0.7")  # TypeError: or an Optax schedule
oxs.center_variable(SGD, oxs.rules.diloco()._replace(weigh=weigh), "workers")
    # ValueError: in lockstep nobody is late
oxs.runtime.run(print, GRADS, SGD, 3, num_workers=1, weigh=weigh)
    # TypeError: rule must be a CenterRule
simulated(weigh=0.5)  # TypeError: weigh must be a function
simulated(weigh=lambda at: jnp.ones(2))
    # ValueError: weigh must return a scalar.*\(2,\)
simulated(tokens=np.ones(3))
    # ValueError: tokens must hold a number for each of the 2
""")
