# SPDX-License-Identifier: Apache-2.0
"""Find the replica that differs from the others, by two words for each leaf.

With w_k the bits of number k of a leaf, all modulo 2^32:

    h_1 = sum_k w_k (2 k + 1)        h_2 = sum_k (w_k xor 0x9E3779B9) (4 k + 3)

All multipliers are odd, so a leaf in which one number differs always has another h_1,
and another h_2.

What is saved carries such words, and a sum of its notes, so that what is read can be
compared with what was saved.
"""

import functools
import json
import operator
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from optx_sync.comm import collectives
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.shards import Names
from optx_sync.core.shapes import Array, Bool, Int32, UInt32
from optx_sync.core.trees import (
    Tree,
    brief,
    check_arrays,
    names_of,
    path_name,
    pure,
)
from optx_sync.state.leaves import equal_on_replicas, is_key

_MIX = 0x9E3779B9
# The keys, among saved notes, of the arrays' words and of the notes' own sum.
_WORDS, _SUM = "fingerprints", "sum"
_SMALL = 2**16  # up to so many numbers NumPy is quicker than a compiler

Notes: TypeAlias = Mapping[str, Any]
Also: TypeAlias = Mapping[str, Any]  # numbers that are in no state, by name
Words: TypeAlias = list[Any]  # of an array its shape, its dtype and its two words


class Damaged(Exception):
    """A save that cannot be read, or holds something else than was saved."""


class Fingerprint(NamedTuple):
    """Which of N replicas differ from the majority.

    Attributes:
        words: uint32[leaves, 2], the two words of each leaf of this replica's own tree.
        differs: bool[N], whether any leaf of a replica differs from the majority's.
        leaf: int32[N], the number of the first such leaf of each replica, -1 for none.
    """

    words: UInt32[Array, "leaves 2"]
    differs: Bool[Array, " replicas"]
    leaf: Int32[Array, " replicas"]

    def where(self, tree: Tree, also: Also | None = None) -> dict[int, str]:
        """Name the replicas that differ and, for each, the first leaf that does.

        Args:
            tree: The tree that was given, or its shapes.
            also: What was given as `also`, or the same names.
        """
        pairs = jax.tree_util.tree_leaves_with_path(pure(tree))
        names = [path_name(path) for path, _ in pairs]
        names += [f"also[{name!r}]" for name in sorted(also or {})]
        # The same on all replicas, and stacked if each of them has returned it.
        shape = np.shape(self.leaf)
        leaf = np.asarray(jax.device_get(self.leaf)).reshape(-1, shape[-1])[0]
        return {
            replica: names[place]
            for replica, place in enumerate(leaf.tolist())
            if place >= 0
        }


def fingerprint(
    tree: Tree, axis_name: AxisName | None, *, also: Also | None = None
) -> Fingerprint:
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
        also: Numbers that are in no state and should be equal as well, by name, such as
            a learning rate of the program: scalars, or arrays of any shape.

    Returns:
        A `Fingerprint`. `where(tree)` of it, outside of compiled functions, names
        replicas and leaves; `where(tree, also)`, too, as `also['rate']`.

    Raises:
        TypeError: A bad axis name; in `also` something else than numbers by name.
        ValueError: The axis is not mapped here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> params = {"b": jnp.zeros((4, 3)), "w": jnp.ones((4, 5)).at[2, 1].set(7)}
        >>> def compare(params):
        ...     return oxs.fingerprint(params, "data")
        >>> jax.vmap(compare, axis_name="data")(params).where(params)
        {2: "['w']"}
        >>> def compare(rate):
        ...     return oxs.fingerprint((), "data", also={"rate": rate})
        >>> rates = jnp.array([0.1, 0.1, 0.2])
        >>> jax.vmap(compare, axis_name="data")(rates).where((), {"rate": 0.1})
        {2: "also['rate']"}
    """
    tree, own = pure(tree), check_also(also)
    check_arrays(tree, "What fingerprint compares")
    leaves = jax.tree.leaves(tree)
    nothing = jnp.zeros(2, jnp.uint32)
    words = [
        _words(jnp.asarray(x)) if equal else nothing
        for x, equal in zip(leaves, equal_on_replicas(tree), strict=True)
    ]
    words += [_words(jnp.asarray(x)) for x in own.values()]
    own = jnp.stack(words) if words else jnp.zeros((0, 2), jnp.uint32)
    replicas = 1 if axis_name is None else collectives.axis_size(axis_name)
    if axis_name is None or not words:
        none = jnp.zeros(replicas, bool)
        return Fingerprint(own, none, jnp.full(replicas, -1, jnp.int32))
    everyone = collectives.gather(own[None], axis_name)
    # Among sorted words that of a majority is in the middle.
    usual = jnp.sort(everyone, axis=0)[replicas // 2][None]
    differs = jnp.any(everyone != usual, axis=-1)
    alike = jnp.sum(~differs, axis=0, dtype=jnp.int32)
    differs = differs | (2 * alike <= replicas)[None]
    found = jnp.any(differs, axis=1)
    first = jnp.argmax(differs, axis=1).astype(jnp.int32)
    return Fingerprint(own, found, jnp.where(found, first, jnp.int32(-1)))


def check_also(also: object) -> dict[str, Any]:
    """Numbers that are in no state, in the order of their names."""
    names = list(also) if isinstance(also, Mapping) else [also]
    if also is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(
            'also must be a dict of numbers by name, such as {"rate": 0.1}; got '
            f"{brief(also)}."
        )
    found: dict[str, Any] = dict(also or {})  # pyright: ignore
    for name, x in found.items():
        if callable(x):
            raise TypeError(
                f"also[{name!r}] is a function, and what is compared are numbers. Pass "
                "its number now, schedule(step), or those of which it is made."
            )
        dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
        if not is_key(x) and dtype.kind not in "biufcV":
            raise TypeError(
                f"also[{name!r}] must be a number or an array of numbers; got "
                f"{brief(x)}."
            )
    return dict(sorted(found.items()))


def said_of(also: Also | None) -> dict[str, str]:
    """What a process says of its numbers in no state: two that are equal say the same.

    A scalar itself; of an array its shape, its dtype and its two words.
    """
    said = {}
    for name, x in check_also(also).items():
        if isinstance(x, jax.Array) and not _is_whole(x):
            raise ValueError(
                f"also[{name!r}] lies on several processes. Pass what this one has, or "
                "let it be a part of the state."
            )
        if is_key(x) or np.ndim(x):
            words = np.sum(jax.device_get(_words_here(x)), 0, np.uint32)
            dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
            said[name] = f"{dtype}{list(np.shape(x))} with the words {words.tolist()}"
        else:
            said[name] = str(np.asarray(jax.device_get(x)).item())
    return said


def unread(path: object, why: object) -> Damaged:
    """What to raise where the reader of a save, such as Orbax, raises `why`."""
    if isinstance(why, KeyError):  # Its text is a bare name.
        why = f"it lacks {why}: it is damaged, or of another version"
    elif isinstance(why, Exception):
        why = str(why) or type(why).__name__
    return Damaged(f"{path} cannot be read: {why}"[:500])


def by_name(tree: Tree) -> dict[Names, Tree]:
    """The arrays of a tree by the names of their paths."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {names_of(path): x for path, x in pairs}


def sealed(notes: Notes, arrays: Mapping[Names, Tree]) -> dict[str, Any]:
    """Notes to save beside arrays: with the arrays' words and a sum of all of it.

    Args:
        notes: What JSON can hold.
        arrays: By name. All processes that hold parts of them call it together.
    """
    words = [[name, *rest] for name, rest in _described(arrays).items()]
    # As JSON gives them back: without tuples, every key a text, NumPy's integers plain.
    noted = {**notes, _WORDS: words}
    noted = json.loads(json.dumps(noted, default=operator.index))
    return {**noted, _SUM: _sum_of(noted)}


def unsealed(path: object, notes: Notes) -> tuple[dict[str, Any], dict[Names, Words]]:
    """What `sealed` was given, and of each array its shape, dtype and two words.

    Raises:
        Damaged: Other notes than those that were saved.
    """
    noted = dict(notes)
    if _SUM not in noted:
        raise Damaged(f"{path} has no sum: it is damaged, or of an earlier version")
    if noted.pop(_SUM) != _sum_of(noted):
        raise Damaged(f"{path} holds other notes than were saved")
    words = {tuple(name): rest for name, *rest in noted.pop(_WORDS)}
    return noted, words


def compare(
    path: object, words: Mapping[Names, Words], arrays: Mapping[Names, Tree]
) -> None:
    """Compare arrays that were read with the words of those that were saved.

    Raises:
        Damaged: They are not the same.
    """
    found = _described(arrays)
    for name in {**words, **found}:
        if words.get(name) != found.get(name):
            raise Damaged(f"{path} holds another {'.'.join(name)} than was saved")


def _described(arrays: Mapping[Names, Tree]) -> dict[Names, Words]:
    """Of each array its shape, its dtype and its two words."""
    words = [_words_here(x) for x in arrays.values()]  # None is waited for yet
    words = [np.sum(jax.device_get(of_one), 0, np.uint32) for of_one in words]
    own = np.stack(words) if words else np.zeros((0, 2), np.uint32)
    if jax.process_count() > 1:
        everyones = np.asarray(multihost_utils.process_allgather(own))
        total = np.asarray(np.sum(everyones, 0, np.uint32))
        split = [not _is_whole(x) for x in arrays.values()]
        own[split] = total[split]
    return {
        name: [list(x.shape), str(x.dtype), *two]
        for (name, x), two in zip(arrays.items(), own.tolist(), strict=True)
    }


def _is_whole(x: Tree) -> bool:
    """Whether this process has all of an array."""
    is_array = isinstance(x, jax.Array)
    return not is_array or x.is_fully_addressable or x.is_fully_replicated


def _words_here(x: Tree) -> list[Tree]:
    """The words of this process's parts of an array, to be added up."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        if x.dtype.itemsize == 8:  # JAX would shorten it.
            x = np.asarray(x, order="C")[..., None].view(np.uint32)
        parts = [(x, [0] * x.ndim)]
    else:
        x = jax.random.key_data(x) if is_key(x) else x
        one, shards = x.is_fully_replicated, x.addressable_shards
        used = shards[:1] if one else [s for s in shards if s.replica_id == 0]
        parts = [(s.data, [here.start or 0 for here in s.index]) for s in used]
    # A program for each shape of the large ones, none of which communicates: one for
    # all arrays takes seconds to compile, before each group's first save.
    words = _on_host if x.size <= _SMALL else _on_device
    return [words(part, x.shape, np.array(start, np.uint32)) for part, start in parts]


@functools.partial(jax.jit, static_argnums=1)
def _on_device(x: jax.Array, shape: tuple[int, ...], start: jax.Array) -> jax.Array:
    return _words(jnp.asarray(x), shape, start)


def _on_host(x: Tree, shape: tuple[int, ...], start: np.ndarray) -> np.ndarray:
    """`_words` without a program to compile."""
    x = np.asarray(x)
    if x.dtype.itemsize == 1:
        x = x.astype(np.int8) if "int" in x.dtype.name else x
    bits = np.asarray(x, order="C")[..., None].view(_word(x)).astype(np.uint32)
    both = _terms(np, bits, shape, start)
    return np.array([np.sum(one, dtype=np.uint32) for one in both])


def _sum_of(notes: Notes) -> int:
    return zlib.crc32(json.dumps(notes, sort_keys=True).encode())


def _words(
    x: jax.Array, shape: tuple[int, ...] | None = None, start: jax.Array | None = None
) -> UInt32[Array, " 2"]:
    """The two words of an array, in one pass over it.

    Of a shard, what it adds to those of its array, which has this shape and in which
    the shard starts there.
    """
    bits, zero = _bits(x), jnp.uint32(0)
    begin = np.zeros(x.ndim, np.uint32) if start is None else start
    both = _terms(jnp, bits, shape or x.shape, begin)

    def add(one, two):
        return one[0] + two[0], one[1] + two[1]

    return jnp.stack(lax.reduce(both, (zero, zero), add, tuple(range(bits.ndim))))


def _terms(xp: Any, bits: Any, shape: tuple[int, ...], start: Any) -> tuple[Tree, Tree]:
    """What both words add up, in NumPy or JAX; as `_words`, with words along an axis.

    Numbered along all axes, since flattening would gather a sharded array.
    """
    place, stride = xp.zeros_like(bits), 1
    for axis in reversed(range(bits.ndim)):
        along = xp.arange(bits.shape[axis], dtype=np.uint32)
        along = along + start[axis] if axis < len(shape) else along
        along = along * np.uint32(stride % 2**32)
        others = [other for other in range(bits.ndim) if other != axis]
        place = place + xp.expand_dims(along, others)
        stride *= shape[axis] if axis < len(shape) else bits.shape[axis]
    return bits * (2 * place + 1), (bits ^ np.uint32(_MIX)) * (4 * place + 3)


def _bits(x: jax.Array) -> UInt32[Array, "..."]:
    """The bits of each number; of wide ones several words along a last axis."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return jnp.stack([_bits(x.real), _bits(x.imag)], axis=-1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    return lax.bitcast_convert_type(x, _word(x)).astype(jnp.uint32)


def _word(x: Tree) -> Any:
    """The type of the words of an array's numbers."""
    return {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
