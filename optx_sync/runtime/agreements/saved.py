# SPDX-License-Identifier: Apache-2.0
"""The state of an agreement as a checkpoint holds it, described and compared."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optx_sync.core.trees import Tree, some
from optx_sync.runtime.messages import Arrays
from optx_sync.state.leaves import is_key, on_data

Notes: TypeAlias = dict[str, Any]  # what JSON can hold


def numbered(tree: Tree) -> dict[str, np.ndarray]:
    """The leaves of any state, numbered, as a checkpoint can hold them."""
    leaves = jax.tree.leaves(jax.tree.map(_words, tree))
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}


def _words(x: Any) -> Any:
    """A typed key as the words that it is made of; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def like(tree: Tree, leaves: dict[str, np.ndarray]) -> Tree:
    """The state from its numbered leaves."""
    old, treedef = jax.tree.flatten(tree)
    shapes = {str(i): jnp.shape(_words(x)) for i, x in enumerate(old)}
    found = {name: jnp.shape(x) for name, x in leaves.items()}
    if shapes != found:
        raise ValueError(
            "What was saved is the state of another optimizer: its arrays have the "
            f"shapes {some([*map(str, found.values())])}, not "
            f"{some([*map(str, shapes.values())])}. Pass the optimizer of before, or "
            "resume=False to start afresh."
        )
    return treedef.unflatten(
        on_data(lambda _, i=i: jnp.array(leaves[str(i)]), x) for i, x in enumerate(old)
    )


def described(kind: str, formulas: Sequence[Callable[..., object]], state: Tree) -> str:
    """A description for a checkpoint: formulas by name, an optimizer by its state."""
    names = [
        f"{f.__module__}.{f.__qualname__}" if hasattr(f, "__qualname__") else repr(f)
        for f in formulas
    ]
    leaves, treedef = jax.tree.flatten(state)
    shapes = [f"{jnp.shape(x)} {jnp.result_type(x)}" for x in leaves]
    return json.dumps([kind, names, str(treedef), shapes])


def difference(saved: str, own: str) -> tuple[str, str]:
    """What two descriptions by `described` differ in, as words for a message."""
    pairs = zip(json.loads(saved), json.loads(own), strict=True)
    for say, (one, other) in zip(_SAID, pairs, strict=True):
        if say(one) != say(other):
            return say(one), say(other)
    return "another rule or optimizer, or of variables of other names", "its own"


_SAID: tuple[Callable[[Any], str], ...] = (
    {"center": "a center rule", "sync_replicas": "SyncReplicas"}.__getitem__,
    # A function that was made in another one, by the name of that.
    lambda names: some(
        [*{n.partition(".<locals>")[0]: 0 for n in names if n != "None"}]
    ),
    # Of a treedef the classes.
    lambda treedef: "a state of " + some(re.findall(r"namedtuple.(\w+)", treedef)),
    lambda shapes: "a state with the arrays " + some(shapes),
)


def check_saved(center: Arrays, saved: Arrays, is_part: bool = False) -> None:
    """Refuse a checkpoint of other variables, or of other parts of them."""
    here = "this server's part of the parameters" if is_part else "the parameters"
    mend = "Pass another checkpoint_dir, or resume=False to start afresh"
    mend += ", or the fragments of before." if is_part else "."
    unknown = [path for path in saved if path not in center]
    missing = [path for path in center if path not in saved]
    said = [f"it has {some(unknown)}, which are not there"] if unknown else []
    said += [f"it lacks {some(missing)}"] if missing else []
    if said:
        raise ValueError(
            f"The checkpoint is of other variables than {here}: "
            f"{', and '.join(said)}. {mend}"
        )
    for path, array in center.items():
        if array.shape != saved[path].shape:
            raise ValueError(
                f"The checkpoint holds {path} with shape {saved[path].shape}; {here} "
                f"has it with shape {array.shape}. {mend}"
            )
