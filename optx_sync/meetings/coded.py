# SPDX-License-Identifier: Apache-2.0
"""Coded (compressed) pushes and answers, for workers that come one by one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optx_sync.center.contract import CenterRule
from optx_sync.core.checks import Refused, refuse
from optx_sync.core.trees import Tree, is_floating, leaves_with_names
from optx_sync.exchange.contract import Exchange, check_exchange


class _Pushes(NamedTuple):
    """How workers that come one by one code what they send."""

    exchange: Exchange
    rule: CenterRule


_PUSHED: Refused[_Pushes] = (
    (
        lambda o: o.exchange.code is None,
        "Workers that meet the center one by one push through an exchange that has a "
        "code, such as oxs.exchange.quantized(), top_k() or error_feedback(...) around "
        "one. This one compares or combines what several replicas have.",
    ),
    (
        lambda o: "center" in o.rule.reads,
        "exchange= codes what a worker contributes, but the contribution of this rule "
        "reads the center as it is when the push arrives, which the worker does not "
        "know. Leave exchange out, or write the rule with own.taken and declare what "
        "it reads, reads=('params', 'taken').",
    ),
)
_PULLED: Refused[Exchange] = (
    (
        lambda exchange: exchange.code is None or exchange.remembers,
        "pull_exchange= codes what a worker lacks of the center, one array alone. What "
        "a code loses is lacking the next time, so nothing is remembered. Pass an "
        "exchange that has a code and no memory, such as oxs.exchange.quantized() or "
        "top_k(), without error_feedback.",
    ),
)


def check_code(exchange: Exchange | None, rule: CenterRule) -> Exchange | None:
    """`exchange=` for workers that come one by one; refuse one without a code."""
    if exchange is not None:
        check_exchange(exchange)
        refuse(_Pushes(exchange, rule), _PUSHED)
    return exchange


def check_pull_code(exchange: Exchange | None) -> Exchange | None:
    """`pull_exchange=`; refuse an exchange that has no code, or that has a memory."""
    if exchange is not None:
        check_exchange(exchange)
        refuse(exchange, _PULLED)
    return exchange


def start_codes(exchange: Exchange, center: Tree) -> tuple[Any, ...]:
    """The state of the code for each array: what a worker remembers."""
    for path, leaf in leaves_with_names(center):
        if leaf is not None and not is_floating(leaf.dtype):
            raise TypeError(
                f"exchange= codes real floating arrays, but the parameter at {path} "
                f"has dtype {leaf.dtype}. Leave exchange out."
            )
    return tuple(exchange.init(x) for x in jax.tree.leaves(center))


def encoded(
    exchange: Exchange, tree: Tree, states: tuple[Any, ...]
) -> tuple[Tree, tuple[Any, ...]]:
    """(a tree of messages, the next states).

    Each array is coded alone, so that variables may go to several servers.
    """
    code: Any = exchange.code  # `check_code` has seen that there is one
    leaves, treedef = jax.tree.flatten(tree)
    coded = [
        code.encode(leaf, state) if leaf.size else (leaf, None, state)
        for leaf, state in zip(leaves, states, strict=True)
    ]
    messages = treedef.unflatten(message for message, _, _ in coded)
    return messages, tuple(state for _, _, state in coded)


def decoded(exchange: Exchange, messages: Tree, like: Tree) -> Tree:
    """The arrays that the messages encode, in the shapes and dtypes of `like`."""
    code: Any = exchange.code
    return jax.tree.map(
        lambda x, message: code.decode(message, x) if x.size else message,
        like,
        messages,
    )


def compile_plus_decoded(exchange: Exchange) -> Callable[[Tree, Tree], Tree]:
    """A compiled function of messages and what is known: known plus what they encode.

    Both sides call it, and nothing else is in its program: how XLA fuses the decoding
    with what is around it may change the last bits, and a server and its worker must
    know the same ones.
    """

    def plus_decoded(messages: Tree, known: Tree) -> Tree:
        return jax.tree.map(jnp.add, known, decoded(exchange, messages, known))

    return jax.jit(plus_decoded)


def message_shapes(exchange: Exchange | None, center: Tree) -> Tree:
    """The messages of one push, as a tree of `jax.ShapeDtypeStruct`."""
    if exchange is None:
        return jax.eval_shape(lambda tree: tree, center)

    def push(tree):
        return encoded(exchange, tree, start_codes(exchange, tree))[0]

    return jax.eval_shape(push, center)


def bytes_of(tree: Tree) -> int:
    """The size in bytes of a tree of arrays, or of their shapes and dtypes."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
