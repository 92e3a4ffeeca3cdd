# SPDX-License-Identifier: Apache-2.0
"""The cost of a program's collectives on given links: seconds and utilisation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from optx_sync.audit.programs import PAIRS, Collective, in_columns
from optx_sync.checks import interval

# Bytes that one of n devices sends along a ring, for each byte of its operand.
_ON_A_RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "collective-broadcast": lambda n: 1,
    "collective-permute": lambda n: 1,
    "send": lambda n: 1,
}


class Cost(NamedTuple):
    """The cost of one period, in seconds of one device."""

    sent: float  # on the links, overlapped with computation or not
    exposed: float  # of these, the seconds in which the device waits
    utilisation: float  # the share of all seconds in which the device computes


class Strategy(NamedTuple):
    """The collectives of a training strategy, as `time` takes them.

    Attributes:
        rows: Collectives of the program, or of the program that meets.
        period: The number of steps from one meeting to the next.
        quiet: Collectives of the program of all other steps. None: one program runs in
            all steps, and its conditionals are taken once in a period.
        overlap: The share of a step's computation that its overlapped collectives can
            hide behind.
    """

    rows: Sequence[Collective]
    period: int = 1
    quiet: Sequence[Collective] | None = None
    overlap: float = 1.0


class Plan(NamedTuple):
    """The result of `plan`; `print` shows it as a table."""

    gbits: tuple[float, ...]
    utilisation: dict[str, tuple[float, ...]]  # of each strategy, at each bandwidth
    goal: float
    needed: dict[str, float]  # Gbit/s for the goal; infinite if none suffices

    def __str__(self) -> str:
        """A line for each strategy."""
        head = ["", *(f"{g:g}" for g in self.gbits), f"for {self.goal:.0%}"]
        lines = [head]
        for name, found in self.utilisation.items():
            shares = [f"{share:.1%}" for share in found]
            lines.append([name, *shares, f"{self.needed[name]:.3g}"])
        return in_columns(lines, "<" + ">" * (len(head) - 1))


def time(
    rows: Iterable[Collective],
    *,
    gbits: float,
    step_seconds: float,
    latency: float = 0.0,
    period: int = 1,
    quiet: Iterable[Collective] | None = None,
    overlap: float = 1.0,
    near: int = 1,
) -> Cost:
    r"""Estimate the seconds that a program's collectives take on given links.

    A collective of b bytes among n devices takes latency + 8 f(n) b / (gbits 1e9)
    seconds, with f(n) what a ring sends of each byte: 2 (n - 1) / n of an all-reduce,
    (n - 1) / n of a reduce-scatter and of an all-to-all, n - 1 of an all-gather, whose
    operand is one device's share, and 1 of a permutation or a send. In each step
    overlapped collectives (`Collective.overlapped`) hide behind `overlap *
    step_seconds` at most; the device waits for others, and for those in conditionals.
    Over the H = `period` steps of a period, of T = `step_seconds` each:

    .. math::

        \text{utilisation} = \frac{H T}{H T + \text{exposed}}

    These are bounds for simple links, not measurements: they leave out shared links,
    trees in place of rings, and kernels that wait for memory.

    Args:
        rows: What `collectives` found, or `Collective`s of a planned program. With
            `quiet`, those of the step that meets.
        gbits: Gbit/s that one device can send: on a host of 8 devices, those of the
            host's link divided by 8.
        step_seconds: Seconds that a step computes.
        latency: Seconds that each collective takes beside its bytes.
        period: H. Rows in conditionals count once in it.
        quiet: The rows of the steps that do not meet, where these have a program of
            their own (`meet=False`).
        overlap: The share of a step's computation that overlapped collectives can
            hide behind: 2/3 where they are gradients that travel during the backward
            pass, 1 where what is sent is there when the step begins.
        near: Devices next to each other in the mesh, of one host or one slice, whose
            links are so fast that collectives among them cost nothing.

    Returns:
        A `Cost`, of one period.

    Raises:
        ValueError: A number is out of its range, or a row does not say between which
            devices it is (then `near` and f(n) are not known).

    Example:
        >>> import optx_sync as oxs
        >>> pair = ((0, 1),)
        >>> gradients = oxs.audit.Collective("all-reduce", 10**9, 1, pair, False)
        >>> oxs.audit.time([gradients], gbits=8, step_seconds=1.0)
        Cost(sent=1.0, exposed=1.0, utilisation=0.5)
        >>> meets = gradients._replace(conditional=True)
        >>> oxs.audit.time([meets], gbits=8, step_seconds=1.0, period=9)
        Cost(sent=1.0, exposed=1.0, utilisation=0.9)
    """
    interval("(0, inf)", gbits=gbits, step_seconds=step_seconds)
    interval("(0, inf)", period=period, near=near)
    interval("[0, inf)", latency=latency)
    interval("[0, 1]", overlap=overlap)
    rows = [row for row in rows if _is_far(row, near)]
    if quiet is None:
        quiet = [row for row in rows if not row.conditional]
    quiet = [row for row in quiet if _is_far(row, near)]
    steps = [(1, rows), (period - 1, quiet)]
    sent = exposed = 0.0
    for count, those in steps:
        hidden = waited = 0.0
        for row in those:
            share = _ON_A_RING[row.kind](max(map(len, row.groups), default=1))
            seconds = latency + 8e-9 * (share * row.bytes) / gbits
            if row.overlapped and not row.conditional:
                hidden += seconds
            else:
                waited += seconds
        sent += count * (hidden + waited)
        exposed += count * (waited + max(0.0, hidden - overlap * step_seconds))
    computing = period * step_seconds
    return Cost(sent, exposed, computing / (computing + exposed))


def plan(
    strategies: Mapping[str, Strategy],
    *,
    gbits: Iterable[float],
    step_seconds: float,
    latency: float = 0.0,
    near: int = 1,
    goal: float = 0.8,
) -> Plan:
    """The utilisation of several strategies at several bandwidths, beside each other.

    Args:
        strategies: By name: the rows of their programs, with the period.
        gbits: The bandwidths, each as `time` takes it.
        step_seconds: As `time` takes it, and so are `latency` and `near`.
        latency: Seconds that each collective takes beside its bytes.
        near: Devices of one host.
        goal: The utilisation for which the bandwidth is looked for.

    Returns:
        A `Plan`.

    Raises:
        ValueError: As `time`; or a goal that is no share between 0 and 1.

    Example:
        >>> import optx_sync as oxs
        >>> row = oxs.audit.Collective("all-reduce", 10**9, 1, ((0, 1),), False)
        >>> meets = row._replace(conditional=True)
        >>> print(oxs.audit.plan(
        ...     {
        ...         "every step": oxs.audit.Strategy([row]),
        ...         "every 100 steps": oxs.audit.Strategy([meets], period=100),
        ...     },
        ...     gbits=(1, 10, 100), step_seconds=0.5,
        ... ))
                             1     10    100  for 80%
        every step        5.9%  38.5%  86.2%       64
        every 100 steps  86.2%  98.4%  99.8%     0.64
    """
    interval("(0, 1)", goal=goal)
    gbits = tuple(gbits)

    def share(strategy: Strategy, bandwidth: float) -> float:
        found = time(
            **strategy._asdict(),
            gbits=bandwidth,
            step_seconds=step_seconds,
            latency=latency,
            near=near,
        )
        return found.utilisation

    found = {
        name: tuple(share(strategy, bandwidth) for bandwidth in gbits)
        for name, strategy in strategies.items()
    }
    needed = {
        name: _least(lambda bandwidth, one=strategy: share(one, bandwidth), goal)
        for name, strategy in strategies.items()
    }
    return Plan(gbits, found, goal, needed)


def _least(share: Callable[[float], float], goal: float) -> float:
    """The least Gbit/s that reach the goal; utilisation grows with the bandwidth."""
    low, high = 1e-9, 1e9
    if share(low) >= goal:
        return 0.0
    if share(high) < goal:
        return math.inf
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if share(middle) >= goal else (middle, high)
    return high


def _is_far(row: Collective, near: int) -> bool:
    """Whether any of a collective leaves the devices that are near each other."""
    if row.groups:
        return any(len({device // near for device in of}) > 1 for of in row.groups)
    if row.kind not in PAIRS:
        raise ValueError(
            f"this {row.kind} of {row.bytes} bytes does not say between which devices "
            "it is. Pass rows of a whole program, or give it groups: "
            "row._replace(groups=((0, 1, 2, 3),))."
        )
    return True
