# SPDX-License-Identifier: Apache-2.0
"""Gossip graphs, `Graph`: who meets whom, round by round, without a center.

In a round worker i mixes the workers' parameters by its row of a matrix W,

    x_i  <-  sum_j W_ij x_j

The rows and columns of W sum to one, so that the mean of the workers stays. A round is
written as permutations with weights, or as groups that take their mean: both are known
when the program is compiled, as `collective-permute` and `all-reduce` require.

    graph               who meets                  each sends  mean of all after
    ring()              both neighbours            2 D         never, gap O(1 / N^2)
    exponential()       i - 2^k in round k         D           log2 N, N a power of two
    random_pairs()      a pair, drawn              D           never, see there
    grid(m)             groups of m, N = m^d       about 2 D   d
    metropolis(edges)   any graph you give         degree D    never

The gap is one minus the second largest magnitude of an eigenvalue of W: each round
shrinks the disagreement at least by that fraction.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from optx_sync.core.checks import integer

Weight = float | tuple[float, ...]  # the same for all workers, or one for each


class Take(NamedTuple):
    """One permutation: from whom each worker takes, and with which weight.

    Attributes:
        source: Worker i takes from worker `source[i]`.
        weight: One number for all workers, or one for each.
    """

    source: tuple[int, ...]
    weight: Weight


class GraphRound(NamedTuple):
    """One round: x_i <- own x_i + sum of weight x_source[i] over `takes`.

    Attributes:
        own: The weight of a worker's own parameters: one number for all workers, or one
            for each.
        takes: What workers take from others.
        groups: If given, groups of equal size: each worker takes the mean of its group,
            and `own` and `takes` are not used.
    """

    own: Weight = 1.0
    takes: tuple[Take, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None


class Graph(NamedTuple):
    """Who meets whom in which round.

    Attributes:
        rounds: `(number of workers) -> rounds`, a tuple of `GraphRound`; raises a
            ValueError for a number that does not fit the graph.
        choose: `"cycle"`: one round after the other. `"draw"`: a random one, from
            the seed and the number of rounds so far: equal on all workers, and
            after a resume.

    Example:
        Gossip with the mean of all in every fourth round (Gossip-PGA):

        >>> import optx_sync as oxs
        >>> ring = oxs.graphs.ring()
        >>> def rounds(n):
        ...     return ring.rounds(n) * 3 + oxs.graphs.grid(n).rounds(n)
        >>> oxs.graphs.Graph(rounds).matrices(4)[-1][0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    rounds: Callable[[int], tuple[GraphRound, ...]]
    choose: Literal["cycle", "draw"] = "cycle"

    def matrices(self, n: int) -> np.ndarray:
        """The mixing matrices of n workers, float64 [rounds, n, n].

        Example:
            >>> import optx_sync as oxs
            >>> oxs.graphs.exponential().matrices(4)[1].tolist()[0]
            [0.5, 0.0, 0.5, 0.0]
        """
        return np.stack([_matrix(round_, n) for round_ in self.rounds(n)])


def ring() -> Graph:
    """Each worker with both neighbours, all three with the same weight.

    Disagreement between distant workers lasts for O(N^2) rounds: use it for few
    workers, or where links exist only between neighbours.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.graphs.ring().matrices(2).tolist()
        [[[0.5, 0.5], [0.5, 0.5]]]
    """

    def rounds(n: int) -> tuple[GraphRound, ...]:
        _check_workers(n)
        return (_even(n, [_shift(n, 1), _shift(n, -1)]),)

    return Graph(rounds)


def exponential() -> Graph:
    """Each worker with one other, 1, 2, 4, ... places before it in turn.

    The cycle has ceil(log2 N) rounds. If N is a power of two, all hold the mean after
    one cycle; otherwise they come close (6 workers keep up to 22 % of their
    disagreement after 3 rounds).

    Example:
        >>> import numpy as np
        >>> import optx_sync as oxs
        >>> cycle = oxs.graphs.exponential().matrices(8)
        >>> bool(np.all(np.linalg.multi_dot(cycle) == 1 / 8))
        True

    References:
        Ying, Yuan, Chen, Hu, Pan and Yin, "Exponential Graph is Provably Efficient for
        Decentralized Deep Training", 2021, arXiv 2110.13363.
    """

    def rounds(n: int) -> tuple[GraphRound, ...]:
        _check_workers(n)
        steps = range(max(1, (n - 1).bit_length()))
        return tuple(_even(n, [_shift(n, -(1 << k))]) for k in steps)

    return Graph(rounds)


def random_pairs() -> Graph:
    """Random pairs, drawn anew in each round; every two workers are equally likely.

    A round is one of a round-robin tournament, in which every two meet once; with an
    odd number of workers one rests. In expectation a round leaves (N - 2) / (2 (N - 1))
    of the squared disagreement, a little less than half.

    Example:
        >>> import optx_sync as oxs
        >>> [r.takes[0].source for r in oxs.graphs.random_pairs().rounds(4)]
        [(3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2)]

    References:
        Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for
        Large Models", 2025, arXiv 2506.10911.
    """

    def rounds(n: int) -> tuple[GraphRound, ...]:
        _check_workers(n)
        even = n + n % 2  # an odd number of workers plays with an absent one
        turns = even - 1
        made = []
        for r in range(turns):
            # Two play whose numbers add up to 2 r; r itself plays with the last one.
            source = [*((2 * r - i) % turns for i in range(turns)), r]
            source[r] = turns
            alone = [i if source[i] >= n else source[i] for i in range(n)]
            made.append(_even(n, [tuple(alone)]))
        return tuple(made)

    return Graph(rounds, "draw")


def grid(m: int) -> Graph:
    """Means of groups of m, along one dimension of a grid of N = m^d workers at a time.

    After d rounds all hold the mean (Moshpit's grid). `grid(N)` is one group of all
    workers: they then meet as those of `local_sgd`, to the bit.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.graphs.grid(2).rounds(4)[1].groups
        ((0, 2), (1, 3))

    References:
        Ryabinin, Gorbunov, Plokhotnyuk and Pekhimenko, "Moshpit SGD:
        Communication-Efficient Decentralized Training on Heterogeneous Unreliable
        Devices", 2021, arXiv 2103.03239.
    """
    integer("m", m, "Write for example oxs.graphs.grid(4).", least=2)

    def rounds(n: int) -> tuple[GraphRound, ...]:
        _check_workers(n)
        dimensions = round(math.log(n, m)) if n > 1 else 0
        if m**dimensions != n:
            raise ValueError(
                f"grid({m}) needs {m}, {m**2}, {m**3}, ... workers; the axis has {n}. "
                f"Pass a root of {n}, or {n} itself for one group of all."
            )

        made = tuple(GraphRound(groups=_along(n, m, k)) for k in range(dimensions))
        return made or (GraphRound(),)

    return Graph(rounds)


def metropolis(edges: Iterable[tuple[int, int]]) -> Graph:
    """Any graph: Metropolis weights, 1 / (1 + the larger degree of an edge's ends).

    A worker's own weight is the rest up to 1. The matrix is symmetric, and its rows and
    columns sum to one, whatever the graph. Edges are split into matchings, one
    `collective-permute` each: as many as the largest degree, or a few more.

    Args:
        edges: Pairs of workers that meet, numbered from 0. The graph must be
            connected, or the mean would never be reached.

    Example:
        A line of three:

        >>> import optx_sync as oxs
        >>> oxs.graphs.metropolis([(0, 1), (1, 2)]).matrices(3)[0].round(2).tolist()
        [[0.67, 0.33, 0.0], [0.33, 0.33, 0.33], [0.0, 0.33, 0.67]]
    """
    edges = edges if isinstance(edges, Iterable) else [edges]
    pairs = sorted({(min(edge), max(edge)) for edge in map(_edge, edges)})

    def rounds(n: int) -> tuple[GraphRound, ...]:
        _check_workers(n)
        highest = max((b for _, b in pairs), default=0)
        if highest >= n:
            raise ValueError(
                f"An edge names worker {highest}, but the axis has {n} workers, "
                f"numbered 0 to {n - 1}."
            )
        reached, before = {0}, 0
        while len(reached) > before:
            before = len(reached)
            reached |= {i for edge in pairs if reached & set(edge) for i in edge}
        if len(reached) < n:
            alone = sorted(set(range(n)) - reached)
            raise ValueError(
                f"The edges do not connect workers {alone} with worker 0. Add edges "
                "until each can be reached from each."
            )
        if 2 * len(pairs) == n * (n - 1):  # a complete graph: all weights are equal
            return (GraphRound(groups=(tuple(range(n)),)),)
        sources: list[list[int]] = []  # each pair exchanges in the first that it can
        for a, b in pairs:
            free = next((s for s in sources if s[a] == a and s[b] == b), None)
            if free is None:
                sources.append(free := list(range(n)))
            free[a], free[b] = b, a
        degree = np.bincount(np.ravel(pairs), minlength=n)
        own, takes = np.ones(n), []
        for source in sources:
            weights = 1 / (1 + np.maximum(degree, degree[source]))
            weights[np.arange(n) == source] = 0
            own -= weights
            takes.append(Take(tuple(source), tuple(weights.tolist())))
        return (GraphRound(tuple(own.tolist()), tuple(takes)),)

    return Graph(rounds)


def _even(n: int, sources: Sequence[tuple[int, ...]]) -> GraphRound:
    """The mean of a worker and its sources; sources that coincide count once.

    A worker that takes from itself, as one that rests, keeps its own value.
    """
    others = [s for s in dict.fromkeys(sources) if s != tuple(range(n))]
    share = 1 / (1 + len(others))
    return GraphRound(share if others else 1.0, tuple(Take(s, share) for s in others))


def _along(n: int, m: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Groups of m along dimension k of a grid of n workers."""
    step = m**k
    firsts = [i for i in range(n) if i // step % m == 0]
    return tuple(tuple(i + j * step for j in range(m)) for i in firsts)


def _shift(n: int, by: int) -> tuple[int, ...]:
    return tuple((i + by) % n for i in range(n))


def _matrix(round_: GraphRound, n: int) -> np.ndarray:
    matrix = np.zeros((n, n))
    if round_.groups is not None:
        for group in round_.groups:
            matrix[np.ix_(group, group)] = 1 / len(group)
        return matrix
    workers = np.arange(n)
    matrix[workers, workers] += np.broadcast_to(round_.own, n)
    for take in round_.takes:
        matrix[workers, list(take.source)] += np.broadcast_to(take.weight, n)
    return matrix


def _check_workers(n: Any) -> None:
    integer("the number of workers", n, "Write oxs.graphs.ring().matrices(8), say.")


def _edge(edge: Any) -> tuple[int, int]:
    mend = "Write for example oxs.graphs.metropolis([(0, 1), (1, 2)])."
    ends = tuple(edge) if isinstance(edge, Iterable) else ()
    if len(ends) != 2 or ends[0] == ends[1]:
        raise ValueError(
            f"An edge is a pair of different workers; got {edge!r}. {mend}"
        )
    one, other = (integer("a worker", end, mend, least=0) for end in ends)
    return one, other
