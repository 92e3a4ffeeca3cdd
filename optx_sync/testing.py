# SPDX-License-Identifier: Apache-2.0
"""Checks for a rule, exchange or optimizer of your own, and faults for your program.

A `CenterRule`, an `Exchange` and a `LeafRule` declare facts in their fields, which the
library takes for granted. These functions hold one of yours to what it declares, and to
the laws that hold for all of them. Each raises a `ValueError` that says what was
declared, what was found, and how to mend it; call them in your tests. The library's own
pass the same checks.

With `virtual_cluster` and `fault` a program for `oxs.runtime.run` is tested against
deaths and the like, in one process and without Ray.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center import contract as rules
from optx_sync.center import worker as work
from optx_sync.center.lockstep import center_variable
from optx_sync.comm.varying import localize
from optx_sync.core import programs
from optx_sync.core.checks import (
    check_function,
    check_inner,
    check_seed,
    integer,
    interval,
    one_of,
)
from optx_sync.core.signatures import readable as _readable
from optx_sync.core.slices import IndexedSlices
from optx_sync.core.trees import Tree, leaves_with_names
from optx_sync.exchange import contract as exchanges
from optx_sync.exchange.error_feedback import ErrorFeedbackState, error_feedback
from optx_sync.exchange.pieces import cut
from optx_sync.meetings import alone
from optx_sync.optimizers.rule import LeafRule, Rows, RuleState, from_rule

if TYPE_CHECKING:
    from optx_sync.virtual import VirtualCluster

__all__ = [
    "check_exchange",
    "check_optimizer",
    "check_rule",
    "fault",
    "virtual_cluster",
]

FaultKind: TypeAlias = Literal["dies", "freezes", "loses an answer", "is told to leave"]

# (fact, the law that it is of, what was found, how to mend it): raises if it is false.
Hold: TypeAlias = Callable[[bool, str, str, str], None]
_AXIS = "workers"
# How exactly the law holds: where the loss is known, and where nobody knows what is
# rounded, to half precision for example.
_KNOWN, _ROUNDED = 1e-5, 2.0**-6
# For so many rounds error feedback gets one and the same tree.
_ROUNDS = 100
_SHAPES = {
    "matrix": jax.ShapeDtypeStruct((6, 5), np.float32),
    "half": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
    "vector": jax.ShapeDtypeStruct((7,), np.float32),
    "scalar": jax.ShapeDtypeStruct((), np.float32),
    "empty": jax.ShapeDtypeStruct((0, 3), np.float32),
}


def check_rule(
    rule: rules.CenterRule,
    *,
    shape: tuple[int, ...] = (4, 3),
    num_workers: int = 4,
    communication_period: int = 3,
) -> None:
    """Hold a `CenterRule` to what it declares.

    Its formulas are called on arrays of one shape: they read nothing but what `reads`
    names, and keep shapes and dtypes; a worker's state keeps its types in a step of
    `oxs.center_variable`. Whether workers that follow the rule converge is not asked.

    Args:
        rule: The rule.
        shape: That of the array that the formulas get.
        num_workers: How many workers meet, if the rule does not say.
        communication_period: The workers' steps from one round to the next.

    Raises:
        TypeError: `rule` is no `CenterRule`.
        ValueError: The rule does not do what it declares.

    Example:
        >>> import optx_sync as oxs
        >>> rule = oxs.CenterRule(
        ...     contribute=lambda own, center, at: own.params - center,
        ...     reads=("params", "taken"),
        ... )
        >>> oxs.testing.check_rule(rule)
        Traceback (most recent call last):
        ValueError: A formula of this CenterRule reads 'center', and the rule declares \
reads=('params', 'taken'). Declare it too: reads=('params', 'taken', 'center').
    """
    rules.check_rule(rule, "oxs.testing.check_rule(oxs.rules.local_sgd())")
    hold = functools.partial(_hold, "CenterRule")
    workers = rule.num_workers or integer("num_workers", num_workers, "Pass 4.")
    steps = jnp.int32(communication_period)
    at = rules.Round(workers, communication_period, steps, tokens=jnp.float32(1))
    numbers = np.random.default_rng(0)
    x, a, s, c = jnp.asarray(numbers.normal(size=(4, *shape)), jnp.float32)
    worker = work.Worker(x, (), (), ())
    results = {
        "contribute": work.contribute(rule, x, s, a, c, at),
        "take": work.take(rule, worker, s, c, at).params,
    }
    for formula, result in results.items():
        hold(
            (result.shape, result.dtype) == (c.shape, c.dtype),
            f"`{formula}` that returns an array like the one that it gets",
            f"of a {c.dtype}{list(shape)} it makes {result.dtype}{result.shape}",
            "Reduce over no axis, and keep the dtype.",
        )
    alone.weigh_alone(rule, c, at)
    alike = rule._replace(weigh=None)
    tx = center_variable(
        optax.sgd(0.1), alike, _AXIS, communication_period=communication_period
    )

    def step(shift):
        own = c + shift
        state = tx.init(own)
        _hold_types(hold, "after a step", state, tx.update(own, state, own)[1])

    with programs.as_optax_expects():
        jax.eval_shape(jax.vmap(step, axis_name=_AXIS), jnp.zeros(workers))


def check_exchange(exchange: exchanges.Exchange, *, replicas: int = 8) -> None:
    """Hold an `Exchange` to what it declares, and to the laws.

    Two rounds of `meet` under `jax.vmap`, of arrays of several shapes and dtypes, also
    a scalar and an empty one, with weights and without: the mean is equal on all
    replicas and has their dtypes; a replica of weight 0 leaves no trace, NaN or not;
    without any weight the mean is 0; sums are right; the state keeps its types. Of a
    `linear` one the law of what is lost holds, and a warning says where
    `error_feedback` around it would explode; an `exact` one gives the plain mean, also
    in groups and of rows; one that `takes_weights` uses them; `scatter` gives pieces of
    the mean, and `code` knows what it loses.

    Args:
        exchange: The exchange.
        replicas: How many of them meet, at least 3.

    Raises:
        TypeError: `exchange` is no `Exchange`.
        ValueError: It does not do what it declares, or breaks a law.

    Example:
        >>> import jax, optx_sync as oxs
        >>> def meet(tree, state, axis_name, *, weight=None, also=None):
        ...     return oxs.exchange.Met(oxs.reduce(tree, axis_name))
        >>> mine = oxs.exchange.Exchange(lambda tree: (), meet, linear=True)
        >>> oxs.testing.check_exchange(mine)
        Traceback (most recent call last):
        ValueError: This Exchange is held to weight 0 without a trace, but the mean of \
'matrix' depends on what that replica sent, or is NaN. Leave it out by jnp.where: 0 \
times NaN is NaN. oxs.reduce(tree, axis_name, weight=weight) does.
    """
    exchange = exchanges.check_exchange(exchange)
    hold = functools.partial(_hold, "Exchange")
    with _given():
        start = jax.eval_shape(exchange.init, _SHAPES)
    _hold_types(hold, "of shapes, from `init`,", start, exchange.init(_SHAPES))
    silent = exchange.remembers or not jax.tree.leaves(start)
    hold(silent, "remembers=False", "init returns arrays", "Leave remembers out.")
    replicas = integer("replicas", replicas, "Pass for example 8.", 3)
    trees, weights = _cases(replicas, exchange.takes_weights)

    def meet(tree, weight=None):
        def one(state, _):
            also = {"ones": jnp.float32(1)}
            met = exchange.meet(tree, state, _AXIS, weight=weight, also=also)
            _hold_types(hold, "after `meet`", state, met.state)
            _hold_types(hold, "in the mean", tree, met.mean)
            return met.state, (met.mean, met.lost, jnp.float32(met.weight), met.also)

        return jax.lax.scan(one, localize(exchange.init(tree), _AXIS), length=2)[1]

    # Arrays [cases, replicas, rounds, ...].
    with _given():
        every = jax.jit(jax.vmap(jax.vmap(meet, axis_name=_AXIS)))(trees, weights)
    means, lost, totals, also = jax.tree.map(np.asarray, every)
    first = jax.tree.map(lambda x: x[0], trees)
    alike = jax.jit(jax.vmap(meet, axis_name=_AXIS))(first)[0]
    for name, x in trees.items():
        owed = None if exchange.exact or lost is None else lost[name]
        _check_mean(hold, name, means[name], alike[name])
        if exchange.linear or exchange.exact:
            _check_law(hold, name, x, weights, means[name], owed)
    sums = np.allclose(totals, weights.sum(1)[:, None, None])
    hold(
        sums and np.allclose(also["ones"], replicas),
        "sums of weights and scalars over all replicas",
        f"of the weights {weights.tolist()} it made {totals[:, 0, 0].tolist()}",
        "Leave weight and also of Met out: the library adds them up.",
    )
    ignored = exchange.takes_weights and all(_close(x[1], x[4]) for x in means.values())
    hold(not ignored, "takes_weights=True", "others change nothing", "Leave it out.")
    _check_forms(exchange, hold, first, jax.tree.map(lambda x: x[0, :, 0], means))
    # Error feedback that is fed back once more owes more, too.
    if exchange.linear and not (
        exchange.exact or isinstance(start, ErrorFeedbackState)
    ):
        _warn_of_growth(exchange, first)


def check_optimizer(
    optimizer: optax.GradientTransformation | LeafRule, *, rows: Rows | None = None
) -> None:
    """Hold an optimizer, or the `LeafRule` of one, to what it declares.

    `init` takes shapes, and the state is what Optax's tools look for; an update has the
    structure and shapes of the parameters, float32 and half, and the state keeps its
    types. Rows that a sparse gradient names move as under the dense one, and others
    stay or move as `rows` says. A `LeafRule` without `needs_params` does without
    parameters.

    Args:
        optimizer: An Optax transformation, or a `LeafRule`.
        rows: What it does to rows without a gradient; `None`: what a `LeafRule`
            declares, and of a transformation nothing is asked.

    Raises:
        TypeError: `optimizer` is neither.
        ValueError: It does not do what it declares.

    Example:
        >>> import optax, optx_sync as oxs
        >>> oxs.testing.check_optimizer(optax.adam(0.1))
        >>> rule = oxs.optimizers.LeafRule(lambda grad, slots, x, at: (grad - x, slots))
        >>> oxs.testing.check_optimizer(rule)
        Traceback (most recent call last):
        ValueError: This optimizer is held to needs_params=False, but `step` fails or \
differs without parameters. Declare needs_params=True.
    """
    rule = optimizer if isinstance(optimizer, LeafRule) else None
    given: Any = optimizer if rule is None else from_rule(rule, 0.1)
    tx = check_inner(given, "oxs.testing.check_optimizer(optax.adam(0.1))")
    rows = rule.rows if rule is not None else rows
    hold = functools.partial(_hold, "optimizer")
    numbers = np.random.default_rng(0)
    drawn = jnp.asarray(numbers.normal(size=(2, 4, 2)), jnp.float32)

    def trees(*arrays: jax.Array) -> list[Tree]:
        return [{"table": x, "bias": x[0]} for x in arrays]

    with programs.as_optax_expects():
        for dtype in (jnp.float32, jnp.bfloat16):
            _check_types(tx, hold, *trees(*drawn.astype(dtype)))
        params, grads, more = trees(*drawn, drawn[1] + 1)
        updates, state = tx.update(grads, tx.init(params), params)
        if rule is not None and not rule.needs_params:
            try:
                blind, _ = tx.update(grads, tx.init(params))
            except (TypeError, AttributeError):
                blind = jax.tree.map(lambda x: x + jnp.nan, updates)
            hold(
                jax.tree.all(jax.tree.map(np.allclose, blind, updates)),
                "needs_params=False",
                "`step` fails or differs without parameters",
                "Declare needs_params=True.",
            )
        if rows is not None:
            _check_rows(tx, rows, hold, params, more, state)


def virtual_cluster(
    seed: int = 0, *, max_seconds: float = 10_000.0
) -> "contextlib.AbstractContextManager[VirtualCluster]":
    """Run `oxs.runtime.run` in this process on a virtual clock, to test a program.

    Within the `with` block a run has its supervisor, servers and workers, and
    checkpoints on the disk if it has a `checkpoint_dir`, but no Ray, no other process,
    no thread and no waiting: whoever waits lets the others go on. The same seed gives
    the same order of events, so a test that fails fails again.

    The clock moves where somebody waits: messages take milliseconds, and a step no time
    at all. In its program a worker says how long one takes by `cluster.sleep(seconds)`;
    `time.sleep` would not move the virtual clock. `cluster.seconds` is what has passed.

    Workers share this process: global variables are one for all, and what JAX sets for
    a thread (`with jax.set_mesh(mesh):`) must not be open around `worker.step`. The
    `finally` blocks of a worker that died run at the end of the `with` block.

    Args:
        seed: Of the order of events.
        max_seconds: The virtual time after which a run that has not ended raises.

    Returns:
        A context manager, which gives the cluster. Needs greenlet: `pip install
        'optx-sync[testing]'`.

    Raises:
        ImportError: greenlet is not installed.
        TypeError: Arguments of a wrong type.
        ValueError: Numbers out of range; in a run, `processes_per_worker`.
        RuntimeError: At the end of the block a `fault` has not struck; in a run, time
            is up, or everybody waits.

    Example:
        Worker 1 dies after three steps. Another one goes on from its last round, and
        all six steps of both are in the center.

        >>> import jax.numpy as jnp, optax, optx_sync as oxs
        >>> def train(worker):
        ...     while worker.local_step < 6:
        ...         cluster.sleep(1.0)
        ...         worker.step({"w": -jnp.ones(())})
        >>> params = {"w": jnp.zeros(())}
        >>> with oxs.testing.virtual_cluster() as cluster:
        ...     center, history = oxs.runtime.run(
        ...         oxs.testing.fault(train, "dies", worker=1, step=3),
        ...         params, optax.sgd(1.0), oxs.rules.local_sgd(),
        ...         num_workers=2, communication_period=1,
        ...     )
        >>> history.count("lost"), float(center["w"]), 6 < cluster.seconds < 8
        (1, 6.0, True)
    """
    check_seed(seed)
    interval("(0, inf)", "Pass seconds.", max_seconds=max_seconds)
    from optx_sync import virtual

    return virtual.entered(virtual.VirtualCluster(seed, max_seconds))


def fault(
    worker_fn: Callable[[Any], object],
    kind: FaultKind,
    *,
    worker: int,
    step: int,
    seconds: float = 60.0,
) -> Callable[[Any], object]:
    """Kill, freeze or otherwise hit a worker at a step, in a `virtual_cluster`.

    Several faults are several calls, `fault(fault(train, ...), ...)`. Each strikes
    once, when its worker has made so many steps and the program goes on.

    Args:
        worker_fn: The program that `oxs.runtime.run` takes.
        kind: `"dies"`: its process is gone, in the middle of the program. `"freezes"`:
            it does nothing for some time. `"loses an answer"`: the answer to its next
            push is lost, and it pushes again. `"is told to leave"`: it has the notice
            (SIGTERM) that its machine goes.
        worker: The number of the worker that is hit.
        step: The `worker.local_step` after which it is.
        seconds: How long a frozen worker is, by the virtual clock.

    Returns:
        The program with the fault.

    Raises:
        TypeError: Arguments of a wrong type.
        ValueError: An unknown kind, or numbers out of range.
        RuntimeError: In a run: it is in no virtual cluster.

    Example:
        Worker 1 is told to leave after two steps: the third is its last one, and is
        handed in. It starts again.

        >>> import jax.numpy as jnp, optax, optx_sync as oxs
        >>> def train(worker):
        ...     while worker.local_step < 6:
        ...         worker.step({"w": -jnp.ones(())})
        ...     worker.flush()
        >>> train = oxs.testing.fault(train, "is told to leave", worker=1, step=2)
        >>> with oxs.testing.virtual_cluster():
        ...     center, history = oxs.runtime.run(
        ...         train, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
        ...         num_workers=2, communication_period=10,
        ...     )
        >>> [e.local_step for e in history.events if e.kind == "push" and e.worker == 1]
        [3, 6]
    """
    check_function("worker_fn", worker_fn, "Pass the program of a worker.")
    one_of("kind", kind, FaultKind)
    integer("worker", worker, "Pass the number of a worker, from 0 on.", 0)
    integer("step", step, "Pass how many steps it makes before.")
    interval("(0, inf)", "Pass how long it is frozen.", seconds=seconds)
    from optx_sync import virtual

    return virtual.with_fault(worker_fn, virtual.Fault(kind, worker, step, seconds))


def _hold(what: str, fact: bool, law: str, found: str, mend: str) -> None:
    if not fact:
        raise ValueError(f"This {what} is held to {law}, but {found}. {mend}")


@contextlib.contextmanager
def _given() -> Iterator[None]:
    """Say what an exchange was called with, if it raises."""
    try:
        yield
    except Exception as error:
        shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in _SHAPES.items()}
        error.add_note(
            f"oxs.testing.check_exchange gave each replica a tree of {shapes}: an "
            "exchange takes scalars and empty arrays, too."
        )
        raise


def _warn_of_growth(exchange: exchanges.Exchange, tree: Tree) -> None:
    """Warn of an exchange that loses more than it gets, so that what is owed grows."""
    fed = error_feedback(exchange)

    def owed(x):
        def one(state, _):
            return fed.meet(x, state, _AXIS).state, None

        start = localize(fed.init(x), _AXIS)
        return optax.tree.norm(jax.lax.scan(one, start, length=_ROUNDS)[0].error)

    squares = sum(np.sum(_wide(x[0]) ** 2) for x in tree.values())
    grown = np.max(jax.jit(jax.vmap(owed, axis_name=_AXIS))(tree)) / np.sqrt(squares)
    # A contraction owes at most as many trees as there were rounds.
    if grown > _ROUNDS**3:
        warnings.warn(
            f"Around this Exchange error_feedback owes {grown:.1g} times a tree after "
            f"{_ROUNDS} rounds, and ever more: training would explode. What it loses "
            "must be smaller than what it gets, |x - C(x)| < |x|; an unbiased code is "
            "often too large for that: leave its scale out, or use it without "
            "error_feedback.",
            stacklevel=3,
        )


def _types(tree: Tree) -> dict[str, tuple]:
    """Shape, dtype, and whether the dtype may still change, of each leaf."""
    return {
        name: (jnp.shape(x), jnp.result_type(x), getattr(x, "weak_type", False))
        for name, x in leaves_with_names(tree)
        if x is not None
    }


def _hold_types(hold: Hold, where: str, wanted: Tree, found: Tree) -> None:
    one, two = _types(wanted), _types(found)
    changed = [name for name in one | two if one.get(name) != two.get(name)]
    hold(
        not changed,
        f"the same types {where}",
        f"of {changed[:3]} they are {[two.get(name) for name in changed[:3]]} "
        f"where they were {[one.get(name) for name in changed[:3]]}",
        "Keep the structure, and cast for example by jnp.asarray(x, old.dtype).",
    )


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _close(x: Any, y: Any, relative: float = 3e-6) -> bool:
    """Whether arrays are equal, to a part of the largest number in them."""
    x, y = _wide(x), _wide(y)
    size = np.abs(np.nan_to_num(x)).max(initial=0)
    return np.allclose(x, y, rtol=0, atol=relative * size, equal_nan=True)


def _cases(replicas: int, weighted: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Trees [cases, replicas, ...], and the replicas' weights in each case."""
    numbers = np.random.default_rng(0)
    one = 0.5 * (1 + np.arange(replicas)) if weighted else np.ones(replicas)
    one[1] = 0  # It has a NaN in the third case.
    none = np.zeros(replicas)
    weights = np.stack([none + 1, one, one, none, one > 0]).astype(np.float32)
    trees = {}
    for name, x in _SHAPES.items():
        drawn = numbers.normal(size=(replicas, *x.shape)).astype(x.dtype)
        trees[name] = np.stack([drawn] * len(weights))
        trees[name][2, 1] = np.nan
    return trees, weights


def _check_mean(hold: Hold, name: str, mean: np.ndarray, alike: jax.Array) -> None:
    """The mean [cases, replicas, rounds, ...] is one, and only of those that count."""
    mean = _wide(mean)
    hold(
        np.array_equal(mean, np.broadcast_to(mean[:, :1], mean.shape), equal_nan=True),
        "one mean for all",
        f"that of {name!r} differs between replicas",
        "Combine the arrays by oxs.reduce, or so that all compute the same.",
    )
    hold(
        bool(np.array_equal(mean[1], mean[2]) and np.isfinite(mean).all()),
        "weight 0 without a trace",
        f"the mean of {name!r} depends on what that replica sent, or is NaN",
        "Leave it out by jnp.where: 0 times NaN is NaN. oxs.reduce(tree, axis_name, "
        "weight=weight) does.",
    )
    hold(
        not mean[3].any(),
        "a mean of 0 where all weights are 0",
        f"that of {name!r} is not",
        "Divide by jnp.where(total > 0, total, 1).",
    )
    hold(
        _close(alike, mean[0], _ROUNDED),
        "weight=None as equal weights",
        f"the mean of {name!r} is another one",
        "Take None for a weight of 1 on each replica.",
    )


def _check_law(
    hold: Hold, name: str, x: Any, weights: np.ndarray, mean: Any, owed: Any
) -> None:
    """The mean times the weights is what was sent, but for what is owed."""
    scale = weights.reshape(*weights.shape, *[1] * (x.ndim - 2))
    sent = np.where(scale > 0, scale * np.nan_to_num(_wide(x)), 0)[:, :, None]
    known = owed is not None and x.dtype == np.float32
    mean, owed = _wide(mean), _wide(0 * mean if owed is None else owed)
    size = (np.abs(sent) + np.abs(owed)).sum(1).max(initial=0)
    arrived = mean[:, 0] * scale.sum(1)[:, None]
    error = np.abs(arrived - (sent - owed).sum(1)).max(initial=0)
    hold(
        error <= (_KNOWN if known else _ROUNDED) * size,
        "linear=True, mean * sum(w) == sum(w * x - lost)",
        f"for {name!r} this is off by {error:.3g} of {size:.3g}",
        "Return in Met.lost what of w * x did not arrive, or declare linear=False.",
    )


def _check_forms(
    exchange: exchanges.Exchange, hold: Hold, tree: Tree, mean: Tree
) -> None:
    """What else an exchange can: pieces, messages, groups and rows."""

    def on_all(function: Callable[..., Tree], *trees: Tree) -> Tree:
        return jax.jit(jax.vmap(function, axis_name=_AXIS))(*trees)

    def same(one: Tree, other: Tree) -> bool:
        close = functools.partial(_close, relative=_ROUNDED)
        return jax.tree.all(jax.tree.map(close, one, other))

    scatter, code = exchange.scatter, exchange.code
    if scatter is not None and exchange.exact:
        pieces = on_all(lambda tree: scatter(tree, (), _AXIS).mean, tree)
        of_mean = on_all(lambda mean: cut(mean, _AXIS), mean)
        hold(same(of_mean, pieces), "scatter", "it gives other pieces", "Leave it out.")
    if code is not None:
        x = jnp.asarray(tree["matrix"][0])
        message, lost, _ = code.encode(x, exchange.init(x))
        hold(
            _close(x, code.decode(message, x) + lost, _KNOWN),
            "code",
            "what is decoded and what is lost are not the array together",
            "Return as lost the array minus what decode makes of the message.",
        )
    if exchange.exact:
        count = len(tree["scalar"])

        def of_groups(tree, index):
            meet, groups = exchange.meet, [[i] for i in range(count)]
            rows: Any = IndexedSlices(index[None], tree["vector"][None])
            alone = meet(tree, (), _AXIS, group_assignment=groups).mean
            return alone, meet(rows, (), _AXIS).mean.to_dense(count)

        rows = np.stack([tree["vector"] / count] * count)
        hold(
            same((tree, rows), on_all(of_groups, tree, np.arange(count))),
            "exact=True",
            "groups of one replica, or rows, have another mean",
            "Leave exact out.",
        )


def _check_types(tx: Any, hold: Hold, params: Tree, grads: Tree) -> None:
    """The state of one step, as arrays, as shapes and as Optax's placeholder."""
    state = tx.init(params)
    shapes = jax.eval_shape(lambda: params)
    _hold_types(hold, "of shapes, from `init`,", state, tx.init(shapes))
    found = optax.tree.map_params(tx, lambda x: x, state)
    _hold_types(hold, "after optax.tree.map_params", state, found)
    updates, after = jax.eval_shape(tx.update, grads, state, params)
    _hold_types(hold, "after `update`", state, after)
    shapes = jax.tree.map(jnp.shape, (updates, params))
    hold(
        shapes[0] == shapes[1],
        "updates of the parameters' shapes",
        f"they are {shapes[0]} for {shapes[1]}",
        "Return for each gradient an update like it.",
    )


def _check_rows(
    tx: Any, rows: Rows, hold: Hold, params: Any, grads: Any, state: Tree
) -> None:
    """A step of two rows of four, against the dense one with zeros in the others."""
    law = f"rows={rows!r}"
    named, others = jnp.array([1, 3]), jnp.array([0, 2])
    values = grads["table"][named]
    sparse = grads | {"table": IndexedSlices(named, values)}
    if rows == "refused":
        try:
            tx.update(sparse, state, params)
        except TypeError:
            return
        hold(False, law, "it takes one", "Declare what it does to rows.")
    dense = grads | {"table": jnp.zeros_like(grads["table"]).at[named].set(values)}

    def tables(updates: Any, state: Tree) -> list:
        slots = state.slots if isinstance(state, RuleState) else ()
        moved: Any = optax.apply_updates(params, updates)
        return [moved["table"], *(tree["table"] for tree in slots)]

    before = tables(jax.tree.map(jnp.zeros_like, params), state)
    after = (tables(*tx.update(grads, state, params)) for grads in (sparse, dense))
    for number, (old, new, wanted) in enumerate(zip(before, *after, strict=True)):
        hold(
            _close(new[named], wanted[named]),
            law,
            "rows with a gradient move otherwise than under the dense one",
            'Compute each row alone, or declare rows="all".',
        )
        # With "decay_all" the other slots are what the rule's `decay` makes of them.
        stay = wanted if rows == "all" else old
        hold(
            _close(new[others], stay[others]) or (rows == "decay_all" and number > 0),
            law,
            "rows without a gradient, or their slots, do otherwise",
            "Declare what it does: the page 'An optimizer, rule or exchange of your "
            "own' has a table of rows=.",
        )


def __dir__() -> list[str]:
    return __all__


_readable(globals())
