# SPDX-License-Identifier: Apache-2.0
"""Stability of an outer momentum: do workers drift apart without any gradient?

An Optax transformation cannot declare its momentum, and workers that drift apart show
it nowhere but in their numbers: so the outer optimizer is tried.
"""

from typing import Any

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
    sgd = _sgd_of(outer)
    if sgd is not None:
        _require_stable(_pairs_growth(*sgd), sgd, "random pairs")


def check_cycle(
    outer: optax.GradientTransformation | None, graph: Graph, workers: int
) -> None:
    """Refuse a momentum under which workers drift apart in the cycle of a graph."""
    sgd = _sgd_of(outer) if 1 < workers <= _CHECKED_WORKERS else None
    if sgd is not None:
        growth = _cycle_growth(graph.matrices(workers), *sgd)
        _require_stable(growth, sgd, f"this graph of {workers} workers")


def _sgd_of(outer: optax.GradientTransformation | None) -> Any:
    """(rate, momentum, nesterov) if it is an SGD, found by four steps; else None."""
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
    momentum = once[2] / once[1] if once[1] else 0.0
    for nesterov in (False, True):
        weights = momentum ** np.arange(4.0)
        if nesterov:
            weights = np.array([1 + momentum, *(momentum * weights[1:])])
        rate = once[0] / weights[0]
        if np.allclose(once, rate * weights, rtol=1e-3, atol=1e-6):
            return float(rate), float(momentum), nesterov
    return None


def _pairs_growth(rate: float, momentum: float, nesterov: bool) -> float:
    """The factor by which a round of random pairs multiplies the squared disagreement.

    For many workers, whose partners are independent of them. With z = (s, t), s the
    center and t the trace of one coordinate, z <- A z + B (partner's z), and the second
    moments of z are multiplied by A x A + B x B.
    """
    own, other = np.array([0.5, 0.0]), np.array([-0.5, 0.0])  # the gradient
    trace = np.array([0.5, momentum]), other
    step = trace
    if nesterov:
        step = own + momentum * trace[0], other + momentum * trace[1]
    a = np.stack([np.array([1.0, 0.0]) - rate * step[0], trace[0]])
    b = np.stack([-rate * step[1], trace[1]])
    return float(max(abs(np.linalg.eigvals(np.kron(a, a) + np.kron(b, b)))))


def _cycle_growth(
    matrices: np.ndarray, rate: float, momentum: float, nesterov: bool
) -> float:
    """The factor by which a cycle multiplies the disagreement, in the long run."""
    n = matrices.shape[1]
    one, alone = np.eye(n), np.eye(n) - 1 / n  # `alone` subtracts the mean
    whole = np.eye(2 * n)
    for matrix in matrices:
        gradient = (one - matrix) @ alone
        trace = np.hstack([gradient, momentum * one])
        step = trace
        if nesterov:
            step = np.hstack([gradient, 0 * one]) + momentum * trace
        whole = np.vstack([np.hstack([alone, 0 * one]) - rate * step, trace]) @ whole
    return float(max(abs(np.linalg.eigvals(whole))))


def _require_stable(growth: float, momentum: tuple, what: str) -> None:
    rate, beta, nesterov = momentum
    if growth > 1 + 1e-3:
        kind = "Nesterov momentum" if nesterov else "momentum"
        raise ValueError(
            f"With {what}, an outer rate of {rate:.3g} and {kind} {beta:.3g} the "
            "workers drift apart even without gradients: their disagreement grows. "
            "Pass a lower momentum, outer=optax.sgd(0.7, momentum=0.5) for example."
        )
