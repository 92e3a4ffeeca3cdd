# SPDX-License-Identifier: Apache-2.0
"""How replicas agree: synchronising optimizers for JAX, as Optax transformations.

The spelling in all documentation is `import optx_sync as oxs`.
"""
# ruff: noqa: I001 # grouped by room, in the order in which a gradient walks through

import importlib
import types

# A gradient's form.
from optx_sync.indexed_slices import IndexedSlices as IndexedSlices
from optx_sync.indexed_slices import on_values as on_values
from optx_sync.indexed_slices import take as take
from optx_sync.indexed_slices import value_and_grad as value_and_grad

# How arrays meet.
from optx_sync.collectives import localize as localize
from optx_sync.collectives import reduce as reduce

# What it becomes.
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
from optx_sync.optimizers.keras import keras as keras

# Where gradients of replicas meet.
from optx_sync.replicas.cross_shard import cross_shard as cross_shard
from optx_sync.replicas.sync_replicas import sync_replicas as sync_replicas

# Where parameters of workers meet.
from optx_sync.center.rule import CenterRule as CenterRule
from optx_sync.center.rule import center_variable as center_variable
from optx_sync.center.elastic_average import elastic_average as elastic_average
from optx_sync.center.elastic_average import elastic_rule as elastic_rule
from optx_sync.center.agn import agn as agn
from optx_sync.center.agn import agn_rule as agn_rule
from optx_sync.center.local_sgd import local_sgd as local_sgd
from optx_sync.center.local_sgd import local_sgd_rule as local_sgd_rule
from optx_sync.center.diloco import diloco as diloco
from optx_sync.center.diloco import diloco_rule as diloco_rule

# Read a state, and say where it lives.
from optx_sync.state import averaged_params as averaged_params
from optx_sync.state import center_params as center_params
from optx_sync.state import metrics as metrics
from optx_sync.state import slot as slot
from optx_sync.state import slot_names as slot_names
from optx_sync.state import swap_center as swap_center
from optx_sync.sharding import stack as stack
from optx_sync.sharding import state_axes as state_axes
from optx_sync.sharding import state_specs as state_specs
from optx_sync.sharding import unstack as unstack

# Workers that do not march in step.
from optx_sync import simulate as simulate

# What is communicated.
from optx_sync import audit as audit


def __getattr__(name: str) -> types.ModuleType:
    # Rooms that are for users of Flax and of Ray, imported when they are asked for.
    if name in ("flax", "runtime"):
        return importlib.import_module(f"optx_sync.{name}")
    raise AttributeError(f"module 'optx_sync' has no attribute {name!r}")
