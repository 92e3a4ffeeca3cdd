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
import numpy as np

from optx_sync import collectives
from optx_sync.collectives import AxisName
from optx_sync.exchange.contract import Exchange, Met, summed
from optx_sync.exchange.pieces import require_meetable
from optx_sync.exchange.robust import norms
from optx_sync.placement.fields import in_rows


class Everyone(NamedTuple):
    """What a rule sees on one replica: a piece of what each of the N replicas has."""

    blocks: list[jax.Array]  # [N, P]: pieces of leaves that can be joined, side by side
    places: list[list[int]]  # which leaves these are
    widths: list[int]  # of each leaf's piece
    counts: jax.Array  # bool[N], who counts
    sizes: Any  # [N, ...], what each replica says of itself: `sizes` of the rule
    axis_name: AxisName
    shard_axes: tuple[str, ...]

    def by_leaf(self):
        """(block, where its pieces of leaves end, which leaves) for each block."""
        for block, places in zip(self.blocks, self.places, strict=True):
            ends = np.cumsum([self.widths[i] for i in places])[:-1]
            yield block, ends.tolist(), places


Rule: TypeAlias = Callable[[Everyone], list[jax.Array]]


def transposed(
    rule: Rule,
    *,
    encode: Callable[[jax.Array], jax.Array] | None = None,
    sizes: Callable[[Sequence[jax.Array], tuple[str, ...]], jax.Array] | None = None,
    shard_axes: AxisName | None = None,
) -> Exchange:
    """The exchange in which each replica applies a rule to a piece of all arrays.

    `encode` is what is done to a leaf before it travels; `sizes` what a replica says of
    itself, a rule that compares whole arrays. A rule returns a piece for each block.
    """

    def meet(tree, state, axis_name, *, weight=None, also=None):
        require_meetable(tree, axis_name, "this exchange")
        every, treedef = jax.tree.flatten(tree)
        # JAX does not compile an all-to-all of empty arrays alone under vmap.
        empty = iter(collectives.reduce([x for x in every if not x.size], axis_name))
        originals = [x for x in every if x.size]
        also = summed(also, axis_name)
        if not originals:
            return Met(treedef.unflatten(empty), state=state, also=also)
        axes = (
            () if sizes is None else collectives.norm_axes(tree, axis_name, shard_axes)
        )
        replicas = collectives.axis_size(axis_name)
        leaves = [(encode or norms.wide)(x) for x in originals]

        counts, said = jnp.ones(replicas, bool), None
        own = [] if sizes is None else [jnp.ravel(sizes(leaves, axes))]
        if weight is not None:
            flag = collectives.localize(norms.flag_of(weight), axis_name)
            own.append(flag.astype(own[0].dtype if own else jnp.float32)[None])
        if own:
            said = collectives.gather(jnp.concatenate(own)[None], axis_name)
        if weight is not None and said is not None:
            counts, said = said[:, -1] > 0, said[:, :-1]

        cut = [in_rows(x.reshape(-1), replicas) for x in leaves]
        places = collectives.kinds(leaves)
        blocks = [jnp.concatenate([cut[i] for i in kind], axis=1) for kind in places]
        everyone = Everyone(
            blocks=[collectives.all_to_all(block, axis_name) for block in blocks],
            places=places,
            widths=[x.shape[1] for x in cut],
            counts=counts,
            sizes=said,
            axis_name=axis_name,
            shard_axes=axes,
        )
        pieces = rule(everyone)
        result = list(originals)
        for (_, ends, kind), piece in zip(everyone.by_leaf(), pieces, strict=True):
            whole = jnp.split(collectives.gather(piece[None], axis_name), ends, axis=1)
            for i, part in zip(kind, whole, strict=True):
                x = originals[i]
                flat = part.reshape(-1)[: x.size]
                result[i] = flat.reshape(x.shape).astype(x.dtype)
        full = iter(result)
        whole = (next(full if x.size else empty) for x in every)
        total = replicas if weight is None else jnp.sum(counts, dtype=jnp.float32)
        return Met(treedef.unflatten(whole), total, None, state, also)

    return Exchange(
        lambda tree: (),
        meet,
        linear=False,
        takes_weights=False,
        outlier=norms.far_from_result(shard_axes),
    )


def check_enough(replicas: int, needed: int, call: str) -> None:
    """Refuse an axis of fewer replicas than a rule needs."""
    if replicas < needed:
        raise ValueError(
            f"oxs.exchange.{call} needs at least {needed} replicas; the axis has "
            f"{replicas}. Pass a smaller number."
        )
