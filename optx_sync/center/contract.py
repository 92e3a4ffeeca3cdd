# SPDX-License-Identifier: Apache-2.0
"""`CenterRule`: what workers and their center give each other, per array.

Every worker trains parameters of its own with `inner`. Every `communication_period`
steps they meet: each worker contributes something, the center absorbs the sum or mean
of the contributions, and each worker takes something back. A `CenterRule` is the
formula for each of the three. With x the worker's parameters, c the center now, s the
center that the worker took last (equal to c in lockstep, where the worker takes the
center whole) and N workers:

    rule        contributes            the center absorbs       the worker takes
    elastic     a (x - c)              c + sum                  x - a (x - c)
    agn         accumulated / steps    a step of `outer`        the center
    local_sgd   (x - s) / N            c + sum                  the center
    diloco      (s - x) / N            a step of `outer`        the center
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import jax
import jax.core
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import integer, one_of
from optx_sync.core.trees import Tree, brief, call_it
from optx_sync.state.direct import period_length

MeanOver: TypeAlias = Literal["pushed", "workers", None]
InnerStates: TypeAlias = Literal["keep", "average", "reset"]
# Or names of fields, with the rounds from one mean of them to the next.
InnerState: TypeAlias = InnerStates | Mapping[str, int]
Period: TypeAlias = int | optax.Schedule


class Own(NamedTuple):
    """What a worker holds of one array when it meets the center (center's dtype).

    Attributes:
        params: x, its parameters after the step.
        taken: s, the center that it took last. For a rule with `take`: the center as it
            was before the worker's last round.
        accumulated: The sum of its gradients or updates since its last round, this
            step's included; `None` where the rule does not accumulate.
    """

    params: jax.Array
    taken: jax.Array
    accumulated: Any


class Round(NamedTuple):
    """What a rule may know of a round, apart from the arrays.

    Attributes:
        num_workers: N: of the axis in lockstep, of the run when asynchronous.
        communication_period: Steps from one round to the next; `None` where the period
            is a schedule.
        steps: int32[], traced: the worker's steps since it last met the center, this
            one included. `contribute` and `take` get the whole period, or less where
            the caller makes the workers meet early. `penalty` is called in every step
            and gets 1 ... period.
        staleness: int32[], for workers that meet the center one by one: rounds of the
            others since this worker took the center, but for those that were dropped
            (`weigh` gave 0, or the worker was not finite). 0 in lockstep.
        tokens: float32[], for workers that meet the center one by one: tokens or
            examples behind the contribution, or steps where nobody counts them. `None`
            in lockstep.
        num_pushed: int32[], for workers that meet the center one by one: contributions
            of this worker, this one included. 1 in lockstep.
    """

    num_workers: int
    communication_period: int | None
    steps: Any
    staleness: Any = 0
    tokens: Any = None
    num_pushed: Any = 1


# The arrays that `contribute` may read, and the two that `take` may.
Array: TypeAlias = Literal[
    "params", "taken", "accumulated", "center", "before", "after"
]
# How much of a contribution the center absorbs, given its `Round`.
Weigh: TypeAlias = Callable[[Round], ArrayLike]


class CenterRule(NamedTuple):
    """What workers and the center give each other, as formulas for one array.

    A NamedTuple: `rule._replace(weigh=...)` is the rule with another field.

    Attributes:
        contribute: `(own: Own, center, at: Round) -> array`.
        outer: The transformation that absorbs the contributions as a gradient, in
            one step on the center. `None`: the contributions are added to the
            center.
        take: `(x, before, after, at) -> array`, the worker's new parameters, from
            its own and the center before and after the round. `None`: the worker
            takes the center after the round.
        mean_over: `None`: contributions are summed. `"pushed"` and `"workers"`: in
            lockstep both average over the workers of the round. Asynchronously
            `"workers"` divides each contribution by N, and `"pushed"` does not.
        accumulate: What a worker sums up between rounds: `"gradients"`, `"updates"` of
            `inner`, or `None`.
        penalty: `(own, at) -> array` added to the gradient in every step, or `None`.
        num_workers: The number of workers that the rule was made for, checked against
            the axis; `None`: any.
        check: `(communication_period) -> None`, which raises for a period that does
            not suit the rule; `None`: any period does.
        weigh: `(at) -> factor` by which a contribution is multiplied where workers
            come one by one: `weigh=` of `oxs.simulate.asynchronous` and
            `oxs.runtime.run`. With 0 it is dropped, and the center stays.
        check_lockstep: `(num_workers) -> None`, which raises where so many workers that
            all meet at once would drift apart; `None`: they never do.
        reads: Names of the arrays that `contribute` reads, "params", "taken",
            "accumulated" and "center", and that `take` reads, "before" and "after".
            Others need not travel or be kept, and raise where a formula uses them.
            All of them, the default, is always right; but what a rule that reads
            "center" contributes cannot be coded in `oxs.runtime`, where a worker does
            not know the center. In lockstep any exchange works.

    Example:
        The skeleton to copy, local SGD with a slower center:

        >>> import optax
        >>> import optx_sync as oxs
        >>> half_way = oxs.CenterRule(
        ...     contribute=lambda own, center, at: 0.5 * (own.params - own.taken),
        ...     mean_over="workers",
        ...     reads=("params", "taken"),
        ... )
        >>> tx = oxs.center_variable(optax.sgd(0.1), half_way, "workers")
    """

    contribute: Callable[[Own, jax.Array, Round], jax.Array]
    outer: optax.GradientTransformation | None = None
    take: Callable[[jax.Array, jax.Array, jax.Array, Round], jax.Array] | None = None
    mean_over: MeanOver = None
    accumulate: Literal["gradients", "updates"] | None = None
    penalty: Callable[[Own, Round], jax.Array] | None = None
    num_workers: int | None = None
    check: Callable[[Period], None] | None = None
    weigh: Weigh | None = None
    check_lockstep: Callable[[int], None] | None = None
    reads: tuple[Array, ...] = get_args(Array)


class Undeclared(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an array that a rule does not declare to read: any use of it raises.

    Args:
        name: The array's name among `CenterRule.reads`.
        reads: What the rule declares.
    """

    def __init__(self, name: Array, reads: tuple[Array, ...]):
        self._name, self._reads = name, reads

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"A formula of this CenterRule reads {self._name!r}, and the rule declares "
            f"reads={self._reads}. Declare it too: reads={(*self._reads, self._name)}."
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        self.__array_ufunc__()


def declared(rule: CenterRule, name: Array, array: Any) -> Any:
    """The array for a formula of the rule; what raises if it is used undeclared."""
    return array if name in rule.reads else Undeclared(name, rule.reads)


def keeps_before(rule: CenterRule) -> bool:
    """Whether a worker must keep the center as it was before its last round.

    This is so for a rule with `take` whose formulas read `own.taken`. In lockstep and
    without `take`, the last center that a worker took is the current one: no copy is
    needed.
    """
    reads = "taken" in rule.reads or rule.penalty is not None
    return rule.take is not None and reads


def static_period(communication_period: Period) -> int | None:
    """The period as a `Round` gives it: `None` for a schedule."""
    return None if callable(communication_period) else communication_period


def check_rule(rule: object, call: str) -> None:
    """Refuse anything but a `CenterRule`, showing `call`, and names it cannot read."""
    if not isinstance(rule, CenterRule):
        raise TypeError(
            f"rule must be a CenterRule; got {brief(rule)}.{call_it(rule)} Write for "
            f"example {call}."
        )
    one_of("mean_over", rule.mean_over, MeanOver)
    known = get_args(Array)
    if not (isinstance(rule.reads, tuple) and set(rule.reads) <= set(known)):
        raise ValueError(
            f"reads of a CenterRule is a tuple of names among {known}; got "
            f"{rule.reads!r}. Write for example reads=('params', 'taken')."
        )


def check_period(communication_period: Period) -> Period:
    """The period; a TypeError or ValueError unless it is an int >= 1 or a schedule."""
    if callable(communication_period):
        return communication_period
    mend = "Pass an int, which is static, for example 10, or a schedule."
    return integer("communication_period", communication_period, mend)


def check_first_period(communication_period: Period, params: Tree) -> None:
    """Refuse a schedule whose first period, of parameters that are there, is none.

    Not where it is constructed, since that would start JAX's backend. Of later periods
    hosts that count and `oxs.by_hand.due` say what is wrong.
    """
    leaves = jax.tree.leaves(params)
    there = all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
    if not callable(communication_period) or not there:
        return
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return
    # A schedule of what a program around it traces has no number yet.
    with contextlib.suppress(jax.errors.JAXTypeError):
        period_length(communication_period, 0)
