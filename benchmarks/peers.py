"""The catalogue, and what it is measured against: Optax, TensorFlow's kernels, torch.

TensorFlow and torch may be missing: `tensorflow()` and `torch()` are None then. They
act in place, on processors. All have the numbers of OURS, as far as they take them.
"""

import functools
import importlib.util
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

import optx_sync as oxs

RATE = 0.01
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _of(peer: str) -> dict[str, dict[str, Any]]:
    return {name: row[peer] for name, row in TABLE.items() if peer in row}


def _makers(library: Any, peer: str) -> dict[str, Callable[[], Any]]:
    return {
        name: functools.partial(
            getattr(library, row["name"]),
            RATE,
            **{k: row[k] for k in row if k != "name"},
        )
        for name, row in _of(peer).items()
    }


OURS, OPTAX = _makers(oxs.optimizers, "ours"), _makers(optax, "optax")
KERNELS, TORCH, TORCH_ROWS = map(_of, ("tensorflow", "torch", "torch_rows"))
# What a kernel is told anew in every step: its start, and what becomes of it.
RUNNING = {
    "beta1_power": (np.float32(0.9), lambda power: power * np.float32(0.9)),
    "beta2_power": (np.float32(0.999), lambda power: power * np.float32(0.999)),
    "global_step": (np.int64(1), lambda step: step + 1),
}


@functools.cache
def _library(name: str, variable: str, value: str) -> Any:
    """A library, imported with a variable set; None where it is not installed."""
    os.environ.setdefault(variable, value)
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


tensorflow = functools.partial(_library, "tensorflow", "TF_CPP_MIN_LOG_LEVEL", "3")
# Its threads would wait for more work in a loop, and take the others' time.
torch = functools.partial(_library, "torch", "OMP_WAIT_POLICY", "passive")


def missing() -> str:
    """Who is not installed, if anyone."""
    peers = {"TensorFlow": tensorflow(), "torch": torch()}
    return " and ".join(name for name, library in peers.items() if library is None)


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
        descent = kernel["name"].endswith("GradientDescent")
        numbers = {"alpha" if descent else "lr": RATE, **kernel.get("numbers", {})}
        numbers = {key: np.float32(number) for key, number in numbers.items()}
        running = {
            key: tf.Variable(RUNNING[key][0]) for key in kernel.get("running", ())
        }
        self.params = [tf.Variable(param) for param in params]
        slots = [
            {
                key: tf.Variable(tf.fill(param.shape, tf.constant(value)))
                for key, value in kernel.get("slots", {}).items()
            }
            for param in self.params
        ]

        def apply(param, slots, **gradient):
            # There is no kernel for rows of plain gradient descent: it scatters.
            if "indices" in gradient and kernel["name"] == "GradientDescent":
                change = gradient["grad"] * numbers["alpha"]
                return param.scatter_sub(tf.IndexedSlices(change, gradient["indices"]))
            return getattr(tf.raw_ops, kind + kernel["name"])(
                var=param.handle,
                **{key: slot.handle for key, slot in slots.items()},
                **{key: variable.read_value() for key, variable in running.items()},
                **numbers,
                **kernel.get("flags", {}),
                **gradient,
            )

        def advance():
            for key, variable in running.items():
                variable.assign(RUNNING[key][1](variable))

        def dense():
            for param, slot, grad in zip(self.params, slots, grads or (), strict=True):
                apply(param, slot, **{"delta" if descent else "grad": grad})
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


def _torch(row: dict[str, Any], params: Sequence[Any]) -> tuple[list[Any], Any]:
    """Parameters of torch, and their optimizer, in the fastest form that it has."""
    held = [torch().nn.Parameter(torch().tensor(param)) for param in params]
    numbers = {key: row[key] for key in row if key not in ("name", "form")}
    numbers |= {row["form"]: True} if "form" in row else {}
    return held, getattr(torch().optim, row["name"])(held, lr=RATE, **numbers)


def torch_step(name: str, params: Sequence[Any], grads: Sequence[Any]) -> Any:
    """A call that makes a step of torch."""
    held, optimizer = _torch(TORCH[name], params)
    for param, grad in zip(held, grads, strict=True):
        param.grad = torch().from_numpy(grad)
    return optimizer.step


def torch_on_rows(name: str, table: np.ndarray) -> Callable[[Any, Any], Any]:
    """A call with indices and values that makes a step of torch, row-sparse."""
    torch().sparse.check_sparse_tensor_invariants.disable()  # they take time
    (param,), optimizer = _torch(TORCH_ROWS[name], [table])

    def on_rows(indices, values):
        # As the gradient of an embedding comes: not sorted, equal rows not summed.
        param.grad = torch().sparse_coo_tensor(indices[None], values, table.shape)
        optimizer.step()

    return on_rows
