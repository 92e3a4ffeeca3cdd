# SPDX-License-Identifier: Apache-2.0
"""`Meeting`: all replicas give a tree, and the mean becomes an update.

What `cross_shard` does with gradients in every step, center rules do with contributions
in every round: the exchange makes one tree of all, and an optimizer steps on it where
it lands, whole on each replica or in pieces.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from optx_sync.comm.varying import vary_like
from optx_sync.core.checks import explains_inner
from optx_sync.core.trees import Tree
from optx_sync.exchange.agree import SCOPE, agree, with_update
from optx_sync.exchange.contract import Exchange
from optx_sync.exchange.landing import Landing


class MeetingState(NamedTuple):
    """What a replica keeps from one meeting to the next.

    Attributes:
        exchange: What the exchange remembers, this replica's own.
        info: An `Info`, of what is measured and counted.
        inner: The state of the optimizer, for this replica's share.
    """

    exchange: Tree
    info: Any
    inner: Tree


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An Optax transformation of all replicas' trees, which also says what was pushed.

    Attributes:
        exchange: How all trees become their mean.
        landing: Where the mean lands, and the optimizer that steps on it there.
        summed: Whether the optimizer gets the sum in place of the mean.
    """

    exchange: Exchange
    landing: Landing
    summed: bool = False

    def init(self, params: Tree) -> Tree:
        """The state of the optimizer, for this replica's share of the parameters."""
        return self.landing.init(params)

    def fit(self, tree: Tree, params: Tree | None, state: Any) -> Landing:
        """The landing for trees like this one; refuses a state that does not fit."""
        return self.landing.fit(tree, tree if params is None else params, state.inner)

    def agree(
        self, landing: Landing, tree: Tree, state: Any, **own: Any
    ) -> tuple[Tree, Any, Any]:
        """(this replica's share of the mean or sum, the state, the sum of weights).

        `own` are the keywords of `exchange.agree.agree` that say how this replica's
        tree counts.
        """
        agreed = agree(
            self.exchange,
            landing,
            tree,
            state.exchange,
            state.info,
            summed=self.summed,
            **own,
        )
        state = state._replace(exchange=agreed.memory, info=agreed.info)
        return agreed.mean, state, agreed.weight

    def step(
        self,
        landing: Landing,
        mean: Tree,
        state: Any,
        params: Tree | None,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Any]:
        """(the updates of the whole parameters, the state): the optimizer's step."""
        own = None if params is None else landing.share(params)
        with explains_inner(mean):
            updates, inner = landing.step(mean, state.inner, own, extra_args)
        with jax.named_scope(SCOPE):
            updates = landing.whole(updates)
        info = with_update(state.info, updates, landing.axis_name)
        return updates, state._replace(
            info=vary_like(info, state.info), inner=vary_like(inner, state.inner)
        )

    def update(
        self,
        tree: Tree,
        state: Any,
        params: Tree,
        *,
        weight: ArrayLike | None = None,
        alike: bool = False,
        extra_args: dict[str, Any],
    ) -> tuple[Tree, Any, jax.Array | int]:
        """(the updates, the state, the sum of the weights or the number of replicas).

        Args:
            tree: What this replica gives, in the structure of the parameters.
            state: A `MeetingState`, or another with its fields.
            params: The parameters, equal on all replicas.
            weight: This replica's; `None`: all count the same.
            alike: Whether all weights are known to be 0 or 1.
            extra_args: For the optimizer.
        """
        landing = self.fit(tree, params, state)
        mean, now, pushed = self.agree(landing, tree, state, weight=weight, alike=alike)
        # What `init` was given may vary where a mean does not.
        mean = vary_like(mean, landing.share(params))
        now = now._replace(info=vary_like(now.info, state.info))
        return *self.step(landing, mean, now, params, extra_args), pushed
