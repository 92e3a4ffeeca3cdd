# SPDX-License-Identifier: Apache-2.0
"""Any Keras 3 optimizer as an Optax gradient transformation."""

import collections
import contextlib
import copy
import re
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optx_sync.checks import check_grads
from optx_sync.programs import as_optax_expects
from optx_sync.trees import Tree, is_slices, leaves_with_names, names_of

# Names a Keras variable: (slot, its parameter's index), or (name, None).
_Name: TypeAlias = tuple[str, int | None]
# A parameter's path and value.
_Leaf: TypeAlias = tuple[tuple[Any, ...], jax.Array | jax.ShapeDtypeStruct]


class KerasState(NamedTuple):
    """The variables of a Keras optimizer, as arrays under their Keras names."""

    variables: dict[str, jax.Array]  # "iteration", "learning_rate", ...
    slots: dict[str, Tree]  # "momentum", "velocity", ...: trees like the parameters

    def named_slots(self) -> dict[str, Tree]:
        """The slots by name, as `oxs.optimizers.slot` reads them."""
        return self.slots


def keras(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """A Keras 3 optimizer, on the JAX backend, as a gradient transformation.

        update = apply(grads, params) - params

    where ``apply`` is Keras's own step, with the optimizer's learning rate schedule,
    weight decay, clipping, moving average and gradient accumulation. Only the
    configuration of `optimizer` is read, and the object is not changed: each traced
    call builds a copy of it on the parameters, with new slots. A learning rate that is
    a number is stored in ``state.variables["learning_rate"]`` and may be changed there,
    also under a ``LossScaleOptimizer``. A learning rate that is a function is called at
    trace time: compiled code keeps the value that it returned.

    Unlike the other optimizers here, and like Keras, it keeps the slots of half
    precision parameters in half precision, and rounds the new parameters before it
    subtracts the old ones. Row-sparse gradients are refused. A leaf whose gradient is
    ``None`` keeps its value and its slots, its moving average included. If all are
    ``None``, nothing changes, not even ``"iteration"``; Keras raises there.

    JAX arrays lack attributes that Keras reads from its variables. No ``constraint`` is
    applied: project the parameters after the step, or chain
    ``optax.keep_params_nonnegative()``. ``overwrite_with_gradient`` has no effect;
    ``optx_sync.flax.SyncTrainState`` overwrites Flax's collection of that name.

    The Keras name of a parameter is its path in the tree, with its index among the
    leaves before the last part, such as "encoder/dense/3.kernel";
    ``exclude_from_weight_decay(var_names=...)`` searches that last part. Variables
    whose shape is not their parameter's (Adafactor), or that not all parameters have
    (Muon), are in ``state.variables``, where ``optax.tree_utils.tree_map_params`` does
    not find them. With abstract parameters, `init` fills a slot that starts as a copy
    of the parameter (ScheduleFreeAdamW) with zeros.

    Args:
        optimizer: A ``keras.optimizers.Optimizer``.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` whose update needs `params`.

    Raises:
        RuntimeError: If Keras runs on another backend.
        TypeError: If `optimizer` is not a Keras optimizer, is a ``MultiOptimizer``, or
            is of a class whose ``from_config(get_config())`` fails; in ``update``, for
            a row-sparse gradient.
        ValueError: If variables, not names, were excluded from the weight decay; in
            ``update``, if `params` is missing or the gradients do not match it.

    Example:
        >>> import os
        >>> os.environ["KERAS_BACKEND"] = "jax"
        >>> import jax.numpy as jnp, keras, optax, optx_sync as oxs
        >>> tx = oxs.optimizers.keras(keras.optimizers.SGD(0.5, momentum=0.5))
        >>> params = {"w": jnp.array([3.0])}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update({"w": jnp.array([1.0])}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].item(), state.slots["momentum"]["w"].item()
        (1.75, -0.75)

    Reference: Keras 3, ``Optimizer.stateless_apply``.
    """
    library = _checked_library(optimizer)
    with warnings.catch_warnings():
        # Keras reads its own learning rate through an `__array__` without `copy`.
        warnings.filterwarnings("ignore", "__array__ impl", DeprecationWarning)
        config = _hide_rate(optimizer).get_config()

    def build(leaves: Mapping[int, _Leaf], slots: list[str] | None):
        """Build a copy of the optimizer on these parameters, and name its variables."""
        own_config = copy.deepcopy(config)
        _show_rate(optimizer, own_config)
        try:
            built = type(optimizer).from_config(own_config)
        except TypeError as error:
            error.add_note(
                "A copy of the optimizer is made by from_config(get_config()). Let its "
                "__init__ take **kwargs and hand them to super().__init__ (a name and "
                "a weight_decay are among them), and its get_config return the "
                "arguments that it adds."
            )
            raise
        excluded = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        if excluded is not None:
            built.exclude_from_weight_decay(var_names=[excluded.pattern])
        params = {i: _variable(library, i, *leaf) for i, leaf in leaves.items()}
        built.build(list(params.values()))
        return built, _names(built, params, slots)

    slots = _common_slots(build)

    def init(params):
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        with as_optax_expects():
            built, names = build(dict(enumerate(leaves)), slots)
            values = {}
            for name, variable in zip(names, built.variables, strict=True):
                leaf = None if name[1] is None else leaves[name[1]][1]
                values[name] = _detach(variable.value, leaf)
        return _to_state(values, slots, structure)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "keras needs the parameters; got params=None. Call "
                "update(grads, state, params)."
            )
        check_grads(updates, params)
        for path, leaf in leaves_with_names(updates):
            if is_slices(leaf):
                raise TypeError(
                    f"Keras optimizers take dense gradients; got IndexedSlices at "
                    f"{path}. Pass slices.to_dense(rows), or use a row-sparse optimizer"
                    " such as oxs.optimizers.adagrad."
                )
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        grads = dict(enumerate(structure.flatten_up_to(updates)))
        grads = {index: grad for index, grad in grads.items() if grad is not None}
        moves = [jnp.zeros_like(leaf) for _, leaf in leaves]
        if not grads:
            return structure.unflatten(moves), state
        values = _from_state(state, structure)
        with as_optax_expects():
            built, names = build({index: leaves[index] for index in grads}, slots)
            moved, changed = built.stateless_apply(
                [values[name] for name in names],
                list(grads.values()),
                [leaves[index][1] for index in grads],
            )
        for index, new in zip(grads, moved, strict=True):
            moves[index] = new - leaves[index][1]
        values.update(zip(names, changed, strict=True))
        return structure.unflatten(moves), _to_state(values, slots, structure)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_library(optimizer: Any) -> ModuleType:
    """Keras, if it runs on JAX, and this is an optimizer of it that can be copied."""
    import keras as library

    if library.backend.backend() != "jax":
        raise RuntimeError(
            f"Keras must run on JAX; got the backend {library.backend.backend()!r}. "
            "Set KERAS_BACKEND=jax (or the backend in ~/.keras/keras.json) before "
            "keras is imported first."
        )
    if not isinstance(optimizer, library.optimizers.Optimizer):
        raise TypeError(
            f"keras takes a Keras optimizer; got {optimizer!r} of type "
            f"{type(optimizer).__name__}. Pass keras.optimizers.Adam(1e-3), for "
            "example."
        )
    if isinstance(optimizer, getattr(library.optimizers, "MultiOptimizer", ())):
        raise TypeError(
            "keras takes one optimizer for all parameters; got a MultiOptimizer. "
            "Use optax.partition with several oxs.optimizers.keras(...)."
        )
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            "exclude_from_weight_decay(var_list=...) names variables that only Keras "
            "has. Pass var_names=..., or use optax.masked."
        )
    return library


def _hide_rate(optimizer: Any) -> Any:
    """A shallow copy of the optimizer, without learning rates that are functions.

    Keras's configuration holds only the name of such a function and cannot restore it.
    """
    # Not copy.copy, which Keras implements by saving and loading.
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    if callable(optimizer.__dict__.get("_learning_rate")):
        copied.__dict__["_learning_rate"] = None
    if hasattr(optimizer, "inner_optimizer"):
        copied.__dict__["inner_optimizer"] = _hide_rate(optimizer.inner_optimizer)
    return copied


def _show_rate(optimizer: Any, config: dict[str, Any]) -> None:
    """Put the learning rate functions that `_hide_rate` left out into `config`."""
    if callable(rate := optimizer.__dict__.get("_learning_rate")):
        config["learning_rate"] = rate
    if hasattr(optimizer, "inner_optimizer"):
        _show_rate(optimizer.inner_optimizer, config["inner_optimizer"]["config"])


def _variable(
    library: ModuleType,
    index: int,
    path: tuple[Any, ...],
    leaf: jax.Array | jax.ShapeDtypeStruct,
) -> Any:
    """A Keras variable for a parameter, its index in the name: paths may collide."""
    keys = [name.replace("/", "_") for name in names_of(path)]
    with contextlib.ExitStack() as scopes:
        for key in keys[:-1]:
            # An empty key is valid, but an empty scope name is not.
            scopes.enter_context(library.name_scope(key or "_"))
        name = ".".join([str(index), *keys[-1:]])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return library.Variable(
                "zeros", shape=leaf.shape, dtype=leaf.dtype.name, name=name
            )
        return library.Variable(jnp.asarray(leaf), name=name)


def _names(built: Any, params: dict[int, Any], slots: list[str] | None) -> list[_Name]:
    """Names for a built optimizer's variables, the same in every build."""
    prefixes = {f"{p.path.replace('/', '_')}_": index for index, p in params.items()}
    # A wrapper has its own iteration and learning rate, but the inner optimizer's act:
    # the wrapper's are named last, so that the inner ones keep the plain names.
    inner = getattr(built, "inner_optimizer", built)
    acting = {id(variable) for variable in inner.variables}
    names: dict[int, _Name] = {}
    seen: collections.Counter[_Name] = collections.Counter()
    for variable in sorted(built.variables, key=lambda v: id(v) not in acting):
        # A slot's name is its parameter's name and a suffix.
        prefix = max(filter(variable.name.startswith, prefixes), key=len, default="")
        slot = variable.name.removeprefix(prefix)
        if prefix and (slots is None or slot in slots):
            name, index = slot, prefixes[prefix]
        else:
            # Keras numbers unnamed variables by how many the process has made so far.
            name, index = re.sub(r"^variable_\d+$", "variable", variable.name), None
        again = seen[name, index]
        seen[name, index] += 1
        names[id(variable)] = (f"{name}#{again}" if again else name), index
    return [names[id(variable)] for variable in built.variables]


def _common_slots(build: Any) -> list[str]:
    """The slots that every parameter has, of any rank, in the parameter's shape."""
    shapes = [(), (2,), (2, 2), (2, 2, 2)]
    leaves = [((), jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes]
    with as_optax_expects():
        built, names = build(dict(enumerate(leaves)), None)
    found = collections.Counter(
        slot
        for (slot, index), variable in zip(names, built.variables, strict=True)
        if index is not None and tuple(variable.shape) == shapes[index]
    )
    return sorted(slot for slot, times in found.items() if times == len(shapes))


def _detach(
    value: jax.Array, leaf: jax.Array | jax.ShapeDtypeStruct | None
) -> jax.Array:
    """A slot's value in its own buffer, sharded and varying like its parameter."""
    if leaf is None or isinstance(leaf, jax.ShapeDtypeStruct):
        return value
    if value.shape != jnp.shape(leaf):
        return jnp.array(value)
    return value + jnp.zeros_like(leaf, dtype=value.dtype)


def _to_state(
    values: dict[_Name, jax.Array], slots: list[str], structure: Any
) -> KerasState:
    return KerasState(
        variables={name: value for (name, i), value in values.items() if i is None},
        slots={
            slot: structure.unflatten(
                [values[slot, index] for index in range(structure.num_leaves)]
            )
            for slot in slots
        },
    )


def _from_state(state: KerasState, structure: Any) -> dict[_Name, jax.Array]:
    values: dict[_Name, jax.Array] = {
        (name, None): value for name, value in state.variables.items()
    }
    for slot, tree in state.slots.items():
        for index, value in enumerate(structure.flatten_up_to(tree)):
            values[slot, index] = value
    return values
