# SPDX-License-Identifier: Apache-2.0
"""Stability of an outer momentum: do workers drift apart without any gradient?

An Optax transformation cannot declare its momentum, and workers that drift apart show
it nowhere but in their numbers: so the outer optimizer is tried.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.elementwise import eager
from optx_sync.peers.graphs import Graph

# For more workers than this the matrices of a cycle are not multiplied out.
_CHECKED_WORKERS = 128


def check_pairs(outer: optax.GradientTransformation | None) -> None:
    """Refuse a momentum under which many workers drift apart in random pairs."""
    _require_stable(outer, _pairs_growth, "random pairs")


def check_cycle(
    outer: optax.GradientTransformation | None, graph: Graph, workers: int
) -> None:
    """Refuse a momentum under which workers drift apart in the cycle of a graph."""
    if 1 < workers <= _CHECKED_WORKERS:
        _require_stable(
            outer,
            lambda sgd: _cycle_growth(graph.matrices(workers), sgd),
            f"this graph of {workers} workers",
        )


class _Sgd(NamedTuple):
    """SGD that makes steps of -rate (own x gradient + kept x trace)."""

    rate: float
    momentum: float
    own: float  # 0, and 1 with Nesterov's momentum
    kept: float  # 1, and with Nesterov's the momentum

    def step(self, gradient: Any, trace: Any) -> Any:
        """What the rate is multiplied by."""
        return self.own * gradient + self.kept * trace


def _sgd_of(outer: optax.GradientTransformation | None) -> _Sgd | None:
    """The optimizer if it is an SGD, found by four steps; else None."""
    if outer is None:
        return None

    def response(first: float) -> np.ndarray:
        param = jnp.zeros((), jnp.float32)
        state, seen = outer.init(param), []
        for gradient in (first, 0.0, 0.0, 0.0):
            update, state = outer.update(jnp.float32(gradient), state, param)
            seen.append(-float(jnp.asarray(update)))
        return np.array(seen)

    with eager():
        try:
            once, twice = response(1.0), response(2.0)
        except jax.errors.UnexpectedTracerError:
            return None  # an injected hyper-parameter, unknown here
    if not np.allclose(2 * once, twice, rtol=1e-4):
        return None
    momentum = float(once[2] / once[1]) if once[1] else 0.0
    for own, kept in ((0.0, 1.0), (1.0, momentum)):
        sgd = _Sgd(1.0, momentum, own, kept)
        weights = sgd.step(np.eye(4)[0], momentum ** np.arange(4.0))
        rate = once[0] / weights[0]
        if np.allclose(once, rate * weights, rtol=1e-3, atol=1e-6):
            return sgd._replace(rate=float(rate))
    return None


def _pairs_growth(sgd: _Sgd) -> float:
    """The factor by which a round of random pairs multiplies the squared disagreement.

    For many workers, whose partners are independent of them. With z = (s, t), s the
    center and t the trace of one coordinate, z <- A z + B (partner's z), and the second
    moments of z are multiplied by A x A + B x B.
    """
    own, other = np.array([0.5, 0.0]), np.array([-0.5, 0.0])  # the gradient
    trace = np.array([0.5, sgd.momentum])
    step = sgd.step(own, trace)
    a = np.stack([np.array([1.0, 0.0]) - sgd.rate * step, trace])
    b = np.stack([-sgd.rate * sgd.step(other, other), other])
    return float(max(abs(np.linalg.eigvals(np.kron(a, a) + np.kron(b, b)))))


def _cycle_growth(matrices: np.ndarray, sgd: _Sgd) -> float:
    """The factor by which a cycle multiplies the disagreement, in the long run."""
    n = matrices.shape[1]
    one, alone = np.eye(n), np.eye(n) - 1 / n  # `alone` subtracts the mean
    whole, nothing = np.eye(2 * n), np.zeros((n, n))
    for matrix in matrices:
        gradient = (one - matrix) @ alone
        trace = np.hstack([gradient, sgd.momentum * one])
        step = sgd.step(np.hstack([gradient, nothing]), trace)
        center = np.hstack([alone, nothing]) - sgd.rate * step
        whole = np.vstack([center, trace]) @ whole
    return float(max(abs(np.linalg.eigvals(whole))))


def _require_stable(
    outer: optax.GradientTransformation | None,
    growth: Callable[[_Sgd], float],
    what: str,
) -> None:
    sgd = _sgd_of(outer)
    if sgd is not None and growth(sgd) > 1 + 1e-3:
        kind = "Nesterov momentum" if sgd.own else "momentum"
        raise ValueError(
            f"With {what}, an outer rate of {sgd.rate:.3g} and {kind} "
            f"{sgd.momentum:.3g} the workers drift apart even without gradients: their "
            "disagreement grows. Pass a lower momentum, outer=optax.sgd(0.7, "
            "momentum=0.5) for example."
        )
