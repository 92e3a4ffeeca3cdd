"""Row-sparse steps beside their peers, run as a user runs it, in its short form."""

import importlib.util

import numpy as np
import pytest

from tests.benchmarks.reading import criterion

SCRIPT = "bench_sparse"
NAMES = ["gradient_descent", "adagrad", "custom_adam"]
COUNTS, ROWS = ["16", "64", "1,024", "16,384"], 16_384
HAS_TENSORFLOW, HAS_TORCH = map(importlib.util.find_spec, ("tensorflow", "torch"))


@pytest.mark.slow
def test_who_is_missing_is_said(page):
    assert ("Not installed" in page) != bool(HAS_TENSORFLOW and HAS_TORCH)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(found):
    lengths = found["data"]["by_length"]
    assert list(lengths) == NAMES
    for times, temporary in lengths.values():
        assert list(times) == list(temporary) == ["1,000", "10,000", "100,000"]
        (needed,) = set(temporary.values())
        # Some arrays of the rows touched, 4 KiB each; the smallest table has 64 KB.
        assert 4_096 <= needed < 64_000
    assert criterion(found, "the compiled step needs as many temporary bytes")["met"]


@pytest.mark.slow
def test_every_side_is_timed_for_every_kind_of_rows(found):
    results = found["data"]["by_touched"]
    assert list(results) == NAMES
    for name, (kinds, _) in results.items():
        assert list(kinds) == [*COUNTS, "sorted", "repeated"]
        sides = {"ours", "dense"} | ({"torch"} if HAS_TORCH else set())
        if HAS_TENSORFLOW and name != "custom_adam":
            sides.add("TensorFlow")
        for times in kinds.values():
            assert set(times) == sides
            assert {len(taken) for taken in times.values()} == {5}
            assert min(min(taken) for taken in times.values()) > 0
    _, _, table = found["tables"]
    orders = ["any order", "sorted", "repeated"]
    assert [row[:2] for row in table["rows"]] == [[n, o] for n in NAMES for o in orders]
    for name, _, _, gain, over_tensorflow, over_torch in table["rows"]:
        assert gain > 0
        assert (over_tensorflow == "-") == (not HAS_TENSORFLOW or name == "custom_adam")
        assert (over_torch == "-") == (not HAS_TORCH)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed")
def test_tensorflows_kernels_make_the_same_steps(found):
    apart = {name: far for name, (_, far) in found["data"]["by_touched"].items()}
    assert apart.pop("custom_adam") is None
    assert max(apart.values()) < 1e-5


def test_rows_touched_are_as_the_kind_says(module):
    gradients = module("sparse_steps").gradients
    for order in ("any order", "sorted", "repeated"):
        pairs = gradients(1_000, 100, order, 3)
        assert len(pairs) == 3
        for indices, values in pairs:
            assert indices.dtype == np.int32 and values.shape == (100, 16)
            assert indices.min() >= 0 and indices.max() < 1_000
            assert (len(np.unique(indices)) < 100) == (order == "repeated")
            assert (np.diff(indices) > 0).all() == (order == "sorted")
        assert not np.array_equal(pairs[0][0], pairs[1][0])
    first, again = (gradients(1_000, 100, "any order", 1)[0] for _ in range(2))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])


def test_break_even_is_where_both_take_as_long(module):
    break_even = module("sparse_steps").break_even
    counts = [16, 64, 256, 1024]

    def at(cost):
        linear = {str(n): {"ours": [n * cost], "dense": [128.0]} for n in counts}
        return break_even(counts, linear | {"sorted": {"ours": [1e9], "dense": [1]}})

    np.testing.assert_allclose([at(1.0), at(0.25), at(100.0)], [128, 512, 16])
    assert at(0.01) is None


def test_a_step_moves_the_rows_it_is_given(module):
    steps = module("sparse_steps")
    table = steps.Table("gradient_descent", 50)
    pairs = steps.gradients(50, 5, "repeated", 2)
    for (grads,) in steps.slices(pairs):
        table(grads)
    expected = np.ones((50, 16), np.float32)
    for indices, values in pairs:
        np.add.at(expected, indices, -np.float32(0.01) * values)
    np.testing.assert_allclose(table.held[0], expected, rtol=1e-6)
