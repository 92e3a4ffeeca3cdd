# SPDX-License-Identifier: Apache-2.0
"""An agreement: what replicas make of their trees in one meeting of an exchange."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optx_sync.comm.collectives import AxisName
from optx_sync.comm.varying import localize, vary_like
from optx_sync.core.trees import Tree, is_slices
from optx_sync.exchange.contract import Exchange, Scalars
from optx_sync.exchange.landing import Contribution, Lands
from optx_sync.exchange.measures import Measured, measure_of, square_sum, to_sum

# What a profile shows of all that is sent for a meeting, and computed to send it.
SCOPE = "oxs.meet"


class Agreed(NamedTuple):
    """The result of an agreement for one replica."""

    mean: Tree  # this replica's share of the mean, or of the sum that was asked for
    weight: Any  # the sum of the weights, or the number of replicas
    sums: Tree  # of the scalars that travelled along, by their names, or None
    memory: Tree  # what the exchange remembers now
    info: Any  # what was measured, and how often this replica was an outlier


def agree(
    exchange: Exchange,
    landing: Lands,
    tree: Tree,
    memory: Tree,
    info: Any,
    *,
    weight: ArrayLike | None = None,
    alike: bool = False,
    batch_size: float | jax.Array = 1,
    own: Scalars | None = None,
    summed: bool = False,
) -> Agreed:
    """Measure this replica, meet, measure the mean, and count an outlier.

    Args:
        exchange: How all trees become one.
        landing: Where that one lands.
        tree: This replica's.
        memory: What the exchange remembers.
        info: An `Info`. The agreement is measured if it holds a `Measured`.
        weight: This replica's; `None`: all count the same.
        alike: Whether all weights are known to be 0 or 1; those that are bools are.
        batch_size: The examples behind the tree, for the measures.
        own: Scalars of this replica that travel along, in place of those of the tree:
            for a caller who has measured what the tree is made of.
        summed: Whether to return the sum: the mean times the number of replicas with a
            weight above 0.
    """
    axis_name, measured = landing.axis_name, info.measured
    alike = alike or weight is None or jnp.result_type(weight) == jnp.bool_
    square = None
    if own is None and isinstance(measured, Measured):
        square = functools.partial(square_within, measured, axis_name)
        own = to_sum(
            square(tree), axis_name, weight=weight, alike=alike, batch_size=batch_size
        )
    elif summed and not alike:
        own = {"contributors": (jnp.asarray(weight) > 0).astype(jnp.float32)}
    with jax.named_scope(SCOPE):
        met = landing.meet(exchange, Contribution(tree, memory, weight, own, square))
    if square is not None:
        measured = measure_of(measured, met.also, met.weight, batch_size)
    info = info._replace(measured=measured)
    if exchange.outlier is not None:
        is_one = exchange.outlier(tree, met, axis_name, weight)
        counted = info.outliers + localize(is_one.astype(jnp.int32), axis_name)
        info = info._replace(outliers=vary_like(counted, info.outliers))
    contributors = (met.also or {}).get("contributors", met.weight)
    mean = times(met.mean, contributors) if summed else met.mean
    return Agreed(mean, met.weight, met.also, met.state, info)


def with_update(info: Any, updates: Tree, axis_name: AxisName) -> Any:
    """The info with the norm of what was made of the mean, if it is measured."""
    measured = info.measured
    if not isinstance(measured, Measured):
        return info
    norm = jnp.sqrt(square_within(measured, axis_name, updates))
    return info._replace(measured=measured._replace(update_norm=norm))


def square_within(measured: Measured, axis_name: AxisName, tree: Tree) -> jax.Array:
    """The squared norm, summed over the shards on other axes than the replicas'."""
    return square_sum(tree, localize(measured.update_norm, axis_name))


def times(tree: Tree, number: ArrayLike, divided: bool = False) -> Tree:
    """All arrays, and values of rows, times a number, or divided by it."""

    def turned(leaf):
        same = jnp.asarray(number, jnp.result_type(leaf))
        return leaf / same if divided else leaf * same

    def turn(leaf):
        return leaf.map_values(turned) if is_slices(leaf) else turned(leaf)

    return jax.tree.map(turn, tree, is_leaf=is_slices)
