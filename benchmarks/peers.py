"""The catalogue, and what it is measured against: Optax, TensorFlow's kernels, torch.

TensorFlow and torch may be missing: `tensorflow()` and `torch()` are None then. They
act in place, on processors. All have the numbers of OURS, as far as they take them.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

import optx_sync as oxs

RATE, L1, L2 = 0.01, 1e-4, 1e-3

OURS = {
    "gradient_descent": lambda: oxs.gradient_descent(RATE),
    "momentum": lambda: oxs.momentum(RATE, 0.9),
    "nesterov": lambda: oxs.momentum(RATE, 0.9, nesterov=True),
    "normalized_sgd": lambda: oxs.normalized_sgd(RATE),
    "adagrad": lambda: oxs.adagrad(RATE),
    "adagrad_da": lambda: oxs.adagrad_da(RATE, l1=L1, l2=L2),
    "adadelta": lambda: oxs.adadelta(RATE, 0.95, 1e-6),
    "rmsprop": lambda: oxs.rmsprop(RATE),
    "rmsprop with momentum": lambda: oxs.rmsprop(RATE, momentum=0.9),
    "rmsprop, centered": lambda: oxs.rmsprop(RATE, eps=1e-3, centered=True),
    "ftrl": lambda: oxs.ftrl(RATE, l1=L1, l2=L2),
    "proximal_gradient_descent": lambda: oxs.proximal_gradient_descent(RATE, L1, L2),
    "proximal_adagrad": lambda: oxs.proximal_adagrad(RATE, l1=L1, l2=L2),
    "adam": lambda: oxs.adam(RATE),
    "custom_adam": lambda: oxs.custom_adam(RATE),
    "amsgrad": lambda: oxs.amsgrad(RATE, b2=0.999, eps=1e-8),
    "nadam": lambda: oxs.nadam(RATE),
    "neural_optimizer_1": lambda: oxs.neural_optimizer_1(RATE),
    "grad_variance_scaled": lambda: oxs.grad_variance_scaled(RATE),
}

OPTAX = {
    "gradient_descent": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, 0.9),
    "nesterov": lambda: optax.sgd(RATE, 0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(RATE, eps=0.0),
    "adadelta": lambda: optax.adadelta(RATE, 0.95, 1e-6),
    "rmsprop": lambda: optax.rmsprop(RATE, 0.9, 1e-10, 1.0),
    "rmsprop with momentum": lambda: optax.rmsprop(RATE, 0.9, 1e-10, 1.0, momentum=0.9),
    "rmsprop, centered": lambda: optax.rmsprop(RATE, 0.9, 1e-3, 1.0, centered=True),
    "adam": lambda: optax.adam(RATE),
    "amsgrad": lambda: optax.amsgrad(
        RATE, bias_correction_mu=False, bias_correction_nu=False
    ),
    "nadam": lambda: optax.nadam(RATE),  # corrects the momentum otherwise
}


class Kernel(NamedTuple):
    """One of `tf.raw_ops.Resource(Sparse)Apply...`, its arguments by their names."""

    name: str
    slots: Mapping[str, float]  # with their initial values
    numbers: Mapping[str, float]
    # Start, and what becomes of it after each step.
    running: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {}
    flags: Mapping[str, bool] = {}
    gradient: str = "grad"


POWERS = {
    "beta1_power": (np.float32(0.9), lambda power: power * np.float32(0.9)),
    "beta2_power": (np.float32(0.999), lambda power: power * np.float32(0.999)),
}
RATE_AND_NORMS = {"lr": RATE, "l1": L1, "l2": L2}
ADAM = {"lr": RATE, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
RMSPROP = {"lr": RATE, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-10}
MOMENTUM = {"lr": RATE, "momentum": 0.9}
MOMENTS, SQUARES = {"m": 0.0, "v": 0.0}, {"ms": 1.0, "mom": 0.0}
KERNELS = {
    "gradient_descent": Kernel(
        "GradientDescent", {}, {"alpha": RATE}, gradient="delta"
    ),
    "momentum": Kernel("Momentum", {"accum": 0.0}, MOMENTUM),
    "nesterov": Kernel(
        "Momentum", {"accum": 0.0}, MOMENTUM, flags={"use_nesterov": True}
    ),
    "adagrad": Kernel("Adagrad", {"accum": 0.1}, {"lr": RATE}),
    "adagrad_da": Kernel(
        "AdagradDA",
        {"gradient_accumulator": 0.0, "gradient_squared_accumulator": 0.1},
        RATE_AND_NORMS,
        running={"global_step": (np.int64(1), lambda step: step + 1)},
    ),
    "adadelta": Kernel(
        "Adadelta",
        {"accum": 0.0, "accum_update": 0.0},
        {"lr": RATE, "rho": 0.95, "epsilon": 1e-6},
    ),
    "rmsprop": Kernel("RMSProp", SQUARES, RMSPROP),
    "rmsprop with momentum": Kernel("RMSProp", SQUARES, {**RMSPROP, "momentum": 0.9}),
    "rmsprop, centered": Kernel(
        "CenteredRMSProp", {"mg": 0.0, **SQUARES}, {**RMSPROP, "epsilon": 1e-3}
    ),
    "ftrl": Kernel(
        "Ftrl", {"accum": 0.1, "linear": 0.0}, {**RATE_AND_NORMS, "lr_power": -0.5}
    ),
    "proximal_gradient_descent": Kernel(
        "ProximalGradientDescent",
        {},
        {"alpha": RATE, "l1": L1, "l2": L2},
        gradient="delta",
    ),
    "proximal_adagrad": Kernel("ProximalAdagrad", {"accum": 0.1}, RATE_AND_NORMS),
    "adam": Kernel("Adam", MOMENTS, ADAM, POWERS),
    "nadam": Kernel("Adam", MOMENTS, ADAM, POWERS, {"use_nesterov": True}),
}


class Torch(NamedTuple):
    """A class of `torch.optim`, and its implementation: not all have a fused one."""

    name: str
    numbers: Mapping[str, Any]
    form: str = "fused"


ADAGRAD = {"initial_accumulator_value": 0.1, "eps": 0.0}
TORCH = {
    "gradient_descent": Torch("SGD", {}),
    "momentum": Torch("SGD", {"momentum": 0.9}),
    "nesterov": Torch("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": Torch("Adagrad", ADAGRAD),
    "adadelta": Torch("Adadelta", {"rho": 0.95}, "foreach"),
    "rmsprop": Torch("RMSprop", {"alpha": 0.9}, "foreach"),
    "rmsprop with momentum": Torch(
        "RMSprop", {"alpha": 0.9, "momentum": 0.9}, "foreach"
    ),
    "rmsprop, centered": Torch("RMSprop", {"alpha": 0.9, "centered": True}, "foreach"),
    "adam": Torch("Adam", {}),
    "amsgrad": Torch("Adam", {"amsgrad": True}),
    "nadam": Torch("NAdam", {}, "foreach"),
}
# For gradients that are sparse tensors; only these take them.
TORCH_ROWS = {
    "gradient_descent": Torch("SGD", {}),
    "adagrad": Torch("Adagrad", ADAGRAD),
    "custom_adam": Torch("SparseAdam", {}),
}


@functools.cache
def tensorflow() -> Any:
    """TensorFlow, or None where it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return None
    return tf


@functools.cache
def torch() -> Any:
    """Torch, or None where it is not installed."""
    # Its threads would wait for more work in a loop, and take the others' time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import torch as library  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return library


def missing() -> str:
    """A sentence on what is not installed, to be printed; empty if all is."""
    peers = {"TensorFlow": tensorflow(), "torch": torch()}
    names = [name for name, library in peers.items() if library is None]
    return f"Not installed, and left out: {' and '.join(names)}." if names else ""


class TensorFlowStep:
    """A kernel of TensorFlow on variables of its own; call it to make a step.

    Args:
        name: of KERNELS.
        params: the first values.
        grads: dense gradients, which every step takes; None for a row-sparse kernel,
            whose calls take indices and values for the one parameter.
    """

    def __init__(
        self, name: str, params: Sequence[np.ndarray], grads: Sequence[Any] | None
    ):
        tf, kernel = tensorflow(), KERNELS[name]
        kind = "ResourceApply" if grads is not None else "ResourceSparseApply"
        numbers = {key: np.float32(number) for key, number in kernel.numbers.items()}
        running = {
            key: tf.Variable(start) for key, (start, _) in kernel.running.items()
        }
        self.params = [tf.Variable(param) for param in params]
        slots = [
            {
                key: tf.Variable(tf.fill(param.shape, tf.constant(value)))
                for key, value in kernel.slots.items()
            }
            for param in self.params
        ]

        def apply(param, slots, **gradient):
            # There is no kernel for rows of plain gradient descent: it scatters.
            if kind == "ResourceSparseApply" and kernel.name == "GradientDescent":
                change = gradient["grad"] * numbers["alpha"]
                return param.scatter_sub(tf.IndexedSlices(change, gradient["indices"]))
            return getattr(tf.raw_ops, kind + kernel.name)(
                var=param.handle,
                **{key: slot.handle for key, slot in slots.items()},
                **{key: variable.read_value() for key, variable in running.items()},
                **numbers,
                **kernel.flags,
                **gradient,
            )

        def advance():
            for key, variable in running.items():
                variable.assign(kernel.running[key][1](variable))

        def dense():
            for param, slot, grad in zip(self.params, slots, grads or (), strict=True):
                apply(param, slot, **{kernel.gradient: grad})
            advance()

        def rows(indices, values):
            apply(self.params[0], slots[0], grad=values, indices=indices)
            advance()

        def repeated_rows(indices, values):
            # What TensorFlow's optimizers do before they call the kernel.
            unique, positions = tf.unique(indices)
            total = tf.math.unsorted_segment_sum(values, positions, tf.size(unique))
            rows(unique, total)

        function = functools.partial(tf.function, autograph=False)
        self._dense, self._rows = function(dense), function(rows)
        self._repeated_rows = function(repeated_rows)

    def __call__(self) -> None:
        """A step with the dense gradients."""
        self._dense()

    def on_rows(self, indices: Any, values: Any, repeated: bool = False) -> None:
        """A step with a row-sparse gradient; `repeated` sums equal rows first."""
        (self._repeated_rows if repeated else self._rows)(indices, values)


def torch_step(
    name: str, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]
) -> Callable[[], Any]:
    """A call that makes a step of torch, in the fastest form that it has."""
    library, chosen = torch(), TORCH[name]
    held = [library.nn.Parameter(library.tensor(param)) for param in params]
    for param, grad in zip(held, grads, strict=True):
        param.grad = library.from_numpy(grad)
    optimizer = getattr(library.optim, chosen.name)
    return optimizer(held, lr=RATE, **chosen.numbers, **{chosen.form: True}).step


def torch_on_rows(name: str, table: np.ndarray) -> Callable[[Any, Any], Any]:
    """A call with indices and values that makes a step of torch, row-sparse."""
    library, chosen = torch(), TORCH_ROWS[name]
    library.sparse.check_sparse_tensor_invariants.disable()  # they take time
    param = library.nn.Parameter(library.tensor(table))
    optimizer = getattr(library.optim, chosen.name)
    step = optimizer([param], lr=RATE, **chosen.numbers).step

    def on_rows(indices, values):
        # As the gradient of an embedding comes: not sorted, equal rows not summed.
        param.grad = library.sparse_coo_tensor(indices[None], values, table.shape)
        step()

    return on_rows
