"""THE table: one row for each optimizer of the catalogue.

Laws run over all rows; `test_golden.py` holds that the table equals the catalogue, and
that each recorded trajectory of an original is run by the row that names it.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class OptimizerCase:
    """An optimizer, and numbers at which every term of its formula matters."""

    name: str  # of the function, and of its file
    originals: tuple[str, ...]  # "group/class", as the golden manifest has them
    rows: str  # "touched", "decay_all", "all" or "refused"
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs_params: bool = False

    @property
    def factory(self):
        module = importlib.import_module(f"optx_sync.optimizers.{self.name}")
        return getattr(module, self.name)

    def make(self, learning_rate: Any = 0.1) -> Any:
        return self.factory(learning_rate, **self.hyperparameters)


OPTIMIZERS = [
    OptimizerCase(
        "gradient_descent",
        ("tf_train/GradientDescent", "returnn/CustomGradientDescentOptimizer"),
        "touched",
    ),
    OptimizerCase(
        "momentum",
        ("tf_train/Momentum",),
        "touched",
        {"momentum": 0.8, "nesterov": True},
    ),
    OptimizerCase("normalized_sgd", ("returnn/NormalizedSGD",), "touched"),
    OptimizerCase(
        "adagrad", ("tf_train/Adagrad",), "touched", {"initial_accumulator_value": 0.3}
    ),
    OptimizerCase(
        "adagrad_da",
        ("tf_train/AdagradDA",),
        "touched",
        {"l1": 0.05, "l2": 0.02},
        needs_params=True,
    ),
    OptimizerCase(
        "adadelta", ("tf_train/Adadelta",), "touched", {"rho": 0.9, "eps": 1e-3}
    ),
    OptimizerCase(
        "rmsprop",
        ("tf_train/RMSProp",),
        "touched",
        {"decay": 0.8, "momentum": 0.5, "eps": 1e-3, "centered": True},
    ),
    OptimizerCase(
        "ftrl",
        ("tf_train/Ftrl",),
        "touched",
        {"l1": 0.05, "l2": 0.02, "l2_shrinkage": 0.01, "beta": 0.5},
        needs_params=True,
    ),
    OptimizerCase(
        "proximal_gradient_descent",
        ("tf_train/ProximalGradientDescent",),
        "touched",
        {"l1": 0.05, "l2": 0.2},
        needs_params=True,
    ),
    OptimizerCase(
        "proximal_adagrad",
        ("tf_train/ProximalAdagrad",),
        "touched",
        {"l1": 0.05, "l2": 0.2},
        needs_params=True,
    ),
    OptimizerCase("adam", ("tf_train/Adam",), "all", {"b1": 0.8, "eps": 1e-3}),
    OptimizerCase(
        "custom_adam",
        ("returnn/CustomAdamOptimizer", "tf_contrib/LazyAdam"),
        "touched",
        {"b1": 0.8, "eps": 1e-3},
    ),
    OptimizerCase(
        "amsgrad",
        ("returnn/AMSGradOptimizer",),
        "refused",
        {"decay": True, "b1": 0.8, "eps": 1e-3},
    ),
    OptimizerCase(
        "nadam",
        ("tf_contrib/Nadam", "returnn/NadamOptimizer"),
        "decay_all",
        {"b1": 0.8, "eps": 1e-3},
    ),
    OptimizerCase(
        "neural_optimizer_1",
        ("returnn/NeuralOptimizer1",),
        "decay_all",
        {"b1": 0.8, "decrease_factor": 0.3},
    ),
    OptimizerCase(
        "grad_variance_scaled",
        ("returnn/GradVarianceScaledOptimizer",),
        "decay_all",
        {"b1": 0.8, "b2": 0.9, "eps": 1e-3},
    ),
]
