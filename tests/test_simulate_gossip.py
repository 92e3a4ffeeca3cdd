"""Workers that meet in pairs at their own pace: NumPy's arithmetic, and a thousand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests.refusals import refused

N, D, RATE, MOMENTUM = 4, 3, 0.25, 0.5
TARGETS = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
SCALES = 1 + np.arange(N, dtype=np.float32)


def pull(worker, params, event):
    """A worker's own bowl, and an event's own slope."""
    slope = 0.01 * event.astype(jnp.float32)
    away = params["w"].astype(jnp.float32) - jnp.asarray(TARGETS)[worker]
    pulled = jnp.asarray(SCALES)[worker] * away + slope
    return {"w": pulled.astype(params["w"].dtype), "b": params["b"] - slope}


def by_hand(workers, partners, period):
    """[T, D + 1] of the event's worker and of the mean, steps, meetings: float64."""
    x = np.zeros((N, D + 1))
    read, trace = x.copy(), x.copy()
    steps, meetings, seen = np.zeros(N, int), 0, []
    for t, (w, p) in enumerate(zip(workers, partners, strict=True)):
        gradient = np.append(
            SCALES[w] * (read[w, :D] - TARGETS[w]) + 0.01 * t, read[w, D] - 0.01 * t
        )
        trace[w] = MOMENTUM * trace[w] + gradient
        x[w] = x[w] - RATE * trace[w]
        steps[w] += 1
        if steps[w] % period == 0 and w != p:
            x[w] = x[p] = (x[w] + x[p]) / 2
            meetings += 1
        read[w] = x[w]
        seen.append((x[w].copy(), x.mean(axis=0), steps[w], meetings))
    return [np.array(of) for of in zip(*seen, strict=True)]


@functools.cache
def events(number=48):
    rng = np.random.default_rng(0)
    return rng.integers(N, size=number), rng.integers(N, size=number)


@pytest.mark.parametrize("period", [1, 3])
def test_it_is_what_numpy_does_event_by_event(period):
    workers, partners = events()
    start = {"w": jnp.zeros(D), "b": jnp.zeros(())}

    @jax.jit
    def run(workers, partners):
        return oxs.simulate.gossip(
            optax.sgd(RATE, MOMENTUM),
            start,
            pull,
            workers,
            partners,
            num_workers=N,
            # A schedule of the worker's own step, too.
            communication_period=period if period == 1 else lambda step: step * 0 + 3,
        )

    # An event of a worker, or with a partner, that does not exist changes nothing.
    none = [[-1, 0], [N, 1], [0, -1], [1, N]]
    traced = np.concatenate([np.stack([workers, partners], axis=1), none])
    found = run(*traced.T)
    rows, means, steps, meetings = by_hand(workers, partners, period)
    last = len(workers)
    for got, expected in ((found.params, rows), (found.mean, means)):
        got = np.concatenate([got["w"], got["b"][:, None]], axis=1)
        np.testing.assert_allclose(got[:last], expected, atol=1e-5, rtol=1e-5)
        if expected is means:
            np.testing.assert_array_equal(got[last:], got[last - 1 : last].repeat(4, 0))
    np.testing.assert_array_equal(found.local_step[:last], steps)
    np.testing.assert_array_equal(found.meetings[:last], meetings)
    assert int(found.meetings[-1]) == meetings[-1]
    np.testing.assert_array_equal(found.events, np.arange(last + 4))


def test_half_precision_meets_in_float32_and_partners_are_drawn_of_the_others():
    workers, _ = events()
    start = {"w": jnp.ones(D, jnp.bfloat16), "b": jnp.ones(())}
    targets = jnp.asarray(2.0 ** np.arange(N), jnp.float32)

    def none(worker, params, event):  # of a worker alone, in its first step only
        first = (params["b"] == 1).astype(jnp.float32) * (1 - targets[worker])
        return {"w": jnp.zeros(D, jnp.bfloat16), "b": first}

    @jax.jit
    def run():
        return oxs.simulate.gossip(
            optax.sgd(1.0),
            start,
            none,
            workers,
            num_workers=N,
            record=lambda params, mean: (params, mean["w"]),
        )

    found = run()
    params, mean = found.recorded
    assert found.params is None and found.mean is None
    assert params["w"].dtype == mean.dtype == jnp.bfloat16
    assert jnp.all(params["w"] == 1) and jnp.all(mean == 1)
    # Nobody is its own partner.
    assert int(found.meetings[-1]) == len(workers)


def test_a_thousand_workers_of_which_each_has_its_own_target_find_the_mean():
    n, size, number = 1000, 16, 8_000
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.normal(size=(n, size)), jnp.float32)
    speed = rng.lognormal(0, 0.5, n)  # of workers: the quick ones step more often
    workers = rng.choice(n, size=number, p=speed / speed.sum())
    weight = jnp.asarray(speed.mean() / speed, jnp.float32)  # all count alike
    found = jax.jit(
        lambda workers: oxs.simulate.gossip(
            optax.sgd(0.3),
            jnp.zeros(size),
            lambda worker, params, event: (params - targets[worker]) * weight[worker],
            workers,
            num_workers=n,
            record=number // 2,
        )
    )(workers)
    goal = np.asarray(targets).mean(axis=0)
    away = np.linalg.norm(np.asarray(found.mean) - goal, axis=1)
    alone = np.linalg.norm(np.asarray(targets) - goal, axis=1).mean()
    assert away[-1] < 0.05 * alone, (away, alone)
    # Workers stay apart, by a part of what their targets are.
    apart = np.asarray(found.final.params) - np.asarray(found.mean)[-1]
    assert 0.05 < np.linalg.norm(apart, axis=1).mean() / alone < 0.7
    assert int(found.final.local_step.sum()) == number


def call(**options):
    given = {"workers": [0, 1], "partners": [1, 0], "num_workers": 2, **options}
    workers, params = given.pop("workers"), given.pop("params", jnp.zeros(2))
    workers, partners = map(np.asarray, (workers, given.pop("partners")))
    inner = given.pop("inner", optax.sgd(0.1))
    oxs.simulate.gossip(
        inner, params, lambda w, params, e: params, workers, partners, **given
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner": "sgd"}, "TypeError: oxs.simulate.gossip"),
        ({"workers": [0, 2]}, "ValueError: workers names worker 2"),
        ({"partners": [0, -1]}, "ValueError: partners names worker -1"),
        ({"partners": [0.0, 1.0]}, "TypeError: partners must hold integers"),
        ({"partners": [1]}, "ValueError: got 1 for the 2 events"),
        ({"num_workers": 0}, "ValueError: num_workers must be 1 or more"),
        ({"seed": 0.5}, "TypeError: seed must be an integer"),
        ({"communication_period": 0}, "ValueError: 1 or more"),
        ({"params": jnp.zeros(2, jnp.int32)}, "TypeError: floating parameters only"),
    ],
)
def test_refused(options, said):
    with refused(said):
        call(**options)
