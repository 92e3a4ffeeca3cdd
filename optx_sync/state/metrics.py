# SPDX-License-Identifier: Apache-2.0
"""Read metrics, center and slots from a state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import optax

from optx_sync.core.trees import Tree, is_nothing, pure
from optx_sync.state import fields


@fields.declare(
    dropped=fields.OWN_COUNT,
    outliers=fields.OWN_COUNT,
    outcome=fields.ANEW.not_a_slot._replace(begins=-1),
    outcome_counts=fields.OWN_COUNT,
    distance=fields.OWN_COUNT,
    gathered=fields.ANEW.not_a_slot,
    measured=fields.LIKE_PARAMS.not_a_slot,
)
class Info(NamedTuple):
    """Fields of a state that only inform, and no step needs; `()` for what it lacks.

    A state may continue with another's, or with a new one: `docs/checkpoints.md`.
    """

    dropped: Tree = ()  # int32[], rounds that left this worker out
    outliers: Tree = ()  # int32[], meetings in which it was an outlier
    outcome: Tree = ()  # int32[], what became of the last gradient, -1 before the first
    outcome_counts: Tree = ()  # int32[] each, how often each outcome so far
    distance: Tree = ()  # float32[], |x - c| just before the last round; 0 before it
    gathered: Tree = ()  # what is measured of its own gradients since the last update
    measured: Tree = ()  # `Measured`, of the last meeting


@fields.declare(measured=fields.SHARED.not_a_slot)
class SharedInfo(Info):
    """The `Info` of workers that measure what they share: a center."""

    __slots__ = ()


def or_none(x: Tree) -> Tree:
    """The value of a field of an `Info`, `None` for `()`."""
    return None if is_nothing(x) else x


def center_params(state: optax.OptState, params: optax.Params) -> Tree:
    """The center that workers share: for evaluation, checkpoints and export.

    Args:
        state: The state of an optimizer that holds a center (`elastic_average`,
            `agn`, `local_sgd`, `diloco`, `center_variable`), alone or anywhere
            inside a chain, with or without a worker axis.
        params: The parameters, of one worker or of all: they give the structure and
            the dtypes. Leaves that no center holds (`optax.masked`) are returned as
            they are.

    Returns:
        A copy of the center, so that the state can be donated, in the structure and
        dtypes of `params` and in its own shape, without a worker axis.

    Raises:
        ValueError: There is no center in the state, or it is of other parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = optax.chain(optax.clip(1.0), oxs.local_sgd(optax.sgd(0.1), "workers"))
        >>> params = jnp.arange(3.0)
        >>> state = oxs.by_hand.replicate(tx.init(params), 4)
        >>> oxs.center_params(state, oxs.by_hand.replicate(params, 4))
        Array([0., 1., 2.], dtype=float32)
    """
    form, params = jax.tree.structure(params), pure(params)
    such_as = "oxs.local_sgd(...)"
    for found in _require(state, fields.WithCenter, "is no center", such_as):
        params = _of_params(found.center_params, params)
    return form.unflatten(jax.tree.leaves(params))


def averaged_params(state: optax.OptState, params: optax.Params) -> Tree:
    """The moving average of the parameters, in their structure and dtypes.

    Args:
        state: The state of `sync_replicas(..., variable_averages=...)`, alone or inside
            of a chain, of one replica or of all with a worker axis in front.
        params: The parameters; those that are not averaged are returned as they are.

    Returns:
        A copy of the averages, so that the state can be donated, in its own shape.

    Raises:
        ValueError: There are no averages in the state, or of other parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.sync_replicas(optax.sgd(0.1), "data", 2, variable_averages=0.99)
        >>> params = {"w": jnp.ones(2)}
        >>> oxs.averaged_params(tx.init(params), params)
        {'w': Array([1., 1.], dtype=float32)}
    """
    such_as = "oxs.sync_replicas(..., variable_averages=0.999)"
    form = jax.tree.structure(params)
    found, *_ = _require(state, fields.WithAverages, "is no moving average", such_as)
    averages = _of_params(found.averaged_params, pure(params))
    return form.unflatten(jax.tree.leaves(averages))


def metrics(state: optax.OptState, params: optax.Params | None = None) -> Any:
    """Metrics to log, read from a state; no collective, values are per worker.

    Args:
        state: The state of an optimizer of this package, alone or inside a chain,
            of one worker or of all. Of several such states (in
            `optax.multi_transform`, say) the first one counts.
        params: For an optimizer with a center: this worker's parameters, or stacked
            ones with a stacked state; adds the distance from the center.

    Returns:
        `CenterMetrics` for an optimizer with a center, `SyncReplicasMetrics` for
        `sync_replicas`, `GossipMetrics` for `gossip` and `noloco`, `CrossShardMetrics`
        for `cross_shard` with `measure=True` or an exchange that counts outliers.

    Raises:
        ValueError: No state in it has metrics, or it is of other parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(0.1), "workers")
        >>> state = tx.init(jnp.zeros(4))
        >>> oxs.metrics(state, jnp.ones(4)).distance
        Array(2., dtype=float32)
    """
    such_as = (
        "oxs.local_sgd(...), oxs.sync_replicas(...) or oxs.cross_shard(..., "
        "measure=True)"
    )
    found, *_ = _require(state, fields.WithMetrics, "are no metrics", such_as)
    return _of_params(functools.partial(_metrics, found), pure(params))


@jax.jit  # One program: leaf by leaf, all differences from the center would be held.
def _metrics(state: Tree, params: Tree | None) -> Any:
    return state.metrics(params)


def _of_params(read: Callable[[Tree], Any], params: Tree) -> Any:
    """What a state says of the parameters that it was made for, and of no others."""
    try:
        return read(params)
    except ValueError as error:
        if "structure" not in str(error):
            raise
        raise ValueError(
            "These are not the parameters of this state: "
            f"{str(error).splitlines()[0].rstrip('.')}. Pass those that the optimizer "
            "trains, behind the state."
        ) from None


def _require(state: Tree, kind: type, lacks: str, such_as: str) -> list[Tree]:
    """The states of a kind, wherever they stand; else a ValueError."""
    found = fields.nodes_of(pure(state), lambda x: isinstance(x, kind))
    if not found:
        raise ValueError(
            f"There {lacks} in this state, of type {type(state).__name__}. Pass the "
            f"state of an optimizer that has such, for example {such_as}."
        )
    return found
