"""Codes of few bits and rotations: what they lose."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optx_sync as oxs
from optx_sync.comm.buffers import pack, unpack
from optx_sync.exchange.codes import LEVELS
from tests.exchange.meeting import AXIS

quantized, rotated = oxs.exchange.quantized, oxs.exchange.rotated


def lost(exchanges: dict[Any, Any], x):
    """The share of the square that one coding of each loses, by name."""

    @jax.jit
    def shares(x):
        left = {name: one.code.encode(x, ())[1] for name, one in exchanges.items()}
        return jax.tree.map(lambda y: jnp.sum(y**2) / jnp.sum(x**2), left)

    return shares(x)


@pytest.mark.parametrize("draw", ["normal", "laplace", "uniform"])
def test_rotated_numbers_lose_what_normal_ones_do(draw):
    """Whatever they are: the distortion of Max's tables, 1960."""
    x = getattr(np.random.default_rng(0), draw)(size=2**18).astype(np.float32)
    x -= x.mean()
    table = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}
    for block in (256, 1024):
        codes = {bits: quantized(bits, block, code="lloyd") for bits in table}
        made = {n: rotated(one, block=block) for n, one in codes.items()}
        found = lost(made, x)
        for bits, share in table.items():
            # A scale that fits so few numbers takes away a little more of the error.
            least = {256: 0.95, 1024: 0.98}[block]
            assert least < found[bits] / share < 1.02
    if draw == "laplace":
        assert all(lost(codes, x)[bits] > 1.3 * share for bits, share in table.items())


def test_one_number_of_a_block_arrives_rotated_and_never_breaks_feedback():
    x = jnp.zeros(512).at[jnp.array([3, 300])].set(jnp.array([5.0, -2.0]))
    codes = {bits: quantized(bits) for bits in (1, 2, 3)}
    for share in lost({n: rotated(one) for n, one in codes.items()}, x).values():
        assert share < 1e-10
    # Without rotation little arrives; but less is lost than zeros would lose.
    for share in lost(codes, x).values():
        assert 0.5 < share < 1


def test_levels_are_the_means_of_the_normal_numbers_nearest_to_them():
    for bits, levels in LEVELS.items():
        middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
        edges, distortion = [0.0, *middles, 40.0], 1.0
        for level, low, high in zip(levels, edges, edges[1:], strict=False):
            mass = math.erf(high / 2**0.5) - math.erf(low / 2**0.5)
            moment = math.exp(-low * low / 2) - math.exp(-high * high / 2)
            assert abs(moment * (2 / math.pi) ** 0.5 / mass - level) < 2e-8
            distortion -= mass * level * level
        assert (
            abs(distortion - {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.0095}[bits])
            < 5e-6
        )


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
def test_what_is_packed_is_unpacked(bits):
    rng = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 9, 64):
        codes = jnp.asarray(
            rng.integers(0, 2**bits, (3, count, 5)), f"uint{max(bits, 8)}"
        )
        packed = pack(codes, bits)
        assert packed.shape[1] <= -(-count * bits // 8) + (bits == 3)
        assert packed.shape[::2] == codes.shape[::2]
        np.testing.assert_array_equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_sixteen_bits_are_rounded_when_they_are_sent_and_summed_in_float32(
    dtype, replicas, weighted
):
    """Of integers, whose sums float32 holds in whatever order they are added.

    The divisors are powers of two: XLA multiplies by the inverse of a scalar, rounded.
    """

    def rounded(x):
        return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float32)

    rng: Any = np.random.default_rng(replicas)
    exchange: Any = quantized(16)
    x = rng.integers(-(2**15), 2**15, (replicas, 1001)).astype(dtype)
    weights = np.resize([0, 1, 3, 4] if weighted else 1, replicas)
    weights = weights.astype(np.float32)

    def meet(x, weight):
        met = exchange.meet(x, (), AXIS, weight=weight if weighted else None)
        piece = exchange.scatter(x, (), AXIS, weight=weight if weighted else None)
        return met.mean, met.lost, piece.mean

    met = jax.jit(jax.vmap(meet, axis_name=AXIS))(x, weights)
    mean, lost, piece = (np.asarray(x, np.float32) for x in met)
    sent = rounded(own := weights[:, None] * x.astype(np.float32))
    expected = sent.sum(0) / weights.sum()
    np.testing.assert_array_equal(mean, [rounded(expected)] * replicas)
    np.testing.assert_array_equal(piece.reshape(-1)[:1001], expected)
    # The owner of a piece owes what the second rounding loses of the sum.
    again = weights.sum() * (expected - rounded(expected))
    np.testing.assert_allclose(lost.sum(0), (own - sent).sum(0) + again, atol=1e-2)
    assert np.abs(again).max() > 1


def test_signs_are_those_of_the_seed():
    x = jnp.asarray(np.random.default_rng(0).laplace(size=1024), jnp.float32)
    code: Any = rotated(quantized(2)).code
    other: Any = rotated(quantized(2), seed=1).code
    messages = [one.encode(x, ())[0].tolist() for one in (code, code, other)]
    assert messages[0] == messages[1] != messages[2]


def test_waves_are_scipys():
    import scipy.fft

    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    code: Any = rotated(oxs.exchange.top_k(64, 64), "dct").code
    message, *_ = code.encode(jnp.asarray(rows.ravel()), ())
    octets = np.asarray(message).reshape(3, -1)
    values = octets[:, 64:].reshape(3, 4, 64).swapaxes(1, 2).copy().view(np.float32)
    values = values[..., 0]
    found = np.zeros_like(values)
    np.put_along_axis(found, octets[:, :64].astype(int), values, 1)
    expected: Any = scipy.fft.dct(rows, norm="ortho")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_lloyds_codes_lose_the_same_share_of_numbers_of_any_size(bits):
    """Squares of numbers below 1e-19 and above 1e19 leave float32."""
    exchange = oxs.exchange.quantized(bits, code="lloyd")
    x = np.random.default_rng(0).normal(size=(2, 1024)).astype(np.float32)

    def lost(x):
        return exchange.meet(x, (), AXIS).lost

    run = jax.jit(jax.vmap(lost, axis_name=AXIS))
    shares = [
        np.square(np.asarray(run(x * np.float32(scale)), float) / scale).mean()
        for scale in (1.0, 1e-30, 1e-20, 1e20, 1e36)
    ]
    np.testing.assert_allclose(shares, shares[0], rtol=1e-3)


def test_a_radial_mean_of_numbers_of_any_size():
    """Or NaN, where it cannot divide by the norm."""
    exchange = oxs.exchange.radial()
    x = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)

    def mean(x):
        return exchange.meet(x, exchange.init(x), AXIS).mean

    run = jax.jit(jax.vmap(mean, axis_name=AXIS))
    for scale in (1e-30, 1e30, 1e35):
        found = np.asarray(run(x * np.float32(scale)), float) / scale
        np.testing.assert_allclose(found, run(x), rtol=1e-4)
    assert np.isnan(run(x * np.float32(1e37))).all()
