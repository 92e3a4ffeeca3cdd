# SPDX-License-Identifier: Apache-2.0
"""Each replica applies a rule to a piece of all replicas' arrays.

Rules need to see all replicas' values of a coordinate side by side. They do in the
transposed form: replica k gets the k-th piece of all replicas' arrays (an all-to-all),
applies the rule to it, and the pieces are gathered. That sends what an all-reduce
sends, and needs memory for one more copy of the arrays, however many replicas there
are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optx_sync.comm import buffers
from optx_sync.comm.collectives import AxisName, all_to_all, axis_size, gather
from optx_sync.comm.varying import localize, norm_axes
from optx_sync.core.shapes import Array, Bool, Num
from optx_sync.exchange.contract import Exchange, Met, summed
from optx_sync.exchange.pieces import require_meetable
from optx_sync.exchange.robust import norms


class Everyone(NamedTuple):
    """What a rule sees on one replica: a piece of what each of the N replicas has."""

    # Pieces of leaves, those side by side that can be.
    blocks: list[Num[Array, "replicas piece"]]
    counts: Bool[Array, " replicas"]  # who counts
    # [replicas, ...], what each replica says of itself; `None` without `sizes`.
    sizes: Any
    axis_name: AxisName
    shard_axes: tuple[str, ...]


Rule: TypeAlias = Callable[[Everyone], list[Num[Array, " piece"]]]


def transposed(
    rule: Rule,
    *,
    encode: Callable[[jax.Array], jax.Array] | None = None,
    sizes: Callable[[Sequence[jax.Array], tuple[str, ...]], jax.Array] | None = None,
    shard_axes: AxisName | None = None,
) -> Exchange:
    """The exchange in which each replica applies a rule to a piece of all arrays.

    `encode` is what is done to a leaf before it travels, `sizes` what a replica says of
    itself, a rule that compares whole arrays. A rule returns a piece for each block. A
    weight is a flag.
    """

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "this exchange")
        originals, treedef = jax.tree.flatten(tree)
        also = summed(also, axis_name)
        axes = () if sizes is None else norm_axes(tree, axis_name, shard_axes)
        replicas = axis_size(axis_name)
        leaves = [(encode or buffers.wide)(x) for x in originals]
        rows = [buffers.in_rows(x.reshape(-1), replicas) for x in leaves]
        joint = buffers.Joint(rows, buffers.joinable())

        if not joint.places:  # Nothing has elements.
            mean = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
            return Met(mean, state=state, also=also)

        counts, said = jnp.ones(replicas, bool), None
        own = [] if sizes is None else [jnp.ravel(sizes(leaves, axes))]
        if weight is not None:
            flag = localize(norms.flag_of(weight), axis_name)
            own.append(flag.astype(own[0].dtype if own else jnp.float32)[None])
        if own:
            said = gather(jnp.concatenate(own)[None], axis_name)
        if weight is not None and said is not None:
            counts, said = said[:, -1] > 0, said[:, :-1]

        blocks = [all_to_all(x, axis_name) for x in joint.join(rows)]
        found = rule(Everyone(blocks, counts, said, axis_name, axes))
        parts = joint.cut([gather(x[None], axis_name) for x in found])
        mean = treedef.unflatten(
            buffers.shaped(part, x).astype(x.dtype)
            for part, x in zip(parts, originals, strict=True)
        )
        total = replicas if weight is None else jnp.sum(counts, dtype=jnp.float32)
        return Met(mean, total, None, state, also)

    return Exchange(
        lambda tree: (),
        meet,
        linear=False,
        remembers=False,
        outlier=norms.far_from_result(shard_axes),
    )


def check_enough(replicas: int, needed: int, call: str) -> None:
    """Refuse an axis of fewer replicas than a rule needs."""
    if replicas < needed:
        raise ValueError(
            f"oxs.exchange.{call} needs at least {needed} replicas; the axis has "
            f"{replicas}. Pass a smaller number."
        )
