"""Parts of the benchmarks that can be wrong: each against NumPy, or by hand."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.cases import OPTIMIZERS
from tests.transformations import made

MACHINES = 100
FEATURES, STEPS, LINES, WIDTH = 30, 40, 3, 6
RATE = 0.5
CASES = (
    *("cross_shard", "sync_replicas", "sync_replicas, with sums by hand"),
    *("sync_replicas, accumulating", "local_sgd"),
    *("diloco", "agn", "elastic_average", "elastic_average, penalty"),
)


@pytest.mark.parametrize("name", CASES)
def test_the_step_by_hand_is_the_library_s(module, name):
    by_hand = module("by_hand")
    assert tuple(by_hand.CASES) == CASES
    case, params = by_hand.CASES[name], {"w": jnp.linspace(-1.0, 1.0, 6)}
    batch = {"w": jnp.stack([jnp.arange(6.0), 3.0 - jnp.arange(6.0) ** 2])}

    def gradient(params, batch):
        return jax.tree.map(operator.sub, params, batch)

    place = NamedSharding(by_hand.mesh_of(2), PartitionSpec(by_hand.AXIS))
    batch, ends = jax.device_put(batch, place), []
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        for make in (by_hand.by_hand, by_hand.with_library):
            step = make(case, params, 2, gradient)
            carry = step.start(params)
            for _ in range(2 * by_hand.PERIOD + 1):
                carry = step.program(carry, batch)
            ends.append(np.asarray(carry[0]["w"]))
    np.testing.assert_allclose(*ends, rtol=1e-6, atol=1e-7)
    assert np.abs(ends[0] - np.asarray(params["w"])).max() > 1e-3


def test_late_machines(module):
    script = module("reproduce_backup_workers")
    # One of two is enough. The second one is busy until 10, then hands in at 11 what it
    # began at 10, while the first one needs 5 for its tenth step.
    times = np.ones((12, 2))
    times[0, 1], times[10, 0] = 10, 5
    assert script.giving_up(times, 1).tolist() == [1] * 12
    assert script.carrying_on(times, 1).tolist() == [1] * 12
    # Both are needed: the last one counts, and nobody is late.
    both = script.giving_up(times, 0)
    assert both.tolist() == [10, *[1] * 9, 5, 1]
    assert script.carrying_on(times, 0).tolist() == both.tolist()
    # Two of three are enough, and one is late by two steps: the others are waited for.
    times = np.array([[1.0, 1, 3], [1, 2, 1], [1, 2, 1], [2, 2, 1]])
    assert script.giving_up(times, 1).tolist() == [1, 1, 1, 2]
    # Until 3 the third one is away. The third step begins at 3.
    assert script.carrying_on(times, 1).tolist() == [1, 2, 1, 2]


def batches_of(seed):
    """Lines in which a feature is at most once, in a table of few features."""
    rng = np.random.default_rng(seed)
    ids = [rng.permutation(FEATURES)[:WIDTH] for _ in range(STEPS * LINES)]
    ids = np.sort(np.reshape(ids, (STEPS, LINES, WIDTH)).astype(np.int32))
    # An id that is no feature.
    ids[..., -1] = np.where(rng.random((STEPS, LINES)) < 0.3, FEATURES, ids[..., -1])
    return ids, (rng.random((STEPS, LINES)) < 0.4).astype(np.float32)


def gradient(weights, ids, labels):
    """Of the logistic losses' sum, and which features the lines have."""
    has = np.zeros((len(ids), FEATURES + 1))
    np.put_along_axis(has, ids, 1.0, axis=1)
    has = has[:, :-1]
    return (1 / (1 + np.exp(-has @ weights)) - labels) @ has, has.any(0)


def shrunk(x, threshold):
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def weights_by_hand(name, penalty, batches):
    """The weights after a pass, each step over the whole table, with NumPy."""
    weights, squares, total, count, anchor = np.zeros((5, FEATURES))
    for ids, labels in zip(*batches, strict=True):
        grad, touched = gradient(weights, ids, labels)
        count += touched
        if name == "ogd_count":
            grad = np.where(count > penalty, grad, 0)
        before, squares = squares, squares + grad**2
        rate = RATE / (1 + np.sqrt(squares))
        total = total + grad
        if name == "ftrl":  # the quadratic terms are centered at the past weights
            anchor += (np.sqrt(squares) - np.sqrt(before)) / RATE * weights
        if name in ("ftrl", "rda"):
            weights = -rate * shrunk(total - anchor, penalty)
        if name == "fobos":
            weights = shrunk(weights - rate * grad, rate * penalty / STEPS)
        if name == "ogd_count":
            weights = weights - rate * grad
    return weights


@pytest.mark.parametrize(
    ("name", "penalty"),
    [("ftrl", 1.0), ("rda", 1.0), ("fobos", 4.0), ("ogd_count", 20.0)],
)
def test_methods_are_those_of_the_papers(module, name, penalty):
    sparse = module("sparse_methods")
    batches = batches_of(1)
    weights = sparse.train(getattr(sparse, name), RATE, penalty, FEATURES, *batches)
    expected = weights_by_hand(name, penalty, batches)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    zeros = np.asarray(weights) == 0
    assert 0 < zeros.sum() < FEATURES
    np.testing.assert_array_equal(zeros, expected == 0)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_global_rate(module, power):
    sparse = module("sparse_methods")
    batches = batches_of(3)
    weights = sparse.train(sparse.global_rate, 0.1, power, FEATURES, *batches)
    expected = np.zeros(FEATURES)
    for step, (ids, labels) in enumerate(zip(*batches, strict=True)):
        grad, _ = gradient(expected, ids, labels)
        expected = expected - 0.1 / (step + 1) ** power * grad
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


def test_nonzeros_at_equal_loss(module):
    script = module("reproduce_ftrl")
    # Halved with each 0.01 of AucLoss, and with each 0.02.
    leader = [script.Point(0, 0.1 + 0.01 * i, 2 ** (10 - i)) for i in range(6)]
    worse = [script.Point(0, 0.103 + 0.01 * i, 2 ** (12 - i / 2)) for i in range(6)]
    worse.append(script.Point(0, 0.125, 5000))  # beaten in both, and left out
    assert script.nonzeros_at(0.115, leader) == pytest.approx(2**8.5)
    assert np.isnan(script.nonzeros_at(0.099, leader))
    curves = {name: [leader] for name in script.METHODS} | {"OGD-Count": [worse]}
    (more,) = script.more_than_ftrl(curves, "OGD-Count", "FTRL", 0.35)
    assert more == pytest.approx(100 * (2 ** (10.65 - 7) - 1))  # at 0.13
    (more,) = script.more_than_ftrl(curves, "OGD-Count", "OGD-Count", 4.0)
    assert more == pytest.approx(100 * (2 ** (10.5 - 6.7) - 1))  # at 0.133
    (more,) = script.more_than_ftrl(curves, "RDA", "FTRL", 0.35)
    assert more == pytest.approx(0)
    assert script.shown([1.0, 2.0, 6.0]) == "+2 % (+1 to +6)"
    assert script.shown([-1.25], 1) == "-1.2 %"
    assert script.shown([1.0, np.nan]) == "-"


def test_every_peer_has_one_of_ours(module):
    peers = module("peers")
    names = {row["ours"]["name"] for row in peers.TABLE.values()}
    assert names == {case.name for case in OPTIMIZERS}
    for others in (peers.OPTAX, peers.KERNELS, peers.TORCH, peers.TORCH_ROWS):
        assert set(others) <= set(peers.OURS)
    for make in (*peers.OURS.values(), *peers.OPTAX.values()):
        assert jax.eval_shape(make().init, jnp.ones(3))
    running = {key for row in peers.KERNELS.values() for key in row.get("running", ())}
    assert running == set(peers.RUNNING)


def test_every_wrapper_is_killed(module):
    named = {name.split(",")[0].split(" ")[0] for name in module("resumed").CASES}
    assert named == {name.partition(",")[0] for name in made()} - {"nested"}
