# SPDX-License-Identifier: Apache-2.0
"""Slots: the arrays that an optimizer keeps for each parameter, by their names."""

import jax
import jax.numpy as jnp
import optax

from optx_sync.core.trees import Tree, is_masked
from optx_sync.optimizers.rule import RuleState
from optx_sync.state import fields


def slot_names(state: optax.OptState) -> tuple[str, ...]:
    """Names of the arrays that an optimizer keeps for each parameter.

    A slot is an array under TensorFlow's name, `accum` of FTRL or `m` of Adam, or under
    Optax's, `mu` or `trace`. A name that occurs twice in a state, for example in the
    inner and the outer optimizer of a center, is qualified: `inner.trace`,
    `outer.trace`. Counters, hyper-parameters and running powers are not slots.

    Args:
        state: The state of any optimizer.

    Returns:
        The names that `slot` takes, in the order in which they stand in the state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(optax.sgd(0.1, momentum=0.9), "workers")
        >>> oxs.optimizers.slot_names(tx.init(jnp.zeros(2)))
        ('center', 'outer.trace', 'inner.trace')
    """
    paths = [path for path, _ in _slots(state)]
    return tuple(_shortest(path, paths) for path in paths)


def slot(state: optax.OptState, name: str) -> Tree:
    """A slot of an optimizer by its name: a tree like the parameters.

    Args:
        state: The state of any optimizer, as `opt_state` of a Flax NNX optimizer or of
            a TrainState.
        name: One of `slot_names(state)`, or a longer form of it.

    Returns:
        The slot's tree, as it stands in the state.

    Raises:
        ValueError: No slot, or more than one, has this name.
        TypeError: The state is not that of an optimizer.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> state = oxs.optimizers.adagrad(0.1).init({"w": jnp.zeros(2)})
        >>> oxs.optimizers.slot(state, "accumulator")
        {'w': Array([0.1, 0.1], dtype=float32)}
    """
    wanted = name.split(".")
    found = [tree for path, tree in _slots(state) if _ends(path, wanted)]
    if len(found) != 1:
        names = slot_names(state)
        if not all(names):  # a tree of arrays alone has a path of no names
            raise TypeError(
                f"state must be that of an optimizer; got {type(state).__name__}. Pass "
                "opt_state of a Flax NNX optimizer, or of a TrainState."
            )
        what = "No slot" if not found else "More than one slot"
        raise ValueError(
            f"{what} of this state has the name {name!r}. Pass one of {names}."
        )
    return found[0]


def _slots(node, path=()):
    """The path and tree of every slot: the last fields of nested NamedTuples."""
    if fields.is_in_pieces(node):
        yield from _slots(node.tree, path)
    elif fields.declares(node):
        for name, kind, value in fields.fields_of(node):
            if kind.slots:
                yield from _slots(value, (*path, name))
    elif isinstance(node, RuleState):
        for name, tree in node.slots._asdict().items():
            yield [*path, name], tree
    elif hasattr(node, "_fields") or _holds_states(node):
        named = node._asdict() if hasattr(node, "_fields") else node
        named = named if isinstance(named, dict) else dict(enumerate(named))
        for name, child in named.items():
            # `optax.inject_hyperparams` keeps numbers of its own beside the state.
            if not str(name).startswith("hyperparams"):
                yield from _slots(child, (*path, str(name)))
    elif any(
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        for x in jax.tree.leaves(node)
    ):
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
    """The path without the positions in chains."""
    return [part for part in path if not part.isdigit()]
