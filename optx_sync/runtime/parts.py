# SPDX-License-Identifier: Apache-2.0
"""Variables split among several servers, and joined again."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.trees import path_name


def partition(params: Any, num_parts: int) -> list[Any]:
    """Split the variables into trees of about equal size, `None` where one has none.

    Args:
        params: A tree of arrays.
        num_parts: How many parts, at most one for each variable.

    Returns:
        Trees like `params`; each variable is in one of them.

    Raises:
        ValueError: More parts than variables.

    Example:
        >>> import numpy as np
        >>> from optx_sync.runtime import partition
        >>> parts = partition({"a": np.zeros(9), "b": np.zeros(5), "c": np.zeros(4)}, 2)
        >>> [[name for name, x in part.items() if x is not None] for part in parts]
        [['a'], ['b', 'c']]
    """
    leaves, treedef = jax.tree.flatten(params)
    if not 1 <= num_parts <= len(leaves):
        raise ValueError(
            f"{len(leaves)} variables cannot be split among {num_parts} servers: each "
            "needs one or more. Pass a smaller num_servers."
        )
    if num_parts == 1:
        return [params]
    owner, sizes = [0] * len(leaves), [0] * num_parts
    bytes_of = [math.prod(jnp.shape(x)) * x.dtype.itemsize for x in leaves]
    filled = [0] * num_parts
    for i in sorted(range(len(leaves)), key=lambda i: -bytes_of[i]):
        # Variables of size 0 must not leave a part empty.
        owner[i] = min(range(num_parts), key=lambda part: (sizes[part], filled[part]))
        sizes[owner[i]] += bytes_of[i]
        filled[owner[i]] += 1
    return [
        treedef.unflatten([x if owner[i] == k else None for i, x in enumerate(leaves)])
        for k in range(num_parts)
    ]


def join_parts(parts: list[Any], params: Any) -> Any:
    """The whole tree from the parts that `partition` made, in the dtypes of `params`.

    Args:
        parts: The parts, each with arrays of its own.
        params: The tree that was split; its structure and dtypes are those of the
            result.

    Returns:
        A tree like `params`.
    """
    found = {}
    for part in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            found[path_name(path)] = leaf
    return jax.tree_util.tree_map_with_path(
        lambda path, param: np.asarray(found[path_name(path)]).astype(param.dtype),
        params,
    )
