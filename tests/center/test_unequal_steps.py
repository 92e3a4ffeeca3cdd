"""Workers that make unequal numbers of steps between meetings: who stands still."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts

PERIOD, ROUNDS, N = 3, 5, contexts.REPLICAS
# Whether each worker has a batch: all, a slow one, one with none, nobody, all again.
THERE = np.ones((ROUNDS, PERIOD, N), bool)
THERE[1, :, 1] = [False, False, True]
THERE[1, :, 3] = [True, False, True]
THERE[2, :, 0] = False
THERE[3] = False
STEPS = THERE.cumsum(1).astype(np.float32)  # of each worker, since the last meeting


def rate(count):
    return 0.2 / (1 + count.astype(jnp.float32))


INNER = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(rate))
STANDING_STILL = optax.conditionally_mask(
    INNER, lambda count, there, **_: there, forward_extra_args=True
)
PARAMS = {"w": jnp.linspace(-1, 1, 4), "b": jnp.float32(0.5)}
RULES = {
    "diloco": functools.partial(oxs.diloco, outer=optax.sgd(0.7, 0.9)),
    "elastic": functools.partial(oxs.elastic_average, moving_rate=0.2, rho=0.3),
}


def grads_of(there=True):
    """Of all steps and workers; without a batch the mean of a loss is NaN."""
    numbers = np.random.default_rng(0)
    shapes = {"w": (ROUNDS * PERIOD, N, 4), "b": (ROUNDS * PERIOD, N)}
    grads = {name: numbers.normal(size=shape) for name, shape in shapes.items()}
    flags = np.reshape(there, (-1, N)) if np.ndim(there) else np.ones((1, N), bool)
    grads["w"] = np.where(flags[..., None], grads["w"], np.nan)
    grads["b"] = np.where(flags, grads["b"], np.nan)
    return {name: x.astype(np.float32) for name, x in grads.items()}


def replay(context, rule, inner, grads, **extra):
    tx = RULES[rule](inner, contexts.AXIS, communication_period=PERIOD)
    return contexts.replay(context, tx, PARAMS, grads, extra)


@functools.cache
def restated(rule):
    """In NumPy: parameters [T, N, ...] and how often each worker's inner has stepped.

    A-EDiT's weights (arXiv 2412.07210): the steps of a worker over those of all.
    """
    grads = grads_of(THERE)
    history = {name: [] for name in grads}
    for name, c in ((name, np.asarray(x, np.float64)) for name, x in PARAMS.items()):
        x, s, outer = [c] * N, c, np.zeros_like(c)
        momentum, counts = [np.zeros_like(c)] * N, [0] * N
        for t, (there, steps) in enumerate(
            zip(THERE.reshape(-1, N), STEPS.reshape(-1, N), strict=True)
        ):
            for i in np.flatnonzero(there):
                pull = 0.3 * (x[i] - s) if rule == "elastic" else 0
                momentum[i] = 0.9 * momentum[i] + grads[name][t, i] + pull
                x[i] = x[i] - 0.2 / (1 + counts[i]) * momentum[i]
                counts[i] += 1
            if t % PERIOD == PERIOD - 1:
                w = steps / max(steps.sum(), 1)
                if rule == "elastic":
                    s, pulls = c, [0.2 * (own - c) for own in x]
                    c = c + (steps > 0).sum() * sum(map(np.multiply, w, pulls))
                    x = list(map(np.subtract, x, pulls))
                else:
                    d = sum(w[i] * (c - x[i]) for i in range(N))
                    if steps.any():  # of nobody there is no mean
                        outer = 0.9 * outer + d
                        c = c - 0.7 * outer
                    x = [c] * N
            history[name].append(np.stack(x))
    return {name: np.stack(x) for name, x in history.items()}, counts


@pytest.mark.parametrize("context", contexts.DISTINCT)
@pytest.mark.parametrize("rule", RULES)
def test_the_one_without_a_batch_stands_still_and_counts_by_its_steps(rule, context):
    extra = {"there": THERE.reshape(-1, N), "weight": STEPS.reshape(-1, N)}
    history, state = replay(context, rule, STANDING_STILL, grads_of(THERE), **extra)
    expected, counts = restated(rule)
    contexts.assert_close(history, expected)
    assert state.local_step.max() == ROUNDS * PERIOD
    count = state.inner.inner_state[1].count
    np.testing.assert_array_equal(count, counts)


@pytest.mark.parametrize("context", ["vmap_axes", "shard_map_axes"])
def test_of_equal_numbers_of_steps_nothing_is_seen(context):
    """Up to how XLA joins the center's step with the choice of what to keep of it."""
    grads, shape = grads_of(), (ROUNDS * PERIOD, N)
    plain, _ = replay(context, "diloco", INNER, grads)
    extra = {"there": np.ones(shape, bool), "weight": np.full(shape, 4, np.float32)}
    found, _ = replay(context, "diloco", STANDING_STILL, grads, **extra)
    contexts.assert_close(found, plain)
