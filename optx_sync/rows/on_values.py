# SPDX-License-Identifier: Apache-2.0
"""Run an Optax transformation on the values of row-sparse gradients."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from optx_sync.core import trees
from optx_sync.core.slices import rebuild, unique_rows
from optx_sync.core.trees import Tree

Tables: TypeAlias = dict[int, jax.Array]  # by the numbers of their leaves


def on_values(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Run a stateless Optax transformation on the values of row-sparse gradients.

    Duplicate rows are added up first, so that clips and norms are those of the dense
    gradient. Dense leaves pass through ``tx`` as usual. A transformation that maps zero
    to zero gives the result of the dense gradient, except for means over a leaf
    (``optax.clip_by_block_rms``): these are taken over the k entries of the slices,
    including the zero entries in place of duplicates, and not over the table.

    ``tx`` gets no parameters of a table, and raises if it uses them: weight decay or a
    trust ratio concerns all rows. Mask such a table out with ``optax.masked``.

    Args:
        tx: a transformation without state, or with scalars only (a schedule's count).

    Raises:
        TypeError: at ``init`` or ``update``, if ``tx`` has arrays as state; at
            ``update``, if it uses the parameters of a table with row-sparse gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.on_values(optax.clip(0.5))
        >>> grads = oxs.IndexedSlices(jnp.array([3, 3]), jnp.array([0.25, 0.75]))
        >>> clipped, _ = tx.update(grads, tx.init(jnp.zeros([9])))
        >>> clipped.values.tolist()
        [0.5, 0.0]
    """
    trees.check_transformation(tx, "tx", "oxs.on_values(optax.clip(1.0))")
    tx = optax.with_extra_args_support(tx)

    def init(params):
        state = tx.init(params)
        _refuse_array_state(state)
        return state

    def update(updates, state, params=None, **extra_args):
        _refuse_array_state(state)
        updates = unique_rows(updates)
        leaves, structure = jax.tree.flatten(updates, is_leaf=trees.is_gradient_leaf)
        values = structure.unflatten(map(trees.values_of, leaves))
        if params is None:
            values, state = tx.update(values, state, None, **extra_args)
        else:
            # A transformation may look at the dtype of all parameters, as
            # optax.inject_hyperparams does, but not at a table's numbers.
            kept = structure.flatten_up_to(params)
            tables = {
                at: jnp.zeros(leaf.values.shape, kept[at].dtype)
                for at, leaf in enumerate(leaves)
                if trees.is_slices(leaf)
            }
            step = functools.partial(tx.update, values, state, **extra_args)
            run = functools.partial(_with_tables, step, structure, kept)
            values, state = run(tables)
            _refuse_use(run, tables)
        updates = structure.unflatten(
            rebuild(leaf._words, new) if trees.is_slices(leaf) else new
            for leaf, new in zip(leaves, structure.flatten_up_to(values), strict=True)
        )
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_array_state(state: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, int | float):
            continue
        number = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_
        if leaf.ndim or not number:
            raise TypeError(
                "on_values takes a transformation without state, or with scalars only; "
                f"got one whose state has a {leaf.dtype}{list(leaf.shape)} at "
                f"{trees.path_name(path)}. Use an optimizer that knows row-sparse "
                "gradients, such as oxs.optimizers.adagrad, or dense gradients."
            )


def _with_tables(step, structure, kept, tables: Tables) -> tuple[Tree, Tree]:
    """The step with these arrays in place of the tables' parameters."""
    seen = [tables.get(at, leaf) for at, leaf in enumerate(kept)]
    return step(structure.unflatten(seen))


def _refuse_use(run: Callable[[Tables], tuple[Tree, Tree]], tables: Tables) -> None:
    """Refuse a transformation whose result depends on the tables' parameters.

    Nothing declares it of an Optax transformation: it is traced once more.
    """
    if not tables:
        return
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), tables)
    try:
        # A result that does not depend on a mapped argument is unmapped.
        jax.eval_shape(jax.vmap(run, out_axes=None), batch)
    except ValueError as error:
        raise TypeError(
            "on_values runs a transformation on the values of a row-sparse gradient; "
            "it cannot use the parameters of that table, of which most rows are not "
            "touched. Leave the table out with optax.masked, or use a dense gradient."
        ) from error
