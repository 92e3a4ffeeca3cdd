# SPDX-License-Identifier: Apache-2.0
"""Find the replica that differs from the others, by two words for each leaf.

With w_k the bits of number k of a leaf, all modulo 2^32:

    h_1 = sum_k w_k (2 k + 1)        h_2 = sum_k (w_k xor 0x9E3779B9) (4 k + 3)

All multipliers are odd, so a leaf in which one number differs always has another h_1,
and another h_2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optx_sync.comm import collectives
from optx_sync.comm.collectives import AxisName
from optx_sync.placement import axes, memory
from optx_sync.shapes import Array, Bool, Int32, UInt32
from optx_sync.trees import Tree, check_arrays, path_name, pure

_MIX = 0x9E3779B9


class Fingerprint(NamedTuple):
    """Which of N replicas differ from the majority."""

    words: UInt32[Array, "leaves 2"]  # this replica's own
    differs: Bool[Array, " replicas"]  # whether a leaf differs from the majority's
    leaf: Int32[Array, " replicas"]  # the first such leaf's number, -1 for none

    def where(self, tree: Tree) -> dict[int, str]:
        """Name the replicas that differ and, for each, the first leaf that does.

        Args:
            tree: The tree that was given, or its shapes.
        """
        paths = jax.tree_util.tree_leaves_with_path(pure(tree))
        # The same on all replicas, and stacked if each of them has returned it.
        shape = np.shape(self.leaf)
        leaf = np.asarray(jax.device_get(self.leaf)).reshape(-1, shape[-1])[0]
        return {
            replica: path_name(paths[place][0])
            for replica, place in enumerate(leaf.tolist())
            if place >= 0
        }


def fingerprint(tree: Tree, axis_name: AxisName | None) -> Fingerprint:
    r"""Compare trees that should be equal on all replicas; find who differs, and where.

    A bit that flips in one replica's memory stays flipped: its parameters, and all that
    is computed from them, differ from the others' for good, and nothing raises. Of each
    leaf, whose numbers have the bits w_k, two words

    .. math::

        h_1 = \sum_k w_k (2 k + 1), \quad
        h_2 = \sum_k (w_k \oplus c) (4 k + 3) \mod 2^{32}

    travel to all replicas, and the words that more than half of them have are right.
    One number that differs is always found; several in a leaf cancel out once in about
    2^64. It reads the tree once, sends 8 bytes for each leaf, and changes nothing: run
    it every few hundred steps, after a restore, and when a worker joins.

    It leaves out what the states in the tree declare as a replica's own (`inner` of a
    center rule, the memory of an exchange, arrays in pieces). So pass

    - `(params, state)` of `cross_shard`, and of any optimizer on equal gradients;
    - `state` alone of a center rule, for center, outer state and counters; its workers'
      parameters are equal after a round with `local_sgd` or `diloco`.

    Without a majority, as of two replicas that differ, all are said to differ. Along
    other mapped mesh axes nothing is compared: each position has its own answer.
    `jax.jit` takes the copies of a replicated array for one; inside of `jax.shard_map`
    each device reads its own copy.

    Args:
        tree: Tree of arrays of any dtype, random keys included.
        axis_name: The mapped axis, or a tuple of them. `None`: only the words, for
            example to store them with a checkpoint; nothing needs to be mapped.

    Returns:
        A `Fingerprint`. `where(tree)` of it, outside of compiled functions, names
        replicas and leaves.

    Raises:
        TypeError: A bad axis name.
        ValueError: The axis is not mapped here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> params = {"b": jnp.zeros((4, 3)), "w": jnp.ones((4, 5)).at[2, 1].set(7)}
        >>> def compare(params):
        ...     return oxs.fingerprint(params, "data")
        >>> jax.vmap(compare, axis_name="data")(params).where(params)
        {2: "['w']"}
    """
    tree = pure(tree)
    check_arrays(tree, "What fingerprint compares")
    leaves = jax.tree.leaves(tree)
    nothing = jnp.zeros(2, jnp.uint32)
    words = [
        _words(memory.on_device(jnp.asarray(x))) if equal else nothing
        for x, equal in zip(leaves, axes.equal_on_replicas(tree), strict=True)
    ]
    own = jnp.stack(words) if words else jnp.zeros((0, 2), jnp.uint32)
    if axis_name is None:
        return Fingerprint(own, jnp.zeros(1, bool), jnp.full(1, -1, jnp.int32))
    replicas = collectives.axis_size(axis_name)
    everyone = collectives.gather(own[None], axis_name)
    # Among sorted words that of a majority is in the middle.
    usual = jnp.sort(everyone, axis=0)[replicas // 2][None]
    differs = jnp.any(everyone != usual, axis=-1)
    alike = jnp.sum(~differs, axis=0, dtype=jnp.int32)
    differs = differs | (2 * alike <= replicas)[None]
    if not words:
        return Fingerprint(
            own, jnp.zeros(replicas, bool), jnp.full(replicas, -1, jnp.int32)
        )
    found = jnp.any(differs, axis=1)
    first = jnp.argmax(differs, axis=1).astype(jnp.int32)
    return Fingerprint(own, found, jnp.where(found, first, jnp.int32(-1)))


def _words(x: jax.Array) -> UInt32[Array, " 2"]:
    """The two words of an array, in one pass over it."""
    bits = _bits(x)
    # Numbered along all axes, since flattening would gather a sharded array.
    place = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place + along * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    both = (
        bits * (2 * place + 1),
        (bits ^ jnp.uint32(_MIX)) * (4 * place + 3),
    )
    zero = jnp.uint32(0)

    def add(one, two):
        return one[0] + two[0], one[1] + two[1]

    return jnp.stack(lax.reduce(both, (zero, zero), add, tuple(range(bits.ndim))))


def _bits(x: jax.Array) -> UInt32[Array, "..."]:
    """The bits of each number; of wide ones several words along a last axis."""
    if axes.is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return jnp.stack([_bits(x.real), _bits(x.imag)], axis=-1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    words = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, words).astype(jnp.uint32)
