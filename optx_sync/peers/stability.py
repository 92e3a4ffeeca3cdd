# SPDX-License-Identifier: Apache-2.0
"""Stability of an outer momentum: do workers drift apart without any gradient?

An Optax transformation cannot declare its momentum, and workers that drift apart show
it nowhere but in their numbers: so the outer optimizer is tried.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.core.programs import as_optax_expects
from optx_sync.peers.graphs import Graph

# For more workers than this the matrices of a cycle are not multiplied out.
_CHECKED_WORKERS = 128


# What a worker's own center may be stepped by.
Outer: TypeAlias = optax.GradientTransformation | None
# A round without gradients, [2 n, 2 n], of n workers' centers and memories, from the
# mixing matrix of the round.
Round: TypeAlias = Callable[[np.ndarray], np.ndarray]


def check_pairs(outer: Outer) -> None:
    """Refuse a momentum under which many workers drift apart in random pairs."""
    _require_stable(outer, _pairs_growth, "random pairs")


def check_cycle(outer: Outer, graph: Graph, workers: int) -> None:
    """Refuse a momentum under which workers drift apart in the cycle of a graph."""
    if 1 < workers <= _CHECKED_WORKERS:
        _require_stable(
            outer,
            lambda round_: _cycle_growth(graph.matrices(workers), round_),
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

    def round(self, matrix: np.ndarray) -> np.ndarray:
        """A `Round` whose memories are the traces."""
        one, nothing = np.eye(len(matrix)), np.zeros_like(matrix)
        gradient = np.hstack([one - matrix, nothing])
        trace = np.hstack([one - matrix, self.momentum * one])
        center = np.hstack([one, nothing]) - self.rate * self.step(gradient, trace)
        return np.vstack([center, trace])

    def __str__(self) -> str:
        kind = "Nesterov momentum" if self.own else "momentum"
        return f"an outer rate of {self.rate:.3g} and {kind} {self.momentum:.3g}"


def _sgd_of(outer: Outer) -> _Sgd | None:
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

    with jax.core.eval_context(), as_optax_expects():
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


def _pairs_growth(round_: Round) -> float:
    """The factor by which a round of random pairs multiplies the squared disagreement.

    For many workers, whose partners are independent of them. With z = (s, t), s the
    center and t the memory of one coordinate, z <- A z + B (partner's z), and the
    second moments of z are multiplied by A x A + B x B. A round is linear in the mixing
    matrix, of which a half is the worker's own.
    """
    a, alone = (round_(np.array([[share]])) for share in (0.5, 0.0))
    b = a - alone
    return float(max(abs(np.linalg.eigvals(np.kron(a, a) + np.kron(b, b)))))


def _cycle_growth(matrices: np.ndarray, round_: Round) -> float:
    """The factor by which a cycle multiplies the disagreement, in the long run."""
    n = matrices.shape[1]
    alone = np.kron(np.eye(2), np.eye(n) - 1 / n)  # subtracts the mean
    whole = np.eye(2 * n)
    for matrix in matrices:
        whole = round_(matrix) @ alone @ whole
    return float(max(abs(np.linalg.eigvals(whole))))


def _require_stable(outer: Outer, growth: Callable[[Round], float], what: str) -> None:
    sgd = _sgd_of(outer)
    if sgd is not None and growth(sgd.round) > 1 + 1e-3:
        raise ValueError(
            f"With {what}, {sgd} the workers drift apart even without gradients: "
            "their disagreement grows. Pass a lower momentum, outer=optax.sgd(0.7, "
            "momentum=0.5) for example."
        )
