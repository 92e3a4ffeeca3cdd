# SPDX-License-Identifier: Apache-2.0
"""The cost of a program's collectives on given links: seconds and utilisation."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from optx_sync.audit.programs import (
    Collective,
    collectives,
    in_columns,
    of_kind,
    shares,
)
from optx_sync.center.turns import QUIET
from optx_sync.core.checks import interval
from optx_sync.core.forms import is_function
from optx_sync.core.trees import Tree
from optx_sync.state.apply import apply_gradients
from optx_sync.state.direct import cycle_of
from optx_sync.workers.workers import Workers


class Cost(NamedTuple):
    """The cost of one period, in seconds of one device.

    Attributes:
        sent: Seconds on the links, overlapped with computation or not.
        exposed: Of these, the seconds in which the device waits.
        utilisation: The share of all seconds in which the device computes steps.
    """

    sent: float
    exposed: float
    utilisation: float


class Strategy(NamedTuple):
    """The collectives of a training strategy, as `time` takes them.

    Attributes:
        rows: Collectives of the program, or of the program that meets.
        period: The number of steps from one meeting to the next; of a rule whose parts
            meet in turn, in which each of them meets once.
        quiet: Collectives of the program of all other steps. None: one program runs in
            all steps, and its conditionals are taken once in a period.
        overlap: The share of a step's computation that its overlapped collectives can
            hide behind.
        round_seconds: Seconds that a period computes beside its steps: codes, the outer
            optimizer.
        meetings: In how many steps of a period workers meet, one part in each. `rows`
            are of the programs of all parts, which `Collective.branch` tells apart.
    """

    rows: Sequence[Collective]
    period: int = 1
    quiet: Sequence[Collective] | None = None
    overlap: float = 1.0
    round_seconds: float = 0.0
    meetings: int = 1


class Plan(NamedTuple):
    """The result of `plan`; `print` shows it as a table.

    Attributes:
        gbits: The bandwidths in Gbit/s, as given.
        utilisation: By the name of each strategy, its utilisation at each bandwidth.
        goal: The utilisation that was asked for.
        needed: By the name of each strategy, the least Gbit/s that reach the goal; 0 if
            any suffice, infinite if none do.
    """

    gbits: tuple[float, ...]
    utilisation: dict[str, tuple[float, ...]]
    goal: float
    needed: dict[str, float]

    def __str__(self) -> str:
        """A line for each strategy."""
        head = ["", *(f"{g:g}" for g in self.gbits), f"for {self.goal:.0%}"]
        lines = [head]
        for name, found in self.utilisation.items():
            shares = [f"{share:.1%}" for share in found]
            lines.append([name, *shares, f"{self.needed[name]:.3g}"])
        return in_columns(lines, "<" + ">" * (len(head) - 1))


def strategy(
    tx: optax.GradientTransformation,
    params: Tree,
    workers: Workers,
) -> Strategy:
    """Compile a step of an optimizer and list what it sends: a `Strategy`.

    The step is that of the optimizer alone: a model that communicates itself (FSDP)
    is not in it. Nothing is computed, nothing but the program is allocated. Of a center
    rule it is the programs of `Workers.step`, one for each part. There a row overlaps
    that does not wait for the gradients, as with `overlap=True`: it can travel while
    the step computes, on whatever platform this is asked.

    Args:
        tx: The optimizer, such as `diloco(...)`.
        params: One worker's parameters or their shapes, or a function without arguments
            that returns them. Gradients have the same shapes.
        workers: The workers, with a mesh: forced CPU devices will do, or an
            `AbstractMesh`, which `collectives` describes.

    Returns:
        The rows, with `communication_period` of a center rule as the period; of another
        optimizer, or where links of a chain stand around the rule, 1. Fields that
        `inner_state={"nu": 6}` averages in some rounds only are rows of every round.

    Raises:
        ValueError: The workers are simulated on one device, where nothing is sent; or
            the period is a schedule.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optx_sync as oxs
        >>> n = jax.device_count()
        >>> tx = oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=20)
        >>> found = oxs.audit.strategy(
        ...     tx, lambda: jnp.zeros(1000), oxs.Workers(n, "workers", mesh=True)
        ... )
        >>> found.period, found.rows[0].bytes
        (20, 4000)
    """
    if workers.mesh is None:
        raise ValueError(
            "workers that are simulated on one device send nothing. Pass those of a "
            "mesh, oxs.Workers(n, axis, mesh=True): CPU devices will do."
        )
    period = cycle_of(tx)
    if callable(period):
        raise ValueError(
            "the communication_period of tx is a schedule, which has no one length. "
            "Give tx a number for this."
        )

    def begin() -> Tree:
        first = params() if is_function(params) else params
        return first, tx.init(first)

    def step(params: Tree, state: Any, grads: Tree) -> Tree:
        return apply_gradients(tx, grads, state, params)

    compiled = workers.step(step, state=2, split=False)
    params, state = workers.expect(begin)
    grads = jax.tree.map(lambda x: x.update(), params)  # arrays of their own
    kinds = compiled.lower_kinds(params, state, grads)
    if {len(kind) for kind in kinds} != {1}:  # no center rule, or one in another one
        rows = collectives(compiled, params, state, grads)
        return Strategy(rows, 1 if period is None else period)
    quiet = of_kind(kinds.pop((QUIET,)), compiled)
    rows = [
        row._replace(branch=(("the part that meets", part), *row.branch))
        for (part,), lowered in kinds.items()
        for row in of_kind(lowered, compiled)
    ]
    cycle = len(kinds) if period is None else period
    return Strategy(rows, cycle, quiet, meetings=len(kinds))


def time(
    rows: Iterable[Collective] | Strategy | optax.GradientTransformation,
    *,
    gbits: float,
    step_seconds: float,
    latency: float = 0.0,
    period: int | None = None,
    quiet: Iterable[Collective] | None = None,
    overlap: float | None = None,
    near: int = 1,
    params: Tree = None,
    workers: Workers | None = None,
) -> Cost:
    r"""Estimate the seconds that a program's collectives take on given links.

    A collective of b bytes among n devices is m messages along a ring, one after the
    other, of p b bytes each, and takes m (latency + 8 p b / (gbits 1e9)) seconds. An
    all-reduce has m = 2 (n - 1), a reduce-scatter and an all-to-all n - 1, with p
    = 1 / n; an all-gather, whose operand is one device's share, n - 1 with p = 1; a
    permutation or a send is one message. In each step overlapped collectives
    (`Collective.overlapped`) hide behind `overlap * step_seconds` at most; the device
    waits for others, and for those in conditionals. Of branches that exclude each
    other, as the pairings of `gossip`, the mean counts (`Collective.branch`), and what
    a loop runs counts as often (`Collective.times`). Over the
    H = `period` steps of a period, of T = `step_seconds` each, and its
    R = `Strategy.round_seconds`:

    .. math::

        \text{utilisation} = \frac{H T}{H T + R + \text{exposed}}

    A step takes T / utilisation seconds in the mean. That is for simple links: shared
    links, trees in place of rings, and kernels that wait for memory are left out.

    Args:
        rows: What `collectives` found, or `Collective`s of a planned program. With
            `quiet`, those of the step that meets. Or a `Strategy`; or an optimizer,
            with `params` and `workers`, which `strategy` compiles.
        gbits: Gbit/s of arrays that one device can send: TCP's headers leave 0.94 of
            a link. On a host of 8 devices, those of the host's link divided by 8.
        step_seconds: Seconds that a step computes.
        latency: Seconds that each message takes beside its bytes: of an all-reduce of
            one number the 2 (n - 1)-th part.
        period: H. Rows in conditionals count once in it. By default that of the
            strategy or of the optimizer, and 1 of rows.
        quiet: The rows of the steps that do not meet, where these have a program of
            their own (`meet=False`).
        overlap: The share of a step's computation that overlapped collectives can
            hide behind: 2/3 where they are gradients that travel during the backward
            pass, 1 where what is sent is there when the step begins.
        near: Devices next to each other in the mesh, of one host or one slice, whose
            links are so fast that collectives among them cost nothing.
        params: For an optimizer, as `strategy` takes them.
        workers: For an optimizer, as `strategy` takes them.

    Returns:
        A `Cost`, of one period.

    Raises:
        ValueError: A number is out of its range, or a row does not say between which
            devices it is (then `near` and n are not known).
        TypeError: `rows` is none of these, or `params` and `workers` are missing.

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
    given = _strategy_of("rows", rows, params, workers)
    rows, meetings = list(given.rows), given.meetings
    period = given.period if period is None else period
    overlap = given.overlap if overlap is None else overlap
    quiet = given.quiet if quiet is None else quiet
    interval("(0, inf)", gbits=gbits, step_seconds=step_seconds)
    interval("(0, inf)" if meetings == 1 else f"[{meetings}, inf)", period=period)
    interval("(0, inf)", near=near)
    interval("[0, inf)", latency=latency, round_seconds=given.round_seconds)
    interval("[0, 1]", overlap=overlap)
    if quiet is None:
        quiet = [row for row in rows if not row.conditional]
    parts = {(): rows}
    if meetings > 1:
        parts = {row.branch[:1]: [] for row in rows}
        for row in rows:
            parts[row.branch[:1]].append(row._replace(branch=row.branch[1:]))
    steps = [*((1, part) for part in parts.values()), (period - meetings, list(quiet))]
    sent = exposed = 0.0
    for count, those in steps:
        hidden = waited = 0.0
        for row, share in zip(those, shares(those), strict=True):
            if not _is_far(row, near):
                continue
            messages, size = row.on_a_ring
            each = latency + 8e-9 * size / gbits
            seconds = share * row.repeated * messages * each
            if row.overlapped and not row.conditional:
                hidden += seconds
            else:
                waited += seconds
        sent += count * (hidden + waited)
        exposed += count * (waited + max(0.0, hidden - overlap * step_seconds))
    computing = period * step_seconds
    in_all = computing + given.round_seconds + exposed
    return Cost(sent, exposed, computing / in_all)


def plan(
    strategies: Mapping[str, Strategy | optax.GradientTransformation],
    *,
    gbits: Iterable[float],
    step_seconds: float,
    latency: float = 0.0,
    near: int = 1,
    goal: float = 0.8,
    params: Tree = None,
    workers: Workers | None = None,
) -> Plan:
    """The utilisation of several strategies at several bandwidths, beside each other.

    Args:
        strategies: By name: the rows of their programs, with the period; or an
            optimizer, with `params` and `workers`, which `strategy` compiles.
        gbits: The bandwidths, each as `time` takes it.
        step_seconds: As `time` takes it, and so are `latency` and `near`.
        latency: Seconds that each message takes beside its bytes.
        near: Devices of one host.
        goal: The utilisation for which the bandwidth is looked for.
        params: Of all optimizers, as `strategy` takes them.
        workers: Of all optimizers, as `strategy` takes them.

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
    cost = functools.partial(
        time, step_seconds=step_seconds, latency=latency, near=near
    )
    found, needed = {}, {}
    for name, one in strategies.items():
        given = _strategy_of(f"strategies[{name!r}]", one, params, workers)

        def share(bandwidth: float, given: Strategy = given) -> float:
            return cost(given, gbits=bandwidth).utilisation

        found[name], needed[name] = tuple(map(share, gbits)), _least(share, goal)
    return Plan(gbits, found, goal, needed)


def _strategy_of(
    name: str, given: Any, params: Tree, workers: Workers | None
) -> Strategy:
    """What `time` and `plan` were given, as a `Strategy`."""
    if isinstance(given, Strategy):
        return given
    if isinstance(given, optax.GradientTransformation):
        if params is None or workers is None:
            raise TypeError(
                f"{name} is an optimizer, which is compiled for shapes and workers. "
                "Pass params= and workers=, such as oxs.Workers(8, 'workers', "
                "mesh=True)."
            )
        return strategy(given, params, workers)
    rows = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(row, Collective) for row in rows):
        raise TypeError(
            f"{name} must be rows of oxs.audit.collectives, a Strategy or an "
            f"optimizer; got {type(given).__name__}."
        )
    return Strategy(rows)


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
    """Whether any of a collective leaves those near each other, as far as is said."""
    apart = any(len({device // near for device in of}) > 1 for of in row.groups)
    return apart or not row.groups
