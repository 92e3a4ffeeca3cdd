# SPDX-License-Identifier: Apache-2.0
"""GASLoC: an outer step and momentum for workers that average with partners."""

from typing import NamedTuple

import jax

from optx_sync.checks import interval
from optx_sync.trees import Tree, times


class Gasloc(NamedTuple):
    """An outer step and momentum of `gossip`, made by `oxs.outer.gasloc`.

    Attributes:
        learning_rate: How far a worker goes from its center before it averages.
        momentum: How much of the way from proposal to proposal it goes on.
    """

    learning_rate: float | jax.Array
    momentum: float | jax.Array

    def proposal(self, x: Tree, center: Tree) -> Tree:
        """What a worker averages: u, from its parameters and its center."""
        rate = self.learning_rate
        # With a rate of 1 it is x to the bit.
        return jax.tree.map(lambda x, s: times(rate, x) + times(1 - rate, s), x, center)

    def ahead(self, moved: Tree, proposal: Tree, last: Tree) -> Tree:
        """How far averaging has moved the center, and the momentum on top of it."""
        return jax.tree.map(
            lambda m, u, v: m + times(self.momentum, u - v), moved, proposal, last
        )


def gasloc(
    learning_rate: float | jax.Array = 1.0, momentum: float | jax.Array = 0.0
) -> Gasloc:
    r"""GASLoC, an outer step with momentum for gossip: DiLoCo without an all-reduce.

    With x_i the parameters of worker i in a round, s_i those after its last round, W
    the graph's matrix of this round, :math:`\eta` the learning rate and :math:`\gamma`
    the momentum:

    .. math::

        u_i &= s_i + \eta (x_i - s_i) \\
        x_i, s_i &\leftarrow \sum_j W_{ij} u_j + \gamma (u_i - u_i')

    where u_i' is u_i of the round before, and in the first round the initial
    parameters. Pass it as `outer=` of `oxs.gossip`: then the mean of all workers makes
    the steps of DiLoCo with `optax.sgd(eta, gamma, nesterov=True)`, whatever the graph,
    and one worker alone does. An Optax optimizer as `outer=` gets the distance to the
    mean of the partners instead, so that its momentum holds what they disagree about,
    too. With the defaults it is plain averaging.

    A worker of weight 0, or that `drop_nonfinite=True` leaves out, proposes its center.
    One more array like the parameters is kept, and none is sent.

    Args:
        learning_rate: eta, 0 or more.
        momentum: gamma, in [0, 1). One under which workers would drift apart in the
            graph is refused by `gossip`.

    Returns:
        A value for `outer=` of `oxs.gossip`. It is no Optax transformation, since it
        also says what workers send.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument out of range.

    Example:
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.gossip(
        ...     optax.adamw(1e-3),
        ...     "workers",
        ...     graph=oxs.graphs.exponential(),
        ...     communication_period=50,
        ...     outer=oxs.outer.gasloc(0.7, 0.5),
        ... )

    References:
        Cagnasso, Belilovsky, Oyallon, "Unifying Local Communications and Local Updates
        for LLM Pretraining", 2026, arXiv 2606.11081.
    """
    interval("[0, inf)", learning_rate=learning_rate)
    interval("[0, 1)", "Pass for example 0.5.", momentum=momentum)
    return Gasloc(learning_rate, momentum)
