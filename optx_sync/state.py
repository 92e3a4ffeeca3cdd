# SPDX-License-Identifier: Apache-2.0
"""Read a state: the center, moving averages, metrics, slots."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optx_sync.placement import fields
from optx_sync.trees import is_masked, pure


def center_params(state: optax.OptState, params: optax.Params) -> Any:
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
    form, params = jax.tree.structure(params), pure(params)
    for found in _require(state, "center_params", "oxs.local_sgd(...)"):
        params = found.center_params(params)
    return form.unflatten(jax.tree.leaves(params))


def averaged_params(state: optax.OptState, params: optax.Params) -> Any:
    """The moving average of the parameters, in their structure and dtypes.

    Args:
        state: The state of `sync_replicas(..., variable_averages=...)`, alone or inside
            of a chain, of one replica or of all with a worker axis in front.
        params: The parameters; those that are not averaged are returned as they are.

    Returns:
        The averages, in the state's own shape.

    Raises:
        ValueError: There are no averages in the state.

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
    found, *_ = _require(state, "averaged_params", such_as)
    return form.unflatten(jax.tree.leaves(found.averaged_params(pure(params))))


def metrics(state: optax.OptState, params: optax.Params | None = None) -> Any:
    """Numbers to log from a state; no collective, values are per worker.

    Args:
        state: The state of an optimizer of this package, alone or inside of a chain, of
            one worker or of all; the first one that is found (of several in
            `optax.multi_transform`, say).
        params: For an optimizer with a center: this worker's parameters, or stacked
            ones with a stacked state; adds the distance from the center.

    Returns:
        `CenterMetrics` for an optimizer with a center, `SyncReplicasMetrics` for
        `sync_replicas`, `GossipMetrics` for `gossip` and `noloco`, `CrossShardMetrics`
        for `cross_shard` with `measure=True` or an exchange that counts outliers.

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
    such_as = (
        "oxs.local_sgd(...), oxs.sync_replicas(...) or oxs.cross_shard(..., "
        "measure=True)"
    )
    found, *_ = _require(state, "metrics", such_as)
    return found.metrics(pure(params))


def slot_names(state: optax.OptState) -> tuple[str, ...]:
    """Names of the arrays that an optimizer keeps for each parameter.

    A slot is what TensorFlow calls one: `accum` of FTRL, `m` of Adam; and Optax's own,
    `mu` or `trace`. Where a name occurs twice in a state, for example in the inner and
    the outer optimizer of a center, it is qualified: `inner.trace`, `outer.trace`.
    Counters, hyper-parameters and running powers are no slots.

    Args:
        state: The state of any optimizer.

    Returns:
        The names that `slot` takes, in the order in which they stand in the state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(optax.sgd(0.1, momentum=0.9), "workers")
        >>> oxs.slot_names(tx.init(jnp.zeros(2)))
        ('center', 'outer.trace', 'inner.trace')
    """
    paths = [path for path, _ in _slots(state)]
    return tuple(_shortest(path, paths) for path in paths)


def slot(state: optax.OptState, name: str) -> Any:
    """A slot of an optimizer, by its name: a tree like the parameters.

    Args:
        state: The state of any optimizer.
        name: One of `slot_names(state)`, or a longer form of it.

    Returns:
        The slot's tree, as it stands in the state.

    Raises:
        ValueError: No slot, or more than one, has this name.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> state = oxs.optimizers.adagrad(0.1).init({"w": jnp.zeros(2)})
        >>> oxs.slot(state, "accumulator")
        {'w': Array([0.1, 0.1], dtype=float32)}
    """
    wanted = name.split(".")
    found = [tree for path, tree in _slots(state) if _ends(path, wanted)]
    if len(found) != 1:
        what = "No slot" if not found else "More than one slot"
        raise ValueError(
            f"{what} of this state has the name {name!r}. Pass one of "
            f"{slot_names(state)}."
        )
    return found[0]


def _slots(node, path=()):
    """Path and tree of every slot: the last fields of nested NamedTuples."""
    if fields.is_in_pieces(node):
        yield from _slots(node.tree, path)
    elif fields.declares(node):
        for name, kind, value in fields.fields_of(node):
            if kind.slots:
                yield from _slots(value, (*path, name))
    elif hasattr(type(node), "named_slots"):
        for name, tree in node.named_slots().items():
            yield [*path, name], tree
    elif hasattr(node, "_fields") or _holds_states(node):
        if hasattr(node, "_fields"):
            children = node._asdict()
        else:
            children = node if isinstance(node, dict) else dict(enumerate(node))
        for name, child in children.items():
            # `optax.inject_hyperparams` keeps its own numbers beside the state.
            if not str(name).startswith("hyperparams"):
                yield from _slots(child, (*path, str(name)))
    elif any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(node)):
        yield list(path), node


def _holds_states(node) -> bool:
    """Whether this is a container of states, such as the state of a chain."""

    def is_state(x):
        return hasattr(x, "_fields") and not is_masked(x)

    leaves = jax.tree.leaves(node, is_leaf=is_state)
    return isinstance(node, tuple | list | dict) and any(map(is_state, leaves))


def _shortest(path, paths):
    """The shortest end of a path that no other path has."""
    for candidate in (_words(path), path):
        for length in range(1, len(candidate) + 1):
            end = candidate[-length:]
            if sum(_ends(other, end) for other in paths) == 1:
                return ".".join(end)
    return ".".join(path)


def _ends(path, end) -> bool:
    return end in (path[-len(end) :], _words(path)[-len(end) :])


def _words(path):
    """The path without the places in chains."""
    return [part for part in path if not part.isdigit()]


def _require(state: Any, answer: str, such_as: str) -> list[Any]:
    """The states that have such an answer, wherever they stand; else a ValueError."""

    def answers(x):
        return hasattr(type(x), answer)

    found = fields.nodes_of(pure(state), answers)
    if not found:
        what = {
            "center_params": "is no center",
            "averaged_params": "is no moving average",
            "metrics": "are no metrics",
        }
        raise ValueError(
            f"There {what[answer]} in this state, of type {type(state).__name__}. Pass "
            f"the state of an optimizer that has such, for example {such_as}."
        )
    return found
