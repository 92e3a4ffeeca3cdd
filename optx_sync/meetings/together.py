# SPDX-License-Identifier: Apache-2.0
"""Contributions that come to a meeting together: what the center makes of them."""

import jax

from optx_sync.center.contract import CenterRule
from optx_sync.core.trees import Tree, row_of, times
from optx_sync.exchange.contract import Exchange

# The axis of the contributions to one meeting.
AXIS = "contributions"


def merged(
    merge: Exchange, rule: CenterRule, brought: Tree, weights: jax.Array
) -> Tree:
    """What the rule asks for of stacked contributions: their mean or their sum.

    A row of weight 0 counts for nothing, whatever it holds.
    """

    def of_one(tree: Tree, weight: jax.Array) -> Tree:
        met = merge.meet(tree, merge.init(tree), AXIS, weight=weight)
        if rule.mean_over is None:  # `weigh` is a factor, as of one that is alone
            return jax.tree.map(lambda x: times(met.weight, x), met.mean)
        return met.mean

    return row_of(jax.vmap(of_one, axis_name=AXIS)(brought, weights), 0)
