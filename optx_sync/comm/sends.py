# SPDX-License-Identifier: Apache-2.0
"""What a traced program sends: the collectives in it, before a compiler has seen it."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend import core

# Which collective XLA makes of a primitive of JAX. A name with "_start" is of one that
# the program itself starts and waits for.
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
# (kind, axes): the bytes that a worker hands over.
Bytes: TypeAlias = Counter[tuple[str, tuple[str, ...]]]


class Sends(NamedTuple):
    """The bytes that one worker hands over, by kind and axes of the collectives.

    Attributes:
        always: Those of collectives in no branch of a conditional.
        branches: Those in branches. Of one conditional the mean over its branches that
            send anything counts, as if they were taken in turn.
    """

    always: Bytes
    branches: Bytes


def sends(program: core.Jaxpr) -> Sends:
    """What a program sends, as it stands before XLA.

    A collective in a `scan` counts as often as that runs; one in a `while_loop`, or in
    a branch there, once. XLA joins some, and may leave out what nothing needs.
    """
    found = Sends(Counter(), Counter())
    for e in program.eqns:
        name = e.primitive.name.removesuffix("_start")
        axes = _axes(e)
        if name in _KINDS and axes:
            given = e.invars[:1] if name == "ragged_all_to_all" else e.invars
            found.always[_KINDS[name], axes] += sum(_bytes(v.aval) for v in given)
        elif name == "cond":
            found.branches.update(_mean(map(_inside, e.params["branches"])))
        else:
            times = e.params["length"] if name == "scan" else 1
            for inner in core.jaxprs_in_params(e.params):
                always, branches = sends(inner)
                found.always.update({key: times * always[key] for key in always})
                found.branches.update(branches)
    return found


def _inside(branch: core.ClosedJaxpr) -> Bytes:
    """What a branch sends, and the branches in it."""
    always, branches = sends(branch.jaxpr)
    return always + branches


def _mean(branches: Iterable[Bytes]) -> dict[Any, Any]:
    """The mean over branches that send anything."""
    several = [branch for branch in branches if branch]
    keys = {key: None for branch in several for key in branch}
    return {key: sum(x[key] for x in several) / len(several) for key in keys}


def _axes(e: core.JaxprEqn) -> tuple[str, ...]:
    """The mapped axes along which an equation communicates."""
    named = e.params.get("axes", e.params.get("axis_name", ()))
    several = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in several if isinstance(axis, str))


def _bytes(aval: Any) -> int:
    """The bytes of an array; numbers of 4 bits share them."""
    if not hasattr(aval, "dtype"):
        return 0  # a token
    dtype = aval.dtype
    bits = 8 * dtype.itemsize
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    return (aval.size * bits + 7) // 8
