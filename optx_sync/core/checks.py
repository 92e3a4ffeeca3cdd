# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the wrappers, and explanations of JAX's own errors."""

import contextlib
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from optx_sync.core import trees
from optx_sync.core.slices import IndexedSlices, check_rows
from optx_sync.core.trees import Tree

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Options = TypeVar("Options")


def shows_call(
    call: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Raise a TypeError that shows `call` for arguments that do not fit a function.

    Nor fits what is given as `inner`, the wrapped optimizer, and is no transformation.
    """
    return lambda function: _showing(call, function)


def _showing(
    call: str, function: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            known = _keywords(kwargs, signature)
            raise TypeError(
                f"{function.__name__}: {error}.{known} Write for example {call}."
            ) from None
        if "inner" in given:
            trees.check_transformation(given["inner"], "inner", call)
        return function(*args, **kwargs)

    return checked


def _keywords(given: Iterable[str], signature: inspect.Signature) -> str:
    """The keyword probably meant by one that a function lacks, or all it has."""
    unknown = [name for name in given if name not in signature.parameters]
    if not unknown:
        return ""
    near = difflib.get_close_matches(unknown[0], signature.parameters, 1)
    if near:
        return f" Did you mean {near[0]}?"
    return f" Its arguments are {', '.join(signature.parameters)}."


def check_inner(
    inner: Any, call: str, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """The wrapped transformation; a TypeError that shows `call` for anything else."""
    trees.check_transformation(inner, name, call)
    return optax.with_extra_args_support(inner)


def check_function(name: str, function: object, mend: str) -> None:
    """Refuse what cannot be called, where a function is asked for."""
    if not callable(function):
        raise TypeError(
            f"{name} must be a function; got one of type {type(function).__name__}. "
            f"{mend}"
        )


def check_rate(learning_rate: object) -> None:
    """Refuse a learning rate that is neither a number nor a schedule."""
    if not callable(learning_rate):
        mend = "Pass a number, or an Optax schedule."
        interval("(-inf, inf)", mend, learning_rate=learning_rate)


def integer(name: str, number: object, mend: str, least: int = 1) -> int:
    """Check a count and return it as an int; NumPy integers are accepted.

    Raises TypeError if it is no integer, ValueError if it is below `least` or at least
    2**31: inside a step it is compared with int32 counters.
    """
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(
            f"{name} must be an integer, and not traced; got {trees.brief(number)}. "
            f"{mend}"
        )
    if not least <= number < 2**31:
        raise ValueError(
            f"{name} must be {least} or more, and below 2**31; got {number}. {mend}"
        )
    return int(number)


def check_seed(seed: object, least: int = -(2**31)) -> int:
    """Check the seed of a random order and return it as an int."""
    return integer("seed", seed, "Pass for example 0, the same on all workers.", least)


def interval(within: str, mend: str = "", **values: object) -> None:
    """Refuse what is no number in an interval in the usual notation, "[0, 1)".

    NaN lies in none. Of a traced value only the shape is checked.

    Raises TypeError for what is no real number, ValueError for one outside of the
    interval, and for an array of several.
    """
    for name, value in values.items():
        real = isinstance(value, numbers.Real | jax.Array | np.ndarray)
        real = real and not isinstance(value, bool)
        if not (real and _lies_in(value, within)):
            wrong = ValueError if real else TypeError
            raise wrong(
                f"{name} must be a number in {within}; got {trees.brief(value)}. {mend}"
            )


def _lies_in(number: Any, within: str) -> bool:
    """Whether a number, or an array of one, may lie in the interval."""
    low, high = map(float, within[1:-1].split(","))
    ends = [low] * (within[0] == "[") + [high] * (within[-1] == "]")
    if jnp.shape(number) or isinstance(number, jax.core.Tracer):
        return not jnp.shape(number)
    number = np.asarray(number)  # JAX would trace the comparison.
    return bool(low < number < high or number in ends)


def floating(name: str, dtype: DTypeLike | None, bits: int = 8) -> np.dtype | None:
    """A dtype; a ValueError if it is not floating, or too narrow. `None` stays."""
    if dtype is None:
        return None
    dtype = jnp.dtype(dtype)
    if not trees.is_floating(dtype) or jnp.finfo(dtype).bits < bits:
        raise ValueError(
            f"{name} must be a floating dtype of {bits} bits or more; got {dtype}. "
            "Pass for example jnp.float32."
        )
    return dtype


def one_of(name: str, value: object, kinds: object) -> None:
    """Refuse a value that a `Literal` does not list."""
    *some, last = map(repr, get_args(kinds))
    wanted = f"one of {', '.join(some)} and" if len(some) > 1 else f"{some[0]} or"
    if not isinstance(value, Hashable) or value not in get_args(kinds):
        raise ValueError(f"{name} must be {wanted} {last}; got {value!r}.")


def check_params(params: Tree) -> None:
    """Refuse parameters among other objects: only arrays are trained."""
    check_no_train_state(params)
    for leaf in jax.tree.leaves(params, is_leaf=_is_nnx_module):
        if _is_nnx_module(leaf):
            raise TypeError(
                f"init takes the parameters as arrays; got {type(leaf).__name__}, a "
                "Flax NNX module. Pass nnx.state(module, nnx.Param), as nnx.Optimizer "
                "does; what this package has for Flax is optx_sync.flax."
            )
    trees.check_arrays(params, "The parameter")
    for path, leaf in trees.leaves_with_names(params):
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            raise TypeError(
                f"The parameter at {path} is {leaf}, an integer of Python, of which "
                "JAX makes an integer array: it cannot be trained. Write "
                f"jnp.float32({leaf})."
            )


def check_no_train_state(params: Tree) -> None:
    """Refuse a Flax training state in place of its parameters."""
    if hasattr(params, "params") and hasattr(params, "opt_state"):
        name = type(params).__name__
        raise TypeError(
            f"What is wanted are parameters; got a {name}, which holds them beside the "
            "optimizer's state and counters. Pass state.params; to start a whole "
            f"{name} use oxs.Workers(n, axis_name).start(state)."
        )


def refuse_placeholder(params: Tree, what: str) -> None:
    """Refuse Optax's tree without leaves, which does not say how a state is divided."""
    if trees.is_placeholder(params):
        raise ValueError(
            f"optax.tree.map_params does not know the state of {what}, which lies in "
            "parts or pieces: it asks init for a state of no parameters. For specs "
            "take oxs.by_hand.state_specs(tx, params, param_specs, axis)."
        )


def _is_nnx_module(x: object) -> bool:
    # By name: Flax is optional, and not imported here.
    return any(
        parent.__name__ == "Module" and parent.__module__.startswith("flax.nnx")
        for parent in type(x).__mro__
    )


def check_one_worker(counter: ArrayLike, kept: Tree, params: Tree | None) -> None:
    """Refuse a worker axis on a state or parameters that should be one worker's.

    `counter` is one of the state's counters, `kept` a tree in it like the parameters.
    """
    if jnp.ndim(counter):
        raise ValueError(
            "A step takes the state of one worker; the counters of this one have shape"
            f" {jnp.shape(counter)}. If a step has returned them so, its out_axes lack"
            " the state's axes: `out_axes=(0, axes)`, as in in_axes. Otherwise stack"
            " the state by `axes = oxs.by_hand.state_axes(tx, params)`,"
            " `oxs.by_hand.replicate(tx.init(params), n, axes)` and in_axes=axes, or"
            " map over all of one that is stacked whole (in_axes=0). Inside"
            " jax.shard_map take the worker axis off: `oxs.by_hand.first(state,"
            " axes)`. oxs.by_hand.map_workers does this."
        )
    if params is None:
        return
    found = dict(trees.leaves_with_names(params))
    for path, leaf in trees.leaves_with_names(kept):
        if leaf is None or found.get(path) is None:
            continue
        shape, own = jnp.shape(leaf), jnp.shape(found[path])
        where = f"The parameter at {path} has shape {own}, but in the state it has"
        if shape != own and shape[1:] == own and shape[0] > 1:
            raise ValueError(
                f"{where} {shape}: tx.init got the parameters of {shape[0]} workers. "
                "It takes those of one: tx.init(params) before oxs.by_hand.replicate."
            )
        if shape != own:
            raise ValueError(
                f"{where} {shape}. Inside jax.shard_map take the worker axis off both,"
                " `oxs.by_hand.first(params)` and `oxs.by_hand.first(state,"
                " oxs.by_hand.state_axes(tx, params))`, or let oxs.by_hand.map_workers"
                " do it; the state is that of tx.init for one worker's parameters."
            )


_LOOKAHEAD = (
    "optax.lookahead takes optax.LookaheadParams with gradients of its fast ones alone,"
    " and a wrapper gradients like the parameters. Lookahead in or around a wrapper is "
    "oxs.diloco(inner, None, outer=optax.sgd(0.5), communication_period=5)."
)


def check_grads(grads: Tree, params: Tree | None) -> None:
    """Refuse gradients that are not floating, or do not match the parameters.

    A leaf is an array, an `IndexedSlices` or `None`. A mismatch names its path.
    """
    found = dict(trees.leaves_with_names(grads))
    for path, grad in found.items():
        if grad is None:
            continue
        dtype = jnp.result_type(trees.values_of(grad))
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"The gradient at {path} has dtype {dtype}; gradients must be "
                "floating. Leave integer parameters out (optax.masked), or pass None."
            )
    if params is None:
        return
    expected = dict(trees.leaves_with_names(params))
    for path in [*expected, *found]:
        if (path in expected) != (path in found):
            where = "gradients" if path in expected else "parameters"
            mend = "Differentiate with respect to the same tree; a leaf without a "
            mend += "gradient is None."
            if isinstance(params, optax.LookaheadParams):
                mend = _LOOKAHEAD
            raise ValueError(
                f"The gradients do not have the structure of the parameters: {path} "
                f"is missing in the {where}. {mend}"
            )
        grad, param = found[path], expected[path]
        if grad is None or param is None:
            continue
        if isinstance(grad, IndexedSlices):
            check_rows(grad, param, path)
        elif jnp.shape(grad) != jnp.shape(param):
            raise ValueError(
                f"The gradient at {path} has shape {jnp.shape(grad)}, which does not "
                f"match its parameter's shape {jnp.shape(param)}."
            )


def fill_missing(updates: Tree, params: Tree | None) -> Tree:
    """Zeros for the updates that are `None`, so that `optax.apply_updates` works."""
    if params is None:
        return updates
    return jax.tree.map(
        lambda update, param: (
            jnp.zeros_like(param) if update is None and param is not None else update
        ),
        updates,
        params,
        is_leaf=trees.is_gradient_leaf,
    )


@contextlib.contextmanager
def explains_inner(grads: Tree) -> Iterator[None]:
    """Note how to mend it when a transformation cannot run on these gradients.

    JAX's own messages, about a container that is no array, a dtype without arithmetic
    or the types of a conditional, do not lead there. Wrappers inside of each other
    note it once.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        leaves = trees.leaves_with_names(grads)
        rows = [name for name, leaf in leaves if trees.is_slices(leaf)]
        notes = []
        if rows:
            notes.append(
                f"The gradient at {rows[0]} is row-sparse (IndexedSlices). Where a "
                "transformation takes arrays only, use an optimizer of oxs.optimizers "
                "(adam, custom_adam, adagrad, ftrl, ...), run a stateless one by "
                "oxs.on_values, or pass the gradient's to_dense(rows)."
            )
        if missing := [name for name, leaf in leaves if leaf is None]:
            notes.append(
                f"The gradient at {missing[0]} is None. Optimizers of oxs.optimizers "
                "leave such a parameter alone; others mostly take arrays only: pass "
                "zeros, or leave the parameter out with optax.masked."
            )
        if isinstance(error, AttributeError) and error.name == "fast":
            notes.append(_LOOKAHEAD)
        arrays = [trees.values_of(leaf) for _, leaf in leaves if leaf is not None]
        if any(jax.typeof(x).manual_axis_type.varying for x in arrays):
            notes.append(
                "Where a conditional or loop of a transformation joins values that"
                " differ between the workers with constants, which jax.shard_map"
                " refuses by default (optax.contrib.reduce_on_plateau does so), map the"
                " step by oxs.Workers or oxs.by_hand.map_workers, or call"
                " jax.shard_map(..., check_vma=False); or hand in what is equal on all"
                " replicas, such as value=oxs.reduce(value, axis_name) where the state"
                " is equal, too."
            )
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def require_state(init: Callable[[Tree], Tree], state: Tree, params: Tree) -> None:
    """Refuse a state whose kinds are not those of one that `init` gives."""
    try:
        expected = jax.eval_shape(init, params)
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # The step itself will say what is wrong.
    if trees.kinds_of(expected) != trees.kinds_of(state):
        where, got, wanted = _difference(state, expected, "state") or _OTHER
        raise ValueError(_NOT_OF_THIS.format(where, got, wanted))


_OTHER = "state", "of other parts", "as it should be"
_NOT_OF_THIS = (
    "The state is not one of this transformation: {} is {}; in that of tx.init(params) "
    "it is {}. Another transformation has made it, or this one with other arguments "
    "(fragments, overlap, exchange, inner, outer) or parameters, such as shards. Start "
    "with tx.init(params); go on with a saved state under the arguments that it was "
    "made with."
)


@contextlib.contextmanager
def explains_state(
    init: Callable[[Tree], Tree], state: Tree, params: Tree
) -> Iterator[None]:
    """Explain a step that fails because its state is not one that `init` gives."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if params is None:
            raise
        try:
            expected = jax.eval_shape(init, params)
        except (AttributeError, TypeError, ValueError):
            raise error from None
        found = _difference(state, expected, "state")
        if found is None and isinstance(error, TypeError):
            found = _other_shape(state, expected)
        if found is None:
            raise
        raise ValueError(_NOT_OF_THIS.format(*found)) from error


def _difference(tree: Tree, expected: Tree, where: str) -> tuple[str, str, str] | None:
    """The first difference in form of two states: its name, what is there, what not."""
    if jax.tree.structure(tree) == jax.tree.structure(expected):
        return None
    parts = isinstance(expected, tuple) and type(tree) is type(expected)
    if parts and len(tree) == len(expected):
        names = [f".{name}" for name in getattr(expected, "_fields", ())]
        names = names or [f"[{i}]" for i in range(len(expected))]
        for name, part, like in zip(names, tree, expected, strict=True):
            if found := _difference(part, like, where + name):
                return found
    if type(tree) is type(expected) and not isinstance(tree, tuple):
        return where, _describe(tree), "one with other leaves"
    return where, _describe(tree), _describe(expected)


def _other_shape(tree: Tree, expected: Tree) -> tuple[str, str, str] | None:
    """The first array of another shape, in states of one form."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), like in zip(leaves, jax.tree.leaves(expected), strict=True):
        if jnp.shape(x) != like.shape:
            where = "state" + jax.tree_util.keystr(path)
            return where, f"of shape {jnp.shape(x)}", f"{like.shape}"
    return None


def _describe(tree: Tree) -> str:
    if hasattr(tree, "dtype"):
        return "an array"
    if type(tree) is tuple:
        return f"a tuple of {len(tree)}" if tree else "empty"
    return f"of type {type(tree).__name__}"


# Rows of a condition on the options, and what is wrong where it is so and how to mend
# it: a template for `str.format` in which `{0}` stands for the options.
Refused: TypeAlias = tuple[tuple[Callable[[Options], object], str], ...]


def refuse(options: Options, table: Refused[Options]) -> None:
    """Raise a ValueError with the sentence of the first row whose condition is so."""
    for condition, sentence in table:
        if condition(options):
            raise ValueError(sentence.format(options))
