# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what an exchange loses is kept, and sent with the next one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optx_sync.comm.buffers import in_groups
from optx_sync.comm.reduce import own_weight, weigh
from optx_sync.comm.varying import in_turn, localize, vary_like
from optx_sync.core.checks import Refused, interval, refuse
from optx_sync.core.trees import Tree, at_least_float32, round_to
from optx_sync.exchange import contract
from optx_sync.exchange.contract import Code, Exchange, Met
from optx_sync.exchange.pieces import require_meetable
from optx_sync.state.fields import OWED, OWN, declare

# Groups of a large tree under way at a time: one is coded while another one travels.
_UNDER_WAY = 2


@declare(error=OWED, exchange=OWN)
class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`, each replica's own."""

    error: Tree  # what it owes, in units of weight times value; at least float32
    exchange: Tree  # the state of the exchange inside


def error_feedback(exchange: Exchange, decay: float | jax.Array = 1.0) -> Exchange:
    r"""Error feedback: send what an exchange lost with the next one.

    With x_i the tree of replica i, w_i its weight (1 if none is given) and e_i what it
    owes, zero at first:

    .. math::

        \text{mean}, \text{lost}_i = \text{exchange}\Big(x_i
        + \text{decay}\, \frac{e_i}{w_i}\Big), \qquad e_i \leftarrow \text{lost}_i

    With decay 1, at any time, all that was received (the sum of mean times sum of
    weights) plus all e_i equals all that was sent in. SGD through a compressing
    exchange then converges, after a time, as through the exact one.

    A replica of weight 0 sends nothing and keeps its e. Where the mean is not finite,
    nothing is known to have arrived, and e stays as it was; so a step that is skipped
    for a NaN (`optax.apply_if_finite` inside) does no lasting harm.

    The state is one float32 for each number and belongs in checkpoints;
    `oxs.by_hand.resize` shares out what leaving replicas owe. Adam and others that
    divide by second moments of the gradient see spikes when e is paid back: feedback is
    proven for SGD, and fits the contributions of `diloco` and `local_sgd` better than
    gradients of Adam.

    Args:
        exchange: A linear exchange: `quantized`, `top_k`, `power_sgd`, or your own. Its
            code C must be a contraction, :math:`|x - C(x)| < |x|`: else e grows without
            bound, as with unbiased codes that are not (a stochastic sign, random
            entries scaled up). `oxs.testing.check_exchange` warns of them.
        decay: The share of e that is sent, 0 to 1. Below 1 (SparseLoCo: 0.95) the
            rest is forgotten.

    Returns:
        A linear exchange of dense real floating leaves that remembers e. Its `lost` is
            by how much e grew in this call.

    Raises:
        TypeError: `exchange` is no `Exchange`; at the call, a leaf that is not
            floating.
        ValueError: An exchange that is not linear, a decay outside of [0, 1]; at the
            call, a leaf that is row-sparse or does not vary over the axis.

    Example:
        4 bits code 7 steps on each side of 0. With a largest value of 7, 0.3 rounds
        to 0, until what is owed adds up.

        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> exchange = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))
        >>> x = jnp.tile(jnp.array([7.0, 0.3]), (2, 2))  # two pieces, one block each
        >>> state = jax.vmap(exchange.init)(x)
        >>> def meet(x, state):
        ...     met = exchange.meet(x, state, "pods")
        ...     return met.mean, met.state
        >>> meet = jax.jit(jax.vmap(meet, axis_name="pods"))
        >>> for _ in range(3):
        ...     mean, state = meet(x, state)
        ...     print(mean[0, :2])
        [7. 0.]
        [7. 1.]
        [7. 0.]

    References:
        Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other
        Gradient Compression Schemes", 2019, arXiv 1901.09847. Sarfi et al.,
        "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv
        2508.15706 (decay).
    """
    exchange = contract.check_exchange(exchange)
    refuse(exchange, _REFUSED)
    interval("[0, 1]", "Pass for example 1.0.", decay=decay)

    def init(tree):
        zeros = jax.tree.map(
            lambda x: vary_like(jnp.zeros(x.shape, at_least_float32(x.dtype)), x), tree
        )
        return ErrorFeedbackState(zeros, exchange.init(tree))

    meet = _fed_back(exchange, exchange.meet, decay)
    scatter = exchange.scatter
    if scatter is not None:
        scatter = _fed_back(exchange, scatter, decay, whole=False)
    return Exchange(
        init,
        meet,
        linear=True,
        takes_weights=exchange.takes_weights,
        code=None if exchange.code is None else _fed_back_code(exchange.code, decay),
        scatter=scatter,
    )


_REFUSED: Refused[Exchange] = (
    (lambda x: x.linear is None, "error_feedback" + contract.UNDECLARED),
    (
        lambda x: not x.linear,
        "error_feedback needs a linear exchange, of which somebody knows what it loses:"
        " what a median leaves out is left out on purpose, and must not come back. Use "
        "the robust exchange alone.",
    ),
)


class _Account(NamedTuple):
    """What a replica owes, before a meeting and after it."""

    decay: float | jax.Array
    weight: jax.Array | None  # this replica's

    @property
    def takes_part(self) -> jax.Array | bool:
        """Whether this replica sends anything."""
        return True if self.weight is None else self.weight > 0

    def wish(self, x: jax.Array, error: jax.Array) -> jax.Array:
        """What is to be sent: x, and a share of what is owed."""
        weight = 1.0
        if self.weight is not None:
            weight = jnp.where(self.takes_part, self.weight, 1.0)
        owed = error * jnp.asarray(self.decay, error.dtype)
        owed = owed / jnp.asarray(weight, error.dtype)
        return x.astype(error.dtype) + jnp.where(self.takes_part, owed, 0.0)

    def after(
        self,
        error: jax.Array,
        wish: jax.Array,
        sent: jax.Array,
        lost: jax.Array | None,
        mean: jax.Array | None,
    ) -> jax.Array:
        """What is owed then; as before where that or a given mean is not finite."""
        new = weigh(wish - sent.astype(wish.dtype), self.weight)
        if lost is not None:
            new = new + lost
        new = jnp.where(self.takes_part, new, new + error)
        arrived = jnp.isfinite(new)
        if mean is not None:
            arrived = arrived & jnp.isfinite(mean)
        return jnp.where(arrived, new, error)

    def grown(self, after: jax.Array, before: jax.Array) -> jax.Array:
        """By how much that is more than what was kept."""
        decay = jnp.asarray(self.decay, before.dtype)
        return after - jnp.where(self.takes_part, decay, 1.0) * before


def _fed_back(
    exchange: Exchange,
    inside: Callable[..., Met],
    decay: float | jax.Array,
    whole: bool = True,
) -> Callable[..., Met]:
    """A `meet` that adds what is owed to what `inside` sends, a half of the exchange's.

    `whole` says whether its mean is of whole arrays, or of a piece of each.
    """

    def meet(tree, state, axis_name, *, weight=None, **more):
        require_meetable(tree, axis_name, "error_feedback")
        account = _Account(decay, own_weight(weight, axis_name))
        before, treedef = jax.tree.flatten(state.error)
        leaves = treedef.flatten_up_to(tree)
        # The error of leaves without a gradient (`None`) stays as it is.
        given = [place for place, x in enumerate(leaves) if x is not None]
        groups, mets = [given], []
        if exchange.in_buckets:
            found = in_groups([leaves[i] for i in given], exchange.bucket_bytes)
            groups = [[given[i] for i in group] for group in found]
        errors, means, grown = list(before), list(leaves), list(leaves)
        for number, group in enumerate(groups):
            wishes = [account.wish(leaves[i], before[i]) for i in group]
            if number >= _UNDER_WAY:
                sooner = groups[number - _UNDER_WAY]
                held, wishes = in_turn([errors[i] for i in sooner], wishes)
                for i, error in zip(sooner, held, strict=True):
                    errors[i] = error
            sent: list[Any] = [None] * len(leaves)
            for i, wish in zip(group, wishes, strict=True):
                sent[i] = round_to(wish, leaves[i].dtype).astype(leaves[i].dtype)
            # Scalars travel once, with the first.
            more = {} if mets else more
            met = inside(
                treedef.unflatten(sent),
                state.exchange,
                axis_name,
                weight=weight,
                **more,
            )
            mets.append(met)
            mean = treedef.flatten_up_to(met.mean)
            lost: list[Any] = [None] * len(leaves)
            if met.lost is not None:
                lost = treedef.flatten_up_to(met.lost)
            for i, wish in zip(group, wishes, strict=True):
                means[i] = mean[i]
                errors[i] = account.after(
                    before[i],
                    wish,
                    sent[i],
                    lost[i],
                    mean[i] if whole else None,
                )
        for i in given:
            grown[i] = account.grown(errors[i], before[i])
        means, errors, grown = map(treedef.unflatten, (means, errors, grown))
        memory = localize(ErrorFeedbackState(errors, mets[0].state), axis_name)
        return mets[0]._replace(mean=means, lost=grown, state=memory)

    return meet


def _fed_back_code(inside: Code, decay: float | jax.Array) -> Code:
    """The same for a worker that comes alone."""

    def encode(x, state):
        wished = x + state.error * jnp.asarray(decay, x.dtype)
        message, lost, inner = inside.encode(wished, state.exchange)
        # Where the message is not finite, what it lost is not finite either.
        error = jnp.where(jnp.isfinite(lost), lost, state.error)
        return message, lost, ErrorFeedbackState(error, inner)

    return Code(encode, inside.decode)
