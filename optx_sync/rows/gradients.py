# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: each replica's own gradients, row-sparse where tables are read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.varying import localize
from optx_sync.core.checks import check_function
from optx_sync.core.slices import rebuild
from optx_sync.core.trees import Tree, names_of, path_name
from optx_sync.rows.lookup import _gather, _GatheredRows


def value_and_grad(
    loss: Callable[..., Any],
    rows: Tree = None,
    has_aux: bool = False,
    *,
    axis_name: AxisName | None = None,
) -> Callable[..., tuple[Any, Tree]]:
    """``jax.value_and_grad`` of each replica's own loss, row-sparse for tables.

    With ``axis_name`` each replica gets its own gradients, as this package's wrappers
    need them, also of parameters that are equal on all replicas: in ``jax.shard_map``
    autodiff would otherwise sum these (``oxs.localize`` prevents it).

    With ``rows`` the rows of a table that a batch names are gathered once, and the loss
    sees and is differentiated with respect to these alone: no array of the table's
    size is made. Inside the loss a table can be read only by
    ``oxs.take(params["embedding"], ids)``. Its gradient is an
    ``IndexedSlices`` as ``sum_duplicates`` leaves it, sorted and unique, with one entry
    for each id that ``rows`` returned.

    Args:
        loss: ``loss(params, *args, **kwargs)``, a scalar, or with ``has_aux`` a pair
            of a scalar and anything.
        rows: a prefix of the parameters' tree. A leaf is a function of the loss's
            other arguments, ``fn(*args, **kwargs)``, that returns all ids (integers of
            any shape) which the loss will look up in the tables below that leaf.
            Parameters with None, or without an entry, have dense gradients.
        has_aux: as in ``jax.value_and_grad``.
        axis_name: the mapped axis along which the replicas lie, or a tuple of them.

    Returns:
        A function of the loss's arguments that returns ``(value, grads)``, or
        ``((value, aux), grads)`` with ``has_aux``.

    Raises:
        TypeError: if a leaf of ``rows`` is not a function, if ids are not integers, if
            the loss uses a table other than by ``oxs.take``, or if ``axis_name`` is
            not a str or a tuple of them.
        ValueError: if ``rows`` names what the parameters do not have, if known ids are
            out of the table's range (in compiled code such ids are dropped), or if
            ``axis_name`` is not mapped.

    Example:
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> def loss(params, batch):
        ...     return jnp.sum(oxs.take(params["embedding"], batch["ids"]) ** 2)
        >>> grad_fn = oxs.value_and_grad(loss, rows={"embedding": lambda b: b["ids"]})
        >>> params = {"embedding": jnp.ones([1000, 2])}
        >>> value, grads = grad_fn(params, {"ids": jnp.array([5, 9])})
        >>> float(value), grads["embedding"].values.tolist()
        (4.0, [[2.0, 2.0], [2.0, 2.0]])
    """
    check_function("loss", loss, "Pass for example value_and_grad(loss, rows=...).")
    named = jax.tree_util.tree_leaves_with_path(rows)
    for path, fn in named:
        mend = "Pass for example rows={'embedding': lambda batch: batch['ids']}."
        check_function(f"rows at {path_name(path)}", fn, mend)
    if axis_name is not None:
        check_axis_name(axis_name)

    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        if axis_name is not None:
            params = localize(params, axis_name)
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in paths]
        for prefix, fn in named:
            # By name, as a dict may describe a module.
            wanted = names_of(prefix)
            below = [
                at
                for at, (path, _) in enumerate(paths)
                if names_of(path)[: len(wanted)] == wanted
            ]
            if not below:
                raise ValueError(
                    f"rows names {path_name(prefix)}, where the parameters have no "
                    f"array; they have {[path_name(path) for path, _ in paths]}."
                )
            ids = fn(*args, **kwargs)
            for at in below:
                path, table = paths[at]
                leaves[at] = _gather(table, ids, path_name(path))
        of_arrays = functools.partial(_of_arrays, loss, structure, leaves, args, kwargs)
        arrays = [x.values if isinstance(x, _GatheredRows) else x for x in leaves]
        value, grads = jax.value_and_grad(of_arrays, has_aux=has_aux)(arrays)
        grads = [
            rebuild(x.words, grad) if isinstance(x, _GatheredRows) else grad
            for x, grad in zip(leaves, grads, strict=True)
        ]
        return value, structure.unflatten(grads)

    return run


def _of_arrays(loss, structure, leaves, args, kwargs, arrays):
    """The loss as a function of the leaves' arrays: rows in place of tables."""
    leaves = [
        dataclasses.replace(x, values=array) if isinstance(x, _GatheredRows) else array
        for x, array in zip(leaves, arrays, strict=True)
    ]
    return loss(structure.unflatten(leaves), *args, **kwargs)
