# SPDX-License-Identifier: Apache-2.0
"""Optax optimizers from a formula for one array: `LeafRule` and `from_rule`.

A `LeafRule` holds the formula for one array and says what happens to rows without a
gradient; `from_rule` applies it to whole trees, as an
`optax.GradientTransformationExtraArgs`. All optimizers made this way behave alike:

* `learning_rate` is a number, a traced scalar, or an Optax schedule, which is called
  with the number of updates so far (0 at the first). It may be negative, as in the
  originals and in Optax; `None`, NaN and infinity are refused.
* The other hyper-parameters are numbers or traced scalars (`optax.inject_hyperparams`).
  They are cast to the slots' dtype before use: in float32, as in TensorFlow, `1 - b1`
  is 0.100000024 for 0.9. Concrete numbers are checked; JAX arrays are not. A decay may
  be 1, as in the originals: its average never changes, and bias correction of a first
  moment then gives 0 / 0.
* Slots of half precision parameters are float32, those of float64 parameters float64.
  The arithmetic is in the slots' dtype; the update is cast to the parameter's dtype.
* A gradient leaf may be `None`: its slots stay as they are and its update is zero (or
  `None` where neither `params` nor a slot gives the shape).
* A gradient leaf may be an `IndexedSlices`, rows of a table. Rows that occur more than
  once are summed first. Then the rule's `rows` says what changes:

  - `"touched"`: the rule updates the named rows and their slots. Nothing else changes,
    and nothing of the table's size is computed.
  - `"decay_all"`: as `"touched"`, and the rule's `decay` updates the slots of all other
    rows.
  - `"all"`: the gradient acts as the dense one, zero in other rows; all rows move.
  - `"refused"`: `update` raises a `TypeError`.

  Rows out of range are dropped. The update is an `IndexedSlices` again (dense for
  `"all"`), which `optax.apply_updates` scatter-adds.
* `params` are needed for row-sparse gradients, and by rules that compute the new
  parameter rather than a step (FTRL, AdagradDA and the proximal optimizers).
* No rule contains a collective: inside `jax.shard_map`, `pmap` and `vmap` it works on
  the local arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optx_sync.core.checks import (
    check_grads,
    check_params,
    check_rate,
    interval,
    one_of,
)
from optx_sync.core.shapes import Array, Float, Int32
from optx_sync.core.slices import DROP, ORDERED, IndexedSlices, like_rows
from optx_sync.core.trees import Tree, at_least_float32, is_gradient_leaf, path_name

Rows = Literal["touched", "decay_all", "all", "refused"]
# One slot of a rule: in a `LeafRule` its initial value, in a state a tree like the
# parameters, in `step` the array of one leaf or some of its rows.
Slot: TypeAlias = Tree


class Step(NamedTuple):
    """Scalars that all arrays of one update share, in the slots' dtype.

    Attributes:
        learning_rate: The rate of this update, a scalar; a schedule's value at `count`.
        count: int32[], updates before this one; 0 at the first.
        hyper: The numbers of the rule's `hyper` as scalars, in order.
        powers: The rule's running `powers`: b^t in the t-th update, b in the first; ()
            if there are none.
    """

    learning_rate: Float[Array, ""]
    count: Any
    hyper: tuple[Float[Array, ""], ...]
    powers: Tree


class NoSlots(NamedTuple):
    """The slots of a rule without slots."""


@dataclasses.dataclass(frozen=True)
class LeafRule:
    """The formula of an optimizer, for one array.

    Attributes:
        step: `step(grad, slots, param, at) -> (update, slots)`, the formula. `grad`,
            `param` (`None` where the caller gave no `params`) and each field of `slots`
            are arrays of one shape and dtype, the whole leaf or some rows of it; `at`
            is a `Step`. `param + update` is the new parameter.
        slots: a NamedTuple of initial values, one field for each slot. In the state the
            same type holds trees like the parameters, in `step` the arrays of one leaf.
        rows: what happens to the rows that an `IndexedSlices` does not name: see the
            module's docstring. `oxs.testing.check_optimizer` holds a rule to it.
        decay: `decay(slots, at) -> slots` for the rows without a gradient; only with
            `rows="decay_all"`.
        hyper: hyper-parameters, which `step` reads as `at.hyper` in the slots' dtype.
        powers: a NamedTuple of numbers whose running powers the state keeps: each
            starts as the number and is multiplied by it after each update (float32
            products, as TensorFlow's `beta1_power`). `step` reads them as `at.powers`.
        needs_params: whether `step` reads `param`.

    Raises:
        TypeError: if `slots` is not a NamedTuple.
        ValueError: if `rows` is unknown, if `rows="decay_all"` comes without `decay`,
            or `decay` with other `rows`.
    """

    step: Callable[[jax.Array, Any, Any, Step], tuple[jax.Array, Any]]
    slots: Tree = NoSlots()  # noqa: RUF009 # a NamedTuple is as immutable as a tuple
    rows: Rows = "refused"
    decay: Callable[[Any, Step], Any] | None = None
    hyper: tuple[ArrayLike, ...] = ()
    powers: Tree = ()
    needs_params: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.slots, "_fields"):
            raise TypeError(
                "slots must be a NamedTuple of initial values; got "
                f"{self.slots!r}. Pass an instance of a `class MySlots(NamedTuple)`."
            )
        one_of("rows", self.rows, Rows)
        if (self.rows == "decay_all") != (self.decay is not None):
            raise ValueError(
                'decay goes with rows="decay_all", and with nothing else; got '
                f"rows={self.rows!r} and decay={self.decay!r}."
            )


class RuleState(NamedTuple):
    """State of every optimizer that `from_rule` makes.

    Attributes:
        update_count: int32[], updates so far.
        powers: The rule's running powers as scalars, which all leaves share; () if
            there are none.
        slots: The rule's NamedTuple, each field a tree like the parameters, of float32
            or wider.
    """

    update_count: Int32[Array, ""]
    powers: Tree
    slots: Tree


def from_rule(
    rule: LeafRule, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """Make an Optax optimizer from a formula for one array.

    Args:
        rule: the formula, its slots, and what it does to rows without a gradient.
        learning_rate: a number, a traced scalar or an Optax schedule; the rule reads
            its value as `at.learning_rate`.

    Returns:
        A transformation over trees of parameters. Extra arguments of `update` are
        accepted and ignored.

    Raises:
        TypeError: if an argument has the wrong type; in `update`, if a gradient is not
            real and floating, or is row-sparse and the rule refuses that.
        ValueError: if `learning_rate` is not finite; in `update`, if gradients,
            parameters and state do not match (the message names the leaf's path), or
            `params` is missing where it is needed.

    Example:
        Sign descent, with one slot that counts how often each element has moved:

        >>> from typing import Any, NamedTuple
        >>> import jax.numpy as jnp
        >>> import optx_sync as oxs
        >>> class SignSlots(NamedTuple):
        ...     moved: Any
        >>> def step(grad, slots, param, at):
        ...     sign = jnp.sign(grad)
        ...     return -at.learning_rate * sign, SignSlots(slots.moved + jnp.abs(sign))
        >>> rule = oxs.optimizers.LeafRule(step, SignSlots(moved=0.0))
        >>> tx = oxs.optimizers.from_rule(rule, 0.5)
        >>> state = tx.init({"w": jnp.zeros(3)})
        >>> updates, state = tx.update({"w": jnp.array([3.0, 0.0, -2.0])}, state)
        >>> print(updates["w"], state.slots.moved["w"])
        [-0.5 -0.   0.5] [1. 0. 1.]
    """
    check_rate(learning_rate)

    def init(params):
        check_params(params)
        dtypes = [slot_dtype(param) for param in jax.tree.leaves(params)]
        widest = max(dtypes, key=lambda d: d.itemsize, default=jnp.dtype(jnp.float32))
        return RuleState(
            update_count=jnp.zeros([], jnp.int32),
            # Copies: an injected b1 is in another state, which may be donated too.
            powers=jax.tree.map(lambda base: jnp.array(base, widest), rule.powers),
            slots=jax.tree.map(
                lambda value: jax.tree.map(
                    lambda p: jnp.full_like(p, value, dtype=slot_dtype(p)), params
                ),
                rule.slots,
            ),
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        leaves, structure = _leaves(updates, state.slots, params)
        if rule.needs_params and params is None:
            raise ValueError(
                "This optimizer sets parameters anew and needs them; got params=None. "
                "Call update(grads, state, params)."
            )
        rate = learning_rate
        if callable(rate):
            rate = rate(state.update_count)
            if jnp.ndim(rate) != 0:
                raise ValueError(
                    "learning_rate must be a schedule of scalars; got shape "
                    f"{jnp.shape(rate)}."
                )
        # The scalars are the same for all leaves: they are traced once for each dtype.
        at = functools.cache(functools.partial(_numbers, rule, rate, state))
        results = [_update_leaf(rule, at, *leaf) for leaf in leaves]
        updates = structure.unflatten([update for update, _ in results])
        columns = [[slots[i] for _, slots in results] for i in range(len(rule.slots))]
        return updates, RuleState(
            update_count=jnp.asarray(optax.safe_increment(state.update_count)),
            powers=jax.tree.map(
                lambda power, base: power * jnp.asarray(base, dtype=power.dtype),
                state.powers,
                rule.powers,
            ),
            slots=type(rule.slots)(*map(structure.unflatten, columns)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


class BetaPowers(NamedTuple):
    """Running powers of Adam and its variants, named as TensorFlow's variables."""

    beta1_power: Slot
    beta2_power: Slot


def bias_corrected_rate(at: Step) -> Float[Array, ""]:
    """Adam's `learning_rate sqrt(1 - b2^t) / (1 - b1^t)`, for rules with BetaPowers."""
    beta1_power, beta2_power = at.powers
    return at.learning_rate * jnp.sqrt(1.0 - beta2_power) / (1.0 - beta1_power)


class Moments(NamedTuple):
    """Slots of Adam and its variants."""

    m: Slot  # running average of gradients
    v: Slot  # of their squares; for `grad_variance_scaled` of (gradient - m)^2


def from_moments(
    step: Callable[[jax.Array, Moments, Any, Step], tuple[jax.Array, Moments]],
    rows: Rows,
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    with_powers: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adam or a variant of it, from its formula, whose `hyper` are (b1, b2, eps).

    With "decay_all" the rows of both averages decay.
    """
    interval("[0, 1]", b1=b1, b2=b2)
    interval("[0, inf)", eps=eps)

    def decay(slots, at):
        b1, b2, _ = at.hyper
        return Moments(slots.m * b1, slots.v * b2)

    rule = LeafRule(
        step,
        Moments(m=0.0, v=0.0),
        rows,
        decay if rows == "decay_all" else None,
        hyper=(b1, b2, eps),
        powers=BetaPowers(b1, b2) if with_powers else (),
    )
    return from_rule(rule, learning_rate)


def soft_threshold(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """Soft thresholding: `x` moved by the threshold towards zero, and no further."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0.0)


def slot_dtype(leaf: Any) -> np.dtype:
    """The dtype of a leaf's slots and of its arithmetic: float32 or wider."""
    dtype = jnp.result_type(leaf)
    return at_least_float32(dtype if jnp.issubdtype(dtype, jnp.floating) else "f4")


def _numbers(rule, rate, state, dtype):
    """The `Step` of an update for leaves whose slots have this dtype."""
    cast = functools.partial(jnp.asarray, dtype=dtype)
    count = state.update_count
    # The compiler would fold a constant rate with neighbouring factors and round
    # differently than with a scheduled rate. So the rate is selected at run time by the
    # count, which is never negative. (LLVM still drops a factor of 1 behind an
    # optimization barrier, or if the select is between two constants.)
    chosen = jnp.where(count >= 0, cast(rate), cast(count))
    hyper = tuple(map(cast, rule.hyper))
    return Step(chosen, count, hyper, jax.tree.map(cast, state.powers))


def _leaves(grads, slots, params):
    """(path, gradient, slots, parameter) of each leaf, and their structure, checked."""
    check_grads(grads, slots[0] if params is None and slots else params)
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        grads, is_leaf=is_gradient_leaf
    )

    def leaves_of(name, tree):
        leaves, other = jax.tree.flatten(tree, is_leaf=is_gradient_leaf)
        if other != structure:
            raise ValueError(
                f"The gradients do not have the structure of the {name}. "
                "Differentiate the tree that init was given."
            )
        return leaves

    none = [None] * len(pairs)
    params = none if params is None else leaves_of("parameters", params)
    columns = [leaves_of("optimizer's state", tree) for tree in slots]
    leaves = [
        (path_name(path), grad, type(slots)(*own), param)
        for (path, grad), param, *own in zip(pairs, params, *columns, strict=True)
    ]
    return leaves, structure


def _update_leaf(rule, at, path, grad, slots, param):
    """The update of one leaf, and its slots."""
    if grad is None:
        known = param if param is not None else (slots[0] if slots else None)
        return (None if known is None else jnp.zeros_like(known)), slots
    if isinstance(grad, IndexedSlices):
        return _update_rows(rule, at, path, grad, slots, param)
    grad = jnp.asarray(grad)
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        raise TypeError(
            f"The gradient at {path} is complex; gradients must be real. Use "
            "optax.contrib.split_real_and_imaginary."
        )
    if slots and grad.shape != slots[0].shape:
        raise ValueError(
            f"The gradient at {path} has shape {grad.shape}, but the state was made by "
            f"init for shape {slots[0].shape}."
        )
    target = grad.dtype if param is None else jnp.result_type(param)
    dtype = slots[0].dtype if slots and param is None else slot_dtype(target)
    wide_param = None if param is None else jnp.asarray(param).astype(dtype)
    wide_grad = grad.astype(dtype)
    update, slots = _step(rule, path, wide_grad, slots, wide_param, at(dtype))
    return update.astype(target), slots


def _update_rows(rule, at, path, grad, slots, table):
    """The update of one leaf with a row-sparse gradient, and its slots."""
    if rule.rows == "refused":
        raise TypeError(
            "This optimizer takes no row-sparse gradients; got IndexedSlices at "
            f"{path}. Pass its to_dense(rows), or use another optimizer; a LeafRule of "
            "your own declares what it does to rows, rows='touched' for example."
        )
    if table is None:
        raise ValueError(
            f"The row-sparse gradient at {path} needs its parameter; got params=None. "
            "Call update(grads, state, params)."
        )
    rows, dtype = table.shape[0], slot_dtype(table)
    grad = grad.map_values(lambda values: values.astype(dtype))
    if rule.rows == "all":
        return _update_leaf(rule, at, path, grad.to_dense(rows), slots, table)

    grad = grad.sum_duplicates()
    here, indices = at(dtype), grad.indices
    in_table = indices < rows

    def rows_or_zero(values):
        return jnp.where(like_rows(in_table, values), values, jnp.zeros_like(values))

    def gather(array):
        # Out-of-range entries compute with a clipped row; their result is dropped.
        read = jnp.asarray(array).at[indices].get
        return read(mode="clip", indices_are_sorted=True, wrap_negative_indices=False)

    def scatter(array, rows):
        return jnp.asarray(array).at[indices].set(rows, **DROP, **ORDERED)

    rows_of = type(slots)(*map(gather, slots)), gather(table).astype(dtype)
    values = rows_or_zero(grad.values)
    update, new_rows = _step(rule, path, values, *rows_of, here)
    if rule.decay is not None:
        slots = rule.decay(slots, here)
    slots = type(slots)(*map(scatter, slots, new_rows))
    return grad.map_values(lambda _: rows_or_zero(update).astype(table.dtype)), slots


def _step(rule, path, grad, slots, param, at):
    """Call `rule.step`, and check that it keeps shapes and the slots' dtypes."""
    update, new = rule.step(grad, slots, param, at)
    wanted, found = (
        [(jnp.shape(x), jnp.result_type(x).name) for x in tree] for tree in (slots, new)
    )
    kept = type(new) is type(slots) and found == wanted
    if not kept or jnp.shape(update) != grad.shape:
        raise ValueError(
            f"The rule's step must return at {path} an update of the gradient's shape "
            f"{grad.shape}, and {type(slots).__name__} of {wanted}; got "
            f"{jnp.shape(update)} and {type(new).__name__} of {found}."
        )
    return update, new
