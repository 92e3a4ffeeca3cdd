# SPDX-License-Identifier: Apache-2.0
"""Optimizers of TensorFlow and RETURNN as Optax transformations, with their arithmetic.

They take dense and row-sparse gradients. `from_rule` makes another such optimizer from
a formula for one array.
"""
# ruff: noqa: I001 # in the order of the pages

from optx_sync.optimizers.rule import LeafRule as LeafRule
from optx_sync.optimizers.rule import from_rule as from_rule
from optx_sync.optimizers.gradient_descent import gradient_descent as gradient_descent
from optx_sync.optimizers.momentum import momentum as momentum
from optx_sync.optimizers.normalized_sgd import normalized_sgd as normalized_sgd
from optx_sync.optimizers.adagrad import adagrad as adagrad
from optx_sync.optimizers.adagrad_da import adagrad_da as adagrad_da
from optx_sync.optimizers.adadelta import adadelta as adadelta
from optx_sync.optimizers.rmsprop import rmsprop as rmsprop
from optx_sync.optimizers.ftrl import ftrl as ftrl
from optx_sync.optimizers.proximal_gradient_descent import (
    proximal_gradient_descent as proximal_gradient_descent,
)
from optx_sync.optimizers.proximal_adagrad import proximal_adagrad as proximal_adagrad
from optx_sync.optimizers.adam import adam as adam
from optx_sync.optimizers.custom_adam import custom_adam as custom_adam
from optx_sync.optimizers.amsgrad import amsgrad as amsgrad
from optx_sync.optimizers.nadam import nadam as nadam
from optx_sync.optimizers.neural_optimizer_1 import (
    neural_optimizer_1 as neural_optimizer_1,
)
from optx_sync.optimizers.grad_variance_scaled import (
    grad_variance_scaled as grad_variance_scaled,
)
from optx_sync.optimizers.slots import slot as slot
from optx_sync.core.signatures import readable as _readable
from optx_sync.optimizers.slots import slot_names as slot_names

_readable(globals())
