# SPDX-License-Identifier: Apache-2.0
"""`Exchange`: how the arrays of all replicas become their mean, and what that loses.

Every wrapper of this package gives its replicas' arrays to an exchange, and goes on
with the mean. The exchange alone decides what travels, how it is coded, and how
outliers are treated. Each file beside this one holds one exchange.

The law of every linear exchange, up to rounding, with x_i the tree of replica i, w_i
its weight, and lost_i what of it did not arrive and replica i still owes:

    mean * sum_i w_i  ==  sum_i (w_i x_i - lost_i)

A sum is the mean times the sum of the weights, which `meet` returns with the mean.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from optx_sync.comm import shards
from optx_sync.comm.buffers import BUCKET_BYTES
from optx_sync.comm.collectives import AxisName, axis_size
from optx_sync.comm.reduce import as_weight, own_weight, reduce
from optx_sync.comm.varying import localize
from optx_sync.core.shapes import Array, Bool, Float, Shaped
from optx_sync.core.trees import Tree, brief, call_it, is_slices, leaves_with_names

# Scalars of a wrapper that may travel with the arrays, by name.
Scalars: TypeAlias = dict[str, Shaped[Array, ""]]


class Met(NamedTuple):
    """The result of a meeting for one replica.

    Your own exchange may leave `weight` and `also` out, `None`: the library then sums
    them in an all-reduce of their own.

    Attributes:
        mean: The mean, a tree equal on all replicas, in the dtypes of the tree that was
            given; of `scatter` this replica's piece of every array.
        weight: The sum of the weights, a scalar; the number of replicas if there are no
            weights.
        lost: What of this replica's tree did not arrive, a tree in units of weight
            times value; `None` if no loss is known.
        state: What this replica remembers now; () for nothing.
        also: The sums of the scalars that were given as `also`, a tree like it.
    """

    mean: Tree
    weight: Float[Array, ""] | int | None = None
    lost: Tree | None = None
    state: Tree = ()
    also: Tree = None


class Code(NamedTuple):
    """One array as a message, and back: how a replica that comes alone sends it.

    Asynchronous workers push one by one, so there is no mean; `oxs.runtime` sends the
    message, and its server adds the decoded array.

    Attributes:
        encode: `(array, state) -> (message, what is lost, state)`; the first state is
            from `Exchange.init`.
        decode: `(message, like) -> array`, where `like` has the shape and dtype of the
            array that was coded: an array or a `jax.ShapeDtypeStruct`.
    """

    encode: Callable[[jax.Array, Tree], tuple[jax.Array, jax.Array, Tree]]
    decode: Callable[[jax.Array, jax.Array | jax.ShapeDtypeStruct], jax.Array]


class Exchange(NamedTuple):
    """How the arrays of all replicas become their mean.

    Attributes:
        init: `(tree) -> state`, from arrays or `jax.ShapeDtypeStruct`: what a
            replica remembers from one exchange to the next; `()` for nothing.
        meet: `(tree, state, axis_name, *, weight=None, also=None) -> Met`, where the
            axis is mapped. `weight` is this replica's, a scalar that is not negative;
            `None`: all count the same. A replica of weight 0 leaves no trace, NaN or
            not; if all weights are 0 the mean is zero. `also` is a tree of this
            replica's scalars, to be summed over all replicas: they travel with the
            arrays if the exchange can carry them. An `exact` exchange takes
            `group_assignment` as well.
        linear: Whether mean * sum_i w_i == sum_i (w_i x_i - lost_i) holds, with x_i
            the tree of replica i, w_i its weight and lost_i its `Met.lost`. `None`: not
            declared, and refused where it matters, by `error_feedback` (which also asks
            for a contraction) and `sync_replicas`.
            `oxs.testing.check_exchange` holds an exchange to all that it declares.
        exact: Whether the mean is exact, whatever the leaves: they may be
            row-sparse (`IndexedSlices`), `meet` takes `group_assignment`, and
            `measure=True` compares gradients with the mean.
        takes_weights: Whether a weight is more than a flag: `False` where 0 leaves
            a replica out and all others count the same.
        remembers: Whether a replica remembers anything: `False` says that `init`
            returns `()`, so that a wrapper around it need not keep a state.
        outlier: `(tree, met, axis_name, weight) -> bool[]`, whether this replica's
            tree lies far from the mean of `met`, which `meet` returned, or was left
            out of it; wrappers count that for `oxs.metrics`. `None`: not asked.
        code: How a worker codes what it pushes without lockstep; `None` if the
            exchange has no meaning for one replica alone.
        scatter: The first half of `meet`, for a state in pieces, `(tree, state,
            axis_name, *, weight=None) -> Met`, whose mean is this replica's piece of
            every array; `None` if the exchange cannot be halved.
        bucket_bytes: How many bytes of a state in pieces one collective brings
            back.
        in_buckets: Whether leaves of different buckets, of `bucket_bytes` each, do not
            touch: `error_feedback` then gives a large tree to `meet` bucket by bucket,
            with `None` in place of the other leaves, and needs less memory.
        needs: The fewest replicas of which it makes a mean.

    Example:
        The mean, written by hand:

        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> def meet(tree, state, axis_name, *, weight=None, also=None):
        ...     return oxs.exchange.Met(oxs.reduce(tree, axis_name, weight=weight))
        >>> by_hand = oxs.exchange.Exchange(lambda tree: (), meet, linear=True)
        >>> tx = oxs.cross_shard(optax.sgd(1.0), "data", exchange=by_hand)
        >>> def step(gradient):
        ...     return tx.update(gradient, tx.init(gradient))[0]
        >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0]))
        Array([-2., -2.], dtype=float32)
    """

    init: Callable[[Tree], Tree]
    meet: Callable[..., Met]
    linear: bool | None = None
    exact: bool = False
    takes_weights: bool = False
    remembers: bool = True
    outlier: (
        Callable[[Tree, Met, AxisName, ArrayLike | None], Bool[Array, ""]] | None
    ) = None
    scatter: Callable[..., Met] | None = None
    code: Code | None = None
    bucket_bytes: int = BUCKET_BYTES
    in_buckets: bool = False
    needs: int = 1


def start_outliers(exchange: Exchange) -> Tree:
    """int32[], how often a replica was an outlier; () if the exchange does not ask."""
    return () if exchange.outlier is None else jnp.zeros((), jnp.int32)


def require_dense(tree: Tree, who: str = "this exchange") -> None:
    """Refuse row-sparse leaves; the message says that `who` does not take them."""
    for path, leaf in leaves_with_names(tree):
        if is_slices(leaf):
            raise ValueError(
                f"The gradient at {path} is row-sparse, which {who} does not take. Use "
                "oxs.exchange.all_reduce(), or its to_dense(rows)."
            )


def check_call(exchange: Exchange, grads: Tree, weight: ArrayLike | None) -> None:
    """Refuse gradients and a weight that the exchange does not take."""
    check_weight(exchange, weight)
    if not exchange.exact:
        require_dense(grads)


def check_weight(exchange: Exchange, weight: ArrayLike | None) -> None:
    """Refuse a weight that is more than a flag if the exchange counts all the same."""
    if weight is None:
        return
    flag = as_weight(weight).dtype == jnp.bool_
    if not (flag or exchange.takes_weights):
        raise ValueError(
            "This exchange counts all replicas alike and takes no weight. Pass a bool "
            "to leave a replica out, or clip with oxs.exchange.clipped(...), which "
            "takes weights. One of your own that does declares takes_weights=True."
        )


# Said where an exchange does not say whether it is linear, and that matters.
UNDECLARED = (
    " asks whether an exchange is linear, and this one does not declare it. Write "
    "Exchange(..., linear=True) for a mean, also a coded one, and linear=False for a "
    "median and the like; oxs.testing.check_exchange holds it to that."
)
# Said where gradients are to be measured and the exchange has no exact mean.
INEXACT = (
    "measure=True compares each replica's gradient with the mean of all, and this "
    "exchange gives another one, coded or cut. Measure with oxs.exchange.all_reduce(), "
    "or leave measure out."
)


def check_exchange(exchange: object, default: Exchange | None = None) -> Exchange:
    """`exchange=` of a wrapper, `default` for `None`; a TypeError for anything else.

    The `meet` of the result gives all fields of `Met`.
    """
    if default is not None and (exchange is None or exchange is default):
        return default
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "exchange must be one of oxs.exchange, or an oxs.exchange.Exchange of your "
            f"own; got {brief(exchange)}.{call_it(exchange)} Write for "
            "example exchange=oxs.exchange.all_reduce(jnp.bfloat16)."
        )
    return exchange._replace(meet=_on_shards(exchange, _complete(exchange)))


def summed(also: Tree, axis_name: AxisName) -> Tree:
    """The sums of a tree of scalars that could not travel with the arrays."""
    if also is None:
        return None
    return reduce(localize(also, axis_name), axis_name, reduction="sum")


def _on_shards(exchange: Exchange, meet: Callable[..., Met]) -> Callable[..., Met]:
    """A `meet` of each device's shards, if a worker is known to be sharded.

    What is lost stays inside. A plain mean needs none of this: XLA takes it of shards.
    """
    if exchange.exact:
        return meet

    def inside(axis_name, tree, state, weight, also):
        met = meet(tree, state, axis_name, weight=weight, also=also)
        return met._replace(weight=jnp.asarray(met.weight), lost=None)

    @functools.wraps(meet)
    def of_shards(tree, state, axis_name, *, weight=None, also=None):
        found = shards.shards_of(tree, axis_name)
        if found is None:
            return meet(tree, state, axis_name, weight=weight, also=also)
        specs, memory = found.specs, shards.like(state, tree, found)
        whole: Any = PartitionSpec()
        return shards.in_shards(
            functools.partial(inside, axis_name),
            found,
            (specs, memory, whole, whole),
            Met(specs, whole, None, memory, whole),
        )(tree, state, weight, also)

    return of_shards


def _complete(exchange: Exchange) -> Callable[..., Met]:
    """A `meet` that fills in the fields of `Met` that the one inside leaves out."""
    meet = exchange.meet

    @functools.wraps(meet)
    def complete(tree, state, axis_name, *, weight=None, also=None, **more):
        if also is not None:
            more["also"] = also
        met = meet(tree, state, axis_name, weight=weight, **more)
        if not isinstance(met, Met):
            raise TypeError(
                "The meet of an exchange returns an oxs.exchange.Met; this one "
                f"returned a {type(met).__name__}. Write for example `return "
                "oxs.exchange.Met(mean, lost=lost, state=state)`."
            )
        if not exchange.remembers and jax.tree.leaves(met.state):
            raise ValueError(
                "This exchange declares remembers=False, and its meet returned a "
                "state, which nobody keeps. Leave remembers out."
            )
        if met.weight is None:
            own = own_weight(weight, axis_name)
            total = axis_size(axis_name)
            if own is not None:
                total = reduce(own, axis_name, reduction="sum")
            met = met._replace(weight=total)
        if met.also is None:
            met = met._replace(also=summed(also, axis_name))
        return met

    return complete
