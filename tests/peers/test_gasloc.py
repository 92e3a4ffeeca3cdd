"""GASLoC: an outer step and momentum for workers that average with partners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.peers.test_gossip import AXIS, GRADS, SGD, D, made, rows, step_of, tree
from tests.refusals import all_refused

N, PERIOD = 4, 2
GRAPHS = {"ring": oxs.graphs.ring(), "pairs": oxs.graphs.random_pairs()}
START = np.random.default_rng(1).normal(size=D).astype(np.float32)


def made_of(graph, outer, **options):
    options = {"communication_period": PERIOD, "seed": 3, **options}
    return oxs.gossip(optax.sgd(1.0), AXIS, graph=graph, outer=outer, **options)


def chosen(graph, number):
    """The matrix of a round, drawn as `gossip` draws it."""
    every = graph.matrices(N)
    if graph.choose == "cycle":
        return every[number % len(every)]
    key = jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), number)
    return every[int(jax.random.randint(key, (), 0, len(every)))]


def published(graph, rate, momentum, weights):
    """The parameters [steps, N, D]; what does not count proposes its center."""
    x = s = last = np.tile(START.astype(float), (N, 1))
    history = []
    for k, gradient in enumerate(GRADS.astype(float)):
        x = x - gradient
        if (k + 1) % PERIOD == 0:
            w = weights[k][:, None]
            u = np.where(w > 0, s + rate * (x - s), s)
            matrix = chosen(graph, k // PERIOD)
            mass = matrix @ w
            mean = np.where(mass > 0, matrix @ (w * u) / np.where(mass > 0, mass, 1), s)
            x = s = mean + momentum * (u - last)
            last = u
        history.append(x)
    return np.array(history), last


@pytest.mark.parametrize(
    ("graph", "context"),
    [
        (GRAPHS["ring"], "shard_map_axes"),
        (GRAPHS["pairs"], "vmap_axes"),
        (oxs.graphs.grid(N), "vmap_axes"),
    ],
    ids=["ring", "pairs", "all"],
)
def test_the_published_update(graph, context):
    ones = np.ones((len(GRADS), N))
    tx = made_of(graph, oxs.outer.gasloc(0.7, 0.6))
    found, state = contexts.replay(context, tx, tree(START), tree(GRADS))
    expected, last = published(graph, 0.7, 0.6, ones)
    np.testing.assert_allclose(rows(found), expected, atol=2e-5)
    np.testing.assert_allclose(rows(state.outer), last, atol=2e-5)
    # The mean of the workers makes DiLoCo's steps, whatever the graph.
    nesterov = optax.sgd(0.7, 0.6, nesterov=True)
    tx = oxs.diloco(optax.sgd(1.0), None, outer=nesterov, communication_period=PERIOD)
    mean, state = tree(START), tx.init(tree(START))
    for gradient in GRADS.mean(1):
        mean, state = oxs.apply_gradients(tx, tree(gradient), state, mean)
    np.testing.assert_allclose(rows(found)[-1].mean(0), rows(mean), atol=2e-5)


def test_without_momentum_it_is_gossip_to_the_bit():
    """Where nothing is rounded; thirds XLA contracts as it fuses the program."""
    start, grads = (tree(np.round(4 * x) / 4) for x in (START, GRADS))
    for graph in (oxs.graphs.exponential(), oxs.graphs.random_pairs()):
        histories = [
            contexts.replay("vmap_axes", made_of(graph, outer), start, grads)
            for outer in (oxs.outer.gasloc(), None)
        ]
        (one, _), (other, _) = histories
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_who_does_not_count_proposes_its_center():
    weights = np.random.default_rng(3).integers(0, 3, (len(GRADS), N))
    weights[5] = 0
    graph = oxs.graphs.metropolis([(0, 1), (1, 2), (2, 3)])
    tx = made_of(graph, oxs.outer.gasloc(0.7, 0.6))
    extra = {"weight": weights.astype(np.float32)}
    found, _ = contexts.replay("vmap_axes", tx, tree(START), tree(GRADS), extra)
    expected, _ = published(graph, 0.7, 0.6, weights)
    np.testing.assert_allclose(rows(found), expected, atol=2e-5)
    grads = GRADS.copy()
    grads[3, 1] = np.nan
    tx = made_of(graph, oxs.outer.gasloc(0.7, 0.6), drop_nonfinite=True)
    found, state = contexts.replay("vmap_axes", tx, tree(START), tree(grads))
    assert np.isfinite(rows(found)).all() and np.isfinite(rows(state.outer)).all()
    assert oxs.metrics(state).dropped.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("name", GRAPHS)
def test_momenta_are_refused_where_workers_drift_apart(name):
    """Without gradients: what is refused drifts, and what is not comes together."""
    rng = np.random.default_rng(0)
    for momentum in (0.3, 0.6, 0.9, 0.97):
        x = last = rng.normal(size=(8, 3))
        matrices = GRAPHS[name].matrices(8)
        for k in range(400):
            which = k if name == "ring" else rng.integers(len(matrices))
            u = x
            x = matrices[which % len(matrices)] @ u + momentum * (u - last)
            last = u
        apart = np.linalg.norm(x - x.mean(0))
        assert np.isfinite(apart)
        refused = False
        try:
            step_of(made(graph=GRAPHS[name], outer=oxs.outer.gasloc(1.0, momentum)))
        except ValueError as error:
            assert "drift apart" in str(error)
            refused = True
        assert refused == (apart > 1), (momentum, apart)


gasloc, ONES, OF_DILOCO = (
    oxs.outer.gasloc,
    jnp.ones(3),
    {"inner": SGD, "axis_name": AXIS},
)

test_refused = all_refused(globals())(r"""
gasloc(1.0, 1.0)  # ValueError: momentum must be a number in \[0, 1\)
gasloc(-1.0)  # ValueError: learning_rate must be a number in \[0, inf\)
made(graph=oxs.graphs.random_pairs(), outer=gasloc(1.0, 0.9)).init(ONES)
    # ValueError: random pairs, the momentum 0.9 of gasloc
oxs.diloco(**OF_DILOCO, outer=gasloc())  # TypeError: outer must be
""")
