# SPDX-License-Identifier: Apache-2.0
"""What workers and a server agree on, and what they send each other.

What travels is a dict from the path of a variable to its array; which arrays go there
and back follows from the rule (`traffic`).
"""

import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.formulas import start_center
from optx_sync.center.rule import CenterRule, Period, Round, reads
from optx_sync.replicas.averages import check_averages
from optx_sync.replicas.sync_replicas import check_replicas

Arrays: TypeAlias = dict[str, Any]  # the path of a variable -> its array


@dataclasses.dataclass(frozen=True)
class SyncReplicas:
    """Synchronous replicas with backup workers, as an agreement of `run`.

    Every worker pushes every gradient; the server drops what is stale, applies `inner`
    to the mean of the first `replicas_to_aggregate` of them, and hands out
    max(N, R) tokens of the new step. A worker waits for a token after each push.

    The original is TensorFlow's `SyncReplicasOptimizer`, whose event by event replay is
    `oxs.simulate.sync_replicas`. Here, with N >= R, a worker whose gradient was
    accepted waits for the update that it is part of. The original lets it go on as soon
    as any token is left over. That buys a gradient which is stale when it arrives, and
    costs a third of the updates when one of four workers lags behind.

    Attributes:
        replicas_to_aggregate: R, the gradients that an update needs.
        total_num_replicas: N, checked against the number of workers; `None`: any.
        num_tokens: The tokens at the start; -1: R of them.
        variable_averages: The decay of a moving average of the parameters, or a
            schedule of the new global step. `None`: no average.

    Example:
        >>> from optx_sync.runtime import SyncReplicas
        >>> SyncReplicas(3, total_num_replicas=4).num_tokens
        -1
    """

    replicas_to_aggregate: int
    total_num_replicas: int | None = None
    num_tokens: int = -1
    variable_averages: float | optax.Schedule | None = None

    def __post_init__(self) -> None:
        check_replicas(self.replicas_to_aggregate, self.total_num_replicas)
        check_averages(self.variable_averages)
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int):
            raise TypeError(f"num_tokens must be an integer; got {self.num_tokens!r}.")
        if self.num_tokens < -1:
            raise ValueError(
                f"num_tokens must be 0 or more, or -1 for replicas_to_aggregate; got "
                f"{self.num_tokens}."
            )


Agreement: TypeAlias = CenterRule | SyncReplicas


class PushRefused(ValueError):
    """A push that the server did not accept; the center is as it was."""


class Push(NamedTuple):
    """What a worker sends."""

    worker: int
    round: int  # 1 for a worker's first push; a retry has the number of the first try
    arrays: dict[str, Arrays]  # what is sent -> its arrays, see `traffic`
    steps: int = 1  # the worker's steps since its last round
    local_step: int = 0  # the worker's steps so far
    shown: dict[str, float] = {}  # noqa: RUF012 # only read: for the display


class Reply(NamedTuple):
    """What a worker gets back."""

    arrays: dict[str, Arrays]  # "before", "after"; or "params"
    global_step: int
    staleness: int  # the other workers' rounds since this worker's last one
    used: bool = True  # False for a stale gradient, which left no trace
    waiting: bool = False  # whether the worker must wait for a token: ask `wait`


class Joined(NamedTuple):
    """What a worker gets that starts, or starts again."""

    arrays: Arrays  # the center
    round: int  # the worker's last one
    local_step: int  # the worker's steps at its last round
    global_step: int
    restarts: int  # how often the worker has joined before


class Event(NamedTuple):
    """One line of the history."""

    # started, restored, join, left, push, dropped, retry, refused; lost (by `run`)
    kind: str
    worker: int  # -1 for the server's own
    round: int
    local_step: int
    global_step: int  # after the event
    staleness: int
    time: float  # seconds since the epoch
    shown: dict[str, float]
    message: str = ""


class Traffic(NamedTuple):
    """Which arrays travel: no more than the rule's formulas read."""

    sends: tuple[str, ...]  # "contribution", or fields of `Own`
    replies: tuple[str, ...]  # of "before" and "after", the center around the round


def traffic(rule: CenterRule, at: Round) -> Traffic:
    """What a worker and the center send each other under a rule."""
    read = reads(rule, at.communication_period or 1)
    if read.center:
        fields = {
            "params": read.params,
            "taken": read.contributed_taken,
            "accumulated": read.accumulated,
        }
        sends = tuple(name for name, is_read in fields.items() if is_read)
    else:
        sends = ("contribution",)
    before = read.before or (read.taken and rule.take is not None)
    after = read.after or (read.taken and rule.take is None)
    names = {"before": before, "after": after}
    return Traffic(sends, tuple(name for name, wanted in names.items() if wanted))


def check_agreement(
    agreement: Any, num_workers: Any, communication_period: Period
) -> None:
    """Refuse an agreement that does not fit the number of workers or the period."""
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise TypeError(f"num_workers must be an integer; got {num_workers!r}.")
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more; got {num_workers}.")
    if isinstance(agreement, SyncReplicas):
        total = agreement.total_num_replicas
        if total not in (None, num_workers):
            raise ValueError(
                f"total_num_replicas={total}, but there are {num_workers} workers. "
                "Leave it out, or make them equal."
            )
        required = agreement.replicas_to_aggregate
        if 0 <= agreement.num_tokens < required - num_workers:
            raise ValueError(
                f"num_tokens={agreement.num_tokens} is too few for a first update: "
                f"{num_workers} workers have {num_workers} gradients without a token, "
                f"and it needs {required}. Pass {required - num_workers} or more, or "
                "-1."
            )
        return
    if not isinstance(agreement, CenterRule):
        raise TypeError(
            "agreement must be a center rule such as oxs.local_sgd_rule(), or "
            f"oxs.runtime.SyncReplicas(3); got {agreement!r}."
        )
    if agreement.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for {agreement.num_workers} workers, but there are "
            f"{num_workers}. Make them equal."
        )
    if agreement.check is not None:
        agreement.check(communication_period)


def partition(params: Any, num_parts: int) -> list[Any]:
    """Split the variables into trees of about equal size, `None` where one has none.

    Args:
        params: A tree of arrays.
        num_parts: How many parts, at most one for each variable.

    Returns:
        Trees like `params`; each variable is in one of them.

    Raises:
        ValueError: More parts than variables.

    Example:
        >>> import numpy as np
        >>> from optx_sync.runtime import partition
        >>> parts = partition({"a": np.zeros(9), "b": np.zeros(5), "c": np.zeros(4)}, 2)
        >>> [[name for name, x in part.items() if x is not None] for part in parts]
        [['a'], ['b', 'c']]
    """
    leaves, treedef = jax.tree.flatten(params)
    if not 1 <= num_parts <= len(leaves):
        raise ValueError(
            f"{len(leaves)} variables cannot be split among {num_parts} servers: each "
            "needs one or more. Pass a smaller num_servers."
        )
    if num_parts == 1:
        return [params]
    owner, sizes = [0] * len(leaves), [0] * num_parts
    bytes_of = [math.prod(jnp.shape(x)) * x.dtype.itemsize for x in leaves]
    filled = [0] * num_parts
    for i in sorted(range(len(leaves)), key=lambda i: -bytes_of[i]):
        # Variables of size 0 must not leave a part empty.
        owner[i] = min(range(num_parts), key=lambda part: (sizes[part], filled[part]))
        sizes[owner[i]] += bytes_of[i]
        filled[owner[i]] += 1
    return [
        treedef.unflatten([x if owner[i] == k else None for i, x in enumerate(leaves)])
        for k in range(num_parts)
    ]


def join_parts(parts: list[Any], params: Any) -> Any:
    """The whole tree from the parts that `partition` made, in the dtypes of `params`.

    Args:
        parts: The parts, each with arrays of its own.
        params: The tree that was split; its structure and dtypes are those of the
            result.

    Returns:
        A tree like `params`.
    """
    found = {}
    for part in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            found[path_of(path)] = leaf
    return jax.tree_util.tree_map_with_path(
        lambda path, param: np.asarray(found[path_of(path)]).astype(param.dtype), params
    )


def path_of(path: Any) -> str:
    """The name of a variable in messages, checkpoints and on the wire."""
    return jax.tree_util.keystr(path) or "the root"


def round_of(num_workers: int, communication_period: Period, steps: Any) -> Round:
    """What a rule may know of a round."""
    period = None if callable(communication_period) else communication_period
    return Round(num_workers, period, jnp.int32(steps))


class Expected(NamedTuple):
    """What a push must look like."""

    names: tuple[str, ...]  # what is sent, see `Traffic`
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    def problem(self, sent: Any) -> str:
        """What is wrong with arrays that a worker sent; "" if nothing is."""
        if not isinstance(sent, dict) or set(sent) != set(self.names):
            got = sorted(sent) if isinstance(sent, dict) else type(sent)
            return f"a push holds {sorted(self.names)}; got {got}."
        for name in self.names:
            problem = self._problem_of(name, sent[name])
            if problem:
                return problem
        return ""

    def _problem_of(self, name: str, arrays: Any) -> str:
        if not isinstance(arrays, dict):
            return f"{name} must be a dict from paths to arrays; got {type(arrays)}."
        unknown = [path for path in arrays if path not in self.paths]
        missing = [path for path in self.paths if path not in arrays]
        if unknown or missing:
            return (
                f"{name} does not have the structure of the parameters: unknown "
                f"{unknown}, missing {missing}. Push what Worker.step was given for "
                "the same parameters."
            )
        of_leaf = _grad_problem if name == "grads" else _array_problem
        for path, shape, dtype in zip(
            self.paths, self.shapes, self.dtypes, strict=True
        ):
            problem = of_leaf(arrays[path], shape, dtype)
            if problem:
                return f"{name} at {path} {problem}"
        return ""


def expected(agreement: Agreement, params: Any, at: Round) -> Expected:
    """What pushes must look like for these parameters, or for the part of a server."""
    if isinstance(agreement, SyncReplicas):
        names, tree = ("grads",), params
    else:
        names = traffic(agreement, at).sends
        tree = jax.eval_shape(start_center, params)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return Expected(
        names,
        tuple(path_of(path) for path, _ in leaves),
        tuple(jnp.shape(leaf) for _, leaf in leaves),
        tuple(np.dtype(leaf.dtype) for _, leaf in leaves),
    )


def _array_problem(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> str:
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        return f"must be an array; got {type(array).__name__}."
    if array.dtype != dtype:
        return f"must have dtype {dtype}; got {array.dtype}."
    if array.shape != shape:
        return f"must have shape {shape}; got {array.shape}."
    if not _is_finite(np.asarray(array)):
        return "holds a NaN or infinity."
    return ""


def _grad_problem(grad: Any, shape: tuple[int, ...], dtype: np.dtype) -> str:
    if grad is None:
        return ""
    if not isinstance(grad, tuple):
        return _array_problem(grad, shape, dtype)
    indices, values = grad
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim != 1:
        return f"must have integer indices in one row; got {indices.dtype}."
    return _array_problem(values, (len(indices), *shape[1:]), dtype)


def _is_finite(array: np.ndarray) -> bool:
    """One pass without a temporary array: a sum is finite only if its terms are."""
    if array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            flat = array.reshape(-1)
            if np.isfinite(np.dot(flat, flat)):
                return True
    # Squares of finite terms may overflow.
    return bool(np.isfinite(array).all())
