"""What other libraries made of the same input, as they gave it: means of every kind.

Each table says whose figures they are: where they stand in the other library's own
tests, or which call of which version gave them. Whole runs are in test_others_runs.py,
those of torchft in center/test_torchft.py, of TensorFlow and RETURNN in the golden
files.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand

AXIS = "clients"
FEDJAX = "google/fedjax c57ee19, "
FLOWER = "flwr 1.42.0, flwr.server.strategy.aggregate."
# The parameters of four clients, and the number of examples of each.
FOUR = (
    np.array([[1, 2, 3], [-2, 4, 0.5], [7, 0, 2], [0, 0, 10]]),
    np.array(
        [[[0, 1], [2, 3]], [[5, -1], [0, 8]], [[1, 1], [1, -6]], [[-3, 2], [2, 2]]]
    ),
)
EXAMPLES = [1, 2, 5, 4]
# Values [clients, ...] of a tree, weights and weighted mean.
WEIGHTED: dict[str, tuple[Any, Any, Any]] = {
    FEDJAX + "aggregator_test.py, test_mean_aggregator": (
        {"w": [[1, 2, 3], [2, 4, 6], [1, 3, 5]]},
        [2, 4, 2],
        {"w": [1.5, 3.25, 5]},
    ),
    FEDJAX + "tree_util_test.py, test_tree_mean": (
        ([0, 2, 4], [1, 3, 5]),
        [6, 7, 8],
        (2.1904761904761907, 3.1904761904761907),
    ),
    # The parameters 0, 2, 4 after rates of 1 / 10 and 1 / 4, and of 1 / 18.
    FEDJAX + "fed_avg_test.py, test_federated_averaging": (
        {"w": np.outer([0.9 * 0.75, 17 / 18], [0, 2, 4])},
        [3, 2],
        {"w": [0, 1.5655555, 3.131111]},
    ),
    FLOWER + "aggregate": (
        FOUR,
        EXAMPLES,
        ([2.6666666666666665, 0.8333333333333334, 4.5], [[0.25, 1], [1.25, -0.25]]),
    ),
    FLOWER + "weighted_loss_avg": ([0.5, 0.25, 1], [10, 30, 60], 0.725),
}


def leaves(tree):
    """A tree of lists and numbers as one of arrays; tuples and dicts are its nodes."""
    return jax.tree.map(
        lambda x: np.asarray(x, np.float32), tree, is_leaf=lambda x: isinstance(x, list)
    )


def assert_all_have(found, mean, rtol, atol):
    """That [clients, ...] of a tree is the mean on all of them."""

    def check(found, mean):
        mean = np.broadcast_to(mean, found.shape)
        np.testing.assert_allclose(found, mean, rtol=rtol, atol=atol)

    jax.tree.map(check, found, leaves(mean))


@pytest.mark.parametrize("source", WEIGHTED)
def test_means_with_the_weights_of_others(source):
    values, weights, mean = WEIGHTED[source]

    def client(values, weight):
        tx = oxs.cross_shard(optax.sgd(1.0), AXIS)
        step = tx.update(values, tx.init(values), weight=weight)[0]
        # Federated averaging: each client moves to its values, and they meet.
        local = oxs.local_sgd(optax.sgd(1.0), AXIS, communication_period=1)
        start = jax.tree.map(jnp.zeros_like, values)
        grads = jax.tree.map(jnp.negative, values)
        params, state = oxs.apply_gradients(
            local, grads, local.init(start), start, weight=weight
        )
        mean = oxs.reduce(values, AXIS, weight=weight)
        return mean, jax.tree.map(jnp.negative, step), params, state.center

    clients = jax.jit(jax.vmap(client, axis_name=AXIS))
    means = clients(leaves(values), np.asarray(weights, np.float32))
    for found in means:
        assert_all_have(found, mean, rtol=1e-6, atol=0)


BYZFL = "byzfl 0.0.11, byzfl."
I, J = np.indices((9, 5))
NINE = ((3 * I * I + 5 * J + I * J) % 11 - 5) / 4  # two of nine send other things
NINE[7] += 20
NINE[8] *= -30
# Values [replicas, ...], the exchange, its result. ByzFL's Krum adds up the n - f - 1
# nearest, the paper and ours n - f - 2: its f is ours and one more.
ROBUST: dict[str, tuple[Any, oxs.exchange.Exchange, Any]] = {
    BYZFL + "Median()": (NINE, oxs.exchange.median(), [0, 0.75, 0.5, 1, 0.5]),
    BYZFL + "TrMean(2)": (
        NINE,
        oxs.exchange.trimmed_mean(2),
        [0.05, 0.35, 0.45, 0.8, 0.6],
    ),
    BYZFL + "GeometricMedian(nu=1e-6, T=200)": (
        NINE,
        oxs.exchange.geometric_median(100),
        [0.0986219218, 0.413412189, 0.340364269, 0.729919132, 0.553076932],
    ),
    BYZFL + "Krum(2)": (NINE, oxs.exchange.krum(1, m=1), [1, 0.75, 0.5, 0.25, 0]),
    BYZFL + "MultiKrum(2)": (
        NINE,
        oxs.exchange.krum(1, m=7),
        [-0.142857143, 0.285714286, 0.321428571, 0.357142857, 0.392857143],
    ),
    BYZFL + "Average()(Clipping(2.0)(...))": (
        NINE,
        oxs.exchange.clipped(2.0),
        [-0.0227841791, 0.248149601, 0.213527825, 0.51847194, 0.483850165],
    ),
    FLOWER + "aggregate_median": (
        FOUR,
        oxs.exchange.median(),
        ([0.5, 1, 2.5], [[0.5, 1], [1.5, 2.5]]),
    ),
    FLOWER + "aggregate_trimmed_avg(..., 0.25)": (
        FOUR,
        oxs.exchange.trimmed_mean(1),
        ([0.5, 1, 2.5], [[0.5, 1], [1.5, 2.5]]),
    ),
}


@pytest.mark.parametrize("source", ROBUST)
def test_robust_means_of_others(source):
    values, exchange, mean = ROBUST[source]

    def replica(values):
        return exchange.meet(values, exchange.init(values), AXIS)[0]

    found = jax.jit(jax.vmap(replica, axis_name=AXIS))(leaves(values))
    assert_all_have(found, mean, rtol=2e-5, atol=1e-6)


# Bluefog-Lib/bluefog 9ee376a, bluefog/common/topology_util.py: each graph's matrix.
A, B, C, D = 1 / 3, 0.25, 5 / 12, 0.2
MATRICES = {
    "RingGraph(2)": (oxs.graphs.ring(), [[0.5, 0.5], [0.5, 0.5]]),
    "RingGraph(4)": (
        oxs.graphs.ring(),
        [[A, A, 0, A], [A, A, A, 0], [0, A, A, A], [A, 0, A, A]],
    ),
    "StarGraph(5)": (
        oxs.graphs.metropolis([(0, i) for i in range(1, 5)]),
        [[D] * 5, *([D, *row] for row in 0.8 * np.eye(4))],
    ),
    "MeshGrid2DGraph(6)": (  # two rows of three
        oxs.graphs.metropolis([(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]),
        [
            [C, B, 0, A, 0, 0],
            [B, B, B, 0, B, 0],
            [0, B, C, 0, 0, A],
            [A, 0, 0, C, B, 0],
            [0, B, 0, B, B, B],
            [0, 0, A, 0, B, C],
        ],
    ),
    "FullyConnectedGraph(4)": (oxs.graphs.grid(4), [[B] * 4] * 4),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_bluefog(name):
    graph, matrix = MATRICES[name]
    (found,) = graph.matrices(len(matrix))
    np.testing.assert_allclose(found, matrix, rtol=1e-12)


# The same, GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(n), rank), three rounds:
# from whom each rank receives.
RECEIVED = {
    6: [[5, 0, 1, 2, 3, 4], [4, 5, 0, 1, 2, 3], [2, 3, 4, 5, 0, 1]],
    8: [[7, 0, 1, 2, 3, 4, 5, 6], [6, 7, 0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3]],
}


@pytest.mark.parametrize("n", RECEIVED)
def test_partners_of_bluefog(n):
    rounds = oxs.graphs.exponential().rounds(n)
    assert [list(r.takes[0].source) for r in rounds] == RECEIVED[n]


# torch 2.15.0 on gloo: HierarchicalModelAverager(OrderedDict(...)) of (period, size of
# a group), called once before the training, so that its steps count from 1; the
# parameter of each rank after each of eight steps of SGD(lr=0.5).
RANK, STEP = np.indices((8, 8))
GRADS = (RANK * RANK * 3 + RANK * STEP * 5 + STEP) % 8 - 3.0
SCHEDULES: dict[Any, Any] = {
    ((2, 2), (4, 4)): [
        [1.5, 0, -0.5, 0],
        [1.75, 1.75, -1.25, -1.25],
        [2.25, -0.25, -0.75, -1.25],
        [-0.5] * 4,
        [-1, -0.5, 1, -0.5],
        [-0.75, -0.75, 0.25, 0.25],
        [-2.25, -2.75, -1.25, 0.25],
        [-2] * 4,
    ],
    ((1, 2), (3, 4)): [
        [0.75, 0.75, -0.25, -0.25],
        [1.75, 1.75, -1.25, -1.25],
        [0] * 4,
        [-0.5] * 4,
        [-0.75, -0.75, 0.25, 0.25],
        [-0.25] * 4,
        [-2, -2, -1, -1],
        [-3.5, -3.5, -0.5, -0.5],
    ],
    ((1, 2), (2, 4), (4, 8)): [
        [0.75, 0.75, -0.25, -0.25, 0.75, 0.75, -0.25, -0.25],
        [0.25, 0.25, 0.25, 0.25, -0.75, -0.75, -0.75, -0.75],
        [-0.5, -0.5, 0.5, 0.5, -1.5, -1.5, -0.5, -0.5],
        [-1] * 8,
        [-1.25, -1.25, -0.25, -0.25, -1.25, -1.25, -0.25, -0.25],
        [-0.75, -0.75, -0.75, -0.75, -1.75, -1.75, -1.75, -1.75],
        [-2.5, -2.5, -1.5, -1.5, -3.5, -3.5, -2.5, -2.5],
        [-3] * 8,
    ],
}


@pytest.mark.parametrize("levels", SCHEDULES)
def test_schedules_of_torchs_hierarchical_model_averager(levels):
    expected = np.asarray(SCHEDULES[levels], np.float32)
    ranks = expected.shape[1]
    tx: Any = optax.sgd(0.5)
    for period, size in levels:
        tx = oxs.local_sgd(tx, f"of {size}", communication_period=period)

    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))

    def run(params, state, grads):
        def step(carry, grad):
            params, state = oxs.apply_gradients(tx, grad, carry[1], carry[0])
            return (params, state), params

        return jax.lax.scan(step, (params, state), grads)[1]

    mapped: Any = run
    for place, (_, size) in enumerate(levels):  # the innermost first
        axes = by_hand.state_axes(tx, jnp.zeros(()), level=len(levels) - 1 - place)
        params, state = by_hand.replicate(params, 2), by_hand.replicate(state, 2, axes)
        mapped = jax.vmap(mapped, (0, axes, 0), axis_name=f"of {size}")
    grads = GRADS[:ranks].astype(np.float32).reshape(*(2 for _ in levels), 8)
    found = jax.jit(mapped)(params, state, grads)
    np.testing.assert_array_equal(found.reshape(ranks, 8).T, expected)


TORCH = json.loads(
    (pathlib.Path(__file__).parent / "golden" / "power_sgd_torch.json").read_text()
)


@pytest.mark.parametrize(
    "case", TORCH["cases"], ids=lambda case: f"rank {case['rank']}"
)
def test_means_of_torchs_power_sgd(case):
    """Three rounds with feedback, from the Q that torch drew first.

    There a rank owes what it has more than the mean, here what it lost itself: the sums
    of both, and so the means, are equal.
    """
    grads = np.swapaxes(
        np.asarray(TORCH["gradients"], np.float32), 0, 1
    )  # each rank's own rounds
    exchange = oxs.exchange.error_feedback(
        oxs.exchange.power_sgd(case["rank"], min_rate=TORCH["min_rate"])
    )
    state = exchange.init(jnp.zeros(grads.shape[2:]))
    # [rank, columns] here, the transpose there.
    rank, columns = state.exchange.factors.shape
    factors = np.reshape(np.asarray(case["first_q"], np.float32), (columns, rank)).T
    factors = jnp.asarray(factors)
    state = state._replace(exchange=state.exchange._replace(factors=factors))

    def one_rank(grads):
        def meet(state, grad):
            met = exchange.meet(grad, state, AXIS)
            return met.state, met.mean

        return jax.lax.scan(meet, state, grads)[1]

    for means in jax.jit(jax.vmap(one_rank, axis_name=AXIS))(grads):
        np.testing.assert_allclose(means, case["means"], rtol=0, atol=2e-6)


# learning-at-home/hivemind 4bd43b7, tests/test_compression.py: the mean square that a
# codec may lose of one normal tensor, and of two peers' means. In half precision it
# adds in float32 and sends differences back, 1e-5; here the mean is what travels.
HIVEMIND = {
    "NONE": (oxs.exchange.all_reduce(), 0, 0),
    "FLOAT16": (oxs.exchange.all_reduce(jnp.float16), 5e-8, 4e-5),
    # Each tensor's codes by themselves, as there.
    "UNIFORM_8BIT": (oxs.exchange.quantized(bucket_bytes=1), 8e-4, 1e-2),
}


@pytest.mark.parametrize("codec", HIVEMIND)
def test_what_hivemind_lets_a_codec_lose(codec):
    """And zeros stay zeros, and a tensor is what it is beside any other one."""
    exchange, alone, averaged = HIVEMIND[codec]
    rng = np.random.default_rng(0)
    roots = np.sqrt(np.linspace([0, 300], [500, 800], 1000, axis=1))
    peers = (roots, rng.normal(size=(2, 1000)), np.zeros((2, 5, 5)))
    peers = jax.tree.map(np.float32, peers)

    def meet(tree):
        return exchange.meet(tree, exchange.init(tree), AXIS)[0]

    def both(one, peers):
        run = jax.vmap(meet, axis_name=AXIS)
        return run(one), run(peers), run(peers[1])

    one = rng.normal(size=(1, 128, 128)).astype(np.float32)
    found, means, by_itself = jax.tree.map(np.asarray, jax.jit(both)(one, peers))
    assert np.square(found - one).mean() <= alone
    for mean, tensor in zip(means, peers, strict=True):
        assert np.square(mean - tensor.mean(0)).mean() <= averaged
    assert not means[2].any()
    np.testing.assert_array_equal(means[1], by_itself)


# deepspeedai/DeepSpeed edaa722, runtime/comm/compressed.py: compressed_allreduce of
# these gradients of four ranks, in three rounds that share its errors, on torch 2.13.0
# (collectives between threads, bits packed by NumPy). Each rank's quarter of the
# 30 numbers, padded to 32, has one size; the signs are these.
I, J = np.indices((5, 6))
BIASED = [  # away from 0, as in its tests: the sign of what is 0 is by chance
    [
        ((3 * I * I + 5 * J + I * J + r * (I + 2 * J) + 7 * t * (r + 1)) % 11 - 5) / 4
        + 0.125
        for t in range(3)
    ]
    for r in range(4)
]
ONE_BIT = (
    {
        "-+--+--+": 0.39502206,
        "+++--+--": 0.33808938,
        "+-++++--": 0.32839084,
        "++-+++": 0.5330041,
    },
    {
        "+++++++-": 0.51900244,
        "-+-++-++": 0.5394311,
        "++--+-++": 0.3259679,
        "--+++-": 0.68421376,
    },
    {
        "--+--+++": 0.6014805,
        "--+--+--": 0.5914138,
        "-+++--++": 0.38565832,
        "-+---+": 0.8123372,
    },
)


def one_bit(ranks):
    """DeepSpeed's compressed all-reduce, as an exchange of one's own.

    A sign for each number and one size go to the ranks, each of which serves a part,
    and the mean comes back so; here all travel as floats. What either way loses is
    added the next time.
    """

    def coded(x):
        size = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
        return jnp.where(x >= 0, size, -size)

    def init(tree):
        def owed(x):
            padded = -(-x.size // (8 * ranks)) * 8 * ranks
            return jnp.zeros(padded), jnp.zeros((ranks, padded // ranks))

        return [owed(x) for x in jax.tree.leaves(tree)]

    def meet(tree, state, axis_name, *, weight=None, also=None):
        def one(x, owed):
            own = owed[0] + jnp.pad(x.ravel(), (0, owed[0].size - x.size))
            served = owed[1] + oxs.reduce(coded(own), axis_name).reshape(ranks, -1)
            mean = coded(served)
            owed = own - coded(own), served - mean
            return mean.ravel()[: x.size].reshape(x.shape), owed

        arrays, structure = jax.tree.flatten(tree)
        found = [one(x, owed) for x, owed in zip(arrays, state, strict=True)]
        means, state = zip(*found, strict=True)
        return oxs.exchange.Met(structure.unflatten(means), state=[*state])

    return oxs.exchange.Exchange(init, meet, linear=False)


def test_compressed_all_reduce_of_deepspeed():
    """Its three rounds; and what did not arrive in them is owed."""
    tx: Any = oxs.cross_shard(optax.sgd(1.0), AXIS, exchange=one_bit(4))

    def rank(grads):
        def step(state, grads):
            updates, state = tx.update(grads, state)
            return state, -updates

        return jax.lax.scan(step, tx.init(grads[0]), grads)

    grads = np.asarray(BIASED, np.float32)
    state, means = jax.jit(jax.vmap(rank, axis_name=AXIS))(grads)
    for number, quarters in enumerate(ONE_BIT):
        signed = [
            size if sign == "+" else -size
            for signs, size in quarters.items()
            for sign in signs
        ]
        expected = np.reshape(signed, (5, 6))
        np.testing.assert_allclose(means[:, number], [expected] * 4, rtol=2e-6)
    ((own, served),) = state.exchange
    owed = (own.mean(0) + served[0].ravel())[:30].reshape(5, 6)
    arrived = np.sum(means[0], 0)
    np.testing.assert_allclose(arrived + owed, grads.mean(0).sum(0), atol=2e-6)
