# SPDX-License-Identifier: Apache-2.0
"""Read a state: the center, averages, what became of a gradient, slots."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.rule import CenterState


class CenterMetrics(NamedTuple):
    """What a worker may want to log; one value for each worker, nothing is sent."""

    rounds: jax.Array  # int32[], exchanges so far
    steps_since_round: jax.Array  # int32[]
    dropped: jax.Array  # int32[], rounds that left this worker out
    distance: jax.Array | None  # float32[], |x - c| over all leaves, given `params`


def center_params(state: optax.OptState, params: optax.Params) -> optax.Params:
    """The center that workers share: for evaluation, checkpoints and export.

    Args:
        state: The state of an optimizer that holds a center (`elastic_average`, `agn`,
            `local_sgd`, `diloco`, `center_variable`), alone or anywhere inside of a
            chain, with or without a worker axis.
        params: The parameters, of one worker or of all: they give the structure and
            the dtypes. Leaves that no center holds (`optax.masked`) are returned as
            they are.

    Returns:
        A copy of the center, so that the state can be donated, in the structure and
        dtypes of `params` and in its own shape, without a worker axis.

    Raises:
        ValueError: There is no center in the state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = optax.chain(optax.clip(1.0), oxs.local_sgd(optax.sgd(0.1), "workers"))
        >>> params = jnp.arange(3.0)
        >>> oxs.center_params(oxs.stack(tx.init(params), 4), oxs.stack(params, 4))
        Array([0., 1., 2.], dtype=float32)
    """
    for found in _require(state, CenterState, "center"):
        center = found.center
        if jnp.ndim(found.local_step) == 1:  # All workers hold the same center.
            center = jax.tree.map(lambda c: c[0], center)
        params = jax.tree.map(
            lambda c, p: p if _is_masked(c) else jnp.array(c, p.dtype, copy=True),
            center,
            params,
            is_leaf=_is_masked,
        )
    return params


def swap_center(train_state: Any) -> Any:
    """A Flax `TrainState` whose parameters are the center, for evaluation.

    Args:
        train_state: Anything with `params`, `opt_state` and `replace`.

    Returns:
        A copy with the center for parameters; go on training with the original.

    Raises:
        ValueError: There is no center in the optimizer's state.
    """
    center = center_params(train_state.opt_state, train_state.params)
    return train_state.replace(params=center)


def metrics(state: optax.OptState, params: optax.Params | None = None) -> Any:
    """What became of a worker's last steps; no collective, values are per worker.

    Args:
        state: The state of an optimizer of this package, alone or inside of a chain;
            the first one that is found (of several in `optax.multi_transform`, say).
        params: This worker's parameters, or stacked ones with a stacked state: adds
            the distance from the center.

    Returns:
        `CenterMetrics` for an optimizer with a center.

    Raises:
        ValueError: There is no state in it that has metrics.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(0.1), "workers")
        >>> state = tx.init(jnp.zeros(4))
        >>> oxs.metrics(state, jnp.ones(4)).distance
        Array(2., dtype=float32)
    """
    found, *_ = _require(state, CenterState, "center")
    distance = None
    if params is not None:
        stacked = jnp.ndim(found.dropped)  # 1 with a worker axis in front, else 0
        center = found.center
        if jnp.ndim(found.local_step) < stacked:
            center = jax.tree.map(lambda c: c[None], center)
        squares = jax.tree.map(
            lambda c, p: (
                0.0 if _is_masked(c) else _square_sum(p.astype(c.dtype) - c, stacked)
            ),
            center,
            params,
            is_leaf=_is_masked,
        )
        distance = jnp.sqrt(sum(jax.tree.leaves(squares)))
    return CenterMetrics(
        found.global_step, found.steps_since_round, found.dropped, distance
    )


def _square_sum(x, skip):
    squares = jnp.square(jnp.abs(x.astype(jnp.float32)))
    return jnp.sum(squares, axis=tuple(range(skip, x.ndim)))


def _require(state, kind, what):
    def is_kind(x):
        return isinstance(x, kind)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(x)]
    if not found:
        raise ValueError(
            f"There is no {what} in this state: {jax.tree.structure(state)}. Pass the "
            "state of an optimizer such as oxs.local_sgd(...)."
        )
    return found


def _is_masked(x) -> bool:
    return isinstance(x, optax.MaskedNode)
