"""A round is an update: a center rule is `cross_shard` of what workers contribute."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts

AXIS, N, STEPS = contexts.AXIS, contexts.REPLICAS, 9
INNER, RATE = optax.sgd(0.1, momentum=0.9), 0.1
PARAMS = {"b": jnp.linspace(-1, 1, 5), "w": jnp.linspace(-2, 2, 24).reshape(6, 4)}
PARTS = (("b", "w"),), (("b",), ("w",))


def by_leaf(path, leaf):
    return int(path[-1].key == "w")


def drawn(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


GRADS = {name: drawn(STEPS, N, *x.shape) for name, x in PARAMS.items()}
WEIGHTS = np.arange(STEPS * N, dtype=np.float32).reshape(STEPS, N) % 3 + 1
# (whether it is elastic averaging, the outer optimizer)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
RULES: dict[str, Any] = {
    "diloco": (oxs.rules.diloco(NESTEROV), NESTEROV),
    "local_sgd": (oxs.rules.local_sgd(), None),
    "elastic": (oxs.rules.elastic(moving_rate=RATE, rho=0.0), None),
}
EXCHANGES = {
    "mean": None,
    "radial": oxs.exchange.radial(),
    "penalised": oxs.exchange.penalized(),
    "16 bits": oxs.exchange.quantized(bits=16),
    "4 bits": oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4)),
}


def restated(
    name, period, exchange, parts, overlap, weighed, inner_state="keep", **options
):
    """The parameters after each step, by the public `cross_shard` and no conditional.

    Contributions are those of the workers as they come into a step (`overlap`), or as
    they leave it.
    """
    sums = name == "elastic"
    outer = RULES[name][1] or optax.stateless(lambda mean, params: mean)
    meet = oxs.cross_shard(
        outer, AXIS, exchange=exchange, reduction="sum" if sums else "mean", **options
    )

    def run(grads, weights):
        own = functools.partial(oxs.localize, axis_name=AXIS)
        x, center, inner = own(PARAMS), PARAMS, INNER.init(own(PARAMS))
        states = [meet.init({leaf: PARAMS[leaf] for leaf in part}) for part in parts]
        waits, history = None, []
        for step in range(STEPS):
            came, given = x, jax.tree.map(lambda g, step=step: g[step], grads)
            updates, inner = INNER.update(given, inner, x)
            x = optax.apply_updates(x, updates)
            due = (step + 1) % (period // len(parts)) == 0
            turn = (step + 1) // (period // len(parts)) - 1
            now = (turn % len(parts), weights[step]) if due else None
            lands, waits = (waits, now) if overlap else (now, None)
            if lands is not None:
                k, weight = lands
                brings = came if overlap else x
                before = {leaf: center[leaf] for leaf in parts[k]}
                sent = {
                    leaf: RATE * (brings[leaf] - c)
                    if sums
                    else (c - brings[leaf]) * (1 if name == "diloco" else -1)
                    for leaf, c in before.items()
                }
                extra = {"weight": weight} if weighed else {}
                move, states[k] = meet.update(sent, states[k], before, **extra)
                after = optax.apply_updates(before, move)
                pulled = {
                    leaf: x[leaf] - RATE * (x[leaf] - before[leaf]) for leaf in after
                }
                x, center = x | (pulled if sums else own(after)), center | after
                if inner_state == "average":
                    inner = own(jax.lax.pmean(inner, AXIS))
                elif inner_state == "reset":
                    inner = INNER.init(x)
            history.append(x)
        return history

    return jax.jit(jax.vmap(run, axis_name=AXIS))(
        jax.tree.map(lambda g: g.swapaxes(0, 1), GRADS), WEIGHTS.T
    )


# With which numbers are the same where all are finite.
WATCHED = {"drop_nonfinite": True, "measure": True}
# (rule, exchange, number of parts, overlap, weights, options of both)
CASES = {
    "diloco": ("diloco", "mean", 1, False, False, {}),
    "weighed": ("diloco", "mean", 1, False, True, {}),
    "radial, weighed": ("diloco", "radial", 1, False, True, {}),
    "penalised": ("diloco", "penalised", 1, False, False, {}),
    "parts, 4 bits": ("diloco", "4 bits", 2, False, True, {}),
    "overlap": ("diloco", "mean", 1, True, False, {}),
    "overlap, weighed parts": ("diloco", "mean", 2, True, True, {}),
    "overlap, radial": ("diloco", "radial", 1, True, True, {}),
    "overlap, parts, 4 bits": ("diloco", "4 bits", 2, True, False, {}),
    "elastic": ("elastic", "mean", 1, False, False, {}),
    "elastic, overlap": ("elastic", "mean", 2, True, False, {}),
    "pieces": ("diloco", "mean", 1, False, True, {"shard_state": True}),
    "pieces, overlap, parts, 4 bits": (
        "diloco",
        "4 bits",
        2,
        True,
        True,
        {"shard_state": True},
    ),
    "local SGD, measured": ("local_sgd", "mean", 1, False, False, {"measure": True}),
    "averages": ("diloco", "mean", 1, False, False, {"inner_state": "average"}),
    "resets": ("elastic", "mean", 1, False, False, {"inner_state": "reset"}),
    "pieces, overlap, parts, 16 bits": (
        "diloco",
        "16 bits",
        2,
        True,
        True,
        {"shard_state": True},
    ),
    "watched": ("diloco", "4 bits", 1, False, True, WATCHED),
    "watched, parts": ("elastic", "mean", 2, False, False, WATCHED),
    "watched, overlap": ("diloco", "radial", 2, True, True, WATCHED),
    "watched, pieces": (
        "diloco",
        "mean",
        1,
        False,
        True,
        {**WATCHED, "shard_state": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_is_an_update(case):
    name, exchange, number, overlap, weighed, options = CASES[case]
    period = 2 * number
    same = {k: x for k, x in options.items() if k not in WATCHED}
    found = restated(
        name,
        period,
        EXCHANGES[exchange],
        PARTS[number - 1],
        overlap,
        weighed and name != "elastic",
        **same,
    )
    tx = oxs.center_variable(
        INNER,
        RULES[name][0],
        AXIS,
        communication_period=period,
        fragments=None if number == 1 else by_leaf,
        overlap=overlap,
        exchange=EXCHANGES[exchange],
        **options,
    )
    extra = {"weight": WEIGHTS} if weighed else {}
    history, _ = contexts.replay("vmap_axes", tx, PARAMS, GRADS, extra)
    for step, expected in enumerate(found):
        own = {leaf: x[step] for leaf, x in history.items()}
        contexts.assert_close(own, expected, 1e-6)


def test_where_nobody_counts_the_center_and_its_momentum_stay():
    tx = oxs.diloco(INNER, AXIS, outer=NESTEROV, communication_period=2)
    steps = [
        contexts.started(tx, PARAMS, 2, weight=jnp.float32(weight))[0]
        for weight in (0, 1)
    ]
    _, params, state = contexts.started(tx, PARAMS, 2)
    grads = jax.tree.map(lambda g: g[0, :2], GRADS)
    for number in range(6):
        before = state
        params, state = steps[number != 3](params, state, grads)
        met = number in (1, 5)
        for field in ("center", "outer"):
            pairs = zip(
                *(jax.tree.leaves(getattr(s, field)) for s in (before, state)),
                strict=True,
            )
            assert all(np.array_equal(*pair) != met for pair in pairs)


def test_what_is_brought_is_what_comes_into_the_next_step():
    """With `overlap` nothing waits in the state but its weight, whoever resizes it."""
    tx = oxs.diloco(INNER, AXIS, communication_period=2, overlap=True)
    one = tx.init(PARAMS)
    plain = oxs.diloco(INNER, AXIS, communication_period=2).init(PARAMS)
    sizes = [sum(x.size for x in jax.tree.leaves(state)) for state in (one, plain)]
    assert sizes[0] == sizes[1] + 2
    step, params, state = contexts.started(tx, PARAMS, 4)
    grads = jax.tree.map(lambda g: g[0], GRADS)
    for _ in range(2):
        params, state = step(params, state, grads)
    assert int(state.waits) == 2
    with pytest.warns(UserWarning, match="leaving workers have learned"):
        params, state = by_hand.resize(tx, params, state, 2)
    step, *_ = contexts.started(tx, PARAMS, 2)
    brought = jax.tree.map(
        lambda c, x: np.mean(np.asarray(c) - np.asarray(x), 0), state.center, params
    )
    grads = jax.tree.map(lambda g: g[:2], grads)
    after: Any = step(params, state, grads)[1]
    moved = jax.tree.map(
        lambda c, d: np.asarray(c) - 0.7 * 1.9 * d, state.center, brought
    )
    contexts.assert_close(after.center, moved)


def test_measures_of_a_round():
    """With `overlap` of the workers that come into the step; 0 where nobody counts."""
    for overlap in (False, True):
        tx = oxs.diloco(
            INNER, AXIS, communication_period=2, overlap=overlap, measure=True
        )
        steps = [
            contexts.started(tx, PARAMS, 2, weight=jnp.float32(w))[0] for w in (1, 0)
        ]
        _, params, state = contexts.started(tx, PARAMS, 2)
        for number in range(5):
            before, came = state, params
            grads = jax.tree.map(lambda g, t=number: g[t, :2], GRADS)
            params, state = steps[number > 1](params, state, grads)
            if number == 1 + overlap:
                brought: Any = came
                if not overlap:
                    alone = oxs.local_sgd(INNER, AXIS, communication_period=9)
                    step, own, plain = contexts.started(alone, PARAMS, 2)
                    for t in range(2):
                        seen = jax.tree.map(lambda g, t=t: g[t, :2], GRADS)
                        own, plain = step(own, plain, seen)
                    brought = own
                apart = jax.tree.map(
                    lambda x, c: np.asarray(x) - np.asarray(c)[None],
                    brought,
                    before.center,
                )
                squares = [
                    np.sum(a**2, tuple(range(1, a.ndim))) for a in apart.values()
                ]
                found = oxs.metrics(state).distance_before_round
                np.testing.assert_allclose(found, np.sqrt(sum(squares)), rtol=1e-5)
                assert (oxs.metrics(state).update_norm > 0).all()
        assert not np.any(oxs.metrics(state).update_norm)
