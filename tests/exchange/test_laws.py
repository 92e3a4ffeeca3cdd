"""What holds for every linear exchange: the law of what is lost, equal means, sums."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.exchange.error_feedback import ErrorFeedbackState
from tests.contexts import started
from tests.exchange.meeting import mapped, placed, rounds
from tests.refusals import refused, table
from tests.transformations import EXCHANGES as EVERY

quantized, top_k = oxs.exchange.quantized, oxs.exchange.top_k
power_sgd, error_feedback = oxs.exchange.power_sgd, oxs.exchange.error_feedback
rotated = oxs.exchange.rotated
ROUNDS = 100
EXCHANGES = {
    "exact": oxs.exchange.all_reduce(),
    "16 bit": quantized(16),
    "8 bit": quantized(),
    "4 bit": quantized(bits=4, block=7),
    "top-k": top_k(k=2, chunk=50),
    "power": power_sgd(rank=2),
    "4 bit, feedback": error_feedback(quantized(bits=4)),
    "1 bit": rotated(quantized(bits=1, block=16), block=16),
    "3 bit": quantized(bits=3, block=9),
    "2 bit, rotated": error_feedback(rotated(quantized(bits=2), "hadamard", 64)),
    "3 bit, rotated": rotated(quantized(bits=3, code="linear")),
    "top-k, waves": error_feedback(rotated(top_k(k=9, chunk=300), "dct")),
    "2 bit, feedback": error_feedback(top_k(k=9, chunk=300, bits=2)),
    "power, feedback": error_feedback(power_sgd(), decay=0.9),
}
# Sizes that divide nothing.
SHAPES = {
    "scalar": ((), np.float32),
    "empty": ((0, 3), np.float32),
    "matrix": ((11, 6), np.float32),
    "cube": ((5, 3, 4), jnp.bfloat16),
}
FEW = ("4 bit, feedback", "2 bit, feedback")
ROTATED = ("2 bit, rotated", "3 bit, rotated")
# Those whose numbers are rounded with the others of their block, of any leaf.
MIXED = (*ROTATED, "1 bit", "top-k, waves")
# How the replicas are mapped, how many, with weights or not, and what they exchange by:
# all exchanges stand on the same few collectives.
CASES = [
    ("vmap", 3, True, (*FEW, *ROTATED, "16 bit", "1 bit", "3 bit", "top-k, waves")),
    ("vmap", 1, False, ("4 bit", "top-k")),
    ("shard_map", 8, False, ("16 bit", "8 bit", "top-k", "power, feedback", *ROTATED)),
    ("shard_map", 3, True, ("16 bit", *FEW[:1])),
    ("shard_map_unchecked", 3, True, FEW),
    ("pmap", 3, True, ("16 bit", *FEW)),
    ("sharded_workers", 4, True, ("16 bit", *FEW, *ROTATED, "power")),
]


def inputs(replicas):
    """Trees [N, T, ...] and weights [N, T], zeros and ones of all replicas among."""
    rng = np.random.default_rng(replicas)
    # Of different sizes, as gradients of layers are.
    trees = {
        name: (rng.normal(size=(replicas, ROUNDS, *shape)) * 10.0**place).astype(dtype)
        for place, (name, (shape, dtype)) in enumerate(SHAPES.items(), -3)
    }
    weights = rng.integers(0, 4, (replicas, ROUNDS)).astype(np.float32)
    weights[:, 3] = 0
    return trees, weights


@functools.cache
def met(context, replicas, weighted, names):
    """Trees, weights and what each exchange made of them."""
    trees, weights = inputs(replicas)
    exchanges = {name: EXCHANGES[name] for name in names}
    program = mapped(context, rounds(exchanges, weighted), replicas)
    results = program(*placed(context, (trees, weights), replicas))
    if not weighted:
        weights = np.ones_like(weights)
    return trees, weights.astype(np.float64), jax.tree.map(np.asarray, results)


def weighed(x, weights):
    """w x in float64; the weights lie along the first axes of x."""
    scale = weights.reshape(weights.shape + (1,) * (x.ndim - weights.ndim))
    return scale * x.astype(np.float64)


def largest(trees, weights):
    """The largest sum over the replicas of the magnitudes of what they send."""
    sums = [np.abs(weighed(x, weights)).sum(0).max(initial=0) for x in trees.values()]
    return max(sums)


def assert_sums(actual, expected, of, message, relative=1e-6):
    """Sums to rounding: to `relative` of the sum of the magnitudes `of` its terms."""
    error = np.abs(actual - expected)
    assert (error <= relative * of.max(initial=0)).all(), (message, error.max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_what_is_lost_is_known(case):
    trees, weights, results = met(*case)
    for name, (means, lost, _, (total, also)) in results.items():
        assert np.array_equal(total, np.broadcast_to(weights.sum(0), total.shape)), name
        x = trees["scalar"]
        assert_sums(also[0], x.sum(0), np.abs(x).sum(0), name)
        beside = largest(trees, weights) if name in MIXED else 0.0
        assert np.array_equal(also, np.broadcast_to(also[:1], also.shape)), name
        for leaf, x in trees.items():
            mean, sent = means[leaf], weighed(x, weights)
            assert mean.dtype == x.dtype, (name, leaf)
            assert np.array_equal(mean, np.broadcast_to(mean[:1], mean.shape)), name
            # What an all-reduce rounds to half precision nobody knows.
            exact = lost is None
            owed = np.zeros(x.shape) if exact else lost[leaf].astype(np.float64)
            assert_sums(
                weighed(mean[0], weights.sum(0)),
                (sent - owed).sum(0),
                (np.abs(sent) + np.abs(owed)).sum(0) + beside,
                (name, leaf),
                0.004 if exact and x.dtype != np.float32 else 1e-6,
            )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_feedback_gives_back_what_was_lost(case):
    """All that was sent in has arrived in the end, or is owed."""
    trees, weights, results = met(*case)
    for name, (means, _, state, _) in results.items():
        if not isinstance(state, ErrorFeedbackState) or "power" in name:
            continue
        beside = ROUNDS * largest(trees, weights) if name in MIXED else 0.0
        for leaf, x in trees.items():
            arrived = weighed(means[leaf][0], weights.sum(0))
            owed = state.error[leaf].astype(np.float64)
            sent = weighed(x, weights)
            assert_sums(
                arrived.sum(0) + owed.sum(0),
                sent.sum((0, 1)),
                np.abs(sent).sum((0, 1)) + np.abs(arrived).sum(0) + beside,
                (name, leaf),
            )
            # It is more than rounding, and does not grow with the rounds.
            if x.size and x.dtype == np.float32 and leaf != "scalar":
                assert 1e-3 < np.abs(owed).max() / np.abs(sent).max() < 20, (name, leaf)


def test_an_array_that_all_replicas_of_vmap_have_in_common_is_met():
    """The gradient of what a loss does not use is one; JAX's all-to-all mistakes it."""
    x = jnp.arange(-5.0, 6.0)
    whole = ("all_reduce", "median", "trimmed_mean", "krum", "quantized")

    def means(names):
        made = [one for name in names for one in EVERY[name]]
        return jax.vmap(
            lambda _: [one.meet(x, one.init(x), "workers").mean for one in made],
            axis_name="workers",
        )

    for found in jax.eval_shape(means(EVERY), jnp.arange(8)):
        assert found.shape == (8, 11)
    for found in jax.jit(means(whole))(jnp.arange(8)):
        np.testing.assert_allclose(found, [x] * 8, atol=0.3)


def test_an_all_reduce_in_a_narrower_dtype_rounds_what_travels():
    x = jnp.array([[1 + 2.0**-10, 3.0], [1 + 2.0**-10, 5.0]])
    exchange = oxs.exchange.all_reduce(jnp.bfloat16)
    run = jax.vmap(lambda x: exchange.meet(x, (), "workers")[0], axis_name="workers")
    assert np.asarray(run(x)).tolist() == [[1.0, 4.0]] * 2


def test_a_mean_in_a_narrow_dtype_is_divided_before_it_is_added():
    """As by torch's `fp16_compress_hook`, 9992: eight times 1e4 would be infinite."""
    exchange: Any = oxs.exchange.all_reduce(jnp.float16)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    halves: Any = {"dtype": jnp.float16, "group_assignment": groups}

    def means(x, weight=None):
        return (
            exchange.meet(x, (), "workers", weight=weight).mean,
            exchange.scatter(x, (), "workers", weight=weight).mean,
            oxs.reduce(x, "workers", weight=weight, **halves),
        )

    x = jnp.full((8, 8), 1e4)
    for arguments in ((x,), (x, jnp.ones(8))):
        for found in jax.vmap(means, axis_name="workers")(*arguments):
            np.testing.assert_allclose(found, 1e4, rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["exact", "16 bit", "8 bit", "top-k", "power, feedback"]
)
def test_weights_whose_sum_overflows_are_loud(name):
    """Divided by infinity every mean is 0, and a center stays where it is."""
    exchange: Any = EXCHANGES[name]

    def means(x, weight):
        state = exchange.init(x)
        whole = exchange.meet(x, state, "workers", weight=weight).mean
        if exchange.scatter is not None:
            met = exchange.scatter(x, state, "workers", weight=weight)
            return whole, met.mean
        return (whole,)

    x, weight = jnp.full((2, 8, 8), 1e-3), jnp.full(2, 3e38)
    for mean in jax.vmap(means, axis_name="workers")(x, weight):
        assert not np.isfinite(mean).any()


def by_hand(answer):
    """An exchange of a user's own, that returns what is given and adds nothing up."""

    def meet(tree, state, axis_name, *, weight=None):
        return answer(oxs.reduce(tree, axis_name, weight=weight), state)

    return oxs.exchange.Exchange(
        lambda tree: (), meet, linear=True, takes_weights=True, remembers=False
    )


def test_an_exchange_of_your_own_may_leave_the_sums_to_the_library():
    inside = by_hand(lambda mean, state: oxs.exchange.Met(mean, state=state))
    exchange = error_feedback(inside)

    def meet(x, weight):
        state = exchange.init(x)
        alike = exchange.meet(x, state, "workers")
        weighted = exchange.meet(x, state, "workers", weight=weight)
        found: list[Any] = [weighted.weight, alike.weight, weighted.mean]
        return jnp.stack(found)

    x, weights = jnp.array([1.0, 4.0, 5.0]), jnp.array([1.0, 2.0, 0.0])
    found = jax.vmap(meet, axis_name="workers")(x, weights)
    assert found.tolist() == [[3.0, 3.0, 3.0]] * 3


def test_measures_through_an_exchange_of_your_own():
    """They are added up beside an exchange that carries nothing but its tree."""

    def meet(tree, state, axis_name, *, weight=None, also=None):
        return oxs.exchange.Met(oxs.reduce(tree, axis_name, weight=weight))

    norms = []
    for exchange in (None, oxs.exchange.Exchange(lambda tree: (), meet, True)):
        options: Any = {"communication_period": 1, "measure": True}
        tx = oxs.local_sgd(optax.sgd(1.0), "workers", exchange=exchange, **options)
        step, params, state = started(tx, jnp.zeros(2), 2, "workers")
        params, state = step(params, state, jnp.array([[3.0, 4.0], [0.0, 5.0]]))
        norms.append(float(oxs.metrics(state, params).contribution_norm))
    assert norms == [5.0, 5.0]


SILENT = oxs.exchange.Exchange(
    lambda tree: (),
    lambda tree, state, axis, **more: oxs.exchange.Met(oxs.reduce(tree, axis)),
)
TUPLE = by_hand(lambda mean, state: (mean, None, state))
KEEPING = by_hand(lambda mean, state: oxs.exchange.Met(mean, state=mean))


def step_with(exchange):
    tx = oxs.cross_shard(optax.sgd(1.0), "workers", exchange=exchange)
    step = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="workers")
    return step(jnp.array([1.0, 3.0]))


@table(r"""
step_with(TUPLE)  # TypeError: oxs.exchange.Met; this one returned a tuple
step_with(KEEPING)  # ValueError: declares remembers=False, .* which nobody keeps
error_feedback(SILENT)
oxs.sync_replicas(optax.sgd(0.1), "workers", 2, exchange=SILENT)
    # ValueError: this one does not declare
""")
def test_what_an_exchange_of_your_own_must_say(call, said):
    assert step_with(SILENT).tolist() == [-2, -2]  # which works where nobody asks
    with refused(said):
        eval(call, globals())
