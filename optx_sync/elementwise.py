# SPDX-License-Identifier: Apache-2.0
"""Check that a transformation may work on pieces of arrays, by trying it on some."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.trees import Tree, cast_like

# Shapes for the trial. The halves of each differ in all but their size.
_EXAMPLE = {
    "matrix": jax.ShapeDtypeStruct((4, 4), np.float32),
    "vector": jax.ShapeDtypeStruct((8,), np.float32),
}
# Sizes of the gradients, so that some pass a threshold; the last one is a NaN.
_SCALES = (1e-6, 1.0, 1e6, np.nan)
_STEPS = 3
# Errors of a transformation that works on the parameters of its own model only.
FAILURES = (TypeError, ValueError, KeyError, AttributeError)


class Elementwise:
    """The check of one transformation that is to work on pieces of arrays.

    `check` tries it on an example, in steps with gradients of many sizes and a NaN:
    on two flat halves, each on a replica of its own, its updates must be those of the
    whole. A transformation that tells parameters apart by name, or fails on the
    example, is tried on small copies of the parameters.

    Args:
        inner: The transformation.
        axes: The axes along which the pieces lie, if they are mapped. The
            transformation may use them to add up what it needs of the whole.
        option: The option that asks for pieces, as the user wrote it, for the message.
        who: The transformation's name, for the message.
    """

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        axes: tuple[str, ...],
        option: str,
        who: str = "inner",
    ):
        self._inner, self._axes = inner, axes
        self._option, self._who = option, who

    def check(self, params: Tree) -> None:
        """Refuse a transformation that needs more than each number of these alone.

        Args:
            params: A tree of arrays or `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: It is not elementwise, or cannot be tried.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
        )
        if not self._fits_pieces(shapes):
            self._refuse("its state has arrays of other sizes than the parameters")
        agrees = self._on_example
        if agrees is None:
            small = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    tuple(min(4 if axis else 6, n) for axis, n in enumerate(x.shape)),
                    np.float32,
                ),
                shapes,
            )
            try:
                agrees = self._agrees(small)
            except FAILURES as error:
                raise ValueError(
                    f"{self._option} needs to try {self._who} on small arrays, and "
                    f"that failed: {error} Leave {self._option} out."
                ) from error
        if not agrees:
            self._refuse("it does not act on each number alone")

    def holds_for(self, x: jax.ShapeDtypeStruct) -> bool:
        """Whether it is elementwise on a small array."""
        try:
            return self._fits_pieces(x, constants=True) and self._agrees(x)
        except FAILURES:
            return False  # It works on arrays of some shapes alone.

    @functools.cached_property
    def _on_example(self) -> bool | None:
        """Whether it is elementwise on the example; `None` if that cannot be tried."""
        try:
            agrees = self._agrees(_EXAMPLE)
            return None if agrees and self._names_leaves() else agrees
        except FAILURES:
            return None

    def _names_leaves(self) -> bool:
        """Whether it treats some parameters differently, by name or otherwise."""

        def picks(x):
            return isinstance(x, optax.MaskedState | optax.transforms.PartitionState)

        state = jax.eval_shape(self._inner.init, _EXAMPLE)
        return any(map(picks, jax.tree.leaves(state, is_leaf=picks)))

    def _fits_pieces(self, shapes: Tree, constants: bool = False) -> bool:
        """Whether the arrays of its state can be cut like the parameters.

        With `constants` some may have shapes that are always the same.
        """
        flat, halves = (
            jax.tree.map(
                lambda x, parts=parts: jax.ShapeDtypeStruct(
                    (-(-x.size // parts),), x.dtype
                ),
                shapes,
            )
            for parts in (1, 2)
        )
        whole, flat, halves = (
            jax.eval_shape(self._inner.init, tree) for tree in (shapes, flat, halves)
        )

        def fits(one, two, half):
            piece = two.shape == (one.size,) and half.shape == (-(-one.size // 2),)
            constant = one.shape == two.shape == half.shape
            return piece or (constant and (constants or one.ndim == 0))

        one, two, half = map(jax.tree.structure, (whole, flat, halves))
        same = one == two == half
        return same and jax.tree.all(jax.tree.map(fits, whole, flat, halves))

    def _agrees(self, shapes: Tree) -> bool:
        """Whether updates of the whole and of its halves agree."""
        with eager():
            params, grads = draw(shapes)
            halves = jax.tree.map(
                lambda x: np.moveaxis(_halves(x, 2), 2, 0), (params, grads)
            )
            whole = jax.tree.map(lambda x: x[None], (params, grads))
            # It runs once: not worth the compiler's time.
            run = jax.jit(
                lambda *replicas: [self._steps(*inputs) for inputs in replicas],
                compiler_options={"xla_backend_optimization_level": 0},
            )
            try:
                whole, pieces = run(whole, halves)
            except jax.errors.UnexpectedTracerError:
                return True  # It closes over a tracer and cannot be evaluated here.
        for one, two in zip(*map(jax.tree.leaves, (whole, pieces)), strict=True):
            one = np.asarray(one)[0].reshape(len(_SCALES), _STEPS, -1)
            two = np.moveaxis(np.asarray(two), 0, 2).reshape(len(_SCALES), _STEPS, -1)
            two = two[..., : one.shape[-1]]
            if not np.allclose(one, two, rtol=1e-4, atol=1e-12, equal_nan=True):
                return False
        return True

    def _steps(self, params: Tree, grads: Tree) -> Tree:
        """The updates [replicas, cases, steps, ...], from arrays [replicas, ...]."""
        # All replicas along the first axis, one along each of the others.
        one = jax.vmap(functools.partial(steps, self._inner))
        for axis in self._axes[1:]:
            one = along(one, axis)
        first = self._axes[0] if self._axes else None
        return jax.vmap(one, axis_name=first)(params, grads)

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(
            f"{self._option} lets {self._who} see pieces of arrays, which is right for "
            "transformations that act on each number alone, such as Adam; but with "
            f"this one {reason}. Norms (clip_by_global_norm, LAMB), shapes (Adafactor, "
            "Muon), noise and estimated rates (Prodigy, DoG) need whole arrays. Leave "
            f"{self._option} out, or write a norm over all pieces: square sums of a "
            "piece, added up by oxs.reduce(squares, axis_name, reduction='sum')."
        )


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Evaluate outside of surrounding traces and mapped axes, as Optax expects it."""
    with jax.core.eval_context(), as_optax_expects():
        yield


@contextlib.contextmanager
def as_optax_expects() -> Iterator[None]:
    """Promote dtypes and shapes here, whatever the user has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def steps(
    inner: optax.GradientTransformationExtraArgs, params: Tree, grads: Tree
) -> Tree:
    """The updates of some steps, [steps, ...], each at parameters of its own."""

    def step(state, now):
        grads, params = now
        updates, new = inner.update(grads, state, params, value=jnp.float32(1))
        return cast_like(new, state), updates

    start = jax.tree.map(lambda x: x[0], params)
    later = jax.tree.map(lambda x: x[1:], params)
    return jax.lax.scan(step, inner.init(start), (grads, later), unroll=True)[1]


def draw(shapes: Tree) -> tuple[Tree, Tree]:
    """Parameters [cases, 1 + steps, ...], and gradients [cases, steps, ...].

    Gradients are of all sizes, those of several steps point the same way, and
    parameters go against them: some transformations ask how far they have come.
    """
    numbers = np.random.default_rng(0)

    def draw(x, *steps):
        drawn = numbers.normal(size=(*steps, *x.shape)).astype(np.float32)
        # The second half is larger.
        grows = np.linspace(0.5, 4.0, max(drawn[..., None].size, 1))
        return drawn * grows[: drawn.size].reshape(drawn.shape)

    def scaled(x):
        x[:, 1:] = x[:, :1] + 0.5 * x[:, 1:]
        for case, scale in enumerate(_SCALES):
            if np.isfinite(scale):
                x[case] *= scale
            elif x[case, 0].size:
                x[case, 0].reshape(-1)[0] = scale
        return x

    def moved(start, grads):
        way = np.cumsum(np.nan_to_num(np.sign(grads)), axis=1)
        way = np.concatenate([np.zeros_like(way[:, :1]), way], axis=1)
        return start - np.float32(0.5) * way

    params = jax.tree.map(draw, shapes)
    grads = jax.tree.map(lambda x: draw(x, len(_SCALES), _STEPS), shapes)
    grads = jax.tree.map(scaled, grads)
    return jax.tree.map(
        lambda x: x.astype(np.float32), (jax.tree.map(moved, params, grads), grads)
    )


def along(function: Callable[..., Tree], axis: str) -> Callable[..., Tree]:
    """The function inside of a mapped axis of size 1."""
    mapped = jax.vmap(function, axis_name=axis)

    def alone(*trees):
        result = mapped(*jax.tree.map(lambda x: x[None], trees))
        return jax.tree.map(lambda x: x[0], result)

    return alone


def _halves(x: np.ndarray, axis: int) -> np.ndarray:
    """All axes from number `axis` on as two flat halves [.., 2, k]."""
    flat = x.reshape(*x.shape[:axis], -1)
    spare = [(0, 0)] * axis + [(0, flat.shape[-1] % 2)]
    return np.pad(flat, spare).reshape(*x.shape[:axis], 2, -1)
