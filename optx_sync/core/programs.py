# SPDX-License-Identifier: Apache-2.0
"""What an optimizer's program reads: each number alone, each leaf alone, or more.

Nothing is run. A transformation is traced, and the equations of its program say of each
result which arrays it reads at its own place, and which elsewhere.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from optx_sync.core import trees
from optx_sync.core.trees import Tree, path_name

# What is given: a leaf's number, and what it is of that leaf. A text names what differs
# from place to place beside that.
Given: TypeAlias = tuple[int, str] | str
Jaxpr: TypeAlias = Any  # with its constants, or one that has none

# Each number of the result is made of the numbers at its own place, also where there
# are more; of those in the first two sets 0 is made of nothing but zeros. Any other
# primitive may read all.
_KEEP_ORDER = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
_KEEP_ZERO = _KEEP_ORDER | frozenset(
    """abs add add_any atan cbrt ceil conj convert_element_type copy div erf expm1 floor
    gt imag integer_pow log1p lt max min mul ne neg or pcast pvary real reduce_precision
    round select_n sign sin sinh sqrt square sub tan tanh""".split()
)
_BY_NUMBERS = _KEEP_ZERO | frozenset(
    """acos and asin atan2 bitcast_convert_type clamp complex cos cosh eq erf_inv erfc
    exp exp2 ge is_finite le lgamma log logistic name not pow rem rsqrt shift_left
    sharding_constraint shift_right_arithmetic shift_right_logical xor""".split()
)
# What these make of a sum over one piece is such a sum.
_OF_SUMS = _KEEP_ORDER | {"convert_element_type", "copy", "div", "mul", "neg", "pvary"}
_PSUM = frozenset({"psum", "psum_invariant"})
_CALLS = frozenset(
    """checkpoint closed_call core_call custom_jvp_call custom_vjp_call
    custom_vmap_call jit pjit remat remat2""".split()
)
# Parameters of an equation that say nothing but shapes.
_SHAPES = frozenset(
    "axes broadcast_dimensions dimensions new_sizes out_sharding shape sharding".split()
)
# While they are traced pieces have at least so many numbers, more than any array that
# a transformation makes of its own.
_MANY = 1009

_pieces_along = jax.make_user_context(default_value=())


@contextlib.contextmanager
def as_optax_expects() -> Iterator[None]:
    """Promote dtypes and shapes here, whatever the user has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def on_pieces(axes: tuple[str, ...]) -> Any:
    """A context in which a transformation gets flat pieces, which lie along these axes.

    Whoever cuts the arrays says so; shapes and types do not.
    """
    return _pieces_along((*_pieces_along.value, *axes))


def axes_of_pieces() -> tuple[str, ...]:
    """The axes along which the pieces lie that a transformation gets here, if any."""
    return _pieces_along.value


# What to write instead.
_MASKS = (
    "Give a mask as a tree of bools, mask=jax.tree.map(lambda x: x.ndim > 1, params), "
    "or by the parameters' paths, and groups as a tree of labels to optax.partition"
)
_WHOLE = "Write a clip by its norm as oxs.clip_by_global_norm(1.0, {axes!r}){front}"
_TRACED = "It must do with gradients, parameters and the extra argument `value`"


class Mixes(Exception):
    """Why a transformation does not act on each number, or on each leaf, alone."""

    def __init__(self, why: str, mend: str = ""):
        """With what to write instead, for `Elementwise.check`."""
        super().__init__(why)
        self.mend = mend


class Read(NamedTuple):
    """What a value is made of."""

    here: frozenset[Given] = frozenset()  # of which each number reads its own place
    # (array, primitive): of which it reads other places, too, and through what.
    elsewhere: frozenset[tuple[Given, str]] = frozenset()
    partial: bool = False  # a sum over this piece, to which padding adds 0
    zero: bool = False  # it is 0 where all arrays are, as in padding

    @property
    def plain(self) -> bool:
        """Whether it depends on no array, and on no place."""
        return not (self.here or self.elsewhere)

    def spread(self, through: str) -> "Read":
        """What a primitive makes of it that reads all places."""
        texts = frozenset(x for x in self.here if isinstance(x, str))
        return Read(texts, self.elsewhere | {(x, through) for x in self.here - texts})


def _joined(reads: Sequence[Read]) -> Read:
    """What a value is made of that is made of all these."""
    return Read(
        frozenset().union(*(x.here for x in reads)),
        frozenset().union(*(x.elsewhere for x in reads)),
        bool(reads) and all(x.partial for x in reads),
        bool(reads) and all(x.zero for x in reads),
    )


def _settled(step: Callable[[list[Read]], list[Read]], start: list[Read]) -> list[Read]:
    """What a loop carries: it is made of more, until a round adds nothing."""
    while True:
        after = [_joined(pair) for pair in zip(start, step(start), strict=True)]
        if after == start:
            return start
        start = after


class _Walk(NamedTuple):
    """What the values of a program are made of; `axes` are those of the pieces."""

    axes: tuple[str, ...] = ()

    def constant(self, x: Any) -> Read:
        """A value that the program holds."""
        x = _one_of_equal(x)
        if shape := np.shape(x):
            return Read(frozenset([f"a constant array of shape {shape}"]))
        return Read(zero=_is_known(x) and bool(x == 0))

    def chosen(self, flag: Read, values: Sequence[Read], by: str = "cond") -> Read:
        """One of several values, as a flag says."""
        one, read = _joined(values), flag.elsewhere | flag.spread(by).elsewhere
        partial = one.partial and flag.plain
        return one._replace(elsewhere=one.elsewhere | read, partial=partial)

    def equation(self, e: Any, reads: list[Read]) -> list[Read]:
        """The results of an equation."""
        name, axes = e.primitive.name, {*self.axes}
        if name in ("while", "scan"):
            found = self._loop(e, reads)
        elif name in _BY_NUMBERS:
            found = [self._by_numbers(e, reads)]
        else:
            found = self._spread(e, reads)
        if name in _PSUM and axes and axes == _names(e):
            if all(x.partial or (x.plain and x.zero) for x in reads):
                found = [Read(zero=x.zero) for x in reads]
        for k, v in enumerate(e.outvars):
            if not getattr(v.aval, "shape", ()):  # A scalar is at no place.
                here = (x for x in found[k].here if not isinstance(x, str))
                found[k] = found[k]._replace(here=frozenset(here))
        return found

    def _by_numbers(self, e: Any, reads: list[Read]) -> Read:
        name, one = e.primitive.name, _joined(reads)
        kept = {"div": reads[:1], "select_n": reads[1:]}.get(name, reads)
        zero = (any if name == "mul" else all)(x.zero for x in kept)
        zero = zero and not (name == "div" and reads[1].zero)
        zero = zero and name in _KEEP_ZERO and e.params.get("y", 1) > 0
        others = [x for x in reads if not x.partial]
        sums = name in _OF_SUMS and len(others) == len(reads) - 1
        sums = sums and (name != "div" or reads[0].partial)
        if name in ("add", "add_any", "sub"):
            sums = len(others) < len(reads) and all(x.zero for x in others)
        return one._replace(partial=sums and all(x.plain for x in others), zero=zero)

    def _spread(self, e: Any, reads: list[Read]) -> list[Read]:
        """Results of a primitive that may read all places of what it is given."""
        name, one = e.primitive.name, _joined(reads)
        here, elsewhere, *_ = one.spread(name)
        if not elsewhere and (_names(e) or name == "axis_index"):
            elsewhere |= {("the place or the number of the pieces", name)}
        for v, x in zip(e.invars, reads, strict=True):
            if _size(v) >= _MANY and not (x.zero or x.spread(name).elsewhere):
                elsewhere |= {("the size of a piece", name)}
        zero = any(x.zero for x in reads) if name == "dot_general" else one.zero
        sums = name in ("reduce_sum", "dot_general") and zero
        sums = sums and not (here or one.elsewhere)
        if not (here or elsewhere):  # What it makes of that may differ by place.
            here = frozenset([f"what `{name}` makes by place"])
        partial = [sums and _size(v) == 1 for v in e.outvars]
        return [Read(here, elsewhere, x, zero=x) for x in partial]

    def _loop(self, e: Any, reads: list[Read]) -> list[Read]:
        name, p = e.primitive.name, e.params
        test, body = p.get("cond_nconsts", 0), p.get("body_jaxpr") or p["jaxpr"]

        def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
            # What a scan goes through, and stacks, has a dimension more outside.
            pairs = zip(outside, inside, strict=True)
            return sum(v.aval.ndim == w.aval.ndim for v, w in pairs)

        carried = alike(e.outvars, body.jaxpr.outvars)
        fixed = alike(e.invars[test:], body.jaxpr.invars) - carried
        given, start = reads[test:][:fixed], reads[test + fixed :][:carried]
        rows = [x.spread(name) for x in reads[test + fixed + carried :]]

        def step(carry: list[Read]) -> list[Read]:
            after = _run(self, body, [*given, *carry, *rows])
            if name == "while":
                [flag] = _run(self, p["cond_jaxpr"], [*reads[:test], *carry])
                after = [self.chosen(flag, [x], name) for x in after]
            return after

        carry = _settled(lambda carry: step(carry)[:carried], start)
        stacked = step(carry)[carried:]
        return [*carry, *(Read(x.here | {name}, x.elsewhere) for x in stacked)]


class Values:
    """Numbers for the values of programs: equal ones for what is computed alike.

    With `shapes=False` arrays may differ in their shapes.
    """

    def __init__(self, shapes: bool = True):
        """Without any value."""
        self.shapes = shapes
        self._numbers: dict[Hashable, int] = {}
        self._held: list[Any] = []

    def of(self, *what: Hashable) -> int:
        """The number of what is described so."""
        return self._numbers.setdefault(what, len(self._numbers))

    def constant(self, x: Any) -> int:
        """A value that the program holds."""
        if not _is_known(x):
            self._held.append(x)  # so that no other one gets its number
            return self.of("constant", id(x))
        x = np.asarray(x if self.shapes else _one_of_equal(x))
        return self.of("constant", x.shape, x.dtype.str, x.tobytes())

    def chosen(self, flag: int, values: Sequence[int]) -> int:
        """One of several values, as a flag says."""
        return self.of("cond", flag, *values)

    def equation(self, e: Any, given: list[int]) -> list[int]:
        """The results of an equation."""
        name, results = e.primitive.name, [v.aval for v in e.outvars]
        if not self.shapes and given:
            sizes = 1, _size(e.outvars[0])
            moved = name in _KEEP_ORDER and _size(e.invars[0]) in sizes
            if moved or name in _PSUM or name in ("pvary", "pcast"):
                return given
        params = tuple(
            (key, self._parameter(x))
            for key, x in sorted(e.params.items())
            if self.shapes or key not in _SHAPES
        )
        return [
            self.of(name, *given, params, place, self.type(x))
            for place, x in enumerate(results)
        ]

    def type(self, x: Any) -> Hashable:
        """The dtype of a value, and its shape where that matters."""
        shape = getattr(x, "shape", None) if self.shapes else None
        return shape, str(getattr(x, "dtype", None))

    def _parameter(self, x: Any) -> Hashable:
        if isinstance(x, tuple | list):
            return tuple(map(self._parameter, x))
        if hasattr(inside := getattr(x, "jaxpr", x), "eqns"):
            given = [self.of("given", k) for k in range(len(inside.invars))]
            return tuple(_run(self, x, given))
        return x if isinstance(x, Hashable) else repr(x)


def _run(way: _Walk | Values, program: Jaxpr, given: Sequence[Any]) -> list[Any]:
    """Go through a program, and through the functions that it calls."""
    jaxpr = getattr(program, "jaxpr", program)
    constants = map(way.constant, getattr(program, "consts", ()))
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, given, strict=True)

    def of(v: Any) -> Any:
        return way.constant(v.val) if isinstance(v, core.Literal) else known[v]

    for e in jaxpr.eqns:
        name, found = e.primitive.name, list(map(of, e.invars))
        if name in _CALLS:
            keys = ("jaxpr", "call_jaxpr", "call")
            [called] = (e.params[key] for key in keys if key in e.params)
            found = _run(way, called, found)
        elif name == "cond":
            ways = [_run(way, branch, found[1:]) for branch in e.params["branches"]]
            found = [way.chosen(found[0], x) for x in zip(*ways, strict=True)]
        else:
            found = way.equation(e, found)
        known |= zip(e.outvars, found, strict=True)
    return list(map(of, jaxpr.outvars))


def _size(v: Any) -> int:
    """The number of numbers of a value."""
    return getattr(v.aval, "size", 0)


def _names(e: Any) -> set[str]:
    """The mapped axes over which an equation communicates."""
    named = (e.params.get(key) for key in ("axes", "axis_name"))
    several = (x if isinstance(x, tuple) else (x,) for x in named)
    return {x for some in several for x in some if isinstance(x, str)}


def _is_known(x: Any) -> bool:
    """Whether this process can read the numbers of a constant."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_replicated", True):
        return False
    return not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _one_of_equal(x: Any) -> Any:
    """The one number of a constant array of equal ones; else the array."""
    if not (_is_known(x) and np.size(x)):
        return x
    flat = np.asarray(x).reshape(-1)
    return flat[0] if (flat == flat[0]).all() else x


class _Program(NamedTuple):
    """The traced `init` and `update` of a transformation."""

    leaves: int  # how many there are
    names: list[str]  # of the leaves, and of the arrays of the state
    shapes: list[jax.ShapeDtypeStruct]  # of these
    init: Jaxpr  # params -> state
    update: Jaxpr  # (gradients, state, params, value) -> (updates, state)

    def result(self, place: int) -> str:
        """What `update` returns there, for messages."""
        kind = "update of" if place < self.leaves else "state at"
        return f"the {kind} {self.names[place]}"

    def said(self, what: Given) -> str:
        """What is given, for messages."""
        if isinstance(what, str):
            return what
        return f"all of the {what[1]} of {self.names[what[0]]}"

    def reads(self, axes: tuple[str, ...]) -> list[Read]:
        """What each result of `update` is made of, after any number of steps."""
        grads, params = (
            [Read(frozenset([(k, kind)]), zero=True) for k in range(self.leaves)]
            for kind in ("gradient", "parameter")
        )

        def update(state: list[Read]) -> list[Read]:
            given = [*grads, *state, *params, Read()]
            return _run(_Walk(axes), self.update, given)

        state = _run(_Walk(axes), self.init, params)
        state = _settled(lambda state: update(state)[self.leaves :], state)
        return [*update(state)[: self.leaves], *state]

    def values(self, values: Values, called: Sequence[Hashable]) -> list[int]:
        """What `init`, then `update` returns, of arrays that are called so."""

        def given(kind: str, among: slice) -> list[int]:
            named = list(zip(called, map(values.type, self.shapes), strict=True))
            return [values.of(kind, *x) for x in named[among]]

        leaves, rest = slice(self.leaves), slice(self.leaves, None)
        params = given("parameter", leaves)
        every = [*given("gradient", leaves), *given("state", rest), *params]
        start = _run(values, self.init, params)
        return [*start, *_run(values, self.update, [*every, values.of("value")])]


def _trace(
    inner: optax.GradientTransformationExtraArgs,
    shapes: Tree,
    axes: tuple[str, ...],
    pieces: bool = False,
) -> _Program:
    """The programs of a transformation for arrays, or pieces, of these shapes."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)

    def update(grads, state, params, value):
        updates, now = inner.update(grads, state, params, value=value)
        return treedef.flatten_up_to(updates), trees.cast_like(now, state)

    # What counts the pieces does something else with two than with one.
    mapped: Any = {"axis_env": [(axis, 1 + pieces) for axis in axes]}
    make: Any = functools.partial(jax.make_jaxpr, return_shape=True, **mapped)
    value = jax.ShapeDtypeStruct((), np.float32)
    try:
        with as_optax_expects(), on_pieces(axes if pieces else ()):
            init, state = make(inner.init)(shapes)
            program, _ = make(update)(shapes, state, shapes, value)
    except Exception as error:
        on, mend = (" on flat pieces", _MASKS) if pieces else ("", _TRACED)
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Mixes(f"it cannot be traced{on}: {said}", mend) from error
    every = [*leaves, *jax.tree_util.tree_leaves_with_path(state)]
    names, found = [path_name(path) for path, _ in every], [x for _, x in every]
    return _Program(len(leaves), names, found, init, program)


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """The check of one transformation that is to work on flat pieces of arrays.

    Each number of its updates and of its state must be made of the numbers at its own
    place and of scalars that depend on no array, or on a sum over all pieces; and but
    for shapes its program for flat pieces must be that for whole arrays.

    Attributes:
        inner: The transformation.
        axes: The axes along which the pieces lie. The transformation may use them to
            add up what it needs of the whole.
        option: The option that asks for pieces, as the user wrote it, for the message.
        who: The transformation's name, for the message.
        around: A chain in which another link sees whole arrays, for the message.
    """

    inner: optax.GradientTransformationExtraArgs
    axes: tuple[str, ...]
    option: str
    who: str = "inner"
    around: str = ""

    def check(self, params: Tree) -> None:
        """Refuse a transformation that needs more than each number of these alone.

        Args:
            params: A tree of arrays or `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: It is not elementwise, or cannot be traced.
        """
        try:
            self.require(params)
        except Mixes as why:
            front = f", or put what needs whole arrays in front: {self.around}"
            axes = trees.one_or_several(self.axes)
            mend = why.mend.format(axes=axes, front=front if self.around else "")
            raise ValueError(
                f"{self.option} gives {self.who} flat pieces of arrays, which is right "
                "for transformations that act on each number alone, such as Adam; but "
                f"with this one {why}. {mend}. Or leave {self.option} out."
            ) from why

    def require(self, params: Tree, constants: bool = False) -> None:
        """Raise `Mixes` where it does not act on each number alone.

        With `constants` its state may have arrays that are not cut.
        """

        def wide(x):
            dtype = jnp.result_type(x)  # Pieces of half precision are float32.
            dtype = trees.at_least_float32(dtype) if trees.is_floating(dtype) else dtype
            # Of what has no numbers JAX leaves out some of what is computed.
            return jax.ShapeDtypeStruct([n or 1 for n in jnp.shape(x)], dtype)

        def cut(x):
            # Of no size of a whole array, so that what looks at sizes is seen.
            return jax.ShapeDtypeStruct((2 * x.size + _MANY,), x.dtype)

        shapes = jax.tree.map(wide, params)
        whole = _trace(self.inner, shapes, self.axes)
        pieces = _trace(self.inner, jax.tree.map(cut, shapes), self.axes, pieces=True)
        one, two = ({*x.names[x.leaves :]} for x in (whole, pieces))
        if other := sorted(one ^ two):
            why = f"its state for flat pieces is another one, at {other[0]}"
            raise Mixes(why, _MASKS)
        every = zip(whole.shapes, pieces.shapes, pieces.reads(self.axes), strict=True)
        for place, (x, flat, read) in enumerate(every):
            result = pieces.result(place)
            fits = flat.shape == cut(x).shape or x.shape == flat.shape == ()
            if not fits and not (constants and x.shape == flat.shape):
                raise Mixes(f"{result} has shape {x.shape} and no pieces", _WHOLE)
            for what, by in sorted(read.elsewhere, key=str):
                why = f"{result} reads {pieces.said(what)}, by `{by}`"
                raise Mixes(why, _WHOLE)
            texts = [text for text in read.here if isinstance(text, str)]
            if texts and flat.size >= _MANY:
                why = f"{result} reads {texts[0]}, of which there are no pieces"
                raise Mixes(why, _WHOLE)
        values, called = Values(shapes=False), range(len(whole.names))
        for place, (x, y) in enumerate(
            zip(*(made.values(values, called) for made in (whole, pieces)), strict=True)
        ):
            if x != y:
                # What it begins with comes first, and then what `update` returns.
                place = (place + whole.leaves) % (len(whole.names))
                raise Mixes(
                    f"{whole.result(place)} is made in another way of flat pieces than "
                    "of whole arrays, as with a mask by `ndim`",
                    _MASKS,
                )


class Leafwise(NamedTuple):
    """What a transformation does to each leaf of a tree, read off its program."""

    kinds: Sequence[Hashable]  # of each leaf: equal where both are treated alike
    own: list[frozenset[str]]  # of each leaf: the names of its own state
    shared: dict[str, Hashable]  # of the state of no leaf, by name: what becomes of it

    def has(self, place: int, alone: "Leafwise") -> bool:
        """Whether that of one leaf alone does to it what this does."""
        pairs = alone.shared.items()
        shared = all(self.shared.get(name) == value for name, value in pairs)
        return shared and self.kinds[place] == alone.kinds[0]


def leafwise(
    inner: optax.GradientTransformationExtraArgs,
    params: Tree,
    axes: tuple[str, ...],
    values: Values,
) -> Leafwise:
    """What a transformation does to each leaf.

    Args:
        inner: The transformation.
        params: A tree of `jax.ShapeDtypeStruct`.
        axes: The mapped axes. A sum over them is not one over leaves.
        values: Numbers of values, the same for what is compared.

    Raises:
        Mixes: What it does to a leaf depends on others, or it cannot be traced.
    """
    program = _trace(inner, params, axes)
    count, owners = program.leaves, []
    for place, read in enumerate(program.reads(())):
        by = {x: "" for x in read.here} | {x: f", by `{y}`" for x, y in read.elsewhere}
        found = sorted(x for x in by if not isinstance(x, str))
        own = place if place < count else min((k for k, _ in found), default=None)
        for x in found:
            if x[0] != own:
                said = f"{program.result(place)} reads {program.said(x)}"
                raise Mixes(said + by[x])
        owners.append(own)
    state = list(zip(program.names, owners, strict=True))[count:]
    # Arrays of a leaf's state are called by their place among these.
    called: list[Hashable] = [None] * count
    for place, (name, own) in enumerate(state, count):
        called.append(name if own is None else owners[count:place].count(own))
    found = program.values(values, called)
    start, updates = found[: len(state)], found[len(state) :][:count]
    made = zip(state, start, found[len(state) + count :], strict=True)
    made = [(own, name, pair) for (name, own), *pair in made]

    def of(leaf: int | None) -> dict[str, Hashable]:
        return {name: tuple(pair) for own, name, pair in made if own == leaf}

    every = [of(leaf) for leaf in range(count)]
    kinds = [(x, *own.values()) for x, own in zip(updates, every, strict=True)]
    return Leafwise(kinds, list(map(frozenset, every)), of(None))
