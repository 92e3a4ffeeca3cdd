# SPDX-License-Identifier: Apache-2.0
"""Varying types over manual mesh axes: mark arrays, make types agree, check them.

Under `jax.shard_map(check_vma=True)` an array's type says over which axes it varies.
Elsewhere types do not say it: there these functions change nothing and trust the
caller.
"""

from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp

from optx_sync.comm import shards
from optx_sync.comm.collectives import (
    ALONE,
    AxisName,
    UnequalError,
    VaryingTypeError,
    check_axis_name,
    checked_axes,
    is_mapped,
    psum,
    vary,
    varying_axes,
)
from optx_sync.core.shapes import Array, Bool
from optx_sync.core.trees import Tree, is_slices, path_name, values_of

SameTree = TypeVar("SameTree")


def localize(tree: SameTree, axis_name: AxisName) -> SameTree:
    """Mark parameters as varying (`pcast`), so that their gradients stay local.

    In `jax.shard_map(check_vma=True)`, the default, autodiff by itself sums the
    gradient of a replicated parameter over the mesh. With respect to the result of
    `localize`, which varies over `axis_name`, `jax.grad` gives each replica its own
    gradient, as in other contexts. Of a gradient that is summed already it makes one
    that a mean over N replicas leaves N times too large: call it on the parameters,
    before `jax.grad`. The values do not change and nothing is sent. In
    `jax.pmap`, `jax.vmap` and under `check_vma=False` it is the identity.

    Args:
        tree: A tree of arrays, usually the parameters.
        axis_name: The mapped axis, or a tuple of them.

    Returns:
        The same tree, varying over `axis_name`.

    Raises:
        ValueError: `axis_name` is not bound.
        TypeError: `axis_name` is not a str or a tuple of them.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> def loss(w, x):
        ...     return jnp.mean(w * x)
        >>> def local_gradient(w, x):
        ...     return jax.grad(loss)(oxs.localize(w, "data"), x)
        >>> w, x = jnp.float32(2), jnp.array([[1.0], [3.0]])
        >>> jax.vmap(local_gradient, axis_name="data", in_axes=(None, 0))(w, x)
        Array([1., 3.], dtype=float32)
    """
    axes = checked_axes(axis_name)
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


def localize_where_mapped(tree: SameTree, axis_name: AxisName) -> SameTree:
    """`localize` where the axis is mapped, elsewhere the identity: for `init`."""
    return localize(tree, axis_name) if is_mapped(axis_name) else tree


def vary_like(tree: SameTree, reference: Tree) -> SameTree:
    """Make each leaf vary over the axes over which its counterpart in `reference` does.

    The branches of a conditional must agree in their types, and so must a state from
    step to step; but a reduced array no longer varies. A leaf without a counterpart
    stays as it is.
    """
    axes = _axes_by_path(reference)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: vary(x, axes.get(path, ())), tree
    )


def vary_with(tree: SameTree, reference: Tree) -> SameTree:
    """Make each leaf vary over all axes over which any leaf of `reference` varies.

    For a state computed from `reference`: its scalars may start as constants, but
    depend on all of that tree a step later.
    """
    axes = axes_of(reference)
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


def axes_of(tree: Tree) -> frozenset[str]:
    """The manual mesh axes over which any leaf varies."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))


_SUMMED = (
    "Inside jax.shard_map(check_vma=True) autodiff has already summed the gradient of "
    "a replicated parameter, unless this program has averaged it before (oxs.reduce, "
    "jax.lax.pmean); reducing it again would be wrong."
)


def require_local(
    tree: Tree,
    axis_name: AxisName,
    what: str = "leaf",
    mend: str | None = None,
    why: str = _SUMMED,
) -> None:
    """Refuse a tree with a leaf that is known to be equal on all replicas already.

    Autodiff or the user has reduced such a leaf, and reducing it again would be
    silently wrong. `why` says how that came, and `mend` what the user can do.
    """
    for axis, path, kind in _leaves_that(tree, axis_name, varies=False):
        mend = mend or (
            f"Either localize the parameters, `params = oxs.localize(params, "
            f"{axis_name!r})` before jax.grad, so that gradients stay local (a summed "
            "gradient itself, localized, would count N times); or, if it is reduced on "
            "purpose, say so: cross_shard(..., grads='summed') or cross_shard(..., "
            "grads='averaged')."
        )
        raise VaryingTypeError(
            f"The {what} at {path} does not vary over the mesh axis {axis!r}: its type "
            f"is {kind}. {why} {mend}"
        )


def require_reduced(tree: Tree, axis_name: AxisName, grads: str) -> None:
    """Refuse a tree with a leaf that still varies over the axis (check_vma=True)."""
    for axis, path, kind in _leaves_that(tree, axis_name, varies=True):
        raise VaryingTypeError(
            f"grads={grads!r} says that the gradients have been reduced already, but "
            f"the gradient at {path} varies over the mesh axis {axis!r}: its type is "
            f"{kind}. Make all leaves local with `params = oxs.localize(params, "
            f"{axis_name!r})` before jax.grad and use grads='local', or reduce this "
            "one first with oxs.reduce."
        )


def require_varying(
    tree: Tree, reference: Tree, axis_name: AxisName, what: str
) -> None:
    """Refuse a state that does not vary over a mesh axis over which parameters do.

    A center is equal only over the workers' axis, `axis_name`. If the parameters vary
    over a second manual axis, as shards do, so must the center (check_vma=True).
    """
    axes, own = _axes_by_path(reference), set(check_axis_name(axis_name))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        missing = axes.get(path, frozenset()) - varying_axes(leaf) - own
        if missing:
            raise UnequalError(
                f"The parameter at {path_name(path)} varies over the mesh axes "
                f"{sorted(missing)}, but the {what} in the state does not. Place the "
                "state as the parameters are: oxs.by_hand.state_specs(tx, params, "
                "param_specs, worker_axis) with these axes in param_specs, or call "
                "init where the axes are mapped."
            )


def axes_of_shards(tree: Tree, axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes over which one worker may be sharded by hand.

    These are all manual axes besides `axis_name`; under check_vma=True, only those over
    which a leaf of the tree varies.
    """
    own, varying = check_axis_name(axis_name), axes_of(tree)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    others = (axis for axis in manual if axis not in own)
    return tuple(a for a in others if a in varying or not checked_axes(a))


def norm_axes(
    tree: Tree, axis_name: AxisName, shard_axes: AxisName | None
) -> tuple[str, ...]:
    """The mesh axes over which a replica's sums of squares must be summed for its norm.

    `shard_axes` are the axes over which the user has sharded a replica by hand. `None`
    is refused where there may be such axes: shards that know only their own norms would
    decide differently.
    """
    if shard_axes is not None:
        return check_axis_name(shard_axes or ALONE)
    inside = shards.axes_inside()
    unclear = not inside and axes_of_shards(tree, axis_name)
    if unclear:
        raise ValueError(
            f"This exchange compares whole arrays of replicas along {axis_name!r}, but "
            f"they may be in shards over the mesh axes {list(unclear)}, too. Pass "
            f"shard_axes={unclear!r} if they are, for sums over the shards, or "
            "shard_axes=() if each position there is a replica of its own."
        )
    return inside


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over those of the mesh axes over which the array may vary."""
    axes = tuple(a for a in axes if a in varying_axes(x) or not checked_axes(a))
    return psum([x], axes)[0] if axes else x


def sum_shards(x: jax.Array, like: jax.Array) -> jax.Array:
    """The sum over the mesh axes over which `x` varies but `like` does not.

    It completes sums over an array in shards, where types say over which axes it varies
    (check_vma=True).
    """
    return sum_over(x, tuple(sorted(varying_axes(x) - varying_axes(like))))


def everywhere(
    flag: Bool[Array, ""], like: Tree, axis_name: AxisName
) -> Bool[Array, ""]:
    """Whether the flag holds on all devices that hold shards of one worker."""
    axes = axes_of_shards(like, axis_name)
    if not axes:
        return flag
    failed = localize((~flag).astype(jnp.int32), axes)
    return sum_over(failed, axes) == 0


def _axes_by_path(tree: Tree) -> dict[tuple[object, ...], frozenset[str]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {path: varying_axes(leaf) for path, leaf in pairs}


def _leaves_that(
    tree: Tree, axis_name: AxisName, varies: bool
) -> Iterator[tuple[str, str, object]]:
    """(axis, path, type) of each leaf that varies over a checked axis, or does not."""
    for axis in checked_axes(axis_name):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_slices):
            x = values_of(leaf)
            if (axis in varying_axes(x)) == varies:
                yield axis, path_name(path), jax.typeof(x)


def in_turn(
    sooner: list[jax.Array], later: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays, of which the compiler computes the later ones after the sooner.

    So that what the sooner ones were made of need no longer be in memory. Only arrays
    that vary over the same axes are held up: a barrier gives all one type.
    """
    both = [*sooner, *later]
    axes = varying_axes(both[0]) if both else frozenset()
    alike = [place for place, x in enumerate(both) if varying_axes(x) == axes]
    held = jax.lax.optimization_barrier([both[place] for place in alike])
    for place, x in zip(alike, held, strict=True):
        both[place] = x
    return both[: len(sooner)], both[len(sooner) :]
