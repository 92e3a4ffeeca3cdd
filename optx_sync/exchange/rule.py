# SPDX-License-Identifier: Apache-2.0
"""`Exchange`: how the arrays of all replicas become their mean, and what that loses.

Every wrapper of this package hands what its replicas have to an exchange and goes on
with the mean. What travels, how it is coded, and how outliers are treated are therefore
the exchange's business alone; the files beside this one hold one each.

The law of every linear exchange, up to rounding, with x_i the tree of replica i, w_i
its weight and lost_i what did not arrive and replica i owes:

    mean * sum_i w_i  ==  sum_i (w_i x_i - lost_i)

A sum is the mean times the sum of the weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.collectives import AxisName, GroupAssignment, localize, vary_like
from optx_sync.trees import Tree, is_slices, leaves_with_names


class Meet(Protocol):
    """`(tree, state, axis_name) -> (mean, lost, state)`, where the axis is mapped.

    `weight` is this replica's, a scalar that is not negative; `None`: all count alike.
    A replica of weight 0 leaves no trace, NaN or not; if all weights are 0 the mean is
    zero. `group_assignment` is given only to an exchange that takes groups.
    """

    def __call__(
        self,
        tree: Tree,
        state: Any,
        axis_name: AxisName,
        *,
        weight: jax.Array | float | None = None,
        group_assignment: GroupAssignment | None = None,
    ) -> tuple[Tree, Tree | None, Any]:
        """The mean over the replicas, what is lost, and the next state."""
        ...


class Code(NamedTuple):
    """What one replica sends where it meets nobody: one array as a message, and back.

    Asynchronous workers push one by one, so there is no mean; `oxs.runtime` sends the
    message, and its server adds what it stands for.
    """

    # (array, what `init` made of it) -> (message, what is lost, state)
    encode: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array, Any]]
    # (message, an array or shape of the kind that was coded) -> array
    decode: Callable[[jax.Array, Any], jax.Array]


class Exchange(NamedTuple):
    """How the arrays of all replicas become their mean.

    Attributes:
        init: `(tree) -> state`, from arrays or `jax.ShapeDtypeStruct`: what a replica
            remembers from exchange to exchange; `()` where that is nothing.
        meet: See `Meet`. `mean` is equal on all replicas, in the dtypes of `tree`;
            `lost` is a tree in units of weight times value, or `None` where nothing is
            lost that anybody knows of.
        linear: Whether the law in this module's head holds.
        takes_rows: Whether leaves may be row-sparse (`IndexedSlices`).
        takes_groups: Whether `meet` takes `group_assignment`.
        takes_weights: Whether a weight is more than a flag: `False` where 0 leaves a
            replica out and all others count alike.
        outlier: `(tree, mean, axis_name, weight) -> bool[]`, whether what this replica
            sent lies far from what `meet` made of it; wrappers count that for
            `oxs.metrics`. `None`: the exchange does not ask.
        meet_and_sum: `meet` of an exchange whose mean is the exact one, for measures:
            it takes a dictionary of scalars after `axis_name`, and returns their sums
            and the divisor of the mean as well.
        code: What a worker pushes without lockstep; `None` where the exchange has no
            meaning for one replica alone.
        scatter: The first half of `meet`, `(tree, axis_name, *, weight) -> pieces`: the
            mean of this replica's piece of every array, for a state in pieces; `None`
            where the exchange cannot be halved.

    Example:
        The exact mean, written by hand:

        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> def meet(tree, state, axis_name, *, weight=None, group_assignment=None):
        ...     return oxs.reduce(tree, axis_name, weight=weight), None, state
        >>> exact = oxs.exchange.Exchange(init=lambda tree: (), meet=meet)
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=exact)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0]))
        Array([-2., -2.], dtype=float32)
    """

    init: Callable[[Tree], Any]
    # A `Meet`; one that takes no groups may leave that argument out.
    meet: Callable[..., tuple[Tree, Tree | None, Any]]
    linear: bool = True
    takes_rows: bool = False
    takes_groups: bool = False
    takes_weights: bool = True
    outlier: Callable[[Tree, Tree, AxisName, Any], jax.Array] | None = None
    # `(tree, state, axis_name, scalars, ...) -> (mean, lost, state, sums, divisor)`.
    meet_and_sum: Callable[..., tuple[Tree, Tree | None, Any, Any, Any]] | None = None
    scatter: Callable[..., Tree] | None = None
    code: Code | None = None


def remembers(exchange: Exchange) -> bool:
    """Whether an exchange keeps anything from one call to the next."""
    example = {
        "matrix": jax.ShapeDtypeStruct((64, 64), np.float32),
        "vector": jax.ShapeDtypeStruct((64,), np.float32),
    }
    return bool(jax.tree.leaves(jax.eval_shape(exchange.init, example)))


def start_outliers(exchange: Exchange) -> Any:
    """int32[], how often a replica was an outlier so far, or () if nobody asks."""
    return () if exchange.outlier is None else jnp.zeros((), jnp.int32)


def count_outlier(
    exchange: Exchange,
    tree: Tree,
    mean: Tree,
    axis_name: AxisName,
    weight: Any,
    so_far: Any,
) -> Any:
    """The count, one more if what this replica sent lies far from the result."""
    if exchange.outlier is None:
        return so_far
    is_one = exchange.outlier(tree, mean, axis_name, weight)
    return vary_like(so_far + localize(is_one.astype(jnp.int32), axis_name), so_far)


def require_dense(tree: Tree, who: str = "this exchange") -> None:
    """Refuse row-sparse leaves; `who` does not take them, says the message."""
    for path, leaf in leaves_with_names(tree):
        if is_slices(leaf):
            raise ValueError(
                f"The gradient at {path} is row-sparse, which {who} does not take. Use "
                "oxs.exchange.all_reduce(), or its to_dense(rows)."
            )


def check_weight(exchange: Exchange, weight: Any) -> None:
    """Refuse a weight that is more than a flag where the exchange has no use for it."""
    if weight is None or exchange.takes_weights:
        return
    if jnp.result_type(weight) != jnp.bool_:
        raise ValueError(
            "This exchange counts all replicas alike and takes no weight. Pass a bool "
            "to leave a replica out, or clip with oxs.exchange.clipped(...), which "
            "takes weights."
        )


def require_exact(exchange: Exchange) -> None:
    """Refuse to measure gradients where an exchange does not give their mean."""
    if exchange.meet_and_sum is None:
        raise ValueError(
            "measure=True compares each replica's gradient with the mean of all, and "
            "this exchange gives another one, coded or cut. Measure with "
            "oxs.exchange.all_reduce(), or leave measure out."
        )


def check_exchange(exchange: Any, default: Exchange) -> Exchange:
    """`exchange=` of a wrapper, `default` for `None`; a TypeError for anything else."""
    if exchange is None:
        return default
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "exchange must be one of oxs.exchange, or an oxs.exchange.Exchange of your "
            f"own; got {exchange!r} of type {type(exchange).__name__}. Write for "
            "example exchange=oxs.exchange.all_reduce(jnp.bfloat16)."
        )
    return exchange


class Met(NamedTuple):
    mean: Any
    weight: Any
    lost: Any
    state: Any
    also: Any


def meet_temporarily(exchange, tree, state, axis_name, *, weight, also):
    from optx_sync.collectives import axis_size, reduce

    if exchange.meet_and_sum is not None:
        mean, lost, state, sums, divisor = exchange.meet_and_sum(
            tree, state, axis_name, also, weight=weight
        )
        return Met(mean, divisor, lost, state, sums)
    mean, lost, state = exchange.meet(tree, state, axis_name, weight=weight)
    total = axis_size(axis_name)
    if weight is not None:
        total = reduce(weight, axis_name, reduction="sum")
    return Met(mean, total, lost, state, reduce(also, axis_name, reduction="sum"))
