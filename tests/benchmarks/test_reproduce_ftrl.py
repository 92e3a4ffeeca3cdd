"""The reproduction of FTRL's sparsity in its short form, and its own parts."""

import sys
import sysconfig

import jax.numpy as jnp
import numpy as np
import pytest

SCRIPT = "reproduce_ftrl"
FEATURES, STEPS, LINES, WIDTH = 30, 40, 3, 6
RATE = 0.5


@pytest.mark.slow
def test_the_page_says_whose_lines_these_are(page):
    assert f"Python {sys.version.split()[0]}" in page and "sha256" in page


@pytest.mark.slow
def test_every_method_trades_weights_for_loss(found):
    curves = found["data"]["curves"]
    names = ["FTRL", "RDA", "FOBOS", "OGD-Count", "proximal_adagrad"]
    assert sorted(curves) == sorted(names)
    for name, runs in curves.items():
        (points,) = runs  # one seed
        validation, test, sizes = np.array(points).T
        assert len(points) == 12
        assert (np.diff(sizes) < 0).all(), name
        # Far from guessing, and the two sets of lines are alike.
        assert (validation[:8] < 0.3).all() and (test[:8] < 0.3).all()
        np.testing.assert_allclose(validation, test, atol=0.05)
        assert test.argmin() < 5 < 10 < test.argmax()
    # Without l1, FTRL and RDA use each feature that was seen.
    assert curves["FTRL"][0][0][2] == curves["RDA"][0][0][2]
    rates, more, published = found["tables"]
    assert [row[0] for row in rates["rows"]] == [*names, "global rate, seed 0"]
    assert more["columns"] == ["FTRL's l1", "AucLoss", "FTRL's", *names[1:]]
    assert len(more["rows"]) == 11
    expected = ["+3 %", "+38 %", "+216 %", "-11.2 %"]
    assert [row[1] for row in published["rows"]] == expected


@pytest.mark.slow
def test_ftrl_needs_fewest_weights(found):
    data = found["data"]
    assert min(data["ogd_count"]["4.0"] + data["ogd_count"]["8.0"]) > 50
    assert data["fobos"][0] > 0
    assert all(abs(more[0]) < 30 for more in data["rda"].values())
    assert data["gains"][0] < -5
    assert len(found["criteria"]) == 6


@pytest.mark.slow
def test_rows_and_dense_gradients_give_the_same_step(found):
    assert found["data"]["differing"] == 0
    assert found["data"]["zeros"] == 0
    assert found["data"]["apart"] < 1e-5


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


def by_hand(name, penalty, batches):
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
    expected = by_hand(name, penalty, batches)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    zeros = np.asarray(weights) == 0
    assert 0 < zeros.sum() < FEATURES
    np.testing.assert_array_equal(zeros, expected == 0)


def test_without_a_penalty_all_are_gradient_descent(module):
    sparse = module("sparse_methods")
    batches = batches_of(2)
    expected = by_hand("ogd_count", 0.0, batches)
    for name in ("ftrl", "fobos", "ogd_count"):
        weights = sparse.train(getattr(sparse, name), RATE, 0.0, FEATURES, *batches)
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


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


def test_a_rule_that_differs_is_seen_beside_dense_gradients(module, monkeypatch):
    sparse = module("sparse_methods")
    batches = batches_of(4)
    rows, dense, differing, _ = sparse.against_dense(RATE, 0.5, FEATURES, *batches)
    assert differing == 0
    np.testing.assert_allclose(rows, dense, atol=1e-6)
    take = sparse.oxs.take
    broken = lambda table, ids: take(table, ids) + jnp.float32(1e-6)  # noqa: E731
    monkeypatch.setattr(sparse.oxs, "take", broken)
    assert sparse.against_dense(RATE, 0.5, FEATURES, *batches)[2] > 0


def test_nonzeros_at_equal_loss(script):
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


def test_lines_and_labels(module, monkeypatch, tmp_path):
    for name, text in {
        "test/inside.py": "a = b + c\n" * 3,
        "package/test/deeper.py": "p = q\n",
        "top.py": "x = y\n\nx\n",
        "site-packages/other.py": "p = q\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    load = module("source_lines").load
    ((ids, labels), (rest, _)), about = load((4, 1))
    assert ids.shape == (4, 48) and rest.shape == (1, 48)
    assert "3 files, 7 lines" in about
    ((ids, labels),), _ = load((5,))
    # Three equal lines of five tokens and four pairs; two of three and two.
    assert sorted(labels) == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal((ids < 2**18).sum(1), np.where(labels == 1, 9, 5))
    # Without tests: is the file in a package?
    (tmp_path / "test/inside.py").unlink()
    ((_, labels),), _ = load((2,))
    assert sorted(labels) == [0, 1]
