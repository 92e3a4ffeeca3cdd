"""HeLoCo, an outer optimizer that turns stale pseudo-gradients to its momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests.center.test_delayed_nesterov import GRADS, steps
from tests.refusals import all_refused

NAMES = "ok", "shrink", "most", "turn", "kappa"


def corrected(d, m, ok, shrink, most, turn, kappa):
    """The published correction of one array, and which of its cases it was."""
    size, of_m = np.linalg.norm(d), np.linalg.norm(m)
    if not of_m:
        return d, "first"
    u, v = d / size, m / of_m
    c, sure = u @ v, size / (size + kappa * of_m)
    if c >= ok:
        return d, "kept"
    if c < 0:
        return d - min(-shrink * c * sure, most) * c * size * v, "shrunk"
    part = min(turn * (1 - c) * sure, 1)
    turned = (1 - part) * u + part * v
    return size * turned / np.linalg.norm(turned), "turned"


@pytest.mark.parametrize(
    "constants", [(0.5, 1, 1, 0.1, 1), (0.9, 4, 0.3, 3, 0.2), (0, 1, 1, 1, 1)]
)
def test_the_published_update(constants):
    rate, factor, cases = 0.3, 0.8, set()
    grads = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    tx = oxs.outer.heloco(rate, factor, **dict(zip(NAMES, constants, strict=True)))
    found = steps(tx, grads)
    x, m = np.ones(3), np.zeros(3)
    for t, d in enumerate(grads.astype(np.float64)):
        d, case = corrected(d, m, *constants)
        m = factor * m + (1 - factor) * d
        x = x - rate * (d + factor * m)
        cases.add(case)
        np.testing.assert_allclose(found[t], x, rtol=0, atol=2e-5)
    assert cases == {"first", "kept", "shrunk"} | (
        {"turned"} if constants[0] else set()
    )


def test_without_corrections_it_is_nesterov_of_an_average():
    found = steps(oxs.outer.heloco(0.5, 0.9, shrink=0, turn=0))
    average = optax.chain(optax.trace(0.9, nesterov=True), optax.scale(-0.05))
    # d + mu m of the average m is nine tenths of d and a tenth of Nesterov's step.
    rest = optax.chain(optax.scale(-0.45))
    both = steps(average) + steps(rest) - 1
    np.testing.assert_allclose(found, both, rtol=0, atol=1e-5)


def test_a_correction_is_never_larger_than_the_conflict():
    tx = oxs.outer.heloco(1.0, 0.0)
    state = tx.init(jnp.zeros(3))
    momentum = np.array([1.0, 2.0, -2.0], np.float32)
    for d in GRADS:
        _, state = tx.update(jnp.asarray(momentum), state)
        step = -np.asarray(tx.update(jnp.asarray(d), state)[0])
        before, after = d @ momentum, step @ momentum
        assert min(before, 0) <= after + 1e-5 and np.isfinite(step).all()
        assert before > 0 or after <= 1e-5
        assert np.linalg.norm(step) <= np.linalg.norm(d) * (1 + 1e-5)
    zero = tx.update(jnp.zeros(3), state)[0]
    assert not np.asarray(zero).any()


def test_workers_one_by_one_reach_the_target():
    """Workers of one target, whose pushes are late: the rule in the simulation."""
    order = np.random.default_rng(2).integers(0, 4, 400)
    run = oxs.simulate.asynchronous(
        optax.sgd(0.3),
        oxs.rules.diloco(outer=oxs.outer.heloco(0.7, 0.5)),
        jnp.zeros(2),
        lambda worker, params, event: params - jnp.array([1.0, -2.0]),
        jnp.asarray(order),
        num_workers=4,
        communication_period=4,
    )
    np.testing.assert_allclose(run.center[-1], [1.0, -2.0], atol=0.05)


heloco, SGD = oxs.outer.heloco, optax.sgd(1.0)

test_what_is_refused = all_refused(globals())(
    """
heloco(0.7, 1.0)  # ValueError: momentum must be a number in .0, 1.
heloco(0.7, ok=2.0)  # ValueError: ok must be a number in .0, 1.
heloco(0.7, kappa=-1.0)  # ValueError: kappa must be a number in .0, inf.
oxs.diloco(SGD, "workers", outer=heloco(0.7), shard_state=True).init(jnp.ones(8))
  # ValueError: shard_state=True
"""
)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e35])
def test_numbers_whose_squares_leave_float32(scale):
    grads = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    tx = oxs.outer.heloco(1.0, 0.5, turn=3.0)
    plain, state = [], tx.init(jnp.zeros(3))
    large, other = [], tx.init(jnp.zeros(3))
    for d in grads:
        moved, state = tx.update(jnp.asarray(d), state)
        plain.append(np.asarray(moved, float))
        moved, other = tx.update(jnp.asarray(d * np.float32(scale)), other)
        large.append(np.asarray(moved, float) / scale)
    np.testing.assert_allclose(large, plain, rtol=1e-4)


def test_small_numbers_of_a_float16_center():
    tx, found = oxs.outer.heloco(1.0, 0.5, turn=3.0), []
    for dtype in (np.float16, np.float32):
        state, d = tx.init(jnp.zeros(3, dtype)), np.array([3e-4, 1e-4, 2e-4], dtype)
        for sign in (1, -1, 1):
            moved, state = tx.update(jnp.asarray(d * dtype(sign)), state)
        assert moved.dtype == dtype
        found.append(np.asarray(moved, np.float32))
    np.testing.assert_allclose(*found, rtol=0.01)


def test_shards_by_hand_are_one_array_or_refused():
    d = jnp.asarray(np.random.default_rng(2).normal(size=(6, 8)), jnp.float32)

    def run(tx, d):
        state = tx.init(d[0])
        for step in d:
            updates, state = tx.update(step, state)
        return updates

    whole = run(oxs.outer.heloco(1.0, 0.5, turn=3.0), d)
    for check in (True, False):
        tx = oxs.outer.heloco(1.0, 0.5, turn=3.0, shard_axes="rows")
        over = Mesh(np.array(jax.devices()[:4]), "rows")
        spec = P(None, "rows")
        cut = jax.shard_map(
            lambda d, tx=tx: run(tx, d),
            mesh=over, in_specs=spec, out_specs=P("rows"), check_vma=check,
        )  # fmt: skip
        np.testing.assert_allclose(jax.jit(cut)(d), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"shards over the mesh axes .'rows'.*Pass"):
        jax.shard_map(
            lambda d: run(oxs.outer.heloco(1.0, 0.5), d),
            mesh=over, in_specs=spec, out_specs=P("rows"),
        )(d)  # fmt: skip
