# SPDX-License-Identifier: Apache-2.0
"""How replicas agree: synchronising optimizers for JAX, as Optax transformations.

The spelling in all documentation is `import optx_sync as oxs`.
"""
# ruff: noqa: I001 # grouped by room, in the order in which a gradient walks through

# A gradient's form.
from optx_sync.indexed_slices import IndexedSlices as IndexedSlices
from optx_sync.indexed_slices import on_values as on_values
from optx_sync.indexed_slices import take as take
from optx_sync.indexed_slices import value_and_grad as value_and_grad

# How arrays meet.
from optx_sync.collectives import localize as localize
from optx_sync.collectives import reduce as reduce

# Where gradients of replicas meet.
from optx_sync.replicas.cross_shard import cross_shard as cross_shard

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
from optx_sync.state import center_params as center_params
from optx_sync.state import metrics as metrics
from optx_sync.state import swap_center as swap_center
from optx_sync.sharding import stack as stack
from optx_sync.sharding import state_axes as state_axes
from optx_sync.sharding import state_specs as state_specs
from optx_sync.sharding import unstack as unstack

# What is communicated.
from optx_sync import audit as audit
